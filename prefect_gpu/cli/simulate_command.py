"""`prefect-gpu simulate`: a list of tasks, or a past flow run, on simulated devices.

`task_list` reads a list of tasks, `recorded_run` makes a list from a flow run, and `simulation` replays a list. These
modules are imported when the command runs.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from prefect_gpu.errors import ReportError
from prefect_gpu.live.table import table_lines
from prefect_gpu.policy import whole
from prefect_gpu.units import format_seconds

if TYPE_CHECKING:
    from prefect_gpu.cli.recorded_run import Measured
    from prefect_gpu.cli.simulation import ListedTask, Outcome, Schedule

#: Names of the lower bounds of a makespan in the output.
_BOUNDS = {
    "chain_s": "longest chain",
    "memory_s": "memory",
    "large_s": "large tasks",
    "places_s": "tasks a device",
}

#: A source that has such an ending, or names a folder, is a path, even if no such file exists.
_FILE_ENDS = (".csv", ".json", ".jsonl", ".ndjson", ".txt")


def read_whole(_: object, tokens: Sequence[Token]) -> int:
    """Return the whole number in a token. Cyclopts itself would round 1.5 to 2."""
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

    The tasks are replayed on simulated devices, in virtual time, with the scheduling of the runner. SOURCE is a file, or
    the id or name of a flow run with published reports: each process takes the same memory and time as in that run. A
    file is CSV or JSON lines; columns: duration (required), arrival, memory (as in 6GiB or 40%; empty: a device to
    itself), devices, name, priority, exclusive, expected, after (names of tasks, separated by spaces).

    Args:
        source: File with a list of tasks, or a flow run; - reads a list from standard input.
        devices: Simulated devices, as in 4x80GiB.
        placement: Place tasks on the emptiest (spread) or the fullest (pack) of the devices that fit.
        no_backfill: First come, first served: no task passes a blocked task.
        unknown_durations: The scheduler knows no expected duration of any task.
        max_tasks_per_device: Most tasks on one device at a time.
        max_processes: Most tasks at a time.
        tasks: Print a line for each task.
        as_json: Print JSON, sizes in bytes and times in seconds.

    Examples:
        prefect-gpu simulate tasks.csv --devices 2x80GiB --tasks
        prefect-gpu simulate quiet-fox --devices 4x80GiB
        prefect-gpu simulate quiet-fox --devices 1x24GiB --json
    """
    from prefect_gpu.cli.simulation import simulate
    from prefect_gpu.devices.simulated import SimulatedDevices
    from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE

    simulated = SimulatedDevices(devices.removeprefix("simulated:"))
    listed, run = _read(source)
    if unknown_durations:
        listed = [replace(task, request=replace(task.request, expected_s=None)) for task in listed]
    schedule = simulate(
        listed,
        simulated,
        max_tasks_per_device,
        max_processes,
        style=placement,
        patience=NO_BACKFILL if no_backfill else PATIENCE,
    )
    if as_json:
        return json.dumps({**(run._asdict() if run else {}), **asdict(schedule)}, indent=2)
    # Names of the tasks that can never run, by reason.
    refusals: dict[str, list[str]] = {}
    for outcome in schedule.tasks:
        if outcome.refusal:
            refusals.setdefault(outcome.refusal, []).append(outcome.name)
    rows = []
    if run is not None:
        names = collections.Counter(run.measured_devices)
        measured = ", ".join(f"{count} × {name}" for name, count in names.items())
        verdict = (
            f"{run.flow_run}: {format_seconds(schedule.makespan_s)} on {devices} instead of "
            f"{format_seconds(run.measured_makespan_s)} on {measured}"
        )
        never = sum(map(len, refusals.values()))
        without = f", without {never} of {len(schedule.tasks)} processes" if never else ""
        rows += [verdict + without, ""]
    rows += table_lines(_figures(schedule, len(simulated.sizes_bytes)))
    if tasks:
        heads = ("task", "submitted", "waited", "started", "ended", "devices", "passed")
        rows += ["", *table_lines([heads, *map(_row, schedule.tasks)])]
    for why, refused in refusals.items():
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        rows.append(f"{', '.join(refused[:3])}{more} can never run: {why}")
    return "\n".join(rows)


def _read(source: str) -> tuple[list[ListedTask], Measured | None]:
    from prefect_gpu.cli.task_list import TaskListError, parse_tasks

    try:
        if source == "-":
            return parse_tasks(sys.stdin, "standard input"), None
        if Path(source).is_file() or os.sep in source or source.endswith(_FILE_ENDS):
            with open(source, encoding="utf-8-sig", newline="") as lines:
                return parse_tasks(lines, source), None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskListError(f"{source} cannot be read: {error}") from error
    from prefect_gpu.cli.recorded_run import recorded_run
    from prefect_gpu.reports.published import report

    try:
        return recorded_run(report(source))
    except ReportError as error:
        raise ReportError(f"there is no file {source}; {error}") from error


def _figures(schedule: Schedule, devices: int) -> list[tuple[str, str]]:
    span_s, bound_s = schedule.makespan_s, schedule.lower_bound_s
    largest = max(schedule.bounds, key=schedule.bounds.__getitem__)
    above = f", {span_s / bound_s:.2f} × the lower bound" if bound_s else ""
    ran = sum(not outcome.refusal for outcome in schedule.tasks)
    return [
        ("tasks", f"{len(schedule.tasks)}, of which {ran} ran"),
        ("devices", f"{devices}"),
        ("makespan", f"{format_seconds(span_s)}{above}"),
        ("lower bound", f"{format_seconds(bound_s)} ({_BOUNDS[largest]})"),
        ("mean wait", format_seconds(schedule.mean_wait_s)),
        ("max wait", format_seconds(schedule.max_wait_s)),
        ("utilisation", f"{schedule.utilisation * 100:.1f}% of memory over the makespan"),
    ]


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.refusal:
        return (outcome.name, "", "", "never", "", "", "")
    times_s = (outcome.submitted_s, outcome.waited_s, outcome.started_s, outcome.ended_s)
    devices = ",".join(map(str, outcome.devices))
    return (outcome.name, *map(format_seconds, times_s), devices, str(outcome.passed))
