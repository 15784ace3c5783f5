"""PyTorch and CuPy return what they cache when the parent asks, and never while that would harm a CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import AllocationMode, FrameworkPolicy, child_environment
from prefect_gpu.in_task import Allocation
from prefect_gpu.processes.messages import Prepare, ReleasedUnused, ReleaseUnused
from prefect_gpu.units import GIB
from tests.gpu import release_bodies as bodies
from tests.process.conftest import make_rig as make_rig
from tests.process.rig import Heard, Rig, eventually, spec_of

pytestmark = pytest.mark.gpu

BUDGET = 8 * GIB

Start = Callable[..., Heard]


@pytest.fixture
def start(nvml: object, make_rig: Callable[..., Rig]) -> Start:
    """Starts a body on the first device."""
    rig, device = make_rig(), NvmlReader().devices()[0]

    def started(
        framework: str, body: Any, *args: Any, allocation: AllocationMode = "limit"
    ) -> Heard:
        pytest.importorskip(framework)
        policy = FrameworkPolicy(
            "nvml", (device.uuid,), (device.total_bytes,), (BUDGET,), {framework: GIB}, allocation
        )
        environment = child_environment(policy, registry.adapters_for(policy), os.environ)
        own = Allocation(BUDGET, BUDGET - GIB, 1, policy.device_uuids, (framework,))
        return rig.launch(
            replace(
                spec_of(body, *args, environment=environment), prepare=Prepare(policy, own, 0.1)
            )
        )

    return started


def release(child: Heard, folder: Path, pause: str) -> None:
    """Have it release what it does not use while its body pauses."""
    assert eventually((folder / pause).exists), "it did not come so far"
    began_s = time.monotonic()
    child.handle.answer(ReleaseUnused(began_s + DEADLOCK_S))
    child.until(ReleasedUnused)
    print(f"{pause}: answered after {time.monotonic() - began_s:.3f} s")
    (folder / f"{pause}-done").touch()


@pytest.mark.parametrize("watched", [True, False], ids=["a capture", "a capture unseen"])
def test_torch_releases_its_cache_but_not_during_a_capture(
    start: Start, tmp_path: Path, watched: bool
) -> None:
    child = start("torch", bodies.torch_graph, str(tmp_path), watched)
    release(child, tmp_path, "capturing")
    release(child, tmp_path, "idle")
    found = child.value()
    print(found)
    if watched:
        assert found["within"] >= 5 * GIB
    assert found["after"] < 1.5 * GIB
    assert (found["least"], found["most"]) == (7, 7)
    assert (found["least-after"], found["most-after"], found["live"]) == (11, 11, 1.5)


def test_cupy_releases_its_pool_until_a_graph_was_captured(start: Start, tmp_path: Path) -> None:
    child = start("cupy", bodies.cupy_graph, str(tmp_path))
    release(child, tmp_path, "idle")
    release(child, tmp_path, "captured")
    found = child.value()
    print(found)
    assert found["before"] < 1.5 * GIB
    assert found["after"] >= 5 * GIB
    assert (found["least"], found["most"], found["live"]) == (7, 7, 1.5)


def test_a_task_that_takes_all_keeps_it(start: Start, tmp_path: Path) -> None:
    child = start("torch", bodies.torch_graph, str(tmp_path), True, allocation="all")
    release(child, tmp_path, "capturing")
    release(child, tmp_path, "idle")
    assert child.value()["after"] >= 5 * GIB
