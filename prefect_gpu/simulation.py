"""A list of tasks replayed on simulated devices in virtual time, by the scheduling that the runner uses.

Covers what starts when and where, how long each task waits, and what no schedule could beat. Nothing
runs and no clock is read: time jumps from one event to the next. Where lists of tasks come from is
`task_list`, what is decided at each event is `scheduling`.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.backfill import PATIENCE, Patience
from prefect_gpu.scheduling.board import Board, PlacementStyle
from prefect_gpu.scheduling.memory import survey_all
from prefect_gpu.scheduling.model import Device, Placement, Request
from prefect_gpu.scheduling.queue import RequestQueue, Shape
from prefect_gpu.scheduling.turns import Decisions, HostRoom, decide


@dataclass(frozen=True, slots=True)
class ListedTask:
    """One task of a list."""

    name: str
    #: Seconds from the beginning at which it is submitted.
    arrival_s: float
    #: Seconds for which it holds its devices.
    duration_s: float
    #: Asked of each device: bytes, a fraction of it, or (`None`) a device to itself.
    memory: int | float | None = None
    #: Devices asked for, all or none.
    count: int = 1
    priority: int = 0
    #: Nobody else on its devices.
    exclusive: bool = False
    #: Seconds that the scheduler expects of it; `None`: it does not know.
    expected_s: float | None = None
    #: Positions in the list of those that must have ended before it is submitted.
    after: tuple[int, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What became of one task."""

    task: ListedTask
    #: Seconds when it was submitted: it had arrived, and all that it comes after had ended.
    ready_s: float = 0.0
    #: Seconds when it started and ended; `None`: it never did.
    started_s: float | None = None
    ended_s: float | None = None
    #: Where it ran.
    placement: Placement | None = None
    #: Later ones that passed it where they may have delayed it.
    passed: int = 0
    #: Seconds at which it was expected to start on the first devices that were kept for it; `None`: none
    #: ever were.
    promised_s: float | None = None
    #: Why it can never run; empty: it ran.
    refusal: str = ""

    @property
    def waited_s(self) -> float | None:
        """Seconds from its submission to its start; `None`: it never started."""
        return None if self.started_s is None else self.started_s - self.ready_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds below which no schedule of the tasks that ran could end."""

    #: The longest chain of tasks that come after one another, arrivals included.
    chain_s: float
    #: All memory for all the time that it is needed, over the memory of all devices.
    memory_s: float
    #: Tasks of which no two fit on one device, over the number of devices.
    large_s: float
    #: Tasks over the places that `max_tasks` leaves; 0: no such bound.
    places_s: float = 0.0

    @property
    def largest_s(self) -> float:
        """The largest of them."""
        return max(self.chain_s, self.memory_s, self.large_s, self.places_s)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What came of a list of tasks."""

    devices: tuple[Device, ...]
    #: In the order of the list.
    outcomes: tuple[Outcome, ...]
    bounds: Bounds
    #: Looks at the queue.
    looks: int

    @property
    def finished(self) -> list[Outcome]:
        """Those that ran."""
        return [o for o in self.outcomes if o.ended_s is not None]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first arrival to the last end; 0: nothing ran."""
        ends = [o.ended_s for o in self.outcomes if o.ended_s is not None]
        return max(ends) - _begin_s(o.task for o in self.outcomes) if ends else 0.0

    @property
    def mean_wait_s(self) -> float:
        """Mean seconds from submission to start."""
        waits = [o.waited_s for o in self.outcomes if o.waited_s is not None]
        return statistics.fmean(waits) if waits else 0.0

    @property
    def max_wait_s(self) -> float:
        """Most seconds from submission to start."""
        return max((o.waited_s for o in self.outcomes if o.waited_s is not None), default=0.0)

    @property
    def utilisation(self) -> float:
        """Part of all memory, over the makespan, that was promised to tasks."""
        span_s = self.makespan_s
        held = sum(
            sum(o.placement.budget_bytes) * o.task.duration_s
            for o in self.outcomes
            if o.placement is not None
        )
        return held / (sum(d.total_bytes for d in self.devices) * span_s) if span_s else 0.0


def simulate(
    tasks: Sequence[ListedTask],
    devices: SimulatedDevices,
    style: PlacementStyle = "spread",
    patience: Patience = PATIENCE,
    max_tasks: int | None = None,
    max_processes: int | None = None,
) -> Schedule:
    """Replay a list of tasks.

    Args:
        tasks: In the order of submission where they arrive together.
        devices: Where they run; a context is part of a task's memory.
        style: `spread` or `pack`.
        patience: How far a blocked task may be passed; `NO_BACKFILL`: not at all.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        max_processes: Most tasks at a time; `None`: any number.
    """
    snapshots = SimulatedReader(devices).read(())
    board = Board(survey_all(snapshots, (), {}, 0), style, max_tasks)
    replay = _Replay(tasks, board, patience, max_processes)
    replay.run()
    there = tuple(snapshot.device for snapshot in snapshots)
    ran = [o.task if o.started_s is not None else None for o in replay.outcomes]
    bounds = lower_bounds(ran, [device.total_bytes for device in there], max_tasks)
    return Schedule(there, tuple(replay.outcomes), bounds, replay.looks)


#: Stands for "any": more than a list can have, or a machine can hold.
_ANY = 1 << 62


class _Replay:
    """Virtual time, the devices, who waits and who runs; see `simulate`."""

    def __init__(
        self,
        tasks: Sequence[ListedTask],
        board: Board,
        patience: Patience,
        max_processes: int | None,
    ) -> None:
        self.outcomes = [Outcome(task) for task in tasks]
        self.looks = 0
        self._board = board
        self._patience = patience
        self._max_processes = max_processes or _ANY
        self._running = 0
        self._submitted = 0
        self._queue = RequestQueue()
        self._checked: frozenset[Shape] = frozenset()
        #: The last look; `None`: somebody has come since.
        self._last: Decisions | None = None
        #: How many tasks each still waits for, and who waits for it.
        self._missing = [len(task.after) for task in tasks]
        self._followers: dict[int, list[int]] = {}
        for position, task in enumerate(tasks):
            for before in task.after:
                self._followers.setdefault(before, []).append(position)
        #: What comes: seconds, whether it is an arrival (ends go first), position in the list.
        self._events = [(t.arrival_s, True, i) for i, t in enumerate(tasks) if not t.after]
        heapq.heapify(self._events)

    def run(self) -> None:
        """Go from event to event until none is left."""
        events = self._events
        while events:
            now_s = events[0][0]
            while events and events[0][0] == now_s:
                _, arrives, position = heapq.heappop(events)
                if arrives:
                    self._submit(position, now_s)
                else:
                    self._end(position, now_s)
            self._look(now_s)

    def _submit(self, position: int, now_s: float) -> None:
        outcome = self.outcomes[position]
        task = outcome.task
        outcome.ready_s = now_s
        self._submitted += 1
        self._last = None
        self._queue.add(
            Request(
                id=str(position),
                task_name=task.name,
                sequence=self._submitted,
                submitted_s=now_s,
                memory=task.memory,
                count=task.count,
                exclusive=task.exclusive,
                priority=task.priority,
                expected_s=task.expected_s,
            )
        )

    def _end(self, position: int, now_s: float) -> None:
        placement = self.outcomes[position].placement
        assert placement is not None
        self._running -= 1
        for reservation in placement.reservations:
            self._board.give_back(reservation)
        for follower in self._followers.get(position, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                arrives_s = max(now_s, self.outcomes[follower].task.arrival_s)
                heapq.heappush(self._events, (arrives_s, True, follower))

    def _look(self, now_s: float) -> None:
        if not self._queue:
            return
        self.looks += 1
        decisions = decide(
            self._queue,
            self._board,
            HostRoom(_ANY, 0, self._running, self._max_processes),
            self._patience,
            now_s,
            checked=self._checked,
            after=self._last,
        )
        self._last = decisions
        self._queue.note(decisions.standings)
        for id_, standing in decisions.standings.items():
            blocked = self.outcomes[int(id_)]
            blocked.passed = standing.passed
            if blocked.promised_s is None:
                blocked.promised_s = standing.starts_s
        for request, error in decisions.refusals:
            self._queue.remove(request)
            self._refuse(int(request.id), str(error))
        for request, placement in decisions.placements:
            self._queue.remove(request)
            outcome = self.outcomes[int(request.id)]
            outcome.placement, outcome.started_s = placement, now_s
            outcome.ended_s = now_s + outcome.task.duration_s
            heapq.heappush(self._events, (outcome.ended_s, False, int(request.id)))
        self._running += len(decisions.placements)
        self._checked = self._queue.shapes

    def _refuse(self, position: int, why: str) -> None:
        """Say that a task can never run, nor what comes after it."""
        left = [(position, why)]
        while left:
            position, why = left.pop()
            outcome = self.outcomes[position]
            if not outcome.refusal:
                outcome.refusal = why
                why = f"comes after {outcome.task.name!r}, which can never run"
                left += [(follower, why) for follower in self._followers.get(position, ())]


def lower_bounds(
    tasks: Sequence[ListedTask | None], sizes_bytes: Sequence[int], max_tasks: int | None = None
) -> Bounds:
    """Work out what no schedule could beat, in seconds from the first arrival.

    Args:
        tasks: A list; `None` in place of those that do not run.
        sizes_bytes: Memory of each device.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
    """
    there = [task for task in tasks if task is not None]
    if not there:
        return Bounds(0.0, 0.0, 0.0)
    small, large = min(sizes_bytes), max(sizes_bytes)

    def least_bytes(task: ListedTask, size_bytes: int) -> float:
        # A device to itself is at least the smallest.
        if task.memory is None or task.exclusive:
            return size_bytes
        return task.memory * size_bytes if isinstance(task.memory, float) else task.memory

    held = sum(least_bytes(t, small) * t.count * t.duration_s for t in there)
    alone_s = sum(t.count * t.duration_s for t in there if least_bytes(t, large) * 2 > large)
    all_s = sum(t.count * t.duration_s for t in there)
    return Bounds(
        chain_s=_chain_s(tasks) - _begin_s(there),
        memory_s=held / sum(sizes_bytes),
        large_s=alone_s / len(sizes_bytes),
        places_s=all_s / (len(sizes_bytes) * max_tasks) if max_tasks else 0.0,
    )


def _begin_s(tasks: Iterable[ListedTask]) -> float:
    return min((task.arrival_s for task in tasks), default=0.0)


def _chain_s(tasks: Sequence[ListedTask | None]) -> float:
    """Give the seconds at which the last task would end if none ever waited for a device."""
    ends: dict[int, float] = {}
    for start in range(len(tasks)):
        left = [start]
        while left:
            at = left[-1]
            task = tasks[at]
            if at in ends or task is None:
                left.pop()
                continue
            before = [b for b in task.after if b not in ends and tasks[b] is not None]
            if before:
                left += before
                continue
            ready_s = max((ends.get(b, 0.0) for b in task.after), default=0.0)
            ends[at] = max(task.arrival_s, ready_s) + task.duration_s
            left.pop()
    return max(ends.values(), default=0.0)
