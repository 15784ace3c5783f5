"""The end of a child: user code is finalised, files are written, libraries are not finalised.

Python's own end visits all objects several times. With a framework this takes more than a second, in which the device's
memory stays in use. A fresh interpreter calls `run_exit_functions` and `finalise_users_modules`, then ends as usual.
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
    """Wait for threads that are no daemons, and call the `atexit` functions, as Python does. Exceptions are printed."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()


def end_fork(code: int) -> NoReturn:
    """End a fork like a script, without finalising memory that the fork shares.

    Clearing the modules of Prefect and PyTorch copies most of the server's pages: 0.8 s instead of 0.02 s (Python 3.11).
    `__del__` of objects that live to the end and `atexit` functions of C libraries are not called.
    """
    run_exit_functions()
    write_open_files()
    # The standard streams are frozen, and may hold a line without an end.
    _write((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    os._exit(code)


def finalise_users_modules() -> None:
    """Collect the user's modules and the task's objects, and freeze all others, so that Python's own end is short.

    `__del__` of these objects finds the globals of their modules, and libraries that work. A module that a library
    refers to stays whole. Under `-X dev` nothing is frozen, since only the collector reports unclosed files.
    """
    if sys.flags.dev_mode:
        gc.unfreeze()
    # Before the collection, which may close a descriptor before its buffer is written (seen in CPython 3.11).
    files = write_open_files()
    if sys.flags.dev_mode:
        return
    held = _release_users_modules()
    gc.collect()
    # Modules are cleared in the end, as in a script.
    sys.modules.update({name: module for name, find in held.items() if (module := find())})
    # Finalisers may have written to files.
    _write(file for find in files if (file := find()))
    gc.freeze()


def write_open_files() -> list[weakref.ref[Any]]:
    """Flush open files, except frozen files (`gc.freeze`) of libraries, and return weak references to them."""
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
