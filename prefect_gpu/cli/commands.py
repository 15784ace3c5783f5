"""The console script `prefect-gpu`: devices, who uses and who waits for them, tags, a simulated schedule.

It changes nothing, and only `doctor` asks a server. Exit codes: 0; 1 when `doctor` finds a problem; 2 when an
argument is wrong or the machine does not answer. What `status` shows is in `status`. How a list of tasks is read is in `task_list`, how it is replayed in `simulation`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, Token, UnknownOptionError
from cyclopts.validators import Number

from prefect_gpu.errors import PrefectGPUError, ReportError
from prefect_gpu.live.table import table_lines
from prefect_gpu.policy import GPUPolicy, is_gpu_tag, parse_tags, whole
from prefect_gpu.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from prefect_gpu.cli.simulation import Outcome, Schedule
    from prefect_gpu.devices.spec import DeviceSpec
    from prefect_gpu.scheduling.model import DeviceSnapshot

app = App(
    name="prefect-gpu",
    help="Devices, tasks that use or want them, tags and simulated schedules of prefect_gpu.",
    version=lambda: f"prefect-gpu {version('prefect-gpu')}",
    version_flags=("--version",),
    # Options have the names given here and no negative form.
    default_parameter=Parameter(negative=(), show_default=False),
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
)


def _read_whole(_: object, tokens: Sequence[Token]) -> int:
    """Read a whole number. Cyclopts itself would round 1.5 to 2."""
    return whole()(tokens[0].value)


Count = Annotated[int | None, Parameter(converter=_read_whole, n_tokens=1, validator=Number(gte=1))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name. `None`: those of this process.

    Returns:
        The exit code.
    """
    tokens = sys.argv[1:] if argv is None else list(argv)
    try:
        if not tokens:
            raise CycloptsError(msg=f"a COMMAND is required; accepted: {', '.join(_commands())}")
        result = app(tokens)
    except CycloptsError as error:
        print(f"prefect-gpu: {_explain(error)}", file=sys.stderr)
        return 2
    except PrefectGPUError as error:
        print(f"prefect-gpu: {error}", file=sys.stderr)
        return 2
    if isinstance(result, int):
        return result
    if result is not None:
        print(result)
    return 0


def _commands() -> list[str]:
    return [name for name in app if not name.startswith("-")]


def _explain(error: CycloptsError) -> str:
    """Return an error of the command line on one line, with what is accepted."""
    text = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, UnknownOptionError):
        names = {name for argument in error.argument_collection for name in argument.names}
        options = sorted(name for name in names if name.startswith("-"))
        text += f"; accepted: {', '.join((*options, '--help'))}"
    return f"{text} (see prefect-gpu {' '.join((*(error.command_chain or ()), '--help'))})"


