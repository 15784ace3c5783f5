"""Lists of tasks as CSV or JSON lines, for `prefect-gpu simulate`.

It covers reading them and naming what is wrong by line and column. How the tasks are replayed is in
`simulation`.

Columns (CSV, named by the first line) or keys (JSON lines, one object on each line):

    duration   seconds, or with a unit as in 10m; required
    arrival    when it is submitted, in the same form, from the beginning; 0
    memory     of each device, context included, as in 6GiB or 40%; empty: a device to itself
    devices    how many, all or none; 1
    name       for `after` and for the report; task-LINE
    priority   higher starts first; 0
    exclusive  yes or no: no other task on its devices; no
    expected   the duration that the scheduler expects, or unknown; empty: the duration
    after      names of tasks that must end before it is submitted, separated by spaces
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.policy import whole
from prefect_gpu.units import DURATIONS_ACCEPTED, SIZES_ACCEPTED, parse_duration, parse_size

#: Longest time that is accepted: three centuries.
MOST_SECONDS = 1e10


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{text} is not a number of seconds from 0 to {MOST_SECONDS:g}")
    return seconds


def _expected(text: str) -> float | None:
    return None if text.lower() == "unknown" else _seconds(text)


def _yes(text: str) -> bool:
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is neither yes nor no")
    return words[text.lower()]


_SECONDS = f"seconds, or {DURATIONS_ACCEPTED}"

#: The columns: field of `ListedTask`, function that reads the text, and what it accepts.
COLUMNS: Mapping[str, tuple[str, Callable[[str], Any], str]] = {
    "name": ("name", str, "a name that no other task has"),
    "arrival": ("arrival_s", _seconds, _SECONDS),
    "duration": ("duration_s", _seconds, _SECONDS),
    "memory": ("memory", parse_size, f"{SIZES_ACCEPTED}; or as in 40%"),
    "devices": ("count", whole(1), "a whole number from 1"),
    "priority": ("priority", whole(), "a whole number"),
    "exclusive": ("exclusive", _yes, "yes or no"),
    "expected": ("expected_s", _expected, f"{_SECONDS}; or unknown"),
    "after": ("after", str.split, "names of tasks, separated by spaces"),
}

_FORMS = f"CSV whose first line names its columns ({', '.join(COLUMNS)}), or JSON lines"


class TaskListError(PrefectGPUError):
    """A list of tasks cannot be read. The message names file, line and column."""


def parse_tasks(lines: Iterable[str], source: str) -> list[ListedTask]:
    """Read a list of tasks: JSON lines if the first line begins with `{`, else CSV.

    Args:
        lines: Lines of the file.
        source: Name of the file in messages.

    Raises:
        TaskListError: The list cannot be read.
    """
    text = list(lines)
    first = next((line for line in text if line.strip()), "")
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    tasks: list[ListedTask] = []
    positions: dict[str, int] = {}
    after: list[tuple[str, list[str]]] = []
    for number, row in rows(text, source):
        where = f"{source}, line {number}"
        fields = {"name": f"task-{number}", "arrival_s": 0.0, **_read_fields(row, where)}
        if fields["name"] in positions:
            raise _error(where, "name", fields["name"])
        if "duration_s" not in fields:
            raise _error(where, "duration", "")
        positions[fields["name"]] = len(tasks)
        after.append((where, fields.pop("after", [])))
        tasks.append(ListedTask(**{"expected_s": fields["duration_s"], **fields}))
    if not tasks:
        raise TaskListError(f"{source}: there is no task in it; accepted: {_FORMS}")
    return _link(tasks, positions, after)


def _read_fields(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a `ListedTask` that a line gives."""
    fields: dict[str, Any] = {}
    for column, value in row.items():
        field, read, accepted = COLUMNS[column]
        if column == "after" and isinstance(value, list):
            value = " ".join(map(str, value))
        if isinstance(value, (list, dict)):
            raise _error(where, column, value, "a text or a number")
        text = "" if value is None else str(value).strip()
        if text:
            try:
                fields[field] = read(text)
            except (ValueError, OverflowError) as error:
                raise _error(where, column, text, accepted) from error
    return fields


def _error(where: str, column: str, given: object, accepted: str = "") -> TaskListError:
    """Return an error that names the column, its value and what is accepted."""
    what = f"{given!r} cannot be read" if given != "" else "nothing is given"
    accepted = accepted or COLUMNS[column][2]
    return TaskListError(f"{where}, column {column!r}: {what}; accepted: {accepted}")


def _csv_rows(lines: list[str], source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(lines, strict=True)
    heads: list[str] = []
    try:
        for row in reader:
            where = f"{source}, line {reader.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if not heads:
                heads = [cell.strip().lower() for cell in row]
                _check_columns(heads, where)
            elif len(row) > len(heads):
                names = f"the first line names {len(heads)} columns"
                raise TaskListError(f"{where}: {len(row)} cells, and {names}")
            else:
                yield reader.line_num, dict(zip(heads, row, strict=False))
    except csv.Error as error:
        raise TaskListError(f"{source}, line {reader.line_num}: {error}") from error


def _json_rows(lines: list[str], source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=partial(_to_object, where))
        except ValueError as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise TaskListError(f"{where}{column}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TaskListError(f"{where}: {line.strip()[:40]!r} is not a JSON object")
        _check_columns(list(row), where)
        yield number, row


def _to_object(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, or raise for a key that is there twice: JSON would use the last one."""
    names = [name for name, _ in pairs]
    _check_once(names, where, "key")
    return dict(pairs)


def _check_columns(names: list[str], where: str) -> None:
    for name in names:
        if name not in COLUMNS:
            raise TaskListError(f"{where}: unknown column {name!r}; accepted: {', '.join(COLUMNS)}")
    _check_once(names, where, "column")


def _check_once(names: list[str], where: str, what: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TaskListError(f"{where}: {what} {twice!r} is there twice")


def _link(
    tasks: list[ListedTask], positions: Mapping[str, int], after: list[tuple[str, list[str]]]
) -> list[ListedTask]:
    """Return the tasks with the names of `after` as positions."""
    linked: list[ListedTask] = []
    for task, (where, names) in zip(tasks, after, strict=True):
        for name in names:
            if name not in positions:
                raise TaskListError(f"{where}, column 'after': there is no task {name!r}")
        before = tuple(dict.fromkeys(positions[name] for name in names))
        linked.append(replace(task, after=before))
    try:
        TopologicalSorter({i: task.after for i, task in enumerate(linked)}).prepare()
    except CycleError as error:
        first = min(error.args[1])
        raise TaskListError(
            f"{after[first][0]}, column 'after': {tasks[first].name!r} comes after itself, or after "
            "tasks that do"
        ) from error
    return linked
