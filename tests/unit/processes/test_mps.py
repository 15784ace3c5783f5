"""Variables of clients of MPS, and which errors are faults that end all of them."""

from __future__ import annotations

import pytest

from prefect_gpu.processes import mps
from prefect_gpu.units import GIB, MIB


@pytest.mark.parametrize(
    ("budget", "compute", "limit", "threads"),
    [
        (4 * GIB, None, "0=4096M", None),
        (GIB + 1, 0.5, "0=1024M", "50"),
        (None, 0.125, None, "12.5"),
    ],
)
def test_a_client_has_its_budget_as_limit(
    budget: int | None, compute: float | None, limit: str | None, threads: str | None
) -> None:
    environment = mps.client_environment("/run/mps", budget, compute)
    of_process = {name: value for name, value in environment.items() if value is not None}
    assert mps.limit_bytes(of_process) == (budget and budget // MIB * MIB)
    assert mps.limit_bytes({**of_process, mps.PIPES: mps.NO_PIPES}) is None
    assert environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": threads,
    }


def test_a_process_outside_finds_no_daemon() -> None:
    assert mps.outside_environment() == {
        "CUDA_MPS_PIPE_DIRECTORY": "/dev/null/no-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": None,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": None,
    }


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access", True),
        (
            "RuntimeError: CUDA error: the remote procedural call between the MPS server and the MPS client failed",
            True,
        ),
        (
            "AcceleratorError: CUDA error: busy or unavailable; search for `cudaErrorDevicesUnavailable'",
            True,
        ),
        ("XlaRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", True),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", True),
        ("OutOfMemoryError: CUDA out of memory", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("ValueError: no", False),
        ("", False),
    ],
)
def test_faults(text: str, is_fault: bool) -> None:
    assert mps.is_fault(text) is is_fault
