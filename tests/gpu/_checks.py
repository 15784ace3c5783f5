"""What the checks on a real GPU share: a server, flows, the reports that came of them, a verdict.

A check is a module whose `main` hands a function to `run`. It runs in two processes. The one that a
person started keeps a Prefect server, reads the devices' memory before and after, ends what takes
too long and prints the verdict. Inside it the same module runs once more, with that server's address
in its environment, and does the work: it prints what it finds and returns what is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pynvml
from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
GIB = 1 << 30

#: Device memory after a check may differ from before by this much.
TOLERANCE_BYTES = 2 * MIB

#: Names, for the process inside, the file that takes its findings.
FINDINGS = "PREFECT_GPU_CHECK_FINDINGS"

#: A server without compiled bytecode takes half a minute to start on a machine that is cold.
SERVER_START_S = 120.0

#: What a body takes longer than is a hang.
BODY_S = 150.0

Result = TypeVar("Result")

say = functools.partial(print, flush=True)


def size(value: int | float | None) -> str:
    """Write bytes as whole MiB; `?`: unknown."""
    return "?" if value is None else f"{value / MIB:.0f}"


def percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{fraction * 100:+.1f}%"


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under heads, numbers to the right."""
    lines = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    numeric = [
        all(re.fullmatch(r"[-+]?[0-9.,]+%?|[-?]|", line[column]) for line in lines[1:])
        for column in range(len(heads))
    ]
    say()
    for line in lines:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        say("  ".join(cells).rstrip())
    say()


# The process that a person starts.


def run(
    check: Callable[[argparse.Namespace], list[str]],
    parser: argparse.ArgumentParser,
    limit_s: float,
    quiet: bool = False,
) -> int:
    """Run a check; print its verdict.

    Args:
        check: Does the work, in a process of its own; gives what is not as it should be.
        parser: Of its arguments, but for `--devices`.
        limit_s: Seconds after which it is ended.
        quiet: Leave out what Prefect logs: failures are meant, and each has a traceback.

    Returns:
        The exit code.
    """
    parser.add_argument(
        "--devices",
        default="nvml",
        help="nvml; host or simulated:1x24GiB only try the script out: nothing is judged there",
    )
    options = parser.parse_args()
    findings = os.environ.pop(FINDINGS, "")
    if not findings:
        return _watch(options.devices == "nvml", limit_s, quiet)
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5), exit=False)
    problems = check(options)
    faulthandler.cancel_dump_traceback_later()
    Path(findings).write_text(json.dumps(problems), encoding="utf-8")
    return 0


def _watch(judged: bool, limit_s: float, quiet: bool) -> int:
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        raise SystemExit(f"start it as a module: python -m tests.gpu.{Path(sys.argv[0]).stem}")
    handles = nvml_handles()
    for handle in handles:
        say(f"{_text(pynvml.nvmlDeviceGetName(handle))}, driver {_text(_driver())}")
    if judged and not handles:
        say("NOT AS IT SHOULD BE\n- no NVIDIA device answers")
        return 1
    before = used_bytes()
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        prefect_server(home) as environment,
    ):
        findings = Path(home, "findings.json")
        environment |= {FINDINGS: str(findings), **(_QUIET if quiet else {})}
        code = _wait(
            subprocess.Popen(
                [sys.executable, "-m", spec.name, *sys.argv[1:]], env=environment, cwd=ROOT
            ),
            limit_s,
        )
        problems: list[str] = []
        if code is None:
            problems.append(f"it took longer than {limit_s:g} s and was ended")
        elif code or not findings.exists():
            problems.append(f"its process ended with {code}, without a verdict")
        crashed = bool(problems)
        if not crashed:
            problems = json.loads(findings.read_text(encoding="utf-8"))
    problems += _look_at_memory(before)
    say(f"took {time.monotonic() - began_s:.0f} s")
    if not judged:
        say("tried without a GPU, so this is no verdict; what differs from one with a GPU:")
    elif not problems:
        say("all as it should be")
        return 0
    else:
        say("NOT AS IT SHOULD BE")
    for problem in problems:
        say(f"- {problem}")
    return int(judged or crashed)


#: No tracebacks of tasks that are meant to fail.
_QUIET = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code; `None` after the time limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Its tasks' processes end with it: the guardian sees to that.
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def _look_at_memory(before: list[int]) -> list[str]:
    ended_s = time.monotonic()
    problems = []
    after = settle(before)
    for index, (first, last) in enumerate(zip(before, after, strict=True)):
        say(
            f"device {index}: used before {first / MIB:.1f} MiB, after {last / MIB:.1f} MiB, "
            f"difference {(last - first) / MIB:+.1f} MiB ({time.monotonic() - ended_s:.2f} s after)"
        )
        if abs(last - first) > TOLERANCE_BYTES:
            problems.append(f"device {index} has {(last - first) / MIB:+.1f} MiB more than before")
    return problems


