"""Final states of GPU tasks: values, retries, caches, timeouts, deaths, errors.

Tests that read the same flow run share it: a fixture runs it once.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE
from prefect.context import TaskRunContext
from prefect.states import Failed, State

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.errors import (
    ChildDiedError,
    ChildTimeoutError,
    PlacementTimeoutError,
    ResultError,
)
from tests.integration import engine_api as api
from tests.integration.bodies import AwkwardError, ColdError, HeldError
from tests.process.rig import eventually

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB")
MANY = GPUTaskRunner(devices=api.TWO, reports=False)


#: The futures of one flow run, by what their tasks do.
Futures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A flow run that is over."""

    futures: Futures
    #: A folder in which each process of a task left a file `NAME-PID`.
    marks: Path
    #: Whether each retry condition and each cache key got the task itself.
    itself: list[bool] = field(default_factory=list)

    def processes(self, name: str) -> set[int]:
        """Return the ids of the processes in which a task's body ran."""
        return {int(path.name.rpartition("-")[2]) for path in self.marks.glob(f"{name}-*")}

    def error(self, name: str) -> Any:
        """Return the exception that a task run ended with."""
        return self.futures[name].result(raise_on_failure=False)

    def message(self, name: str) -> str:
        """Return the message of a task run's final state in the API."""
        state = api.task_run(self.futures[name].task_run_id).state
        assert state is not None
        return str(state.message)


# Retries and caches.


