"""The values of a report: one `TaskReport` for each process that was started.

It covers their published form (`metadata`, `read_metadata`) and what a history keeps of them (`past_run`). How a report is
drawn is in `timeline` and `markdown`, how it reaches Prefect in `publish`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast
from uuid import UUID

from prefect_gpu.frameworks.registry import WITHOUT_PEAK
from prefect_gpu.measurements import COMPACT_SAMPLES, Mark, Sample, StepFacts, largest, merge
from prefect_gpu.scheduling.history import PastRun
from prefect_gpu.scheduling.model import Device, DeviceKind

#: Version of the metadata's meaning; rises when a field changes its meaning.
SCHEMA = 1

#: Words for the cause of an out-of-memory error (`scheduling.ladder.Cause`).
CAUSE_WORDS: Mapping[str, str] = {
    "own_cap": "its own cap",
    "foreign": "other people's processes",
    "crowded": "tasks beside it",
    "host": "the machine's own memory",
    "unknown": "unknown",
}

Outcome = Literal["completed", "failed", "oom", "died", "timeout", "cancelled"]
#: Words for each outcome.
OUTCOME_WORDS: Mapping[Outcome, str] = {
    "completed": "completed",
    "failed": "failed",
    "oom": "out of memory",
    "died": "died",
    "timeout": "timed out",
    "cancelled": "cancelled",
}

BudgetSource = Literal["tag", "learned", "probe"]
Source = Literal["nvml", "framework", "host", "simulated"]


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """The most that one process of a task, or all of them together, held of a device."""

    #: Index of the device, as in `Device.index`.
    device_index: int
    #: `None`: all of them.
    pid: int | None
    peak_bytes: int
    #: Of the task on this device.
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class SuspensionFacts:
    """A time in which a process did not run, because its memory was on the host."""

    #: Seconds from the placement to its beginning, and its length with both moves.
    at_s: float
    seconds: float
    #: Seconds of the moves to the host and back.
    out_s: float
    in_s: float
    #: Bytes that were moved.
    moved_bytes: int
    #: What it was suspended for, as text for a person, and the device on which it came back.
    reason: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Everything that is known about one process of one task run."""

    task_name: str
    task_key: str
    task_run_id: UUID
    task_run_name: str
    flow_run_id: UUID | None
    #: Process id of the child. `None`: it could not be started.
    pid: int | None
    #: In the order that the task asked for.
    devices: tuple[Device, ...]
    #: Frameworks that the child used, comma-separated; "none".
    framework: str
    outcome: Outcome
    #: Number of this process among those started for the task run, from 1.
    attempt: int
    #: Bytes reserved on each device; the smallest if devices differ.
    budget_bytes: int
    budget_source: BudgetSource
    #: Most bytes that the devices showed for the process, all devices together.
    peak_process_bytes: int
    #: Most bytes that the frameworks had allocated, and held with their caches. `None`: unknown.
    peak_live_bytes: int | None
    peak_reserved_bytes: int | None
    #: Bytes of the contexts, which no framework counts, all devices together.
    context_bytes: int
    #: Bytes that stayed in use after the process ended. `None`: cannot be measured here.
    leaked_bytes: int | None
    #: Seconds from the request to the placement, from there to the first line of the body, and of the
    #: body.
    queued_s: float
    start_s: float
    run_s: float
    #: When the task was placed, in seconds since the epoch.
    placed_at: float
    #: In order of time; `at_s` counts from the placement.
    samples: tuple[Sample, ...]
    #: Where `peak_process_bytes` comes from.
    source: Source
    marks: tuple[Mark, ...] = ()
    #: The error on one line. Empty: there was none.
    error: str = ""
    #: Memory reserved and not used, over time, in byte-seconds.
    wasted_byte_seconds: float = 0.0
    #: Readings taken before neighbours in `samples` were merged. 0: none was merged.
    sample_count: int = 0
    #: Most bytes that a framework could allocate on each device. `None`: no cap.
    cap_bytes: int | None = None
    #: Cause of an out-of-memory error (`scheduling.ladder.Cause`). Empty: there was no such error.
    cause: str = ""
    #: Bytes needed on one device, as the out-of-memory error says. `None`: unknown.
    wanted_bytes: int | None = None
    #: Measurements of its steps. `None`: it gave no evidence of steps.
    steps: StepFacts | None = None
    #: Digest of its `gpu:learn_by` values: each has a history of its own. Empty: none are named.
    history_key: str = ""
    #: Of the task's function, as its history has it. Empty: not known.
    qualified_name: str = ""
    #: Name of the flow that its task was submitted in, as its history has it. `None`: in none.
    flow_name: str | None = None
    #: What its task asked for beside memory: a place in the order, and its devices for itself.
    priority: int = 0
    exclusive: bool = False
    #: Names of the tasks, of all flows of the machine, that were on its devices meanwhile. Up to 20.
    shared_with: tuple[str, ...] = ()
    #: After an out-of-memory, the framework's own summary of its memory. Empty: it has none.
    memory_summary: str = ""
    #: The file with its memory snapshot. Empty: none was written.
    snapshot_path: str = ""
    #: Most bytes that its task could be given of each of its devices, on the largest ones: what the driver and the
    #: headroom leave. `None`: not known.
    capacity_bytes: int | None = None
    #: `False`: the frameworks' counters could not be read to the end (the body destroyed its context). What they
    #: say is then too little to learn from.
    counted_out: bool = True
    #: By device, all processes first and then each, the largest first. Empty: one process on one device.
    processes: tuple[ProcessPeak, ...] = ()
    #: Bytes reserved on each device, in their order. Empty: `budget_bytes` on each.
    budgets_bytes: tuple[int, ...] = ()
    #: Most bytes that each device showed for the process, in their order. Empty: not known.
    device_peaks_bytes: tuple[int, ...] = ()
    #: Its `gpu:learn_by` values in words (`batch_size=32`). Empty: none are named.
    learn_by: str = ""
    #: What the body has reported of its results, by name (`report_metric`).
    metrics: tuple[tuple[str, float], ...] = ()
    #: What the next process of the task run gets, and why. Empty: the runner starts none by itself.
    next_words: str = ""
    #: Bytes of each device that it gets. `None`: a device to itself, or there is none.
    next_budget_bytes: int | None = None
    #: Bytes of the allocation that was refused when memory ran out. `None`: there was none, or it is not known.
    refused_bytes: int | None = None
    #: The end of what it wrote to its stderr, if it died. Empty: nothing.
    stderr_tail: str = ""
    #: When it did not run because its memory was on the host. `run_s` is without it.
    suspensions: tuple[SuspensionFacts, ...] = ()

    @property
    def suspended_s(self) -> float:
        """Seconds for which its memory was on the host, the moves included."""
        return sum(each.seconds for each in self.suspensions)

    @property
    def node(self) -> str:
        """Name of the node of a cluster that all its devices are in; empty: there is no cluster."""
        return self.devices[0].node if self.devices else ""

    @property
    def device_kind(self) -> DeviceKind:
        """Kind of the devices that its memory was measured on."""
        return "nvml" if self.source == "framework" else self.source

    @property
    def most_bytes(self) -> int | None:
        """Most bytes that a device could give to its task, as far as the report knows; `None`: it has no device."""
        if self.capacity_bytes is not None:
            return self.capacity_bytes
        return max((device.total_bytes for device in self.devices), default=None)

    @property
    def budget_total_bytes(self) -> int:
        """Bytes reserved on all its devices together."""
        return sum(self.budgets_bytes) or self.budget_bytes * max(1, len(self.devices))

    def budget_on(self, device: Device) -> int:
        """Return the bytes reserved on one of its devices."""
        if not self.budgets_bytes:
            return self.budget_bytes
        return self.budgets_bytes[self.devices.index(device)]

    def share_on(self, device: Device) -> float:
        """Return which fraction of its memory one of its devices holds, by their peaks."""
        whole = sum(self.device_peaks_bytes)
        if not whole:
            return 1 / len(self.devices)
        return self.device_peaks_bytes[self.devices.index(device)] / whole

    @property
    def held_s(self) -> float:
        """Seconds for which it held its reservation, as far as the report knows."""
        last_s = self.samples[-1].at_s if self.samples else 0.0
        return max(self.start_s + self.run_s + self.suspended_s, last_s)

    @property
    def reserved_byte_seconds(self) -> float:
        """Reserved memory over time, in byte-seconds."""
        return self.budget_total_bytes * self.held_s

    def compact(self) -> TaskReport:
        """Return a copy of a few kilobytes, of which a flow's report can keep thousands.

        Its samples are merged into a coarse outline. It has no marks, no table of processes, no memory summary and
        no stderr. Other fields are unchanged.
        """
        return replace(
            self,
            samples=merge(self.samples, COMPACT_SAMPLES),
            marks=(),
            memory_summary="",
            stderr_tail="",
            processes=(),
            sample_count=max(self.sample_count, len(self.samples)),
        )

    def metadata(self) -> dict[str, str]:
        """Return the published fields as strings: Prefect accepts at most 500 characters each."""

        def known(value: int | None) -> str:
            return "unknown" if value is None else str(value)

        return {
            "schema": str(SCHEMA),
            "task_key": self.task_key,
            "device_uuid": ",".join(device.uuid for device in self.devices),
            "device_name": ",".join(dict.fromkeys(device.name for device in self.devices)),
            **({"node": self.node} if self.node else {}),
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
            "shared_with": ", ".join(self.shared_with)[:499] or "none",
            "steady_live_bytes": known(self.steps.steady_live_bytes if self.steps else None),
            "task_name": self.task_name,
            "qualified_name": self.qualified_name,
            **({} if self.flow_name is None else {"flow_name": self.flow_name}),
            "learn_by": self.history_key,
            "learn_by_words": self.learn_by,
            "priority": str(self.priority),
            "exclusive": str(self.exclusive),
            "device_total_bytes": ",".join(str(device.total_bytes) for device in self.devices),
            "placed_at": f"{self.placed_at:.3f}",
            "held_s": f"{self.held_s:.3f}",
            "wanted_bytes": known(self.wanted_bytes),
            "capacity_bytes": known(self.capacity_bytes),
            "counted_out": str(self.counted_out),
            **({"suspended_s": f"{self.suspended_s:.3f}"} if self.suspensions else {}),
            **(_step_texts(self.steps) if self.steps else {}),
            **{f"metric_{name}": f"{value:.12g}" for name, value in self.metrics[:20]},
        }


