"""What the log of a GPU task run says of its processes: one line when one is placed, one when it has ended.

Text only. Where the lines are logged is `attempt`; what a waiting task run logs is in `prefect_engine`.
"""

from __future__ import annotations

from prefect_gpu.reports.model import OUTCOME_WORDS, TaskReport
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.units import format_bytes, format_seconds

#: A shorter wait (seconds) is not mentioned.
LEAST_WAIT_S = 1.0


def placed_line(placement: Placement, grant: Grant, whole: bool, waited_s: float) -> str:
    """Return where a process runs, with how much memory, and why as much.

    Args:
        placement: Its devices.
        grant: What it was to get.
        whole: It has all that its devices had free.
        waited_s: Seconds that the task run waited for it.
    """
    where = ", ".join(device.label for device in placement.devices)
    budget = format_bytes(min(placement.budget_bytes))
    budget += " on each" if len(placement.devices) > 1 else ""
    if grant.after_oom:
        why = "after an out-of-memory"
    elif grant.source == "probe":
        why = "no earlier run has shown what it needs"
    else:
        why = (
            "learned from earlier runs" if grant.source == "learned" else "from its tag gpu:memory"
        )
    how = f"alone on {where} with all that is free, " if whole else f"on {where} with a budget of "
    waited = f" after {format_seconds(waited_s)}" if waited_s >= LEAST_WAIT_S else ""
    return f"Placed{waited} {how}{budget} ({why})"


def ended_line(report: TaskReport) -> str:
    """Return what a process used; empty: another line says why it ended."""
    if report.outcome in ("oom", "cancelled"):
        return ""
    kind = " of host memory" if report.source == "host" else ""
    peak, budget = format_bytes(report.peak_process_bytes), format_bytes(report.budget_total_bytes)
    used = f"at most {peak} of {budget}{kind}"
    if not report.peak_process_bytes:
        used = "memory not measured"
    ran = f"ran {format_seconds(report.run_s)}"
    return f"{OUTCOME_WORDS[report.outcome].capitalize()}: {ran}, {used}"
