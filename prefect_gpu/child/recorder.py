"""Records the phases, marks and steps of a body in its child, with their memory.

Counters are read at the beginning and at the end of a phase. In between, the thread of a `LiveSampler` takes a sample
every few milliseconds. Samples miss short peaks, so each fully read step after the first is traced, too, if its
framework allows it. Counters are not reset, since the body may read them, and devices are not synchronised: seconds are
those of the CPU. `measurements` limits the number of kept marks.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from prefect_gpu import in_task
from prefect_gpu.child.channel import Channel
from prefect_gpu.child.readings import Readings
from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters, EndTrace
from prefect_gpu.measurements import (
    FIRST_STEPS,
    MARKS_PER_STEP,
    Mark,
    MarkKeeper,
    StepFacts,
    largest,
)
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes.messages import CountersRead, ReleasedUnused

T = TypeVar("T")

#: Number of last steps whose seconds and final memory are kept, for the median and the slope.
KEPT_STEPS = 512

#: Steps are alike if the largest two steady steps differ by less than this factor. Steps on inputs of one size take the
#: same memory to the byte (PyTorch). A smaller last batch or an evaluation is not among the largest two.
ALIKE_FACTOR = 1.02

#: Step ends needed for a slope: one outlier among three misleads.
LEAST_FOR_SLOPE = 4


class StepBook:
    """Collects the facts about one body's steps. For one thread at a time.

    Steps are *steady* after the first step, in which frameworks try kernels and take more memory, and after the last
    step in which the allocator had to release its cache. Of the open step, memory counts, but seconds do not. A step
    read only at its ends shows no peak: on a busy machine samples come late.

    If steady steps are not alike, inputs change size, and the memory of the first step counts: it may have had the
    largest input.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first_live: int | None = None
        #: Peak bytes in the open step.
        self._open_live: int | None = None
        #: Whether the open step was read between its ends, or has a known peak.
        self._is_open_read = False
        self._steady_live: int | None = None
        #: Second largest peak of the steady steps that have ended; `None`: fewer than two steps.
        self._second_live: int | None = None
        self._steady = 0
        self._last_retries = 0
        #: Allocation retries after the first step.
        self._retries = 0
        #: Whether the allocator had to release its cache in the open step.
        self.released_cache = False
        self._ended_s: float | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        #: Number of a steady step, and bytes allocated at its end.
        self._ends: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)

    def reading(
        self, live_bytes: int, alloc_retries: int | None = None, *, at_end: bool = False
    ) -> None:
        """Add a reading of the allocated bytes, or their peak in the open step.

        Args:
            live_bytes: Bytes that the frameworks have allocated.
            alloc_retries: How often an allocator had to release its cache so far; `None`: not read.
            at_end: The reading is of the end of the step, when most of the memory may be free again.
        """
        self._open_live = largest(self._open_live, live_bytes)
        self._is_open_read = self._is_open_read or not at_end
        if alloc_retries is None:
            return
        # Fewer than before: the body reset the statistics of its framework.
        rise = alloc_retries - self._last_retries
        more = rise if rise >= 0 else alloc_retries
        self._last_retries = alloc_retries
        if more:
            self.released_cache = True
            self._retries += more if self.count else 0

    def boundary(
        self, at_s: float, live_bytes: int | None = None, alloc_retries: int | None = None
    ) -> None:
        """End a step at a monotonic time, with the reading of that moment; `live_bytes`: `None` is no reading."""
        if live_bytes is not None:
            self.reading(live_bytes, alloc_retries, at_end=True)
        if self.count == 0:
            self._first_live = self._open_live
        elif self.released_cache:
            self._steady, self._steady_live, self._second_live = 0, None, None
            self._ends.clear()
        else:
            self._steady += 1
            if self._is_open_read and self._open_live is not None:
                self._add_peak(self._open_live)
            if live_bytes is not None:
                self._ends.append((self._steady, live_bytes))
        if self._ended_s is not None:
            self._seconds.append(max(0.0, at_s - self._ended_s))
        self._ended_s = at_s
        self.count += 1
        # The memory at the end of a step is the memory at the beginning of the next.
        self._open_live, self._is_open_read, self.released_cache = live_bytes, False, False

    def _add_peak(self, live_bytes: int) -> None:
        if self._steady_live is None or live_bytes >= self._steady_live:
            self._second_live, self._steady_live = self._steady_live, live_bytes
        else:
            self._second_live = largest(self._second_live, live_bytes)

    def facts(self) -> StepFacts | None:
        """Return the facts about the steps so far; `None`: no step has ended."""
        if self.count == 0:
            return None
        # Most bodies have no steps.
        from statistics import linear_regression, median

        steady = self._steady > 0 and not self.released_cache
        is_read = steady and self._steady_live is not None
        alike, growth = False, None
        if self._steady_live is not None and self._second_live is not None:
            alike = self._steady_live <= ALIKE_FACTOR * self._second_live
        if steady and len(self._ends) >= LEAST_FOR_SLOPE:
            growth = linear_regression(*zip(*self._ends, strict=True)).slope
        return StepFacts(
            count=self.count,
            first_live_bytes=self._first_live,
            steady_live_bytes=largest(self._steady_live, self._open_live) if is_read else None,
            step_s=median(self._seconds) if self._seconds else None,
            alloc_retries=self._retries,
            growth_bytes=growth,
            alike=alike,
        )


