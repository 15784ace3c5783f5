"""The parent's end of a template process: asks it for forks, hears of them and of their ends.

What the template does is in `template`; who gets a fork of which template, in `templates`. A request
blocks the launcher's thread for as long as the template takes to fork: 3 to 20 ms.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from prefect_gpu.errors import PolicyError
from prefect_gpu.processes.interpreter import interpreter_flags, with_token
from prefect_gpu.processes.spawning import SpawnRequest
from prefect_gpu.processes.template import NO_TOKEN, TEMPLATE_TITLE

#: What a template's interpreter runs.
TEMPLATE = Path(__file__).with_name("template.py")

#: Seconds that a template may take to fork; more is a hang.
ANSWER_S = 10.0

#: Exit code of a fork that nobody could reap for us.
UNKNOWN_CODE = 255

#: Bytes that a message may have: an environment travels in one.
_SOCKET_BYTES = 4 << 20

#: Libraries that a template may import: a fork of a process that has imported one of these, and done
#: nothing with it, was seen to work (tests/process/test_forkserver.py).
TESTED = ("prefect", "numpy", "torch")

#: Why others are refused.
REFUSED = {
    "tensorflow": "it starts threads as it is imported, which a fork does not have",
    "jax": "it starts threads as it is first used, and says itself that a fork of it may hang",
}


def check_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Make sure that a template may import some libraries.

    Returns:
        The names, sorted.

    Raises:
        PolicyError: One of them is not known to survive a fork.
    """
    chosen = tuple(sorted(set(names)))
    for name in chosen:
        root = name.partition(".")[0]
        if root not in TESTED and root != "prefect_gpu":
            why = REFUSED.get(root, "nobody has tested a fork of a process that has imported it")
            raise PolicyError(
                f'{root} with start_method="forkserver"',
                why,
                f'{", ".join(TESTED)}; or start_method="spawn"',
            )
    return chosen


# What a template says.


