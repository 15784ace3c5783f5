"""Lists of tasks as files: CSV and JSON lines, for `prefect-gpu simulate`.

Covers reading them and saying what is wrong with one, by line and column. What is done with the tasks is
`simulation`.

Columns (CSV, with a first line that names them) or keys (JSON lines, one object a line):

    duration   seconds, or with a unit as in 10m; the one that must be there
    arrival    when it is submitted, from the beginning, likewise; 0
    memory     of each device, context included, as in 6GiB or 40%; empty: a device to itself
    devices    how many, all or none; 1
    name       for `after` and for the report; task-LINE
    priority   higher starts first; 0
    exclusive  yes or no: nobody else on its devices; no
    expected   the duration that the scheduler expects, or unknown; empty: the duration
    after      names of tasks that must have ended before it is submitted, with spaces between
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.simulation import ListedTask
from prefect_gpu.units import (
    DURATIONS_ACCEPTED,
    SIZES_ACCEPTED,
    parse_duration,
    parse_size,
)

#: Longest time that is believed: three centuries.
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
    """A list of tasks cannot be read; the message names file, line and column."""


def parse_tasks(lines: Iterable[str], source: str) -> list[ListedTask]:
    """Read a list of tasks: JSON lines if the first line begins with `{`, else CSV.

    Args:
        lines: Of the file.
        source: What to call it in messages.

    Raises:
        TaskListError: Something in it cannot be read.
    """
    there = list(lines)
    first = next((line for line in there if line.strip()), "")
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    tasks: list[ListedTask] = []
    places: dict[str, int] = {}
    named: list[tuple[int, list[str]]] = []
    for number, row in rows(there, source):
        fields = _Fields(row, f"{source}, line {number}")
        name = fields.read("name", str, "a text") or f"task-{number}"
        if name in places:
            raise fields.error("name", name, "a name that no other task has")
        places[name] = len(tasks)
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
        named.append((number, fields.text("after").split()))
    if not tasks:
        raise TaskListError(f"{source}: there is no task in it; accepted: {_FORMS}")
    return _link(tasks, places, named, source)


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
            raise TaskListError(f"{where}{column}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise TaskListError(f"{where}: {line.strip()[:40]!r} is no JSON object")
        _check_columns(list(row), where)
        yield number, row


def _to_object(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is there twice, of which JSON would silently take the last."""
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
        """Give a field as text; empty: it is not there."""
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
        """Read a field; `None`: it is empty or not there."""
        text = self.text(column)
        if not text:
            return None
        try:
            return parse(text)
        except (ValueError, OverflowError) as error:
            raise self.error(column, text, accepted) from error

    def error(self, column: str, given: object, accepted: str) -> TaskListError:
        """Say what is wrong with a field."""
        what = f"{given!r} cannot be read" if given != "" else "nothing is given"
        return TaskListError(f"{self._where}, column {column!r}: {what}; accepted: {accepted}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{text} is no number of seconds from 0 to {MOST_SECONDS:g}")
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
    places: Mapping[str, int],
    named: list[tuple[int, list[str]]],
    source: str,
) -> list[ListedTask]:
    """Turn the names of `after` into positions."""
    linked: list[ListedTask] = []
    for task, (number, names) in zip(tasks, named, strict=True):
        for name in names:
            if name not in places:
                raise TaskListError(
                    f"{source}, line {number}, column 'after': there is no task {name!r}"
                )
        after = tuple(dict.fromkeys(places[name] for name in names))
        linked.append(replace(task, after=after))
    _check_circles(linked, [number for number, _ in named], source)
    return linked


def _check_circles(tasks: list[ListedTask], numbers: list[int], source: str) -> None:
    missing = [len(task.after) for task in tasks]
    followers: dict[int, list[int]] = {}
    for at, task in enumerate(tasks):
        for before in task.after:
            followers.setdefault(before, []).append(at)
    ready = [at for at, count in enumerate(missing) if not count]
    for at in ready:
        for follower in followers.get(at, ()):
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ready) < len(tasks):
        first = next(at for at, count in enumerate(missing) if count)
        raise TaskListError(
            f"{source}, line {numbers[first]}, column 'after': {tasks[first].name!r} comes after "
            f"itself, or after tasks that do"
        )
