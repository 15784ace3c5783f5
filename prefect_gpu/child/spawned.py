"""What a body passes to processes that it starts with `multiprocessing`, and what they return.

Such a process imports functions and classes by the names of their modules. It cannot import those of the user's
`__main__`, of a notebook or of a script that was loaded by path, since none of these runs in it. Here they travel by
value instead. That holds for all that uses the pickler of `multiprocessing`, with each start method: `Process`, `Pool`,
`ProcessPoolExecutor`, `torch.multiprocessing.spawn` and the workers of a `DataLoader`.

In the process where they arrive, functions of one module share their global variables, as if it were imported
there: functions that a `Pool` calls see what its initializer has assigned. A variable that exists keeps its value.
"""

from __future__ import annotations

import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, TypeAlias

from prefect_gpu.processes.values import ByValuePickler, travels_by_value

#: By the name of a module: the global variables of its functions, in this process.
_globals: dict[str, dict[str, Any]] = {}

#: Classes that were sent by value, or have arrived so.
_classes: weakref.WeakSet[type] = weakref.WeakSet()

#: Sets the state of a new function or class.
SetState: TypeAlias = Callable[[Any, Any], None]


def install(body: Callable[..., Any] | None = None) -> None:
    """Make the pickler of `multiprocessing`, in this process, send by value what others cannot import.

    Args:
        body: Of the task, if this is its process. Its global variables are those of its module.
    """
    variables = getattr(inspect.unwrap(body), "__globals__", None) if body is not None else None
    if variables is not None:
        _globals.setdefault(variables.get("__name__", ""), variables)
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]


def load(data: bytes) -> Any:
    """Return the class or function that another process sent by value.

    Args:
        data: What `_SpawnPickler` wrote.
    """
    # What this process sends back may be such a class, too.
    install()
    return pickle.loads(data)


def _reduce(pickler: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, (type, FunctionType)) and travels_by_value(obj):
        file = io.BytesIO()
        _SpawnPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
        return load, (file.getvalue(),)
    return NotImplemented


class _SpawnPickler(ByValuePickler):
    """Pickles a class or function, and what it refers to."""

    def reducer_override(self, obj: Any) -> Any:
        """See `ByValuePickler.reducer_override`."""
        reduction = super().reducer_override(obj)
        if not isinstance(reduction, tuple) or len(reduction) != 6:
            return reduction
        # As cloudpickle makes one by value. It may come back from the other process.
        make, arguments, state, *_, set_state = reduction
        if isinstance(obj, FunctionType):
            name = obj.__globals__.get("__name__", "")
            _globals.setdefault(name, obj.__globals__)
            make, arguments = _make_function, (name, make, *arguments)
            set_state = partial(_set_function, set_state)
        elif isinstance(obj, type):
            _classes.add(obj)
            set_state = partial(_set_class, set_state)
        return make, arguments, state, None, None, set_state


def _make_function(name: str, make: Callable[..., FunctionType], *arguments: Any) -> FunctionType:
    made = make(*arguments)
    variables = _globals.setdefault(name, {})
    for key, value in made.__globals__.items():
        variables.setdefault(key, value)
    return FunctionType(
        made.__code__, variables, made.__name__, made.__defaults__, made.__closure__
    )


def _set_function(set_state: SetState, function: FunctionType, state: Any) -> None:
    # Cloudpickle would set variables that exist, and that other functions have assigned since.
    slots = state[1]
    exist = function.__globals__
    slots["__globals__"] = {k: v for k, v in slots["__globals__"].items() if k not in exist}
    set_state(function, state)


def _set_class(set_state: SetState, made: type, state: Any) -> None:
    # One that exists here keeps its attributes, and its methods their identity.
    if made not in _classes:
        _classes.add(made)
        set_state(made, state)
