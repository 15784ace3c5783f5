"""After an out-of-memory: whose fault it was, and what the next process gets.

Pure: what was seen goes in, a cause and the next rung come out. Who starts the next process is
`prefect_gpu.escalation`; what a history makes of it later is in `history`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prefect_gpu.scheduling.history import OOM_FACTOR
from prefect_gpu.units import MIB, format_bytes

#: own_cap: the task needs more than its budget. foreign: other people's processes took what was
#: missing. crowded: ours filled the device though this one was within its budget. host: the machine's
#: own memory ran out. unknown: it was killed, and nothing says why.
Cause = Literal["own_cap", "foreign", "crowded", "host", "unknown"]

#: Processes that one task run may have because of out-of-memory, the first included.
MOST_PROCESSES = 5

#: Out-of-memory that were not its own, one after another, after which it is given a whole device.
MOST_SHARED = 3

#: Others' memory that grew by less than this filled no device: desktops and drivers come and go.
LEAST_GROWTH_BYTES = 64 * MIB

#: What an error says was wanted is taken this many times: sizes are rounded on the way.
WANTED_FACTOR = 1.1


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one out-of-memory. Bytes are those of the device where it happened."""

    #: The budget of the process there.
    budget_bytes: int
    #: What its framework could allocate at most; `None`: no cap.
    cap_bytes: int | None
    #: Beside its allocator, for what no framework counts.
    context_bytes: int = 0
    #: What the failed allocation asked for; `None`: its message does not say.
    wanted_bytes: int | None = None
    #: What its framework held when it failed; `None`: it does not tell.
    held_bytes: int | None = None
    #: What the device showed for the process when it failed; `None`: it does not tell.
    process_bytes: int | None = None
    #: What the device had free when it failed; `None`: it was not asked.
    free_bytes: int | None = None
    #: By how much others' memory there had grown since the process was placed.
    foreign_growth_bytes: int = 0
    #: The error says by itself whether the process's own cap refused; `None`: it does not say.
    says_own_cap: bool | None = None
    #: The device was its alone.
    alone: bool = False


def classify(evidence: Evidence) -> Cause:
    """Tell whose fault an out-of-memory in a framework was.

    The cap is to blame if the device could have given what was asked; where it could not, whoever
    took more than he was promised: others, this process, or nobody, in this order.
    """
    if evidence.says_own_cap:
        return "own_cap"
    # Unless the error says that something else refused.
    capped = evidence.cap_bytes is not None and evidence.says_own_cap is None
    wanted = evidence.wanted_bytes or 0
    free = evidence.free_bytes
    if free is None:
        # Nobody asked the device: a process with a cap has probably hit it.
        return "own_cap" if capped else "crowded"
    if capped and free >= max(1, wanted):
        return "own_cap"
    missing = max(LEAST_GROWTH_BYTES, wanted - free)
    if evidence.foreign_growth_bytes >= missing:
        return "foreign"
    if _needs_more_than_its_budget(evidence, wanted) or evidence.alone:
        return "own_cap"
    return "crowded"


def _needs_more_than_its_budget(evidence: Evidence, wanted_bytes: int) -> bool:
    if evidence.cap_bytes is not None and evidence.held_bytes is not None:
        return evidence.held_bytes + wanted_bytes > evidence.cap_bytes
    if evidence.process_bytes is not None:
        return evidence.process_bytes + wanted_bytes > evidence.budget_bytes
    return False


def needed_bytes(evidence: Evidence) -> int | None:
    """Give what the process would have needed on its device in all; `None`: cannot be told."""
    if evidence.wanted_bytes is None:
        return None
    held = evidence.process_bytes
    if evidence.held_bytes is not None:
        held = max(held or 0, evidence.held_bytes + evidence.context_bytes)
    return None if held is None else held + evidence.wanted_bytes


@dataclass(frozen=True, slots=True)
class Climb:
    """How far one task run has climbed."""

    #: Processes that it has had.
    processes: int = 1
    #: Out-of-memory in a row that were not its own.
    shared: int = 0
    #: The last process had a whole device.
    whole_device: bool = False
    #: Most bytes that a rung has given; 0: none has.
    reached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rung:
    """What the next process gets."""

    climb: Climb
    #: Bytes to reserve on each device; `None`: a device to itself, all that it has free.
    budget_bytes: int | None
    #: For the log: why, and how much.
    reason: str


def next_rung(climb: Climb, cause: Cause, evidence: Evidence, capacity_bytes: int) -> Rung | str:
    """Say what the next process gets.

    Args:
        climb: So far, the process that has just failed included.
        cause: From `classify`.
        evidence: Of the last out-of-memory.
        capacity_bytes: What the largest device that the task may use could ever promise.

    Returns:
        The rung; or, where there is none, why: a text for the error.
    """
    needed = needed_bytes(evidence)
    wanted = f"; it would have needed {format_bytes(needed)} in all" if needed else ""
    budget = format_bytes(evidence.budget_bytes)
    if cause not in ("own_cap", "foreign", "crowded"):
        return f"more memory of a device does not help ({cause})"
    if climb.processes >= MOST_PROCESSES:
        return f"{climb.processes} processes have run out of memory, the last with {budget}{wanted}"
    if cause == "own_cap":
        if climb.whole_device:
            return f"a whole device was not enough, {budget}{wanted}"
        more = max(int(evidence.budget_bytes * OOM_FACTOR), int((needed or 0) * WANTED_FACTOR))
        return _give(replace(climb, shared=0), more, capacity_bytes, f"{budget} were not enough")
    shared = climb.shared + 1
    if shared > MOST_SHARED:
        return f"the device ran full {shared} times though the task was within its {budget}{wanted}"
    taken = "other people's processes" if cause == "foreign" else "tasks beside it"
    reason = f"{taken} filled the device though it was within its {budget}"
    grown = replace(climb, shared=shared)
    if shared == MOST_SHARED or climb.whole_device:
        # A whole device is no protection from other people: it may take another.
        return _give(grown, capacity_bytes, capacity_bytes, reason)
    return _give(grown, evidence.budget_bytes, capacity_bytes, reason)


def _give(climb: Climb, budget_bytes: int, capacity_bytes: int, reason: str) -> Rung:
    again = replace(climb, processes=climb.processes + 1)
    if budget_bytes >= capacity_bytes:
        whole = replace(again, whole_device=True)
        return Rung(whole, None, f"{reason}; it gets a device to itself")
    again = replace(again, reached_bytes=max(climb.reached_bytes, budget_bytes))
    return Rung(again, budget_bytes, f"{reason}; it gets {format_bytes(budget_bytes)}")
