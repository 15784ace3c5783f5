"""Policies that the tests of this folder share."""

from typing import Any

from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.units import GIB


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
