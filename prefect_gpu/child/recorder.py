"""Records the phases, marks and steps of a body in its child, with their memory.

Counters are read at the beginning and at the end of a phase; in between, the thread of `readings` takes
a sample every few milliseconds. Samples miss short peaks, so each step after the first that is read in
full is traced as well, where its framework can be: its peak is then exact. A framework's counters are
never reset, since the body may read them, and the device is never synchronised: seconds are those of
the CPU, which a GPU lags behind. `prefect_gpu.measurements` says how many marks are
kept, and `StepBook` what follows from steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.frameworks.adapter import Counters, PeakTrace
from prefect_gpu.measurements import (
    FIRST_STEPS,
    MARKS_PER_STEP,
    Mark,
    MarkKeeper,
    StepFacts,
    largest,
)

#: Number of last steps whose seconds are kept, for the median.
KEPT_SECONDS = 512

#: Step ends needed for a slope: two give a difference only, and one outlier among three misleads.
LEAST_FOR_SLOPE = 4


class StepBook:
    """Collects what is known of one body's steps. For one thread at a time.

    The first step ends at the first boundary. It takes more memory than later ones: frameworks try
    kernels in it. Steps count as *steady* after the first one, and after the last one in which the
    allocator had to release its cache. The open step is what comes after the last boundary: its
    memory counts, since a budget must hold it too, and its seconds do not.
    """

    def __init__(self) -> None:
        #: Number of boundaries so far.
        self._count = 0
        self._first_live: int | None = None
        #: Peak bytes in the open step, and in the steady steps that have ended.
        self._open_live: int | None = None
        self._steady_live: int | None = None
        #: Number of steady steps that have ended.
        self._steady = 0
        self._last_retries = 0
        #: Allocation retries after the first step.
        self._retries = 0
        self._released_cache = False
        self._ended_s: float | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT_SECONDS)
        self._slope = _Slope()

    @property
    def count(self) -> int:
        """Number of steps that have ended."""
        return self._count

    @property
    def released_cache(self) -> bool:
        """Whether the allocator had to release its cache in the open step."""
        return self._released_cache

    def reading(self, live_bytes: int, alloc_retries: int) -> None:
        """Add a reading of what is allocated.

        Args:
            live_bytes: Bytes that the frameworks have allocated.
            alloc_retries: How often an allocator had to release its cache so far.
        """
        self._open_live = largest(self._open_live, live_bytes)
        # Fewer than before: the body reset the statistics of its framework.
        rise = alloc_retries - self._last_retries
        more = rise if rise >= 0 else alloc_retries
        self._last_retries = alloc_retries
        if more:
            self._released_cache = True
            self._retries += more if self._count else 0

    def peak(self, live_bytes: int) -> None:
        """Add a peak of what was allocated in the open step."""
        self._open_live = largest(self._open_live, live_bytes)

    def boundary(
        self, at_s: float, live_bytes: int | None = None, alloc_retries: int | None = None
    ) -> None:
        """End a step, with the reading at that moment.

        Args:
            at_s: Monotonic seconds.
            live_bytes: As in `reading`; `None`: there was no reading.
            alloc_retries: As in `reading`; `None`: there was no reading.
        """
        if live_bytes is not None:
            self.reading(live_bytes, alloc_retries or 0)
        if self._count == 0:
            self._first_live = self._open_live
        elif self._released_cache:
            self._steady, self._steady_live, self._slope = 0, None, _Slope()
        else:
            self._steady += 1
            self._steady_live = largest(self._steady_live, self._open_live)
            if live_bytes is not None:
                self._slope.add(self._steady, live_bytes)
        if self._ended_s is not None:
            self._seconds.append(max(0.0, at_s - self._ended_s))
        self._ended_s = at_s
        self._count += 1
        # What is allocated at the end of a step is allocated at the beginning of the next.
        self._open_live, self._released_cache = live_bytes, False

    def facts(self) -> StepFacts | None:
        """Return what the steps so far show; `None`: there was none."""
        if self._count == 0:
            return None
        steady = self._steady > 0 and not self._released_cache
        return StepFacts(
            count=self._count,
            first_live_bytes=self._first_live,
            steady_live_bytes=largest(self._steady_live, self._open_live) if steady else None,
            step_s=_median(self._seconds),
            alloc_retries=self._retries,
            growth_bytes=self._slope.value() if steady else None,
        )


class _Slope:
    """A least-squares slope over points that are not kept. Exact: sums of whole numbers."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0

    def add(self, x: int, y: int) -> None:
        self._n += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def value(self) -> float | None:
        if self._n < LEAST_FOR_SLOPE:
            return None
        return (self._n * self._xy - self._x * self._y) / (self._n * self._xx - self._x**2)


def _median(values: Iterable[float]) -> float | None:
    # Not with `statistics`, which every child would import, with `decimal` and `fractions`.
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