@dataclass(frozen=True, slots=True)
class TemplateReady:
    """It has imported what it could, and may be asked for forks, if `unfit` is empty."""

    #: Modules that could not be imported, and why.
    failed: Mapping[str, str]
    #: Why it must not be forked.
    unfit: str


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork exists."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkRefused:
    """The system would not fork."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForkEnded:
    """A fork has ended; it is a zombie until `reap` is called."""

    pid: int
    #: Exit code; negative: the number of the signal that ended it.
    code: int


#: What answers a request.
ForkAnswer = (Forked, ForkRefused)

TemplateMessage: TypeAlias = "TemplateReady | Forked | ForkRefused | ForkEnded"


class ForkServer:
    """One template process. Safe to use from several threads, which wait for each other.

    Args:
        modules: What it imports, Prefect's part in a child first (`check_modules` has passed).
        sys_path: Where it looks for them.
        environment: Its own variables.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        sys_path: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> None:
        self.environment = dict(environment)
        #: What became of it: empty while it may be asked for forks, or is not ready yet.
        self.problem = ""
        self._lock = threading.Lock()
        self._ready: TemplateReady | None = None
        self._next_id = 0
        #: Ends that were told and not asked for, by process id.
        self._ended: dict[int, int] = {}
        # Of messages: a request arrives whole, with its descriptors.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._control, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [
                    sys.executable,
                    *interpreter_flags(),
                    str(TEMPLATE),
                    str(theirs.fileno()),
                    TEMPLATE_TITLE,
                ],
                stdin=subprocess.DEVNULL,
                # Pipes, as its forks have: what Python knows of a stream (that it could be sought in,
                # say) they inherit.
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                # Room for the mark that each of its forks bears.
                env=with_token(self.environment, NO_TOKEN),
            )
        assert self.process.stdout is not None
        threading.Thread(
            target=_pass_on, args=(self.process.stdout,), name="prefect-gpu-template", daemon=True
        ).start()
        boot = {"sys_path": sys_path, "modules": modules}
        try:
            self._control.send(json.dumps(boot).encode())
        except OSError as error:
            self._give_up(f"the template process ended at once ({error})")

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until it may be asked for forks.

        Returns:
            Why it may not; empty: it may.
        """
        with self._lock:
            if self._ready is None and not self.problem:
                try:
                    self._ready = self._hear(TemplateReady, timeout_s)
                except (EOFError, TimeoutError) as error:
                    self._give_up(str(error))
                else:
                    self.problem = self._ready.unfit
            return self.problem

    @property
    def failed(self) -> Mapping[str, str]:
        """Modules that it could not import, and why; those are left to its forks."""
        return {} if self._ready is None else self._ready.failed

    def fork(self, request: SpawnRequest) -> ForkedProcess:
        """Have a process forked: a `Spawner`.

        Raises:
            OSError: The folder or the template is gone, it does not answer, or the system would not
                fork.
        """
        if request.cwd and not os.path.isdir(request.cwd):
            raise FileNotFoundError(errno.ENOENT, "no such folder", request.cwd)
        outs = [os.pipe(), os.pipe()]
        try:
            with self._lock:
                pid = self._ask(request, [write for _, write in outs])
        except BaseException:
            for read, _ in outs:
                os.close(read)
            raise
        finally:
            for _, write in outs:
                os.close(write)
        streams = [os.fdopen(read, "rb", buffering=0) for read, _ in outs]
        return ForkedProcess(self, pid, *streams)

    def _ask(self, request: SpawnRequest, outs: list[int]) -> int:
        self._next_id += 1
        message = {
            "kind": "fork",
            "id": self._next_id,
            "environment": dict(request.environment),
            "cwd": request.cwd,
            "title": request.title,
        }
        descriptors = array.array("i", (request.channel, *outs))
        try:
            if self.problem:
                raise EOFError(self.problem)
            self._control.sendmsg(
                [json.dumps(message).encode()],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
            )
            answer = self._hear(ForkAnswer, ANSWER_S)
        except (EOFError, TimeoutError, BrokenPipeError, ConnectionResetError) as error:
            self._give_up(str(error))
            raise OSError(errno.EPIPE, f"no fork: {error}") from error
        if isinstance(answer, ForkRefused):
            raise OSError(errno.EAGAIN, f"no fork: {answer.reason}")
        assert isinstance(answer, Forked)
        return answer.pid

    def exit_code(self, pid: int, timeout_s: float | None) -> int:
        """Wait for the end of a fork. Its process id stays its own until `reap`.

        Raises:
            TimeoutError: It has not ended in time.
        """
        if not _await_end(pid, timeout_s):
            raise TimeoutError(f"process {pid} has not ended")
        with self._lock:
            try:
                while pid not in self._ended:
                    ended = self._hear(ForkEnded, ANSWER_S)
                    self._ended[ended.pid] = ended.code
            except EOFError:
                # The template was killed. Whoever inherits its forks reaps them, and keeps the code.
                self._ended[pid] = UNKNOWN_CODE
            except TimeoutError as error:
                self._give_up(str(error))
                self._ended[pid] = UNKNOWN_CODE
            return self._ended[pid]

    def reap(self, pid: int) -> None:
        """Let go of a fork that has ended: its process id may then be another's."""
        with self._lock:
            self._ended.pop(pid, None)
            try:
                self._control.send(json.dumps({"kind": "reap", "pid": pid}).encode())
            except OSError:
                # The template is gone, and the fork with it.
                return

    def _hear(self, kind: Any, timeout_s: float | None) -> Any:
        """Wait for a message of some kind; ends of forks that come before it are kept.

        Raises:
            TimeoutError: None came.
            EOFError: The template is gone.
        """
        self._control.settimeout(timeout_s)
        while True:
            try:
                data = self._control.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                raise TimeoutError(f"the template process said nothing for {timeout_s} s") from None
            except OSError:
                data = b""
            if not data:
                raise EOFError("the template process is gone")
            message = _parse(json.loads(data))
            if isinstance(message, kind):
                return message
            if isinstance(message, ForkEnded):
                self._ended[message.pid] = message.code

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.process.kill()

    def forget(self) -> None:
        """After a fork of the parent: hold nothing of it."""
        self._control.close()
        # Not a child of the fork's: nothing to wait for, or to warn of.
        self.process.returncode = 0

    def close(self) -> None:
        """End the template. Its forks live on."""
        self.problem = self.problem or "it was closed"
        self.process.kill()
        self.process.wait()
        with self._lock:
            self._control.close()


class ForkedProcess:
    """A fork of a template, as the launcher knows its processes (`spawning.Process`)."""

    def __init__(self, server: ForkServer, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self._server = server
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Give the exit code, `None` while it runs; it is not let go of."""
        if self.returncode is None:
            try:
                return self._server.exit_code(self.pid, 0.0)
            except TimeoutError:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, let go of it and give the exit code.

        Raises:
            TimeoutError: It has not ended in time.
        """
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
            self._server.reap(self.pid)
        return self.returncode


def _await_end(pid: int, timeout_s: float | None) -> bool:
    """Wait until a process has ended, reaped or not; `False`: it has not in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
    finally:
        os.close(descriptor)


def _pass_on(stream: IO[bytes]) -> None:
    """Show what a template prints, which is what its imports complain of."""
    with stream:
        while data := stream.read(1 << 16):
            # A flow without standard error, as under `pythonw`, has nobody to complain to.
            if sys.stderr is not None:
                sys.stderr.write(data.decode("utf-8", errors="backslashreplace"))


def _parse(said: Mapping[str, Any]) -> TemplateMessage:
    kind = said["kind"]
    if kind == "ready":
        return TemplateReady(said["failed"], said["unfit"])
    if kind == "forked":
        return Forked(said["id"], said["pid"])
    if kind == "refused":
        return ForkRefused(said["id"], said["reason"])
    return ForkEnded(said["pid"], said["code"])
