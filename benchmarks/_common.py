"""What the benchmarks share: a server for all rows, a process for each, versions, and a table.

What they read of devices is in `_devices`, arithmetic in `_bound`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[1]

#: Seconds that a server, and one measurement, may take at most.
SERVER_S = 300.0
MEASUREMENT_S = 3600.0

#: Seconds to wait, after a process ended, for its remaining output.
OUTPUT_S = 5.0

#: Seconds that a process has to end after SIGTERM.
TERMINATE_S = 5.0

#: When this process started, for the times in progress messages; monotonic seconds.
STARTED_S = time.monotonic()

#: Prefix of the line in which a measuring process prints its figures.
MARK = "MEASURED "


@contextmanager
def prefect_server(api_url: str | None = None) -> Iterator[str]:
    """Yield the API URL of a running server.

    Args:
        api_url: Of a server that runs; `None`: the one that `PREFECT_API_URL` in the environment names,
            or else one that is started here. Its database is in a temporary folder, and `PREFECT_HOME`
            points there too while it runs.
    """
    # Servers and children without compiled bytecode start twice as slowly.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    # Asked to end, it ends its server and the row that is measured: they have sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    api_url = api_url or os.environ.get("PREFECT_API_URL")
    if api_url:
        yield api_url
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["PREFECT_HOME"] = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = Path(home, "server.log")
        with log.open("w") as file:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "prefect", "server", "start", "--no-ui"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}/api"
            _wait_until_healthy(url, server, log)
            yield url
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(server.pid, signum)
                    server.wait(10)
                    break
                except subprocess.TimeoutExpired:
                    continue
                except ProcessLookupError:
                    break


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVER_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no Prefect server: {log.read_text()[-2000:]}") from None
        time.sleep(0.1)


def measure(script: str, arguments: Sequence[str], api_url: str) -> dict[str, Any]:
    """Run a benchmark's own file once more, to measure one row in a fresh process.

    Returns:
        What it gave to `tell`.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=MEASUREMENT_S,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line[len(MARK) :])
            return found
    raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode} and measured nothing")


def stream(
    script: str,
    arguments: Sequence[str],
    api_url: str,
    limit_s: float,
    on_record: Callable[[dict[str, Any]], None],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a benchmark's own file in a new process and read its records as they come.

    Other output is printed. After the time limit, the process and its descendants are ended; records
    that were sent before count.

    Args:
        script: The file.
        arguments: Of it.
        api_url: Prefect's, for it and its children.
        limit_s: Time limit in seconds.
        on_record: Called at once with each record that the process passes to `tell`.
        environment: Variables beside those of this process.

    Returns:
        The reason of a failure, in a few words; empty if it succeeded.
    """
    # Prefect's pool, Ray and a plain spawn find `_bodies` and its like here.
    paths = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-u", script, *arguments],
        env={
            **os.environ,
            "PREFECT_API_URL": api_url,
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    deadline = time.monotonic() + limit_s
    over, gone_s, closed = False, None, False
    try:
        while not (closed and process.poll() is not None):
            now = time.monotonic()
            if process.poll() is not None:
                gone_s = gone_s or now
                # Do not wait for descendants that keep the output open.
                if now > gone_s + OUTPUT_S:
                    break
            elif now > deadline:
                over = True
                _end(process)
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line is None:
                # A process closes its output a moment before it ends.
                closed = True
                continue
            if line.startswith(MARK):
                on_record(json.loads(line[len(MARK) :]))
            elif line.strip():
                print(line, end="", flush=True)
    except BaseException:
        _end(process)
        raise
    if over:
        return f"ended after {limit_s:.0f} s"
    code = process.wait()
    return f"its process ended with {code}" if code else ""


def _read_lines(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate a process and its group, then kill what is left."""
    for signum, patience_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, signum)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def tell(found: dict[str, Any]) -> None:
    """Send a measurement to the process that called `measure` or `stream`."""
    print(MARK + json.dumps(found), flush=True)


def say(text: str) -> None:
    """Print a line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED_S:6.1f} s] {text}", flush=True)


class Results:
    """Everything that was found, written to a file again after each addition.

    Args:
        path: Where; `None`: nowhere.
        head: What holds for all of it: versions, devices, seed.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self._path = path
        self.found: dict[str, Any] = {**head, "runs": []}

    def add(self, run: dict[str, Any]) -> None:
        """Store one run."""
        self.found["runs"].append(run)
        self.write()

    def put(self, name: str, value: Any) -> None:
        """Store a value beside the runs."""
        self.found[name] = value
        self.write()

    def write(self) -> None:
        """Bring the file up to date; what was there is whole at any moment."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)


def installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def runner_lacks(*arguments: str) -> str:
    """Return which arguments this version of the runner lacks; empty if none."""
    from prefect_gpu import GPUTaskRunner

    known = inspect.signature(GPUTaskRunner.__init__).parameters
    missing = [name for name in arguments if name not in known]
    return f"not there: GPUTaskRunner has no {', '.join(missing)}" if missing else ""


def add_arguments(
    parser: argparse.ArgumentParser, rows: Iterable[str], budget_s: float, seed_of: str
) -> None:
    """Add the options of every benchmark that runs its own file for each row.

    Args:
        parser: Of the benchmark.
        rows: What it can measure.
        budget_s: Default of the time limit for all rows, in seconds.
        seed_of: What is drawn.
    """
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds for all of it")
    parser.add_argument("--seed", type=int, default=0, help=f"of {seed_of}")
    parser.add_argument("--api-url", default=None, help="of a Prefect server that runs")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here as results come")
    parser.add_argument("--json", action="store_true", help="print the JSON too")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(rows), help=argparse.SUPPRESS)
    parser.add_argument("--on-gpu", action="store_true", help=argparse.SUPPRESS)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for further arguments of the runner; see `read_settings`."""
    parser.add_argument(
        "--with", dest="settings", action="append", default=[], help="NAME=VALUE of GPUTaskRunner"
    )


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `NAME=VALUE` as further arguments of the runner; a value is JSON, or else text.

    Raises:
        SystemExit: One is no such pair.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise SystemExit(f"--with {pair}: accepted is NAME=VALUE, as in --with standby=4")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


