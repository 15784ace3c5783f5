"""The parent's end of a template process: asks it for forks, hears of them and of their ends.

What the template does is in `template`. Nothing here blocks for longer than the template takes to
read its socket: it is used from the launcher's one thread, which watches `fileno` and calls `read`.
"""

from __future__ import annotations

import array
import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prefect_gpu.errors import PolicyError
from prefect_gpu.processes.interpreter import interpreter_flags

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


TemplateMessage = TemplateReady | Forked | ForkRefused | ForkEnded


class ForkServer:
    """One template process. For one thread at a time, who also reads `process.stdout` and `stderr`.

    Args:
        modules: What it imports (`check_modules`).
        sys_path: Where it looks for them.
        environment: Its own variables.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        sys_path: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> None:
        # Of messages: a request arrives whole, with its descriptors.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [
                    sys.executable,
                    *interpreter_flags(),
                    str(Path(__file__).with_name("template.py")),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                # Pipes, as its forks have: what Python knows of a stream (that it could be sought in,
                # say) they inherit.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=dict(environment),
            )
        boot = {"sys_path": sys_path, "modules": modules}
        self._control.send(json.dumps(boot).encode())
        #: What it said when it was ready; `None`: it is not yet.
        self.ready: TemplateReady | None = None
        self._next_id = 0

    def fileno(self) -> int:
        """Give the descriptor that is readable when there is something to `read`."""
        return self._control.fileno()

    def request(
        self,
        channel: socket.socket,
        stdout: IO[bytes],
        stderr: IO[bytes],
        environment: Mapping[str, str],
        cwd: str,
        title: str,
    ) -> int:
        """Ask for a fork.

        Args:
            channel: The child's end of its channel; the caller closes its own copy.
            stdout: Where the child prints; the caller closes its own copy.
            stderr: Likewise.
            environment: All of the child's variables.
            cwd: Its folder; empty: the template's.
            title: Name of the task.

        Returns:
            What `Forked` or `ForkRefused` will name it by.

        Raises:
            OSError: The template is gone, or a variable is longer than a message may be.
        """
        self._next_id += 1
        request = {
            "kind": "fork",
            "id": self._next_id,
            "environment": dict(environment),
            "cwd": cwd,
            "title": title,
        }
        descriptors = array.array("i", (channel.fileno(), stdout.fileno(), stderr.fileno()))
        self._control.sendmsg(
            [json.dumps(request).encode()],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
        )
        return self._next_id

    def reap(self, pid: int) -> None:
        """Let go of a fork that has ended: from now on its process id may be another's."""
        try:
            self._control.send(json.dumps({"kind": "reap", "pid": pid}).encode())
        except OSError:
            # The template is gone; whoever inherits its forks reaps them.
            return

    def read(self) -> Iterator[TemplateMessage]:
        """Give what the template has said, without waiting.

        Raises:
            EOFError: It is gone.
        """
        while True:
            try:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("the template process is gone")
            message = _parse(json.loads(data))
            if isinstance(message, TemplateReady):
                self.ready = message
            yield message

    def forget(self) -> None:
        """After a fork of the parent: hold nothing of it."""
        self._close_own()
        self.process.returncode = 0

    def close(self) -> None:
        """End the template. Its forks live on."""
        self._close_own()
        self.process.kill()
        self.process.wait()

    def _close_own(self) -> None:
        self._control.close()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _parse(said: Mapping[str, Any]) -> TemplateMessage:
    kind = said["kind"]
    if kind == "ready":
        return TemplateReady(said["failed"], said["unfit"])
    if kind == "forked":
        return Forked(said["id"], said["pid"])
    if kind == "refused":
        return ForkRefused(said["id"], said["reason"])
    return ForkEnded(said["pid"], said["code"])
