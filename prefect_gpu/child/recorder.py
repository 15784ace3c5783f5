"""Records the memory and time of a body's phases, marks and steps, in its child process.

Phases are `with` blocks, marks are moments, steps are repetitions. All counters are read at both ends of a phase. In
between, a `LiveSampler` takes a sample every few milliseconds. Samples miss short peaks, so allocations are also traced
in fully read steps after the first, if the framework allows that. Counters are not reset, since the body may read them.
Devices are not synchronised: seconds are the CPU's. `measurements` limits the number of kept marks.
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
from prefect_gpu.process_resources import PROCESS_RESOURCES, read_own_bytes
from prefect_gpu.processes.messages import CountersRead, ReleasedUnused

T = TypeVar("T")

#: Number of last steps whose seconds and end memory are kept, for the median and the slope.
KEPT_STEPS = 512

#: Steps are alike if the peaks of the two largest steady steps differ by less than this factor. For inputs of one size,
#: PyTorch's peaks are equal to the byte. A smaller last batch or an evaluation is not among the two largest.
ALIKE_FACTOR = 1.02

#: Step ends needed for a slope: one outlier among three would mislead.
LEAST_FOR_SLOPE = 4


class StepBook:
    """Computes `StepFacts` from the readings of one body's steps. For one thread at a time.

    Steps are *steady* after the first step, in which frameworks try kernels and take more memory, and after the last
    step in which the allocator had to release its cache. The memory of the open (unfinished) step counts, its seconds
    do not. A step read only at its ends has no known peak: on a busy machine samples come late. If steady steps are not
    alike, inputs change size, and the first step's memory counts, since its input may have been the largest.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first_live: int | None = None
        #: Peak bytes in the open step.
        self._open_live: int | None = None
        #: The open step was read between its ends, or its peak is known.
        self._is_open_read = False
        self._steady_live: int | None = None
        #: Second largest peak of the ended steady steps; `None`: fewer than two.
        self._second_live: int | None = None
        self._steady = 0
        self._last_retries = 0
        #: Allocation retries after the first step.
        self._retries = 0
        #: The allocator had to release its cache in the open step.
        self.released_cache = False
        self._ended_s: float | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        #: Numbers of steady steps, each with the bytes allocated at its end.
        self._ends: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)

    def reading(
        self, live_bytes: int, alloc_retries: int | None = None, *, at_end: bool = False
    ) -> None:
        """Add a reading of the frameworks' allocated bytes, or of their peak, to the open step.

        `alloc_retries` is how often an allocator had to release its cache so far (`None`: not read). A reading
        `at_end` of the step is no peak: most of the memory may be free again.
        """
        self._open_live = largest(self._open_live, live_bytes)
        self._is_open_read = self._is_open_read or not at_end
        if alloc_retries is None:
            return
        # Fewer than before: the body has reset the framework's statistics.
        rise = alloc_retries - self._last_retries
        more = rise if rise >= 0 else alloc_retries
        self._last_retries = alloc_retries
        if more:
            self.released_cache = True
            self._retries += more if self.count else 0

    def boundary(
        self, at_s: float, live_bytes: int | None = None, alloc_retries: int | None = None
    ) -> None:
        """End the open step at a monotonic time, with a reading of that moment (`live_bytes` is `None`: no reading)."""
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
        # A step begins with the memory at the end of the last.
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
        # Imported late, since most bodies have no steps.
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


#: After the first steps, reading all counters may take 1/READ_SHARE of the time, and samples at steps' ends as much. On
#: an H200 with PyTorch 2.11, a sample takes 40 µs, and reading a step with four phases in full takes 1 ms.
READ_SHARE = 100

#: Most names kept of phases and marks: a body may invent a new name each time.
KEPT_NAMES = 256


