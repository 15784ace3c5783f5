"""Every name of Prefect outside its documented API, in one place, with a test for each.

Parent's side: read the run that a thread is in, serialise its context for a child, show states of our
own, forward what a child logs and emits, run Prefect's engine. Child's side: be inside that run
(`child_context`). Checked against Prefect 3.8.8; `tests/integration/test_bridge.py` says which
change of Prefect broke which function here.

It decides nothing about devices or processes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import Task, get_run_logger
from prefect._internal.plugins.collections import load_prefect_collections
from prefect._internal.uuid7 import uuid7
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import (
    FlowRunContext,
    SettingsContext,
    SyncClientContext,
    TagsContext,
    TaskRunContext,
    hydrated_context,
    serialize_context,
)
from prefect.events import Event
from prefect.events.worker import EventsWorker, ProcessPoolForwardingEventsClient
from prefect.exceptions import CrashedRun
from prefect.logging.handlers import emit_api_log, set_api_log_sink
from prefect.logging.loggers import patch_print
from prefect.settings.legacy import Setting
from prefect.states import Crashed, Failed, Pending, Running
from prefect.task_engine import run_task_sync
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.utilities.collections import visit_collection
from prefect.utilities.engine import emit_task_run_state_change_event

from prefect_gpu.policy import is_gpu_tag
from prefect_gpu.processes.messages import EventEmitted, LogEmitted

#: Seconds between tries to get a slot of a tag concurrency limit from a server that is too busy to
#: answer; Prefect's own client has tried six times by then.
SLOT_DELAYS_S = (2.0, 5.0, 10.0, 20.0, 40.0, 60.0)

#: Name of the state of a task that waits for a device.
AWAITING = "AwaitingGPU"

#: Attributes of tasks and flows that only the parent's engine calls.
ONLY_HERE = (
    "on_completion_hooks",
    "on_failure_hooks",
    "on_running_hooks",
    "on_rollback_hooks",
    "on_commit_hooks",
    "on_cancellation_hooks",
    "on_crashed_hooks",
    "retry_condition_fn",
    "cache_key_fn",
)


# Parent's side: the flow.


def flow_run_of_thread() -> FlowRunContext | None:
    """Give the flow run that the caller is in; `None` outside one."""
    return FlowRunContext.get()


def context_tags() -> set[str]:
    """Give the tags of `prefect.tags` contexts around the caller, without the flow run's own."""
    tags = set(TagsContext.get().current_tags)
    flow_run_context = FlowRunContext.get()
    if flow_run_context is not None and flow_run_context.flow_run is not None:
        tags -= set(flow_run_context.flow_run.tags)
    return tags


def flow_run_goes_on(context: FlowRunContext | None, runner: object) -> bool:
    """Tell whether a flow's function came to a good end (or there is none to ask).

    The engine tells a task runner of exceptions that end the flow *engine* only. A flow that raised
    an ordinary exception is seen by its state, which the engine sets before the runner exits:
    `Failed`, or, where the flow is retried, `AwaitingRetry` or already `Running` again.

    Args:
        context: Of the flow run that the runner's tasks were submitted in.
        runner: The runner that ends. One that is not the flow's own (entered by hand, or in a
            child's copy of the context) ends while its flow goes on.
    """
    if context is None or context.flow_run is None or context.flow_run.state is None:
        return True
    if context.detached or context.task_runner is not runner:
        return True
    return bool(context.flow_run.state.is_completed())


def flow_of(context: FlowRunContext | None) -> tuple[str, UUID | None]:
    """Give the name of a flow and the id of its run; "no-flow" and `None` outside one."""
    if context is None or context.flow_run is None:
        return "no-flow", None
    name = context.flow.name if context.flow is not None else context.flow_run.name
    return name, context.flow_run.id


class SharedClient:
    """One synchronous API client for all engine threads of a runner.

    In an async flow each task would otherwise set up a client of its own, 58 to 64 ms of CPU;
    shared it costs 2.6 ms (measured, Prefect 3.8.8).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: SyncClientContext | None = None
        self._own = contextlib.ExitStack()
        self._closed = False

    def open(self) -> SyncClientContext:
        """Give the client's context: the flow's, or one that is opened now, in the caller's flow.

        Raises:
            RuntimeError: It was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the client of this task runner is closed")
            if self._context is None:
                self._context = SyncClientContext.get()
            if self._context is None:
                # In a copy of the caller's context, which must not be changed by us.
                self._context = copy_context().run(
                    lambda: self._own.enter_context(_Entered(SyncClientContext()))
                )
            return self._context

    @contextlib.contextmanager
    def lend(self) -> Iterator[SyncPrefectClient]:
        """Give the client for a while; it stays open."""
        yield self.open().client

    def close(self) -> None:
        """Close the client if it is ours."""
        with self._lock:
            self._closed = True
            self._context = None
            self._own.close()


