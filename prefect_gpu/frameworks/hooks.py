"""In the child: apply each adapter right after its framework's first import.

A framework that nobody imports costs nothing. It does not say what is applied (the adapters do),
nor which adapters (`registry` does).
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import (
    Counters,
    FrameworkAdapter,
    FrameworkPolicy,
    PeakTrace,
    TracingAdapter,
)
from prefect_gpu.frameworks.registry import ADAPTERS


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of adapters that are still to be applied, as the other finders would.

    It keeps the loader that the others give and hooks `exec_module` on that one object, so that
    resources, sources and submodules are found as ever. Python's own lock on each module makes
    "first import" exact when threads import at once.
    """

    def __init__(
        self,
        adapters: Iterable[FrameworkAdapter],
        policy: FrameworkPolicy,
        on_error: Callable[[FrameworkError], None],
    ) -> None:
        self._pending = {adapter.module: adapter for adapter in adapters}
        self._failed: dict[str, FrameworkError] = {}
        self._policy = policy
        self._on_error = on_error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Give the other finders' spec with its loader hooked, or `None`: not ours."""
        if fullname in self._failed:
            # Half of it is imported: to try again would fail in a way that explains nothing.
            raise self._failed[fullname]
        if fullname not in self._pending:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._hook(spec)
        return spec

    def apply_loaded(self) -> None:
        """Apply the adapters whose frameworks are imported already."""
        for module in [name for name in self._pending if name in sys.modules]:
            self._apply(module)

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _hook(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A zip's loader is shared by its modules.
            if module.__name__ == spec.name and spec.name in self._pending:
                vars(loader).pop("exec_module", None)
                self._apply(spec.name)

        loader.exec_module = exec_module

    def _apply(self, module: str) -> None:
        adapter = self._pending.pop(module)
        try:
            adapter.apply(self._policy)
        except Exception as error:
            failure = _as_framework_error(adapter, error)
            self._failed[module] = failure
            self._on_error(failure)
            if failure is error:
                raise
            raise failure from error


def install(
    adapters: Iterable[FrameworkAdapter],
    policy: FrameworkPolicy,
    on_error: Callable[[FrameworkError], None] = lambda error: None,
) -> AfterImport:
    """Apply each adapter now if its framework is imported, else right after its first import.

    Args:
        adapters: Those of `registry.adapters_for(policy)`.
        policy: What they apply.
        on_error: Told of a failure before it is raised into the import (or out of here), so that
            it is known even if the body catches it.

    Returns:
        The finder, first on `sys.meta_path`; a caller that wants it gone removes it there.

    Raises:
        FrameworkError: A framework that is imported already cannot carry out the policy.
    """
    finder = AfterImport(adapters, policy, on_error)
    sys.meta_path.insert(0, finder)
    finder.apply_loaded()
    return finder


def frameworks_in_use() -> tuple[str, ...]:
    """Name the frameworks that this process has imported."""
    return tuple(name for name, adapter in ADAPTERS.items() if adapter.module in sys.modules)


def collect_counters(adapters: Iterable[FrameworkAdapter] | None = None) -> Counters | None:
    """Sum the counters of the frameworks that are imported; safe while one is being imported.

    Args:
        adapters: Which to ask; `None`: all.

    Returns:
        The sum. A field is `None` where every framework leaves it unknown; one that keeps no
        reserved bytes counts with what it has in use, the least that it can hold. `None`: no
        framework has touched a device.
    """
    found = []
    for adapter in ADAPTERS.values() if adapters is None else adapters:
        if adapter.module not in sys.modules:
            continue
        counters = adapter.counters()
        if counters is not None:
            found.append(counters)
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


def sample(adapters: Iterable[FrameworkAdapter] | None = None) -> tuple[int, int] | None:
    """Read what the frameworks have allocated now, and their allocation retries so far.

    The quick sibling of `collect_counters`, for a thread that asks every few milliseconds.

    Args:
        adapters: Which to ask; `None`: all.

    Returns:
        Both summed; a framework that does not count retries adds none. `None`: no framework has
        touched a device.
    """
    live_bytes, retries, touched = 0, 0, False
    for adapter in ADAPTERS.values() if adapters is None else adapters:
        if adapter.module not in sys.modules:
            continue
        found = adapter.sample()
        if found is not None:
            live_bytes, retries, touched = live_bytes + found[0], retries + found[1], True
    return (live_bytes, retries) if touched else None


def begin_trace(adapters: Iterable[FrameworkAdapter] | None = None) -> PeakTrace | None:
    """Begin to trace the frameworks that can be.

    Args:
        adapters: Which to ask; `None`: all.

    Returns:
        What ends it and gives the sum of their peaks; beside a framework that cannot be traced, the
        least that was allocated at the peak. `None`: none can be traced now.
    """
    traces = []
    for adapter in ADAPTERS.values() if adapters is None else adapters:
        if adapter.module in sys.modules and isinstance(adapter, TracingAdapter):
            trace = adapter.begin_trace()
            if trace is not None:
                traces.append(trace)
    return _Traces(tuple(traces)) if traces else None


@dataclass(frozen=True, slots=True)
class _Traces:
    """Those of several frameworks."""

    traces: tuple[PeakTrace, ...]

    def end(self) -> int | None:
        # All of them end, whatever one says.
        peaks = [trace.end() for trace in self.traces]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None


def _sum_known(pairs: list[tuple[int | None, int]]) -> int | None:
    if all(value is None for value, _ in pairs):
        return None
    return sum(least if value is None else value for value, least in pairs)


def _as_framework_error(adapter: FrameworkAdapter, error: Exception) -> FrameworkError:
    if isinstance(error, FrameworkError):
        return error
    return FrameworkError(
        adapter.name, f"could not apply the policy: {type(error).__name__}: {error}"
    )
