"""Text about processes: their log lines, the error and verdict of an outcome, and the summary of a flow run.

`process_run` decides an outcome and the next step. Lines about waiting task runs are in `engine`, the flow's
report with all processes in `reports`.
"""

from __future__ import annotations

import math
import signal
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from typing_extensions import assert_never

from prefect_gpu.engine.task_engine import (
    LONGEST_LINE,
    CancelledByRunner,
    ChildTraceback,
    attach_traceback,
)
from prefect_gpu.errors import ChildDiedError, ChildTimeoutError, PrefectGPUError, ResultError
from prefect_gpu.processes.crash_site import crashed_at
from prefect_gpu.processes.launch_spec import ChildRefused
from prefect_gpu.reports.advice import NO_TAG_HELPS, TaskTags, task_tags
from prefect_gpu.reports.model import OUTCOME_WORDS, TaskReport, Verdict
from prefect_gpu.runner import process_run
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.task_plan import TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Device, Placement
from prefect_gpu.suspension.driver_calls import ProcessLostError
from prefect_gpu.units import format_bytes, format_seconds

#: Most lines of a summary on tasks, devices and tags: 12 with the first line and the counts of omitted lines.
MOST_LINES = 3, 2, 3

#: Shortest wait in seconds that is mentioned.
LEAST_WAIT_S = 1.0


#: Text about a SIGKILL that the runner did not send, by its cause.
_KILLED = {
    "host": (
        "the machine's own memory, or that of its container or job (control group), ran out: the kernel's counter of "
        "out-of-memory kills rose while it ran: load less data at a time, start fewer data loader workers, or let fewer "
        "tasks run at once (max_processes=)"
    ),
    "unknown": (
        "cause unknown: possibly the kernel's out-of-memory killer, possibly a kill -9; journalctl -k shows which"
    ),
}


def placed_line(
    placement: Placement, grant: Grant, identity: HistoryKey, whole: bool, waited_s: float
) -> str:
    """Return the log line of a placement: the devices, the memory, and the reason for the budget.

    `whole`: the process has all free memory of its devices. `waited_s` are the seconds of waiting before.
    """
    shares = any(r.probe for r in placement.reservations)
    on = ", ".join(device.label for device in placement.devices)
    budget = format_bytes(min(placement.budget_bytes))
    budget += " on each" if len(placement.devices) > 1 else ""
    if grant.after_oom:
        why = "after an out-of-memory"
    elif grant.source == "tag":
        why = "from its tag gpu:memory"
    elif (values := grant.estimated_from.get(placement.devices[0].name)) and not shares:
        why = f"estimated from runs with {values}"
    elif (runs := grant.learned_runs.get(placement.devices[0].name)) and not shares:
        where = "outside a flow" if identity.flow_name is None else "in this flow"
        equal = "equal gpu:learn_by values" if identity.learn_by else ""
        chosen = identity.learn_by_words or equal
        why = f"learned from {runs} {'run' if runs == 1 else 'runs'} of this task {where}"
        why += f" with {chosen}" if chosen else ""
    else:
        why = "no earlier run has shown what it needs"
        why += f"; {grant.alone_because}" if grant.alone_because else ""
    how = f"alone on {on} with all that is free, " if whole else f"on {on} with a budget of "
    if shares:
        how = f"on {on}, where other first runs may be, with at most "
    waited = f" after {format_seconds(waited_s)}" if waited_s >= LEAST_WAIT_S else ""
    return f"Placed{waited} {how}{budget} ({why})"