class _Entered:
    """Enters the client of a `SyncClientContext` without setting a context variable."""

    def __init__(self, context: SyncClientContext) -> None:
        self._context = context

    def __enter__(self) -> SyncClientContext:
        self._context.client.__enter__()
        # Whoever enters it again must neither enter nor close the client.
        self._context._context_stack = 1
        return self._context

    def __exit__(self, *exc_info: Any) -> None:
        self._context.client.__exit__(*exc_info)


# Parent's side: the engine around one task.


def with_body(
    task: Task[..., Any],
    body: Callable[..., Any],
    hopeless: Callable[[object], bool],
) -> Task[..., Any]:
    """Give a copy of a task whose body is replaced, for Prefect's engine to run in a thread.

    Args:
        task: The user's task; it is not changed.
        body: Called in place of `task.fn`, with its arguments, synchronously.
        hopeless: Tells of an error that a retry could only fail with again.
    """
    shadow = copy.copy(task)

    @functools.wraps(task.fn)
    def call_body(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    shadow.fn = call_body
    shadow.isasync = False
    shadow.isgenerator = False
    # Counted by us from the body's first line, and ended by killing the process.
    shadow.timeout_seconds = None
    shadow.retry_condition_fn = _retry_condition(task.retry_condition_fn, hopeless)
    return shadow


def _retry_condition(
    condition: Callable[..., Any] | None, hopeless: Callable[[object], bool]
) -> Callable[..., Any]:
    # The last answer, kept for the engine's own question: see `may_still_retry`. One task run's
    # engine runs in one thread.
    answered: list[tuple[object, bool]] = []

    def known(state: State[Any]) -> bool | None:
        if hopeless(state.data):
            return False
        if answered and answered[0][0] is state.data:
            return answered.pop()[1]
        return True if condition is None else None

    def keep(state: State[Any], answer: object) -> bool:
        answered[:] = [(state.data, bool(answer))]
        return bool(answer)

    if inspect.iscoroutinefunction(condition):

        async def check_async(task: Any, run: TaskRun, state: State[Any]) -> bool:
            answer = known(state)
            if answer is None:
                answer = keep(state, await condition(task, run, state))
            return answer

        return check_async

    def check(task: Any, run: TaskRun, state: State[Any]) -> bool:
        answer = known(state)
        if answer is None:
            assert condition is not None
            answer = keep(state, condition(task, run, state))
        return answer

    return check


class ChildCrash(BaseException):
    """Ends Prefect's engine for one task run as a crash.

    Args:
        error: What happened; what the future's result raises.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        return str(self.error)


def run_engine(
    client: SharedClient,
    task: Task[..., Any],
    task_run_id: UUID,
    parameters: dict[str, Any],
    wait_for: Iterable[Any] | None,
    dependencies: dict[str, set[Any]] | None,
    seen_run: Callable[[], TaskRun | None],
) -> State[Any]:
    """Run Prefect's task engine to its end, in this thread and its context.

    Args:
        client: For the engine.
        task: From `with_body`.
        task_run_id: For the new task run.
        parameters: What to call it with.
        wait_for: Futures that must be done first.
        dependencies: Further inputs to record.
        seen_run: Gives the task run that the body found itself in (`current_task_run`), `None` if
            it was not called: the engine keeps it to itself.

    Returns:
        The final state, crashes included.
    """
    if SyncClientContext.get() is None:
        SyncClientContext.__var__.set(client.open())
    try:
        for delay_s in (*SLOT_DELAYS_S, None):
            try:
                state = run_task_sync(
                    task=task,
                    task_run_id=task_run_id,
                    parameters=parameters,
                    wait_for=wait_for,
                    return_type="state",
                    dependencies=dependencies,
                )
                break
            except ConcurrencySlotAcquisitionError:
                # Before the body, and about Prefect's own server: not the task's failure.
                if delay_s is None or seen_run() is not None:
                    raise
                threading.Event().wait(delay_s * random.uniform(0.5, 1.5))
    except ChildCrash as crash:
        state = _state_of(seen_run())
        assert state is not None
        # Prefect attached our BaseException; a flow that asks for the result must be able to catch
        # it as any other error.
        state.data = crash.error
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        # An exception in the future would be raised by its `wait`, which Prefect's runners never
        # do: the end of the runner, or trouble of the engine itself, is a crash of this run alone.
        state = _state_of(seen_run())
        if state is None or not state.is_final():
            state = Crashed(message=f"Execution was interrupted: {error!r}", data=error)
        if state.is_crashed() and not isinstance(state.data, Exception):
            state.data = CrashedRun(state.message or str(error))
            state.data.__cause__ = error
    assert state is not None
    return state


def _state_of(task_run: TaskRun | None) -> State[Any] | None:
    return None if task_run is None else task_run.state


def new_task_run_id() -> UUID:
    """Make an id for a task run: ordered by time, as Prefect's own runners make them."""
    return uuid7()


def run_logger() -> Any:
    """Give the logger of the run that this thread is in."""
    return get_run_logger()


def current_task_run() -> TaskRun:
    """Give the task run that this thread's engine runs: the engine's own object.

    Raises:
        RuntimeError: There is none.
    """
    context = TaskRunContext.get()
    if context is None:
        raise RuntimeError("this thread runs no task")
    return context.task_run


def may_still_retry(task_run: TaskRun, error: Exception) -> bool:
    """Tell whether the engine would run the body again after an exception.

    It asks the task's `retry_condition_fn`; the engine is given the same answer when it asks.

    Args:
        task_run: The thread's.
        error: What the body is about to raise.
    """
    context = TaskRunContext.get()
    assert context is not None
    # The engine's copy of the task, from `with_body`.
    task = context.task
    if task_run.run_count > task.retries:
        return False
    condition: Any = task.retry_condition_fn
    # As the engine words it.
    state: State[Any] = Failed(
        data=error, message=f"Task run encountered unexpected exception: {error!r}"
    )
    try:
        if inspect.iscoroutinefunction(condition):
            return bool(run_coro_as_sync(condition(task, task_run, state)))
        return bool(condition(task, task_run, state))
    except Exception:  # noqa: BLE001
        # The user's: the engine calls it again, logs what it raised, and does not retry.
        return False


def show_awaiting(reason: str) -> None:
    """Show the thread's task run as waiting for a device, and why."""
    _show(Pending(name=AWAITING, message=f"Waiting for {reason}"))


def show_running() -> None:
    """Show the thread's task run as running again, if it was shown as waiting."""
    state = current_task_run().state
    if state is not None and state.name == AWAITING:
        _show(Running())


def _show(state: State[Any]) -> None:
    # Not through the engine's `set_state`: it would count another run.
    task_run = current_task_run()
    before = task_run.state
    state.state_details.task_run_id = task_run.id
    state.state_details.flow_run_id = task_run.flow_run_id
    if before is not None and before.type == StateType.RUNNING:
        task_run.total_run_time += state.timestamp - before.timestamp
    task_run.state = state
    task_run.state_id = state.id
    task_run.state_type = state.type
    task_run.state_name = state.name
    emit_task_run_state_change_event(task_run=task_run, initial_state=before, validated_state=state)


# Parent's side: the child.


def context_for_child(task: Task[..., Any]) -> tuple[dict[str, Any], bool]:
    """Serialise the thread's run for a child.

    Args:
        task: The user's own task, to stand in place of the copy that the engine runs.

    Returns:
        The context, and whether the body's prints go to the run's log.
    """
    run = TaskRunContext.get()
    with _AsTheyAre.of_thread(None if run is None else str(run.client.api_url)):
        context = serialize_context()
    log_prints = False
    task_run_context = context.get("task_run_context")
    if run is not None and task_run_context:
        log_prints = run.log_prints
        task_run_context["task"] = _travelling(task)
        # They travel once, as the call's arguments.
        task_run_context["parameters"] = {}
    flow_run_context = context.get("flow_run_context")
    if flow_run_context and flow_run_context.get("flow") is not None:
        flow_run_context["flow"] = _travelling(flow_run_context["flow"])
    tags = context.get("tags_context")
    if tags:
        # What a task submits from inside has tags of its own.
        tags["current_tags"] = {t for t in tags["current_tags"] if not is_gpu_tag(t)}
    return context, log_prints


def _travelling(runnable: Any) -> Any:
    """Give a copy of a task or flow for a child to know its run by: without what only runs here.

    A flow's function may refer to anything that its script holds (locks, clients, models), and all
    of it would be pickled, for each task, or refuse to be. The body itself travels in the call.
    """
    light = copy.copy(runnable)
    light.__dict__.pop("__wrapped__", None)
    light.fn = _runs_elsewhere
    for name in ONLY_HERE:
        if name in light.__dict__:
            setattr(light, name, [] if name.endswith("_hooks") else None)
    return light


def _runs_elsewhere(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this copy only names the run; call the task or flow itself")


def without_flow_parameters(context: dict[str, Any]) -> dict[str, Any]:
    """Give a child's context for a flow whose own parameters cannot travel."""
    flow_run_context = {**context.get("flow_run_context", {}), "parameters": {}}
    return {**context, "flow_run_context": flow_run_context}


class _AsTheyAre(SettingsContext):
    """Settings that travel as they are.

    To serialise them took 14 ms of CPU for each task, rebuilding and checking them the child 25 ms;
    pickling and unpickling them take 0.2 (measured, Prefect 3.8.8).
    """

    @classmethod
    def of_thread(cls, url: str | None) -> _AsTheyAre:
        """Give this thread's settings, to be entered while its run is serialised.

        Args:
            url: Of the parent's server: without it each child would boot one of its own. `None`: as
                the settings say.
        """
        current = SettingsContext.get()
        assert current is not None, "Prefect always has settings"
        settings = current.settings
        if url is not None and settings.api.url != url:
            api = settings.api.model_copy(update={"url": url})
            settings = settings.model_copy(update={"api": api})
        return cls(profile=current.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """See `SettingsContext.serialize`."""
        secrets = {"include_secrets": include_secrets}
        profile = self.model_dump(include={"profile"}, exclude_unset=True, context=secrets)
        return {**visit_collection(profile, _plain, return_data=True), "settings": self.settings}


def _plain(value: Any) -> Any:
    """Give what stands for a part of a profile elsewhere, as Prefect writes it."""
    if isinstance(value, Setting):
        return value.name
    return str(value) if isinstance(value, Path) else value


def environment_for_child() -> dict[str, str | None]:
    """Give the variables that a child needs so that Prefect in it speaks to the parent's server."""
    run = TaskRunContext.get()
    if run is None:
        return {}
    # A server of the parent's own (ephemeral) has an address that no setting tells.
    return {"PREFECT_API_URL": str(run.client.api_url)}


def forward_log(log: dict[str, Any]) -> None:
    """Send on what a child logged for its run."""
    emit_api_log(log)


def forward_event(event: str) -> None:
    """Send on an event that a child emitted."""
    worker = EventsWorker.instance()
    context = copy_context()
    # What it is related to was attached in the child, which may have been in another run by then.
    for variable in (FlowRunContext.__var__, TaskRunContext.__var__):
        context.run(cast(ContextVar[Any], variable).set, None)
    context.run(worker.send, Event.model_validate_json(event))


# Child's side.


class _EventQueue:
    """Stands for the queue that Prefect's forwarding client puts events on.

    The client must be Prefect's own class: `emit_event` drops events of clients it does not know.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send

    def put(self, item: tuple[str, Event]) -> None:
        """Send an event to the parent."""
        _, event = item
        self._send(EventEmitted(event.model_dump_json()))


@contextlib.contextmanager
def child_context(
    context: dict[str, Any], log_prints: bool, send: Callable[[Any], None]
) -> Iterator[None]:
    """Be inside the parent's task run: logs, prints, runtime ids, artifacts and nested flows.

    Args:
        context: From `context_for_child`.
        log_prints: Prints go to the run's log.
        send: Takes messages to the parent.
    """
    set_api_log_sink(lambda log: send(LogEmitted(_as_json(log))))
    EventsWorker.set_client_override(
        ProcessPoolForwardingEventsClient, event_queue=_EventQueue(send)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_flush_events)
        stack.enter_context(hydrated_context(context, client=_LateClient()))
        if log_prints:
            stack.enter_context(patch_print())
        yield


def rehearse() -> None:
    """In a process that waits for its task: do now what is the same for every run.

    Takes 15 of the 45 ms that `child_context` took (measured, Prefect 3.8.8).
    """
    # Asked for by each block, result storage among them, and kept.
    load_prefect_collections()
    # Logging is set up, and the models of the contexts are built.
    with hydrated_context({"tags_context": {}}, client=_LateClient()):
        pass


class _LateClient(SyncPrefectClient):
    """The API client of a child's run, made once it is used: its certificates take 17 ms to read."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there: all that `__init__` would have set.
        if "_client" in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        self.__dict__.update(get_client(sync_client=True).__dict__)
        return getattr(self, name)


def _flush_events() -> None:
    with EventsWorker._instance_lock:
        started = bool(cast(Any, EventsWorker)._instances)
    if started:
        EventsWorker.instance().wait_until_empty()


def _as_json(log: dict[str, Any]) -> dict[str, Any]:
    # Ids and times of Prefect's own types would have to be imported to be unpickled.
    plain: dict[str, Any] = json.loads(json.dumps(log, default=str))
    return plain
