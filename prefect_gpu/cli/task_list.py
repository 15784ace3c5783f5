"""Lists of tasks for `prefect-gpu simulate`, from a file (columns: `docs/scheduling.md`) or from a past flow run.

Of a flow run, each process of a GPU task becomes a task with the process's memory, duration and predecessors. Tasks
without a gpu tag become delays between GPU tasks. Waits in the flow's own code, as in `future.result()`, are not
recorded: the last result before a task's submission counts as its cause, and the delay between the two is kept.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from prefect_gpu.errors import PrefectGPUError, ReportError
from prefect_gpu.policy import whole
from prefect_gpu.scheduling.model import Request
from prefect_gpu.units import parse_duration, parse_size

if TYPE_CHECKING:
    from prefect_gpu.reports.model import TaskReport
    from prefect_gpu.reports.published import FlowRunReport

#: A source with such a suffix, or in a folder, is a file, even if it does not exist.
_SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".txt")


@dataclass(frozen=True, slots=True)
class ListedTask:
    """One task of a list."""

    #: Name, memory and devices of the task. Id, order and time are set at the submission.
    request: Request
    #: Seconds for which the task holds its devices.
    duration_s: float
    #: Earliest submission, in seconds from the beginning.
    arrival_s: float = 0.0
    #: Positions of the task's predecessors in the list: they must end before the submission.
    after: tuple[int, ...] = ()
    #: Seconds to the submission from the last end of a predecessor, or from a later arrival.
    lag_s: float = 0.0


class Measured(NamedTuple):
    """Measurements of a past flow run, for comparison with its simulation."""

    flow_run: str
    flow_run_id: str
    #: Seconds from the first request for a device to the last end of a process.
    measured_makespan_s: float
    #: Names of the used devices, one for each device.
    measured_devices: tuple[str, ...]


class TaskListError(PrefectGPUError):
    """A list of tasks cannot be read. The message names file, line and column."""


def read_source(source: str) -> tuple[list[ListedTask], Measured | None]:
    """Return the tasks of a file (`-`: standard input), or of a flow run (id or name) with the run's measurements.

    Raises:
        TaskListError: The file cannot be read.
        ReportError: There is no such flow run, or its reports cannot be read.
    """
    path = Path(source)
    try:
        if source == "-":
            return parse_tasks(sys.stdin or (), "standard input"), None
        if path.is_file() or "/" in source or path.suffix in _SUFFIXES:
            with path.open(encoding="utf-8-sig") as lines:
                return parse_tasks(lines, source), None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskListError(f"{source} cannot be read: {error}") from error
    from prefect_gpu.reports.published import report

    try:
        return recorded_run(report(source))
    except ReportError as error:
        raise ReportError(f"there is no file {source}; {error}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = parse_duration(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text} is not a number of seconds")
    return seconds


def _yes(text: str) -> bool:
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")


#: Columns of a list. Each has a field of `Request` or `ListedTask`, and the function that reads a cell's text.
COLUMNS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("task_name", str),
    "arrival": ("arrival_s", _seconds),
    "duration": ("duration_s", _seconds),
    "memory": ("memory", parse_size),
    "devices": ("count", whole(1)),
    "priority": ("priority", whole()),
    "exclusive": ("exclusive", _yes),
    "expected": ("expected_s", lambda text: None if text.lower() == "unknown" else _seconds(text)),
    "after": ("after", str.split),
}


def parse_tasks(lines: Iterable[str], source: str) -> list[ListedTask]:
    """Return the tasks of a list: JSON lines if the first line begins with `{`, else CSV. `source`: its name in errors.

    Raises:
        TaskListError: The list cannot be read.
    """
    text = list(lines)
    table = csv.DictReader(text, restkey="more cells than columns", strict=True)
    is_json = "".join(text).lstrip().startswith("{")
    #: Tasks by name, each with the names of its predecessors.
    tasks: dict[str, tuple[ListedTask, list[str]]] = {}
    number = 0
    try:
        heads = [] if is_json else [head.strip().lower() for head in table.fieldnames or ()]
        if twice := {head for head in heads if heads.count(head) > 1}:
            raise ValueError(f"column {min(twice)!r} is there twice")
        for number, row in enumerate(text if is_json else table, start=1):
            given = _read_row(row)
            if not given:
                continue
            after, arrival_s = given.pop("after", []), given.pop("arrival_s", 0.0)
            duration_s = given.pop("duration_s")
            named = {
                "task_name": f"task-{table.reader.line_num or number}",
                "expected_s": duration_s,
            }
            request = Request(id="", sequence=0, submitted_s=0.0, **{**named, **given})
            if request.task_name in tasks:
                raise ValueError(f"column 'name': another task has the name {request.task_name!r}")
            tasks[request.task_name] = ListedTask(request, duration_s, arrival_s), after
    except (ValueError, csv.Error) as error:
        raise TaskListError(f"{source}, line {table.reader.line_num or number}: {error}") from error
    if not tasks:
        accepted = f"CSV whose first line names its columns ({', '.join(COLUMNS)}), or JSON lines"
        raise TaskListError(f"{source}: there is no task in it; accepted: {accepted}")
    places = {name: at for at, name in enumerate(tasks)}
    try:
        TopologicalSorter({name: after for name, (_, after) in tasks.items()}).prepare()
        return [replace(t, after=tuple(places[each] for each in n)) for t, n in tasks.values()]
    except KeyError as error:
        raise TaskListError(f"{source}, column 'after': there is no task {error}") from error
    except CycleError as error:
        circle = " before ".join(map(repr, error.args[1]))
        raise TaskListError(f"{source}, column 'after': {circle}, a circle") from error


def _read_row(row: Any) -> dict[str, Any]:
    """Return the values of a JSON line or of a row's cells, without empty ones; raise `ValueError` for a bad value."""
    if isinstance(row, str):
        row = json.loads(row) if row.strip() else {}
    if not isinstance(row, dict):
        raise ValueError("this is not a JSON object")
    values: dict[str, Any] = {}
    for head, value in row.items():
        column = head.strip().lower()
        if column not in COLUMNS:
            raise ValueError(f"unknown column {column!r}; accepted: {', '.join(COLUMNS)}")
        if column == "after" and isinstance(value, list):
            value = " ".join(map(str, value))
        field, read = COLUMNS[column]
        try:
            if text := "" if value is None else str(value).strip():
                values[field] = read(text)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"column {column!r}: {error}") from error
    if values and "duration_s" not in values:
        raise ValueError("column 'duration': nothing is given")
    return values


