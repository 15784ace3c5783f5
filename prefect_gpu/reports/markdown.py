"""Reports of a process and of a flow run in GitHub markdown. Charts: `timeline`; tags: `advice`; sending: `publish`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from uuid import UUID

from prefect_gpu.measurements import Mark, StepFacts, Suspension
from prefect_gpu.reports.advice import TagAdvice, advise, tag_advice, tags_table, task_tags
from prefect_gpu.reports.canvas import clean
from prefect_gpu.reports.markup import (
    clean_name,
    escape,
    folded,
    image,
    notice,
    percent,
    preformatted,
    table,
)
from prefect_gpu.reports.model import (
    CAUSE_WORDS,
    OUTCOME_WORDS,
    OUTCOMES,
    BudgetSource,
    Source,
    TaskReport,
    UnstartedRun,
)
from prefect_gpu.reports.timeline import flow_gantt_svg, task_timeline_svg
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.units import (
    GIB,
    MIB,
    counted,
    format_bytes,
    format_joules,
    format_seconds,
    text_of,
)

#: Most rows of a flow's table. Chromium takes a second longer for each 300 rows, because Prefect's v2 UI renders an
#: artifact's page twice (3.8.8, two cores).
ROW_LIMIT = 300

#: Most lines in a list of problems, rows in a table of processes, results of a task, and characters of an error.
ATTENTION_LIMIT = 50
PROCESS_LIMIT = 50
METRIC_LIMIT = 50
ERROR_LIMIT = 1000

#: Paragraphs in a report about the source of its numbers.
_SOURCE_NOTES: dict[Source, str] = {
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
    "estimated": "estimated from",
    "probe": "a probe: a first run may take what its device has free",
}


def task_summary(report: TaskReport) -> str:
    """Return a report as one line of plain text: `eval-wide · attempt 1 · completed · 460MiB of 598MiB`."""
    peak, budget = map(format_bytes, (report.peak_process_bytes, report.budget_total_bytes))
    outcome = f"{OUTCOME_WORDS[report.outcome]} · {peak} of {budget}"
    return f"{clean_name(report.task_run_name)} · attempt {report.attempt} · {outcome}"


def task_markdown(report: TaskReport, earlier: Sequence[TaskReport] = ()) -> str:
    """Return the report of one process in markdown. `earlier`: reports of earlier processes of the task run."""
    tag = tag_advice((*earlier, report))
    parts = [f"**{_headline(report)}**"]
    if report.error:
        parts.append(notice(escape(report.error, ERROR_LIMIT)))
    if report.stderr_tail:
        parts += ["The end of its stderr:", preformatted(report.stderr_tail)]
    if report.leaked_bytes:
        leaked = format_bytes(report.leaked_bytes)
        parts.append(notice(f"{leaked} did not come back after the process ended."))
    if note := _SOURCE_NOTES.get(report.source):
        parts.append(note)
    parts.append(image(f"Memory of {report.task_run_name} over time", task_timeline_svg(report)))
    parts.append(table(("Task run", escape(report.task_run_name)), _facts(report, tag)))
    if advice := advise(report, tag):
        parts += ["### What would help", "\n".join(f"- {line}" for line in advice)]
    if report.processes:
        parts += ["### Devices and processes", _devices_and_processes(report)]
    if report.marks:
        parts += ["### Phases", _phases(report)]
    if report.memory_summary:
        title = "PyTorch's memory summary when memory ran out"
        parts.append(folded(title, report.memory_summary))
    raw = {"pid": str(report.pid), **report.metadata()}
    lines = (f"{key}: {clean(value)}" for key, value in raw.items())
    parts.append(folded("Raw numbers, in bytes and seconds", "\n".join(lines)))
    return "\n\n".join(parts) + "\n"


def _headline(report: TaskReport) -> str:
    """Return one sentence with the memory that a process needed and its budget."""
    budget = format_bytes(report.budget_total_bytes)
    peak_bytes = report.peak_process_bytes
    peak = format_bytes(peak_bytes)
    share = percent(peak_bytes, report.budget_total_bytes)
    head = OUTCOMES[report.outcome].ended.capitalize()
    if report.outcome == "completed":
        head += f" in {format_seconds(report.run_s)}"
    elif report.run_s > 0:
        head += f" after {format_seconds(report.run_s)}"
    if peak_bytes == 0:
        return f"{head}: no memory was seen, of a budget of {budget}."
    if peak_bytes > report.budget_total_bytes:
        over = format_bytes(peak_bytes - report.budget_total_bytes)
        return f"{head}: it took {peak}, {over} more than its budget of {budget}."
    if report.outcome == "oom":
        return f"{head}: it had taken {peak} of its {budget} budget ({share})."
    if report.budget_source == "probe":
        return f"{head}: it took {peak} of the {budget} that its device had free for it."
    verb = "needed" if report.outcome == "completed" else "had taken"
    several = f" on {len(report.devices)} devices together" if len(report.devices) > 1 else ""
    return f"{head}: it {verb} {peak} of its {budget} budget{several} ({share})."


def _facts(report: TaskReport, tag: TagAdvice | None) -> list[tuple[str, str]]:
    """Return the rows of a report's table, names and values. Rows without a value are left out."""
    several = len(report.devices) > 1
    each, together = (" on each device", " on all together") if several else ("", "")
    smallest = " on the device with the smallest one" if len({*report.budgets_bytes}) > 1 else each
    framework = escape(report.framework or "none")
    # No framework allocates on simulated devices.
    by = "" if framework == "none" else f", by {framework}"
    viewer = "[PyTorch's viewer](https://pytorch.org/memory_viz)"
    snapshot = f"{escape(report.snapshot_path, 500)}; open it in {viewer}"
    again = f" (attempt {report.attempt})" if report.attempt > 1 else ""
    times = [("queued", report.queued_s), ("start", report.start_s), ("run", report.run_s)]
    peak = f"{together}, {_SOURCE_WORDS[report.source]}"
    estimated = escape(report.estimated_from or "", 200)
    budget = f"{smallest}, {_BUDGET_WORDS[report.budget_source]} {estimated}".rstrip()
    rows = (
        ("Outcome", OUTCOME_WORDS[report.outcome] + again),
        ("Device", _device_words(report)),
        ("Values", escape(report.learn_by, 200)),
        *((f"Result: {escape(name)}", f"{x:.6g}") for name, x in report.metrics[:METRIC_LIMIT]),
        ("Sharing", "at the same time as others, by MPS" if report.sharing else ""),
        ("Shared with", escape(", ".join(report.shared_with), 500)),
        ("Budget", _size(report.budget_bytes, budget)),
        ("Cap", _size(report.cap_bytes, f"{each}, what a framework could allocate", "")),
        ("Peak of the process", _size(report.peak_process_bytes, peak)),
        ("Peak allocated (live)", _size(report.peak_live_bytes, by, "")),
        (
            "Peak held by the framework",
            _size(report.peak_reserved_bytes, ", its cache included", ""),
        ),
        ("Context", _size(report.context_bytes or None, ", outside the framework's count", "")),
        ("Steps", _step_words(report.steps)),
        ("Out of memory put down to", _oom_words(report)),
        ("Memory snapshot", snapshot if report.snapshot_path else ""),
        ("Leaked", _size(report.leaked_bytes, "", "")),
        ("Unused reservation", _unused_percent([report])),
        ("Tag for next time", _tag_words(tag, report)),
        ("GPU computed", _computed_words([report], "of the time")),
        ("Units in use", _unit_words(report)),
        ("Time", ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in times)),
        ("Suspended", "; ".join(map(_suspension_words, report.suspensions))),
    )
    return [row for row in rows if row[1]]


