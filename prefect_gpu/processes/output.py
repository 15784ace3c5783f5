"""Forwards the output of child processes to the parent's standard output and standard error.

The launcher's thread reads the streams of each child without blocking (`ChildOutput`), and another thread writes to the
parent's streams (`OutputForwarder`). While `PENDING_BYTES` are not written, children wait. After `STALLED_S` seconds
without progress, output is dropped and a line says how much, so that no child waits for ever for a terminal that nobody
reads. The end of standard error is kept for messages about a child's death.
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

#: Bytes that may wait for the parent's stream; with more, children are not read.
PENDING_BYTES = 4 * 1024 * 1024

#: Seconds without progress after which the parent's stream counts as stalled: a terminal may be paused all night.
STALLED_S = 5.0

#: Bytes at the end of standard error kept for the message about a child's death.
STDERR_TAIL_BYTES = 64 * 1024

#: Bytes read or written in one call.
_PIECE_BYTES = 64 * 1024

#: Most pieces read from an ended child's stream, to which another process may still write. More than a pipe holds.
_LAST_PIECES = 32


class OutputForwarder:
    """Thread that writes children's output to `sys.stdout` and `sys.stderr`, and calls `on_progress` after a write."""

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
        """Whether children must wait: too many bytes are not written, and the stream is not stalled."""
        if self._pending_bytes < PENDING_BYTES:
            return False
        return time.monotonic() - self._progress_at < STALLED_S

    def offer(self, stream: StreamName, text: str) -> None:
        """Add output of a child to the queue, or drop the output if the stream is stalled. Never blocks."""
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
        """Wait until all output is written; return whether that took at most `timeout_s`."""
        with self._condition:
            if self._pending and not self._start():
                return False
            return self._condition.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def _start(self) -> bool:
        """Start the thread, unless it runs; return whether it runs. After a failure the next output tries again."""
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
        # Looked up each time: pytest and notebooks replace the streams while tasks run.
        target = sys.stdout if stream == "stdout" else sys.stderr
        # A closed or broken stream of the parent must not fail a task.
        with contextlib.suppress(Exception):
            try:
                target.write(text)
            except UnicodeEncodeError as error:
                # The encoding of the parent's stream lacks the character, as under LC_ALL=C.
                target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            target.flush()


class ChildOutput:
    """Reader of one child's standard streams, which are unbuffered pipes. For the launcher's thread only."""

    def __init__(
        self,
        streams: Mapping[StreamName, IO[bytes]],
        selector: selectors.BaseSelector,
        forwarder: OutputForwarder,
    ) -> None:
        self._streams = dict(streams)
        self._selector = selector
        self._forwarder = forwarder
        # Incremental, since a character may be divided between two pieces.
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: decoder(errors="replace") for name in streams}
        #: The streams are not read until the forwarder has room.
        self.held_back = False
        self.stderr_tail = bytearray()
        for stream in streams.values():
            os.set_blocking(stream.fileno(), False)
        self._watch()

    def resume(self) -> None:
        """Read the streams again, if they were held back and the forwarder has room."""
        if self.held_back and not self._forwarder.full:
            self.held_back = False
            self._watch()

    def finish(self) -> None:
        """Read the rest of the streams of an ended child, and close the streams."""
        self.held_back = False
        for name in tuple(self._streams):
            for _ in range(_LAST_PIECES):
                if not self._read(name, last=True):
                    break
        self._unwatch()
        self.close_in_fork()

    def close_in_fork(self) -> None:
        """Close the streams without changing the selector, which a fork shares with its parent."""
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
        """Read one piece of output; return whether more may be read now."""
        stream = self._streams.get(name)
        if stream is None:
            return False
        # The rest (`last`) is at most a pipe's 64 KiB and is always read.
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
    """Unregister a file or descriptor from a selector, if it is registered and open."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(file)
