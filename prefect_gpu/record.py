"""What is learned of one process while it runs, and the report that is made of it.

It takes facts down and adds them up; it starts, asks and decides nothing (`attempt`), and it does not
draw or publish (`reports`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.frameworks.context import ContextWatch
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.frameworks.registry import SEEN_BY_LOOKING
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.reports.marks import MarkKeeper
from prefect_gpu.reports.model import (
    BudgetSource,
    Mark,
    Outcome,
    Source,
    StepFacts,
    TaskReport,
)
from prefect_gpu.reports.series import Sample, SeriesBuilder, largest
from prefect_gpu.scheduling.model import DeviceKind, Placement


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Which task run a process belongs to."""

    task_name: str
    task_key: str
    task_run_id: UUID
    task_run_name: str
    flow_run_id: UUID | None


class ProcessRecord:
    """Facts of one process, from its placement on. Any thread may add to it.

    Args:
        placement: Where it runs.
        placed_s: Monotonic seconds when it was placed.
        queued_s: Seconds that it waited for that.
    """

    def __init__(self, placement: Placement, placed_s: float, queued_s: float) -> None:
        self._placement = placement
        self._placed_s = placed_s
        self._queued_s = queued_s
        #: Wall-clock seconds since the epoch.
        self._placed_at = time.time()
        #: Guards the series: the broker's thread, the launcher's and the engine's add to it.
        self._lock = threading.Lock()
        self._series = SeriesBuilder(sum(placement.budget_bytes))
        self._context = ContextWatch()
        self._counted = False
        #: The last counters are those of the body's end: its peaks are whole.
        self._counted_out = False
        self._peak_live_bytes: int | None = None
        self._peak_reserved_bytes: int | None = None
        #: How the body ended, as the child says; it counts once the value is here.
        self._claimed: tuple[Outcome, str] = ("died", "")
        #: The value has arrived whole.
        self.value_arrived = False
        self._used: tuple[str, ...] = ()
        self._steps: StepFacts | None = None
        #: Their times are seconds since the body's first line.
        self._marks = MarkKeeper()
        #: Most that it held, as itself or the simulated devices know it, in bytes.
        self._own_peak_bytes = 0
        #: Process id; `None`: there is no process yet.
        self.pid: int | None = None
        #: Bytes of context left out of its cap.
        self.context_bytes = 0
        #: Contexts as they are known on its device, in bytes by framework.
        self.known_contexts: Mapping[str, int] = {}
        #: Monotonic seconds of the body's first line and end; `None`: not yet.
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.outcome: Outcome = "died"
        #: One line of what went wrong.
        self.error = ""
        #: Bytes that a framework could allocate at most on a device; `None`: no cap.
        self.cap_bytes: int | None = None
        #: What the child saw when device memory ran out; `None`: it did not, or nobody knows.
        self.out_of_memory: OutOfMemory | None = None
        #: What that is put down to (`scheduling.ladder.Cause`); empty: there was none.
        self.cause = ""
        #: Bytes on one device that it would have needed; `None`: unknown.
        self.wanted_bytes: int | None = None

    @property
    def budget_bytes(self) -> int:
        """Bytes on each device, the smallest where they differ."""
        return min(self._placement.budget_bytes)

    @property
    def total_budget_bytes(self) -> int:
        """Bytes on all its devices together."""
        return sum(self._placement.budget_bytes)

    @property
    def last_process_bytes(self) -> int | None:
        """Bytes on all its devices when they last showed any; `None`: they never did.

        A process that was killed leaves the driver's list before its end is heard.
        """
        with self._lock:
            samples = self._series.samples
        return next((s.process_bytes for s in samples[::-1] if s.process_bytes), None)

    def add_reading(self, at_s: float, process_bytes: int, live_bytes: int | None = None) -> None:
        """Take down what its devices show for it.

        Args:
            at_s: Monotonic seconds.
            process_bytes: Of the whole process, on all its devices.
            live_bytes: What it has allocated, where the devices know (simulated ones do).
        """
        with self._lock:
            self._context.add_reading(process_bytes)
        self._add(at_s, process_bytes, live_bytes, live_bytes)

    def add_counters(self, counters: Counters, frameworks: tuple[str, ...]) -> None:
        """Take down what its frameworks say themselves.

        The body may reset their peaks, which are its own to read: the largest seen counts.
        """
        self._counted = True
        self._used = frameworks
        with self._lock:
            self._context.add_reserved(
                counters.reserved_bytes, counters.peak_reserved_bytes, counters.freed_bytes
            )
        for live in (counters.live_bytes, counters.peak_live_bytes):
            self._peak_live_bytes = largest(self._peak_live_bytes, live)
        for reserved in (counters.reserved_bytes, counters.peak_reserved_bytes):
            self._peak_reserved_bytes = largest(self._peak_reserved_bytes, reserved)
        self._add(time.monotonic(), None, counters.live_bytes, counters.reserved_bytes)

    def add_steps(self, steps: StepFacts | None, marks: Iterable[Mark]) -> None:
        """Take down what its steps show so far, and the marks that are new.

        Args:
            steps: `None`: there was none.
            marks: Their times are seconds since the body's first line.
        """
        with self._lock:
            self._steps = steps or self._steps
            self._marks.extend(marks)

    def add_peaks(self, live_bytes: int, process_bytes: int) -> None:
        """Take down peaks that are known only at its end (simulated devices)."""
        self._own_peak_bytes = process_bytes
        self._add(time.monotonic(), None, live_bytes, live_bytes)

    def add_end(self, ended: BodyEnded) -> None:
        """Take down how its body ended, as the child says. It may still die sending its value."""
        self.ended_s = time.monotonic()
        if ended.counters is not None:
            self.add_counters(ended.counters, ended.frameworks)
            self._counted_out = True
        self.add_steps(ended.steps, ended.marks)
        self._used = ended.frameworks
        self._own_peak_bytes = ended.host_peak_bytes
        self.out_of_memory = ended.out_of_memory
        if not ended.raised:
            self._claimed = "completed", ""
        else:
            error = ended.traceback.strip().rpartition("\n")[2]
            self._claimed = "oom" if ended.out_of_memory else "failed", error

    def add_value(self) -> None:
        """Take down that the value is here whole: the outcome is what the child said."""
        self.value_arrived = True
        if self.outcome == "died":
            self.outcome, self.error = self._claimed

    def _add(
        self, at_s: float, process: int | None, live: int | None, reserved: int | None
    ) -> None:
        since = max(0.0, at_s - self._placed_s)
        with self._lock:
            self._series.add(Sample(since, process, live, reserved))

    def report(
        self,
        facts: TaskFacts,
        kind: DeviceKind,
        number: int,
        budget_source: BudgetSource,
        frameworks: tuple[str, ...],
        leaked_bytes: int | None,
    ) -> TaskReport:
        """Make the report, once nothing is left of the process.

        Args:
            facts: Whose process it was.
            kind: Of its devices.
            number: From 1: which process of the task run.
            budget_source: Where its budget came from.
            frameworks: As tagged; empty: those that it used.
            leaked_bytes: What did not come back; `None`: cannot be told.
        """
        ended_s = time.monotonic() if self.ended_s is None else self.ended_s
        started_s = ended_s if self.started_s is None else self.started_s
        with self._lock:
            series = self._series
            # Simulated devices know more than a child that died between two messages.
            peak_live = largest(self._peak_live_bytes, series.peak_live_bytes)
            peak_reserved = largest(self._peak_reserved_bytes, series.peak_reserved_bytes)
            peak_process, context, source = self._add_up(kind, peak_reserved)
            return TaskReport(
                task_name=facts.task_name,
                task_key=facts.task_key,
                task_run_id=facts.task_run_id,
                task_run_name=facts.task_run_name,
                flow_run_id=facts.flow_run_id,
                pid=self.pid,
                devices=self._placement.devices,
                framework=",".join(frameworks or self._used) or "none",
                outcome=self.outcome,
                attempt=number,
                budget_bytes=self.budget_bytes,
                budget_source=budget_source,
                peak_process_bytes=peak_process,
                peak_live_bytes=peak_live,
                peak_reserved_bytes=peak_reserved,
                context_bytes=context,
                leaked_bytes=leaked_bytes,
                queued_s=self._queued_s,
                start_s=started_s - self._placed_s,
                run_s=max(0.0, ended_s - started_s),
                placed_at=self._placed_at,
                samples=series.samples,
                sample_count=series.count,
                source=source,
                marks=self._placed_marks(started_s),
                error=self.error,
                wasted_byte_seconds=series.wasted_byte_seconds(ended_s - self._placed_s),
                cap_bytes=self.cap_bytes,
                cause=self.cause,
                wanted_bytes=self.wanted_bytes,
                steps=self._seen_steps(),
            )

    def _seen_steps(self) -> StepFacts | None:
        """Give what its steps show; steady memory only where looking can see it."""
        steps = self._steps
        if steps is None or SEEN_BY_LOOKING.issuperset(self._used):
            return steps
        return replace(steps, steady_live_bytes=None)

    def _placed_marks(self, started_s: float) -> tuple[Mark, ...]:
        """Give the marks with their times since the placement."""
        before_s = started_s - self._placed_s
        return tuple(replace(m, at_s=m.at_s + before_s) for m in self._marks.marks())

    def _add_up(self, kind: DeviceKind, peak_reserved: int | None) -> tuple[int, int, Source]:
        """Give the process's peak, its context, and where the peak comes from."""
        peak = self._series.peak_process_bytes or 0
        if kind != "nvml":
            # A resident set that was gone before the next reading is known to the child.
            return max(peak, self._own_peak_bytes), self._assumed_context_bytes(), kind
        context = self._context.seen_bytes()
        if context is None:
            context = self._unseen_context_bytes(peak, peak_reserved)
        if peak_reserved is None or not self._counted or peak >= peak_reserved:
            return peak, context, kind
        # Too short to be seen whole, or on a device that tells nothing of processes.
        return peak_reserved + context, context, "framework"

    def _unseen_context_bytes(self, peak: int, peak_reserved: int | None) -> int:
        """Estimate the context where no reading could be set against what the allocators held.

        A body that gives its cache back all the time leaves none. No reading may have met its peak,
        and the difference of the peaks is then too small: a cap that rests on it would let the
        process pass its budget. So what is assumed is the least, as far as anything is.
        """
        assumed = self._assumed_context_bytes()
        if not peak_reserved or (assumed and not self._counted_out):
            # It took what its counters never said before it died: the difference may be anything.
            return assumed
        return max(assumed, peak - peak_reserved)

    def _assumed_context_bytes(self) -> int:
        """Give the context that was left out of its cap, or is known of what it turned out to use.

        Each of its devices has one.
        """
        known = (self.known_contexts.get(name, 0) for name in self._used)
        each = self.context_bytes or max(known, default=0)
        return each * len(self._placement.devices)
