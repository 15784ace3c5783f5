"""A flow run that was, as a list of tasks that `simulation` can replay on other devices.

It covers what each process of a GPU task held and for how long, and what it waited for. Where these figures come from
is `reports.published`. Tasks without a gpu tag hold no device: they are only the time that passes between two GPU
tasks. What the flow's own code waited for, as in `future.result()`, is not recorded. A task that was submitted after a
result had come is taken to have been submitted because of it, as long after it as it was.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.errors import ReportError
from prefect_gpu.reports.advice import WHOLE_FRACTION
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.published import FlowRunReport, Submission


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A flow run as it was, and its tasks."""

    flow_run: str
    flow_run_id: UUID
    #: Seconds from the first request for a device to the last end of a process.
    makespan_s: float
    #: Names of the devices that were used, one for each device.
    device_names: tuple[str, ...]
    #: One for each process, in the order in which they asked for a device.
    tasks: tuple[ListedTask, ...]


def recorded_run(run: FlowRunReport) -> RecordedRun:
    """Return a flow run as a list of tasks.

    Args:
        run: Its published reports.

    Raises:
        ReportError: It has no report of a process, or another version published one.
    """
    reports = sorted(
        (r for r in run.task_reports if r.devices), key=lambda r: (_asked_at(r), r.attempt)
    )
    if not reports:
        raise ReportError(
            f"flow run {run.flow_run} has no report of a process: there is nothing to replay"
        )
    begin_at = _asked_at(reports[0])
    ended_at = max(map(_ended_at, reports))
    devices = {device.key: device.name for report in reports for device in report.devices}
    return RecordedRun(
        run.flow_run,
        run.flow_run_id,
        ended_at - begin_at,
        tuple(devices.values()),
        tuple(_list(reports, run.submissions, begin_at)),
    )


def _list(
    reports: Sequence[TaskReport], submissions: Mapping[UUID, Submission], begin_at: float
) -> Iterator[ListedTask]:
    results = sorted((_result_at(report), position) for position, report in enumerate(reports))
    #: By task run: position of its last process so far.
    last: dict[UUID, int] = {}
    for position, report in enumerate(reports):
        asked_at = arrived_at = _asked_at(report)
        if report.task_run_id in last:
            before = {last[report.task_run_id]}
        else:
            submission = submissions.get(report.task_run_id, Submission(asked_at, ()))
            before = _before(submission, submissions, last)
            # The clocks that these two are read from may differ.
            submitted_at = min(submission.submitted_at, asked_at)
            there = bisect.bisect_right(results, (submitted_at, position))
            before |= next(({at} for _, at in results[:there][::-1] if at < position), set())
        if before:
            # Its arrival is what it comes after, then.
            arrived_at = begin_at
        ready_at = max((_ended_at(reports[position]) for position in before), default=asked_at)
        last[report.task_run_id] = position
        yield ListedTask(
            name=report.task_run_name + (f" #{report.attempt}" if report.attempt > 1 else ""),
            arrival_s=arrived_at - begin_at,
            duration_s=report.held_s,
            memory=_memory(report),
            probe_bytes=_probe_bytes(report),
            count=len(report.devices),
            priority=report.priority,
            exclusive=report.exclusive,
            expected_s=report.held_s,
            after=tuple(sorted(before)),
            lag_s=max(0.0, asked_at - ready_at),
        )


def _before(
    submission: Submission, submissions: Mapping[UUID, Submission], last: Mapping[UUID, int]
) -> set[int]:
    """Return the processes whose results a task takes, directly or through tasks without a process."""
    found, seen, ahead = set[int](), set[UUID](), list(submission.inputs)
    while ahead:
        id_ = ahead.pop()
        if id_ in last:
            found.add(last[id_])
        elif id_ not in seen:
            seen.add(id_)
            ahead += submissions[id_].inputs if id_ in submissions else ()
    return found


def _memory(report: TaskReport) -> int | None:
    """Return the bytes that a process reserved on each device; `None`: it had devices to itself, or was a first run."""
    least = min(device.total_bytes for device in report.devices)
    if report.budget_source == "probe" or report.budget_bytes >= WHOLE_FRACTION * least:
        return None
    return report.budget_bytes


def _probe_bytes(report: TaskReport) -> int | None:
    """Return the most bytes that a first run which shared devices held on each; `None`: it was none."""
    if report.budget_source != "probe" or report.cap_bytes is None:
        return None
    return -(-report.peak_process_bytes // len(report.devices))


def _asked_at(report: TaskReport) -> float:
    return report.placed_at - report.queued_s


def _ended_at(report: TaskReport) -> float:
    return report.placed_at + report.held_s


def _result_at(report: TaskReport) -> float:
    """Return when its result came, in seconds since the epoch. Its process ends a moment later."""
    return report.placed_at + report.start_s + report.run_s + report.suspended_s
