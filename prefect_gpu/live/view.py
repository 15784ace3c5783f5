"""The live view of a flow in a terminal: its last lines show devices, and what runs and waits.

All text that this process writes to the terminal stays whole above the view. `LowerLines` takes the place of the `write` of
both streams, so it sees what `print`, loggers, Prefect's console and the output of children write. A progress bar or a
live display of another program moves the cursor: the view ends as soon as there is one. What the view shows is drawn in `progress`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import rich
from rich.cells import cell_len, set_cell_size

from prefect_gpu.errors import CapacityError
from prefect_gpu.live.progress import FlowProgress, combine, view_lines
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread

logger = logging.getLogger(__name__)

#: Seconds until the first drawing, and between two. A flow that is over before the first shows none.
FIRST_S = 1.0
REFRESH_S = 0.5

#: What moves the cursor or erases text, but for the end of a line: another program draws. Colours do neither.
DRAWING = re.compile(r"\r(?!\n)|\x08|\x1b(?:[78M]|\[[0-9;?]*[A-HJKSTfhlsu])")

#: Colours, and characters that are not shown.
UNSEEN = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f]")


class LowerLines:
    """The last lines of a terminal. Other text of this process goes above them. Safe to use from several threads.

    Args:
        terminal: The stream that is drawn on.
        streams: Those whose text goes above, `terminal` among them. All are of the same terminal.
    """

    def __init__(self, terminal: io.TextIOWrapper, streams: Sequence[io.TextIOWrapper]) -> None:
        #: It is drawn on.
        self.terminal = terminal
        self._streams = streams
        self._lock = threading.RLock()
        #: What is drawn now.
        self._drawn: list[str] = []
        #: Lines that have no end yet, by stream and thread.
        self._begun: dict[tuple[int, int], str] = {}
        #: Columns of the terminal when it last had a size.
        self._columns = 2
        #: `False`: it draws no more, and text is written as without it.
        self.open = True
        for stream in streams:
            stream.flush()
            # Its own objects know the stream already, such as handlers of loggers: another stream in its place
            # would not be seen by them.
            stream.write = functools.partial(self._take, stream)  # type: ignore[method-assign]

    def show(self, lines: Sequence[str]) -> None:
        """Draw other lines; those that are too long are cut, and those that are too many left out."""
        with self._lock:
            if not self.open:
                return
            if not _has_size(self.terminal):
                self.close()
                return
            width, room = self._width(), max(1, self.height() - 1)
            begun = [UNSEEN.sub("", text) for text in self._begun.values()]
            fitting = [_cut(line, width - 1) for line in (*begun[-room:], *lines)][:room]
            if fitting != self._drawn:
                before = self._erase()
                self._drawn = fitting
                self._put(before + "\n".join(fitting))

    def close(self) -> None:
        """Erase the lines, and let text be written as without them. Without effect the second time."""
        with self._lock:
            if not self.open:
                return
            text = self._erase() + "\n".join(self._begun.values())
            self.forget()
            # The terminal may be gone.
            with contextlib.suppress(OSError, ValueError):
                self._put(text)

    def forget(self) -> None:
        """Draw no more, and erase nothing. In a fork of the process, whose parent still draws."""
        self.open = False
        self._lock = threading.RLock()
        self._drawn, self._begun = [], {}
        for stream in self._streams:
            if getattr(vars(stream).get("write"), "func", None) == self._take:
                del stream.write

    def _take(self, stream: io.TextIOWrapper, text: str) -> int:
        """Write text above the lines: in place of the `write` of a stream."""
        with self._lock:
            if self.open and isinstance(text, str) and DRAWING.search(text):
                self.close()
            if not self.open or not isinstance(text, str):
                return io.TextIOWrapper.write(stream, text)
            writer = id(stream), threading.get_ident()
            whole, end, rest = (self._begun.pop(writer, "") + text).rpartition("\n")
            if rest:
                self._begun[writer] = rest
            if end:
                self._put(f"{self._erase()}{whole}\n" + "\n".join(self._drawn))
            return len(text)

    def _erase(self) -> str:
        """Return what moves the cursor to where the lines begin, and erases them."""
        if not self._drawn:
            return ""
        # A terminal that was made narrower has wrapped them.
        width = self._width()
        height = sum(max(1, -(-cell_len(line) // width)) for line in self._drawn)
        return "\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + "\x1b[J"

    def _put(self, text: str) -> None:
        io.TextIOWrapper.write(self.terminal, text)
        self.terminal.flush()

    def _width(self) -> int:
        columns = os.get_terminal_size(self.terminal.fileno()).columns
        if columns:
            self._columns = max(2, columns)
        return self._columns

    def height(self) -> int:
        """Return how many lines the terminal has."""
        return os.get_terminal_size(self.terminal.fileno()).lines


def _cut(line: str, width: int) -> str:
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def open_lower_lines(stdout: Any, stderr: Any) -> LowerLines | None:
    """Return the last lines of the terminal that two streams are of; `None`: nothing is to be drawn there.

    Args:
        stdout: The process's standard output. It may be elsewhere.
        stderr: Its standard error, which is drawn on.
    """
    if not _is_plain(stderr) or other_display():
        return None
    if os.environ.get("TERM", "") in ("", "dumb", "unknown") or not in_foreground(stderr):
        return None
    if not _has_size(stderr):
        return None
    streams = [stderr]
    if stdout is not None and stdout.isatty():
        if not _is_plain(stdout):
            # A display of another program has replaced it.
            return None
        if os.ttyname(stdout.fileno()) == os.ttyname(stderr.fileno()):
            streams.append(stdout)
    return LowerLines(stderr, streams)


def _is_plain(stream: Any) -> bool:
    """Return whether a stream is a terminal that no other program has replaced."""
    if not isinstance(stream, io.TextIOWrapper) or "write" in vars(stream) or stream.closed:
        return False
    return stream.isatty() and stream.encoding.lower().startswith("utf")


def _has_size(terminal: Any) -> bool:
    """Return whether a terminal says how large it is: else nobody knows where its lines end, nor how to erase them."""
    return all(os.get_terminal_size(terminal.fileno()))


def in_foreground(stream: Any) -> bool:
    """Return whether the terminal is this process's now; one in the background must not draw."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:
        # It is not the terminal that the process was started from.
        return True


