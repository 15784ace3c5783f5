"""The child's end of its channel: blocking, and safe to use from several threads.

The parent's end is in `launcher`; what is said is in `messages`.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import threading
import weakref
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import messages, passing
from prefect_gpu.processes.memory_files import MemoryFile
from prefect_gpu.processes.messages import HEADER, Answered, Asked, Body
from prefect_gpu.processes.transport import Contents, FrameTransport, Parcel, unpack


class Channel:
    """One stream to the parent. It belongs to one process: a fork of it has none."""

    def __init__(self, descriptor: int) -> None:
        # What the body starts must not hold the stream open.
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)
        self._identity = _identity(descriptor)
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._forked = False
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(itself))
        # The first that is registered is called last: until then any thread may send.
        atexit.register(self._socket.close)

    def send(self, message: Any) -> None:
        """Send a small message. A fork of the child (a worker of a data loader) sends nothing.

        Raises:
            OSError: The parent is gone, or the body closed the stream.
        """
        if self._forked:
            return
        data = messages.encode(message)
        with self._sending:
            self._check()
            self._socket.sendall(data)

    def send_with_value(self, message: Any, value: Parcel) -> None:
        """Send a message and the value that it announces, with nothing between them."""
        if self._forked:
            return
        with self._sending:
            self._check()
            self._socket.sendall(messages.encode(message))
            header, body = value.frame
            try:
                sent = passing.send(self._socket, header, value.files)
            except ProtocolError:
                # Its files may not go now; nothing of it went. The parent waits for a value.
                contents = value.open()
                stream = memoryview(contents.stream)
                header, body = FrameTransport().pack([stream], contents.buffers).frame
                sent = 0
            self._socket.sendall(header[sent:])
            self._socket.sendall(body)

    def receive(self) -> Body:
        """Wait for the body of the next frame.

        Raises:
            EOFError: The parent is gone.
        """
        return self._receive()[1]

    def receive_value(self) -> Contents:
        """Wait for the next frame, which is a value.

        Raises:
            EOFError: The parent is gone.
            ProtocolError: What came with it cannot be put together.
        """
        return unpack(*self._receive())

    def _receive(self) -> tuple[int, Body, list[MemoryFile]]:
        header = bytearray(HEADER.size)
        files = self._fill(header)
        kind, length = HEADER.unpack(header)
        body = messages.allocate_body(length)
        files += self._fill(body)
        return kind, body, files

    def ask(self, method: str, **arguments: Any) -> Any:
        """Ask the parent something and wait for its answer.

        Raises:
            RuntimeError: The caller is a fork of the child.
            BaseException: What the parent answered with.
        """
        if self._forked:
            raise RuntimeError(
                f"{method} works in the process of a GPU task itself, not in one forked from it"
            )
        with self._asking:
            self.send(Asked(method, arguments))
            answer = messages.decode(self.receive())
        if not isinstance(answer, Answered):
            raise ProtocolError(f"the parent answered {method!r} with {answer!r}")
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _check(self) -> None:
        """See that the descriptor is still ours."""
        # A body that closes all of them, and then opens a file, may have given it our number.
        if _identity(self._socket.fileno()) != self._identity:
            raise OSError(errno.EBADF, "the body closed the channel to the parent process")

    def _fill(self, body: Body) -> list[MemoryFile]:
        """Receive until it is full; give the memory files that came with it."""
        view = memoryview(body)
        files: list[MemoryFile] = []
        while len(view):
            got, beside = passing.receive(self._socket, view)
            if not got:
                raise EOFError("the parent process is gone")
            files += beside
            view = view[got:]
        return files


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _forget(channel: weakref.ref[Channel]) -> None:
    """After a fork: two processes that write to one stream would garble it."""
    forked = channel()
    if forked is not None:
        forked._forked = True
        try:
            forked._check()
        except OSError:
            # The number is another file's by now.
            forked._socket.detach()
        else:
            forked._socket.close()


_current: Channel | None = None


def current_channel() -> Channel | None:
    """Give the channel of the GPU task that this process is; `None` elsewhere."""
    return _current


def set_current_channel(channel: Channel | None) -> None:
    """Say which channel this process has. For the child's start only."""
    global _current
    _current = channel
