"""The messages between a parent and its child, and their order.

One child, one stream socket, one task:

    parent                                child
    ------                                -----
    boot frame: sys.path, argv    ───▶    the interpreter becomes like the parent's

                                          only a standby, a process started before its task:
                                  ◀───    Warmed (modules are imported), or it ends

    Prepare                       ───▶    policy, allocation; a standby catches up with its task
    value frame: the `Call`       ───▶
                                  ◀───    Accepted; then the policy is applied, the call is read
                                  ◀───    BodyStarted; `timeout_seconds` counts from here
                                  ◀───    CountersRead, LogEmitted, EventEmitted: any number
                                  ◀───    Asked, which blocks the child until
    Answered                      ───▶
    ReleaseUnused                 ───▶    at any time; answered by the sampler's thread, from
                                          before `BodyStarted` until the body's end
                                  ◀───    ReleasedUnused
                                  ◀───    BodyEnded
                                  ◀───    value frame: what was returned, or the exception
                                          the process ends

Early ends:

- Before `BodyStarted`: a standby is replaced by a fresh process, and the task does not notice. The end of a fresh
  process is a death.
- The call cannot be read, or the policy cannot be applied: `BodyEnded` with the exception, without `BodyStarted`.
- After `BodyStarted` and before the value is complete: a death, also inside a frame.
- The child closes its channel without a value, or lives on after its value: the launcher kills it after a grace time.
  A value that has arrived is kept.
- The child sends bytes that are no message: it is killed (`ProtocolError`).
- The parent ends, or closes the channel: the child ends once it reads or sends; the guardian ends the rest.

Messages are pickled. `transport` has frames and values, `launch_spec` the other events of a child.
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
    """Base of everything that may be sent in a frame of kind `transport.MESSAGE`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """First message: the state that must exist before any of the user's modules is imported."""

    policy: FrameworkPolicy
    allocation: Allocation
    #: Seconds between two readings of the frameworks' counters.
    counters_interval_s: float
    #: Changes since a standby was started; `None`: the process was started for this task.
    late: Late | None = None
    #: Libraries that the call needs. A process started for the task imports them before the call is read.
    libraries: tuple[str, ...] = ()
    #: Modules of the flow's process that no fresh interpreter can import.
    private_modules: tuple[str, ...] = ()
    #: The user's other modules that the flow's process has loaded.
    users_modules: tuple[str, ...] = ()
    #: Functions and classes of such modules in the registry of Keras: module and qualified name by registered name.
    registered: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: State of the flow's interpreter when this message is made.
    interpreter: InterpreterState = field(default_factory=InterpreterState.read)


@dataclass(frozen=True, slots=True)
class Late:
    """Facts that a standby learns only with its task."""

    #: Variables to set, or to remove (`None`).
    environment: Mapping[str, str | None]
    #: The parent's working folder, arguments and paths now. Empty `cwd`: keep the folder.
    cwd: str
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A value of one of the flow's transactions, unpickled for each `Transaction.get`, which copies it anyway."""

    #: The value, or, if it cannot be sent, the error that `get` raises.
    held: Apart | Exception

    def __deepcopy__(self, memo: object) -> Any:
        if isinstance(self.held, Exception):
            raise self.held
        return self.held.load()


@dataclass(frozen=True, slots=True)
class Call:
    """The task's body and its arguments; travels as a value, pickled by `values`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Prefect's serialised context, without parameters, still pickled since unpickling imports Prefect. `None`: run
    #: without Prefect.
    context: Apart | None = None
    #: The flow's parameters in that context. They travel once, also if they are arguments of the task.
    flow_parameters: Mapping[str, Any] = field(default_factory=dict)
    #: `print` goes to the run's log.
    log_prints: bool = False
    #: Level of Prefect's loggers, until Prefect is imported.
    log_level: str = "INFO"
    #: Prefect is imported before the body; otherwise when it is first needed.
    at_once: bool = False
    #: The task's parameters in that context, which are the arguments by name. They travel once.
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def read_context(self) -> dict[str, Any]:
        """Return Prefect's serialised context; empty: there is no context. Raise if it cannot be unpickled here."""
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
    """Answer to an `Asked`: a result, or the error to raise."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ReleaseUnused(Message):
    """Ask the child to return the frameworks' unused device memory to the driver. No effect after `until_s`."""

    #: Latest begin, in monotonic seconds, which all processes of a machine share.
    until_s: float


