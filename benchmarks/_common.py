"""What the benchmarks share: a server for all rows, a process for each, versions, and a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

#: Seconds that a server, and one measurement, may take at most.
SERVER_S = 120.0
MEASUREMENT_S = 3600.0

#: Begins the line in which a measuring process says what it found.
MARK = "MEASURED "


@contextmanager
def prefect_server(api_url: str | None = None) -> Iterator[str]:
    """Give the API URL of a running server: one of our own unless `api_url` names one.

    Its database is in a temporary folder, and `PREFECT_HOME` points there too while it runs.
    """
    # Servers and children without compiled bytecode start twice as slowly.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    if api_url is not None:
        yield api_url
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["PREFECT_HOME"] = home
        os.environ.pop("PREFECT_API_URL", None)
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


def tell(found: dict[str, Any]) -> None:
    """Say what was measured, to the process that asked with `measure`."""
    print(MARK + json.dumps(found), flush=True)


def versions(*more: str) -> dict[str, Any]:
    """Give versions of this machine, Python and of packages, `None` where one is not installed."""
    packages = {}
    for name in ("prefect", "prefect-gpu", *more):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg()[0],
        **packages,
    }


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Give a median and its spread as text: `12.3 (11.8–14.0)`."""
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
