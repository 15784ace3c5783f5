"""Pickle reductions of objects that Python cannot pickle, or that must stay one object.

Locks, caches and context variables have no state worth keeping, or only a wrapped function: they are *made anew* in the
other process. A module's object without state, such as `dataclasses.MISSING`, is compared by `is`: the other process
uses its own object of that name. Objects of one process (threads, running programs, open files) are refused. Functions
and classes are in `by_value`, objects of frameworks in the adapters.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import importlib
import io
import queue
import random
import struct
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.frameworks.registry import find_in_namespace
from prefect_gpu.frameworks.tensorflow_adapter import reduce_traced
from prefect_gpu.frameworks.torch_adapter import reduce_compiled
from prefect_gpu.values import c_types
from prefect_gpu.values.importable import (
    find_reference,
    is_importable,
    private_modules,
    resolve,
    travels_by_value,
    users_modules,
)
from prefect_gpu.values.stand_ins import keep

#: A pickle reduction: a callable that makes an object anew, its arguments, and perhaps a state.
Made = tuple[Any, ...]

#: The module and the name of an object.
Name = tuple[str, str]

_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())

#: Type of the functions that `functools.lru_cache` and `cache` make.
CACHED: type = type(functools.lru_cache(len))

#: Types of objects that synchronise the threads of one process.
SYNCHRONISATION: tuple[type, ...] = (
    _LOCK,
    _RLOCK,
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
)


#: Queues between the threads of one process.
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue, queue.SimpleQueue)


def is_shared(value: object) -> bool:
    """Return whether an object is a lock, a queue or the like of one process's threads: a copy would be useless."""
    return isinstance(value, SYNCHRONISATION) or type(value) in _QUEUES


# Reductions by type.


def _make_event(is_set: bool) -> threading.Event:
    event = threading.Event()
    if is_set:
        event.set()
    return event


def _context_variable(variable: contextvars.ContextVar[Any]) -> Made:
    nothing: Any = _Nothing
    # In an empty context, `get` returns the default.
    try:
        default = contextvars.Context().run(variable.get)
    except LookupError:
        default = nothing
    value = variable.get(nothing)
    return _make_context_variable, (variable.name, default, nothing if value is default else value)


def _make_context_variable(name: str, default: Any, value: Any) -> contextvars.ContextVar[Any]:
    options: dict[str, Any] = {} if default is _Nothing else {"default": default}
    made: contextvars.ContextVar[Any] = contextvars.ContextVar(name, **options)
    if value is not _Nothing:
        made.set(value)
    return made


class _Nothing:
    """Stands for a missing value. A class, since both processes have the same class."""


def _cached_function(function: Any) -> Made:
    parameters = function.cache_parameters()
    options = parameters["maxsize"], parameters["typed"], _own_attributes(function)
    return _make_cached, (function.__wrapped__, *options)


def _make_cached(
    function: Callable[..., Any], maxsize: int | None, typed: bool, attributes: Mapping[str, Any]
) -> Any:
    made = functools.lru_cache(maxsize, typed)(function)
    vars(made).update(attributes)
    return made


def _own_attributes(wrapper: Any) -> dict[str, Any]:
    """Return the attributes of a wrapper function that `functools` has not set."""
    others = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters", *_OF_DISPATCH}
    return {name: value for name, value in vars(wrapper).items() if name not in others}


#: Attributes of the functions that `functools.singledispatch` makes.
_OF_DISPATCH = ("register", "dispatch", "registry", "_clear_cache")


def _make_reference(target: Any) -> weakref.ref[Any]:
    # Without a target, the reference is dead: the set ends at once.
    return weakref.ref(set() if target is None else target)


def _file(file: io.TextIOWrapper) -> Made:
    for name in ("stdout", "stderr", "stdin"):
        if getattr(sys, name) is file:
            return getattr, (sys, name)
    raise TypeError("an open file belongs to the process that opened it; pass its path")


