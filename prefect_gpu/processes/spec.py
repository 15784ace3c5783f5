"""What starts a child, and the protocol of whoever starts it.

A `LaunchSpec` is a value that could travel to another machine; a `Launcher` makes a process of it.
No process id is part of what a launcher takes, and no descriptor but of memory files, whose bytes a
launcher that cannot pass them would send (`transport.FrameTransport` packs without any). The launcher of this machine is in
`launcher`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_gpu.processes.messages import Prepare
from prefect_gpu.processes.transport import Contents, Parcel


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything a child is made of."""

    task_name: str
    #: Variables to set in the child's environment, or to remove (`None`).
    environment: Mapping[str, str | None]
    prepare: Prepare
    #: The call, packed, or pickled as it is; empty for a calibration.
    call: Parcel | bytes = b""
    #: Like the parent's.
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    #: The hot standby that is kept for it, as it is called in the ledger; empty: none is.
    standby: str = ""


#: Title of a process that waits for its task; spaces leave room for the task's name.
STANDBY_TITLE = "standby".ljust(80)

#: Exit code of a process that waited ahead and cannot become its task's: a folder is gone, or what it
#: imported is not what the task would import.
UNSUITED_CODE = 75


@dataclass(frozen=True, slots=True)
class WarmSpec:
    """A child that is made ahead of its task, and what it imports until that comes."""

    #: Modules to import: `package.module`, or `package:name,name` for `from package import name, name`.
    modules: tuple[str, ...]
    #: All of its environment.
    environment: Mapping[str, str]
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A process exists. Its id is for measuring it on its own host, not for steering it.

    It may come a second time: the process before had been made ahead and ended before it took the call.
    """

    pid: int


@dataclass(frozen=True, slots=True)
class ChildRefused:
    """No process could be started."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ValueArrived:
    """The value that a `BodyEnded` announced."""

    data: Contents = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The process is gone; nothing follows."""

    #: Exit code; negative: the number of the signal that ended it.
    code: int
    #: End of its standard error.
    stderr_tail: str
    #: The stream ended inside a message.
    truncated: bool = False
    #: Why the launcher itself killed it; empty: it did not, or was asked to.
    killed_because: str = ""


#: Gets every message of one child in order, on the launcher's thread: it must not block.
Listener = Callable[[Any], None]


class ChildHandle(Protocol):
    """One child, from outside."""

    def answer(self, message: Any) -> None:
        """Send a message to the child; dropped if it is gone."""
        ...

    def terminate(self) -> None:
        """Ask the child to end."""
        ...

    def kill(self) -> None:
        """End the child and all that it started."""
        ...


class Launcher(Protocol):
    """Starts children. Safe to use from several threads."""

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a child; `listener` hears `ChildStarted` or `ChildRefused` first."""
        ...
