"""What a report is made of: one `TaskReport` for every process that was started.

It covers the values and their published text form (`metadata`). It does not draw (`timeline`,
`markdown`) or publish (`publish`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

from prefect_gpu.reports.series import COMPACT_SAMPLES, Sample, merge
from prefect_gpu.scheduling.model import Device

__all__ = [
    "CAUSE_WORDS",
    "SCHEMA",
    "BudgetSource",
    "Mark",
    "Outcome",
    "Sample",
    "Source",
    "StepFacts",
    "TaskReport",
]

#: Version of the metadata's meaning; rises when a field changes its meaning.
SCHEMA = 1

#: What an out-of-memory is put down to (`scheduling.ladder.Cause`).
CAUSE_WORDS: Mapping[str, str] = {
    "own_cap": "its own cap",
    "foreign": "other people's processes",
    "crowded": "tasks beside it",
    "host": "the machine's own memory",
    "unknown": "unknown",
}

Outcome = Literal["completed", "failed", "oom", "died", "timeout", "cancelled"]
BudgetSource = Literal["tag", "learned", "probe"]
Source = Literal["nvml", "framework", "host", "simulated"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment inside the body."""

    #: Seconds since the task was placed.
    at_s: float
    name: str
    #: Seconds that a phase took; `None`: a mark, which is a moment.
    duration_s: float | None = None
    #: Bytes that its frameworks had allocated and held at its end, and the most of each during it;
    #: `None`: unknown.
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    #: Bytes that the driver showed for the process at its end; `None`: it tells nothing, or was not
    #: asked.
    process_bytes: int | None = None
    #: Which step it belongs to, from 0.
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a body's steps (`step()`, or phases and marks that come again) say of its memory."""

    #: Steps that are over.
    count: int
    #: Most that the frameworks had allocated up to the end of the first step.
    first_live_bytes: int | None = None
    #: The same in the steps after it, from the last one on in which the allocator had to give up its
    #: cache; `None`: there was none.
    steady_live_bytes: int | None = None
    #: Median seconds of the steps after the first.
    step_s: float | None = None
    #: Times that the allocator had to give up its cache after the first step.
    alloc_retries: int = 0
    #: By how many bytes a step what is allocated at the ends of steps grows; `None`: too few steps.
    growth_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Everything known about one process of one task run."""

    task_name: str
    task_key: str
    task_run_id: UUID
    task_run_name: str
    flow_run_id: UUID | None
    #: Of the child; `None`: it could not be started.
    pid: int | None
    #: In the task's order.
    devices: tuple[Device, ...]
    #: Frameworks that the child used, comma-separated; "none".
    framework: str
    outcome: Outcome
    #: From 1: every process started for this task run.
    attempt: int
    #: Bytes on each device, as reserved (the smallest, where devices differ).
    budget_bytes: int
    budget_source: BudgetSource
    #: Largest amount that the device showed for the process, summed over its devices.
    peak_process_bytes: int
    #: Largest amount allocated, and held, by the frameworks; `None`: unknown.
    peak_live_bytes: int | None
    peak_reserved_bytes: int | None
    #: Contexts, which no framework counts, summed over its devices.
    context_bytes: int
    #: Bytes that did not come back after the process ended; `None`: cannot be told here.
    leaked_bytes: int | None
    #: Seconds from the request to a device, from there to the body's first line, and of the body.
    queued_s: float
    start_s: float
    run_s: float
    #: Wall-clock seconds since the epoch when the task was placed: lines flows up on a chart.
    placed_at: float
    #: Points in order of time.
    samples: tuple[Sample, ...]
    #: Where `peak_process_bytes` comes from.
    source: Source
    marks: tuple[Mark, ...] = ()
    #: One line of what went wrong; empty: nothing did.
    error: str = ""
    #: The process held this much for this long, summed: reserved − used, in byte-seconds.
    wasted_byte_seconds: float = 0.0
    #: Readings taken, before neighbours in `samples` were merged; 0: none was merged.
    sample_count: int = 0
    #: Bytes that a framework could allocate at most; `None`: no cap.
    cap_bytes: int | None = None
    #: What an out-of-memory is put down to (`scheduling.ladder.Cause`); empty: there was none.
    cause: str = ""
    #: What it would have needed on one device, as its out-of-memory says; `None`: unknown.
    wanted_bytes: int | None = None
    #: What its steps say; `None`: it gave no evidence of steps.
    steps: StepFacts | None = None
    #: Names the history that its budget came from and went into; empty: not told. A task with
    #: `gpu:learn_by` has several.
    history_key: str = ""

    @property
    def budget_total_bytes(self) -> int:
        """Bytes reserved on all its devices together."""
        return self.budget_bytes * max(1, len(self.devices))

    @property
    def held_s(self) -> float:
        """Seconds that it held its reservation, as far as the report knows."""
        last_s = self.samples[-1].at_s if self.samples else 0.0
        return max(self.start_s + self.run_s, last_s)

    @property
    def reserved_byte_seconds(self) -> float:
        """What it kept others from using: reservation × time."""
        return self.budget_total_bytes * self.held_s

    def compact(self) -> TaskReport:
        """Give a copy of a few kilobytes that a flow's report can keep by the thousand.

        It has a coarse outline of the samples and no marks; all other fields are unchanged.
        """
        return replace(
            self,
            samples=merge(self.samples, COMPACT_SAMPLES),
            marks=(),
            sample_count=max(self.sample_count, len(self.samples)),
        )

    def metadata(self) -> dict[str, str]:
        """Give the numbers as strings, short ones: Prefect cuts a value at 500 characters."""

        def known(value: int | None) -> str:
            return "unknown" if value is None else str(value)

        return {
            "schema": str(SCHEMA),
            "task_key": self.task_key,
            "device_uuid": ",".join(device.uuid for device in self.devices),
            "device_name": ",".join(dict.fromkeys(device.name for device in self.devices)),
            "framework": self.framework,
            "outcome": self.outcome,
            "attempt": str(self.attempt),
            "budget_bytes": str(self.budget_bytes),
            "budget_source": self.budget_source,
            "peak_process_bytes": str(self.peak_process_bytes),
            "peak_live_bytes": known(self.peak_live_bytes),
            "peak_reserved_bytes": known(self.peak_reserved_bytes),
            "context_bytes": str(self.context_bytes),
            "leaked_bytes": known(self.leaked_bytes),
            "queued_s": f"{self.queued_s:.3f}",
            "start_s": f"{self.start_s:.3f}",
            "run_s": f"{self.run_s:.3f}",
            "samples": str(max(self.sample_count, len(self.samples))),
            "source": self.source,
            "cap_bytes": "none" if self.cap_bytes is None else str(self.cap_bytes),
            "cause": self.cause or "none",
            "steady_live_bytes": known(self.steps.steady_live_bytes if self.steps else None),
        }
