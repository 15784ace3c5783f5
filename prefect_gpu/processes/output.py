"""Output of children on its way to the parent's own standard output and error.

The launcher's thread reads the streams of each child (`ChildOutput`) and never blocks. A thread of its own writes the
output (`OutputForwarder`). While the parent's stream is full and makes progress, children wait. After `STALLED_S`
seconds without progress output is dropped, and a line says how much: a terminal that is not read stops no child for
good. The end of standard error is kept for error messages about a death.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import logging
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any, Literal

from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import start_thread

logger = logging.getLogger(__name__)

StreamName = Literal["stdout", "stderr"]

#: Bytes that may wait for the parent's stream before children are held back.
PENDING_BYTES = 4 * 1024 * 1024

#: Seconds without progress after which a stream counts as stalled. A paused terminal must not stop a night's work.
STALLED_S = 5.0

#: Bytes of standard error kept for the message about a death.
STDERR_TAIL_BYTES = 64 * 1024

#: Bytes read or written in one call.
_PIECE_BYTES = 64 * 1024

#: Most pieces read from a stream whose process has ended: more than a pipe holds. Another process may still write.
_LAST_PIECES = 32


class OutputForwarder:
    """Writes children's output to `sys.stdout` and `sys.stderr` on its thread, then calls `on_progress`."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._condition = threading.Condition()
        self._pending: deque[tuple[StreamName, str]] = deque()
        self._pending_bytes = 0
        self._dropped_bytes = 0
        self._progress_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._told = False

    @property
    def full(self) -> bool:
        """Whether children must wait now."""
        if self._pending_bytes < PENDING_BYTES:
            return False
        return time.monotonic() - self._progress_at < STALLED_S

    def offer(self, stream: StreamName, text: str) -> None:
        """Add output of a child to the queue. Never blocks."""
        if not text:
            return
        with self._condition:
            if self._pending_bytes >= PENDING_BYTES and not self.full:
                self._dropped_bytes += len(text)
                return
            if not self._pending:
                self._progress_at = time.monotonic()
            self._pending.append((stream, text))
            self._pending_bytes += len(text)
            self._start()
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all output is written; return whether that was in time."""
        with self._condition:
            if self._pending and not self._start():
                return False
            return self._condition.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def _start(self) -> bool:
        """Start the thread if there is none; return whether there is one. The next output tries again."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._run, "prefect-gpu-output")
            except CapacityError as error:
                if not self._told:
                    self._told = True
                    logger.warning("what tasks print is held back: %s", error)
                return False
        return True

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._pending))
                stream, text = self._pending.popleft()
                size = len(text)
                parts = [text]
                while self._pending and self._pending[0][0] == stream and size < _PIECE_BYTES:
                    part = self._pending.popleft()[1]
                    parts.append(part)
                    size += len(part)
                dropped, self._dropped_bytes = self._dropped_bytes, 0
            if dropped:
                text = f"\n[prefect_gpu: {dropped} bytes of output dropped, stream stalled]\n"
                parts.append(text)
            self._write(stream, "".join(parts))
            with self._condition:
                self._pending_bytes -= size
                self._progress_at = time.monotonic()
                self._condition.notify_all()
            self._on_progress()

    @staticmethod
    def _write(stream: StreamName, text: str) -> None:
        # Looked up at every write: pytest and notebooks replace the streams while tasks run.
        target = sys.stdout if stream == "stdout" else sys.stderr
        # A closed or broken stream of the parent must not fail a task.
        with contextlib.suppress(Exception):
            try:
                target.write(text)
            except UnicodeEncodeError as error:
                # The encoding of the parent's stream has fewer characters than UTF-8, as under LC_ALL=C.
                target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            target.flush()


class ChildOutput:
    """The standard streams of one child, which are unbuffered pipes. For the launcher's thread only."""

    def __init__(
        self,
        streams: Mapping[StreamName, IO[bytes]],
        selector: selectors.BaseSelector,
        forwarder: OutputForwarder,
    ) -> None:
        self._streams = dict(streams)
        self._selector = selector
        self._forwarder = forwarder
        # A character may be cut between two pieces.
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: decoder(errors="replace") for name in streams}
        #: The streams are not read until the forwarder has room.
        self.held_back = False
        #: End of standard error.
        self.stderr_tail = bytearray()
        for stream in streams.values():
            os.set_blocking(stream.fileno(), False)
        self._watch()

    def resume(self) -> None:
        """Read the streams again, if they were held back and there is room now."""
        if self.held_back and not self._forwarder.full:
            self.held_back = False
            self._watch()

    def finish(self) -> None:
        """Read the rest of the streams of a child that has ended, and close them."""
        self.held_back = False
        for name in tuple(self._streams):
            for _ in range(_LAST_PIECES):
                if not self._read(name, last=True):
                    break
        self._unwatch()
        self.close_in_fork()

    def close_in_fork(self) -> None:
        """Close the streams, but do not change the selector, which a fork shares with its parent."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _watch(self) -> None:
        for name, stream in self._streams.items():
            read = functools.partial(self._read, name)
            self._selector.register(stream, selectors.EVENT_READ, lambda mask, read=read: read())

    def _unwatch(self) -> None:
        for stream in self._streams.values():
            unwatch(self._selector, stream)

    def _read(self, name: StreamName, last: bool = False) -> bool:
        """Read one piece of output; `False`: nothing more can come now."""
        stream = self._streams.get(name)
        if stream is None:
            return False
        # The rest of a pipe (64 KiB) is read in any case.
        if self._forwarder.full and not last:
            self._unwatch()
            self.held_back = True
            return False
        try:
            data = os.read(stream.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._forwarder.offer(name, self._decoders[name].decode(data, final=not data))
        if not data:
            unwatch(self._selector, stream)
            stream.close()
            del self._streams[name]
            return False
        if name == "stderr":
            self.stderr_tail += data
            del self.stderr_tail[:-STDERR_TAIL_BYTES]
        return True


def unwatch(selector: selectors.BaseSelector, file: Any) -> None:
    """Unregister a file or descriptor, if it is registered and open."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(file)
