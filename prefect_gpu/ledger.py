"""The ledger of one Python process, shared by all its runners.

It keeps promises; it does not decide them (`prefect_gpu.scheduling`) nor wait for memory to come
back (`prefect_gpu.broker`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from prefect_gpu.scheduling.ledger import LedgerView
from prefect_gpu.scheduling.model import Reservation


class ProcessLedger:
    """A `Ledger` in memory. Its owner is this process, so nothing outlives its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._reservations: dict[str, tuple[Reservation, ...]] = {}
        self._pids: dict[str, int] = {}
        #: Of hot standbys: called without the lock.
        self._give_ups: dict[str, Callable[[], None]] = {}
        #: Made at most once a change: it is asked for far more often.
        self._view: LedgerView | None = None
        self._watchers: list[Callable[[], None]] = []

    def view(self) -> LedgerView:
        """Give all reservations and the version that they stand at."""
        with self._lock:
            if self._view is None:
                self._view = LedgerView(
                    self._version,
                    tuple(r for group in self._reservations.values() for r in group),
                    {pid: request_id for request_id, pid in self._pids.items()},
                )
            return self._view

    def try_reserve(
        self, version: int, reservations: Sequence[Reservation], instead_of: Sequence[str] = ()
    ) -> bool:
        """Write all reservations if `version` still stands; else write none.

        What is taken back for them is told to nobody: it is theirs.
        """
        with self._lock:
            if version != self._version:
                return False
            for request_id in instead_of:
                self._forget(request_id)
            for reservation in reservations:
                group = self._reservations.get(reservation.request_id, ())
                self._reservations[reservation.request_id] = (*group, reservation)
            self._version += 1
            self._view = None
            return True

    def attach(self, request_id: str, pid: int) -> None:
        """Say which process holds what was promised; it replaces one that was named before."""
        with self._lock:
            if request_id in self._reservations:
                # No new version: what was promised to whom stays as it is.
                self._pids[request_id] = pid
                self._view = None

    def release(self, request_id: str) -> None:
        """Take back all reservations of one request; unknown ones are ignored."""
        with self._lock:
            if not self._forget(request_id):
                return
            self._version += 1
            self._view = None
            watchers = list(self._watchers)
        for changed in watchers:
            changed()

    def lend(self, request_id: str, give_up: Callable[[], None]) -> None:
        """Say how to ask for a hot standby's reservation back."""
        with self._lock:
            if request_id in self._reservations:
                self._give_ups[request_id] = give_up

    def reclaim(self, request_id: str) -> None:
        """Ask whoever holds a hot standby's reservation to give it up; others are ignored."""
        with self._lock:
            give_up = self._give_ups.get(request_id)
        if give_up is not None:
            give_up()

    def _forget(self, request_id: str) -> bool:
        self._pids.pop(request_id, None)
        self._give_ups.pop(request_id, None)
        return self._reservations.pop(request_id, None) is not None

    def renew(self, owner_pid: int, owner_started_s: float) -> None:
        """Do nothing: this ledger dies with its only owner."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every release; the function returned ends that."""
        with self._lock:
            self._watchers.append(changed)

        def end() -> None:
            with self._lock:
                if changed in self._watchers:
                    self._watchers.remove(changed)

        return end


#: The one ledger of this process: runners whose device specifications differ see each other's
#: promises in it.
PROCESS_LEDGER = ProcessLedger()
