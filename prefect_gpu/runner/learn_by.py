"""Digests of the values that `gpu:learn_by` names: equal values, equal digests, on every host.

A history is kept for each digest, so a digest must not depend on the process, the host, the order of a
dictionary, or the module of a class (in a script that is `__main__`). Of the values themselves only short ones that
are no secrets are kept, in words, for reports.
Tags are read in `policy`; histories are in `scheduling.history`.

| value | counts by |
|---|---|
| number | its value, `32` as `32.0`; `True` is no number |
| text, bytes, path, date, time, duration, UUID, range | its text |
| dtype of any library, `torch.device` | its text |
| enum | class and member |
| list or tuple, set, dict | its items; the order counts in lists and tuples only |
| dataclass, pydantic model | class and fields |
| array, tensor | class, dtype and shape, but not its contents |
| class, function | its qualified name |
| anything else | the qualified name of its class |
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import hashlib
import inspect
import json
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from prefect_gpu.errors import PolicyError
from prefect_gpu.reports.markup import is_secret

#: Characters of a digest: 48 bits are enough to tell the values of one task apart.
DIGEST_CHARS = 12

#: Depth of values inside values. Deeper ones count by their class, and so does a value inside itself.
DEPTH_LIMIT = 30

#: Values that are read in all, a shared one each time. A value that holds more counts by its class.
NODE_LIMIT = 100_000

#: Classes, by library and name, whose objects are told apart by their text.
_TOLD_BY_TEXT = {
    "builtins.complex",
    "builtins.range",
    "datetime.timedelta",
    "decimal.Decimal",
    "fractions.Fraction",
    "numpy.dtype",
    "tensorflow.DType",
    "torch.device",
    "torch.dtype",
    "uuid.UUID",
}

_TIMES = {"datetime.date", "datetime.time"}

#: Characters of the words for all values of a call.
WORDS_LIMIT = 120

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def digest_values(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> str:
    """Return the digest of the arguments of some parameters.

    Args:
        function: The task's own, whose signature has the defaults.
        names: Parameters that `gpu:learn_by` names, or keys of a `**kwargs`, in any order.
        arguments: Bound to the parameters by name, without defaults or with them.

    Returns:
        `DIGEST_CHARS` hexadecimal characters; empty if there are no names.

    Raises:
        PolicyError: The function has no such parameter.
    """
    asked = sorted(set(names))
    if not asked:
        return ""
    parameters = inspect.signature(function).parameters
    taken = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    values: list[Any] = []
    for name in asked:
        if name in parameters:
            default = parameters[name].default
            given = name in arguments or default is not inspect.Parameter.empty
            values.append([name, _whole(arguments.get(name, default))] if given else [name])
        elif taken is not None:
            rest = arguments.get(taken, {})
            values.append([name, _whole(rest[name])] if name in rest else [name])
        else:
            raise _unknown(function, name, parameters)
    return hashlib.sha256(json.dumps(values).encode("ascii")).hexdigest()[:DIGEST_CHARS]


def describe_values(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> str:
    """Return the arguments of some parameters in words: `batch_size=32, model=vit-b16`.

    Numbers, texts, enums, paths, dtypes and the like are written as the user would write them. Of a secret, which its
    parameter's name or its text shows, nothing is said, and of other values the name of their class.

    Args:
        function: The task's own.
        names: As for `digest_values`, which must accept them.
        arguments: Bound to the parameters by name, with defaults.
    """
    variadic = (
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD
    )
    given = {**arguments.get(next(variadic, ""), {}), **arguments}
    words = (f"{name}={_words(name, given[name])}" for name in sorted(set(names)) if name in given)
    return ", ".join(words)[:WORDS_LIMIT]


def _words(name: str, value: Any, deep: bool = True) -> str:
    cls = type(value)
    if is_secret(name):
        return "(secret)"
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return _name(value)
    if deep and isinstance(value, (list, tuple)) and len(value) <= WORDS_LIMIT:
        return f"[{', '.join(_words(name, item, deep=False) for item in value)}]"
    plain = value is None or isinstance(value, (str, bool, numbers.Number))
    if plain or hasattr(cls, "__fspath__") or _is_one_of(cls, _TOLD_BY_TEXT | _TIMES):
        # Python refuses to write more than 4300 digits.
        with contextlib.suppress(ValueError):
            text = str(value)
            return "(secret)" if is_secret(name, text) else text
    return _name(cls)


def _unknown(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter]
) -> PolicyError:
    known = [p.name for p in parameters.values() if p.kind not in _VARIADIC]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean gpu:learn_by={close[0]}?" if close else ""
    return PolicyError(
        f"gpu:learn_by={name}",
        f"{_name(function)}() has no parameter {name!r}{hint}",
        ", ".join(known) or "none, since it has no parameters",
    )


class _TooLargeError(Exception):
    """A value holds more than `NODE_LIMIT` values."""


class _Walk:
    """The state of one walk through a value."""

    def __init__(self) -> None:
        #: Ids of the values around the current one.
        self.path: set[int] = set()
        #: Values read so far.
        self.nodes = 0


def _whole(value: Any) -> Any:
    try:
        return _plain(value, _Walk())
    except _TooLargeError:
        # Not the part read so far, which depends on the order of sets and dicts.
        return ["object", _name(type(value))]


def _plain(value: Any, walk: _Walk) -> Any:
    """Return a value as JSON can hold it; the first item of a list names the kind of value."""
    walk.nodes += 1
    if walk.nodes > NODE_LIMIT:
        raise _TooLargeError
    if value is None or isinstance(value, bool):
        return value
    if id(value) in walk.path or len(walk.path) > DEPTH_LIMIT:
        return ["object", _name(type(value))]
    walk.path.add(id(value))
    try:
        return _read(value, walk)
    finally:
        walk.path.discard(id(value))


def _read(value: Any, walk: _Walk) -> Any:
    """Return what a value counts by, as in the table of this module."""
    cls = type(value)
    if isinstance(value, enum.Enum):
        # Python 3.10 has no name for flags that are combined.
        said = _plain(value.value, walk) if isinstance(value, enum.Flag) else value.name
        return ["enum", _name(cls), said]
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        if not (number := float(value)).is_integer():
            return ["number", repr(number)]
        value = int(number)
    if isinstance(value, numbers.Integral):
        # Not decimal: Python refuses to write more than 4300 digits.
        return ["number", f"{int(value):x}"]
    if isinstance(value, str):
        return ["text", str(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if hasattr(cls, "__fspath__"):
        return _plain(value.__fspath__(), walk)
    if hasattr(cls, "isoformat"):
        return ["time", value.isoformat()]
    if _is_one_of(cls, _TOLD_BY_TEXT):
        return ["said", str(value)]
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return ["name", _name(value)]
    names: list[str] | None = None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(model := getattr(cls, "model_fields", None), Mapping):
        # A pydantic model. `model_extra` has its arguments beside the fields.
        names = [*model, "model_extra"]
    if names is not None:
        fields = [[name, _plain(getattr(value, name, None), walk)] for name in names]
        return ["fields", _name(cls), fields]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if _is_one_of(cls, {"numpy.generic"}):
            # Of NumPy's scalars, truth values and dates are not numbers to Python.
            return _plain(value.item(), walk)
        return ["array", _name(cls), str(value.dtype), str(value.shape)]
    if isinstance(value, (list, tuple)):
        return ["list", [_plain(item, walk) for item in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((_plain(item, walk) for item in value), key=json.dumps)]
    if isinstance(value, Mapping):
        items = [[_plain(k, walk), _plain(v, walk)] for k, v in value.items()]
        return ["dict", sorted(items, key=json.dumps)]
    return ["object", _name(cls)]


def _is_one_of(cls: type, names: Collection[str]) -> bool:
    """Return whether a class, or one that it derives from, has one of some names, with its library."""
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__)
    return any(".".join(base) in names for base in bases)


def _name(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)
