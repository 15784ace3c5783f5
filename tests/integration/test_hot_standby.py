"""Hot standbys under a real flow, on simulated devices, whose contexts count."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.processes.standby_pool import standby_pool
from prefect_gpu.testing import SimulatedDevices
from prefect_gpu.units import GIB, MIB
from tests.integration import engine_api as api
from tests.integration.test_memory_ladder import machine
from tests.process.rig import eventually, is_alive

pytestmark = pytest.mark.usefixtures("prefect_server")

CONTEXT = 512 * MIB


def runner(devices: str = "1x16GiB") -> GPUTaskRunner:
    return GPUTaskRunner(
        devices=SimulatedDevices(devices, context="512MiB"), standby="hot", headroom="0"
    )


def hot() -> tuple[int, ...]:
    assert eventually(lambda: standby_pool().hot >= 1)
    return standby_pool().pids


def held(reader: SimulatedReader) -> dict[int, int]:
    """What processes hold of the only device."""
    (snapshot,) = reader.read(())
    return {use.pid: use.used_bytes or 0 for use in snapshot.processes}


@task(tags=gpu(memory="4GiB"))
def where(size: str = "1GiB") -> tuple[int, int | None]:
    from prefect_gpu.testing import allocate

    held = allocate(size)
    allocation = current_allocation()
    assert held is not None and allocation is not None
    return os.getpid(), allocation.cap_bytes


def metadata(future: Any) -> dict[str, str]:
    (artifact,) = api.artifacts(task_run_id=future.task_run_id, count=1)
    return artifact.metadata_ or {}


def test_a_task_is_done_by_a_process_that_has_its_context() -> None:
    futures: list[Any] = []
    seen: dict[str, Any] = {}

    @flow(task_runner=runner())
    def two() -> None:
        futures.append(where.submit())
        futures[0].result()
        reader = machine()
        waiting = hot()
        seen["held"] = {pid: held(reader).get(pid) for pid in waiting}
        futures.append(where.submit())
        seen["pid"], seen["cap"] = futures[1].result()
        seen["reader"] = reader

    two()
    assert seen["held"][seen["pid"]] == CONTEXT, "before its task came"
    assert seen["cap"] == 4 * GIB - CONTEXT, "what comes late holds"
    report = metadata(futures[1])
    assert report["leaked_bytes"] == "0" and report["outcome"] == "completed"
    assert report["context_bytes"] == str(CONTEXT)
    assert standby_pool().pids == ()
    assert eventually(lambda: held(seen["reader"]) == {}), "the flow's end is theirs"


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("takes-all", gpu(memory="100%")),
        ("is-alone", gpu(memory="1GiB", exclusive=True)),
        ("probes", gpu(exclusive=True)),
    ],
)
def test_a_task_that_needs_the_device_has_it(name: str, tags: list[str]) -> None:
    futures: list[Any] = []

    # Each a history of its own.
    @task(name=name)
    def other() -> int:
        allocation = current_allocation()
        assert allocation is not None
        return allocation.budget_bytes

    @flow(task_runner=runner())
    def needs() -> tuple[tuple[int, ...], int]:
        where.submit().result()
        waiting = hot()
        # Another set of modules, so another kind: none of those that wait is for it.
        futures.append(other.with_options(tags=[*tags, "gpu:framework=torch"]).submit())
        return waiting, futures[0].result()

    waiting, budget = needs()
    assert budget == (GIB if "gpu:memory=1GiB" in tags else 16 * GIB)
    assert not any(map(is_alive, waiting))
    assert metadata(futures[0])["leaked_bytes"] == "0"


def test_many_tasks_run_as_they_would_without(caplog: pytest.LogCaptureFixture) -> None:
    futures: list[Any] = []

    @flow(task_runner=runner("2x9GiB"))
    def many() -> list[Any]:
        futures.extend(where.map(["1GiB"] * 8))
        return [future.result()[0] for future in futures]

    with caplog.at_level(logging.WARNING, "prefect_gpu"):
        assert len(set(many())) == 8
    assert {metadata(future)["leaked_bytes"] for future in futures} == {"0"}
    assert not [r for r in caplog.records if r.name.startswith("prefect_gpu")]


def test_where_there_is_nothing_to_start_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    @task(tags=gpu(memory="64MiB", framework="none"))
    def small() -> int:
        return os.getpid()

    @task(tags=gpu(memory="64MiB", framework="none"))
    def another() -> int:
        return os.getpid()

    @flow(task_runner=GPUTaskRunner(devices="host", standby="hot", reports=False))
    def on_host() -> None:
        small.submit().result()
        another.submit().result()

    with caplog.at_level(logging.INFO, "prefect_gpu"):
        on_host()
    told = [r.getMessage() for r in caplog.records if "standby='hot'" in r.getMessage()]
    assert told == ["standby='hot' needs NVIDIA devices: without, standbys only import ahead"]
