"""Whole flows on a real device: policy, placement, memory truth, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from prefect_gpu import ChildDiedError, GPUTaskRunner, PlacementError, current_allocation, gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
]

GIB = 1 << 30
RUNNER = GPUTaskRunner(devices="nvml")


def metadata_of(key: str) -> list[dict[str, Any]]:
    """Every report under an artifact key, oldest first."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    return [dict(a.metadata_ or {}) for a in sorted(found, key=lambda a: str(a.created))]


def work_on_device(size_bytes: int) -> None:
    import torch

    held = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    a = torch.randn(2048, 2048, device="cuda")
    (a @ a).sum().item()
    held.fill_(1)
    torch.cuda.synchronize()


def test_a_cuda_tensor_arrives_on_the_host_and_the_report_is_true() -> None:
    @task(name="cuda-tensor", tags=gpu(memory="4GiB", framework="torch"))
    def make() -> dict[str, Any]:
        import torch

        work_on_device(GIB)
        tied = torch.arange(6.0, device="cuda").reshape(2, 3)
        return {"tensor": tied, "view": tied[1], "pid": os.getpid()}

    @flow(task_runner=RUNNER)
    def one() -> dict[str, Any]:
        return make.submit().result()

    result = one()
    assert result["tensor"].device.type == "cpu"
    assert result["view"].tolist() == [3.0, 4.0, 5.0]
    import torch

    assert not torch.cuda.is_initialized()
    (report,) = metadata_of("gpu-memory-cuda-tensor")
    assert report["source"] == "nvml"
    assert report["outcome"] == "completed"
    assert report["leaked_bytes"] == "0"
    assert GIB < int(report["peak_live_bytes"]) < 2 * GIB
    assert int(report["peak_process_bytes"]) <= int(report["budget_bytes"]) == 4 * GIB
    assert 200 << 20 < int(report["context_bytes"]) < 1200 << 20


def test_the_cap_holds_and_an_out_of_memory_is_told_as_one() -> None:
    @task(name="too-much", tags=gpu(memory="3GiB", framework="torch", oom="fail"))
    def too_much() -> None:
        allocation = current_allocation()
        assert allocation is not None and allocation.cap_bytes is not None
        assert GIB < allocation.cap_bytes < 3 * GIB
        work_on_device(4 * GIB)

    @flow(task_runner=RUNNER)
    def one() -> Any:
        return too_much.submit(return_state=True)

    with pytest.raises(Exception, match="out of memory") as caught:
        one()
    assert type(caught.value).__name__ == "OutOfMemoryError"
    (report,) = metadata_of("gpu-memory-too-much")
    assert (report["outcome"], report["cause"]) == ("oom", "own_cap")
    assert int(report["peak_process_bytes"]) <= 3 * GIB


def test_two_of_forty_percent_run_together_and_a_third_waits() -> None:
    @task(tags=gpu(memory="40%", framework="none"))
    def span() -> tuple[float, float]:
        start = time.time()
        time.sleep(4)
        return start, time.time()

    @flow(task_runner=RUNNER)
    def three() -> list[tuple[float, float]]:
        return [f.result() for f in [span.submit(), span.submit(), span.submit()]]

    first, second, third = sorted(three())
    assert second[0] < first[1], "two of 40 % overlap"
    assert third[0] >= min(first[1], second[1]), "a third waits for one to end"


def test_memory_of_other_peoples_processes_counts(device_is_clean: Callable[[], int]) -> None:
    program = (
        "import torch, sys; free, _ = torch.cuda.mem_get_info();"
        "x = torch.empty(free * 7 // 10, dtype=torch.uint8, device='cuda');"
        "print('up', flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdin is not None
    other.stdout.readline()

    @task(tags=gpu(memory="40%", framework="none"))
    def after() -> float:
        return time.time()

    @flow(task_runner=RUNNER)
    def waits() -> tuple[float, float]:
        future = after.submit()
        time.sleep(3)
        left = time.time()
        other.stdin.close()
        other.wait()
        return left, future.result()

    with other:
        left, started = waits()
    assert started > left


def test_death_by_any_means_leaves_nothing() -> None:
    @task(tags=gpu(memory="3GiB", framework="torch"))
    def die(how: str) -> None:
        work_on_device(GIB)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))

    @flow(task_runner=RUNNER)
    def dying() -> list[Any]:
        futures = die.map(["SIGKILL", "SIGSEGV", "exit", "SIGTERM"])
        return [f.result(raise_on_failure=False) for f in futures]

    assert [type(error) for error in dying()] == [ChildDiedError] * 4
    reports = metadata_of("gpu-memory-die")
    assert [r["outcome"] for r in reports] == ["died"] * 4
    assert {r["leaked_bytes"] for r in reports} == {"0"}


