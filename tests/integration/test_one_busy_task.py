"""Tasks that keep a GPU busy by their earlier runs, in a flow."""

from __future__ import annotations

import time

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.scheduling.history import PastRun

Span = tuple[float, float]


@task(tags=gpu(memory="1GiB", framework="none"))
def compute() -> Span:
    began_s = time.time()
    time.sleep(1.5)
    return began_s, time.time()


@flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB"))
def two() -> list[Span]:
    return [future.result() for future in [compute.submit(), compute.submit()]]


@pytest.mark.parametrize("setting", ["1", "0"])
def test_the_second_waits_for_the_first_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    busy = PastRun(1.0, "completed", process_bytes=1 << 30, run_s=60.0, busy_fraction=0.97)
    monkeypatch.setattr(MemoryHistory, "runs", lambda self, key: [busy])
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_ONE_BUSY_TASK_PER_DEVICE", setting)
    (_, ended_s), (began_s, _) = sorted(two())
    assert (began_s >= ended_s) is (setting == "1")
    assert ("kept busy by: compute" in caplog.text) is (setting == "1")
