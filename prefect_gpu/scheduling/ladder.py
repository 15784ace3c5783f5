"""Cause of an out-of-memory, and the memory that the task run's next process gets.

Pure. `prefect_gpu.runner.submission` starts the next process; `history` learns from it for later runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from prefect_gpu.scheduling.history import OOM_FACTOR
from prefect_gpu.scheduling.model import ONLY_ON, DeviceKind
from prefect_gpu.units import MIB, format_bytes, size_in_tag

#: own_cap: the task needs more than its budget. foreign: other people's processes took the memory. crowded: our own
#: processes filled the device, this one within its budget. host: the machine's own memory ran out. unknown: killed for
#: an unknown reason.
Cause = Literal["own_cap", "foreign", "crowded", "host", "unknown"]

#: Most processes of one task run because of out-of-memory, the first included.
MOST_PROCESSES = 5

#: Consecutive out-of-memory errors with another cause than `own_cap`, after which the task gets a whole device.
MOST_SHARED = 3

#: Growth of other people's memory below this filled no device: desktops and drivers come and go.
LEAST_GROWTH_BYTES = 64 * MIB

#: Factor on the bytes that an error says were wanted: sizes are rounded on the way.
WANTED_FACTOR = 1.1

#: Advice after the last out-of-memory of a task run, by cause; for `own_cap` where no budget is large enough.
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
    """Measurements of one out-of-memory. Bytes are those of the device where it happened."""

    #: The budget of the process there.
    budget_bytes: int
    #: Bytes that its framework could allocate at most; `None`: no cap.
    cap_bytes: int | None
    #: Part of its budget for memory that no framework counts.
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
    #: Whether the process's own cap refused, by the error's text; `None`: it does not say.
    says_own_cap: bool | None = None
    #: No other GPU task was on the device.
    alone: bool = False
    #: Its need was not known, and its budget was the free memory of a device beside other tasks.
    shared_probe: bool = False


def classify(evidence: Evidence) -> Cause:
    """Return the cause of an out-of-memory in a framework.

    The cap is the cause if the device had the wanted bytes free. Otherwise the cause is, in this order: growth of other
    people's processes, this process's own need, or neither.
    """
    if evidence.says_own_cap:
        return "own_cap"
    # `False`: the error says that something else than the cap refused.
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
    held = evidence.process_bytes
    return held is not None and held + wanted_bytes > evidence.budget_bytes


def needed_bytes(evidence: Evidence) -> int | None:
    """Return the bytes that the process would have needed on its device in all; `None`: not known."""
    if evidence.wanted_bytes is None:
        return None
    held = evidence.process_bytes
    if evidence.held_bytes is not None:
        held = max(held or 0, evidence.held_bytes + evidence.context_bytes)
    return None if held is None else held + evidence.wanted_bytes


@dataclass(frozen=True, slots=True)
class OomHistory:
    """The processes of one task run so far, and the memory that they were given."""

    #: Number of its processes.
    processes: int = 1
    #: Consecutive out-of-memory errors with another cause than `own_cap`.
    shared: int = 0
    #: The last process had a whole device.
    whole_device: bool = False
    #: Most bytes given after an out-of-memory; 0: none yet.
    reached_bytes: int = 0
    #: The last process got the bytes in the error of a probe beside others.
    from_error: bool = False


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Memory that the next process of a task run gets."""

    climb: OomHistory
    #: Bytes to reserve on each device; `None`: a device to itself, all that it has free.
    budget_bytes: int | None
    #: For the log: why, and how much.
    reason: str


def next_attempt(
    climb: OomHistory,
    cause: Cause,
    evidence: Evidence,
    capacity_bytes: int,
    whole_bytes: int = 0,
    alike: bool = True,
) -> NextAttempt | str:
    """Return the memory of the next process, or, if there is none, the reason as text for the error.

    `capacity_bytes` is the most that could ever be reserved on the largest device that the task may use, `whole_bytes`
    is known to be enough for past runs with their first steps (0: not known). `climb` counts the process that has
    just failed. `alike`: all devices that the task may use are of one model.
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
    climb: OomHistory, cause: Cause, evidence: Evidence, capacity_bytes: int, alike: bool
) -> NextAttempt:
    """Return the memory after a probe beside others: the bytes that its error says it needs, then a whole device."""
    # Its cap was what its neighbours left, so a multiple of it says nothing. The error names one allocation and not
    # those after it: a whole device is next, and the body begins three times at most.
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
    """Return what went wrong, as text for the log."""
    budget = format_bytes(evidence.budget_bytes)
    if cause == "own_cap":
        return f"{budget} were not enough"
    taken = "other people's processes" if cause == "foreign" else "tasks beside it"
    return f"{taken} filled the device though it was within its {budget}"


def _wanted(evidence: Evidence) -> str:
    needed = needed_bytes(evidence)
    return f"; it would have needed {format_bytes(needed)} in all" if needed else ""


def last_words(
    cause: Cause, evidence: Evidence, rung: NextAttempt | str, capacity_bytes: int, kind: DeviceKind
) -> str:
    """Return why a task run ends out of memory and what to write next time, as text for its state.

    `rung` and `capacity_bytes` are those of `next_attempt`; a `NextAttempt` is what the task run would get without `gpu:oom=fail`.
    """
    if isinstance(rung, str):
        return f"{rung}: {REMEDIES[cause]}" if cause in REMEDIES else rung
    why, remedy = _shortage(cause, evidence) + _wanted(evidence), REMEDIES.get(cause, "")
    if cause == "own_cap":
        given = rung.budget_bytes
        size = "100%" if given is None else size_in_tag(given, capacity_bytes)
        remedy = f"write gpu:memory={size}{ONLY_ON[kind]}"
    return f"{why}: {remedy}; without gpu:oom=fail it runs again by itself"


def _give(
    climb: OomHistory, budget_bytes: int, capacity_bytes: int, alike: bool, reason: str
) -> NextAttempt:
    again = replace(climb, processes=climb.processes + 1)
    if budget_bytes < capacity_bytes:
        again = replace(again, reached_bytes=max(climb.reached_bytes, budget_bytes))
        return NextAttempt(again, budget_bytes, f"{reason}; it gets {format_bytes(budget_bytes)}")
    # Among devices of several models, any whole device may be a small one.
    again = replace(again, whole_device=alike)
    again = again if alike else replace(again, reached_bytes=capacity_bytes)
    return NextAttempt(
        again, None if alike else capacity_bytes, f"{reason}; it gets a device to itself"
    )
