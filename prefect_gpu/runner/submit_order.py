"""Keep requests in the order of `submit`, although the engine threads of tasks reach their bodies in any order.

A task run takes its place at `submit`. Before it requests a budget or a device, it waits for task runs in front that
are about to make a request, tens of milliseconds later. A task run that waits for its inputs or for another's first
run delays no other; afterwards it is at its old place again. The order of requests is in `scheduling`.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prefect.futures import PrefectFuture
from prefect.utilities.collections import visit_collection

from prefect_gpu.clock import Clock, RealClock

#: Seconds without an arrival after which task runs in front are passed: one may wait invisibly, as for a slot of a
#: tag's concurrency limit. Of 200 mapped tasks on two cores 45 came in behind a later one, by at most 0.1 s.
PATIENCE_S = 2.0


class Place:
    """The place of one task run, from `SubmitOrder.add`. For the task run's own thread."""

    def __init__(self, order: SubmitOrder, number: int, waits: Callable[[], bool]) -> None:
        self._order = order
        self.number = number
        #: Returns whether the task run waits for something other than its turn. Called under the lock of the order.
        self.waits = waits
        #: Notified when it may be its turn; `None`: the task run does not wait for its turn.
        self.turn: threading.Condition | None = None

    def take_turn(self) -> None:
        """Wait until no task run in front is about to make a request; then delay the ones behind until `leave`."""
        self._order.take_turn(self)

    def yield_while(self, waits: Callable[[], bool]) -> None:
        """Delay no other task run while `waits` returns true. `waits` must not block."""
        self._order.change(self, waits)

    def leave(self) -> None:
        """Note that the task run has requested its device, or never will. `take_turn` restores its place."""
        self._order.leave(self)


class SubmitOrder:
    """A runner's task runs that have not requested a device yet. Safe to use from several threads."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or RealClock()
        self._lock = threading.Lock()
        #: Sorted by number.
        self._places: list[Place] = []

    def add(self, number: int, waits: Callable[[], bool] = lambda: False) -> Place:
        """Return the place `number` for a task run. `waits` returns whether its inputs are open; it must not block."""
        place = Place(self, number, waits)
        with self._lock:
            self._insert(place)
        return place

    def take_turn(self, place: Place) -> None:
        """See `Place.take_turn`."""
        with self._lock:
            place.waits = lambda: False
            if place not in self._places:
                self._insert(place)
            place.turn = threading.Condition(self._lock)
            while any(not each.waits() for each in self._in_front(place)):
                # Only the first waiting task run has a time limit: the others wait for it.
                limit_s = PATIENCE_S if self._first_waiting() is place else None
                if not self._clock.wait(place.turn, limit_s):
                    for each in [each for each in self._in_front(place) if each.turn is None]:
                        self._places.remove(each)
                    self._wake_first()
            place.turn = None
            self._wake_first()

    def change(self, place: Place, waits: Callable[[], bool]) -> None:
        """See `Place.yield_while`."""
        with self._lock:
            place.waits = waits
            self._wake_first()

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        with self._lock:
            if place in self._places:
                self._places.remove(place)
                self._wake_first()

    def _insert(self, place: Place) -> None:
        bisect.insort(self._places, place, key=lambda each: each.number)

    def _in_front(self, place: Place) -> Iterator[Place]:
        for each in self._places:
            if each is place:
                return
            yield each

    def _first_waiting(self) -> Place | None:
        return next((each for each in self._places if each.turn is not None), None)

    def _wake_first(self) -> None:
        first = self._first_waiting()
        if first is not None and first.turn is not None:
            first.turn.notify()


class Inputs:
    """The parameters and `wait_for` of a task run, which must be done before its body can be called."""

    def __init__(self, *values: Any) -> None:
        self._values = values
        #: Futures that were not done at the last check; `None`: not checked yet.
        self._open: list[Any] | None = None

    def wait(self) -> bool:
        """Return whether a future is not done."""
        if self._open is None:
            # Not searched at `submit`: parameters may be large collections, and the check is rare.
            values, self._values = self._values, ()
            self._open = _futures_in(values)
        while self._open and _is_done(self._open[-1]):
            self._open.pop()
        return bool(self._open)


def _futures_in(values: Any) -> list[Any]:
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, PrefectFuture):
            found.append(value)

    # A user's collection that cannot be visited fails in the task run's own thread.
    with contextlib.suppress(Exception):
        visit_collection(values, visit, return_data=False)
    return found


def _is_done(future: Any) -> bool:
    # Futures of other runners may lack the attribute; their state takes a call of the API.
    wrapped = getattr(future, "wrapped_future", None)
    return wrapped is not None and bool(wrapped.done())
