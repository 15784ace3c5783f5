"""A task's process as a `Subject`: the interface of the thread that suspends and resumes it (`suspension.suspended`).

`SuspendableProcess` knows the process's memory, the room on its device and its reservation. It reports suspensions to
the ledger, the log and the report of the task run, and the engine's thread.
"""

from __future__ import annotations

import contextlib
import queue as queues
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ticket import BY_HAND, Measured, Ticket
from prefect_gpu.devices.host import mps_runs, read_host_available_bytes
from prefect_gpu.measurements import Suspension
from prefect_gpu.processes.messages import (
    BodyStarted,
    CountersRead,
    ReleasedUnused,
    ReleaseUnused,
)
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.suspension.eligibility import Candidate
from prefect_gpu.suspension.suspended import Stage, lost_tasks
from prefect_gpu.units import format_bytes, format_seconds

#: Most seconds to wait until a process has returned unused device memory; then it is suspended anyway. Its thread looks
#: every 5 ms, but a body that holds the interpreter's lock blocks the thread.
RELEASE_S: Final = 0.5

#: Seconds to wait for the device reading that shows the remaining memory.
READING_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Suspended:
    """The process was suspended at `at_s` (monotonic seconds)."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The process has run again since `at_s` (monotonic seconds)."""

    at_s: float


@dataclass(frozen=True, slots=True)
class AwaitsReturn:
    """The suspended process waits to resume."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Lost:
    """The process is to be killed: the driver lost its state, or no device is left for it; `why` is text for people."""

    why: str


SuspensionMessage = Suspended | Resumed | AwaitsReturn | Lost


class SuspendableProcess:
    """The process of a placed request.

    `send` sends a message to the process, `tell` to the engine's thread; `say` writes to the task run's log;
    `add_suspension` adds to the task run's report. `is_client`: whether it is a client of MPS (`None`: not known).
    """

    def __init__(
        self,
        broker: Broker,
        ticket: Ticket,
        task_key: str,
        send: Callable[[Any], None],
        tell: Callable[[SuspensionMessage], None],
        say: Callable[[str], None],
        add_suspension: Callable[[Suspension], None],
        is_client: bool | None = None,
    ) -> None:
        self._broker = broker
        self._ticket = ticket
        self._task_key = task_key
        self._send = send
        self._tell = tell
        self._say = say
        self._add_suspension = add_suspension
        self._is_client = is_client
        #: Frameworks that the process has used so far, by its last counters.
        self._frameworks: tuple[str, ...] = ()
        #: Whether the body has begun, so that a thread in the process answers messages.
        self._listens = False
        self._released: queues.SimpleQueue[ReleasedUnused] = queues.SimpleQueue()
        self._noted = threading.Condition()
        #: Bytes of the process and its descendants by process id, and monotonic seconds of that reading.
        self._held_bytes: Mapping[int, int] = {}
        self._noted_s = 0.0
        #: UUID of the device at the suspension.
        self._left_uuid = ""
        self._reason = ""
        #: Text of the last refusal to suspend.
        self._refused = ""

    def hear(self, message: Any) -> None:
        """Handle a message from the process: begun body, counters, or released memory; other messages are ignored."""
        if isinstance(message, BodyStarted):
            self._listens = True
        elif isinstance(message, CountersRead) and message.counters is not None:
            self._frameworks = message.frameworks
        elif isinstance(message, ReleasedUnused):
            self._released.put(message)

    def take_measurement(self, at_s: float, measured: Sequence[Measured]) -> None:
        """Store the process's memory by a reading at `at_s` (monotonic), which was not made while the memory was moved."""
        with self._noted:
            self._held_bytes = {
                pid: size for each in measured for pid, size in each.by_pid.items() if size
            }
            self._noted_s = at_s
            self._noted.notify_all()

    # The methods of `Subject`, called on the suspension's thread.

    def candidate(self) -> Candidate:
        """See `Subject.candidate`."""
        held = self._held_bytes
        return Candidate(
            kind=self._broker.kind,
            device_uuids=tuple(device.uuid for device in self._ticket.devices),
            used_bytes=sum(held.values()),
            processes=len(held),
            frameworks=self._frameworks,
            host_available_bytes=read_host_available_bytes(),
            mps=mps_runs() if self._is_client is None else self._is_client,
            lost_before=self._task_key in lost_tasks(),
        )

    def trim(self) -> None:
        """See `Subject.trim`."""
        if not self._listens:
            return
        request = ReleaseUnused(time.monotonic() + RELEASE_S)
        self._send(request)
        with contextlib.suppress(queues.Empty):
            # The queue may have late answers to an earlier request.
            while self._released.get(
                timeout=max(0.0, request.until_s - time.monotonic())
            ) != ReleasedUnused(request.until_s):
                pass
        asked_s = time.monotonic()
        self._broker.refresh()
        with self._noted:
            self._noted.wait_for(lambda: self._noted_s >= asked_s, READING_S)

    def free_bytes(self) -> int | None:
        """See `Subject.free_bytes`."""
        return self._broker.free_bytes(self._ticket.devices[0])

    def comes_back(self) -> bool:
        """See `Subject.comes_back`."""
        self._broker.show_suspension(self._ticket, "moving in", "moving back")
        return self._ticket.may_resume.get()

    def onto(self) -> Mapping[str, str] | None:
        """See `Subject.onto`."""
        was, now = self._left_uuid, self._ticket.devices[0].uuid
        if was == now:
            return None
        others = (device.uuid for device in self._broker.devices)
        return {**{uuid: uuid for uuid in others}, was: now, now: was}

    def tell(self, stage: Stage, text: str) -> None:
        """See `Subject.tell`."""
        self._broker.show_suspension(self._ticket, stage, text)
        if stage == "refused" and text != self._refused:
            # A task that may be suspended for others can be refused for the same reason many times.
            self._refused = text
            self._say(f"{text[0].upper()}{text[1:]}")
        elif stage in ("moving out", "away"):
            reason = self._ticket.held_back_for
            kind = WaitKind.RESUME if reason == BY_HAND else WaitKind.ROOM
            self._tell(AwaitsReturn(Reason(kind, suspended_for=reason, detail=text)))

    def begun(self) -> None:
        """See `Subject.begun`."""
        self._left_uuid = self._ticket.devices[0].uuid
        self._reason = self._ticket.held_back_for
        self._tell(Suspended(time.monotonic()))

    def ended(self, suspension: Suspension | None) -> None:
        """See `Subject.ended`."""
        if suspension is not None:
            device = self._ticket.devices[0]
            done = replace(suspension, reason=self._reason, device=device.label)
            self._add_suspension(done)
            where = "" if device.uuid == self._left_uuid else f", now on {device.label},"
            self._say(
                f"Goes on{where} after {format_seconds(done.seconds)}, suspended for {done.reason}: "
                f"{format_bytes(done.moved_bytes)} were in host memory "
                f"(out in {format_seconds(done.out_s)}, back in {format_seconds(done.in_s)})"
            )
        self._tell(Resumed(time.monotonic()))

    def lost(self, why: str) -> None:
        """See `Subject.lost`."""
        self._tell(Lost(why))
