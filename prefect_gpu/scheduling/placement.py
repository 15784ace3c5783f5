"""Whether a request fits a device now, later or never, and the choice of devices for a request.

Pure. `Board` has the devices of one scheduling pass. `scheduling_pass` decides when a request is considered and checks
the host resources of nodes; `backfill` keeps devices for blocked requests.

Devices with room for a request are preferred in this order: not busy (a task on a busy device is slow for as long as it
runs); first in `gpu:device`; on a node with a ready standby of the request's kind (saves the seconds of imports); by
placement style. No request waits for a preferred device while another device has room for it.

A device has no room for a second task that keeps it busy by itself (`crowds`): by turns both would take twice as long,
and hold their memory as long. So each has a device of its own, or they run one after another.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, TypeAlias

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, ModelBudgets, Placement, Request, Reservation
from prefect_gpu.scheduling.probes import allowance_bytes, offered_bytes, probe_of
from prefect_gpu.scheduling.reasons import Reason, WaitKind, shown_bytes, shown_names
from prefect_gpu.units import GIB, format_bytes

#: A device that computes for a larger fraction of the time is busy: one more task would slow down all tasks there.
BUSY_FRACTION = 0.8

#: Most devices or nodes that a message about a cluster lists.
MOST_LISTED = 16

#: Function that returns whether a request may have the device at a position in `Board.states`.
Allows: TypeAlias = Callable[[int, Request], bool]

#: Devices that a request's tags name: position in `Board.states` to position of the name in `gpu:device`. Devices of
#: several nodes may share a name. Without `gpu:device`, the position in the tag is 0.
Named: TypeAlias = Mapping[int, int]


class Board:
    """All devices of one scheduling pass, each identified by its position in `states`. Placements are booked on the board.

    Args:
        states: All devices, from one reading.
        style: `spread` prefers the device with most free memory: on large devices tasks slow each other down
            long before memory runs out. `pack` prefers the device with least.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        around: Reservations of the GPU tasks inside which this process runs. They do not count as tasks.
        least_bytes: Least bytes that a waiting request asks for: a device with less free memory is not considered.
        standbys: Number of standbys that wait for a task, by kind (`Request.standby`) and node.
    """

    def __init__(
        self,
        states: Iterable[DeviceState],
        style: PlacementStyle = "spread",
        max_tasks: int | None = None,
        around: Iterable[Reservation] = (),
        least_bytes: int = 0,
        standbys: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        self.states = list(states)
        #: `standbys` without the ones that placements of this pass use; no number is 0.
        self._standbys = {
            kind: {node: count for node, count in nodes.items() if count > 0}
            for kind, nodes in standbys.items()
        }
        self._max_tasks = max_tasks
        self._around = Counter(reservation.device_key for reservation in around)
        self._sign = -1 if style == "spread" else 1
        self._least_bytes = least_bytes
        #: Sort key and position of the devices that can take another task, preferred first: not busy, and busy.
        self._open: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for at, state in enumerate(self.states):
            if state.room_bytes >= least_bytes and self._takes_more(state):
                self._open[_is_busy(state)].append((self._sign * state.room_bytes, at))
        for order in self._open:
            order.sort()
        #: By number of devices: see `_capacity_bytes`.
        self._capacities: dict[int, int] = {}

    @cached_property
    def several_nodes(self) -> bool:
        """Whether the devices are on more than one node."""
        return len(self.nodes) > 1

    @cached_property
    def nodes(self) -> Mapping[str, Sequence[int]]:
        """Positions in `states` of each node's devices, by node name."""
        nodes: dict[str, list[int]] = {}
        for at, state in enumerate(self.states):
            nodes.setdefault(state.snapshot.device.host, []).append(at)
        return nodes

    @cached_property
    def positions(self) -> Mapping[DeviceKey, int]:
        """Position in `states` of each device, by device key."""
        return {state.snapshot.device.key: at for at, state in enumerate(self.states)}

    def named(self, request: Request) -> Named | None:
        """Return the devices that a request's tags name; `None`: any.

        Raises:
            PlacementError: A named device or node does not exist.
        """
        if not request.devices and not request.nodes:
            return None
        found = _select(request, self.states_of(request))
        if not request.devices and len(found) == len(self.states):
            return None
        return {self.positions[state.device.key]: place for state, place in found}

    def states_of(self, request: Request) -> Sequence[DeviceState]:
        """Return the devices of the nodes that a request names; all devices if it names none or a missing node."""
        if not request.nodes or not all(name in self.nodes for name in request.nodes):
            return self.states
        return [self.states[at] for name in request.nodes for at in self.nodes[name]]

    def surely_fits(self, request: Request) -> bool:
        """Return `True` if a request certainly fits once all devices are empty; `False`: not known."""
        if request.devices or request.nodes or isinstance(request.memory, ModelBudgets):
            return False
        return least_bytes(request) <= self._capacity_bytes(request.count) > 0

    def _capacity_bytes(self, count: int) -> int:
        """Return the bytes that each of `count` empty devices of one node could hold; 0: no node has so many devices."""
        if count not in self._capacities:
            # The node's name plays no part for one device.
            nodes = (
                self.nodes.values()
                if count > 1 and self.several_nodes
                else [range(len(self.states))]
            )
            sizes = ([self.states[at].capacity_bytes for at in node] for node in nodes)
            self._capacities[count] = max(
                (heapq.nlargest(count, node)[-1] for node in sizes if len(node) >= count), default=0
            )
        return self._capacities[count]

    def could_use(self, request: Request, named: Named | None, at: int) -> bool:
        """Return whether a device could be one of a request's devices (all of one node) once all tasks have ended."""
        holds = self._holding(request, named, (at,))
        if holds and request.count > 1 and self.several_nodes:
            on_node = self.nodes[self.states[at].device.host]
            return len(self._holding(request, named, on_node)) >= request.count
        return bool(holds)

    def usable(self, request: Request, named: Named | None) -> Iterator[int]:
        """Yield the devices for which `could_use` is true."""
        alone = request.count == 1 or not self.several_nodes
        groups = [range(len(self.states))] if alone else self.nodes.values()
        for group in groups:
            found = self._holding(request, named, group)
            if alone or len(found) >= request.count:
                yield from found

    def _holding(self, request: Request, named: Named | None, places: Iterable[int]) -> list[int]:
        allowed = places if named is None else [at for at in places if at in named]
        return [at for at in allowed if could_hold(request, self.states[at])]

    def max_tasks_on(self, state: DeviceState) -> float:
        """Return the most reservations allowed on a device; infinite: as many as fit."""
        if self._max_tasks is None:
            return math.inf
        return self._max_tasks + self._around[state.device.key]

    def most_free_bytes(self) -> int:
        """Return the free bytes of the emptiest device that can take another task; less than 0: no device can."""
        ends = 0 if self._sign < 0 else -1
        return max((self._sign * order[ends][0] for order in self._open if order), default=-1)

    def choose(
        self,
        request: Request,
        named: Named | None = None,
        allows: Allows = lambda at, request: True,
    ) -> list[int] | None:
        """Return devices of one node that can hold a request now, by the preference of this module; `None`: it must wait.

        Of several nodes, the node with the best least-preferred device is chosen: a task on several devices is as slow as
        its slowest device. The caller has called `check_possible` for the request.
        """
        if named is not None:
            return self._choose_named(request, named, allows)
        if ready := self._standbys.get(request.standby):
            for orders in (self._open[:1], self._open):
                for nodes in (ready, None):
                    if chosen := self._first_of_one_node(request, orders, allows, nodes):
                        return chosen
            return None
        return self._first_of_one_node(request, self._open, allows)

    def _first_of_one_node(
        self,
        request: Request,
        orders: Iterable[Sequence[tuple[int, int]]],
        allows: Allows,
        nodes: Container[str] | None = None,
    ) -> list[int] | None:
        """Return the first fitting devices of sorted lists, `request.count` of one node; `nodes` limits the nodes."""
        by_node: dict[str, list[int]] = {}
        for order in orders:
            for at in self._prefer(request, order, allows, nodes):
                on_node = by_node.setdefault(self.states[at].device.host, [])
                on_node.append(at)
                if len(on_node) == request.count:
                    return on_node
        return None

    def _choose_named(self, request: Request, named: Named, allows: Allows) -> list[int] | None:
        """Return the fitting named devices that come first in the tag, by preference among devices of one name."""
        ready = self._standbys.get(request.standby, ())
        by_node: dict[str, list[tuple[bool, int, bool, int, int]]] = {}
        for at, place in named.items():
            if not allows(at, request) or not self.fits(request, at):
                continue
            state = self.states[at]
            left = state.room_bytes - (need_bytes(request, state) or 0)
            node = state.device.host
            rank = (_is_busy(state), place, node not in ready, self._sign * left, at)
            by_node.setdefault(node, []).append(rank)
        count = request.count
        found = [sorted(ranks)[:count] for ranks in by_node.values() if len(ranks) >= count]
        if not found:
            return None
        best = min(found, key=lambda ranks: ranks[-1])
        if request.devices:
            best.sort(key=lambda rank: rank[1])
        return [at for *_, at in best]

    def fits(self, request: Request, at: int) -> bool:
        """Return whether a device has memory for a request now, and may have another task."""
        return fits_now(request, self.states[at]) and self._takes_more(self.states[at])

    def close(self, nodes: Collection[str]) -> None:
        """Exclude the devices of `nodes` from now on, except for requests that name devices or nodes."""
        closed = {at for node in nodes for at in self.nodes.get(node, ())}
        for order in self._open if closed else ():
            order[:] = [each for each in order if each[1] not in closed]

    def place(self, request: Request, chosen: Sequence[int], now_s: float = 0.0) -> Placement:
        """Book a request on devices chosen by `choose`; return its placement on them, in that order."""
        reservations: list[Reservation] = []
        # A probe has one cap for all its devices: frameworks that take a fraction take the same fraction of each.
        caps = [
            offered_bytes(request, self.states[at], least_whole_bytes(self.states[at]))
            for at in chosen
            if shares(request, self.states[at])
        ]
        cap = min((each for each in caps if each is not None), default=None)
        for at in chosen:
            reservations.append(reservation_for(request, self.states[at], now_s, cap))
            self._book(at, reservations[-1])
        # The placed request uses one ready standby of its node.
        node, ready = self.states[chosen[0]].device.host, self._standbys.get(request.standby, {})
        if node in ready:
            ready[node] -= 1
            if not ready[node]:
                del ready[node]
        return Placement(
            request.id,
            tuple(self.states[at].snapshot.device for at in chosen),
            tuple(reservation.reserved_bytes for reservation in reservations),
            tuple(reservations),
        )

    def _book(self, at: int, reservation: Reservation) -> None:
        state = self.states[at]
        order = self._open[_is_busy(state)]
        place = bisect.bisect_left(order, (self._sign * state.room_bytes, at))
        if place < len(order) and order[place][1] == at:
            del order[place]
        self.states[at] = state = state.after(reservation)
        if state.room_bytes >= self._least_bytes and self._takes_more(state):
            bisect.insort(order, (self._sign * state.room_bytes, at))

    def _prefer(
        self,
        request: Request,
        order: Sequence[tuple[int, int]],
        allows: Allows,
        nodes: Container[str] | None,
    ) -> Iterator[int]:
        """Yield the fitting devices of a sorted list, preferred first; `nodes` limits the nodes."""
        # If a request asks for the same bytes of each device, all fitting devices are at one end of the list.
        same, least = type(request.memory) is int, least_bytes(request)
        first = 0 if self._sign < 0 else bisect.bisect_left(order, (least, -1))
        found: list[tuple[int, int]] = []
        for key, at in order[first:] if first else order:
            if self._sign < 0 and -key < least:
                break
            if not allows(at, request):
                continue
            state = self.states[at]
            if nodes is not None and state.device.host not in nodes:
                continue
            if not fits_now(request, state):
                continue
            if same:
                yield at
            else:
                # The need differs by device, so devices are sorted by the memory that stays free.
                found.append((key - self._sign * (need_bytes(request, state) or 0), at))
        yield from (at for _, at in sorted(found))

    def _takes_more(self, state: DeviceState) -> bool:
        """Return whether a device may have another task, without a check of its memory."""
        if self._max_tasks is not None and len(state.reservations) >= self.max_tasks_on(state):
            return False
        return is_open(state)


