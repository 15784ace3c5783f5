"""Standbys under a real flow: which task gets one, that none is left, and that tasks see no difference."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.processes.standby_pool import standby_pool
from tests.integration import bodies
from tests.integration.programs import Workplace, lines_of, wait_for
from tests.process.rig import eventually, is_alive
from tests.process.warm import end_sources

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB", framework="none")


def runner(**changes: Any) -> GPUTaskRunner:
    given: dict[str, Any] = {
        "devices": "host",
        "reports": False,
        "standby": 1,
        "start_method": "spawn",
    }
    return GPUTaskRunner(**{**given, **changes})


def ready() -> tuple[int, ...]:
    assert eventually(lambda: standby_pool().ready_by_kind.total() >= 1)
    return standby_pool().pids


where = task(bodies.ids, tags=SMALL)


@pytest.fixture(autouse=True)
def no_source_of_another_test() -> None:
    end_sources()


def test_the_second_task_is_done_by_the_process_that_waited() -> None:
    @flow(task_runner=runner())
    def two() -> tuple[int, tuple[int, ...], int]:
        first = where.submit().result()[0]
        waiting = ready()
        return first, waiting, where.submit().result()[0]

    first, waiting, second = two()
    assert first != second and waiting == (second,)
    assert standby_pool().pids == (), "the flow's end is theirs"


def test_with_standby_off_none_waits() -> None:
    @flow(task_runner=runner(standby=0))
    def two() -> tuple[int, ...]:
        where.submit().result()
        time.sleep(0.1)
        found = standby_pool().pids
        where.submit().result()
        return found

    assert two() == ()


def test_a_task_that_waits_for_another_has_one_kept_for_it(tmp_path: Path) -> None:
    @task
    def slow(path: str) -> int:
        assert eventually(lambda: os.path.exists(path))
        return 1

    @task(tags=SMALL)
    def after(x: int) -> int:
        return os.getpid()

    @flow(task_runner=runner())
    def chain(path: str) -> tuple[tuple[int, ...], int]:
        future = after.submit(slow.submit(path))
        waiting = ready()
        Path(path).touch()
        return waiting, future.result()

    path = tmp_path / "go"
    try:
        waiting, done_by = chain(str(path))
    finally:
        path.unlink(missing_ok=True)
    assert waiting == (done_by,)


def test_what_a_body_finds_is_the_same_in_both(tmp_path: Path) -> None:
    # Else the number of threads depends on whether the process before has gone yet.
    @task(tags=gpu(memory="64MiB", framework="none", cpus=1), log_prints=True)
    def look() -> dict[str, Any]:
        import prefect
        from prefect.context import get_run_context
        from prefect.settings import PREFECT_API_URL

        from prefect_gpu import current_allocation

        context = get_run_context()
        allocation = current_allocation()
        assert allocation is not None
        return {
            "pid": os.getpid(),
            "environment": dict(os.environ),
            "url": PREFECT_API_URL.value(),
            "client": str(context.client.api_url),
            "answers": context.client.hello().status_code,
            "name": prefect.runtime.task_run.name.partition("-")[0],
            "budget": allocation.budget_bytes,
            "argv": list(sys.argv),
            "path": list(sys.path),
            "cwd": os.getcwd(),
        }

    @flow
    def both() -> dict[str, Any]:
        first = look.submit().result()
        waiting = standby_pool().pids and ready()
        second = look.submit().result()
        assert (second["pid"],) == waiting or not waiting
        return {k: v for k, v in (second if waiting else first).items() if k != "pid"}

    cold = both.with_options(task_runner=runner(standby=0))()
    warm = both.with_options(task_runner=runner())()
    # Each child has a mark of its own.
    assert cold["environment"].pop("PREFECT_GPU_CHILD") != warm["environment"].pop(
        "PREFECT_GPU_CHILD"
    )
    assert cold == warm


def test_a_flow_that_fails_leaves_none() -> None:
    seen: list[tuple[int, ...]] = []

    @flow(task_runner=runner())
    def fails() -> None:
        where.submit().result()
        seen.append(ready())
        raise ValueError("the flow's own")

    with pytest.raises(ValueError, match="the flow's own"):
        fails()
    assert standby_pool().pids == () and not any(map(is_alive, seen[0]))


#: Signals that end a flow; `faults/test_processes` kills its process.
ENDS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]

_FLOW = """
import os, sys, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.processes.standby_pool import standby_pool

@task(tags=gpu(memory="64MiB", framework="none"))
def work():
    return os.getpid()

@flow(task_runner=GPUTaskRunner(devices="host", standby=1, start_method="spawn", reports=False))
def waits():
    work.submit().result()
    while not standby_pool().ready_by_kind.total():
        time.sleep(0.01)
    with open("pids.txt.part", "w") as file:
        print(*standby_pool().pids, file=file)
    os.rename("pids.txt.part", "pids.txt")
    time.sleep(600)

waits()
"""


CPU_FRAMEWORKS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
        ),
    )
    for name in ("torch", "tensorflow")
]


@pytest.mark.parametrize("name", CPU_FRAMEWORKS)
def test_a_framework_that_was_imported_ahead_still_takes_its_threads(
    name: str, tmp_path: Path
) -> None:
    tags = gpu(memory="64MiB", framework=name)

    @task(tags=tags)
    def threads(name: str) -> tuple[int, tuple[int, int], str]:
        if name == "torch":
            import torch

            found = torch.get_num_threads(), torch.get_num_interop_threads()
        else:
            import tensorflow as tf

            tf.reduce_sum(tf.ones([64, 64]) @ tf.ones([64, 64])).numpy()
            setting = tf.config.threading
            found = (
                setting.get_intra_op_parallelism_threads(),
                setting.get_inter_op_parallelism_threads(),
            )
        return os.getpid(), found, os.environ["OMP_NUM_THREADS"]

    @task(tags=SMALL)
    def sleeps(path: str) -> None:
        Path(path + ".begun").touch()
        assert eventually(lambda: os.path.exists(path))

    @flow(task_runner=runner(standby=2))
    def both(path: str) -> Any:
        threads.submit(name).result(timeout=DEADLOCK_S)
        waiting = ready()
        # With another process the threads of each are half of what they were at the imports.
        other = sleeps.submit(path)
        assert eventually(lambda: os.path.exists(path + ".begun"))
        found = threads.submit(name).result(timeout=DEADLOCK_S)
        Path(path).touch()
        other.result()
        return waiting, found

    path = tmp_path / "go"
    try:
        waiting, (pid, (intra, inter), variable) = both(str(path))
    finally:
        path.unlink(missing_ok=True)
        Path(f"{path}.begun").unlink(missing_ok=True)
    assert pid in waiting
    expected = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (intra, inter, variable) == (expected, expected, str(expected))


@pytest.mark.parametrize("signum", ENDS)
def test_none_outlives_its_flow(place: Workplace, signum: int) -> None:
    place.write("flow.py", _FLOW)
    process = place.start("flow.py", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: bool(lines_of(place.folder / "pids.txt")))
        (waiting,) = map(int, lines_of(place.folder / "pids.txt"))
        assert is_alive(waiting)
        process.send_signal(signum)
        process.wait(DEADLOCK_S)
        assert eventually(lambda: not is_alive(waiting))
    finally:
        process.kill()
        process.wait()
