"""`prefect-gpu simulate`: a list of tasks, or a flow run that was, on devices that do not exist.

It covers the command's arguments and what it prints. How a list is read is in `task_list`, how a flow run becomes one in
`recorded_run`, and how it is replayed in `simulation`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from prefect_gpu.errors import ReportError
from prefect_gpu.live.table import table_lines
from prefect_gpu.policy import whole
from prefect_gpu.units import format_seconds

if TYPE_CHECKING:
    from prefect_gpu.cli.recorded_run import RecordedRun
    from prefect_gpu.cli.simulation import ListedTask, Outcome, Schedule

#: Names that end like this, or have a folder in them, are files also if there is none.
_FILE_ENDS = (".csv", ".json", ".jsonl", ".ndjson", ".txt")


def read_whole(_: object, tokens: Sequence[Token]) -> int:
    """Return a whole number. Cyclopts itself would round 1.5 to 2."""
    return whole()(tokens[0].value)


Count = Annotated[int | None, Parameter(converter=read_whole, n_tokens=1, validator=Number(gte=1))]


def simulate_command(
    source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    devices: str,
    placement: Literal["spread", "pack"] = "spread",
    no_backfill: bool = False,
    unknown_durations: bool = False,
    max_tasks_per_device: Count = None,
    max_processes: Count = None,
    tasks: bool = False,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> str:
    """Print when and where a list of tasks, or the tasks of a past flow run, would run.

    The tasks are replayed on devices that do not exist, in virtual time, with the scheduling that the
    runner uses. SOURCE is a file, or the id or name of a flow run whose reports are published: each process then takes the
    memory and the time that it took. A file is CSV or JSON lines; columns: duration (required), arrival, memory (as in
    6GiB or 40%; empty: a device to itself), devices, name, priority, exclusive, expected, after (names of tasks,
    separated by spaces).

    Args:
        source: List of tasks, or flow run; - reads a list from standard input.
        devices: Simulated devices, as in 4x80GiB.
        placement: Among devices that fit: the emptiest (spread) or the fullest (pack).
        no_backfill: First come, first served: no task passes one that is blocked.
        unknown_durations: The scheduler expects no duration of any task.
        max_tasks_per_device: Most tasks on a device at a time.
        max_processes: Most tasks at a time.
        tasks: Print a line for each task.
        as_json: Print JSON, sizes in bytes and times in seconds.

    Examples:
        prefect-gpu simulate tasks.csv --devices 2x80GiB --tasks
        prefect-gpu simulate quiet-fox --devices 4x80GiB
        prefect-gpu simulate quiet-fox --devices 1x24GiB --json
    """
    # Imported here because the other commands need none of it.
    from prefect_gpu.cli.simulation import simulate
    from prefect_gpu.devices.simulated import SimulatedDevices
    from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE

    simulated = SimulatedDevices(devices.removeprefix("simulated:"))
    listed, run = _read(source)
    if unknown_durations:
        listed = [dataclasses.replace(task, expected_s=None) for task in listed]
    schedule = simulate(
        listed,
        simulated,
        placement,
        NO_BACKFILL if no_backfill else PATIENCE,
        max_tasks_per_device,
        max_processes,
    )
    if as_json:
        return json.dumps({**_run_json(run), **_schedule_json(schedule)}, indent=2)
    rows = [] if run is None else [_verdict(run, schedule, devices), ""]
    rows += table_lines(_schedule_rows(schedule))
    if tasks:
        heads = ("task", "submitted", "waited", "started", "ended", "devices", "passed")
        rows += ["", *table_lines([heads, *(_outcome_row(o) for o in schedule.outcomes)])]
    return "\n".join([*rows, *_never_lines(schedule)])


def _never_lines(schedule: Schedule) -> list[str]:
    """Return a line for each reason why tasks can never run."""
    names: dict[str, list[str]] = {}
    for outcome in schedule.outcomes:
        if outcome.refusal:
            names.setdefault(outcome.refusal, []).append(outcome.task.name)
    return [
        f"{', '.join(tasks[:3])}{f' and {len(tasks) - 3} more' if len(tasks) > 3 else ''} can never run: {refusal}"
        for refusal, tasks in names.items()
    ]


def _read(source: str) -> tuple[list[ListedTask], RecordedRun | None]:
    from prefect_gpu.cli.task_list import TaskListError, parse_tasks

    try:
        if source == "-":
            return parse_tasks(sys.stdin, "standard input"), None
        if Path(source).is_file() or os.sep in source or source.endswith(_FILE_ENDS):
            with open(source, encoding="utf-8-sig", newline="") as lines:
                return parse_tasks(lines, source), None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskListError(f"{source} cannot be read: {error}") from error
    # Imported here: they import Prefect, which takes a second.
    from prefect_gpu.cli.recorded_run import recorded_run
    from prefect_gpu.reports.published import report

    try:
        run = recorded_run(report(source))
    except ReportError as error:
        raise ReportError(f"there is no file {source}; {error}") from error
    return list(run.tasks), run


def _verdict(run: RecordedRun, schedule: Schedule, devices: str) -> str:
    """Return what the other devices change, in one line."""
    names = collections.Counter(run.device_names)
    measured = ", ".join(f"{count} × {name}" for name, count in names.items())
    text = (
        f"{run.flow_run}: {format_seconds(schedule.makespan_s)} on {devices} instead of "
        f"{format_seconds(run.makespan_s)} on {measured}"
    )
    never = sum(bool(o.refusal) for o in schedule.outcomes)
    return f"{text}, without {never} of {len(schedule.outcomes)} processes" if never else text


def _run_json(run: RecordedRun | None) -> dict[str, Any]:
    if run is None:
        return {}
    return {
        "flow_run": run.flow_run,
        "flow_run_id": str(run.flow_run_id),
        "measured_makespan_s": run.makespan_s,
        "measured_devices": list(run.device_names),
    }


def _schedule_rows(schedule: Schedule) -> list[tuple[str, str]]:
    bounds, span_s = schedule.bounds, schedule.makespan_s
    named = {
        "longest chain": bounds.chain_s,
        "memory": bounds.memory_s,
        "large tasks": bounds.large_s,
        "tasks a device": bounds.places_s,
    }
    largest = max(named, key=named.__getitem__)
    above = f", {span_s / bounds.largest_s:.2f} × the lower bound" if bounds.largest_s else ""
    return [
        ("tasks", f"{len(schedule.outcomes)}, of which {len(schedule.finished)} ran"),
        ("devices", f"{len(schedule.devices)}"),
        ("makespan", f"{format_seconds(span_s)}{above}"),
        ("lower bound", f"{format_seconds(bounds.largest_s)} ({largest})"),
        ("mean wait", format_seconds(schedule.mean_wait_s)),
        ("max wait", format_seconds(schedule.max_wait_s)),
        ("utilisation", f"{schedule.utilisation * 100:.1f}% of memory over the makespan"),
    ]


def _outcome_row(outcome: Outcome) -> tuple[str, ...]:
    placement = outcome.placement
    if placement is None:
        return (outcome.task.name, "", "", "never", "", "", "")
    times_s = (outcome.ready_s, outcome.waited_s, outcome.started_s, outcome.ended_s)
    return (
        outcome.task.name,
        *(format_seconds(time_s) for time_s in times_s),
        ",".join(str(device.index) for device in placement.devices),
        str(outcome.passed),
    )


def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    return {
        "makespan_s": schedule.makespan_s,
        "lower_bound_s": schedule.bounds.largest_s,
        "bounds": dataclasses.asdict(schedule.bounds),
        "mean_wait_s": schedule.mean_wait_s,
        "max_wait_s": schedule.max_wait_s,
        "utilisation": schedule.utilisation,
        "tasks": [
            {
                "name": outcome.task.name,
                "submitted_s": outcome.ready_s,
                "waited_s": outcome.waited_s,
                "started_s": outcome.started_s,
                "ended_s": outcome.ended_s,
                "devices": [d.index for d in outcome.placement.devices]
                if outcome.placement
                else [],
                "passed": outcome.passed,
                "refusal": outcome.refusal,
            }
            for outcome in schedule.outcomes
        ],
    }