#: After the first steps, full readings of steps may take one part in this number of the time, and samples at the ends
#: of steps as much. On an H200 with PyTorch 2.11, a sample takes 40 µs, and a step with four phases in full 1 ms.
READ_SHARE = 100

#: Most names that are kept, for bodies with a new name each time.
KEPT_NAMES = 256


@dataclass(slots=True, eq=False)
class Span:
    """A phase that has begun, or the time since the last mark."""

    name: str
    #: Monotonic seconds.
    began_s: float
    #: Number of the step at its beginning, from 0.
    step: int
    #: Peaks so far, in bytes; `None`: unknown, or not measured.
    peak_live_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class Recorder:
    """Records one body's phases, marks and steps. Any thread may use it.

    A step ends with `step()`. In a body without such calls, the first name that occurs twice begins a step at each
    occurrence.
    """

    def __init__(self, source: Readings, clock: Clock | None = None) -> None:
        self._source = source
        self._clock: Clock = clock or RealClock()
        PROCESS_RESOURCES.after_fork(self, Recorder.forget)
        # Reentrant: a finalizer that calls `mark` may run anywhere. Readings are taken under it, to keep their order.
        self._lock = threading.RLock()
        self._book = StepBook()
        self._keeper = MarkKeeper()
        #: When the body's first line ran.
        self._origin_s = self._clock.now()
        self._since_mark = Span("", self._origin_s, 0)
        #: The open phases that are measured, and the time since the last mark.
        self._spans = [self._since_mark]
        #: The frameworks' own peaks at the last reading.
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        self._has_steps = False
        self._names: set[str] = set()
        #: Without `step`: name that begins a step; `None`: unknown.
        self._head: str | None = None
        #: End of the last phase or mark that belongs to the open step.
        self._tail_s: float | None = None
        #: State of the open step: read in full, number of marks, seconds of reading.
        self._in_full = True
        self._marked = 0
        self._spent_s = 0.0
        self._trace: EndTrace | None = None
        self._over = False
        self.metrics: dict[str, float] = {}
        #: Times of the next full reading of a step, and of the next sample at the end of a step.
        self._due_s = 0.0
        self._sample_due_s = 0.0

    def begin_phase(self, name: str) -> Span:
        """Begin a phase; pass the returned value to `end_phase`."""
        with self._lock:
            at_s = self._clock.now()
            is_new = self._take_name(name, at_s)
            phase = Span(name, at_s, self._book.count)
            if self._is_wanted(is_new):
                self._begin_span(phase, self.counters())
            return phase

    def end_phase(self, phase: Span) -> None:
        """End a phase and measure it."""
        with self._lock:
            at_s = self._tail_s = self._clock.now()
            if phase in self._spans:
                self._add(phase, at_s - phase.began_s)
                self._spans.remove(phase)

    def mark(self, name: str) -> None:
        """Record this moment, with the peaks since the last mark."""
        with self._lock:
            at_s = self._clock.now()
            is_new = self._take_name(name, at_s)
            if name != self._head:
                self._tail_s = at_s
            span, counters = self._since_mark, None
            span.name, span.began_s, span.step = name, at_s, self._book.count
            if self._is_wanted(is_new):
                counters = self._add(span, None)
            self._spans.remove(span)
            self._since_mark = Span("", at_s, self._book.count)
            self._begin_span(self._since_mark, counters)

    def step(self) -> None:
        """End a step."""
        with self._lock:
            self._has_steps = True
            self._end_step(self._clock.now())

    @property
    def step_count(self) -> int:
        """Number of steps that have ended."""
        return self._book.count

    def begin(self) -> None:
        """Begin the body: times count from here."""
        with self._lock:
            self._origin_s = self._clock.now()

    def sample(self, *, at_end: bool = False) -> tuple[int, int | None] | None:
        """Take a sample, record it and return it: bytes allocated now, allocation retries so far."""
        with self._lock:
            found = self._source.sample()
            if found is not None:
                self._take(*found, at_end=at_end)
            return found

    def counters(self, *, at_end: bool = False) -> Counters | None:
        """Read all counters, record them and return them; `at_end`: at the end of a step."""
        with self._lock:
            counters = self._timed(self._source.counters)
            if counters is None:
                return None
            live, reserved = counters.live_bytes, counters.reserved_bytes
            # A peak that differs from the last one is newer than it. After a reset by the body it is lower.
            if counters.peak_live_bytes != self._peak_live_bytes:
                live, at_end = max(live, counters.peak_live_bytes), False
            self._peak_live_bytes = counters.peak_live_bytes
            if counters.peak_reserved_bytes is not None:
                if counters.peak_reserved_bytes != self._peak_reserved_bytes:
                    reserved = max(reserved or 0, counters.peak_reserved_bytes)
                self._peak_reserved_bytes = counters.peak_reserved_bytes
            self._take(live, counters.alloc_retries, reserved, at_end=at_end)
            return counters

    def release_unused(self) -> None:
        """Return unused device memory of the frameworks to the driver, without the lock: the device may be busy."""
        self._source.release_unused()

    def stop(self) -> None:
        """End the body, after success or failure: nothing is traced from here on."""
        with self._lock:
            self._over = True
            self._end_trace()

    def finish(self) -> None:
        """End the last step of a body that has returned, if names begin the steps; not called if the body raised."""
        with self._lock:
            self._end_trace()
            self.counters()
            if not self._has_steps and self._head is not None and self._tail_s is not None:
                self._book.boundary(self._tail_s)

    def take(self) -> tuple[StepFacts | None, tuple[Mark, ...]]:
        """Return the facts about the steps so far, and the marks that were not returned before."""
        with self._lock:
            return self._book.facts(), self._keeper.take()

    def forget(self) -> None:
        """In a fork (a worker of a data loader): stop recording; open phases may still end."""
        in_task.set_current_recorder(None)
        # The lock's holder may not exist here.
        self._lock = threading.RLock()
        self._trace = None

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
        found: tuple[int, int | None] | None = None
        if not self._in_full and at_s >= self._sample_due_s:
            found = self.sample(at_end=True)
            self._sample_due_s = at_s + READ_SHARE * (self._clock.now() - at_s)
        # After an allocation retry, too, so that an earlier peak does not count as a later one.
        if self._in_full or self._book.released_cache:
            counters = self.counters(at_end=True)
            found = None
            if counters is not None:
                found = counters.live_bytes, counters.alloc_retries
        self._book.boundary(at_s, *(found or ()))
        if self._in_full:
            self._due_s = at_s + READ_SHARE * self._spent_s
        self._in_full = self._book.count < FIRST_STEPS or at_s >= self._due_s
        self._marked, self._spent_s, self._tail_s = 0, 0.0, None
        # Not the first step, for which the framework's own peak counts.
        if self._in_full and not self._over:
            self._trace = self._timed(self._source.begin_trace)

    def _is_wanted(self, is_new: bool) -> bool:
        """Return whether to measure a phase or mark, and count it."""
        wanted = self._marked < MARKS_PER_STEP and (self._in_full or is_new)
        self._marked += wanted
        return wanted

    def _begin_span(self, span: Span, counters: Counters | None) -> None:
        if counters is not None:
            span.peak_live_bytes = counters.live_bytes
            span.peak_reserved_bytes = counters.reserved_bytes
        self._spans.append(span)

    def _add(self, span: Span, duration_s: float | None) -> Counters | None:
        counters = self.counters()
        self._keeper.add(
            Mark(
                at_s=span.began_s - self._origin_s,
                name=span.name,
                duration_s=duration_s,
                allocated_bytes=None if counters is None else counters.live_bytes,
                peak_allocated_bytes=span.peak_live_bytes,
                reserved_bytes=None if counters is None else counters.reserved_bytes,
                peak_reserved_bytes=span.peak_reserved_bytes,
                process_bytes=self._timed(self._source.process_bytes),
                step=span.step,
            )
        )
        return counters

    def _timed(self, read: Callable[[], T]) -> T:
        """Call a reading function; its time counts for the open step."""
        began_s = self._clock.now()
        found = read()
        self._spent_s += self._clock.now() - began_s
        return found

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        peak = None if trace is None else self._timed(trace)
        if peak is not None:
            self._book.reading(peak)

    def _take(
        self,
        live_bytes: int,
        retries: int | None,
        reserved_bytes: int | None = None,
        *,
        at_end: bool,
    ) -> None:
        self._book.reading(live_bytes, retries, at_end=at_end)
        for span in self._spans:
            span.peak_live_bytes = largest(span.peak_live_bytes, live_bytes)
            span.peak_reserved_bytes = largest(span.peak_reserved_bytes, reserved_bytes)


