"""Transport of bytes, memory files and values over the socket between a parent process and its child.

- A *frame* is a kind (1 byte), a length (8 bytes, big-endian) and that many bytes. A stream that ends inside a frame
  means that its sender died, which is no error of the protocol.
- A *memory file* is memory without a name that passes from process to process by descriptor. It is written once,
  sealed, and mapped privately: no other process sees a change of the mapping. Its memory is freed with its last
  descriptor and its last mapping, also after the death of a process.
- A *value* is pickled into a stream and large buffers outside the stream. `pack` makes a `PackedValue` of both: a frame
  and the memory files sent with it. `unpack` makes a `ReceivedValue` on the other side, which is unpickled in place.
  Small values are a frame without files; so are all values if the system has no memory files (macOS).

`messages` has the contents of frames. The sockets belong to `launcher` and to the child's channel.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import io
import mmap
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from prefect_gpu.errors import ProtocolError
from prefect_gpu.process_resources import PROCESS_RESOURCES

#: Whether this system has memory files, as Linux. (`/dev/shm` is no substitute: containers give it 64 MB, and its files
#: outlive the process that made them.)
AVAILABLE = hasattr(os, "memfd_create")

#: Bytes in one call of `pwrite`; 256 KiB to 64 MiB take the same time. `pwrite` is faster than a shared mapping (2 GB,
#: 2 cores, Linux 6.18: 0.56 s and 0.83 to 1.77 s), lets other threads run, and leaves no mapping to prevent the seal.
_WRITE_BYTES = 8 << 20

#: Bytes compared in one call: less than `malloc` takes from the system anew each time (128 KiB). Comparing takes less
#: than half the time of writing a new file (256 MiB, 2 busy cores: 0.07 and 0.16 s).
_COMPARE_BYTES = 64 << 10

#: Files mapped at a time in one process before Python 3.13, where a mapping keeps a descriptor: a quarter of the usual
#: limit (1,024). Further files are copied into plain memory.
_MOST_MAPPED = 256

#: Alignment of the parts of a file and of a frame, in bytes, as in the frameworks' own memory.
_ALIGNMENT = 64

#: Mappings that keep a descriptor.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class MemoryFile(io.FileIO):
    """A memory file with its descriptor, closed with the last reference, and in a fork; its mappings stay."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        PROCESS_RESOURCES.after_fork(self, MemoryFile.close)

    def __del__(self) -> None:
        # `FileIO` would warn of a file that was not closed explicitly.
        self.close()

    def map(self) -> mmap.mmap:
        """Return a private (copy-on-write) mapping of the whole file, or raise `ProtocolError`."""
        try:
            return _map_privately(self.fileno(), os.fstat(self.fileno()).st_size)
        except (OSError, ValueError, MemoryError) as error:
            raise ProtocolError(f"a memory file cannot be mapped: {error}") from error

    def holds(self, parts: Sequence[memoryview]) -> bool:
        """Return whether the file has exactly the bytes of `parts`, as `write_file` lays them out."""
        offsets, end = lay_out([part.nbytes for part in parts])
        # Views would be compared element by element, with the interpreter's lock held; `bytes` are compared at once.
        return os.fstat(self.fileno()).st_size == end and all(
            os.pread(self.fileno(), len(piece := part[at : at + _COMPARE_BYTES]), offset + at)
            == piece.tobytes()
            for offset, part in zip(offsets, parts, strict=True)
            for at in range(0, part.nbytes, _COMPARE_BYTES)
        )


def _map_privately(descriptor: int, size_bytes: int) -> mmap.mmap:
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size_bytes, flags, protection, trackfd=False)
    if len(_mapped) < _MOST_MAPPED:
        mapped = mmap.mmap(descriptor, size_bytes, flags, protection)
        _mapped.add(mapped)
        return mapped
    memory = mmap.mmap(-1, size_bytes, flags | mmap.MAP_ANONYMOUS, protection)
    view, at = memoryview(memory), 0
    while at < size_bytes:
        at += os.preadv(descriptor, [view[at:]], at)
    return memory


