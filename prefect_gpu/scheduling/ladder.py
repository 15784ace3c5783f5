"""Cause of an out-of-memory, and the memory of the next process of the same task run.

Pure. `prefect_gpu.runner.submission` starts the next process. `history` learns budgets of later task runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from prefect_gpu.scheduling.history import OOM_FACTOR
from prefect_gpu.scheduling.model import ONLY_ON, DeviceKind
from prefect_gpu.units import MIB, format_bytes, size_in_tag

#: Why a process ran out of memory. own_cap: the task needs more than its budget. foreign: processes of other programs
#: took the memory. crowded: other tasks filled the device while this process was within its budget. host: the machine's
#: own memory ran out. unknown: the process was killed for an unknown reason.
Cause = Literal["own_cap", "foreign", "crowded", "host", "unknown"]

#: Most processes of one task run that runs out of memory, the first included.
MOST_PROCESSES = 5

#: Consecutive out-of-memory errors with another cause than `own_cap`, after which the task gets a whole device.
MOST_SHARED = 3

#: Least growth of foreign memory that can be the cause: desktops and drivers take and free a little all the time.
LEAST_GROWTH_BYTES = 64 * MIB

#: Factor on the bytes that an error message says were asked for: the message has rounded sizes.
WANTED_FACTOR = 1.1

#: Advice after the last out-of-memory of a task run, by cause. That of `own_cap` is for tasks larger than any device.
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
    """Measurements of a process when it ran out of memory, on the device where that happened."""

    budget_bytes: int
    #: Most bytes that the framework was allowed to allocate; `None`: no cap.
    cap_bytes: int | None
    #: Part of the budget for memory that no framework counts.
    context_bytes: int = 0
    #: Bytes that the failed allocation asked for; `None`: the error does not say.
    wanted_bytes: int | None = None
    #: Bytes that the framework held; `None`: not reported.
    held_bytes: int | None = None
    #: Bytes that the device showed for the process; `None`: not reported.
    process_bytes: int | None = None
    #: Free bytes of the device; `None`: the device was not read.
    free_bytes: int | None = None
    #: Bytes by which foreign memory on the device had grown since the process was placed.
    foreign_growth_bytes: int = 0
    #: Whether the framework's cap refused the allocation, by the error's text; `None`: the text does not say.
    says_own_cap: bool | None = None
    #: Whether the driver refuses the process more than its budget (a client of MPS).
    limited: bool = False
    #: Whether no other GPU task was on the device.
    alone: bool = False
    #: Whether the task's need was not known, and its budget was the memory that other tasks left free.
    shared_probe: bool = False


def classify(evidence: Evidence) -> Cause:
    """Return the cause of an out-of-memory in a framework: `own_cap`, `foreign` or `crowded`.

    `own_cap` if the error says so, or a process with a cap or limit failed while the device had the wanted bytes free.
    Otherwise `foreign` if foreign memory grew by the missing bytes, `own_cap` if the process needs more than its budget
    or is alone on the device, and `crowded` in all other cases.
    """
    if evidence.says_own_cap:
        return "own_cap"
    # `says_own_cap=False`: the error says that the driver refused, not the cap.
    capped = evidence.limited or (evidence.cap_bytes is not None and evidence.says_own_cap is None)
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
    """Return the bytes held at an out-of-memory plus those of the failed allocation; `None`: not known."""
    if evidence.wanted_bytes is None:
        return None
    held = evidence.process_bytes
    if evidence.held_bytes is not None:
        held = max(held or 0, evidence.held_bytes + evidence.context_bytes)
    return None if held is None else held + evidence.wanted_bytes


@dataclass(frozen=True, slots=True)
class OomHistory:
    """The processes of one task run so far, and the memory that they were given."""

    #: Number of processes, the current one included.
    processes: int = 1
    #: Consecutive out-of-memory errors with another cause than `own_cap`.
    shared: int = 0
    #: Whether the last process had a whole device.
    whole_device: bool = False
    #: Most bytes given to a process after an out-of-memory; 0: none yet.
    reached_bytes: int = 0
    #: Whether the budget of the last process was computed from the error of a shared probe.
    from_error: bool = False


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Memory of the next process of a task run after an out-of-memory."""

    #: History of the task run, with the next process counted.
    climb: OomHistory
    #: Bytes to reserve on each device; `None`: a device to itself.
    budget_bytes: int | None
    #: Cause and size, as text for the log.
    reason: str


def next_attempt(
    climb: OomHistory,
    cause: Cause,
    evidence: Evidence,
    capacity_bytes: int,
    whole_bytes: int = 0,
    alike: bool = True,
) -> NextAttempt | str:
    """Return the memory of the next process of a task run, or the reason, as text for the error, why there is no next one.

    `climb` counts the process that has just failed. `capacity_bytes` is the most that can be reserved on the largest
    device that the task may use. `whole_bytes` is `LearnedBudget.whole_bytes` (0: not known). `alike`: all devices that
    the task may use are of one model.
    """
    needed, wanted = needed_bytes(evidence), _wanted(evidence)
    budget = format_bytes(evidence.budget_bytes)
    if cause not in ("own_cap", "foreign", "crowded"):
        return f"more memory of a device does not help ({cause})"
    if climb.processes >= MOST_PROCESSES:
        return f"{climb.processes} processes have run out of memory, the last with {budget}{wanted}"
    if cause == "own_cap":
        if evidence.wanted_bytes is not None and evidence.wanted_bytes > capacity_bytes:
            # The next process would only wait for an empty device, and keep others from it.
            asked, most = format_bytes(evidence.wanted_bytes), format_bytes(capacity_bytes)
            return f"it asked for {asked} at once, more than the {most} of a whole device"
        if climb.whole_device or evidence.budget_bytes >= capacity_bytes:
            return f"a whole device was not enough, {budget}{wanted}"
        if evidence.shared_probe or climb.from_error:
            return _give_needed(climb, cause, evidence, capacity_bytes, alike)
        more = max(
            int(evidence.budget_bytes * OOM_FACTOR), int((needed or 0) * WANTED_FACTOR), whole_bytes
        )
        if climb.processes == MOST_PROCESSES - 1:
            # The last process gets all memory: a task does not fail while its device has memory left.
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
        # Foreign processes may fill a whole device, too. The next process may get another device.
        return _give(grown, capacity_bytes, capacity_bytes, alike, reason)
    return _give(grown, evidence.budget_bytes, capacity_bytes, alike, reason)


def _give_needed(
    climb: OomHistory, cause: Cause, evidence: Evidence, capacity_bytes: int, alike: bool
) -> NextAttempt:
    """Return the memory after a shared probe: the bytes that its error shows, after a second failure a whole device."""
    # A multiple of the cap would say nothing, since the cap depended on the neighbours. The error shows one allocation,
    # not later ones, so a whole device is next: the body begins three times at most.
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
    """Return the cause of an out-of-memory as text for the log."""
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
    """Return why a task run fails out of memory, with advice, as text for its state.

    `rung` is the result of `next_attempt` for the same `capacity_bytes`: a `NextAttempt` if only `gpu:oom=fail` stops it.
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
