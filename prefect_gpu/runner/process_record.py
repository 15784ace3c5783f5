"""Collect facts about one process while it runs, and make its report. `attempt` starts it, `reports` publishes."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.frameworks.registry import SEEN_BY_LOOKING
from prefect_gpu.measurements import (
    Mark,
    MarkKeeper,
    Sample,
    SeriesBuilder,
    StepFacts,
    Suspension,
    WorkBuilder,
    largest,
)
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import BudgetSource, ProcessPeak, Source, TaskReport, Verdict
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.scheduling.model import DeviceKind, DeviceWork, Placement

#: Most pairs of process and device whose memory is recorded for a body.
MOST_PROCESSES = 256


#: Wall-clock seconds since the epoch at monotonic time 0, read once: times in a report are as far apart as monotonic
#: ones, and an ended reservation never seems to overlap the next.
EPOCH_S = time.time() - time.monotonic()


class ProcessRecord:
    """Facts about one process from its placement on. Safe to use from several threads.

    The broker's thread adds readings, the launcher's thread messages of the process, the engine's thread caps.
    `placed_s` is in monotonic seconds, `queued_s` the wait before. `watched`: the process must keep to its budget.
    """

    def __init__(
        self, placement: Placement, placed_s: float, queued_s: float, watched: bool = True
    ) -> None:
        self._placement = placement
        self._placed_s = placed_s
        self._queued_s = queued_s
        self._watched = watched
        #: Guards the private attributes below.
        self._lock = threading.RLock()
        self._series = SeriesBuilder(sum(placement.budget_bytes))
        self._work = WorkBuilder()
        self._context = ContextWatch()
        self._counted = False
        #: Whether the last counters are from the body's end: their peaks are complete.
        self._counted_out = False
        self._peak_live_bytes: int | None = None
        self._peak_reserved_bytes: int | None = None
        #: Times are seconds since the placement.
        self._suspensions: tuple[Suspension, ...] = ()
        #: Peak bytes by the device's place in the placement and process id.
        self._processes: dict[tuple[int, int], int] = {}
        #: Peak bytes of all processes together on each device.
        self._device_peaks = [0] * len(placement.devices)
        #: Times are seconds since the body's first line.
        self._marks = MarkKeeper()
        self._metrics: tuple[tuple[str, float], ...] = ()
        #: Peak bytes reported by the process itself or by simulated devices.
        self._own_peak_bytes = 0
        # Set by the methods below; any thread may read them.
        #: Bytes of the budgets on all its devices together.
        self.total_budget_bytes = sum(placement.budget_bytes)
        #: Process id; of the last process if an earlier one ended before it took the call. `None`: no process yet.
        self.pid: int | None = None
        #: Most bytes that a framework can allocate on a device; `None`: no cap.
        self.cap_bytes: int | None = None
        #: Bytes of the context that the cap leaves free.
        self.context_bytes = 0
        #: Frameworks that the process has used so far.
        self.used_frameworks: tuple[str, ...] = ()
        #: Known contexts on its device, in bytes by framework.
        self.known_contexts: Mapping[str, int] = {}
        #: Bytes in the last reading of its devices; `None`: no reading yet.
        self.seen_bytes: int | None = None
        #: Facts about the body's steps so far; `None`: no step.
        self.steps: StepFacts | None = None
        #: Monotonic seconds of the body's first line and of its end; `None`: not yet.
        self.started_s: float | None = None
        self.ended_s: float | None = None
        #: Whether the value has arrived completely.
        self.value_arrived = False
        #: Whether the process is a client of MPS.
        self.is_client = False
        #: The child's facts about its out-of-memory; `None`: none, or not known.
        self.out_of_memory: OutOfMemory | None = None

    @property
    def last_process_bytes(self) -> int | None:
        """Bytes in the last non-zero reading (the driver drops a killed process early); `None`: there was none."""
        with self._lock:
            samples = self._series.samples
        return next((s.process_bytes for s in samples[::-1] if s.process_bytes), None)

    def set_caps(
        self, cap_bytes: int | None, context_bytes: int, known_contexts: Mapping[str, int]
    ) -> None:
        """Set the attributes `cap_bytes`, `context_bytes` and `known_contexts`."""
        self.cap_bytes, self.context_bytes = cap_bytes, context_bytes
        self.known_contexts = known_contexts

    def add_reading(
        self, at_s: float, sizes_bytes: Sequence[int], live_bytes: int | None = None
    ) -> tuple[int, int] | None:
        """Record a reading of the devices; return the first overshoot as bytes and budget, `None`: no overshoot.

        `at_s` is in monotonic seconds. `sizes_bytes` is the process's memory on each device, in the placement's order.
        `live_bytes` is its allocated memory; `None`: not known (only simulated devices know).
        """
        total = sum(sizes_bytes)
        with self._lock:
            self.seen_bytes = total
            self._context.add_reading(total)
            self._add(at_s, total, live_bytes, live_bytes)
            self._device_peaks = list(map(max, self._device_peaks, sizes_bytes))
            for size, budget in zip(sizes_bytes, self._placement.budget_bytes, strict=True):
                if self._watched and size > budget + OVERSHOOT_BYTES:
                    self._watched = False
                    return size, budget
        return None

    def add_absence(self, at_s: float) -> None:
        """Record at a reading (monotonic seconds) that the process's memory is on the host or being moved."""
        with self._lock:
            self.seen_bytes = 0
            self._work.pause()
            self._add(at_s, 0, None, None)

    def add_suspension(self, suspension: Suspension) -> None:
        """Record a suspension that has ended."""
        begun_s, ended_s = suspension.begun_s - self._placed_s, suspension.ended_s - self._placed_s
        with self._lock:
            placed = replace(suspension, begun_s=begun_s, ended_s=ended_s)
            self._suspensions = (*self._suspensions, placed)

    def add_processes(self, by_pid: Sequence[Mapping[int, int]]) -> None:
        """Record the bytes of each of the body's processes: per device in the placement's order, by process id."""
        with self._lock:
            for device, held in enumerate(by_pid):
                for pid, held_bytes in held.items():
                    key = device, pid
                    if key in self._processes or len(self._processes) < MOST_PROCESSES:
                        self._processes[key] = max(held_bytes, self._processes.get(key, 0))

    def add_work(self, at_s: float, works: Sequence[DeviceWork | None]) -> None:
        """Record what each device computed, in the placement's order, at a reading (monotonic seconds).

        Only the time of the body counts.
        """
        with self._lock:
            if self.started_s is None or self.ended_s is not None:
                return
            for place, work in enumerate(works):
                if work is not None:
                    busy, of_all = work.busy.get(self.pid, 0.0), sum(work.busy.values())
                    self._work.add(at_s, place, busy, of_all, work.energy_j, work.units)

    def add_counters(self, counters: Counters, frameworks: tuple[str, ...]) -> None:
        """Record the frameworks' counters. The body may reset their peaks, so the largest peak seen counts."""
        with self._lock:
            self._counted = True
            self.used_frameworks = frameworks
            live, reserved = counters.live_bytes, counters.reserved_bytes
            self._context.add_reserved(reserved, counters.peak_reserved_bytes, counters.freed_bytes)
            most_live, most_reserved = counters.peak_live_bytes, counters.peak_reserved_bytes
            self._peak_live_bytes = largest(largest(self._peak_live_bytes, live), most_live)
            self._peak_reserved_bytes = largest(
                largest(self._peak_reserved_bytes, reserved), most_reserved
            )
            self._add(time.monotonic(), None, live, reserved)

    def add_steps(self, steps: StepFacts | None, marks: Iterable[Mark]) -> None:
        """Record facts about steps (`None`: no step) and new marks, in seconds since the body's first line."""
        with self._lock:
            self.steps = steps or self.steps
            self._marks.add(*marks)

    def add_peaks(self, live_bytes: int, process_bytes: int) -> None:
        """Record the peaks of a process on simulated devices, which are known only at its end."""
        with self._lock:
            self._own_peak_bytes = process_bytes
            self._add(time.monotonic(), None, live_bytes, live_bytes)

    def add_end(self, ended: BodyEnded) -> None:
        """Record the body's end as the child reports it. The child may still die while it sends its value."""
        with self._lock:
            self.ended_s = time.monotonic()
            if ended.counters is not None:
                self.add_counters(ended.counters, ended.frameworks)
                self._counted_out = True
            self._context.seen_bytes = largest(self._context.seen_bytes, ended.context_bytes)
            self.steps = ended.steps or self.steps
            self._marks.add(*ended.marks)
            self.used_frameworks = ended.frameworks
            self._metrics = tuple(ended.metrics.items())
            self._own_peak_bytes = ended.host_peak_bytes
            self.out_of_memory = ended.out_of_memory or self.out_of_memory

    def _add(self, at_s: float, process: int | None, live: int | None, held: int | None) -> None:
        since = max(0.0, at_s - self._placed_s)
        self._series.add(Sample(since, process, live, held))

    def report(
        self,
        call: TaskCall,
        kind: DeviceKind,
        number: int,
        budget_source: BudgetSource,
        estimated_from: str | None,
        frameworks: tuple[str, ...],
        verdict: Verdict,
        leaked_bytes: int | None,
        gone_s: float | None,
        shared_with: tuple[str, ...] = (),
        capacity_bytes: int | None = None,
    ) -> TaskReport:
        """Return the report of a call's process, once nothing is left of the process.

        `number` is the process's number in its task run, from 1. `frameworks` are from the tags; empty: the frameworks
        that the process used. `leaked_bytes` were not freed; `None`: not known. `gone_s` is the monotonic time of the
        end; `None`: now. `shared_with` names tasks on the same devices meanwhile. `capacity_bytes` is the largest
        possible budget on each device; `None`: not known.
        """
        with self._lock:
            ended_s = self.ended_s if self.ended_s is not None else gone_s
            ended_s = time.monotonic() if ended_s is None else ended_s
            started_s = ended_s if self.started_s is None else self.started_s
            series = self._series
            # Simulated devices know more than a child that died between two messages.
            peak_live = largest(self._peak_live_bytes, series.peak_live_bytes)
            peak_reserved = largest(self._peak_reserved_bytes, series.peak_reserved_bytes)
            peak_process, context, source = self._add_up(kind, peak_reserved)
            plan, run, identity, seen = (
                call.plan,
                call.run.task_run,
                call.identity,
                self.out_of_memory,
            )
            return TaskReport(
                **{field.name: getattr(verdict, field.name) for field in fields(verdict)},
                task_name=plan.task_name,
                task_key=plan.task_key,
                task_run_id=run.id,
                task_run_name=clean_name(run.name),
                flow_run_id=run.flow_run_id,
                pid=self.pid,
                devices=self._placement.devices,
                framework=",".join(frameworks or self.used_frameworks) or "none",
                attempt=number,
                budget_bytes=min(self._placement.budget_bytes),
                budget_source=budget_source,
                estimated_from=estimated_from,
                peak_process_bytes=peak_process,
                peak_live_bytes=peak_live,
                peak_reserved_bytes=peak_reserved,
                context_bytes=context,
                leaked_bytes=leaked_bytes,
                queued_s=self._queued_s,
                start_s=started_s - self._placed_s,
                sharing="mps" if self.is_client else None,
                busy_fraction=self._work.busy_fraction,
                energy_j=self._work.energy_j,
                **(units._asdict() if (units := self._work.units) else {}),
                run_s=max(0.0, ended_s - started_s - sum(s.seconds for s in self._suspensions)),
                suspensions=self._suspensions,
                placed_at=EPOCH_S + self._placed_s,
                samples=series.samples,
                sample_count=series.count,
                source=source,
                marks=tuple(
                    replace(m, at_s=m.at_s + started_s - self._placed_s)
                    for m in self._marks.marks()
                ),
                metrics=self._metrics,
                wasted_byte_seconds=series.wasted_byte_seconds(ended_s - self._placed_s),
                cap_bytes=self.cap_bytes,
                steps=self._seen_steps(),
                history_key=identity.learn_by,
                learn_by=identity.learn_by_words,
                qualified_name=identity.qualified_name,
                flow_name=identity.flow_name,
                priority=plan.policy.priority,
                exclusive=plan.policy.exclusive,
                budgets_bytes=self._placement.budget_bytes,
                device_peaks_bytes=tuple(self._device_peaks),
                refused_bytes=seen.wanted_bytes if seen else None,
                shared_with=shared_with,
                capacity_bytes=capacity_bytes,
                counted_out=self._counted_out or not self._counted,
                memory_summary=seen.summary if seen else "",
                snapshot_path=seen.snapshot_path if seen else "",
                processes=self._several_processes(),
            )

    def _several_processes(self) -> tuple[ProcessPeak, ...]:
        """Return the peaks of each process on each device; empty: a single process on one device."""
        if len(self._device_peaks) == 1 and {pid for _, pid in self._processes} <= {self.pid}:
            return ()
        peaks: list[ProcessPeak] = []
        placed = zip(self._placement.devices, self._placement.budget_bytes, strict=True)
        for at, (device, budget) in enumerate(placed):
            held = [(size, pid) for (place, pid), size in self._processes.items() if place == at]
            all_of_it = self._device_peaks[at], None
            for size, pid in (all_of_it, *sorted(held, reverse=True)):
                peaks.append(ProcessPeak(device.index, pid, size, budget))
        return tuple(peaks)

    def _seen_steps(self) -> StepFacts | None:
        """Return the facts about the steps; with steady memory only if sampling sees it in all used frameworks."""
        steps = self.steps
        if steps is None or SEEN_BY_LOOKING.issuperset(self.used_frameworks):
            return steps
        return replace(steps, steady_live_bytes=None)

    def _add_up(self, kind: DeviceKind, peak_reserved: int | None) -> tuple[int, int, Source]:
        """Return the process's peak in bytes, its context in bytes, and the source of the peak."""
        peak = self._series.peak_process_bytes or 0
        source: Source = kind
        seen = self._context.seen_bytes if kind == "nvml" else self._assumed_context_bytes()
        context = self._unseen_context_bytes(peak, peak_reserved) if seen is None else seen
        if kind != "nvml":
            # The child knows peaks of its resident set that no reading shows.
            peak = max(peak, self._own_peak_bytes)
        elif peak_reserved is not None and self._counted and peak < peak_reserved:
            # No reading shows the peak, or the device does not attribute memory to processes.
            peak, source = peak_reserved + context, "framework"
        elif not all(device.attributed for device in self._placement.devices):
            # Without attribution the peak is from the process's own counters.
            source = "framework"
        # An assumed context may be larger than the real one.
        total = sum(device.total_bytes for device in self._placement.devices)
        return min(peak, total), min(context, total), source

    def _unseen_context_bytes(self, peak: int, peak_reserved: int | None) -> int:
        """Return an estimate of the context: no reading can be compared with the allocators' memory."""
        assumed = self._assumed_context_bytes()
        if not peak_reserved or (assumed and not self._counted_out):
            # The process died, and may have held more than its counters showed: the difference means nothing.
            return assumed
        # The body empties its cache all the time. If no reading met the peak, the difference is too small, and a cap
        # computed from it would let the process pass its budget: the assumed context is the least.
        return max(assumed, peak - peak_reserved)

    def _assumed_context_bytes(self) -> int:
        """Return the context on all devices together: the size left free by the cap, or else the known size."""
        known = (self.known_contexts.get(name, 0) for name in self.used_frameworks)
        each = self.context_bytes or max(known, default=0)
        return each * len(self._placement.devices)


