"""What to write in a task's tags next time, from what its runs showed.

It covers words and sizes that read well. The formula is `scheduling.history`, which gives a task its
budget where no tag does: both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefect_gpu.reports.markup import escape, table
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.past_run import past_run
from prefect_gpu.scheduling.history import (
    LIVE_FACTOR,
    LIVE_MARGIN_BYTES,
    OOM_FACTOR,
    ROUND_BYTES,
    Lesson,
    PastRun,
    learn,
)
from prefect_gpu.scheduling.ladder import WANTED_FACTOR
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.units import GIB, MIB, format_bytes, parse_bytes

#: How a run ended that did not complete.
_THAT: Mapping[str, str] = {
    "failed": "failed",
    "died": "died",
    "timeout": "timed out",
    "cancelled": "was cancelled",
}

#: A tag this near to what would be suggested is left alone.
NEAR_FRACTION = 0.05


def suggest_budget(reports: Sequence[TaskReport]) -> str | None:
    """Say what to write after `gpu:memory=` for one task next time.

    Args:
        reports: Processes of that task.

    Returns:
        What its runs teach, rounded up to a size that reads well; `None` where none completed.
    """
    lesson, _ = teach(reports)
    return tag_size(lesson.budget_bytes, reports) if lesson else None


def teach(reports: Sequence[TaskReport]) -> tuple[Lesson | None, str]:
    """Learn from runs as a history would; give the largest lesson of theirs, and what it rests on.

    Args:
        reports: Processes of one task; those of different histories are told apart.
    """
    lessons = []
    for group in _by_history(reports):
        runs = [past_run(report) for report in group]
        if learn(runs) is None:
            continue
        # A tag must hold what a run took that failed for another reason, too.
        counted = [
            run if run.outcome == "oom" else replace(run, outcome="completed") for run in runs
        ]
        lesson = learn(counted)
        if lesson is not None and lesson.budget_bytes:
            lessons.append((lesson, _because(lesson, runs)))
    return max(lessons, key=lambda found: found[0].budget_bytes, default=(None, ""))


def budget_after_oom(report: TaskReport) -> int:
    """Give the bytes to ask for after a process reached its own cap, as the ladder would."""
    wanted = int((report.wanted_bytes or 0) * WANTED_FACTOR)
    return max(int(report.budget_bytes * OOM_FACTOR), wanted)


def tag_size(size_bytes: float, reports: Sequence[TaskReport]) -> str:
    """Write a size for a tag; all of a device where that is less than was asked for."""
    text = readable_size(size_bytes)
    totals = [device.total_bytes for report in reports for device in report.devices]
    return text if not totals or parse_bytes(text) <= max(totals) else "100%"


def readable_size(size_bytes: float) -> str:
    """Round up to a size for a tag: `2.1GiB`, `37GiB`, `320MiB`."""
    if size_bytes > 992 * MIB:
        step = 0.1 if size_bytes <= 10 * GIB else 0.5 if size_bytes <= 32 * GIB else 1
        # Steps counted as a whole number first, so that 2.1 is not 2.1000000000000001.
        steps = math.ceil(size_bytes / GIB / step - 1e-9)
        return f"{round(steps * step, 1):g}GiB"
    return f"{max(1, math.ceil(size_bytes / MIB / 32)) * 32}MiB"


def tags_table(reports: Sequence[TaskReport]) -> str:
    """Write what to change in each task's tags, or that nothing is."""
    by_task: dict[str, list[TaskReport]] = {}
    for report in reports:
        by_task.setdefault(report.task_name, []).append(report)
    rows = [row for name, group in sorted(by_task.items()) if (row := _row(name, group))]
    if not rows:
        return "Nothing to change: every tag fits what its task took."
    return table(("task", "budget now", "write", "because"), rows)


