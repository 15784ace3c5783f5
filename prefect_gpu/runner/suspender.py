"""Suspend and resume one task's process on request.

    asked ─▶ eligible? ─▶ trimmed ─▶ moving out ─▶ away ─▶ room? ─▶ moving in ─▶ running

A thread starts when a suspension is requested and lives until the process runs again. So resuming cannot fail for want
of a thread. It reports each stage to the ledger, to the log and the report of the task run, and to the engine's thread.
The driver's calls are in `suspension`; `scheduling` decides which process is suspended, and when.
"""

from __future__ import annotations

import contextlib
import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.ticket import BY_HAND, Measured
from prefect_gpu.devices.host import mps_runs, read_host_available_bytes
from prefect_gpu.errors import CapacityError
from prefect_gpu.measurements import Suspension
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread
from prefect_gpu.processes.messages import ReleasedUnused, ReleaseUnused
from prefect_gpu.runner.process_run import AwaitsReturn, Lost, Resumed, Suspended
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.suspension.driver_calls import (
    DriverCalls,
    NotSuspendedError,
    ProcessLostError,
    move_in,
    move_out,
)
from prefect_gpu.suspension.eligibility import REFUSED, Candidate, refusal
from prefect_gpu.units import MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from prefect_gpu.runner.attempt import Attempt

logger = logging.getLogger(__name__)

#: Most seconds to wait until a process has returned unused device memory; then it is suspended anyway. Its thread looks
#: every 5 ms, but a body that holds the interpreter's lock blocks the thread.
RELEASE_S: Final = 0.5

#: Seconds to wait for the device reading that shows the remaining memory.
READING_S: Final = 2.0

#: Bytes that a device must have free beside the bytes to restore: a restore without room loses the process.
ROOM_MARGIN_BYTES = 512 * MIB

#: Seconds between two checks of the device's free memory.
ROOM_S = 0.25

#: Seconds after which the device is read again before a restore, if the ledger's answer took so long.
OLD_S = 0.5


def lost_tasks() -> set[str]:
    """Return the keys of tasks, in this Python process, that lost a process in a move. They are not moved again."""
    return PROCESS_RESOURCES.get("tasks lost in a move", set[str])


def shared_calls() -> DriverCalls:
    """Return the `DriverCalls` that all tasks of this Python process share."""
    return PROCESS_RESOURCES.get("driver calls", DriverCalls)


