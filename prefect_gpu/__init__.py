"""Run each GPU task of a Prefect flow in a process of its own, on devices with room for it.

The public names. Layering, from what users call to what decides; imports go down only:

    task_runner, cli
        attempt, contexts, prefect_bridge
            broker, reports, processes, devices, frameworks
                scheduling, policy, settings
                    errors, units

Prefect's server and its workers import this package to find integrations, so everything is imported
on first use: no Prefect, no NVML and no framework here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_gpu.errors import (
        ChildDiedError,
        ChildTimeoutError,
        DeviceError,
        FrameworkError,
        PlacementError,
        PlacementTimeoutError,
        PolicyError,
        PrefectGPUError,
        ProtocolError,
        ResultError,
    )
    from prefect_gpu.inside import Allocation, current_allocation
    from prefect_gpu.policy import GPUPolicy, gpu
    from prefect_gpu.task_runner import GPUTaskRunner

__version__ = "0.1.0"

_HOMES = {
    "GPUTaskRunner": "task_runner",
    "gpu": "policy",
    "GPUPolicy": "policy",
    "Allocation": "inside",
    "current_allocation": "inside",
    "PrefectGPUError": "errors",
    "PolicyError": "errors",
    "ResultError": "errors",
    "PlacementError": "errors",
    "PlacementTimeoutError": "errors",
    "DeviceError": "errors",
    "FrameworkError": "errors",
    "ChildDiedError": "errors",
    "ChildTimeoutError": "errors",
    "ProtocolError": "errors",
}

__all__ = [  # noqa: RUF022  # by importance
    "GPUTaskRunner",
    "gpu",
    "GPUPolicy",
    "current_allocation",
    "Allocation",
    "PrefectGPUError",
    "PolicyError",
    "ResultError",
    "PlacementError",
    "PlacementTimeoutError",
    "DeviceError",
    "FrameworkError",
    "ChildDiedError",
    "ChildTimeoutError",
    "ProtocolError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
