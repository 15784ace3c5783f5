"""A flow run that was, as a list of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from prefect_gpu.cli.recorded_run import recorded_run
from prefect_gpu.cli.simulation import simulate
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.errors import ReportError
from prefect_gpu.measurements import Sample
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.published import FlowRunReport, ProcessReport, Submission
from prefect_gpu.units import GIB
from tests.fakes.reports import PLACED_AT, device, task_report

A, B, C, PLAIN = (UUID(int=number) for number in range(1, 5))


def process(
    task_run: UUID,
    asked_s: float,
    queued_s: float,
    held_s: float,
    held_longer_s: float = 0,
    **more: Any,
) -> TaskReport:
    """A process that asked for its device so long after the first, waited, and held it."""
    fields: dict[str, Any] = {
        "task_run_id": task_run,
        "task_run_name": f"task-{task_run.int}",
        "placed_at": PLACED_AT + asked_s + queued_s,
        "queued_s": queued_s,
        "start_s": 0.0,
        "run_s": held_s,
        "samples": (Sample(held_s + held_longer_s, GIB),),
    }
    return task_report(**{**fields, **more})


def flow_run(
    *reports: TaskReport, submissions: Mapping[UUID, Submission] | None = None
) -> FlowRunReport:
    found = (ProcessReport(r.task_run_name, r.task_run_id, "", r.metadata()) for r in reports)
    run = ("quiet-fox", UUID(int=9), "Completed", "")
    return FlowRunReport(*run, {}, tuple(found), submissions or {})


def at(seconds: float, *inputs: UUID) -> Submission:
    return Submission(PLACED_AT + seconds, inputs)


def test_first_runs_that_shared_devices_take_their_peak_memory() -> None:
    shared: dict[str, Any] = {"budget_source": "probe", "cap_bytes": 40 * GIB}
    tasks, _ = recorded_run(
        flow_run(
            process(A, 0, 0, 10, peak_process_bytes=3 * GIB, **shared),
            process(B, 0, 0, 10, peak_process_bytes=3, devices=(device(0), device(1)), **shared),
        )
    )
    assert [task.request.memory for task in tasks] == [3 * GIB, 2], "of each device, rounded up"
    assert simulate(tasks, SimulatedDevices("2x80GiB")).makespan_s == 10


def test_each_process_takes_the_memory_and_the_time_that_it_took() -> None:
    tasks, measured = recorded_run(
        flow_run(
            process(B, 2, 8, 5, budget_bytes=8 * GIB, priority=3, exclusive=True),
            process(A, 0, 0, 10),
            process(C, 3, 12, 4, devices=(device(0), device(1)), budget_source="probe"),
        )
    )
    first, second, third = tasks
    assert (first.request.task_name, first.request.memory) == ("task-1", 6 * GIB)
    assert (first.arrival_s, first.duration_s) == (0, 10)
    assert (second.arrival_s, second.request.memory, second.request.priority) == (2, 8 * GIB, 3)
    assert (first.request.exclusive, second.request.exclusive) == (False, True)
    assert (third.request.count, third.request.memory) == (2, None)
    assert measured.measured_makespan_s == pytest.approx(19)
    assert measured.measured_devices == ("NVIDIA H200", "NVIDIA H200")


def test_a_budget_of_nearly_a_whole_device_is_a_device_to_itself() -> None:
    (task,), _ = recorded_run(flow_run(process(A, 0, 0, 1, budget_bytes=138 * GIB)))
    assert task.request.memory is None


def test_a_task_comes_after_those_whose_results_it_takes() -> None:
    tasks, measured = recorded_run(
        flow_run(
            process(A, 0, 0, 10),
            process(B, 0, 10, 20),
            process(C, 33, 0, 1),
            submissions={A: at(0), B: at(0), PLAIN: at(0, A, B), C: at(0.5, PLAIN)},
        )
    )
    last = tasks[2]
    assert last.after == (0, 1), "through the task that has no process"
    assert (last.arrival_s, last.lag_s) == pytest.approx((0, 3))
    alone = simulate(tasks, SimulatedDevices("1x8GiB")).makespan_s
    side_by_side = simulate(tasks, SimulatedDevices("2x8GiB")).makespan_s
    assert (alone, side_by_side) == pytest.approx((measured.measured_makespan_s, 24))


def test_a_task_that_was_submitted_after_a_result_is_taken_to_have_waited_for_it() -> None:
    tasks, measured = recorded_run(
        flow_run(
            process(A, 0, 0, 10),
            process(B, 0, 10, 20),
            process(C, 31, 0, 5, held_longer_s=1),
            process(PLAIN, 36.5, 0, 1),
            submissions={A: at(0), B: at(0), C: at(30.5), PLAIN: at(36.2)},
        )
    )
    assert [task.after for task in tasks] == [(), (), (1,), (2,)]
    assert tasks[2].lag_s == pytest.approx(1)
    assert tasks[3].lag_s == 0, "the result of C came before its process had ended"
    alone = simulate(tasks, SimulatedDevices("1x8GiB")).makespan_s
    side_by_side = simulate(tasks, SimulatedDevices("2x8GiB")).makespan_s
    assert (measured.measured_makespan_s, alone, side_by_side) == pytest.approx((37.5, 38, 28))


def test_clocks_that_differ_put_no_task_after_itself() -> None:
    tasks, _ = recorded_run(
        flow_run(process(A, 0, 0, 0), process(B, 0, 0, 1), submissions={A: at(9), B: at(9, B)})
    )
    assert [task.after for task in tasks] == [(), (0,)]


def test_a_process_comes_after_the_one_before_it_of_its_task_run() -> None:
    (first, second, other), _ = recorded_run(
        flow_run(
            process(A, 0, 0, 10, outcome="oom", cause="own_cap"),
            process(A, 10.5, 0, 5, attempt=2, budget_bytes=9 * GIB),
            process(B, 16, 0, 5),
            submissions={A: at(0), B: at(0, A)},
        )
    )
    assert (second.request.task_name, second.request.memory) == ("task-1 #2", 9 * GIB)
    assert (second.after, second.lag_s) == ((0,), pytest.approx(0.5))
    assert other.after == (1,), "the last process has the result"
    assert first.after == ()


def test_reports_of_another_version_are_one_error() -> None:
    figures = {**task_report().metadata(), "schema": "0"}
    report = FlowRunReport("a", UUID(int=9), "", "", {}, (ProcessReport("t", A, "", figures),))
    with pytest.raises(ReportError, match=r"another version of prefect_gpu: .* schema '0'"):
        recorded_run(report)
    with pytest.raises(ReportError, match="flow run quiet-fox has no report of a process"):
        recorded_run(flow_run())