@pytest.fixture(scope="module")
def repeated(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Tasks that succeed at a later try, and tasks with a cache that run twice."""
    marks = tmp_path_factory.mktemp("marks")

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
        if mark("retried") < 2:
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

    itself: list[bool] = []

    def only_cold(task: Any, run: Any, state: State[Any]) -> bool:
        itself.append(task is choosy)
        return isinstance(state.data, ColdError)

    def key(context: TaskRunContext, parameters: Any) -> None:
        itself.append(context.task is keyed)

    @task(tags=SMALL, cache_key_fn=key)
    def keyed() -> int:
        return 3

    @task(tags=SMALL, retries=3, retry_condition_fn=only_cold, cache_policy=NO_CACHE)
    def choosy() -> None:
        raise ColdError("again") if mark("choosy") == 0 else ValueError("never again")

    @task(tags=SMALL, retries=1, cache_policy=NO_CACHE)
    def failed_state() -> Any:
        return Failed(message="said so") if mark("state") == 0 else 5

    @task(tags=SMALL, retries=1, cache_policy=NO_CACHE)
    def held_once() -> str:
        if mark("held") == 0:
            raise HeldError("once")
        return "again"

    futures: Futures = {}

    @flow(task_runner=MANY)
    def repeats(nonce: str) -> None:
        futures["inputs"] = by_inputs.submit(1, nonce)
        futures["source"] = by_source.submit(nonce)
        futures["retried"] = third_time.submit()
        futures["delayed"] = delayed.submit()
        futures["choosy"] = choosy.submit()
        futures["state"] = failed_state.submit()
        futures["held"] = held_once.submit()
        futures["keyed"] = keyed.submit()
        for future in list(futures.values()):
            future.wait()
        futures["inputs again"] = by_inputs.submit(1, nonce)
        futures["source again"] = by_source.submit(nonce)

    repeats(str(marks))
    return Run(futures, marks, itself)


@pytest.mark.parametrize(("policy", "value"), [("inputs", 2), ("source", 7)])
def test_a_cached_result_starts_no_process(repeated: Run, policy: str, value: int) -> None:
    first, second = repeated.futures[policy], repeated.futures[f"{policy} again"]
    assert first.result() == second.result() == value
    assert second.state.name == "Cached"
    assert len(repeated.processes(policy)) == 1


def test_each_retry_has_a_process_of_its_own(repeated: Run) -> None:
    pid, _ = repeated.futures["retried"].result()
    processes = repeated.processes("retried")
    assert len(processes) == 3 and pid in processes and os.getpid() not in processes


def test_a_retried_task_run_counts_its_attempts_and_shows_its_states(repeated: Run) -> None:
    _, attempt = repeated.futures["retried"].result()
    run_id = repeated.futures["retried"].task_run_id
    assert attempt == api.task_run(run_id).run_count == 3
    names = api.names(run_id)
    while "AwaitingGPU" in names:
        # On a busy machine a process may wait for its device for a moment: then it starts, and runs.
        at = names.index("AwaitingGPU")
        del names[at : at + 3]
    assert names == ["Pending", "Running", "Retrying", "Retrying", "Completed"]


def test_a_retry_waits_for_its_delay(repeated: Run) -> None:
    assert repeated.futures["delayed"].result() >= 1.0
    assert "AwaitingRetry" in api.names(repeated.futures["delayed"].task_run_id)


def test_a_retry_condition_sees_the_error_of_the_body(repeated: Run) -> None:
    assert isinstance(repeated.error("choosy"), ValueError)
    assert len(repeated.processes("choosy")) == 2


def test_a_retry_condition_and_a_cache_key_get_the_task_itself(repeated: Run) -> None:
    assert repeated.futures["keyed"].result() == 3
    assert len(repeated.itself) >= 3 and all(repeated.itself)


def test_a_failed_state_that_a_body_returns_is_retried(repeated: Run) -> None:
    assert repeated.futures["state"].result() == 5


def test_an_error_that_cannot_travel_is_retried(repeated: Run) -> None:
    assert repeated.futures["held"].result() == "again"


# Timeouts.


@pytest.fixture(scope="module")
def timed(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tasks that queue for longer than they may run, and one that hangs."""
    marks = tmp_path_factory.mktemp("marks")

    @task(tags=gpu(memory="6GiB"))
    def holds() -> None:
        time.sleep(5.5)

    @task(tags=gpu(memory="6GiB"), timeout_seconds=5)
    def follows(name: str) -> str:
        return name

    # Time for the first line of its body, on a machine that does many other things.
    @task(tags=gpu(memory="1GiB"), timeout_seconds=2, retries=1)
    def hangs() -> None:
        (marks / f"hangs-{os.getpid()}").touch()
        time.sleep(600)

    futures: Futures = {}

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def waits() -> None:
        holds.submit()
        futures.update({name: follows.submit(name) for name in "ab"})
        futures["hangs"] = hangs.submit()

    waits()
    return Run(futures, marks)


def test_a_timeout_counts_from_the_first_line_of_the_body(timed: Run) -> None:
    assert [timed.futures[name].result() for name in "ab"] == ["a", "b"]


def test_a_task_that_takes_longer_than_its_timeout_is_timed_out(timed: Run) -> None:
    future = timed.futures["hangs"]
    assert (future.state.type.value, future.state.name) == ("FAILED", "TimedOut")
    assert api.task_run(future.task_run_id).state_name == "TimedOut"
    assert "ran longer than timeout_seconds=2; its process was killed" in future.state.message
    with pytest.raises(ChildTimeoutError, match=r"longer than timeout_seconds=2"):
        future.result()


def test_each_process_that_takes_too_long_is_killed(timed: Run) -> None:
    pids = timed.processes("hangs")
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


# Deaths.


@pytest.fixture(scope="module")
def died(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Tasks whose processes die, beside tasks that live."""
    marks = tmp_path_factory.mktemp("marks")

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
        if not (marks / "died").exists():
            (marks / "died").touch()
            os._exit(4)
        return "alive"

    def never(task: Any, run: Any, state: State[Any]) -> bool:
        (marks / f"asked-{len(list(marks.iterdir()))}").touch()
        return False

    @task(tags=SMALL, retries=2, retry_condition_fn=never)
    def dies_unretried() -> None:
        os._exit(5)

    @task(tags=SMALL)
    def lives(x: int) -> int:
        return x

    futures: Futures = {}

    @flow(task_runner=MANY)
    def mixed() -> None:
        futures.update({how: dies.submit(how) for how in ("segfault", "kill", "exit", "sys.exit")})
        futures["once"] = dies_once.submit()
        futures["unretried"] = dies_unretried.submit()
        futures.update({f"alive {x}": lives.submit(x) for x in range(4)})
        # An ordinary error, which the flow may catch.
        with pytest.raises(ChildDiedError):
            futures["kill"].result()
        for future in futures.values():
            future.wait()

    mixed()
    return Run(futures, marks)


DEATHS = {
    "segfault": "was killed by SIGSEGV",
    "kill": "was killed by SIGKILL",
    "exit": "ended with exit code 3",
    "sys.exit": "was ended by SystemExit: that was all",
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_task_whose_process_dies_has_crashed_and_says_how(died: Run, how: str) -> None:
    assert died.futures[how].state.type.value == "CRASHED"
    assert type(died.error(how)) is ChildDiedError
    assert DEATHS[how] in str(died.error(how))


@pytest.mark.parametrize("how", DEATHS)
def test_the_api_shows_how_the_process_died(died: Run, how: str) -> None:
    run = api.task_run(died.futures[how].task_run_id)
    assert run.state is not None and run.state.type.value == "CRASHED"
    assert DEATHS[how] in died.message(how)


def test_a_death_quotes_what_the_process_wrote_last(died: Run) -> None:
    death = died.error("segfault")
    assert isinstance(death, ChildDiedError) and "about to segfault" in death.stderr_tail
    assert "that dies (" in str(death) and "\n" not in str(death)
    run = api.task_run(died.futures["segfault"].task_run_id)
    assert run.flow_run_id is not None
    api.logs(
        run.flow_run_id, [f"The process died; end of its standard error:\n{death.stderr_tail}"]
    )


def test_causes_of_a_sigkill_are_worded_as_possible(died: Run) -> None:
    assert "possibly" in str(died.error("kill"))


def test_tasks_beside_one_whose_process_dies_go_on(died: Run) -> None:
    assert [died.futures[f"alive {x}"].result() for x in range(4)] == [0, 1, 2, 3]


def test_a_dead_process_is_retried(died: Run) -> None:
    assert died.futures["once"].result() == "alive"


def test_a_retry_condition_is_asked_about_a_dead_process(died: Run) -> None:
    assert died.futures["unretried"].state.type.value == "CRASHED"
    assert len(list(died.marks.glob("asked-*"))) == 1


# Errors and values that cannot travel.


@pytest.fixture(scope="module")
def failed(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Tasks that raise, and tasks whose arguments, function or value cannot be pickled."""

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
        return {"deep": [sqlite3.connect(":memory:")]} if what == "lock" else (i for i in "abc")

    @task(tags=SMALL)
    def takes(x: Any) -> None:
        raise AssertionError("no process was to start")

    connection = sqlite3.connect(":memory:")

    @task(tags=SMALL)
    def closes_over() -> Any:
        return connection

    futures: Futures = {}

    @flow(task_runner=MANY)
    def fails() -> str:
        whichs = ["cold", "awkward", "held", "deep", "big", "key"]
        futures.update({which: raises.submit(which) for which in whichs})
        futures["lock"] = returns.submit("lock")
        futures["generator"] = returns.submit("generator")
        futures["argument"] = takes.submit({"a": [1, sqlite3.connect(":memory:")]})
        futures["closure"] = closes_over.submit()
        for future in futures.values():
            future.wait()
        return "done"

    assert fails() == "done"
    return Run(futures, tmp_path_factory.mktemp("marks"))


UNPICKLABLE = ("lock", "argument", "closure")


@pytest.mark.parametrize("name", ["cold", "awkward", "held", "deep", "big", "key", *UNPICKLABLE])
def test_a_task_that_raises_has_failed_and_not_crashed(failed: Run, name: str) -> None:
    assert failed.futures[name].state.type.value == "FAILED"


def test_an_error_arrives_with_its_type_arguments_and_traceback(failed: Run) -> None:
    error = failed.error("cold")
    assert type(error) is ColdError and error.args == ("too cold", 3)
    assert "raise ColdError" in str(error.__cause__)


def test_an_error_keeps_its_cause_as_text(failed: Run) -> None:
    assert type(failed.error("key")) is KeyError
    assert "the cause" in str(failed.error("key").__cause__)


def test_an_error_whose_class_takes_other_arguments_arrives(failed: Run) -> None:
    assert type(failed.error("awkward")).__name__ == "AwkwardError"
    assert "code 4: warmer" in str(failed.error("awkward"))


def test_what_cannot_be_pickled_of_an_error_is_named_in_a_note(failed: Run) -> None:
    error = failed.error("held")
    assert type(error).__name__ == "HeldError"
    assert "sqlite3.Connection" in " ".join(error.__notes__)


def test_a_recursion_without_end_arrives_with_its_traceback_shortened(failed: Run) -> None:
    assert type(failed.error("deep")) is RecursionError
    assert "revious line repeated" in str(failed.error("deep").__cause__)


def test_an_error_with_a_large_message_arrives_whole(failed: Run) -> None:
    assert len(str(failed.error("big"))) == 2_000_000


def test_a_generator_arrives_as_the_list_of_its_items(failed: Run) -> None:
    assert failed.futures["generator"].result() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("lock", "result['deep'][0]"),
        ("argument", "x['a'][1]"),
        ("closure", "connection (used in closes_over) is a sqlite3.Connection"),
    ],
)
def test_what_cannot_be_pickled_is_named_by_its_path(failed: Run, name: str, where: str) -> None:
    assert type(failed.error(name)) is ResultError
    assert where in str(failed.error(name)) and "sqlite3.Connection" in str(failed.error(name))


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_the_api_shows_what_could_not_be_pickled(failed: Run, name: str) -> None:
    assert "sqlite3.Connection" in failed.message(name)


