"""A list of tasks replayed on simulated devices in virtual time, with the scheduling of the runner.

It covers when and where each task starts, how long it waits, and lower bounds of any schedule. Nothing runs
and no clock is read: time jumps from one event to the next. Lists are read in `task_list`, or made of a flow run in
`recorded_run`; what happens at each event is decided in `scheduling`.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from prefect_gpu.broker.broker import HEADROOM_BYTES
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.backfill import PATIENCE, Patience
from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import Device, Placement, Request
from prefect_gpu.scheduling.placement import Board, PlacementStyle
from prefect_gpu.scheduling.probes import READY_S, Growth, choose_leaving, counted_bytes
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue, decide


@dataclass(frozen=True, slots=True)
class ListedTask:
    """One task of a list."""

    name: str
    #: Seconds from the beginning at which it is submitted.
    arrival_s: float
    #: Seconds for which it holds its devices.
    duration_s: float
    #: Memory of each device: bytes, or a fraction of it. `None`: a device to itself, or see `probe_bytes`.
    memory: int | float | None = None
    #: Number of devices. It gets all of them or none.
    count: int = 1
    priority: int = 0
    #: No other task on its devices.
    exclusive: bool = False
    #: Seconds that the scheduler expects it to take. `None`: unknown.
    expected_s: float | None = None
    #: Positions in the list of the tasks that must end before it is submitted.
    after: tuple[int, ...] = ()
    #: Seconds from then, or from its arrival if that is later, to its submission.
    lag_s: float = 0.0
    #: Of a first run whose need is not known and which shares devices: the bytes of each that it holds from its start on.
    #: `None`: it is none.
    probe_bytes: int | None = None


@dataclass(slots=True)
class Outcome:
    """The result of one task."""

    task: ListedTask
    #: When it was submitted, in seconds: it had arrived, and the tasks before it had ended.
    ready_s: float = 0.0
    #: When it started and ended, in seconds. `None`: it never did.
    started_s: float | None = None
    ended_s: float | None = None
    #: Its devices. `None`: it never started.
    placement: Placement | None = None
    #: Number of later tasks that passed it and may have delayed it.
    passed: int = 0
    #: When it was expected to start on the first devices that were held back for it, in seconds. `None`:
    #: none were.
    promised_s: float | None = None
    #: Why it can never run. Empty: it ran.
    refusal: str = ""

    @property
    def waited_s(self) -> float | None:
        """Seconds from its submission to its start. `None`: it never started."""
        return None if self.started_s is None else self.started_s - self.ready_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of the duration of any schedule of the tasks that ran, in seconds."""

    #: Duration of the longest chain of tasks that wait for each other, arrivals included.
    chain_s: float
    #: Memory × time of all tasks, divided by the memory of all devices.
    memory_s: float
    #: Duration of the tasks of which no two fit on one device, divided by the number of devices.
    large_s: float
    #: Duration of all tasks, divided by how many may run at once. 0: there is no such limit.
    places_s: float = 0.0

    @property
    def largest_s(self) -> float:
        """The largest of them."""
        return max(self.chain_s, self.memory_s, self.large_s, self.places_s)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The result of a list of tasks."""

    devices: tuple[Device, ...]
    #: In the order of the list.
    outcomes: tuple[Outcome, ...]
    bounds: Bounds

    @property
    def finished(self) -> list[Outcome]:
        """Tasks that ran."""
        return [o for o in self.outcomes if o.ended_s is not None]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first arrival to the last end. 0: no task ran."""
        ends = [o.ended_s for o in self.outcomes if o.ended_s is not None]
        return max(ends) - _begin_s(o.task for o in self.outcomes) if ends else 0.0

    @property
    def mean_wait_s(self) -> float:
        """Mean of the seconds from submission to start."""
        waits = [o.waited_s for o in self.outcomes if o.waited_s is not None]
        return statistics.fmean(waits) if waits else 0.0

    @property
    def max_wait_s(self) -> float:
        """Most seconds from submission to start."""
        return max((o.waited_s for o in self.outcomes if o.waited_s is not None), default=0.0)

    @property
    def utilisation(self) -> float:
        """Fraction of all memory, over the makespan, that was reserved for tasks; of a first run, what it held."""
        span_s = self.makespan_s
        held = sum(
            (
                sum(o.placement.budget_bytes)
                if o.task.probe_bytes is None
                else o.task.probe_bytes * o.task.count
            )
            * o.task.duration_s
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
    headroom_bytes: int = HEADROOM_BYTES["simulated"],
) -> Schedule:
    """Replay a list of tasks.

    Args:
        tasks: In the order of submission if they arrive together.
        devices: Simulated devices. The memory of a task includes its context.
        style: `spread` or `pack`.
        patience: How far a blocked task may be passed. `NO_BACKFILL`: not at all.
        max_tasks: Most tasks on a device at a time. `None`: as many as fit.
        max_processes: Most tasks at a time. `None`: any number.
        headroom_bytes: Kept free on each device, as a runner does by default.
    """
    snapshots = SimulatedReader(devices).read(())
    states = [device_state(snapshot, (), {}, headroom_bytes) for snapshot in snapshots]
    replay = _Replay(tasks, states, headroom_bytes, style, patience, max_tasks, max_processes)
    replay.run()
    simulated = tuple(snapshot.device for snapshot in snapshots)
    ran = [o.task if o.started_s is not None else None for o in replay.outcomes]
    bounds = lower_bounds(ran, [state.capacity_bytes for state in states], max_tasks)
    return Schedule(simulated, tuple(replay.outcomes), bounds)


