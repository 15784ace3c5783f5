"""Which running tasks are suspended so that a blocked request can start.

Pure. A suspended process has its GPU memory on the host. A request of its own in the queue, its *return*, resumes it.
`suspension.eligibility` decides which processes can be suspended at all.

- On each device at most one task is suspended for a request: the cheapest task without which the request fits. A request
  for several devices gets the devices with the lowest total cost.
- A task is suspended for a request of higher priority. For any other request it is only moved: another device has room
  for it, its return is placed first, and the move takes less time than the request would wait.
- The cost is the seconds to the host and back. A task that is already asked to suspend costs nothing, so a plan stays
  the same while nothing else changes.

A task with unknown end is expected to run for as long again as it has run, an overdue task for as long again as it is
overdue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prefect_gpu.scheduling import placement
from prefect_gpu.scheduling.backfill import ready_s
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.scheduling_pass import Shape, shape_of
from prefect_gpu.units import GIB

#: Bytes a second from a device to the host and back, the slowest measured: 32 GiB took 15 to 18 s out and 5.4 to 7.4 s
#: in (H200, driver 580.159.04). Seconds for a context alone: 0.48 to 0.65 out, 0.27 to 0.29 in.
OUT_BYTES_S, IN_BYTES_S = 1.7 * GIB, 4.4 * GIB
FIXED_OUT_S, FIXED_IN_S = 0.5, 0.3

#: Bytes of host memory that suspended processes must leave free: the kernel's available memory is an estimate.
HOST_MARGIN_BYTES = 2 * GIB

#: Most requests for which tasks are suspended at the same time.
HEADS = 4

#: Each time a task has been suspended for this many seconds, the priority of its return rises by one.
AGING_S = 600.0

#: Seconds after its resumption in which a task is not suspended again, so that it makes progress.
REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A task that holds devices, with the values that decide whether it is suspended."""

    request_id: str
    priority: int
    #: Whether the task has one device and may be suspended now.
    preemptible: bool
    #: Devices of its machine and model where it may resume; only its own if a tag pins it or the driver cannot move it.
    devices: tuple[DeviceKey, ...]
    #: Bytes that a suspension moves to the host.
    moved_bytes: int
    #: Monotonic seconds of the placement.
    since_s: float
    #: Monotonic seconds before which the task is not suspended.
    rests_until_s: float = 0.0
    #: Id of the request for which the task is, or is asked to be, suspended; empty: no request.
    suspended_for: str = ""
    #: Whether its memory is on the host.
    away: bool = False
    #: Whether it is suspended because probes ran its device short of memory; see `probes`.
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks to suspend so that a request can start on `devices`, if earlier plans of the pass are carried out."""

    request_id: str
    devices: tuple[DeviceKey, ...]
    #: Tasks to suspend, at most one on each device, by request id. The value: whether the task is moved.
    suspended: Mapping[str, bool]


def aged_priority(request: Request, away_s: float) -> int:
    """Return the priority of the return of a task that has been suspended for `away_s` seconds."""
    return request.priority + int(away_s // AGING_S)


def out_s(moved_bytes: int) -> float:
    """Return the expected seconds to move a process's memory from a device to the host."""
    return FIXED_OUT_S + moved_bytes / OUT_BYTES_S


def in_s(moved_bytes: int) -> float:
    """Return the expected seconds to move a process's memory from the host to a device."""
    return FIXED_IN_S + moved_bytes / IN_BYTES_S


def plan(
    blocked: Sequence[Request],
    states: Sequence[DeviceState],
    running: Mapping[str, Running],
    host_room_bytes: Mapping[str, int],
    now_s: float,
    max_tasks: int | None = None,
    refuses: Callable[[Request, str], bool] = lambda request, node: False,
) -> list[Plan]:
    """Return the plans of this pass: for each blocked request that can start if tasks are suspended, those tasks.

    The plans replace those of the pass before: if a task is asked to suspend for a request whose plan no longer names
    it, its suspension is withdrawn. At most `HEADS` requests that had no plan get one. The first request that gets none,
    and each suspended task that is to resume, keep the device on which they are expected to start soonest.

    `blocked` has the waiting requests of all brokers after a scheduling pass, in the order of the queue; `states` are the
    devices after it. `host_room_bytes` has the free host memory by `Device.host`, less the bytes still being moved out of
    tasks whose return is already requested. `max_tasks` is the most tasks on a device at a time; `None`: as many as fit.
    `refuses` returns whether host resources allow no process for a request on a node now.
    """
    asked = {task.suspended_for for task in running.values() if task.suspended_for}
    if not asked and not any(task.preemptible for task in running.values()):
        return []
    machine = _Machine(
        {state.device.key: state for state in states},
        running,
        {host: room_bytes - HOST_MARGIN_BYTES for host, room_bytes in host_room_bytes.items()},
        now_s,
        math.inf if max_tasks is None else max_tasks,
        refuses,
    )
    plans: list[Plan] = []
    helpless: set[tuple[int, Shape]] = set()
    for request in blocked:
        if request.returns:
            machine.keep(request)
        elif request.id in asked or len(plans) < HEADS:
            shape = request.priority, shape_of(request)
            if shape in helpless and request.id not in asked:
                continue
            found = machine.choose(request)
            if found is not None:
                plans.append(found)
                continue
            if not helpless:
                machine.keep(request)
            helpless.add(shape)
    return plans


