"""`prefect-gpu simulate`: a list of tasks, or a past flow run, on simulated devices, in virtual time.

`simulate` drives the broker of the runner. No process runs and no real clock is read: time jumps from one event to the
next. `task_list` makes the lists.
"""

from __future__ import annotations

import collections
import heapq
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.cli.run_commands import AsJson, Count
from prefect_gpu.cli.task_list import ListedTask, read_source
from prefect_gpu.clock import RealClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.errors import PlacementError
from prefect_gpu.live.table import table_lines
from prefect_gpu.units import format_seconds


def simulate_command(
    source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    devices: str,
    placement: Literal["spread", "pack"] = "spread",
    max_tasks_per_device: Count | None = None,
    max_processes: Count | None = None,
    tasks: bool = False,
    as_json: AsJson = False,
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
        max_tasks_per_device: Most tasks on one device at a time.
        max_processes: Most tasks at a time.
        tasks: Print a line for each task.
        as_json: Print JSON, sizes in bytes and times in seconds.

    Examples:
        prefect-gpu simulate tasks.csv --devices 2x80GiB --tasks
        prefect-gpu simulate quiet-fox --devices 4x80GiB
        prefect-gpu simulate quiet-fox --devices 1x24GiB --json
    """
    simulated = SimulatedDevices(devices.removeprefix("simulated:"))
    listed, run = read_source(source)
    limits = {"max_processes": max_processes, "max_tasks_per_device": max_tasks_per_device}
    tickets = simulate(listed, simulated, style=placement, **limits)
    found, rows = figures(listed, tickets, simulated), [*map(_row, tickets)]
    if as_json:
        facts = {**(run._asdict() if run else {}), **found, "tasks": rows}
        return json.dumps(facts, indent=2)
    # Names of the tasks that can never run, by reason.
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if row["refusal"]:
            refusals.setdefault(row["refusal"], []).append(row["name"])
    never = sum(map(len, refusals.values()))
    span_s, bound_s = found["makespan_s"], found["lower_bound_s"]
    lines = []
    if run is not None:
        names = collections.Counter(run.measured_devices)
        measured = ", ".join(f"{count} × {name}" for name, count in names.items())
        before = f"{format_seconds(run.measured_makespan_s)} on {measured}"
        without = f", without {never} of {len(rows)} processes" if never else ""
        verdict = f"{format_seconds(span_s)} on {devices} instead of {before}{without}"
        lines = [f"{run.flow_run}: {verdict}", ""]
    above = f", {span_s / bound_s:.2f} × the lower bound" if bound_s else ""
    lines += table_lines(
        [
            ("tasks", f"{len(rows)}, of which {len(rows) - never} ran"),
            ("devices", f"{len(simulated.sizes_bytes)}"),
            ("makespan", f"{format_seconds(span_s)}{above}"),
            ("lower bound", format_seconds(bound_s)),
            ("mean wait", format_seconds(found["mean_wait_s"])),
            ("max wait", format_seconds(found["max_wait_s"])),
            ("utilisation", f"{found['utilisation']:.1%} of memory over the makespan"),
        ]
    )
    if tasks:
        heads = ("task", "submitted", "waited", "started", "ended", "devices")
        lines += ["", *table_lines([heads, *map(_cells, rows)])]
    for why, refused in refusals.items():
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        lines.append(f"{', '.join(refused[:3])}{more} can never run: {why}")
    return "\n".join(lines)


def figures(
    tasks: Sequence[ListedTask], tickets: Sequence[Ticket], devices: SimulatedDevices
) -> dict[str, float]:
    """Return the figures of a simulation for JSON. `tickets` are those of `simulate`, for at least one task."""
    # By position: the end of a task if no task had to wait for a device.
    ends_s: dict[int, float] = {}
    for at in TopologicalSorter({at: task.after for at, task in enumerate(tasks)}).static_order():
        if tickets[at].placement is not None:
            ready_s = max([tasks[at].arrival_s, *(ends_s[each] for each in tasks[at].after)])
            ends_s[at] = ready_s + tasks[at].lag_s + tasks[at].duration_s
    begin_s = min(task.arrival_s for task in tasks)
    span_s = max(ticket.ended_s or begin_s for ticket in tickets) - begin_s
    waits_s = [tickets[at].placed_s - tickets[at].request.submitted_s for at in ends_s] or [0.0]
    byte_s = sum(
        sum(ticket.placement.budget_bytes) * task.duration_s
        for task, ticket in zip(tasks, tickets, strict=True)
        if ticket.placement is not None
    )
    memory_s = byte_s / sum(devices.sizes_bytes)
    return {
        "makespan_s": span_s,
        "lower_bound_s": max([memory_s, *(end_s - begin_s for end_s in ends_s.values())]),
        "mean_wait_s": statistics.fmean(waits_s),
        "max_wait_s": max(waits_s),
        "utilisation": memory_s / span_s if span_s else 0.0,
    }


def _row(ticket: Ticket) -> dict[str, Any]:
    """Return facts of a task for JSON. Times are in seconds from the beginning; `None`: the task never started."""
    asked_s, ran = ticket.request.submitted_s, ticket.placement is not None
    return {
        "name": ticket.request.task_name,
        "submitted_s": asked_s,
        "waited_s": ticket.placed_s - asked_s if ran else None,
        "started_s": ticket.placed_s if ran else None,
        "ended_s": ticket.ended_s,
        "devices": [device.index for device in ticket.devices],
        "refusal": str(ticket.error or ""),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name, *times_s, devices, refusal = row.values()
    if refusal:
        return (name, "", "", "never", "", "")
    return (name, *map(format_seconds, times_s), ",".join(map(str, devices)))


class _VirtualClock(RealClock):
    """A clock whose time `simulate` sets. No thread waits on the clock."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


def simulate(
    tasks: Sequence[ListedTask],
    devices: SimulatedDevices,
    max_processes: int | None = None,
    **settings: Any,
) -> list[Ticket]:
    """Return the tickets of a list of tasks after they ran on simulated devices, with their times, or their errors.

    Args:
        tasks: Tasks. Tasks with equal arrivals are submitted in this order. A task's memory includes its context.
        devices: Simulated devices.
        max_processes: Most tasks at a time. `None`: any number.
        settings: Further arguments of `Broker`.
    """
    from prefect_gpu.broker.broker import Broker

    clock = _VirtualClock()
    broker = Broker(
        SimulatedReader(devices, clock),
        Ledger(now=clock.now),
        # The default of `Broker` depends on this machine's cores.
        max_processes=max_processes or sys.maxsize,
        clock=clock,
        read_host_available=lambda: sys.maxsize,
        stepped=True,
        **settings,
    )
    #: Tickets by the position of their task in the list, and those without a decision.
    tickets: dict[int, Ticket] = {}
    waiting: dict[int, Ticket] = {}
    #: Seconds, whether a task arrives rather than ends, and its position. At equal times ends are handled before
    #: arrivals, because they free devices for new requests.
    events: list[tuple[float, bool, int]] = []
    sorter = TopologicalSorter({at: task.after for at, task in enumerate(tasks)})
    sorter.prepare()

    def finish(*over: int) -> None:
        """Note that tasks have ended or can never run. Tasks that come after all such tasks arrive now or later."""
        sorter.done(*over)
        for at in sorter.get_ready():
            arrival_s = max(clock.now_s, tasks[at].arrival_s) + tasks[at].lag_s
            heapq.heappush(events, (arrival_s, True, at))

    finish()
    while events:
        clock.now_s = events[0][0]
        while events and events[0][0] == clock.now_s:
            _, arrives, at = heapq.heappop(events)
            refused = [tickets[each].request for each in tasks[at].after if tickets[each].error]
            if not arrives:
                broker.end(tickets[at])
                finish(at)
            elif refused:
                why = f"comes after {refused[0].task_name!r}, which can never run"
                tickets[at] = Ticket(tasks[at].request, error=PlacementError(why))
                finish(at)
            else:
                request = replace(tasks[at].request, sequence=len(tickets))
                tickets[at] = waiting[at] = broker.submit(request)
        broker.look()
        for at in [each for each, ticket in waiting.items() if ticket.decided]:
            if waiting.pop(at).error is None:
                heapq.heappush(events, (clock.now_s + tasks[at].duration_s, False, at))
            else:
                finish(at)
    return [tickets[at] for at in range(len(tasks))]
