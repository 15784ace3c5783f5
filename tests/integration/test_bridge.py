"""One test for each name of Prefect outside its documented API: which change broke what."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import prefect.main
import pytest
from prefect import context as variables_of_prefect
from prefect import flow, flow_engine, tags, task
from prefect.cache_policies import INPUTS, NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.context import (
    FlowRunContext,
    SettingsContext,
    SyncClientContext,
    TagsContext,
    TaskRunContext,
    get_settings_context,
    hydrated_context,
    serialize_context,
)
from prefect.events import Event
from prefect.events.worker import EventsWorker, ProcessPoolForwardingEventsClient
from prefect.exceptions import TerminationSignal
from prefect.logging.configuration import (
    DEFAULT_LOGGING_SETTINGS_PATH,
    load_logging_config,
    setup_logging,
)
from prefect.logging.handlers import emit_api_log, set_api_log_sink
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW,
    Settings,
    temporary_settings,
)
from prefect.transactions import CommitMode, Transaction, get_transaction, transaction
from prefect.utilities.engine import emit_task_run_state_change_event

from prefect_gpu import GPUTaskRunner, gpu, values
from prefect_gpu.child import prefect_context
from prefect_gpu.engine import task_engine, task_run
from prefect_gpu.engine.flow_run import SharedClient, flow_of, flow_run_goes_on
from prefect_gpu.errors import ResultError
from prefect_gpu.processes.messages import EventEmitted, LogEmitted
from prefect_gpu.reports.publish import bounded_settings
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import GIB
from prefect_gpu.values import Apart
from tests.integration import engine_api as api


@pytest.mark.parametrize(
    ("error", "intent", "says"),
    [
        (TerminationSignal(signal=15), "cancel", "Cancelled('the flow run was cancelled')"),
        (TerminationSignal(signal=15), None, "Crashed('Execution was aborted by a termination signal.')"),
        (KeyboardInterrupt(), None, "Crashed('Execution was aborted by an interrupt signal.')"),
        (None, None, "Cancelled('the flow ended before this task')"),
    ],
    ids=["cancelled through the API", "SIGTERM", "Ctrl-C", "a flow that failed"],
)  # fmt: skip
def test_task_runs_end_as_their_flow_run_does(
    error: BaseException | None, intent: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fails where Prefect has no such name any more: a cancelled flow's task runs would crash.
    monkeypatch.setattr(flow_engine, "_termination_intent", lambda: intent)
    assert str(task_engine.ended_by(error).state()) == says


def test_state_events_take_what_we_give_them() -> None:
    parameters = set(inspect.signature(emit_task_run_state_change_event).parameters)
    assert parameters >= {"task_run", "initial_state", "validated_state"}, "see EngineRun._show"


def test_threads_may_copy_the_settings_at_the_same_time() -> None:
    # To validate a copy, Prefect sets fields of the settings that all threads share, and unsets them.
    def copy_often(_: int) -> None:
        for _ in range(500):
            with task_run._AsTheyAre.of_thread("http://127.0.0.1:1/api") as copied:
                assert copied.settings.api.url == "http://127.0.0.1:1/api"
            with bounded_settings(get_settings_context(), 1.5) as copied:
                assert copied.settings.api.request_timeout == 1.5

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(copy_often, range(4)))
    finally:
        sys.setswitchinterval(interval_s)


def test_task_run_ids_are_ordered_by_time() -> None:
    first, second = task_engine.new_task_run_id(), task_engine.new_task_run_id()
    # Milliseconds since the epoch, in the first 48 bits.
    assert first.version == 7 and first.int >> 80 <= second.int >> 80, "see new_task_run_id"


def test_the_log_sink_takes_logs_as_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(inspect.signature(emit_api_log).parameters) == ["log"], "see EngineRun.forward_log"
    sent: list[Any] = []
    # A context without a run has none.
    monkeypatch.setattr(prefect_context, "get_run_logger", logging.getLogger)
    with prefect_context.child_context({}, False, sent.append):
        emit_api_log({"message": "said", "task_run_id": uuid4()})
    set_api_log_sink(None)
    EventsWorker.set_client_override(None)
    (log,) = sent
    assert isinstance(log, LogEmitted) and log.log["message"] == "said"
    assert isinstance(log.log["task_run_id"], str)


def test_what_is_logged_in_a_child_never_fails_the_body(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(prefect_context, "get_run_logger", lambda: logging.getLogger("run"))
    own, propagate = logging.getLogger("prefect_gpu.of_a_test"), logging.getLogger("prefect_gpu")
    with prefect_context.child_context({}, False, lambda message: None):
        own.warning("bad %d %d", 1)
        try:
            raise RuntimeError("why")
        except RuntimeError:
            own.exception("failed")
    set_api_log_sink(None)
    EventsWorker.set_client_override(None)
    (record,) = [record for record in caplog.records if record.name == "run"]
    assert record.getMessage() == "failed" and record.exc_info
    assert propagate.propagate


def test_emit_event_knows_the_forwarding_client() -> None:
    from prefect.events import utilities

    source = inspect.getsource(utilities.emit_event)
    assert "ProcessPoolForwardingEventsClient" in source, "events of children would be dropped"
    assert next(iter(inspect.signature(ProcessPoolForwardingEventsClient).parameters)) == (
        "event_queue"
    ), "see prefect_context.EventQueue"
    sent: list[Any] = []
    queue = prefect_context.EventQueue(sent.append)
    assert hash(queue), "the worker of events uses it as a key"
    client = ProcessPoolForwardingEventsClient(queue)
    event = Event(event="test", resource={"prefect.resource.id": "test"})

    async def emit() -> None:
        async with client:
            await client.emit(event)

    asyncio.run(emit())
    (message,) = sent
    assert isinstance(message, EventEmitted)
    assert Event.model_validate_json(message.event).id == event.id
    assert hasattr(EventsWorker, "_instances") and hasattr(EventsWorker, "_instance_lock"), (
        "see prefect_context._flush_events"
    )


@pytest.mark.usefixtures("prefect_server")
def test_the_serialised_context_has_the_keys_we_change() -> None:
    seen: dict[str, Any] = {}
    lock = threading.Lock()

    def named() -> str:
        return f"locked: {lock.locked()}"

    def key(context: Any, parameters: Any) -> str:
        return f"{uuid4()} {named()}"

    @task(tags=["gpu:memory=1GiB", "mine"], log_prints=True, task_run_name=named, cache_key_fn=key)
    def inside(x: int) -> None:
        raw = serialize_context()
        assert set(raw) >= {
            "flow_run_context", "task_run_context", "tags_context", "settings_context"
        }, "keys of the serialised context changed: see EngineRun.context_for_child"  # fmt: skip
        assert set(raw["task_run_context"]) >= {"task", "task_run", "parameters"}
        assert set(raw["flow_run_context"]) >= {"flow", "flow_run", "parameters"}
        assert "api" in raw["settings_context"]["settings"], "see task_run._AsTheyAre"
        assert "current_tags" in raw["tags_context"]
        seen["profile"] = raw["settings_context"]["profile"]
        engine_run = task_run.EngineRun(inside)
        seen["around"] = engine_run.context_for_child()
        seen["environment"] = engine_run.environment_for_child()
        seen["run"] = engine_run.task_run
        seen["flow"] = flow_of(FlowRunContext.get())
        seen["client"] = str(SyncClientContext.get().client.api_url)  # type: ignore[union-attr]

    @inside.on_failure
    def _hook(*args: Any) -> None:
        lock.acquire()

    @flow(flow_run_name=named)
    def around(held: int) -> None:
        from prefect import tags

        assert lock is not None
        with tags("gpu:count=2", "kept"):
            inside(held)

    around(3)
    context, parameters, of_flow, log_prints = seen["around"]
    assert log_prints is True
    assert seen["environment"] == {"PREFECT_API_URL": seen["client"]}
    assert context["settings_context"]["settings"].api.url == seen["client"]
    assert context["settings_context"]["profile"] == seen["profile"], "see task_run._AsTheyAre"
    assert context["task_run_context"]["parameters"] == {} and parameters == {"x": 3}
    light = context["task_run_context"]["task"]
    assert light.name == "inside" and light is not inside and light.on_failure_hooks == []
    assert inside.on_failure_hooks, "the task itself was changed"
    # Locks of functions that never run in a child are not sent.
    pickled = values.dumps([light, context["flow_run_context"]["flow"]], "argument", "it")
    assert b"locked" not in bytes(pickled.open().stream)
    assert context["flow_run_context"]["flow"].fn is task_run._runs_elsewhere
    assert context["flow_run_context"]["parameters"] == {} and of_flow == {"held": 3}
    assert "kept" in context["tags_context"]["current_tags"]
    assert not any(t.startswith("gpu") for t in context["tags_context"]["current_tags"])
    assert seen["flow"][0] == "around" and seen["flow"][1] == seen["run"].flow_run_id
    with hydrated_context(context):
        hydrated = TaskRunContext.get()
        assert hydrated is not None and hydrated.task_run.id == seen["run"].id
        flow_context = FlowRunContext.get()
        assert flow_context is not None and flow_context.detached
        assert "kept" in TagsContext.get().current_tags
        # The runner of a child's copy ends while its flow goes on.
        assert flow_run_goes_on(flow_context, flow_context.task_runner)


@pytest.mark.parametrize("ends", ["completed", "failed"])
def test_a_child_has_copies_of_the_transactions_of_its_run(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_context, "get_run_logger", logging.getLogger)
    hooks: list[str] = []

    def note(transaction: Transaction) -> None:
        hooks.append("of the nested one")

    def in_child(context: dict[str, Any]) -> Any:
        with prefect_context.child_context(context, False, lambda message: None) as contexts:
            own = get_transaction()
            assert own is not None and own.get("inherited") == [1]
            with pytest.raises(ResultError, match="generator"):
                own.get("refused")
            own.get_parent().set("of the outer", 2)  # type: ignore[union-attr]
            own.set("own", 3)
            own.stage(None, on_commit_hooks=[note])
            with transaction(commit_mode=CommitMode.LAZY) as nested:
                assert nested.get("own") == 3
                nested.stage(None, on_commit_hooks=[note], on_rollback_hooks=[note])
            assert hooks == [], "it ends with the body"
            return contexts.commit() if ends == "completed" else contexts.roll_back()

    with transaction() as outer:
        outer.set("inherited", [1])
        outer.set("refused", (each for each in ()))
        with transaction(key="a-key") as own:
            values = [task_run._as_values(each) for each in task_run._transactions()]
            assert [each["fields"]["key"] for each in values] == ["a-key", None]
            apart = Apart.of({"transactions": values}, "call", "context")
            changes = Context().run(in_child, apart.load())
            assert hooks == ["of the nested one"]
            assert own.get("own", None) is None, "a child has copies"
            if ends == "completed":
                assert changes.transactions == ({"own": 3}, {"of the outer": 2})
                task_run.apply_changes(changes)
                assert (own.get("own"), outer.get("of the outer")) == (3, 2)
                assert own.on_commit_hooks == [note]
            own.on_commit_hooks.clear()
            # Nothing is stored.
            own.write_on_commit = False
    set_api_log_sink(None)
    EventsWorker.set_client_override(None)


def test_a_transaction_whose_outer_one_has_ended_is_read_once() -> None:
    outer = Transaction()
    with outer:
        context = copy_context()

    def read() -> list[Any]:
        with transaction() as own:
            assert task_run._transactions() == [own, outer]
            return task_run._transactions()

    assert len(context.run(read)) == 2


def test_prefect_sets_its_logging_up_as_a_child_without_prefect_expects() -> None:
    config = load_logging_config(DEFAULT_LOGGING_SETTINGS_PATH)
    assert config["root"] == {"level": "WARNING", "handlers": ["console"]}, "see LatePrefect"
    level = task_run.prefect_log_level()
    assert config["loggers"]["prefect"] == {"level": level}, "see _Run.begin_logging"
    assert "setup_logging()" in Path(prefect.main.__file__).read_text()
    # The second time it sets levels alone.
    source = inspect.getsource(setup_logging)
    assert "incremental" in source and "PROCESS_LOGGING_CONFIG" in source, (
        "see late_prefect._as_it_was"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFECT_LOGGING_ROOT_LEVEL", "INFO"),
        ("PREFECT_LOGGING_LOGGERS_PREFECT_LEVEL", "DEBUG"),
        ("PREFECT_LOGGING_EXTRA_LOGGERS", "mine"),
        ("PREFECT_LOGGING_SETTINGS_PATH", __file__),
        ("PREFECT_LOGGING_LOG_PRINTS", "true"),
    ],
)
def test_a_task_needs_prefect_for_logging_that_is_not_the_default(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs() -> bool:
        with SettingsContext(profile=profile, settings=Settings()):
            return task_run.logs_need_prefect(task(lambda: None))

    profile = get_settings_context().profile
    assert not needs()
    monkeypatch.setenv(name, value)
    assert needs()


def test_a_body_and_what_it_starts_see_the_values_of_its_run_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each is put back as it was.
    for name, held in list(vars(variables_of_prefect).items()):
        if isinstance(held, type) and hasattr(held, "__var__"):
            monkeypatch.setattr(held, "__var__", held.__var__)
        monkeypatch.setattr(variables_of_prefect, name, held)
    run, is_body = Context(), ContextVar("is_body", default=False)
    run.run(TagsContext(current_tags={"of the run"}).__enter__)
    run.run(variables_of_prefect._deployment_parameters.set, {"x": 1})
    prefect_context.share(run, is_body.get)

    def tags_now() -> set[str]:
        return set(TagsContext.get().current_tags)

    def parameters_now() -> Any:
        return variables_of_prefect._deployment_parameters.get()

    def body() -> None:
        assert tags_now() == set() and parameters_now() is None
        is_body.set(True)
        assert tags_now() == {"of the run"} and parameters_now() == {"x": 1}
        with tags("inner"):
            assert tags_now() == {"of the run", "inner"}
        assert tags_now() == {"of the run"}
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(tags_now).result() == set()
            assert pool.submit(copy_context().run, tags_now).result() == {"of the run"}
        assert asyncio.run(asyncio.to_thread(tags_now)) == {"of the run"}
        assert FlowRunContext.get() is None

    # Not in the context of the test: what is set there stays.
    copy_context().run(body)


@pytest.mark.usefixtures("prefect_server")
def test_awaiting_gpu_counts_neither_as_a_run_nor_as_run_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: dict[str, Any] = {}

    @task
    def waits() -> None:
        engine_run = task_run.EngineRun(waits)
        run = engine_run.task_run
        engine_run.show_running()
        seen["before"] = (run.state_name, run.run_count)
        lacks = Reason(WaitKind.DEVICE_MEMORY, (5 * GIB,), GIB, where="device 0")
        less = replace(lacks, free_bytes=0)
        behind = replace(less, ahead=1, ahead_tasks=(("train", False),))
        for reason in (lacks, less, behind, Reason(WaitKind.FIRST_READING)):
            engine_run.show_awaiting(reason)
        seen["awaiting"] = (run.state_type, run.state_name, run.state.message)  # type: ignore[union-attr]
        engine_run.show_placed("Placed on device 0")
        seen["starting"] = (run.state_type, run.state_name, run.state.message)  # type: ignore[union-attr]
        engine_run.show_running()
        # It is running already.
        engine_run.show_placed("Placed on device 0")
        seen["after"] = (run.state_name, run.run_count)

    @flow
    def one() -> Any:
        future = waits.submit()
        future.wait()
        seen["id"] = future.task_run_id

    one()
    assert seen["before"] == seen["after"] == ("Running", 1)
    assert seen["awaiting"] == (
        StateType.PENDING,
        task_run.AWAITING,
        "Waiting for the first reading of the devices",
    )
    assert seen["starting"] == (
        StateType.PENDING,
        task_run.STARTING,
        "Placed on device 0; starting its process",
    )
    assert api.names(seen["id"]) == [
        "Pending",
        "Running",
        *["AwaitingGPU"] * 4,
        "Starting",
        "Running",
        "Completed",
    ]
    # The second is of the same topic.
    told = [r.getMessage() for r in caplog.records if r.name == "prefect.task_runs"]
    assert told[:3] == [
        "Waiting for 5GiB on device 0; most free 1GiB",
        "Waiting for 5GiB on device 0; most free 0B; 1 ahead in the queue: train",
        "Waiting for the first reading of the devices",
    ]
    assert api.task_run(seen["id"]).run_count == 1


@pytest.mark.usefixtures("prefect_server")
def test_of_large_arguments_that_prefect_hashes_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    large = task_run.LARGE_ARGUMENTS_BYTES

    @task
    def hashed(sizes: list[int]) -> None:
        for size in sizes:
            task_run.EngineRun(hashed).advise_no_cache(size)

    @flow
    def all_kinds() -> None:
        hashed([large - 1])
        hashed.with_options(cache_policy=NO_CACHE)([large])
        hashed([large, large])
        hashed.with_options(cache_policy=INPUTS - "sizes", name="left out")([large])

    all_kinds()
    told = [r.getMessage() for r in caplog.records if "NO_CACHE" in r.getMessage()]
    assert [each.partition(",")[0] for each in told] == ["Its arguments take 256MiB"]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("outer", ["sync", "async", "none", "task"])
def test_the_shared_client_is_the_flows_or_one_that_is_closed(outer: str) -> None:
    seen: dict[str, Any] = {}

    def body() -> None:
        before = SyncClientContext.get()
        shared = SharedClient()
        contexts = [shared.open(), shared.open()]
        seen["same"] = contexts[0] is contexts[1]
        seen["the flow's"] = contexts[0] is before
        answers: list[Any] = []

        def ask() -> None:
            SyncClientContext.__var__.set(shared.open())
            with SyncClientContext.get_or_create() as context, shared.lend() as client:
                assert context.client is client
                answers.append(client.api_healthcheck())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen["answers"] = answers
        assert SyncClientContext.get() is before
        client: SyncPrefectClient = contexts[0].client
        shared.close()
        shared.close()
        seen["closed"] = client._client.is_closed
        with pytest.raises(RuntimeError, match="it takes no more tasks"):
            shared.open()

    if outer == "sync":
        flow(body)()
    elif outer == "task":
        # The runner goes on when the task has ended.
        with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
            task(body)()
    elif outer == "async":

        @flow
        async def around() -> None:
            body()

        asyncio.run(around())
    else:
        body()
    assert seen["same"] and seen["answers"] == [None] * 8
    # An open client is the flow's business.
    assert seen["the flow's"] is (outer == "sync")
    # That of a task is shared, and closed once both have ended.
    assert seen["closed"] is (outer in ("async", "none"))


def test_the_shared_client_opens_without_a_call_of_an_api_that_is_away() -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        shared = SharedClient()
        client: SyncPrefectClient = shared.open().client
        with shared.lend() as lent:
            assert lent is client
        shared.close()
    assert client._client.is_closed


@pytest.mark.usefixtures("prefect_server")
def test_children_talk_to_the_parents_server_in_a_session_of_their_own() -> None:
    @task(tags=gpu(memory="64MiB"))
    def looks() -> dict[str, Any]:
        from prefect.settings import PREFECT_API_URL

        return {
            "settings": PREFECT_API_URL.value(),
            "environment": os.environ.get("PREFECT_API_URL"),
            "session": os.getsid(0) == os.getpid(),
        }

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def one() -> Any:
        context = FlowRunContext.get()
        assert context is not None
        return looks.submit().result(), str(context.client.api_url)

    seen, url = one()
    assert seen["settings"].rstrip("/") == seen["environment"].rstrip("/") == url.rstrip("/")
    assert seen["session"]
