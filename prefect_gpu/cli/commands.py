"""The console script `prefect-gpu`, and its commands about this machine and about tags.

`suspend` and `resume` write the wanted state into the ledger of the machine, where a suspension lasts until `resume` or
the task's end. The task's flow moves the memory, and writes its progress into the ledger.

Exit codes: 0; 1 if `doctor` finds a problem, or `check` a tag that was probably meant as a GPU tag; 2 if an argument is
wrong, the output cannot be written, or the machine or Prefect's API does not answer. Commands about past flow runs are
in `run_commands`, `simulate` in `simulate_command`, the content of `status` in `status`. Functions import the modules
that need Prefect (a second), a driver or Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.validators import Number

from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.cli.run_commands import (
    AsJson,
    list_histories,
    recommend,
    reset_histories,
    show_report,
)
from prefect_gpu.cli.simulate_command import simulate_command
from prefect_gpu.errors import PrefectGPUError, ReportError, SettingError
from prefect_gpu.live.table import table_lines
from prefect_gpu.policy import GPUPolicy, is_gpu_tag, near_miss, parse_tags, why_alone
from prefect_gpu.suspension.eligibility import REFUSED
from prefect_gpu.units import format_bytes, format_seconds, text_of

if TYPE_CHECKING:
    from prefect_gpu.devices.spec import DeviceSpec
    from prefect_gpu.scheduling.model import DeviceSnapshot, Request
    from prefect_gpu.settings import GPUSettings

#: Seconds between two readings of the ledger.
LOOK_S = 0.1

#: Seconds without progress after which a command reports that the flow does not answer.
SILENT_S = 10.0

#: Fewest characters of an id that identify a run.
SHORTEST_ID = 8

_pause = threading.Event()


def _version() -> str:
    """Print the version.

    Examples:
        prefect-gpu version
    """
    return f"prefect-gpu {version('prefect-gpu')}"


app = App(
    name="prefect-gpu",
    help="Devices, tasks that use or want them, tags, reports and simulated schedules of prefect_gpu.",
    help_epilogue="Examples:\n\n    prefect-gpu status --watch\n    prefect-gpu report quiet-fox",
    version=_version,
    version_flags=("--version",),
    # Options have the names given here and no negative form.
    default_parameter=Parameter(negative=(), show_default=False),
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
)


def _add(command: Callable[..., Any], name: str, group: App = app) -> None:
    """Add a command, with the examples of its docstring below its help: Cyclopts itself leaves examples out."""
    _, _, examples = (inspect.getdoc(command) or "").partition("Examples:\n")
    group.command(command, name=name, help_epilogue=f"Examples:\n\n{examples}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv`: command and arguments; `None`: from `sys.argv`."""
    tokens = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters outside the terminal's encoding are escaped, as in the output of child processes.
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        return _refuse("the output cannot be written: it is closed")
    try:
        if not tokens:
            raise CycloptsError(msg=f"a COMMAND is required; accepted: {', '.join(_commands())}")
        for token in tokens:
            _check_encoding(token)
        result = app(tokens)
        if result is not None and not isinstance(result, int):
            print(result)
        # Flush here, where an error can be caught.
        sys.stdout.flush()
    except BrokenPipeError:
        # The program that reads the output, such as `head`, has ended.
        _discard(sys.stdout)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except CycloptsError as error:
        return _refuse(_explain(error))
    except PrefectGPUError as error:
        return _refuse(str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard(sys.stdout)
        return _refuse(f"the output cannot be written: {error.strerror}")
    return result if isinstance(result, int) else 0


#: Errors of a write to standard output: a full disk, a quota, a limit, a lost terminal, a closed descriptor.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _refuse(text: str) -> int:
    """Print an error to standard error, and return exit code 2."""
    # `print` writes to standard output if there is no standard error.
    if sys.stderr is None:
        return 2
    from prefect_gpu.reports.canvas import clean

    try:
        print(f"prefect-gpu: {clean(text)}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
    return 2


def _discard(stream: TextIO) -> None:
    """Drop a stream's unwritten output: at exit Python would flush the stream again, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _check_encoding(token: str) -> None:
    """Raise `CycloptsError` for an argument that no command can print, send or find."""
    try:
        token.encode()
    except UnicodeEncodeError:
        if not os.path.lexists(token):
            shown = os.fsencode(token).decode(errors="backslashreplace")
            text = f"the argument '{shown}' is not UTF-8, and no file has that name"
            raise CycloptsError(msg=text) from None


def _commands() -> list[str]:
    return [name for name in app if not name.startswith("-")]


def _explain(error: CycloptsError) -> str:
    """Return a command-line error on one line, with the accepted values."""
    text = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, UnknownOptionError):
        names = {name for argument in error.argument_collection for name in argument.names}
        options = sorted(name for name in names if name.startswith("-"))
        text += f"; accepted: {', '.join((*options, '--help'))}"
    if isinstance(error, UnusedCliTokensError):
        text = f"nothing is expected here: {' '.join(error.unused_tokens or ())}"
    if isinstance(error, UnknownCommandError):
        # Cyclopts itself names only eight commands.
        text = f"{text.partition('. ')[0]}. Available commands: {', '.join(_commands())}"
    return f"{text} (see prefect-gpu {' '.join((*(error.command_chain or ()), '--help'))})"


def _devices(*, devices: str = "", address: str = "", as_json: AsJson = False) -> str:
    """List the devices as the runner sees them.

    Args:
        address: Address of a Ray cluster, to list the devices of its nodes: auto, host:port, ray://host:10001
            (default: PREFECT_INTEGRATIONS_GPU_ADDRESS, else this machine).
        devices: Devices to list: auto, nvml, host, simulated:2x24GiB, or indices and UUID prefixes separated by commas
            (default: PREFECT_INTEGRATIONS_GPU_DEVICES, else auto).
        as_json: Print JSON, sizes in bytes.

    Examples:
        prefect-gpu devices
        prefect-gpu devices --devices 0,1 --json
        prefect-gpu devices --address auto
    """
    from prefect_gpu.devices.spec import open_reader, parse_spec

    given = parse_spec(devices or _settings().devices)
    if address := address or _settings().address or "":
        return _list_nodes(address, given, as_json)
    named = given.simulated is not None and given.simulated.name
    reader = open_reader(given, os.environ, shared=_settings().ledger if named else None)
    with contextlib.closing(reader):
        snapshots = reader.read(())
    if as_json:
        return json.dumps([*map(_device_json, snapshots)], indent=2)
    if not snapshots:
        return "no devices"
    return "\n".join(table_lines([_DEVICE_HEADS, *map(_device_row, snapshots)]))


_DEVICE_HEADS = ("index", "uuid", "name", "total", "free", "processes")


def _list_nodes(address: str, devices: DeviceSpec, as_json: bool) -> str:
    from prefect_gpu.cluster.membership import read_cluster
    from prefect_gpu.cluster.node_agent import NodeSettings

    settings = NodeSettings("", devices, "spread", None, None, _settings().ledger, standby=0)
    read, aside = read_cluster(address, settings)
    # Nodes join in any order.
    snapshots = sorted(read, key=lambda each: (each.device.host, each.device.index))
    if as_json:
        found = {"devices": [*map(_device_json, snapshots)], "set_aside": aside}
        return json.dumps(found, indent=2)
    rows = [(each.device.host, *_device_row(each)) for each in snapshots]
    lines = table_lines([("node", *_DEVICE_HEADS), *rows])
    return "\n".join([*lines, *(f"{node} is set aside: {why}" for node, why in aside.items())])


def _status(
    *,
    devices: str = "",
    watch: bool = False,
    interval: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    as_json: AsJson = False,
) -> str | None:
    """Show the tasks that use devices of this machine, the waiting tasks, and why they wait.

    The tasks are from all flows of this machine that share the ledger, the record of all reservations. Processes of
    other programs are shown, too.

    Args:
        devices: Devices to show; see `prefect-gpu devices`.
        watch: Repeat the output until Ctrl-C.
        interval: Seconds between two readings, with --watch.
        as_json: Print JSON, sizes in bytes and times in seconds.

    Examples:
        prefect-gpu status
        prefect-gpu status --watch --interval 5
    """
    from prefect_gpu.cli.status import open_status, status_lines
    from prefect_gpu.cli.terminal import repeat
    from prefect_gpu.devices.spec import parse_spec

    with open_status(parse_spec(devices or _settings().devices), _settings().ledger) as read:

        def show() -> str:
            status = read()
            if as_json:
                return json.dumps(dataclasses.asdict(status), indent=None if watch else 2)
            return "\n".join(status_lines(status))

        if not watch:
            return show()
        repeat(show, interval)
        return None


def _doctor(*, as_json: AsJson = False) -> str | int:
    """Check driver, packages, frameworks, server and limits, and print how to repair problems.

    The exit code is 1 if there is a problem. Each installed framework is imported in a process of its own.

    Args:
        as_json: Print JSON.

    Examples:
        prefect-gpu doctor
        prefect-gpu doctor --json
    """
    from prefect_gpu.cli.doctor import examine, finding_lines

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print("\n".join(finding_lines(finding)), flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    return int(any(each.level == "problem" for each in findings))


def _check(tags: list[str], /, *, as_json: AsJson = False) -> str | int:
    """Print the policy that tags define for a GPU task, or the error in the tags.

    The exit code is 1 if a tag is no GPU tag but was probably meant as one. The tag is printed to standard error.

    Args:
        tags: One or more tags, for example "gpu:memory=6GiB".
        as_json: Print JSON, sizes in bytes and times in seconds; null: a task with these tags is no GPU task.

    Examples:
        prefect-gpu check "gpu:memory=6GiB" "gpu:framework=torch"
        prefect-gpu check gpu:memory=40% gpu:count=2
    """
    policy = parse_tags(tags)
    if as_json:
        text = json.dumps(policy and dataclasses.asdict(policy), indent=2, default=sorted)
    elif policy is None:
        text = "no gpu tag: the task runs in a thread, without a device of its own"
    else:
        ours = dict.fromkeys(("gpu", *(tag.strip() for tag in tags if is_gpu_tag(tag))))
        written = " ".join(f'"{tag}"' for tag in ours)
        text = "\n".join([*table_lines(_policy_rows(policy)), f"tags: {written}"])
    misses = {tag: meant for tag in tags if (meant := near_miss(tag))}
    if not misses:
        return text
    print(text)
    for tag, meant in misses.items():
        _refuse(f"{tag!r} has no meaning; did you mean {meant!r}?")
    return 1


def _policy_rows(policy: GPUPolicy) -> list[tuple[str, str]]:
    memory = policy.memory
    if memory is None:
        alone = why_alone(policy)
        first = f"has a device to itself: {alone}" if alone else "shares a device while it has room"
        budget = f"learned from earlier runs; a first run {first}"
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
        ("allocation", _allocation(policy)),
        ("allocator options", ", ".join(options) or "PyTorch's own"),
        ("caching", "on" if policy.caching else "off"),
        ("exclusive", "yes" if policy.exclusive else "no"),
        ("oom", policy.oom),
        ("enforce", policy.enforce),
        ("priority", str(policy.priority)),
        ("preemptible", "yes" if policy.preemptible else "no"),
        ("wait", text_of(policy.wait_s, format_seconds, "no limit")),
        ("cpus", text_of(policy.cpus, absent="a share of the cores")),
        ("learn_by", ", ".join(policy.learn_by) or "none"),
    ]


def _allocation(policy: GPUPolicy) -> str:
    known = policy.memory is not None or "allocation" in policy.stated
    if known or not policy.caching:
        return policy.allocation
    # A first run that shares a device is capped, and so is a run with a learned budget.
    return "growth in a first run, then limit" if why_alone(policy) else "limit"


def _settings() -> GPUSettings:
    from prefect_gpu.settings import read_settings

    return read_settings()


def _device_row(snapshot: DeviceSnapshot) -> tuple[str, ...]:
    device = snapshot.device
    state = (format_bytes(snapshot.free_bytes), str(len(snapshot.processes)))
    if snapshot.error:
        state = (f"unusable: {snapshot.error}", "")
    return (str(device.index), device.uuid, device.name, format_bytes(device.total_bytes), *state)


def _device_json(snapshot: DeviceSnapshot) -> dict[str, Any]:
    return {
        **dataclasses.asdict(snapshot.device),
        "free_bytes": None if snapshot.error else snapshot.free_bytes,
        "processes": [{"pid": use.pid, "used_bytes": use.used_bytes} for use in snapshot.processes],
        "error": snapshot.error,
    }


def suspend(run: str, *, share: bool = False) -> int:
    """Move the GPU memory of a running task to the host, so that another program can use the device.

    The suspension lasts until `prefect-gpu resume`, or the task's end. Without `--share` the freed memory stays reserved.
    The exit code is 1 if a task is not suspended: the task continues, and the reason is printed.

    Args:
        run: Id of a flow run or task run, or at least the first eight characters of the id; or name of a task run.
        share: Let other GPU tasks use the freed memory. After `resume` the task continues when there is room for it.

    Examples:
        prefect-gpu suspend train-4f1
        prefect-gpu suspend 0198f3c1 --share
    """
    return _ask(run, away=True, share=share)


def resume(run: str) -> int:
    """Move the GPU memory of a suspended task back to its device, as soon as there is room.

    Args:
        run: Flow run or task run; see `prefect-gpu suspend`.

    Examples:
        prefect-gpu resume train-4f1
    """
    return _ask(run, away=False)


def _means(request: Request, run: str) -> bool:
    """Return whether the argument of `suspend` names the task run, or the flow run, of a request."""
    ids = request.task_run_id, request.flow_run_id
    known = len(run) >= SHORTEST_ID and any(each.startswith(run.lower()) for each in ids)
    return known or run == request.task_run_name


def _ask(run: str, away: bool, share: bool = False) -> int:
    from prefect_gpu.broker.host_ledger import HostStore
    from prefect_gpu.broker.preempting import hold_back

    ledger = Ledger(partial(HostStore, _settings().ledger))
    found = {i: each for i, each in ledger.running().items() if _means(each.request, run)}
    if ledger.problem:
        raise ReportError(f"the ledger of this machine cannot be read: {ledger.problem}")
    if not found:
        names = sorted({e.request.task_run_name for e in ledger.running().values()})
        running = f"these have devices: {', '.join(names)}" if names else "no GPU task has a device"
        accepted = "accepted: the name of a task run, the id of a task run or of a flow run"
        raise SettingError(f"{run!r} names no GPU task of this machine; {running}; {accepted}")
    for request_id in found:
        ledger.rewrite(request_id, partial(hold_back, away=away, shared=share))
    done = [_follow(ledger, i, e.request.task_run_name, away) for i, e in found.items()]
    return 0 if all(done) else 1


def _follow(ledger: Ledger, request_id: str, name: str, away: bool) -> bool:
    """Print the progress of a task's suspension or resume until its end; return whether the move succeeded."""
    told, silent_s = None, 0.0
    while (entry := ledger.running().get(request_id)) is not None:
        state = entry.suspension
        if state and state != told:
            print(f"{name}: {state}", flush=True)
            told = state
        if away and state.startswith((REFUSED, "away")):
            return state.startswith("away")
        if not away and not state:
            print(f"{name}: runs")
            return True
        if told is None and silent_s >= SILENT_S:
            text = f"{name}: its flow has not answered for {SILENT_S:g}s; the wish stays"
            print(text, file=sys.stderr)
            return False
        silent_s += LOOK_S
        _pause.wait(LOOK_S)
    print(f"{name}: has ended")
    return not away


_add(_devices, "devices")
_add(_status, "status")
_add(suspend, "suspend")
_add(resume, "resume")
_add(_doctor, "doctor")
_add(_check, "check")
_add(show_report, "report")
_add(recommend, "recommend")
_add(simulate_command, "simulate")
_add(_version, "version")
_history = App(
    name="history",
    help="List the histories of tasks, or delete them.",
    help_epilogue="Examples:\n\n    prefect-gpu history list",
)
app.command(_history)
_add(list_histories, "list", _history)
_add(reset_histories, "reset", _history)
