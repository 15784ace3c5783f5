"""Settings that hold for all tests, and for the programs that they start."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.integration.programs import MAX_RETRIES, Workplace, workplace
from tests.ui.server import migrated

# A standby costs a start of a process for each kind of task, and competes with the tests that run
# beside it: only tests about standbys start them, with an argument of the runner.
os.environ["PREFECT_INTEGRATIONS_GPU_STANDBY"] = "0"

# Tests that run side by side must not see each other's tasks.
_ledger = tempfile.mkdtemp(prefix="prefect-gpu-ledger-")
os.environ["PREFECT_INTEGRATIONS_GPU_LEDGER"] = _ledger
atexit.register(shutil.rmtree, _ledger, ignore_errors=True)

# A shell has what it starts in the background ignore Ctrl-C (`make check &`), and all that is started from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Allow the one warning that real Prefect forces."""
    # In an async flow Prefect 3.8.8 asks the server for its default result storage with a client
    # that it never closes (`results._read_server_default_result_storage_block_id`); its socket is
    # found by the garbage collector, in whichever test comes next.
    config.addinivalue_line("filterwarnings", "ignore:unclosed <socket.socket:ResourceWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the thousands of collected tests out of every collection of garbage, also of those while they are made."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session")
def prefect_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a temporary Prefect API, set for everything in this process.

    It is one for all workers, except for slow tests, of which one can keep a server busy.
    Takes about 10 s to start on an idle machine. It sets the API URL, which hides what a user
    without a server sees: the ephemeral server has tests of its own. Task-run states reach the API
    seconds late: poll.
    """
    with pytest.MonkeyPatch.context() as patch:
        # The server's process inherits these. Analytics try to reach the internet.
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        patch.delenv("PREFECT_API_URL", raising=False)
        # Servers and children without compiled bytecode start twice as slowly.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        from prefect.settings import (
            PREFECT_CLIENT_MAX_RETRIES,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            PREFECT_LOGGING_TO_API_BATCH_INTERVAL,
            PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL,
            temporary_settings,
        )

        quick = {
            # Its thread, which sleeps for 1 s at a time, is joined at the end of a flow.
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
            # By default logs come to the server after 2 s, and events to its database after 5 s.
            PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 0.5,
            PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL: 1.0,
            PREFECT_CLIENT_MAX_RETRIES: MAX_RETRIES,
        }
        base = tmp_path_factory.getbasetemp()
        shared = not request.config.option.markexpr.startswith("slow")
        folder = base.parent if shared and "PYTEST_XDIST_WORKER" in os.environ else base
        with temporary_settings(quick), _one_server(folder) as url:
            yield url


@contextmanager
def _one_server(folder: Path) -> Iterator[str]:
    """Use the server of the first process that comes to a folder, which ends it after all others."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_DATABASE_CONNECTION_URL
    from prefect.testing.utilities import prefect_test_harness

    port = folder / "prefect-server-port"
    really_start = SubprocessASGIServer.start

    def start(server: SubprocessASGIServer, timeout: int | None = None) -> None:
        url = PREFECT_SERVER_DATABASE_CONNECTION_URL.value() or ""
        with migrated(Path(url.partition(":///")[2])):
            really_start(server, timeout)

    def join(server: SubprocessASGIServer, timeout: int | None = None) -> None:
        server.port = int(port.read_text())

    with (folder / "turn.lock").open("w") as turn, (folder / "users.lock").open("w") as users:
        fcntl.flock(turn, fcntl.LOCK_EX)
        is_first = not port.exists()
        with ExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch:
                if not is_first:
                    fcntl.flock(users, fcntl.LOCK_SH)
                patch.setattr(SubprocessASGIServer, "start", start if is_first else join)
                stack.enter_context(prefect_test_harness(server_startup_timeout=270))
            url = PREFECT_API_URL.value() or ""
            port.write_text(str(urlsplit(url).port))
            fcntl.flock(turn, fcntl.LOCK_UN)
            yield url
            if is_first:
                fcntl.flock(turn, fcntl.LOCK_EX)
                port.unlink()
                fcntl.flock(users, fcntl.LOCK_EX)


@pytest.fixture(autouse=True, scope="module")
def _sources_end_with_their_file() -> Iterator[None]:
    """A source that waits for the next flow would be counted among what a later file's tests leave."""
    yield
    if "prefect_gpu.processes.standby_pool" in sys.modules:
        from tests.process.warm import end_sources

        end_sources()


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    """A folder for programs that use the server; fails if one of their processes is left."""
    with workplace(tmp_path, prefect_server) as made:
        yield made
