"""What is learned of one process while it runs, and the report that is made of it.

It takes facts down and adds them up; it starts, asks and decides nothing (`attempt`), and it does not
draw or publish (`reports`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from uuid import UUID

from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.reports.model import BudgetSource, Outcome, Source, TaskReport
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
        self._counted = False
        self._peak_live_bytes: int | None = None
        self._peak_reserved_bytes: int | None = None
        #: How the body ended, as the child says; it counts once the value is here.
        self._claimed: tuple[Outcome, str] = ("died", "")
        #: The value has arrived whole.
        self.value_arrived = False
        self._used: tuple[str, ...] = ()
        #: Most that it held, as itself or the simulated devices know it, in bytes.
        self._own_peak_bytes = 0
        #: Process id; `None`: there is no process yet.
        self.pid: int | None = None
        #: Bytes of context left out of its cap.
        self.context_bytes = 0
        #: Monotonic seconds of the body's first line and end; `None`: not yet.
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.outcome: Outcome = "died"
        #: One line of what went wrong.
        self.error = ""

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
        self._add(at_s, process_bytes, live_bytes, live_bytes)

    def add_counters(self, counters: Counters, frameworks: tuple[str, ...]) -> None:
        """Take down what its frameworks say themselves.

        The body may reset their peaks, which are its own to read: the largest seen counts.
        """
        self._counted = True
        self._used = frameworks
        for live in (counters.live_bytes, counters.peak_live_bytes):
            self._peak_live_bytes = largest(self._peak_live_bytes, live)
        for reserved in (counters.reserved_bytes, counters.peak_reserved_bytes):
            self._peak_reserved_bytes = largest(self._peak_reserved_bytes, reserved)
        self._add(time.monotonic(), None, counters.live_bytes, counters.reserved_bytes)

    def add_peaks(self, live_bytes: int, process_bytes: int) -> None:
        """Take down peaks that are known only at its end (simulated devices)."""
        self._own_peak_bytes = process_bytes
        self._add(time.monotonic(), None, live_bytes, live_bytes)

    def add_end(self, ended: BodyEnded) -> None:
        """Take down how its body ended, as the child says. It may still die sending its value."""
        self.ended_s = time.monotonic()
        if ended.counters is not None:
            self.add_counters(ended.counters, ended.frameworks)
        self._used = ended.frameworks
        self._own_peak_bytes = ended.host_peak_bytes
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
            peak_live = self._peak_live_bytes if self._counted else series.peak_live_bytes
            peak_reserved = (
                self._peak_reserved_bytes if self._counted else series.peak_reserved_bytes
            )
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
                error=self.error,
                wasted_byte_seconds=series.wasted_byte_seconds(ended_s - self._placed_s),
            )

    def _add_up(self, kind: DeviceKind, peak_reserved: int | None) -> tuple[int, int, Source]:
        """Give the process's peak, its context, and where the peak comes from."""
        peak = self._series.peak_process_bytes or 0
        if kind != "nvml":
            # A resident set that was gone before the next reading is known to the child.
            return max(peak, self._own_peak_bytes), self.context_bytes, kind
        if peak_reserved is None or not self._counted:
            return peak, self.context_bytes, kind
        if peak >= peak_reserved > 0:
            return peak, max(0, peak - peak_reserved), kind
        # Too short to be seen whole, or on a device that tells nothing of processes.
        return peak_reserved + self.context_bytes, self.context_bytes, "framework"
