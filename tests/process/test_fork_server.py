"""Forks of a fork server, requested as the launcher does, and spoken to over their channels."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PolicyError
from prefect_gpu.processes import messages
from prefect_gpu.processes.fork_server import ForkServer, _pass_on, check_modules
from prefect_gpu.processes.interpreter import SpawnRequest, import_paths
from prefect_gpu.processes.messages import Call
from prefect_gpu.values import transport
from tests.process.rig import PREPARE

MODULES = (
    "numpy",
    "prefect_gpu.child.prefect_context",
    "prefect_gpu.child.main",
    "prefect_gpu.child.bootstrap",
    "torch",
)


class Fork:
    """One fork and its channel."""

    def __init__(self, server: ForkServer, environment: dict[str, str], cwd: str) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(DEADLOCK_S)
        with theirs:
            request = SpawnRequest("a-task", theirs.fileno(), environment, cwd)
            try:
                self.process = server.fork(request)
            except OSError:
                self.channel.close()
                raise
        self.pid = self.process.pid

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        boot = json.dumps({"sys_path": import_paths(), "argv": sys.argv}).encode()
        call = values.dumps(Call(function, args, {}), "call", "call")
        self.channel.sendall(transport.frame_header(transport.BOOT, len(boot)) + boot)
        self.channel.sendall(messages.encode(PREPARE))
        for piece in call.frame:
            self.channel.sendall(piece)

    def value(self) -> Any:
        reader = transport.FrameReader()
        while True:
            try:
                frame = reader.receive(self.channel)
            except (EOFError, ConnectionResetError):
                raise AssertionError(self.printed()) from None
            if frame is not None and frame.kind == transport.VALUE:
                return values.loads(transport.unpack(frame), "return value")

    def end(self) -> int:
        """Wait for its end, as the launcher does."""
        pidfd = self.process.open_pidfd()
        assert pidfd is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            assert selector.select(DEADLOCK_S)
        os.close(pidfd)
        return self.process.wait()

    def printed(self) -> list[bytes]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return [stream.read() for stream in (self.process.stdout, self.process.stderr)]

    def close(self) -> None:
        self.channel.close()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Server:
    """A fork server that is ready, or will never be."""

    def __init__(self, *modules: str) -> None:
        self.server = ForkServer(modules, import_paths(), dict(os.environ))
        self.problem = self.server.wait_ready(DEADLOCK_S)
        self.forks: list[Fork] = []

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.server.process

    def fork(self, environment: dict[str, str] | None = None, cwd: str = "") -> Fork:
        fork = Fork(self.server, dict(os.environ, **(environment or {})), cwd)
        self.forks.append(fork)
        return fork

    def close(self) -> None:
        self.close_forks()
        self.server.close()

    def close_forks(self) -> None:
        for fork in self.forks:
            fork.close()
        self.forks.clear()


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    server = Server(*MODULES)
    assert (server.problem, server.server.failed) == ("", {})
    yield server
    server.close()


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.close_forks()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*modules: str) -> Server:
        servers.append(Server(*modules))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_a_fork_is_like_a_fresh_interpreter(server: Server) -> None:
    fork = server.fork({"PREFECT_GPU_TEST": "from the request"}, "/")
    fork.send(_describe)
    found = fork.value()
    assert found["pid"] == fork.pid
    assert found["session"] == fork.pid
    assert found["parent"] == server.process.pid
    assert found["variable"] == "from the request"
    assert found["cwd"] == "/"
    assert found["argv"] == sys.argv
    # Its channel; nothing of the server's.
    assert found["sockets"] == 1
    assert fork.end() == 0
    assert fork.printed() == [b"printed\n", b"complained\n"]


def test_a_change_in_one_fork_is_not_seen_in_another(server: Server) -> None:
    forks = [server.fork(), server.fork()]
    for one in forks:
        one.send(_count)
    # The random numbers of forks that were made alike are not alike.
    (first, one_number), (second, other_number) = (one.value() for one in forks)
    assert (first, second) == (1, 1)
    assert one_number != other_number
    assert [one.end() for one in forks] == [0, 0]


@pytest.mark.parametrize("cpus", [1, 2])
def test_libraries_compute_in_a_fork(server: Server, cpus: int) -> None:
    fork = server.fork()
    fork.send(_compute, cpus)
    assert fork.value() == pytest.approx((300.0**3, 300.0**3))
    assert fork.end() == 0


def test_a_fork_ends_like_a_script(server: Server, tmp_path: Any) -> None:
    fork = server.fork()
    fork.send(_leave_open, str(tmp_path))
    assert fork.value() is None
    assert fork.end() == 0
    assert (tmp_path / "never closed").read_text() == "all of it"
    assert (tmp_path / "at exit").read_text() == "called"
    assert (tmp_path / "by a thread").read_text() == "waited for"


def test_a_fork_prints_its_last_line_without_an_end(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    fork = make_server("prefect_gpu.child.main").fork()
    fork.send(_print_no_end)
    assert fork.value() is None
    assert fork.end() == 0
    assert fork.printed() == [b"no end", b""]


def test_a_fork_outlives_its_server_and_a_server_does_not_outlive_its_parent(
    make_server: Callable[..., Server],
) -> None:
    server = make_server("prefect_gpu.child.main")
    fork = server.fork()
    # As the parent's end would.
    server.server.forget()
    server.process.returncode = None
    assert server.process.wait(DEADLOCK_S) == 0
    fork.send(_describe)
    assert fork.value()["pid"] == fork.pid


def test_an_environment_may_be_larger_than_a_pipe(server: Server) -> None:
    large = {f"PREFECT_GPU_TEST_{n}": "x" * 100_000 for n in range(5)}
    fork = server.fork({**large, "PREFECT_GPU_TEST": "the last"})
    fork.send(_describe)
    assert fork.value()["variable"] == "the last"
    assert fork.end() == 0


def test_a_module_that_cannot_be_imported_is_named(make_server: Callable[..., Server]) -> None:
    server = make_server("prefect_gpu.no_such_module")
    assert server.problem == ""
    ((name, reason),) = server.server.failed.items()
    assert name == "prefect_gpu.no_such_module" and reason.startswith("ModuleNotFoundError: ")


def test_what_a_server_prints_is_not_repeated_by_its_forks(
    make_server: Callable[..., Server], importable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open(os.path.join(importable, "prints_at_import.py"), "w") as file:
        file.write("print('imported')\n")
    server = make_server("prefect_gpu.child.bootstrap", "prints_at_import")
    fork = server.fork()
    end_at_once(fork)
    assert fork.printed() == [b"", b""]


def test_a_server_may_print_while_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    reading, writing = os.pipe()
    os.write(writing, b"a warning")
    os.close(writing)
    with open(reading, "rb", buffering=0) as stream:
        _pass_on(stream)
        assert stream.closed, "all of it was read"


def test_a_server_whose_libraries_have_started_threads_is_not_forked(
    make_server: Callable[..., Server], importable: str
) -> None:
    with open(os.path.join(importable, "starts_a_thread.py"), "w") as file:
        file.write("import threading, time\n")
        file.write(
            "threading.Thread(target=time.sleep, args=(60,), name='odd', daemon=True).start()"
        )
    server = make_server("starts_a_thread")
    assert server.problem == "its libraries have started threads (odd)"
    with pytest.raises(OSError, match="no fork: its libraries have started threads"):
        server.fork()


def test_a_server_that_was_killed_cannot_be_asked_for_forks(
    make_server: Callable[..., Server],
) -> None:
    server = make_server("prefect_gpu.child.main")
    server.process.kill()
    server.process.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="no fork"):
            server.fork()
    assert server.server.problem.startswith("it did not fork (BrokenPipeError")


def test_a_fork_that_the_system_refuses_leaves_the_server_and_its_other_forks(
    make_server: Callable[..., Server], importable: str
) -> None:
    with open(os.path.join(importable, "refuses_every_other.py"), "w") as file:
        file.write("import itertools\nimport os\n")
        file.write("real, calls = os.fork, itertools.count()\n")
        file.write("def fork():\n    if next(calls) % 2:\n")
        file.write("        raise BlockingIOError(11, 'no more processes')\n    return real()\n")
        file.write("os.fork = fork\n")
    server = make_server("refuses_every_other")
    first = server.fork()
    with pytest.raises(OSError, match=r"no fork: .*no more processes"):
        server.fork()
    second = server.fork()
    assert not server.server.problem
    os.kill(first.pid, signal.SIGSEGV)
    assert first.end() == -signal.SIGSEGV
    second.channel.close()
    assert second.end() == 0


def test_a_server_without_descriptors_refuses_and_goes_on(
    make_server: Callable[..., Server],
) -> None:
    server = make_server("prefect_gpu.child.main")
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (6, limits[1]))
    with pytest.raises(OSError, match="no fork"):
        server.fork()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    fork = server.fork()
    fork.channel.close()
    assert fork.end() == 0


def test_a_fork_can_be_waited_for(server: Server) -> None:
    fork = server.fork()
    fork.channel.close()
    assert fork.end() == 0
    assert fork.process.poll() == 0
    assert fork.process.wait() == 0


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("torch", "tensorflow"), 'tensorflow with start_method="forkserver": it starts threads'),
        (("jax",), 'jax with start_method="forkserver": it starts threads'),
        (("cupy",), 'cupy with start_method="forkserver": nobody has tested'),
        (("my.module",), 'my with start_method="forkserver": nobody has tested'),
    ],
)
def test_libraries_that_are_not_tested_are_refused(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(PolicyError, match=problem) as caught:
        check_modules(names)
    assert 'accepted: prefect, numpy, torch; or start_method="spawn"' in str(caught.value)


def test_libraries_that_are_tested_are_accepted() -> None:
    check_modules(("torch", "numpy", "prefect_gpu.task_runner"))


def end_at_once(fork: Fork) -> int:
    # It has heard nothing yet, and ends when its channel closes.
    fork.channel.close()
    return fork.end()


# Bodies.


def _describe() -> dict[str, Any]:
    print("printed")
    print("complained", file=sys.stderr)
    kinds = []
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "variable": os.environ.get("PREFECT_GPU_TEST"),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
    }


def _count() -> tuple[int, float]:
    import numpy as np

    np.seen = getattr(np, "seen", 0) + 1  # type: ignore[attr-defined]
    return np.seen, float(np.random.random())  # type: ignore[attr-defined]


def _compute(cpus: int) -> tuple[float, float]:
    import numpy as np
    import torch

    torch.set_num_threads(cpus)
    ones = np.ones((300, 300))
    return float((ones @ ones).sum()), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())


def _leave_open(folder: str) -> None:
    import atexit
    import time

    def write(name: str, text: str) -> None:
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)

    def slowly() -> None:
        time.sleep(0.2)
        write("by a thread", "waited for")

    atexit.register(write, "at exit", "called")
    threading.Thread(target=slowly).start()
    sys.never_closed = open(os.path.join(folder, "never closed"), "w")  # type: ignore[attr-defined]  # noqa: SIM115
    sys.never_closed.write("all of it")  # type: ignore[attr-defined]


def _print_no_end() -> None:
    print("no end", end="")
