"""The parent's code for fork servers (`start_method="forkserver"`).

A fork server is a process that has imported libraries and is forked for each task; its own code is in `child.preload`.
One pool serves all runners of a Python process. A task gets a fresh interpreter instead if its environment differs in
variables that libraries read at import (`frameworks.adapter`), or if its server fails.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from prefect_gpu.errors import CapacityError, PolicyError
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import late_changes
from prefect_gpu.process_resources import PROCESS_RESOURCES, read_status, start_thread
from prefect_gpu.processes.guardian import with_token
from prefect_gpu.processes.interpreter import (
    SpawnRequest,
    environment_with,
    import_paths,
    interpreter_flags,
)
from prefect_gpu.processes.launch_spec import LaunchSpec, Listener
from prefect_gpu.processes.launcher import Handle, ProcessLauncher, process_launcher
from prefect_gpu.processes.standby_kind import Kind

logger = logging.getLogger(__name__)

PRELOAD = Path(__file__).parents[1] / "child" / "preload.py"

#: Seconds in which a server must fork, or report the end of a fork; a slower server counts as hung.
ANSWER_S = 10.0

#: Seconds in which a server must import its modules: ten times the half minute that a cold disk takes.
READY_S = 300.0

#: Seconds between two checks whether a server that does not answer was stopped (SIGSTOP).
LOOK_S = 0.1

#: Failures of a kind's servers before their first fork, after which tasks of the kind get fresh interpreters.
MOST_FAILURES = 3

#: Exit code of a fork whose server had ended or hung when the fork ended: only the server learns the real code.
UNKNOWN_CODE = 255

#: Modules that every server imports first: Prefect, as a child needs it, and the code of a fork.
_ALWAYS = (
    "prefect_gpu.child.prefect_context",
    "prefect_gpu.task_runner",
    "prefect_gpu.child.main",
    "prefect_gpu.child.bootstrap",
)

#: Libraries that a server may import: a fork after the import of each works (tests/process/test_fork_server.py).
TESTED = ("prefect", "numpy", "torch")

REFUSED = {
    "tensorflow": "it starts threads as it is imported, which a fork does not have",
    "jax": "it starts threads as it is first used, and says itself that a fork of it may hang",
}


def check_modules(names: Iterable[str]) -> None:
    """Raise `PolicyError` if one of the modules belongs to a library that is not known to survive a fork."""
    for name in sorted(names):
        root = name.partition(".")[0]
        if root not in TESTED and root != "prefect_gpu":
            why = REFUSED.get(root, "nobody has tested a fork of a process that has imported it")
            raise PolicyError(
                f'{root} with start_method="forkserver"',
                why,
                f'{", ".join(TESTED)}; or start_method="spawn"',
            )


class ForkServer:
    """A fork server that imports `modules` in order; raises `OSError` (no process) or `CapacityError` (no thread)."""

    def __init__(
        self, modules: tuple[str, ...], sys_path: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        self.environment = dict(environment)
        #: Token in the environment of the server and its forks, by which the guardian finds them.
        self.token = uuid.uuid4().hex
        #: Reason why the server cannot fork; empty: it can, or still imports.
        self.problem = ""
        #: Reasons of failed imports, by module; forks import these modules again.
        self.failed: Mapping[str, str] = {}
        self.served = False
        #: The imports did not end in time, so no other server of the kind is tried.
        self.hung = False
        # Several threads may fork; each waits for the others.
        self._lock = threading.Lock()
        self._ready = False
        # SEQPACKET keeps message boundaries. When the last copy of this end closes, the server ends.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.process = _start_server(
                    theirs.fileno(), with_token(self.environment, self.token)
                )
            except BaseException:
                self._control.close()
                raise
        boot = {"sys_path": sys_path, "modules": modules}
        try:
            self._control.send(json.dumps(boot).encode())
        except OSError as error:
            self._give_up(f"its process ended at once ({error})")

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the server has imported its modules; return the reason why it cannot fork, empty: it can."""
        with self._lock:
            if self._ready or self.problem:
                return self.problem
            try:
                self._wait_for_answer(self._control, timeout_s)
                told = json.loads(self._control.recv(1 << 16))
            except TimeoutError:
                self.hung = True
                self._give_up(f"it has imported for more than {timeout_s:g} s")
            except (OSError, ValueError):
                self._give_up("its process ended as it imported")
            else:
                self.failed, self.problem, self._ready = told["failed"], told["problem"], True
                for name, reason in self.failed.items():
                    logger.debug("the fork server could not import %s: %s", name, reason)
            return self.problem

    def fork(self, request: SpawnRequest) -> ForkedProcess:
        """Fork a process; a `Spawner`. Raise `OSError` if the server cannot fork or the folder does not exist."""
        if request.cwd and not os.path.isdir(request.cwd):
            raise FileNotFoundError(errno.ENOENT, "no such folder", request.cwd)
        with self._lock:
            if self.problem or not self._ready:
                raise OSError(errno.EPIPE, f"no fork: {self.problem or 'it still imports'}")
            process = self._fork(request)
            self.served = True
            return process

    def _fork(self, request: SpawnRequest) -> ForkedProcess:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            streams = []
            sent = [request.channel]
            for _ in ("stdout", "stderr"):
                reading, writing = os.pipe()
                streams.append(ours.enter_context(open(reading, "rb", buffering=0)))
                theirs.callback(os.close, writing)
                sent.append(writing)
            # A socket pair has no name, so that only the fork and the server can answer.
            reply, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(reply)
            theirs.enter_context(answering)
            # A file in memory, since an environment may be larger than a pipe's buffer.
            content = theirs.enter_context(open(os.memfd_create("fork"), "w+b", buffering=0))
            wanted = {"environment": dict(request.environment), "cwd": request.cwd}
            content.write(json.dumps(wanted).encode())
            descriptors = [*sent, answering.fileno(), content.fileno()]
            try:
                self._control.settimeout(ANSWER_S)
                socket.send_fds(self._control, [b"!"], descriptors)
                theirs.close()
                self._wait_for_answer(reply, ANSWER_S)
                said, received, _, _ = socket.recv_fds(reply, 512, 1, socket.MSG_CMSG_CLOEXEC)
                if not said:
                    self._control.settimeout(0)
                    with contextlib.suppress(BlockingIOError):
                        if not self._control.recv(1):
                            raise BrokenPipeError(errno.EPIPE, "its process ended")
            except OSError as error:
                self._give_up(f"it did not fork ({type(error).__name__}: {error})")
                raise OSError(errno.EPIPE, f"no fork: {error}") from error
            if not received:
                # The system refused to fork, or has no descriptor left. Later forks may succeed.
                raise OSError(errno.EAGAIN, f"no fork: {said.decode() or 'no answer'}")
            ours.pop_all()
        return ForkedProcess(self, int(said), received[0], reply, *streams)

    def read_exit_code(self, reply: socket.socket) -> int:
        """Return the exit code that the server reports for an ended fork; `UNKNOWN_CODE`: the server is silent."""
        try:
            self._wait_for_answer(reply, ANSWER_S)
            return int(reply.recv(32))
        except TimeoutError:
            with self._lock:
                self._give_up(f"it did not report an end within {ANSWER_S:g} s")
        except (OSError, ValueError):
            logger.debug("a fork server ended before its fork")
        return UNKNOWN_CODE

    def _wait_for_answer(self, answer: socket.socket, timeout_s: float) -> None:
        """Wait for an answer, or raise `TimeoutError`. Kill a stopped server, which would block the launcher."""
        poll, deadline = select.poll(), time.monotonic() + timeout_s
        poll.register(answer, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left_s, LOOK_S)):
                return
            if read_status(self.process.pid, "State").startswith("T"):
                self.process.kill()
        raise TimeoutError

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.process.kill()

    def forget(self) -> None:
        """Close this process's resources of the server, in a fork of the parent."""
        self._control.close()
        # The server is no child of the fork, which must not wait for it.
        self.process.returncode = 0

    def close(self) -> None:
        """End the server, but not its forks."""
        self.problem = self.problem or "it was closed"
        self.process.kill()
        self.process.wait()
        with self._lock:
            self._control.close()


