"""What a history keeps of a process: its report, turned into a `PastRun`."""

from __future__ import annotations

from prefect_gpu.frameworks.registry import WITHOUT_PEAK
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.series import largest
from prefect_gpu.scheduling.history import PastRun


def past_run(report: TaskReport) -> PastRun:
    """Turn the report of a process into what its history keeps.

    A report sums what was measured over its devices, a history is about one of them: of several,
    each is given an equal part, rounded up.
    """
    count = max(1, len(report.devices))

    def each(total_bytes: int) -> int:
        return -(-total_bytes // count)

    def each_known(total_bytes: int | None) -> int | None:
        return None if total_bytes is None else each(total_bytes)

    steps = report.steps
    live = report.peak_live_bytes
    if not WITHOUT_PEAK.isdisjoint(report.framework.split(",")):
        live = largest(live, report.peak_reserved_bytes)
    return PastRun(
        ended_at=report.placed_at + report.held_s,
        outcome=report.outcome,
        cause=report.cause,
        budget_bytes=report.budget_bytes,
        cap_bytes=report.cap_bytes,
        live_bytes=each_known(live),
        steady_live_bytes=each_known(steps.steady_live_bytes) if steps else None,
        process_bytes=each(report.peak_process_bytes),
        context_bytes=each(report.context_bytes),
        alloc_retries=steps.alloc_retries if steps else 0,
        step_s=steps.step_s if steps else None,
        run_s=report.run_s,
        wanted_bytes=report.wanted_bytes,
        start_s=report.start_s,
    )
