"""Enums that travel by value: each member has its value, its data and its attributes, whatever made them in the script.

Cloudpickle makes members from their values alone, without the enum's `__new__` and `__init__`, and without aliases.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, EnumMeta
from typing import Any, NamedTuple, TypeAlias

#: A type of Python's own code, and the arguments of its `__new__`.
Data: TypeAlias = tuple[type, tuple[Any, ...]]

#: Attributes that `enum` itself gives to members.
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"}


class Parts(NamedTuple):
    """The parts from which `make` makes an enum. The attributes of the enum and of its members are set afterwards."""

    metaclass: type
    bases: tuple[type, ...]
    name: str
    qualified_name: str
    module: str
    #: Value and data of each member and alias, by name.
    members: Mapping[str, tuple[Any, Data]]
    #: See `enum.FlagBoundary`; `None`: that of the base class, or Python 3.10.
    boundary: Any


def reduce(kind: type[Enum], arguments: Any, state: Any) -> Any:
    """Return the callable that makes an enum, its arguments and its state, from those of cloudpickle.

    The state is a pair: the attributes of the enum by name, and those of its members by name of the member.
    """
    bases, name, qualified_name, _, module, *_ = arguments
    members = kind.__members__
    found, _ = state
    boundary = getattr(kind, "_boundary_", None)
    boundary = None if boundary is getattr(bases[-1], "_boundary_", None) else boundary
    made_of = {each: (member._value_, _data(member)) for each, member in members.items()}
    held = {
        each: own
        for each, member in members.items()
        if (own := {k: v for k, v in vars(member).items() if k not in _OF_ENUM})
    }
    attributes = {k: v for k, v in found.items() if k not in members}
    parts = Parts(type(kind), bases, name, qualified_name, module, made_of, boundary)
    return make, tuple(parts), (attributes, held)


def _data(member: Enum) -> Data:
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

    def __init__(self, value: Any, data: Data) -> None:
        self.value = value
        self.base, self.arguments = data


def _new(kind: Any, member: Any) -> Any:
    # Of an enum of tuples, `enum` passes all arguments as one tuple.
    while isinstance(member, tuple):
        (member,) = member
    made = member.base.__new__(kind, *member.arguments)
    made._value_ = member.value
    return made


def _init(member: Any, *_: Any) -> None:
    """Do nothing: the attributes that the script's `__init__` sets are sent."""


#: Attributes of an enum while it is made, so that nothing of the script runs. Those of the script are set later.
_MEANWHILE = {"__new__": _new, "__init__": _init, "__reduce_ex__": Enum.__reduce_ex__}


def make(*parts: Any) -> type:
    """Return an enum without the attributes of the enum and its members, from the arguments that `reduce` returns."""
    metaclass, bases, name, qualified_name, module, members, boundary = Parts(*parts)
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
