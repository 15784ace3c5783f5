"""Functions and classes that travel by value (pickled with their code), and their reconstruction.

Functions and classes of importable modules travel by reference, also below a decorator such as Prefect's `@task`; all
others travel by value. In the receiving process, functions of one module share the global variables of that module or
of its stand-in (`stand_ins`). Existing functions, classes and variables of a name are not replaced. A function in a
task's result is a copy with the values that its global variables had in the task's process.

Cloudpickle takes functions and classes apart and rebuilds them; this module chooses them and their namespaces.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, EnumMeta
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
from cloudpickle import cloudpickle as internals

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.frameworks.registry import find_in_namespace, nested_code
from prefect_gpu.frameworks.torch_adapter import reduce_compiled
from prefect_gpu.values import c_types, made_anew
from prefect_gpu.values.importable import find_reference, is_importable, resolve, travels_by_value
from prefect_gpu.values.stand_ins import keep, namespace

#: The module and the qualified name of a function or class.
Key: TypeAlias = tuple[str, str]

#: Text that cloudpickle 3.1.3 and later write in place of the file name of code.
_NO_FILE = "<dynamic-code>"

#: Types of immutable values, for which a copy is as good as the original.
_CONSTANTS = (int, float, complex, str, bytes, bool, Enum)

#: Types of values that travel by reference or by value, never by attributes.
_DEFINITIONS = (type, types.ModuleType, types.FunctionType)

#: Types of values that stand in annotations.
_IN_ANNOTATIONS = (type, types.ModuleType, types.GenericAlias, types.UnionType, typing.TypeVar)

#: Received functions and classes whose attributes this process has set.
_finished: weakref.WeakSet[Any] = weakref.WeakSet()

#: In a task's process: classes that were received by value from the flow's process.
_from_flow: weakref.WeakSet[type] = weakref.WeakSet()

#: `classes`: classes received by this thread since `arrivals` began.
_arriving = threading.local()


@contextlib.contextmanager
def arrivals() -> Iterator[None]:
    """Record the classes that are unpickled by value in a `with` block as classes of the flow's process."""
    # Per thread: other threads may receive classes of other processes.
    outer = getattr(_arriving, "classes", None)
    arrived: list[type] = []
    _arriving.classes = arrived
    try:
        yield
    finally:
        _arriving.classes = outer
    _from_flow.update(arrived)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped base
    """Pickles importable functions, classes and modules by reference, and others by value.

    Args:
        file: Object with a `write` method.
        to_flow: The value goes to the flow's process. Classes that were received from there are sent by id.
        by_name: Functions that a module has under their name are sent by name, not as copies: the flow has them.
        lacking: Names that the other process has not found in a module that it could import.
        with_hints: Global variables that annotations name as text are sent with functions and classes.
        options: Arguments of `pickle.Pickler`.
    """

    def __init__(
        self,
        file: Any,
        *,
        to_flow: bool = False,
        by_name: bool = False,
        lacking: frozenset[Key] = frozenset(),
        with_hints: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(file, **{"protocol": 5, **options})
        self._to_flow = to_flow
        self._by_name = by_name
        self._lacking = lacking
        self._with_hints = with_hints
        self._named = made_anew.NamedObjects(to_flow)

    def reducer_override(self, obj: Any) -> Any:
        """Return the pickle reduction of an object; `NotImplemented`: pickle's default is right."""
        # `isinstance` reads `__class__`, which would load a lazily loaded module.
        kind = type(obj)
        if issubclass(kind, types.ModuleType):
            return self._module(obj)
        if issubclass(kind, type):
            return self._class(obj)
        if kind is types.FunctionType:
            return self._function(obj)
        if kind is types.CodeType:
            make, parts = self.dispatch_table[types.CodeType](obj)
            names = {_NO_FILE: obj.co_filename}
            return make, tuple(names.get(p, p) if isinstance(p, str) else p for p in parts)
        if kind is typing.TypeVar and travels_by_value(obj):
            return internals._make_typevar, internals._decompose_typevar(obj)
        return self._named.reduce(obj)

    def _module(self, module: types.ModuleType) -> Any:
        name = object.__getattribute__(module, "__dict__").get("__name__")
        if isinstance(name, str) and sys.modules.get(name) is module:
            if travels_by_value_of_module(name):
                return _private_module, (name, _module_attributes(vars(module)))
            # Cloudpickle's own reduction would read the module's attributes.
            return internals.subimport, (name,)
        reduction = reduce_compiled(module)
        if reduction is not NotImplemented:
            # A namespace of PyTorch's operators.
            return reduction
        # By value: `sys.modules` may have another module of this name.
        held = {k: v for k, v in vars(module).items() if k != "__builtins__"}
        return internals.dynamic_subimport, (name, held)

    def _class(self, obj: Any) -> Any:
        if self._to_flow and obj in _from_flow:
            # The flow's process finds its own class by cloudpickle's id of the class.
            tracker_id = internals._get_or_create_tracker_id(obj)
            return internals._lookup_class_or_track, (tracker_id, None)
        of_c = c_types.is_c_type(obj)
        if of_c and (made := c_types.reduce_type(obj)) is not NotImplemented:
            return made
        reduction = super().reducer_override(obj)
        if reduction is NotImplemented and (travels_by_value(obj) or self._is_lacking(obj)):
            reduction = internals._dynamic_class_reduce(obj)
        if reduction is NotImplemented or len(reduction) != 6:
            return reduction
        make, arguments, state, *_ = reduction
        if make is internals._make_skeleton_enum:
            make, arguments, state = _reduce_enum(obj, arguments, state)
        else:
            arguments, state = _with_names(obj, arguments, state)
        of_bases = layout = None
        if of_c:
            arguments, state = c_types.with_body(obj, arguments, state)
            of_bases, layout = c_types.Layout(*obj.__bases__), c_types.Layout(obj)
        key = None if self._to_flow else made_anew.own_name(obj)
        # `get_annotations` leaves out annotations of base classes, and does not evaluate text.
        hints = self._hints(inspect.get_annotations(obj), obj.__module__)
        tracker_id = internals._get_or_create_tracker_id(obj)
        return (
            _make_class, (of_bases, key, tracker_id, make, *arguments),
            (layout, hints, state), None, None, _set_class,
        )  # fmt: skip

    def _function(self, obj: types.FunctionType) -> Any:
        lacking = self._is_lacking(obj)
        if not lacking:
            reference = find_reference(obj)
            if reference is not None:
                *_, steps = reference
                return (resolve, reference) if steps else NotImplemented
        if self._by_name and (key := made_anew.own_name(obj)) is not None:
            return resolve, key
        reduction = made_anew.reduce_function(obj, not self._to_flow)
        if reduction is not NotImplemented:
            return reduction
        _, arguments, (attributes, slots), *_ = self._dynamic_function_reduce(obj)
        code, base, *others = arguments
        variables = {**slots["__globals__"], **_used_by_classes(obj)}
        patches = self._patches(obj, variables)
        module = self._namespace_of(obj, variables)
        if module is not None and is_importable(module) and not lacking:
            # The importable module has its variables. Only functions and classes of private modules are sent.
            variables = {n: v for n, v in variables.items() if _is_private(v)}
        slots["__globals__"] = {n: self._by_reference(v) for n, v in variables.items()}
        hints = self._hints(obj.__annotations__, obj.__module__, obj.__globals__)
        key = None if self._to_flow else made_anew.own_name(obj)
        return (
            _make_function, (module, key, code, base, *others), (patches, hints, (attributes, slots)),
            None, None, _set_function,
        )  # fmt: skip

    def _is_lacking(self, obj: Any) -> bool:
        """Return whether the other process lacks a function or class, or the class around it."""
        return (obj.__module__, obj.__qualname__.partition(".")[0]) in self._lacking

    def _namespace_of(
        self, function: types.FunctionType, variables: Mapping[str, Any]
    ) -> str | None:
        """Return the module whose global variables a function shares; `None`: the function gets copies of its own."""
        name = str(function.__globals__.get("__name__"))
        if self._to_flow or look_at(name, "__dict__") is not function.__globals__:
            return None
        if is_importable(name) and not _has_state(function, variables):
            # The used variables are the same in all processes: the module need not be imported.
            return None
        return name

    def _by_reference(self, value: Any) -> Any:
        """Return a global variable's value or, if pickling fails, a reference to its name in an importable module."""
        if self._to_flow or value is None or isinstance(value, (*_CONSTANTS, *_DEFINITIONS)):
            return value
        name = self._named.importable_name(value)
        if name is None:
            return value
        try:
            # The output of this trial is dropped at once, since the value may be large.
            nowhere = types.SimpleNamespace(write=lambda data: None)
            trial = ByValuePickler(nowhere, with_hints=False, buffer_callback=lambda _: None)
            trial.dump(value)
        except Exception:  # pickling may raise anything
            return made_anew.Referenced(name)
        return value

    def _hints(
        self, annotations: Mapping[str, Any], module: str, held: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the global variables of a private module that annotations name as text; `held`: all its variables."""
        if not self._with_hints or self._to_flow or is_importable(module):
            return {}
        if held is None:
            held = look_at(module, "__dict__") or {}
        found = {}
        for name in dict.fromkeys(_names_in(annotations.values())):
            value = held.get(name)
            if isinstance(value, _IN_ANNOTATIONS) or type(value).__module__ == "typing":
                found[name] = value
        return found

    def _patches(
        self, function: types.FunctionType, variables: Mapping[str, Any]
    ) -> list[tuple[types.ModuleType, str, Any]]:
        """Return module, name and value of what a function reads from modules and a child could not import."""
        if self._to_flow:
            return []
        found = []
        names = [name for code in nested_code(function.__code__) for name in code.co_names]
        for module in variables.values():
            if not issubclass(type(module), types.ModuleType):
                continue
            held = object.__getattribute__(module, "__dict__")
            private = travels_by_value_of_module(held.get("__name__", ""))
            for name in dict.fromkeys(names):
                value = held.get(name)
                added = private and isinstance(value, (type, types.FunctionType))
                if added or _is_private(value):
                    found.append((module, name, value))
        return found


def travels_by_value_of_module(name: str) -> bool:
    """Return whether functions of a module travel by value: a fresh interpreter cannot import its top-level package."""
    return not is_importable(name.partition(".")[0])


def _is_private(value: Any) -> bool:
    """Return whether a value is a function or class of a user's module that a child cannot import."""
    return (
        isinstance(value, (type, types.FunctionType))
        and travels_by_value(value)
        and registry.is_users(value.__module__)
    )


def _module_attributes(variables: Mapping[str, Any]) -> dict[str, Any]:
    names = "__package__", "__path__", "__file__"
    return {
        name: list(v) if name == "__path__" else v for name in names if (v := variables.get(name))
    }


def _with_names(kind: type, arguments: Any, state: Any) -> tuple[Any, Any]:
    """Return a class's pickled parts with its qualified name, its `__slots__` and bases that its metaclass accepts.

    Cloudpickle leaves out the first two. Without the name, objects of a nested class cannot be pickled; without the
    slots they would have a `__dict__`.
    """
    maker, name, bases, attributes, *others = arguments
    attributes = {**attributes, "__qualname__": kind.__qualname__}
    found, slots = state
    own = vars(kind)
    if maker.__name__ == "_TypedDictMeta" and "__orig_bases__" not in own:
        # Up to Python 3.11, the only base of `TypedDict("X", {...})`, and of a class derived from a `TypedDict`, is
        # `dict`, which the metaclass refuses.
        bases = (find_in_namespace(maker.__module__, "TypedDict"),)
    # `typing.NamedTuple` adds the slots.
    if "__slots__" in own and typing.NamedTuple not in bases:
        attributes["__slots__"] = own["__slots__"]
    if own.get("__slots__"):
        found = {k: v for k, v in found.items() if not isinstance(v, types.MemberDescriptorType)}
    return (maker, name, bases, attributes, *others), (found, slots)


def _used_by_classes(function: types.FunctionType) -> dict[str, Any]:
    """Return the global variables used in class bodies inside a function, which cloudpickle does not find."""
    held = function.__globals__
    bodies = (c for c in nested_code(function.__code__) if not c.co_flags & inspect.CO_OPTIMIZED)
    return {name: held[name] for code in bodies for name in code.co_names if name in held}


def _has_state(function: types.FunctionType, variables: Mapping[str, Any]) -> bool:
    """Return whether a function of an importable module uses global variables whose values may differ by process."""
    module = function.__globals__.get("__name__")
    if any(_stores_globals(code) for code in nested_code(function.__code__)):
        return True
    for value in variables.values():
        if issubclass(type(value), types.ModuleType):
            continue
        if isinstance(value, (type, types.FunctionType)):
            if value.__module__ == module:
                return True
        elif not isinstance(value, _CONSTANTS):
            return True
    return False


@functools.cache
def _stores_globals(code: types.CodeType) -> bool:
    import dis

    return any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(code))


def _names_in(annotations: Iterable[Any]) -> Iterator[str]:
    """Yield the names that annotations contain as text, also inside `Optional["Name"]`."""
    # A child rarely needs this module.
    import ast

    for each in annotations:
        if isinstance(each, typing.ForwardRef):
            each = each.__forward_arg__
        if isinstance(each, str):
            try:
                tree = ast.parse(each.strip(), mode="eval")
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    yield node.id
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from _names_in([node.value])
        else:
            yield from _names_in(getattr(each, "__args__", None) or ())


# The receiving process.


def _private_module(name: str, attributes: Mapping[str, Any]) -> types.ModuleType:
    namespace(name, attributes)
    return sys.modules[name]


def find(key: Key | None) -> Any:
    """Return this process's function or class of a name, without asking the flow's process; `None`: no such object."""
    if key is None:
        return None
    found = find_in_namespace(*key)
    # Attributes that a class inherits do not count.
    is_it = isinstance(found, (type, types.FunctionType)) and key == (
        found.__module__,
        found.__qualname__,
    )
    return found if is_it else None


def _make_function(
    module: str | None, key: Key | None, code: types.CodeType, base: dict[str, Any], *others: Any
) -> types.FunctionType:
    found = find(key)
    if isinstance(found, types.FunctionType):
        return found
    if module is None:
        return internals._make_function(code, base, *others)  # type: ignore[no-any-return]
    name, defaults, closure = others
    function = types.FunctionType(code, namespace(module, base), name, defaults, closure)
    keep(key, function)
    return function


def _set_function(function: types.FunctionType, state: Any) -> None:
    patches, hints, (attributes, slots) = state
    for module, name, value in patches:
        vars(module).setdefault(name, value)
    exist = function.__globals__
    missing = {k: v for k, v in {**hints, **slots["__globals__"]}.items() if k not in exist}
    if function in _finished:
        exist.update(missing)
        return
    _finished.add(function)
    internals._function_setstate(function, (attributes, {**slots, "__globals__": missing}))


def _make_class(
    _of_bases: None, key: Key | None, tracker_id: str, make: Callable[..., type], *arguments: Any
) -> type:
    # Unpickling the first argument has given the bases their layout.
    found = find(key)
    if not isinstance(found, type):
        found = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    made: type | None = found
    if made is None:
        made = _new_class(make, arguments)
        internals._lookup_class_or_track(tracker_id, made)
    keep(key, made)
    return made


def _new_class(make: Callable[..., type], arguments: Any) -> type:
    """Make a class. What the script's metaclass and `__init_subclass__` have done arrives with the script's variables.

    Those of a library are called, to register the class in this process. The keywords after the base classes are not
    known: an `__init_subclass__` that needs them is left out.
    """
    if make is internals._make_skeleton_class and arguments[0] in _finished:
        arguments = functools.partial(_call_metaclass, arguments[0]), *arguments[1:]
    bases = next(each for each in arguments if isinstance(each, tuple))
    around = {c: None for base in types.resolve_bases(bases) for c in base.__mro__}
    with _without_hooks(c for c in around if c in _finished):
        try:
            return make(*arguments)
        except TypeError:
            hooks = [c for c in around if isinstance(_hook_of(c), classmethod)]
            if not hooks:
                raise
    with _without_hooks(hooks):
        return make(*arguments)


def _call_metaclass(metaclass: type, name: str, bases: Any, body: dict[str, Any]) -> type:
    """Make a class of a script's metaclass with the `__new__` and `__init__` of the library's class below it."""
    library: Any = _of_library(metaclass)
    made: type = library.__new__(metaclass, name, bases, body)
    library.__init__(made, name, bases, body)
    return made


def _of_library(metaclass: type) -> type:
    """Return the first class in a metaclass's MRO that does not come from the script."""
    return next(each for each in metaclass.__mro__ if each not in _finished)


class _Unguarded:
    """Stands for a class in cloudpickle's `_class_setstate`: a script's metaclass may refuse to set attributes."""

    def __init__(self, made: type) -> None:
        vars(self)["made"] = made

    def __setattr__(self, name: str, value: Any) -> None:
        library: Any = _of_library(type(self.made))
        library.__setattr__(self.made, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


def _hook_of(kind: type) -> Any:
    return vars(kind).get("__init_subclass__")


@contextlib.contextmanager
def _without_hooks(kinds: Iterable[type]) -> Iterator[None]:
    """Take `__init_subclass__` away from classes during a `with` block."""
    taken = [(kind, hook) for kind in kinds if (hook := _hook_of(kind)) is not None]
    for kind, _ in taken:
        type.__delattr__(kind, "__init_subclass__")
    try:
        yield
    finally:
        for kind, hook in taken:
            type.__setattr__(kind, "__init_subclass__", hook)


def _set_class(made: type, state: Any) -> None:
    _, hints, parts = state
    if hints:
        variables = namespace(made.__module__, {})
        for name, value in hints.items():
            variables.setdefault(name, value)
    # An existing class keeps its attributes, and its methods keep their identity.
    if made not in _finished:
        _finished.add(made)
        arrived: list[type] | None = getattr(_arriving, "classes", None)
        if arrived is not None:
            arrived.append(made)
        internals._class_setstate(_Unguarded(made), parts)
        for name, attributes in parts[1].items():
            vars(made.__members__[name]).update(attributes)  # type: ignore[attr-defined]


# Enums: each member has its value, its data and its attributes, whatever made them in the script. Cloudpickle makes
# members from their values alone, without the enum's `__new__` and `__init__`, and without aliases.

#: A type of Python's own code, and the arguments of its `__new__`.
_Data: TypeAlias = tuple[type, tuple[Any, ...]]

#: Attributes that `enum` itself gives to members.
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"}


class _EnumParts(NamedTuple):
    """The parts from which `_make_enum` makes an enum. The attributes of the enum and of its members are set afterwards."""

    metaclass: type
    bases: tuple[type, ...]
    name: str
    qualified_name: str
    module: str
    #: Value and data of each member and alias, by name.
    members: Mapping[str, tuple[Any, _Data]]
    #: See `enum.FlagBoundary`; `None`: that of the base class, or Python 3.10.
    boundary: Any


def _reduce_enum(kind: type[Enum], arguments: Any, state: Any) -> Any:
    """Return the callable that makes an enum, its arguments and its state, from those of cloudpickle.

    The state is a pair: the attributes of the enum by name, and those of its members by name of the member.
    """
    bases, name, qualified_name, _, module, *_ = arguments
    members = kind.__members__
    found, _ = state
    boundary = getattr(kind, "_boundary_", None)
    boundary = None if boundary is getattr(bases[-1], "_boundary_", None) else boundary
    made_of = {each: (member._value_, _member_data(member)) for each, member in members.items()}
    held = {
        each: own
        for each, member in members.items()
        if (own := {k: v for k, v in vars(member).items() if k not in _OF_ENUM})
    }
    attributes = {k: v for k, v in found.items() if k not in members}
    parts = _EnumParts(type(kind), bases, name, qualified_name, module, made_of, boundary)
    return _make_enum, tuple(parts), (attributes, held)


def _member_data(member: Enum) -> _Data:
    """Return how the data of a member, as in `class Level(int, Enum)`, is made."""
    for base in type(member)._member_type_.__mro__:  # type: ignore[attr-defined]
        if hasattr(vars(base).get("__new__"), "__self__"):
            break
    if hasattr(base, "__getnewargs__"):
        return base, base.__getnewargs__(member)
    if base.__reduce__ is not object.__reduce__:
        return base, base.__reduce__(member)[1]
    return base, ()


class _Member:
    """A member's value and data, in the place of what the script gives to `__new__` and `__init__`."""

    def __init__(self, value: Any, data: _Data) -> None:
        self.value = value
        self.base, self.arguments = data


def _new_member(kind: Any, member: Any) -> Any:
    # Of an enum of tuples, `enum` passes all arguments as one tuple.
    while isinstance(member, tuple):
        (member,) = member
    made = member.base.__new__(kind, *member.arguments)
    made._value_ = member.value
    return made


def _init_member(member: Any, *_: Any) -> None:
    """Do nothing: the attributes that the script's `__init__` sets are sent."""


#: Attributes of an enum while it is made, so that nothing of the script runs. Those of the script are set later.
_MEANWHILE = {"__new__": _new_member, "__init__": _init_member, "__reduce_ex__": Enum.__reduce_ex__}


def _make_enum(*parts: Any) -> type:
    """Return an enum without the attributes of the enum and its members, from the arguments that `_reduce_enum` returns."""
    metaclass, bases, name, qualified_name, module, members, boundary = _EnumParts(*parts)
    body: Any = EnumMeta.__prepare__(name, bases)
    for each, (value, data) in members.items():
        body[each] = _Member(value, data)
    for each, function in _MEANWHILE.items():
        body[each] = function
    options = {} if boundary is None else {"boundary": boundary}
    made: type = EnumMeta.__new__(metaclass, name, bases, body, **options)
    # By `is`: a member's data may have an `==` of its own.
    for each, value in [*vars(made).items()]:
        if any(value is function for function in _MEANWHILE.values()):
            type.__delattr__(made, each)
    made.__module__, made.__qualname__ = module, qualified_name
    return made
