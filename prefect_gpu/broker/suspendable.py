"""A task's process as the machine that it runs on knows it: what decides whether and where it is suspended and resumed.

It is the half of a `suspension.suspended.Subject` that must be near the process: its size, its unused memory, the room
on its device, its reservation. The other half, what is done with the news, is the flow's. On one machine both are in
the flow's process; on a cluster this half is in the agent of the node.
"""

from __future__ import annotations

import contextlib
import queue as queues
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.devices.host import mps_runs, read_host_available_bytes
from prefect_gpu.processes.messages import (
    BodyStarted,
    CountersRead,
    ReleasedUnused,
    ReleaseUnused,
)
from prefect_gpu.suspension.eligibility import Candidate

#: Seconds that a process has to return unused device memory before it is suspended without. Its thread for that looks every
#: 5 ms, but a body that holds the interpreter's lock keeps it from looking.
RELEASE_S: Final = 0.5

#: Seconds to wait for the reading of the devices that shows what is left to move.
READING_S: Final = 2.0


class SuspendableProcess:
    """The process of a placed request.

    Args:
        broker: Of its devices.
        ticket: Of the request.
        send: Sends a message to the process.
    """

    def __init__(self, broker: Broker, ticket: Ticket, send: Callable[[Any], None]) -> None:
        self._broker = broker
        self._ticket = ticket
        self._send = send
        #: Frameworks that it has used so far, as its last counters say.
        self._frameworks: tuple[str, ...] = ()
        #: Its body has begun: something in it listens.
        self._listens = False
        self._released: queues.SimpleQueue[ReleasedUnused] = queues.SimpleQueue()
        self._noted = threading.Condition()
        #: Bytes that each of its processes holds, by process id, and monotonic seconds of the reading that showed it.
        self._held_bytes: Mapping[int, int] = {}
        self._noted_s = 0.0
        #: UUID of the device where it was when it was suspended.
        self._left_uuid = ""

    def hear(self, message: Any) -> None:
        """Take a message of the process; those that say nothing of this are ignored."""
        if isinstance(message, BodyStarted):
            self._listens = True
        elif isinstance(message, CountersRead) and message.counters is not None:
            self._frameworks = message.frameworks
        elif isinstance(message, ReleasedUnused):
            self._released.put(message)

    def take_measurement(self, at_s: float, measured: Sequence[Measured]) -> None:
        """Take a reading of its devices (monotonic seconds), which was not made while its memory was on the way."""
        with self._noted:
            self._held_bytes = {
                pid: size for each in measured for pid, size in each.by_pid.items() if size
            }
            self._noted_s = at_s
            self._noted.notify_all()

    def lost_before(self) -> bool:
        """Return whether a process of its task was lost in a move before."""
        raise NotImplementedError

    # What a `Subject` says of it.

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
            mps=mps_runs(),
            lost_before=self.lost_before(),
        )

    def trim(self) -> None:
        """See `Subject.trim`."""
        if not self._listens:
            return
        request = ReleaseUnused(time.monotonic() + RELEASE_S)
        self._send(request)
        with contextlib.suppress(queues.Empty):
            # What came too late for an earlier request is in the queue, too.
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
        return self._broker.comes_back(self._ticket)

    def onto(self) -> Mapping[str, str] | None:
        """See `Subject.onto`."""
        was, now = self._left_uuid, self._ticket.devices[0].uuid
        if was == now:
            return None
        others = (device.uuid for device in self._broker.devices)
        return {**{uuid: uuid for uuid in others}, was: now, now: was}

    def begun(self) -> None:
        """See `Subject.begun`."""
        self._left_uuid = self._ticket.devices[0].uuid
