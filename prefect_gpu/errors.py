"""Every error of this package, in a tree split by who must act.

    PrefectGPUError
    ├── PolicyError            the author of the task: a tag is wrong or contradicts another
    ├── ResultError            the author of the task: a value cannot travel between processes
    ├── CapacityError          whoever runs the flow: the machine cannot do what was asked
    │   ├── PlacementError         no device here can ever hold the task
    │   │   └── PlacementTimeoutError  none could in the time that `gpu:wait` allows
    │   ├── DeviceError            a driver or a device does not answer, or is not there
    │   └── FrameworkError         a framework in the child cannot carry out the policy
    ├── ChildDiedError         the task or the operating system: the process is gone
    ├── ChildTimeoutError      the task: it ran longer than `timeout_seconds`
    ├── BudgetExceededError    the task: its process took more device memory than its budget
    └── ProtocolError          us: a message that does not follow our own protocol

It does not hold what a task itself raises: that travels unchanged.

Errors that cross the pipe pass their constructor's positional arguments unchanged to
`super().__init__` and build their text in `__str__`; otherwise they would pickle and then fail to
unpickle.
"""

from __future__ import annotations

from prefect_gpu.units import format_bytes


class PrefectGPUError(Exception):
    """Base of all errors of this package."""


class PolicyError(PrefectGPUError, ValueError):
    """A tag that cannot be read, is unknown or contradicts another.

    Args:
        given: What was written, `gpu:memory=8`.
        problem: What is wrong with it.
        accepted: What would have been accepted.
    """

    def __init__(self, given: str, problem: str, accepted: str) -> None:
        super().__init__(given, problem, accepted)
        self.given = given
        self.problem = problem
        self.accepted = accepted

    def __str__(self) -> str:
        return f"{self.given}: {self.problem}; accepted: {self.accepted}"


#: In place of a type's name, for a value that was pickled and cannot be unpickled.
REBUILT = "value that cannot be rebuilt"

#: In place of a type's name, for a value for which there is no memory on its way.
NO_ROOM = "value that finds no memory"


class ResultError(PrefectGPUError):
    """A value that cannot travel between the parent and the child.

    Args:
        what: "return value", "exception", "argument" or "function".
        where: Path inside the value, `result['model'].lock`.
        type_name: Qualified name of the type that cannot be pickled; `REBUILT` or `NO_ROOM` where it
            is not for its type.
        reason: What pickle said.
    """

    def __init__(self, what: str, where: str, type_name: str, reason: str) -> None:
        super().__init__(what, where, type_name, reason)
        self.what = what
        self.where = where
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        if self.type_name == REBUILT:
            return (
                f"the {self.what} of a GPU task cannot be rebuilt on the other side: {self.reason}"
            )
        if self.type_name == NO_ROOM:
            return (
                f"the {self.what} of a GPU task finds no memory of the machine for its way between "
                f"processes ({self.reason}); free some, run fewer tasks at a time, or pass the path "
                f"of a file"
            )
        text = (
            f"the {self.what} of a GPU task cannot be sent between processes: {self.where} is a "
            f"{self.type_name}, which cannot be pickled ({self.reason})"
        )
        if self.what == "return value":
            text += "; return plain data, or write it to a file inside the task and return the path"
        elif self.what in ("argument", "function"):
            text += "; make it inside the task, or pass what it is made from"
        return text


class CapacityError(PrefectGPUError):
    """The machine cannot do what was asked."""


class PlacementError(CapacityError):
    """No device here can ever hold the task.

    Args:
        problem: What was asked and why it cannot be had, with the limit.
        per_device: One reason for each device, `"GPU-1a2b: 23.7GiB in all"`.
    """

    def __init__(self, problem: str, per_device: tuple[str, ...] = ()) -> None:
        super().__init__(problem, per_device)
        self.problem = problem
        self.per_device = per_device

    def __str__(self) -> str:
        if not self.per_device:
            return self.problem
        return f"{self.problem} [{'; '.join(self.per_device)}]"


class PlacementTimeoutError(PlacementError):
    """No device was had within the time that `gpu:wait` allows."""


class DeviceError(CapacityError):
    """A driver or device that does not answer, is not there or cannot be named so.

    Args:
        problem: What was asked for and what answered.
    """


class FrameworkError(CapacityError):
    """A framework in the child that cannot carry out the policy.

    Args:
        framework: Its name as in `gpu:framework`.
        problem: What was asked of it and what it did.
    """

    def __init__(self, framework: str, problem: str) -> None:
        super().__init__(framework, problem)
        self.framework = framework
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.framework}: {self.problem}"


class ChildDiedError(PrefectGPUError):
    """The process of a task ended without an answer.

    Args:
        task_name: Name of the task.
        pid: Process id of the child.
        how: "was killed by SIGKILL", "ended with exit code 3".
        detail: Last memory sample and possible causes, each worded as possible.
        stderr_tail: End of what the child wrote to standard error.
    """

    def __init__(
        self, task_name: str, pid: int, how: str, detail: str = "", stderr_tail: str = ""
    ) -> None:
        super().__init__(task_name, pid, how, detail, stderr_tail)
        self.task_name = task_name
        self.pid = pid
        self.how = how
        self.detail = detail
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        text = f"the process of GPU task {self.task_name!r} (pid {self.pid}) {self.how}"
        if self.detail:
            text += f"; {self.detail}"
        if self.stderr_tail:
            text += f"\nend of its standard error:\n{self.stderr_tail}"
        return text


class ChildTimeoutError(PrefectGPUError, TimeoutError):
    """The body ran longer than `timeout_seconds`; its process was killed.

    Args:
        task_name: Name of the task.
        timeout_s: The limit, in seconds from the body's first line.
    """

    def __init__(self, task_name: str, timeout_s: float) -> None:
        super().__init__(task_name, timeout_s)
        self.task_name = task_name
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return (
            f"GPU task {self.task_name!r} ran longer than timeout_seconds={self.timeout_s:g}; "
            f"its process was killed"
        )


class BudgetExceededError(PrefectGPUError):
    """The process of a task took more of a device than its budget.

    Args:
        task_name: Name of the task.
        budget_bytes: Its budget on the device, the context included.
        seen_bytes: What the device showed for it.
    """

    def __init__(self, task_name: str, budget_bytes: int, seen_bytes: int) -> None:
        super().__init__(task_name, budget_bytes, seen_bytes)
        self.task_name = task_name
        self.budget_bytes = budget_bytes
        self.seen_bytes = seen_bytes

    def __str__(self) -> str:
        return (
            f"the process of GPU task {self.task_name!r} held {format_bytes(self.seen_bytes)} of a "
            f"device, above its budget of {format_bytes(self.budget_bytes)}"
        )


class ProtocolError(PrefectGPUError):
    """A message between parent and child that does not follow our protocol: our fault."""
