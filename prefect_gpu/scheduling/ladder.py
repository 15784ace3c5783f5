"""After an out-of-memory: its cause, and what the next process of the task run gets.

Pure: what was seen goes in, a cause and the next rung come out. The next process is started by
`prefect_gpu.runner.submission`; what later runs learn from it is in `history`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from prefect_gpu.scheduling.history import OOM_FACTOR
from prefect_gpu.scheduling.model import ONLY_ON, DeviceKind
from prefect_gpu.units import MIB, format_bytes, size_in_tag

#: own_cap: the task needs more than its budget. foreign: processes of others took what was missing.
#: crowded: our processes filled the device though this one was within its budget. host: the machine's own
#: memory ran out. unknown: it was killed, and the reason is not known.
Cause = Literal["own_cap", "foreign", "crowded", "host", "unknown"]

#: Processes that one task run may have because of out-of-memory, the first included.
MOST_PROCESSES = 5

#: Out-of-memory that were not its own, one after another, after which it is given a whole device.
MOST_SHARED = 3

#: Others' memory that grew by less than this filled no device: desktops and drivers come and go.
LEAST_GROWTH_BYTES = 64 * MIB

#: What an error says was wanted is multiplied by this: sizes are rounded on the way.
WANTED_FACTOR = 1.1

#: What helps after the last out-of-memory of a task run, by its cause; of `own_cap` where no budget is large enough.
REMEDIES: Mapping[Cause, str] = {
    "own_cap": (
        "it must take less (a smaller batch, which find_batch_size finds; mixed precision) or have a larger device"
    ),
    "foreign": (
        "wait until they end, name other devices (gpu:device), or keep more memory free for them (headroom=)"
    ),
    "crowded": "write gpu:exclusive, or gpu:enforce=kill for the tasks beside it",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one out-of-memory. Bytes are those of the device where it happened."""

    #: The budget of the process there.
    budget_bytes: int
    #: Bytes that its framework could allocate at most; `None`: no cap.
    cap_bytes: int | None
    #: Of its budget, bytes for what no framework counts.
    context_bytes: int = 0
    #: Bytes that the failed allocation asked for; `None`: its message does not say.
    wanted_bytes: int | None = None
    #: Bytes that its framework held when it failed; `None`: not reported.
    held_bytes: int | None = None
    #: Bytes that the device showed for the process when it failed; `None`: not reported.
    process_bytes: int | None = None
    #: Bytes that the device had free when it failed; `None`: it was not read.
    free_bytes: int | None = None
    #: Bytes by which others' memory there had grown since the process was placed.
    foreign_growth_bytes: int = 0
    #: The error says by itself whether the process's own cap refused; `None`: it does not say.
    says_own_cap: bool | None = None
    #: No other GPU task was on the device.
    alone: bool = False
    #: Its need was not known, and its budget was what its device had free beside other tasks.
    shared_probe: bool = False


def classify(evidence: Evidence) -> Cause:
    """Return the cause of an out-of-memory in a framework.

    The cap is the cause if the device could have given what was asked. Where it could not, the cause is what
    took more than expected: other people's processes, this process, or neither, in this order.
    """
    if evidence.says_own_cap:
        return "own_cap"
    # Unless the error says that something else refused.
    capped = evidence.cap_bytes is not None and evidence.says_own_cap is None
    wanted = evidence.wanted_bytes or 0
    free = evidence.free_bytes
    if free is None:
        # The device was not read: a process with a cap has probably reached it.
        return "own_cap" if capped else "crowded"
    if capped and free >= max(1, wanted):
        return "own_cap"
    missing = max(LEAST_GROWTH_BYTES, wanted - free)
    if evidence.foreign_growth_bytes >= missing:
        return "foreign"
    if _needs_more_than_its_budget(evidence, wanted) or evidence.alone:
        return "own_cap"
    return "crowded"


def _needs_more_than_its_budget(evidence: Evidence, wanted_bytes: int) -> bool:
    if evidence.cap_bytes is not None and evidence.held_bytes is not None:
        return evidence.held_bytes + wanted_bytes > evidence.cap_bytes
    if evidence.process_bytes is not None:
        return evidence.process_bytes + wanted_bytes > evidence.budget_bytes
    return False


def needed_bytes(evidence: Evidence) -> int | None:
    """Return the bytes that the process would have needed on its device in all; `None`: not known."""
    if evidence.wanted_bytes is None:
        return None
    held = evidence.process_bytes
    if evidence.held_bytes is not None:
        held = max(held or 0, evidence.held_bytes + evidence.context_bytes)
    return None if held is None else held + evidence.wanted_bytes


@dataclass(frozen=True, slots=True)
class Climb:
    """How many processes one task run has had, and how much they were given."""

    #: Processes that it has had.
    processes: int = 1
    #: Out-of-memory in a row that were not its own.
    shared: int = 0
    #: The last process had a whole device.
    whole_device: bool = False
    #: Most bytes that a rung has given; 0: none has.
    reached_bytes: int = 0
    #: The last process was given what the error of a probe beside others said it needs.
    from_error: bool = False


@dataclass(frozen=True, slots=True)
class Rung:
    """What the next process gets."""

    climb: Climb
    #: Bytes to reserve on each device; `None`: a device to itself, all that it has free.
    budget_bytes: int | None
    #: For the log: why, and how much.
    reason: str


