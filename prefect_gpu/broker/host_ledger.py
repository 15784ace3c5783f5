"""The log of a machine's ledger in an SQLite database, shared by all processes that use the same folder.

The database is in WAL mode, so that readers and one writer use it at the same time. It need not survive a reboot, so no
write waits for the disk.

Each process locks a file of its own beside the database and counts as alive while it holds the lock. The kernel releases
the lock however the process ends, across containers and users; then other processes remove its entries (see `ledger`).
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import logging
import os
import socket
import sqlite3
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from prefect_gpu.broker.ledger import (
    Entry,
    Ledger,
    Row,
    Store,
    StoreError,
    StoreReplacedError,
    Written,
)
from prefect_gpu.devices.host import read_machine
from prefect_gpu.devices.shared_folder import (
    Hold,
    SharedFolder,
    default_folder,
    folder_key,
    read_namespace,
    shared_folder,
)
from prefect_gpu.process_resources import PROCESS_RESOURCES

logger = logging.getLogger(__name__)

#: Version of the tables and of `Entry`. Releases with different versions do not share a ledger.
SCHEMA = 2

#: Seconds to wait for another process's write. A write takes less than a millisecond, but a process stopped in the middle
#: of one may block the file for ever.
BUSY_S = 5.0

#: Instead of `BUSY_S`, for a process at its end. Other processes remove entries that it could not remove.
LEAVING_S = 0.5

#: Seconds between two checks of whether other processes are still alive.
OWNERS_S = 0.25

#: Rows kept for slow readers, and as a record for people.
LOG_ROWS = 20_000

_TABLES = """
CREATE TABLE log (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at_s REAL NOT NULL,
    owner TEXT NOT NULL,
    request TEXT NOT NULL,
    promises INTEGER NOT NULL,
    entry TEXT
);
CREATE INDEX of_request ON log (request, number);
CREATE TABLE owners (owner TEXT PRIMARY KEY, about TEXT NOT NULL);
"""

_FILES = ("ledger.db", "ledger.db-wal", "ledger.db-shm")

_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)

#: Columns of a row and its owner, a process that may have ended.
_COLUMNS = "request, promises, entry, owner"

_OWNERS = "SELECT owner, about FROM owners"

#: The last row of each request.
_LAST_ROWS = f"SELECT max(number), {_COLUMNS} FROM log GROUP BY request ORDER BY 1"

#: Device and inode of a file.
FileIdentity: TypeAlias = tuple[int, int]


def host_ledger(folder: Path | None = None) -> Ledger:
    """Return this process's object for the ledger that all processes of the machine share in a folder."""
    return PROCESS_RESOURCES.get(
        ("ledger", folder_key(folder)), lambda: Ledger(partial(HostStore, folder, shared_folder))
    )


@dataclass(frozen=True, slots=True)
class Owner:
    """A process's description of itself, for people; `namespace` is the PID namespace of `pid`."""

    pid: int = 0
    namespace: str = ""
    user: str = ""


_OWNER: TypeAdapter[Owner] = TypeAdapter(Owner)


