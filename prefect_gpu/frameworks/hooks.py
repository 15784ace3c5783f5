"""Apply each adapter right after its framework's first import in a child process, and sum up all adapters' counters.

A framework that is not imported costs nothing. `registry` chooses a child's adapters. `child.late_prefect` does the
same for Prefect.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import _LazyModule  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import Counters, EndTrace, FrameworkAdapter, FrameworkPolicy
from prefect_gpu.frameworks.registry import ADAPTERS


class AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that calls a function right after the first import of each of some modules.

    The finder replaces `exec_module` of another finder's loader, so resources, sources and submodules are found as
    usual. Several finders act in the order of installation. Other threads that import the module wait for the end of
    the function: Python holds a lock for each module during its import.
    """

    def __init__(self, actions: Mapping[str, Callable[[], object]]) -> None:
        self._pending = dict(actions)
        self._failed: dict[str, Exception] = {}

    def install(self) -> None:
        """Become the first finder of `sys.meta_path`; act now for imported modules. Raises the functions' errors."""
        sys.meta_path.insert(0, self)
        for name in list(self._pending):
            module = sys.modules.get(name)
            if is_lazy(module):
                # A lazy module is imported when an attribute of it is first used.
                self._hook(object.__getattribute__(module, "__spec__"))
            elif name in sys.modules:
                self._act(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return another finder's spec with its loader hooked; `None`: the module has no function to call."""
        if fullname in self._failed:
            # A part of the module was imported: a second import would fail with a misleading error.
            raise self._failed[fullname]
        if fullname not in self._pending:
            return None
        finders = list(sys.meta_path)
        # Finders before this one have found nothing, or are waiting for the same module.
        others = finders[finders.index(self) + 1 :] if self in finders else finders
        specs = (f.find_spec(fullname, path, target) for f in others if hasattr(f, "find_spec"))
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            self._hook(spec)
        return spec

    def _hook(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # All modules of a zip file share a loader.
            if module.__name__ == spec.name and spec.name in self._pending:
                vars(loader).pop("exec_module", None)
                self._act(spec.name)

        loader.exec_module = exec_module

    def _act(self, module: str) -> None:
        action = self._pending.pop(module)
        try:
            action()
        except Exception as error:
            self._failed[module] = error
            raise


def install(adapters: Iterable[FrameworkAdapter], policy: FrameworkPolicy) -> AfterImport:
    """Apply each adapter now if its framework is imported, else right after its first import; return the finder.

    Caps of processes that the body starts are applied at once. `FrameworkError`: an imported framework cannot carry
    out the policy. A caller may remove the finder from `sys.meta_path`.
    """
    chosen = tuple(adapters)
    for adapter in chosen:
        adapter.cap_subprocesses(policy, os.environ)
    finder = AfterImport({a.name: functools.partial(_apply, a, policy) for a in chosen})
    finder.install()
    return finder


def _apply(adapter: FrameworkAdapter, policy: FrameworkPolicy) -> None:
    try:
        adapter.apply(policy)
    except FrameworkError:
        raise
    except Exception as error:
        problem = f"could not apply the policy: {type(error).__name__}: {error}"
        raise FrameworkError(adapter.name, problem) from error


def frameworks_in_use() -> tuple[str, ...]:
    """Return the names of the frameworks that this process has imported."""
    return tuple(adapter.name for adapter in _in_use(ADAPTERS.values()))


def collect_counters(adapters: Iterable[FrameworkAdapter]) -> Counters | None:
    """Return the summed counters of all imported frameworks; `None`: no framework has used a device.

    A field is `None` if no framework counts it. A framework that does not count reserved bytes adds its live bytes,
    the least that it can hold. Another thread may be importing a framework.
    """
    found = [c for adapter in _in_use(adapters) if (c := adapter.counters()) is not None]
    if not found:
        return None
    return Counters(
        live_bytes=sum(c.live_bytes for c in found),
        reserved_bytes=_sum_known([(c.reserved_bytes, c.live_bytes) for c in found]),
        peak_live_bytes=sum(c.peak_live_bytes for c in found),
        peak_reserved_bytes=_sum_known([(c.peak_reserved_bytes, c.peak_live_bytes) for c in found]),
        alloc_retries=_sum_known([(c.alloc_retries, 0) for c in found]),
        freed_bytes=_sum_known([(c.freed_bytes, 0) for c in found]),
    )


def sample(adapters: Iterable[FrameworkAdapter]) -> tuple[int, int] | None:
    """Return the allocated bytes and allocation retries of all frameworks so far; `None`: see `collect_counters`."""
    found = collect_counters(adapters)
    return None if found is None else (found.live_bytes, found.alloc_retries or 0)


def begin_trace(adapters: Iterable[FrameworkAdapter]) -> EndTrace | None:
    """Begin a trace of allocations in the first imported framework that can; `None`: no framework can now."""
    traces = (adapter.begin_trace() for adapter in _in_use(adapters))
    return next((trace for trace in traces if trace is not None), None)


def _in_use(adapters: Iterable[FrameworkAdapter]) -> list[FrameworkAdapter]:
    loaded = sys.modules
    return [a for a in adapters if a.name in loaded and not is_lazy(loaded.get(a.name))]


def is_lazy(module: ModuleType | None) -> bool:
    """Return whether a module is imported only when an attribute of it is first used (`importlib.util.LazyLoader`)."""
    # `isinstance` reads an attribute of the module, which would import it.
    return type(module) is _LazyModule


def _sum_known(pairs: list[tuple[int | None, int]]) -> int | None:
    if all(value is None for value, _ in pairs):
        return None
    return sum(least if value is None else value for value, least in pairs)
