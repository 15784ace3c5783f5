"""State machine of one child process (a message in, actions out), and the next step after its end. Pure.

`ProcessRun` decides how a process ends, when it is killed, and the shown state of its task run. `attempt` reads
messages and carries out actions. Text for an outcome is in `run_log`.

    STARTING ──BodyBegan──▶ RUNNING ──BodyEnded──▶ SENDING ──ValueArrived──▶ FINISHED
        └──── TimedOut, Cancelled, … ──▶ KILLED, LOST ──Died──▶ FINISHED

`next_step` chooses another process, or the task run's error, after a process without a value; `submission` carries that
out. The budget after an out-of-memory is in `scheduling.ladder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from prefect_gpu.broker.phases import IllegalTransition
from prefect_gpu.errors import (
    NodeRefusedError,
    PlacementError,
    PlacementTimeoutError,
    ProtocolError,
)
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ValueArrived
from prefect_gpu.processes.messages import Asked, BodyEnded, EventEmitted, LogEmitted
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.scheduling import ladder
from prefect_gpu.scheduling.ladder import Cause, Evidence, NextAttempt, OomHistory
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import format_seconds
from prefect_gpu.values.transport import ReceivedValue

# Outcomes. An outcome decided by another module is that module's message. `traceback` is the child's, as text; `None`:
# the body did not raise the error.


@dataclass(frozen=True, slots=True)
class Done:
    """The body has returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The body raised, its value is unreadable, or the process sent bytes that are no message."""

    error: Exception
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The body raised for lack of device memory, or a device shows more memory than the process's budget."""

    error: Exception
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    """The body raised `SystemExit` or another `BaseException`, which would end the flow if raised in its process."""

    error: BaseException
    traceback: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process has ended without a value."""

    exited: ChildExited
    #: Cause of a SIGKILL that the runner did not send; `None`: there was no such signal.
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The body ran longer than `timeout_seconds`: the last `SetDeadline` has passed."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The flow run ends before the task run."""


@dataclass(frozen=True, slots=True)
class EndedForOthers:
    """The broker ends a first run: its device (`where`: label) runs short of memory for the first runs on it."""

    where: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The process is to be killed: the driver lost its state, or no device is left for it; `why` is text for people."""

    why: str


Failure = (
    Failed | OutOfMemory | Quit | Died | TimedOut | Cancelled | EndedForOthers | Lost | ChildRefused
)
Outcome = Done | Failure

# Other messages.


@dataclass(frozen=True, slots=True)
class BodyBegan:
    """The body's first line is about to run, at `at_s` monotonic seconds."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Suspended:
    """The process was suspended at `at_s` (monotonic seconds)."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The process has run again since `at_s` (monotonic seconds)."""

    at_s: float


@dataclass(frozen=True, slots=True)
class AwaitsReturn:
    """The suspended process waits to resume."""

    reason: Reason


ChildMessage = (
    BodyBegan | Asked | LogEmitted | EventEmitted | BodyEnded | ValueArrived | ChildRefused | Died
)
MachineMessage = Suspended | Resumed | AwaitsReturn | Lost | Cancelled | EndedForOthers
RunMessage = ChildMessage | MachineMessage | Failed | OutOfMemory | TimedOut

