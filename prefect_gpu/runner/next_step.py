"""Choose the next step after a process ended without a value: another process, or the task run's error. Pure.

The budget after an out-of-memory is in `scheduling.ladder`; `submission` carries out the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_gpu.errors import NodeRefusedError, PlacementError, PlacementTimeoutError
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import ChildRefused
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_run import Cancelled, EndedForOthers, Failure, Lost
from prefect_gpu.scheduling import ladder
from prefect_gpu.scheduling.ladder import Cause, Evidence, NextAttempt, OomHistory
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import format_seconds

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
