"""Lists of tasks as files, and what is said of bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.cli.task_list import TaskListError, parse_tasks
from prefect_gpu.scheduling.model import Request
from prefect_gpu.units import GIB

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
        pytest.param("duration,colour\n1,red", "f, line 1: unknown column 'colour'; accepted: name, ", id="an unknown column"),
        pytest.param("duration,duration\n1,2", "f, line 1: column 'duration' is there twice", id="a column twice"),
        pytest.param("duration\n1,2", "f, line 2: 2 cells, and the first line names 1 columns", id="too many cells"),
        pytest.param("name\nx", "f, line 2, column 'duration': nothing is given", id="no duration"),
        pytest.param("duration\n1\n-3", "f, line 3, column 'duration': '-3' cannot be read; accepted: seconds, or", id="before the beginning"),
        pytest.param("duration\nnan", "column 'duration': 'nan'", id="no number"),
        pytest.param("duration\nsoon", "column 'duration': 'soon'", id="a word for a duration"),
        pytest.param("duration,arrival\n1,inf", "column 'arrival': 'inf'", id="never arrives"),
        pytest.param("duration,memory\n1,8", "line 2, column 'memory': '8' cannot be read; accepted: a positive number with a unit", id="memory without a unit"),
        pytest.param("duration,memory\n1,140%", "column 'memory': '140%'", id="more than a device"),
        pytest.param("duration,devices\n1,0", "column 'devices': '0' cannot be read; accepted: a whole number from 1", id="no device"),
        pytest.param("duration,priority\n1,high", "column 'priority': 'high'", id="a word for a priority"),
        pytest.param("duration,exclusive\n1,perhaps", "column 'exclusive': 'perhaps' cannot be read; accepted: yes or no", id="perhaps exclusive"),
        pytest.param("duration,expected\n1,long", "column 'expected': 'long'", id="a word for what is expected"),
        pytest.param("name,duration\na,1\na,1", "line 3, column 'name': 'a' cannot be read; accepted: a name that no other", id="a name twice"),
        pytest.param("name,duration,after\na,1,b", "line 2, column 'after': there is no task 'b'", id="after an unknown task"),
        pytest.param("name,duration,after\na,1,b\nb,1,a", "line 2, column 'after': 'a' comes after itself", id="a circle"),
        pytest.param("name,duration,after\nx,1,\na,1,a", "line 3, column 'after': 'a' comes after itself", id="after itself"),
        pytest.param('duration\n"1', "f, line 2: unexpected end of data", id="a quote without an end"),
        pytest.param('{"duration": 1}\n{"duration" 1}', "f, line 2, column 13: not JSON", id="no JSON"),
        pytest.param('{"duration": 1}\n[1]', "f, line 2: '[1]' is not a JSON object", id="no object"),
        pytest.param('{"duration": 1}\n{"length": 1}', "f, line 2: unknown column 'length'", id="an unknown key"),
        pytest.param('{"duration": 1}\n{"duration": 1, "name": "a", "duration": 2}', "f, line 2: column 'duration' is there twice", id="a key twice"),
        pytest.param('{"duration": [1]}', "f, line 1, column 'duration': [1] cannot be read; accepted: a text or a number", id="a list"),
    ],
)  # fmt: skip
def test_errors_name_line_and_column(text: str, says: str) -> None:
    with pytest.raises(TaskListError) as caught:
        parse_tasks(text.splitlines(keepends=True), "f")
    assert says in str(caught.value)
