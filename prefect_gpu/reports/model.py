"""Values of reports: a `TaskReport` for each process, its metadata, its `PastRun`. Text: `markdown`; API: `publish`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from uuid import UUID

from prefect_gpu.frameworks.registry import WITHOUT_PEAK
from prefect_gpu.measurements import (
    COMPACT_SAMPLES,
    Mark,
    Sample,
    StepFacts,
    Suspension,
    largest,
    merge,
)
from prefect_gpu.scheduling.history import PastRun
from prefect_gpu.scheduling.ladder import Cause
from prefect_gpu.scheduling.model import Device, DeviceKind

#: Version of the metadata, raised when a field changes its meaning.
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


class OutcomeWords(NamedTuple):
    """The words and the colour that show an outcome in reports."""

    words: str
    #: Predicate, as in "it ran out of memory".
    ended: str
    #: Prefect's name of the task run's state.
    state: str
    #: Distinguishable with common colour blindness. Bars also have the outcome in words.
    colour: str


OUTCOMES: Mapping[str, OutcomeWords] = {
    "completed": OutcomeWords("completed", "completed", "completed", "#3b82f6"),
    "failed": OutcomeWords("failed", "failed", "failed", "#d97706"),
    "oom": OutcomeWords("out of memory", "ran out of memory", "failed", "#dc2626"),
    "died": OutcomeWords("died", "died", "crashed", "#475569"),
    "timeout": OutcomeWords("timed out", "timed out", "failed", "#a855f7"),
    "cancelled": OutcomeWords("cancelled", "was cancelled", "cancelled", "#9ca3af"),
}
OUTCOME_WORDS: Mapping[str, str] = {name: row.words for name, row in OUTCOMES.items()}

BudgetSource = Literal["tag", "learned", "estimated", "probe"]
Source = Literal["nvml", "framework", "host", "simulated"]


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """Peak memory on one device and the task's budget: of one process of a task, or of all of them (no `pid`)."""

    device_index: int
    #: `None`: all processes together.
    pid: int | None
    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a process: outcome, error, cause, next attempt. Only the engine's thread sets these values."""

    outcome: Outcome
    #: The error on one line. Empty: there was none.
    error: str = ""
    #: Cause of an out-of-memory error or of a kill. Empty: there was none.
    cause: Cause | Literal[""] = ""
    #: Bytes needed on one device, from the out-of-memory error. `None`: unknown.
    wanted_bytes: int | None = None
    #: Memory of the task run's next process, and the reason, as text. Empty: the runner starts no further process.
    next_words: str = ""
    #: Bytes of each device that the next process gets. `None`: a whole device, or there is no next process.
    next_budget_bytes: int | None = None
    #: The end of the stderr of a process that died. Empty: the process wrote nothing.
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport(Verdict):
    """All facts about one process of one task run."""

    task_name: str
    task_key: str
    task_run_id: UUID
    task_run_name: str
    flow_run_id: UUID | None
    #: Process id of the child. `None`: it could not be started.
    pid: int | None
    #: In the order of the request.
    devices: tuple[Device, ...]
    #: Frameworks that the child used, separated by commas; "none": no framework.
    framework: str
    #: Number of this process among the processes of its task run, from 1.
    attempt: int
    #: Bytes reserved on each device; the smallest value if devices differ.
    budget_bytes: int
    budget_source: BudgetSource
    #: Peak bytes of the process on all devices together, measured by `source`.
    peak_process_bytes: int
    #: Peak bytes that frameworks had allocated, without and with their caches. `None`: unknown.
    peak_live_bytes: int | None
    peak_reserved_bytes: int | None
    #: Bytes of the CUDA contexts, which no framework counts, all devices together.
    context_bytes: int
    #: Bytes that stayed in use after the process ended. `None`: cannot be measured here.
    leaked_bytes: int | None
    #: Seconds from request to placement, from placement to the body's first line, and of the body.
    queued_s: float
    start_s: float
    run_s: float
    #: Placement, in seconds since the epoch.
    placed_at: float
    #: In order of time; `at_s` counts from the placement.
    samples: tuple[Sample, ...]
    source: Source
    marks: tuple[Mark, ...] = ()
    #: Reserved but unused memory over time, in byte-seconds.
    wasted_byte_seconds: float = 0.0
    #: Number of readings before readings were merged into `samples`. 0: nothing was merged.
    sample_count: int = 0
    #: Most bytes that a framework could allocate on each device. `None`: no cap.
    cap_bytes: int | None = None
    #: Measurements of training steps. `None`: no steps were seen.
    steps: StepFacts | None = None
    #: Digest of the `gpu:learn_by` values, which selects the history. Empty: the task has no such tag.
    history_key: str = ""
    #: Qualified name of the task's function, as in the history. Empty: not known.
    qualified_name: str = ""
    #: Name of the flow in which the task was submitted, as in the history. `None`: no flow.
    flow_name: str | None = None
    priority: int = 0
    exclusive: bool = False
    #: Names of up to 20 tasks, of any flow of the machine, that ran on the same devices at the same time.
    shared_with: tuple[str, ...] = ()
    #: The framework's own memory summary after an out-of-memory. Empty: there is none.
    memory_summary: str = ""
    #: Path of the memory snapshot. Empty: none was written.
    snapshot_path: str = ""
    #: Largest possible budget: the largest device less driver and headroom. `None`: not known.
    capacity_bytes: int | None = None
    #: `False`: the body destroyed its CUDA context before the last reading, so its counters are too low to learn from.
    counted_out: bool = True
    #: For each device: all processes together, then each process by size. Empty: one process on one device.
    processes: tuple[ProcessPeak, ...] = ()
    #: Bytes reserved on each device, in device order. Empty: `budget_bytes` on each.
    budgets_bytes: tuple[int, ...] = ()
    #: Peak bytes of the process on each device, in device order. Empty: not known.
    device_peaks_bytes: tuple[int, ...] = ()
    #: The `gpu:learn_by` values in words (`batch_size=32`). Empty: the task has no such tag.
    learn_by: str = ""
    #: Other values from which the budget was estimated: `batch_size 16, 32`. `None`: it was not.
    estimated_from: str | None = None
    #: Results that the body reported with `report_metric`, by name.
    metrics: tuple[tuple[str, float], ...] = ()
    #: Bytes of the allocation that failed when memory ran out. `None`: no out-of-memory, or not known.
    refused_bytes: int | None = None
    #: "mps": it was a client of MPS. `None`: it shared its device by time.
    sharing: Literal["mps"] | None = None
    #: Fraction of the body's time in which its kernels ran, the mean of its devices; not the whole of a device need be
    #: in use then. `None`: not known.
    busy_fraction: float | None = None
    #: Energy in joules of its devices, in the process's part of their computing. `None`: not known.
    energy_j: float | None = None
    #: Use of the devices' units while no other process computed, as in `UnitUse`. `None`: not known.
    multiprocessors: float | None = None
    tensor_cores: float | None = None
    bandwidth: float | None = None
    #: Times in which the process's memory was on the host. `run_s` excludes these times.
    suspensions: tuple[Suspension, ...] = ()

    @property
    def suspended_s(self) -> float:
        """Seconds in which the process's memory was on the host, moves included."""
        return sum(each.seconds for each in self.suspensions)

    @property
    def node(self) -> str:
        """Name of the cluster node that has the process's devices; empty: there is no cluster."""
        return self.devices[0].node if self.devices else ""

    @property
    def device_kind(self) -> DeviceKind:
        """Kind of the devices on which the memory was measured."""
        return "nvml" if self.source == "framework" else self.source

    @property
    def most_bytes(self) -> int | None:
        """Largest possible budget on one device; if not known, the largest device's memory. `None`: no device."""
        if self.capacity_bytes is not None:
            return self.capacity_bytes
        return max((device.total_bytes for device in self.devices), default=None)

    @property
    def budget_total_bytes(self) -> int:
        """Bytes reserved on all devices of the process together."""
        return sum(self.budgets_bytes) or self.budget_bytes * max(1, len(self.devices))

    def budget_on(self, device: Device) -> int:
        """Return the bytes reserved on one device of the process."""
        if not self.budgets_bytes:
            return self.budget_bytes
        return self.budgets_bytes[self.devices.index(device)]

    def share_on(self, device: Device) -> float:
        """Return the fraction of the process's memory that is on one device, by the peaks on its devices."""
        whole = sum(self.device_peaks_bytes)
        if not whole:
            return 1 / len(self.devices)
        return self.device_peaks_bytes[self.devices.index(device)] / whole

    @property
    def held_s(self) -> float:
        """Seconds for which the process held its reservation, computed from its times and last sample."""
        last_s = self.samples[-1].at_s if self.samples else 0.0
        return max(self.start_s + self.run_s + self.suspended_s, last_s)

    def compact(self) -> TaskReport:
        """Return a copy of a few kilobytes, without marks and long texts. A flow's report keeps thousands of copies."""
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
        """Return the figures to publish, as strings. Prefect accepts at most 500 characters each."""
        values = ((figure, figure.value(self)) for figure in FIGURES)
        return {
            **{f.name: f.kind.write(v) for f, v in values if v is not None or not f.optional},
            **{f"metric_{name}": f"{value:.12g}" for name, value in self.metrics[:20]},
        }


