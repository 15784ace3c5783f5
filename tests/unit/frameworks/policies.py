"""Policies and modules that tests of frameworks share."""

import importlib.util
import sys
from typing import Any

import pytest

from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.registry import ADAPTERS
from prefect_gpu.units import GIB

#: Two devices, with budgets of 8 and 4 GiB.
TWO: dict[str, Any] = {
    "device_uuids": ("GPU-a", "GPU-b"),
    "total_bytes": (80 * GIB,) * 2,
    "budget_bytes": (8 * GIB, 4 * GIB),
}


def policy(**changes: Any) -> FrameworkPolicy:
    """Return a policy of one 80 GiB device with a budget of 8 GiB."""
    return FrameworkPolicy(
        **{
            "device_kind": "nvml",
            "device_uuids": ("GPU-aa",),
            "total_bytes": (80 * GIB,),
            "budget_bytes": (8 * GIB,),
            **changes,
        }
    )


def import_lazily(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module as `importlib.util.LazyLoader` does: it loads when an attribute is read."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def apply(framework: str, **changes: Any) -> None:
    """Apply a policy to a framework."""
    ADAPTERS[framework].apply(policy(**changes))
