"""The ledger of a machine: waiting and placed requests of all flows.

An `Entry` is the ledger's record of one request. The ledger is a log of changes to entries, so every process that reads
the log has the same entries. A decision is made on one version of the ledger and written only if no process has added a
reservation since (compare and swap), so two brokers can never reserve the same bytes.

A `Store` keeps the log: itself for one process, `host_ledger.HostStore` for all processes of a machine.
`prefect_gpu.scheduling` decides on reservations; `device_view` waits until memory of ended processes is free.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prefect_gpu.broker.phases import Phase, Wish, Wisher
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.scheduling.backfill import BlockedStatus
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request in the ledger, as all processes see it."""

    #: The request. Its devices are named by their full UUIDs.
    request: Request
    #: Process that owns the request, by the name of its lock file.
    owner: str = ""
    #: Name of the owner's node.
    node: str = ""
    #: Number of the broker within the owner.
    broker: int = 0
    phase: Phase = Phase.WAITING
    #: Who wants its process suspended; `None`: nobody.
    wish: Wish | None = None
    #: Reservations of the request; empty: it has no devices.
    reservations: tuple[Reservation, ...] = ()
    #: Devices that the request may use.
    devices: tuple[DeviceKey, ...] = ()
    #: How often later requests were placed before this one, and the devices kept for it.
    status: BlockedStatus = field(default_factory=BlockedStatus)
    #: The limit `max_processes` of its broker.
    max_processes: int = 0
    #: Process that holds the memory; `None`: none does yet.
    pid: int | None = None
    #: PID namespace of its owner, and of `pid`; empty: not known.
    namespace: str = ""
    #: Bytes that the process holds on each of `devices`, measured by its own flow. Written only where other flows cannot
    #: find the process by `pid`, because they or the driver see another PID namespace.
    held_bytes: tuple[int, ...] = ()
    #: The task's body waits for GPU tasks that it submitted. Written by the body's process.
    waits: bool = False
    #: The task's body has begun, so the kernel's figure of used memory includes its host memory.
    running: bool = False
    #: Progress of the suspension, or why the process was not suspended, as text for people; empty: neither.
    suspension: str = ""
    #: Monotonic seconds when the request was first placed; 0: not known.
    placed_s: float = 0.0
    #: Monotonic seconds before which the process is not suspended for another request.
    rests_until_s: float = 0.0

    @property
    def origin(self) -> str:
        """Name of the request's broker, unique on the machine."""
        return f"{self.owner}/{self.broker}"

    @property
    def runs(self) -> bool:
        """Whether the request was placed: it has devices, or had them when its process was suspended."""
        return self.phase is not Phase.WAITING

    @property
    def away(self) -> bool:
        """Whether the process is fully suspended, and no resume has begun."""
        return self.phase in (Phase.AWAY, Phase.RELEASED)

    @property
    def held_back(self) -> bool:
        """Whether a person wants the process suspended."""
        return self.wish is not None and self.wish.by is Wisher.PERSON

    @property
    def suspended_for(self) -> str | None:
        """Id of the waiting request for which the process is to be suspended; `None`: no request."""
        return None if self.wish is None else self.wish.request_id


def owner_of(origin: str) -> str:
    """Return the owning process (as in `Entry.owner`) of a broker named as in `Entry.origin`."""
    return origin.partition("/")[0]


#: Changed entries by request id; `None`: the request was removed.
Changes = Mapping[str, Entry | None]


class Row(NamedTuple):
    """One row in the log of a store: a change to the entry of a request."""

    #: Position in the log, from 1.
    number: int
    #: Id of the request; empty: earlier rows are not available, and the last row of each request follows.
    request_id: str
    #: Whether the row adds a reservation. Decisions made without it must be made again.
    promises: bool
    #: The new entry; `None`: the request was removed.
    entry: Entry | None


class Written(NamedTuple):
    """The result of `Store.write`."""

    #: Rows that other processes have written since the last read.
    rows: Sequence[Row]
    #: Number of the last row written; `None`: a row of another process conflicts, and nothing was written.
    number: int | None


class StoreError(Exception):
    """A store cannot be used. The text says why."""


class StoreReplacedError(StoreError):
    """The files of a store were replaced. The store must be opened again, as other processes do."""