def _size(size_bytes: int | None, more: str, bold: str = "**") -> str:
    return "" if size_bytes is None else f"{bold}{format_bytes(size_bytes)}{bold}{more}"


def _suspension_words(each: Suspension) -> str:
    reason = f" for {escape(each.reason)}" if each.reason else ""
    device = f" on {escape(each.device)}" if each.device else ""
    return (
        f"{format_seconds(each.seconds)}{reason}, {format_bytes(each.moved_bytes)} to host memory in "
        f"{format_seconds(each.out_s)} and back{device} in {format_seconds(each.in_s)}"
    )


def _tag_words(tag: TagAdvice | None, report: TaskReport) -> str:
    """Return the advised tag and its reason; empty: the budget fits, or the task run has another process."""
    if tag is None or tag.fits or report.next_words:
        return ""
    return f"{tag.write_words} ({tag.why})"


def _step_words(steps: StepFacts | None) -> str:
    if not steps:
        return ""
    words = [f"{steps.count} finished"]
    if steps.first_live_bytes is not None:
        words.append(f"up to {format_bytes(steps.first_live_bytes)} allocated in the first")
    if steps.steady_live_bytes is not None:
        differ = "" if steps.alike or steps.count < 3 else ", which differ"
        words.append(f"{format_bytes(steps.steady_live_bytes)} in steady ones{differ}")
    if steps.step_s is not None:
        words.append(f"{format_seconds(steps.step_s)} each")
    if steps.alloc_retries:
        words.append(f"its cache given up {counted(steps.alloc_retries, 'time')}")
    return ", ".join(words)


