"""The end of a process whose objects may not all be taken apart: what is in open files is written.

When that is, is said where they end: forks in `template`, all others in `child`.
"""

from __future__ import annotations

import _io
import contextlib
import gc


def write_open_files() -> None:
    """Write what is buffered in files that nobody has closed: their text is in this process alone.

    All but what was set aside from the collector (`gc.freeze`), which is libraries.
    """
    for found in gc.get_objects():
        if issubclass(type(found), _io._IOBase):
            with contextlib.suppress(Exception):
                found.flush()