def _start_server(control: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, *interpreter_flags(), str(PRELOAD), str(control), "fork server"],
        stdin=subprocess.DEVNULL,
        # Pipes, as its forks have: a fork inherits the stream objects, which remember whether they are seekable.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=(control,),
        start_new_session=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        start_thread(functools.partial(_pass_on, process.stdout), "prefect-gpu-fork-server")
    except CapacityError:
        process.kill()
        process.wait()
        process.stdout.close()
        raise
    return process


def _pass_on(stream: IO[bytes]) -> None:
    """Copy a server's output, such as warnings of imports, to standard error."""
    with stream:
        while data := stream.read(1 << 16):
            # A closed or missing standard error must not block a server that prints.
            with contextlib.suppress(Exception):
                sys.stderr.write(data.decode("utf-8", errors="backslashreplace"))


class ForkedProcess:
    """A fork of a fork server; implements `Process`. Its server reaps it: its end shows by pidfd, not by process id."""

    def __init__(
        self, server: ForkServer, pid: int, pidfd: int, reply: socket.socket, *streams: IO[bytes]
    ) -> None:
        self._server = server
        self.pid = pid
        self._pidfd, self._reply = pidfd, reply
        self.stdout: IO[bytes] | None
        self.stderr: IO[bytes] | None
        self.stdout, self.stderr = streams
        self.returncode: int | None = None

    def open_pidfd(self) -> int:
        """See `Process.open_pidfd`. To be called once."""
        return self._pidfd

    def poll(self) -> int | None:
        """See `Process.poll`."""
        return self.returncode

    def wait(self) -> int:
        """Return the exit code, as the server reports it. To be called after the end of the process."""
        if self.returncode is None:
            with self._reply:
                self.returncode = self._server.read_exit_code(self._reply)
        return self.returncode

    def __del__(self) -> None:
        self._reply.close()


