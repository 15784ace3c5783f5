"""Bytes and descriptors over one socket: how memory files pass from process to process.

The kernel hands descriptors over with the first byte that they were sent with, and never joins that
byte to what was sent before. It knows neither frames nor values.
"""

from __future__ import annotations

import array
import errno
import socket
from collections.abc import Sequence

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes.memory_files import MemoryFile

#: Descriptors that come with one message at most: Linux's own limit (`SCM_MAX_FD`).
_MOST_DESCRIPTORS = 253

#: Not to be inherited by what the receiver starts.
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_ROOM_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


def send(channel: socket.socket, data: memoryview, files: Sequence[MemoryFile] = ()) -> int:
    """Send some of `data`, and all of `files` with its first byte.

    Returns:
        Bytes that were sent; the files went with them if there were any.

    Raises:
        BlockingIOError: The channel is full.
        ProtocolError: Too many descriptors are under way; the system takes no more.
        OSError: The other end is gone.
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


def receive(channel: socket.socket, room: memoryview) -> tuple[int, tuple[MemoryFile, ...]]:
    """Receive into `room`, and what came with it.

    Raises:
        BlockingIOError: Nothing is there yet.
        ProtocolError: Descriptors came that this process has no room for.
        OSError: The other end is gone.
    """
    size_bytes, ancillary, flags, _ = channel.recvmsg_into([room], _ROOM_BYTES, _FLAGS)
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
    return size_bytes, tuple(files)
