"""Moving a process's GPU memory to the host and back: the driver's calls in order, and the result of a failure.

    running ─lock─▶ locked ─checkpoint─▶ away ─restore─▶ locked ─unlock─▶ running

A failed lock is undone by unlock, and the process continues. A process whose checkpoint or restore fails or does not end
in time is lost: the driver does not tell its state, and it must be killed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from typing import Final

from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.suspension.driver_calls import DriverCallError, DriverCalls, Step

#: States of a process, as the driver numbers them.
RUNNING, LOCKED, AWAY, FAILED = range(4)

#: Seconds for the driver to lock a process: it waits for the process's calls that are under way.
LOCK_S: Final = 5.0

#: Seconds for a call that moves no memory.
SHORT_S: Final = 10.0

#: A move may take `SHORT_S` and a second for so many bytes. The slowest measured is 1.7 GiB/s out.
SLOWEST_BYTES_S: Final = 256 << 20

#: States of a process before and after each call.
_BEFORE_AND_AFTER: Final[Mapping[Step, tuple[int, int]]] = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, AWAY),
    "restore": (AWAY, LOCKED),
    "unlock": (LOCKED, RUNNING),
}

#: Most repeats of a call in which the driver process has ended.
_MOST_AGAIN = 3


class NotSuspendedError(PrefectGPUError):
    """The process could not be suspended, and runs as before. The text says why."""


class ProcessLostError(PrefectGPUError):
    """The driver has left the process in an unknown state. It must be killed. The text says why."""


def move_deadline_s(used_bytes: int) -> float:
    """Return the seconds after which a move of `used_bytes` has failed."""
    return SHORT_S + used_bytes / SLOWEST_BYTES_S


def move_out(calls: DriverCalls, pid: int, used_bytes: int) -> float:
    """Move a process's GPU memory to the host, `used_bytes` on its devices; return the seconds that it took.

    Its threads stop in their next call of the driver until `move_in`.

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
    """Move a process's memory back from the host, so that the process runs; return the seconds that it took.

    Only with the room reserved and seen free: a restore that finds no room loses the process. `onto` has the new device
    of each device that the process can name, by UUID; `None`: the same devices.

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
    """Unlock a process, if it is locked; raise `ProcessLostError`, with `why`, if it stays locked."""
    try:
        _call(calls, "unlock", pid, deadline_s=SHORT_S)
    except DriverCallError as error:
        with contextlib.suppress(DriverCallError):
            if calls.call("state", pid, deadline_s=SHORT_S) == RUNNING:
                return
        raise ProcessLostError(f"{why}; {error}") from error


def _call(calls: DriverCalls, step: Step, pid: int, *words: str, deadline_s: float) -> None:
    """Make a call, and repeat it if the driver process has ended and the call had no effect."""
    # The driver carries out a call in the process itself, so it may end well without the process that asked for it, and
    # asking for the state waits for that (seen with driver 580.159.04, each step interrupted at once, after 0.05 and
    # 0.5 s).
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
