"""Number and kind of warm processes, which import a task's modules before the task exists.

Pure. A warm process saves tasks the seconds of their imports, and costs host memory and, while it imports, a core. Of a
kind that is forked there is one. Of another there is a standby for each submitted task without a process, and one for the
next task, which is likely of the kind of the last.
`standby_pool` starts and ends the processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindDemand:
    """Number of wanted and of existing warm processes of one kind."""

    kind: Hashable
    #: Processes that tasks need. Missing ones are started.
    wanted: int
    #: Whether one existing process stays for the next task.
    spare: bool
    #: Host memory of one process.
    size_bytes: int
    #: Processes that wait for a task, and processes that still import.
    ready: int
    importing: int
    #: Whether one process is forked for all tasks of this kind. It is no standby.
    forks: bool = False

    @property
    def existing(self) -> int:
        """Number of existing processes."""
        return self.ready + self.importing


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


def plan_standbys(
    demands: Sequence[KindDemand], left_bytes: float, most: int, imports: int
) -> StandbyPlan:
    """Return the processes to start and to end. `demands` has all wanted and existing kinds, most urgent first.

    `left_bytes` is the host memory for new processes. If it is negative, processes end. At most `most` standbys exist,
    and `imports` processes import at a time.
    """
    targets = _targets(demands, most)
    missing = {d.kind: targets[d.kind] - d.existing for d in demands}
    ends = [d for d in demands for _ in range(-missing[d.kind])]
    # Importing standbys have not taken all their memory yet.
    left_bytes += sum(d.size_bytes for d in ends) - sum(d.size_bytes * d.importing for d in demands)
    short_of_memory = left_bytes < 0
    # The least urgent standbys end first.
    for demand in reversed(demands):
        for _ in range(min(demand.existing, targets[demand.kind])):
            if left_bytes < 0:
                ends.append(demand)
                left_bytes += demand.size_bytes
    if ends:
        # No starts now: the next reading shows whether the memory of ended standbys is free.
        return StandbyPlan(ends=tuple(d.kind for d in ends), short_of_memory=short_of_memory)
    imports -= sum(d.importing for d in demands)
    starts: list[Hashable] = []
    for demand in _in_turns(demands, missing):
        if len(starts) < imports and demand.size_bytes <= left_bytes:
            starts.append(demand.kind)
            left_bytes -= demand.size_bytes
    return StandbyPlan(tuple(starts))


def _targets(demands: Sequence[KindDemand], most: int) -> Mapping[Hashable, int]:
    targets = Counter[Hashable]()
    spares = [d for d in demands if d.spare and d.existing and not d.wanted]
    for demand in (*_in_turns(demands, {d.kind: d.wanted for d in demands}), *spares):
        if demand.forks or most > 0:
            targets[demand.kind] += 1
            most -= not demand.forks
    return targets


def _in_turns(
    demands: Sequence[KindDemand], numbers: Mapping[Hashable, int]
) -> Iterator[KindDemand]:
    """Yield each demand as often as the number of its kind says, in turns.

    A kind with a thousand tasks must leave standbys for other kinds.
    """
    for turn in range(max(numbers.values(), default=0)):
        yield from (d for d in demands if turn < numbers[d.kind])
