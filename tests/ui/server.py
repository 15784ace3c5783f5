"""A real Prefect server with its UI, on a port and in a folder of its own."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.fakes.ports import free_port

#: The first start builds a database: 15 s on two idle cores, minutes on a machine that is loaded.
STARTUP_S = 600.0

#: What Prefect's migrations make of an empty database, which takes seconds of CPU; kept from one server to the next.
MIGRATED = Path(__file__).parents[2] / ".cache" / f"prefect-{version('prefect')}.db"


@contextmanager
def migrated(database: Path) -> Iterator[None]:
    """Give a server that is started in the context, and is ready at its end, a database that is migrated."""
    is_new = not database.exists()
    if is_new and MIGRATED.exists():
        shutil.copy(MIGRATED, database)
    yield
    if not is_new or MIGRATED.exists():
        return
    MIGRATED.parent.mkdir(exist_ok=True)
    made = MIGRATED.with_suffix(f".{os.getpid()}")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(made)) as target:
        source.backup(target)
    made.replace(MIGRATED)


@contextmanager
def running_server(
    home: Path,
    python: str = sys.executable,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Start a server, yield the URL of its API, and end it.

    Args:
        home: A folder for its database and log.
        python: The interpreter of the environment that the server runs in.
        port: Where it listens; `None`: a free one.
        environment: Without Prefect's settings for a server; `None`: that of this process.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    if environment is None:
        dropped = ("PREFECT_", "PYTHONPATH")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    environment = {
        **environment,
        "PREFECT_HOME": str(home),
        # The page calls the API here; by default at port 4200, and shows "Unable to connect".
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_DOCKET_NAME": f"ui-{port}",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [python, "-m", "prefect", "server", "start", "--port", str(port)]
    with ExitStack() as lent, (home / "server.log").open("wb") as log:
        # Another interpreter may have another version of Prefect.
        if python == sys.executable:
            lent.enter_context(migrated(home / "prefect.db"))
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            _wait(f"{url}/api/health", server, home / "server.log")
            lent.close()
            yield f"{url}/api"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTUP_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"no Prefect server at {url}; its output:\n{log.read_text()[-4000:]}")
