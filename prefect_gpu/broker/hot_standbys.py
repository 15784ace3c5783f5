"""The hot standbys of one broker: each is lent a device, handed to a task, and taken back.

A hot standby is a process that has started its framework on a device before its task comes. This module covers
what it holds there, from the reservation until its memory is back, and which tasks may take it. Which device
one is started on, which task takes one and which must end for a task is decided in `scheduling.standbys`. The
process itself belongs to `processes.standby_pool`. Locking and reading the devices is the broker's work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prefect_gpu.broker.device_view import RecoveryWatch
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import Clock
from prefect_gpu.devices.reader import DeviceReader, ProcessMemory
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Reading, Request, Reservation
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.scheduling.standbys import choose_device

#: What is called without the broker's lock; `None`: nothing is.
Call = Callable[[], object] | None


@dataclass(eq=False)
class HotStandby:
    """One hot standby."""

    #: Its name in the ledger.
    id: str
    #: Tasks of this kind may take it.
    kind: Hashable
    pid: int
    #: Ends its process. Called without the broker's lock.
    give_up: Callable[[], object]
    #: The process was told to start its framework, so a task may take it, and it may hold memory of the device.
    started: bool = False
    #: It was asked to end. It holds its memory until then.
    ending: bool = False
    #: Its place in the ledger, and the memory that is waited for after its end.
    ticket: Ticket = field(init=False)
    #: What the reader of its device keeps of it.
    memory: ProcessMemory = field(init=False)
    #: The request that has taken it, of whose reservation its memory is then a part; `None`: none has.
    taken_by: Ticket | None = None

    @property
    def device(self) -> Device:
        """The device that it is on."""
        assert self.ticket.placement is not None
        return self.ticket.placement.devices[0]


class HotStandbys:
    """All hot standbys of one broker.

    Not safe to use from several threads at once: the broker calls it with its lock. What a method returns to
    be called, the broker calls without the lock.

    Args:
        reader: Reads the devices.
        ledger: Where reservations are written.
        recovery: Waits for the memory of those that have ended.
        clock: Time.
        style: How tasks are placed.
    """

    def __init__(
        self,
        reader: DeviceReader,
        ledger: Ledger,
        recovery: RecoveryWatch,
        clock: Clock,
        style: PlacementStyle,
    ) -> None:
        self._reader = reader
        self._ledger = ledger
        self._recovery = recovery
        self._clock = clock
        self._style = style
        #: By id, the oldest first.
        self._standbys: dict[str, HotStandby] = {}

    @property
    def without_task(self) -> tuple[HotStandby, ...]:
        """All whose reservation is their own."""
        return tuple(s for s in self._standbys.values() if s.taken_by is None)

    @property
    def offers(self) -> Mapping[str, Hashable]:
        """The kind of each that a task may take, by id."""
        return {s.id: s.kind for s in self.without_task if s.started and not s.ending}

    def lend(
        self,
        standby: HotStandby,
        states: Sequence[DeviceState],
        reading: Reading,
        version: int,
        context_bytes: Mapping[DeviceKey, int],
        avoid: Container[str],
    ) -> bool:
        """Choose a device for a new hot standby and reserve its context there.

        Args:
            standby: Its process has not used a device.
            states: All devices.
            reading: What `states` was made from.
            version: Of the ledger then. Where another broker has changed it since, nothing is reserved.
            context_bytes: The size of its context on each device.
            avoid: UUIDs of devices where its framework does not start.

        Returns:
            Whether it is reserved.
        """
        counts = Counter(s.device.key for s in self.without_task if s.kind == standby.kind)
        device = choose_device(states, self._style, context_bytes, counts, avoid)
        if device is None:
            return False
        name, size = "a hot standby", context_bytes[device.key]
        reservation = Reservation(standby.id, *device.key, size, task_name=name, standby=True)
        request = Request(standby.id, name, -1, self._clock.now())
        entry = Entry(request, reservations=(reservation,), devices=(device.key,))
        if not self._ledger.try_write(version, {standby.id: entry}):
            return False
        standby.memory = self._reader.process_memory((device.uuid,), None)
        standby.ticket = Ticket(request, pid=standby.pid)
        standby.ticket.placement = Placement(standby.id, (device,), (size,), (reservation,))
        self._recovery.take_baseline(standby.ticket, reading)
        self._ledger.attach(standby.id, standby.pid)
        self._standbys[standby.id] = standby
        return True

    def offer(self, standby_id: str) -> None:
        """Allow tasks to take one whose process is about to start its framework."""
        standby = self._standbys.get(standby_id)
        if standby is None:
            return
        standby.started = True
        standby.memory.attach(standby.pid)
        # Where the device lists no processes, it is taken to hold this.
        assert standby.ticket.placement is not None
        standby.ticket.stand_in_bytes = standby.ticket.placement.budget_bytes[0]

    def hand_over(self, standby_id: str, ticket: Ticket) -> None:
        """Assign one to a request whose reservation replaces the standby's."""
        standby = self._standbys[standby_id]
        standby.taken_by = ticket
        ticket.standby_id = standby_id
        ticket.pid = standby.pid
        ticket.stand_in_bytes = standby.ticket.stand_in_bytes
        self._ledger.attach(ticket.request.id, standby.pid)

    def attach(self, ticket: Ticket, pid: int) -> Call:
        """Note which process has a request's task: the hot standby that was kept for it, or another."""
        standby = self._standbys.get(ticket.standby_id)
        if standby is None or standby.pid != pid:
            return self.leave(ticket)
        del self._standbys[standby.id]
        ticket.standby_id = ""
        return None

    def leave(self, ticket: Ticket) -> Call:
        """End the hot standby that was kept for a request, if there is one: the request will not use it."""
        standby = self._standbys.get(ticket.standby_id)
        if standby is None:
            return None
        # Its reservation is the request's. What it holds until it is gone is not foreign memory.
        self._take_back(standby)
        standby.ending = True
        return standby.give_up

    def reclaim(self, standby_id: str) -> Call:
        """Take one back from its process, because another needs the memory."""
        standby = self._standbys.get(standby_id)
        if standby is None or standby.taken_by is not None or standby.ending:
            return None
        standby.ending = True
        return standby.give_up

    def end(self, standby_id: str) -> Call:
        """Note that a process is gone; without effect where a task has it."""
        standby = self._standbys.pop(standby_id, None)
        if standby is None:
            return None
        self._take_back(standby)
        standby.memory.detach()
        if not standby.started:
            return partial(self._ledger.release, standby_id)
        # Its reservation stands until the device shows the memory back.
        ticket = standby.ticket
        ticket.ended_s = self._clock.now()
        ticket.ended_pid, ticket.pid = ticket.pid, None
        self._recovery.begin(ticket, ticket.ended_s)
        return None

    @staticmethod
    def _take_back(standby: HotStandby) -> None:
        """Make the request that has taken it start a process of its own."""
        ticket, standby.taken_by = standby.taken_by, None
        if ticket is not None:
            ticket.standby_id = ""
            if ticket.pid == standby.pid:
                ticket.pid = None
                ticket.stand_in_bytes = 0