class Kind(NamedTuple):
    """Conversion of a figure's value to text and back."""

    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _or(word: str, absent: object, kind: Kind) -> Kind:
    """Return a kind that writes a word in place of the value `absent`."""
    return Kind(
        lambda value: word if value == absent else kind.write(value),
        lambda text: absent if text == word else kind.read(text),
    )


TEXT, NUMBER, REAL = Kind(str, str), Kind(str, int), Kind(str, float)
SECONDS = Kind(lambda seconds: f"{seconds:.3f}", float)
DECIMAL = Kind(lambda value: f"{value:.4f}", float)
FLAG = Kind(str, lambda text: text == "True")
WORD = _or("none", "", TEXT)
#: Bytes of one device. `None`: not known (`SIZE`), or no limit (`LIMIT`).
SIZE, LIMIT = _or("unknown", None, NUMBER), _or("none", None, NUMBER)
#: Bytes on all devices together. A history keeps this number divided by the number of devices, rounded up.
TOTAL = _or("unknown", None, NUMBER)
#: One value for each device.
TEXTS = Kind(",".join, lambda text: [each for each in text.split(",") if each])
SIZES = Kind(lambda sizes: ",".join(map(str, sizes)), lambda text: [*map(int, TEXTS.read(text))])


class Figure(NamedTuple):
    """A row of `FIGURES`: a value of a report, its text in the metadata, and its field in the history."""

    #: Name in the published metadata.
    name: str
    kind: Kind
    #: Field of `TaskReport`, or `steps.NAME` for a field of `StepFacts`; empty: the field with the figure's name. Or a
    #: function that computes the figure: such a figure is not read back.
    source: str | Callable[[TaskReport], object] = ""
    #: Field of `PastRun`. Empty: the history does not keep the figure.
    history: str = ""
    #: A figure without a value is left out of the metadata.
    optional: bool = False

    def value(self, report: TaskReport) -> Any:
        """Return the figure's value in a report; `None`: the report has no value."""
        if not isinstance(self.source, str):
            return self.source(report)
        steps, _, name = (self.source or self.name).rpartition(".")
        owner = report.steps if steps else report
        return None if owner is None else getattr(owner, name)


