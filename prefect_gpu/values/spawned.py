"""Pickling of functions and classes between a task's process and its `multiprocessing` processes.

Such a process imports functions and classes by module and name. The user's `__main__`, a notebook or a script loaded by
path does not run there, so its functions and classes travel by value (`by_value`): for all users of the pickler of
`multiprocessing` (`Process`, `Pool`, `ProcessPoolExecutor`, `torch.multiprocessing.spawn`, workers of a `DataLoader`),
with each start method.

Existing functions, classes and variables of the receiving process are not replaced, and functions of one module share
their global variables. So the functions of a `Pool` see the variables that its initializer sets.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import pickle
import sys
import threading
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle as internals

from prefect_gpu.errors import short_text
from prefect_gpu.frameworks.registry import find_in_namespace
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.values.by_value import ByValuePickler, Key, find
from prefect_gpu.values.importable import travels_by_value
from prefect_gpu.values.made_anew import CACHED, own_name

#: Functions and classes that were sent or received, as pickles.
_sent: dict[Key, bytes] = {}


def install() -> None:
    """Make the pickler of `multiprocessing` in this process send private functions and classes by value."""
    PROCESS_RESOURCES.after_fork(ForkingPickler, _release_in_fork)
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]


def keep_main_from_running() -> None:
    """Keep `multiprocessing` processes from running the user's script, the file of the stand-in for `__main__`."""
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        return {k: v for k, v in prepare(name).items() if not k.startswith("init_main")}

    spawn.get_preparation_data = without_main


def load(key: Key | None, data: bytes | None, problem: str = "") -> Any:
    """Return a class or function that another process sent.

    `key`: module and name; `None`: no own name. `data`: output of `ByValuePickler`; `None`: the object could not be
    pickled for the reason `problem`, so this process must have it.
    """
    # This process may send the class back.
    install()
    found = find(key)
    if found is not None:
        return found
    if data is None:
        raise pickle.UnpicklingError(f"{'.'.join(key or ())} cannot be sent by value: {problem}")
    value = pickle.loads(data)
    if key is not None:
        _sent.setdefault(key, data)
    return value


def _release_in_fork(owner: type) -> None:
    # The lock may be held by a thread that does not exist in the fork.
    internals._DYNAMIC_CLASS_TRACKER_LOCK = threading.Lock()


def _reduce(pickler: ForkingPickler, obj: Any) -> Any:
    if not isinstance(obj, (type, FunctionType, CACHED)) or not travels_by_value(obj):
        return NotImplemented
    key = own_name(obj)
    # A process that is being started gets current global variables, not an older pickle. A running process has them.
    data = None if key is None or get_spawning_popen() is not None else _sent.get(key)
    if data is None:
        file = io.BytesIO()
        try:
            ByValuePickler(file).dump(obj)
        except Exception as error:
            if key is None:
                raise
            if find_in_namespace(*key) is obj and key[0] in sys.modules and key[0] != "__main__":
                # A library's module that no finder knows can be imported all the same.
                return NotImplemented
            if not _is_forked():
                raise
            return load, (key, None, short_text(error))
        data = file.getvalue()
        if key is not None:
            _sent[key] = data
    return load, (key, data)


def _is_forked() -> bool:
    """Return whether this process may be, or may have, a `multiprocessing` fork, which has the same functions."""
    if multiprocessing.parent_process() is not None:
        return True
    started = (getattr(each, "_popen", None) for each in multiprocessing.active_children())
    return any(getattr(each, "method", "") == "fork" for each in started)
