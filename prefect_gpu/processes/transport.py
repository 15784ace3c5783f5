"""How values travel: within a frame, or in memory files whose descriptors go with it.

`values` pickles a value into a stream and large buffers beside it; here they are packed into a
`Parcel`, which a channel sends, and what came is unpacked into `Contents`, which `values` unpickles
in place. Small parcels are one frame and nothing else; so are all where there are no memory files
(macOS).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import memory_files, messages
from prefect_gpu.processes.memory_files import MemoryFile, lay_out
from prefect_gpu.processes.messages import Body

#: Bytes from which a part of a value travels in a memory file. Pickled, sent, mapped and read in
#: another process, by frame and by file (medians, 2 busy cores): 0.14 and 0.19 ms for 64 KiB, 0.29 and
#: 0.29 for 256 KiB, 0.97 and 0.58 for 1 MiB, 5.5 and 2.7 for 4 MiB. Up to 1 MiB that is not worth a
#: descriptor on both sides.
FILE_BYTES = 1 << 20

#: Memory files of one value at most: each is a descriptor. The largest parts get one each, so that
#: what is let go of gives its memory back; the others share the last.
MOST_FILES = 16

_COUNT = struct.Struct("!I")

#: Where a part is: the number of its file (-1: in the frame), offset and length in bytes.
_PART = struct.Struct("!iQQ")

#: Writes parts to a memory file, or finds one that holds them.
Write = Callable[[Sequence[memoryview]], MemoryFile]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value on its way: a frame, and the memory files that go with it."""

    #: `messages.VALUE` or `messages.PARCEL`.
    kind: int
    #: The frame's body.
    body: bytes | bytearray = field(repr=False)
    files: tuple[MemoryFile, ...] = ()

    @property
    def frame(self) -> tuple[memoryview, ...]:
        """The frame's bytes; `files` go with the first of them."""
        header = messages.value_header(len(self.body), self.kind)
        return memoryview(header), memoryview(self.body)

    def open(self) -> Contents:
        """Read it in this very process."""
        return unpack(self.kind, bytearray(self.body), self.files)


@dataclass(frozen=True, slots=True)
class Contents:
    """A value that came, still pickled. Its memory lives as long as what is unpickled from it."""

    #: What pickle reads.
    stream: Body | memoryview = field(repr=False)
    #: What it finds beside the stream.
    buffers: tuple[memoryview, ...] = field(default=(), repr=False)


class Transport(Protocol):
    """Packs what `values` pickled."""

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> Parcel:
        """Pack a stream, in pieces, and the buffers beside it. Nothing given is kept.

        Raises:
            OSError: There is no memory for it (`ENOMEM`, `ENOSPC`).
            MemoryError: Likewise.
        """
        ...


class FrameTransport:
    """Puts everything into the frame, in one piece: what every system can send."""

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> Parcel:
        """See `Transport`."""
        if not buffers:
            return Parcel(messages.VALUE, b"".join(stream))
        return _assemble(stream, buffers, {}, {}, ())


class FileTransport:
    """Puts large parts into memory files.

    Args:
        write: Makes the files of buffers.
    """

    def __init__(self, write: Write = memory_files.write_file) -> None:
        self._write = write

    def pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> Parcel:
        """See `Transport`."""
        try:
            return self._pack(stream, buffers)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise
            # No descriptor left, a limit on the size of files, a sandbox: the frame needs none.
            return FrameTransport().pack(stream, buffers)

    def _pack(self, stream: Sequence[memoryview], buffers: Sequence[memoryview]) -> Parcel:
        files: list[MemoryFile] = []
        places: dict[int, tuple[int, int]] = {}
        for group in group_parts([buffer.nbytes for buffer in buffers]):
            offsets, _ = lay_out([buffers[index].nbytes for index in group])
            for index, offset in zip(group, offsets, strict=True):
                places[index] = (len(files), offset)
            files.append(self._write([buffers[index] for index in group]))
        stream_place: dict[int, tuple[int, int]] = {}
        if sum(piece.nbytes for piece in stream) >= FILE_BYTES:
            # Large `bytes`, and arrays that pickle as such, are in the stream. A stream is never
            # shared, so it is not asked for in `write`.
            stream_place[0] = (len(files), 0)
            files.append(memory_files.write_stream(stream))
        if not files:
            return FrameTransport().pack(stream, buffers)
        return _assemble(stream, buffers, stream_place, places, tuple(files))