def _queue(found: Any) -> Made:
    if not found.empty():
        raise TypeError("a copy would get nothing of what is put into it")
    size = getattr(found, "maxsize", None)
    return type(found), () if size is None else (size,)


_ANEW: dict[type, Callable[[Any], Made]] = {
    object: lambda _: (object, ()),
    _LOCK: lambda _: (threading.Lock, ()),
    _RLOCK: lambda _: (threading.RLock, ()),
    threading.Event: lambda found: (_make_event, (found.is_set(),)),
    threading.Condition: lambda found: (threading.Condition, (found._lock,)),
    threading.Semaphore: lambda found: (threading.Semaphore, (found._value,)),
    threading.BoundedSemaphore: lambda found: (threading.BoundedSemaphore, (found._initial_value,)),
    threading.Barrier: lambda found: (
        threading.Barrier,
        (found.parties, found._action, found._timeout),
    ),
    threading.local: lambda _: (threading.local, ()),
    **dict.fromkeys(_QUEUES, _queue),
    contextvars.ContextVar: _context_variable,
    CACHED: _cached_function,
    functools.cached_property: lambda found: (
        functools.cached_property,
        (found.func,),
        {"attrname": found.attrname},
    ),
    weakref.WeakValueDictionary: lambda found: (weakref.WeakValueDictionary, (dict(found),)),
    weakref.WeakKeyDictionary: lambda found: (weakref.WeakKeyDictionary, (dict(found),)),
    weakref.ref: lambda found: (_make_reference, (found(),)),
    io.TextIOWrapper: _file,
    struct.Struct: lambda found: (struct.Struct, (found.format,)),
    random.SystemRandom: lambda _: (random.SystemRandom, ()),
}

#: The same by name of the type, for libraries that may not be there.
_ANEW_BY_NAME: dict[str, Callable[[Any], Made]] = {
    "ctypes.CDLL": c_types.reduce_library,
    "ctypes.PyDLL": c_types.reduce_library,
    "ctypes.CDLL.__init__.<locals>._FuncPtr": c_types.reduce_function,
    "numpy.finfo": lambda found: (type(found), (found.dtype,)),
    "torch.finfo": lambda found: (type(found), (find_in_namespace("torch", found.dtype),)),
    "torch.iinfo": lambda found: (type(found), (find_in_namespace("torch", found.dtype),)),
}

#: Names of types whose objects have names in the type's module, though their own reduction does not say so.
_HELD_BY_MODULE = ("torch.memory_format", "sys.flags", "sys.float_info", "sys.version_info")

#: Names of types of libraries' objects that a script may refer to, and compare by `is` or use as the library has set them.
_OF_LIBRARIES = ("builtins.object", "_contextvars.ContextVar", "ctypes.CDLL", "ctypes.PyDLL")

#: Types of `typing` and `typing_extensions` whose objects are pickled by module and name, by name of the type; with the
#: arguments that make an object. Objects of private modules are made anew.
_NAMED_TYPES: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "NewType": lambda found: ((found.__name__, found.__supertype__), {}),
    "ParamSpec": lambda found: ((found.__name__,), {}),
    "TypeVarTuple": lambda found: ((found.__name__,), {}),
    "TypeAliasType": lambda found: (
        (found.__name__, found.__value__),
        {"type_params": found.__type_params__},
    ),
}


def _make_named(kind: type, module: str, arguments: Any, options: Any) -> Any:
    # These types take an object's module, which cannot always be set, from their caller.
    held = {"__name__": module, "kind": kind, "arguments": arguments, "options": options}
    return eval("kind(*arguments, **options)", held)


#: Type of the aliases that `type` statements make (from Python 3.12 on).
_ALIAS = getattr(typing, "TypeAliasType", None)


def _make_alias(module: str, name: str, held: list[Any]) -> Any:
    # The value of a `type` statement is computed when it is first read: by then, `held` has it.
    namespace: dict[str, Any] = {"__name__": module, "__held__": held}
    exec(f"type {name} = __held__[0]", namespace)
    return namespace[name]