@contextlib.contextmanager
def prefect_server(home: str) -> Iterator[dict[str, str]]:
    """Run a server, and give the environment of programs that use it.

    What this package keeps of contexts is in `home` too: a check begins with nothing known.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": home,
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": str(Path(home, "cache")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        # TensorFlow and JAX write a page for each out-of-memory that is meant.
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SERVER_START_S
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the Prefect server did not start (exit code {server.poll()})")
            time.sleep(0.2)
        yield environment
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


# The driver, read from outside of the package.


def nvml_handles() -> list[Any]:
    """Return the handle of every device that `CUDA_VISIBLE_DEVICES` shows; empty if no driver answers.

    So checks of one device can run side by side on several.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        every = map(str, range(pynvml.nvmlDeviceGetCount()))
        return [
            pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in (every if visible is None else filter(None, visible.split(",")))
        ]
    except pynvml.NVMLError:
        return []


def used_bytes() -> list[int]:
    """Read what is used of each device."""
    infos = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in nvml_handles()]
    return [int(info.total - info.free) for info in infos]


def settle(before: list[int], patience_s: float = 5.0) -> list[int]:
    """Wait until as much is used as before; give what is used then, or when patience ends."""
    deadline = time.monotonic() + patience_s
    while True:
        after = used_bytes()
        near = all(abs(a - b) <= TOLERANCE_BYTES for a, b in zip(after, before, strict=True))
        if near or time.monotonic() > deadline:
            return after
        time.sleep(0.01)


