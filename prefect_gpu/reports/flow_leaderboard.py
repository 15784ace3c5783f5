"""Publish a leaderboard of GPU task runs from inside their flow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture

from prefect_gpu.errors import ReportError
from prefect_gpu.reports.leaderboard import LeaderboardRow, leaderboard_markdown, rank
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import OUTCOME_WORDS, TaskReport
from prefect_gpu.reports.publish import artifact_key, cut_values

LEADERBOARD_PREFIX = "gpu-leaderboard"


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
