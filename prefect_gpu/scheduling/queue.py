"""Whose turn it is: which waiting requests start now, which can never, and why the rest wait.

Pure: a queue, the rooms of one tick and the machine's own memory go in; decisions come out. How a
device is chosen is in `placement`, how free memory is worked out in `memory`.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Memory, Placement, Request, Reservation
from prefect_gpu.scheduling.placement import (
    Choices,
    PlacementStyle,
    check_possible,
    could_hold,
    describe_wait,
    select_rooms,
)
from prefect_gpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What the machine itself has left for processes."""

    #: Bytes that new processes could use, as the kernel tells.
    available_bytes: int
    #: Bytes promised to processes that were started and have not taken them yet.
    promised_bytes: int
    #: Processes of ours that run.
    processes: int
    #: Most of them at a time.
    max_processes: int

    @property
    def full(self) -> bool:
        """Whether no process at all may start now."""
        return self.processes >= self.max_processes

    def refusal(self, request: Request) -> str:
        """Say why no process may start for `request` now; empty: it may."""
        if self.full:
            return f"{self.processes} processes run, and max_processes is {self.max_processes}"
        left = self.available_bytes - self.promised_bytes
        # With nothing of ours running, waiting would not bring memory back: an estimate alone must
        # not stop a flow forever.
        if self.processes and request.host_bytes > left:
            return (
                f"{format_bytes(request.host_bytes)} of the machine's own memory for its process; "
                f"{format_bytes(max(0, left))} available"
            )
        return ""

    def after(self, request: Request) -> HostRoom:
        """Give what is left once a process was started for `request`."""
        return HostRoom(
            self.available_bytes,
            self.promised_bytes + request.host_bytes,
            self.processes + 1,
            self.max_processes,
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one look at the queue decided."""

    placements: tuple[tuple[Request, Placement], ...]
    refusals: tuple[tuple[Request, PlacementError], ...]


def order_key(request: Request) -> tuple[int, int]:
    """Sort key of the queue: priority, then first come."""
    return -request.priority, request.sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a request that says which devices can hold it: equal shapes have equal chances."""

    memory: Memory
    #: 1 byte and 100 % are equal numbers.
    is_fraction: bool
    count: int
    devices: tuple[str, ...]
    exclusive: bool

    @classmethod
    def of(cls, request: Request) -> Shape:
        """Give the shape of a request."""
        return cls(
            request.memory,
            isinstance(request.memory, float),
            request.count,
            request.devices,
            request.exclusive,
        )


class Lane:
    """The waiting requests of one shape, in the order of `order_key`.

    If the first of them must wait, so must the others: a look at the queue costs as much as there
    are lanes, not requests.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        #: Those before `_first` are gone. They are cut off in bulk: moving 100,000 entries for each
        #: that starts would be most of its cost.
        self._requests: list[Request] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._requests) - self._first

    def __getitem__(self, position: int) -> Request:
        return self._requests[self._first + position]

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[i] for i in range(self._first, len(self._requests)))

    def add(self, request: Request) -> None:
        """Put a request in its place; behind those with an equal key."""
        bisect.insort(self._requests, request, lo=self._first, key=order_key)

    def remove(self, request: Request) -> bool:
        """Take a request out; tell whether it was there."""
        place = self._bisect(request)
        while place < len(self._requests) and self._requests[place].id != request.id:
            if order_key(self._requests[place]) != order_key(request):
                return False
            place += 1
        if place == len(self._requests):
            return False
        if place > self._first:
            del self._requests[place]
            return True
        self._first += 1
        if self._first * 2 > len(self._requests):
            del self._requests[: self._first]
            self._first = 0
        return True

    def count_before(self, request: Request) -> int:
        """Count those whose turn is before that of a request, of this lane or another."""
        return self._bisect(request) - self._first

    def _bisect(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, order_key(request), lo=self._first, key=order_key)


class RequestQueue:
    """The waiting requests, by shape. Not safe to use from several threads at once.

    Args:
        requests: Those that wait from the beginning, in any order.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._lanes: dict[Shape, Lane] = {}
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*self._lanes.values(), key=order_key)

    @property
    def shapes(self) -> Collection[Shape]:
        """The shapes of those who wait."""
        return self._lanes.keys()

    @property
    def lanes(self) -> Collection[Lane]:
        """One lane for each shape; none is empty."""
        return self._lanes.values()

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        shape = Shape.of(request)
        lane = self._lanes.get(shape)
        if lane is None:
            lane = self._lanes[shape] = Lane(shape)
        lane.add(request)

    def remove(self, request: Request) -> bool:
        """Take a request out; tell whether it was there."""
        shape = Shape.of(request)
        lane = self._lanes.get(shape)
        if lane is None or not lane.remove(request):
            return False
        if not lane:
            del self._lanes[shape]
        return True