def _is_busy(state: DeviceState) -> bool:
    busy = state.snapshot.busy_fraction
    return busy is not None and busy > BUSY_FRACTION


#: Which of several fitting devices is preferred; see `Board`.
PlacementStyle = Literal["spread", "pack"]

#: Least free bytes for a task that gets a device to itself: a context alone takes 0.5 to 1.2 GiB (measured on an H200
#: with PyTorch and TensorFlow). On small devices, a quarter of the device is enough.
LEAST_WHOLE_BYTES = 2 * GIB


def select_devices(request: Request, states: Sequence[DeviceState]) -> list[DeviceState]:
    """Return the devices that a request may use, in the order of its tag.

    Raises:
        PlacementError: A named device or node does not exist.
    """
    if not request.devices and not request.nodes:
        return list(states)
    return [state for state, _ in _select(request, states)]


def devices_of(request: Request, states: Sequence[DeviceState]) -> list[DeviceState]:
    """Return the result of `select_devices`; empty: a named device or node does not exist, so the next pass refuses it."""
    try:
        return select_devices(request, states)
    except PlacementError:
        return []


def _select(request: Request, states: Sequence[DeviceState]) -> list[tuple[DeviceState, int]]:
    """Return the devices that a request may use, each with the position of its name in `gpu:device`, from 0."""
    there = dict.fromkeys(state.device.host for state in states)
    for name in request.nodes:
        if name not in there:
            raise PlacementError(
                f"gpu:node={name} names no node of this runner; accepted: {_join(there)}"
            )
    if request.nodes:
        states = [state for state in states if state.device.host in request.nodes]
    if not request.devices:
        return [(state, 0) for state in states]
    chosen: dict[DeviceKey, tuple[DeviceState, int]] = {}
    for place, name in enumerate(request.devices):
        matches = _find_named(name, states)
        # An index may name one device of each node.
        most = len({state.device.host for state in matches}) if name.isdigit() else 1
        if not 0 < len(matches) <= most:
            raise _misnamed(request, name, len(matches), states)
        for match in matches:
            if match.device.key in chosen:
                raise PlacementError(
                    f"gpu:device={','.join(request.devices)} names {match.device.label} "
                    f"twice; name each device once"
                )
            chosen[match.device.key] = match, place
    return list(chosen.values())


