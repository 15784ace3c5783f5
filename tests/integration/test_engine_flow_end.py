"""The ends of flows: their children end, reports are published, and nothing is left."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import pickle
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from prefect import flow, task
from prefect.client.schemas.objects import TaskRun
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.reports.publish import artifact_key
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB")


endless = task(bodies.endless, tags=SMALL)


@task(tags=gpu(memory="100%", priority=-1))
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
    # The task itself would take ten minutes.
    assert time.monotonic() - raised_at[0] < DEADLOCK_S
    assert api.children() == []
    (pid,) = [int(path.name) for path in tmp_path.iterdir()]
    assert not os.path.exists(f"/proc/{pid}")
    for future in kept:
        state = api.task_run(future.task_run_id).state
        assert state is not None and state.type.value == "CANCELLED"
        # An ordinary error for later calls of `result`.
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


@dataclass(frozen=True)
class Reported:
    """Three runs of a flow whose task fails once and is retried."""

    #: Names of threads and kinds of open descriptors after the first flow run, and after the last.
    before: tuple[list[str], Counter[str]]
    after: tuple[list[str], Counter[str]]
    #: Child processes after the last flow run.
    children: list[int]
    #: The task run of the last flow run.
    task_run: TaskRun


def open_descriptors() -> Counter[str]:
    """Return what this process has open, but for connections that Prefect's clients keep to the server."""
    connections = {each.fd for each in psutil.Process().net_connections("tcp")}
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed again.
        with contextlib.suppress(FileNotFoundError):
            if int(name) not in connections:
                kinds[re.sub(r"[0-9]+", "N", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return kinds


@pytest.fixture(scope="module")
def reported(prefect_server: str) -> Reported:
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

    @flow(name="reported", task_runner=GPUTaskRunner(devices=api.TWO))
    def runs() -> None:
        kept.append(twice.submit())

    def inventory() -> tuple[list[str], Counter[str]]:
        gc.collect()
        threads = sorted(
            t.name for t in threading.enumerate() if t.name.startswith(("prefect-gpu", "Thread"))
        )
        return threads, open_descriptors()

    runs()
    before = inventory()
    runs()
    runs()
    return Reported(before, inventory(), api.children(), api.task_run(kept[-1].task_run_id))


def test_a_flow_that_is_over_has_left_no_process(reported: Reported) -> None:
    assert reported.children == []


def test_a_flow_that_is_over_has_left_no_thread(reported: Reported) -> None:
    assert reported.after[0] == reported.before[0]
    assert not [name for name in reported.after[0] if "engine" in name or "publisher" in name]


def test_a_flow_that_is_over_has_left_no_descriptor(reported: Reported) -> None:
    assert not reported.after[1] - reported.before[1]


def test_each_process_of_a_task_run_has_a_report(reported: Reported) -> None:
    found = api.artifacts(task_run_id=reported.task_run.id, count=2)
    assert {artifact.key for artifact in found} == {artifact_key("gpu-memory", "twice")}
    metadata = [artifact.metadata_ or {} for artifact in found]
    assert [(m["attempt"], m["outcome"]) for m in metadata] == [("1", "failed"), ("2", "completed")]


def test_a_report_has_these_numbers(reported: Reported) -> None:
    _, second = api.artifacts(task_run_id=reported.task_run.id, count=2)
    metadata = second.metadata_ or {}
    assert set(metadata) == {
        "schema", "task_key", "device_uuid", "device_name", "framework", "outcome", "attempt",
        "budget_bytes", "budget_source", "peak_process_bytes", "peak_live_bytes",
        "peak_reserved_bytes", "context_bytes", "leaked_bytes", "queued_s", "start_s", "run_s",
        "samples", "source", "cap_bytes", "cause", "shared_with", "steady_live_bytes",
        "task_name", "qualified_name", "flow_name", "learn_by", "learn_by_words", "priority", "exclusive",
        "device_total_bytes", "placed_at", "held_s", "wanted_bytes", "capacity_bytes", "counted_out",
    }  # fmt: skip
    assert metadata["peak_live_bytes"] == str(32 << 20)
    assert metadata["budget_bytes"] == str(64 << 20)
    assert (metadata["source"], metadata["budget_source"]) == ("simulated", "tag")


def test_a_flow_run_has_a_report(reported: Reported) -> None:
    found = api.artifacts(flow_run_id=reported.task_run.flow_run_id, count=3)
    assert artifact_key("gpu-flow", "reported") in {artifact.key for artifact in found}


@pytest.fixture
def packed() -> GPUTaskRunner:
    """A runner with every argument given."""
    return GPUTaskRunner(
        devices=api.TWO,
        placement="pack",
        max_processes=3,
        headroom="1GiB",
        reports=False,
        max_tasks_per_device=2,
    )


def test_a_copy_of_a_runner_equals_it(packed: GPUTaskRunner) -> None:
    again = packed.duplicate()
    assert again == packed and hash(again) == hash(packed) and again is not packed


def test_a_runner_with_other_arguments_is_another_one(packed: GPUTaskRunner) -> None:
    assert packed != GPUTaskRunner(devices=api.TWO)
    others = {"placement": "pack", "max_processes": 3, "headroom": "1GiB", "reports": False}
    assert packed != GPUTaskRunner(devices=api.TWO, **others)
    assert packed == GPUTaskRunner(devices=api.TWO, **others, max_tasks_per_device=2)
    assert packed != "runner"


def test_a_runner_can_be_pickled_while_it_runs_and_while_it_does_not(packed: GPUTaskRunner) -> None:
    assert pickle.loads(pickle.dumps(packed)) == packed
    with packed:
        assert pickle.loads(pickle.dumps(packed)) == packed


def test_a_flow_can_be_pickled_with_its_runner(packed: GPUTaskRunner) -> None:
    @flow(task_runner=packed)
    def one() -> None:
        """Do nothing."""

    assert cloudpickle.loads(cloudpickle.dumps(one)).task_runner == packed


def test_a_runner_must_be_started_before_it_takes_tasks(packed: GPUTaskRunner) -> None:
    with pytest.raises(RuntimeError, match="must be started"):
        packed.submit(endless, {})


ids = task(bodies.ids, tags=SMALL)


def test_a_flow_takes_the_class_of_the_runner_in_place_of_an_instance() -> None:
    @flow(task_runner=GPUTaskRunner)
    def default() -> int:
        return ids.submit().result()[0]

    assert default() != os.getpid()


def test_a_runner_takes_tasks_outside_of_any_flow() -> None:
    # Without it Prefect warns of its own log lines of the task run, and a warning is an error here.
    apart = {PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}
    with (
        temporary_settings(apart),
        GPUTaskRunner(devices=api.TWO, reports=False) as alone,
    ):
        assert alone.submit(ids, {}).result()[0] != os.getpid()
