"""What children print, read by the launcher's thread without ever blocking.

It keeps the end of standard error for the message about a death and hands the rest to `output`,
which writes it; while that is full, children are held back.
"""

from __future__ import annotations

import functools
import os
import selectors
from typing import IO

from prefect_gpu.processes.launched import LaunchedChild
from prefect_gpu.processes.output import OutputForwarder, StreamName

#: Bytes of standard error kept for the message about a death.
STDERR_TAIL_BYTES = 64 * 1024

#: Pieces of 64 KiB that are read from a stream whose process has ended: more than a pipe holds, and
#: an end for what a process left behind that goes on writing.
_LAST_PIECES = 32


class StreamReader:
    """Reads the standard streams of all children of a launcher, on its thread."""

    def __init__(self, selector: selectors.BaseSelector, output: OutputForwarder) -> None:
        self._selector = selector
        self._output = output
        self._held_back: set[LaunchedChild] = set()

    @property
    def holds_back(self) -> bool:
        """Whether a child's output waits for room."""
        return bool(self._held_back)

    def watch(self, child: LaunchedChild) -> None:
        """Read a child's streams from now on."""
        for name, stream in child.streams.items():
            if stream.fileno() not in self._selector.get_map():
                self._selector.register(
                    stream,
                    selectors.EVENT_READ,
                    functools.partial(self._ready, child, name),
                )

    def go_on(self) -> None:
        """Read again what was held back, if there is room now."""
        if self._held_back and not self._output.full:
            for child in tuple(self._held_back):
                self.watch(child)
            self._held_back.clear()

    def finish(self, child: LaunchedChild) -> None:
        """Take what the streams of a child that has ended still hold, and close them."""
        for name in tuple(child.streams):
            for _ in range(_LAST_PIECES):
                if not self._read(child, name, last=True):
                    break
        self._held_back.discard(child)
        for stream in child.streams.values():
            self.unwatch(stream)
            stream.close()
        child.streams.clear()

    def unwatch(self, stream: IO[bytes]) -> None:
        """Read a stream no more."""
        try:
            self._selector.unregister(stream)
        except (KeyError, ValueError):
            return

    def _ready(self, child: LaunchedChild, name: StreamName, mask: int) -> None:
        self._read(child, name)

    def _read(self, child: LaunchedChild, name: StreamName, last: bool = False) -> bool:
        """Read what a child printed; `False`: nothing more can come now."""
        stream = child.streams.get(name)
        if stream is None:
            return False
        # What a pipe still holds at the end (64 KiB) is taken in any case.
        if self._output.full and not last:
            self._hold_back(child)
            return False
        try:
            data = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._output.offer(name, child.decoders[name].decode(data, final=not data))
        if not data:
            self.unwatch(stream)
            stream.close()
            del child.streams[name]
            return False
        if name == "stderr":
            child.stderr_tail += data
            del child.stderr_tail[:-STDERR_TAIL_BYTES]
        return True

    def _hold_back(self, child: LaunchedChild) -> None:
        for stream in child.streams.values():
            self.unwatch(stream)
        self._held_back.add(child)
