"""Specs from which child processes are started, the events of these processes, and the protocol of launchers.

`launcher` starts processes on this machine, `cluster.flow_side` on nodes. `messages` has a child's messages.
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
    """Everything needed to start the process of a task, also on another machine."""

    task_name: str
    #: Variables to set in the child's environment; `None`: to remove.
    environment: Mapping[str, str | None]
    prepare: Prepare
    call: PackedValue
    #: The parent's working folder, arguments and paths.
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    #: Devices and request of the task, for a launcher that has them confirmed on another machine; `None`: unknown.
    placement: Placement | None = None
    request: Request | None = None


#: Title of standbys in `ps`, also once they have a task.
STANDBY_TITLE = "standby"

#: Title in `ps` of warm processes that are forked, and of their forks.
SOURCE_TITLE = "source of forks"


@dataclass(frozen=True, slots=True)
class WarmSpec:
    """Everything needed to start a warm process, which imports modules before its tasks are known."""

    #: Modules to import: `package.module`, or `package:name,name` for `from package import name, name`.
    modules: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str = ""
    argv: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    #: Descriptor to inherit, of the socket on which the parent requests forks; `None`: the process serves one task.
    control: int | None = None


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A process was started. Sent again for the fresh process after a standby ended before the task's body began."""

    #: For measurements on the process's host, not for signals.
    pid: int


@dataclass(frozen=True, slots=True)
class ChildRefused:
    """No process could be started, or no messages can be exchanged with the process."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ValueArrived:
    """The value that a `BodyEnded` announced."""

    data: ReceivedValue = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The process has ended. The last event of a child."""

    #: Exit code; negative: number of the signal that ended the process.
    code: int
    stderr_tail: str
    #: The child's stream ended inside a message.
    truncated: bool = False
    #: Reason why the launcher itself decided to kill the process; empty: it did not.
    killed_because: str = ""


Heard = ChildStarted | ChildRefused | ValueArrived | ChildExited | Message

#: Called with each event and message of one child, in order, on the launcher's thread. Must not block.
Listener = Callable[[Heard], None]


def tell(listener: Listener, message: Heard) -> None:
    """Call a listener with an event or message; log exceptions of the listener."""
    try:
        listener(message)
    except Exception:
        logger.exception("a listener of a GPU task's process raised on %s", type(message))


class ChildHandle(Protocol):
    """Handle of one child process, as `Launcher.start` returns it."""

    def answer(self, message: Any) -> None:
        """Send a message to the child, or drop the message if the child has ended."""

    def kill(self) -> None:
        """Kill the child and every process that it started."""


class Launcher(Protocol):
    """Starts child processes. Safe to use from several threads."""

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a child, or raise `CapacityError`; `listener` first gets `ChildStarted` or `ChildRefused`."""


class AnnouncedTask(Launcher, Protocol):
    """The launcher of one submitted task, for which a standby may be kept until the task starts."""

    def retract(self) -> None:
        """Keep no standby for the task any longer; no effect once the task has had a process."""