# Actions.


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process. `bars_moves`: from now on no process of its task is suspended."""

    bars_moves: bool = False


@dataclass(frozen=True, slots=True)
class ShowRunning:
    """Show the task run as running."""


@dataclass(frozen=True, slots=True)
class ShowAwaiting:
    """Show the task run as waiting for a reason."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Warn:
    """Log a warning on the task run."""

    text: str


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Send `TimedOut` if no other message comes before `at_s` monotonic seconds; `None`: no deadline."""

    at_s: float | None


@dataclass(frozen=True, slots=True)
class OpenValue:
    """Unpickle the value; `outcome_of` is the outcome. No further message is handled."""

    ended: BodyEnded
    data: ReceivedValue


@dataclass(frozen=True, slots=True)
class Finish:
    """The outcome is known; no further message is handled."""

    outcome: Outcome


#: Messages that are actions, too: forward a log record or an event, answer a question.
Served = Asked | LogEmitted | EventEmitted
Action = Kill | ShowRunning | ShowAwaiting | Warn | SetDeadline | OpenValue | Served | Finish


class Phase(Enum):
    """The phases of a process."""

    STARTING = "no line of the body has run"
    RUNNING = "the body runs"
    SENDING = "the body has ended, and its value is on the way"
    KILLED = "it was killed, and its end is awaited"
    LOST = "it was killed since it was lost in a move; a value that is on the way counts"
    LOST_SENDING = "the same, and its body has ended"
    FINISHED = "its value is there, or its outcome is known"


_SERVED = (Asked, LogEmitted, EventEmitted)
_MOVED = (Suspended, Resumed, AwaitsReturn)
_ENDS = {Died: Phase.FINISHED, ChildRefused: Phase.FINISHED}
_KILLS = {**dict.fromkeys((Cancelled, OutOfMemory, Failed), Phase.KILLED), Lost: Phase.LOST}
_BEGUN = {BodyEnded: Phase.SENDING, EndedForOthers: Phase.KILLED, **_KILLS, **_ENDS}

#: Next phase by phase and message. A pair neither here nor in `IGNORED` is illegal.
TRANSITIONS: Mapping[Phase, Mapping[type[RunMessage], Phase]] = {
    Phase.STARTING: {
        **dict.fromkeys((*_SERVED, *_MOVED), Phase.STARTING),
        BodyBegan: Phase.RUNNING,
        **_BEGUN,
    },
    Phase.RUNNING: {
        **dict.fromkeys((*_SERVED, *_MOVED), Phase.RUNNING),
        TimedOut: Phase.KILLED,
        **_BEGUN,
    },
    Phase.SENDING: {
        **dict.fromkeys((*_SERVED, *_MOVED), Phase.SENDING),
        ValueArrived: Phase.FINISHED,
        **_KILLS,
        Lost: Phase.LOST_SENDING,
        **_ENDS,
    },
    Phase.KILLED: {**dict.fromkeys((*_SERVED, Cancelled), Phase.KILLED), **_ENDS},
    Phase.LOST: {
        **dict.fromkeys(_SERVED, Phase.LOST),
        BodyEnded: Phase.LOST_SENDING,
        Cancelled: Phase.KILLED,
        **_ENDS,
    },
    Phase.LOST_SENDING: {
        **dict.fromkeys(_SERVED, Phase.LOST_SENDING),
        ValueArrived: Phase.FINISHED,
        Cancelled: Phase.KILLED,
        **_ENDS,
    },
    Phase.FINISHED: {},
}

#: Messages about a process that was already killed.
_LATE = frozenset({*_MOVED, BodyBegan, Lost, OutOfMemory, EndedForOthers, Failed})

#: Messages without effect.
IGNORED: Mapping[Phase, frozenset[type[RunMessage]]] = {
    # A value without a `BodyEnded` before it.
    Phase.STARTING: frozenset({ValueArrived}),
    Phase.RUNNING: frozenset({ValueArrived}),
    # The value is about to arrive.
    Phase.SENDING: frozenset({EndedForOthers}),
    Phase.KILLED: _LATE | {BodyEnded, ValueArrived},
    Phase.LOST: _LATE | {ValueArrived},
    Phase.LOST_SENDING: _LATE,
    Phase.FINISHED: frozenset(),
}


class ProcessRun:
    """The state of one child process. For one thread.

    `timeout_s` are the seconds for the body, suspensions not counted; `None`: no limit. `enforces`: a process above its
    budget is killed; otherwise a warning is logged.
    """

    def __init__(self, timeout_s: float | None, enforces: bool) -> None:
        self._timeout_s = timeout_s
        self._enforces = enforces
        self.phase = Phase.STARTING
        #: Monotonic seconds of the body's timeout; a suspension moves it.
        self._ends_s: float | None = None
        #: Monotonic seconds of the suspension; `None`: not suspended.
        self._suspended_s: float | None = None
        self._deadline_s: float | None = None
        self._body_ended: BodyEnded | None = None
        #: Outcome of a process that was killed.
        self._decided: Failure | None = None

    def handle(self, message: RunMessage) -> list[Action]:
        """Return the actions to carry out after a message; raise `IllegalTransition` if the phase does not allow it."""
        kind = type(message)
        if kind in IGNORED[self.phase]:
            return []
        if kind not in TRANSITIONS[self.phase]:
            raise IllegalTransition(f"{kind.__name__} came when {self.phase.value}")
        if isinstance(message, OutOfMemory) and not self._enforces:
            return [Warn(f"{message.error}; gpu:enforce=kill would end it")]
        self.phase = TRANSITIONS[self.phase][kind]
        actions = self._act(message)
        counts = self.phase is Phase.RUNNING and self._suspended_s is None
        deadline_s = self._ends_s if counts else None
        if deadline_s != self._deadline_s:
            self._deadline_s = deadline_s
            actions.insert(0, SetDeadline(deadline_s))
        return actions

    def _act(self, message: RunMessage) -> list[Action]:
        match message:
            case BodyBegan(at_s):
                self._ends_s = None if self._timeout_s is None else at_s + self._timeout_s
                return [ShowRunning()]
            case BodyEnded():
                self._body_ended = message
                return []
            case ValueArrived(data):
                assert self._body_ended is not None
                return [OpenValue(self._body_ended, data)]
            case Failed():
                # The launcher kills the process if it has not ended.
                self._decided = message
                return []
            case ChildRefused() | Died():
                return [Finish(self._decided or message)]
            case Asked() | LogEmitted() | EventEmitted():
                return [message]
            case Suspended(at_s):
                self._suspended_s = at_s
                return []
            case Resumed(at_s):
                if self._ends_s is not None and self._suspended_s is not None:
                    self._ends_s += at_s - self._suspended_s
                self._suspended_s = None
                return [ShowRunning()]
            case AwaitsReturn(reason):
                return [ShowAwaiting(reason)]
            case TimedOut() | Cancelled() | EndedForOthers() | OutOfMemory() | Lost():
                self._decided = message
                return [Kill(bars_moves=isinstance(message, Lost))]
        assert_never(message)


def outcome_of(ended: BodyEnded, value: Any) -> Outcome:
    """Return the outcome of a body whose value has arrived."""
    if not ended.raised:
        return Done(value)
    error = value
    if not isinstance(value, BaseException):
        error = ProtocolError(f"a child announced an exception and sent {value!r}")
    if not isinstance(error, Exception):
        return Quit(error, ended.traceback)
    if ended.out_of_memory is not None:
        return OutOfMemory(error, ended.traceback)
    return Failed(error, ended.traceback)


# The next step.

#: Seconds until a new request after a node's refusal: readings come every 0.25 s.
REFUSED_S = 0.25


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process that returned no value."""

    outcome: Failure
    #: Error of the task run if no other process follows.
    error: BaseException
    #: The error in one line, for the log.
    said: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Facts about an out-of-memory, for the choice of the next budget."""

    evidence: Evidence
    #: Arguments of `ladder.next_attempt`.
    capacity_bytes: int
    whole_bytes: int
    alike: bool
    kind: DeviceKind


@dataclass(frozen=True, slots=True)
class History:
    """Facts about a task run and its ended process, for the choice of the next step."""

    policy: GPUPolicy
    #: Budget increases, the ended process included.
    climb: OomHistory
    #: `None`: the process has not run out of memory.
    memory: Memory | None
    #: Seconds since the task run wants devices for this process.
    since_s: float
    #: Error of the out-of-memory before this process; `None`: none.
    shortage: BaseException | None = None
    #: The process ended with a CUDA fault as a client of MPS: names of the tasks beside it, one of which may have caused
    #: the fault. `None`: it did not.
    at_fault: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """Facts about an out-of-memory, for the report of the process."""

    cause: Cause
    #: Bytes on one device that the process needed; `None`: unknown.
    wanted_bytes: int | None
    #: Budget of the next process; `None`: there is none.
    rung: NextAttempt | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Step: run the body in another process."""

    grant: Grant
    #: Logged on the task run.
    warning: str
    #: `None`: the process has not run out of memory.
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Step after a node's refusal: request a device again after `REFUSED_S`, and show `reason` meanwhile."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Raise:
    """Step: end the task run with an error."""

    error: BaseException
    #: Note added to the error; `None`: none.
    note: str | None = None
    #: As in `Retry`.
    shortage: Shortage | None = None


