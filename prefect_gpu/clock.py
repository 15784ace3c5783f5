"""The protocol `Clock`, the real clock, and a clock that a test moves. Each caller keeps its own deadline."""

from __future__ import annotations

import threading
import time
from typing import Protocol

#: Seconds after which a `FakeClock` that waits for other threads raises: reached only in a deadlock.
DEADLOCK_S = 120.0


class Clock(Protocol):
    """Monotonic time, and waiting for it to pass."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...

    def wait(self, condition: threading.Condition, until_s: float | None) -> bool:
        """Wait until `condition`, held by the caller, is notified; `False`: it is `until_s` now (`None`: no limit).

        `until_s` is a time of `now`: with a duration, the time between the caller's reading and this call would be lost.
        """
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until_s: float | None) -> bool:
        """Wait until `condition` is notified or the time is up; see `Clock.wait`."""
        return condition.wait(None if until_s is None else max(0.0, until_s - self.now()))


class FakeClock:
    """A clock that stands still until `advance` moves it. Any thread may use it.

    A thread that waits on it is woken by a notification or by `advance` passing its deadline, never by real time.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._lock = threading.Condition()
        self._now_s = start_s
        #: Deadline and condition of each thread that waits; `None`: no deadline.
        self._waiters: dict[object, tuple[float | None, threading.Condition]] = {}

    def now(self) -> float:
        """Return the seconds that the test has set."""
        with self._lock:
            return self._now_s

    def wait(self, condition: threading.Condition, until_s: float | None) -> bool:
        """Wait until `condition` is notified or `advance` passes the deadline; see `Clock.wait`."""
        token = object()
        with self._lock:
            if until_s is not None and until_s <= self._now_s:
                return False
            self._waiters[token] = (until_s, condition)
            self._lock.notify_all()
        try:
            # `advance` takes `condition` before it notifies, and the caller holds it until here: no wake-up is lost.
            condition.wait()
        finally:
            with self._lock:
                self._waiters.pop(token, None)
        return until_s is None or self.now() < until_s

    def advance(self, duration_s: float) -> None:
        """Move the time forward, and wake the threads whose deadline has passed."""
        with self._lock:
            self._now_s += duration_s
            due = [
                token
                for token, (deadline_s, _) in self._waiters.items()
                if deadline_s is not None and deadline_s <= self._now_s
            ]
            conditions = [self._waiters.pop(token)[1] for token in due]
        for condition in conditions:
            with condition:
                condition.notify_all()

    def wait_for_waiters(self, count: int = 1) -> None:
        """Block until `count` threads wait on this clock; raise `TimeoutError` after `DEADLOCK_S` real seconds."""
        with self._lock:
            if not self._lock.wait_for(lambda: len(self._waiters) >= count, DEADLOCK_S):
                raise TimeoutError(f"no {count} waiting threads after {DEADLOCK_S:g}s")