@contextmanager
def ray_options(**options: Any) -> Iterator[None]:
    """Submit tasks with these options of Ray inside the context."""
    from prefect_ray.context import remote_options

    with remote_options(**options):
        yield


def ray_runner(devices: int) -> Any:
    """Make Prefect's runner on a Ray of its own, without what neither side needs."""
    # Else it writes a token into the home folder; this Ray is of this machine alone.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    from prefect_ray import RayTaskRunner

    return RayTaskRunner(
        init_kwargs={
            "num_gpus": devices,
            "include_dashboard": False,
            "log_to_driver": False,
            # By default a third of the machine's memory; results here are a few numbers.
            "object_store_memory": 256 * 2**20,
        }
    )


def warm_up(runner: Any, frameworks: Sequence[str], on_gpu: bool) -> None:
    """Run a small task of each framework, as what a machine is asked first: its context is measured.

    That is done once for each framework, GPU model and driver, and kept in the user's cache folder.
    """
    import _bodies
    from prefect import flow, task

    from prefect_gpu import gpu

    work = task(_bodies.first_use, name="warm-up")

    @flow(name="warm-up", task_runner=runner)
    def use_once() -> None:
        for framework in frameworks:
            tags = gpu(memory="3GiB" if on_gpu else "512MiB", framework=framework)
            work.with_options(tags=tags).submit(framework, on_gpu, 2**20).result()

    use_once()


def read_reports(flow_run_id: str, least: int, patience_s: float = 15.0) -> list[dict[str, str]]:
    """Read the numbers of a flow run's memory reports, one for each process.

    Args:
        flow_run_id: Whose.
        least: How many there must be; they are waited for.
        patience_s: Seconds to wait for them.
    """
    from prefect.client.orchestration import get_client

    where = {"key": {"like_": "gpu-memory-"}, "flow_run_id": {"any_": [flow_run_id]}}
    deadline = time.monotonic() + patience_s
    with get_client(sync_client=True) as client:
        while True:
            rows: list[dict[str, Any]] = []
            while True:
                # 200 are the most that the API gives at a time.
                asked = {"artifacts": where, "sort": "CREATED_DESC", "limit": 200}
                asked["offset"] = len(rows)
                page = client.request("POST", "/artifacts/filter", json=asked).json()
                rows += page
                if len(page) < 200:
                    break
            if len(rows) >= least or time.monotonic() > deadline:
                return [
                    {**(row["metadata_"] or {}), "task_run_id": str(row["task_run_id"])}
                    for row in rows
                ]
            time.sleep(0.5)


def summarise_reports(reports: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Count outcomes, budgets by source and leaked bytes in the numbers of memory reports."""
    outcomes: dict[str, int] = {}
    sources: dict[str, int] = {}
    leaked, unknown = 0, 0
    for report in reports:
        outcome = report.get("outcome", "?")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        source = report.get("budget_source", "?")
        sources[source] = sources.get(source, 0) + 1
        text = report.get("leaked_bytes", "unknown")
        leaked, unknown = (leaked + int(text), unknown) if text.isdigit() else (leaked, unknown + 1)
    return {
        "reports": len(reports),
        "outcomes": outcomes,
        "budget_sources": sources,
        "out_of_memory": outcomes.get("oom", 0),
        "leaked_bytes": leaked,
        "leaked_unknown": unknown,
    }


def says_out_of_memory(error: str) -> bool:
    """Return whether the type and text of an error indicate an out-of-memory."""
    text = error.lower().replace("_", " ").replace("outofmemory", "out of memory")
    return "out of memory" in text or "resource exhausted" in text or "resourceexhausted" in text


def release() -> tuple[str, str]:
    """Return the version of this package and the commit that it was measured at.

    The commit is that of this file's repository, with `+changes` where a tracked file differs from it.
    Where there is no repository, as in a copy on another machine, `PREFECT_GPU_COMMIT` names it.

    Raises:
        SystemExit: There is neither a repository nor that variable: a figure without its commit is no
            evidence.
    """
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    commit = os.environ.get("PREFECT_GPU_COMMIT") or _commit()
    if not commit:
        raise SystemExit(f"{REPOSITORY} is no git repository: set PREFECT_GPU_COMMIT to its commit")
    return version, commit


def _commit() -> str:
    # A copy inside another repository is none of its commits.
    if not (REPOSITORY / ".git").exists():
        return ""
    # The owner of a copied or mounted folder may be another one than the user.
    git = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", str(REPOSITORY)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return commit.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def versions(*more: str) -> dict[str, Any]:
    """Return versions of this machine, of Python, of this package and its commit, and of packages.

    Args:
        more: Packages beside Prefect; the version of one that is not installed is `None`.
    """
    version, commit = release()
    packages = {}
    for name in ("prefect", *more):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg()[0],
        "prefect-gpu": version,
        "commit": commit,
        **packages,
    }


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return a median and its spread as text: `12.3 (11.8–14.0)`."""
    if not values:
        return "–"
    low, mid, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return f"{mid:.{digits}f}"
    return f"{mid:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, its columns aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    print(line(head))
    print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        print(line(row))