#: Names of types whose objects belong to one process, with the reason. (A copy could be made, with new locks.)
_REFUSED = {
    "threading.Thread": "a thread runs in one process",
    "concurrent.futures._base.Future": "what it waits for happens in one process; pass its result",
    "concurrent.futures._base.Executor": "its threads or processes belong to one process",
    "subprocess.Popen": "only the process that started a program waits for it; pass its pid",
}

#: Reductions of compiled functions and models, by package.
_FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "torch": reduce_compiled,
    "tensorflow": reduce_traced,
}

#: Endings of the names of these functions' and models' types.
_COMPILED = ("Function", "RecursiveScriptModule", "OpOverload", "OpOverloadPacket")


class Referenced:
    """Placeholder in a pickle for an object that the other process imports by its name."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return resolve, self._name


def _parser(suppress: str, obj: Any) -> Any:
    # `argparse` compares this text by `is`.
    name = Referenced(("argparse", "SUPPRESS"))
    state = {key: name if value is suppress else value for key, value in vars(obj).items()}
    return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]


def _refuse(reason: str, obj: Any) -> NoReturn:
    raise TypeError(reason)


class NamedObjects:
    """Reduces objects of one pickle to a name, or to be made anew. `to_flow`: the pickle goes to the flow's process."""

    def __init__(self, to_flow: bool) -> None:
        self._to_flow = to_flow
        #: Functions that reduce an object, by type; `None`: pickle's default.
        self._rules: dict[type, Callable[[Any], Any] | None] = {}
        #: Names of the objects in private modules and the user's modules, by id of the object; `None`: not looked up.
        #: `cached_property` has one lock for all pickles up to Python 3.11, which a fork may inherit locked.
        self._names: dict[int, Name] | None = None
        self._users_names: dict[int, Name] | None = None
        #: A list with the value of each type alias, by id of the alias.
        self._alias_values: dict[int, list[Any]] = {}

    def reduce(self, obj: Any) -> Any:
        """Return the reduction of an object, no function, class or module; `NotImplemented`: pickle's default."""
        kind = type(obj)
        try:
            rule = self._rules[kind]
        except KeyError:
            rule = self._rules[kind] = self._rule(kind)
        return NotImplemented if rule is None else rule(obj)

    def _rule(self, kind: type) -> Callable[[Any], Any] | None:
        names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
        name = names[0]
        make = _ANEW.get(kind) or next(
            (_ANEW_BY_NAME[n] for n in names if n in _ANEW_BY_NAME), None
        )
        if make is not None:
            return functools.partial(self._anew, make)
        if kind is _ALIAS:
            return self._alias
        if kind.__module__ in ("typing", "typing_extensions") and kind.__name__ in _NAMED_TYPES:
            return functools.partial(self._private, _NAMED_TYPES[kind.__name__])
        if issubclass(kind, threading.local):
            return functools.partial(self._anew, lambda _: (kind, ()))
        for each in names:
            reason = _REFUSED.get(each)
            if reason is not None:
                return functools.partial(_refuse, reason)
        package = kind.__module__.partition(".")[0]
        if package == "argparse" and hasattr(kind, "_get_kwargs"):
            return functools.partial(_parser, importlib.import_module("argparse").SUPPRESS)
        if package in _FRAMEWORKS and kind.__name__.endswith(_COMPILED):
            return _FRAMEWORKS[package]
        if not _is_plain(kind) and name not in _HELD_BY_MODULE:
            own = isinstance(kind.__reduce__, types.FunctionType) and travels_by_value(kind)
            # pickle itself prefers a function that is registered for the type.
            return self._named_by_itself if own and kind not in copyreg.dispatch_table else None
        index = {id(value): name for name, value in _held_near(kind)}
        return functools.partial(self._singleton, kind, index) if index else None

    def _anew(self, make: Callable[[Any], Made], obj: Any) -> Any:
        if hasattr(obj, "__qualname__"):
            reference = find_reference(obj)
            if reference is not None:
                return resolve, reference
            name = own_name(obj)
        else:
            name = self._name_of(obj)
            if name is not None and is_importable(name[0]):
                return resolve, name
        return _made(name, not self._to_flow, make(obj))

    def _private(self, options: Callable[[Any], Any], obj: Any) -> Any:
        if not travels_by_value(obj):
            return NotImplemented
        made = _make_named, (type(obj), obj.__module__, *options(obj))
        return _made(own_name(obj), not self._to_flow, made)

    def _alias(self, obj: Any) -> Any:
        """Reduce the alias of a `type` statement, whose value may refer to the alias."""
        if obj.__type_params__ or not obj.__name__.isidentifier():
            return self._private(_NAMED_TYPES["TypeAliasType"], obj)
        if not travels_by_value(obj):
            return NotImplemented
        # The list is the same in each reduction of the alias, so the pickle has the value once.
        held = self._alias_values.setdefault(id(obj), [])
        if not held:
            held.append(obj.__value__)
        made = _make_alias, (obj.__module__, obj.__name__, held)
        return _made(own_name(obj), not self._to_flow, made)

    def _singleton(self, kind: type, index: Mapping[int, Name], obj: Any) -> Any:
        name = index.get(id(obj))
        if name is None or find_in_namespace(*name) is not obj:
            return NotImplemented
        if getattr(obj, "__dict__", None) or copyreg._slotnames(kind):  # type: ignore[attr-defined]
            # The object has a state, which may differ in the other process.
            return NotImplemented
        if is_importable(name[0]):
            return resolve, name
        return _made(name, not self._to_flow, (object.__new__, (kind,)))

    def _named_by_itself(self, obj: Any) -> Any:
        """Reduce an object of a private class with a `__reduce__`, which may return the name of a global variable."""
        reduction = obj.__reduce_ex__(5)
        if not isinstance(reduction, str):
            return reduction
        # The attributes are no state, which would replace those of an object that is there.
        attributes = getattr(obj, "__dict__", {})
        made = _make_plain, (type(obj), attributes)
        return _made((obj.__module__, reduction), not self._to_flow, made)

    def _name_of(self, obj: Any) -> Name | None:
        """Return the module and the name of an object; `None`: no module has the object under a name."""
        if self._names is None:
            self._names = _names_in(("__main__", *private_modules(), *users_modules()))
        name = self._names.get(id(obj))
        if _is_of_libraries(type(obj)) and (name is None or not is_importable(name[0])):
            found = _named_by_libraries(len(sys.modules)).get(id(obj))
            # A script that has imported the object has it under the same name. By now, the library may have another one.
            if found is not None and (name is None or name[1] == found[1]):
                return found if find_in_namespace(*found) is obj else name
        return name

    def importable_name(self, obj: Any) -> Name | None:
        """Return an object's name in an importable module of the user or of the object's type; `None`: no such name."""
        near = (name for name, value in _held_near(type(obj)) if value is obj)
        if self._users_names is None:
            self._users_names = _names_in(users_modules())
        name = self._users_names.get(id(obj)) or next(near, None)
        return name if name is not None and is_importable(name[0]) else None


