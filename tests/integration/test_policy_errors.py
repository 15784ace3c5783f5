"""What cannot be: each fails its task run, before any process starts and without using a retry."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, runtime, tags, task
from prefect.tasks import Task

from prefect_gpu import GPUTaskRunner, PolicyError, current_allocation, gpu
from prefect_gpu.errors import DeviceError, PlacementError
from tests.integration import engine_api as api

#: Tags, the error, and what it says.
BAD: dict[str, tuple[list[str], type[Exception], str]] = {
    "an unknown key": (["gpu:memroy=6GiB"], PolicyError, "did you mean gpu:memory"),
    "not a size": (["gpu:memory=12 bananas"], PolicyError, "gpu:memory=12 bananas"),
    "a size without a unit": (["gpu:memory=8"], PolicyError, "gpu:memory=8"),
    "no memory": (["gpu:memory=0GiB"], PolicyError, "gpu:memory=0GiB"),
    "more than all of a device": (["gpu:memory=120%"], PolicyError, "gpu:memory=120%"),
    "no device": (["gpu:count=0"], PolicyError, "gpu:count=0"),
    "an unknown framework": (["gpu:framework=theano"], PolicyError, "torch"),
    "a cap without a cache": (
        ["gpu:memory=1GiB", "gpu:caching=off", "gpu:allocation=limit"],
        PolicyError,
        "caching=off",
    ),
    "two budgets": (["gpu:memory=1GiB", "gpu:memory=2GiB"], PolicyError, "two values"),
    "more devices than there are": (["gpu:memory=1GiB", "gpu:count=3"], PlacementError, "3"),
    "a device that is not there": (["gpu:memory=1GiB", "gpu:device=7"], PlacementError, "7"),
    "more than the largest device": (["gpu:memory=80GiB"], PlacementError, "80GiB"),
}


@pytest.mark.usefixtures("prefect_server")
def test_what_cannot_be_fails_its_task_run_without_a_process_or_a_retry(tmp_path: Path) -> None:
    def body() -> None:
        (tmp_path / "started").touch()

    def of(name: str, given: list[str]) -> Task[[], None]:
        return task(body, name=name, tags=given, retries=3, retry_delay_seconds=60)

    kept: dict[str, Any] = {}
    runs: list[UUID] = []

    @flow(task_runner=GPUTaskRunner(devices=api.TWO))
    def bad() -> str:
        runs.append(UUID(runtime.flow_run.id))
        kept.update({name: of(name, given).submit() for name, (given, *_) in BAD.items()})
        with tags("gpu:memory=lots"):
            kept["from a context"] = of("from a context", gpu(memory="1GiB")).submit()
        for future in kept.values():
            future.wait()
        return "goes on"

    @flow(task_runner=GPUTaskRunner(devices="nvml", reports=False))
    def no_driver() -> None:
        kept["no driver"] = of("no driver", ["gpu"]).submit()
        kept["no driver"].wait()

    assert bad() == "goes on"
    cases = {**BAD, "from a context": ([], PolicyError, "gpu:memory=lots")}
    if not _has_driver():
        no_driver()
        cases["no driver"] = ([], DeviceError, "")
    for name, (_, error, said) in cases.items():
        found = kept[name].result(raise_on_failure=False)
        assert isinstance(found, error), (name, found)
        assert said in str(found), name
        # Of the user's: where it is submitted.
        assert traceback.extract_tb(found.__traceback__)[-1].filename == __file__, name
        assert kept[name].state.name == "Failed", name
    assert not (tmp_path / "started").exists()
    (report,) = api.artifacts(flow_run_id=runs[0], count=1)
    failed = str(len(BAD) + 1)
    assert report.metadata_ is not None
    assert {report.metadata_[key] for key in ("task_runs", "unstarted", "failed")} == {failed}
    assert report.description == f"Flow report · {failed} task runs: {failed} failed; 0 attempts."
    assert "did you mean gpu:memory" in report.data
    assert f"/runs/task-run/{kept['no memory'].task_run_id})" in report.data
    run = api.task_run(kept["two budgets"].task_run_id)
    assert run.run_count == 1
    assert run.state is not None and "two values for memory" in str(run.state.message)


def _has_driver() -> bool:
    try:
        from prefect_gpu.devices.nvml import NvmlReader

        NvmlReader()
    except Exception:
        return False
    return True


def test_a_constructor_or_decorator_raises_at_once() -> None:
    with pytest.raises(DeviceError, match="simulated devices 'two'"):
        GPUTaskRunner(devices="simulated:two")
    with pytest.raises(ValueError, match="placement"):
        GPUTaskRunner(placement="sideways")
    with pytest.raises(ValueError, match="headroom"):
        GPUTaskRunner(headroom="much")
    with pytest.raises(PolicyError, match="12 bananas"):
        gpu(memory="12 bananas")
    with pytest.raises(PolicyError, match="caching=off"):
        gpu(memory="1GiB", caching="off", allocation="limit")


@pytest.mark.usefixtures("prefect_server")
def test_tags_come_from_the_task_its_options_and_contexts_key_by_key() -> None:
    @task(tags=gpu(memory="1GiB", priority=2))
    def given() -> Any:
        return current_allocation()

    @task
    def untagged() -> Any:
        return current_allocation()

    kept: dict[str, Any] = {}

    @flow(task_runner=GPUTaskRunner(devices=api.TWO, reports=False))
    def tagged() -> None:
        futures = {
            "own": given.submit(),
            "options": given.with_options(tags=gpu(memory="2GiB", allocation="growth")).submit(),
            "thread": untagged.submit(),
        }
        with tags("gpu:memory=3GiB"), tags("gpu:count=2"):
            futures["context"] = given.submit()
            futures["context alone"] = untagged.submit()
        kept.update({name: future.result() for name, future in futures.items()})

    # The flow run's tags are not the tasks'.
    with tags("gpu:memory=5GiB"):
        tagged()
    gib = 1 << 30
    assert kept["own"].budget_bytes == kept["own"].cap_bytes == gib
    assert (kept["options"].budget_bytes, kept["options"].cap_bytes) == (2 * gib, None)
    assert kept["thread"] is None
    assert kept["context"].budget_bytes == kept["context alone"].budget_bytes == 3 * gib
    assert len(kept["context"].device_uuids) == 2
