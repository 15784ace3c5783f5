"""How many processes wait ahead of their tasks, of which kind: start these, end those.

A standby costs host memory and, while it imports, a core; it saves a task the seconds of its imports.
So there are as many as tasks are known to come, and one for the next that nobody has announced,
which is likely like the last. What a kind is, and carrying this out, is `processes.standby`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindDemand:
    """One kind of standby: who wants it, and what there is of it."""

    kind: Hashable
    #: Tasks that were submitted and have not got a process yet.
    waiting: int
    #: The kind of the task that was started last: one is made for the next.
    latest: bool
    #: A task of this kind was started before: one that is there is kept for the next.
    used: bool
    #: Host memory that one takes, in bytes.
    size_bytes: int
    #: Standbys that wait for a task.
    ready: int
    #: Standbys that still import.
    warming: int
    #: Another one may be started. Not so where they died, or were of no use.
    useful: bool = True
    #: Further ones, beside those for the tasks that are wanted: for the case that a hot one waits on
    #: another device.
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What standbys may take."""

    #: Bytes of the machine's memory that new processes could use, as the kernel tells now.
    available_bytes: int
    #: Bytes promised to tasks' processes that have not taken them yet.
    promised_bytes: int
    #: Bytes to leave free whatever is wanted.
    reserve_bytes: int
    #: Cores of this process.
    cores: int
    #: Standbys at most.
    most: int


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """What to do now. A kind may be named several times: once for each process."""

    starts: tuple[Hashable, ...] = ()
    #: One that imports still is ended before one that is ready.
    ends: tuple[Hashable, ...] = ()


def most_by_default(cores: int, max_processes: int) -> int:
    """Give how many standbys there are at most where nobody says: half the cores, at least two."""
    return min(max_processes, max(2, cores // 2))


def plan_standbys(demands: Sequence[KindDemand], machine: Machine) -> StandbyPlan:
    """Say which standbys to start and which to end.

    Args:
        demands: Every kind that is wanted or exists, the most urgent first.
        machine: What there is room for.
    """
    have = {d.kind: d.ready + d.warming for d in demands}
    targets = _targets(demands, machine.most)
    ends = [d.kind for d in demands for _ in range(have[d.kind] - targets[d.kind])]
    left_bytes = machine.available_bytes - machine.promised_bytes - machine.reserve_bytes
    # They have taken part of it at most.
    left_bytes -= sum(d.size_bytes * d.warming for d in demands)
    sizes = {d.kind: d.size_bytes for d in demands}
    left_bytes += sum(sizes[kind] for kind in ends)
    # Before the machine's memory runs out they go, the least urgent first.
    for demand in reversed(demands):
        kept = min(have[demand.kind], targets[demand.kind])
        while left_bytes < 0 and kept:
            ends.append(demand.kind)
            left_bytes += demand.size_bytes
            kept -= 1
    if ends:
        # What they free shows at the next look.
        return StandbyPlan(ends=tuple(ends))
    return StandbyPlan(starts=_starts(demands, targets, left_bytes, machine.cores))


def _targets(demands: Sequence[KindDemand], most: int) -> dict[Hashable, int]:
    wanted = {}
    for demand in demands:
        least = max(demand.waiting, int(demand.latest))
        wanted[demand.kind] = least + demand.spare if demand.useful and least else 0
    targets = dict.fromkeys(wanted, 0)
    # In turns: one kind with a thousand tasks must not keep the others from theirs.
    while most > 0 and any(targets[kind] < wanted[kind] for kind in wanted):
        for kind in wanted:
            if targets[kind] < wanted[kind] and most > 0:
                targets[kind] += 1
                most -= 1
    for demand in demands:
        spare = demand.used and demand.useful and demand.ready + demand.warming > 0
        if spare and most > 0 and targets[demand.kind] == 0:
            targets[demand.kind] = 1
            most -= 1
    return targets


def _starts(
    demands: Sequence[KindDemand], targets: dict[Hashable, int], left_bytes: int, cores: int
) -> tuple[Hashable, ...]:
    # Importing takes a core each; the tasks that run need theirs.
    slots = max(1, cores // 2) - sum(d.warming for d in demands)
    missing = {d.kind: targets[d.kind] - d.ready - d.warming for d in demands}
    starts: list[Hashable] = []
    for turn in range(max(missing.values(), default=0)):
        for demand in demands:
            if turn < missing[demand.kind] and slots > 0 and demand.size_bytes <= left_bytes:
                starts.append(demand.kind)
                slots -= 1
                left_bytes -= demand.size_bytes
    return tuple(starts)