def decide(
    queue: RequestQueue,
    rooms: Sequence[Room],
    host: HostRoom,
    style: PlacementStyle = "spread",
    held_by_parent: Iterable[Reservation] = (),
    checked: Collection[Shape] = frozenset(),
) -> Decisions:
    """Decide who starts now and who never can.

    A request that is blocked blocks those behind it on the devices that it could use; one that the
    machine's own memory blocks blocks all, since all need of it.

    Args:
        queue: Waiting requests; left as it is.
        rooms: All devices, read in one tick, in the order of their index.
        host: The machine's own memory and processes.
        style: `spread` or `pack`.
        held_by_parent: What the GPU task around this process holds, if there is one.
        checked: Shapes that are known to be possible.
    """
    held = tuple(held_by_parent)
    placements: list[tuple[Request, Placement]] = []
    refusals: list[tuple[Request, PlacementError]] = []
    #: The next of each lane: its order, the lane's number (no two are equal), its place in the lane.
    heads: list[tuple[tuple[int, int], int, int]] = []
    lanes = list(queue.lanes)
    for number, lane in enumerate(lanes):
        if lane.shape not in checked:
            impossible = _refuse(lane, rooms, held)
            if impossible:
                refusals += impossible
                continue
        heads.append((order_key(lane[0]), number, 0))
    heapq.heapify(heads)
    choices = Choices(rooms, style)
    named: dict[int, list[Room]] = {}
    while heads and choices and not host.full:
        _, number, place = heads[0]
        lane = lanes[number]
        request = lane[place]
        if request.devices and number not in named:
            named[number] = select_rooms(request, rooms)
        placement = choices.choose(request, named.get(number))
        if placement is None:
            if choices.alike and not request.devices and not held:
                # It blocks every device: a shortcut past asking each of a thousand.
                break
            choices.block(
                room for room in named.get(number, rooms) if could_hold(request, room, held)
            )
            heapq.heappop(heads)
            continue
        if host.refusal(request):
            break
        choices.take(placement)
        host = host.after(request)
        placements.append((request, placement))
        if place + 1 < len(lane):
            heapq.heapreplace(heads, (order_key(lane[place + 1]), number, place + 1))
        else:
            heapq.heappop(heads)
    return Decisions(tuple(placements), tuple(refusals))


def _refuse(
    lane: Lane, rooms: Sequence[Room], held: Sequence[Reservation]
) -> list[tuple[Request, PlacementError]]:
    """Refuse all of a lane if the first of it is impossible."""
    refusals: list[tuple[Request, PlacementError]] = []
    for request in lane:
        try:
            check_possible(request, rooms, held)
        except PlacementError as error:
            refusals.append((request, error))
        else:
            break
    return refusals


def explain(request: Request, queue: RequestQueue, rooms: Sequence[Room], host: HostRoom) -> str:
    """Say why a request waits, in one line that a person can act on.

    Raises:
        PlacementError: It names devices that are not there.
    """
    eligible = select_rooms(request, rooms)
    reason = host.refusal(request) or describe_wait(request, eligible)
    mine = {room.device.key for room in eligible}
    ahead = sum(
        before
        for lane in queue.lanes
        if (before := lane.count_before(request)) and _overlap(lane[0], rooms, mine)
    )
    if ahead:
        reason += f"; {ahead} ahead in the queue"
    return reason


def _overlap(request: Request, rooms: Sequence[Room], mine: Collection[tuple[str, str]]) -> bool:
    """Tell whether a request may use one of some devices."""
    if not request.devices:
        return True
    try:
        return any(room.device.key in mine for room in select_rooms(request, rooms))
    except PlacementError:
        # It will be refused at the next look.
        return False
