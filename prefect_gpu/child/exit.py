"""The end of a child: what is the user's is finalised, files are written, libraries are left as they are.

Python's own end looks at all objects several times and clears module after module: more than a second
with a framework, for which the device's memory stays taken. A fresh interpreter ends with
`run_exit_functions` and `finalise_users_modules`, then as every interpreter does. A fork ends with
`end_fork`. When a child must end is not decided here.
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

    Python's own end begins the same way. What raises is printed.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()


def end_fork(code: int) -> NoReturn:
    """End a fork: all that the end of a script promises, but no finalising of what it shares.

    Clearing the modules of Prefect and PyTorch one by one copies most of the fork server's pages: it
    took 0.8 s in a fork and 0.4 s in a fresh process; 0.02 s are left (2 cores, Python 3.11). Not called
    are `__del__` of objects that live to the end, and what C libraries register with `atexit`.
    """
    run_exit_functions()
    # Objects that the server made are frozen: looking at them would copy their pages.
    write_open_files()
    # The standard streams are among these, and may hold a line that has no end yet.
    _write((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    os._exit(code)


def finalise_users_modules() -> None:
    """Collect the user's modules and what the task made, and freeze all the rest.

    Objects get their `__del__` as in a script, while the globals of their modules are still there and
    libraries still work. A module that a library holds (in a cache of `typing`, say) stays whole.
    Python's own end then has only modules to let go of.

    Under `-X dev` all of it is left to Python's own end, since only the collector reports what libraries
    left unclosed.
    """
    if sys.flags.dev_mode:
        gc.unfreeze()
    # Before the collection, which may close what a file writes to before the file (seen in CPython 3.11,
    # where a module and its file are collected for the first time): its text would be lost.
    files = write_open_files()
    if sys.flags.dev_mode:
        return
    held = _release_users_modules()
    gc.collect()
    # They are cleared in the end, as in a script.
    sys.modules.update({name: module for name, find in held.items() if (module := find())})
    # Objects that were collected may have written to files.
    _write(file for find in files if (file := find()))
    gc.freeze()


def write_open_files() -> list[weakref.ref[Any]]:
    """Write what is buffered in open files: their text exists in this process alone.

    Returns:
        References to these files. Frozen files (`gc.freeze`), which are libraries', are not among them.
    """
    # By the type: `__class__` of an object may run its code.
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
            # As Python does in the end: an import of it now fails, and does not run it again.
            sys.modules[name] = None  # type: ignore[assignment]
    return held