@functools.lru_cache(maxsize=1)
def _named_by_libraries(modules: int) -> dict[int, Name]:
    """Return the names of all objects of the types `_OF_LIBRARIES`, by id; takes 0.1 s for two thousand modules."""
    # `modules`, the number of loaded modules, is the cache key.
    return {
        id(v): name
        for name, v in _held(sys.modules)
        if _is_of_libraries(type(v)) and is_importable(name[0])
    }


def _is_of_libraries(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in _OF_LIBRARIES


def own_name(obj: Any) -> Name | None:
    """Return the module and the qualified name of an object; `None`: its module has another object there, or none."""
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    return (module, name) if find_in_namespace(module, name) is obj else None


def _is_plain(kind: type) -> bool:
    """Return whether pickle's default, a reduction to attributes, is used for objects of a type."""
    as_python: Any = object
    return (
        kind.__reduce_ex__ is as_python.__reduce_ex__
        and kind.__reduce__ is as_python.__reduce__
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind not in copyreg.dispatch_table
        and all(base is object or base.__module__ != "builtins" for base in kind.__mro__)
    )


def _held_near(kind: type) -> Iterator[tuple[Name, Any]]:
    """Yield name and object for each object of a type in the type's module and the packages around it."""
    name = kind.__module__
    while isinstance(name, str) and name:
        yield from (each for each in _held([name]) if type(each[1]) is kind)
        name = name.rpartition(".")[0]


def _held(modules: Any) -> Iterator[tuple[Name, Any]]:
    """Yield each attribute of some modules: its module and name, and its value."""
    for module in list(modules):
        for name, value in list((look_at(module, "__dict__") or {}).items()):
            yield (module, name), value


def _names_in(modules: Any) -> dict[int, Name]:
    return {id(value): name for name, value in _held(modules)}


def _made(name: Name | None, keeps: bool, made: Made) -> Any:
    """Return the reduction of an object with a name; `keeps`: the other process stores the object under its name."""
    make, arguments, *state = made
    return (_make, (name, keeps, make, arguments), *state)


def _make(
    name: Name | None, keeps: bool, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Return the object that this process has under a name, else a new one."""
    made = make(*arguments)
    if name is None:
        return made
    found = find_in_namespace(*name)
    if type(found) is type(made):
        return found
    if keeps:
        keep(name, made)
    return made


def _make_plain(kind: type, attributes: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    if attributes:
        vars(made).update(attributes)
    return made


# Functions that wrap a function.

#: The code of all functions that `functools.singledispatch` makes.
_DISPATCH_CODE = functools.singledispatch(_make_event).__code__  # type: ignore[attr-defined]


def reduce_function(function: types.FunctionType, keeps: bool) -> Any:
    """Return the reduction of a wrapper that `singledispatch`, PyTorch or pydantic made, or `NotImplemented`.

    The other process wraps the wrapped function again, with all options that can be read. `keeps`: that process stores
    the new wrapper under its name.
    """
    made = _reduce_wrapper(function)
    return made if made is NotImplemented else _made(own_name(function), keeps, made)


def _reduce_wrapper(function: types.FunctionType) -> Any:
    if function.__code__ is _DISPATCH_CODE:
        # The registered functions may refer to the dispatching function, so they are its state.
        state = dict(function.registry), _own_attributes(function)  # type: ignore[attr-defined]
        return _new_dispatch, (), state, None, None, _set_dispatch
    if _made_by(function, "torch"):
        return reduce_compiled(function)
    if _made_by(function, "pydantic"):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "wrapper" not in cells:
            # Another decorator of pydantic, such as its first version's.
            return NotImplemented
        options: Any = getattr(cells["wrapper"].cell_contents, "__self__", None)
        config = getattr(getattr(options, "config_wrapper", None), "config_dict", None)
        validate_return = bool(getattr(options, "validate_return", False))
        return _make_validated, (function.__wrapped__, config, validate_return)  # type: ignore[attr-defined]
    return NotImplemented


def _made_by(function: types.FunctionType, package: str) -> bool:
    made = function.__globals__.get("__name__", "")
    return made.partition(".")[0] == package and hasattr(function, "__wrapped__")


def _not_set(*_: Any) -> None:
    """Stands for the function of `object` in a new dispatching function."""


def _new_dispatch() -> Any:
    return functools.singledispatch(_not_set)


def _set_dispatch(dispatch: Any, state: Any) -> None:
    if dispatch.registry[object] is not _not_set:
        # This process has it: its functions and attributes are not replaced.
        return
    functions, attributes = state
    for kind, function in functions.items():
        dispatch.register(kind, function)
    functools.update_wrapper(dispatch, functions[object])
    vars(dispatch).update(attributes)


def _make_validated(function: Callable[..., Any], config: Any, validate_return: bool) -> Any:
    decorate = importlib.import_module("pydantic").validate_call
    return decorate(config=config, validate_return=validate_return)(function)
