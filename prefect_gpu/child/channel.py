"""The child's end of its channel: blocking, and safe to use from several threads.

`launcher` has the parent's end, `messages` the messages, and `transport` their bytes.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import socket
import threading
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes import guardian, messages
from prefect_gpu.processes.guardian import TOKEN_VARIABLE
from prefect_gpu.processes.messages import Answered, Asked, Message, ReleaseUnused
from prefect_gpu.values import transport
from prefect_gpu.values.transport import Frame, FrameReader, PackedValue, ReceivedValue


class Channel:
    """The stream to the parent, which owns its descriptor. A fork of the process has no channel."""

    def __init__(self, descriptor: int) -> None:
        # Processes that the body starts must not hold the stream open.
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)
        self._identity = _identity(descriptor)
        self._frames = FrameReader()
        self._sending = threading.Lock()
        #: Held by the thread that receives.
        self._asking = threading.Lock()
        #: Last request of the parent that was received and not taken.
        self._request: ReleaseUnused | None = None
        self._forked = False
        PROCESS_RESOURCES.after_fork(self, Channel.forget)
        # Called last, since it is registered first: until then any thread may send.
        atexit.register(self.close)

    def close(self) -> None:
        """Close the stream, unless the body has closed the descriptor."""
        try:
            self._check()
        except OSError:
            # The descriptor may be another file's now.
            self._socket.detach()
        else:
            self._socket.close()

    def send(self, message: Message) -> None:
        """Send a message; a fork of the child (a worker of a data loader) sends nothing.

        Raises:
            OSError: The parent is gone, or the body closed the stream.
        """
        if self._forked:
            return
        data = messages.encode(message)
        with self._sending:
            self._check()
            self._socket.sendall(data)

    def send_with_value(self, message: Message, value: PackedValue) -> None:
        """Send a message and at once the value that it announces."""
        if self._forked:
            return
        with self._sending:
            self._check()
            self._socket.sendall(messages.encode(message))
            header, body = value.frame
            try:
                sent = transport.send(self._socket, header, value.files)
            except ProtocolError:
                # The value's files cannot be sent now, and no byte of the value was sent.
                contents = value.open()
                header, body = transport.pack([contents.stream], contents.buffers, None).frame
                sent = 0
            self._socket.sendall(header[sent:])
            self._socket.sendall(body)

    def receive(self) -> Message:
        """Wait for the next message and return it; raise `EOFError` if the parent is gone."""
        return messages.decode(self._receive().body)

    def receive_value(self) -> ReceivedValue:
        """Wait for the next frame, which is a value, and return it; raise `EOFError` if the parent is gone."""
        return transport.unpack(self._receive())

    def _receive(self) -> Frame:
        while (frame := self._frames.receive(self._socket)) is None:
            pass
        return frame

    def ask(self, method: str, **arguments: Any) -> Any:
        """Ask the parent a question, wait for the answer and return it.

        Raises:
            RuntimeError: The caller is a fork of the child.
            BaseException: The parent has answered with this exception.
        """
        if self._forked:
            raise RuntimeError(
                f"{method} works in the process of a GPU task, not in a forked process"
            )
        with self._asking:
            self.send(Asked(method, arguments))
            while isinstance(answer := self.receive(), ReleaseUnused):
                self._request = answer
        if not isinstance(answer, Answered):
            raise ProtocolError(f"the parent answered {method!r} with {answer!r}")
        if answer.error is not None:
            raise answer.error
        return answer.result

    def take_request(self) -> ReleaseUnused | None:
        """Return a received request of the parent, without waiting; `None`: no request. For one thread at a time.

        Raises:
            OSError: The body closed the stream.
        """
        # Otherwise the thread that waits for an answer receives requests, too.
        if self._asking.acquire(blocking=False):
            try:
                self._check()
                if self._poll(select.POLLIN) == select.POLLIN:
                    message = self.receive()
                    # An answer that nobody waits for is dropped.
                    if isinstance(message, ReleaseUnused):
                        self._request = message
            except EOFError:
                # See `end_with_parent`.
                return None
            finally:
                self._asking.release()
        request, self._request = self._request, None
        return request

    def _poll(self, mask: int) -> int:
        """Return the events of the stream now. The end of the other side is reported for any mask."""
        poll = select.poll()
        poll.register(self._socket, mask)
        return next((events for _, events in poll.poll(0)), 0)

    def end_with_parent(self) -> None:
        """Kill this process and all that it started if the parent is gone, for the guardian may be gone, too.

        Raises:
            OSError: The body closed the stream.
        """
        self._check()
        if self._poll(0):
            pid = os.getpid()
            token = os.environ.get(TOKEN_VARIABLE, "").rpartition("/")[2]
            guardian.kill_strays({pid: token or f"of {pid}"})
            guardian.kill_group(pid)

    def _check(self) -> None:
        """Raise `OSError` if the body has closed the descriptor, which may be another file's now."""
        if _identity(self._socket.fileno()) != self._identity:
            raise OSError(errno.EBADF, "the body closed the channel to the parent process")

    def forget(self) -> None:
        """In a fork: close the stream, which only one process may use."""
        self._forked = True
        self.close()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


_current: Channel | None = None


def current_channel() -> Channel | None:
    """Return the channel of the GPU task that this process runs; `None` elsewhere."""
    return _current


def set_current_channel(channel: Channel | None) -> None:
    """Set the channel of this process. For the child's start only."""
    global _current
    _current = channel
