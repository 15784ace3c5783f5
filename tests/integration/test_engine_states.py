"""What becomes of GPU tasks: values, retries, caches, timeouts, deaths, errors."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE
from prefect.states import Failed, State

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.errors import (
    ChildDiedError,
    ChildTimeoutError,
    PlacementTimeoutError,
    ResultError,
)
from tests.integration import engine_api as api
from tests.process.rig import eventually

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB")
MANY = GPUTaskRunner(devices=api.TWO, reports=False)


class ColdError(Exception):
    """An error of the user's, with a constructor that pickles."""


class AwkwardError(Exception):
    """One whose constructor takes other arguments than it passes on."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}: {hint}")
        self.code = code


class HeldError(Exception):
    """One that holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def test_a_cache_hit_starts_no_process_and_each_retry_has_its_own(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def mark(name: str) -> int:
        made = len(list(marks.glob(f"{name}-*")))
        (marks / f"{name}-{os.getpid()}").touch()
        return made

    @task(tags=SMALL, cache_policy=INPUTS, persist_result=True)
    def by_inputs(x: int, nonce: str) -> int:
        mark("inputs")
        return x + 1

    @task(tags=SMALL, cache_policy=TASK_SOURCE + INPUTS, persist_result=True)
    def by_source(nonce: str) -> int:
        mark("source")
        return 7

    @task(tags=SMALL, retries=2, cache_policy=NO_CACHE)
    def third_time() -> tuple[int, int]:
        if mark("retry") < 2:
            raise ValueError("not yet")
        allocation = current_allocation()
        assert allocation is not None
        return os.getpid(), allocation.attempt

    @task(tags=SMALL, retries=1, retry_delay_seconds=[1], cache_policy=NO_CACHE)
    def delayed() -> float:
        if mark("delayed") < 1:
            (marks / "failed_at").write_text(str(time.time()))
            raise ValueError("not yet")
        return time.time() - float((marks / "failed_at").read_text())

    def only_cold(task: Any, run: Any, state: State[Any]) -> bool:
        return isinstance(state.data, ColdError)

    @task(tags=SMALL, retries=3, retry_condition_fn=only_cold, cache_policy=NO_CACHE)
    def choosy() -> None:
        raise ColdError("again") if mark("choosy") == 0 else ValueError("never again")

    @task(tags=SMALL, retries=1, cache_policy=NO_CACHE)
    def failed_state() -> Any:
        return Failed(message="said so") if mark("state") == 0 else 5

    kept: dict[str, Any] = {}

    @flow(task_runner=MANY)
    def first(nonce: str) -> None:
        out: dict[str, Any] = {
            "a": by_inputs.submit(1, nonce),
            "s": by_source.submit(nonce),
            "retried": third_time.submit(),
            "delayed": delayed.submit(),
            "choosy": choosy.submit(),
            "state": failed_state.submit(),
        }
        for future in out.values():
            future.wait()
        out["b"] = by_inputs.submit(1, nonce)
        out["t"] = by_source.submit(nonce)
        for future in out.values():
            future.wait()
        kept.update(out)

    first(str(tmp_path))
    assert kept["a"].result() == kept["b"].result() == 2
    assert kept["s"].result() == kept["t"].result() == 7
    assert kept["b"].state.name == kept["t"].state.name == "Cached"
    assert len(list(marks.glob("inputs-*"))) == len(list(marks.glob("source-*"))) == 1
    pid, attempt = kept["retried"].result()
    assert attempt == 3
    assert len(list(marks.glob("retry-*"))) == 3
    assert pid != os.getpid()
    assert kept["delayed"].result() >= 1.0
    assert len(list(marks.glob("choosy-*"))) == 2
    assert isinstance(kept["choosy"].result(raise_on_failure=False), ValueError)
    assert kept["state"].result() == 5
    run = api.task_run(kept["retried"].task_run_id)
    assert run.run_count == 3
    assert api.names(kept["retried"].task_run_id) == [
        "Pending",
        "Running",
        "Retrying",
        "Retrying",
        "Completed",
    ]
    assert "AwaitingRetry" in api.names(kept["delayed"].task_run_id)


def test_a_timeout_counts_from_the_bodys_first_line_and_kills_the_process(tmp_path: Path) -> None:
    @task(tags=gpu(memory="7GiB"), timeout_seconds=2)
    def holds(name: str) -> str:
        time.sleep(1.2)
        return name

    @task(tags=gpu(memory="7GiB"), timeout_seconds=0.5, retries=1)
    def hangs() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    kept: dict[str, Any] = {}

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def waits() -> None:
        # The third queues for longer than it may run.
        kept["holds"] = [holds.submit(name) for name in "abc"]
        kept["hangs"] = hangs.submit()
        for future in (*kept["holds"], kept["hangs"]):
            future.wait()

    waits()
    assert [future.result() for future in kept["holds"]] == ["a", "b", "c"]
    state = kept["hangs"].state
    assert (state.type.value, state.name) == ("FAILED", "TimedOut")
    with pytest.raises(ChildTimeoutError, match=r"longer than timeout_seconds=0\.5"):
        kept["hangs"].result()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert api.task_run(kept["hangs"].task_run_id).state_name == "TimedOut"


def test_a_dead_child_crashes_its_task_run_alone(tmp_path: Path) -> None:
    @task(tags=SMALL)
    def dies(how: str) -> None:
        print(f"about to {how}", file=sys.stderr, flush=True)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        sys.exit("that was all")

    @task(tags=SMALL, retries=1)
    def dies_once() -> str:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(4)
        return "alive"

    def never(task: Any, run: Any, state: State[Any]) -> bool:
        (tmp_path / f"asked-{len(list(tmp_path.iterdir()))}").touch()
        return False

    @task(tags=SMALL, retries=2, retry_condition_fn=never)
    def dies_unretried() -> None:
        os._exit(5)

    @task(tags=SMALL)
    def lives(x: int) -> int:
        return x

    kept: dict[str, Any] = {}

    @flow(task_runner=MANY)
    def mixed() -> str:
        kept["dead"] = {how: dies.submit(how) for how in ("segfault", "kill", "exit", "sys.exit")}
        kept["once"] = dies_once.submit()
        kept["unretried"] = dies_unretried.submit()
        alive = lives.map(list(range(4)))
        try:
            kept["dead"]["kill"].result()
        except Exception as error:
            assert isinstance(error, ChildDiedError)
        assert alive.result() == [0, 1, 2, 3]
        for future in (*kept["dead"].values(), kept["once"], kept["unretried"]):
            future.wait()
        return "the flow goes on"

    assert mixed() == "the flow goes on"
    said = {}
    for how, future in kept["dead"].items():
        assert future.state.type.value == "CRASHED"
        error = future.result(raise_on_failure=False)
        assert type(error) is ChildDiedError
        said[how] = str(error)
        run = api.task_run(future.task_run_id)
        assert run.state is not None and run.state.type.value == "CRASHED"
        said[how + " api"] = str(run.state.message)
    assert "was killed by SIGSEGV" in said["segfault"]
    assert "was killed by SIGSEGV" in said["segfault api"]
    assert "about to segfault" in said["segfault"]
    assert "killed by SIGKILL" in said["kill"] and "possibly" in said["kill"]
    assert "ended with exit code 3" in said["exit"]
    assert "ended with exit code 3" in said["exit api"]
    assert "was ended by SystemExit: that was all" in said["sys.exit"]
    assert kept["once"].result() == "alive"
    assert kept["unretried"].state.type.value == "CRASHED"
    assert len(list(tmp_path.glob("asked-*"))) == 1


def test_errors_travel_as_they_are_or_are_named() -> None:
    @task(tags=SMALL)
    def raises(which: str) -> None:
        if which == "cold":
            raise ColdError("too cold", 3)
        if which == "awkward":
            raise AwkwardError(4, hint="warmer")
        if which == "held":
            raise HeldError("holding on")
        if which == "deep":

            def dig(n: int) -> None:
                dig(n + 1)

            dig(0)
        if which == "big":
            raise ValueError("x" * 2_000_000)
        raise KeyError(which) from ValueError("the cause")

    @task(tags=SMALL)
    def returns(what: str) -> Any:
        return {"deep": [threading.Lock()]} if what == "lock" else (i for i in "abc")

    @task(tags=SMALL)
    def takes(x: Any) -> None:
        raise AssertionError("no process was to start")

    kept: dict[str, Any] = {}
    lock = threading.Lock()

    @task(tags=SMALL)
    def closes_over() -> Any:
        return lock

    @flow(task_runner=MANY)
    def fails() -> str:
        whichs = ["cold", "awkward", "held", "deep", "big", "key"]
        kept.update({which: raises.submit(which) for which in whichs})
        kept["lock"] = returns.submit("lock")
        kept["generator"] = returns.submit("generator")
        kept["argument"] = takes.submit({"a": [1, threading.Lock()]})
        kept["closure"] = closes_over.submit()
        try:
            kept["cold"].result()
        except ColdError as error:
            assert error.args == ("too cold", 3)
            assert "raise ColdError" in str(error.__cause__)
        for future in kept.values():
            future.wait()
        return "done"

    assert fails() == "done"
    assert {future.state.type.value for n, future in kept.items() if n != "generator"} == {"FAILED"}

    def error(name: str) -> Any:
        return kept[name].result(raise_on_failure=False)

    assert type(error("awkward")) is ResultError
    assert "AwkwardError" in str(error("awkward")) and "code 4: warmer" in str(error("awkward"))
    assert "HeldError" in str(error("held")) and "lock" in str(error("held"))
    assert type(error("deep")) is RecursionError
    assert "revious line repeated" in str(error("deep").__cause__)
    assert len(str(error("big"))) == 2_000_000
    assert type(error("key")) is KeyError and "the cause" in str(error("key").__cause__)
    assert "result['deep'][0]" in str(error("lock")) and "_thread.lock" in str(error("lock"))
    assert kept["generator"].result() == ["a", "b", "c"]
    assert "x['a'][1]" in str(error("argument")) and "_thread.lock" in str(error("argument"))
    assert "the function of a GPU task" in str(error("closure"))
    assert "lock (used in closes_over) is a _thread.lock" in str(error("closure"))
    for name in ("lock", "argument", "closure"):
        assert type(error(name)) is ResultError
        run = api.task_run(kept[name].task_run_id)
        assert run.state is not None and "_thread.lock" in str(run.state.message)


def test_an_error_that_cannot_travel_is_still_retried(tmp_path: Path) -> None:
    @task(tags=SMALL, retries=1)
    def held_once() -> str:
        if not (tmp_path / "raised").exists():
            (tmp_path / "raised").touch()
            raise HeldError("once")
        return "again"

    @flow(task_runner=MANY)
    def one() -> str:
        return held_once.submit().result()

    assert one() == "again"


def test_large_values_arrays_and_tensors() -> None:
    import numpy
    import torch

    @task(tags=gpu(memory="1GiB", framework="none"))
    def echo(kind: str, value: Any) -> Any:
        if kind == "bytes":
            return value + b"!"
        return value * 2

    @flow(task_runner=MANY)
    def large() -> Any:
        array = numpy.arange(1_000_000, dtype="float64").reshape(1000, 1000)
        futures = [
            echo.submit("bytes", b"x" * 50_000_000),
            echo.submit("array", array),
            echo.submit("tensor", torch.arange(10)),
        ]
        data, doubled, tensor = (future.result() for future in futures)
        assert len(data) == 50_000_001 and data.endswith(b"x!")
        assert (doubled == array * 2).all()
        assert tensor.tolist() == list(range(0, 20, 2))

    large()


def test_a_wait_for_a_device_shows_in_the_api_and_ends(tmp_path: Path) -> None:
    @task(tags=gpu(memory="6GiB"))
    def holds(index: int) -> None:
        (tmp_path / f"holds-{index}").touch()
        assert eventually((tmp_path / "let-go").exists)

    @task(tags=gpu(memory="6GiB", priority=1))
    def follows() -> None:
        time.sleep(0.5)

    @task(tags=gpu(memory="6GiB", wait="1s"), retries=1)
    def impatient() -> None:
        raise AssertionError("no device was to be had")

    kept: dict[str, Any] = {}

    @flow(task_runner=GPUTaskRunner(devices=api.TWO, reports=False))
    def crowd() -> None:
        holders = [holds.submit(index) for index in range(2)]
        # Not by the number of processes: standbys are some too.
        api.until(lambda: all((tmp_path / f"holds-{index}").exists() for index in range(2)))
        kept["follows"] = follows.submit()
        kept["impatient"] = impatient.submit()
        kept["seen"] = api.until(
            lambda: (s := kept["follows"].state).name == "AwaitingGPU" and s, "AwaitingGPU"
        )
        kept["impatient"].wait()
        (tmp_path / "let-go").touch()
        for future in (*holders, kept["follows"]):
            future.wait()

    crowd()
    assert kept["seen"].type.value == "PENDING"
    assert "6GiB on any of 2 devices; most free 2GiB" in kept["seen"].message
    run_id = kept["follows"].task_run_id
    assert api.names(run_id) == ["Pending", "Running", "AwaitingGPU", "Running", "Completed"]
    run = api.task_run(run_id)
    assert run.run_count == 1
    assert 0.5 <= run.total_run_time.total_seconds() < 2.5
    states = api.history(run_id)
    waited_s = (states[3].timestamp - states[2].timestamp).total_seconds()
    assert waited_s > 0.5
    with pytest.raises(PlacementTimeoutError, match=r"gpu:wait=1(\.0)?s is over"):
        kept["impatient"].result()
    assert api.task_run(kept["impatient"].task_run_id).state_name == "Failed"
    assert api.names(kept["impatient"].task_run_id).count("Retrying") == 1
