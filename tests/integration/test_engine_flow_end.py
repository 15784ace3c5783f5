"""How flows end, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.reports.publish import artifact_key
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB")


@task(tags=SMALL)
def endless(folder: str) -> None:
    """Run until killed."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


@task(tags=gpu(memory="8GiB", priority=-1))
def queued() -> None:
    """Wait for a device in vain."""


@pytest.mark.parametrize("kind", ["sync", "async", "retried"])
def test_a_flow_that_raises_ends_its_children_at_once(kind: str, tmp_path: Path) -> None:
    kept: list[Any] = []
    raised_at: list[float] = []

    def body() -> None:
        if len(kept) == 2:
            # The second attempt of the retried flow.
            raise ValueError("for good")
        kept.append(endless.submit(str(tmp_path)))
        api.until(lambda: list(tmp_path.iterdir()))
        kept.append(queued.submit())
        raised_at.append(time.monotonic())
        raise ValueError("the flow's own")

    runner = GPUTaskRunner(devices=api.ONE, reports=False)

    if kind == "async":

        @flow(task_runner=runner)
        async def fails_async() -> None:
            body()

        with pytest.raises(ValueError, match="own"):
            asyncio.run(fails_async())
    else:

        @flow(task_runner=runner, retries=int(kind == "retried"))
        def fails() -> None:
            body()

        with pytest.raises(ValueError, match="for good" if kind == "retried" else "own"):
            fails()
    assert time.monotonic() - raised_at[0] < 15
    assert api.children() == []
    (pid,) = [int(path.name) for path in tmp_path.iterdir()]
    assert not os.path.exists(f"/proc/{pid}")
    for future in kept:
        state = api.task_run(future.task_run_id).state
        assert state is not None and state.type.value == "CRASHED"
        # An ordinary error for whoever still asks.
        assert isinstance(future.result(raise_on_failure=False), Exception)


def test_a_flow_that_returns_waits_for_its_tasks(tmp_path: Path) -> None:
    @task(tags=SMALL)
    def slow(name: str) -> str:
        time.sleep(0.5)
        (tmp_path / name).touch()
        return name

    @task
    def after(name: str) -> None:
        (tmp_path / f"after-{name}").touch()

    kept: list[Any] = []

    @flow(task_runner=GPUTaskRunner(devices=api.TWO, reports=False))
    def leaves() -> str:
        kept.append(slow.submit("a"))
        kept.append(after.submit(kept[0]))
        kept.append(slow.submit("b", wait_for=[kept[1]]))
        return "left"

    assert leaves() == "left"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "after-a", "b"}
    assert {api.task_run(future.task_run_id).state_name for future in kept} == {"Completed"}


def test_nothing_is_left_and_reports_are_published() -> None:
    @task(tags=gpu(memory="64MiB"), retries=1)
    def twice() -> None:
        from prefect_gpu import current_allocation
        from prefect_gpu.testing import allocate

        allocation = current_allocation()
        assert allocation is not None
        with allocate("32MiB"):
            if allocation.attempt == 1:
                # The second process is over before this one has ended.
                atexit.register(time.sleep, 1.0)
                raise ValueError("once")

    kept: list[Any] = []

    @flow(task_runner=GPUTaskRunner(devices=api.TWO))
    def reported() -> None:
        kept.append(twice.submit())

    def inventory() -> tuple[list[str], int]:
        gc.collect()
        threads = sorted(
            t.name for t in threading.enumerate() if t.name.startswith(("prefect-gpu", "Thread"))
        )
        return threads, len(os.listdir("/proc/self/fd"))

    reported()
    before = inventory()
    reported()
    reported()
    after = inventory()
    assert api.children() == []
    assert after[0] == before[0]
    assert not [name for name in after[0] if "engine" in name or "publisher" in name]
    assert after[1] <= before[1]
    run = api.task_run(kept[-1].task_run_id)
    found = api.artifacts(task_run_id=run.id, count=2)
    assert {artifact.key for artifact in found} == {artifact_key("gpu-memory", "twice")}
    first, second = (artifact.metadata_ or {} for artifact in found)
    assert set(first) == {
        "schema", "task_key", "device_uuid", "device_name", "framework", "outcome", "attempt",
        "budget_bytes", "budget_source", "peak_process_bytes", "peak_live_bytes",
        "peak_reserved_bytes", "context_bytes", "leaked_bytes", "queued_s", "start_s", "run_s",
        "samples", "source", "cap_bytes", "cause", "steady_live_bytes",
    }  # fmt: skip
    assert [(m["attempt"], m["outcome"]) for m in (first, second)] == [
        ("1", "failed"),
        ("2", "completed"),
    ]
    assert second["peak_live_bytes"] == str(32 << 20)
    assert second["budget_bytes"] == str(64 << 20)
    assert (second["source"], second["budget_source"]) == ("simulated", "tag")
    all_of_flow = api.artifacts(flow_run_id=run.flow_run_id, count=3)
    assert artifact_key("gpu-flow", "reported") in {artifact.key for artifact in all_of_flow}


def test_a_runner_copies_compares_and_pickles() -> None:
    runner = GPUTaskRunner(
        devices=api.TWO,
        placement="pack",
        max_processes=3,
        headroom="1GiB",
        reports=False,
        max_tasks_per_device=2,
    )
    assert runner.max_tasks_per_device == 2
    again = runner.duplicate()
    assert again == runner and hash(again) == hash(runner) and again is not runner
    assert runner != GPUTaskRunner(devices=api.TWO) and runner != "runner"
    assert pickle.loads(pickle.dumps(runner)) == runner
    with runner:
        assert pickle.loads(pickle.dumps(runner)) == runner

    @flow(task_runner=runner)
    def one() -> None:
        """Nothing."""

    assert cloudpickle.loads(cloudpickle.dumps(one)).task_runner == runner
    with pytest.raises(RuntimeError, match="must be started"):
        runner.submit(endless, {})

    @task(tags=SMALL)
    def pid() -> int:
        return os.getpid()

    # A class in place of an instance; and no flow at all.
    @flow(task_runner=GPUTaskRunner)
    def default() -> int:
        return pid.submit().result()

    assert default() != os.getpid()
    with GPUTaskRunner(devices=api.TWO, reports=False) as alone:
        assert alone.submit(pid, {}).result() != os.getpid()
