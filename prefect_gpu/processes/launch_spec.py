"""Specs from which children are started, the events of their processes, and the protocol of launchers.

`launcher` starts processes on this machine, `cluster.flow_side` on nodes. `messages` has the messages of a child.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_gpu.processes.messages import Message, Prepare
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.values.transport import PackedValue, ReceivedValue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """All that is needed to start the process of a task. The spec can be sent to another machine."""

    task_name: str
    #: Variables to set in the child's environment, or to remove (`None`).
    environment: Mapping[str, str | None]
    prepare: Prepare
    call: PackedValue
    #: The parent's working folder, arguments and paths.
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    #: Devices and request of the task, which a launcher of another machine has confirmed there; `None`: unknown.
    placement: Placement | None = None
    request: Request | None = None


#: Title in `ps` of a process that was started ahead of its task, also once it has a task.
STANDBY_TITLE = "standby"

#: Exit code of a standby that cannot run its task: a folder is gone, or the task would import other modules.
UNSUITED_CODE = 75


@dataclass(frozen=True, slots=True)
class WarmSpec:
    """All that is needed to start a standby: a process that imports modules before its task is known."""

    #: Modules to import: `package.module`, or `package:name,name` for `from package import name, name`.
    modules: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A process exists. Sent again if the first process was a standby that ended before it accepted the task."""

    #: For measurements on the process's own host, not for signals.
    pid: int


@dataclass(frozen=True, slots=True)
class ChildRefused:
    """No process could be started."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ValueArrived:
    """The value that a `BodyEnded` announced."""

    data: ReceivedValue = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The process has ended; nothing follows."""

    #: Exit code; negative: the number of the signal that ended it.
    code: int
    stderr_tail: str
    #: The stream of messages ended inside a message.
    truncated: bool = False
    #: Why the launcher killed the process by its own decision; empty: it did not.
    killed_because: str = ""


Heard = ChildStarted | ChildRefused | ValueArrived | ChildExited | Message

#: Called with each message of one child, in order, on the launcher's thread: it must not block.
Listener = Callable[[Heard], None]


def tell(listener: Listener, message: Heard) -> None:
    """Call a listener; log its exceptions."""
    try:
        listener(message)
    except Exception:
        logger.exception("a listener of a GPU task's process raised on %s", type(message))


class ChildHandle(Protocol):
    """Handle of one child, for its owner."""

    def answer(self, message: Any) -> None:
        """Send a message to the child; it is dropped if the child has ended."""

    def kill(self) -> None:
        """Kill the child and every process that it started."""


class Launcher(Protocol):
    """Starts children. Safe to use from several threads."""

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a child; `listener` is called with `ChildStarted` or `ChildRefused` first.

        Raises:
            CapacityError: The launcher cannot run; the listener is not called.
        """


class AnnouncedTask(Launcher, Protocol):
    """The launcher of one submitted task, for which a process may be started ahead."""

    def retract(self) -> None:
        """Keep no process for the task any longer; without effect once a process was started for it."""
