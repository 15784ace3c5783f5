"""A terminal: a pseudo-terminal, and what a person sees on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading

#: What a program writes to a terminal: a sequence, or a character.
PIECE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)


class Screen:
    """The lines of a terminal that scrolls, all that were ever written.

    It knows only what the live view uses. Any other sequence is an error.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for piece in PIECE.findall(text):
            if piece == "\n":
                self._row += 1
            elif piece == "\r":
                self._column = 0
            elif piece[0] != "\x1b":
                self._put(piece)
            elif piece[-1] == "A":
                self._row -= int(piece[2:-1])
                assert self._row >= 0
            elif piece == "\x1b[J":
                del self.lines[self._row + 1 :]
                self.lines[self._row] = self.lines[self._row][: self._column]
            elif piece[-1] != "m":
                raise AssertionError(f"this terminal does not know {piece!r}")
            while len(self.lines) <= self._row:
                self.lines.append("")

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._row, self._column = self._row + 1, 0
            self.lines += [""] * (self._row + 1 - len(self.lines))
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1


class Terminal:
    """A pseudo-terminal, read by a thread, as a person's is by its window."""

    def __init__(self, columns: int = 100, rows: int = 30) -> None:
        self.columns = columns
        self._open = True
        self._master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self._read = bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        """Set the size that programs see. What is on the screen stays as it is."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _run(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._read += data
        except OSError:
            return

    def start(self, command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        """Start a program in the terminal."""
        streams = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        return subprocess.Popen(command, start_new_session=True, **streams, **kwargs)  # type: ignore[call-overload, no-any-return]

    @property
    def text(self) -> str:
        """All that was written so far."""
        return bytes(self._read).decode(errors="replace")

    def screen(self) -> list[str]:
        """Return the lines that are seen now, also those that were scrolled away."""
        screen = Screen(self.columns)
        screen.feed(self.text)
        return screen.lines

    def close(self) -> None:
        """End it, once all was read; nothing may use it any more. Without effect the second time."""
        if self._open:
            self._open = False
            os.close(self.slave)
            self._thread.join(60)
            os.close(self._master)
