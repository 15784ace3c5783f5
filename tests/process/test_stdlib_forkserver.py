"""What is used of the private parts of `multiprocessing`, one test for each."""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes.stdlib_forkserver import KEY_BYTES, Entry, ForkClient, read_number

_SERVER = """
import atexit, os, socket, sys
from prefect_gpu.processes import stdlib_forkserver
address, alive, key, left = sys.argv[1:]
server = os.getpid()
atexit.register(lambda: os.getpid() != server and open(left, "w").write("at exit"))
listener = socket.socket(socket.AF_UNIX)
listener.bind(address)
listener.listen()
print("listens", flush=True)
stdlib_forkserver.serve(listener, int(alive), bytes.fromhex(key))
"""


class Server:
    """A server that has imported nothing but what it needs to fork."""

    def __init__(self, folder: Path) -> None:
        self.key = os.urandom(KEY_BYTES)
        self.address = str(folder / "forks")
        #: Written by a function that the server has registered with `atexit`, in a fork.
        self.left = folder / "left"
        theirs, self.alive = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, self.address, str(theirs), self.key.hex(), self.left],
            stdout=subprocess.PIPE,
            pass_fds=(theirs,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        )
        os.close(theirs)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listens\n"
        self.process.stdout.close()
        self.client = ForkClient(self.address, self.alive, self.key)

    def fork(self, function: Callable[[int], object]) -> tuple[int, int, socket.socket]:
        """Fork; return the process id, the descriptor for its exit code, and our end of its socket."""
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLOCK_S)
        with theirs:
            entry = Entry(__name__, function.__name__)
            return (*self.client.fork(entry, [theirs.fileno()]), ours)

    def stop(self) -> None:
        """Close our end of what the server watches."""
        os.close(self.alive)
        self.alive = -1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.alive >= 0:
        made.stop()
    made.process.kill()
    made.process.wait()


def test_a_fork_runs_the_entry_with_the_descriptors_that_were_sent(server: Server) -> None:
    pid, status, channel = server.fork(say_ids)
    with channel:
        assert channel.recv(100).decode() == f"{pid} {server.process.pid}"
    assert read_number(status) == 0
    os.close(status)


@pytest.mark.parametrize("code", [7, -signal.SIGKILL])
def test_the_server_reports_the_exit_code_of_a_fork(server: Server, code: int) -> None:
    _, status, channel = server.fork(end_as_told)
    with channel:
        channel.send(str(code).encode())
        assert read_number(status) == code
    os.close(status)


def test_the_server_ends_with_its_parent_while_a_fork_still_runs(server: Server) -> None:
    _, status, channel = server.fork(end_as_told)
    with channel:
        assert channel.recv(100) == b"ready"
        server.stop()
        assert server.process.wait(DEADLOCK_S) == 0
        with pytest.raises(EOFError):
            read_number(status)
        channel.send(b"0")
    os.close(status)


def test_a_fork_uses_multiprocessing_like_a_process_that_no_server_has_made(server: Server) -> None:
    _, status, channel = server.fork(say_what_multiprocessing_knows)
    with channel:
        assert channel.recv(100) == b"[None, None, None, None]"
    os.close(status)


def test_a_fork_keeps_the_exit_functions_of_what_the_server_imported(server: Server) -> None:
    _, status, channel = server.fork(run_exit_functions)
    with channel:
        assert channel.recv(100) == b"done"
    assert server.left.read_text() == "at exit"
    os.close(status)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="servers have a key since Python 3.14")
def test_a_client_without_the_key_is_refused(server: Server) -> None:
    server.client = ForkClient(server.address, server.alive, bytes(KEY_BYTES))
    with pytest.raises(Exception, match="digest"):
        server.fork(say_ids)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (forkserver.ForkServer(), "_forkserver_address"),
        (forkserver.ForkServer(), "_forkserver_alive_fd"),
        (forkserver.ForkServer(), "_inherited_fds"),
        (forkserver.ForkServer(), "connect_to_new_process"),
        (forkserver.ForkServer(), "ensure_running"),
        (forkserver, "_forkserver"),
        (forkserver, "main"),
        (forkserver, "read_signed"),
        (resource_tracker, "_resource_tracker"),
        (resource_tracker._resource_tracker, "_fd"),
        (spawn, "_main"),
        (atexit, "_clear"),
        (atexit, "_run_exitfuncs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_multiprocessing_has_the_private_name(owner: object, name: str) -> None:
    assert hasattr(owner, name)


def test_the_servers_loop_takes_the_arguments_that_it_is_given() -> None:
    parameters = inspect.signature(forkserver.main).parameters
    assert list(parameters)[:3] == ["listener_fd", "alive_r", "preload"]
    assert ("authkey_r" in parameters) == (sys.version_info >= (3, 14))


# Functions of forks.


def say_ids(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as channel:
        channel.send(f"{os.getpid()} {os.getppid()}".encode())


def end_as_told(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as channel:
        channel.send(b"ready")
        code = int(channel.recv(100))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def say_what_multiprocessing_knows(descriptor: int) -> None:
    own = forkserver._forkserver
    found = [own._forkserver_address, own._forkserver_alive_fd, own._inherited_fds]
    with socket.socket(fileno=descriptor) as channel:
        channel.send(repr([*found, resource_tracker._resource_tracker._fd]).encode())


def run_exit_functions(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as channel:
        atexit._run_exitfuncs()
        channel.send(b"done")
