"""What `phase`, `mark` and `step` talk to in a child: it measures, and finds the steps of the body.

Numbers are read at the begin and the end of a phase; in between, the thread of `sampler` looks every
few milliseconds. Looks miss short peaks, so each step after the first that is read in full is traced
as well, where its framework can be: its peak is then exact. It never resets a framework's counters,
which are the body's to read, and never synchronises the device: seconds are those of the CPU, which a
GPU lags behind. What is kept of marks is `prefect_gpu.reports.marks`'s to say, what steps show
`steps`'.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.frameworks.adapter import Counters, PeakTrace
from prefect_gpu.processes.steps import StepBook
from prefect_gpu.reports.marks import FIRST_STEPS, MARKS_PER_STEP, MarkKeeper
from prefect_gpu.reports.model import Mark, StepFacts
from prefect_gpu.reports.series import largest

#: After the first steps, one part in this many of the time may go into reading steps in full, and as
#: much into looks as a step ends. In a loop of 3 ms a step on an H200, PyTorch 2.11, a look takes
#: 40 µs; a step in full with four phases a millisecond. What was not looked at costs 2 µs a phase.
READ_SHARE = 100

#: Names that are remembered. A body that makes a new one each time teaches nothing of steps.
KEPT_NAMES = 256


class MemorySource(Protocol):
    """What a recorder asks. `Readings` is the real one. It never raises."""

    def sample(self) -> tuple[int, int] | None:
        """Read bytes allocated now and allocation retries so far."""
        ...

    def counters(self) -> Counters | None:
        """Read all counters."""
        ...

    def begin_trace(self) -> PeakTrace | None:
        """Begin to trace what is allocated; `None`: it cannot be."""
        ...

    def process_bytes(self) -> int | None:
        """Read what the driver shows for this process."""
        ...


class Recorder:
    """Takes down one body's phases, marks and steps. Any thread may use it.

    A step ends with `step()`. In a body that never calls it, the first name that comes a second time
    begins a step each time that it comes.

    Args:
        source: What to ask.
        clock: Says when.
    """

    def __init__(self, source: MemorySource, clock: Clock | None = None) -> None:
        self._source = source
        self._clock: Clock = clock or RealClock()
        # Reentrant: a finalizer that calls `mark` may run anywhere. Readings are taken under it, so
        # that an older one never comes after a newer.
        self._lock = threading.RLock()
        self._book = StepBook()
        self._keeper = MarkKeeper()
        #: The body's first line.
        self._origin_s = self._clock.now()
        self._since_mark = _Span()
        #: Those of the phases that are open and measured, and the one since the last mark.
        self._spans = [self._since_mark]
        #: The frameworks' own peaks when they were read last.
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        #: Whether the body calls `step`; else the name that begins a step, once it is known.
        self._has_steps = False
        self._names: set[str] = set()
        self._head: str | None = None
        #: End of the last phase or mark that belongs to the step that is open.
        self._tail_s: float | None = None
        #: Of the step that is open: whether it is read in full, its marks, seconds spent on reading.
        self._in_full = True
        self._marked = 0
        self._spent_s = 0.0
        #: Runs through the step that is open; `None`: it is not traced.
        self._trace: PeakTrace | None = None
        #: The body is over.
        self._over = False
        #: When a step is next read in full, and when one is next looked at as it ends.
        self._due_s = 0.0
        self._look_due_s = 0.0

    # What the body calls.

    def begin_phase(self, name: str) -> OpenPhase:
        """Begin a phase; what it returns goes to `end_phase`."""
        with self._lock:
            at_s = self._clock.now()
            is_new = self._take_name(name, at_s)
            span = None
            if self._is_wanted(is_new):
                span = _begin_span(self._read())
                self._spans.append(span)
            return OpenPhase(name, at_s, self._book.count, span)

    def end_phase(self, phase: OpenPhase) -> None:
        """End a phase and measure it."""
        with self._lock:
            at_s = self._tail_s = self._clock.now()
            if phase.span is None:
                return
            self._add(phase.name, phase.began_s, at_s - phase.began_s, phase.span, phase.step)
            self._spans.remove(phase.span)

    def mark(self, name: str) -> None:
        """Measure this moment; its peaks are those since the last mark."""
        with self._lock:
            at_s = self._clock.now()
            is_new = self._take_name(name, at_s)
            if name != self._head:
                self._tail_s = at_s
            span, counters = self._since_mark, None
            if self._is_wanted(is_new):
                counters = self._add(name, at_s, None, span, self._book.count)
            self._spans.remove(span)
            self._since_mark = _begin_span(counters)
            self._spans.append(self._since_mark)

    def step(self) -> None:
        """Say that a step is over."""
        with self._lock:
            self._has_steps = True
            self._end_step(self._clock.now())

    # What the child calls.

    def begin(self) -> None:
        """Say that the body's first line comes next."""
        with self._lock:
            self._origin_s = self._clock.now()

    def sample(self) -> None:
        """Look at what is allocated now."""
        with self._lock:
            found = self._source.sample()
            if found is not None:
                self._take(*found)

    def counters(self) -> Counters | None:
        """Read all counters, for the steps and for the caller."""
        with self._lock:
            return self._read()

    def stop(self) -> None:
        """Say that the body is over, however it ended: nothing is traced from here on."""
        with self._lock:
            self._over = True
            self._end_trace()

    def finish(self) -> None:
        """Say that the body has returned; not called if it raised.

        Where names begin the steps, the last step has no other end.
        """
        with self._lock:
            self._end_trace()
            self._read()
            if not self._has_steps and self._head is not None and self._tail_s is not None:
                self._book.boundary(self._tail_s)

    def take(self) -> tuple[StepFacts | None, tuple[Mark, ...]]:
        """Give what the steps so far show, and the marks that were not given before."""
        with self._lock:
            return self._book.facts(), self._keeper.take()

    def renew_lock(self) -> None:
        """After a fork: the thread that held the lock may not be there, and the trace is its."""
        self._lock = threading.RLock()
        self._trace = None

    # How steps are found.

    def _take_name(self, name: str, at_s: float) -> bool:
        """Look whether a name begins a step; `True`: it never came before."""
        if name not in self._names:
            if len(self._names) < KEPT_NAMES:
                self._names.add(name)
                return True
        elif not self._has_steps and self._head in (None, name):
            self._head = name
            self._end_step(at_s)
        return False

    def _end_step(self, at_s: float) -> None:
        self._end_trace()
        live = retries = None
        if self._in_full:
            counters = self._read()
            if counters is not None:
                live, retries = counters.live_bytes, counters.alloc_retries
        elif at_s >= self._look_due_s:
            found = self._source.sample()
            if found is not None:
                self._take(*found)
                live, retries = found
            self._look_due_s = at_s + READ_SHARE * (self._clock.now() - at_s)
        if self._book.pinched and not self._in_full:
            # So that a peak before the retry is not taken for one after it.
            self._read()
        self._book.boundary(at_s, live, retries)
        if self._in_full:
            self._due_s = at_s + READ_SHARE * self._spent_s
        self._in_full = self._book.count < FIRST_STEPS or at_s >= self._due_s
        self._marked, self._spent_s, self._tail_s = 0, 0.0, None
        # The first step has none: what it takes counts by the framework's own peak.
        if self._in_full:
            self._begin_trace()

    # How numbers are read.

    def _is_wanted(self, is_new: bool) -> bool:
        """Say whether a phase or mark is to be measured."""
        wanted = self._marked < MARKS_PER_STEP and (self._in_full or is_new)
        self._marked += wanted
        return wanted

    def _add(
        self, name: str, at_s: float, duration_s: float | None, span: _Span, step: int
    ) -> Counters | None:
        counters = self._read()
        began_s = self._clock.now()
        process_bytes = self._source.process_bytes()
        self._spent_s += self._clock.now() - began_s
        self._keeper.add(
            Mark(
                at_s=at_s - self._origin_s,
                name=name,
                duration_s=duration_s,
                allocated_bytes=None if counters is None else counters.live_bytes,
                peak_allocated_bytes=span.peak_live_bytes,
                reserved_bytes=None if counters is None else counters.reserved_bytes,
                peak_reserved_bytes=span.peak_reserved_bytes,
                process_bytes=process_bytes,
                step=step,
            )
        )
        return counters

    def _read(self) -> Counters | None:
        began_s = self._clock.now()
        counters = self._source.counters()
        self._spent_s += self._clock.now() - began_s
        if counters is None:
            return None
        live, reserved = counters.live_bytes, counters.reserved_bytes
        # A peak that differs from the last look's was reached since: if it is lower, the body has
        # reset it in between.
        if counters.peak_live_bytes != self._peak_live_bytes:
            live = max(live, counters.peak_live_bytes)
        self._peak_live_bytes = counters.peak_live_bytes
        if counters.peak_reserved_bytes is not None:
            if counters.peak_reserved_bytes != self._peak_reserved_bytes:
                reserved = max(reserved or 0, counters.peak_reserved_bytes)
            self._peak_reserved_bytes = counters.peak_reserved_bytes
        self._take(live, counters.alloc_retries or 0, reserved)
        return counters

    def _begin_trace(self) -> None:
        if self._over:
            return
        began_s = self._clock.now()
        self._trace = self._source.begin_trace()
        self._spent_s += self._clock.now() - began_s

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        began_s = self._clock.now()
        peak = trace.end()
        self._spent_s += self._clock.now() - began_s
        if peak is not None:
            self._book.peak(peak)

    def _take(self, live_bytes: int, retries: int, reserved_bytes: int | None = None) -> None:
        self._book.reading(live_bytes, retries)
        for span in self._spans:
            span.peak_live_bytes = largest(span.peak_live_bytes, live_bytes)
            span.peak_reserved_bytes = largest(span.peak_reserved_bytes, reserved_bytes)


@dataclass(slots=True, eq=False)
class _Span:
    """The most of each, in bytes, over some time; `None`: unknown."""

    peak_live_bytes: int | None = None
    peak_reserved_bytes: int | None = None


def _begin_span(counters: Counters | None) -> _Span:
    if counters is None:
        return _Span()
    return _Span(counters.live_bytes, counters.reserved_bytes)


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """A phase that has begun."""

    name: str
    #: Monotonic seconds.
    began_s: float
    #: The step that it began in, from 0.
    step: int
    #: `None`: it is not measured.
    span: _Span | None