def ended_line(report: TaskReport) -> str:
    """Return the log line of an ended process: run time and memory; empty: another line says why it ended."""
    if report.outcome in ("oom", "cancelled"):
        return ""
    kind = " of host memory" if report.source == "host" else ""
    used = _peak_words(report) + (kind if report.peak_process_bytes else "")
    ran = f"ran {format_seconds(report.run_s)}"
    return f"{OUTCOME_WORDS[report.outcome].capitalize()}: {ran}, {used}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the class name unless the class is of this package."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - a user's class may have no text
        text = ""
    if isinstance(error, (PrefectGPUError, CancelledByRunner)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return an error's text in one line for the log: of PyTorch's six sentences the first is enough."""
    return textwrap.shorten(first_line(error), LONGEST_LINE, placeholder=" …")


def conclude(
    outcome: process_run.Failure, plan: TaskPlan, record: ProcessRecord
) -> tuple[BaseException, Verdict]:
    """Return the error and the verdict of a process that returned no value."""
    match outcome:
        case process_run.Failed(error, traceback):
            verdict = Verdict("failed", _what(error, traceback))
        case process_run.OutOfMemory(error, traceback):
            verdict = Verdict("oom", _what(error, traceback))
        case ChildRefused(error):
            return error, Verdict("failed", first_line(error))
        case process_run.Quit(raised, traceback):
            assert record.pid is not None
            said = f": {raised}" if str(raised) else ""
            how = f"was ended by {type(raised).__name__}{said}"
            death = ChildDiedError(plan.task_name, record.pid, how)
            death.__cause__ = ChildTraceback(traceback)
            return death, Verdict("died", _last_line(traceback) or first_line(death))
        case process_run.Died(exited, cause):
            said = f"the process {_describe_exit(exited.code)}"
            if line := crashed_at(exited.stderr_tail):
                said += f"; it crashed in native code that {line} called"
            verdict = Verdict("died", said, cause or "", stderr_tail=exited.stderr_tail)
            return _death(plan.task_name, outcome, record), verdict
        case process_run.TimedOut():
            assert plan.timeout_s is not None
            late = ChildTimeoutError(plan.task_name, plan.timeout_s)
            return late, Verdict("timeout", first_line(late))
        case process_run.Cancelled():
            ended = CancelledByRunner()
            return ended, Verdict("cancelled", first_line(ended))
        case process_run.Lost(why):
            return ProcessLostError(why), Verdict("died", why)
        case process_run.EndedForOthers(where):
            why = f"ended for other first runs on {where}, which ran short of memory"
            alone = "it gets a device to itself"
            return PrefectGPUError(why), Verdict("cancelled", why, next_words=alone)
        case _:
            assert_never(outcome)
    if traceback:
        attach_traceback(error, traceback)
    return error, verdict


def _what(error: BaseException, traceback: str | None) -> str:
    """Return the first line of a body's error, or of the error that `error` replaces since it could not be sent."""
    replaced = _last_line(traceback) if isinstance(error, ResultError) else ""
    return replaced or first_line(error)


def _last_line(traceback: str | None) -> str:
    return (traceback or "").strip().rpartition("\n")[2]


def _describe_exit(code: int) -> str:
    """Return the end of a process as text: `was killed by SIGSEGV`, `ended with exit code 3`."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code} before it returned"


def _death(task_name: str, died: process_run.Died, record: ProcessRecord) -> ChildDiedError:
    exited, detail = died.exited, list[str]()
    if seen := record.last_process_bytes:
        budget = format_bytes(record.total_budget_bytes)
        detail.append(f"last seen holding {format_bytes(seen)} of its {budget} budget")
    if exited.killed_because:
        detail.append(f"prefect_gpu killed it since {exited.killed_because}")
    elif died.cause:
        detail.append(_KILLED[died.cause])
    if exited.truncated:
        detail.append("it died while sending")
    if line := crashed_at(exited.stderr_tail):
        detail.append(f"it crashed in native code that {line} called")
    assert record.pid is not None
    return ChildDiedError(
        task_name, record.pid, _describe_exit(exited.code), "; ".join(detail), exited.stderr_tail
    )


def flow_summary(states: Mapping[str, int], reports: Sequence[TaskReport]) -> str:
    """Return the summary of a flow run, in at most 12 lines: final states, needs of its GPU tasks (compact reports)."""
    counts = [f"{count} {name}" for name, count in sorted(states.items(), key=lambda s: -s[1])]
    tasks: dict[str, list[TaskReport]] = {}
    for report in reports:
        tasks.setdefault(report.task_name, []).append(report)
    longest = sorted(tasks.values(), key=lambda group: -sum(r.run_s for r in group))
    peaks = sorted(_peaks(reports).items(), key=lambda each: -each[1] / each[0].total_bytes)
    held = [
        f"{device.label}: these tasks held at most {format_bytes(size)} of {format_bytes(device.total_bytes)}"
        f"{_busy_words(device, reports)}"
        for device, size in peaks
        if size
    ]
    parts = (
        ([_task_line(group) for group in longest], "tasks"),
        (held, "devices"),
        (list(_tag_lines(task_tags(reports))), "tags to change"),
    )
    lines = [f"GPU task runs: {', '.join(counts)}"]
    for (each, what), most in zip(parts, MOST_LINES, strict=True):
        lines += each[:most]
        if len(each) > most:
            lines.append(f"other {what}: {len(each) - most}")
    return "\n  ".join(lines)


def _task_line(group: Sequence[TaskReport]) -> str:
    count = len(group)
    processes = "1 process" if count == 1 else f"{count} processes"
    waited, ran = sum(r.queued_s for r in group), sum(r.run_s for r in group)
    most = max(group, key=lambda r: r.peak_process_bytes)
    return (
        f"{most.task_name}: {processes}, waited {format_seconds(waited)}, ran {format_seconds(ran)} "
        f"in all, {_peak_words(most)}"
    )


def _peak_words(report: TaskReport) -> str:
    if not report.peak_process_bytes:
        return "no device memory seen"
    peak, budget = format_bytes(report.peak_process_bytes), format_bytes(report.budget_total_bytes)
    return f"at most {peak} of {budget}"


def _tag_lines(tags: Sequence[TaskTags]) -> Iterator[str]:
    """Yield a line for each task whose tag is to be changed, for all sets of its `gpu:learn_by` values together."""
    sets: dict[str, list[TaskTags]] = {}
    for each in tags:
        if each.write:
            sets.setdefault(each.task_name, []).append(each)
    for name, found in sets.items():
        most = max(found, key=lambda each: math.inf if each.size_bytes is None else each.size_bytes)
        if most.fits:
            continue
        why = most.why
        if len(found) > 1:
            why += f"; the most of {len(found)} sets of gpu:learn_by values"
        elif most.learn_by:
            name = f"{name} ({most.learn_by})"
        if most.write == NO_TAG_HELPS:
            yield f"{name} (now {most.budget_words}): {why}, so {NO_TAG_HELPS}"
        else:
            write = most.write_words.replace("`", "")
            yield f"write {write} in the tag of {name} (now {most.budget_words}): {why}"


def _busy_words(device: Device, reports: Iterable[TaskReport]) -> str:
    """Return for how much of the time from the first to the last of its processes a device computed, as text."""
    known = [r for r in reports if device in r.devices and r.busy_fraction is not None]
    begun_s = min((r.placed_at for r in known), default=0.0)
    span_s = max((r.placed_at + r.held_s - begun_s for r in known), default=0.0)
    busy_s = sum((r.busy_fraction or 0.0) * r.run_s for r in known)
    return f", and it computed for them for {busy_s / span_s:.0%} of the time" if span_s else ""


def _peaks(reports: Iterable[TaskReport]) -> dict[Device, int]:
    """Return the peak bytes of all processes together, by device; at most the device's memory."""
    # An upper bound: merged readings keep the largest. Counters show peaks between readings, of one process only.
    changes: dict[Device, list[tuple[float, int]]] = {}
    alone: dict[Device, int] = {}
    for report in reports:
        for device in report.devices:
            share = report.peak_process_bytes // len(report.devices)
            alone[device] = max(alone.get(device, 0), share)
            of_device, held = changes.setdefault(device, []), 0
            for at_s, process_bytes in _held(report):
                now = process_bytes // len(report.devices)
                of_device.append((report.placed_at + at_s, now - held))
                held = now
            of_device.append((report.placed_at + report.held_s, -held))
    return {
        device: min(
            device.total_bytes,
            max(alone[device], *accumulate(change for _, change in sorted(of_device))),
        )
        for device, of_device in changes.items()
    }


def _held(report: TaskReport) -> Iterator[tuple[float, int]]:
    """Yield the memory of a process as seconds since its placement and bytes; 0 bytes while it was suspended."""
    away = [(s.begun_s + s.out_s, s.ended_s - s.in_s) for s in report.suspensions]
    held = [(s.at_s, s.process_bytes) for s in report.samples if s.process_bytes is not None]
    yield from sorted(
        [
            *((at_s, size) for at_s, size in held if not any(a <= at_s < b for a, b in away)),
            *((gone_s, 0) for gone_s, _ in away),
            *((s.ended_s - s.in_s, s.moved_bytes) for s in report.suspensions),
        ]
    )
