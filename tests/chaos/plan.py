"""What a seed means: the tasks of each flow, and the faults of the run. Pure."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30

Sort = Literal[
    "plain", "large", "bare", "raises", "retried", "short", "greedy", "exclusive", "pair"
]

#: How often each sort of task comes.
_SORTS: dict[Sort, int] = {
    "plain": 6,
    "large": 2,
    "bare": 2,
    "raises": 1,
    "retried": 2,
    "short": 2,
    "greedy": 1,
    "exclusive": 1,
    "pair": 1,
}

#: GiB that a greedy task takes without a cap, whatever its budget: tasks beside it run out of memory.
GREEDY_GIB = 14.0

Method = Literal["spawn", "standby", "forkserver"]

#: The first flows have one of each, so that a short run has all. A fork costs a tenth of a fresh process.
METHODS: tuple[Method, ...] = (
    "forkserver",
    "spawn",
    "standby",
    *(["forkserver"] * 5),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One task that a flow submits."""

    #: Of the flow and of the task in it, as in `3.17`.
    key: str
    sort: Sort
    #: GiB of each device that the body allocates.
    gib: float
    #: GiB that it asks for; `None`: it has no budget.
    budget_gib: float | None
    #: Seconds for which the body holds its memory.
    seconds: float
    #: Bytes of its argument, and of its value.
    size_bytes: int
    retries: int
    retry_delay_s: float
    priority: int

    @property
    def count(self) -> int:
        """Devices."""
        return 2 if self.sort == "pair" else 1


def method(number: int) -> Method:
    """Return how the processes of a flow start."""
    return METHODS[number % len(METHODS)]


def jobs(seed: int, number: int, count: int, devices: int) -> Iterator[Job]:
    """Yield the tasks of one flow.

    Args:
        seed: Of the run.
        number: Of the flow.
        count: How many.
        devices: Of the machine: without a second one no task asks for two.
    """
    choose = random.Random(f"{seed}/{number}")
    sorts = [sort for sort, times in _SORTS.items() for _ in range(times)]
    for index in range(count):
        sort = choose.choice(sorts)
        if sort == "pair" and devices < 2:
            sort = "plain"
        budget = choose.choice([2.0, 3.0, 5.0, 8.0])
        # Half a GiB of the budget is left for what no framework counts.
        gib = {"short": budget * 1.6, "greedy": GREEDY_GIB}.get(sort, budget - 0.75)
        yield Job(
            key=f"{number}.{index}",
            sort=sort,
            gib=gib,
            budget_gib=None if sort == "bare" else budget,
            seconds=choose.uniform(0.0, 0.6),
            size_bytes=choose.randrange(4 * MIB, 24 * MIB) if sort == "large" else 64,
            retries=choose.choice([0, 0, 1, 2]) if sort != "retried" else 3,
            retry_delay_s=choose.choice([0.0, 0.5]),
            priority=choose.choice([0, 0, 0, 1, 5]),
        )


def argument(job: Job) -> bytes:
    """Return what a task is called with."""
    return random.Random(f"argument {job.key}").randbytes(job.size_bytes)


def value(job: Job, argument_sum: int) -> bytes:
    """Return what a body returns that was called with an argument of that checksum."""
    return random.Random(f"value {job.key} {argument_sum}").randbytes(job.size_bytes)


def value_sum(job: Job) -> int:
    """Return the checksum of what a task is to return."""
    return zlib.crc32(value(job, zlib.crc32(argument(job))))


FaultKind = Literal["kill", "stop", "outage", "full disk"]
Target = Literal["child", "standby", "guardian", "source", "flow", ""]

#: Seconds for which a flow may be stopped: others give its ledger up after 5 s if it is in a write.
LONGEST_STOP_S = 3.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    #: Since the begin of the run.
    at_s: float
    kind: FaultKind
    target: Target = ""
    #: Between 0 and 1: which of the processes of that sort.
    pick: float = 0.0
    #: How long a process is stopped, or the server or the disk away.
    seconds: float = 0.0
    #: A stopped process is killed, not continued; the server answers 503, not refuses.
    harsh: bool = False

    def __str__(self) -> str:
        words = [f"{self.at_s:.1f} s: {self.kind}", self.target]
        if self.seconds:
            words.append(f"for {self.seconds:.1f} s")
        if self.harsh:
            words.append("then kill" if self.kind == "stop" else "503")
        return " ".join(filter(None, words))


#: How often each comes: a flow is killed every two minutes, or it would have ended few task runs.
_FAULTS: dict[tuple[FaultKind, Target], int] = {
    ("kill", "child"): 20,
    ("kill", "standby"): 10,
    ("kill", "guardian"): 10,
    ("kill", "source"): 8,
    ("kill", "flow"): 1,
    ("stop", "child"): 8,
    ("stop", "standby"): 6,
    ("stop", "guardian"): 6,
    ("stop", "source"): 4,
    ("stop", "flow"): 3,
    ("outage", ""): 6,
    ("full disk", ""): 4,
}


def faults(seed: int) -> Iterator[Fault]:
    """Yield the faults of a run, without end, in order."""
    choose = random.Random(f"{seed}/faults")
    kinds = [kind for kind, times in _FAULTS.items() for _ in range(times)]
    at_s = 5.0
    while True:
        at_s += choose.uniform(0.5, 5.0)
        kind, target = choose.choice(kinds)
        lasts = kind != "kill"
        seconds = choose.uniform(0.5, LONGEST_STOP_S) if lasts else 0.0
        yield Fault(
            at_s,
            kind,
            target,
            pick=choose.random(),
            seconds=seconds,
            harsh=choose.random() < 0.4 if kind in ("stop", "outage") else False,
        )