class ForkServerPool:
    """Keeps one fork server for each kind of task (libraries, environment). Safe to use from several threads."""

    def __init__(self, launcher: ProcessLauncher) -> None:
        self._launcher = launcher
        self._reset()
        PROCESS_RESOURCES.after_fork(self, ForkServerPool._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._owners: set[object] = set()
        self._servers: dict[Kind, ForkServer] = {}
        #: Number of servers that failed before their first fork.
        self._failures: dict[Kind, int] = {}

    def open(self, owner: object) -> None:
        """Register a runner that may need forks, until `close`."""
        with self._lock:
            self._owners.add(owner)

    def close(self, owner: object) -> None:
        """Remove a runner, and end all servers if no runner is left."""
        with self._lock:
            self._owners.discard(owner)
            if self._owners:
                return
            servers, self._servers, self._failures = self._servers, {}, {}
        for server in servers.values():
            self._close(server)

    def announce(self, kind: Kind) -> ForkLauncher:
        """Start a server for a task's kind, unless there is one; return the launcher for the task."""
        kind = replace(kind, always=tuple(m for m in kind.always if m not in _ALWAYS), users=())
        self.server(kind)
        return ForkLauncher(self, self._launcher, kind)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the servers."""
        with self._lock:
            return tuple(server.process.pid for server in self._servers.values())

    def server(self, kind: Kind) -> ForkServer | None:
        """Return a kind's server, which may still import; start one if needed. `None`: the kind gets no server."""
        with self._lock:
            if not self._owners:
                return None
            server = self._servers.get(kind)
            if server is not None and server.problem:
                del self._servers[kind]
                self._close(server)
                count = MOST_FAILURES if server.hung else int(not server.served)
                self._note_failure(kind, server.problem, count)
                server = None
            if server is None and self._failures.get(kind, 0) < MOST_FAILURES:
                try:
                    server = self._servers[kind] = ForkServer(
                        _modules(kind), import_paths(), kind.environment_of(os.environ)
                    )
                    # A stopped server does not notice the parent's end.
                    self._launcher.guard(server.process.pid, server.token)
                except (OSError, CapacityError) as error:
                    self._note_failure(kind, str(error), 1)
            return server

    def _close(self, server: ForkServer) -> None:
        # Before the server ends, after which another process may get its id.
        self._launcher.guard(server.process.pid, "")
        server.close()

    def _note_failure(self, kind: Kind, problem: str, count: int) -> None:
        self._failures[kind] = self._failures.get(kind, 0) + count
        logger.warning("the fork server of GPU tasks is given up: %s", problem)

    def _forget(self) -> None:
        """Drop all servers in a fork of the parent."""
        for server in self._servers.values():
            server.forget()
        self._reset()


class ForkLauncher:
    """The `Launcher` of one task. Forks the task's process if possible, else starts a fresh interpreter."""

    def __init__(self, pool: ForkServerPool, launcher: ProcessLauncher, kind: Kind) -> None:
        self._pool = pool
        self._launcher = launcher
        self._kind = kind

    def start(self, spec: LaunchSpec, listener: Listener) -> Handle:
        """See `Launcher.start`. Waits until the server has imported its modules."""
        server = self._pool.server(self._kind)
        while server is not None and server.wait_ready(READY_S):
            server = self._pool.server(self._kind)
        if server is None or not self._suits(server, spec):
            return self._launcher.start(spec, listener)
        return self._launcher.start(spec, listener, server.fork)

    def _suits(self, server: ForkServer, spec: LaunchSpec) -> bool:
        environment, adapters = environment_with(spec.environment), registry.ADAPTERS.values()
        changes = late_changes(
            server.environment, environment, adapters, cpus_stated=self._kind.cpus_stated
        )
        return changes is not None

    def retract(self) -> None:
        """Do nothing, since fork servers are not kept for single tasks."""


def _modules(kind: Kind) -> tuple[str, ...]:
    """Return the modules that a kind's server imports; of libraries, only those in `TESTED`."""
    extra = [m for m in kind.always if m not in _ALWAYS]
    # numpy is no framework, but nearly every body uses it.
    if importlib.util.find_spec("numpy") is not None:
        extra.append("numpy")
    return (*_ALWAYS, *(m for m in extra if m.partition(".")[0] in TESTED))


def fork_server_pool() -> ForkServerPool:
    """Return the only fork server pool of this Python process; a fork has its own."""
    return PROCESS_RESOURCES.get(ForkServerPool, lambda: ForkServerPool(process_launcher()))
