"""Large arguments that several GPU tasks take: written once, passed to each.

Every call of a task has a `Share` from when it begins to wait for a device to its end. A large buffer
that is dumped with one is written to a memory file, which stays as long as a share that used it, or is
known to need it, is open. Before another call gets the file its bytes are compared with the buffer's:
the flow may have written to its array in between. What a file is, is `memory_files`'s.

A share knows what its call will need from looking at its arguments (NumPy arrays, PyTorch tensors, and
whatever else gives its memory, in lists, tuples and dictionaries too), not into objects of other
classes: what only those hold is shared by calls that run at the same time, and written again later.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from prefect_gpu.processes import memory_files
from prefect_gpu.processes.memory_files import MemoryFile, address_of, write_file
from prefect_gpu.processes.transport import (
    FILE_BYTES,
    FileTransport,
    FrameTransport,
    Transport,
    Write,
)

#: Address and length in bytes.
Region: TypeAlias = tuple[int, int]

#: Values that a share looks at: enough for any signature, no time for a list of a million numbers.
_MOST_VALUES = 1000
_DEEPEST = 3


class ArgumentFiles:
    """The memory files of one process's arguments. Safe to use from several threads.

    Args:
        write: Makes a file.
    """

    def __init__(self, write: Write = write_file) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._open: set[Share] = set()
        self._entries: dict[tuple[Region, ...], _Entry] = {}

    def share(self, arguments: Any) -> Share:
        """Begin a call that takes these arguments; a context manager that ends it."""
        share = Share(self, frozenset(find_regions(arguments)))
        with self._lock:
            self._open.add(share)
        return share

    def file_for(self, share: Share, parts: Sequence[memoryview]) -> MemoryFile:
        """Give a file that holds `parts`: one that another share has, or a new one.

        Raises:
            OSError: See `memory_files.write_file`.
        """
        key = tuple((address_of(part), part.nbytes) for part in parts)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.users.add(share)
        # Others that want the same wait here until it is written, rather than write it too.
        with entry.lock:
            if entry.file is None or not entry.file.holds(parts):
                # The old one goes as soon as it has reached those that it was written for.
                entry.file = None
                entry.file = self._write(parts)
            return entry.file

    def close(self, share: Share) -> None:
        """End a call: let go of files that no other one needs."""
        dropped = []
        with self._lock:
            self._open.discard(share)
            needed = frozenset[Region]().union(*(other.regions for other in self._open))
            for key, entry in tuple(self._entries.items()):
                entry.users.discard(share)
                if not entry.users and not needed.intersection(key):
                    dropped.append(self._entries.pop(key))
        # Gigabytes may go back to the system here: not under the lock.
        del dropped

    def __len__(self) -> int:
        """Give the number of files that are kept."""
        with self._lock:
            return len(self._entries)


class _Entry:
    """A file, and who has used it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: MemoryFile | None = None
        self.users: set[Share] = set()


class Share:
    """One call's part in the files; ends with the `with` block."""

    def __init__(self, files: ArgumentFiles, regions: frozenset[Region]) -> None:
        self._files = files
        #: Memory that the call is known to need.
        self.regions = regions

    def transport(self) -> Transport:
        """Give what packs this call's arguments."""
        if not memory_files.AVAILABLE:
            return FrameTransport()
        return FileTransport(lambda parts: self._files.file_for(self, parts))

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.close(self)


def find_regions(arguments: Any) -> Iterator[Region]:
    """Find the large memory of arguments, without looking into objects of unknown classes."""
    for value in itertools.islice(_walk(arguments, _DEEPEST), _MOST_VALUES):
        region = _region(value)
        if region is not None and region[1] >= FILE_BYTES:
            yield region


def _walk(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        parts: Any = value
    elif isinstance(value, Mapping):
        parts = value.values()
    else:
        yield value
        return
    if depth:
        for part in parts:
            yield from _walk(part, depth - 1)


def _region(value: Any) -> Region | None:
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    try:
        if tensor is not None and isinstance(value, tensor):
            storage = value.untyped_storage()
            on_host = storage.device.type == "cpu"
            return (storage.data_ptr(), storage.nbytes()) if on_host else None
        # Flat, whatever its shape, format and order; refused where it is not in one piece.
        view = pickle.PickleBuffer(value).raw()
        return address_of(view), view.nbytes
    except Exception:
        # It gives no memory: most values do not.
        return None


_files = ArgumentFiles()


def argument_files() -> ArgumentFiles:
    """Give the files of this Python process; in a fork of it, none yet."""
    return _files


def _forget() -> None:
    """After a fork: the files are closed (`memory_files`), and a lock may have been held."""
    global _files
    _files = ArgumentFiles()


os.register_at_fork(after_in_child=_forget)