def recorded_run(run: FlowRunReport) -> tuple[list[ListedTask], Measured]:
    """Return a task for each process of a flow run, in the order of requests, and the measurements of the run.

    Raises:
        ReportError: The run has no report of a process, or another version of prefect_gpu published a report.
    """
    found = [(r.placed_at - r.queued_s, r.attempt, r) for r in run.task_reports if r.devices]
    if not found:
        problem = "has no report of a process: there is nothing to replay"
        raise ReportError(f"flow run {run.flow_run} {problem}")
    found.sort(key=lambda each: each[:2])
    began_at = found[0][0]
    ends_at = [report.placed_at + report.held_s for _, _, report in found]
    # Results come a moment before the end of their processes.
    results_at = [r.placed_at + r.start_s + r.run_s + r.suspended_s for _, _, r in found]
    tasks: list[ListedTask] = []
    #: Position of the last process so far, by task run.
    last: dict[UUID, int] = {}
    for position, (asked_at, attempt, report) in enumerate(found):
        task_run_id = report.task_run_id
        before = _predecessors(task_run_id, run, last)
        if task_run_id not in last:
            submission = run.submissions.get(task_run_id)
            # The times of submission and request may come from different clocks.
            until = min(submission.submitted_at, asked_at) if submission else asked_at
            known = [(at, n) for n, at in enumerate(results_at[:position]) if at <= until]
            before |= {max(known)[1]} if known else set()
        last[task_run_id] = position
        request = Request(
            "",
            report.task_run_name + (f" #{attempt}" if attempt > 1 else ""),
            position,
            0.0,
            _memory(report),
            len(report.devices),
            exclusive=report.exclusive,
            priority=report.priority,
            expected_s=report.held_s,
        )
        # The arrival of a task with predecessors depends on their ends only.
        arrival_s = 0.0 if before else asked_at - began_at
        lag_s = max(0.0, asked_at - max((ends_at[each] for each in before), default=asked_at))
        tasks.append(ListedTask(request, report.held_s, arrival_s, tuple(sorted(before)), lag_s))
    devices = {device.key: device.name for _, _, report in found for device in report.devices}
    span_s, names = max(ends_at) - began_at, tuple(devices.values())
    return tasks, Measured(run.flow_run, str(run.flow_run_id), span_s, names)


def _predecessors(task_run_id: UUID, run: FlowRunReport, last: Mapping[UUID, int]) -> set[int]:
    """Return positions of the last processes of a task run and, if it has none, of its inputs, and of their inputs."""
    found, seen, ahead = set[int](), set[UUID](), [task_run_id]
    while ahead:
        id_ = ahead.pop()
        if id_ in last:
            found.add(last[id_])
        elif id_ not in seen:
            seen.add(id_)
            ahead += run.submissions[id_].inputs if id_ in run.submissions else ()
    return found


def _memory(report: TaskReport) -> int | None:
    """Return a process's memory on each device, in bytes; `None`: the process had its devices to itself."""
    from prefect_gpu.reports.advice import WHOLE_FRACTION

    if report.budget_source == "probe":
        # A first run with a cap shared its devices. Its budget was the most that it could get, so its peak is used.
        peak_bytes = max(1, -(-report.peak_process_bytes // len(report.devices)))
        return None if report.cap_bytes is None else peak_bytes
    smallest = min(device.total_bytes for device in report.devices)
    return report.budget_bytes if report.budget_bytes < WHOLE_FRACTION * smallest else None
