"""The console script `prefect-gpu`: what the runner would see, how it reads tags, when tasks would run.

It changes nothing and talks to no server. Exit codes: 0, or 2 when what was asked is wrong or the
machine does not answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.policy import GPUPolicy, parse_tags
from prefect_gpu.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from prefect_gpu.scheduling.model import DeviceSnapshot
    from prefect_gpu.simulation import Outcome, Schedule


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; `None`: those of this process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        text: str = arguments.command(arguments)
    except PrefectGPUError as error:
        print(f"prefect-gpu: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefect-gpu", description="A look at prefect_gpu.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    devices = commands.add_parser("devices", help="list the devices as the runner sees them")
    devices.add_argument(
        "--devices",
        metavar="SPEC",
        help="auto, nvml, host, simulated:2x24GiB, or indices and UUID prefixes with commas "
        "(default: PREFECT_INTEGRATIONS_GPU_DEVICES, else auto)",
    )
    devices.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    devices.set_defaults(command=_devices)
    check = commands.add_parser("check", help="read tags and print the policy, or what is wrong")
    check.add_argument("tags", nargs="+", metavar="TAG", help='for example "gpu:memory=6GiB"')
    check.set_defaults(command=_check)
    _add_simulate(commands)
    commands.add_parser("version", help="print the version").set_defaults(command=_version)
    return parser


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="say when and where a list of tasks would run",
        description="Replay a list of tasks on devices that do not exist, in virtual time, with the "
        "scheduling that the runner uses.",
        epilog="FILE is CSV or JSON lines; columns: duration (must be there), arrival, memory (as in "
        "6GiB or 40%%; empty: a device to itself), devices, name, priority, exclusive, expected, "
        "after (names of tasks, with spaces).",
    )
    simulate.add_argument("file", metavar="FILE", help="list of tasks; - reads standard input")
    simulate.add_argument("--devices", metavar="SPEC", required=True, help="as in 4x80GiB")
    simulate.add_argument("--placement", choices=("spread", "pack"), default="spread")
    simulate.add_argument(
        "--no-backfill",
        action="store_true",
        help="first come, first served: nobody passes a task that is blocked",
    )
    simulate.add_argument(
        "--unknown-durations", action="store_true", help="let the scheduler expect no duration"
    )
    simulate.add_argument("--max-tasks-per-device", metavar="N", type=_positive)
    simulate.add_argument("--max-processes", metavar="N", type=_positive)
    simulate.add_argument("--tasks", action="store_true", help="print a line for each task")
    simulate.add_argument("--json", action="store_true", help="print JSON, bytes and seconds")
    simulate.set_defaults(command=_simulate)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _simulate(arguments: argparse.Namespace) -> str:
    # Here and not above: the other commands need none of it.
    from prefect_gpu.devices.simulated import SimulatedDevices
    from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE
    from prefect_gpu.simulation import simulate
    from prefect_gpu.task_list import TaskListError, parse_tasks

    devices = SimulatedDevices(arguments.devices.removeprefix("simulated:"))
    try:
        if arguments.file == "-":
            tasks = parse_tasks(sys.stdin, "standard input")
        else:
            with open(arguments.file, encoding="utf-8-sig", newline="") as file:
                tasks = parse_tasks(file, arguments.file)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskListError(f"{arguments.file} cannot be read: {error}") from error
    if arguments.unknown_durations:
        tasks = [dataclasses.replace(task, expected_s=None) for task in tasks]
    schedule = simulate(
        tasks,
        devices,
        arguments.placement,
        NO_BACKFILL if arguments.no_backfill else PATIENCE,
        arguments.max_tasks_per_device,
        arguments.max_processes,
    )
    if arguments.json:
        return json.dumps(_schedule_json(schedule), indent=2)
    lines = _table(_schedule_rows(schedule))
    if arguments.tasks:
        heads = ("task", "submitted", "waited", "started", "ended", "devices", "passed")
        lines += ["", *_table([heads, *(_outcome_row(o) for o in schedule.outcomes)])]
    never = [o for o in schedule.outcomes if o.refusal]
    lines += [f"{o.task.name} can never run: {o.refusal}" for o in never]
    return "\n".join(lines)


def _schedule_rows(schedule: Schedule) -> list[tuple[str, str]]:
    bounds, span_s = schedule.bounds, schedule.makespan_s
    by = {
        "longest chain": bounds.chain_s,
        "memory": bounds.memory_s,
        "large tasks": bounds.large_s,
        "tasks a device": bounds.places_s,
    }
    which = max(by, key=by.__getitem__)
    above = f", {span_s / bounds.largest_s:.2f} × the lower bound" if bounds.largest_s else ""
    return [
        ("tasks", f"{len(schedule.outcomes)}, of which {len(schedule.finished)} ran"),
        ("devices", f"{len(schedule.devices)}"),
        ("makespan", f"{format_seconds(span_s)}{above}"),
        ("lower bound", f"{format_seconds(bounds.largest_s)} ({which})"),
        ("mean wait", format_seconds(schedule.mean_wait_s)),
        ("max wait", format_seconds(schedule.max_wait_s)),
        ("utilisation", f"{schedule.utilisation * 100:.1f}% of memory over the makespan"),
    ]


def _outcome_row(outcome: Outcome) -> tuple[str, ...]:
    placement = outcome.placement
    if placement is None:
        return (outcome.task.name, "", "", "never", "", "", "")
    return (
        outcome.task.name,
        format_seconds(outcome.ready_s),
        format_seconds(outcome.waited_s),
        format_seconds(outcome.started_s),
        format_seconds(outcome.ended_s),
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


def _version(_: argparse.Namespace) -> str:
    return f"prefect-gpu {version('prefect-gpu')}"


def _check(arguments: argparse.Namespace) -> str:
    policy = parse_tags(arguments.tags)
    if policy is None:
        return "no gpu tag: the task runs in a thread, without a device of its own"
    return "\n".join(
        [
            *_table(_policy_rows(policy)),
            "tags: " + " ".join(f'"{tag}"' for tag in policy.to_tags()),
        ]
    )


def _policy_rows(policy: GPUPolicy) -> list[tuple[str, str]]:
    memory = policy.memory
    if memory is None:
        budget = "a device to itself"
    elif isinstance(memory, float):
        budget = f"{memory * 100:.6g}% of each device"
    else:
        budget = f"{format_bytes(memory)} ({memory} bytes) on each device"
    shares = (
        share.name if share.fraction is None else f"{share.name} {share.fraction * 100:.6g}%"
        for share in policy.frameworks
    )
    options = (f"{name}={text}" for name, text in policy.allocator_options)
    return [
        ("memory", budget),
        ("count", str(policy.count)),
        ("devices", ", ".join(policy.devices) or "any"),
        ("frameworks", ", ".join(shares) or "those the task imports"),
        ("allocation", policy.allocation),
        ("allocator options", ", ".join(options) or "PyTorch's own"),
        ("caching", "on" if policy.caching else "off"),
        ("exclusive", "yes" if policy.exclusive else "no"),
        ("oom", policy.oom),
        ("enforce", policy.enforce),
        ("priority", str(policy.priority)),
        ("wait", "no limit" if policy.wait_s is None else format_seconds(policy.wait_s)),
        ("cpus", "a share of the cores" if policy.cpus is None else str(policy.cpus)),
        ("learn_by", ", ".join(policy.learn_by) or "none"),
    ]


def _devices(arguments: argparse.Namespace) -> str:
    # Here and not above: `check` needs no driver.
    from prefect_gpu.devices.spec import open_reader, parse_spec

    reader = open_reader(parse_spec(arguments.devices or _default_devices()), os.environ)
    try:
        snapshots = reader.read(())
    finally:
        reader.close()
    if arguments.json:
        return json.dumps([_as_json(snapshot) for snapshot in snapshots], indent=2)
    if not snapshots:
        return "no devices"
    heads = ("index", "uuid", "name", "total", "free", "processes")
    return "\n".join(_table([heads, *(_device_row(snapshot) for snapshot in snapshots)]))


def _default_devices() -> str:
    from prefect_gpu.settings import GPUSettings  # imports Prefect, which takes a second

    return GPUSettings().devices


def _device_row(snapshot: DeviceSnapshot) -> tuple[str, ...]:
    device = snapshot.device
    state = (
        (f"unusable: {snapshot.error}", "")
        if snapshot.error
        else (format_bytes(snapshot.free_bytes), str(len(snapshot.processes)))
    )
    return (str(device.index), device.uuid, device.name, format_bytes(device.total_bytes), *state)


def _as_json(snapshot: DeviceSnapshot) -> dict[str, Any]:
    return {
        **dataclasses.asdict(snapshot.device),
        "free_bytes": None if snapshot.error else snapshot.free_bytes,
        "processes": [
            {"pid": process.pid, "used_bytes": process.used_bytes} for process in snapshot.processes
        ],
        "error": snapshot.error,
    }


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of `rows` with two spaces between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