#: After the first steps, one part in this many of the time may be spent on reading steps in full, and
#: as much on samples at the ends of steps. In a loop of 3 ms per step on an H200, PyTorch 2.11, a sample
#: takes 40 µs, and a step in full with four phases a millisecond. A phase that is not read costs 2 µs.
READ_SHARE = 100

#: Names that are remembered. A body with a new name each time shows nothing of its steps.
KEPT_NAMES = 256


class MemorySource(Protocol):
    """What a recorder reads from. `Readings` implements it. Its methods never raise."""

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
        """Read what the driver reports of this process; `None`: unknown."""
        ...


class Recorder:
    """Records one body's phases, marks and steps. Any thread may use it.

    A step ends with `step()`. In a body that never calls it, the first name that comes a second time
    begins a new step each time that it comes.

    Args:
        source: Of the readings.
        clock: Of the times; `None`: the real one.
    """

    def __init__(self, source: MemorySource, clock: Clock | None = None) -> None:
        self._source = source
        self._clock: Clock = clock or RealClock()
        # Reentrant: a finalizer that calls `mark` may run anywhere. Readings are taken under the lock,
        # so that they are recorded in the order in which they were taken.
        self._lock = threading.RLock()
        self._book = StepBook()
        self._keeper = MarkKeeper()
        #: When the body's first line ran.
        self._origin_s = self._clock.now()
        self._since_mark = _Span()
        #: Those of the open phases that are measured, and the one since the last mark.
        self._spans = [self._since_mark]
        #: The frameworks' own peaks at the last reading.
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        #: Whether the body calls `step`.
        self._has_steps = False
        self._names: set[str] = set()
        #: Else the name that begins a step, once it is known.
        self._head: str | None = None
        #: End of the last phase or mark that belongs to the open step.
        self._tail_s: float | None = None
        #: Of the open step: whether it is read in full, its marks, seconds spent on reading.
        self._in_full = True
        self._marked = 0
        self._spent_s = 0.0
        #: Of the open step; `None`: it is not traced.
        self._trace: PeakTrace | None = None
        #: The body has ended.
        self._over = False
        #: When a step is read in full next, and when a sample is taken at the end of a step next.
        self._due_s = 0.0
        self._sample_due_s = 0.0

    # What the body calls.

    def begin_phase(self, name: str) -> OpenPhase:
        """Begin a phase; the value that is returned is passed to `end_phase`."""
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
        """Record this moment; its peaks are those since the last mark."""
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
        """End a step."""
        with self._lock:
            self._has_steps = True
            self._end_step(self._clock.now())

    # What the child calls.

    def begin(self) -> None:
        """Begin the body: times count from here."""
        with self._lock:
            self._origin_s = self._clock.now()

    def sample(self) -> None:
        """Take a sample of what is allocated now."""
        with self._lock:
            found = self._source.sample()
            if found is not None:
                self._take(*found)

    def counters(self) -> Counters | None:
        """Read all counters, record them and return them."""
        with self._lock:
            return self._read()

    def stop(self) -> None:
        """End the body, however it ended: nothing is traced from here on."""
        with self._lock:
            self._over = True
            self._end_trace()

    def finish(self) -> None:
        """End the last step of a body that has returned; not called if it raised.

        Where names begin the steps, nothing else ends the last one.
        """
        with self._lock:
            self._end_trace()
            self._read()
            if not self._has_steps and self._head is not None and self._tail_s is not None:
                self._book.boundary(self._tail_s)

    def take(self) -> tuple[StepFacts | None, tuple[Mark, ...]]:
        """Return what the steps so far show, and the marks that were not returned before."""
        with self._lock:
            return self._book.facts(), self._keeper.take()

    def renew_lock(self) -> None:
        """In a fork: replace the lock, whose holder may not exist here, and drop the trace."""
        self._lock = threading.RLock()
        self._trace = None

    # How steps are found.

    def _take_name(self, name: str, at_s: float) -> bool:
        """Begin a step if a name begins one; return whether the name is new."""
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
        elif at_s >= self._sample_due_s:
            found = self._source.sample()
            if found is not None:
                self._take(*found)
                live, retries = found
            self._sample_due_s = at_s + READ_SHARE * (self._clock.now() - at_s)
        if self._book.released_cache and not self._in_full:
            # So that a peak before the allocation retry does not count as one after it.
            self._read()
        self._book.boundary(at_s, live, retries)
        if self._in_full:
            self._due_s = at_s + READ_SHARE * self._spent_s
        self._in_full = self._book.count < FIRST_STEPS or at_s >= self._due_s
        self._marked, self._spent_s, self._tail_s = 0, 0.0, None
        # The first step has no trace: the framework's own peak counts for it.
        if self._in_full:
            self._begin_trace()

    # How numbers are read.

    def _is_wanted(self, is_new: bool) -> bool:
        """Return whether a phase or mark is to be measured, and count it."""
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
        # A peak that differs from the last reading's was reached since then: if it is lower, the body has
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
    """Peaks over some time, in bytes; `None`: unknown."""

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