#: All figures in published order, from which metadata, reports read back, histories and event payloads are made.
FIGURES = (
    Figure("schema", NUMBER, lambda report: SCHEMA),
    Figure("task_key", TEXT),
    Figure("device_uuid", TEXTS, lambda report: [device.uuid for device in report.devices]),
    Figure("device_name", TEXT, lambda r: ",".join(dict.fromkeys(d.name for d in r.devices))),
    Figure("node", TEXT, lambda report: report.node or None, optional=True),
    Figure("framework", TEXT),
    Figure("outcome", TEXT, history="outcome"),
    Figure("attempt", NUMBER),
    Figure("budget_bytes", NUMBER, history="budget_bytes"),
    Figure("budget_source", TEXT),
    Figure("peak_process_bytes", TOTAL, history="process_bytes"),
    Figure("peak_live_bytes", TOTAL, history="live_bytes"),
    Figure("peak_reserved_bytes", TOTAL),
    Figure("context_bytes", TOTAL, history="context_bytes"),
    Figure("leaked_bytes", TOTAL),
    Figure("queued_s", SECONDS),
    Figure("start_s", SECONDS, history="start_s"),
    Figure("run_s", SECONDS, history="run_s"),
    Figure("samples", NUMBER, lambda report: max(report.sample_count, len(report.samples))),
    Figure("source", TEXT),
    Figure("cap_bytes", LIMIT, history="cap_bytes"),
    Figure("cause", WORD, history="cause"),
    Figure("shared_with", WORD, lambda report: ", ".join(report.shared_with)[:499]),
    Figure("steady_live_bytes", TOTAL, "steps.steady_live_bytes", "steady_live_bytes"),
    Figure("task_name", TEXT),
    Figure("qualified_name", TEXT),
    Figure("flow_name", TEXT, optional=True),
    Figure("learn_by", TEXT, "history_key"),
    Figure("learn_by_words", TEXT, "learn_by"),
    Figure("estimated_from", TEXT, optional=True),
    Figure("priority", NUMBER),
    Figure("exclusive", FLAG),
    Figure("device_total_bytes", SIZES, lambda report: [d.total_bytes for d in report.devices]),
    Figure("placed_at", SECONDS),
    Figure("held_s", SECONDS, lambda report: report.held_s),
    Figure("wanted_bytes", SIZE, history="wanted_bytes"),
    Figure("capacity_bytes", SIZE, history="capacity_bytes"),
    Figure("counted_out", FLAG),
    Figure("suspended_s", SECONDS, lambda report: report.suspended_s or None, optional=True),
    Figure("sharing", TEXT, optional=True),
    Figure("busy_fraction", DECIMAL, history="busy_fraction", optional=True),
    Figure("energy_j", DECIMAL, optional=True),
    Figure("multiprocessors", DECIMAL, optional=True),
    Figure("tensor_cores", DECIMAL, optional=True),
    Figure("bandwidth", DECIMAL, optional=True),
    Figure("steps", NUMBER, "steps.count", optional=True),
    Figure("alloc_retries", NUMBER, "steps.alloc_retries", "alloc_retries", optional=True),
    Figure("alike", FLAG, "steps.alike", optional=True),
    Figure("step_s", REAL, "steps.step_s", "step_s", optional=True),
)

