"""Messages between a parent and its child process, and the order of the messages.

A child has one stream socket and one task:

    parent                                child
    ------                                -----
    boot frame: sys.path, argv    ───▶    sets up the interpreter like the parent's

                                          only a warm process (started before its tasks):
                                  ◀───    Warmed (modules are imported), or it ends; one that
                                          is forked gets no more, each fork begins as above

    Prepare                       ───▶    policy, allocation; a standby applies `Late`
    value frame: the `Call`       ───▶
                                  ◀───    Accepted; then applies the policy and reads the call
                                  ◀───    BodyStarted; `timeout_seconds` counts from here
                                  ◀───    CountersRead, LogEmitted, EventEmitted: any number
                                  ◀───    Asked, which blocks the child until
    Answered                      ───▶
    ReleaseUnused                 ───▶    at any time; answered by the sampler's thread, from
                                          before `BodyStarted` until the body's end
                                  ◀───    ReleasedUnused
                                  ◀───    BodyEnded
                                  ◀───    value frame: return value or exception; then it ends

Early ends:

- A standby ends before `BodyStarted`: the launcher starts a fresh process, without effect on the task.
- A fresh process ends before `BodyStarted`, or any process before its value is complete: the child has died.
- The call cannot be read, or the policy cannot be applied: `BodyEnded` with the exception, without `BodyStarted`.
- The child closes its channel without a value, or lives on after its value: the launcher kills the child after a grace
  time. A value that has arrived is kept.
- The child sends bytes that are no message: the launcher kills the child (`ProtocolError`).
- The parent ends, or closes the channel: the child ends when it reads or sends; the guardian kills the rest.

Messages are pickled. `values.transport` has frames and values, `launch_spec` the other events of a child.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_gpu.errors import ProtocolError, short_text
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.in_task import Allocation
from prefect_gpu.measurements import Mark, StepFacts
from prefect_gpu.processes.interpreter import InterpreterState
from prefect_gpu.values import Apart
from prefect_gpu.values.transport import MESSAGE, FrameBody, PackedValue, frame_header


class Message:
    """Base class of the messages, each sent in a frame of kind `transport.MESSAGE`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """First message to a child: the state to set up before the user's modules are imported."""

    policy: FrameworkPolicy
    allocation: Allocation
    #: Seconds between two readings of the frameworks' counters.
    counters_interval_s: float
    #: Changes since a standby was started; `None`: the process was started for this task.
    late: Late | None = None
    #: Libraries that the call needs, imported before the call is read unless this process is a standby or a fork.
    libraries: tuple[str, ...] = ()
    #: Modules of the flow's process that no fresh interpreter can import.
    private_modules: tuple[str, ...] = ()
    #: The user's other modules that the flow's process has loaded.
    users_modules: tuple[str, ...] = ()
    #: Functions and classes of these modules that are registered in Keras: module, qualified name by registered name.
    registered: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: State of the flow's interpreter when this message is made.
    interpreter: InterpreterState = field(default_factory=InterpreterState.read)


@dataclass(frozen=True, slots=True)
class Late:
    """Environment and paths of a task, for the standby to which the task is given."""

    #: Variables to set; `None`: to remove.
    environment: Mapping[str, str | None]
    #: The parent's current working folder (empty: keep the folder), arguments and paths.
    cwd: str
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A value of a Prefect transaction of the flow, which `Transaction.get` unpickles by its deep copy."""

    #: The pickled value, or the error that `get` raises because the value cannot be sent.
    held: Apart | Exception

    def __deepcopy__(self, memo: object) -> Any:
        if isinstance(self.held, Exception):
            raise self.held
        return self.held.load()


@dataclass(frozen=True, slots=True)
class Call:
    """The task's body and its arguments. Sent as a value frame, pickled by `values`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Prefect's serialised context without parameters, pickled since unpickling imports Prefect; `None`: no task run.
    context: Apart | None = None
    #: The flow's parameters, for the context. Pickled with the arguments, so that values in both are sent once.
    flow_parameters: Mapping[str, Any] = field(default_factory=dict)
    log_prints: bool = False
    #: Level of Prefect's loggers until Prefect is imported.
    log_level: str = "INFO"
    #: Import Prefect before the body, not only when Prefect is first needed.
    at_once: bool = False
    #: The task's parameters, for the context: the arguments by name.
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def read_context(self) -> dict[str, Any]:
        """Return Prefect's serialised context; empty: no context. Raise the unpickler's error if it cannot be read."""
        context: dict[str, Any] = {} if self.context is None else self.context.load()
        for name, parameters in (
            ("task_run_context", self.parameters),
            ("flow_run_context", self.flow_parameters),
        ):
            if context.get(name):
                context[name]["parameters"] = dict(parameters)
        return context


