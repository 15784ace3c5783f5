"""The ledger of a machine: which requests wait and which hold what of which device, in all flows.

An `Entry` is what is known of one request. The ledger is a log of changes to entries, so every process that
reads the log has the same entries. A decision is made on one version of the ledger and written only if no
process has promised memory since (compare and swap), so two brokers can never reserve the same bytes twice.

Where the log is kept is a `Store`: `MemoryStore` for one process, `host_ledger.HostStore` for all processes of
a machine. What to reserve is decided in `prefect_gpu.scheduling`; waiting for memory to come back is
`device_view`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.scheduling.backfill import BlockedStatus
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request in the ledger, as all processes see it."""

    #: What is asked. Its devices are named by their whole UUIDs.
    request: Request
    #: Which process it belongs to: the name of that process's lock.
    owner: str = ""
    #: Name of the node that this process runs on.
    node: str = ""
    #: Which broker of the process it belongs to.
    broker: int = 0
    #: What it holds; empty: it waits.
    reservations: tuple[Reservation, ...] = ()
    #: Devices that it may use.
    devices: tuple[DeviceKey, ...] = ()
    #: What has happened to it while it was blocked.
    status: BlockedStatus = field(default_factory=BlockedStatus)
    #: Most processes at a time of its broker.
    max_processes: int = 0
    #: Process that holds the memory; `None`: none does yet.
    pid: int | None = None
    #: The PID namespace in which `pid` names that process; empty: not known.
    namespace: str = ""
    #: Bytes that the process holds of each of `devices`, as its own flow has measured them. Written where its id
    #: means nothing to others: processes of another PID namespace use the ledger, or the driver's ids are those of
    #: one.
    taken: tuple[int, ...] = ()
    #: Its body has begun, so the memory that it needs of the machine itself is taken.
    running: bool = False
    #: Another process asks for its memory back. Of hot standbys.
    reclaimed: bool = False

    @property
    def origin(self) -> str:
        """Which broker of the machine it belongs to."""
        return f"{self.owner}/{self.broker}"

    @property
    def standby(self) -> bool:
        """Whether it is a hot standby's."""
        return any(reservation.standby for reservation in self.reservations)


def owner_of(origin: str) -> str:
    """Return the owner in an `Entry.origin`."""
    return origin.partition("/")[0]


#: Entries by the id of their request; `None`: it is gone.
Changes = Mapping[str, Entry | None]


class Row(NamedTuple):
    """One change in a log."""

    #: Its place in the log, from 1.
    number: int
    #: Empty: rows were left out before those that follow, which are the last one of each request.
    request_id: str
    #: It promises memory: a decision made before it must be made again.
    promises: bool
    #: `None`: the request is gone.
    entry: Entry | None


class Written(NamedTuple):
    """The result of `Store.write`."""

    #: What others have written since it was read last.
    rows: Sequence[Row]
    #: Number of the last row of what was written; `None`: nothing was, since a row of others conflicts.
    number: int | None


class StoreError(Exception):
    """A store cannot be used any more. Its text says why."""


class StoreReplacedError(StoreError):
    """A store is not where other processes find theirs any more: it must be opened anew."""


class Store(Protocol):
    """Where a log is kept. The ledger calls it under its lock; each call returns soon, whatever others do."""

    #: Name of this process as an owner.
    owner: str
    #: The PID namespace of this process.
    namespace: str
    #: Name of the node that this process runs on.
    node: str
    #: Owners that are alive and show no sign of it: they were stopped, or hang. As of the last call of `changed`.
    silent: frozenset[str]

    @property
    def closed(self) -> bool:
        """Whether this process uses the store no longer, as while it exits."""
        ...

    def beat(self) -> None:
        """Show the other processes that this one works."""
        ...

    def changed(self) -> bool:
        """Return whether another process may have written since the last call of `read` or `write`."""
        ...

    def read(self, after: int) -> Sequence[Row]:
        """Return what was written after a row.

        Raises:
            StoreError: It cannot be read.
        """
        ...

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """Write changes, all or none.

        Args:
            after: Number of the last row that was read.
            changes: Rows, whose numbers are not used.
            conflicts: Returns whether nothing may be written, for each row of others after that one.

        Raises:
            StoreError: It cannot be written.
        """
        ...

    def close(self) -> None:
        """Remove what this process has written, for other processes: it uses the store no longer."""
        ...


