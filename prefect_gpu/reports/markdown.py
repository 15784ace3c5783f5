"""What a person reads: one process's report and one flow run's report, as GitHub markdown.

It covers words and tables. Charts come from `timeline`; `publish` brings the text to Prefect. Both
of Prefect's UIs strip inline `<svg>`, `style` and `class`, but show an image given as a `data:`
URI (Prefect 3.8.8), so that is how charts travel.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence, Set

from prefect_gpu.reports.canvas import clean
from prefect_gpu.reports.model import BudgetSource, Outcome, Source, TaskReport
from prefect_gpu.reports.timeline import OUTCOME_WORDS, flow_gantt_svg, task_timeline_svg
from prefect_gpu.units import GIB, MIB, format_bytes, format_seconds, parse_bytes

#: Rows of a flow's table. Beyond, the page gets slow to open (some 200 bytes a row); failures and
#: leaks are listed apart and are never cut by this.
ROW_LIMIT = 1000

#: Lines in each list of things that need attention.
ATTENTION_LIMIT = 50

#: Characters of an error and of a name that are shown.
ERROR_LIMIT = 1000
NAME_LIMIT = 80

#: Part that a tag adds to the largest peak seen: runs differ a little from one to the next.
TAG_MARGIN = 1.1

#: What has a meaning in the middle of a line; a user's text never starts one.
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
#: GitHub's markdown makes a link of these wherever they stand.
_AUTOLINK = re.compile(r"(?i)(https?|ftp)://|www\.|@")

_SOURCE_NOTES: dict[Source, str] = {
    "nvml": "",
    "framework": (
        "The driver does not tell here which process holds how much: the process's numbers are what"
        " its frameworks held plus the measured context."
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

#: How a run ended that did not complete, after "a run that".
_THAT: dict[Outcome, str] = {
    "failed": "failed",
    "oom": "ran out of memory",
    "died": "died",
    "timeout": "timed out",
    "cancelled": "was cancelled",
}

_HEADLINES: dict[Outcome, str] = {
    "completed": "Completed",
    "failed": "Failed",
    "oom": "Ran out of memory",
    "died": "Died",
    "timeout": "Timed out",
    "cancelled": "Was cancelled",
}


def escape(text: str, limit: int = NAME_LIMIT) -> str:
    """Make a user's text safe inside a paragraph or a table cell: one line, no markup, no links."""
    line = clean(text)
    if len(line) > limit:
        line = line[: limit - 1] + "…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    # A zero-width joint keeps an address from turning into a link.
    return _AUTOLINK.sub(lambda match: match[0][:-1] + "&#8203;" + match[0][-1], line)


def image(alt: str, svg: str) -> str:
    """Write a chart as a markdown image that carries its own data."""
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f"![{escape(alt)}](data:image/svg+xml;base64,{data})"


