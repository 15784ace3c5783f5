"""What follows the end of a process that has returned no value: another process, or the task run's error. Pure.

What another process gets after an out-of-memory is in `scheduling.ladder`; `submission` carries the step out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_gpu.broker.suspendable import Lost
from prefect_gpu.errors import NodeRefusedError, PlacementError, PlacementTimeoutError
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.launch_spec import ChildRefused
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_run import Cancelled, EndedForOthers, Failure
from prefect_gpu.scheduling.ladder import (
    Cause,
    Climb,
    Evidence,
    Rung,
    classify,
    last_words,
    needed_bytes,
    next_rung,
)
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import format_seconds

#: Seconds after which a task asks again for a device that its node has refused: readings come every 0.25 s.
REFUSED_S = 0.25


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process has ended that has returned no value."""

    outcome: Failure
    #: What its task run raises if no other process follows.
    error: BaseException
    #: The error in one line, for the log.
    said: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of an out-of-memory when the next step is chosen."""

    evidence: Evidence
    #: As for `ladder.next_rung`.
    capacity_bytes: int
    whole_bytes: int
    alike: bool
    kind: DeviceKind


@dataclass(frozen=True, slots=True)
class History:
    """What is known of the task run."""

    policy: GPUPolicy
    #: With the process that has ended.
    climb: Climb
    #: `None`: the process has not run out of memory.
    memory: Memory | None
    #: Seconds since the process asked for its devices.
    since_s: float
    #: Error of the out-of-memory after which the process was started; `None`: there was none.
    shortage: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the report of the process says of its out-of-memory."""

    cause: Cause
    #: Bytes on one device that the process would have needed; `None`: unknown.
    wanted_bytes: int | None
    #: What the next process gets; `None`: there is none.
    rung: Rung | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Another process runs the body."""

    grant: Grant
    #: Logged on the task run.
    warning: str
    #: `None`: the process has not run out of memory.
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The task run asks for a device again after `REFUSED_S`, since there was no process."""

    grant: Grant
    #: Shown meanwhile.
    reason: Reason


@dataclass(frozen=True, slots=True)
class Raise:
    """The task run ends."""

    error: BaseException
    #: Added to the error; `None`: nothing.
    note: str | None = None
    #: As in `Retry`.
    shortage: Shortage | None = None


Step = Retry | AskAgain | Raise


def next_step(ended: Ended, grant: Grant, history: History) -> Step:
    """Return what follows.

    Args:
        ended: How the process has ended; `ChildRefused` as well if it was not placed.
        grant: What it got.
        history: What is known of the task run.
    """
    again = replace(grant, waited_s=0.0)
    match ended.outcome:
        case Lost(why):
            # None of this task is moved again, so it comes at most once for each that is moved now.
            return Retry(again, f"The process was lost in a move: {why}; the body runs again")
        case EndedForOthers():
            return Retry(
                replace(again, probe_fraction=0.0, alone_because="it was ended once"),
                "Ended, since first runs beside it grow and its device runs short of memory; it runs again with "
                "a device to itself",
            )
        case ChildRefused(NodeRefusedError() as error):
            # It goes back to its place in the queue, and what the node says is known by the next reading.
            waited_s, limit_s = grant.waited_s + history.since_s, history.policy.wait_s
            if limit_s is None or waited_s < limit_s:
                reason = Reason(WaitKind.OTHER_NODE, at=error.node, detail=error.problem)
                return AskAgain(replace(grant, waited_s=waited_s + REFUSED_S), reason)
            limit = format_seconds(limit_s)
            return Raise(PlacementTimeoutError(f"gpu:wait={limit} is over: {error}"))
        case ChildRefused(PlacementError() as error) if history.shortage is not None:
            if not isinstance(error, PlacementTimeoutError):
                # What ran out is what went wrong; that there is no more is why it ends.
                return Raise(history.shortage, str(error))
        case Cancelled():
            return Raise(ended.error)
    if history.memory is None:
        return Raise(ended.error)
    policy, climb, memory = history.policy, history.climb, history.memory
    evidence, capacity = memory.evidence, memory.capacity_bytes
    cause = classify(evidence)
    rung = next_rung(climb, cause, evidence, capacity, memory.whole_bytes, memory.alike)
    # A probe beside others was not given what its tag lets it fail with.
    probed = evidence.shared_probe or climb.from_error
    if isinstance(rung, str) or (policy.oom == "fail" and not probed):
        note = last_words(cause, evidence, rung, capacity, memory.kind)
        return Raise(ended.error, note, Shortage(cause, needed_bytes(evidence), None))
    return Retry(
        replace(again, memory=rung.budget_bytes, after_oom=True, probe_fraction=0.0),
        f"Out of memory: {rung.reason} ({ended.said})",
        Shortage(cause, needed_bytes(evidence), rung),
    )
