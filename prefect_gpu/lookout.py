"""What a broker sees of its devices: their last reading, and what of it our own requests hold.

Covers how fresh the reading is, the room that it leaves on the devices and of the machine itself, what it
says of each process, and what a person is told of it. Asking for readings and deciding on them is `broker`;
the arithmetic is `scheduling.memory`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping

from prefect_gpu.clock import Clock
from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.ledger import Ledger, LedgerView
from prefect_gpu.scheduling.memory import Room, measure, survey_all
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKey,
    DeviceKind,
    DeviceSnapshot,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import select_rooms
from prefect_gpu.scheduling.turns import HostRoom
from prefect_gpu.ticket import Ticket
from prefect_gpu.units import format_seconds

logger = logging.getLogger(__name__)

#: A reading that came longer ago than this (seconds) is not decided on; a new one is asked for first.
FRESH_S = 0.5

#: Seconds without a reading after which a driver is said to be silent.
SILENT_S = 5.0


class Lookout:
    """The last reading of one broker's devices. Not safe to use from several threads at once.

    Args:
        devices: Which.
        kind: Of all of them.
        ledger: Where promises are written.
        headroom_bytes: Kept free on each device.
        max_processes: Most processes at a time.
        held_by_parent: What the GPU task around this process holds.
        clock: Time.
        placed: The broker's requests that were placed, by id, as they are at any time.
        ours: Gives all that may have a process of ours: those, those whose memory is waited for, and hot
            standbys.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        kind: DeviceKind,
        ledger: Ledger,
        headroom_bytes: int,
        max_processes: int,
        held_by_parent: tuple[Reservation, ...],
        clock: Clock,
        placed: Mapping[str, Ticket],
        ours: Callable[[], Collection[Ticket]],
    ) -> None:
        self._devices = devices
        self._kind = kind
        self._ledger = ledger
        self._headroom_bytes = headroom_bytes
        self._max_processes = max_processes
        self._held_by_parent = held_by_parent
        self._clock = clock
        self._placed = placed
        self._ours = ours
        #: The last one; `None`: none has come.
        self.reading: Reading | None = None
        #: Monotonic seconds when it came. Its own time is when it began, and a driver may be slow.
        self._came_s = 0.0
        #: The last survey of that reading; `None`: something has changed since.
        self._rooms: list[Room] | None = None
        #: What each device could promise at the last reading, by which requests were checked.
        self._usable: tuple[int, ...] = ()
        #: Devices that do not work, and why.
        self._set_aside: dict[DeviceKey, str] = {}
        self._context_told = False

    def take(self, reading: Reading) -> None:
        """Look at a new reading from now on."""
        self.reading = reading
        self._came_s = self._clock.now()

    def tell(self, reading: Reading) -> None:
        """Tell a person what is odd in a reading, each thing once."""
        self._tell_foreign_context(reading)
        self._tell_set_aside(reading)

    def note_usable(self, reading: Reading) -> bool:
        """Tell whether devices can promise other sizes than at the reading before."""
        usable = tuple(snapshot.usable_bytes for snapshot in reading.snapshots)
        if usable == self._usable:
            return False
        # A device that did not work at first tells only now what its driver keeps.
        self._usable = usable
        return True

    @property
    def fresh(self) -> bool:
        """Whether there is a reading to decide on, with an error or without."""
        return self.reading is not None and self._clock.now() - self._came_s <= FRESH_S

    @property
    def silence(self) -> str:
        """What of the devices is waited for, as text; empty: they answer."""
        if self.reading is None:
            return "the first reading of the devices"
        silent_s = self._clock.now() - self._came_s
        if self.reading.error or silent_s > SILENT_S:
            why = self.reading.error or f"nothing heard for {format_seconds(silent_s)}"
            return f"the devices to answer ({why})"
        return ""

    def eligible(self, names: tuple[str, ...]) -> tuple[Device, ...]:
        """Give the devices that a task may use; all, where it names some that are not there."""
        rooms = [Room(DeviceSnapshot(device, 0.0, 0), 0, 0, 0) for device in self._devices]
        try:
            chosen = select_rooms(Request("", "", 0, 0.0, devices=names), rooms)
        except PlacementError:
            # Asking for a placement says so.
            return self._devices
        return tuple(room.device for room in chosen)

    def capacities(self, names: tuple[str, ...]) -> dict[Device, int]:
        """Give what each device that a task may use could ever promise, in bytes."""
        known = {r.device.key: r.capacity_bytes for r in self._rooms_now()}
        return {
            d: known.get(d.key, d.total_bytes - self._headroom_bytes) for d in self.eligible(names)
        }

    def foreign_growth_bytes(self, before: Mapping[DeviceKey, int]) -> int:
        """Say by how much others' memory has grown on the device where it grew most; 0: it did not."""
        now = {room.device.key: room.foreign_bytes for room in self._rooms_now()}
        growths = [
            now.get(key, bytes_before) - bytes_before for key, bytes_before in before.items()
        ]
        return max(0, *growths) if growths else 0

    def _rooms_now(self) -> list[Room]:
        return [] if self.reading is None or self.reading.error else self.survey(self.reading)

    def survey(self, reading: Reading, view: LedgerView | None = None) -> list[Room]:
        """Say what room the last reading leaves on each device; again only after `forget`.

        Args:
            reading: The last one.
            view: The promises to count; `None`: those of now.
        """
        if self._rooms is None:
            view = view or self._ledger.view()
            self._rooms = survey_all(
                reading.snapshots,
                (*view.reservations, *self._held_by_parent),
                self._measure(reading, view),
                self._headroom_bytes,
            )
        return self._rooms

    def forget(self) -> None:
        """Have the next survey made anew: promises or processes have changed."""
        self._rooms = None

    def survey_once(self, reading: Reading, view: LedgerView) -> list[Room]:
        """Say what room there is for somebody who is about to change it."""
        self.forget()
        try:
            return self.survey(reading, view)
        finally:
            self.forget()

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of the machine's memory promised to processes that have not taken them yet."""
        return sum(t.request.host_bytes for t in self._placed.values() if not t.running)

    def survey_host(self, reading: Reading) -> HostRoom:
        """Say what room a reading leaves of the machine itself, now."""
        return HostRoom(
            available_bytes=reading.host_available_bytes,
            promised_bytes=self.host_promised_bytes,
            processes=len(self._placed),
            max_processes=self._max_processes,
        )

    def sizes(self, reading: Reading) -> Iterator[tuple[Ticket, tuple[int, ...]]]:
        """Give what each request with a process holds of its devices, in bytes and in its order."""
        measured = self._measure(reading, self._ledger.view())
        for request_id, ticket in self._placed.items():
            if ticket.pid is None or ticket.placement is None:
                continue
            yield (
                ticket,
                tuple(
                    measured.get(device.key, {}).get(request_id, 0)
                    for device in ticket.placement.devices
                ),
            )

    def _measure(self, reading: Reading, view: LedgerView) -> Mapping[DeviceKey, Mapping[str, int]]:
        """Say what our requests hold, by device and request id."""
        roots: dict[DeviceKey, dict[int, str]] = {}
        # Processes of other brokers: those that the ledger names.
        pids = {request_id: pid for pid, request_id in view.processes.items()}
        for reservation in view.reservations:
            request_id = reservation.request_id
            other = pids.get(request_id)
            if other is not None and request_id not in self._placed:
                roots.setdefault(reservation.device_key, {})[other] = request_id
        # The task around us, if there is one: what this process holds is not foreign.
        for reservation in self._held_by_parent:
            roots.setdefault(reservation.device_key, {})[os.getpid()] = reservation.request_id
        stand_ins: dict[str, int] = {}
        for ticket in self._ours():
            pid = ticket.pid or ticket.ended_pid
            if pid is None or ticket.placement is None:
                continue
            devices = ticket.placement.devices
            for device in devices:
                roots.setdefault(device.key, {})[pid] = ticket.request.id
            if ticket.pid is not None:
                stand_ins[ticket.request.id] = ticket.stand_in_bytes // len(devices)
        return {
            key: measure(snapshot, roots[key], stand_ins)
            for snapshot in reading.snapshots
            if not snapshot.error and (key := snapshot.device.key) in roots
        }

    def _tell_foreign_context(self, reading: Reading) -> None:
        if self._context_told or self._kind != "nvml" or self._held_by_parent:
            return
        pid = os.getpid()
        if any(p.pid == pid for s in reading.snapshots for p in s.processes):
            self._context_told = True
            logger.warning(
                "this process itself holds GPU memory, which counts as somebody else's until it "
                "ends: call GPU tasks with .submit or .map, not directly, and keep CUDA out of "
                "the flow"
            )

    def _tell_set_aside(self, reading: Reading) -> None:
        for snapshot in reading.snapshots:
            key, uuid = snapshot.device.key, snapshot.device.uuid
            if snapshot.error and self._set_aside.get(key) != snapshot.error:
                logger.warning("device %s is set aside: %s", uuid, snapshot.error)
                self._set_aside[key] = snapshot.error
            elif not snapshot.error and self._set_aside.pop(key, ""):
                logger.info("device %s answers again", uuid)