def task_markdown(report: TaskReport) -> str:
    """Write the report of one process."""
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
    parts.append(_table(("Task run", escape(report.task_run_name)), _facts(report)))
    if report.marks:
        parts.append("### Phases")
        parts.append(_phases(report))
    raw = [("`pid`", str(report.pid))]
    raw += [(f"`{key}`", escape(value, 500)) for key, value in report.metadata().items()]
    parts += [
        "<details>\n<summary>Raw numbers, in bytes and seconds</summary>",
        _table(("field", "value"), raw),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _headline(report: TaskReport) -> str:
    """Say in one sentence what it needed against what it had."""
    budget = format_bytes(report.budget_total_bytes)
    peak_bytes = report.peak_process_bytes
    peak = format_bytes(peak_bytes)
    share = _percent(peak_bytes, report.budget_total_bytes)
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
    leaked = "cannot be told here" if report.leaked_bytes is None else "none"
    return [
        ("Outcome", OUTCOME_WORDS[report.outcome] + _attempt_words(report)),
        ("Device", _device_words(report)),
        (
            "Budget",
            f"**{format_bytes(report.budget_bytes)}**{each}, {_BUDGET_WORDS[report.budget_source]}",
        ),
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


def _phases(report: TaskReport) -> str:
    rows = [
        (
            escape(mark.name),
            format_seconds(mark.at_s),
            "–" if mark.duration_s is None else format_seconds(mark.duration_s),
            _bytes_or_dash(mark.allocated_bytes),
            _bytes_or_dash(mark.peak_allocated_bytes),
            _bytes_or_dash(mark.reserved_bytes),
            _bytes_or_dash(mark.peak_reserved_bytes),
        )
        for mark in report.marks
    ]
    heads = ("phase", "at", "took", "allocated", "peak allocated", "held", "peak held")
    return _table(heads, rows, right=(1, 2, 3, 4, 5, 6))


def flow_markdown(reports: Sequence[TaskReport], *, flow_name: str = "") -> str:
    """Write the report of one flow run: what needs attention first, every process last.

    Args:
        reports: One for each process that was started, in any order; compact ones will do.
        flow_name: For the picture's description.
    """
    reports = sorted(reports, key=lambda report: (report.placed_at, report.attempt))
    parts = [f"**{_flow_headline(reports)}**"]
    if not reports:
        return parts[0] + "\n"
    parts += [f"> {note}" for note in _flow_notes(reports)]
    if attention := _attention(reports):
        parts += ["### Needs attention", "\n".join(attention)]
    parts.append(image(f"Devices of {flow_name or 'the flow'} over time", flow_gantt_svg(reports)))
    parts += ["### Tags for next time", _advice(reports)]
    parts += ["### Reserved in vain", _flow_waste(reports)]
    parts += ["### Every process", _every_process(reports)]
    return "\n\n".join(parts) + "\n"


def flow_metadata(reports: Sequence[TaskReport]) -> dict[str, str]:
    """Give a flow run's totals as strings, as `TaskReport.metadata` does for one process."""
    outcomes = [report.outcome for report in reports]
    return {
        "schema": "1",
        "task_runs": str(len({report.task_run_id for report in reports})),
        "processes": str(len(reports)),
        **{outcome: str(outcomes.count(outcome)) for outcome in OUTCOME_WORDS},
        "devices": str(len({device.uuid for r in reports for device in r.devices})),
        "leaked_bytes": str(sum(report.leaked_bytes or 0 for report in reports)),
        "reserved_gib_s": f"{sum(r.reserved_byte_seconds for r in reports) / GIB:.3f}",
        "wasted_gib_s": f"{sum(r.wasted_byte_seconds for r in reports) / GIB:.3f}",
        "duration_s": f"{_duration_s(reports):.3f}",
        "source": ",".join(sorted({report.source for report in reports})),
    }


def suggest_budget(reports: Sequence[TaskReport]) -> str | None:
    """Say what to write after `gpu:memory=` for one task next time.

    Args:
        reports: Processes of that task.

    Returns:
        The largest peak on one device × 1.1, rounded up to a size that reads well; `None` where
        no run completed with memory.
    """
    top = _largest(reports)
    return readable_size(_peak_each(top) * TAG_MARGIN) if top else None


def _largest(reports: Sequence[TaskReport]) -> TaskReport | None:
    """Choose the process that a task's next budget must hold; `None` where that is not known."""
    if not any(_peak_each(r) > 0 for r in reports if r.outcome == "completed"):
        return None
    # What a probe took on an empty device is up to 2.7 times what the task needs (FACTS.md), so a
    # probe counts only where no run of the same history completed under a real budget.
    proven = {
        r.history_key for r in reports if r.outcome == "completed" and r.budget_source != "probe"
    }
    counted = [r for r in reports if r.budget_source != "probe" or r.history_key not in proven]
    return max(counted, key=_peak_each)


def _peak_each(report: TaskReport) -> float:
    return report.peak_process_bytes / max(1, len(report.devices))


def readable_size(size_bytes: float) -> str:
    """Round up to a size for a tag: `2.1GiB`, `37GiB`, `320MiB`."""
    if size_bytes > 992 * MIB:
        step = 0.1 if size_bytes <= 10 * GIB else 0.5 if size_bytes <= 32 * GIB else 1
        # Steps counted as a whole number first, so that 2.1 is not 2.1000000000000001.
        steps = math.ceil(size_bytes / GIB / step - 1e-9)
        return f"{round(steps * step, 1):g}GiB"
    return f"{max(1, math.ceil(size_bytes / MIB / 32)) * 32}MiB"


def _flow_headline(reports: Sequence[TaskReport]) -> str:
    if not reports:
        return "No GPU process was started."
    count = len(reports)
    done = sum(report.outcome == "completed" for report in reports)
    devices = len({device.uuid for report in reports for device in report.devices})
    retried = count - len({report.task_run_id for report in reports})
    text = f"{done} of {_many(count, 'process', 'processes')} completed"
    text += f" on {_many(devices, 'device')} in {format_seconds(_duration_s(reports))}"
    if retried:
        text += f"; {retried} of them ran a task again"
    return text + "."


def _flow_notes(reports: Sequence[TaskReport]) -> list[str]:
    return [note for source, note in _SOURCE_NOTES.items() if note and _has(reports, source)]


def _has(reports: Sequence[TaskReport], source: Source) -> bool:
    return any(report.source == source for report in reports)


def _attention(reports: Sequence[TaskReport]) -> list[str]:
    leaks = [
        f"- **Leak**: {format_bytes(r.leaked_bytes)} did not come back after {_who(r)} on "
        f"{_device_words(r)}"
        for r in reports
        if r.leaked_bytes
    ]
    failures = [
        f"- **{OUTCOME_WORDS[r.outcome].capitalize()}**: {_who(r)}"
        + (f": {escape(r.error, 300)}" if r.error else "")
        for r in reports
        if r.outcome != "completed"
    ]
    return [*_cut(leaks, "leaks"), *_cut(failures, "failures")]


def _cut(lines: list[str], what: str) -> list[str]:
    left = len(lines) - ATTENTION_LIMIT
    return lines if left <= 0 else [*lines[:ATTENTION_LIMIT], f"- … and {left} more {what}"]


def _advice(reports: Sequence[TaskReport]) -> str:
    by_task: dict[str, list[TaskReport]] = {}
    for report in reports:
        by_task.setdefault(report.task_name, []).append(report)
    rows = []
    for name, group in sorted(by_task.items()):
        top = _largest(group)
        tags = {r.budget_bytes if r.budget_source == "tag" else 0 for r in group}
        size = readable_size(_peak_each(top) * TAG_MARGIN) if top else ""
        if top and not _fits(tags, parse_bytes(size)):
            why = f"largest peak {format_bytes(top.peak_process_bytes)}"
            if len(top.devices) > 1:
                why += f" on {len(top.devices)} devices"
            if top.outcome != "completed":
                why += f", of a run that {_THAT[top.outcome]}"
            if top.budget_source == "probe":
                why += ", with a device to itself; less may do"
            rows.append((escape(name), _now_words(group), f"`gpu:memory={size}`", why))
        elif not top and any(report.outcome == "oom" for report in group):
            most = format_bytes(max(r.budget_bytes for r in group))
            rows.append((escape(name), _now_words(group), f"more than {most}", "none completed"))
    if not rows:
        return "Nothing to change: every tag fits what its task took."
    return _table(("task", "budget now", "write", "because"), rows)


def _fits(tags: Set[int], size_bytes: int) -> bool:
    """Tell whether all runs had one tag that is near enough to leave alone."""
    return all(abs(tag - size_bytes) <= 0.05 * size_bytes for tag in tags)


def _now_words(group: Sequence[TaskReport]) -> str:
    budgets = {(report.budget_source, report.budget_bytes) for report in group}
    sizes = sorted({size for _, size in budgets})
    sources = ", ".join(sorted({source for source, _ in budgets}))
    if len(sizes) == 1:
        return f"{format_bytes(sizes[0])}, {sources}"
    return f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, {sources}"


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
    # Few columns: the v1 UI neither wraps cells nor is its page wide. The rest is in each task
    # run's own report.
    heads = ("#", "task run", "outcome", "on", "peak of budget", "queued", "run")
    rows = [
        (
            str(number),
            escape(r.task_run_name) + _attempt_words(r),
            "completed" if r.outcome == "completed" else f"**{OUTCOME_WORDS[r.outcome]}**",
            ", ".join(str(device.index) for device in r.devices) or "–",
            _of_budget(r) + (", probe" if r.budget_source == "probe" else ""),
            format_seconds(r.queued_s),
            format_seconds(r.run_s),
        )
        for number, r in enumerate(reports[:ROW_LIMIT], 1)
    ]
    table = _table(heads, rows, right=(0, 5, 6))
    left = len(reports) - ROW_LIMIT
    return table if left <= 0 else f"{table}\n\n… and {left} more processes, not shown."


def _of_budget(report: TaskReport) -> str:
    peak, budget = report.peak_process_bytes, report.budget_total_bytes
    return f"{format_bytes(peak)} of {format_bytes(budget)} ({_percent(peak, budget)})"


def _who(report: TaskReport) -> str:
    return f"{escape(report.task_run_name)}{_attempt_words(report)}"


def _attempt_words(report: TaskReport) -> str:
    return f" (process {report.attempt})" if report.attempt > 1 else ""


def _device_words(report: TaskReport) -> str:
    words = [
        f"device {device.index}, {escape(device.name)}, {format_bytes(device.total_bytes)}"
        for device in report.devices
    ]
    return "; ".join(words) or "none"


def _waste_words(wasted: float, reserved: float) -> str:
    # A process that died before its first line held its device longer than its report can tell.
    reserved = max(wasted, reserved)
    return f"{wasted / GIB:,.1f} GiB·s of {reserved / GIB:,.1f}, {_percent(wasted, reserved)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "–"


def _bytes_or_dash(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else format_bytes(size_bytes)


def _duration_s(reports: Sequence[TaskReport]) -> float:
    start = min((report.placed_at for report in reports), default=0.0)
    return max((report.placed_at + report.held_s - start for report in reports), default=0.0)


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
    aligned = ["--:" if column in right else "---" for column in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, aligned, *rows))