def _step_texts(steps: StepFacts) -> dict[str, str]:
    facts: dict[str, object] = {
        "steps": steps.count,
        "alloc_retries": steps.alloc_retries,
        "alike": steps.alike,
    }
    if steps.step_s is not None:
        facts["step_s"] = steps.step_s
    return {name: str(value) for name, value in facts.items()}


#: Published figures that are words, whatever they look like, and those that have one value for each device.
_WORDS = frozenset(
    [
        "task_key",
        "task_name",
        "qualified_name",
        "flow_name",
        "learn_by",
        "learn_by_words",
        "node",
        "device_name",
        "framework",
        "outcome",
        "budget_source",
        "source",
        "cause",
        "shared_with",
    ]
)
_LISTS: Mapping[str, Callable[[str], object]] = {"device_uuid": str, "device_total_bytes": int}


def figure_values(figures: Mapping[str, str]) -> dict[str, object]:
    """Return published figures as values for JSON: numbers, booleans, lists, words; `None`: not known, or there is none."""
    return {name: _value(name, text) for name, text in figures.items()}


def _value(name: str, text: str) -> object:
    if name in _LISTS:
        return [_LISTS[name](each) for each in text.split(",") if each]
    if name in _WORDS:
        return text
    words = {"unknown": None, "none": None, "True": True, "False": False}
    if text in words:
        return words[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            # JSON has no other numbers.
            return number if math.isfinite(number) else text
    return text


def read_metadata(
    figures: Mapping[str, str], task_run_id: UUID, flow_run_id: UUID | None, task_run_name: str = ""
) -> TaskReport:
    """Return a report of what was published: what advice, and a replay of its flow run, need of it.

    It has no samples but one at its end, no marks, and none of the texts.

    Args:
        figures: As `TaskReport.metadata` returned them.
        task_run_id: Of the artifact.
        flow_run_id: Of the artifact.
        task_run_name: As Prefect has it.

    Raises:
        ValueError: A figure is missing, or cannot be read.
    """
    if figures.get("schema") != str(SCHEMA):
        raise ValueError(f"the figures of a report have schema {figures.get('schema')!r}")

    def size(name: str) -> int | None:
        return None if figures[name] in ("unknown", "none") else int(figures[name])

    try:
        uuids = [uuid for uuid in figures["device_uuid"].split(",") if uuid]
        totals = [int(text) for text in figures["device_total_bytes"].split(",") if text]
        source, peak = cast(Source, figures["source"]), int(figures["peak_process_bytes"])
        kind: DeviceKind = "nvml" if source == "framework" else source
        return TaskReport(
            task_name=figures["task_name"],
            task_key=figures["task_key"],
            task_run_id=task_run_id,
            task_run_name=task_run_name,
            flow_run_id=flow_run_id,
            pid=None,
            devices=tuple(
                Device(uuid, index, figures["device_name"], total, kind, figures.get("node", ""))
                for index, (uuid, total) in enumerate(zip(uuids, totals, strict=True))
            ),
            framework=figures["framework"],
            outcome=cast(Outcome, figures["outcome"]),
            attempt=int(figures["attempt"]),
            budget_bytes=int(figures["budget_bytes"]),
            budget_source=cast(BudgetSource, figures["budget_source"]),
            peak_process_bytes=peak,
            peak_live_bytes=size("peak_live_bytes"),
            peak_reserved_bytes=size("peak_reserved_bytes"),
            context_bytes=int(figures["context_bytes"]),
            leaked_bytes=size("leaked_bytes"),
            queued_s=float(figures["queued_s"]),
            start_s=float(figures["start_s"]),
            run_s=float(figures["run_s"]),
            placed_at=float(figures["placed_at"]),
            samples=(Sample(float(figures["held_s"]), peak),),
            sample_count=int(figures["samples"]),
            source=source,
            cap_bytes=size("cap_bytes"),
            cause="" if figures["cause"] == "none" else figures["cause"],
            wanted_bytes=size("wanted_bytes"),
            capacity_bytes=size("capacity_bytes"),
            steps=_read_steps(figures, size("steady_live_bytes")),
            history_key=figures["learn_by"],
            learn_by=figures["learn_by_words"],
            qualified_name=figures["qualified_name"],
            flow_name=figures.get("flow_name"),
            priority=int(figures["priority"]),
            exclusive=figures["exclusive"] == "True",
            counted_out=figures["counted_out"] == "True",
        )
    except KeyError as error:
        raise ValueError(f"the figures of a report have no {error}") from error


def _read_steps(figures: Mapping[str, str], steady_live_bytes: int | None) -> StepFacts | None:
    if "steps" not in figures:
        return None
    return StepFacts(
        count=int(figures["steps"]),
        steady_live_bytes=steady_live_bytes,
        step_s=float(figures["step_s"]) if "step_s" in figures else None,
        alloc_retries=int(figures["alloc_retries"]),
        alike=figures["alike"] == "True",
    )


@dataclass(frozen=True, slots=True)
class UnstartedRun:
    """A GPU task run that ended before it got a process."""

    task_run_id: UUID
    task_run_name: str
    outcome: Literal["failed", "cancelled", "died"]
    #: The error on one line.
    error: str
    #: When it ended, in seconds since the epoch.
    ended_at: float


def past_run(report: TaskReport) -> PastRun:
    """Return what the history of a task keeps of a process.

    A report sums what was measured over all devices and a history is about one device. Each device of
    several is counted with an equal share, rounded up.
    """
    count = max(1, len(report.devices))

    def each(total_bytes: int) -> int:
        return -(-total_bytes // count)

    def each_known(total_bytes: int | None) -> int | None:
        return None if total_bytes is None else each(total_bytes)

    steps = report.steps if report.counted_out else None
    peak = report.peak_process_bytes
    # Neither the device nor a framework has told anything of it.
    measured = peak > 0 or report.source != "framework"
    live = report.peak_live_bytes if report.counted_out else None
    if report.counted_out and not WITHOUT_PEAK.isdisjoint(report.framework.split(",")):
        live = largest(live, report.peak_reserved_bytes)
    # What a probe was given beside others says nothing of what it needs.
    shared_probe = report.budget_source == "probe" and report.cap_bytes is not None
    return PastRun(
        ended_at=report.placed_at + report.held_s,
        outcome=report.outcome,
        cause=report.cause,
        budget_bytes=0 if shared_probe else report.budget_bytes,
        cap_bytes=None if shared_probe else report.cap_bytes,
        live_bytes=each_known(live),
        steady_live_bytes=each_known(steps.steady_live_bytes) if steps and steps.alike else None,
        process_bytes=each(peak) if measured else None,
        context_bytes=each(report.context_bytes),
        alloc_retries=steps.alloc_retries if steps else 0,
        step_s=steps.step_s if steps else None,
        run_s=report.run_s,
        wanted_bytes=report.wanted_bytes,
        start_s=report.start_s,
        capacity_bytes=report.capacity_bytes,
        task_run_id=str(report.task_run_id),
    )
