"""Finds the user's line in which a process crashed, in the output of Python's `faulthandler`."""

from __future__ import annotations

import re
from pathlib import Path

#: Frames of the crashed thread, innermost first.
_CRASHED = re.compile(r"Current thread [^\n]*\n((?:  File [^\n]*\n)+)")
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (.*)')

#: Parts of paths of installed packages, the standard library and this package.
_NOT_USERS = (
    "site-packages",
    "dist-packages",
    "/lib/python3.",
    "<frozen ",
    str(Path(__file__).parents[1]),
)


def crashed_at(stderr_tail: str) -> str:
    """Return the innermost frame of a crash, the user's if possible, as in `train (script.py:12)`; empty: unknown."""
    found = _CRASHED.search(stderr_tail)
    if found is None:
        return ""
    frames = _FRAME.findall(found[1])
    users = [frame for frame in frames if not any(part in frame[0] for part in _NOT_USERS)]
    path, line, function = (users or frames)[0]
    return f"{function} ({path}:{line})"
