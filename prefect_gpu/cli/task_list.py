"""Reads lists of tasks for `prefect-gpu simulate`: CSV or JSON lines, with the columns in `docs/scheduling.md`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from prefect_gpu.cli.simulation import ListedTask
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.policy import whole, word
from prefect_gpu.scheduling.model import Request
from prefect_gpu.units import DURATIONS_ACCEPTED, SIZES_ACCEPTED, parse_duration, parse_size

#: Longest accepted time in seconds: three centuries.
MOST_SECONDS = 1e10

#: A line of a list: its number, and pairs of column and value.
Row = tuple[int, Sequence[tuple[str, Any]]]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{text} is not a number of seconds from 0 to {MOST_SECONDS:g}")
    return seconds


def _yes(text: str) -> bool:
    return word("yes", "true", "1", "no", "false", "0")(text) in ("yes", "true", "1")


_SECONDS = f"seconds, or {DURATIONS_ACCEPTED}"

#: By column: the function that reads a cell's text, and the accepted texts in words.
COLUMNS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "name": (str, "a name that no other task has"),
    "arrival": (_seconds, _SECONDS),
    "duration": (_seconds, _SECONDS),
    "memory": (parse_size, f"{SIZES_ACCEPTED}; or as in 40%"),
    "devices": (whole(1), "a whole number from 1"),
    "priority": (whole(), "a whole number"),
    "exclusive": (_yes, "yes or no"),
    "expected": (
        lambda text: None if text.lower() == "unknown" else _seconds(text),
        f"{_SECONDS}; or unknown",
    ),
    "after": (str.split, "names of tasks, separated by spaces"),
}


class TaskListError(PrefectGPUError):
    """A list of tasks cannot be read. The message names file, line and column."""


def parse_tasks(lines: Iterable[str], source: str) -> list[ListedTask]:
    """Return the tasks of a list: JSON lines if the first line begins with `{`, else CSV. `source`: its name in errors.

    Raises:
        TaskListError: The list cannot be read.
    """
    text = list(lines)
    first = next((line for line in text if line.strip()), "")
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    tasks: list[ListedTask] = []
    #: By name: position of a task in the list, its line, and the names of its predecessors.
    places: dict[str, tuple[int, str, list[str]]] = {}
    for number, row in rows(text, source):
        where = f"{source}, line {number}"
        given = _values(row, where)
        name = given.get("name", f"task-{number}")
        if name in places:
            raise _error("name", name, where)
        places[name] = len(tasks), where, given.get("after", [])
        request = Request(
            "",
            name,
            0,
            0.0,
            given.get("memory"),
            given.get("devices", 1),
            exclusive=given.get("exclusive", False),
            priority=given.get("priority", 0),
            expected_s=given.get("expected", given["duration"]),
        )
        tasks.append(ListedTask(request, given["duration"], given.get("arrival", 0.0)))
    if not tasks:
        accepted = f"CSV whose first line names its columns ({', '.join(COLUMNS)}), or JSON lines"
        raise TaskListError(f"{source}: there is no task in it; accepted: {accepted}")
    for at, where, names in places.values():
        unknown = next((name for name in names if name not in places), None)
        if unknown is not None:
            raise TaskListError(f"{where}, column 'after': there is no task {unknown!r}")
        after = tuple(dict.fromkeys(places[name][0] for name in names))
        tasks[at] = replace(tasks[at], after=after)
    try:
        TopologicalSorter({at: task.after for at, task in enumerate(tasks)}).prepare()
    except CycleError as error:
        name, (_, where, _) = list(places.items())[min(error.args[1])]
        why = f"{name!r} comes after itself, or after tasks that do"
        raise TaskListError(f"{where}, column 'after': {why}") from error
    return tasks


def _values(row: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the values of the cells in a row by column, without empty cells."""
    values = {}
    for column, value in row:
        if column == "after" and isinstance(value, list):
            value = " ".join(map(str, value))
        if isinstance(value, list):
            raise _error(column, value, where, "a text or a number")
        text = "" if value is None else str(value).strip()
        try:
            if text:
                values[column] = COLUMNS[column][0](text)
        except (ValueError, OverflowError) as error:
            raise _error(column, text, where) from error
    if "duration" not in values:
        raise TaskListError(f"{where}, column 'duration': nothing is given; accepted: {_SECONDS}")
    return values


def _error(column: str, given: object, where: str, accepted: str = "") -> TaskListError:
    accepted = accepted or COLUMNS[column][1]
    problem = f"{given!r} cannot be read; accepted: {accepted}"
    return TaskListError(f"{where}, column {column!r}: {problem}")


def _csv_rows(lines: list[str], source: str) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    heads: list[str] = []
    try:
        for row in reader:
            where = f"{source}, line {reader.line_num}"
            if not any(map(str.strip, row)):
                continue
            if not heads:
                heads = [cell.strip().lower() for cell in row]
                _check_columns(heads, where)
            elif len(row) > len(heads):
                names = f"the first line names {len(heads)} columns"
                raise TaskListError(f"{where}: {len(row)} cells, and {names}")
            else:
                yield reader.line_num, list(zip(heads, row, strict=False))
    except csv.Error as error:
        raise TaskListError(f"{source}, line {reader.line_num}: {error}") from error


def _json_rows(lines: list[str], source: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            # Pairs, because a `dict` would keep only the last value of a repeated key.
            row = json.loads(line, object_pairs_hook=list)
        except ValueError as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise TaskListError(f"{where}{column}: not JSON: {error}") from error
        if not line.lstrip().startswith("{"):
            raise TaskListError(f"{where}: {line.strip()[:40]!r} is not a JSON object")
        _check_columns([column for column, _ in row], where)
        yield number, row


def _check_columns(names: list[str], where: str) -> None:
    for at, name in enumerate(names):
        if name not in COLUMNS:
            raise TaskListError(f"{where}: unknown column {name!r}; accepted: {', '.join(COLUMNS)}")
        if name in names[:at]:
            raise TaskListError(f"{where}: column {name!r} is there twice")