_BY_NAME = {figure.name: figure for figure in FIGURES}


def figures_of(report: TaskReport, *names: str) -> dict[str, Any]:
    """Return the named figures of a report: values by name."""
    return {name: _BY_NAME[name].value(report) for name in names}


def figure_values(figures: Mapping[str, str]) -> dict[str, object]:
    """Return published figures as JSON values: numbers, booleans, lists, strings; `None`: unknown or absent."""
    return {name: _value(name, text) for name, text in figures.items()}


def _value(name: str, text: str) -> object:
    kind = _BY_NAME[name].kind if name in _BY_NAME else None
    if kind in (TEXT, WORD):
        return text
    with contextlib.suppress(ValueError):
        if kind is not None:
            return kind.read(text)
        number = float(text)
        # JSON has no infinity and no NaN.
        return (
            int(text) if text.lstrip("-").isdigit() else number if math.isfinite(number) else text
        )
    return text


def read_metadata(
    figures: Mapping[str, str], task_run_id: UUID, flow_run_id: UUID | None, task_run_name: str = ""
) -> TaskReport:
    """Return a report from its published figures, for advice and for a replay of its flow run.

    The report has one sample, at the end of the process, and no marks or texts.

    Raises:
        ValueError: A figure is missing or unreadable.
    """
    if figures.get("schema") != str(SCHEMA):
        raise ValueError(f"the figures of a report have schema {figures.get('schema')!r}")
    values: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for figure in FIGURES:
        if figure.name not in figures:
            if figure.optional:
                continue
            raise ValueError(f"the figures of a report have no {figure.name!r}")
        value = values[figure.name] = figure.kind.read(figures[figure.name])
        if isinstance(figure.source, str):
            of_steps, _, name = (figure.source or figure.name).rpartition(".")
            (steps if of_steps else fields)[name] = value
    kind: DeviceKind = "nvml" if values["source"] == "framework" else values["source"]
    devices = zip(values["device_uuid"], values["device_total_bytes"], strict=True)
    return TaskReport(
        task_run_id=task_run_id,
        task_run_name=task_run_name,
        flow_run_id=flow_run_id,
        pid=None,
        devices=tuple(
            Device(uuid, index, values["device_name"], total, kind, values.get("node", ""))
            for index, (uuid, total) in enumerate(devices)
        ),
        samples=(Sample(values["held_s"], values["peak_process_bytes"]),),
        sample_count=values["samples"],
        steps=StepFacts(**steps) if "count" in steps else None,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class UnstartedRun:
    """A GPU task run that ended before it got a process."""

    task_run_id: UUID
    task_run_name: str
    outcome: Literal["failed", "cancelled", "died"]
    #: The error on one line.
    error: str
    #: End, in seconds since the epoch.
    ended_at: float


def past_run(report: TaskReport) -> PastRun:
    """Return the history entry of a process, in bytes of one device: each `TOTAL` is divided by the devices."""
    live = report.peak_live_bytes
    if not WITHOUT_PEAK.isdisjoint(report.framework.split(",")):
        live = largest(live, report.peak_reserved_bytes)
    steps = report.steps
    if steps and not steps.alike:
        steps = replace(steps, steady_live_bytes=None)
    # The budget of a probe that shared its device says nothing about the task's need.
    shared_probe = report.budget_source == "probe" and report.cap_bytes is not None
    known = replace(
        report,
        peak_live_bytes=live if report.counted_out else None,
        steps=steps if report.counted_out else None,
        budget_bytes=0 if shared_probe else report.budget_bytes,
        cap_bytes=None if shared_probe else report.cap_bytes,
    )
    count = max(1, len(report.devices))
    values = ((figure, figure.value(known)) for figure in FIGURES if figure.history)
    kept: dict[str, Any] = {
        figure.history: -(-value // count) if figure.kind is TOTAL else value
        for figure, value in values
        if value is not None
    }
    if not report.peak_process_bytes and report.source == "framework":
        # Neither the device nor a framework measured the process's memory.
        del kept["process_bytes"]
    return PastRun(
        ended_at=report.placed_at + report.held_s, task_run_id=str(report.task_run_id), **kept
    )