#: Kinds of events, in the order in which those of one time are processed. An end makes room for what arrives.
_END, _SETTLES, _ARRIVES = range(3)

#: Stands for "no limit": more tasks than a list can have, more bytes than a machine can have.
_ANY = 1 << 62


class _Replay:
    """The state of a simulation: virtual time, devices, waiting and running tasks."""

    def __init__(
        self,
        tasks: Sequence[ListedTask],
        states: Sequence[DeviceState],
        headroom_bytes: int,
        style: PlacementStyle,
        patience: Patience,
        max_tasks: int | None,
        max_processes: int | None,
    ) -> None:
        self.outcomes = [Outcome(task) for task in tasks]
        #: All devices as they are now, by key.
        self._states = {state.device.key: state for state in states}
        self._headroom_bytes = headroom_bytes
        self._style: PlacementStyle = style
        self._max_tasks = max_tasks
        self._patience = patience
        self._max_processes = max_processes or _ANY
        self._running = 0
        self._submitted = 0
        #: Order of submission, by position.
        self._sequences: dict[int, int] = {}
        self._queue = RequestQueue()
        #: Returns tasks once all those that they come after have ended.
        self._sorter = TopologicalSorter({i: task.after for i, task in enumerate(tasks)})
        self._sorter.prepare()
        #: Next events: seconds, kind, position in the list.
        self._events: list[tuple[float, int, int]] = []
        self._push_arrivals(0.0)

    def run(self) -> None:
        """Process all events in order of time."""
        events = self._events
        while events:
            now_s = events[0][0]
            while events and events[0][0] == now_s:
                _, kind, position = heapq.heappop(events)
                if kind == _ARRIVES:
                    self._submit(position, now_s)
                elif kind == _END and self.outcomes[position].ended_s == now_s:
                    self._end(position, now_s)
            self._schedule(now_s)
            while self._end_probes(now_s):
                self._schedule(now_s)
        self._refuse_followers()

    def _push_arrivals(self, now_s: float) -> None:
        for position in self._sorter.get_ready():
            task = self.outcomes[position].task
            arrives_s = max(now_s, task.arrival_s) + task.lag_s
            heapq.heappush(self._events, (arrives_s, _ARRIVES, position))

    def _submit(self, position: int, now_s: float) -> None:
        outcome = self.outcomes[position]
        task = outcome.task
        outcome.ready_s = now_s
        self._submitted += 1
        self._add(position, self._submitted, shares=task.probe_bytes is not None)

    def _add(self, position: int, sequence: int, shares: bool) -> None:
        task = self.outcomes[position].task
        memory = task.memory
        largest_bytes = max(state.capacity_bytes for state in self._states.values())
        if task.probe_bytes is not None and task.probe_bytes > largest_bytes:
            # It is refused, with the reason.
            memory = task.probe_bytes
        self._sequences[position] = sequence
        self._queue.add(
            Request(
                id=str(position),
                task_name=task.name,
                sequence=sequence,
                submitted_s=self.outcomes[position].ready_s,
                memory=memory,
                count=task.count,
                exclusive=task.exclusive,
                priority=task.priority,
                expected_s=task.expected_s,
                probe_fraction=1.0 if shares else 0.0,
            )
        )

    def _end(self, position: int, now_s: float) -> None:
        self._release(position)
        self._sorter.done(position)
        self._push_arrivals(now_s)

    def _release(self, position: int) -> None:
        placement = self.outcomes[position].placement
        assert placement is not None
        self._running -= 1
        for reservation in placement.reservations:
            state = self._states[reservation.device_key]
            left = tuple(r for r in state.reservations if r != reservation)
            self._states[reservation.device_key] = replace(state, reservations=left)

    def _growths(self, state: DeviceState) -> dict[str, Growth]:
        """Return how the first runs that share a device have grown: at once, to what they hold."""
        growths = {}
        for reservation in state.reservations:
            held_bytes = self.outcomes[int(reservation.request_id)].task.probe_bytes
            if reservation.probe is not None and held_bytes is not None:
                growths[reservation.request_id] = Growth(
                    reservation.probe.since_s, held_bytes, reservation.probe.since_s, held_bytes
                )
        return growths

    def _as_now(self, state: DeviceState, now_s: float) -> DeviceState:
        growths = self._growths(state)
        counts = {
            r.request_id: counted_bytes(r, growths[r.request_id], now_s)
            for r in state.reservations
            if r.request_id in growths
        }
        return device_state(state.snapshot, state.reservations, {}, self._headroom_bytes, counts)

    def _end_probes(self, now_s: float) -> bool:
        """End first runs that are in the way of others, for which each gets a device to itself; return whether one was."""
        ended = False
        for state in tuple(self._states.values()):
            growths = self._growths(state)
            held_bytes = sum(growth.peak_bytes for growth in growths.values())
            snapshot = replace(state.snapshot, free_bytes=state.snapshot.free_bytes - held_bytes)
            full = replace(state, snapshot=snapshot)
            leaving = choose_leaving(full, growths, now_s, self._headroom_bytes)
            # A suspension is not simulated: here memory has grown in the first seconds.
            if leaving is not None and leaving.ends:
                position = int(leaving.request_id)
                self._release(position)
                outcome = self.outcomes[position]
                outcome.placement = outcome.started_s = outcome.ended_s = None
                self._add(position, self._sequences[position], shares=False)
                ended = True
        return ended

    def _schedule(self, now_s: float) -> None:
        if not self._queue:
            return
        states = [self._as_now(state, now_s) for state in self._states.values()]
        board = Board(states, self._style, self._max_tasks)
        decisions = decide(
            self._queue,
            board,
            HostState(_ANY, 0, self._running, self._max_processes),
            self._patience,
            now_s,
        )
        self._states = {state.device.key: state for state in board.states}
        self._queue.statuses.update(decisions.statuses)
        for id_, status in decisions.statuses.items():
            blocked = self.outcomes[int(id_)]
            blocked.passed = status.passed
            if blocked.promised_s is None:
                blocked.promised_s = status.starts_s
        for request, error in decisions.refusals:
            self._queue.remove(request)
            self.outcomes[int(request.id)].refusal = str(error)
        for request, placement in decisions.placements:
            self._queue.remove(request)
            outcome = self.outcomes[int(request.id)]
            outcome.placement, outcome.started_s = placement, now_s
            outcome.ended_s = now_s + outcome.task.duration_s
            heapq.heappush(self._events, (outcome.ended_s, _END, int(request.id)))
            if any(r.probe for r in placement.reservations):
                heapq.heappush(self._events, (now_s + READY_S, _SETTLES, int(request.id)))
        self._running += len(decisions.placements)

    def _refuse_followers(self) -> None:
        """Record that tasks after one that can never run can never run either."""
        after = {i: outcome.task.after for i, outcome in enumerate(self.outcomes)}
        for position in TopologicalSorter(after).static_order():
            for before in (self.outcomes[b] for b in after[position]):
                if before.refusal and not self.outcomes[position].refusal:
                    why = f"comes after {before.task.name!r}, which can never run"
                    self.outcomes[position].refusal = why