@app.command(name="devices")
def _devices(
    *,
    devices: str = "",
    address: str = "",
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> str:
    """List the devices as the runner sees them.

    Args:
        address: Of a Ray cluster, whose nodes' devices are listed: auto, host:port, ray://host:10001.
        devices: auto, nvml, host, simulated:2x24GiB, or indices and UUID prefixes with commas (default:
            PREFECT_INTEGRATIONS_GPU_DEVICES, else auto).
        as_json: Print JSON, sizes in bytes.
    """
    # Imported here because `check` needs no driver.
    from prefect_gpu.devices.spec import open_reader, parse_spec

    given = parse_spec(devices or _default_devices())
    if address:
        return _list_nodes(address, given, as_json)
    named = given.simulated is not None and given.simulated.name
    reader = open_reader(given, os.environ, shared=_ledger_folder() if named else None)
    try:
        snapshots = reader.read(())
    finally:
        reader.close()
    if as_json:
        return json.dumps([_device_json(snapshot) for snapshot in snapshots], indent=2)
    if not snapshots:
        return "no devices"
    heads = ("index", "uuid", "name", "total", "free", "processes")
    return "\n".join(table_lines([heads, *(_device_row(snapshot) for snapshot in snapshots)]))


def _list_nodes(address: str, devices: DeviceSpec, as_json: bool) -> str:
    # Imported here: they import Ray.
    from prefect_gpu.cluster.flow_cluster import read_cluster
    from prefect_gpu.cluster.node_agent import NodeSettings

    settings = NodeSettings("", devices, "spread", None, None, _ledger_folder(), standby=0)
    snapshots, aside = read_cluster(address, settings)
    if as_json:
        found = {"devices": [_device_json(each) for each in snapshots], "set_aside": aside}
        return json.dumps(found, indent=2)
    heads = ("node", "index", "uuid", "name", "total", "free", "processes")
    rows = [(each.device.host, *_device_row(each)) for each in snapshots]
    return "\n".join(
        [
            *table_lines([heads, *rows]),
            *(f"{node} is set aside: {why}" for node, why in aside.items()),
        ]
    )


@app.command(name="status")
def _status(
    *,
    devices: str = "",
    watch: bool = False,
    interval: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    as_json: Annotated[bool, Parameter("--json")] = False,
) -> str | None:
    """Show what holds the devices of this machine, and what waits for them and why.

    Tasks of all flows of this machine that share the ledger are shown, and other programs' processes.

    Args:
        devices: See `prefect-gpu devices`.
        watch: Show it again and again, until Ctrl-C.
        interval: Seconds between two readings, with --watch.
        as_json: Print JSON, sizes in bytes and times in seconds.
    """
    # Imported here because `check` needs neither driver nor ledger.
    from prefect_gpu.cli.status import open_status, status_lines
    from prefect_gpu.cli.watch import repeat
    from prefect_gpu.devices.spec import parse_spec

    with open_status(parse_spec(devices or _default_devices()), _ledger_folder()) as read:

        def show() -> str:
            status = read()
            if as_json:
                return json.dumps(dataclasses.asdict(status), indent=None if watch else 2)
            return "\n".join(status_lines(status))

        if not watch:
            return show()
        repeat(show, interval)
        return None


@app.command(name="report")
def _report(
    flow_run: str,
    /,
    *,
    html: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    as_csv: Annotated[bool, Parameter("--csv")] = False,
) -> str | None:
    """Print the report of a flow run, or write all of its reports to one page.

    Args:
        flow_run: Its id or its name; of several runs of one name the last that was started.
        html: Write one page with all reports and charts to this file, which needs no other.
        as_json: Print the figures of all processes as JSON, sizes in bytes and times in seconds.
        as_csv: Print a row for each process.
    """
    # Imported here: it imports Prefect, which takes a second.
    from prefect_gpu.reports.published import report

    found = report(flow_run)
    if html is not None:
        try:
            html.write_text(found.to_html(), encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{html} cannot be written: {error}") from error
        return f"{html} has the report of the flow run and of {len(found.processes)} processes"
    if as_json:
        return found.to_json()
    if as_csv:
        return found.to_csv().rstrip("\n")
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(found.to_text()))
    return None


@app.command(name="doctor")
def _doctor(*, as_json: Annotated[bool, Parameter("--json")] = False) -> str | int:
    """Look at driver, packages, frameworks, server and limits, and say how to mend what is wrong.

    The exit code is 1 if there is a problem. Each framework that is installed is imported in a process of its own.

    Args:
        as_json: Print JSON.
    """
    # Imported here: it imports Prefect, which takes a second.
    from prefect_gpu.cli.doctor import examine, finding_lines

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print("\n".join(finding_lines(finding)), flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    return int(any(each.level == "problem" for each in findings))


@app.command(name="check")
def _check(tags: list[str], /) -> str:
    """Read tags and print the policy, or what is wrong.

    Args:
        tags: For example "gpu:memory=6GiB".
    """
    policy = parse_tags(tags)
    if policy is None:
        return "no gpu tag: the task runs in a thread, without a device of its own"
    ours = dict.fromkeys(("gpu", *(tag.strip() for tag in tags if is_gpu_tag(tag))))
    written = " ".join(f'"{tag}"' for tag in ours)
    return "\n".join([*table_lines(_policy_rows(policy)), f"tags: {written}"])


@app.command(name="simulate")
def _simulate(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
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
    """Print when and where a list of tasks would run.

    The tasks are replayed on devices that do not exist, in virtual time, with the scheduling that the
    runner uses. FILE is CSV or JSON lines; columns: duration (required), arrival, memory (as in 6GiB or
    40%; empty: a device to itself), devices, name, priority, exclusive, expected, after (names of tasks,
    separated by spaces).

    Args:
        file: List of tasks; - reads standard input.
        devices: Simulated devices, as in 4x80GiB.
        placement: Among devices that fit: the emptiest (spread) or the fullest (pack).
        no_backfill: First come, first served: no task passes one that is blocked.
        unknown_durations: The scheduler expects no duration of any task.
        max_tasks_per_device: Most tasks on a device at a time.
        max_processes: Most tasks at a time.
        tasks: Print a line for each task.
        as_json: Print JSON, sizes in bytes and times in seconds.
    """
    # Imported here because the other commands need none of it.
    from prefect_gpu.cli.simulation import simulate
    from prefect_gpu.cli.task_list import TaskListError, parse_tasks
    from prefect_gpu.devices.simulated import SimulatedDevices
    from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE

    simulated = SimulatedDevices(devices.removeprefix("simulated:"))
    try:
        if file == "-":
            listed = parse_tasks(sys.stdin, "standard input")
        else:
            with open(file, encoding="utf-8-sig", newline="") as lines:
                listed = parse_tasks(lines, file)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskListError(f"{file} cannot be read: {error}") from error
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
        return json.dumps(_schedule_json(schedule), indent=2)
    rows = table_lines(_schedule_rows(schedule))
    if tasks:
        heads = ("task", "submitted", "waited", "started", "ended", "devices", "passed")
        rows += ["", *table_lines([heads, *(_outcome_row(o) for o in schedule.outcomes)])]
    never = [o for o in schedule.outcomes if o.refusal]
    rows += [f"{o.task.name} can never run: {o.refusal}" for o in never]
    return "\n".join(rows)


@app.command(name="version")
def _version() -> str:
    """Print the version."""
    return f"prefect-gpu {version('prefect-gpu')}"


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


def _policy_rows(policy: GPUPolicy) -> list[tuple[str, str]]:
    memory = policy.memory
    if memory is None:
        budget = "a device to itself"
    elif isinstance(memory, float):
        budget = f"{memory * 100:.6g}% of each device"
    else:
        budget = f"{format_bytes(memory)} ({memory} bytes) on each device"
    shares = (str(share).replace(":", " ") for share in policy.frameworks)
    options = (f"{name}={text}" for name, text in policy.allocator_options)
    return [
        ("memory", budget),
        ("count", str(policy.count)),
        ("devices", ", ".join(policy.devices) or "any"),
        ("nodes", ", ".join(policy.nodes) or "any"),
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


def _ledger_folder() -> Path | None:
    from prefect_gpu.settings import read_settings  # imports Prefect, which takes a second

    return read_settings().ledger


def _default_devices() -> str:
    from prefect_gpu.settings import read_settings  # imports Prefect, which takes a second

    return read_settings().devices


def _device_row(snapshot: DeviceSnapshot) -> tuple[str, ...]:
    device = snapshot.device
    state = (
        (f"unusable: {snapshot.error}", "")
        if snapshot.error
        else (format_bytes(snapshot.free_bytes), str(len(snapshot.processes)))
    )
    return (str(device.index), device.uuid, device.name, format_bytes(device.total_bytes), *state)


def _device_json(snapshot: DeviceSnapshot) -> dict[str, Any]:
    return {
        **dataclasses.asdict(snapshot.device),
        "free_bytes": None if snapshot.error else snapshot.free_bytes,
        "processes": [
            {"pid": process.pid, "used_bytes": process.used_bytes} for process in snapshot.processes
        ],
        "error": snapshot.error,
    }
