"""The end of a process whose libraries are not taken apart: what is the user's is, and files are written.

Python's own end looks at all objects there are, several times, and clears module after module: more than
a second with a framework, for which the device's memory stays taken. Forks end elsewhere (`template`):
they share the pages of what would be taken apart.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable
from itertools import compress
from typing import Any

from prefect_gpu.frameworks import registry


def call_last_functions() -> None:
    """Wait for threads that are no daemons, then call what `atexit` knows: how Python's own end begins."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()


def take_apart() -> None:
    """Have the collector take the user's modules apart, and what the task made; set aside all the rest.

    Objects get their `__del__` as in a script, while the globals of their modules are still there and
    libraries still work. A module that a library holds (a cache of `typing` that has one class of it
    does) stays whole. Nothing is left to do for Python's own end but to let go of modules.

    Under `-X dev` all of it is left to Python's own end: what libraries left unclosed is complained of
    only if the collector sees it.
    """
    if sys.flags.dev_mode:
        gc.unfreeze()
    # Before: the collector may close what a file writes to before the file (seen in CPython 3.11,
    # where a module and its file are collected for the first time), and its text would be lost.
    files = write_open_files()
    if sys.flags.dev_mode:
        return
    held = _let_go_of_users_modules()
    gc.collect()
    # They are cleared in the end, as in a script.
    sys.modules.update({name: module for name, find in held.items() if (module := find())})
    # What ended may have written its last.
    _write(file for find in files if (file := find()))
    gc.freeze()


def write_open_files() -> list[weakref.ref[Any]]:
    """Write what is buffered in files that nobody has closed: their text is in this process alone.

    Returns:
        What finds these files: all but those that were set aside from the collector (`gc.freeze`),
        which are libraries'.
    """
    found = gc.get_objects()
    # Half a million objects with a framework: looked through without a line of Python for each.
    is_file = map(_file_types().__contains__, map(id, map(type, found)))
    files = list(compress(found, is_file))
    _write(files)
    return [weakref.ref(file) for file in files]


def _write(files: Iterable[Any]) -> None:
    for file in files:
        with contextlib.suppress(Exception):
            file.flush()


def _let_go_of_users_modules() -> dict[str, Any]:
    """Have `sys.modules` hold none of the user's; give what finds those that something else holds."""
    held = {}
    users = (name for name in list(sys.modules) if name != "__main__" and registry.is_users(name))
    for name in users:
        # Some libraries put objects there that are no modules.
        with contextlib.suppress(TypeError):
            held[name] = weakref.ref(sys.modules[name])
            # As Python does in the end: who imports it now is told that it is gone, and runs it no more.
            sys.modules[name] = None  # type: ignore[assignment]
    return held


def _file_types() -> set[int]:
    """Give the `id` of every class of files: a class need not be hashable."""
    known, waiting = set(), [_io._IOBase]
    while waiting:
        kind = waiting.pop()
        if id(kind) not in known:
            known.add(id(kind))
            waiting += type.__subclasses__(kind)
    return known
