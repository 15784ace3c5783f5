"""Memory files: values in memory that has no name and passes from process to process by descriptor.

A file is written once, sealed, and mapped by whoever was given its descriptor: privately, so that what
is mapped can be written to and nobody else sees it. When the last descriptor and the last mapping are
gone the memory is, too, whoever died. What is put into files is `transport`'s to say, how a descriptor
passes over a socket `passing`'s.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from prefect_gpu.errors import ProtocolError

#: Whether this system has them: Linux. (`/dev/shm` is no substitute: containers give it 64 MB, and
#: names in it outlive whoever made them.)
AVAILABLE = hasattr(os, "memfd_create")

#: Bytes written in one call. Copying with `pwrite` was the fastest way into a file here (Linux 6.18,
#: 2 cores, 2 GB): 0.56 s, in pieces from 256 KiB to 64 MiB alike. Two threads: 0.60 s, since the kernel
#: lets one write to a file at a time. Through a shared mapping: 1.77 s by page faults, 0.83 s with
#: `MADV_POPULATE_WRITE` first, 1.06 s by two threads on huge pages: pages are zeroed before they are
#: written. `pwrite` also leaves no writable mapping in the way of the seal, and lets other threads run.
_PIECE_BYTES = 8 << 20

#: `MAP_FIXED` of Linux on every architecture.
_MAP_FIXED = 0x10

#: Files of this process that are open: a fork of it must not keep them alive.
_open_files: weakref.WeakSet[MemoryFile] = weakref.WeakSet()


class MemoryFile:
    """A descriptor of a memory file, closed with the last reference to this object.

    Args:
        descriptor: Of the file; owned from here on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _open_files.add(self)

    def fileno(self) -> int:
        """Give the descriptor.

        Raises:
            ValueError: It is closed.
        """
        if self._descriptor < 0:
            raise ValueError("the memory file is closed")
        return self._descriptor

    def close(self, close: Any = os.close) -> None:
        """Give up the descriptor; what is mapped stays."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    def __del__(self) -> None:
        self.close()

    def map(self) -> mmap.mmap:
        """Map the whole file, copy on write; the mapping holds no descriptor.

        Raises:
            ProtocolError: It is no sealed memory file, or finds no room in the address space.
        """
        # One that could still shrink would kill whoever reads it where it was cut off.
        wanted = _fcntl().F_SEAL_SHRINK | _fcntl().F_SEAL_WRITE
        try:
            if _fcntl().fcntl(self.fileno(), _fcntl().F_GET_SEALS) & wanted != wanted:
                raise ProtocolError("a descriptor that came is of no sealed memory file")
            size_bytes = os.fstat(self.fileno()).st_size
            return _map_privately(self.fileno(), size_bytes)
        except (OSError, ValueError, MemoryError) as error:
            raise ProtocolError(f"a memory file cannot be mapped: {error}") from error

    def holds(self, parts: Sequence[memoryview]) -> bool:
        """Tell whether the file holds exactly these bytes, each part where `write_file` puts it."""
        offsets, end = lay_out([part.nbytes for part in parts])
        if os.fstat(self.fileno()).st_size != end:
            return False
        mapped = memoryview(self.map())
        return all(
            _same(mapped[offset : offset + part.nbytes], part)
            for offset, part in zip(offsets, parts, strict=True)
        )


def lay_out(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Say at which offset each part of a file begins, and where the last one ends.

    Parts begin at multiples of 64 bytes, as far apart as frameworks align their own memory.
    """
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offset = -(-end // 64) * 64
        offsets.append(offset)
        end = offset + size_bytes
    return offsets, end


def write_file(parts: Sequence[memoryview]) -> MemoryFile:
    """Make a memory file of flat bytes, laid out by `lay_out`, and seal it.

    Raises:
        OSError: The system gives no such file (`ENOSYS`, `EMFILE`), or not the memory for it (`ENOMEM`,
            `ENOSPC`).
    """
    offsets, end = lay_out([part.nbytes for part in parts])
    return _write(parts, offsets, end)


def write_stream(pieces: Sequence[memoryview]) -> MemoryFile:
    """Make a memory file of flat bytes, with nothing between them, and seal it.

    Raises:
        OSError: As `write_file`.
    """
    ends = list(itertools.accumulate(piece.nbytes for piece in pieces))
    return _write(pieces, [0, *ends], ends[-1])


def _write(parts: Sequence[memoryview], offsets: Sequence[int], end: int) -> MemoryFile:
    file = MemoryFile(os.memfd_create("prefect-gpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    for offset, part in zip(offsets, parts, strict=False):
        at = 0
        while at < part.nbytes:
            at += os.pwrite(file.fileno(), part[at : at + _PIECE_BYTES], offset + at)
    os.ftruncate(file.fileno(), end)
    fcntl = _fcntl()
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
    return file


@functools.cache
def _fcntl() -> Any:
    # Untyped: the names of the seals exist on Linux alone.
    import fcntl

    return fcntl


def _map_privately(descriptor: int, size_bytes: int) -> mmap.mmap:
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size_bytes, flags, protection, trackfd=False)
    # Before 3.13 `mmap` keeps a descriptor for as long as it lives: a thousand results, and no other
    # file could be opened. So it maps plain memory, and the file takes that memory's place.
    room = mmap.mmap(-1, size_bytes, flags | mmap.MAP_ANONYMOUS, protection)
    address = address_of(memoryview(room))
    found = _system_mmap()(
        address, size_bytes, protection, flags | _MAP_FIXED, ctypes.c_int(descriptor), 0
    )
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return room


@functools.cache
def _system_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    return function


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Give the address of contiguous memory, written to or not."""
    # `from_buffer` of ctypes refuses what is read-only.
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


@functools.cache
def _memcmp() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return function


def _same(left: memoryview, right: memoryview) -> bool:
    # 2 GB: 0.22 s, and other threads run meanwhile; `==` of memoryviews took 0.83 s at its best.
    if left.nbytes != right.nbytes:
        return False
    return bool(_memcmp()(address_of(left), address_of(right), right.nbytes) == 0)


def _close_all() -> None:
    """After a fork: the files are the other process's."""
    for file in tuple(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_all)