#: Times that a ledger opens its store anew. File systems whose files change their numbers would make it go on for
#: ever.
MOST_OPENED = 10

#: Seconds after which a ledger that could not use its store tries it again: a disk may be full, or slow, for a while.
AGAIN_S = 60.0


class MemoryStore:
    """The log of a process that shares nothing. It keeps no rows, since nobody else reads them."""

    owner = "memory"
    namespace = ""
    node = ""
    silent = frozenset[str]()
    closed = False

    def beat(self) -> None:
        """Do nothing: no other process looks."""

    def changed(self) -> bool:
        """Return `False`: no other process writes here."""
        return False

    def read(self, after: int) -> Sequence[Row]:
        """Return nothing: no other process writes here."""
        return ()

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """See `Store.write`."""
        return Written((), after + len(changes))

    def close(self) -> None:
        """Do nothing: no other process reads here."""


@dataclass(frozen=True, slots=True)
class LedgerView:
    """All that is promised at one version."""

    version: int
    #: By device. The tuple of a device is the same object until its reservations change.
    by_device: Mapping[DeviceKey, tuple[Reservation, ...]]
    #: Request id to the process that runs for it: what such a process holds is not foreign, whichever
    #: broker started it.
    processes: Mapping[str, int]
    #: Request id to the bytes that such a process holds, for those of other PID namespaces, and for those of which
    #: the driver's figures tell nothing.
    taken: Mapping[str, Mapping[DeviceKey, int]]
    #: By origin: requests that hold devices, without hot standbys.
    holding: Mapping[str, int]
    #: Bytes of the machine's memory reserved for processes that have not taken them yet.
    host_promised_bytes: int
    #: See `Store.silent`. The memory of their hot standbys is reserved as a task's is: none of them ends on demand.
    silent: frozenset[str] = frozenset()

    @property
    def tasks(self) -> int:
        """Requests that hold devices, without hot standbys."""
        return sum(self.holding.values())


class Seat:
    """What one broker has not seen yet of the waiting requests of others, and of its own."""

    def __init__(self, number: int) -> None:
        #: Of the broker in this process.
        self.number = number
        #: Waiting entries that others have written, by request id; `None`: it waits no longer.
        self.changes: dict[str, Entry | None] = {}

    def take(self) -> Changes:
        """Return the changes since the last call."""
        changes, self.changes = self.changes, {}
        return changes


