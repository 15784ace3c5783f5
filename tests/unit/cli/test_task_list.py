"""Lists of tasks from files, what is said of bad files, and lists from flow runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from prefect_gpu.cli.simulate_command import simulate
from prefect_gpu.cli.task_list import ListedTask, TaskListError, parse_tasks, recorded_run
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.errors import ReportError
from prefect_gpu.measurements import Sample
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.published import FlowRunReport, ProcessReport, Submission
from prefect_gpu.scheduling.model import Request
from prefect_gpu.units import GIB
from tests.fakes.reports import PLACED_AT, device, task_report

CSV = """\
name, duration, memory, devices, arrival, priority, exclusive, expected, after
first,10m,6GiB,2,1.5,3,yes,unknown,

second,60,40%,,2m,,no,90,first
third,1,,,,,,,"first second"
"""

JSON = """\
{"name": "first", "duration": "10m", "memory": "6GiB", "devices": 2, "arrival": 1.5, "priority": 3, "exclusive": true, "expected": "unknown"}

{"name": "second", "duration": 60, "memory": "40%", "arrival": "2m", "exclusive": false, "expected": 90, "after": ["first"]}
{"name": "third", "duration": 1, "memory": null, "after": "first second"}
"""


def asked(name: str, memory: int | float | None, expected_s: float | None, **more: Any) -> Request:
    return Request("", name, 0, 0.0, memory, expected_s=expected_s, **more)


@pytest.mark.parametrize("text", [CSV, JSON], ids=["csv", "json lines"])
def test_csv_and_json_lines_are_read_alike(text: str) -> None:
    first = asked("first", 6 * GIB, None, count=2, priority=3, exclusive=True)
    assert parse_tasks(text.splitlines(keepends=True), "f") == [
        ListedTask(first, 600.0, 1.5),
        ListedTask(asked("second", 0.4, 90.0), 60.0, 120.0, after=(0,)),
        ListedTask(asked("third", None, 1.0), 1.0, after=(0, 1)),
    ]


def test_a_missing_name_is_made_up_and_columns_may_be_in_any_order() -> None:
    assert parse_tasks(["Memory,Duration\n", "1GiB,5\n", "2GiB,6\n"], "f") == [
        ListedTask(asked("task-2", GIB, 5.0), 5.0),
        ListedTask(asked("task-3", 2 * GIB, 6.0), 6.0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "f: there is no task in it; accepted: CSV whose first line", id="nothing"),
        pytest.param("duration", "f: there is no task in it", id="columns alone"),
        pytest.param("duration,Duration\n1,2", "f, line 1: column 'duration' is there twice", id="a column twice"),
        pytest.param("duration,colour\n1,red", "f, line 2: unknown column 'colour'; accepted: name, ", id="an unknown column"),
        pytest.param("duration\n1,2", "f, line 2: unknown column 'more cells than columns'", id="too many cells"),
        pytest.param("name\nx", "f, line 2: column 'duration': nothing is given", id="no duration"),
        pytest.param("duration\n1\n-3", "f, line 3: column 'duration': -3 is not a number of seconds", id="before the beginning"),
        pytest.param("duration\nnan", "column 'duration': nan is not a number", id="no number"),
        pytest.param("duration\nsoon", "column 'duration': 'soon'", id="a word for a duration"),
        pytest.param("duration,arrival\n1,inf", "column 'arrival': inf is not a number", id="never arrives"),
        pytest.param("duration,memory\n1,8", "line 2: column 'memory': '8' has no unit; did you mean 8GiB?", id="memory without a unit"),
        pytest.param("duration,memory\n1,140%", "column 'memory': '140%'", id="more than a device"),
        pytest.param("duration,devices\n1,0", "column 'devices': 0 is less than 1", id="no device"),
        pytest.param("duration,priority\n1,high", "column 'priority': 'high'", id="a word for a priority"),
        pytest.param("duration,exclusive\n1,perhaps", "column 'exclusive': 'perhaps' is neither yes nor no", id="perhaps exclusive"),
        pytest.param("duration,expected\n1,long", "column 'expected': 'long'", id="a word for what is expected"),
        pytest.param("name,duration\na,1\na,1", "line 3: column 'name': another task has the name 'a'", id="a name twice"),
        pytest.param("name,duration,after\na,1,b", "f, column 'after': there is no task 'b'", id="after an unknown task"),
        pytest.param("name,duration,after\na,1,b\nb,1,a", "f, column 'after': 'a' before 'b' before 'a'", id="a circle"),
        pytest.param("name,duration,after\nx,1,\na,1,a", "f, column 'after': 'a' before 'a'", id="after itself"),
        pytest.param('duration\n"1', "f, line 2: unexpected end of data", id="a quote without an end"),
        pytest.param('{"duration": 1}\n{"duration" 1}', "f, line 2: Expecting ':' delimiter: line 1 column 13", id="no JSON"),
        pytest.param('{"duration": 1}\n[1]', "f, line 2: this is not a JSON object", id="no object"),
        pytest.param('{"duration": 1}\n{"length": 1}', "f, line 2: unknown column 'length'", id="an unknown key"),
        pytest.param('{"duration": [1]}', "f, line 1: column 'duration': '[1]' is not a number", id="a list"),
    ],
)  # fmt: skip
def test_errors_name_line_and_column(text: str, says: str) -> None:
    with pytest.raises(TaskListError) as caught:
        parse_tasks(text.splitlines(keepends=True), "f")
    assert says in str(caught.value)


# Flow runs.

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


def makespan_s(tasks: list[ListedTask], devices: str) -> float:
    return max(ticket.ended_s or 0.0 for ticket in simulate(tasks, SimulatedDevices(devices)))


def test_first_runs_that_shared_devices_take_their_peak_memory() -> None:
    shared: dict[str, Any] = {"budget_source": "probe", "cap_bytes": 40 * GIB}
    tasks, _ = recorded_run(
        flow_run(
            process(A, 0, 0, 10, peak_process_bytes=3 * GIB, **shared),
            process(B, 0, 0, 10, peak_process_bytes=3, devices=(device(0), device(1)), **shared),
        )
    )
    assert [task.request.memory for task in tasks] == [3 * GIB, 2], "of each device, rounded up"
    assert makespan_s(tasks, "2x80GiB") == 10


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
    alone = makespan_s(tasks, "1x8GiB")
    side_by_side = makespan_s(tasks, "2x8GiB")
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
    alone = makespan_s(tasks, "1x8GiB")
    side_by_side = makespan_s(tasks, "2x8GiB")
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
