"""The child's end of its channel: blocking, and safe to use from several threads.

The parent's end is in `launcher`; what is said is in `messages`.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import messages
from prefect_gpu.processes.messages import HEADER, Answered, Asked


class Channel:
    """One stream to the parent."""

    def __init__(self, descriptor: int) -> None:
        # What the body starts must not hold the stream open.
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)
        self._sending = threading.Lock()
        self._asking = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a small message.

        Raises:
            OSError: The parent is gone.
        """
        data = messages.encode(message)
        with self._sending:
            self._socket.sendall(data)

    def send_with_value(self, message: Any, value: bytes | memoryview) -> None:
        """Send a message and the value that it announces, with nothing between them."""
        with self._sending:
            self._socket.sendall(messages.encode(message))
            self._socket.sendall(messages.value_header(len(value)))
            self._socket.sendall(value)

    def receive(self) -> bytearray:
        """Wait for the body of the next frame.

        Raises:
            EOFError: The parent is gone.
        """
        _, length = HEADER.unpack(self._receive_exactly(HEADER.size))
        return self._receive_exactly(length)

    def ask(self, method: str, **arguments: Any) -> Any:
        """Ask the parent something and wait for its answer.

        Raises:
            BaseException: What the parent answered with.
        """
        with self._asking:
            self.send(Asked(method, arguments))
            answer = messages.decode(self.receive())
        if not isinstance(answer, Answered):
            raise ProtocolError(f"the parent answered {method!r} with {answer!r}")
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _receive_exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        view = memoryview(data)
        while len(view):
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError("the parent process is gone")
            view = view[got:]
        return data


_current: Channel | None = None


def current_channel() -> Channel | None:
    """Give the channel of the GPU task that this process is; `None` elsewhere."""
    return _current


def set_current_channel(channel: Channel | None) -> None:
    """Say which channel this process has. For the child's start only."""
    global _current
    _current = channel
