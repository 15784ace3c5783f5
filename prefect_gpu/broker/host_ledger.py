"""The log of a machine's ledger in a file, shared by all processes that use the same folder.

The file is an SQLite database in WAL mode, which readers and one writer use at the same time. Nothing in it has
to survive the machine's end, so no write waits for the disk.

A process is alive for as long as it holds a lock on a file of its own beside the database. The kernel releases
the lock when the process ends, in whatever way, and across containers and users. What a process that is gone
has written is removed by the others.

What the entries mean is in `ledger`.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import sqlite3
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from prefect_gpu.broker.ledger import Entry, Ledger, Row, StoreError, Written
from prefect_gpu.devices.shared_folder import Hold, SharedFolder, default_folder, read_namespace
from prefect_gpu.process_resources import PROCESS_RESOURCES

#: Version of the tables and of `Entry`. Releases with different ones do not share a ledger.
SCHEMA = 1

#: Seconds that a call waits for another process to finish its write, which takes less than a millisecond. A
#: process that was stopped in the middle of one may keep the file for ever.
BUSY_S = 5.0

#: Seconds between two checks of whether other processes are still alive.
OWNERS_S = 0.25

#: Rows that are kept for readers which are behind, and as a record of what happened.
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

#: Connections of the processes that this one is a fork of.
_of_parents: list[sqlite3.Connection] = []

_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


def host_ledger(folder: Path | None = None) -> Ledger:
    """Return the ledger that all processes of this machine share, one for each folder in a process.

    Args:
        folder: See `HostStore`.
    """
    return PROCESS_RESOURCES.get(("ledger", folder), lambda: Ledger(partial(HostStore, folder)))


class HostStore:
    """A log that all processes of a machine share. Not safe to use from several threads at once.

    Args:
        folder: See `SharedFolder`.
        owners_s: Seconds between two checks of whether other processes are still alive.

    Raises:
        StoreError: It cannot be used.
    """

    def __init__(self, folder: Path | None = None, owners_s: float = OWNERS_S) -> None:
        self._every_s = owners_s
        self.owner = uuid.uuid4().hex
        self.namespace = read_namespace()
        self._registered = False
        self._owners_s = 0.0
        self._seen_version = -1
        #: Whether the path names another file than the one that is open, or none.
        self._replaced = False
        self._folder = default_folder() if folder is None else folder
        try:
            self._shared = shared = SharedFolder(folder)
            #: While it has it, this process is alive.
            self._hold = hold = shared.hold(f"{self.owner}.lock")
            PROCESS_RESOURCES.after_fork(self, HostStore._forget)
            os.close(shared.open_file("ledger.db"))
            self._file = self._identify()
            self._db = sqlite3.connect(
                shared.path / "ledger.db",
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            # When the last process ends, nothing of it is left.
            weakref.finalize(self, _leave, self._db, hold, shared.path, self.owner, os.getpid())
            self._make_tables()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(self._describe(error)) from error

    def changed(self) -> bool:
        """See `Store.changed`. It also removes what processes have written that are gone."""
        if time.monotonic() >= self._owners_s:
            self._owners_s = time.monotonic() + self._every_s
            with contextlib.suppress(OSError, sqlite3.Error):
                self._remove_ended()
            self._replaced = self._replaced or self._identify() != self._file
        if self._replaced:
            # `read` says so.
            return True
        try:
            return self._version() != self._seen_version
        except sqlite3.Error:
            # `read` says what is wrong.
            return True

    def read(self, after: int) -> Sequence[Row]:
        """See `Store.read`."""
        if self._replaced:
            raise StoreError(f"the ledger in {self._folder} was removed or replaced while in use")
        try:
            version = self._version()
            # A process that knows nothing has decided nothing: it needs the last row of each request alone.
            rows = self._rows(after) if after else self._last_rows()
            self._seen_version = version
            return rows
        except (sqlite3.Error, ValidationError) as error:
            raise StoreError(self._describe(error)) from error

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """See `Store.write`."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._seen_version = self._version()
                rows = self._rows(after)
                number: int | None = None
                if not any(conflicts(row) for row in rows):
                    number = self._append(changes) or (rows[-1].number if rows else after)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("ROLLBACK" if number is None else "COMMIT")
            return Written(rows, number)
        except (sqlite3.Error, ValidationError, OSError) as error:
            raise StoreError(self._describe(error)) from error

    def _append(self, changes: Iterable[Row]) -> int:
        if not self._registered:
            about = json.dumps(_about_this_process(self.namespace))
            self._db.execute("INSERT INTO owners VALUES (?, ?)", (self.owner, about))
            self._registered = True
        number = 0
        for row in changes:
            owner, text = self.owner, None
            if row.entry is not None:
                # Another process may note that it has passed a request.
                owner, text = row.entry.owner, _ENTRY.dump_json(row.entry).decode()
            number = _insert(self._db, owner, row.request_id, row.promises, text)
        if number and number % 1000 == 0:
            self._trim(number)
        return number

    def _trim(self, number: int) -> None:
        """Delete rows that no reader needs: old ones of requests that are gone or were written anew."""
        self._db.execute(
            "DELETE FROM log WHERE number < ? AND (entry IS NULL OR EXISTS "
            "(SELECT 1 FROM log AS later WHERE later.request = log.request AND later.number > log.number))",
            (number - LOG_ROWS,),
        )

    def _rows(self, after: int) -> list[Row]:
        (last,) = self._db.execute("SELECT max(number) FROM log").fetchone()
        if last is not None and last - after > LOG_ROWS:
            # Some were deleted. This process was stopped for long.
            return [Row(after, "", True, None), *self._last_rows()]
        query = "SELECT number, request, promises, entry FROM log WHERE number > ? ORDER BY number"
        return [_row(*each) for each in self._db.execute(query, (after,))]

    def _last_rows(self) -> list[Row]:
        query = "SELECT max(number), request, promises, entry FROM log GROUP BY request ORDER BY 1"
        return [_row(*each) for each in self._db.execute(query)]

    def _identify(self) -> tuple[int, int] | None:
        """Return which file the path of the database names; `None`: none that can be seen."""
        try:
            found = os.stat(self._shared.path / "ledger.db")
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _make_tables(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            (schema,) = self._db.execute("PRAGMA user_version").fetchone()
            if schema == 0:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA}")
            elif schema != SCHEMA:
                raise StoreError(
                    f"the ledger in {self._folder} has schema {schema} and this release of prefect-gpu uses "
                    f"schema {SCHEMA}; use one release for all flows of this machine"
                )
        finally:
            self._db.execute("COMMIT")

    def _remove_ended(self) -> None:
        """Remove the entries of processes that hold their lock no longer."""
        owners = self._db.execute("SELECT owner FROM owners WHERE owner != ?", (self.owner,))
        for (owner,) in owners.fetchall():
            # One of another user that may not be opened counts as alive.
            with contextlib.suppress(OSError):
                if not self._shared.is_held(f"{owner}.lock"):
                    self._remove_owner(owner)

    def _remove_owner(self, owner: str) -> None:
        _remove_owner(self._db, owner)
        # This connection does not see its own write as a change.
        self._seen_version = -1

    def _forget(self) -> None:
        # SQLite must not close in a fork what the parent has opened.
        _of_parents.append(self._db)

    def _describe(self, error: Exception) -> str:
        return f"the ledger in {self._folder} cannot be used ({type(error).__name__}: {error})"


