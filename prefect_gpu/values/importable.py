"""Functions, classes and modules that another interpreter can import, and references to them.

A fresh interpreter with the same `sys.path` imports modules through the standard finders. Scripts, notebooks, and
modules loaded by path, made by hand or found by a script's own finder are *private*: their functions and classes travel
by value (`by_value`). Only `resolve` imports modules.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.frameworks.registry import find_in_namespace, find_steps, is_users

#: Results of `is_importable` by module name, with the module's id: Prefect loads several scripts under one name.
_importable: dict[str, tuple[int, bool]] = {}

#: Packages of the standard loaders and finders, which every interpreter has.
_OF_PYTHON = ("_frozen_importlib", "_frozen_importlib_external", "importlib", "zipimport")


def is_importable(module_name: str) -> bool:
    """Return whether a fresh interpreter with the same `sys.path` would import this very module of `sys.modules`.

    A lazily loaded module (`importlib.util.LazyLoader`) stays unloaded. If the folders of `sys.path` cannot be read, as
    without a free descriptor, every module with a `__spec__` counts as importable.
    """
    identity = id(sys.modules.get(module_name))
    known = _importable.get(module_name)
    if known is None or known[0] != identity:
        try:
            known = _importable[module_name] = identity, _find(module_name)
        except OSError:
            return look_at(module_name, "__spec__") is not None
    return known[1]


def travels_by_value(obj: Any) -> bool:
    """Return whether a class or function travels by value: a fresh interpreter cannot import its top-level module."""
    name = getattr(obj, "__module__", None)
    # Only the top-level module counts: no finder knows submodules that a library makes by hand.
    return isinstance(name, str) and not is_importable(name.partition(".")[0])


def private_modules() -> tuple[str, ...]:
    """Return the names of loaded modules, other than `__main__`, that a fresh interpreter cannot import."""
    folders = {path for path in sys.path if isinstance(path, str)}
    private = {n for n in list(sys.modules) if "." not in n and _may_be_private(n, folders)}
    private = {name for name in private if not is_importable(name)}
    if not private:
        return ()
    return tuple(sorted(name for name in list(sys.modules) if name.partition(".")[0] in private))


def _may_be_private(name: str, folders: set[str]) -> bool:
    """Return whether a loaded module may be private, without the 0.1 ms of a full look-up; `folders`: `sys.path`."""
    module = sys.modules.get(name)
    if name in ("__main__", "__mp_main__") or not isinstance(module, types.ModuleType):
        return False
    known = _importable.get(name)
    if known is not None and known[0] == id(module):
        return not known[1]
    loader, file = getattr(look_at(name, "__spec__"), "loader", None), look_at(name, "__file__")
    if _home_of(loader) not in _OF_PYTHON:
        return True
    # Without a file: built in, frozen, or a folder without `__init__`. Else a folder of `sys.path` must have the file.
    place = os.path.dirname(file) if isinstance(file, str) else None
    return place is not None and place not in folders and os.path.dirname(place) not in folders


def users_modules() -> tuple[str, ...]:
    """Return the names of the user's loaded modules that a fresh interpreter can import."""
    users = (name for name in list(sys.modules) if is_users(name))
    return tuple(sorted(name for name in users if is_importable(name)))


def _home_of(finder: Any) -> str:
    """Return the top-level module that defines a finder or loader."""
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__.partition(".")[0]


def _find(module_name: str) -> bool:
    """Return the result for `is_importable`, or raise `OSError` if a folder cannot be read."""
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__" or hasattr(type(module), "stands_in"):
        return False
    parent_name, _, _ = module_name.rpartition(".")
    path = None
    if parent_name:
        path = look_at(parent_name, "__path__")
        if path is None or not is_importable(parent_name):
            return False
    file: str | None = look_at(module_name, "__file__")
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or _is_private(_home_of(finder)):
            continue
        try:
            spec: importlib.machinery.ModuleSpec | None = find_spec(module_name, path)
        except OSError:
            raise
        except Exception:  # another library's finder that does not know the name
            continue
        if spec is not None:
            if file is None or not spec.has_location:
                return True
            return os.path.realpath(spec.origin or "") == os.path.realpath(file)
    return False


def _is_private(root: str) -> bool:
    """Return whether a top-level module that defines a finder is private."""
    if root in _OF_PYTHON:
        return False
    # Not `is_importable`, which would ask this finder.
    return root == "__main__" or importlib.machinery.PathFinder.find_spec(root) is None


#: Module and qualified name of an object, and the attributes from the object to a function below its decorators.
Reference = tuple[str, str, tuple[str, ...]]


def find_reference(obj: Any) -> Reference | None:
    """Return the arguments of `resolve` for an object with a `__qualname__`; `None`: the object travels by value."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    if module not in sys.modules or travels_by_value(obj):
        return None
    steps = find_steps(find_in_module(module, name), obj)
    return None if steps is None else (module, name, steps)


def find_in_module(module: str, name: str) -> Any:
    """Return a loaded module's object by its qualified name, without calling descriptors; `None`: no such object."""
    found = find_in_namespace(module, name)
    if found is None and module in sys.modules and "." not in name:
        # A module's own `__getattr__` may make it.
        found = getattr(sys.modules[module], name, None)
    return found


def resolve(module: str, name: str, steps: tuple[str, ...] = ()) -> Any:
    """Return the object of a `Reference`, or raise `ImportError` or `AttributeError`."""
    if module not in sys.modules:
        importlib.import_module(module)
    found = find_in_module(module, name)
    for step in steps:
        found = getattr(found, step)
    if found is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return found
