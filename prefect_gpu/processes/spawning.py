"""How a process comes to be: what is asked for, what is given back, and the plain way to do it.

The launcher knows a process by `Process` alone, so another way to make one (from a server that forks,
say) is another `Spawner`. What the process then hears is the launcher's business.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from prefect_gpu.processes.interpreter import interpreter_flags

#: What a child's interpreter runs.
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What a new process must be."""

    #: Shown by `ps` beside the bootstrap.
    title: str
    #: Descriptor of the child's end of its channel; under the same number there.
    channel: int
    #: All of its environment.
    environment: Mapping[str, str]
    #: Folder to start in; empty: the parent's.
    cwd: str


class Process(Protocol):
    """A child of this process: leader of a session of its own, its streams unbuffered pipes."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Reads what it prints."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """Reads its standard error."""
        ...

    #: Exit code once it was waited for; negative: the signal that ended it. May be set, so that a
    #: fork of the parent does not wait for what is not its child.
    returncode: int | None

    def poll(self) -> int | None:
        """Give the exit code, `None` while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and give the exit code."""
        ...


#: Starts a process. Called on the launcher's thread; raises if there can be none.
Spawner = Callable[[SpawnRequest], Process]


def spawn_fresh(request: SpawnRequest) -> Process:
    """Start a fresh interpreter by exec, with this one's flags.

    Raises:
        OSError: The system refuses, or the folder is gone.
    """
    return subprocess.Popen(
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
        # Raw: what a fork or a slow reader leaves in a buffer of Python's is lost.
        bufsize=0,
        pass_fds=(request.channel,),
        start_new_session=True,
        env=dict(request.environment),
        cwd=request.cwd or None,
    )