class Ledger:
    """The entries of all requests. Safe to use from several threads.

    A fork of the process begins with an empty one.

    Args:
        open_store: Opens the store, when the ledger is used first. What it raises as `StoreError` is logged
            once, and the process shares nothing until the store can be used again.
        now: Returns monotonic seconds.
    """

    def __init__(
        self,
        open_store: Callable[[], Store] = MemoryStore,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._now = now
        #: Whether other processes may use it.
        self.shares = open_store is not MemoryStore
        self._reset()
        # A fork must not find SQLite in the middle of a call.
        PROCESS_RESOURCES.quiet_at_fork(self, lambda ledger: ledger._lock)
        PROCESS_RESOURCES.after_fork(self, Ledger._reset)

    def _reset(self) -> None:
        #: Guards all below. Nothing is called under it but the store.
        self._lock = threading.RLock()
        self._store: Store | None = None
        #: Why other processes are not seen; empty: they are.
        self.problem = ""
        #: Monotonic seconds when the store is tried again.
        self._again_s = 0.0
        #: See `Store.silent`.
        self._silent: frozenset[str] = frozenset()
        self._entries: dict[str, Entry] = {}
        #: Those of them that hold something.
        self._holding: dict[str, Entry] = {}
        self._by_device: dict[DeviceKey, tuple[Reservation, ...]] = {}
        #: Number of the last row that was read or written.
        self._number = 0
        #: Version at which this store was opened: versions go on where those of an earlier store end.
        self._base = 0
        #: Version at which memory was promised last.
        self._promised = 0
        #: Times that the store was opened anew.
        self._opened = 0
        #: Others have written something that the watchers were not called for.
        self._news = False
        #: Made at most once for each change.
        self._view: LedgerView | None = None
        self._numbers = itertools.count()
        self._seats: list[Seat] = []
        self._watchers: list[Callable[[], None]] = []
        #: By request id, of hot standbys of this process.
        self._give_ups: dict[str, Callable[[], None]] = {}

    # Brokers.

    def join(self, changed: Callable[[], None]) -> Seat:
        """Return a seat for a broker.

        Args:
            changed: Called from any thread, without locks, after every release, and when `poll` has found
                changes of other processes.
        """
        with self._lock:
            seat = Seat(next(self._numbers))
            self.view()
            seat.changes.update((i, e) for i, e in self._entries.items() if not e.reservations)
            self._seats.append(seat)
            self._watchers.append(changed)
        return seat

    def view(self) -> LedgerView:
        """Read what other processes have written, and return what is promised now."""
        with self._lock:
            store = self._look()
            if self._view is None:
                self._view = self._make_view(store)
            return self._view

    def beat(self) -> None:
        """Show other processes that this one works. A process that does not for a while is not waited for."""
        with self._lock:
            self._open().beat()

    def poll(self) -> None:
        """Read what other processes have written, and call the watchers if there was something since the last call."""
        with self._lock:
            self._look()
            # Views, writes and other brokers read too.
            if not self._news:
                return
            self._news = False
        self._call_watchers()

    def try_write(self, version: int, changes: Changes) -> bool:
        """Write changes if nobody has promised memory since a view was made; else write none.

        Args:
            version: Of the view on which they were decided.
            changes: What to write. The owner is set here.

        Returns:
            Whether they were written.
        """
        with self._lock:
            if self._promised > version:
                return False
            return self._write(changes, lambda row: row.promises or row.request_id in changes)

    def attach(self, request_id: str, pid: int) -> None:
        """Set which process holds what a request has reserved; it replaces one that was set before."""
        with self._lock:
            self._change(request_id, pid=pid, namespace=self._open().namespace)

    def take(self, request_id: str, taken: tuple[int, ...]) -> None:
        """Note the bytes that the process of a request holds of each device that it may use."""
        with self._lock:
            self._change(request_id, taken=taken)

    def run(self, request_id: str) -> None:
        """Note that the body of a request has begun."""
        with self._lock:
            self._change(request_id, running=True)

    def release(self, request_id: str) -> None:
        """Remove a request and call the watchers; unknown ids are ignored."""
        with self._lock:
            if request_id not in self._entries:
                return
            while request_id in self._entries:
                self._write({request_id: None}, lambda row: False)
        self._call_watchers()

    def lend(self, request_id: str, give_up: Callable[[], None]) -> None:
        """Set what is called when the memory of a hot standby of this process is asked for."""
        with self._lock:
            if request_id in self._entries:
                self._give_ups[request_id] = give_up

    def reclaim(self, request_id: str) -> None:
        """Ask for the memory of a hot standby, of this or another process; it is released once it is free.

        Requests that are no hot standby's are ignored.
        """
        with self._lock:
            give_up = self._give_ups.get(request_id)
            entry = self._entries.get(request_id)
            if give_up is None and entry is not None and entry.standby and not entry.reclaimed:
                self._change(request_id, reclaimed=True)
        if give_up is not None:
            give_up()

    def entry(self, request_id: str) -> Entry | None:
        """Return what is known of a request; `None`: nothing is."""
        with self._lock:
            return self._entries.get(request_id)

    def owns(self, request_id: str) -> bool:
        """Return whether a request is of this process."""
        with self._lock:
            entry = self._entries.get(request_id)
            return entry is not None and entry.owner == self._open().owner

    # With the lock held.

    def _open(self) -> Store:
        if self._store is None:
            try:
                self._store = self._open_store()
                self._read()
                # Nobody has seen anything else before.
                self._news = False
            except StoreError as error:
                self._share_nothing(error)
        assert self._store is not None
        return self._store

    def _look(self) -> Store:
        """Take what other processes have written, and which of them show no sign of life."""
        if self.problem and self._now() >= self._again_s:
            self._share_again()
        if self._open().changed():
            self._read()
        store = self._open()
        if store.silent != self._silent:
            differ, self._silent = store.silent ^ self._silent, store.silent
            for request_id, entry in self._holding.items():
                if entry.standby and entry.owner in differ:
                    self._list(request_id, entry.reservations, self._shown(entry))
            self._view = None
            self._news = True
        return store

    def _share_nothing(self, error: StoreError) -> None:
        """Go on with what this process knows of itself."""
        if self._store is None or not self._store.closed:
            logger.warning("GPU tasks of other processes are not seen from now on: %s", error)
        mine = self._leave()
        self.problem = str(error)
        self._again_s = self._now() + AGAIN_S
        self._store = MemoryStore()
        self._write(mine, lambda row: False)

    def _share_again(self) -> None:
        """Try to use the store again, after it could not be used."""
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
            logger.warning("GPU tasks of other processes are seen again")

    def _open_anew(self, error: StoreReplacedError) -> None:
        """Go on with the store that other processes use now, in which this one has nothing yet."""
        self._opened += 1
        if self._opened > MOST_OPENED:
            self._share_nothing(error)
            return
        logger.warning("%s; it is opened anew, and memory may be promised twice until then", error)
        self._write_all(self._leave())

    def _write_all(self, mine: Mapping[str, Entry]) -> None:
        """Write what this process has into a store that does not have it."""
        while True:
            # It is another one after each failure.
            namespace = self._open().namespace
            changes = {i: replace(entry, namespace=namespace) for i, entry in mine.items()}
            if self._write(changes, lambda row: False):
                return

    def _leave(self) -> dict[str, Entry]:
        """Close the store; return what this process had in it, to be written to another one."""
        owner = ""
        if self._store is not None:
            owner = self._store.owner
            self._store.close()
        self._store = None
        mine = {
            request_id: replace(entry, owner="", node="", namespace="")
            for request_id, entry in self._entries.items()
            if entry.owner == owner
        }
        self._forget_entries()
        # What was decided on another store's entries is decided again.
        self._base = self._promised = self._base + self._number + 1
        self._number = 0
        self._news = True
        return mine

    def _forget_entries(self) -> None:
        give_ups = dict(self._give_ups)
        for request_id in tuple(self._entries):
            self._apply(request_id, None, None)
        self._give_ups = give_ups

    def _read(self) -> None:
        assert self._store is not None
        try:
            self._take(self._store.read(self._number))
        except StoreReplacedError as error:
            self._open_anew(error)
        except StoreError as error:
            self._share_nothing(error)

    def _change(self, request_id: str, **fields: object) -> None:
        while (entry := self._holding.get(request_id)) is not None:
            changed = replace(entry, **fields)  # type: ignore[arg-type]
            if self._write({request_id: changed}, lambda row: row.request_id == request_id):
                break

    def _write(self, changes: Changes, conflicts: Callable[[Row], bool]) -> bool:
        """Write changes; return whether none of the rows that others have written meanwhile conflicts."""
        store = self._open()
        rows = [
            Row(
                0,
                request_id,
                entry is not None and bool(entry.reservations) and request_id not in self._holding,
                entry
                if entry is None or entry.owner
                else replace(entry, owner=store.owner, node=store.node),
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
            # What others had reserved is no longer known: what was decided on it is decided again.
            self._share_nothing(error)
            return False
        if written.number is None:
            return False
        first = written.number - len(rows) + 1
        for at, row in enumerate(rows):
            self._apply(row.request_id, row.entry, row._replace(number=first + at))
        return True

    def _take(self, rows: Iterable[Row]) -> None:
        """Take what other processes have written."""
        assert self._store is not None
        # A store leaves out rows for a process that is far behind, and for one that has read none.
        left_out = not self._number
        for row in rows:
            if not row.request_id:
                left_out = True
                self._forget_entries()
                continue
            mine = self._entries.get(row.request_id)
            if row.entry is None and mine is not None and mine.owner == self._store.owner:
                raise StoreError("its file that says that this process is alive was removed")
            self._apply(row.request_id, row.entry, row)
            self._news = True
        if left_out:
            # Any of the rows that are not there may have promised memory.
            self._promised = self._base + self._number

    def _apply(self, request_id: str, entry: Entry | None, row: Row | None) -> None:
        """Bring the entries up to one change."""
        if row is not None:
            self._number = row.number
            if row.promises:
                self._promised = self._base + row.number
        before = self._entries.pop(request_id, None)
        self._holding.pop(request_id, None)
        if entry is not None:
            self._entries[request_id] = entry
            if entry.reservations:
                self._holding[request_id] = entry
        self._list(request_id, self._shown(before), self._shown(entry))
        self._view = None
        if entry is None:
            self._give_ups.pop(request_id, None)
        waits = entry is not None and not entry.reservations
        if waits or (before is not None and not before.reservations):
            for seat in self._seats:
                seat.changes[request_id] = entry if waits else None

    def _shown(self, entry: Entry | None) -> tuple[Reservation, ...]:
        """Return the reservations of an entry as scheduling sees them."""
        if entry is None:
            return ()
        if entry.owner in self._silent and entry.standby:
            return tuple(replace(each, standby=False) for each in entry.reservations)
        return entry.reservations

    def _list(
        self, request_id: str, before: Sequence[Reservation], held: Sequence[Reservation]
    ) -> None:
        """Replace the reservations of a request in the lists of their devices."""
        if held == before:
            return
        for key in dict.fromkeys(r.device_key for r in (*before, *held)):
            left = [r for r in self._by_device.pop(key, ()) if r.request_id != request_id]
            left += [r for r in held if r.device_key == key]
            if left:
                self._by_device[key] = tuple(left)

    def _make_view(self, store: Store) -> LedgerView:
        holding: dict[str, int] = {}
        processes: dict[str, int] = {}
        taken: dict[str, Mapping[DeviceKey, int]] = {}
        host_promised_bytes = 0
        for request_id, entry in self._holding.items():
            if entry.pid is not None and entry.namespace == store.namespace:
                processes[request_id] = entry.pid
            if entry.pid is not None and (entry.taken or request_id not in processes):
                sizes = entry.taken or (0,) * len(entry.devices)
                taken[request_id] = dict(zip(entry.devices, sizes, strict=True))
            if not entry.standby:
                holding[entry.origin] = holding.get(entry.origin, 0) + 1
                host_promised_bytes += 0 if entry.running else entry.request.host_bytes
        return LedgerView(
            self._base + self._number,
            dict(self._by_device),
            processes,
            taken,
            holding,
            host_promised_bytes,
            self._silent,
        )

    # Without the lock.

    def _call_watchers(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
            owner = "" if self._store is None else self._store.owner
            asked = [
                give_up
                for request_id, give_up in self._give_ups.items()
                if (entry := self._entries.get(request_id)) is not None
                and entry.owner == owner
                and entry.reclaimed
            ]
        for call in (*watchers, *asked):
            try:
                call()
            except Exception:
                # One broker may find no thread; the others must look all the same.
                logger.exception(
                    "a broker of GPU devices could not take that the ledger has changed"
                )
