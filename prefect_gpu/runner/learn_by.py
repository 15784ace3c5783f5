"""Digests of the values that `gpu:learn_by` names: equal values have equal digests on every host.

Each digest has a history, so it must not depend on the process, the host, or the module of a class (`__main__` in a
script). The values themselves are kept for reports only in words, if short and no secrets. Tags are read in `policy`;
histories are in `scheduling.history`.

| value | counts by |
|---|---|
| number | its value, `32` as `32.0`; `True` is no number |
| text, path | its text |
| `True`, `False`, `None` | itself |
| enum | class and member |
| tuple or list of these | its items in their order |

Other values are a `PolicyError`: the part that memory depends on is not known.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import hashlib
import inspect
import json
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefect_gpu.errors import PolicyError
from prefect_gpu.reports.markup import is_secret

#: Characters of a digest: 48 bits distinguish the values of one task.
DIGEST_CHARS = 12

#: Nested tuples. The limit also ends the walk through a list that contains itself.
DEPTH_LIMIT = 4

#: Most characters of the words for all values of a call.
WORDS_LIMIT = 120

#: Values accepted by `digest_values`, for messages.
ACCEPTED = (
    f"numbers, text, True, False, None, enums, paths, and tuples or lists of these, at most {DEPTH_LIMIT} deep; give "
    f"what memory depends on a parameter of its own, as in shape=tuple(x.shape)"
)

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def digest_values(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> str:
    """Return the digest of some arguments of a call: `DIGEST_CHARS` hexadecimal characters.

    Args:
        function: The task's own function.
        names: Parameters in `gpu:learn_by`, or keys of a `**kwargs`, in any order.
        arguments: Bound to the parameters by name, with defaults.

    Raises:
        PolicyError: The function has no such parameter, or the type of an argument is not accepted.
    """
    given = _select(function, names, arguments)
    values = [
        [name, _plain(name, name, given[name])] if name in given else [name]
        for name in sorted(set(names))
    ]
    return hashlib.sha256(json.dumps(values).encode("ascii")).hexdigest()[:DIGEST_CHARS]


def describe_values(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> str:
    """Return arguments that `digest_values` accepts in words: `batch_size=32, model=vit-b16`.

    A secret, recognised by its parameter's name or its text, becomes `(secret)`.
    """
    given = _select(function, names, arguments)
    words = ", ".join(f"{name}={_words(name, given[name])}" for name in sorted(given))
    return words[:WORDS_LIMIT]


def _select(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by name for some parameters, without absent keys of a `**kwargs`."""
    parameters = inspect.signature(function).parameters
    variadic = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    rest = {} if variadic is None else arguments.get(variadic, {})
    given: dict[str, Any] = {}
    for name in names:
        if name in parameters:
            given[name] = arguments[name]
        elif variadic is None:
            raise _unknown(function, name, parameters)
        elif name in rest:
            given[name] = rest[name]
    return given


def _words(name: str, value: Any) -> str:
    if is_secret(name):
        return "(secret)"
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_words(name, item) for item in value)}]"
    # Python refuses to write more than 4300 digits.
    with contextlib.suppress(ValueError):
        text = str(value)
        return "(secret)" if is_secret(name, text) else text
    return type(value).__qualname__


def _unknown(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter]
) -> PolicyError:
    known = [p.name for p in parameters.values() if p.kind not in _VARIADIC]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean gpu:learn_by={close[0]}?" if close else ""
    of = getattr(function, "__qualname__", type(function).__qualname__)
    return PolicyError(
        f"gpu:learn_by={name}",
        f"{of}() has no parameter {name!r}{hint}",
        ", ".join(known) or "none, since it has no parameters",
    )


def _plain(name: str, where: str, value: Any, depth: int = 0) -> Any:
    """Return a value for JSON; a list starts with its kind. `where` is the value's path for errors: `sizes[0]`."""
    cls = type(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        # Python 3.10 has no name for combined flags.
        said = (
            _plain(name, where, value.value, depth) if isinstance(value, enum.Flag) else value.name
        )
        return ["enum", cls.__qualname__, said]
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        if not (number := float(value)).is_integer():
            return ["number", repr(number)]
        value = int(number)
    if isinstance(value, numbers.Integral):
        # Not decimal: Python refuses to write more than 4300 digits.
        return ["number", f"{int(value):x}"]
    text = value.__fspath__() if hasattr(cls, "__fspath__") else value
    if isinstance(text, str):
        return ["text", str(text)]
    if isinstance(value, (list, tuple)) and depth < DEPTH_LIMIT:
        items = enumerate(value)
        return ["list", [_plain(name, f"{where}[{at}]", item, depth + 1) for at, item in items]]
    kind = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    raise PolicyError(f"gpu:learn_by={name}", f"{where} is of type {kind}", ACCEPTED)
