"""The waiting requests, by shape and in order, and what each has seen while it waits.

It decides nothing: who starts is decided in `turns`.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prefect_gpu.scheduling.backfill import Standing
from prefect_gpu.scheduling.model import Memory, Request


def order_key(request: Request) -> tuple[int, int]:
    """Sort key of the queue: priority, then first come."""
    return -request.priority, request.sequence


class Shape(NamedTuple):
    """What a request needs, where, and about how long: equal shapes have equal chances."""

    memory: Memory
    #: 1 byte and 100 % are equal numbers.
    is_fraction: bool
    device_count: int
    devices: tuple[str, ...]
    exclusive: bool
    #: Power of two above the seconds that it is expected to run; `None`: not known. Where the first of
    #: a lane would delay somebody, those of another length may not.
    length: int | None = None

    @classmethod
    def of(cls, request: Request) -> Shape:
        """Give the shape of a request."""
        return cls(
            request.memory,
            isinstance(request.memory, float),
            request.count,
            request.devices,
            request.exclusive,
            None if request.expected_s is None else math.frexp(request.expected_s)[1],
        )


class Lane:
    """The waiting requests of one shape, in the order of `order_key`.

    If the first of them must wait, so must the others: a look at the queue costs as much as there
    are lanes, not requests.
    """

    def __init__(self, shape: Shape, number: int) -> None:
        self.shape = shape
        #: Tells it from the others, and which of two came first.
        self.number = number
        #: Bytes that all of them ask for of a device at least; 0 where it depends on the device.
        self.least_bytes = shape.memory if type(shape.memory) is int else 0
        #: The first, and its `order_key`; while it is empty they mean nothing.
        self.first: Request
        self.key = (0, 0)
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
        if not self._requests or order_key(self._requests[-1]) <= order_key(request):
            # As nearly all come.
            self._requests.append(request)
        else:
            bisect.insort(self._requests, request, lo=self._first, key=order_key)
        self._note_first()

    def remove(self, request: Request) -> bool:
        """Take a request out; tell whether it was there."""
        if self._first == len(self._requests):
            return False
        if self.first is not request:
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
        if self._requests:
            self._note_first()
        return True

    def count_before(self, request: Request) -> int:
        """Count those whose turn is before that of a request, of this lane or another."""
        return self._bisect(request) - self._first

    def _note_first(self) -> None:
        self.first = self._requests[self._first]
        self.key = order_key(self.first)

    def _bisect(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, order_key(request), lo=self._first, key=order_key)


#: A turn to come: the request's `order_key`, the lane's number (no two are equal), the lane, and the
#: request's place in it.
Turn: TypeAlias = tuple[tuple[int, int], int, Lane, int]


class RequestQueue:
    """The waiting requests, by shape. Not safe to use from several threads at once.

    Args:
        requests: Those that wait from the beginning, in any order.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._lanes: dict[Shape, Lane] = {}
        #: By the id of each request.
        self._lane_of: dict[str, Lane] = {}
        self._made = 0
        #: The turn of the first of each lane, in order, and `least_bytes` of each, the smallest first:
        #: a look at the queue begins with both, and a change moves one of either.
        self._firsts: list[Turn] = []
        self._least_bytes: list[int] = []
        #: Made at most once a change.
        self._shapes: frozenset[Shape] | None = None
        #: What blocked requests have seen, by id; those that have seen nothing are left out.
        self.standings: dict[str, Standing] = {}
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*self._lanes.values(), key=order_key)

    @property
    def shapes(self) -> frozenset[Shape]:
        """The shapes of those who wait; the same object until they change."""
        if self._shapes is None:
            self._shapes = frozenset(self._lanes)
        return self._shapes

    @property
    def lanes(self) -> Collection[Lane]:
        """One lane for each shape; none is empty."""
        return self._lanes.values()

    @property
    def firsts(self) -> Sequence[Turn]:
        """The turn of the first of each lane, in the order of their turns."""
        return self._firsts

    def count_lanes(self, most_bytes: int) -> int:
        """Count the lanes that ask for so much of a device at most, as far as that is known."""
        return bisect.bisect_right(self._least_bytes, most_bytes)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        shape = Shape.of(request)
        lane = self._lanes.get(shape)
        if lane is None:
            self._made += 1
            lane = self._lanes[shape] = self._lane_of[request.id] = Lane(shape, self._made)
            bisect.insort(self._least_bytes, lane.least_bytes)
            self._shapes = None
            lane.add(request)
            bisect.insort(self._firsts, (lane.key, lane.number, lane, 0))
            return
        self._lane_of[request.id] = lane
        before = lane.key
        lane.add(request)
        if lane.key != before:
            self._drop_first(before, lane)
            bisect.insort(self._firsts, (lane.key, lane.number, lane, 0))

    def remove(self, request: Request) -> bool:
        """Take a request out; tell whether it was there."""
        lane = self._lane_of.get(request.id)
        if lane is None:
            return False
        before = lane.key
        if not lane.remove(request):
            return False
        del self._lane_of[request.id]
        if not lane:
            del self._lanes[lane.shape]
            del self._least_bytes[bisect.bisect_left(self._least_bytes, lane.least_bytes)]
            self._shapes = None
            self._drop_first(before, lane)
        elif lane.key != before:
            self._drop_first(before, lane)
            bisect.insort(self._firsts, (lane.key, lane.number, lane, 0))
        self.standings.pop(request.id, None)
        return True

    def note(self, standings: Mapping[str, Standing]) -> None:
        """Keep what a look at the queue did to requests that go on waiting."""
        self.standings.update(standings)

    def _drop_first(self, key: tuple[int, int], lane: Lane) -> None:
        del self._firsts[bisect.bisect_left(self._firsts, (key, lane.number))]
