"""Suspending and resuming one task's process on request.

    asked ─▶ eligible? ─▶ trimmed ─▶ moving out ─▶ away ─▶ room? ─▶ moving in ─▶ running

A thread starts when a suspension is requested and lives until the process runs again. So resuming cannot fail for want
of a thread. The thread reads the state of the process from a `Subject`, and reports each stage to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from prefect_gpu.errors import CapacityError
from prefect_gpu.measurements import Suspension
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread
from prefect_gpu.suspension.driver_calls import DriverCalls
from prefect_gpu.suspension.eligibility import Candidate, refusal
from prefect_gpu.suspension.moves import NotSuspendedError, ProcessLostError, move_in, move_out
from prefect_gpu.units import MIB, format_bytes, format_seconds

logger = logging.getLogger(__name__)

#: Bytes that a device must have free beside the bytes to restore: a restore without room loses the process.
ROOM_MARGIN_BYTES = 512 * MIB

#: Seconds between two checks of the device's free memory.
ROOM_S = 0.25

#: Seconds after which the device is read again before a restore, if `Subject.comes_back` took so long.
OLD_S = 0.5

#: Beginning of the text of `Subject.tell` for the stage `refused`; the reason follows.
REFUSED = "not suspended: "

#: Progress of a suspension.
Stage = Literal["refused", "moving out", "away", "moving in", "running"]


class Subject(Protocol):
    """A task's process, as seen by its `Suspender`, whose thread calls all methods."""

    def candidate(self) -> Candidate:
        """Return the current values that decide whether the process may be suspended."""
        ...

    def trim(self) -> None:
        """Ask the process to free unused device memory, then read its device again. Does not wait long for an answer."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free bytes of the process's device, from a new reading; `None`: the device does not answer."""
        ...

    def comes_back(self) -> bool:
        """Record that the process resumes; return `False` if it has no reservation, or a new suspension was requested."""
        ...

    def onto(self) -> Mapping[str, str] | None:
        """Return the new device of each device that the process can see, by UUID; `None`: the same devices."""
        ...

    def tell(self, stage: Stage, text: str) -> None:
        """Show the stage and its text for people, which is empty once the process runs."""
        ...

    def begun(self) -> None:
        """Record that the process is suspended from now on."""
        ...

    def ended(self, suspension: Suspension | None) -> None:
        """Record that the process runs again; `None`: the suspension failed."""
        ...

    def lost(self, why: str) -> None:
        """Kill the process, which the driver has left in an unknown state."""
        ...


def lost_tasks() -> set[str]:
    """Return the keys of tasks, in this Python process, that lost a process in a move. They are not moved again."""
    return PROCESS_RESOURCES.get("tasks lost in a move", set[str])


def shared_calls() -> DriverCalls:
    """Return the `DriverCalls` that all tasks of this Python process share."""
    return PROCESS_RESOURCES.get("driver calls", DriverCalls)