def _oom_words(report: TaskReport) -> str:
    """Return the cause of an out-of-memory error and the memory that the process would have needed."""
    words = CAUSE_WORDS.get(report.cause, escape(report.cause))
    if words and report.wanted_bytes is not None:
        words += f"; it would have needed {format_bytes(report.wanted_bytes)}"
    return words


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
    return text + _left_out(len(report.processes) - PROCESS_LIMIT, "more, not shown.")


def _left_out(count: int, what: str) -> str:
    return f"\n\n… and {count} {what}" if count > 0 else ""


def _phases(report: TaskReport) -> str:
    process = "NVML" if report.source == "nvml" else "process"
    sizes = ("allocated", "peak allocated", "reserved", "peak reserved", process)
    text = table(
        ("step", "phase", *sizes, "took"), map(_phase, report.marks), right=(0, 2, 3, 4, 5, 6, 7)
    )
    note = "Sizes in MiB. The peaks of a phase are those in it, the peaks of a mark those since the mark before."
    return f"{text}\n\n{note}"


def _phase(mark: Mark) -> tuple[str, ...]:
    # One unit for all rows: 2.1GiB in two rows may hide 50 MiB.
    size = partial(text_of, as_text=lambda size_bytes: f"{size_bytes / MIB:,.1f}", absent="–")
    return (
        str(mark.step),
        escape(mark.name),
        size(mark.allocated_bytes),
        size(mark.peak_allocated_bytes),
        size(mark.reserved_bytes),
        size(mark.peak_reserved_bytes),
        size(mark.process_bytes),
        text_of(mark.duration_s, format_seconds, "–"),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A task run of a flow run."""

    #: Report of the last process; the task run itself if no process was started.
    end: TaskReport | UnstartedRun
    #: Reports of the task run's processes, in order; empty: no process was started.
    attempts: tuple[TaskReport, ...] = ()
    #: Address of the task run's page; `None`: there is none.
    url: str | None = None

    @property
    def name(self) -> str:
        """Name of the task run in markdown."""
        name = escape(self.end.task_run_name)
        return f"[{name}]({self.url})" if self.url else name

    @property
    def last(self) -> TaskReport | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def tries(self) -> int:
        """Number of the task run's processes."""
        return max((len(self.attempts), *(report.attempt for report in self.attempts)))

    @property
    def began_at(self) -> float:
        if isinstance(self.end, UnstartedRun):
            return self.end.ended_at
        return self.attempts[0].placed_at


_Link: TypeAlias = Callable[[UUID], str | None]


def _task_runs(
    reports: Sequence[TaskReport],
    unstarted: Sequence[UnstartedRun],
    link: _Link = lambda task_run_id: None,
) -> list[_Run]:
    """Return reports grouped by task run, in order of the first placement."""
    by_id: dict[UUID, list[TaskReport]] = {}
    for report in sorted(reports, key=lambda report: (report.attempt, report.placed_at)):
        by_id.setdefault(report.task_run_id, []).append(report)
    runs = [_Run(each[-1], tuple(each), link(run_id)) for run_id, each in by_id.items()]
    others = (each for each in unstarted if each.task_run_id not in by_id)
    runs += [_Run(each, url=link(each.task_run_id)) for each in others]
    return sorted(runs, key=lambda run: run.began_at)


def flow_markdown(
    reports: Sequence[TaskReport],
    unstarted: Sequence[UnstartedRun] = (),
    *,
    flow_name: str = "",
    link: _Link = lambda task_run_id: None,
) -> str:
    """Return the report of one flow run in markdown: problems first, the table of all task runs last.

    Args:
        reports: A report of each started process, in any order. Compact reports are enough.
        unstarted: Task runs that ended without a process. Task runs with a report are ignored.
        flow_name: Name of the flow in the chart's description.
        link: Returns the address of a task run's page; `None`: there is none.
    """
    runs = _task_runs(reports, unstarted, link)
    parts = [f"**{flow_headline(reports, unstarted)}**"]
    if not runs:
        return parts[0] + "\n"
    sources = {report.source for report in reports}
    if "nvml" in sources:
        # A process may end before the driver is asked; its own report says so.
        sources.discard("framework")
    parts += [note for source, note in _SOURCE_NOTES.items() if source in sources]
    if attention := _attention(runs):
        parts += ["### Needs attention", "\n".join(attention)]
    if reports:
        numbers = {report: at for at, run in enumerate(runs, 1) for report in run.attempts}
        chart = flow_gantt_svg([*numbers], numbers=[*numbers.values()])
        parts.append(image(f"Devices of {flow_name or 'the flow'} over time", chart))
        parts += ["### Tags for next time", tags_table(task_tags(reports))]
        parts.append(_flow_waste(reports))
        if words := _computed_words(reports, "of the time of these tasks"):
            parts.append(f"**GPUs computed: {words}.**")
    parts += ["### Every task run", _every_run(runs)]
    return "\n\n".join(parts) + "\n"


def flow_metadata(
    reports: Sequence[TaskReport], unstarted: Sequence[UnstartedRun] = ()
) -> dict[str, str]:
    """Return the totals of a flow run as strings, as `TaskReport.metadata` does for one process."""
    runs = _task_runs(reports, unstarted)
    outcomes: list[str] = [run.end.outcome for run in runs]
    return {
        # In schema 2 outcomes count task runs, in schema 1 processes.
        "schema": "2",
        "task_runs": str(len(runs)),
        "processes": str(len(reports)),
        **{outcome: str(outcomes.count(outcome)) for outcome in OUTCOME_WORDS},
        "unstarted": str(sum(not run.attempts for run in runs)),
        "devices": str(len({device for r in reports for device in r.devices})),
        **({"nodes": str(nodes)} if (nodes := _count_nodes(reports)) else {}),
        "leaked_bytes": str(sum(report.leaked_bytes or 0 for report in reports)),
        "reserved_gib_s": f"{_reserved_byte_seconds(reports) / GIB:.3f}",
        "wasted_gib_s": f"{sum(r.wasted_byte_seconds for r in reports) / GIB:.3f}",
        "duration_s": f"{_duration_s(reports):.3f}",
        "source": ",".join(sorted({report.source for report in reports})),
    }


def flow_headline(reports: Sequence[TaskReport], unstarted: Sequence[UnstartedRun] = ()) -> str:
    """Return one sentence with the numbers of task runs by state, attempts and devices, and the duration."""
    runs = _task_runs(reports, unstarted)
    if not runs:
        return "No GPU task ran."
    states = [OUTCOMES[run.end.outcome].state for run in runs]
    known = dict.fromkeys(words.state for words in OUTCOMES.values())
    counts = [f"{states.count(state)} {state}" for state in known if state in states]
    text = f"{counted(len(runs), 'task run')}: {', '.join(counts)}"
    text += f"; {counted(sum(run.tries for run in runs), 'attempt')}"
    if reports:
        devices = len({device for report in reports for device in report.devices})
        nodes = _count_nodes(reports)
        text += f" on {counted(devices, 'device')}"
        text += f" of {counted(nodes, 'node')}" if nodes else ""
        text += f" in {format_seconds(_duration_s(reports))}"
    return text + "."


def _attention(runs: Sequence[_Run]) -> list[str]:
    leaks = [
        f"- **Leak**: {format_bytes(report.leaked_bytes)} did not come back after {run.name} on "
        f"{_device_words(report)}"
        for run in runs
        for report in run.attempts
        if report.leaked_bytes
    ]
    failures = [_failure(run) for run in runs if run.end.outcome != "completed"]
    above = [
        f"- **Above its budget**: {run.name} took {format_bytes(over)} more than its "
        f"{format_bytes(report.budget_total_bytes)}"
        for run in runs
        if (report := run.last)
        and (over := report.peak_process_bytes - report.budget_total_bytes) > OVERSHOOT_BYTES
    ]
    lines: list[str] = []
    for found, what in ((failures, "failures"), (leaks, "leaks"), (above, "above their budget")):
        lines += found[:ATTENTION_LIMIT]
        if (left := len(found) - ATTENTION_LIMIT) > 0:
            lines.append(f"- … and {left} more {what}")
    return lines


def _failure(run: _Run) -> str:
    text = f"- {_state_words(run, first=str.capitalize)}: {run.name}"
    report = run.last
    if report and report.node:
        text += f" on {_on(report)}"
    if report and report.cause:
        text += f", put down to {_oom_words(report)}"
    return text + (f": {escape(run.end.error, 300)}" if run.end.error else "")


def _state_words(run: _Run, first: Callable[[str], str] = str) -> str:
    """Return a task run's state, changed by `first`, and its retries: `completed, recovered after 2 retries`."""
    state = first(OUTCOMES[run.end.outcome].state)
    if run.end.outcome == "completed":
        retries = f", recovered after {counted(run.tries - 1, 'retry', 'retries')}"
        return state + (retries if run.tries > 1 else "")
    words = f"**{state}**"
    if run.end.outcome in ("oom", "timeout"):
        words += f", {OUTCOME_WORDS[run.end.outcome]}"
    if not run.attempts:
        words += ", no process was started"
    return words + (f", after {run.tries} attempts" if run.tries > 1 else "")


def _flow_waste(reports: Sequence[TaskReport]) -> str:
    text = f"**Unused reservation: {_unused_percent(reports)}** of the memory that was reserved, over time."
    rest = [report for report in reports if report.budget_source != "probe"]
    if len(rest) < len(reports):
        without = f"; without them: {_unused_percent(rest)}" if rest else ""
        why = "First runs reserve what their device has free, to find out what they need"
        text += f" {why}{without}."
    return text


def _every_run(runs: Sequence[_Run]) -> str:
    # Few columns: the v1 UI does not wrap cells, and each task run has a report with all values.
    heads = ["#", "task run", "outcome", "on", "peak of budget", "queued", "run", "cause"]
    # Above the limit, completed task runs are left out first.
    ranked = sorted(enumerate(runs, 1), key=lambda each: each[1].end.outcome == "completed")
    rows = [
        (str(number), run.name, _state_words(run), *_last_process(run))
        for number, run in sorted(ranked[:ROW_LIMIT], key=lambda each: each[0])
    ]
    text = table(heads, rows, right=(0, 5, 6))
    return text + _left_out(len(runs) - ROW_LIMIT, "more task runs, not shown.")


def _last_process(run: _Run) -> tuple[str, ...]:
    """Return the cells about a task run's last process: device, peak of budget, queued, run, cause."""
    if (report := run.last) is None:
        return ("–",) * 5
    peak, budget = report.peak_process_bytes, report.budget_total_bytes
    sizes = f"not seen, of {format_bytes(budget)}"
    if peak:
        sizes = f"{format_bytes(peak)} of {format_bytes(budget)} ({percent(peak, budget)})"
    sizes += ", probe" if report.budget_source == "probe" else ""
    times = map(format_seconds, (report.queued_s, report.run_s))
    cause = next((r.cause for r in reversed(run.attempts) if r.cause), "")
    return (_on(report), sizes, *times, CAUSE_WORDS.get(cause, escape(cause)) or "–")


def _on(report: TaskReport) -> str:
    """Return the indices of a process's devices, in a cluster after the node's name: `gpu-2:0, 1`."""
    indices = ", ".join(str(device.index) for device in report.devices)
    return f"{escape(report.node)}:{indices}" if report.node else indices or "–"


def _count_nodes(reports: Sequence[TaskReport]) -> int:
    """Return the number of cluster nodes that processes ran on; 0: no cluster."""
    return len({report.node for report in reports} - {""})


def _device_words(report: TaskReport) -> str:
    words = [
        f"{escape(device.label)}, {escape(device.name)}, {format_bytes(device.total_bytes)}"
        for device in report.devices
    ]
    return "; ".join(words) or "none"


def _computed_words(reports: Sequence[TaskReport], of: str) -> str:
    """Return, as text, the part of the time of bodies in which kernels ran, and the energy; "": no report has them."""
    known = [(r.busy_fraction, r.run_s) for r in reports if r.busy_fraction is not None]
    run_s = sum(seconds for _, seconds in known)
    if not run_s:
        return ""
    busy = sum(fraction * seconds for fraction, seconds in known) / run_s
    joules = [r.energy_j for r in reports if r.energy_j is not None]
    return f"{busy:.0%} {of}" + (f", {format_joules(sum(joules))}" if joules else "")


def _unit_words(report: TaskReport) -> str:
    if report.multiprocessors is None:
        return ""
    parts = {
        "multiprocessors": report.multiprocessors,
        "tensor cores": report.tensor_cores,
        "memory bandwidth": report.bandwidth,
    }
    return ", ".join(f"{part:.0%} of {what}" for what, part in parts.items() if part is not None)


def _unused_percent(reports: Sequence[TaskReport]) -> str:
    """Return the unused fraction of the reserved memory over time, as a percentage in text."""
    wasted = sum(report.wasted_byte_seconds for report in reports)
    # A process that died before its first line held its device longer than its report shows.
    return percent(wasted, max(wasted, _reserved_byte_seconds(reports)))


def _reserved_byte_seconds(reports: Sequence[TaskReport]) -> float:
    return sum(report.budget_total_bytes * report.held_s for report in reports)


def _duration_s(reports: Sequence[TaskReport]) -> float:
    start = min((report.placed_at for report in reports), default=0.0)
    return max((report.placed_at + report.held_s - start for report in reports), default=0.0)
