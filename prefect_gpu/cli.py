"""The console script `prefect-gpu`: what the runner would see and how it reads tags.

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
    commands.add_parser("version", help="print the version").set_defaults(command=_version)
    return parser


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