class HostStore(Store):
    """A `Store` in a folder that all processes of a machine share. Raises `StoreError` if the folder cannot be used.

    Used by one thread at a time, except for `close`. `owners_s`: seconds between two checks for ended processes.
    """

    def __init__(
        self,
        folder: Path | None = None,
        open_folder: Callable[[Path | None], SharedFolder] = SharedFolder,
        owners_s: float = OWNERS_S,
    ) -> None:
        self._every_s = owners_s
        self.owner = uuid.uuid4().hex
        self.namespace = read_namespace()
        self.node = socket.gethostname()
        # At exit the store is closed while other threads run, and closing SQLite's connection in the middle of a call
        # crashes the process.
        self._lock = threading.RLock()
        self._registered = False
        self._owners_s = 0.0
        self._seen_version = -1
        #: Error that made the store unusable; `None`: it is usable.
        self._broken: sqlite3.Error | None = None
        self._folder = default_folder() if folder is None else folder
        try:
            self._shared = shared = open_folder(folder)
            # Under a lock: two processes must not both find no other one, nor remove a lock file that is not held yet.
            with shared.locked("opening"):
                #: This process counts as alive while it holds this lock file.
                self._hold = hold = shared.hold(f"{self.owner}.lock")
                try:
                    self._db, database = self._open()
                except BaseException:
                    if hold is not None:
                        hold.release()
                    with contextlib.suppress(OSError):
                        (shared.path / f"{self.owner}.lock").unlink()
                    raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(self._describe(error)) from error
        self._files = (database, *_read_files(shared.path)[1:])
        # Runs at the latest when the interpreter exits.
        self._finalizer = weakref.finalize(
            self, _leave, self._lock, self._db, database, hold, shared.path, self.owner, os.getpid()
        )
        # In a fork SQLite would believe that it holds locks of the parent.
        PROCESS_RESOURCES.after_fork(self, lambda store: store._db.close())

    @property
    def closed(self) -> bool:
        """See `Store.closed`."""
        return not self._finalizer.alive

    def beat(self) -> None:
        """See `Store.beat`."""
        self._shared.beat()

    def changed(self) -> bool:
        """See `Store.changed`. Also removes the entries of processes that have ended."""
        with self._lock:
            if time.monotonic() >= self._owners_s:
                self._owners_s = time.monotonic() + self._every_s
                try:
                    self._look_at_owners()
                except OSError:
                    # No file descriptor is free to open a lock file.
                    pass
                except sqlite3.Error as error:
                    self._broken = error
            try:
                # `read` raises the error.
                return (
                    self._broken is not None
                    or self._is_replaced()
                    or self._version() != self._seen_version
                )
            except sqlite3.Error:
                return True

    def read(self, after: int) -> Sequence[Row]:
        """See `Store.read`."""
        with self._lock:
            try:
                if self._broken is not None:
                    raise self._broken
                self._check_files()
                version = self._version()
                # A first read needs only the last row of each request.
                rows = self._rows(after) if after else self._last_rows()
                self._seen_version = version
                return rows
            except (sqlite3.Error, ValueError) as error:
                raise StoreError(self._describe(error)) from error

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """See `Store.write`."""
        with self._lock:
            try:
                with _transaction(self._db):
                    self._check_files()
                    self._seen_version = self._version()
                    rows = self._rows(after)
                    number: int | None = None
                    if not any(conflicts(row) for row in rows):
                        number = self._append(changes) or (rows[-1].number if rows else after)
                return Written(rows, number)
            except (sqlite3.Error, OSError, ValueError) as error:
                raise StoreError(self._describe(error)) from error

    def close(self) -> None:
        """See `Store.close`."""
        self._finalizer()

    def read_owners(self) -> dict[str, Owner]:
        """Return descriptions of the processes that use the ledger, by `Entry.owner`.

        Raises:
            StoreError: The ledger cannot be read.
        """
        return {owner: _owner(text) for owner, text in self._ask(_OWNERS)}

    def read_placed_s(self) -> dict[str, float]:
        """Return the monotonic seconds of each request's last placement by request id; old requests may be missing.

        Raises:
            StoreError: The ledger cannot be read.
        """
        return dict(self._ask("SELECT request, max(at_s) FROM log WHERE promises GROUP BY request"))

    def _ask(self, query: str) -> list[tuple[str, Any]]:
        with self._lock:
            try:
                return self._db.execute(query).fetchall()
            except sqlite3.Error as error:
                raise StoreError(self._describe(error)) from error

    def _append(self, changes: Iterable[Row]) -> int:
        if not self._registered:
            about = _OWNER.dump_json(_about_this_process(self.namespace)).decode()
            self._db.execute("INSERT INTO owners VALUES (?, ?)", (self.owner, about))
            self._registered = True
        number = 0
        for row in changes:
            owner, text = self.owner, None
            if row.entry is not None:
                # The entry may be of another process's request: its status counts later requests that were placed first.
                owner, text = row.entry.owner, _ENTRY.dump_json(row.entry).decode()
            number = _insert(self._db, owner, row.request_id, row.promises, text)
        if number and number % 1000 == 0:
            self._trim(number)
        return number

    def _trim(self, number: int) -> None:
        """Delete rows that no reader needs: old rows of requests that are gone or have newer rows."""
        self._db.execute(
            "DELETE FROM log WHERE number < ? AND (entry IS NULL OR EXISTS "
            "(SELECT 1 FROM log AS later WHERE later.request = log.request AND later.number > log.number))",
            (number - LOG_ROWS,),
        )

    def _rows(self, after: int) -> list[Row]:
        (last,) = self._db.execute("SELECT max(number) FROM log").fetchone()
        if last is not None and last - after > LOG_ROWS:
            # Some of these rows were deleted: this process was stopped for a long time.
            return [Row(after, "", True, None), *self._last_rows()]
        return self._read_rows(
            f"SELECT number, {_COLUMNS} FROM log WHERE number > {after:d} ORDER BY 1"
        )

    def _last_rows(self) -> list[Row]:
        unlisted = self._db.execute(
            f"SELECT DISTINCT owner FROM ({_LAST_ROWS}) "
            "WHERE entry IS NOT NULL AND owner NOT IN (SELECT owner FROM owners)"
        )
        for (owner,) in unlisted.fetchall():
            if not self._is_alive(owner):
                self._drop(owner, "is not in its list of processes")
        return self._read_rows(_LAST_ROWS)

    def _read_rows(self, query: str) -> list[Row]:
        """Return parsed rows; an unreadable row raises `ValueError`, or drops all rows of its process if that has ended."""
        while True:
            rows: list[Row] = []
            failed: dict[str, ValueError] = {}
            for *row, owner in self._db.execute(query).fetchall():
                try:
                    rows.append(_row(*row))
                except ValueError as error:
                    failed[owner] = error
            if not failed:
                return rows
            for owner, why in failed.items():
                if self._is_alive(owner):
                    raise why
                self._drop(owner, f"has written what cannot be read: {why}")

    def _is_alive(self, owner: str) -> bool:
        try:
            return self._shared.is_held(f"{owner}.lock")
        except OSError:
            # A lock file of another user that cannot be opened counts as held.
            return True

    def _drop(self, owner: str, why: str) -> None:
        logger.warning(
            "the entries of a process that has ended were dropped from the ledger in %s, since it %s",
            *(self._folder, why),
        )
        with _transaction(self._db):
            self._remove_owner(owner)
            self._db.execute("DELETE FROM log WHERE owner = ? AND entry IS NOT NULL", (owner,))

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _open(self) -> tuple[sqlite3.Connection, FileIdentity | None]:
        """Open the database, and return it with its file's identity; raise `StoreError` for another schema."""
        # A file that no other process uses is replaced if it is damaged (all rows are read), of another release, or of
        # another boot, which may have ended in the middle of a write.
        path = self._shared.path / _FILES[0]
        alone = not self._finds_others()
        self._shared.make_file(path.name)
        identity = _read_files(self._shared.path)[0]
        try:
            database = _connect(path, self._folder)
            if not alone:
                return database, identity
            if database.execute("PRAGMA application_id").fetchone() == (_boot_number(),):
                _check_rows(database)
                return database, identity
            database.close()
        except (StoreError, sqlite3.DatabaseError) as error:
            # A locked database, or one on a full disk, is not damaged.
            if not alone or isinstance(error, sqlite3.OperationalError):
                raise
            logger.warning("%s; no process uses it, and it is replaced", self._describe(error))
        for name in _FILES:
            (self._shared.path / name).unlink(missing_ok=True)
        self._shared.make_file(path.name)
        identity = _read_files(self._shared.path)[0]
        return _connect(path, self._folder), identity

    def _finds_others(self) -> bool:
        """Return whether another living process, of any release, uses the folder."""
        owners = {path.stem for path in self._shared.path.glob("*.lock")} - {self.owner}
        # All are checked: `_is_alive` removes the files of processes that have ended.
        alive = [owner for owner in owners if self._is_alive(owner)]
        return bool(alive)

    def _is_replaced(self) -> bool:
        return _read_files(self._shared.path) != self._files

    def _check_files(self) -> None:
        if self._is_replaced():
            raise StoreReplacedError(
                f"the files of the ledger in {self._folder} were removed or replaced while it was in use"
            )

    def _look_at_owners(self) -> None:
        """Remove the entries of ended processes, and update `silent`."""
        owners = self._db.execute("SELECT owner FROM owners WHERE owner != ?", (self.owner,))
        silent: set[str] = set()
        for (owner,) in owners.fetchall():
            # A lock file of another user that cannot be opened counts as held.
            with contextlib.suppress(OSError):
                if not self._shared.is_held(f"{owner}.lock"):
                    self._remove_owner(owner)
                elif self._shared.is_silent(f"{owner}.lock"):
                    silent.add(owner)
        self.silent = frozenset(silent)

    def _remove_owner(self, owner: str) -> None:
        _remove_owner(self._db, owner)
        # SQLite does not report the connection's own writes as changes.
        self._seen_version = -1

    def _describe(self, error: Exception) -> str:
        if isinstance(error, StoreError):
            return str(error)
        text = " ".join(str(error).split())
        return f"the ledger in {self._folder} cannot be used ({type(error).__name__}: {text})"