def _find_named(name: str, states: Sequence[DeviceState]) -> list[DeviceState]:
    if name.isdigit():
        return [state for state in states if state.device.index == int(name)]
    node, _, index = name.rpartition(":")
    if node and index.isdigit():
        on_node = [state for state in states if state.device.host == node]
        if found := [state for state in on_node if state.device.index == int(index)]:
            return found
    name = name.lower()
    found = [state for state in states if state.device.uuid.lower().startswith(name)]
    # "SIM-1" is a whole UUID and the beginning of "SIM-10": the whole UUID counts.
    return [state for state in found if state.device.uuid.lower() == name] or found


def _misnamed(
    request: Request, name: str, matches: int, states: Sequence[DeviceState]
) -> PlacementError:
    """Return the error for a device name with no match, or with more than one."""
    devices = [state.device for state in states]
    in_cluster = any(device.in_cluster for device in devices)
    problem = "names more than one device" if matches else "names no device"
    where = f" on node {_join(request.nodes)}" if request.nodes else ""
    with_node = f", a node and an index as in {devices[0].label}" if in_cluster else ""
    texts = [f"{each.label if in_cluster else each.index}: {each.uuid}" for each in devices]
    return PlacementError(
        f"gpu:device={name} {problem} of this runner{where}; accepted: an index from 0 to "
        f"{max((device.index for device in devices), default=0)}{with_node}, or the beginning of a UUID",
        _shorten(texts) if in_cluster else tuple(texts),
    )


