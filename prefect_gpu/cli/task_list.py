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
from typing import Any, TypeVar

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.units import (
    DURATIONS_ACCEPTED,
    SIZES_ACCEPTED,
    parse_duration,
    parse_size,
)

#: Longest time that is accepted: three centuries.
MOST_SECONDS = 1e10

COLUMNS = (
    "name",
    "arrival",
    "duration",
    "memory",
    "devices",
    "priority",
    "exclusive",
    "expected",
    "after",
)

_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False, "": False}

_T = TypeVar("_T")


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
    after: list[tuple[int, list[str]]] = []
    for number, row in rows(text, source):
        fields = _Fields(row, f"{source}, line {number}")
        name = fields.read("name", str, "a text") or f"task-{number}"
        if name in positions:
            raise fields.error("name", name, "a name that no other task has")
        positions[name] = len(tasks)
        duration_s = fields.read("duration", _seconds, _SECONDS)
        if duration_s is None:
            raise fields.error("duration", "", _SECONDS)
        expected_s: float | None = duration_s
        if fields.text("expected").lower() == "unknown":
            expected_s = None
        elif (given := fields.read("expected", _seconds, f"{_SECONDS}; or unknown")) is not None:
            expected_s = given
        tasks.append(
            ListedTask(
                name=name,
                arrival_s=fields.read("arrival", _seconds, _SECONDS) or 0.0,
                duration_s=duration_s,
                memory=fields.read("memory", parse_size, f"{SIZES_ACCEPTED}; or as in 40%"),
                count=fields.read("devices", _count, "a whole number from 1") or 1,
                priority=fields.read("priority", int, "a whole number") or 0,
                exclusive=fields.read("exclusive", _yes, "yes or no") or False,
                expected_s=expected_s,
            )
        )
        after.append((number, fields.text("after").split()))
    if not tasks:
        raise TaskListError(f"{source}: there is no task in it; accepted: {_FORMS}")
    return _link(tasks, positions, after, source)


_FORMS = f"CSV whose first line names its columns ({', '.join(COLUMNS)}), or JSON lines"
_SECONDS = f"seconds, or {DURATIONS_ACCEPTED}"


def _csv_rows(lines: list[str], source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(lines, strict=True)
    heads: list[str] | None = None
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TaskListError(f"{source}, line {reader.line_num}: {error}") from error
        if not any(cell.strip() for cell in row):
            continue
        if heads is None:
            heads = [cell.strip().lower() for cell in row]
            _check_columns(heads, f"{source}, line {reader.line_num}")
        elif len(row) > len(heads):
            raise TaskListError(
                f"{source}, line {reader.line_num}: {len(row)} cells, and the first line names "
                f"{len(heads)} columns"
            )
        else:
            yield reader.line_num, dict(zip(heads, row, strict=False))


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


class _Fields:
    """One line of a list."""

    def __init__(self, row: Mapping[str, Any], where: str) -> None:
        self._row = row
        self._where = where

    def text(self, column: str) -> str:
        """Return a field as text. Empty: it is not there."""
        value = self._row.get(column)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if column == "after" and isinstance(value, list):
            value = " ".join(str(name) for name in value)
        if isinstance(value, (list, dict)):
            raise self.error(column, value, "a text or a number")
        return str(value).strip()

    def read(self, column: str, parse: Callable[[str], _T], accepted: str) -> _T | None:
        """Return a field after parsing it. `None`: it is empty or not there."""
        text = self.text(column)
        if not text:
            return None
        try:
            return parse(text)
        except (ValueError, OverflowError) as error:
            raise self.error(column, text, accepted) from error

    def error(self, column: str, given: object, accepted: str) -> TaskListError:
        """Return an error that names the field, its value and what is accepted."""
        what = f"{given!r} cannot be read" if given != "" else "nothing is given"
        return TaskListError(f"{self._where}, column {column!r}: {what}; accepted: {accepted}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{text} is not a number of seconds from 0 to {MOST_SECONDS:g}")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(f"{count} is less than 1")
    return count


def _yes(text: str) -> bool:
    try:
        return _YES[text.lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither yes nor no") from None


def _link(
    tasks: list[ListedTask],
    positions: Mapping[str, int],
    after: list[tuple[int, list[str]]],
    source: str,
) -> list[ListedTask]:
    """Return the tasks with the names of `after` as positions."""
    linked: list[ListedTask] = []
    for task, (number, names) in zip(tasks, after, strict=True):
        for name in names:
            if name not in positions:
                raise TaskListError(
                    f"{source}, line {number}, column 'after': there is no task {name!r}"
                )
        before = tuple(dict.fromkeys(positions[name] for name in names))
        linked.append(replace(task, after=before))
    _check_circles(linked, [number for number, _ in after], source)
    return linked


def _check_circles(tasks: list[ListedTask], numbers: list[int], source: str) -> None:
    try:
        TopologicalSorter({i: task.after for i, task in enumerate(tasks)}).prepare()
    except CycleError as error:
        first = min(error.args[1])
        raise TaskListError(
            f"{source}, line {numbers[first]}, column 'after': {tasks[first].name!r} comes after "
            f"itself, or after tasks that do"
        ) from error
