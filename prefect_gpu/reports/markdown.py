"""The report of a process and the report of a flow run as GitHub markdown.

It covers words and tables. Charts come from `timeline`, advice and tags to write from `advice`. `publish`
sends the text to Prefect.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect_gpu.measurements import StepFacts
from prefect_gpu.reports.advice import advise, tags_table
from prefect_gpu.reports.markup import escape, folded, image, percent, table
from prefect_gpu.reports.model import (
    CAUSE_WORDS,
    OUTCOME_WORDS,
    BudgetSource,
    Outcome,
    Source,
    TaskReport,
)
from prefect_gpu.reports.timeline import flow_gantt_svg, task_timeline_svg
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.units import GIB, MIB, format_bytes, format_seconds

#: Rows of a flow's table. With more, of some 200 bytes each, the page becomes slow to open. Failures and
#: leaks are listed separately.
ROW_LIMIT = 1000

#: Lines in each list of what needs attention.
ATTENTION_LIMIT = 50

#: Rows of the table of a task's processes.
PROCESS_LIMIT = 50

#: Characters of an error that are shown.
ERROR_LIMIT = 1000

_SOURCE_NOTES: dict[Source, str] = {
    "nvml": "",
    "framework": (
        "The driver does not report the memory of each process here: the numbers are what its"
        " frameworks held plus the measured context."
    ),
    "host": (
        "These numbers are **host memory, resident set; not GPU memory**: no GPU answered, so the"
        " machine's own memory stood in for one."
    ),
    "simulated": (
        "These numbers are **simulated**: no real device was used, and nothing real was measured."
    ),
}

_SOURCE_WORDS: dict[Source, str] = {
    "nvml": "as the driver counts it (NVML)",
    "framework": "frameworks plus context",
    "host": "host memory, resident set",
    "simulated": "simulated",
}

_BUDGET_WORDS: dict[BudgetSource, str] = {
    "tag": "from its tag",
    "learned": "learned from earlier runs",
    "probe": "a probe: the first run has the device to itself",
}

_HEADLINES: dict[Outcome, str] = {
    "completed": "Completed",
    "failed": "Failed",
    "oom": "Ran out of memory",
    "died": "Died",
    "timeout": "Timed out",
    "cancelled": "Was cancelled",
}


def task_markdown(report: TaskReport) -> str:
    """Return the report of one process."""
    parts = [f"**{_headline(report)}**"]
    if report.error:
        parts.append(f"> ⚠️ {escape(report.error, ERROR_LIMIT)}")
    if report.leaked_bytes:
        parts.append(
            f"> ⚠️ {format_bytes(report.leaked_bytes)} did not come back after the process ended."
        )
    if note := _SOURCE_NOTES[report.source]:
        parts.append(f"> {note}")
    parts.append(image(f"Memory of {report.task_run_name} over time", task_timeline_svg(report)))
    parts.append(table(("Task run", escape(report.task_run_name)), _facts(report)))
    if advice := advise(report):
        parts += ["### What would help", "\n".join(f"- {line}" for line in advice)]
    if report.processes:
        parts += ["### Devices and processes", _devices_and_processes(report)]
    if report.marks:
        parts += ["### Phases", _phases(report)]
    if report.memory_summary:
        title = "PyTorch's memory summary when memory ran out"
        parts.append(folded(title, report.memory_summary))
    raw = [("`pid`", str(report.pid))]
    raw += [(f"`{key}`", escape(value, 500)) for key, value in report.metadata().items()]
    parts += [
        "<details>\n<summary>Raw numbers, in bytes and seconds</summary>",
        table(("field", "value"), raw),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _headline(report: TaskReport) -> str:
    """Return one sentence: what it needed and what it had."""
    budget = format_bytes(report.budget_total_bytes)
    peak_bytes = report.peak_process_bytes
    peak = format_bytes(peak_bytes)
    share = percent(peak_bytes, report.budget_total_bytes)
    time = f" in {format_seconds(report.run_s)}" if report.outcome == "completed" else ""
    if report.outcome in ("failed", "died", "timeout", "cancelled", "oom") and report.run_s > 0:
        time = f" after {format_seconds(report.run_s)}"
    head = _HEADLINES[report.outcome] + time
    if peak_bytes == 0:
        return f"{head}: no memory was seen, of a budget of {budget}."
    if peak_bytes > report.budget_total_bytes:
        over = format_bytes(peak_bytes - report.budget_total_bytes)
        return f"{head}: it took {peak}, {over} more than its budget of {budget}."
    if report.outcome == "oom":
        return f"{head}: it had taken {peak} of its {budget} budget ({share})."
    if report.budget_source == "probe":
        return f"{head}: it took {peak}, with the whole device ({budget}) to itself."
    verb = "needed" if report.outcome == "completed" else "had taken"
    return f"{head}: it {verb} {peak} of its {budget} budget ({share})."


def _facts(report: TaskReport) -> list[tuple[str, str]]:
    frameworks = report.framework or "none"
    live, reserved = report.peak_live_bytes, report.peak_reserved_bytes
    unknown = f"unknown (framework: {escape(frameworks)})"
    each = " on each device" if len(report.devices) > 1 else ""
    leaked = "cannot be measured here" if report.leaked_bytes is None else "none"
    return [
        ("Outcome", OUTCOME_WORDS[report.outcome] + _attempt_words(report)),
        ("Device", _device_words(report)),
        ("Shared with", escape(", ".join(report.shared_with), 500) or "no other GPU task"),
        (
            "Budget",
            f"**{format_bytes(report.budget_bytes)}**{each}, {_BUDGET_WORDS[report.budget_source]}",
        ),
        ("Cap", _cap_words(report)),
        (
            "Peak of the process",
            f"**{format_bytes(report.peak_process_bytes)}**, {_SOURCE_WORDS[report.source]}",
        ),
        (
            "Peak allocated (live)",
            unknown if live is None else f"{format_bytes(live)}, by {escape(frameworks)}",
        ),
        (
            "Peak held by the framework",
            unknown if reserved is None else f"{format_bytes(reserved)}, its cache included",
        ),
        ("Context", f"{format_bytes(report.context_bytes)}, outside the framework's count"),
        ("Steps", _step_words(report.steps)),
        *([("Out of memory put down to", _oom_words(report))] if report.cause else []),
        *([("Memory snapshot", _snapshot_words(report))] if report.snapshot_path else []),
        ("Leaked", format_bytes(report.leaked_bytes) if report.leaked_bytes else leaked),
        (
            "Reserved in vain",
            _waste_words(report.wasted_byte_seconds, report.reserved_byte_seconds),
        ),
        (
            "Time",
            ", ".join(
                f"{what} {format_seconds(seconds)}"
                for what, seconds in (
                    ("queued", report.queued_s),
                    ("start", report.start_s),
                    ("run", report.run_s),
                )
            ),
        ),
    ]


def _cap_words(report: TaskReport) -> str:
    if report.cap_bytes is None:
        return "none"
    each = " on each device" if len(report.devices) > 1 else ""
    return f"{format_bytes(report.cap_bytes)}{each}, what a framework could allocate"


def _step_words(steps: StepFacts | None) -> str:
    if steps is None:
        return "none seen"
    words = [f"{steps.count} over"]
    if steps.first_live_bytes is not None:
        words.append(f"up to {format_bytes(steps.first_live_bytes)} allocated in the first")
    if steps.steady_live_bytes is not None:
        differ = "" if steps.alike or steps.count < 3 else ", which differ"
        words.append(f"{format_bytes(steps.steady_live_bytes)} in steady ones{differ}")
    if steps.step_s is not None:
        words.append(f"{format_seconds(steps.step_s)} each")
    if steps.alloc_retries:
        words.append(f"its cache given up {_many(steps.alloc_retries, 'time')}")
    return ", ".join(words)


def _oom_words(report: TaskReport) -> str:
    words = CAUSE_WORDS.get(report.cause, escape(report.cause))
    if report.wanted_bytes is not None:
        words += f"; it would have needed {format_bytes(report.wanted_bytes)}"
    return words


def _snapshot_words(report: TaskReport) -> str:
    viewer = "[PyTorch's viewer](https://pytorch.org/memory_viz)"
    return f"{escape(report.snapshot_path, 500)}; open it in {viewer}"


def _devices_and_processes(report: TaskReport) -> str:
    def words(pid: int | None) -> str:
        if pid is None:
            return "all"
        return f"{pid}, the task's own" if pid == report.pid else f"{pid}, started by it"

    node = f"{escape(report.node)}:" if report.node else ""
    rows = [
        (
            f"{node}{process.device_index}",
            words(process.pid),
            format_bytes(process.peak_bytes),
            percent(process.peak_bytes, process.budget_bytes),
        )
        for process in report.processes[:PROCESS_LIMIT]
    ]
    text = table(("device", "process", "peak", "of its budget"), rows, right=(2, 3))
    left = len(report.processes) - PROCESS_LIMIT
    return text if left <= 0 else f"{text}\n\n… and {left} more, not shown."


def _phases(report: TaskReport) -> str:
    process = "NVML" if report.source == "nvml" else "process"
    heads = ["step", "phase", "allocated", "peak allocated", "reserved", "peak reserved", process]
    rows = [
        [
            str(mark.step),
            escape(mark.name),
            *map(
                _mib,
                (
                    mark.allocated_bytes,
                    mark.peak_allocated_bytes,
                    mark.reserved_bytes,
                    mark.peak_reserved_bytes,
                    mark.process_bytes,
                ),
            ),
        ]
        for mark in report.marks
    ]
    if any(mark.duration_s is not None for mark in report.marks):
        heads.append("took")
        for row, mark in zip(rows, report.marks, strict=True):
            row.append("–" if mark.duration_s is None else format_seconds(mark.duration_s))
    sizes = "Sizes in MiB. The peaks of a phase are those in it, the peaks of a mark those since the mark before."
    return table(heads, rows, right=(0, 2, 3, 4, 5, 6, 7)) + f"\n\n{sizes}"


def _mib(size_bytes: int | None) -> str:
    # One unit for all rows: 2.1GiB beside 2.1GiB may hide 50 MiB.
    return "unknown" if size_bytes is None else f"{size_bytes / MIB:,.1f}"


def flow_markdown(reports: Sequence[TaskReport], *, flow_name: str = "") -> str:
    """Return the report of one flow run: what needs attention first, every process last.

    Args:
        reports: One for each process that was started, in any order; compact ones are enough.
        flow_name: For the description of the image.
    """
    reports = sorted(reports, key=lambda report: (report.placed_at, report.attempt))
    parts = [f"**{_flow_headline(reports)}**"]
    if not reports:
        return parts[0] + "\n"
    sources = {report.source for report in reports}
    parts += [f"> {note}" for source, note in _SOURCE_NOTES.items() if note and source in sources]
    if attention := _attention(reports):
        parts += ["### Needs attention", "\n".join(attention)]
    parts.append(image(f"Devices of {flow_name or 'the flow'} over time", flow_gantt_svg(reports)))
    parts += ["### Tags for next time", tags_table(reports)]
    parts += ["### Reserved in vain", _flow_waste(reports)]
    parts += ["### Every process", _every_process(reports)]
    return "\n\n".join(parts) + "\n"


def flow_metadata(reports: Sequence[TaskReport]) -> dict[str, str]:
    """Return the totals of a flow run as strings, like `TaskReport.metadata` of one process."""
    outcomes = [report.outcome for report in reports]
    return {
        "schema": "1",
        "task_runs": str(len({report.task_run_id for report in reports})),
        "processes": str(len(reports)),
        **{outcome: str(outcomes.count(outcome)) for outcome in OUTCOME_WORDS},
        "devices": str(len({device for r in reports for device in r.devices})),
        **({"nodes": str(nodes)} if (nodes := _count_nodes(reports)) else {}),
        "leaked_bytes": str(sum(report.leaked_bytes or 0 for report in reports)),
        "reserved_gib_s": f"{sum(r.reserved_byte_seconds for r in reports) / GIB:.3f}",
        "wasted_gib_s": f"{sum(r.wasted_byte_seconds for r in reports) / GIB:.3f}",
        "duration_s": f"{_duration_s(reports):.3f}",
        "source": ",".join(sorted({report.source for report in reports})),
    }


def _flow_headline(reports: Sequence[TaskReport]) -> str:
    if not reports:
        return "No GPU process was started."
    count = len(reports)
    done = sum(report.outcome == "completed" for report in reports)
    devices = len({device for report in reports for device in report.devices})
    nodes = _count_nodes(reports)
    of_nodes = f" of {_many(nodes, 'node')}" if nodes else ""
    retried = count - len({report.task_run_id for report in reports})
    text = f"{done} of {_many(count, 'process', 'processes')} completed"
    text += f" on {_many(devices, 'device')}{of_nodes} in {format_seconds(_duration_s(reports))}"
    if retried:
        text += f"; {retried} of them ran a task again"
    return text + "."


def _attention(reports: Sequence[TaskReport]) -> list[str]:
    leaks = [
        f"- **Leak**: {format_bytes(r.leaked_bytes)} did not come back after {_name(r)} on "
        f"{_device_words(r)}"
        for r in reports
        if r.leaked_bytes
    ]
    failures = [
        f"- **{OUTCOME_WORDS[r.outcome].capitalize()}**: {_name(r)}"
        + (f" on {_on(r)}" if r.node else "")
        + (f", put down to {_oom_words(r)}" if r.cause else "")
        + (f": {escape(r.error, 300)}" if r.error else "")
        for r in reports
        if r.outcome != "completed"
    ]
    above = [
        f"- **Above its budget**: {_name(r)} took "
        f"{format_bytes(r.peak_process_bytes - r.budget_total_bytes)} more than its "
        f"{format_bytes(r.budget_total_bytes)}"
        for r in reports
        if r.peak_process_bytes - r.budget_total_bytes > OVERSHOOT_BYTES
    ]
    return [*_cut(leaks, "leaks"), *_cut(failures, "failures"), *_cut(above, "above their budget")]


def _cut(lines: list[str], what: str) -> list[str]:
    left = len(lines) - ATTENTION_LIMIT
    return lines if left <= 0 else [*lines[:ATTENTION_LIMIT], f"- … and {left} more {what}"]


def _flow_waste(reports: Sequence[TaskReport]) -> str:
    wasted = sum(report.wasted_byte_seconds for report in reports)
    text = _waste_words(wasted, sum(report.reserved_byte_seconds for report in reports))
    text = f"**{text}** (reserved minus used, over time)."
    probes = sum(r.wasted_byte_seconds for r in reports if r.budget_source == "probe")
    if probes:
        text += (
            f" Probes account for {probes / GIB:,.1f} GiB·s of it: a first run has a device to"
            " itself, later ones do not."
        )
    return text


def _every_process(reports: Sequence[TaskReport]) -> str:
    # Few columns, because the v1 UI does not wrap cells. The rest is in the report of each task run.
    heads = ["#", "task run", "outcome", "on", "peak of budget", "queued", "run"]
    rows = [
        [
            str(number),
            escape(r.task_run_name) + _attempt_words(r),
            "completed" if r.outcome == "completed" else f"**{OUTCOME_WORDS[r.outcome]}**",
            _on(r),
            _of_budget(r) + (", probe" if r.budget_source == "probe" else ""),
            format_seconds(r.queued_s),
            format_seconds(r.run_s),
        ]
        for number, r in enumerate(reports[:ROW_LIMIT], 1)
    ]
    if any(report.cause for report in reports):
        heads.append("cause")
        for row, report in zip(rows, reports, strict=False):
            row.append(CAUSE_WORDS.get(report.cause, escape(report.cause)) or "–")
    text = table(heads, rows, right=(0, 5, 6))
    left = len(reports) - ROW_LIMIT
    return text if left <= 0 else f"{text}\n\n… and {left} more processes, not shown."


def _of_budget(report: TaskReport) -> str:
    peak, budget = report.peak_process_bytes, report.budget_total_bytes
    return f"{format_bytes(peak)} of {format_bytes(budget)} ({percent(peak, budget)})"


def _name(report: TaskReport) -> str:
    return f"{escape(report.task_run_name)}{_attempt_words(report)}"


def _attempt_words(report: TaskReport) -> str:
    return f" (process {report.attempt})" if report.attempt > 1 else ""


def _on(report: TaskReport) -> str:
    """Return the indices of its devices, in a cluster after their node: `gpu-2:0, 1`."""
    indices = ", ".join(str(device.index) for device in report.devices)
    return f"{escape(report.node)}:{indices}" if report.node else indices or "–"


def _count_nodes(reports: Sequence[TaskReport]) -> int:
    """Return how many nodes of a cluster the processes ran on; 0: there is no cluster."""
    return len({report.node for report in reports} - {""})


def _device_words(report: TaskReport) -> str:
    words = [
        f"{escape(device.label) if device.node else f'device {device.index}'}, {escape(device.name)}, {format_bytes(device.total_bytes)}"
        for device in report.devices
    ]
    return "; ".join(words) or "none"


def _waste_words(wasted: float, reserved: float) -> str:
    # A process that died before its first line held its device longer than its report knows.
    reserved = max(wasted, reserved)
    return f"{wasted / GIB:,.1f} GiB·s of {reserved / GIB:,.1f}, {percent(wasted, reserved)}"


def _duration_s(reports: Sequence[TaskReport]) -> float:
    start = min((report.placed_at for report in reports), default=0.0)
    return max((report.placed_at + report.held_s - start for report in reports), default=0.0)


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
