"""Run each GPU task of a Prefect flow in a process of its own, on devices with enough free memory.

This module has the public names; `docs/architecture.md` describes the folders. Prefect's server and workers import this
package to find integrations, so Prefect, NVML and frameworks are imported on first use.
"""

import importlib
import sys

from prefect_gpu.version import VERSION

# Type checkers take this name for `typing.TYPE_CHECKING`. `python -m prefect_gpu` searches the current folder first until
# `__main__` runs: modules that Python has not loaded itself, `typing` and `__future__` among them, are not imported here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from prefect_gpu.errors import (
        BudgetExceededError,
        ChildDiedError,
        ChildTimeoutError,
        DeviceError,
        FrameworkError,
        PlacementError,
        PlacementTimeoutError,
        PolicyError,
        PrefectGPUError,
        ProtocolError,
        ReportError,
        ResultError,
        SettingError,
    )
    from prefect_gpu.frameworks.memory_help import find_batch_size, memory_snapshot, release_cached
    from prefect_gpu.frameworks.onnxruntime_adapter import onnxruntime_provider_options
    from prefect_gpu.in_task import Allocation, current_allocation, mark, phase, report_metric, step
    from prefect_gpu.policy import GPUPolicy, gpu
    from prefect_gpu.reports.leaderboard import LeaderboardRow, publish_leaderboard
    from prefect_gpu.reports.published import FlowRunReport, report
    from prefect_gpu.task_runner import GPUTaskRunner
    from prefect_gpu.task_worker import serve

__version__ = VERSION

#: The public names of each module. All others are in `errors`.
_NAMES = {
    "task_runner": ("GPUTaskRunner",),
    "task_worker": ("serve",),
    "policy": ("gpu", "GPUPolicy"),
    "in_task": ("current_allocation", "Allocation", "phase", "mark", "step", "report_metric"),
    "frameworks.memory_help": ("find_batch_size", "memory_snapshot", "release_cached"),
    "frameworks.onnxruntime_adapter": ("onnxruntime_provider_options",),
    "reports.published": ("report", "FlowRunReport"),
    "reports.leaderboard": ("publish_leaderboard", "LeaderboardRow"),
}

# fmt: off
__all__ = [  # noqa: RUF022  # by importance
    "GPUTaskRunner", "serve", "gpu", "GPUPolicy",
    "current_allocation", "Allocation", "phase", "mark", "step", "report_metric",
    "find_batch_size", "release_cached", "memory_snapshot", "onnxruntime_provider_options",
    "report", "FlowRunReport", "publish_leaderboard", "LeaderboardRow",
    "PrefectGPUError", "PolicyError", "SettingError", "ResultError",
    "PlacementError", "PlacementTimeoutError", "DeviceError", "FrameworkError",
    "ChildDiedError", "ChildTimeoutError", "BudgetExceededError", "ReportError", "ProtocolError",
    "__version__",
]
# fmt: on


def _follow_prefects_task_worker() -> None:
    """Have `engine.direct_calls` imported after Prefect's task worker, to warn of GPU tasks under Prefect's `serve`."""
    global _follows
    if _follows:
        return
    _follows = True
    from prefect_gpu.frameworks.hooks import AfterImport

    AfterImport(
        {"prefect.task_worker": lambda: importlib.import_module(f"{__name__}.engine.direct_calls")}
    ).install()


#: Whether the hook on `prefect.task_worker` is installed.
_follows = False


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _follow_prefects_task_worker()
    home = next((home for home, names in _NAMES.items() if name in names), "errors")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "prefect.task_worker" in sys.modules:
    _follow_prefects_task_worker()