def default_transport() -> Transport:
    """Give the best transport of this system."""
    return FileTransport() if memory_files.AVAILABLE else FrameTransport()


def group_parts(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Say which parts go into a memory file together, by their places; the rest stays in the frame."""
    large = [index for index, size in enumerate(sizes_bytes) if size >= FILE_BYTES]
    large.sort(key=lambda index: -sizes_bytes[index])
    # One for the stream, one that the others share.
    own = sorted(large[: MOST_FILES - 2])
    others = sorted(set(range(len(sizes_bytes))).difference(own))
    groups = [[index] for index in own]
    if sum(sizes_bytes[index] for index in others) >= FILE_BYTES:
        groups.append(others)
    return groups


def _assemble(
    stream: Sequence[memoryview],
    buffers: Sequence[memoryview],
    stream_place: dict[int, tuple[int, int]],
    places: dict[int, tuple[int, int]],
    files: tuple[MemoryFile, ...],
) -> Parcel:
    """Make the frame: where each part is, the stream first, then the parts that are in it."""
    stream_bytes = sum(piece.nbytes for piece in stream)
    head_bytes = _COUNT.size + _PART.size * (1 + len(buffers))
    inside = [] if stream_place else [stream_bytes]
    inside += [b.nbytes for index, b in enumerate(buffers) if index not in places]
    # As one more part in front of them, so that they are aligned as in a file.
    (_, *offsets), end = lay_out([head_bytes, *inside])
    body = bytearray(end)
    room = memoryview(body)
    found: list[tuple[int, int, int]] = []
    free = iter(offsets)
    if stream_place:
        found.append((*stream_place[0], stream_bytes))
    else:
        at = next(free)
        found.append((-1, at, stream_bytes))
        for piece in stream:
            room[at : at + piece.nbytes] = piece
            at += piece.nbytes
    for index, buffer in enumerate(buffers):
        if index in places:
            found.append((*places[index], buffer.nbytes))
        else:
            at = next(free)
            found.append((-1, at, buffer.nbytes))
            room[at : at + buffer.nbytes] = buffer
    _COUNT.pack_into(body, 0, len(found))
    for number, part in enumerate(found):
        _PART.pack_into(body, _COUNT.size + number * _PART.size, *part)
    return Parcel(messages.PARCEL, body, files)


def unpack(kind: int, body: Body, files: Sequence[MemoryFile]) -> Contents:
    """Find a value's parts in the frame and the files that came.

    Files are mapped, and their descriptors may be closed after that.

    Raises:
        ProtocolError: They do not fit together, or a file cannot be mapped.
    """
    if kind == messages.VALUE:
        return Contents(body)
    rooms = [memoryview(file.map()) for file in files]
    # Last, so that -1 finds it.
    rooms.append(memoryview(body))
    parts: list[memoryview] = []
    try:
        (count,) = _COUNT.unpack_from(body)
        for number in range(count):
            place, offset, size_bytes = _PART.unpack_from(body, _COUNT.size + number * _PART.size)
            if not -1 <= place < len(files):
                raise IndexError(f"it names file {place}")
            part = rooms[place][offset : offset + size_bytes]
            if part.nbytes != size_bytes:
                raise IndexError(f"{size_bytes} bytes at {offset} are past the end")
            parts.append(part)
        stream, *buffers = parts
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"a value came with {len(files)} memory files and a table that does not fit: {error}"
        ) from error
    return Contents(stream, tuple(buffers))