def lay_out(sizes_bytes: Sequence[int], alignment: int = _ALIGNMENT) -> tuple[list[int], int]:
    """Return the offsets of the parts of a file, multiples of `alignment` bytes, and the end of the last part."""
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offset = -(-end // alignment) * alignment
        offsets.append(offset)
        end = offset + size_bytes
    return offsets, end


def write_file(parts: Sequence[memoryview], alignment: int = _ALIGNMENT) -> MemoryFile:
    """Write flat parts to a new sealed memory file, as `lay_out` places them.

    Raises `OSError`: the system makes no such file (`ENOSYS`, `EMFILE`), or has no memory for it (`ENOMEM`, `ENOSPC`).
    """
    offsets, end = lay_out([part.nbytes for part in parts], alignment)
    file = MemoryFile(os.memfd_create("prefect-gpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    for offset, part in zip(offsets, parts, strict=True):
        at = 0
        while at < part.nbytes:
            at += os.pwrite(file.fileno(), part[at : at + _WRITE_BYTES], offset + at)
    os.ftruncate(file.fileno(), end)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
    return file


# Frames, and the bytes and descriptors of a socket.

HEADER: Final = struct.Struct("!BQ")

#: Kinds of frames: a message of `messages`.
MESSAGE: Final = 1
#: A value in parts: a table of the parts, and the parts outside memory files.
VALUE: Final = 2
#: JSON that the child's bootstrap reads before it can import anything; only to a child, and first.
BOOT: Final = 3

#: Longest frame. A larger length is garbage on the stream.
LONGEST_FRAME_BYTES: Final = 1 << 44

#: Bytes from which a frame's body is a mapping: no zeros are written, and it returns to the system after its last use.
MAPPED_BYTES: Final = 1 << 20

#: A frame's body: bytes that pickle reads in place.
FrameBody: TypeAlias = bytearray | mmap.mmap

#: Most descriptors of one message: Linux's own limit (`SCM_MAX_FD`).
_MOST_DESCRIPTORS = 253

_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)

#: Received descriptors are not inherited by processes that the receiver starts.
_RECEIVE_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def frame_header(kind: int, size_bytes: int) -> bytes:
    """Return the header of a frame, which precedes the frame's body."""
    return HEADER.pack(kind, size_bytes)


def allocate_body(size_bytes: int) -> FrameBody:
    """Allocate memory for a frame's body, or raise `ProtocolError`."""
    try:
        if size_bytes < MAPPED_BYTES:
            return bytearray(size_bytes)
        # Private, unlike Python's default: the system may then use huge pages.
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError) as error:
        raise ProtocolError(f"a message of {size_bytes} bytes finds no memory: {error}") from error


def send(channel: socket.socket, data: memoryview, files: Sequence[MemoryFile] = ()) -> int:
    """Send some of `data`, and the descriptors of all `files` with its first byte; return the number of bytes sent.

    The kernel delivers descriptors with the byte that they were sent with, and never joins that byte to earlier bytes.

    Raises:
        BlockingIOError: The socket is full.
        ProtocolError: Too many descriptors are in flight.
        ConnectionError: The other end is gone.
        OSError: The system has no memory for it.
    """
    if not files:
        return channel.send(data)
    numbers = array.array("i", [file.fileno() for file in files])
    try:
        return channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            raise ProtocolError(
                f"{len(files)} memory files cannot be passed: as many as a user may have open are "
                f"on their way already; raise the limit of open files (ulimit -n)"
            ) from error
        raise


def _receive(channel: socket.socket, memory: memoryview) -> tuple[int, list[MemoryFile]]:
    size_bytes, ancillary, flags, _ = channel.recvmsg_into(
        [memory], _ANCILLARY_BYTES, _RECEIVE_FLAGS
    )
    files: list[MemoryFile] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            files += map(MemoryFile, numbers)
    if flags & socket.MSG_CTRUNC:
        raise ProtocolError(
            "a value came in memory files, and this process has as many files open as it may; raise "
            "the limit (ulimit -n)"
        )
    return size_bytes, files


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    body: FrameBody
    #: Memory files that came with the frame's bytes.
    files: tuple[MemoryFile, ...] = ()


class FrameReader:
    """Reads frames from a socket, blocking or not, in pieces of any size; receives into a frame, never past its end."""

    def __init__(self) -> None:
        self._header = memoryview(bytearray(HEADER.size))
        #: Kind of the frame that is being read; `None`: its header is not complete.
        self._kind: int | None = None
        self._body: FrameBody = bytearray()
        #: Memory for the next bytes.
        self._free = self._header
        self._files: list[MemoryFile] = []

    @property
    def truncated(self) -> bool:
        """Whether a part of a frame has been received: a stream that ends now ends inside a frame."""
        return self._kind is not None or len(self._free) < HEADER.size

    def drop_files(self) -> None:
        """Close the memory files that came with an incomplete frame."""
        self._files = []

    def receive(self, channel: socket.socket) -> Frame | None:
        """Receive some bytes; return the frame that is complete with them, or `None`.

        Raises:
            EOFError: The other end is closed.
            BlockingIOError: There are no bytes now.
            ProtocolError: The bytes are not a frame, or its body or its memory files cannot be received.
            OSError: The other end is gone.
        """
        size_bytes, files = _receive(channel, self._free)
        if not size_bytes:
            raise EOFError("the process at the other end is gone")
        self._files += files
        self._free = self._free[size_bytes:]
        if len(self._free):
            return None
        if self._kind is None:
            kind, length = HEADER.unpack(self._header)
            if kind not in (MESSAGE, VALUE, BOOT) or length > LONGEST_FRAME_BYTES:
                raise ProtocolError(
                    f"a process sent a frame of kind {kind} and length {length}; something "
                    f"other than prefect_gpu wrote to its channel"
                )
            self._kind, self._body = kind, allocate_body(length)
            if length:
                self._free = memoryview(self._body)
                return None
        frame = Frame(self._kind, self._body, tuple(self._files))
        self._kind, self._body, self._free, self._files = None, bytearray(), self._header, []
        return frame


# Values.

#: Bytes from which a part of a value has a memory file. Pickling, sending, mapping and reading take, by frame and by
#: file (medians, 2 busy cores): 0.14 and 0.19 ms for 64 KiB, 0.29 and 0.29 for 256 KiB, 0.97 and 0.58 for 1 MiB, 5.5
#: and 2.7 for 4 MiB. Up to 1 MiB, a file is not worth a descriptor on both sides.
FILE_BYTES = 1 << 20

#: Most memory files of one value, each with a descriptor. Large parts have a file each, so that releasing one frees its
#: memory; the other parts share the last file.
MOST_FILES = 16

_COUNT = struct.Struct("!I")

#: Place of a part: the number of its file (-1: in the frame), its offset and its length in bytes.
_PART = struct.Struct("!iQQ")

#: Writes parts to a memory file, or returns a file that holds them.
WriteFile = Callable[[Sequence[memoryview]], MemoryFile]


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value to be sent: a frame, and the memory files that go with it."""

    #: The frame's body.
    body: bytearray = field(repr=False)
    files: tuple[MemoryFile, ...] = ()

    @property
    def frame(self) -> tuple[memoryview, ...]:
        """Header and body of the frame; `files` are sent with its first byte."""
        return memoryview(frame_header(VALUE, len(self.body))), memoryview(self.body)

    @property
    def size_bytes(self) -> int:
        """Bytes of the frame and of its files."""
        return len(self.body) + sum(os.fstat(file.fileno()).st_size for file in self.files)

    def open(self) -> ReceivedValue:
        """Return the value as if received, in the process that packed it."""
        return unpack(Frame(VALUE, self.body, self.files))


@dataclass(frozen=True, slots=True)
class ReceivedValue:
    """A received value, still pickled. Objects unpickled from it keep its memory alive."""

    #: Pickle's stream.
    stream: memoryview = field(repr=False)
    #: Pickle's buffers outside the stream.
    buffers: tuple[memoryview, ...] = field(default=(), repr=False)
    #: Frame of the value, whose memory files are open; `None`: parts without a frame.
    frame: Frame | None = field(default=None, repr=False)


def pack(
    stream: Sequence[memoryview],
    buffers: Sequence[memoryview],
    write: WriteFile | None = write_file,
) -> PackedValue:
    """Pack a pickled value: its stream, in pieces, and the buffers outside the stream. Large parts get memory files.

    `write` makes the files of buffers; `None`: everything is in the frame, as on a system without memory files. Without
    memory for the value, `MemoryError` or `OSError` (`ENOMEM`, `ENOSPC`) is raised.
    """
    if AVAILABLE and write is not None:
        try:
            return _pack(stream, buffers, write)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise
            # No free descriptor, a limit on the size of files, or a sandbox: the frame needs no file.
    return _pack(stream, buffers, None)


def group_parts(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the parts for each memory file; all other parts stay in the frame."""
    # Two files are left: for the stream, and for all smaller parts together.
    own = [index for index, size in enumerate(sizes_bytes) if size >= FILE_BYTES][: MOST_FILES - 2]
    others = [index for index in range(len(sizes_bytes)) if index not in own]
    groups = [[index] for index in own]
    if sum(sizes_bytes[index] for index in others) >= FILE_BYTES:
        groups.append(others)
    return groups


def _pack(
    stream: Sequence[memoryview], buffers: Sequence[memoryview], write: WriteFile | None
) -> PackedValue:
    # The stream is part 0.
    parts = [stream, *([buffer] for buffer in buffers)]
    sizes = [sum(piece.nbytes for piece in pieces) for pieces in parts]
    files: list[MemoryFile] = []
    #: File and offset of each part.
    places: dict[int, tuple[int, int]] = {}
    if write is not None:
        for group in group_parts(sizes[1:]):
            offsets, _ = lay_out([sizes[1 + index] for index in group])
            places |= {1 + n: (len(files), at) for n, at in zip(group, offsets, strict=True)}
            files.append(write([buffers[index] for index in group]))
        if sizes[0] >= FILE_BYTES:
            # The stream has large `bytes`. Its file is not shared: no other value has the same stream.
            places[0] = (len(files), 0)
            files.append(write_file(stream, alignment=1))
    inside = [number for number in range(len(parts)) if number not in places]
    # The table is laid out as a part, so that the other parts are aligned as in a file.
    table_bytes = _COUNT.size + _PART.size * len(parts)
    (_, *offsets), end = lay_out([table_bytes, *(sizes[number] for number in inside)])
    places |= {n: (-1, offset) for n, offset in zip(inside, offsets, strict=True)}
    body = bytearray(end)
    view = memoryview(body)
    _COUNT.pack_into(body, 0, len(parts))
    for number, pieces in enumerate(parts):
        file, at = places[number]
        _PART.pack_into(body, _COUNT.size + number * _PART.size, file, at, sizes[number])
        if file < 0:
            for piece in pieces:
                view[at : at + piece.nbytes] = piece
                at += piece.nbytes
    return PackedValue(body, tuple(files))


def unpack(frame: Frame) -> ReceivedValue:
    """Return the value in a frame and its mapped files; raise `ProtocolError` if the table of parts is wrong."""
    # The frame is last, at index -1.
    memory = [*(memoryview(file.map()) for file in frame.files), memoryview(frame.body)]
    parts: list[memoryview] = []
    try:
        (count,) = _COUNT.unpack_from(frame.body)
        for number in range(count):
            file, at, size_bytes = _PART.unpack_from(frame.body, _COUNT.size + number * _PART.size)
            if not -1 <= file < len(frame.files):
                raise IndexError(f"it names file {file}")
            part = memory[file][at : at + size_bytes]
            if part.nbytes != size_bytes:
                raise IndexError(f"{size_bytes} bytes at {at} are past the end")
            parts.append(part)
        stream, *buffers = parts
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"a value came with {len(frame.files)} memory files and a table that does not fit: {error}"
        ) from error
    return ReceivedValue(stream, tuple(buffers), frame)


# Memory files of large arguments, which several GPU tasks of one process share. A call of a task has a `Share` from its
# wait for a device to its end. A file stays while a share that used the file is open. The files used last also stay
# while another call waits, so successive tasks write a common argument once.


class ArgumentFiles:
    """The memory files of large arguments of one process's GPU tasks. Safe to use from several threads."""

    def __init__(self, write: WriteFile = write_file) -> None:
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
        """Pack the call's arguments like the function `pack`, with files that other calls may share."""
        try:
            return pack(stream, buffers, lambda parts: self._files.file_for(self, parts))
        finally:
            self._files.take_packed(self)


def argument_files() -> ArgumentFiles:
    """Return the `ArgumentFiles` of this process; a fork of the process has none at first."""
    return PROCESS_RESOURCES.get(ArgumentFiles, ArgumentFiles)
