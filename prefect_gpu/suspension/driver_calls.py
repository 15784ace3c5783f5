"""The flow's side of `driver_process`: sends the CUDA driver's checkpoint calls with deadlines; `moves` has their order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefect_gpu.devices.spec import VISIBLE_VARIABLE
from prefect_gpu.errors import CapacityError, PrefectGPUError
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread
from prefect_gpu.suspension import driver_process

Step = Literal["state", "lock", "checkpoint", "restore", "unlock"]

#: Seconds for the driver process to load and initialise the driver: 0.3 s on an idle machine.
START_S = 30.0

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
