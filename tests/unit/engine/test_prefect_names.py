"""The subclasses of Prefect's classes, and the names that they use in the installed version."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from prefect.task_engine import SyncTaskRunEngine

import prefect_gpu
from prefect_gpu.engine.task_engine import GPUTaskRunEngine, RunnerTaskRunEngine
from prefect_gpu.runner.engine_threads import RunnerThreads
from prefect_gpu.task_worker import GPUTaskWorker
from tests import prefect_names

OURS = str(Path(prefect_gpu.__file__).parent)


def test_prefect_has_all_that_the_subclasses_rest_on() -> None:
    assert prefect_names.changed() == []


def test_what_is_gone_or_different_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle_crash(self: Any, error: Any) -> None:
        self._raised = error

    monkeypatch.delattr(SyncTaskRunEngine, "can_retry")
    monkeypatch.setattr(SyncTaskRunEngine, "handle_crash", handle_crash)
    monkeypatch.delitem(SyncTaskRunEngine.__dataclass_fields__, "_raised")
    found = prefect_names.changed()
    assert found[:3] == [
        "SyncTaskRunEngine.handle_crash takes (self, error), not (self, exc)",
        "SyncTaskRunEngine.can_retry is gone",
        "SyncTaskRunEngine._raised is gone",
    ]
    assert "SyncTaskRunEngine.handle_crash has no 'self._raised = exc'" in found


@pytest.mark.parametrize(
    "kind", [RunnerTaskRunEngine, GPUTaskRunEngine, GPUTaskWorker, RunnerThreads]
)
def test_each_method_that_a_subclass_overrides_is_in_the_table(kind: Any) -> None:
    overridden = {
        name
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and name != "__init__"
        if any(name in vars(base) for base in kind.__mro__[1:])
    }
    named = {
        name for owner, name, _ in prefect_names.ARGUMENTS if issubclass(kind, owner_of(owner))
    }
    assert overridden and overridden <= named


def owner_of(owner: Any) -> type:
    """Return the class that a row of the table is about; for a function, a class that nothing is a subclass of."""
    return owner if isinstance(owner, type) else type("Nothing", (), {})


def functions(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a module and of its classes, with their names."""
    for name, value in vars(module).items():
        yield name, value
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from ((f"{value.__name__}.{each}", held) for each, held in vars(value).items())


def test_one_method_of_prefect_is_replaced() -> None:
    for name in ("task_runner", "task_worker", "child.prefect_context"):
        importlib.import_module(f"prefect_gpu.{name}")
    prefects = [module for name, module in sys.modules.items() if name.startswith("prefect.")]
    replaced = {
        f"{module.__name__}.{name}"
        for module in prefects
        for name, value in functions(module)
        if inspect.isfunction(value) and value.__code__.co_filename.startswith(OURS)
    }
    assert replaced == {"prefect.task_engine.BaseTaskRunEngine._wait_for_dependencies"}
