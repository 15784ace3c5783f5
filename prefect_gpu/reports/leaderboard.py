"""Leaderboards of a flow's task runs: rows, their order by a metric, text in markdown, publication from the flow."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture

from prefect_gpu.errors import ReportError
from prefect_gpu.reports.canvas import GRID, INK, MUTED, Canvas, byte_ticks, shorten
from prefect_gpu.reports.markup import clean_name, escape, image, table
from prefect_gpu.reports.model import OUTCOME_WORDS, TaskReport
from prefect_gpu.reports.publish import artifact_key, cut_values
from prefect_gpu.units import format_bytes, format_joules, format_percent, format_seconds, text_of

LEADERBOARD_PREFIX = "gpu-leaderboard"

#: Most rows in the plot and in the table.
MOST_ROWS = 200

#: Size of the plot and its left, right, top and bottom margins, in pixels.
_WIDTH, _HEIGHT = 720.0, 360.0
_MARGINS = 84.0, 110.0, 36.0, 54.0
_POINT = "#2563eb"

#: Larger values are not drawn: the axis' range would overflow.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class LeaderboardRow:
    """One task run in a leaderboard."""

    name: str
    #: Value of the metric; `None`: the run has none.
    value: float | None
    #: Run time; `None`: not known.
    seconds: float | None = None
    #: Peak bytes of the run's process; `None`: not known.
    peak_bytes: int | None = None
    device: str = ""
    #: Why the run has no value; empty: not known.
    problem: str = ""
    #: Part of the run time in which the GPU computed for the process, from 0 to 1; `None`: not known.
    busy_fraction: float | None = None
    #: Energy in joules that the GPU took for the process; `None`: not known.
    energy_j: float | None = None


def rank(rows: Sequence[LeaderboardRow], smaller_is_better: bool) -> list[LeaderboardRow]:
    """Return rows ordered from best to worst value: equal values by time, rows without a number last."""
    sign = 1 if smaller_is_better else -1

    def place(row: LeaderboardRow) -> tuple[bool, float, float]:
        none = row.value is None or math.isnan(row.value)
        value = 0.0 if row.value is None or none else sign * row.value
        return none, value, math.inf if row.seconds is None else row.seconds

    return sorted(rows, key=place)


def leaderboard_markdown(ranked: Sequence[LeaderboardRow], metric: str) -> str:
    """Return a leaderboard in markdown: the best run, a plot of the metric against memory, and a table."""
    parts = [f"**No entry has a value of {escape(metric)}.**"]
    best = ranked[0] if ranked else None
    if best is not None and best.value is not None:
        memory = "" if best.peak_bytes is None else f", with {format_bytes(best.peak_bytes)}"
        parts = [f"**Best: {escape(best.name)}, {escape(metric)} {best.value:.6g}{memory}.**"]
    shown = ranked[:MOST_ROWS]
    if svg := _plot(shown, metric):
        parts.append(image(f"{metric} against memory", svg))
    heads = ["#", "name", escape(metric), "time", "peak memory", "GPU computed", "energy", "device"]
    rows = [
        [
            str(at),
            escape(row.name),
            escape(row.problem, 200) if row.value is None else f"{row.value:.6g}",
            text_of(row.seconds, format_seconds),
            text_of(row.peak_bytes, format_bytes),
            text_of(row.busy_fraction, format_percent),
            text_of(row.energy_j, format_joules),
            escape(row.device),
        ]
        for at, row in enumerate(shown, 1)
    ]
    parts.append(table(heads, rows, right=(0, 2, 3, 4, 5, 6)))
    if len(ranked) > len(shown):
        parts.append(f"{len(ranked) - len(shown)} more are left out.")
    return "\n\n".join(parts)


def _plot(ranked: Sequence[LeaderboardRow], metric: str) -> str:
    """Return a plot of the metric against memory; empty: fewer than two rows have both."""
    points = [
        (at, row.peak_bytes, row.value, row.name)
        for at, row in enumerate(ranked, 1)
        if row.peak_bytes is not None and row.value is not None and abs(row.value) <= _LARGEST
    ]
    if len(points) < 2:
        return ""
    left, right, top, bottom = _MARGINS
    most_bytes = max(1.0, *(size * 1.05 for _, size, _, _ in points))
    low, high = min(p[2] for p in points), max(p[2] for p in points)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    # An axis goes below 0 only for negative values.
    low, high = low - room if low < 0 else max(0.0, low - room), high + room

    def x(size: float) -> float:
        return left + (_WIDTH - left - right) * size / most_bytes

    def y(value: float) -> float:
        return top + (_HEIGHT - top - bottom) * (high - value) / (high - low)

    canvas = Canvas(_WIDTH, _HEIGHT, f"{metric} against memory")
    for size, label in byte_ticks(most_bytes):
        canvas.line([(x(size), top), (x(size), _HEIGHT - bottom)], GRID)
        canvas.text(x(size), _HEIGHT - bottom + 18, label, size=12, fill=MUTED, anchor="middle")
    for step in range(5):
        value = low + (high - low) * step / 4
        canvas.line([(left, y(value)), (_WIDTH - right, y(value))], GRID)
        canvas.text(left - 8, y(value) + 4, _tick(value), size=12, fill=MUTED, anchor="end")
    middle = (left + _WIDTH - right) / 2
    canvas.text(middle, _HEIGHT - 12, "peak memory of the process", size=12, anchor="middle")
    canvas.text(12, top - 14, shorten(metric, 200, 12), size=12, bold=True)
    for at, size, value, name in reversed(points):
        canvas.dot(x(size), y(value), _POINT)
        label = shorten(f"{at} {name}", right, 11)
        canvas.text(x(size) + 7, y(value) + 4, label, size=11, fill=INK, halo=True)
    return canvas.svg()


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def publish_leaderboard(
    rows: Iterable[PrefectFuture[Any] | LeaderboardRow],
    metric: str,
    *,
    key: str | None = None,
    smaller_is_better: bool = False,
) -> UUID:
    """Publish an artifact that lists task runs ordered by a metric, with their times, memory and energy; return its id.

    Call this function inside the flow. It waits until the task runs have ended. A task run that failed, was cached, or
    did not report the metric comes last, without a value.

    Args:
        rows: Futures of GPU tasks whose bodies call `report_metric`, or rows with values of your own.
        metric: Name of the metric.
        key: Key of the artifact: lower-case letters, digits, dashes. `None`: `gpu-leaderboard-` and the flow's name.
        smaller_is_better: The smallest value is the best, as for a loss.

    Raises:
        ReportError: The call is not in a flow with a `GPUTaskRunner`, or an entry of `rows` is neither a row nor a
            future of this runner's GPU tasks.
    """
    context = FlowRunContext.get()
    active: Any = getattr(getattr(context, "task_runner", None), "_run", None)
    if context is None or context.flow_run is None or not hasattr(active, "last_report"):
        raise ReportError(
            "publish_leaderboard: call it in a flow whose task runner is GPUTaskRunner"
        )
    ranked = rank([_row(each, metric, active) for each in rows], smaller_is_better)
    best = ranked[0] if ranked else None
    flow_name = context.flow_run.name if context.flow is None else context.flow.name
    best_words = "" if best is None or best.value is None else f"; first: {best.name}"
    values = json.dumps({row.name: row.value for row in ranked})
    figures = {"metric": metric, "best": "" if best is None else best.name, "values": values}
    artifact = ArtifactCreate(
        key=artifact_key(LEADERBOARD_PREFIX, flow_name) if key is None else artifact_key("", key),
        type="markdown",
        description=f"Leaderboard · ordered by {metric}{best_words}",
        data=leaderboard_markdown(ranked, metric),
        metadata_=cut_values(figures),
        flow_run_id=context.flow_run.id,
    )
    with get_client(sync_client=True) as client:
        return client.create_artifact(artifact).id


def _row(entry: PrefectFuture[Any] | LeaderboardRow, metric: str, active: Any) -> LeaderboardRow:
    if isinstance(entry, LeaderboardRow):
        return entry
    if not isinstance(entry, PrefectFuture):
        raise ReportError(
            f"publish_leaderboard: {entry!r} is no row; accepted: futures of GPU tasks and LeaderboardRow"
        )
    entry.wait()
    report: TaskReport | None = active.last_report(entry.task_run_id)
    if report is None:
        return _row_without_process(entry)
    value, problem = None, OUTCOME_WORDS[report.outcome]
    if report.outcome == "completed":
        value = dict(report.metrics).get(metric)
        named = ", ".join(name for name, _ in report.metrics) or "none"
        problem = f"not reported (it reported {named})" if value is None else ""
    return LeaderboardRow(
        clean_name(report.task_run_name),
        value,
        report.run_s,
        report.peak_process_bytes or None,
        ", ".join(dict.fromkeys(device.name for device in report.devices)),
        problem,
        report.busy_fraction,
        report.energy_j,
    )


def _row_without_process(future: PrefectFuture[Any]) -> LeaderboardRow:
    """Return the row of a task run that ended before it got a process."""
    state = future.state
    if state.name == "Completed":
        raise ReportError(
            f"publish_leaderboard: task run {future.task_run_id} had no process of this flow's runner; "
            "accepted: futures of GPU tasks and LeaderboardRow"
        )
    name = str(future.task_run_id)
    # The server gets a task run a moment later than the flow has its future.
    with contextlib.suppress(ObjectNotFound), get_client(sync_client=True) as client:
        name = client.read_task_run(future.task_run_id).name
    why = "" if state.is_completed() else f": {state.message}"
    return LeaderboardRow(clean_name(name), None, problem=f"{state.name}{why}")