@dataclass(frozen=True, slots=True)
class Warmed(Message):
    """A standby has imported its modules. With a problem the standby ends by itself, even if it was given a task."""

    #: Modules whose import failed. Their side effects are unknown, so no task may run here.
    failed: tuple[str, ...] = ()
    #: Action of a module at its import, after which a policy comes too late; empty: none.
    touched: str = ""
    #: Private memory of the process now, in bytes; 0: unknown.
    resident_bytes: int = 0

    @property
    def problem(self) -> str:
        """Why no task may run here; empty: tasks may run."""
        if self.touched:
            return self.touched
        return f"{', '.join(self.failed)} could not be imported" if self.failed else ""


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The child has received its `Prepare` and reads the call next; nothing of the task has run."""


@dataclass(frozen=True, slots=True)
class BodyStarted(Message):
    """The body's first line is next: `timeout_seconds` counts from here."""


@dataclass(frozen=True, slots=True)
class LogEmitted(Message):
    """A log record as Prefect's API handler prepared it."""

    log: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventEmitted(Message):
    """A Prefect event, as JSON."""

    event: str


@dataclass(frozen=True, slots=True)
class CountersRead(Message):
    """The frameworks' own counters, summed over frameworks and devices, and the body's steps so far."""

    #: `None`: no framework is used.
    counters: Counters | None
    frameworks: tuple[str, ...]
    #: Facts about the steps so far; `None`: no step has ended.
    steps: StepFacts | None = None
    #: Marks and phases since the last message. Their times are seconds since the body's first line.
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked(Message):
    """A question that blocks the child until an `Answered` comes."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReleasedUnused(Message):
    """Answer to a `ReleaseUnused`: unused memory was released where that was safe."""

    #: Copied from the request.
    until_s: float


@dataclass(frozen=True, slots=True)
class ContextChanges:
    """Changes that a body has made to Prefect's contexts of its run, for the flow's process."""

    #: Values set by name: in the task run's own transaction, then in each transaction around it.
    transactions: tuple[Mapping[str, Any], ...]
    #: Hooks that the body has added to its own transaction.
    on_commit: tuple[Callable[..., Any], ...]
    on_rollback: tuple[Callable[..., Any], ...]
    #: Metadata of assets, by the asset's key.
    metadata: Mapping[str, Mapping[str, Any]]

    def __bool__(self) -> bool:
        """Return whether anything was changed."""
        return any((*self.transactions, self.on_commit, self.on_rollback, self.metadata))


@dataclass(frozen=True, slots=True)
class BodyEnded(Message):
    """The body has ended. A value's frame follows: the return value, or the exception."""

    #: `True`: the value is an exception to raise in the parent.
    raised: bool
    #: The missing device memory, from the exception or one of its causes; `None`: neither is an out-of-memory.
    out_of_memory: OutOfMemory | None = None
    #: The traceback as text; empty if nothing was raised.
    traceback: str = ""
    #: Last counters, `None` where no framework was used.
    counters: Counters | None = None
    frameworks: tuple[str, ...] = ()
    #: As in `CountersRead`.
    steps: StepFacts | None = None
    marks: tuple[Mark, ...] = ()
    #: Largest resident set of the child so far, in bytes; 0: unknown.
    host_peak_bytes: int = 0
    #: Metrics that the body has reported, by name.
    metrics: dict[str, float] = field(default_factory=dict)
    #: Pickled `ContextChanges`; `None`: no changes, or the body raised.
    changes: PackedValue | None = None


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return frame_header(MESSAGE, len(body)) + body


def decode(body: bytes | FrameBody) -> Message:
    """Return the message in a frame's body; raise `ProtocolError` if the bytes are no message."""
    try:
        message = pickle.loads(body)
    except Exception as error:
        raise ProtocolError(
            f"a process sent a message that cannot be read ({short_text(error)})"
        ) from error
    if not isinstance(message, Message):
        raise ProtocolError(f"a process sent a {type(message).__name__}, which is no message")
    return message