def _driver() -> str | bytes:
    driver: str | bytes = pynvml.nvmlSystemGetDriverVersion()
    return driver


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Observer(threading.Thread):
    """Knows nothing of the package: reads every device's processes, every 10 ms, until it is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._handles = nvml_handles()
        self._stopped = threading.Event()
        #: Most bytes that NVML ever showed for a process, by its id.
        self.peaks: dict[int, int] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(0.01):
            now: dict[int, int] = defaultdict(int)
            for handle in self._handles:
                with contextlib.suppress(pynvml.NVMLError):
                    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                        now[process.pid] += process.usedGpuMemory or 0
            for pid, held in now.items():
                self.note(pid, held)

    def note(self, pid: int, held: int) -> None:
        """Take one reading of a process."""
        self.peaks[pid] = max(self.peaks.get(pid, 0), held)

    def peak_of(self, process: Process | None) -> int | None:
        """Return the peak that NVML listed for a process; `None` if it was never listed."""
        return None if process is None else self.peaks.get(process.pid)


# Flows, and what became of their tasks.


@dataclass(frozen=True, slots=True)
class FlowRun(Generic[Result]):
    """A flow that has returned."""

    id: str
    value: Result
    seconds: float


def run_flow(
    name: str, body: Callable[[], Result], devices: str, **configuration: Any
) -> FlowRun[Result]:
    """Run a function as a flow.

    Args:
        name: Of the flow.
        body: Submits tasks and waits for them (`gather`).
        devices: As in `--devices`.
        **configuration: Of its `GPUTaskRunner`.
    """
    from prefect import flow
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner

    kept: list[FlowRun[Result]] = []
    began_s = time.monotonic()

    def run_body() -> None:
        value = body()
        kept.append(FlowRun(str(flow_run.id), value, time.monotonic() - began_s))

    runner: Any = GPUTaskRunner(devices=devices, **configuration)
    flow(name=name, task_runner=runner)(run_body)()
    (ended,) = kept
    return ended


@dataclass(frozen=True, slots=True)
class Ended:
    """One task run, as its flow sees it."""

    task_run_id: str
    #: What it returned; `None`: it failed.
    value: Any
    #: Why it failed; `None`: it did not.
    error: BaseException | None

    @property
    def words(self) -> str:
        """What went wrong, in one line; empty: nothing did."""
        if self.error is None:
            return ""
        first = str(self.error).strip().partition("\n")[0]
        return f"{type(self.error).__name__}: {first}"[:200]


def gather(futures: Mapping[str, Any], limit_s: float) -> dict[str, Ended]:
    """Wait for task runs, whatever becomes of them.

    Raises:
        TimeoutError: They took longer than `limit_s` together; that fails the flow, which ends them.
    """
    deadline = time.monotonic() + limit_s
    found = {}
    for name, future in futures.items():
        left_s = max(0.1, deadline - time.monotonic())
        value = future.result(timeout=left_s, raise_on_failure=False)
        failed = isinstance(value, BaseException)
        found[name] = Ended(
            str(future.task_run_id), None if failed else value, value if failed else None
        )
    return found


# What was reported of them, read as any client of the API would.


@dataclass(frozen=True, slots=True)
class Process:
    """What was reported of one process of a task run."""

    task_run_id: str
    #: The artifact's metadata.
    fields: Mapping[str, str]
    #: The artifact's text.
    text: str

    def __getitem__(self, name: str) -> str:
        return self.fields.get(name, "?")

    def bytes(self, name: str) -> int | None:
        """Return a number of bytes; `None` if it is not known."""
        value = self.fields.get(name, "")
        return int(value) if value.lstrip("-").isdigit() else None

    @property
    def attempt(self) -> int:
        return int(self.fields.get("attempt", "0"))

    def section(self, title: str) -> str:
        """Return the text under a heading; empty if there is none."""
        return self.text.partition(f"### {title}\n\n")[2].partition("\n\n")[0]

    @property
    def pid(self) -> int:
        found = re.search(r"\bpid\D{0,12}(\d+)", self.text)
        return int(found[1]) if found else 0


def read_processes(
    flow_run_id: str, least: int, patience_s: float = 20.0
) -> dict[str, list[Process]]:
    """Read the memory reports of a flow run.

    Args:
        flow_run_id: Whose.
        least: Reports that there must be; they are waited for.
        patience_s: Seconds to wait for them.

    Returns:
        By task run, its processes in their order.
    """
    deadline = time.monotonic() + patience_s
    where = {"key": {"like_": "gpu-memory-"}, "flow_run_id": {"any_": [flow_run_id]}}
    while True:
        found = read_all("/artifacts/filter", {"artifacts": where, "sort": "CREATED_DESC"})
        if len(found) >= least or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    processes: dict[str, list[Process]] = defaultdict(list)
    for row in found:
        report = Process(str(row["task_run_id"]), row["metadata_"] or {}, str(row["data"]))
        processes[report.task_run_id].append(report)
    for reports in processes.values():
        reports.sort(key=lambda report: report.attempt)
    return dict(processes)


def read_histories() -> dict[str, list[dict[str, str]]]:
    """Read what histories keep of every process so far, by task name, in the order of their ends."""
    where = {"key": {"like_": "gpu-history-"}}
    rows = read_all("/artifacts/filter", {"artifacts": where, "sort": "CREATED_DESC"})
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        fields = row["metadata_"] or {}
        runs[fields.get("task_name", "?")].append(fields)
    for kept in runs.values():
        kept.sort(key=lambda fields: float(fields.get("ended_at", 0)))
    return dict(runs)


def read_task_runs(flow_run_id: str, patience_s: float = 20.0) -> dict[str, dict[str, Any]]:
    """Read a flow run's task runs by id, once all have ended: states reach the API seconds late."""
    deadline = time.monotonic() + patience_s
    final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
    while True:
        rows = read_all("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        if all(row["state_type"] in final for row in rows) or time.monotonic() > deadline:
            return {str(row["id"]): row for row in rows}
        time.sleep(0.5)


def read_all(
    path: Literal["/artifacts/filter", "/task_runs/filter"], query: dict[str, Any]
) -> list[dict[str, Any]]:
    """Read all rows that a query finds, page by page."""
    from prefect.client.orchestration import get_client

    # The most that the API gives at a time.
    page = 200
    rows: list[dict[str, Any]] = []
    with get_client(sync_client=True) as client:
        while True:
            asked = {**query, "limit": page, "offset": len(rows)}
            answer = client.request("POST", path, json=asked).json()
            rows += answer
            if len(answer) < page:
                return rows


def last_of(processes: Mapping[str, list[Process]], ended: Ended) -> Process | None:
    """Return the report of the last process of a task run; `None` if there is none."""
    reports = processes.get(ended.task_run_id)
    return reports[-1] if reports else None


def logs_of(task_run_id: str, text: str, patience_s: float = 20.0) -> list[str]:
    """Read the lines of a task run's log that contain a text, as any client of the API would."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + patience_s
    with get_client(sync_client=True) as client:
        while True:
            asked = {"logs": {"task_run_id": {"any_": [task_run_id]}}}
            found = client.request("POST", "/logs/filter", json=asked).json()
            lines = [row["message"] for row in found if text in row["message"]]
            if lines or time.monotonic() > deadline:
                return lines
            time.sleep(0.5)


# In a task.


def own_bytes() -> int:
    """Read what NVML shows for this very process, on all devices."""
    listed = [
        process
        for handle in nvml_handles()
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]
    return sum(process.usedGpuMemory or 0 for process in listed if process.pid == os.getpid())


def run_steps(
    one_step: Callable[[], object], least: int = 6, seconds: float = 1.0, most: int = 200
) -> int:
    """Run steps of a body, saying so, for long enough that the driver's figure is read meanwhile.

    Returns:
        How many there were.
    """
    from prefect_gpu import step

    began_s = time.monotonic()
    done = 0
    while done < least or (done < most and time.monotonic() - began_s < seconds):
        one_step()
        step()
        done += 1
    return done