def _row(number: int, request_id: str, promises: int, text: str | None) -> Row:
    entry = None if text is None else _ENTRY.validate_json(text)
    return Row(number, request_id, bool(promises), entry)


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
    """Remove a process that is gone, and all that it has written of requests."""
    database.execute("BEGIN IMMEDIATE")
    try:
        left = database.execute(
            "SELECT request, entry, max(number) FROM log WHERE owner = ? GROUP BY request", (owner,)
        )
        for request, entry, _ in left.fetchall():
            if entry is not None:
                _insert(database, owner, request, False, None)
        database.execute("DELETE FROM owners WHERE owner = ?", (owner,))
    finally:
        database.execute("COMMIT")


def _leave(
    database: sqlite3.Connection, hold: Hold | None, folder: Path, owner: str, pid: int
) -> None:
    """Remove this process from a ledger. Called at its end."""
    if pid != os.getpid():
        # A fork: the ledger is the parent's.
        return
    with contextlib.suppress(sqlite3.Error, OSError):
        _remove_owner(database, owner)
        database.close()
        (folder / f"{owner}.lock").unlink(missing_ok=True)
        if hold is not None:
            hold.release()


def _about_this_process(namespace: str) -> dict[str, str | int | float]:
    """Return what a person needs to find this process. Nothing depends on it."""
    with contextlib.suppress(KeyError, OSError, psutil.Error):
        return {
            "pid": os.getpid(),
            "namespace": namespace,
            "started_s": psutil.Process().create_time(),
            "boot": _read_text("/proc/sys/kernel/random/boot_id"),
            "host": socket.gethostname(),
            "user": getpass.getuser(),
        }
    return {"pid": os.getpid()}


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