def test_growth_has_no_cap_and_all_takes_its_budget() -> None:
    @task(name="grows", tags=gpu(memory="3GiB", framework="torch", allocation="growth"))
    def grows() -> int | None:
        work_on_device(4 * GIB)
        allocation = current_allocation()
        assert allocation is not None
        return allocation.cap_bytes

    @task(name="takes-all", tags=gpu(memory="8GiB", framework="torch", allocation="all"))
    def takes_all() -> int:
        import torch

        return int(torch.cuda.memory_reserved())

    @flow(task_runner=RUNNER)
    def both() -> tuple[Any, int]:
        return grows.submit().result(), takes_all.submit().result()

    cap, reserved = both()
    assert cap is None
    assert reserved > 6 * GIB


def test_a_nested_gpu_task_reserves_beside_its_parent() -> None:
    @task(tags=gpu(memory="2GiB", framework="none"))
    def inner() -> int:
        return os.getpid()

    @task(tags=gpu(memory="3GiB", framework="torch"))
    def outer() -> tuple[int, int]:
        work_on_device(GIB)
        return os.getpid(), inner.submit().result()

    @task(tags=gpu(memory="90%", framework="torch"))
    def hopeless() -> None:
        import torch

        # What it does not use of its budget it would lend to the inner task.
        used = torch.empty(torch.cuda.mem_get_info()[1] * 8 // 10, dtype=torch.uint8, device="cuda")
        inner.with_options(tags=gpu(memory="30%")).submit().result()
        used.fill_(0)

    @flow(task_runner=RUNNER)
    def nested() -> tuple[int, int]:
        return outer.submit().result()

    @flow(task_runner=RUNNER)
    def never() -> None:
        hopeless.submit().result()

    first, second = nested()
    assert len({first, second, os.getpid()}) == 3
    with pytest.raises(PlacementError, match="it can never start while"):
        never()


def test_jax_and_cupy_are_capped_and_their_arrays_arrive_as_numpy() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("cupy")

    @task(name="in-jax", tags=gpu(memory="4GiB", framework="jax"))
    def in_jax() -> Any:
        import jax.numpy as jnp

        a = jnp.ones((4096, 4096))
        return (a @ a)[0, :3]

    @task(name="in-cupy", tags=gpu(memory="4GiB", framework="cupy"))
    def in_cupy() -> Any:
        import cupy

        a = cupy.ones((4096, 4096))
        return float((a @ a)[0, 0])

    @flow(task_runner=RUNNER)
    def both() -> tuple[Any, Any]:
        first, second = in_jax.submit(), in_cupy.submit()
        return first.result(), second.result()

    array, value = both()
    assert type(array).__module__ == "numpy"
    assert array.tolist() == [4096.0] * 3
    assert value == 4096.0
    for key in ("gpu-memory-in-jax", "gpu-memory-in-cupy"):
        (report,) = metadata_of(key)
        assert int(report["peak_process_bytes"]) <= 4 * GIB, report


def test_the_parent_is_in_no_list_even_when_it_asks_for_devices(tmp_path: Path) -> None:
    program = tmp_path / "devices.py"
    program.write_text(
        "import os, pynvml\n"
        "from prefect_gpu.devices.spec import open_reader, parse_spec\n"
        "reader = open_reader(parse_spec('nvml'), os.environ)\n"
        "for _ in range(3): reader.read([])\n"
        "pynvml.nvmlInit()\n"
        "h = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "print(os.getpid() in [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)])\n"
    )
    answer = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "False"
