"""Waiting for the memory of processes that are gone.

Covers which tickets wait for it, what is still missing, and when to stop waiting. How a look is
judged is `scheduling.memory`; asking for readings and releasing what was promised is `broker`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from prefect_gpu.scheduling.memory import Recovery, judge_recovery, ownerless_bytes
from prefect_gpu.scheduling.model import Device, DeviceKey, DeviceSnapshot, Reading
from prefect_gpu.ticket import Ticket
from prefect_gpu.units import MIB, format_bytes, format_seconds

logger = logging.getLogger(__name__)

#: Seconds for which a reservation outlives its process at most, waiting for the memory to be back.
#: Measured: 0 to 0.13 s on an H200; up to 1.5 s reported elsewhere; a zombie may keep it for ever.
RECOVERY_S = 5.0

#: Seconds between two looks while memory is waited for.
RECOVERY_POLL_S = 0.02

#: Bytes by which an otherwise empty device may differ from before without anything having leaked.
LEAK_TOLERANCE_BYTES = 2 * MIB

#: Bytes in use that NVML lists no process with, for each process that it lists. Measured on an H200,
#: driver 580: 8.8 MiB with one process, 5.6 MiB for each further one
#: (`docs/evidence/gpu-bookkeeping.txt`). Smaller leaks show only once the device is quieter.
BOOKKEEPING_BYTES = 9 * MIB


class RecoveryWatch:
    """The tickets whose process has ended and whose memory is not back.

    Not safe to use from several threads at once.
    """

    def __init__(self) -> None:
        #: By request id.
        self._ending: dict[str, Ticket] = {}
        #: When to look again.
        self._poll_s = 0.0
        #: Devices that list none of our processes though one holds memory there (containers).
        self._hiding: set[DeviceKey] = set()
        #: Devices that have listed a process of ours.
        self._listing: set[DeviceKey] = set()

    @property
    def ending(self) -> Collection[Ticket]:
        """Those whose memory is waited for."""
        return self._ending.values()

    @property
    def poll_s(self) -> float | None:
        """Monotonic seconds at which to look again; `None`: nobody waits."""
        return self._poll_s if self._ending else None

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Wait for the memory of a process that has just ended; a look is due at once."""
        self._ending[ticket.request.id] = ticket
        self._poll_s = now_s

    def take_baseline(self, ticket: Ticket, reading: Reading) -> None:
        """Note what its devices show before its process starts."""
        assert ticket.placement is not None
        ticket.ownerless_before = {
            device.key: _ownerless(reading, device.key) for device in ticket.placement.devices
        }

    def look(self, reading: Reading, placed: Collection[Ticket]) -> list[Ticket]:
        """Find those whose memory is back, and wait for them no longer.

        Args:
            reading: A new one, without an error.
            placed: The tickets whose processes run.
        """
        self._find_hiding(reading, placed)
        done = [ticket for ticket in self._ending.values() if self._is_back(ticket, reading)]
        for ticket in done:
            del self._ending[ticket.request.id]
        return done

    def give_up(
        self, now_s: float, reading: Reading | None, placed: Collection[Ticket]
    ) -> list[Ticket]:
        """Find those who have waited long enough, and say what has leaked.

        Args:
            now_s: By the clock, not by a reading: a driver that hangs gives none.
            reading: The last one.
            placed: The tickets whose processes run.
        """
        done = []
        for ticket in tuple(self._ending.values()):
            assert ticket.ended_s is not None
            if now_s - ticket.ended_s < RECOVERY_S:
                continue
            done.append(ticket)
            del self._ending[ticket.request.id]
            if reading is None or reading.error:
                continue
            # Once more: what the one before has leaked is not missing here.
            self._is_back(ticket, reading)
            if ticket.missing_bytes:
                self._tell_leak(ticket, reading, (*placed, *self._ending.values()))
        return done

    def end_all(self) -> list[Ticket]:
        """Wait for nobody any more."""
        done = list(self._ending.values())
        self._ending.clear()
        return done

    def poll(self, now_s: float) -> bool:
        """Tell whether a look is due now, and set the time of the next."""
        if not self._ending or now_s < self._poll_s:
            return False
        self._poll_s = now_s + RECOVERY_POLL_S
        return True

    def _is_back(self, ticket: Ticket, reading: Reading) -> bool:
        assert ticket.placement is not None and ticket.ended_s is not None
        if reading.at_s < ticket.ended_s:
            return False
        looks = [self._judge(ticket, device, reading) for device in ticket.placement.devices]
        known = [look.missing_bytes for look in looks if look.missing_bytes is not None]
        ticket.missing_bytes = sum(known) if len(known) == len(looks) else None
        return all(look.complete for look in looks)

    def _judge(self, ticket: Ticket, device: Device, reading: Reading) -> Recovery:
        assert ticket.ended_pid is not None
        snapshot = _snapshot_of(reading, device.key)
        if snapshot is None:
            return Recovery(complete=False, missing_bytes=None)
        before = None if device.key in self._hiding else ticket.ownerless_before.get(device.key)
        bookkeeping = BOOKKEEPING_BYTES if device.kind == "nvml" else 0
        return judge_recovery(snapshot, ticket.ended_pid, before, LEAK_TOLERANCE_BYTES, bookkeeping)

    def _tell_leak(self, ticket: Ticket, reading: Reading, others: Collection[Ticket]) -> None:
        logger.warning(
            "%s of device memory did not come back within %s of the end of task %r (pid %s); the "
            "device's free memory is counted without it",
            format_bytes(ticket.missing_bytes),
            format_seconds(RECOVERY_S),
            ticket.request.task_name,
            ticket.ended_pid,
        )
        # Told once: those who run beside it must not be blamed for the same bytes.
        assert ticket.placement is not None
        for device in ticket.placement.devices:
            now = _ownerless(reading, device.key)
            for other in others:
                before = other.ownerless_before.get(device.key)
                if before is not None and now is not None:
                    other.ownerless_before[device.key] = max(before, now)

    def _find_hiding(self, reading: Reading, placed: Collection[Ticket]) -> None:
        """Find devices that do not list a process of ours, although its counters say it is there.

        What nobody is listed with says nothing there: it may be another task's.
        """
        listed = {use.root_pid for s in reading.snapshots for use in s.processes}
        for snapshot in reading.snapshots:
            if any(use.root_pid is not None for use in snapshot.processes):
                self._listing.add(snapshot.device.key)
        # One that has listed us hides nothing: a process that was just killed leaves the list before
        # we hear of its end (seen on an H200).
        self._hiding -= self._listing
        for ticket in placed:
            if ticket.pid is not None and ticket.stand_in_bytes and ticket.pid not in listed:
                assert ticket.placement is not None
                keys = {device.key for device in ticket.placement.devices}
                self._hiding |= keys - self._listing


def _snapshot_of(reading: Reading, key: DeviceKey) -> DeviceSnapshot | None:
    return next((s for s in reading.snapshots if s.device.key == key), None)


def _ownerless(reading: Reading, key: DeviceKey) -> int | None:
    snapshot = _snapshot_of(reading, key)
    return None if snapshot is None else ownerless_bytes(snapshot)
