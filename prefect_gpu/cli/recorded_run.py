"""A past flow run as a list of tasks, which `simulation` replays on other devices.

Each process of a GPU task becomes a task with the process's memory, duration and predecessors. Tasks without a gpu tag
become delays between GPU tasks. Waits in the flow's own code, as in `future.result()`, are not recorded: the last result
before a task's submission counts as its cause, and the delay between the two is kept.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.errors import ReportError
from prefect_gpu.reports.advice import WHOLE_FRACTION
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.published import FlowRunReport, Submission
from prefect_gpu.scheduling.model import Request


class Measured(NamedTuple):
    """Measurements of a past flow run, for comparison with its simulation."""

    flow_run: str
    flow_run_id: str
    #: Seconds from the first request for a device to the last end of a process.
    measured_makespan_s: float
    #: Names of the used devices, one for each device.
    measured_devices: tuple[str, ...]


def recorded_run(run: FlowRunReport) -> tuple[list[ListedTask], Measured]:
    """Return a task for each process of a flow run, in the order of requests, and the measurements of the run.

    Raises:
        ReportError: The run has no report of a process, or another version of prefect_gpu published a report.
    """
    reports = sorted(
        (r for r in run.task_reports if r.devices), key=lambda r: (_asked_at(r), r.attempt)
    )
    if not reports:
        problem = "has no report of a process: there is nothing to replay"
        raise ReportError(f"flow run {run.flow_run} {problem}")
    devices = {device.key: device.name for report in reports for device in report.devices}
    span_s = max(map(_ended_at, reports)) - _asked_at(reports[0])
    measured = Measured(run.flow_run, str(run.flow_run_id), span_s, tuple(devices.values()))
    return list(_list(reports, run.submissions)), measured


def _list(
    reports: Sequence[TaskReport], submissions: Mapping[UUID, Submission]
) -> Iterator[ListedTask]:
    # Times of results, which come a moment before the end of their processes.
    results = sorted(
        (r.placed_at + r.start_s + r.run_s + r.suspended_s, at) for at, r in enumerate(reports)
    )
    #: Position of the last process so far, by task run.
    last: dict[UUID, int] = {}
    for position, report in enumerate(reports):
        asked_at = _asked_at(report)
        if report.task_run_id in last:
            before = {last[report.task_run_id]}
        else:
            submission = submissions.get(report.task_run_id, Submission(asked_at, ()))
            before = _before(submission, submissions, last)
            # The times of submission and request may come from different clocks.
            submitted_at = min(submission.submitted_at, asked_at)
            there = bisect.bisect_right(results, (submitted_at, position))
            before |= next(({at} for _, at in results[:there][::-1] if at < position), set())
        last[report.task_run_id] = position
        ready_at = max((_ended_at(reports[at]) for at in before), default=asked_at)
        request = Request(
            "",
            report.task_run_name + (f" #{report.attempt}" if report.attempt > 1 else ""),
            position,
            0.0,
            _memory(report),
            len(report.devices),
            exclusive=report.exclusive,
            priority=report.priority,
            expected_s=report.held_s,
        )
        # The arrival of a task with predecessors depends on their ends only.
        arrival_s = 0.0 if before else asked_at - _asked_at(reports[0])
        lag_s = max(0.0, asked_at - ready_at)
        yield ListedTask(request, report.held_s, arrival_s, tuple(sorted(before)), lag_s)


def _memory(report: TaskReport) -> int | None:
    """Return a process's memory on each device, in bytes; `None`: the process had its devices to itself."""
    if report.budget_source == "probe":
        # A first run with a cap shared its devices. Its budget was the most that it could get, so its peak is used.
        peak_bytes = max(1, -(-report.peak_process_bytes // len(report.devices)))
        return None if report.cap_bytes is None else peak_bytes
    smallest = min(device.total_bytes for device in report.devices)
    return report.budget_bytes if report.budget_bytes < WHOLE_FRACTION * smallest else None


def _before(
    submission: Submission, submissions: Mapping[UUID, Submission], last: Mapping[UUID, int]
) -> set[int]:
    """Return positions of the processes whose results a task takes, directly or through tasks without a process."""
    found, seen, ahead = set[int](), set[UUID](), list(submission.inputs)
    while ahead:
        id_ = ahead.pop()
        if id_ in last:
            found.add(last[id_])
        elif id_ not in seen:
            seen.add(id_)
            ahead += submissions[id_].inputs if id_ in submissions else ()
    return found


def _asked_at(report: TaskReport) -> float:
    return report.placed_at - report.queued_s


def _ended_at(report: TaskReport) -> float:
    return report.placed_at + report.held_s