class _Choice(NamedTuple):
    """A device for a request, and the task on it to suspend for the request."""

    key: DeviceKey
    #: The task and its reservation; `None`: the request fits without a suspension.
    task: Running | None = None
    held: Reservation | None = None
    #: Whether another device has room for the task now.
    moves: bool = False


def _new(choices: Iterable[_Choice]) -> list[Running]:
    """Return the tasks of `choices` that are not yet asked to suspend."""
    return [each.task for each in choices if each.task and not each.task.suspended_for]


def _cost_s(tasks: Iterable[Running]) -> float:
    """Return the total seconds to move the memory of `tasks` to the host and back."""
    return sum(out_s(task.moved_bytes) + in_s(task.moved_bytes) for task in tasks)


def _rank(choices: Sequence[_Choice]) -> tuple[float, int, int]:
    """Return the cost of suspending tasks: seconds, how many are not moved to another device, how many in all."""
    suspended = [each for each in choices if each.task is not None]
    return _cost_s(_new(choices)), sum(not each.moves for each in suspended), len(suspended)


@dataclass(eq=False, repr=False)
class _Machine:
    """The devices as they are once earlier plans of the pass are carried out."""

    _states: dict[DeviceKey, DeviceState]
    _running: Mapping[str, Running]
    #: Host memory for suspended processes, by `Device.host`.
    _host_bytes: dict[str, int]
    _now_s: float
    _most: float
    _refuses: Callable[[Request, str], bool]
    #: Devices that later plans may not use.
    _kept: set[DeviceKey] = field(default_factory=set, init=False)
    #: Devices and suspended tasks of the plans so far.
    _taken: set[DeviceKey] = field(default_factory=set, init=False)
    _suspended: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        for state in self._states.values():
            for held in state.reservations:
                task = self._running.get(held.request_id)
                if task is not None and (task.suspended_for or task.leaves) and not task.away:
                    self._host_bytes[state.device.host] -= task.moved_bytes

    def keep(self, request: Request) -> None:
        """Exclude the devices where a request is expected to start soonest from later plans."""
        times = ((at_s, s.device.key) for s, at_s in self._times(request, self._usable(request)))
        self._kept.update(key for _, key in sorted(times)[: request.count])

    def choose(self, request: Request) -> Plan | None:
        """Return and book the plan for a request; `None`: no suspension helps."""
        usable = self._usable(request)
        # The need of a shared probe is not known, so neither is the memory to free for it.
        if any(placement.shares(request, state) for state in usable):
            return None
        ready = sorted(at_s for _, at_s in self._times(request, usable))
        wait_s = ready[request.count - 1] - self._now_s if len(ready) >= request.count else math.inf
        by_node: dict[str, list[_Choice]] = {}
        for state in usable:
            if (choice := self._cheapest(request, state, wait_s)) is not None:
                by_node.setdefault(state.device.host, []).append(choice)
        # The sort is stable: equal devices stay in the tag's order.
        sets = [
            sorted(choices, key=lambda choice: _rank([choice]))[: request.count]
            for choices in by_node.values()
            if len(choices) >= request.count
        ]
        best = min((s for s in sets if self._allows(request, s, wait_s)), key=_rank, default=[])
        if all(choice.task is None for choice in best):
            # No choice, or the request waits for something else than devices.
            return None
        order = [state.device.key for state in usable]
        return self._carry_out(request, sorted(best, key=lambda choice: order.index(choice.key)))

    def _usable(self, request: Request) -> list[DeviceState]:
        """Return the devices that a plan for a request may use, in the order of the request's tag."""
        return [
            state
            for state in placement.devices_of(request, list(self._states.values()))
            if state.device.key not in self._kept
            and not state.snapshot.error
            and not self._refuses(request, state.device.host)
            and placement.could_hold(request, state)
        ]

    def _times(
        self, request: Request, states: Iterable[DeviceState]
    ) -> Iterator[tuple[DeviceState, float]]:
        """Yield each device with a known expected start of a request, and that time in monotonic seconds."""
        for state in states:
            held = tuple(replace(r, ends_s=self._end_s(r)) for r in state.reservations)
            at_s = ready_s(request, replace(state, reservations=held), self._now_s, self._most)
            if at_s is not None:
                yield state, at_s

    def _end_s(self, reservation: Reservation) -> float | None:
        """Return the monotonic seconds when a reservation is expected to end; `None`: not known."""
        task = self._running.get(reservation.request_id)
        if task is None:
            return reservation.ends_s
        known_s = reservation.ends_s
        return self._now_s + abs(self._now_s - (task.since_s if known_s is None else known_s))

    def _cheapest(self, request: Request, state: DeviceState, wait_s: float) -> _Choice | None:
        """Return the cheapest choice on a device, at most one task suspended; `None`: to wait for `wait_s` costs less."""
        key = state.device.key
        if self._fits(request, state):
            return _Choice(key)
        found: list[_Choice] = []
        for held in sorted(state.reservations, key=lambda held: held.request_id):
            task = self._running.get(held.request_id)
            if task is None or not self._may_go(task, held, request):
                continue
            if not self._fits(request, _without(state, held)):
                continue
            moves = self._destination(task, held, self._states, {key}) is not None
            choice = _Choice(key, task, held, moves)
            if moves or task.priority < request.priority:
                if self._allows(request, [choice], wait_s):
                    found.append(choice)
        return min(found, key=lambda choice: _rank([choice]), default=None)

    def _fits(self, request: Request, state: DeviceState) -> bool:
        return placement.fits_now(request, state) and len(state.reservations) < self._most

    def _may_go(self, task: Running, held: Reservation, request: Request) -> bool:
        """Return whether the state of a task allows its suspension for a request, whatever the cost."""
        if task.suspended_for or task.request_id in self._suspended:
            # An asked task belongs to the request that it is suspended for.
            return task.suspended_for == request.id
        if not task.preemptible or task.away or self._now_s < task.rests_until_s:
            return False
        ends_s = self._end_s(held)
        # The task is not suspended if it is expected to end before its memory would be out.
        return ends_s is None or ends_s - self._now_s >= out_s(task.moved_bytes)

    def _allows(self, request: Request, choices: Sequence[_Choice], wait_s: float) -> bool:
        """Return whether the host has room for the suspended memory, and the wait saved is longer than the cost."""
        new = _new(choices)
        host = self._states[choices[0].key].device.host
        # The request's own process needs host memory, too.
        room_bytes = max(0, self._host_bytes[host] - request.host_bytes)
        if sum(task.moved_bytes for task in new) > room_bytes:
            return False
        lost_s = _cost_s(task for task in new if task.priority >= request.priority)
        return not new or wait_s - sum(out_s(task.moved_bytes) for task in new) > lost_s

    def _destination(
        self,
        task: Running,
        held: Reservation,
        states: Mapping[DeviceKey, DeviceState],
        taken: Container[DeviceKey],
    ) -> DeviceKey | None:
        """Return the fullest device outside `taken` that has room for a task's return now; `None`: no device has."""
        fits = [
            (state.free_bytes, key)
            for key in task.devices
            if key not in taken
            and key not in self._taken
            and key not in self._kept
            and (state := states.get(key)) is not None
            and placement.is_open(state)
            and not (held.exclusive and state.reservations)
            and state.free_bytes >= held.reserved_bytes
            and len(state.reservations) < self._most
        ]
        return min(fits)[1] if fits else None

    def _carry_out(self, request: Request, chosen: Sequence[_Choice]) -> Plan | None:
        """Book and return a plan; `None`: other devices do not have room for all tasks that must be moved."""
        states, keys = dict(self._states), tuple(choice.key for choice in chosen)
        suspended: dict[str, bool] = {}
        pairs = [(each.task, each.held) for each in chosen if each.task and each.held]
        # The largest task first: it fits on the fewest devices.
        for task, held in sorted(pairs, key=lambda p: (-p[1].reserved_bytes, p[0].request_id)):
            to = self._destination(task, held, states, keys)
            if to is not None:
                states[to] = states[to].after(replace(held, machine=to[0], device_uuid=to[1]))
            elif task.priority >= request.priority:
                return None
            suspended[task.request_id] = to is not None
            states[held.device_key] = _without(states[held.device_key], held)
        for task in _new(chosen):
            self._host_bytes[states[keys[0]].device.host] -= task.moved_bytes
        for key in keys:
            booked = placement.reservation_for(request, states[key], self._now_s)
            states[key] = states[key].after(booked)
        self._states = states
        self._taken.update(keys)
        self._suspended.update(suspended)
        return Plan(request.id, keys, suspended)


def _without(state: DeviceState, held: Reservation) -> DeviceState:
    """Return a device's state with one reservation removed and its bytes free."""
    left = tuple(each for each in state.reservations if each != held)
    free_bytes = state.free_bytes + held.reserved_bytes
    return replace(state, reservations=left, free_bytes=free_bytes, probe_bytes=None)