#: Seconds between two samples, on average. At 5 ms a ResNet-50 on an H200 ran as fast as without.
SAMPLE_INTERVAL_S = 0.005

#: Sampling, which holds the interpreter's lock, may take one part in this number of the processor's time.
SAMPLE_SHARE = 100

#: Varied fraction of the interval, so that samples do not fall in step with the body's loop.
JITTER = 0.6

#: Seconds to wait for the thread's end: a call into a driver may never return.
END_S = 30.0


class LiveSampler:
    """Takes samples every few milliseconds on its thread, and sends counters to the parent every `interval_s` seconds.

    The thread also carries out requests of the parent, and ends the process if the parent is gone.
    """

    def __init__(self, channel: Channel, recorder: Recorder, interval_s: float) -> None:
        self._channel = channel
        self._recorder = recorder
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefect-gpu-recorder", daemon=True)
        #: Counters and number of steps of the last message.
        self._sent: tuple[Counters | None, int] = None, 0

    def start(self) -> None:
        """Start the thread; if the system starts no thread, the body runs without samples."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _report_end(error)

    def stop(self) -> None:
        """End the thread, if there is one, and the trace."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        self._recorder.stop()

    def last(
        self,
    ) -> tuple[Counters | None, tuple[str, ...], StepFacts | None, tuple[Mark, ...]]:
        """Return the current counters, the frameworks used, and the steps and marks that were not sent before."""
        counters = self._recorder.counters()
        return counters, hooks.frameworks_in_use(), *self._recorder.take()

    def _run(self) -> None:
        try:
            # `OSError`: the parent is gone, or the body closed the channel.
            with contextlib.suppress(OSError):
                self._take_samples()
        except Exception as error:
            _report_end(error)

    def _take_samples(self) -> None:
        due_s = time.monotonic() + self._interval_s
        # Not the module's generator, which the body may have seeded.
        vary = random.Random().uniform
        pause_s = SAMPLE_INTERVAL_S
        while not self._stopped.wait(pause_s * vary(1 - JITTER / 2, 1 + JITTER / 2)):
            self._answer()
            began_s = time.thread_time()
            self._recorder.sample()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._interval_s
                self._channel.end_with_parent()
                self._send()
            pause_s = max(SAMPLE_INTERVAL_S, SAMPLE_SHARE * (time.thread_time() - began_s))

    def _answer(self) -> None:
        request = self._channel.take_request()
        if request is not None and time.monotonic() < request.until_s:
            self._recorder.release_unused()
            self._channel.send(ReleasedUnused(request.until_s))

    def _send(self) -> None:
        counters = self._recorder.counters()
        if counters is None and not self._recorder.step_count:
            # Marks alone are sent at the end.
            return
        steps, marks = self._recorder.take()
        news = counters, 0 if steps is None else steps.count
        if marks or news != self._sent:
            self._sent = news
            self._channel.send(CountersRead(counters, hooks.frameworks_in_use(), steps, marks))


def _report_end(error: Exception) -> None:
    sys.stderr.write(f"prefect_gpu: memory is no longer sampled: {error!r}\n")
