"""Moving a process's GPU memory to the host and back: the CUDA driver's checkpoint calls, their order and failures.

    running ─lock─▶ locked ─checkpoint─▶ away ─restore─▶ locked ─unlock─▶ running

`driver_process` makes the calls, each with a deadline. After a failed lock the process is unlocked and continues. A
process is *lost*, and must be killed, if its checkpoint or restore fails or has no end in time: the driver leaves it in
an unknown state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from prefect_gpu.devices.spec import VISIBLE_VARIABLE
from prefect_gpu.errors import CapacityError, PrefectGPUError
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread
from prefect_gpu.suspension import driver_process

Step = Literal["state", "lock", "checkpoint", "restore", "unlock"]

#: Seconds for the driver process to load and initialise the driver: 0.3 s on an idle machine.
START_S = 30.0

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

#: Meaning of the driver's expected errors, by their number in `cuda.h`.
RESULTS = {
    1: "invalid value",
    2: "out of memory",
    304: "the operating system refused it",
    401: "the process is not in the state for this call",
    500: "the driver or the process is not there",
    600: "not in time",
    800: "not permitted",
    801: "not supported",
}


@dataclass(eq=False)
class DriverCallError(PrefectGPUError):
    """The driver refused a call, or did not answer."""

    step: str
    #: `CUresult`; `None`: no answer.
    code: int | None
    #: Why there was no answer.
    problem: str = ""
    #: Whether there was no answer because the driver process has ended.
    ended: bool = False

    def __str__(self) -> str:
        if self.code is None:
            return f"the driver's {self.step}: {self.problem}"
        return f"the driver's {self.step} failed with {self.code} ({RESULTS.get(self.code, 'see cuda.h')})"


class NotSuspendedError(PrefectGPUError):
    """A process could not be suspended, and runs as before. The text says why."""


class ProcessLostError(PrefectGPUError):
    """The driver has left a process in an unknown state: the process must be killed. The text says why."""


@dataclass(slots=True)
class _Call:
    """A call that waits for its answer."""

    answered: threading.Event = field(default_factory=threading.Event)
    code: int | None = None
    value: int = 0


class _Process:
    """One driver process. A thread reads its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._started = _Call()
        #: Unanswered calls by id; `None`: the process has ended.
        self._calls: dict[str, _Call] | None = {"0": self._started}
        self._number = 0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Ctrl-C in the terminal must not reach the driver process.
            start_new_session=True,
            cwd="/",
            # The driver must see every device of the machine.
            env={k: v for k, v in os.environ.items() if k != VISIBLE_VARIABLE},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.kill = self._process.kill
        try:
            start_thread(self._read, "prefect-gpu-driver-calls")
        except CapacityError:
            with self._process:
                self._process.kill()
            raise

    @property
    def ended(self) -> bool:
        return self._calls is None

    def support(self) -> str:
        """Return why this driver cannot suspend processes, as text; empty: it can."""
        if not self._started.answered.wait(START_S):
            return f"the CUDA driver has not answered for {START_S:g}s"
        if self._started.code is None:
            return "the process that calls the CUDA driver has ended"
        if self._started.code:
            return f"the CUDA driver cannot be used here (result {self._started.code})"
        return "" if self._started.value else "the NVIDIA driver is older than 570"

    def call(self, step: str, pid: int, words: Sequence[str], deadline_s: float) -> int:
        call = _Call()
        with self._lock:
            if self._calls is None:
                call.answered.set()
            else:
                self._number += 1
                self._calls[str(self._number)] = call
                line = " ".join([str(self._number), step, str(pid), *words]) + "\n"
                # If the process has ended, `_read` answers the call.
                with contextlib.suppress(OSError):
                    os.write(self._stdin.fileno(), line.encode())
        if not call.answered.wait(deadline_s):
            raise DriverCallError(step, None, f"no answer after {deadline_s:.1f}s")
        if call.code is None:
            raise DriverCallError(step, None, "the process that calls the driver has ended", True)
        if call.code:
            raise DriverCallError(step, call.code)
        return call.value

    def _read(self) -> None:
        for line in self._stdout:
            try:
                number, code, value = line.decode().split()
                with self._lock:
                    call = (self._calls or {}).pop(number, None)
                if call is not None:
                    call.code, call.value = int(code), int(value)
                    call.answered.set()
            except ValueError:
                # A part of a line: the process was killed.
                continue
        with self._lock:
            unanswered, self._calls = self._calls or {}, None
            self._stdin.close()
        for call in unanswered.values():
            call.answered.set()
        self._stdout.close()
        self._process.wait()

    def forget(self) -> None:
        """Close the pipes in a fork of the flow: with an open copy, the driver process would outlive the flow."""
        # `os.close` needs no lock of a pipe object, which a thread of the flow may have held at the fork.
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError, ValueError):
                os.close(pipe.fileno())
        self._process.returncode = 0


class DriverCalls:
    """The CUDA driver's checkpoint calls, made by a driver process. Safe to use from several threads.

    The driver process, started by `command`, starts at the first call, after its own end, and in each fork of the flow.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable, "-I", "-S", driver_process.__file__)
    ) -> None:
        self._command = tuple(command)
        self._reset()
        PROCESS_RESOURCES.after_fork(self, DriverCalls._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def _forget(self) -> None:
        process = self._process
        self._reset()
        if process is not None:
            process.forget()

    def unsupported(self) -> str:
        """Return why no process can be suspended on this machine, as text for people; empty: processes can be."""
        try:
            return self._running().support()
        except (OSError, CapacityError) as error:
            return f"the process that calls the CUDA driver cannot be started: {error}"

    def call(self, step: Step, pid: int, *words: str, deadline_s: float) -> int:
        """Make one call for the process `pid` and return its value; `driver_process` has the meaning of `words`.

        Raises:
            DriverCallError: The call failed, or had no answer within `deadline_s` seconds. The driver may still make it.
        """
        try:
            process = self._running()
        except (OSError, CapacityError) as error:
            raise DriverCallError(step, None, f"its process cannot be started: {error}") from error
        return process.call(step, pid, words, deadline_s)

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.ended:
                self._process = _Process(self._command)
            return self._process

    def close(self) -> None:
        """Kill the driver process, also during a call."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()


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