def _row(name: str, group: Sequence[TaskReport]) -> tuple[str, str, str, str] | None:
    now = _now_words(group)
    lesson, why = teach(group)
    if lesson is not None:
        if _fits(group, lesson.budget_bytes):
            return None
        keys = len({report.history_key for report in group})
        if keys > 1:
            why += f"; the largest of {keys} histories, each of which has its own without a tag"
        return escape(name), now, f"`gpu:memory={tag_size(lesson.budget_bytes, group)}`", why
    pinched = [r for r in group if r.cause == "own_cap"]
    if pinched:
        most = max(pinched, key=budget_after_oom)
        why = "none completed; it ran out of memory at its cap"
        if most.wanted_bytes:
            why += f", where it would have needed {format_bytes(most.wanted_bytes)}"
        size = tag_size(budget_after_oom(most), group)
        return escape(name), now, f"`gpu:memory={size}`", why
    if any(report.outcome == "oom" for report in group):
        most_bytes = format_bytes(max(report.budget_bytes for report in group))
        return escape(name), now, f"more than {most_bytes}", "none completed"
    return None


def _by_history(reports: Sequence[TaskReport]) -> list[list[TaskReport]]:
    groups: dict[tuple[str, str], list[TaskReport]] = {}
    for report in reports:
        model = report.devices[0].name if report.devices else ""
        groups.setdefault((report.history_key, model), []).append(report)
    return [_without_probes(group) for group in groups.values()]


def _without_probes(group: Sequence[TaskReport]) -> list[TaskReport]:
    # What a probe took on an empty device is up to 2.7 times what the task needs (ResNet-50 on an
    # H200), so a probe without evidence of steps counts only where nothing better is known.
    completed = [r for r in group if r.outcome == "completed"]
    if all(r.budget_source == "probe" for r in completed):
        return list(group)
    return [r for r in group if r.budget_source != "probe" or _is_steady(r)]


def _is_steady(report: TaskReport) -> bool:
    return report.steps is not None and report.steps.steady_live_bytes is not None


def _because(lesson: Lesson, runs: Sequence[PastRun]) -> str:
    if lesson.floor_bytes and lesson.budget_bytes - lesson.floor_bytes < ROUND_BYTES:
        return "with less it ran out of memory or slowed down"

    def need_bytes(run: PastRun) -> int:
        # What one run alone would teach.
        alone = learn([replace(run, outcome="completed")])
        return alone.budget_bytes if alone else 0

    counted = [run for run in runs if run.outcome != "oom"]
    top = max(counted, key=need_bytes)
    of_runs = f", of {len(counted)} runs" if len(counted) > 1 else ""
    if top.outcome in _THAT:
        of_runs = f", of a run that {_THAT[top.outcome]}"
    live = top.live_bytes if top.steady_live_bytes is None else top.steady_live_bytes
    if live is None:
        # No framework tells: the process as a whole is all that is known.
        return f"peak {_with_room(top.process_bytes)}{of_runs}"
    steady = "live peak" if top.steady_live_bytes is None else "steady live peak"
    context = f" + context {format_bytes(lesson.context_bytes)}" if lesson.context_bytes else ""
    return f"{steady} {_with_room(live)}{context}{of_runs}"


def _with_room(size_bytes: int) -> str:
    if size_bytes * (LIVE_FACTOR - 1) < LIVE_MARGIN_BYTES:
        return f"{format_bytes(size_bytes)} + {format_bytes(LIVE_MARGIN_BYTES)}"
    return f"{format_bytes(size_bytes)} × {LIVE_FACTOR:g}"


def _fits(group: Sequence[TaskReport], size_bytes: int) -> bool:
    """Tell whether all runs had a tag that can stay: near enough, or less and yet enough."""
    for report in group:
        if report.budget_source != "tag":
            return False
        tag = report.budget_bytes
        if abs(tag - size_bytes) <= NEAR_FRACTION * size_bytes:
            continue
        if tag > size_bytes or not _had_enough(report):
            return False
    return True


def _had_enough(report: TaskReport) -> bool:
    """Tell whether nothing shows that a process's budget was too small."""
    pinched = report.steps is not None and report.steps.alloc_retries > 0
    over = report.peak_process_bytes > report.budget_total_bytes + OVERSHOOT_BYTES
    return report.outcome != "oom" and not report.cause and not pinched and not over


def _now_words(group: Sequence[TaskReport]) -> str:
    budgets = {(report.budget_source, report.budget_bytes) for report in group}
    sizes = sorted({size for _, size in budgets})
    sources = ", ".join(sorted({source for source, _ in budgets}))
    if len(sizes) == 1:
        return f"{format_bytes(sizes[0])}, {sources}"
    return f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, {sources}"
