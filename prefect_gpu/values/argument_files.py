"""Memory files (see `transport`) of large arguments, which several GPU tasks of one process share.

A call of a task has a `Share` from its wait for a device to its end. A file stays while a share that used the file is
open. The files used last also stay while another call waits, so successive tasks write a common argument once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.values import transport
from prefect_gpu.values.transport import MemoryFile, PackedValue, WriteFile


class ArgumentFiles:
    """The memory files of large arguments of one process's GPU tasks. Safe to use from several threads."""

    def __init__(self, write: WriteFile = transport.write_file) -> None:
        self._write = write
        self._lock = threading.Lock()
        #: Shares of calls that have not packed their arguments yet: each may need any file.
        self._waiting: set[Share] = set()
        #: Entries of the last call that used files; empty when no call waits.
        self._last: tuple[_Entry, ...] = ()
        #: Entries by address and length of the buffers in their file. Open shares keep entries alive.
        self._entries: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], _Entry] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Yield the `Share` of a new call, which ends with the `with` block."""
        share = Share(self)
        with self._lock:
            self._waiting.add(share)
        try:
            yield share
        finally:
            self.take_packed(share)
            share.entries.clear()

    def file_for(self, share: Share, parts: Sequence[memoryview]) -> MemoryFile:
        """Return a file with the bytes of `parts`, another call's or a new one; raise `OSError` if writing fails."""
        # NumPy gives the addresses of buffers. Without it, each call writes files of its own.
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return self._write(parts)
        arrays = [numpy.frombuffer(part, dtype="u1") for part in parts]
        key = tuple((int(a.__array_interface__["data"][0]), int(a.nbytes)) for a in arrays)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            share.entries.add(entry)
            dropped, self._last = self._last, tuple(share.entries)
        # This may free gigabytes, so the lock is not held.
        del dropped
        # Other calls with the same argument wait here until the file is written.
        with entry.lock:
            # The bytes are compared: the flow may have written to its array since.
            if entry.file is None or not entry.file.holds(parts):
                # Calls that were given the old file keep it open.
                entry.file = None
                entry.file = self._write(parts)
            return entry.file

    def take_packed(self, share: Share) -> None:
        """Record that a call has packed its arguments or ended; drop the last used files if no other call waits."""
        with self._lock:
            self._waiting.discard(share)
            dropped = self._last
            if not self._waiting:
                self._last = ()
        del dropped

    def __len__(self) -> int:
        """Return the number of kept files."""
        return sum(entry.file is not None for entry in tuple(self._entries.values()))


class _Entry:
    """A memory file, and a lock that is held while the file is written."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: MemoryFile | None = None


class Share:
    """One call's use of `ArgumentFiles`."""

    def __init__(self, files: ArgumentFiles) -> None:
        self._files = files
        #: Entries of the files that the call uses; empty after its end.
        self.entries: set[_Entry] = set()

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> PackedValue:
        """Pack the call's arguments like `transport.pack`, with files that other calls may share."""
        try:
            return transport.pack(stream, buffers, lambda parts: self._files.file_for(self, parts))
        finally:
            self._files.take_packed(self)


def argument_files() -> ArgumentFiles:
    """Return the `ArgumentFiles` of this process; a fork of the process has none at first."""
    return PROCESS_RESOURCES.get(ArgumentFiles, ArgumentFiles)