class Store:
    """Keeps the log of a ledger. The ledger holds its lock during a call, so each call returns within seconds.

    This one keeps no rows: its process shares nothing.
    """

    #: Name of this process as an owner, its PID namespace, and the name of its node.
    owner: str = "memory"
    namespace: str = ""
    node: str = ""
    #: Owners (processes) that are alive but send no heartbeats: stopped, or hanging. Updated by `changed`.
    silent: frozenset[str] = frozenset()

    @property
    def closed(self) -> bool:
        """Whether the store was closed, for example at the exit of this process."""
        return False

    def beat(self) -> None:
        """Send a heartbeat to the other processes."""

    def changed(self) -> bool:
        """Return whether another process may have written since the last call of `read` or `write`."""
        return False

    def read(self, after: int) -> Sequence[Row]:
        """Return the rows after a row number; raise `StoreError` if they cannot be read."""
        return ()

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """Write changes, all or none; raise `StoreError` if they cannot be written.

        `after` is the number of the last row that was read. `conflicts` returns whether a later row, of another process,
        forbids the write. The numbers of the rows in `changes` are not used.
        """
        return Written((), after + len(changes))

    def close(self) -> None:
        """Remove the entries of this process, and close the store."""


#: Most times that a ledger reopens a store whose files were replaced. A file system whose inode numbers change would
#: otherwise cause an endless loop.
MOST_OPENED = 10

#: Seconds after which a store that could not be used is tried again. A disk may be full or slow for a while.
AGAIN_S = 60.0


class HostUse(NamedTuple):
    """Number of requests that hold a device, and bytes of host memory reserved for bodies that have not begun."""

    tasks: int
    promised_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerView:
    """All reservations at one version of the ledger."""

    version: int
    #: Reservations by device. The tuple of a device is the same object until its reservations change.
    by_device: Mapping[DeviceKey, tuple[Reservation, ...]]
    #: Process ids by request id. The memory of these processes is not foreign, whichever broker started them.
    processes: Mapping[str, int]
    #: By request id: bytes of a process that cannot be found by its process id; see `Entry.held_bytes`.
    held_bytes: Mapping[str, Mapping[DeviceKey, int]]
    #: By broker (`Entry.origin`): number of requests that hold devices.
    holding: Mapping[str, int]
    #: Use of the host by device; a request on several devices counts at its first. A cluster adds them up by node.
    host_use: Mapping[DeviceKey, HostUse]
    #: See `Store.silent`.
    silent: frozenset[str] = frozenset()
    #: Number of requests that hold devices and may be suspended for others.
    preemptible: int = 0
    #: Monotonic seconds when this process last read that another process has, or may have, released a device.
    freed_s: float = float("-inf")
    #: Name of this process as in `Entry.owner`.
    owner: str = ""

    @property
    def tasks(self) -> int:
        """Number of requests that hold devices."""
        return sum(self.holding.values())

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of host memory reserved for task bodies that have not begun."""
        return sum(use.promised_bytes for use in self.host_use.values())


class Subscription:
    """Changes to entries since one broker's last `Ledger.read`."""

    def __init__(self, number: int) -> None:
        #: Number of the broker in this process.
        self.number = number
        #: Changed entries by request id; `None`: the request was removed.
        self.changes: dict[str, Entry | None] = {}