def next_rung(
    climb: Climb,
    cause: Cause,
    evidence: Evidence,
    capacity_bytes: int,
    whole_bytes: int = 0,
    alike: bool = True,
) -> Rung | str:
    """Return what the next process gets.

    Args:
        climb: The processes so far, with the one that has just failed.
        cause: From `classify`.
        evidence: Of the last out-of-memory.
        capacity_bytes: Bytes that could ever be reserved on the largest device that the task may use.
        whole_bytes: Bytes that are known to be enough for past runs, their first steps included; 0: not known.
        alike: All devices that the task may use are of one model.

    Returns:
        What it gets; or, where it gets none, the reason, as text for the error.
    """
    needed, wanted = needed_bytes(evidence), _wanted(evidence)
    budget = format_bytes(evidence.budget_bytes)
    if cause not in ("own_cap", "foreign", "crowded"):
        return f"more memory of a device does not help ({cause})"
    if climb.processes >= MOST_PROCESSES:
        return f"{climb.processes} processes have run out of memory, the last with {budget}{wanted}"
    if cause == "own_cap":
        if climb.whole_device or evidence.budget_bytes >= capacity_bytes:
            return f"a whole device was not enough, {budget}{wanted}"
        if evidence.shared_probe or climb.from_error:
            return _give_needed(climb, cause, evidence, capacity_bytes, alike)
        more = max(
            int(evidence.budget_bytes * OOM_FACTOR), int((needed or 0) * WANTED_FACTOR), whole_bytes
        )
        if climb.processes == MOST_PROCESSES - 1:
            # Its last process: a task does not fail for lack of memory that the device has.
            more = capacity_bytes
        grown = replace(climb, shared=0)
        return _give(grown, more, capacity_bytes, alike, _shortage(cause, evidence))
    if evidence.shared_probe:
        return _give_needed(climb, cause, evidence, capacity_bytes, alike)
    shared = climb.shared + 1
    if shared > MOST_SHARED:
        return f"the device ran full {shared} times though the task was within its {budget}{wanted}"
    reason = _shortage(cause, evidence)
    grown = replace(climb, shared=shared)
    if shared == MOST_SHARED or climb.whole_device:
        # Other people's processes may fill a whole device too: it may be another device next time.
        return _give(grown, capacity_bytes, capacity_bytes, alike, reason)
    return _give(grown, evidence.budget_bytes, capacity_bytes, alike, reason)


def _give_needed(
    climb: Climb, cause: Cause, evidence: Evidence, capacity_bytes: int, alike: bool
) -> Rung:
    """Return the next try after a probe beside others: the bytes that its error says it needs, then a whole device.

    Its cap was what its neighbours left, so a multiple of it says nothing. The error says what one allocation wanted, not
    what comes after it: a whole device is next, and the body begins three times at most.
    """
    asked = int((needed_bytes(evidence) or 0) * WANTED_FACTOR)
    enough = asked > (evidence.budget_bytes if cause == "own_cap" else 0)
    from_error = evidence.shared_probe and enough and asked < capacity_bytes
    return _give(
        replace(climb, shared=0, from_error=from_error),
        asked if from_error else capacity_bytes,
        capacity_bytes,
        alike,
        _shortage(cause, evidence),
    )


def _shortage(cause: Cause, evidence: Evidence) -> str:
    """Return what went wrong, as the log says it."""
    budget = format_bytes(evidence.budget_bytes)
    if cause == "own_cap":
        return f"{budget} were not enough"
    taken = "other people's processes" if cause == "foreign" else "tasks beside it"
    return f"{taken} filled the device though it was within its {budget}"


def _wanted(evidence: Evidence) -> str:
    needed = needed_bytes(evidence)
    return f"; it would have needed {format_bytes(needed)} in all" if needed else ""


def last_words(
    cause: Cause, evidence: Evidence, rung: Rung | str, capacity_bytes: int, kind: DeviceKind
) -> str:
    """Return why a task run ends out of memory and what to write next time, for its state.

    Args:
        cause: From `classify`.
        evidence: Of its last out-of-memory.
        rung: From `next_rung`. A rung is what the task run would get without `gpu:oom=fail`.
        capacity_bytes: As for `next_rung`.
        kind: Of its devices.
    """
    if isinstance(rung, str):
        return f"{rung}: {REMEDIES[cause]}" if cause in REMEDIES else rung
    why, remedy = _shortage(cause, evidence) + _wanted(evidence), REMEDIES.get(cause, "")
    if cause == "own_cap":
        given = rung.budget_bytes
        size = "100%" if given is None else size_in_tag(given, capacity_bytes)
        remedy = f"write gpu:memory={size}{ONLY_ON[kind]}"
    return f"{why}: {remedy}; without gpu:oom=fail it runs again by itself"


def _give(climb: Climb, budget_bytes: int, capacity_bytes: int, alike: bool, reason: str) -> Rung:
    again = replace(climb, processes=climb.processes + 1)
    if budget_bytes >= capacity_bytes:
        whole = replace(again, whole_device=alike)
        if not alike:
            # Any whole device may be a small one.
            whole = replace(whole, reached_bytes=capacity_bytes)
        return Rung(
            whole, None if alike else capacity_bytes, f"{reason}; it gets a device to itself"
        )
    again = replace(again, reached_bytes=max(climb.reached_bytes, budget_bytes))
    return Rung(again, budget_bytes, f"{reason}; it gets {format_bytes(budget_bytes)}")