@dataclass(slots=True, eq=False)
class Span:
    """An open phase, or the time since the last mark, with its memory peaks so far."""

    name: str
    #: Monotonic seconds.
    began_s: float
    #: Number of the step in which the span began, from 0.
    step: int
    #: `None`: unknown, or not measured.
    peak_live_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class Recorder:
    """Records one body's phases, marks and steps. Safe to use from several threads.

    A step ends with `step()`. In a body without such calls, each occurrence of the first repeated name of a phase or
    mark begins a step.
    """

    def __init__(self, source: Readings, clock: Clock | None = None) -> None:
        self._source = source
        self._clock: Clock = clock or RealClock()
        PROCESS_RESOURCES.after_fork(self, Recorder.forget)
        # Reentrant, since a finalizer that calls `mark` may run anywhere. Held during readings, to keep their order.
        self._lock = threading.RLock()
        self._book = StepBook()
        self._keeper = MarkKeeper()
        #: Time of the body's first line.
        self._origin_s = self._clock.now()
        self._since_mark = Span("", self._origin_s, 0)
        #: Measured open phases, and the time since the last mark.
        self._spans = [self._since_mark]
        #: The frameworks' own peaks at the last reading.
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        self._has_steps = False
        self._names: set[str] = set()
        #: Name that begins a step in a body without `step`; `None`: unknown.
        self._head: str | None = None
        #: Time of the open step's last mark or end of a phase.
        self._tail_s: float | None = None
        #: Of the open step: all counters are read; number of measured marks; seconds of reading.
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
        """Begin a phase, and return its span for `end_phase`."""
        with self._lock:
            at_s = self._clock.now()
            is_new = self._take_name(name, at_s)
            phase = Span(name, at_s, self._book.count)
            if self._is_wanted(is_new):
                self._begin_span(phase, self.counters())
            return phase

    def end_phase(self, phase: Span) -> None:
        """End a phase, and record its time and memory."""
        with self._lock:
            at_s = self._tail_s = self._clock.now()
            if phase in self._spans:
                self._add(phase, at_s - phase.began_s)
                self._spans.remove(phase)

    def mark(self, name: str) -> None:
        """Record a mark at this moment, with the memory peaks since the last mark."""
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
        """End the open step of the body; see `prefect_gpu.step`."""
        with self._lock:
            self._has_steps = True
            self._end_step(self._clock.now())

    @property
    def step_count(self) -> int:
        """Number of steps that have ended."""
        return self._book.count

    def begin(self) -> None:
        """Note that the body begins: times of marks count from here."""
        with self._lock:
            self._origin_s = self._clock.now()

    def sample(self, *, at_end: bool = False) -> tuple[int, int | None] | None:
        """Record a sample and return its allocated bytes and allocation retries so far; `None`: unknown."""
        with self._lock:
            found = self._source.sample()
            if found is not None:
                self._take(*found, at_end=at_end)
            return found

    def counters(self, *, at_end: bool = False) -> Counters | None:
        """Read, record and return all counters (`at_end`: of the end of a step); `None`: unknown."""
        with self._lock:
            counters = self._timed(self._source.counters)
            if counters is None:
                return None
            live, reserved = counters.live_bytes, counters.reserved_bytes
            # A changed peak is newer than the last reading. (After a reset by the body, peaks are lower.)
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
        """Return the frameworks' unused device memory to the driver. Takes no lock, since the device may be busy."""
        self._source.release_unused()

    def stop(self) -> None:
        """Stop tracing allocations, after the body's success or failure."""
        with self._lock:
            self._over = True
            self._end_trace()

    def finish(self) -> None:
        """Read all counters, and end the last step if steps begin with a name. Only if the body returned a value."""
        with self._lock:
            self._end_trace()
            self.counters()
            if not self._has_steps and self._head is not None and self._tail_s is not None:
                self._book.boundary(self._tail_s)

    def take(self) -> tuple[StepFacts | None, tuple[Mark, ...]]:
        """Return the facts about the steps so far (`None`: no step), and the marks since the last call."""
        with self._lock:
            return self._book.facts(), self._keeper.take()

    def forget(self) -> None:
        """Stop recording in a fork of the child, such as a worker of a data loader; open phases may still end."""
        in_task.set_current_recorder(None)
        # The thread that holds the lock may not exist in the fork.
        self._lock = threading.RLock()
        self._trace = None

    def _take_name(self, name: str, at_s: float) -> bool:
        """Note a phase's or mark's name, which may begin a step; return whether the name is new."""
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
        # Also after an allocation retry, so that an earlier peak does not count as a later peak.
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
        # The first step is not traced, since the framework's own peak is the step's.
        if self._in_full and not self._over:
            self._trace = self._timed(self._source.begin_trace)

    def _is_wanted(self, is_new: bool) -> bool:
        """Return whether to measure a phase or mark; count measured phases and marks of the step."""
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
        """Call a reading function and add its seconds to the open step's."""
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


