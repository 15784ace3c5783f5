"""What a body passes to processes that it starts with `multiprocessing`, and what they return.

Such a process imports functions and classes by the names of their modules. It cannot import those of the user's
`__main__`, of a notebook or of a script that was loaded by path, since none of these runs in it. Here they travel by
value instead. That holds for all that uses the pickler of `multiprocessing`, with each start method: `Process`, `Pool`,
`ProcessPoolExecutor`, `torch.multiprocessing.spawn` and the workers of a `DataLoader`.

Where they arrive, it is as if their module was imported there: a function or class that a process has under a name
stays the one of that name, and functions of one module share their global variables. A variable that exists keeps its
value. So what the initializer of a `Pool` assigns, the functions see that it calls.
"""

from __future__ import annotations

import inspect
import io
import multiprocessing
import operator
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, TypeAlias

import cloudpickle

from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes.messages import short_text
from prefect_gpu.processes.values import ByValuePickler, travels_by_value

#: The module and the qualified name of a function or class.
Key: TypeAlias = tuple[str, str]

#: Sets the state of a new function or class.
SetState: TypeAlias = Callable[[Any, Any], None]

#: By the name of a module: the global variables of its functions, in this process.
_globals: dict[str, dict[str, Any]] = {}

#: The functions and classes that were sent by value, or have arrived so.
_known: dict[Key, Any] = {}

#: How they were sent, or have arrived.
_sent: dict[Key, bytes] = {}

#: Classes whose attributes are set: those without a key, too.
_classes: weakref.WeakSet[type] = weakref.WeakSet()


def install(body: Callable[..., Any] | None = None) -> None:
    """Make the pickler of `multiprocessing`, in this process, send by value what others cannot import.

    Args:
        body: Of the task, if this is its process. Its global variables are those of its module.
    """
    if body is not None:
        variables = getattr(inspect.unwrap(body), "__globals__", {})
        _globals.setdefault(variables.get("__name__", ""), variables)
        for each in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS):
            # It came with the call. Type variables are tracked as well.
            if isinstance(each, type):
                _classes.add(each)
                _key(each)
    PROCESS_RESOURCES.after_fork(ForkingPickler, _release_in_fork)
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]


def load(key: Key | None, data: bytes | None, problem: str = "") -> Any:
    """Return the class or function that another process sent.

    Args:
        key: `None`: it has no name of its own.
        data: What `_SpawnPickler` wrote; `None`: it cannot be sent by value.
        problem: Why.

    Raises:
        pickle.UnpicklingError: It cannot be sent by value, and this process does not have it.
    """
    # What this process sends back may be such a class, too.
    install()
    found = None if key is None else _find(key)
    if found is not None:
        return found
    if data is None:
        raise pickle.UnpicklingError(f"{'.'.join(key or ())} cannot be sent by value: {problem}")
    value = pickle.loads(data)
    if key is not None:
        _sent.setdefault(key, data)
    return value


def _release_in_fork(owner: type) -> None:
    # Another thread may have held it, which does not exist in the fork.
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK = threading.Lock()


def _reduce(pickler: ForkingPickler, obj: Any) -> Any:
    if not isinstance(obj, (type, FunctionType)) or not travels_by_value(obj):
        return NotImplemented
    key = _key(obj)
    # A process that starts gets global variables as they are now. One that runs has them.
    data = None if key is None or get_spawning_popen() is not None else _sent.get(key)
    if data is None:
        file = io.BytesIO()
        try:
            _SpawnPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
        except Exception as error:
            if key is None:
                raise
            if _in_modules(key) is obj and key[0] in sys.modules and key[0] != "__main__":
                # A library's own: its module can be imported, though no finder knows it.
                return NotImplemented
            if not _is_forked():
                raise
            # A process that was forked has it.
            return load, (key, None, short_text(error))
        data = file.getvalue()
        if key is not None:
            _sent[key] = data
    return load, (key, data)


