"""The end of a child: user code is finalised, files are written, libraries are not finalised.

Python's own end looks at all objects several times and clears module after module. With a framework this takes more
than a second, in which the device's memory stays in use. A fresh interpreter calls `run_exit_functions` and
`finalise_users_modules`, then ends as usual. A fork ends with `end_fork`.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from prefect_gpu.frameworks import registry


def run_exit_functions() -> None:
    """Wait for threads that are no daemons, then call the functions registered with `atexit`.

    Python's own end begins in the same way. Exceptions are printed.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()


def end_fork(code: int) -> NoReturn:
    """End a fork like a script, without finalising memory that it shares.

    Clearing the modules of Prefect and PyTorch one by one copies most of the fork server's pages: 0.8 s in a
    fork and 0.4 s in a fresh process, against 0.02 s (2 cores, Python 3.11). `__del__` of objects that live to
    the end and `atexit` functions of C libraries are not called.
    """
    run_exit_functions()
    # Objects that the server made are frozen, so their pages are not copied by a look at them.
    write_open_files()
    # The standard streams are frozen too, and may hold a line that has no end yet.
    _write((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    os._exit(code)


def finalise_users_modules() -> None:
    """Collect the user's modules and the task's objects, and freeze all other objects.

    Objects get their `__del__` as in a script, while the globals of their modules are still there and libraries still
    work. A module that a library holds (in a cache of `typing`, say) stays whole. Python's own end then only releases
    modules. Under `-X dev` Python's own end does all of this, since only the collector reports unclosed files of libraries.
    """
    if sys.flags.dev_mode:
        gc.unfreeze()
    # Before the collection, which may close a descriptor before the buffer above it (seen in CPython 3.11, at the first
    # collection of a module and its file): the text would be lost.
    files = write_open_files()
    if sys.flags.dev_mode:
        return
    held = _release_users_modules()
    gc.collect()
    # Modules are cleared in the end, as in a script.
    sys.modules.update({name: module for name, find in held.items() if (module := find())})
    # Objects that were collected may have written to files.
    _write(file for find in files if (file := find()))
    gc.freeze()


def write_open_files() -> list[weakref.ref[Any]]:
    """Flush open files, whose buffers exist in this process alone.

    Returns:
        References to these files, without the frozen files (`gc.freeze`) of libraries.
    """
    # `__class__` of an object may run its code.
    files = [found for found in gc.get_objects() if issubclass(type(found), _io._IOBase)]
    _write(files)
    return [weakref.ref(file) for file in files]


def _write(files: Iterable[Any]) -> None:
    for file in files:
        with contextlib.suppress(Exception):
            file.flush()


def _release_users_modules() -> dict[str, Any]:
    """Remove the user's modules from `sys.modules`; return weak references to them, by name."""
    held = {}
    users = (name for name in list(sys.modules) if name != "__main__" and registry.is_users(name))
    for name in users:
        # Some libraries put objects there that are no modules.
        with contextlib.suppress(TypeError):
            held[name] = weakref.ref(sys.modules[name])
            # As in Python's own end: an import now fails, and does not run the module again.
            sys.modules[name] = None  # type: ignore[assignment]
    return held
