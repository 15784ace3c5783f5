"""What the adapters share: lazy imports, error names without imports, host copies, free room.

It holds nothing of one framework alone. Everything here is importable where no framework is
installed, since pickled host copies name `host_value` and the parent unpickles them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def load(name: str) -> Any:
    """Import a framework's module; `Any`, since frameworks are untyped at this edge."""
    return importlib.import_module(name)


def loaded(name: str) -> Any:
    """Give a module that is imported already, else `None`; never imports."""
    return sys.modules.get(name)


def host_value(value: T) -> T:
    """Rebuild a pickled host copy: the value itself."""
    return value


def is_named(error: BaseException, root: str | tuple[str, ...], names: Iterable[str]) -> bool:
    """Tell whether an error's class, or a base of it, has one of `names` below a root module.

    Compares names, so that the parent can ask without importing the framework.
    """
    roots = (root,) if isinstance(root, str) else root
    wanted = frozenset(names)
    return any(
        base.__name__ in wanted and base.__module__.partition(".")[0] in roots
        for base in type(error).__mro__
    )


def says(error: BaseException, *texts: str) -> bool:
    """Tell whether an error's text contains one of `texts`, whatever the case."""
    message = str(error).lower()
    return any(text.lower() in message for text in texts)