class ContextWatch:
    """Derives the context of one process: memory on the device above the memory of its allocators. For one thread.

    Device and allocators are read at different times by different processes. Each reading of the device is compared
    with the allocators' largest memory between the counters before and after the reading:

    - If the allocators freed nothing in between, their memory only rose, and the later counters bound it. The derived
    context can then only be too small, and the largest of many is right.
    - If they freed something, their memory is unknown for a moment (`cudnn.benchmark` tries its workspaces that way),
    and the reading is ignored.
    - If they do not count freed memory, their overall peak bounds a period in which the peak rose, and no other.

    Readings after the last counters are ignored: a process may take gigabytes just before it dies.
    """

    def __init__(self) -> None:
        self._reserved_bytes: int | None = None
        self._freed_bytes: int | None = None
        self._peak_bytes = 0
        #: Newest readings since the last counters, in bytes.
        self._pending: collections.deque[int] = collections.deque(maxlen=8)
        #: Largest context so far, in bytes; `None`: none.
        self.seen_bytes: int | None = None

    def add_reading(self, process_bytes: int) -> None:
        """Add a reading of the process's bytes on the device."""
        if process_bytes and self._reserved_bytes is not None:
            self._pending.append(process_bytes)

    def add_reserved(
        self,
        reserved_bytes: int | None,
        peak_bytes: int | None = None,
        freed_bytes: int | None = None,
    ) -> None:
        """Add the allocators' counters: bytes held, largest ever held, and freed so far; `None`: not reported."""
        before, self._reserved_bytes = self._reserved_bytes, reserved_bytes
        freed_before, self._freed_bytes = self._freed_bytes, freed_bytes
        peak_before, self._peak_bytes = self._peak_bytes, max(self._peak_bytes, peak_bytes or 0)
        if before is not None and reserved_bytes is not None and freed_before == freed_bytes:
            # A peak that rose did so between the two counters.
            rose = self._peak_bytes if self._peak_bytes > peak_before else 0
            most = max(before, reserved_bytes, rose)
            seen = [size - most for size in self._pending if size > most > 0]
            self.seen_bytes = max((*seen, self.seen_bytes or 0)) or None
        self._pending.clear()
