"""Moving a process's GPU memory to the host and back: the driver's calls in order, and the result of a failure.

    running ─lock─▶ locked ─checkpoint─▶ away ─restore─▶ locked ─unlock─▶ running

After a failed lock the process is unlocked and continues. A process is *lost*, and must be killed, if its checkpoint or
restore fails or has no end in time: the driver leaves it in an unknown state.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from typing import Final

from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.suspension.driver_calls import DriverCallError, DriverCalls, Step

#: States of a process, by the driver's numbers.
RUNNING, LOCKED, AWAY, FAILED = range(4)

#: Seconds for the driver to lock a process: the driver waits for the process's own calls to end.
LOCK_S: Final = 5.0

#: Seconds for a call that moves no memory.
SHORT_S: Final = 10.0

#: Bytes a second that the deadline of a move allows for, after `SHORT_S`. The slowest measured is 1.7 GiB/s out.
SLOWEST_BYTES_S: Final = 256 << 20

#: States of a process before and after each call.
_BEFORE_AND_AFTER: Final[Mapping[Step, tuple[int, int]]] = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, AWAY),
    "restore": (AWAY, LOCKED),
    "unlock": (LOCKED, RUNNING),
}

#: Most repeats of a call during which the driver process ended.
_MOST_AGAIN = 3


class NotSuspendedError(PrefectGPUError):
    """A process could not be suspended, and runs as before. The text says why."""


class ProcessLostError(PrefectGPUError):
    """The driver has left a process in an unknown state: the process must be killed. The text says why."""


def move_deadline_s(used_bytes: int) -> float:
    """Return the seconds after which a move of `used_bytes` counts as failed."""
    return SHORT_S + used_bytes / SLOWEST_BYTES_S


def move_out(calls: DriverCalls, pid: int, used_bytes: int) -> float:
    """Move a process's GPU memory, `used_bytes`, to the host; return the seconds of the move.

    The process's threads block in their next call of the driver until `move_in`.

    Raises:
        NotSuspendedError: The process runs as before.
        ProcessLostError: The process must be killed.
    """
    begun_s = time.monotonic()
    try:
        _call(calls, "lock", pid, str(round(1000 * LOCK_S)), deadline_s=LOCK_S + SHORT_S)
    except DriverCallError as error:
        _unlock(calls, pid, str(error))
        raise NotSuspendedError(str(error)) from error
    try:
        _call(calls, "checkpoint", pid, deadline_s=move_deadline_s(used_bytes))
    except DriverCallError as error:
        raise ProcessLostError(str(error)) from error
    return time.monotonic() - begun_s


def move_in(
    calls: DriverCalls, pid: int, used_bytes: int, onto: Mapping[str, str] | None = None
) -> float:
    """Move a process's memory back to its devices, so that the process runs; return the seconds of the move.

    The caller has reserved the memory and read that it is free: a restore without room loses the process. `onto` has the
    new device of each device that the process can see, by UUID; `None`: the same devices.

    Raises:
        ProcessLostError: The process must be killed.
    """
    begun_s = time.monotonic()
    words = [uuid for pair in (onto or {}).items() for uuid in pair]
    try:
        _call(calls, "restore", pid, *words, deadline_s=move_deadline_s(used_bytes))
    except DriverCallError as error:
        raise ProcessLostError(str(error)) from error
    _unlock(calls, pid, "it stays locked")
    return time.monotonic() - begun_s


def _unlock(calls: DriverCalls, pid: int, why: str) -> None:
    """Unlock a process; raise `ProcessLostError`, with `why` in its text, if the process does not run afterwards."""
    try:
        _call(calls, "unlock", pid, deadline_s=SHORT_S)
    except DriverCallError as error:
        with contextlib.suppress(DriverCallError):
            if calls.call("state", pid, deadline_s=SHORT_S) == RUNNING:
                return
        raise ProcessLostError(f"{why}; {error}") from error


def _call(calls: DriverCalls, step: Step, pid: int, *words: str, deadline_s: float) -> None:
    """Make a call; repeat it if the driver process ended during the call and the call had no effect."""
    # A call may succeed although the driver process has ended: the driver carries it out inside the process `pid`, and
    # `state` waits for its end (driver 580.159.04, each step interrupted at once, after 0.05 and 0.5 s).
    until_s = time.monotonic() + deadline_s
    before, after = _BEFORE_AND_AFTER[step]
    for again in itertools.count():
        try:
            calls.call(step, pid, *words, deadline_s=until_s - time.monotonic())
            return
        except DriverCallError as error:
            if not error.ended or again == _MOST_AGAIN:
                raise
            state = calls.call("state", pid, deadline_s=until_s - time.monotonic())
            if state == after:
                return
            if state != before:
                raise