def _connect(path: Path, folder: Path) -> sqlite3.Connection:
    """Open a database with its tables; raise `StoreError` if it has another schema."""
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        with _transaction(database):
            (schema,) = database.execute("PRAGMA user_version").fetchone()
            if schema == 0:
                for statement in _TABLES.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {SCHEMA}")
                database.execute(f"PRAGMA application_id = {_boot_number()}")
            elif schema != SCHEMA:
                raise StoreError(
                    f"the ledger in {folder} has schema {schema} and this release of prefect-gpu uses "
                    f"schema {SCHEMA}; use one release for all flows of this machine"
                )
        return database
    except BaseException:
        database.close()
        raise


def _check_rows(database: sqlite3.Connection) -> None:
    """If a database has unreadable rows, close it and raise `sqlite3.DatabaseError`."""
    try:
        database.execute(_OWNERS).fetchall()
        for *row, _ in database.execute(_LAST_ROWS):
            _row(*row)
    except (sqlite3.Error, ValueError) as error:
        database.close()
        raise sqlite3.DatabaseError(str(error)) from error


def _boot_number() -> int:
    """Return a number that identifies this boot of the machine, for the database's header."""
    return zlib.crc32(read_machine().encode()) & 0x7FFF_FFFF


def _read_files(folder: Path) -> tuple[FileIdentity | None, ...]:
    """Return the current identity of each database file in a folder; `None`: the file is missing."""
    found: list[FileIdentity | None] = []
    for name in _FILES:
        try:
            status = os.stat(folder / name)
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _never_close(database: sqlite3.Connection) -> None:
    """Keep a connection open until this process ends: closing it may delete newer files with the names of its files."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Run the `with` block in a transaction: the current one, or a new one."""
    if database.in_transaction:
        yield
        return
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # SQLite itself rolls back after some errors, such as a full disk.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _row(number: int, request_id: str, promises: int, text: str | None) -> Row:
    """Return a parsed row; raise `ValueError` if this release would not have written it."""
    try:
        entry = None if text is None else _ENTRY.validate_json(text)
    except (ValidationError, TypeError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ValueError(f"row {number}: {said}") from error
    if entry is not None and len(entry.held_bytes) not in (0, len(entry.devices)):
        raise ValueError(
            f"row {number} has {len(entry.held_bytes)} sizes for {len(entry.devices)} devices"
        )
    return Row(number, request_id, bool(promises), entry)


def _owner(text: str) -> Owner:
    """Return a process's parsed description of itself; an empty one if `text` is unreadable."""
    try:
        return _OWNER.validate_json(text)
    except (ValidationError, TypeError):
        return Owner()


def _insert(
    database: sqlite3.Connection, owner: str, request_id: str, promises: bool, entry: str | None
) -> int:
    cursor = database.execute(
        "INSERT INTO log (at_s, owner, request, promises, entry) VALUES (?, ?, ?, ?, ?)",
        (time.monotonic(), owner, request_id, promises, entry),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _remove_owner(database: sqlite3.Connection, owner: str) -> None:
    """Remove an ended process and all its entries."""
    with _transaction(database):
        left = database.execute(
            "SELECT request, entry, max(number) FROM log WHERE owner = ? GROUP BY request", (owner,)
        )
        for request, entry, _ in left.fetchall():
            if entry is not None:
                _insert(database, owner, request, False, None)
        database.execute("DELETE FROM owners WHERE owner = ?", (owner,))


def _leave(
    lock: threading.RLock,
    database: sqlite3.Connection,
    identity: FileIdentity | None,
    hold: Hold | None,
    folder: Path,
    owner: str,
    pid: int,
) -> None:
    """Remove this process from a ledger at its end."""
    if pid != os.getpid():
        # A fork: the ledger is the parent's.
        return
    if lock.acquire(timeout=BUSY_S + LEAVING_S):
        try:
            with contextlib.suppress(sqlite3.Error):
                database.execute(f"PRAGMA busy_timeout = {LEAVING_S * 1000:.0f}")
                _remove_owner(database, owner)
            if _read_files(folder)[0] == identity:
                with contextlib.suppress(sqlite3.Error):
                    database.close()
            else:
                # The WAL file in the folder belongs to another database now.
                _never_close(database)
        finally:
            lock.release()
    else:
        # Another thread's call does not return. Other processes will remove the entries.
        _never_close(database)
    if hold is not None:
        hold.release()
    with contextlib.suppress(OSError):
        (folder / f"{owner}.lock").unlink(missing_ok=True)


def _about_this_process(namespace: str) -> Owner:
    """Return the description of this process for people. No decision depends on it."""
    user = ""
    # A container may have no name for its user.
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return Owner(os.getpid(), namespace, user)