def _join(names: Collection[str]) -> str:
    return ", ".join(_shorten(list(names)))


def _shorten(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the first `MOST_LISTED` texts, followed by the number of other texts."""
    more = len(texts) - MOST_LISTED
    return (*texts[:MOST_LISTED], f"and {more} more") if more > 0 else tuple(texts)


def least_bytes(request: Request) -> int:
    """Return the bytes that a request asks of each device; 0: they depend on the device."""
    return request.memory if type(request.memory) is int else 0


def need_bytes(request: Request, state: DeviceState) -> int | None:
    """Return the bytes that a request asks of one device; `None`: all free memory.

    A fraction is of the device's total, limited to its capacity: 100 % is the memory that driver and headroom leave.
    """
    if type(request.memory) is int:
        # The usual case: a pass asks a hundred times for each placed task (benchmarks/placement.py).
        return request.memory
    need = request.need_bytes(state.device)
    if need is not None and isinstance(request.memory, float):
        return min(need, state.capacity_bytes)
    return need


def reservation_for(
    request: Request, state: DeviceState, now_s: float, cap_bytes: int | None = None
) -> Reservation:
    """Return the reservation of a request that starts now on a device. `cap_bytes`: of a probe that shares the device."""
    need = need_bytes(request, state) if cap_bytes is None else cap_bytes
    return Reservation(
        request.id,
        *state.device.key,
        state.free_bytes if need is None else need,
        request.exclusive or need is None,
        request.task_name,
        None if request.expected_s is None else now_s + request.expected_s,
        probe=None if cap_bytes is None else probe_of(request, state, cap_bytes, now_s),
        fills=request.fills,
    )


def check_possible(request: Request, states: Sequence[DeviceState]) -> None:
    """Raise `PlacementError` if a request can never be placed, even on empty devices. `states` has all devices."""
    eligible = select_devices(request, states)
    several = len({state.device.host for state in eligible}) > 1
    # The devices of one request must be of one group.
    groups: dict[str, list[DeviceState]] = {}
    for state in eligible:
        groups.setdefault(state.device.host if request.count > 1 else "", []).append(state)
    most = max(groups.values(), key=len, default=eligible)
    if request.count > len(most):
        among = f"{len(most)} {'named' if request.devices else 'here'}"
        where = (
            f"one node has ({among}, on {most[0].device.host})"
            if several
            else f"there are ({among})"
        )
        raise PlacementError(
            f"gpu:count={request.count} asks for more devices than {where}; lower the count or name other devices",
            _describe_each(eligible),
        )
    holding = [[each for each in group if could_hold(request, each)] for group in groups.values()]
    fitting = max(holding, key=len)
    if len(fitting) >= request.count:
        return
    if request.memory is None and not fitting:
        raise PlacementError(
            f"no device here has memory left to give beside its headroom, so {request.task_name!r} can never start; "
            "lower the headroom or name other devices",
            _describe_each(eligible),
        )
    need = max(need_bytes(request, state) or 0 for state in eligible)
    largest = max(eligible, key=lambda state: state.capacity_bytes)
    usable = f"{largest.device.label}, {format_bytes(largest.capacity_bytes)} usable"
    problem = f"larger than any device here (largest: {usable})"
    if fitting:
        of_node, on = (" of one node", f" (on {fitting[0].device.host})") if several else ("", "")
        problem = (
            f"asked on {request.count} devices{of_node}, and only {len(fitting)} could hold it{on}"
        )
    raise PlacementError(
        f"gpu:memory={format_bytes(need)} is {problem}; lower the tag or name other devices",
        _describe_each(eligible),
    )


def could_hold(request: Request, state: DeviceState) -> bool:
    """Return whether a device could hold a request once all its tasks have ended."""
    return 0 < state.capacity_bytes >= (need_bytes(request, state) or 0)


def fits_now(request: Request, state: DeviceState) -> bool:
    """Return whether a device has memory for a request now, and no task that excludes it."""
    if not is_open(state) or crowds(request, state.reservations):
        return False
    if shares(request, state):
        return offered_bytes(request, state, least_whole_bytes(state)) is not None
    need = need_bytes(request, state)
    if (need is None or request.exclusive) and state.reservations:
        return False
    return state.free_bytes >= (least_whole_bytes(state) if need is None else need)


def crowds(request: Request, held: Iterable[Reservation]) -> bool:
    """Return whether a request that fills a device would join another one that does.

    Its ancestors wait for it. An urgent one does not wait: a part of a device now is more than all of it later.
    """
    return (request.fills and request.priority <= 0) and any(
        each.fills and each.request_id not in request.ancestors for each in held
    )


def shares(request: Request, state: DeviceState) -> bool:
    """Return whether a request is a probe (first run, need unknown on this device) that may share the device."""
    if not request.probe_fraction or request.exclusive:
        return False
    return request.confirms_probe or request.need_bytes(state.device) is None


def least_whole_bytes(state: DeviceState) -> int:
    """Return the least free bytes of a device for a task that asks for the whole device."""
    return min(LEAST_WHOLE_BYTES, state.capacity_bytes // 4)


def is_open(state: DeviceState) -> bool:
    """Return whether a device works and has no exclusive task."""
    return not state.snapshot.error and not any(each.exclusive for each in state.reservations)


def _describe_each(states: Sequence[DeviceState]) -> tuple[str, ...]:
    """Return the capacity of each device as text for an error message; in a cluster, of the first devices only."""
    texts = [
        f"{state.device.label}: "
        + (state.snapshot.error or f"{format_bytes(state.capacity_bytes)} usable")
        for state in states
    ]
    return _shorten(texts) if states and states[0].device.in_cluster else tuple(texts)


def device_reason(
    request: Request, states: Sequence[DeviceState], max_tasks: int | None = None
) -> Reason:
    """Return why a request waits for devices. `states` are all devices that it may use; `max_tasks` as for `Board`."""
    needs = {need_bytes(request, state) for state in states}
    probes = None in needs and any(shares(request, state) for state in states)
    if probes:
        needs = {min(allowance_bytes(state) for state in states)}
    nodes = {state.device.host for state in states if state.device.in_cluster}
    one, working = states[0].device, [state for state in states if not state.snapshot.error]
    asked = partial(
        Reason,
        need_bytes=() if None in needs else tuple(sorted(n for n in needs if n is not None)),
        count=request.count,
        devices=len(states),
        nodes=len(nodes),
        where=one.label if len(states) == 1 else one.node or None,
    )
    if not working:
        return asked(WaitKind.DEVICE_ERROR, at=one.label, detail=states[0].snapshot.error)
    if max_tasks is not None and all(len(state.reservations) >= max_tasks for state in working):
        return asked(WaitKind.DEVICE_TASKS, limit=max_tasks)
    held = [reservation for state in states for reservation in state.reservations]
    alone = None in needs or request.exclusive
    if held and (alone or not any(is_open(state) for state in states)):
        kind = WaitKind.EMPTY_DEVICE if alone else WaitKind.EXCLUSIVE_TASK
        return asked(kind, tasks=shown_names(sorted(each.task_name for each in held)))

    crowded = [state for state in working if crowds(request, state.reservations)]
    if any(fits_now(replace(request, fills=False), state) for state in crowded):
        there = (each.task_name for state in crowded for each in state.reservations if each.fills)
        return asked(WaitKind.BUSY_DEVICE, tasks=shown_names(sorted(there)))

    def free_bytes(state: DeviceState) -> int:
        return shown_bytes(state.free_for_probes_bytes if probes else state.free_bytes)

    most = max(working, key=free_bytes)
    at = most.device.label if nodes and len(states) > 1 else None
    first = () if probes else shown_names(each.task_name for each in held if each.probe is not None)
    enough = WaitKind.RESERVED_MEMORY if first else WaitKind.DEVICE_MEMORY
    kind = WaitKind.FIRST_RUN_MEMORY if probes else enough
    return asked(kind, free_bytes=free_bytes(most), at=at, tasks=first)