@dataclass(frozen=True, slots=True)
class Answered(Message):
    """The parent's answer to an `Asked`: a result, or the error for the child to raise."""

    result: Any = None
    error: BaseException | None = None
    #: Number of the question.
    number: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseUnused(Message):
    """The parent's request to return the frameworks' unused device memory to the driver."""

    #: Monotonic seconds (the same in all processes of a machine) after which the request has no effect.
    until_s: float


@dataclass(frozen=True, slots=True)
class Warmed(Message):
    """Report of a warm process about its imports. With a `problem` it ends by itself, even if it has a task."""

    #: Modules whose import failed. Side effects of such an import are unknown, so no task may run.
    failed: tuple[str, ...] = ()
    #: Action of a module at its import, such as a driver's start, after which a policy or a fork comes too late; empty:
    #: none.
    touched: str = ""
    #: Private memory of the process now, in bytes; 0: unknown.
    resident_bytes: int = 0

    @property
    def problem(self) -> str:
        """Reason why no task may run in the process or a fork of it; empty: a task may run."""
        if self.touched:
            return self.touched
        return f"{', '.join(self.failed)} could not be imported" if self.failed else ""


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The child has received `Prepare` and will read the call; none of the task's code has run."""


@dataclass(frozen=True, slots=True)
class BodyStarted(Message):
    """The child is about to call the body: `timeout_seconds` counts from here."""


@dataclass(frozen=True, slots=True)
class LogEmitted(Message):
    """A log record of the child, as prepared by Prefect's API handler."""

    log: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventEmitted(Message):
    """A Prefect event of the child, as JSON."""

    event: str


@dataclass(frozen=True, slots=True)
class CountersRead(Message):
    """The frameworks' memory counters, summed over frameworks and devices, and the body's steps and marks."""

    #: `None`: no framework is used.
    counters: Counters | None
    frameworks: tuple[str, ...]
    #: `None`: no step has ended.
    steps: StepFacts | None = None
    #: Marks and phases since the last message; times are seconds since the body's first line.
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked(Message):
    """A call of one of the parent's methods by name; the child waits for `Answered`."""

    method: str
    arguments: Mapping[str, Any]
    #: No other question of the task has it: a fresh process may get the answer to one of a standby that has ended.
    number: int = 0

    def answer(self, method: Callable[..., Any]) -> Answered:
        """Call a method with the arguments; return its result, or its exception, as the answer."""
        try:
            return Answered(method(**self.arguments), number=self.number)
        except Exception as error:
            return Answered(error=error, number=self.number)


@dataclass(frozen=True, slots=True)
class ReleasedUnused(Message):
    """The child's answer to a `ReleaseUnused`, with its `until_s`: unused memory was released where that was safe."""

    until_s: float


@dataclass(frozen=True, slots=True)
class ContextChanges:
    """Changes that a body has made to the transactions and assets of its task run, for the flow's process."""

    #: New values by name, for the task run's own transaction and then for each transaction around it.
    transactions: tuple[Mapping[str, Any], ...]
    #: Hooks that the body has added to the task run's own transaction.
    on_commit: tuple[Callable[..., Any], ...]
    on_rollback: tuple[Callable[..., Any], ...]
    #: Metadata of assets, by the asset's key.
    metadata: Mapping[str, Mapping[str, Any]]

    def __bool__(self) -> bool:
        return any((*self.transactions, self.on_commit, self.on_rollback, self.metadata))


@dataclass(frozen=True, slots=True)
class BodyEnded(Message):
    """The body has ended. The next frame is its value: the return value, or the exception."""

    #: The value is an exception.
    raised: bool
    #: From the exception or one of its causes; `None`: neither is an out-of-memory error.
    out_of_memory: OutOfMemory | None = None
    #: Traceback as text; empty: nothing was raised.
    traceback: str = ""
    #: The last readings, as in `CountersRead`.
    counters: Counters | None = None
    frameworks: tuple[str, ...] = ()
    steps: StepFacts | None = None
    marks: tuple[Mark, ...] = ()
    #: Largest resident set of the child so far, in bytes; 0: unknown.
    host_peak_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    #: Pickled `ContextChanges`; `None`: no changes, or the body raised.
    changes: PackedValue | None = None
    #: Device memory outside the frameworks' allocators, in bytes; `None`: not known, or the body raised.
    context_bytes: int | None = None


def encode(message: Message) -> bytes:
    """Return a message as the bytes of its frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return frame_header(MESSAGE, len(body)) + body


def decode(body: bytes | FrameBody) -> Message:
    """Return the message in a frame's body; raise `ProtocolError` if the bytes are not a message."""
    try:
        message = pickle.loads(body)
    except Exception as error:
        raise ProtocolError(
            f"a process sent a message that cannot be read ({short_text(error)})"
        ) from error
    if not isinstance(message, Message):
        raise ProtocolError(f"a process sent a {type(message).__name__}, which is no message")
    return message
