"""Memory files of large arguments, which several GPU tasks share.

Every call of a task has a `Share` from the beginning of its wait for a device to its end. A file stays while a share
that used it is open. The last used files also stay while another call waits, so tasks that run one after another write
an argument once.
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
    """The memory files of one process's arguments. Safe to use from several threads."""

    def __init__(self, write: WriteFile = transport.write_file) -> None:
        self._write = write
        self._lock = threading.Lock()
        #: The calls that have not packed their arguments: each may need any file.
        self._waiting: set[Share] = set()
        #: Files of the last call that used any, as long as another call waits.
        self._last: tuple[_Entry, ...] = ()
        #: Entries by address and length of the buffers in the file; kept alive by the calls that use them.
        self._entries: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], _Entry] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Begin a call, which ends with the `with` block."""
        share = Share(self)
        with self._lock:
            self._waiting.add(share)
        try:
            yield share
        finally:
            self.take_packed(share)
            share.entries.clear()

    def file_for(self, share: Share, parts: Sequence[memoryview]) -> MemoryFile:
        """Return a file with the bytes of `parts`, another share's or a new one, or raise `OSError`.

        The bytes of an existing file are compared first: the flow may have written to its array in between.
        """
        # NumPy gives the addresses.
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return self._write(parts)
        arrays = [numpy.frombuffer(part, dtype="u1") for part in parts]
        key = tuple((int(a.__array_interface__["data"][0]), int(a.nbytes)) for a in arrays)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            share.entries.add(entry)
            dropped, self._last = self._last, tuple(share.entries)
        # Gigabytes may go back to the system here, so the lock is released.
        del dropped
        # Other calls with the same argument wait here until it is written, instead of writing it too.
        with entry.lock:
            if entry.file is None or not entry.file.holds(parts):
                # The old file is closed once all its calls have received it.
                entry.file = None
                entry.file = self._write(parts)
            return entry.file

    def take_packed(self, share: Share) -> None:
        """Note that a call has packed its arguments, or has ended."""
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
    """A file; the lock is held while it is written."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: MemoryFile | None = None


class Share:
    """The part of one call in the files."""

    def __init__(self, files: ArgumentFiles) -> None:
        self._files = files
        #: Entries of the call's files, until the call ends.
        self.entries: set[_Entry] = set()

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> PackedValue:
        """Pack the call's arguments, as `transport.pack` does."""
        try:
            return transport.pack(stream, buffers, lambda parts: self._files.file_for(self, parts))
        finally:
            self._files.take_packed(self)


def argument_files() -> ArgumentFiles:
    """Return the files of this Python process; a fork of it begins without any."""
    return PROCESS_RESOURCES.get(ArgumentFiles, ArgumentFiles)