def lower_bounds(
    tasks: Sequence[ListedTask | None], sizes_bytes: Sequence[int], max_tasks: int | None = None
) -> Bounds:
    """Return lower bounds of the duration of any schedule, from the first arrival.

    Args:
        tasks: The list, with `None` for those that do not run.
        sizes_bytes: Memory of each device.
        max_tasks: Most tasks on a device at a time. `None`: as many as fit.
    """
    ran = [task for task in tasks if task is not None]
    if not ran:
        return Bounds(0.0, 0.0, 0.0)
    small, large = min(sizes_bytes), max(sizes_bytes)

    def least_bytes(task: ListedTask, size_bytes: int) -> float:
        # The device that a task has to itself is at least as large as the smallest.
        if task.probe_bytes is not None:
            return task.probe_bytes
        if task.memory is None or task.exclusive:
            return size_bytes
        return task.memory * size_bytes if isinstance(task.memory, float) else task.memory

    held = sum(least_bytes(t, small) * t.count * t.duration_s for t in ran)
    alone_s = sum(t.count * t.duration_s for t in ran if least_bytes(t, large) * 2 > large)
    all_s = sum(t.count * t.duration_s for t in ran)
    return Bounds(
        chain_s=_chain_s(tasks) - _begin_s(ran),
        memory_s=held / sum(sizes_bytes),
        large_s=alone_s / len(sizes_bytes),
        places_s=all_s / (len(sizes_bytes) * max_tasks) if max_tasks else 0.0,
    )


def _begin_s(tasks: Iterable[ListedTask]) -> float:
    return min((task.arrival_s for task in tasks), default=0.0)


def _chain_s(tasks: Sequence[ListedTask | None]) -> float:
    """Return when the last task would end if none had to wait for a device."""
    ran = {i: task for i, task in enumerate(tasks) if task is not None}
    after = {i: [before for before in task.after if before in ran] for i, task in ran.items()}
    ends: dict[int, float] = {}
    for i in TopologicalSorter(after).static_order():
        ready_s = max((ends[before] for before in after[i]), default=0.0)
        ends[i] = max(ran[i].arrival_s, ready_s) + ran[i].lag_s + ran[i].duration_s
    return max(ends.values(), default=0.0)
