"""Moves the GPU memory of one process to the host and back: the driver's calls in order, and what a failure leaves.

    running ─lock─▶ locked ─checkpoint─▶ away ─restore─▶ locked ─unlock─▶ running

A failed lock is undone by unlock, and the process goes on. A process whose checkpoint or restore fails or does not end
in time is lost: the driver does not say what is left of it. It must be killed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.suspension.driver_calls import DriverCallError, DriverCalls

#: States of a process, as the driver numbers them.
RUNNING, LOCKED, AWAY, FAILED = range(4)

#: Seconds that the driver may take to lock a process: it waits for calls of the process that are under way.
LOCK_S: Final = 5.0

#: Seconds for a call that moves nothing.
SHORT_S: Final = 10.0

#: A move is given `SHORT_S` and a second for so many bytes. The slowest that was measured is 1.7 GiB/s out.
SLOWEST_BYTES_S: Final = 256 << 20

#: Seconds between two looks at the state of a process after the driver process has ended within a call.
_LOOK_S = 0.1


@dataclass(eq=False)
class NotSuspendedError(PrefectGPUError):
    """The process could not be suspended, and goes on as before."""

    #: Why.
    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(eq=False)
class ProcessLostError(PrefectGPUError):
    """The driver has left the process in a state that is not known. It must be killed."""

    #: Why.
    problem: str

    def __str__(self) -> str:
        return self.problem


def move_deadline_s(used_bytes: int) -> float:
    """Return the seconds after which a move has failed.

    Args:
        used_bytes: Bytes that the process holds on its devices.
    """
    return SHORT_S + used_bytes / SLOWEST_BYTES_S


def move_out(calls: DriverCalls, pid: int, used_bytes: int) -> float:
    """Move a process's GPU memory to the host. Its threads stand in their next call of the driver until `move_in`.

    Args:
        calls: Of the driver.
        pid: Of the process.
        used_bytes: Bytes that it holds on its devices.

    Returns:
        Seconds that it took.

    Raises:
        NotSuspendedError: It goes on as before.
        ProcessLostError: It must be killed.
    """
    begun_s = time.monotonic()
    try:
        _call(
            calls, "lock", pid, str(round(1000 * LOCK_S)), deadline_s=LOCK_S + SHORT_S, then=LOCKED
        )
    except DriverCallError as error:
        _unlock(calls, pid, f"it could not be locked: {error}")
        raise NotSuspendedError(str(error)) from error
    try:
        _call(calls, "checkpoint", pid, deadline_s=move_deadline_s(used_bytes), then=AWAY)
    except DriverCallError as error:
        raise ProcessLostError(str(error)) from error
    return time.monotonic() - begun_s


def move_in(
    calls: DriverCalls, pid: int, used_bytes: int, onto: Mapping[str, str] | None = None
) -> float:
    """Move a process's memory back from the host; it goes on.

    Only with the room reserved and seen free: a restore that finds no room loses the process.

    Args:
        calls: Of the driver.
        pid: Of the process.
        used_bytes: Bytes that it will hold on its devices.
        onto: The new device of each device that the process can name, by UUID; `None`: where it was.

    Returns:
        Seconds that it took.

    Raises:
        ProcessLostError: It must be killed.
    """
    begun_s = time.monotonic()
    words = [uuid for pair in (onto or {}).items() for uuid in pair]
    try:
        _call(calls, "restore", pid, *words, deadline_s=move_deadline_s(used_bytes), then=LOCKED)
    except DriverCallError as error:
        raise ProcessLostError(str(error)) from error
    _unlock(calls, pid, "it could not be unlocked")
    return time.monotonic() - begun_s


def _unlock(calls: DriverCalls, pid: int, why: str) -> None:
    """Let a locked process go on; one that is not locked does so already.

    Raises:
        ProcessLostError: It stays locked.
    """
    try:
        _call(calls, "unlock", pid, deadline_s=SHORT_S, then=RUNNING)
    except DriverCallError:
        try:
            if calls.call("state", pid, deadline_s=SHORT_S) == RUNNING:
                return
        except DriverCallError as silent:
            error = silent
        raise ProcessLostError(f"{why}, and {error}") from error


def _call(
    calls: DriverCalls, step: str, pid: int, *words: str, deadline_s: float, then: int
) -> None:
    """Make a call. If the driver process ends within it, look at what has become of the process.

    The driver carries out a call in the process itself, so it may end well without the process that asked for it.

    Raises:
        DriverCallError: The process has not reached the state `then` within the deadline.
    """
    until_s = time.monotonic() + deadline_s
    try:
        calls.call(step, pid, *words, deadline_s=deadline_s)  # type: ignore[arg-type]
        return
    except DriverCallError as error:
        if error.code is not None:
            raise
        first = error
    while time.monotonic() < until_s:
        if calls.call("state", pid, deadline_s=SHORT_S) == then:
            return
        time.sleep(_LOOK_S)
    raise first
