"""First come is the order of `submit`, although the engine threads of tasks reach their bodies in any order.

A task run takes its place when it is submitted. Before it asks for a budget or a device it waits for the task runs
in front of it that are on their way: their threads are about to ask too, which takes tens of milliseconds. A task run
that waits for something else (its inputs, or another's first run) holds up none behind it; once it has what it
waited for it is on its way again, at its old place. The order of what has been asked is `scheduling`.
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

#: Seconds without an arrival after which those in front are passed: one may wait where that cannot be seen, as for a
#: slot of a tag's concurrency limit. Of 200 mapped tasks on two cores 45 came in behind a later one, by at most 0.1 s.
PATIENCE_S = 2.0


class Place:
    """The place of one task run. Made by `SubmitOrder.add`; its methods are for the task run's own thread."""

    def __init__(self, order: SubmitOrder, number: int, waits: Callable[[], bool]) -> None:
        self._order = order
        self.number = number
        #: Returns whether it waits for something else than its turn; under the lock of the order.
        self.waits = waits
        #: Notified when it may be its turn; `None`: it does not wait for it.
        self.turn: threading.Condition | None = None

    def take_turn(self) -> None:
        """Wait until none in front is on its way. From then on those behind wait until `leave` or `yield_while`."""
        self._order.take_turn(self)

    def yield_while(self, waits: Callable[[], bool]) -> None:
        """Hold up none behind it for as long as a function returns true. It must not wait."""
        self._order.change(self, waits)

    def leave(self) -> None:
        """Note that it has asked for its device, or never will. `take_turn` brings it back."""
        self._order.leave(self)


class SubmitOrder:
    """The task runs of one runner that have not asked for a device yet. Safe to use from several threads.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or RealClock()
        self._lock = threading.Lock()
        #: By number.
        self._places: list[Place] = []

    def add(self, number: int, waits: Callable[[], bool] = lambda: False) -> Place:
        """Return the place of a task run that was just submitted.

        Args:
            number: In the order of `submit`.
            waits: Returns whether it still waits for its inputs. It must not wait itself.
        """
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
                # Only the first that waits has a time: the others wait for it.
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
    """What a task run waits for before its body can be called.

    Args:
        values: Its parameters, and what it was told to wait for.
    """

    def __init__(self, *values: Any) -> None:
        self._values = values
        #: Those that were not done when asked last; `None`: it was not asked.
        self._open: list[Any] | None = None

    def wait(self) -> bool:
        """Return whether one of the futures is not done."""
        if self._open is None:
            # Not at `submit`: parameters may be large collections, and it is rarely asked.
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

    # A collection of the user's that cannot be visited fails in the task run's own thread.
    with contextlib.suppress(Exception):
        visit_collection(values, visit, return_data=False)
    return found


def _is_done(future: Any) -> bool:
    # Those of other runners may have no such attribute; their state is a question to the API.
    wrapped = getattr(future, "wrapped_future", None)
    return wrapped is not None and bool(wrapped.done())
