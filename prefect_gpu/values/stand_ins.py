"""Stand-ins for modules of the flow's process that this process cannot import: `__main__`, and modules loaded by path.

A stand-in has the name of such a module and the functions and classes that arrived by value, so `pickle`,
`typing.get_type_hints` and `import __main__` find them. For a missing name a stand-in asks the flow's process once, and
the object arrives by value. Module-level code of the script does not run. `by_value` makes functions and classes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.frameworks.hooks import AfterImport
from prefect_gpu.process_resources import PROCESS_RESOURCES

#: Returns an attribute of a module in the flow's process, by the names of both, or raises `AttributeError`.
Source = Callable[[str, str], Any]


class _Asking:
    """This process's state of asking the flow's process for names. Any thread may read a stand-in."""

    def __init__(self) -> None:
        #: `None`: this process cannot ask, as in a fork, which has no channel.
        self.source: Source | None = None
        #: Names that the flow's process does not have, with their modules.
        self.absent: set[tuple[str, str]] = set()
        #: `names`: names that a thread is asking for. They count as absent: an arriving object may need itself.
        self.by_thread = threading.local()


_asking = _Asking()
PROCESS_RESOURCES.after_fork(_asking, lambda asking: setattr(asking, "source", None))


def set_source(source: Source | None) -> None:
    """Set the function that asks the flow's process for a module's attribute; `None`: ask no more."""
    _asking.source = source


def _absent(module: str, name: str) -> AttributeError:
    return AttributeError(f"module {module!r} has no attribute {name!r}")


class StandIn(ModuleType):
    """Module in place of a module of the flow's process, which is asked for missing attributes."""

    #: Tells `importable` that no interpreter can import the module.
    stands_in = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            # Libraries look for these in each module, and expect that some are missing.
            raise _absent(self.__name__, name)
        return vars(self).setdefault(name, fetch(self.__name__, name))


def fetch(module: str, name: str) -> Any:
    """Return an attribute of a module of the flow's process, or raise `AttributeError`; ask for absent names once."""
    # No lock is held: an arriving object may import modules that other threads, waiting here, are importing.
    # Read once: the end of the task, in another thread, takes the source away.
    key, source = (module, name), _asking.source
    names: set[tuple[str, str]] = vars(_asking.by_thread).setdefault("names", set())
    if source is None or key in names or key in _asking.absent:
        raise _absent(module, name)
    names.add(key)
    try:
        return source(module, name)
    except AttributeError:
        _asking.absent.add(key)
        raise
    finally:
        names.discard(key)


def stand_in(name: str) -> ModuleType:
    """Return the module of a name, imported if possible, else a stand-in; always a stand-in for `__main__`."""
    found = sys.modules.get(name)
    if isinstance(found, StandIn):
        return found
    if name != "__main__":
        if found is not None:
            return found
        with contextlib.suppress(ImportError):
            __import__(name)
            return sys.modules[name]
    made = sys.modules[name] = StandIn(name)
    vars(made)["__builtins__"] = __builtins__
    return made


def namespace(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the global variables for a module's functions that travel by value; set missing ones of a stand-in."""
    module = stand_in(name)
    held = vars(module)
    if isinstance(module, StandIn):
        held.update({k: v for k, v in attributes.items() if held.get(k) is None})
    return held


def keep(key: tuple[str, str] | None, value: Any) -> None:
    """Store an object under its name (`None`: no name) in its module, unless the module has an object of that name."""
    if key is not None and "." not in key[1]:
        vars(stand_in(key[0])).setdefault(key[1], value)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the private modules of the flow's process, after all other finders."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names or _asking.source is None:
            return None
        is_package = any(name.startswith(fullname + ".") for name in self._names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module's code has run in the flow's process."""


def install(private: Iterable[str], users: Iterable[str]) -> None:
    """Install stand-ins for `__main__` and the flow's `private` modules; make `users` modules ask for missing names.

    `private`: modules that no fresh interpreter can import. `users`: the user's others; a script may have added names.
    """
    stand_in("__main__")
    names = frozenset(private)
    if names:
        sys.meta_path.append(_Finder(names))
    AfterImport({name: functools.partial(_ask_for_missing, name) for name in users}).install()


def _ask_for_missing(name: str) -> None:
    module = sys.modules[name]

    def ask(attribute: str) -> Any:
        path, find_spec = look_at(name, "__path__"), importlib.machinery.PathFinder.find_spec
        # For a submodule, `from package import module` imports it next.
        if attribute.startswith("__") or (path and find_spec(f"{name}.{attribute}", path)):
            raise _absent(name, attribute)
        return vars(module).setdefault(attribute, fetch(name, attribute))

    # A module's own `__getattr__` takes precedence.
    vars(module).setdefault("__getattr__", ask)