class Suspender:
    """Suspends and resumes the process `pid`; `calls` is `shared_calls` by default. Safe to use from several threads."""

    def __init__(
        self, pid: int, subject: Subject, calls: Callable[[], DriverCalls] | None = None
    ) -> None:
        self._pid = pid
        self._subject = subject
        self._calls = calls or (lambda: shared_calls())
        self._changed = threading.Condition()
        self._wanted = False
        #: Number of requests to suspend so far.
        self._asked = 0
        #: Whether the process's memory is on the host, or on the way there or back.
        self.away = False
        self._gone = False
        self._thread: threading.Thread | None = None
        #: Values of the current suspension.
        self._begun_s = self._out_s = 0.0
        self._moved_bytes = 0

    @property
    def away_s(self) -> float | None:
        """Seconds since the current suspension began; `None`: not suspended."""
        return time.monotonic() - self._begun_s if self.away else None

    def ask(self, away: bool) -> None:
        """Ask to suspend the process (`away=True`) or to resume it, without waiting; the last request counts."""
        with self._changed:
            self._wanted = away
            self._asked += away
            self._changed.notify_all()
            if self._thread is None and not self._gone and self._wanted != self.away:
                try:
                    self._thread = start_thread(self._run, "prefect-gpu-suspend")
                except CapacityError as error:
                    # A suspended process has a thread, so this request is to suspend.
                    self._refuse(str(error), self._asked)

    def end(self) -> None:
        """End the thread: the process has ended, or is about to be killed."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self.away and self._wanted and not self._gone:
                    self._changed.wait()
                if self._gone or self._wanted == self.away:
                    self._thread = None
                    return
                out, asked = self._wanted, self._asked
            try:
                if out:
                    self._suspend(asked)
                else:
                    self._resume()
            except ProcessLostError as error:
                self._lose(str(error))
            except Exception as error:
                logger.exception("a GPU task could not be suspended or resumed")
                self._lose(str(error))

    def _lose(self, why: str) -> None:
        with self._changed:
            gone, self._gone = self._gone, True
        # The move may have failed because the process has ended.
        if not gone:
            self._subject.lost(why)

    def _suspend(self, asked: int) -> None:
        try:
            calls = self._calls()
            candidate = self._subject.candidate()
            problem = refusal(candidate) or calls.unsupported()
            if not problem:
                self._subject.trim()
                candidate = self._subject.candidate()
                problem = refusal(candidate)
        except Exception as error:
            # Nothing was done to the process.
            logger.exception("a GPU task could not be suspended")
            problem = str(error)
        if problem:
            self._refuse(problem, asked)
            return
        self._subject.tell("moving out", "moving to the host")
        self._begun_s = time.monotonic()
        self.away = True
        self._subject.begun()
        try:
            self._out_s = move_out(calls, self._pid, candidate.used_bytes)
        except NotSuspendedError as error:
            self.away = False
            self._subject.ended(None)
            self._refuse(str(error), asked)
            return
        self._moved_bytes = candidate.used_bytes
        moved, took = format_bytes(self._moved_bytes), format_seconds(self._out_s)
        self._subject.tell("away", f"away: {moved} in host memory, moved in {took}")

    def _refuse(self, problem: str, asked: int) -> None:
        """Refuse the suspension request of number `asked`, unless a later one is waiting for its own answer."""
        with self._changed:
            if self._asked == asked or not self._wanted:
                self._wanted = False
                self._subject.tell("refused", f"{REFUSED}{problem}")

    def _resume(self) -> None:
        if not self._wait_for_room():
            return
        in_s = move_in(self._calls(), self._pid, self._moved_bytes, self._subject.onto())
        self.away = False
        done = Suspension(self._begun_s, time.monotonic(), self._out_s, in_s, self._moved_bytes)
        self._subject.ended(done)
        self._subject.tell("running", "")

    def _wait_for_room(self) -> bool:
        """Wait until the device has room for the process; return whether the process is still to resume."""
        need_bytes = self._moved_bytes + ROOM_MARGIN_BYTES
        told = ""
        while True:
            free_bytes = self._subject.free_bytes()
            fits = free_bytes is not None and free_bytes >= need_bytes
            if fits:
                read_s = time.monotonic()
                if self._subject.comes_back():
                    if time.monotonic() - read_s <= OLD_S:
                        return True
                    free_bytes = self._subject.free_bytes()
                    fits = free_bytes is not None and free_bytes >= need_bytes
                    if fits:
                        return True
                    # `comes_back` has recorded a resumption: report again that the process waits.
                    told = ""
            free = "its device does not answer"
            if free_bytes is not None:
                free = "others have taken its device's memory"
            if not fits and free != told:
                told = free
                self._subject.tell("away", f"away, waits for {format_bytes(need_bytes)}: {free}")
            with self._changed:
                if not self._gone and not self._wanted:
                    self._changed.wait(ROOM_S)
                if self._gone or self._wanted:
                    return False
