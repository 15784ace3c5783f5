"""Kinds of tasks and flows, and everything of Prefect's that surrounds a body."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import prefect
import pytest
from prefect import allow_failure, flow, get_run_logger, tags, task, unmapped
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from prefect.futures import as_completed, wait
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.testing import allocate
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB")
RUNNER = GPUTaskRunner(devices=api.TWO, reports=False)


class Model:
    """A user's class with tasks for methods."""

    def __init__(self, bias: int) -> None:
        self.bias = bias

    @task(tags=SMALL)
    def add(self, x: int) -> tuple[int, int]:
        return x + self.bias, os.getpid()

    @classmethod
    @task(tags=SMALL)
    def name(cls) -> tuple[str, int]:
        return cls.__name__, os.getpid()

    @staticmethod
    @task(tags=SMALL)
    def double(x: int) -> tuple[int, int]:
        return 2 * x, os.getpid()


def test_every_kind_of_body_runs_in_a_process_of_its_own() -> None:
    @task(tags=SMALL)
    async def async_body(x: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        return x, os.getpid()

    @task(tags=SMALL)
    def generates() -> Iterator[int]:
        yield from (1, 2, os.getpid())

    @task(tags=SMALL)
    async def async_generates() -> AsyncIterator[int]:
        for item in (3, 4, os.getpid()):
            yield item

    free = 10

    @task(tags=SMALL)
    def closure(x: int) -> tuple[int, int]:
        return x + free, os.getpid()

    kept: dict[str, Any] = {}

    @flow(task_runner=RUNNER)
    def everything() -> None:
        model = Model(100)
        made = task(functools.partial(bodies.scaled, 7), name="made", tags=SMALL)
        kept["sync"] = {
            "async": async_body.submit(1).result(),
            "closure": closure.submit(1),
            "method": model.add.submit(1),
            "class": Model.name.submit(),
            "static": Model.double.submit(4),
            "lambda": task(lambda x: (x, os.getpid()), name="anonymous", tags=SMALL).submit(5),
            "partial": made.submit(2),
        }
        kept["generators"] = [generates.submit().result(), async_generates.submit().result()]
        kept["mapped"] = async_body.map([1, 2]).result()
        kept["sync"] = {k: getattr(f, "result", lambda f=f: f)() for k, f in kept["sync"].items()}

    everything()
    values = {k: v for k, (v, _) in kept["sync"].items()}
    assert values == {
        "async": 1,
        "closure": 11,
        "method": 101,
        "class": "Model",
        "static": 8,
        "lambda": 5,
        "partial": 14,
    }
    pids = [pid for _, pid in kept["sync"].values()]
    pids += [items[-1] for items in kept["generators"]] + [pid for _, pid in kept["mapped"]]
    assert [items[:2] for items in kept["generators"]] == [[1, 2], [3, 4]]
    assert [value for value, _ in kept["mapped"]] == [1, 2]
    assert len(set(pids)) == len(pids) and os.getpid() not in pids
    assert api.children() == []


def test_async_flows_and_how_results_go_from_task_to_task() -> None:
    @task(tags=SMALL)
    async def one(x: int) -> int:
        return x + 1

    @task(tags=SMALL)
    def total(nested: dict[str, list[int]], scale: int = 1) -> int:
        return sum(nested["xs"]) * scale

    @task
    def in_thread(x: int) -> tuple[int, int, Any]:
        return x, os.getpid(), current_allocation()

    @task(tags=SMALL)
    def fails() -> None:
        raise ValueError("as asked")

    @task(tags=SMALL)
    def tolerant(x: Any) -> str:
        return type(x).__name__

    order: list[str] = []

    @task
    def note(name: str) -> None:
        order.append(name)

    kept: dict[str, Any] = {}

    @flow(task_runner=RUNNER)
    async def awaits() -> int:
        first = one.map([1, 2])
        second = one.map(first)
        summed = total.submit({"xs": list(second)}, scale=2)
        thread = in_thread.submit(summed)
        noted = note.submit("late", wait_for=[summed])
        broken = fails.submit()
        kept["tolerant"] = tolerant.submit(allow_failure(broken))
        kept["upstream"] = tolerant.submit(broken)
        kept["unmapped"] = total.map(unmapped({"xs": [1]}), scale=[3, 4]).result()
        kept["state"] = one.submit(4, return_state=True)
        kept["done"] = sorted(future.result() for future in as_completed([*first, *second]))
        kept["waited"] = wait([noted, kept["tolerant"], kept["upstream"]])
        kept["thread"] = thread.result()
        with pytest.raises(ValueError, match="as asked"):
            broken.result()
        return summed.result()

    assert asyncio.run(awaits()) == 14
    assert order == ["late"]
    assert kept["unmapped"] == [3, 4]
    assert kept["state"].is_completed() and kept["state"].result() == 5
    assert kept["done"] == [2, 3, 3, 4]
    assert kept["thread"] == (14, os.getpid(), None)
    assert kept["tolerant"].result() == "ValueError"
    assert kept["upstream"].state.name == "NotReady"
    assert not kept["waited"].not_done


@dataclass(frozen=True)
class Observed:
    """A flow run with one task that logs, prints, publishes and looks around itself."""

    #: Id of the task run.
    id: UUID
    #: Id of the flow run, as text.
    flow_run: str
    #: What the body found, by name.
    found: dict[str, Any]
    #: The result that the final state holds.
    persisted: Any
    #: The name and state of the task run as each hook saw them, and whether it got the task itself.
    hooks: list[tuple[str, str, bool]]


@pytest.fixture(scope="module")
def observed(prefect_server: str) -> Observed:
    @task(
        tags=[*SMALL, "mine"],
        log_prints=True,
        task_run_name="eval-{name}-{size}",
        persist_result=True,
    )
    def look(name: str, size: int) -> dict[str, Any]:
        get_run_logger().info("logged in %s", name)
        print(f"printed in {name}")
        # From a thread, which has no context of Prefect's.
        logger = logging.getLogger("prefect_gpu.frameworks")
        warning = threading.Thread(target=logger.warning, args=("warned in %s", name))
        warning.start()
        warning.join()
        artifact = create_markdown_artifact("# here", key=f"from-child-{os.getpid()}")
        event = emit_event("prefect-gpu.tested", {"prefect.resource.id": f"test.{name}"})
        return {
            "task_run": prefect.runtime.task_run.id,
            "name": prefect.runtime.task_run.name,
            "task": prefect.runtime.task_run.task_name,
            "flow_run": prefect.runtime.flow_run.id,
            "flow": prefect.runtime.flow_run.flow_name,
            "artifact": artifact,
            "event": event is not None and str(event.id),
        }

    hooks: list[tuple[str, str, bool]] = []
    lock = threading.Lock()

    @look.on_completion
    def _completed(task: Any, run: Any, state: Any) -> None:
        with lock:
            hooks.append((run.name, state.name, task is look))

    @look.on_running
    async def _running(task: Any, run: Any, state: Any) -> None:
        hooks.append((run.name, state.name, task is look))

    kept: dict[str, Any] = {}

    # The flow closes over a lock and has one as its parameter: neither is sent to the child.
    @flow(task_runner=RUNNER, validate_parameters=False)
    def watches(held: Any) -> None:
        with lock, tags("from-context"):
            future = look.submit("a", size=3)
        kept["id"], kept["found"] = future.task_run_id, future.result()
        kept["flow_run"] = prefect.runtime.flow_run.id
        kept["persisted"] = future.state.data

    with tags("around-the-flow"):
        watches(threading.Lock())
    return Observed(hooks=hooks, **kept)


def test_the_runtime_in_a_body_names_its_task_run_and_flow_run(observed: Observed) -> None:
    assert observed.found["task_run"] == str(observed.id)
    assert observed.found["task"] == "look"
    assert observed.found["flow_run"] == observed.flow_run
    assert observed.found["flow"] == "watches"


def test_a_task_run_is_named_by_its_parameters(observed: Observed) -> None:
    assert observed.found["name"] == api.task_run(observed.id).name == "eval-a-3"


def test_hooks_of_a_task_are_called_in_the_parent(observed: Observed) -> None:
    assert observed.hooks == [("eval-a-3", "Running", True), ("eval-a-3", "Completed", True)]


def test_a_task_run_has_the_tags_of_its_task_and_of_the_contexts_around_it(
    observed: Observed,
) -> None:
    run = api.task_run(observed.id)
    assert {*SMALL, "mine", "from-context", "around-the-flow"} <= set(run.tags)


@pytest.mark.parametrize("message", ["logged in a", "printed in a", "warned in a"])
def test_logs_and_prints_of_a_body_belong_to_its_task_run(observed: Observed, message: str) -> None:
    logs = api.logs(UUID(observed.flow_run), [message])
    assert logs[message].task_run_id == observed.id


def test_the_runners_own_lines_are_in_the_logs_of_their_runs(observed: Observed) -> None:
    placed = r"Placed (after \S+ )?on device 0 with a budget of 64MiB \(from its tag gpu:memory\)"

    def placements() -> Any:
        logs = api.logs(UUID(observed.flow_run), []).values()
        return [each for each in logs if re.fullmatch(placed, each.message)]

    (line,) = api.until(placements, "the placement")
    assert line.task_run_id == observed.id

    def summary() -> Any:
        logs = api.logs(UUID(observed.flow_run), []).values()
        return next((each for each in logs if each.message.startswith("GPU task runs: ")), None)

    found = api.until(summary, "summary")
    assert found.message.startswith("GPU task runs: 1 Completed\n  look: 1 process, waited ")
    assert found.task_run_id is None
    ended = [
        text for text in api.logs(UUID(observed.flow_run), []) if text.startswith("Completed: ran")
    ]
    assert [text.rpartition("; ")[2] for text in ended] == [url_for("task-run", observed.id)]


def test_an_artifact_of_a_body_belongs_to_its_task_run(observed: Observed) -> None:
    found = api.artifacts(task_run_id=observed.id, count=1)
    assert [artifact.id for artifact in found] == [observed.found["artifact"]]


def test_the_result_of_a_body_is_persisted_by_its_final_state(observed: Observed) -> None:
    assert observed.persisted.result == observed.found


def test_an_event_of_a_body_is_related_to_its_task_run(observed: Observed) -> None:
    body = {
        "filter": {
            "event": {"name": ["prefect-gpu.tested"]},
            "occurred": {"since": "2020-01-01T00:00:00Z", "until": "2100-01-01T00:00:00Z"},
        }
    }
    with prefect.get_client(sync_client=True) as client:

        def emitted() -> bool:
            events = client.request("POST", "/events/filter", json=body).json()["events"]
            mine = [event for event in events if event["id"] == observed.found["event"]]
            related = [each["prefect.resource.id"] for event in mine for each in event["related"]]
            return f"prefect.task-run.{observed.id}" in related

        api.until(emitted, "the child's event")


def test_nested_submits_from_a_gpu_task_and_from_a_thread() -> None:
    @task(tags=SMALL)
    def inner(x: int) -> tuple[int, int]:
        return x * 2, os.getpid()

    @task
    def thread_inner() -> int:
        return os.getpid()

    @task(tags=gpu(memory="1GiB"))
    def outer(x: int) -> dict[str, Any]:
        gpu_future = inner.submit(x)
        thread_future = thread_inner.submit()
        return {
            "inner": gpu_future.result(),
            "thread": thread_future.result(),
            "pid": os.getpid(),
            "id": str(gpu_future.task_run_id),
        }

    @task
    def from_thread(x: int) -> tuple[int, int]:
        return inner.submit(x).result()

    @task(tags=SMALL)
    def calls_a_flow() -> int:
        @flow(task_runner=ThreadPoolTaskRunner())
        def small() -> int:
            return thread_inner.submit().result()

        return small()

    kept: dict[str, Any] = {}

    @flow(task_runner=RUNNER)
    def nests() -> None:
        futures = {
            "outer": outer.submit(4),
            "from_thread": from_thread.submit(5),
            "flow": calls_a_flow.submit(),
        }
        kept.update({k: f.result() for k, f in futures.items()})
        kept["outer_id"] = futures["outer"].task_run_id

    nests()
    value, pid = kept["outer"]["inner"]
    assert value == 8
    assert len({pid, kept["outer"]["pid"], os.getpid()}) == 3
    assert kept["outer"]["thread"] == kept["outer"]["pid"]
    assert kept["from_thread"][0] == 10 and kept["from_thread"][1] != os.getpid()
    assert kept["flow"] != os.getpid()
    assert api.task_run(UUID(kept["outer"]["id"])).state_name == "Completed"


def test_nested_gpu_tasks_run_on_the_machines_own_memory_beside_an_exclusive_parent() -> None:
    @task(tags=SMALL)
    def inner() -> int:
        return os.getpid()

    @task(tags=gpu(memory="64MiB", exclusive=True))
    def outer() -> str:
        try:
            inner.submit().result()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ran"

    @task(tags=SMALL)
    def shares() -> int:
        return inner.submit().result()

    kept: dict[str, Any] = {}

    @flow(task_runner=GPUTaskRunner(devices="host", reports=False))
    def nests() -> None:
        kept["shares"] = shares.submit().result()
        kept["alone"] = outer.submit().result()

    nests()
    assert kept["shares"] != os.getpid()
    assert kept["alone"] == "ran", "its device is lent to the task inside it"


def test_nested_gpu_tasks_get_what_those_around_them_do_not_use_or_fail() -> None:
    @task(tags=gpu(memory="4GiB"))
    def inner(x: int) -> int:
        allocate("4GiB")
        return x

    @task(tags=gpu(memory="4GiB"))
    def outer(x: int) -> Any:
        return inner.submit(x).result()

    @task(tags=gpu(memory="8GiB"))
    def uses_it() -> str:
        allocate("7GiB")
        try:
            return f"ran {inner.submit(1).result()}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    kept: dict[str, Any] = {}

    @flow(task_runner=GPUTaskRunner(devices="simulated:1x10GiB", reports=False))
    def nests() -> None:
        kept["lent"] = outer.map([1, 2]).result()
        kept["hopeless"] = uses_it.submit().result()

    nests()
    assert kept["lent"] == [1, 2]
    assert kept["hopeless"].startswith(
        "PlacementError: 'inner' was submitted from inside a GPU task"
    )
    assert "the outer task 'uses_it' holds 8GiB and uses 7GiB" in kept["hopeless"]


def test_flows_of_one_process_share_devices_and_reservations() -> None:
    def hold(name: str) -> tuple[str, float, float, str]:
        import time

        began = time.time()
        time.sleep(0.3)
        allocation = current_allocation()
        assert allocation is not None
        return name, began, time.time(), allocation.device_uuids[0]

    # Two tasks of one function: a body that refers to a task imports Prefect.
    big = task(hold, name="big", tags=gpu(memory="6GiB"))
    unsaid = task(hold, name="unsaid", tags=gpu(exclusive=True))

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def inner() -> list[Any]:
        return big.map(["c", "d"]).result()

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def outer() -> list[Any]:
        futures = [big.submit("a"), unsaid.submit("b")]
        return inner() + [future.result() for future in futures]

    spans = sorted(outer(), key=lambda span: span[1])
    assert {name for name, *_ in spans} == set("abcd")
    for (_, _, ended, _), (_, began, _, _) in itertools.pairwise(spans):
        assert ended <= began


def test_flow_retries_persistence_and_transactions() -> None:
    from prefect.transactions import transaction

    attempts: list[int] = []
    rolled_back: list[str] = []

    @task(tags=SMALL, persist_result=True)
    def costly(x: int) -> int:
        return os.getpid()

    @costly.on_rollback
    def _undo(txn: Any) -> None:
        rolled_back.append("costly")

    @flow(task_runner=RUNNER, retries=1, persist_result=True)
    def twice(nonce: int) -> int:
        pid = costly.submit(nonce).result()
        attempts.append(pid)
        if len(attempts) == 1:
            raise ValueError("once")
        with contextlib.suppress(RuntimeError), transaction():
            costly.submit(nonce + 1).wait()
            raise RuntimeError("roll back")
        return pid

    assert twice(os.getpid()) == attempts[0]
    # The second attempt found what the first had kept.
    assert attempts[0] == attempts[1]


def test_a_gpu_task_that_is_called_directly_is_warned_of_once_wherever_it_is_called() -> None:
    @task(tags=SMALL)
    def own() -> int:
        return os.getpid()

    @task
    def plain() -> int:
        return os.getpid()

    @task(tags=SMALL)
    async def waits() -> int:
        return os.getpid()

    inner = own.with_options(name="inner")

    @flow
    def forgets() -> UUID:
        own.with_options(name="forgotten").submit().wait()
        return UUID(prefect.runtime.flow_run.id)

    @task(tags=SMALL)
    def around() -> UUID:
        assert {inner(), inner(), plain()} == {os.getpid()}
        return forgets()

    ids: list[UUID] = []

    @flow(task_runner=RUNNER)
    async def calls() -> None:
        ids.append(UUID(prefect.runtime.flow_run.id))
        ids.extend(around.submit().result() for _ in range(2))
        own.submit().wait()
        plain()
        assert {own(), own(), await waits(), plain()} == {os.getpid()}
        with tags(*SMALL):
            plain.with_options(name="tagged")()
        get_run_logger().info("last")

    asyncio.run(calls())
    # In a task's flow the line after the warning is the end of its task run.
    last = ["last", *["Finished in state Completed()"] * 2]
    warned = [
        log
        for flow_run_id, line in zip(ids, last, strict=True)
        for log in api.all_logs(flow_run_id, [line])
        if log.level == logging.WARNING
    ]
    texts = {log.message.split("'")[1]: log.message.partition("' ")[2] for log in warned}
    assert sorted(texts) == ["forgotten", "inner", "own", "tagged", "waits"]
    # One for each, though two processes and two flows called the same task.
    assert len(warned) == len(texts)
    assert all(log.task_run_id is not None for log in warned)
    assert texts["own"].startswith("was called directly: it runs in the flow's own process")
    assert texts["inner"].startswith(
        "was called directly: it runs in the process of the GPU task around it"
    )
    assert texts["forgotten"].startswith(
        "runs in the process of the GPU task around it, and its gpu tags have no effect"
    )


def test_a_tag_that_is_nearly_a_gpu_tag_is_warned_of_once_on_the_flow_run() -> None:
    @task(tags=["gpu=6GiB"])
    def meant() -> int:
        return os.getpid()

    @task(tags=["gpu-a100"])
    def other() -> int:
        return os.getpid()

    @task(tags="gpu")  # type: ignore[arg-type]
    def text() -> int:
        return os.getpid()

    ids: list[UUID] = []

    @flow(task_runner=RUNNER)
    def misspells() -> None:
        ids.append(UUID(prefect.runtime.flow_run.id))
        runs = [each.submit() for each in (meant, meant, other, text, text)]
        with tags("gpu-memory=4GiB"):
            runs.append(other.submit())
        assert {run.result() for run in runs} == {os.getpid()}
        get_run_logger().info("last")

    misspells()
    logs = api.logs(ids[0], ["last"])
    warned = [log for log in logs.values() if log.level == logging.WARNING]
    assert [log.message for log in warned] == [
        "Task 'meant' has the tag 'gpu=6GiB', which has no meaning here; did you mean 'gpu:memory=6GiB'?",
        (
            "Task 'text' has the tags g, p, u: Python splits a text into its characters where a list is expected. Write "
            'tags=["gpu:memory=6GiB"] or tags=gpu(memory="6GiB"), not tags="gpu:memory=6GiB".'
        ),
        "Task 'other' has the tag 'gpu-memory=4GiB', which has no meaning here; did you mean 'gpu:memory=4GiB'?",
    ]


def test_a_tag_that_is_nearly_a_gpu_tag_is_warned_of_outside_a_flow_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @task(tags=["gpu=6GiB"])
    def meant() -> int:
        return os.getpid()

    # Without it Prefect warns of its own log lines of the task run.
    apart = {PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}
    with temporary_settings(apart), RUNNER.duplicate() as runner:
        assert runner.submit(meant, {}).result() == os.getpid()
    (warned,) = [record for record in caplog.records if "has no meaning here" in record.message]
    assert warned.levelno == logging.WARNING and "'gpu:memory=6GiB'" in warned.message


def test_gpu_tasks_of_a_flow_without_the_runner_are_warned_of() -> None:
    @task(tags=SMALL)
    def lonely() -> int:
        return os.getpid()

    @task
    def plain() -> int:
        return os.getpid()

    ids: list[UUID] = []

    @flow
    def forgets() -> None:
        ids.append(UUID(prefect.runtime.flow_run.id))
        pids = [task.submit().result() for task in (plain, lonely, lonely)]
        assert {*pids} == {os.getpid()}
        get_run_logger().info("last")

    forgets()
    logs = api.logs(ids[0], ["last"])
    (warned,) = [message for message in logs if "its gpu tags have no effect" in message]
    assert warned.startswith("GPU task 'lonely' ") and "task_runner=GPUTaskRunner()" in warned
