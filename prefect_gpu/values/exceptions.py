"""Pickle reductions of exceptions, which keep type, text, attributes, notes, cause and context.

The constructor of an exception is not called again: many constructors take other arguments than they pass to
`Exception`. `pickling` packs exceptions, and replaces an exception whose class cannot be sent.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Mapping
from typing import Any

#: Returns the reason why a value cannot be pickled; `None`: pickling works.
Problem = Callable[[Any], "str | None"]

#: Most characters of the `repr` that replaces an argument that cannot be pickled.
_LONGEST_REPR = 200


def reduce_exception(error: BaseException, find_problem: Problem | None, own_way: bool) -> Any:
    """Return a pickle reduction of an exception.

    `find_problem` finds values that cannot be pickled, which a note or their `repr` replaces; `None`: all values are
    sent. `own_way`: a `__reduce__` of the exception's own class is used.
    """
    kind = type(error)
    arguments, attributes = error.args, dict(error.__dict__)
    if own_way and not _is_of_python(kind):
        reduced: Any = error.__reduce_ex__(5)
        make, first, *rest = reduced
        made: Any = (make, tuple(first))
        attributes = {**attributes, **rest[0]} if rest and isinstance(rest[0], dict) else attributes
    else:
        # The built-in class knows all parts: an `OSError` has more than its `args`.
        of_python: Any = _base(kind).__reduce__(error)
        _, initial, *rest = of_python
        if find_problem is not None:
            arguments = tuple(_shown(each, find_problem) for each in arguments)
            initial = tuple(_shown(each, find_problem) for each in initial)
        made = _make, (kind, tuple(initial), arguments)
        attributes = {**(rest[0] if rest else {}), **attributes}
    attributes.update(slots_of(error))
    links: dict[str, Any] = {"cause": error.__cause__, "context": error.__context__}
    if find_problem is not None:
        attributes, links = _without_problems(attributes, links, find_problem)
    links["suppress"] = error.__suppress_context__
    return (*made, (attributes, links), None, None, _finish)


def _base(kind: type[BaseException]) -> type[BaseException]:
    """Return the built-in class that a class of exceptions derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _is_of_python(kind: type[BaseException]) -> bool:
    """Return whether a class of exceptions has no pickle methods other than those of a built-in class."""
    for name in ("__reduce_ex__", "__reduce__"):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if owner.__module__ != "builtins":
            return False
    return True


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has in `__slots__`."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _shown(value: Any, find_problem: Problem) -> Any:
    if find_problem(value) is None:
        return value
    try:
        return repr(value)[:_LONGEST_REPR]
    except Exception:
        return f"a {type(value).__qualname__}"


def _without_problems(
    attributes: Mapping[str, Any], links: Mapping[str, Any], find_problem: Problem
) -> tuple[dict[str, Any], dict[str, Any]]:
    kept, notes = {}, list(attributes.get("__notes__", ()))
    note = "{} was left out on the way from the GPU task: {}"
    for name, value in attributes.items():
        problem = find_problem(value)
        if problem is None:
            kept[name] = value
        else:
            notes.append(note.format(f"Attribute {name!r}", problem))
    sent = dict(links)
    for name, value in links.items():
        problem = None if value is None else find_problem(value)
        if problem is not None:
            sent[name] = None
            notes.append(note.format(f"The {name} of this error", problem))
    if notes:
        kept["__notes__"] = notes
    return kept, sent


def _make(
    kind: type[BaseException], initial: tuple[Any, ...], arguments: tuple[Any, ...]
) -> BaseException:
    base = _base(kind)
    try:
        made = kind.__new__(kind, *initial)
    except TypeError:
        # The class's own `__new__` takes other arguments.
        made = base.__new__(kind, *initial)
    if base.__init__ is not BaseException.__init__:
        with contextlib.suppress(Exception):
            base.__init__(made, *initial)
    made.args = arguments
    return made


def _finish(error: BaseException, state: Any) -> None:
    attributes, links = state
    for name, value in attributes.items():
        # A property without a setter is computed from other attributes.
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)
    error.__cause__, error.__context__ = links["cause"], links["context"]
    error.__suppress_context__ = links["suppress"]
