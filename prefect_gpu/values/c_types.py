"""Pickle reductions of `ctypes`: its types without a name, the layout of a script's structures, and loaded libraries.

The other process loads a library again, by its name and in the default mode. A pointer and a callback are addresses in
one process: `ctypes` refuses to pickle them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

#: Attributes that determine how a structure lies in memory. The last one fixes the layout.
_LAYOUT = ("_pack_", "_align_", "_layout_", "_anonymous_", "_fields_")

#: Attributes that a class derived from an abstract type of `ctypes` must have in its body.
_BODY = ("_type_", "_length_", "_flags_", "_restype_", "_argtypes_")

#: Attributes of a library's function that a program sets.
_PROTOTYPE = ("argtypes", "restype", "errcheck")


def is_c_type(kind: Any) -> bool:
    """Return whether a class is a type of `ctypes`, or derived from one."""
    # A process that does not use `ctypes` does not import it here.
    return any(each.__module__ == "_ctypes" for each in (kind, *type(kind).__mro__))


def reduce_type(kind: type) -> Any:
    """Return the reduction of a type that `ctypes` itself has made; `NotImplemented`: it is another class."""
    try:
        function, arguments = _reduce_type(kind)
        # A class that the program derives from such a type is another one.
        return (function, arguments) if function(*arguments) is kind else NotImplemented
    except (AttributeError, TypeError):
        # An abstract type, or a class that has a name of its own.
        return NotImplemented


def _reduce_type(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    import ctypes
    from _ctypes import CFuncPtr

    simple, pointer, function = ctypes._SimpleCData, ctypes._Pointer, CFuncPtr
    if issubclass(kind, type):
        # No module has a metaclass of `ctypes` under its name.
        bases = (ctypes.Structure, ctypes.Union, ctypes.Array, simple, pointer, function)
        return type, (next((each for each in bases if type(each) is kind), None),)
    if issubclass(kind, ctypes.Array):
        return _array_type, (Layout(kind._type_), kind._type_, kind._length_)
    if issubclass(kind, pointer):
        return _pointer_type, (kind._type_,)
    if issubclass(kind, function):
        return _function_type, (kind._flags_, kind._restype_, *kind._argtypes_)
    # A number in the byte order of other machines.
    names = "__ctype_le__", "__ctype_be__"
    native, other = names if sys.byteorder == "little" else names[::-1]
    of_machine = getattr(kind, native)
    # A single byte has no order: both are the type itself.
    return getattr, (None if of_machine is kind else of_machine, other)


def _array_type(_layout: None, kind: Any, length: int) -> Any:
    # Unpickling the first argument has given a structure its layout, without which it has no size.
    return kind * length


def _pointer_type(target: Any) -> Any:
    # pickle would find the function in `_ctypes`, and a later import of `ctypes` drops all pointer types.
    import ctypes

    return ctypes.POINTER(target)


def _function_type(flags: int, result: Any, *arguments: Any) -> Any:
    import ctypes
    from _ctypes import FUNCFLAG_PYTHONAPI, FUNCFLAG_USE_ERRNO

    if flags & FUNCFLAG_PYTHONAPI:
        return ctypes.PYFUNCTYPE(result, *arguments)
    return ctypes.CFUNCTYPE(result, *arguments, use_errno=bool(flags & FUNCFLAG_USE_ERRNO))


class Layout:
    """Gives structures of a script their layout in the other process, and first to the structures that they contain.

    A pickle has it before all that depends on the size: methods, which may use objects of the structure, derived
    structures and arrays. Structures may refer to each other, so several layouts of a structure may be in one pickle.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds

    def __reduce__(self) -> Any:
        found: dict[type, dict[str, Any]] = {}
        for kind in self._kinds:
            _find_layouts(kind, found)
        return _set_layouts, (tuple(found.items()),)


def _find_layouts(kind: type, found: dict[type, dict[str, Any]]) -> None:
    """Add the layout of a structure, after those of its bases and of the structures that it contains."""
    own = vars(kind)
    if kind in found or "_fields_" not in own:
        return
    for part in (*kind.__bases__, *(field[1] for field in own["_fields_"])):
        _find_layouts(part, found)
    found[kind] = {name: own[name] for name in _LAYOUT if name in own}
    # The class's own list may be half pickled.
    found[kind]["_fields_"] = [tuple(field) for field in own["_fields_"]]


def _set_layouts(layouts: Any) -> None:
    for kind, layout in layouts:
        for name, value in layout.items():
            # A class that is there has its layout.
            if name not in vars(kind):
                setattr(kind, name, value)


def with_body(kind: type, arguments: Any, state: Any) -> tuple[Any, Any]:
    """Return a class's pickled parts with what `ctypes` needs in its body, and without what its layout makes."""
    maker, name, bases, attributes, *others = arguments
    attributes = {**attributes, **{n: v for n, v in vars(kind).items() if n in _BODY}}
    found, slots = state
    made = {n for n, value in found.items() if type(value).__name__ == "CField"}
    made.update(_LAYOUT, _BODY)
    found = {n: value for n, value in found.items() if n not in made}
    return (maker, name, bases, attributes, *others), (found, slots)


def reduce_library(library: Any) -> Any:
    """Return the reduction of a loaded library, with the prototypes of its functions and with added attributes."""
    from _ctypes import FUNCFLAG_USE_ERRNO

    use_errno = bool(library._FuncPtr._flags_ & FUNCFLAG_USE_ERRNO)
    arguments = type(library), library._name, use_errno
    if _load(*arguments)._handle != library._handle:
        raise TypeError("it was loaded by a handle, which belongs to one process")
    prototypes, attributes = {}, {}
    for name, value in vars(library).items():
        if isinstance(value, library._FuncPtr) and value.__name__ == name:
            prototypes[name] = _prototype(value)
        elif name not in ("_name", "_handle", "_FuncPtr"):
            attributes[name] = value
    return _load, arguments, (prototypes, attributes), None, None, _set_library


def _load(kind: Any, name: str | None, use_errno: bool) -> Any:
    import ctypes

    # The constructor of a derived class may take other arguments.
    library = kind.__new__(kind)
    ctypes.CDLL.__init__(library, name, use_errno=use_errno)
    return library


def _set_library(library: Any, state: Any) -> None:
    prototypes, attributes = state
    for name, prototype in prototypes.items():
        _set_prototype(getattr(library, name), prototype)
    vars(library).update(attributes)


def reduce_function(function: Any) -> Any:
    """Return the reduction of a function of a library."""
    library, name = (function._objects or {}).get("0"), function.__name__
    if library is None:
        raise TypeError("it has no library, only an address in one process")
    if vars(library).get(name) is function:
        return getattr, (library, name)
    state = _prototype(function)
    return operator.getitem, (library, name), state, None, None, _set_prototype


def _prototype(function: Any) -> dict[str, Any]:
    values = {name: getattr(function, name) for name in _PROTOTYPE}
    return {name: v for name, v in values.items() if v is not None or name == "restype"}


def _set_prototype(function: Any, prototype: Mapping[str, Any]) -> None:
    for name, value in prototype.items():
        setattr(function, name, value)
