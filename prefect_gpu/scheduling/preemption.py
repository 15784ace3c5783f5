"""Which running tasks are suspended or moved so that a blocked request can start.

A suspended process has its device memory on the host; it comes back through the queue. A moved one comes back at once
on another device of the same model. Both need a process that may be moved at all, which is decided elsewhere
(`suspension.eligibility`), as is how it is done.

- A task is suspended only for a request of higher priority. It may be moved for any, if the wait that is saved is
  longer than the moves of those that are not of lower priority.
- Where a task can be moved it is not suspended: it goes on at once.
- The cost of a plan is the seconds of its moves, out and in. What is on its way already costs nothing, so a plan stays
  the same while nothing else changes.
- No more tasks go than are needed: without any one of them the request would not start.

A task of which the end is not known is expected to run for as long again as it has run; one that is overdue, for as
long again as it is overdue. Pure: it decides over values, as all of this folder does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NamedTuple

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import ready_s
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.placement import (
    could_hold,
    is_open,
    least_whole_bytes,
    need_bytes,
    select_devices,
    shares,
)
from prefect_gpu.scheduling.scheduling_pass import Shape
from prefect_gpu.units import GIB

#: Bytes a second from a device to the host and back: 32 GiB took 15 to 18 s out and 5.4 to 7.4 s in (H200, driver
#: 580.159.04), the slowest of which counts. Seconds for a context alone: 0.48 to 0.65 out, 0.27 to 0.29 in.
OUT_BYTES_S, IN_BYTES_S = 1.7 * GIB, 4.4 * GIB
FIXED_OUT_S, FIXED_IN_S = 0.5, 0.3

#: Bytes of the machine's memory that no suspended process takes: what the kernel calls available is an estimate.
HOST_MARGIN_BYTES = 2 * GIB

#: Requests for which tasks go at the same time.
HEADS = 4

#: Most tasks on a device of which each combination is considered: 70 at most are not contained in one another.
EXACT = 8

#: Most combinations of devices of a node that are considered for a request for several.
MOST_COMBINATIONS = 16

#: Seconds away that raise the priority of a return by one.
AGING_S = 600.0

#: Seconds after a return or a move in which a task is not asked again, so that it gets something done.
REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A task that holds devices, as far as that decides whether it is suspended or moved."""

    request_id: str
    priority: int
    preemptible: bool
    #: What it holds. While it is moved: first on the device that it leaves, then on the one where it comes back.
    reservations: tuple[Reservation, ...]
    #: Devices that it may come back on; only its own where a tag pins it, or the driver cannot move it to another.
    devices: tuple[DeviceKey, ...]
    #: Bytes that a move has to carry.
    moved_bytes: int
    #: Monotonic seconds of its placement.
    since_s: float
    #: Monotonic seconds before which it is not asked.
    rests_until_s: float = 0.0
    #: The request that it goes for; empty: none.
    suspended_for: str = ""
    #: Its memory is on the host.
    away: bool = False
    #: It goes for the first runs beside it; see `probes`.
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes so that one request can start.

    A plan may count on room that an earlier plan of the same pass leaves. It is carried out once all that goes is away
    and the request fits.
    """

    request_id: str
    #: Where the request is to start.
    devices: tuple[DeviceKey, ...]
    #: Each task that goes, by request id, and the device where it comes back at once; `None`: it waits in the queue.
    going: Mapping[str, DeviceKey | None]


def aged_priority(request: Request, away_s: float) -> int:
    """Return the priority at which a suspended task asks to come back.

    Args:
        request: Of the task; its priority is that of its tag.
        away_s: Seconds for which it has been away.
    """
    return request.priority + int(away_s // AGING_S)


def out_s(moved_bytes: int) -> float:
    """Return the seconds that memory of a process takes from a device to the host."""
    return FIXED_OUT_S + moved_bytes / OUT_BYTES_S


def in_s(moved_bytes: int) -> float:
    """Return the seconds that memory of a process takes from the host to a device."""
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
    """Return what goes for the first blocked requests that this helps, at most `HEADS` new ones.

    It is made anew in each pass. A task that was asked to go for a request, and is in no plan of that request any
    more, is to be let go on.

    The first request that cannot be helped, and each suspended task that waits for its return, keep the devices where
    they are expected to start soonest from the plans of later requests.

    Args:
        blocked: Requests of all brokers that wait for devices after a scheduling pass, in the order of the queue.
        states: All devices after the placements of the pass.
        running: Tasks that hold devices, by request id.
        host_room_bytes: Bytes of each machine's own memory that processes could use now, less what is still to come of
            tasks that were let go while their memory was on its way out; by `Device.host`.
        now_s: Monotonic seconds.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        refuses: Returns whether no process may start for a request on a node now.
    """
    asked = {task.suspended_for for task in running.values() if task.suspended_for}
    if not asked and not any(task.preemptible for task in running.values()):
        return []
    machine = _Machine(states, running, host_room_bytes, now_s, max_tasks, refuses)
    plans: list[Plan] = []
    helpless: set[tuple[int, Shape]] = set()
    for request in blocked:
        if request.returns:
            machine.keep(request)
        elif request.id in asked or len(plans) < HEADS:
            shape = request.priority, Shape.of(request)
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


class _Way(NamedTuple):
    """Tasks that go together. Those that were asked before cost nothing."""

    #: As `Plan.going`.
    going: Mapping[str, DeviceKey | None]
    #: Seconds until they are away, and until they are back.
    out_s: float = 0.0
    cost_s: float = 0.0
    #: Of `cost_s`, what tasks lose that are not of lower priority.
    lost_s: float = 0.0
    #: Bytes that come to the host.
    host_bytes: int = 0

    @property
    def rank(self) -> tuple[float, int, int]:
        """What the best is the least of: seconds, tasks that wait in the queue, tasks."""
        return self.cost_s, list(self.going.values()).count(None), len(self.going)

    def saves(self, wait_s: float) -> bool:
        """Return whether it is better than to wait for some seconds."""
        return not self.cost_s or wait_s - self.out_s > self.lost_s

    def plus(self, other: _Way) -> _Way:
        """Return both together."""
        return _Way(
            {**self.going, **other.going},
            self.out_s + other.out_s,
            self.cost_s + other.cost_s,
            self.lost_s + other.lost_s,
            self.host_bytes + other.host_bytes,
        )


class _Machine:
    """The devices as they are once earlier plans are carried out. Its arguments are those of `plan`."""

    def __init__(
        self,
        states: Iterable[DeviceState],
        running: Mapping[str, Running],
        host_room_bytes: Mapping[str, int],
        now_s: float,
        max_tasks: int | None,
        refuses: Callable[[Request, str], bool],
    ) -> None:
        self._states = {state.device.key: state for state in states}
        #: Until then: nothing is gone yet, and what is moved has its new place.
        self._meanwhile = dict(self._states)
        self._running = running
        self._now_s = now_s
        self._most = math.inf if max_tasks is None else max_tasks
        self._refuses = refuses
        #: By machine.
        self._host_bytes = {
            host: room_bytes - HOST_MARGIN_BYTES for host, room_bytes in host_room_bytes.items()
        }
        for task in running.values():
            state = self._states.get(task.reservations[0].device_key)
            if (task.suspended_for or task.leaves) and not task.away and state is not None:
                self._host_bytes[state.device.host] -= task.moved_bytes
        #: Devices that no later plan has.
        self._kept: set[DeviceKey] = set()

    def keep(self, request: Request) -> None:
        """Keep the devices where a request is expected to start soonest from later plans."""
        times = ((at_s, s.device.key) for s, at_s in self._times(request, self._usable(request)))
        self._kept.update(key for _, key in sorted(times)[: request.count])

    def choose(self, request: Request) -> Plan | None:
        """Choose what goes for a request, and book it; `None`: nothing, it waits."""
        usable = self._usable(request)
        # What a first run beside others needs is not known, so neither is what would have to go.
        if any(shares(request, state) for state in usable):
            return None
        ready = sorted(at_s for _, at_s in self._times(request, usable))
        wait_s = ready[request.count - 1] - self._now_s if len(ready) >= request.count else math.inf
        best: tuple[_Way, Sequence[DeviceKey]] | None = None
        for keys in self._device_sets(request, usable, wait_s):
            way = self._together(request, keys, wait_s)
            if way is not None and (best is None or way.rank < best[0].rank):
                best = way, keys
                if request.count > 1:
                    # Sets of several come in about the order of their cost.
                    break
        # If nothing has to go, it waits for something else.
        if best is None or not best[0].going:
            return None
        way, keys = best
        self._go(way)
        for key in keys:
            self._book(request, key)
        order = [state.device.key for state in usable]
        return Plan(request.id, tuple(sorted(keys, key=order.index)), way.going)

    def _usable(self, request: Request) -> list[DeviceState]:
        """Return the devices that a request may use, in the order of its tag."""
        try:
            found = select_devices(request, list(self._states.values()))
        except PlacementError:
            # The next pass refuses it.
            return []
        return [
            state
            for state in found
            if state.device.key not in self._kept
            and not state.snapshot.error
            and not self._refuses(request, state.device.host)
            and could_hold(request, state)
        ]

    def _times(
        self, request: Request, states: Iterable[DeviceState]
    ) -> Iterator[tuple[DeviceState, float]]:
        """Yield when devices are expected to have the room for a request, where that is known."""
        for state in states:
            held = tuple(replace(r, ends_s=self._end_s(r)) for r in state.reservations)
            at_s = ready_s(request, replace(state, reservations=held), self._now_s, self._most)
            if at_s is not None:
                yield state, at_s

    def _end_s(self, reservation: Reservation) -> float | None:
        """Return when a reservation is expected to end; `None`: not known."""
        task = self._running.get(reservation.request_id)
        if task is None:
            return reservation.ends_s
        known_s = reservation.ends_s
        return self._now_s + abs(self._now_s - (task.since_s if known_s is None else known_s))

    def _device_sets(
        self, request: Request, usable: Iterable[DeviceState], wait_s: float
    ) -> Iterator[Sequence[DeviceKey]]:
        """Yield sets of devices of one node, as many as a request asks for, likely the cheapest first."""
        if request.count == 1:
            yield from ((state.device.key,) for state in usable)
            return
        nodes: dict[str, list[tuple[tuple[float, int, int], DeviceKey]]] = {}
        for state in usable:
            key = state.device.key
            if (way := self._cheapest(request, key, (key,), wait_s)) is not None:
                nodes.setdefault(state.device.host, []).append((way.rank, key))
        for ranked in nodes.values():
            sets = combinations([key for _, key in sorted(ranked)], request.count)
            yield from islice(sets, MOST_COMBINATIONS)

    def _together(self, request: Request, keys: Sequence[DeviceKey], wait_s: float) -> _Way | None:
        """Return what goes for a request on some devices; `None`: there is no way."""
        if len(keys) == 1:
            return self._cheapest(request, keys[0], keys, wait_s)
        trial = copy.copy(self)
        trial._states, trial._meanwhile = dict(self._states), dict(self._meanwhile)
        trial._host_bytes = dict(self._host_bytes)
        together = _Way({})
        for key in keys:
            way = trial._cheapest(request, key, keys, wait_s)
            if way is None:
                return None
            trial._go(way)
            together = together.plus(way)
        return together if together.saves(wait_s) else None

    def _cheapest(
        self, request: Request, key: DeviceKey, taken: Collection[DeviceKey], wait_s: float
    ) -> _Way | None:
        """Return the cheapest way to have a request on a device; `None`: there is none.

        Args:
            request: What is asked.
            key: The device.
            taken: The devices of the request, where no task comes back.
            wait_s: Seconds for which it is expected to wait otherwise.
        """
        state = self._states[key]
        need = need_bytes(request, state)
        alone = need is None or request.exclusive
        missing = (least_whole_bytes(state) if need is None else need) - state.free_bytes
        must: list[Running] = []
        may: list[Running] = []
        for reservation in state.reservations:
            task = self._running.get(reservation.request_id)
            goes = task is not None and self._goes(task, request, key, taken)
            if task is not None and goes:
                (must if alone or reservation.exclusive else may).append(task)
            elif alone or reservation.exclusive:
                return None
        places = len(state.reservations) + 1 - self._most

        def is_enough(tasks: Sequence[Running]) -> bool:
            freed = sum(task.reservations[0].reserved_bytes for task in tasks)
            return freed >= missing and len(tasks) >= places

        def cost(tasks: Sequence[Running]) -> tuple[float, int]:
            new = (task.moved_bytes for task in tasks if not task.suspended_for)
            return sum(out_s(moved) + in_s(moved) for moved in new), len(tasks)

        sets = _least_sets(may, lambda some: is_enough((*must, *some)))
        host = state.device.host
        ways = (
            self._way(request, (*must, *s), host, taken, wait_s) for s in sorted(sets, key=cost)
        )
        return next((way for way in ways if way is not None), None)

    def _goes(
        self, task: Running, request: Request, key: DeviceKey, taken: Collection[DeviceKey]
    ) -> bool:
        """Return whether a task can go from a device for a request, by itself."""
        held = task.reservations[0]
        if task.suspended_for:
            # It is claimed by the request that it goes for, and stays asked whatever the time.
            return task.suspended_for == request.id and held.device_key == key
        resting = self._now_s < task.rests_until_s
        if not task.preemptible or task.away or resting or len(task.reservations) > 1:
            return False
        ends_s = self._end_s(held)
        if ends_s is not None and ends_s - self._now_s < out_s(task.moved_bytes):
            # It ends sooner by itself.
            return False
        if task.priority < request.priority:
            return True
        return self._destination(task, taken, self._states, self._meanwhile) is not None

    def _way(
        self,
        request: Request,
        tasks: Iterable[Running],
        host: str,
        taken: Collection[DeviceKey],
        wait_s: float,
    ) -> _Way | None:
        """Return how some tasks of a machine go together; `None`: one of them has nowhere to go, or to wait is better."""
        # The largest first: it has the fewest places.
        tasks = sorted(tasks, key=lambda t: (-t.reservations[0].reserved_bytes, t.request_id))
        way = _Way({})
        for task in tasks:
            if task.suspended_for != request.id:
                out = out_s(task.moved_bytes)
                cost = out + in_s(task.moved_bytes)
                lost = 0.0 if task.priority < request.priority else cost
                way = way.plus(_Way({}, out, cost, lost, task.moved_bytes))
        # The request's own process needs some of it, too.
        host_bytes = max(0, self._host_bytes[host] - request.host_bytes)
        if way.host_bytes > host_bytes or not way.saves(wait_s):
            return None
        states, meanwhile = dict(self._states), dict(self._meanwhile)
        going: dict[str, DeviceKey | None] = {}
        for task in tasks:
            if len(task.reservations) > 1:
                # It is moved already.
                to: DeviceKey | None = task.reservations[1].device_key
                if to in taken:
                    return None
            elif (to := self._destination(task, taken, states, meanwhile)) is not None:
                _move(task, to, states, meanwhile)
            elif task.priority >= request.priority:
                return None
            going[task.request_id] = to
        return way._replace(going=going)

    def _destination(
        self,
        task: Running,
        taken: Collection[DeviceKey],
        states: Mapping[DeviceKey, DeviceState],
        meanwhile: Mapping[DeviceKey, DeviceState],
    ) -> DeviceKey | None:
        """Return the device where a task can come back at once, the fullest one; `None`: there is none."""
        held = task.reservations[0]
        source = states[held.device_key].device

        def holds(state: DeviceState) -> bool:
            return (
                is_open(state)
                and not (held.exclusive and state.reservations)
                and state.free_bytes >= held.reserved_bytes
                and len(state.reservations) < self._most
            )

        fits = [
            (states[key].free_bytes, key)
            for key in task.devices
            if key in states
            and key not in (source.key, *taken, *self._kept)
            and (states[key].device.name, states[key].device.host) == (source.name, source.host)
            and holds(states[key])
            and holds(meanwhile[key])
        ]
        return min(fits)[1] if fits else None

    def _go(self, way: _Way) -> None:
        """Book that tasks go."""
        for request_id, to in way.going.items():
            task = self._running[request_id]
            held = task.reservations[0]
            state = self._states[held.device_key]
            left = tuple(r for r in state.reservations if r.request_id != request_id)
            free = state.free_bytes + held.reserved_bytes
            state = replace(state, reservations=left, free_bytes=free, probe_bytes=None)
            self._states[held.device_key] = state
            if to is not None and len(task.reservations) == 1:
                _move(task, to, self._states, self._meanwhile)
            if not task.suspended_for:
                self._host_bytes[state.device.host] -= task.moved_bytes

    def _book(self, request: Request, key: DeviceKey) -> None:
        """Book a request on a device."""
        state = self._states[key]
        need = need_bytes(request, state)
        ends_s = None if request.expected_s is None else self._now_s + request.expected_s
        self._states[key] = state.after(
            Reservation(
                request.id,
                *key,
                state.free_bytes if need is None else need,
                request.exclusive or need is None,
                request.task_name,
                ends_s,
            )
        )


def _move(task: Running, to: DeviceKey, *maps: dict[DeviceKey, DeviceState]) -> None:
    """Book a task where it comes back."""
    held = replace(task.reservations[0], machine=to[0], device_uuid=to[1])
    for states in maps:
        states[to] = states[to].after(held)


def _least_sets(
    tasks: Sequence[Running], is_enough: Callable[[Sequence[Running]], bool]
) -> Iterator[Sequence[Running]]:
    """Yield sets of tasks that are enough, and of which none could stay: all such sets, or a few where tasks are many."""
    if len(tasks) <= EXACT:
        tasks = sorted(tasks, key=lambda task: task.reservations[0].reserved_bytes)
        for size in range(len(tasks) + 1):
            for some in combinations(tasks, size):
                # If the smallest cannot stay, none can.
                if is_enough(some) and not (some and is_enough(some[1:])):
                    yield some
        return
    # Those first that free most in a second. What is on its way goes before them.
    ranked = sorted(
        tasks,
        key=lambda task: (
            not task.suspended_for,
            out_s(task.moved_bytes) / max(1, task.reservations[0].reserved_bytes),
        ),
    )
    yield from ([task] for task in ranked if is_enough([task]))
    chosen = next((ranked[:n] for n in range(len(ranked) + 1) if is_enough(ranked[:n])), None)
    if chosen is not None:
        for task in reversed(chosen):
            fewer = [each for each in chosen if each is not task]
            chosen = fewer if is_enough(fewer) else chosen
        yield chosen