class Suspender:
    """Suspends and resumes a started process; `calls` is `shared_calls` by default. Safe to use from several threads."""

    def __init__(
        self, pid: int, process: Attempt, calls: Callable[[], DriverCalls] | None = None
    ) -> None:
        self._pid = pid
        self._process = process
        self._broker, self._ticket = process.broker, process.ticket
        self._calls = calls or (lambda: shared_calls())
        self._changed = threading.Condition()
        self._wanted = False
        #: Number of requests to suspend so far.
        self._asked = 0
        #: Whether the process's memory is on the host, or on the way there or back.
        self.away = False
        self._gone = False
        self._thread: threading.Thread | None = None
        self._noted = threading.Condition()
        #: Bytes of the process and its descendants by process id, and monotonic seconds of that reading.
        self._held_bytes: Mapping[int, int] = {}
        self._noted_s = 0.0
        #: Answers of the process to `ReleaseUnused`.
        self.released: queues.SimpleQueue[ReleasedUnused] = queues.SimpleQueue()
        #: Text of the last refusal to suspend.
        self._refused = ""
        #: Values of the current suspension: `_left_uuid` is the device at its begin.
        self._begun_s = self._out_s = 0.0
        self._moved_bytes = 0
        self._left_uuid = self._reason = ""

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

    def take_measurement(self, at_s: float, measured: Sequence[Measured]) -> None:
        """Store the process's memory by a reading at `at_s` (monotonic), which was not made while the memory was moved."""
        with self._noted:
            self._held_bytes = {
                pid: size for each in measured for pid, size in each.by_pid.items() if size
            }
            self._noted_s = at_s
            self._noted.notify_all()

    # The thread of the suspension.

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
            self._process.tell(Lost(why))

    def _tell(self, trigger: Trigger, text: str) -> None:
        """Show a stage and its text for people, which is empty once the process runs."""
        self._broker.show_suspension(self._ticket, trigger, text)
        if trigger in (Trigger.MOVING_OUT, Trigger.MOVED_OUT):
            reason = self._ticket.held_back_for
            kind = WaitKind.RESUME if reason == BY_HAND else WaitKind.ROOM
            self._process.tell(AwaitsReturn(Reason(kind, suspended_for=reason, detail=text)))

    def _candidate(self) -> Candidate:
        held, is_client = self._held_bytes, self._process.is_client
        return Candidate(
            kind=self._broker.kind,
            device_uuids=tuple(device.uuid for device in self._ticket.devices),
            used_bytes=sum(held.values()),
            processes=len(held),
            frameworks=self._process.record.used_frameworks,
            host_available_bytes=read_host_available_bytes(),
            mps=mps_runs() if is_client is None else is_client,
            lost_before=self._process.call.plan.task_key in lost_tasks(),
        )

    def _trim(self) -> None:
        """Have the process free unused device memory, then read its device again. Does not wait long for an answer."""
        if self._process.record.started_s is None:
            # No thread in the process answers.
            return
        request = ReleaseUnused(time.monotonic() + RELEASE_S)
        self._process.send(request)
        with contextlib.suppress(queues.Empty):
            # The queue may have late answers to an earlier request.
            while self.released.get(
                timeout=max(0.0, request.until_s - time.monotonic())
            ) != ReleasedUnused(request.until_s):
                pass
        asked_s = time.monotonic()
        self._broker.refresh()
        with self._noted:
            self._noted.wait_for(lambda: self._noted_s >= asked_s, READING_S)

    def _suspend(self, asked: int) -> None:
        try:
            calls = self._calls()
            candidate = self._candidate()
            problem = refusal(candidate) or calls.unsupported()
            if not problem:
                self._trim()
                candidate = self._candidate()
                problem = refusal(candidate)
        except Exception as error:
            # Nothing was done to the process.
            logger.exception("a GPU task could not be suspended")
            problem = str(error)
        if problem:
            self._refuse(problem, asked)
            return
        self._tell(Trigger.MOVING_OUT, "moving to the host")
        self._left_uuid = self._ticket.devices[0].uuid
        self._reason = self._ticket.held_back_for
        self._begun_s = time.monotonic()
        self.away = True
        self._process.tell(Suspended(time.monotonic()))
        try:
            self._out_s = move_out(calls, self._pid, candidate.used_bytes)
        except NotSuspendedError as error:
            self.away = False
            self._process.tell(Resumed(time.monotonic()))
            self._refuse(str(error), asked)
            return
        self._moved_bytes = candidate.used_bytes
        moved, took = format_bytes(self._moved_bytes), format_seconds(self._out_s)
        self._tell(Trigger.MOVED_OUT, f"away: {moved} in host memory, moved in {took}")

    def _refuse(self, problem: str, asked: int) -> None:
        """Refuse the suspension request of number `asked`, unless a later one is waiting for its own answer."""
        with self._changed:
            if self._asked != asked and self._wanted:
                return
            self._wanted = False
            self._tell(Trigger.NOT_MOVED, f"{REFUSED}{problem}")
            if problem != self._refused:
                # A task that may be suspended for others can be refused for the same reason many times.
                self._refused = problem
                self._process.call.run.say(f"{REFUSED[0].upper()}{REFUSED[1:]}{problem}")

    def _resume(self) -> None:
        if not self._wait_for_room():
            return
        device = self._ticket.devices[0]
        moved = device.uuid != self._left_uuid
        onto = self._onto(device.uuid) if moved else None
        in_s = move_in(self._calls(), self._pid, self._moved_bytes, onto)
        self.away = False
        done = Suspension(
            self._begun_s,
            time.monotonic(),
            self._out_s,
            in_s,
            self._moved_bytes,
            reason=self._reason,
            device=device.label,
        )
        self._process.record.add_suspension(done)
        where = f", now on {device.label}," if moved else ""
        self._process.call.run.say(
            f"Goes on{where} after {format_seconds(done.seconds)}, suspended for {done.reason}: "
            f"{format_bytes(done.moved_bytes)} were in host memory "
            f"(out in {format_seconds(done.out_s)}, back in {format_seconds(done.in_s)})"
        )
        self._process.tell(Resumed(time.monotonic()))
        self._tell(Trigger.MOVED_IN, "")

    def _onto(self, uuid: str) -> Mapping[str, str]:
        """Return the new device of each device that the process can see, by UUID, if it resumes on another device."""
        others = {device.uuid: device.uuid for device in self._broker.devices}
        return {**others, self._left_uuid: uuid, uuid: self._left_uuid}

    def _wait_for_room(self) -> bool:
        """Wait until the device has room for the process; return whether the process is still to resume."""
        need_bytes = self._moved_bytes + ROOM_MARGIN_BYTES
        told: str | None = None
        while True:
            why = self._no_room(need_bytes)
            read_s = time.monotonic()
            if why is None and self._may_resume():
                if time.monotonic() - read_s > OLD_S:
                    why = self._no_room(need_bytes)
                if why is None:
                    return True
                # A resumption was recorded: report again that the process waits.
                told = None
            if why is not None and why != told:
                told = why
                waits = f"away, waits for {format_bytes(need_bytes)}: {why}"
                self._tell(Trigger.MOVED_OUT, waits)
            with self._changed:
                if not self._gone and not self._wanted:
                    self._changed.wait(ROOM_S)
                if self._gone or self._wanted:
                    return False

    def _no_room(self, need_bytes: int) -> str | None:
        """Return why the process's device has no room for `need_bytes`, by a new reading; `None`: it has."""
        free_bytes = self._broker.free_bytes(self._ticket.devices[0])
        if free_bytes is None:
            return "its device does not answer"
        return None if free_bytes >= need_bytes else "others have taken its device's memory"

    def _may_resume(self) -> bool:
        """Record that the process resumes; return `False` if it has no reservation, or a new suspension was requested."""
        self._tell(Trigger.MOVING_IN, "moving back")
        return self._ticket.may_resume.get()