#: Mean seconds between two samples. At 5 ms a ResNet-50 on an H200 ran as fast as without samples.
SAMPLE_INTERVAL_S = 0.005

#: Sampling, which holds the interpreter's lock, may take 1/SAMPLE_SHARE of a processor's time.
SAMPLE_SHARE = 100

#: Fraction of the interval that varies at random, so that samples do not synchronise with the body's loop.
JITTER = 0.6

#: Seconds to wait for the sampler's thread: a call into a driver may never return.
END_S = 30.0


#: Counters, used frameworks, steps, marks, largest resident set in bytes, metrics.
LastReadings = tuple[
    Counters | None, tuple[str, ...], StepFacts | None, tuple[Mark, ...], int, dict[str, float]
]


class LiveSampler:
    """Thread that samples memory, sends counters every `interval_s` seconds, and serves requests of the parent."""

    def __init__(
        self,
        channel: Channel,
        recorder: Recorder,
        interval_s: float,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._channel = channel
        #: Called at every sample.
        self._watch = watch
        self._recorder = recorder
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefect-gpu-recorder", daemon=True)
        #: Counters and number of steps in the last message.
        self._sent: tuple[Counters | None, int] = None, 0

    def start(self) -> None:
        """Start the thread; if the system refuses a thread, the body runs without samples."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _report_end(error)

    def stop(self) -> None:
        """End the thread, if it runs, and the trace of allocations."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        self._recorder.stop()

    def last(self) -> LastReadings:
        """Return the last readings, in the order of the fields of `BodyEnded`; steps and marks since the last message."""
        counters, used = self._recorder.counters(), hooks.frameworks_in_use()
        # On Linux `ru_maxrss` begins with the parent's memory before the exec.
        peak_bytes = read_own_bytes("VmHWM")
        return counters, used, *self._recorder.take(), peak_bytes, self._recorder.metrics

    def _run(self) -> None:
        try:
            # `OSError`: the parent is gone, or the body closed the channel.
            with contextlib.suppress(OSError):
                self._take_samples()
        except Exception as error:
            _report_end(error)

    def _take_samples(self) -> None:
        due_s = time.monotonic() + self._interval_s
        # Not the generator of `random` itself, which the body may have seeded.
        vary = random.Random().uniform
        pause_s = SAMPLE_INTERVAL_S
        while not self._stopped.wait(pause_s * vary(1 - JITTER / 2, 1 + JITTER / 2)):
            self._answer()
            began_s = time.thread_time()
            self._recorder.sample()
            if self._watch is not None:
                self._watch()
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
            # Marks without counters or steps are sent at the end.
            return
        steps, marks = self._recorder.take()
        news = counters, 0 if steps is None else steps.count
        if marks or news != self._sent:
            self._sent = news
            self._channel.send(CountersRead(counters, hooks.frameworks_in_use(), steps, marks))


def _report_end(error: Exception) -> None:
    sys.stderr.write(f"prefect_gpu: memory is no longer sampled: {error!r}\n")
