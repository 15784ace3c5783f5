"""Programs of users, run for real: an environment, a process, and the processes that it leaves.

Every program is a process of its own against one Prefect server. All that it starts carries a mark
in its environment, so that what survives it can be found whatever session it moved to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

#: Only breaks a deadlock: the slowest program takes 15 s on two idle cores, minutes on a loaded machine.
LIMIT_S = 480.0

#: How often Prefect repeats a call, after 2, 4, 8 … seconds. Its server opens each transaction as a reader (3.8.8), and
#: SQLite refuses at once a reader that writes after another has written; the 5 by default are too few on a busy machine.
MAX_RETRIES = 7

#: Names a run in the environment of all its processes.
MARK = "PREFECT_GPU_TEST_RUN"

_TASKS = """
import os
import sys

from prefect import flow, task
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, current_allocation, gpu

with open(os.environ["MODULE_RUNS"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")

SCALE = 10
PARENT = os.getpid()


class HostError(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


class Point:
    def __init__(self, x):
        self.x = x


def scaled(x):
    return x * SCALE


@task(tags=gpu(TAGS))
def make(point):
    print(f"child prints {point.x}")
    assert isinstance(point, Point) and current_allocation() is not None
    WORK
    if point.x == 7:
        raise HostError("from the child", os.getpid())
    return Point(scaled(point.x)), os.getpid()


def check(made, failed):
    point, pid = made.result()
    assert isinstance(point, Point) and point.x == 10
    try:
        failed.result()
    except HostError as error:
        assert error.args == ("from the child", error.code)
        assert len({pid, error.code, os.getpid()}) == 3
        return "all arrived"


@flow(task_runner=GPUTaskRunner(devices=DEVICES))
def host_flow():
    print("FLOW", flow_run.id)
    return check(*make.map([Point(1), Point(7)]))


@flow(task_runner=GPUTaskRunner(devices=DEVICES))
async def async_host_flow():
    return check(*make.map([Point(1), Point(7)]))
"""


def make_tasks(
    devices: str = "host", tags: str = 'memory="64MiB", framework="none"', work: str = "pass"
) -> str:
    """Return the tasks and flows of a program.

    `host_flow` returns "all arrived" only if arguments, values and errors of classes defined beside it keep their
    identity, globals and helpers are there, and each of its two bodies ran in a process of its own.

    Args:
        devices: Of the flows' runner.
        tags: Arguments of `gpu` for the tasks.
        work: Statements that the body of `make` runs.
    """
    indented = textwrap.indent(textwrap.dedent(work), "    ")
    text = _TASKS.replace("    WORK", indented)
    return text.replace("DEVICES", repr(devices)).replace("TAGS", tags)


TASKS = make_tasks()

#: What `TASKS` prints when it is followed by this.
CALL = '\nprint("RESULT", host_flow())\n'
SCRIPT = TASKS + CALL
ARRIVED = "RESULT all arrived"

#: Runs cells in a kernel of its own, as a notebook's server does; prints what each cell printed.
_NOTEBOOK = """
import json, sys
from jupyter_client.manager import start_new_kernel

cells = json.load(open(sys.argv[1]))
manager, client = start_new_kernel(kernel_name="python3")
outputs = []
try:
    for cell in cells:
        printed = []
        def hear(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed.append([content["name"], content["text"]])
            elif kind == "error":
                printed.append(["error", "\\n".join(content["traceback"])])
        reply = client.execute_interactive(cell, output_hook=hear, timeout=450)
        outputs.append([reply["content"]["status"], printed])
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=False)
json.dump(outputs, open(sys.argv[2], "w"))
"""


class Workplace:
    """A folder for one test's programs, and the environment they run in.

    Args:
        folder: Empty, of the test's own.
        api_url: Of the Prefect server; `None`: the program is to bring its own.
        python: The interpreter of the programs.
    """

    def __init__(self, folder: Path, api_url: str | None, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.token = uuid.uuid4().hex
        #: One line for each time that the module level of `TASKS` ran.
        self.module_runs = folder / "module-runs.txt"
        self.environment = _environment(folder, api_url)
        self.environment[MARK] = self.token
        self.environment["MODULE_RUNS"] = str(self.module_runs)
        self._started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> Path:
        """Write a file of the program's."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def run(
        self,
        *arguments: str,
        stdin: str | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        expect: int | None = 0,
        limit_s: float = LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with arguments to its end; it must leave no process behind."""
        done = subprocess.run(
            [self.python, *arguments],
            input=stdin,
            cwd=cwd or self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        if expect is not None:
            assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return done

    def run_while_it_prints(self, *arguments: str, silent_s: float = LIMIT_S) -> str:
        """Run Python with arguments to its end, however long it takes.

        Args:
            *arguments: Of the interpreter.
            silent_s: Seconds in which it prints something, be it a line of a log: else it hangs.

        Returns:
            What it printed on standard output.
        """
        said, errors = self.folder / "stdout.txt", self.folder / "stderr.txt"
        with said.open("w") as stdout, errors.open("w") as stderr:
            process = self.start(*arguments, stdout=stdout, stderr=stderr)
            sizes, heard = (0, 0), time.monotonic()
            while process.poll() is None:
                now = said.stat().st_size, errors.stat().st_size
                if now != sizes:
                    sizes, heard = now, time.monotonic()
                if time.monotonic() - heard > silent_s:
                    process.kill()
                    process.wait()
                    raise AssertionError(
                        f"silent for {silent_s:g} s:\n{errors.read_text()[-5000:]}"
                    )
                time.sleep(0.1)
        assert process.returncode == 0, errors.read_text()[-5000:]
        return said.read_text()

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start Python with arguments, as the leader of a group as under a terminal."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [self.python, *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def runs(self) -> list[tuple[int, str]]:
        """Return process id and module name for each time that the module level of `TASKS` ran."""
        lines = self.module_runs.read_text(encoding="utf-8").splitlines()
        return [(int(pid), name) for pid, name in (line.split() for line in lines)]

    def processes(self) -> dict[int, str]:
        """Return the processes of this workplace that live: process id to command line."""
        return {pid: command for pid, command in marked(self.token) if pid != os.getpid()}

    def wait_until_gone(self, limit_s: float) -> float:
        """Wait until no process is left; return the seconds it took."""
        began = time.monotonic()
        wait_for(lambda: not self.processes(), limit_s, lambda: f"left: {self.processes()}")
        return time.monotonic() - began

    def kill_all(self) -> dict[int, str]:
        """Kill the processes that are left; return them."""
        left = self.processes()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # What a test that failed leaves open would be found in one that follows.
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        return left


@contextmanager
def workplace(
    folder: Path, api_url: str | None, python: str = sys.executable
) -> Iterator[Workplace]:
    """Yield a workplace; raise if a process of it is left."""
    place = Workplace(folder, api_url, python)
    try:
        yield place
        # The guardian looks for strays for a moment after its parent's end.
        place.wait_until_gone(60.0)
    finally:
        place.kill_all()


def run_cells(place: Workplace, cells: list[str]) -> list[str]:
    """Run cells in one kernel; return what each printed to standard output."""
    place.write("driver.py", _NOTEBOOK)
    place.write("cells.json", json.dumps(cells))
    place.run("driver.py", "cells.json", "outputs.json")
    outputs = json.loads((place.folder / "outputs.json").read_text(encoding="utf-8"))
    for status, printed in outputs:
        assert status == "ok", "".join(text for _, text in printed)
    return ["".join(text for name, text in printed if name == "stdout") for _, printed in outputs]


def wait_for(
    condition: Callable[[], bool],
    limit_s: float = LIMIT_S,
    explain: Callable[[], str] = lambda: "",
    interval_s: float = 0.02,
) -> None:
    """Poll until a condition holds.

    Args:
        condition: Called until its value is true.
        limit_s: Seconds after which it will never hold.
        explain: Called for the error's message.
        interval_s: Seconds between two calls; more where each asks the API.

    Raises:
        AssertionError: It did not hold in time.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s; {explain()}")
        time.sleep(interval_s)


def lines_of(path: Path) -> Sequence[str]:
    """Read a file's lines; none if there is no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()


def _environment(folder: Path, api_url: str | None) -> dict[str, str]:
    dropped = ("PREFECT_", "PYTEST_", "PYTHONDONTWRITEBYTECODE", "COV_CORE", MARK)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    paths = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    home = folder / "home"
    home.mkdir()
    ledger = folder / "ledger"
    ledger.mkdir()
    environment.update(
        PREFECT_INTEGRATIONS_GPU_LEDGER=str(ledger),
        PREFECT_HOME=str(home / "prefect"),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        # Prefect's own 20 s are too few on a slow machine that is busy.
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="120",
        PREFECT_CLIENT_MAX_RETRIES=str(MAX_RETRIES),
        PREFECT_INTEGRATIONS_GPU_STANDBY="0",
        DO_NOT_TRACK="1",
        # Where IPython and Jupyter would otherwise write into the user's home.
        IPYTHONDIR=str(home / "ipython"),
        JUPYTER_RUNTIME_DIR=str(home / "jupyter"),
        PYTHONPATH=os.pathsep.join(paths),
    )
    if api_url is not None:
        environment["PREFECT_API_URL"] = api_url
    return environment


def marked(token: str) -> Iterator[tuple[int, str]]:
    wanted = f"{MARK}={token}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace")
            with open(f"/proc/{name}/stat", "rb") as file:
                # A process that ended and was not reaped runs nothing.
                if file.read().rpartition(b") ")[2].startswith(b"Z"):
                    continue
        except OSError:
            continue
        yield int(name), command
