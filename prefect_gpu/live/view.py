"""The live view of a flow: the last lines of a terminal show devices, and running and waiting task runs.

Other text of this process appears above the view: `LowerLines` replaces the `write` of stdout and stderr. A progress bar
or live display of another library moves the cursor: the view then ends. `progress` makes the lines.
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

#: Seconds until the first drawing, and between drawings. A flow that ends before the first drawing has no view.
FIRST_S = 1.0
REFRESH_S = 0.5

#: Control sequences that move the cursor or erase text: another display draws. Line ends and colours do not match.
DRAWING = re.compile(r"\r(?!\n)|\x08|\x1b(?:[78M]|\[[0-9;?]*[A-HJKSTfhlsu])")

#: Colours and invisible characters.
UNSEEN = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f]")


class LowerLines:
    """Lines at the end of a terminal, below other text of this process. Safe to use from several threads.

    The lines are drawn on the stream `terminal`. Text that is written to any of `streams` appears above them.
    """

    def __init__(self, terminal: io.TextIOWrapper, streams: Sequence[io.TextIOWrapper]) -> None:
        self.terminal = terminal
        self._streams = streams
        self._lock = threading.RLock()
        #: Lines on the terminal now.
        self._drawn: list[str] = []
        #: Text without a line end yet, by id of stream and thread.
        self._begun: dict[tuple[int, int], str] = {}
        #: Last known width of the terminal, in columns.
        self._columns = 2
        #: `False`: no lines are drawn any more, and text is written as usual.
        self.open = True
        for stream in streams:
            stream.flush()
            # Handlers of loggers already refer to this stream object, so it cannot be replaced as a whole.
            stream.write = functools.partial(self._take, stream)  # type: ignore[method-assign]

    def show(self, lines: Sequence[str]) -> None:
        """Replace the drawn lines. Long lines are cut, and lines without room are left out."""
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
        """Erase the lines, and stop drawing. Text is written as usual from now on. Idempotent."""
        with self._lock:
            if not self.open:
                return
            text = self._erase() + "\n".join(self._begun.values())
            self.forget()
            # The terminal may be gone.
            with contextlib.suppress(OSError, ValueError):
                self._put(text)

    def forget(self) -> None:
        """Stop drawing without erasing. For a fork of the process: the parent still draws."""
        self.open = False
        self._lock = threading.RLock()
        self._drawn, self._begun = [], {}
        for stream in self._streams:
            if getattr(vars(stream).get("write"), "func", None) == self._take:
                del stream.write

    def _take(self, stream: io.TextIOWrapper, text: str) -> int:
        """Write text above the lines; replaces the `write` of a stream."""
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
        """Return the control sequence that moves the cursor to the first drawn line and erases from there."""
        if not self._drawn:
            return ""
        # A terminal that became narrower has wrapped the lines.
        width = self._width()
        height = sum(max(1, -(-cell_len(line) // width)) for line in self._drawn)
        up = f"\x1b[{height - 1}A" if height > 1 else ""
        return f"\r{up}\x1b[J"

    def _put(self, text: str) -> None:
        io.TextIOWrapper.write(self.terminal, text)
        self.terminal.flush()

    def _width(self) -> int:
        # The terminal may be gone, or have no size.
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self.terminal.fileno()).columns
            self._columns = max(2, columns or self._columns)
        return self._columns

    def height(self) -> int:
        """Return the terminal's number of lines."""
        return os.get_terminal_size(self.terminal.fileno()).lines


def _cut(line: str, width: int) -> str:
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def open_lower_lines(stdout: Any, stderr: Any) -> LowerLines | None:
    """Return lines below the output of `stderr`, and of `stdout` on the same terminal; `None`: no terminal to draw on."""
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return None
    # Last, since the question makes rich's own console, which would keep the streams of today.
    if not (_is_plain(stderr) and in_foreground(stderr) and _has_size(stderr)) or other_display():
        return None
    if stdout is None or not stdout.isatty():
        return LowerLines(stderr, [stderr])
    if not _is_plain(stdout):
        # Another library has replaced the stream.
        return None
    same = os.ttyname(stdout.fileno()) == os.ttyname(stderr.fileno())
    return LowerLines(stderr, [stderr, stdout] if same else [stderr])


def _is_plain(stream: Any) -> bool:
    """Return whether a stream is a UTF terminal whose `write` no other library has replaced."""
    if not isinstance(stream, io.TextIOWrapper) or "write" in vars(stream) or stream.closed:
        return False
    return stream.isatty() and stream.encoding.lower().startswith("utf")


def _has_size(terminal: Any) -> bool:
    """Return whether a terminal reports its size. Without it, lines cannot be erased."""
    return all(os.get_terminal_size(terminal.fileno()))


def in_foreground(stream: Any) -> bool:
    """Return whether this process is in the foreground of a stream's terminal: only then may it draw."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:
        # The process was not started from this terminal.
        return True


def other_display() -> bool:
    """Return whether tqdm or rich has an open progress bar or live display."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is not None and len(getattr(tqdm.tqdm, "_instances", ())):
        return True
    # rich 14.1 has a stack of live displays, earlier versions have a single one.
    console = rich.get_console()
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


class LiveView:
    """The live view that all flows of this process share. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Function that returns a flow's progress, by flow.
        self._sources: dict[Hashable, Callable[[], FlowProgress]] = {}
        self._lines: LowerLines | None = None
        #: Set when the view ends.
        self._ended = threading.Event()
        PROCESS_RESOURCES.after_fork(self, LiveView._forget)

    def join(self, flow: Hashable, source: Callable[[], FlowProgress]) -> None:
        """Add a flow to the view. The first flow starts the drawing, if there is a terminal to draw on."""
        with self._lock:
            first = not self._sources
            self._sources[flow] = source
            if not first:
                return
            try:
                self._lines = open_lower_lines(sys.stdout, sys.stderr)
                if self._lines is not None:
                    self._ended = threading.Event()
                    run = functools.partial(self._run, self._lines, self._ended)
                    start_thread(run, "prefect-gpu-live-view")
            except (CapacityError, OSError, ValueError) as error:
                logger.debug("there is no live view: %s", error)
                self._close()

    def leave(self, flow: Hashable) -> None:
        """Remove a flow from the view. The last flow ends the drawing. Idempotent."""
        with self._lock:
            if self._sources.pop(flow, None) is not None and not self._sources:
                self._close()

    def _close(self) -> None:
        self._ended.set()
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _forget(self) -> None:
        """Reset the view without erasing, in a fork of the process: the parent still draws."""
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
                # Process boundary: an error of the display must not fail the flow.
                logger.debug("the live view has ended: %r", error)
                break
        lines.close()


def live_view() -> LiveView:
    """Return the `LiveView` of this process."""
    return PROCESS_RESOURCES.get("live view", LiveView)