def _key(obj: Any) -> Key | None:
    """Return the key of a function or class; `None`: its name is that of another one, or of none outside a function."""
    key = obj.__module__, obj.__qualname__
    if "<" in obj.__qualname__ or not travels_by_value(obj):
        return None
    there = _in_modules(key)
    if there is not None and there is not obj:
        return None
    return key if _known.setdefault(key, obj) is obj else None


def _find(key: Key) -> Any:
    found = _known.get(key)
    return _in_modules(key) if found is None else found


def _in_modules(key: Key) -> Any:
    """Return what a module of this process has under a name; `None`: nothing."""
    module, name = key
    found = _globals.get(module, {}).get(name)
    if isinstance(found, (type, FunctionType)) and (found.__module__, found.__qualname__) == key:
        return found
    # `__main__` is no module of the user's here.
    if module == "__main__" or module not in sys.modules:
        return None
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except AttributeError:
        return None


def _is_forked() -> bool:
    """Return whether this process may be, or have, a fork of `multiprocessing`'s: the two know the same."""
    if multiprocessing.parent_process() is not None:
        return True
    started = (getattr(each, "_popen", None) for each in multiprocessing.active_children())
    return any(getattr(each, "method", "") == "fork" for each in started)


class _SpawnPickler(ByValuePickler):
    """Pickles a class or function, and what it refers to."""

    def reducer_override(self, obj: Any) -> Any:
        """See `ByValuePickler.reducer_override`."""
        reduction = super().reducer_override(obj)
        if not isinstance(reduction, tuple) or len(reduction) != 6:
            return reduction
        # As cloudpickle makes one by value.
        make, arguments, state, *_, set_state = reduction
        key = _key(obj)
        if isinstance(obj, FunctionType):
            module = obj.__globals__.get("__name__", "")
            if not module or _globals.setdefault(module, obj.__globals__) is not obj.__globals__:
                # Code that was generated, with variables of its own.
                module = ""
            make, arguments = _make_function, (key, module, make, *arguments)
            set_state = partial(_set_function, key, set_state)
        elif isinstance(obj, type):
            _classes.add(obj)
            make, arguments = _make_class, (key, make, *arguments)
            set_state = partial(_set_class, key, set_state)
        return make, arguments, state, None, None, set_state


def _make_function(
    key: Key | None, module: str, make: Callable[..., FunctionType], *arguments: Any
) -> FunctionType:
    found = None if key is None else _find(key)
    if isinstance(found, FunctionType) and key is not None:
        # Its state is set.
        _known.setdefault(key, found)
        return found
    made = make(*arguments)
    if not module:
        return made
    variables = _globals.setdefault(module, {})
    for name, value in made.__globals__.items():
        variables.setdefault(name, value)
    return FunctionType(
        made.__code__, variables, made.__name__, made.__defaults__, made.__closure__
    )


def _set_function(key: Key | None, set_state: SetState, function: FunctionType, state: Any) -> None:
    # Cloudpickle would set variables that exist, and that other functions have assigned since.
    slots = state[1]
    exist = function.__globals__
    missing = {k: v for k, v in slots["__globals__"].items() if k not in exist}
    if key is not None and _known.get(key) is function:
        exist.update(missing)
        return
    slots["__globals__"] = missing
    set_state(function, state)
    if key is not None:
        _known.setdefault(key, function)


def _make_class(key: Key | None, make: Callable[..., type], *arguments: Any) -> type:
    found = None if key is None else _find(key)
    if isinstance(found, type):
        # Making it again would call `__init_subclass__` of its base again.
        _classes.add(found)
        return found
    return make(*arguments)


def _set_class(key: Key | None, set_state: SetState, made: type, state: Any) -> None:
    # One that exists here keeps its attributes, and its methods their identity.
    if made not in _classes:
        set_state(made, state)
        _classes.add(made)
        if key is not None:
            _known.setdefault(key, made)
