"""Number and kind of warm processes, which import a task's modules before the task exists.

Pure. A warm process saves tasks the seconds of their imports, and costs host memory and, while it imports, a core. Of a
kind that is forked there is one. Of another there is a standby for each submitted task without a process, and one for the
next task, which is likely of the kind of the last.
`standby_pool` starts and ends the processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindDemand:
    """Number of tasks and of existing standbys of one kind."""

    kind: Hashable
    #: Submitted tasks that have no process yet.
    waiting: int
    #: Whether the last started task is of this kind: then one standby is started for the next task.
    latest: bool
    #: Whether a task of this kind was ever started: then one existing standby stays for the next task.
    used: bool
    #: Host memory of one standby.
    size_bytes: int
    #: Standbys that wait for a task, and standbys that still import.
    ready: int
    importing: int
    #: False if standbys of this kind died, or could not run their tasks.
    useful: bool = True
    #: Whether one process is forked for all tasks of this kind. It does not count in `Machine.most`.
    forks: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of the machine for standbys."""

    #: Host memory that new processes could use now, by the kernel's estimate.
    available_bytes: int
    #: Bytes promised to tasks' processes and not taken yet.
    promised_bytes: int
    #: Bytes that always stay free.
    reserve_bytes: int
    #: Cores that this process may use.
    cores: int
    #: Most processes that become that of one task.
    most: int


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """Kinds of the standbys to start and to end now, one entry for each process."""

    starts: tuple[Hashable, ...] = ()
    #: Of one kind, a standby that still imports is ended before a ready standby.
    ends: tuple[Hashable, ...] = ()
    #: Whether standbys end because host memory runs out.
    short_of_memory: bool = False


def most_by_default(cores: int, max_processes: int) -> int:
    """Return the default limit on standbys: half the cores, at least two, at most `max_processes`."""
    return min(max_processes, max(2, cores // 2))


def most_imports(cores: int) -> int:
    """Return the limit on standbys that import at a time: each takes a core that running tasks need."""
    return max(1, cores // 2)


def plan_standbys(demands: Sequence[KindDemand], machine: Machine) -> StandbyPlan:
    """Return the standbys to start and to end. `demands` has all wanted and existing kinds, most urgent first."""
    have = {d.kind: d.ready + d.importing for d in demands}
    targets = _targets(demands, machine.most)
    ends = [d.kind for d in demands for _ in range(have[d.kind] - targets[d.kind])]
    left_bytes = machine.available_bytes - machine.promised_bytes - machine.reserve_bytes
    # Importing standbys have not taken all their memory yet.
    left_bytes -= sum(d.size_bytes * d.importing for d in demands)
    sizes = {d.kind: d.size_bytes for d in demands}
    left_bytes += sum(sizes[kind] for kind in ends)
    short_of_memory = left_bytes < 0
    # The least urgent standbys end first.
    for demand in reversed(demands):
        kept = min(have[demand.kind], targets[demand.kind])
        while left_bytes < 0 and kept:
            ends.append(demand.kind)
            left_bytes += demand.size_bytes
            kept -= 1
    if ends:
        # No starts now: the next reading shows whether the memory of ended standbys is free.
        return StandbyPlan(ends=tuple(ends), short_of_memory=short_of_memory)
    return StandbyPlan(starts=_starts(demands, targets, left_bytes, machine.cores))


def _targets(demands: Sequence[KindDemand], most: int) -> dict[Hashable, int]:
    wanted = {}
    for demand in demands:
        wanted[demand.kind] = max(demand.waiting, int(demand.latest)) if demand.useful else 0
    sources = {d.kind: int(wanted.pop(d.kind) > 0 or _is_spare(d)) for d in demands if d.forks}
    targets = dict.fromkeys(wanted, 0)
    # Kinds take turns: a kind with a thousand tasks must leave standbys for other kinds.
    while most > 0 and any(targets[kind] < wanted[kind] for kind in wanted):
        for kind in wanted:
            if targets[kind] < wanted[kind] and most > 0:
                targets[kind] += 1
                most -= 1
    for demand in demands:
        if not demand.forks and _is_spare(demand) and most > 0 and targets[demand.kind] == 0:
            targets[demand.kind] = 1
            most -= 1
    return {**targets, **sources}


def _is_spare(demand: KindDemand) -> bool:
    return demand.used and demand.useful and demand.ready + demand.importing > 0


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
