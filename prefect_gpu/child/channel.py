"""The child's end of the channel to its parent. Calls block; several threads may use the channel.

`processes.launcher` has the parent's end, `messages` the messages, and `values.transport` their bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes import guardian, messages
from prefect_gpu.processes.guardian import TOKEN_VARIABLE
from prefect_gpu.processes.messages import Answered, Asked, Message, ReleaseUnused
from prefect_gpu.values import transport
from prefect_gpu.values.transport import Frame, FrameReader, PackedValue, ReceivedValue


class Channel:
    """The stream socket to the parent; owns the descriptor. Closed in a fork of the child."""

    def __init__(self, descriptor: int) -> None:
        # Not inherited: processes that the body starts would keep the stream open.
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)
        self._identity = _identity(descriptor)
        self._frames = FrameReader()
        # Reentrant, like `_asking`: a finalizer or signal handler of the body may log in the middle of a message.
        self._sending = threading.RLock()
        #: Id of the thread that is in the middle of a message, and holds `_sending`.
        self._sender: int | None = None
        #: Messages that interrupted the sending thread: they are sent after its own.
        self._late = deque[Callable[[], None]]()
        #: Held by the thread that receives.
        self._asking = threading.RLock()
        #: Id of the thread that receives.
        self._receiver: int | None = None
        #: Numbers of questions. Another process of the task has others.
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "big"))
        #: The parent's last request that `take_request` has not returned.
        self._request: ReleaseUnused | None = None
        self._forked = False
        PROCESS_RESOURCES.after_fork(self, Channel.forget)
        # Registered first, so called last: other exit functions may send.
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
        """Send a message; raise `OSError` if the parent has ended or the body closed the stream."""
        if self._forked:
            # In a fork of the child, such as a worker of a data loader.
            return
        data = messages.encode(message)
        self._transmit(lambda: self._socket.sendall(data))

    def _transmit(self, write: Callable[[], None]) -> None:
        """Call `write`, which sends one message, while no other message is on its way."""
        with self._sending:
            self._late.append(write)
            try:
                while self._late and self._sender is None:
                    self._sender = threading.get_ident()
                    try:
                        self._check()
                        while self._late:
                            self._late.popleft()()
                    finally:
                        self._sender = None
            except BaseException:
                # The caller learns that the message was not sent.
                with contextlib.suppress(ValueError):
                    self._late.remove(write)
                raise

    def send_with_value(self, message: Message, value: PackedValue) -> None:
        """Send a message, and without a gap the value that the message announces."""
        if self._forked:
            return
        self._transmit(lambda: self._send_with_value(message, value))

    def _send_with_value(self, message: Message, value: PackedValue) -> None:
        self._socket.sendall(messages.encode(message))
        header, body = value.frame
        try:
            sent = transport.send(self._socket, header, value.files)
        except ProtocolError:
            # The value's files cannot be sent, and no byte was: send their contents.
            contents = value.open()
            header, body = transport.pack([contents.stream], contents.buffers, None).frame
            sent = 0
        self._socket.sendall(header[sent:])
        self._socket.sendall(body)

    def receive(self) -> Message:
        """Wait for the next message and return it; raise `EOFError` if the parent has ended."""
        return messages.decode(self._receive().body)

    def receive_value(self) -> ReceivedValue:
        """Wait for the next frame, a value, and return the value; raise `EOFError` if the parent has ended."""
        return transport.unpack(self._receive())

    def _receive(self) -> Frame:
        while (frame := self._frames.receive(self._socket)) is None:
            pass
        return frame

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the parent by name, wait for the answer, and return its result or raise its exception."""
        if self._forked:
            raise RuntimeError(
                f"{method} works in the process of a GPU task, not in a forked process"
            )
        if threading.get_ident() in (self._sender, self._receiver):
            raise RuntimeError(
                f"{method} was called by a finalizer or signal handler in the middle of a message to or from the parent"
            )
        with self._asking:
            self._receiver = threading.get_ident()
            try:
                number = next(self._numbers)
                self.send(Asked(method, arguments, number))
                answer = self._receive_answer(number)
            finally:
                self._receiver = None
        if not isinstance(answer, Answered):
            raise ProtocolError(f"the parent answered {method!r} with {answer!r}")
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _receive_answer(self, number: int) -> Message:
        while True:
            message = self.receive()
            if isinstance(message, ReleaseUnused):
                self._request = message
            elif not isinstance(message, Answered) or message.number == number:
                return message

    def take_request(self) -> ReleaseUnused | None:
        """Return the parent's latest request, without waiting; `None`: no new request. For one thread at a time."""
        # If another thread waits for an answer in `ask`, that thread receives requests.
        if self._asking.acquire(blocking=False):
            self._receiver = threading.get_ident()
            try:
                self._check()
                if self._poll(select.POLLIN) == select.POLLIN:
                    message = self.receive()
                    # An answer without a waiting thread is dropped.
                    if isinstance(message, ReleaseUnused):
                        self._request = message
            except EOFError:
                # `end_with_parent` handles the parent's end.
                return None
            finally:
                self._receiver = None
                self._asking.release()
        request, self._request = self._request, None
        return request

    def _poll(self, mask: int) -> int:
        """Return the stream's current events of `poll`; the end of the parent is reported for any mask."""
        poll = select.poll()
        poll.register(self._socket, mask)
        return next((events for _, events in poll.poll(0)), 0)

    def end_with_parent(self) -> None:
        """Kill this process and all that it started, if the parent has ended."""
        self._check()
        if self._poll(0):
            # The guardian may have ended as well.
            pid = os.getpid()
            token = os.environ.get(TOKEN_VARIABLE, "").rpartition("/")[2]
            guardian.kill_strays({pid: token or f"of {pid}"})
            guardian.kill_group(pid)

    def _check(self) -> None:
        """Raise `OSError` if the body has closed the stream; its number may be another file's descriptor now."""
        if _identity(self._socket.fileno()) != self._identity:
            raise OSError(errno.EBADF, "the body closed the channel to the parent process")

    def forget(self) -> None:
        """Close the stream in a fork of the child: only one process may use the stream."""
        self._forked = True
        self.close()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


_current: Channel | None = None


def current_channel() -> Channel | None:
    """Return the channel of this child process; `None`: this process is no child."""
    return _current


def set_current_channel(channel: Channel | None) -> None:
    """Set the channel of this process. For the child's start only."""
    global _current
    _current = channel
