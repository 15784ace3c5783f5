"""How a child process is started: what is asked for, what is returned, and a fresh interpreter.

`launcher` knows a child's process by the protocol `Process` alone. `start_interpreter` starts a fresh
interpreter like this one; `fork_server` has the other way. Also here: the flags, paths, folder and
cores of this interpreter, which a child shall share. What the process is told is not covered; that is
the business of `launcher`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

#: What a child's interpreter runs.
BOOTSTRAP = Path(__file__).parents[1] / "child" / "bootstrap.py"


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What a new process must be."""

    #: Shown by `ps` after the interpreter and the script; not for a fork.
    title: str
    #: Descriptor of the child's end of its channel.
    channel: int
    #: The whole environment of the process.
    environment: Mapping[str, str]
    #: Folder to start in; empty: the parent's.
    cwd: str


class Process(Protocol):
    """A child process: leader of a session of its own, its output unbuffered pipes."""

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its session and its process group."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """The reading end of its standard output."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """The reading end of its standard error."""
        ...

    #: Exit code after `wait`; negative: the number of the signal that ended it. A fork of the parent
    #: sets it, since it must not wait for a process that is not its child.
    returncode: int | None

    def open_pidfd(self) -> int | None:
        """Open a descriptor that becomes readable when the process ends; the caller closes it.

        Returns:
            The descriptor, or `None` if the system has no such descriptors or none left.
        """
        ...

    def poll(self) -> int | None:
        """Return its exit code; `None`: it has not ended."""
        ...

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        ...


#: Starts a process. Runs on the launcher's thread; raises if the process cannot be started.
Spawner = Callable[[SpawnRequest], Process]


class Interpreter(subprocess.Popen[bytes]):
    """A fresh interpreter: a `Process`."""

    def open_pidfd(self) -> int | None:
        """See `Process.open_pidfd`."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None


def start_interpreter(request: SpawnRequest) -> Interpreter:
    """Start a fresh interpreter by exec, with the flags of this one: a `Spawner`.

    Raises:
        OSError: The system refuses, or the folder does not exist.
    """
    return Interpreter(
        [
            sys.executable,
            *interpreter_flags(),
            str(BOOTSTRAP),
            str(request.channel),
            request.title,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Unbuffered: what a fork or a slow reader leaves in a buffer of Python is lost.
        bufsize=0,
        pass_fds=(request.channel,),
        start_new_session=True,
        env=dict(request.environment),
        cwd=request.cwd or None,
    )


def import_paths() -> tuple[str, ...]:
    """Return `sys.path` for a child, which may start in another folder: `""` becomes this folder."""
    # Python ignores entries that are not text, such as a `Path`.
    return tuple(os.path.abspath(p) if p == "" else p for p in sys.path if isinstance(p, str))


def interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with (`-W`, `-X`, `-O`, …)."""
    # The function that multiprocessing uses for its own spawned children; there is no public one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def working_folder() -> str:
    """Return the working folder of this process; empty if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def environment_with(
    changes: Mapping[str, str | None], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return an environment with some variables set, or removed (`None`).

    Args:
        changes: Of the variables.
        base: The environment; `None`: that of this process.
    """
    changed = {**(os.environ if base is None else base), **changes}
    return {name: value for name, value in changed.items() if value is not None}
