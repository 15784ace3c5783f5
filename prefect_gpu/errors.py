"""The errors of this package, in a tree with the person or program that can act on each.

    PrefectGPUError
    ├── PolicyError            the author of the task: a tag is wrong or contradicts another
    ├── SettingError           the author of the flow: an argument of the runner, or a setting, cannot be read
    ├── ResultError            the author of the task: a value cannot travel between processes
    ├── CapacityError          the operator of the machine: a request exceeds the machine
    │   ├── PlacementError         no device here can ever hold the task
    │   │   └── PlacementTimeoutError  no device was free within `gpu:wait`
    │   ├── DeviceError            a driver or a device does not answer, or is not there
    │   └── FrameworkError         a framework in the child cannot carry out the policy
    ├── ChildDiedError         the task or the operating system: the process is gone
    ├── ChildTimeoutError      the task: it ran longer than `timeout_seconds`
    ├── BudgetExceededError    the task: its process used more device memory than its budget
    ├── ReportError            the reader: the reports of a flow run cannot be read
    └── ProtocolError          this package: a message does not follow its protocol

Exceptions that a task's body raises reach the flow unchanged, so the tree has none of them.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from prefect_gpu.units import format_bytes

#: Most characters of an error's text in its `repr`.
REPR_LIMIT = 60


class PrefectGPUError(Exception):
    """Base of all errors of this package."""

    def __repr__(self) -> str:
        # Prefect logs the `repr` above a traceback whose last line has the whole text (3.8.8).
        said = textwrap.shorten(str(self), REPR_LIMIT, placeholder=" …")
        return f"{type(self).__name__}({said!r})"

    def __post_init__(self) -> None:
        # Pickle calls the class with `args` in the other process.
        self.args = tuple(vars(self).values())


@dataclass(eq=False, repr=False)
class PolicyError(PrefectGPUError, ValueError):
    """A tag cannot be read, is unknown or contradicts another."""

    #: The tag or argument, as in `gpu:memory=8`.
    given: str
    #: The fault of the tag or argument.
    problem: str
    #: The accepted values.
    accepted: str

    def __str__(self) -> str:
        return f"{self.given}: {self.problem}; accepted: {self.accepted}"


class SettingError(PrefectGPUError, ValueError):
    """A setting, or an argument of `GPUTaskRunner` or `serve`, cannot be read. The text has the accepted values."""


#: `ResultError.type_name` of a value that cannot be unpickled, or for which there is not enough memory.
REBUILT = "value that cannot be rebuilt"
NO_ROOM = "value that finds no memory"


@dataclass(eq=False, repr=False)
class ResultError(PrefectGPUError):
    """A value cannot travel between the parent and the child."""

    #: "return value", "exception", "argument", "function" or "transaction".
    what: str
    #: Path inside the value, as in `result['model'].lock`.
    where: str
    #: Qualified name of the type that cannot be pickled, or `REBUILT` or `NO_ROOM`.
    type_name: str
    #: The message of the underlying error.
    reason: str

    def __str__(self) -> str:
        value = f"the {self.what} of a GPU task"
        if self.type_name == REBUILT:
            return f"{value} cannot be rebuilt on the other side: {self.reason}"
        if self.type_name == NO_ROOM:
            return (
                f"{value} finds no memory of the machine for its way between processes ({self.reason}); "
                f"free some, run fewer tasks at a time, or pass the path of a file"
            )
        text = (
            f"{value} cannot be sent between processes: {self.where} is a {self.type_name}, which "
            f"cannot be pickled ({self.reason})"
        )
        if self.what == "return value":
            text += "; return plain data, or write it to a file inside the task and return the path"
        elif self.what in ("argument", "function"):
            text += "; make it inside the task, or in a module that the script imports"
        return text


class CapacityError(PrefectGPUError):
    """A request exceeds the machine: its devices, frameworks, processes, threads or descriptors."""


@dataclass(eq=False, repr=False)
class PlacementError(CapacityError):
    """No device here can ever hold the task."""

    #: The request and the reason of its refusal, with the limit.
    problem: str
    #: One reason for each device, as in `"GPU-1a2b: 23.7GiB in all"`.
    per_device: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.per_device:
            return self.problem
        return f"{self.problem} [{'; '.join(self.per_device)}]"


class PlacementTimeoutError(PlacementError):
    """The task got no device within the time that `gpu:wait` allows."""


class DeviceError(CapacityError):
    """A driver or a device does not answer, is not there, or its name cannot be read."""


@dataclass(eq=False, repr=False)
class FrameworkError(CapacityError):
    """A framework in the child cannot carry out the policy."""

    #: Name of the framework as in `gpu:framework`.
    framework: str
    #: The demanded policy, and the framework's behaviour.
    problem: str

    def __str__(self) -> str:
        return f"{self.framework}: {self.problem}"


@dataclass(eq=False, repr=False)
class NodeRefusedError(PrefectGPUError):
    """The chosen devices of a cluster's node are no longer free; the task is placed again."""

    node: str
    #: The missing memory or device.
    problem: str

    def __str__(self) -> str:
        return f"node {self.node} of the cluster refused the task: {self.problem}"


@dataclass(eq=False, repr=False)
class ChildDiedError(PrefectGPUError):
    """The process of a task ended without an answer."""

    task_name: str
    pid: int
    #: How the process ended: "was killed by SIGKILL", "ended with exit code 3".
    how: str
    #: Last memory sample and possible causes, each worded as possible.
    detail: str = ""
    #: End of the child's standard error, which is also in the task run's log and not in the text of the error.
    stderr_tail: str = ""

    def __str__(self) -> str:
        text = f"the process of GPU task {self.task_name!r} (pid {self.pid}) {self.how}"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(eq=False, repr=False)
class ChildTimeoutError(PrefectGPUError, TimeoutError):
    """The body ran longer than `timeout_seconds`; its process was killed."""

    task_name: str
    #: The limit, in seconds from the first line of the body.
    timeout_s: float

    def __str__(self) -> str:
        limit = f"timeout_seconds={self.timeout_s:g}"
        return f"GPU task {self.task_name!r} ran longer than {limit}; its process was killed"

    def __repr__(self) -> str:
        # Prefect shows the `repr` in the message of the task run's state (3.8.8).
        return f"{type(self).__name__}: {self}"


@dataclass(eq=False, repr=False)
class BudgetExceededError(PrefectGPUError):
    """The process of a task used more of a device than its budget."""

    task_name: str
    #: Budget on the device, context included.
    budget_bytes: int
    #: Bytes of the process on the device, as read.
    seen_bytes: int

    def __str__(self) -> str:
        return (
            f"the process of GPU task {self.task_name!r} held {format_bytes(self.seen_bytes)} of a "
            f"device, above its budget of {format_bytes(self.budget_bytes)}"
        )


class ReportError(PrefectGPUError):
    """The reports of a flow run cannot be read or written. The text says why."""


class ProtocolError(PrefectGPUError):
    """A message between parent and child does not follow the protocol: a fault of this package."""


def short_text(error: BaseException) -> str:
    """Return the type and the text of an error, cut to 500 characters; no error in making the text is raised."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, whose text cannot be had"
    return text if len(text) <= 500 else text[:500] + "…"


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error. Python 3.10 has no method for it, and shows none in a traceback."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]
