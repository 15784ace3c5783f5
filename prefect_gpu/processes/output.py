"""What children print, on its way to the parent's own standard output and error.

A child never blocks for good on a terminal that nobody reads: while the parent's stream makes
progress the child is held back as any process would be; once it has stood still for `STALLED_S`,
output is dropped, and a line says how much. The end of standard error is kept by the launcher, not
here.
"""

from __future__ import annotations

import codecs
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

StreamName = Literal["stdout", "stderr"]

#: Bytes that may wait for the parent's stream before children are held back.
PENDING_BYTES = 4 * 1024 * 1024

#: Seconds without progress after which a stream counts as stalled. A person who pauses a terminal
#: must not stop a night's work.
STALLED_S = 5.0


class OutputForwarder:
    """Writes children's output from a thread of its own, to `sys.stdout` and `sys.stderr`."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._condition = threading.Condition()
        self._pending: deque[tuple[StreamName, str]] = deque()
        self._pending_bytes = 0
        self._dropped_bytes = 0
        self._progress_at = time.monotonic()
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether children should be held back now."""
        if self._pending_bytes < PENDING_BYTES:
            return False
        return time.monotonic() - self._progress_at < STALLED_S

    def offer(self, stream: StreamName, text: str) -> None:
        """Take output of a child. Never blocks."""
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
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prefect-gpu-output", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered was written; `False`: it was not in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._pending))
                stream, text = self._pending.popleft()
                size = len(text)
                # Neighbours of one stream go out in one write.
                parts = [text]
                while self._pending and self._pending[0][0] == stream and size < 65536:
                    part = self._pending.popleft()[1]
                    parts.append(part)
                    size += len(part)
                dropped, self._dropped_bytes = self._dropped_bytes, 0
            if dropped:
                parts.append(
                    f"\n[prefect_gpu: {dropped} bytes of output dropped, stream stalled]\n"
                )
            self._write(stream, "".join(parts))
            with self._condition:
                self._pending_bytes -= size
                self._progress_at = time.monotonic()
                self._condition.notify_all()
            self._on_room()

    @staticmethod
    def _write(stream: StreamName, text: str) -> None:
        # Looked up at every write: pytest and notebooks replace the streams while we run.
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write(text)
            target.flush()
        except Exception:
            # A closed or broken stream of the parent's is no reason for a task to fail, and there
            # is nowhere left to say so.
            return


def decoder() -> codecs.IncrementalDecoder:
    """Give a decoder for one stream of one child; characters may be cut between pieces."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