def other_display() -> bool:
    """Return whether a progress bar or live display is open that is known without its drawing."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is not None and len(getattr(tqdm.tqdm, "_instances", ())):
        return True
    # rich 14.1 has a stack of them, earlier ones had one.
    console = rich.get_console()
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


class LiveView:
    """The view of all flows of this process, while there are any. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By flow: returns what to show of it.
        self._sources: dict[Hashable, Callable[[], FlowProgress]] = {}
        self._lines: LowerLines | None = None
        #: Set when the view ends.
        self._ended = threading.Event()
        PROCESS_RESOURCES.after_fork(self, LiveView._forget)

    def join(self, flow: Hashable, source: Callable[[], FlowProgress]) -> None:
        """Show a flow from now on, where there is a terminal to draw on."""
        with self._lock:
            first = not self._sources
            self._sources[flow] = source
            if not first:
                return
            try:
                self._lines = lines = open_lower_lines(sys.stdout, sys.stderr)
                if lines is not None:
                    self._ended = threading.Event()
                    run = functools.partial(self._run, lines, self._ended)
                    start_thread(run, "prefect-gpu-live-view")
            except (CapacityError, OSError, ValueError) as error:
                logger.debug("there is no live view: %s", error)
                self._close()

    def leave(self, flow: Hashable) -> None:
        """Show a flow no longer. Without effect the second time."""
        with self._lock:
            if self._sources.pop(flow, None) is not None and not self._sources:
                self._close()

    def _close(self) -> None:
        self._ended.set()
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _forget(self) -> None:
        """Begin anew in a fork of the process, where the parent still draws."""
        if self._lines is not None:
            self._lines.forget()
        self._lock, self._sources, self._lines = threading.Lock(), {}, None

    def _run(self, lines: LowerLines, ended: threading.Event) -> None:
        pause_s = FIRST_S
        while not ended.wait(pause_s) and lines.open:
            pause_s = REFRESH_S
            try:
                with self._lock:
                    sources = tuple(self._sources.values())
                if other_display():
                    break
                if sources and in_foreground(lines.terminal):
                    progress = combine([source() for source in sources])
                    lines.show(view_lines(progress, lines.height()))
            except Exception as error:  # noqa: BLE001
                # Process boundary: what is shown of a flow must not fail it.
                logger.debug("the live view has ended: %r", error)
                break
        lines.close()


def live_view() -> LiveView:
    """Return the view of this process."""
    return PROCESS_RESOURCES.get("live view", LiveView)