Step = Retry | AskAgain | Raise


def next_step(ended: Ended, grant: Grant, history: History) -> Step:
    """Return the step after an ended process, or after a request that was not placed (`ChildRefused`)."""
    match ended.outcome:
        case Lost(why):
            # No process of this task is moved again: at most one loss for each move in progress.
            return Retry(grant, f"The process was lost in a move: {why}; the body runs again")
        case EndedForOthers():
            return Retry(
                replace(grant, histories={}, probe_fraction=0.0, alone_because="it was ended once"),
                "Ended, since first runs beside it grow and its device runs short of memory; it runs again with "
                "a device to itself",
            )
        case ChildRefused(NodeRefusedError() as error):
            # The task run returns to its place in the queue; the node's state is known by the next reading.
            limit_s = history.policy.wait_s
            if limit_s is None or history.since_s < limit_s:
                reason = Reason(WaitKind.OTHER_NODE, at=error.node, detail=error.problem)
                return AskAgain(reason)
            limit = format_seconds(limit_s)
            return Raise(PlacementTimeoutError(f"gpu:wait={limit} is over: {error}"))
        case ChildRefused(PlacementError() as error) if history.shortage is not None:
            if not isinstance(error, PlacementTimeoutError):
                # The error is the out-of-memory; the lack of a larger device is the note.
                return Raise(history.shortage, str(error))
        case Cancelled():
            return Raise(ended.error)
    if history.at_fault is not None:
        beside = f" ({', '.join(history.at_fault)})" if history.at_fault else ""
        return Retry(
            replace(grant, outside_mps=True),
            f"It ended with a CUDA fault as a client of MPS, where a fault of one ends all{beside}; it runs again, "
            f"outside MPS ({ended.said})",
        )
    if history.memory is None:
        return Raise(ended.error)
    policy, climb, memory = history.policy, history.climb, history.memory
    evidence, capacity = memory.evidence, memory.capacity_bytes
    cause = ladder.classify(evidence)
    rung = ladder.next_attempt(climb, cause, evidence, capacity, memory.whole_bytes, memory.alike)
    # A probe that shared its device had less than its tag allows: `gpu:oom=fail` does not apply.
    probed = evidence.shared_probe or climb.from_error
    if isinstance(rung, str) or (policy.oom == "fail" and not probed):
        note = ladder.last_words(cause, evidence, rung, capacity, memory.kind)
        return Raise(ended.error, note, Shortage(cause, ladder.needed_bytes(evidence), None))
    return Retry(
        replace(grant, memory=rung.budget_bytes, histories={}, after_oom=True, probe_fraction=0.0),
        f"Out of memory: {rung.reason} ({ended.said})",
        Shortage(cause, ladder.needed_bytes(evidence), rung),
    )
