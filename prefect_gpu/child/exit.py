"""The end of a child: finalises the user's modules and writes open files, but does not finalise libraries.

Python's own finalisation visits all objects several times. With a framework this takes more than a second, in which the
device's memory stays in use. So a child calls `run_exit_functions` and `finalise_users_modules`. Then a fork ends with
`end_unfinalised`, any other child as usual.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
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
    """Wait for non-daemon threads and call the `atexit` functions, as Python does; print their exceptions."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()


def end_unfinalised(opened: Iterable[weakref.ref[Any]]) -> NoReturn:
    """Write files and end this source or fork, without the exit functions of C; `opened`: files of its libraries."""
    # Clearing the modules of Prefect and PyTorch would copy most shared pages: 0.8 s, now 0.02 s (Python 3.11).
    write_open_files()
    _write(file for find in opened if (file := find()))
    flush_streams()
    os._exit(0)


def flush_streams() -> None:
    """Write what the standard streams buffer, also those of C."""
    _write((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    ctypes.CDLL(None).fflush(None)


def finalise_users_modules() -> None:
    """Collect the user's modules and the task's objects, then freeze all other objects to shorten Python's own end.

    Meanwhile `__del__` methods still find their modules' globals and working libraries. A module to which a library
    refers is not collected. Under `-X dev` nothing is frozen, since only the collector reports unclosed files.
    """
    if sys.flags.dev_mode:
        gc.unfreeze()
    # Before the collection, which may close a file's descriptor before its buffer is written (CPython 3.11).
    files = write_open_files()
    if sys.flags.dev_mode:
        return
    held = _release_users_modules()
    gc.collect()
    # Python clears these modules at its end, as in a script.
    sys.modules.update({name: module for name, find in held.items() if (module := find())})
    # Finalisers may have written to files.
    _write(file for find in files if (file := find()))
    gc.freeze()


def write_open_files() -> list[weakref.ref[Any]]:
    """Flush all open files except frozen ones (`gc.freeze`), which are libraries'; return weak references to them."""
    # `isinstance` would read `__class__`, which may run an object's code.
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
        # Some libraries store objects in `sys.modules` that are no modules.
        with contextlib.suppress(TypeError):
            held[name] = weakref.ref(sys.modules[name])
            # As at Python's own end: an import now fails, instead of running the module again.
            sys.modules[name] = None  # type: ignore[assignment]
    return held
