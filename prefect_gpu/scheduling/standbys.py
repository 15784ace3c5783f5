"""Number and kind of the standbys: processes that wait for tasks.

A standby costs host memory and, while it imports, a core; it saves a task the seconds of its imports. So there is one
for each known task to come, and one for the next task, which is likely like the last. Pure;
`processes.standby_pool` starts and ends the processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindDemand:
    """Tasks that want one kind of standby, and its existing standbys."""

    kind: Hashable
    #: Tasks that were submitted and have no process yet.
    waiting: int
    #: The last task that was started is of this kind: one standby is made for the next.
    latest: bool
    #: A task of this kind was started before: one existing standby is kept for the next.
    used: bool
    #: Host memory of one standby, in bytes.
    size_bytes: int
    #: Standbys that wait for a task.
    ready: int
    #: Standbys that still import.
    importing: int
    #: False if standbys of this kind died, or did not suit their tasks.
    useful: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of the machine for standbys."""

    #: Bytes of the machine's memory that new processes could use now, as the kernel reports.
    available_bytes: int
    #: Bytes promised to tasks' processes and not taken yet.
    promised_bytes: int
    #: Bytes to leave free in any case.
    reserve_bytes: int
    #: Cores that this process may use.
    cores: int
    #: Most standbys.
    most: int


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """Standbys to start and end now. A kind is named once for each process."""

    starts: tuple[Hashable, ...] = ()
    #: A standby that still imports is ended before a ready one.
    ends: tuple[Hashable, ...] = ()
    #: Some standbys end because the machine's memory runs out.
    short_of_memory: bool = False


def most_by_default(cores: int, max_processes: int) -> int:
    """Return the most standbys without a setting: half the cores, at least two."""
    return min(max_processes, max(2, cores // 2))


def most_imports(cores: int) -> int:
    """Return the most standbys that import at a time: each takes a core that running tasks need."""
    return max(1, cores // 2)


def plan_standbys(demands: Sequence[KindDemand], machine: Machine) -> StandbyPlan:
    """Return which standbys to start and which to end; `demands` has every wanted or existing kind, most urgent first."""
    have = {d.kind: d.ready + d.importing for d in demands}
    targets = _targets(demands, machine.most)
    ends = [d.kind for d in demands for _ in range(have[d.kind] - targets[d.kind])]
    left_bytes = machine.available_bytes - machine.promised_bytes - machine.reserve_bytes
    # Standbys that still import have taken a part of their memory at most.
    left_bytes -= sum(d.size_bytes * d.importing for d in demands)
    sizes = {d.kind: d.size_bytes for d in demands}
    left_bytes += sum(sizes[kind] for kind in ends)
    short_of_memory = left_bytes < 0
    # They end before the machine's memory runs out, the least urgent first.
    for demand in reversed(demands):
        kept = min(have[demand.kind], targets[demand.kind])
        while left_bytes < 0 and kept:
            ends.append(demand.kind)
            left_bytes += demand.size_bytes
            kept -= 1
    if ends:
        # The memory of ended standbys shows at the next reading.
        return StandbyPlan(ends=tuple(ends), short_of_memory=short_of_memory)
    return StandbyPlan(starts=_starts(demands, targets, left_bytes, machine.cores))


def _targets(demands: Sequence[KindDemand], most: int) -> dict[Hashable, int]:
    wanted = {}
    for demand in demands:
        wanted[demand.kind] = max(demand.waiting, int(demand.latest)) if demand.useful else 0
    targets = dict.fromkeys(wanted, 0)
    # In turn: one kind with a thousand tasks must not keep the others from theirs.
    while most > 0 and any(targets[kind] < wanted[kind] for kind in wanted):
        for kind in wanted:
            if targets[kind] < wanted[kind] and most > 0:
                targets[kind] += 1
                most -= 1
    for demand in demands:
        spare = demand.used and demand.useful and demand.ready + demand.importing > 0
        if spare and most > 0 and targets[demand.kind] == 0:
            targets[demand.kind] = 1
            most -= 1
    return targets


def _starts(
    demands: Sequence[KindDemand], targets: dict[Hashable, int], left_bytes: int, cores: int
) -> tuple[Hashable, ...]:
    slots = most_imports(cores) - sum(d.importing for d in demands)
    missing = {d.kind: targets[d.kind] - d.ready - d.importing for d in demands}
    starts: list[Hashable] = []
    for turn in range(max(missing.values(), default=0)):
        for demand in demands:
            if turn < missing[demand.kind] and slots > 0 and demand.size_bytes <= left_bytes:
                starts.append(demand.kind)
                slots -= 1
                left_bytes -= demand.size_bytes
    return tuple(starts)