def test_a_function_that_cannot_be_pickled_is_called_that(failed: Run) -> None:
    assert "the function of a GPU task" in str(failed.error("closure"))


def test_large_values_and_arrays() -> None:
    import numpy

    @task(tags=gpu(memory="1GiB", framework="none"))
    def echo(kind: str, value: Any) -> Any:
        if kind == "bytes":
            return value + b"!"
        return value * 2

    @flow(task_runner=MANY)
    def large() -> Any:
        array = numpy.arange(1_000_000, dtype="float64").reshape(1000, 1000)
        futures = [echo.submit("bytes", b"x" * 50_000_000), echo.submit("array", array)]
        data, doubled = (future.result() for future in futures)
        assert len(data) == 50_000_001 and data.endswith(b"x!")
        assert (doubled == array * 2).all()

    large()


# Waiting for a device.


@pytest.fixture(scope="module")
def queued(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tasks that hold all devices, one that follows them, and one that does not wait for them.

    The state in which the follower waits is the future named "seen".
    """
    marks = tmp_path_factory.mktemp("marks")

    @task(tags=gpu(memory="6GiB"))
    def holds(index: int) -> None:
        (marks / f"holds-{index}").touch()
        assert eventually((marks / "let-go").exists)

    @task(tags=gpu(memory="6GiB", priority=1))
    def follows() -> None:
        time.sleep(0.5)

    @task(tags=gpu(memory="6GiB", wait="1s"), retries=1)
    def impatient() -> None:
        raise AssertionError("no device was to be had")

    futures: Futures = {}

    @flow(task_runner=GPUTaskRunner(devices=api.TWO, reports=False))
    def crowd() -> None:
        for index in range(2):
            holds.submit(index)
        api.until(lambda: all((marks / f"holds-{index}").exists() for index in range(2)))
        futures["follows"] = follows.submit()
        futures["impatient"] = impatient.submit()
        futures["seen"] = api.until(
            lambda: (s := futures["follows"].state).name == "AwaitingGPU" and s, "AwaitingGPU"
        )
        futures["impatient"].wait()
        (marks / "let-go").touch()

    crowd()
    return Run(futures, marks)


def test_a_task_that_waits_for_a_device_is_pending_and_says_for_what(queued: Run) -> None:
    seen = queued.futures["seen"]
    assert seen.type.value == "PENDING"
    # 2 GiB less the headroom of 256 MiB.
    assert "6GiB on any of 2 devices; most free 1.8GiB" in seen.message


def test_the_wait_for_a_device_is_a_state_of_its_own_in_the_api(queued: Run) -> None:
    run_id = queued.futures["follows"].task_run_id
    assert api.names(run_id) == [
        "Pending",
        "Running",
        "AwaitingGPU",
        "Starting",
        "Running",
        "Completed",
    ]
    states = api.history(run_id)
    assert re.fullmatch(
        r"Placed after .+ on device \d with a budget of 6GiB .+; starting its process",
        states[3].message,
    )
    assert states[3].timestamp > states[2].timestamp


def test_the_wait_for_a_device_counts_neither_as_a_run_nor_as_run_time(queued: Run) -> None:
    run_id = queued.futures["follows"].task_run_id
    run = api.task_run(run_id)
    assert run.run_count == 1
    states = api.history(run_id)
    # Running before the wait and after it: about half a second, and what the machine's load adds.
    ran_s = sum(
        (after.timestamp - before.timestamp).total_seconds()
        for before, after in itertools.pairwise(states)
        if before.name == "Running"
    )
    assert run.total_run_time.total_seconds() == pytest.approx(ran_s, abs=0.1)
    assert ran_s >= 0.5


def test_a_task_that_waits_longer_than_it_wants_fails(queued: Run) -> None:
    with pytest.raises(PlacementTimeoutError, match=r"gpu:wait=1(\.0)?s is over"):
        queued.futures["impatient"].result()
    assert api.task_run(queued.futures["impatient"].task_run_id).state_name == "Failed"


def test_a_task_that_waited_too_long_is_retried(queued: Run) -> None:
    assert api.names(queued.futures["impatient"].task_run_id).count("Retrying") == 1
