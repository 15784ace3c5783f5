"""Processes that are forks, in real flows: all that holds for fresh interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.states import State

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import ChildTimeoutError
from prefect_gpu.processes.standby_pool import standby_pool
from tests.cases import needs
from tests.integration import bodies
from tests.integration.programs import Workplace, lines_of, wait_for
from tests.process.rig import eventually, is_alive
from tests.process.warm import end_sources

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB", framework="none")


def runner(**changes: Any) -> GPUTaskRunner:
    given: dict[str, Any] = {"devices": "host", "reports": False, "start_method": "auto"}
    return GPUTaskRunner(**{**given, **changes})


where = task(bodies.ids, tags=SMALL)


@pytest.fixture(autouse=True)
def none_of_another_test() -> None:
    end_sources()


def test_each_task_is_a_fork_of_one_template_and_nothing_is_left() -> None:
    @flow(task_runner=runner())
    def three() -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        found = [future.result() for future in [where.submit() for _ in range(3)]]
        return found, standby_pool().pids

    found, templates = three()
    assert len({pid for pid, _ in found}) == 3
    assert {parent for _, parent in found} == set(templates)
    # No standbys beside it.
    assert len(templates) == 1
    assert eventually(lambda: not any(is_alive(pid) for pid, _ in found))
    # It waits for the next flow, for a while.
    assert set(three()[1]) == set(templates)
    end_sources()
    assert not any(map(is_alive, templates))


def test_values_errors_deaths_timeouts_and_retries_are_as_ever(tmp_path: Path) -> None:
    @task(tags=SMALL)
    def double(x: int) -> dict[str, int]:
        allocation = current_allocation()
        assert allocation is not None
        return {"value": 2 * x, "attempt": allocation.attempt, "parent": os.getppid()}

    @task(tags=SMALL)
    def shop() -> None:
        raise bodies.ShopError("bread", 3)

    @task(tags=SMALL)
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    @task(tags=SMALL)
    def leave() -> None:
        os._exit(3)

    @task(tags=SMALL, timeout_seconds=0.5)
    def late() -> None:
        time.sleep(600)

    @task(tags=SMALL, retries=2)
    def third_time() -> tuple[int, int]:
        (tmp_path / f"tried-{os.getpid()}").touch()
        tried = len(list(tmp_path.glob("tried-*")))
        if tried < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return tried, os.getppid()

    @task(tags=SMALL)
    def add(x: dict[str, int], y: dict[str, int]) -> int:
        return x["value"] + y["value"]

    @flow(task_runner=runner())
    def all_of_it() -> tuple[dict[str, Any], tuple[int, ...]]:
        one, two = double.submit(1), double.submit(2)
        futures = {
            "double": one,
            "add": add.submit(one, two),
            "shop": shop.submit(),
            "crash": crash.submit(),
            "leave": leave.submit(),
            "late": late.submit(),
            "third_time": third_time.submit(),
        }
        for future in futures.values():
            future.wait(DEADLOCK_S)
        templates = standby_pool().pids
        return {name: future.state for name, future in futures.items()}, templates

    states, templates = all_of_it(return_state=True).result(raise_on_failure=False)
    doubled = result(states["double"])
    assert (doubled["value"], doubled["attempt"]) == (2, 1) and doubled["parent"] in templates
    assert result(states["add"]) == 6
    tried, parent = result(states["third_time"])
    assert tried == 3 and parent in templates
    problem = result(states["shop"])
    assert isinstance(problem, bodies.ShopError) and problem.item == "bread"
    assert states["crash"].name == states["leave"].name == "Crashed"
    assert "was killed by SIGSEGV" in states["crash"].message
    assert "ended with exit code 3" in states["leave"].message
    assert isinstance(result(states["late"]), ChildTimeoutError)


def result(state: State[Any]) -> Any:
    return state.result(raise_on_failure=False)


@needs("torch")
def test_libraries_work_and_the_surroundings_are_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_GPU_TEST_BEFORE", "as the flow began")

    @task(tags=gpu(memory="64MiB", framework="torch", cpus=1), log_prints=True)
    def compute() -> dict[str, Any]:
        import numpy as np
        import torch

        print("from a fork")
        ahead = "torch._dynamo" in sys.modules
        weights = torch.ones(200, 200, requires_grad=True)
        (weights @ weights).sum().backward()
        assert weights.grad is not None
        torch.optim.SGD([weights]).step()
        return {
            "ahead": ahead,
            "numpy": float((np.ones((200, 200)) @ np.ones((200, 200))).sum()),
            "torch": float(weights.grad.sum()),
            "random": float(torch.rand(1)) >= 0 and float(np.random.random()),
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("PREFECT_GPU_TEST_BEFORE"),
            "since": os.environ.get("PREFECT_GPU_TEST_SINCE"),
            "cwd": os.getcwd(),
            "argv": list(sys.argv),
            "path": [p for p in sys.path if p],
            "parent": os.getppid(),
        }

    @flow(task_runner=runner())
    def three() -> tuple[list[dict[str, Any]], tuple[int, ...]]:
        before = [compute.submit().result(), compute.submit().result()]
        templates = standby_pool().pids
        # Read at imports, for all that anybody knows.
        os.environ["PREFECT_GPU_TEST_SINCE"] = "now"
        monkeypatch.setenv("TEST_OF_A_LIBRARY", "now")
        return [*before, compute.submit().result()], templates

    try:
        (first, second, third), (template,) = three()
    finally:
        os.environ.pop("PREFECT_GPU_TEST_SINCE", None)
    assert first["random"] != second["random"]
    for found in (first, second, third):
        assert (found["numpy"], found["torch"]) == (200.0**3, 2 * 200.0**3)
        assert (found["threads"], found["variable"]) == (1, "as the flow began")
        assert (found["cwd"], found["argv"]) == (str(tmp_path), sys.argv)
        assert found["path"] == [os.path.abspath(p) for p in sys.path if p]
    assert first["parent"] == second["parent"] == template
    assert first["ahead"] and second["ahead"], "what the first optimizer would import"
    assert (first["since"], third["since"]) == (None, "now")
    # What was changed since could come too late for a process that has imported its libraries.
    assert third["parent"] == os.getpid()


def test_cancelled_tasks_end(tmp_path: Path) -> None:
    @task(tags=SMALL)
    def sleeps() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    @flow(task_runner=runner())
    def fails() -> None:
        sleeps.submit()
        sleeps.submit()
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        seen.append(standby_pool().pids)
        raise ValueError("the flow's own")

    seen: list[tuple[int, ...]] = []
    with pytest.raises(ValueError, match="the flow's own"):
        fails()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert eventually(lambda: not any(map(is_alive, pids)))
    assert standby_pool().pids == seen[0]


def test_a_template_that_is_killed_loses_no_task(tmp_path: Path) -> None:
    @task(tags=SMALL)
    def works(index: int) -> tuple[int, int]:
        (tmp_path / f"begun-{index}").touch()
        assert eventually((tmp_path / "go").exists)
        return index, os.getppid()

    @flow(task_runner=runner(max_processes=2))
    def six() -> list[tuple[int, int]]:
        futures = [works.submit(index) for index in range(6)]
        assert eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        (template,) = standby_pool().pids
        os.kill(template, signal.SIGKILL)
        (tmp_path / "go").touch()
        return [future.result() for future in futures]

    found = six()
    assert [index for index, _ in found] == list(range(6))


def test_frameworks_whose_forks_are_not_known_to_work_have_fresh_interpreters() -> None:
    @task(tags=gpu(memory="64MiB", framework="tensorflow"))
    def named() -> int:
        return os.getppid()

    @task(tags=gpu(memory="64MiB"))
    def found() -> int:
        if time.time() < 0:
            import tensorflow

            assert tensorflow
        return os.getppid()

    @flow(task_runner=runner(standby=0))
    def both() -> list[int]:
        return [each.submit().result() for each in (named, found)]

    assert both() == [os.getpid()] * 2


def test_spawn_means_fresh_interpreters_and_so_does_another_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @flow(task_runner=runner(start_method="spawn", standby=0))
    def spawned() -> int:
        return where.submit().result()[1]

    assert spawned() == os.getpid()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert spawned.with_options(task_runner=runner(standby=0))() == os.getpid()


def test_flows_of_several_threads_share_a_template() -> None:
    seen: list[tuple[int, ...]] = []
    both = threading.Barrier(2, timeout=DEADLOCK_S)

    @flow(task_runner=runner())
    def one() -> int:
        parent = where.submit().result()[1]
        both.wait()
        seen.append(standby_pool().pids)
        both.wait()
        return parent

    parents: list[int] = []
    threads = [threading.Thread(target=lambda: parents.append(one())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLOCK_S)
    assert len(parents) == 2 and len(set(parents)) == 1
    assert seen == [(parents[0],)] * 2 and standby_pool().pids == (parents[0],)


#: Signals that end a flow; `faults/test_processes` kills its process.
ENDS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]

_FLOW = """
import os, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.processes.standby_pool import standby_pool

@task(tags=gpu(memory="64MiB", framework="none"))
def work(index):
    with open(f"child-{index}", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(600)

@flow(task_runner=GPUTaskRunner(devices="host", start_method="auto", reports=False))
def waits():
    futures = work.map([0, 1])
    while not (os.path.exists("child-0") and os.path.exists("child-1")):
        time.sleep(0.01)
    with open("pids.txt.part", "w") as file:
        print(*standby_pool().pids, file=file)
    os.rename("pids.txt.part", "pids.txt")
    futures.wait()

waits()
"""


@pytest.mark.parametrize("signum", ENDS)
def test_none_outlives_its_flow(place: Workplace, signum: int) -> None:
    place.write("flow.py", _FLOW)
    process = place.start("flow.py", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: bool(lines_of(place.folder / "pids.txt")))
        files = [place.folder / name for name in ("pids.txt", "child-0", "child-1")]
        wait_for(lambda: all(lines_of(file) for file in files))
        pids = [int(lines_of(file)[0]) for file in files]
        assert all(map(is_alive, pids))
        process.send_signal(signum)
        process.wait(DEADLOCK_S)
        assert eventually(lambda: not any(map(is_alive, pids)))
    finally:
        process.kill()
        process.wait()