class Ledger:
    """The entries of all requests. Safe to use from several threads. A fork of the process begins with an empty ledger.

    `open_store` is called at the first use. Its `StoreError` is logged once, and the process shares nothing until the store
    can be used again. `now` returns monotonic seconds of the brokers' clock.
    """

    def __init__(
        self,
        open_store: Callable[[], Store] = Store,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._now = now
        #: Whether other processes may use the ledger.
        self.shares = open_store is not Store
        self._reset()
        # A fork must not find SQLite in the middle of a call.
        PROCESS_RESOURCES.quiet_at_fork(self, lambda ledger: ledger._lock)
        PROCESS_RESOURCES.after_fork(self, Ledger._reset)

    def _reset(self) -> None:
        #: Guards all attributes below. Only the store is called while it is held.
        self._lock = threading.RLock()
        self._store: Store | None = None
        #: Reason why the store cannot be used; empty: it can be used.
        self.problem = ""
        #: Whether a warning said that the store cannot be used, and none since that it can.
        self._warned = False
        #: Monotonic seconds when the store is tried again.
        self._again_s = 0.0
        #: See `Store.silent`.
        self._silent: frozenset[str] = frozenset()
        self._entries: dict[str, Entry] = {}
        #: By request id: version at which the entry was written.
        self._changed: dict[str, int] = {}
        self._holding: dict[str, Entry] = {}
        self._by_device: dict[DeviceKey, tuple[Reservation, ...]] = {}
        self._host_use: dict[DeviceKey, HostUse] = {}
        #: Number of the last row that was read or written.
        self._number = 0
        #: Version at which this store was opened; versions continue from an earlier store.
        self._base = 0
        #: Version at which the last reservation was added.
        self._promised = 0
        self._freed_s = float("-inf")
        #: Number of times that the store was reopened because its files were replaced.
        self._opened = 0
        #: Whether other processes have made changes since the watchers were last called.
        self._news = False
        #: The current view; `None`: not computed since the last change.
        self._view: LedgerView | None = None
        self._numbers = itertools.count()
        self._subscriptions: list[Subscription] = []
        self._watchers: list[Callable[[], None]] = []

    # Brokers.

    def subscribe(self, changed: Callable[[], None]) -> Subscription:
        """Register a broker, and return its subscription.

        `changed` is called by `announce`, on any thread and without locks: after releases and rewrites in this process, and
        when `poll` has found changes of other processes.
        """
        with self._lock:
            subscription = Subscription(next(self._numbers))
            self.view()
            subscription.changes.update(self._entries)
            self._subscriptions.append(subscription)
            self._watchers.append(changed)
        return subscription

    def share(self, open_store: Callable[[], Store]) -> None:
        """Move the entries of this process to a shared store, and use that from now on; no effect on a shared ledger."""
        with self._lock:
            if self.shares:
                return
            self._open_store, self.shares = open_store, True
            self._write_all(self._leave())
        self.announce()

    def view(self) -> LedgerView:
        """Read new rows of other processes, and return the current view."""
        with self._lock:
            store = self._look()
            if self._view is None:
                self._view = self._make_view(store)
            return self._view

    def read(self, subscription: Subscription) -> tuple[LedgerView, Changes]:
        """Read new rows of other processes; return the current view, and the entries changed since the last call."""
        with self._lock:
            view = self.view()
            changes, subscription.changes = subscription.changes, {}
            return view, changes

    def beat(self) -> None:
        """Send a heartbeat. Other processes do not wait for the requests of a process without heartbeats."""
        with self._lock:
            self._open().beat()

    def poll(self) -> None:
        """Read new rows of other processes, and call the watchers if any came since the last call."""
        with self._lock:
            self._look()
            # Rows may have been read by a view, a write or another broker.
            if not self._news:
                return
            self._news = False
        self.announce()

    def try_write(self, version: int, changes: Mapping[str, Entry]) -> bool:
        """Write changes decided on the view with `version`, set the owner of new entries, and return `True`.

        Return `False`, and write nothing, if a reservation was added or one of these entries has changed since that view.
        """
        with self._lock:
            # A new entry has no owner yet.
            if self._promised > version or any(
                self._changed[i] > version if i in self._changed else entry.owner
                for i, entry in changes.items()
            ):
                return False
            return self._write(changes, lambda row: row.promises or row.request_id in changes)

    def rewrite(
        self, request_id: str, change: Callable[[Entry], Entry], announces: bool = True
    ) -> bool:
        """Replace the entry of a placed or suspended request by `change(entry)`, and return whether the entry has changed.

        `change` must not add reservations. `announces`: the watchers are called.
        """
        with self._lock:
            while True:
                entry = self._entries.get(request_id)
                if entry is None or not entry.runs or (changed := change(entry)) == entry:
                    return False
                if self._write({request_id: changed}, lambda row: row.request_id == request_id):
                    break
        if announces:
            self.announce()
        return True

    def announce(self) -> None:
        """Call the watchers of this process, since entries have changed."""
        with self._lock:
            watchers = list(self._watchers)
        for call in watchers:
            try:
                call()
            except Exception:
                # One broker may fail to start a thread; the other brokers must still be called.
                logger.exception(
                    "a broker of GPU devices could not take that the ledger has changed"
                )

    def running(self) -> dict[str, Entry]:
        """Return the entries of placed and suspended requests of all processes, by request id."""
        with self._lock:
            self._look()
            return {i: entry for i, entry in self._entries.items() if entry.runs}

    def release(self, request_id: str) -> None:
        """Remove a request and call the watchers; unknown ids are ignored."""
        with self._lock:
            if request_id not in self._entries:
                return
            while request_id in self._entries:
                self._write({request_id: None}, lambda row: False)
        self.announce()

    def entry(self, request_id: str) -> Entry | None:
        """Return the entry of a request; `None`: the ledger has none."""
        with self._lock:
            return self._entries.get(request_id)

    # With the lock held.

    def _open(self) -> Store:
        if self._store is None:
            try:
                self._store = self._open_store()
                self._read()
                # There was no earlier view to differ from.
                self._news = False
            except StoreError as error:
                self._share_nothing(error)
        assert self._store is not None
        return self._store

    def _look(self) -> Store:
        """Read new rows of other processes and update the owners without heartbeats; return the store."""
        if self.problem and self._now() >= self._again_s:
            self._share_again()
        if self._open().changed():
            self._read()
        store = self._open()
        if store.silent != self._silent:
            self._silent = store.silent
            self._view = None
            self._news = True
        return store

    def _share_nothing(self, error: StoreError) -> None:
        """Replace the store by a `Store`, which shares nothing."""
        # A closed store: this process exits.
        if not self._warned and (self._store is None or not self._store.closed):
            self._warned = True
            logger.warning("GPU tasks of other processes are not seen from now on: %s", error)
        mine = self._leave()
        self.problem = str(error)
        self._again_s = self._now() + AGAIN_S
        self._store = Store()
        self._write(mine, lambda row: False)

    def _share_again(self) -> None:
        """Try again to use a store that could not be used before."""
        self._again_s = self._now() + AGAIN_S
        if self._opened > MOST_OPENED:
            return
        try:
            store = self._open_store()
        except StoreError as error:
            self.problem = str(error)
            return
        mine = self._leave()
        self.problem, self._store = "", store
        self._read()
        self._write_all(mine)
        if not self.problem:
            self._warned = False
            logger.warning("GPU tasks of other processes are seen again")

    def _open_anew(self, error: StoreReplacedError) -> None:
        """Open a store again whose files were replaced, and write the entries of this process to it."""
        self._opened += 1
        if self._opened > MOST_OPENED:
            self._share_nothing(error)
            return
        logger.warning("%s; it is opened anew, and memory may be promised twice until then", error)
        self._write_all(self._leave())

    def _write_all(self, mine: Mapping[str, Entry]) -> None:
        """Write the entries of this process to a store that does not have them."""
        while not self._write(mine, lambda row: False):
            # A failed write has replaced the store by another one.
            pass

    def _leave(self) -> dict[str, Entry]:
        """Close the store, and return the entries of this process."""
        owner = "" if self._store is None else self._store.owner
        if self._store is not None:
            self._store.close()
        self._store = None
        mine = {
            request_id: replace(entry, owner="", node="", namespace="")
            for request_id, entry in self._entries.items()
            if entry.owner == owner
        }
        self._forget_entries()
        # Decisions on the entries of the old store must be made again.
        self._base = self._promised = self._base + self._number + 1
        self._number = 0
        self._news = True
        return mine

    def _forget_entries(self) -> None:
        for request_id in tuple(self._entries):
            self._apply(request_id, None, None)

    def _read(self) -> None:
        assert self._store is not None
        try:
            self._take(self._store.read(self._number))
        except StoreReplacedError as error:
            self._open_anew(error)
        except StoreError as error:
            self._share_nothing(error)

    def _write(self, changes: Changes, conflicts: Callable[[Row], bool]) -> bool:
        """Write changes; return `False` if a row written by others meanwhile conflicts, or the store fails."""
        store = self._open()
        rows = [
            Row(
                0,
                request_id,
                entry is not None and self._promises(request_id, entry),
                entry
                if entry is None or entry.owner
                else replace(entry, owner=store.owner, node=store.node, namespace=store.namespace),
            )
            for request_id, entry in changes.items()
        ]
        try:
            written = store.write(self._number, rows, conflicts)
            self._take(written.rows)
        except StoreReplacedError as error:
            self._open_anew(error)
            return False
        except StoreError as error:
            # The reservations of other processes are unknown now, so the decision must be made again.
            self._share_nothing(error)
            return False
        if written.number is None:
            return False
        first = written.number - len(rows) + 1
        for at, row in enumerate(rows):
            self._apply(row.request_id, row.entry, row._replace(number=first + at))
        return True

    def _promises(self, request_id: str, entry: Entry) -> bool:
        """Return whether an entry adds a reservation on a device where its request had none."""
        before = self._holding.get(request_id)
        held = {r.device_key for r in before.reservations} if before is not None else set()
        return any(r.device_key not in held for r in entry.reservations)

    def _take(self, rows: Iterable[Row]) -> None:
        assert self._store is not None
        # A process that has read nothing, or is far behind, gets only the last row of each request.
        left_out = not self._number
        for row in rows:
            if not row.request_id:
                left_out = True
                self._forget_entries()
                self._freed_s = self._now()
                continue
            mine = self._entries.get(row.request_id)
            if row.entry is None and mine is not None and mine.owner == self._store.owner:
                raise StoreError("its file that says that this process is alive was removed")
            held = row.request_id in self._holding
            self._apply(row.request_id, row.entry, row)
            if held and row.request_id not in self._holding:
                self._freed_s = self._now()
            self._news = True
        if left_out:
            # Any of the missing rows may have added a reservation.
            self._promised = self._base + self._number

    def _apply(self, request_id: str, entry: Entry | None, row: Row | None) -> None:
        """Apply a change of one entry to all attributes; without a row, the numbers of rows and versions stay."""
        if row is not None:
            self._number = row.number
            if row.promises:
                self._promised = self._base + row.number
        before = self._entries.pop(request_id, None)
        self._changed.pop(request_id, None)
        self._holding.pop(request_id, None)
        if entry is not None:
            self._entries[request_id] = entry
            self._changed[request_id] = self._base + self._number
            if entry.reservations:
                self._holding[request_id] = entry
        self._list(
            request_id,
            () if before is None else before.reservations,
            () if entry is None else entry.reservations,
        )
        self._count(before, -1)
        self._count(entry, 1)
        self._view = None
        for subscription in self._subscriptions:
            subscription.changes[request_id] = entry

    def _list(
        self, request_id: str, before: Sequence[Reservation], held: Sequence[Reservation]
    ) -> None:
        """Update `_by_device` for a request's earlier and current reservations."""
        if held == before:
            return
        for key in dict.fromkeys(r.device_key for r in (*before, *held)):
            left = [r for r in self._by_device.pop(key, ()) if r.request_id != request_id]
            left += [r for r in held if r.device_key == key]
            if left:
                self._by_device[key] = tuple(left)

    def _count(self, entry: Entry | None, sign: int) -> None:
        """Add an entry to `_host_use` (`sign` 1), or subtract it (-1)."""
        if entry is None or not entry.reservations:
            return
        key = entry.reservations[0].device_key
        tasks, promised_bytes = self._host_use.pop(key, (0, 0))
        tasks += sign
        promised_bytes += 0 if entry.running else sign * entry.request.host_bytes
        if tasks:
            self._host_use[key] = HostUse(tasks, promised_bytes)

    def _make_view(self, store: Store) -> LedgerView:
        holding: dict[str, int] = {}
        processes: dict[str, int] = {}
        held_bytes: dict[str, Mapping[DeviceKey, int]] = {}
        preemptible = 0
        for request_id, entry in self._holding.items():
            if entry.pid is not None and entry.namespace == store.namespace:
                processes[request_id] = entry.pid
            if entry.pid is not None and (entry.held_bytes or request_id not in processes):
                sizes = entry.held_bytes or (0,) * len(entry.devices)
                held_bytes[request_id] = dict(zip(entry.devices, sizes, strict=True))
            preemptible += entry.request.preemptible
            holding[entry.origin] = holding.get(entry.origin, 0) + 1
        return LedgerView(
            self._base + self._number,
            dict(self._by_device),
            processes,
            held_bytes,
            holding,
            dict(self._host_use),
            self._silent,
            preemptible,
            self._freed_s,
            store.owner,
        )
