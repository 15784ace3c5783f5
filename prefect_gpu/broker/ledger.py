"""The ledger of one Python process, shared by all its runners: which requests hold which reservations.

A decision is made on one version of the ledger and written only if that version is still current (compare
and swap), so two brokers can never reserve the same bytes twice. What to reserve is decided in
`prefect_gpu.scheduling`; waiting for memory to come back is `device_view`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.scheduling.model import DeviceKey, Reservation


@dataclass(frozen=True, slots=True)
class LedgerView:
    """All reservations at one version."""

    version: int
    #: By device. The tuple of a device is the same object until its reservations change.
    by_device: Mapping[DeviceKey, tuple[Reservation, ...]]
    #: Request id to the process that runs for it: what such a process holds is not foreign, whichever
    #: broker started it.
    processes: Mapping[str, int]


class ProcessLedger:
    """Reservations in memory, keyed by host and device UUID. Safe to use from several threads.

    Its owner is this process, so nothing in it outlives the process. A fork of the process begins with an
    empty one.
    """

    def __init__(self) -> None:
        self._reset()
        PROCESS_RESOURCES.after_fork(self, ProcessLedger._reset)

    def _reset(self) -> None:
        #: Guards all below. Nothing else is called under it.
        self._lock = threading.Lock()
        self._version = 0
        #: Devices of each request, by its id.
        self._devices: dict[str, tuple[DeviceKey, ...]] = {}
        self._by_device: dict[DeviceKey, tuple[Reservation, ...]] = {}
        self._processes: dict[str, int] = {}
        #: By request id, of hot standbys.
        self._give_ups: dict[str, Callable[[], None]] = {}
        #: Made at most once for each change.
        self._view: LedgerView | None = None
        self._watchers: list[Callable[[], None]] = []

    def view(self) -> LedgerView:
        """Return all reservations and their version."""
        with self._lock:
            if self._view is None:
                self._view = LedgerView(self._version, dict(self._by_device), dict(self._processes))
            return self._view

    def try_reserve(
        self, version: int, reservations: Sequence[Reservation], instead_of: Sequence[str] = ()
    ) -> bool:
        """Write all reservations if `version` is still current; else write none.

        Args:
            version: Of the view on which they were decided.
            reservations: What to write.
            instead_of: Requests whose reservations are taken back in the same step. The watchers are not
                called for them, since their memory is not free.

        Returns:
            Whether they were written.
        """
        with self._lock:
            if version != self._version:
                return False
            for request_id in instead_of:
                self._remove(request_id)
            for reservation in reservations:
                request_id, key = reservation.request_id, reservation.device_key
                self._devices[request_id] = (*self._devices.get(request_id, ()), key)
                self._by_device[key] = (*self._by_device.get(key, ()), reservation)
            self._version += 1
            self._view = None
            return True

    def attach(self, request_id: str, pid: int) -> None:
        """Set which process holds what a request has reserved; it replaces one that was set before."""
        with self._lock:
            if request_id in self._devices:
                # The version stays: what is reserved has not changed.
                self._processes[request_id] = pid
                self._view = None

    def release(self, request_id: str) -> None:
        """Take back all reservations of a request and call the watchers; unknown ids are ignored."""
        with self._lock:
            if not self._remove(request_id):
                return
            self._version += 1
            self._view = None
            watchers = list(self._watchers)
        for changed in watchers:
            changed()

    def lend(self, request_id: str, give_up: Callable[[], None]) -> None:
        """Set what `reclaim` calls to get a hot standby's reservation back."""
        with self._lock:
            if request_id in self._devices:
                self._give_ups[request_id] = give_up

    def reclaim(self, request_id: str) -> None:
        """Ask for a hot standby's reservation back; it is released once its memory is free.

        Requests that are no hot standby's are ignored.
        """
        with self._lock:
            give_up = self._give_ups.get(request_id)
        if give_up is not None:
            give_up()

    def _remove(self, request_id: str) -> bool:
        self._processes.pop(request_id, None)
        self._give_ups.pop(request_id, None)
        devices = self._devices.pop(request_id, None)
        for key in devices or ():
            left = tuple(r for r in self._by_device.pop(key, ()) if r.request_id != request_id)
            if left:
                self._by_device[key] = left
        return devices is not None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every release, from any thread."""
        with self._lock:
            self._watchers.append(changed)


#: The one ledger of this process: runners whose device specifications differ see each other's reservations.
PROCESS_LEDGER = ProcessLedger()
