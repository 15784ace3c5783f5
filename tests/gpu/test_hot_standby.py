"""Hot standbys on a real device: ready at the first line, counted, capped, given up, and gone after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.broker.host_ledger import host_ledger
from prefect_gpu.processes.standby_pool import standby_pool
from prefect_gpu.scheduling.model import Reservation
from prefect_gpu.settings import read_settings
from tests.gpu._checks import nvml_handles
from tests.gpu.test_runner_on_gpu import metadata_of
from tests.process.rig import eventually, is_alive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
]

GIB = 1 << 30
MIB = 1 << 20

#: The device that `device_is_clean` looks at.
RUNNER = GPUTaskRunner(devices=[0], standby="hot")


def reservations() -> list[Reservation]:
    view = host_ledger(read_settings().ledger).view()
    return [r for group in view.by_device.values() for r in group]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    assert standby_pool().pids == ()
    assert eventually(lambda: not any(r.standby for r in reservations()))


def hot() -> tuple[int, ...]:
    assert eventually(lambda: standby_pool().hot >= 1)
    return standby_pool().pids


def driver_shows(pid: int) -> int:
    """Bytes that the driver lists a process with; 0: none."""
    import pynvml

    (handle, *_) = nvml_handles()
    uses = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(use.usedGpuMemory or 0 for use in uses if use.pid == pid)


def measure_context(framework: str) -> None:
    """Measure the context; the first task that needs it gives up its hot standby."""

    @task(name=f"measures-{framework}", tags=gpu(memory="4GiB", framework=framework))
    def nothing() -> None:
        return None

    @flow(task_runner=GPUTaskRunner(devices=[0], standby=0, reports=False))
    def measures() -> None:
        nothing.submit().result()

    measures()


def at_first_line() -> dict[str, Any]:
    import torch

    return {
        "pid": os.getpid(),
        "started": torch.cuda.is_initialized(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "devices": torch.cuda.device_count(),
        "check": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }


def test_cuda_runs_at_the_first_line_and_the_context_was_counted_before() -> None:
    measure_context("torch")

    @task(name="hot-first-line", tags=gpu(memory="4GiB", framework="torch"))
    def first_line() -> dict[str, Any]:
        seen = at_first_line()
        import torch

        a = torch.ones(1024, 1024, device="cuda")
        seen["sum"] = (a @ a).sum().item()
        return seen

    @flow(task_runner=RUNNER)
    def two() -> tuple[dict[int, int], int, dict[str, Any]]:
        first_line.submit().result()
        waiting = hot()
        shown = {pid: driver_shows(pid) for pid in waiting}
        promised = sum(r.reserved_bytes for r in reservations() if r.standby)
        return shown, promised, first_line.submit().result()

    shown, promised, seen = two()
    assert seen["started"] and seen["sum"] == 1024.0**3
    assert seen["peak"] == seen["reserved"] == 0, "its counters begin as in a fresh process"
    assert seen["devices"] == 1 and seen["check"] is None
    assert 100 * MIB < shown[seen["pid"]] < 2 * GIB
    assert promised >= 100 * MIB
    reports = metadata_of("gpu-memory-hot-first-line")
    assert {r["leaked_bytes"] for r in reports} == {"0"}
    assert {r["outcome"] for r in reports} == {"completed"}


@pytest.mark.parametrize("framework", ["torch", "cupy"])
@pytest.mark.parametrize("allocation", ["limit", "all"])
def test_the_cap_holds_although_cuda_runs_before_it(framework: str, allocation: str) -> None:
    pytest.importorskip(framework)
    measure_context(framework)

    @task(
        name=f"hot-cap-{framework}-{allocation}",
        tags=gpu(memory="5GiB", framework=framework, allocation=allocation),
    )
    def fill(framework: str) -> tuple[int, list[str]]:
        from prefect_gpu import current_allocation

        allocation = current_allocation()
        assert allocation is not None and allocation.cap_bytes is not None
        said = []
        for size in (allocation.cap_bytes - GIB, allocation.cap_bytes + GIB):
            try:
                if framework == "torch":
                    import torch

                    held = torch.empty(size, dtype=torch.uint8, device="cuda")
                else:
                    import cupy

                    held = cupy.empty(size, dtype=cupy.uint8)
                said.append("had")
                del held
            except Exception as error:
                said.append(type(error).__name__)
        return os.getpid(), said

    @flow(task_runner=RUNNER)
    def two() -> tuple[tuple[int, ...], Any, Any]:
        first = fill.submit(framework).result()
        waiting = hot()
        return waiting, first, fill.submit(framework).result()

    waiting, (_, cold), (pid, warm) = two()
    assert pid in waiting, "it was not done by one that waited"
    assert warm == cold == ["had", "OutOfMemoryError"]
    reports = metadata_of(f"gpu-memory-hot-cap-{framework}-{allocation}")
    assert {r["leaked_bytes"] for r in reports} == {"0"}


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("hot-takes-all", gpu(memory="100%", framework="none")),
        ("hot-is-alone", gpu(memory="4GiB", exclusive=True, framework="none")),
        ("hot-probes", gpu(framework="none")),
    ],
)
def test_a_task_that_needs_the_device_has_it(name: str, tags: list[str]) -> None:
    measure_context("torch")

    @task(tags=gpu(memory="4GiB", framework="torch"))
    def wakes() -> None:
        at_first_line()

    @task(name=name, tags=tags)
    def needs() -> list[int]:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]

    @flow(task_runner=RUNNER)
    def one() -> tuple[tuple[int, ...], list[int]]:
        wakes.submit().result()
        waiting = hot()
        return waiting, needs.submit().result()

    waiting, there = one()
    assert not set(waiting) & set(there) and not any(map(is_alive, waiting))
    assert {r["leaked_bytes"] for r in metadata_of(f"gpu-memory-{name}")} == {"0"}


def test_allocator_options_are_there_from_the_start() -> None:
    measure_context("torch")
    options = {"expandable_segments": "True"}

    @task(name="hot-options", tags=gpu(memory="4GiB", framework="torch", alloc=options))
    def options_of() -> tuple[int, bool, bool]:
        import torch

        started = torch.cuda.is_initialized()
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        segments = torch.cuda.memory_snapshot()
        assert held is not None
        return os.getpid(), started, any(s.get("is_expandable") for s in segments)

    @flow(task_runner=RUNNER)
    def two() -> tuple[tuple[int, ...], Any]:
        options_of.submit().result()
        waiting = hot()
        return waiting, options_of.submit().result()

    waiting, (pid, started, expandable) = two()
    assert pid in waiting and started and expandable


def test_other_frameworks_stand_by_without_a_context() -> None:
    @task(name="hot-none", tags=gpu(memory="1GiB", framework="none"))
    def plain() -> int:
        return os.getpid()

    @flow(task_runner=RUNNER)
    def two() -> tuple[tuple[int, ...], int, int]:
        plain.submit().result()
        assert eventually(lambda: standby_pool().ready >= 1)
        return standby_pool().pids, standby_pool().hot, plain.submit().result()

    waiting, count, pid = two()
    assert pid in waiting and count == 0
