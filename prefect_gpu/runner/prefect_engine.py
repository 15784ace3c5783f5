"""Prefect's engine on the parent's side: the names of Prefect outside its documented API.

It reads the run that a thread is in, serialises its context for a child, shows states of our own,
forwards what a child logs and emits, and runs the engine. The child's side is
`prefect_gpu.child.prefect_context`. Checked against Prefect 3.8.8; `tests/integration/test_bridge.py`
has a test for each name, which says what a change of Prefect breaks here.

It decides nothing about devices or processes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import random
import sys
import textwrap
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from datetime import datetime, timezone
from types import FrameType, TracebackType
from typing import Any, cast
from uuid import UUID

from prefect import Task, flow_engine, get_run_logger
from prefect._internal.uuid7 import uuid7
from prefect.cache_policies import CompoundCachePolicy, Inputs
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import (
    AssetContext,
    FlowRunContext,
    SettingsContext,
    SyncClientContext,
    TagsContext,
    TaskRunContext,
    serialize_context,
)
from prefect.events import Event, emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, CrashedRun, MissingContextError, TerminationSignal
from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.logging.loggers import flow_run_logger, get_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed, Failed, Pending, Running
from prefect.task_engine import AsyncTaskRunEngine, SyncTaskRunEngine, run_task_sync
from prefect.transactions import BaseTransaction, Transaction, get_transaction
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.utilities.engine import emit_task_run_state_change_event, should_log_prints
from prefect.utilities.urls import url_for

from prefect_gpu import values
from prefect_gpu.child.channel import current_channel
from prefect_gpu.errors import PrefectGPUError, ProtocolError, ResultError
from prefect_gpu.in_task import current_allocation
from prefect_gpu.policy import is_gpu_tag
from prefect_gpu.processes.messages import ContextChanges, StoredValue
from prefect_gpu.reports.events import DEVICE_ROLE, GPUEvent, device_resource
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import MIB, format_bytes

#: Seconds between tries to get a slot of a tag concurrency limit from a server that is too busy to
#: answer. Most refusals last for a moment; Prefect's own client may have tried six times by then.
SLOT_DELAYS_S = (0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)

#: Characters of an error's text that a log line, or the message of a state, repeats.
LONGEST_LINE = 160

#: Packages whose frames are between a line that submits a task and the task runner.
_NOT_USERS = ("prefect", "prefect_gpu")

#: Name of the state of a task that waits for a device.
AWAITING = "AwaitingGPU"

#: The state of a task run that has waited, from its placement to the first line of its body.
STARTING = "Starting"

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


# The flow.


def context_tags() -> set[str]:
    """Return the tags of `prefect.tags` contexts around the caller, without the flow run's own."""
    tags = set(TagsContext.get().current_tags)
    flow_run_context = FlowRunContext.get()
    if flow_run_context is not None and flow_run_context.flow_run is not None:
        tags -= set(flow_run_context.flow_run.tags)
    return tags


def flow_run_goes_on(context: FlowRunContext | None, runner: object) -> bool:
    """Return whether a flow's function succeeded, or there is no flow to ask.

    The engine passes only those exceptions to a task runner that end the flow *engine*. An ordinary
    exception of the flow shows in the state that the engine sets before the runner exits: `Failed`,
    or, where the flow is retried, `AwaitingRetry` or already `Running` again.

    Args:
        context: Of the flow run that the runner's tasks were submitted in.
        runner: The runner that ends. One that is not the flow's own (entered by hand, or in a
            child's copy of the context) ends while its flow continues.
    """
    if context is None or context.flow_run is None or context.flow_run.state is None:
        return True
    if context.detached or context.task_runner is not runner:
        return True
    return bool(context.flow_run.state.is_completed())


def flow_of(context: FlowRunContext | None) -> tuple[str, UUID | None]:
    """Return the name of a flow, as reports show it, and the id of its run; "no-flow" and `None` outside one."""
    if context is None or context.flow_run is None:
        return "no-flow", None
    name = context.flow.name if context.flow is not None else context.flow_run.name
    return clean_name(name), context.flow_run.id


def log_on_flow(context: FlowRunContext | None, text: str, level: int = logging.INFO) -> None:
    """Log on a flow run, of which the context may have ended; outside one, on Prefect's console alone."""
    if context is not None and context.flow_run is not None:
        flow_run_logger(context.flow_run, context.flow).log(level, text)
    else:
        get_logger("gpu").log(level, text)


def artifact_url(artifact_id: UUID) -> str | None:
    """Return the address of an artifact's page; `None`: no address of a UI is known."""
    # `url_for` knows no artifacts (Prefect 3.8.8).
    base = get_current_settings().ui_url
    return f"{base.rstrip('/')}/artifacts/artifact/{artifact_id}" if base else None


def emit_device_event(event: GPUEvent, around: Context) -> None:
    """Emit an event about a device.

    Args:
        event: Its first device is the resource.
        around: The context of the flow run, from which Prefect reads the related resources.
    """
    around.copy().run(
        emit_event,
        event.name,
        {**device_resource(event.devices[0]), **event.labels},
        payload={**event.payload},
    )


class SharedClient:
    """One synchronous API client for all engine threads of a runner.

    In an async flow each task would otherwise set up its own client, which takes 58 to 64 ms of CPU;
    a shared one takes 2.6 ms (measured, Prefect 3.8.8).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: SyncClientContext | None = None
        #: Context of its own client; `None`: it has none.
        self._own: Context | None = None
        self._closed = False

    def open(self) -> SyncClientContext:
        """Return the client's context: the flow's, or one that is opened now, in the caller's flow.

        Raises:
            RuntimeError: It was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the task runner has ended; it takes no more tasks")
            if self._context is None and TaskRunContext.get() is None:
                # That of a task is entered again, below: otherwise it would be closed at the end of the task.
                self._context = SyncClientContext.get()
            if self._context is None:
                # In a copy of the caller's context, which must not change. The engine enters it again,
                # which then neither opens nor closes the client. It is not entered itself here: that asks
                # the API for its version, and an API that is away must fail tasks, not their `submit`.
                self._own, context = copy_context(), SyncClientContext()
                self._own.run(context.client.__enter__)
                context._context_stack = 1
                self._context = context
            return self._context

    @contextlib.contextmanager
    def lend(self) -> Iterator[SyncPrefectClient]:
        """Lend the client for a `with` block; it stays open after it."""
        yield self.open().client

    def close(self) -> None:
        """Close the client, unless it is the flow's."""
        with self._lock:
            self._closed = True
            own, self._own = self._own, None
            if own is not None and self._context is not None:
                own.run(self._context.client.__exit__, None, None, None)
            self._context = None


# The engine around one task.


def with_body(
    task: Task[..., Any],
    body: Callable[..., Any],
    hopeless: Callable[[object], bool],
    speaks_for_itself: Callable[[Exception], bool],
    submitted_at: CallingLine | None = None,
) -> Task[..., Any]:
    """Return a copy of a task whose body is replaced, for Prefect's engine to run in a thread.

    Args:
        task: The user's task; it is not changed.
        body: Called in place of `task.fn`, with its arguments, synchronously.
        hopeless: Returns whether a retry could only fail with the same error.
        speaks_for_itself: Returns whether an error is not explained by where in this package it was raised.
        submitted_at: The line of the user's that submitted the task. It is shown with errors of this package, which
            have no other line of the user's.
    """
    shadow = copy.copy(task)

    @functools.wraps(task.fn)
    def call_body(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        except Exception as error:
            if not speaks_for_itself(error):
                raise
            told = error
        # The frames of this package would stand between the user's, which are its cause, and Prefect's.
        try:
            line = submitted_at if isinstance(told, PrefectGPUError) else None
            raise told.with_traceback(None if line is None else line.traceback())
        finally:
            # It holds this frame.
            del told

    call_body.runs_in_child = True  # type: ignore[attr-defined]
    shadow.fn = call_body
    shadow.isasync = False
    shadow.isgenerator = False
    # The time is counted from the body's first line in the child, whose process is killed.
    shadow.timeout_seconds = None
    shadow.retry_condition_fn = _retry_condition(task.retry_condition_fn, hopeless)
    return shadow


@dataclass(frozen=True, slots=True)
class CallingLine:
    """A line of the user's. It keeps nothing of the call: a frame would keep all that is in its variables."""

    file: str
    line: int
    function: str
    #: Of the function.
    first_line: int
    module: str

    def traceback(self) -> TracebackType:
        """Return a traceback of this line alone, without what was in its variables."""
        # A frame is only made by running code; this code says that it is from there.
        code = compile("here.append(frame())", self.file, "exec")
        code = code.replace(co_name=self.function, co_firstlineno=self.first_line)
        here: list[FrameType] = []
        exec(code, {"here": here, "frame": sys._getframe, "__name__": self.module})
        # -1: it is not known where in the line.
        return TracebackType(None, here.pop(), -1, self.line)


def calling_line() -> CallingLine | None:
    """Return the innermost line that is neither of Prefect nor of this package; `None`: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    if frame is None:
        return None
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    return CallingLine(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno, module)


def _retry_condition(
    condition: Callable[..., Any] | None, hopeless: Callable[[object], bool]
) -> Callable[..., Any]:
    # The last answer, kept for the engine's own question: see `EngineRun.may_still_retry`. The engine
    # of a task run uses one thread.
    answered: list[tuple[object, bool]] = []

    # A plain function, as the engine expects one.
    def check(task: Any, run: TaskRun, state: State[Any]) -> bool:
        if hopeless(state.data):
            return False
        if answered and answered[0][0] is state.data:
            return answered.pop()[1]
        answer: Any = True
        if inspect.iscoroutinefunction(condition):
            answer = run_coro_as_sync(condition(task, run, state))
        elif condition is not None:
            answer = condition(task, run, state)
        answered[:] = [(state.data, bool(answer))]
        return bool(answer)

    return check


#: How an engine waits for the next retry of its task run; `None`: as Prefect does.
_pause: ContextVar[Callable[[float], object] | None] = ContextVar("prefect_gpu_pause", default=None)


@contextlib.contextmanager
def paused_by(pause: Callable[[float], object]) -> Iterator[None]:
    """Make engines that are run or submitted in a `with` block wait by a function of the runner.

    Args:
        pause: Waits for a number of seconds; raises a `BaseException` once the runner ends.
    """
    token = _pause.set(pause)
    try:
        yield
    finally:
        _pause.reset(token)


def _ended_by_the_runner(wait_until_ready: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(wait_until_ready)
    def wait(engine: Any) -> None:
        pause, retry_at = _pause.get(), engine.state.state_details.scheduled_time
        if pause is not None and retry_at is not None:
            pause((retry_at - datetime.now(timezone.utc)).total_seconds())
        wait_until_ready(engine)

    return wait


# The engine's own name (Prefect 3.8.8): it sleeps there until the next retry, and nothing could wake it. In a
# version without that name it sleeps on.
if hasattr(SyncTaskRunEngine, "wait_until_ready"):
    _waiting: Any = _ended_by_the_runner(SyncTaskRunEngine.wait_until_ready)
    SyncTaskRunEngine.wait_until_ready = _waiting  # type: ignore[method-assign]


class CancelledByRunner(BaseException):
    """Ends Prefect's engine for one task run, since its flow has ended.

    Args:
        message: Of the final state.
        crashed: Whether the flow run crashes, and so does the task run; else it is cancelled.
    """

    def __init__(
        self, message: str = "the flow ended before this task", crashed: bool = False
    ) -> None:
        super().__init__(message)
        self.crashed = crashed

    def state(self) -> State[Any]:
        """Return the final state of the task run."""
        return (Crashed if self.crashed else Cancelled)(message=str(self))


def ended_by(error: BaseException | None) -> CancelledByRunner:
    """Return how a flow's tasks end.

    Args:
        error: What ended the flow's engine; `None`: its function failed.
    """
    if isinstance(error, TerminationSignal):
        # A worker or `serve` says it before it sends the signal (Prefect 3.8.8).
        if getattr(flow_engine, "_termination_intent", lambda: "")() == "cancel":
            return CancelledByRunner("the flow run was cancelled")
        return CancelledByRunner("Execution was aborted by a termination signal.", crashed=True)
    if isinstance(error, KeyboardInterrupt):
        return CancelledByRunner("Execution was aborted by an interrupt signal.", crashed=True)
    if isinstance(error, CancelledError):
        return CancelledByRunner(
            "Execution was cancelled by the runtime environment.", crashed=True
        )
    return CancelledByRunner()


def _ends_on_purpose(handle_crash: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(handle_crash)
    def handle(engine: Any, error: BaseException) -> None:
        if not isinstance(error, CancelledByRunner):
            handle_crash(engine, error)
            return
        # As the engine does, without the error line. A state that the body returns would be stored as its result.
        engine.set_state(error.state(), force=True)
        engine._raised = error
        engine._telemetry.record_exception(error)
        engine._telemetry.end_span_on_failure(str(error))

    return handle


def _finishes_on_purpose(log_finished_message: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(log_finished_message)
    def log(engine: Any) -> None:
        if isinstance(engine._raised, CancelledByRunner):
            engine.logger.info(f"Finished in state {engine.state}")
        else:
            log_finished_message(engine)

    return log


#: How a line begins that this package adds to an error.
NOTE = "prefect_gpu: "


def add_note(error: Exception, text: str) -> None:
    """Add a line to what is shown of an error that ends a task run out of memory, and to the task run's state.

    Python 3.10 keeps the line without showing it in a traceback.
    """
    if sys.version_info >= (3, 11):
        error.add_note(NOTE + text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), NOTE + text]  # type: ignore[attr-defined]


def _says_what_helps(set_state: Callable[..., State[Any]]) -> Callable[..., State[Any]]:
    @functools.wraps(set_state)
    def set_(engine: Any, state: State[Any], force: bool = False) -> State[Any]:
        # Prefect's message has the error's own text and not its notes.
        data = state.data
        error = data if isinstance(data, Exception) else getattr(data, "result", None)
        for note in getattr(error, "__notes__", ()) if state.is_failed() else ():
            if note.startswith(NOTE):
                said = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                said = textwrap.shorten(said, LONGEST_LINE, placeholder=" …")
                state.message = f"Out of memory: {note.removeprefix(NOTE)} ({said})"
        return set_state(engine, state, force=force)

    return set_


# The engine's own names (Prefect 3.8.8): it calls every exception that is no `Exception` a crash, and logs two errors.
_wrapped: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("handle_crash", _ends_on_purpose),
    ("log_finished_message", _finishes_on_purpose),
    ("set_state", _says_what_helps),
)
for _name, _wrap in _wrapped:
    if hasattr(SyncTaskRunEngine, _name):
        setattr(SyncTaskRunEngine, _name, _wrap(getattr(SyncTaskRunEngine, _name)))


#: Names of GPU tasks that ran without a `GPUTaskRunner` in this process, and were warned of.
_without_runner: set[str] = set()


def is_first_warning(task_name: str, has_runner: bool) -> bool:
    """Return whether no call of a GPU task without the task runner was warned of before.

    The process of a GPU task asks the flow's process, as several processes may call the same task.

    Args:
        task_name: Name of the task.
        has_runner: Its flow has a `GPUTaskRunner`: each flow run has warnings of its own.
    """
    context, channel = FlowRunContext.get(), current_channel()
    # Only a `GPUTaskRunner` has it.
    is_first = getattr(context and context.task_runner, "is_first_direct_call", None)
    if has_runner and is_first is not None:
        first = bool(is_first(task_name))
    else:
        first = task_name not in _without_runner
        _without_runner.add(task_name)
    if first and channel is not None:
        with contextlib.suppress(OSError, EOFError, ProtocolError, RuntimeError):
            arguments = {"task_name": task_name, "has_runner": has_runner}
            return bool(channel.ask("is_first_warning", **arguments))
    return first


def _warns_of_direct_calls(begin_run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(begin_run)
    def begin(engine: Any) -> Any:
        task, context = engine.task, FlowRunContext.get()
        # A background task was not called in its flow: `task_worker` warns of it.
        state = engine.task_run and engine.task_run.state
        deferred = bool(state and state.state_details.deferred)
        tagged = context is not None and any(map(is_gpu_tag, {*task.tags, *context_tags()}))
        if (
            context is not None
            and tagged
            and not (deferred or getattr(task.fn, "runs_in_child", False))
        ):
            has_runner = hasattr(context.task_runner, "is_first_direct_call")
            if is_first_warning(task.name, has_runner):
                _warn_of_direct_call(engine.logger, task.name, has_runner)
        # A coroutine, of the engine of async tasks.
        return begin_run(engine)

    return begin


def _warn_of_direct_call(log: Any, task_name: str, has_runner: bool) -> None:
    around = current_allocation() is not None
    where = "the process of the GPU task around it" if around else "the flow's own process"
    has = (
        "on its device and within its memory budget"
        if around
        else "without a device or a memory budget of its own"
    )
    if has_runner:
        text = (
            "GPU task %r was called directly: it runs in %s, %s. Call it with .submit() or .map()."
        )
        log.warning(text, task_name, where, has)
    else:
        text = (
            "GPU task %r runs in %s, and its gpu tags have no effect: its flow has another task runner. Write "
            "@flow(task_runner=GPUTaskRunner())."
        )
        log.warning(text, task_name, where)


# A direct call goes to Prefect's engine without the task runner, so the engine is where it can be seen (Prefect 3.8.8).
for _engine in (SyncTaskRunEngine, AsyncTaskRunEngine):
    if hasattr(_engine, "begin_run"):
        setattr(_engine, "begin_run", _warns_of_direct_calls(_engine.begin_run))  # noqa: B010


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
    arguments: Mapping[str, Any],
    seen_run: Callable[[], TaskRun | None],
) -> State[Any]:
    """Run Prefect's task engine to its end, in this thread and its context.

    Args:
        client: For the engine.
        task: From `with_body`.
        arguments: Other arguments of `run_task_sync`: the parameters, and the task run or the id of a new one.
        seen_run: Returns the task run that the body was called for (`EngineRun.task_run`), which the
            engine does not return; `None`: the body was not called.

    Returns:
        The final state, crashes included.
    """
    if SyncClientContext.get() is None:
        SyncClientContext.__var__.set(client.open())
    pause = _pause.get() or threading.Event().wait
    try:
        for delay_s in (*SLOT_DELAYS_S, None):
            try:
                state = run_task_sync(task, **{**arguments, "return_type": "state"})
                break
            except ConcurrencySlotAcquisitionError:
                # Prefect's server was too busy before the body began: not the task's failure.
                if delay_s is None or seen_run() is not None:
                    raise
                pause(delay_s * random.uniform(0.5, 1.5))
    except ChildCrash as crash:
        run = seen_run()
        assert run is not None and run.state is not None
        state = run.state
        # Prefect attached our BaseException; a flow that asks for the result must be able to catch
        # it as any other error.
        state.data = crash.error
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        # An exception in the future would be raised by its `wait`, which Prefect's own futures never
        # do. The end of the runner, or an error of the engine itself, crashes this task run alone.
        run = seen_run()
        state = None if run is None else run.state
        if isinstance(error, CancelledByRunner) and (state is None or not state.is_final()):
            state = error.state()
        if state is None or not state.is_final():
            state = Crashed(message=f"Execution was interrupted: {error!r}", data=error)
        if not isinstance(state.data, Exception):
            kind = CancelledRun if state.is_cancelled() else CrashedRun
            state.data = kind(state.message or str(error))
            state.data.__cause__ = error
    assert state is not None
    return state


def failed_state(task_name: str, error: Exception) -> State[Any]:
    """Return the state of a task for which no engine could be started, and log it for the flow."""
    with contextlib.suppress(MissingContextError):
        get_run_logger().error("Task %r could not be started: %s", task_name, error)
    return Failed(message=f"Task could not be started: {error}", data=error)


def new_task_run_id() -> UUID:
    """Return an id for a new task run: ordered by time, as Prefect's own runners make them."""
    return uuid7()


#: Bytes of arguments from which the time of Prefect's hash is worth a line: 0.75 s for as many, on two cores (Prefect 3.8.8).
LARGE_ARGUMENTS_BYTES = 256 * MIB

#: Names of GPU tasks whose large arguments were logged.
_large_arguments: set[str] = set()


def hashes_inputs(task: Task[..., Any]) -> bool:
    """Return whether Prefect hashes all arguments of a task before each run, to look for a cached result."""
    policy = task.cache_policy
    policies = policy.policies if isinstance(policy, CompoundCachePolicy) else [policy]
    return any(isinstance(each, Inputs) and not each.exclude for each in policies)


class EngineRun:
    """The task run that this thread's engine runs. For use on that thread.

    Args:
        task: The user's own task. The engine runs the copy that `with_body` made.

    Raises:
        RuntimeError: This thread runs no task.
    """

    def __init__(self, task: Task[..., Any]) -> None:
        context = TaskRunContext.get()
        if context is None:
            raise RuntimeError("this thread runs no task")
        self._task = task
        self._context = context
        #: The engine's own object.
        self.task_run: TaskRun = context.task_run
        self._logger = get_run_logger()
        self._around = _around_events(context)
        #: Topics of the reasons to wait that were logged since the last placement.
        self._told: set[object] = set()
        #: Why it waits; `None`: it does not wait, or not for long.
        self.awaits: Reason | None = None
        flow_run = FlowRunContext.get()
        flow = None if flow_run is None else flow_run.flow
        #: Name of the flow that the task was submitted in, the innermost of nested ones; `None`: in none.
        self.flow_name: str | None = None if flow is None else clean_name(flow.name)

    def end(self) -> None:
        """Forget the run's value and arguments; logs and events may still come, in any time."""
        self.task_run = _without_value(self.task_run)
        self._context = TaskRunContext.model_construct(task_run=self.task_run)

    def say(self, text: str) -> None:
        """Log what happens, on the task run. From any thread."""
        self._logger.info(text)

    def advise_no_cache(self, size_bytes: int) -> None:
        """Log once for each task that Prefect hashes its arguments, where these are large."""
        name = self._task.name
        if size_bytes < LARGE_ARGUMENTS_BYTES or name in _large_arguments:
            return
        if hashes_inputs(self._context.task):
            _large_arguments.add(name)
            self.say(
                f"Its arguments take {format_bytes(size_bytes)}, and Prefect hashes them before each run, to look for "
                "a cached result: @task(cache_policy=NO_CACHE) saves that time"
            )

    def say_ended(self, text: str) -> None:
        """Log how a process has ended, with the address of the page that has its report. From any thread."""
        # A context is entered by one thread at a time.
        url = self._around.copy().run(url_for, "task-run", self.task_run.id)
        self.say(f"{text}; {url}" if url else text)

    def warn(self, text: str) -> None:
        """Log a warning on the task run."""
        self._logger.warning(text)

    def note(self, text: str) -> None:
        """Add a warning to the log of the task run in the API alone: the terminal shows its text already."""
        run = self.task_run
        record = {
            "name": self._logger.name,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": text,
            "task_run_id": str(run.id),
            "flow_run_id": run.flow_run_id and str(run.flow_run_id),
        }
        if self._logger.isEnabledFor(logging.WARNING):
            APILogHandler().handle(logging.makeLogRecord(record))

    def emit(self, event: GPUEvent) -> None:
        """Emit an event about the task run. From any thread; without waiting for the API."""
        run = self.task_run
        related = [
            *({**device_resource(d), "prefect.resource.role": DEVICE_ROLE} for d in event.devices),
            # As in Prefect's own events of a task run; the flow run, its flow and its tags are added by Prefect.
            *(
                {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
                for tag in sorted(run.tags)
            ),
        ]
        resource = {
            "prefect.resource.id": f"prefect.task-run.{run.id}",
            "prefect.resource.name": run.name,
            **event.labels,
        }
        # A context is entered by one thread at a time.
        self._around.copy().run(
            emit_event, event.name, resource, related=related, payload={**event.payload}
        )

    def may_still_retry(self, error: Exception) -> bool:
        """Return whether the engine would run the body again after an exception.

        It asks the task's `retry_condition_fn`; the engine gets the same answer when it asks.

        Args:
            error: What the body is about to raise.
        """
        # The engine's copy of the task, from `with_body`.
        task, task_run = self._context.task, self.task_run
        if task_run.run_count > task.retries:
            return False
        condition: Any = task.retry_condition_fn
        # As the engine words it.
        state: State[Any] = Failed(
            data=error, message=f"Task run encountered unexpected exception: {error!r}"
        )
        try:
            return bool(condition(task, task_run, state))
        except Exception:  # noqa: BLE001
            # The user's function: the engine calls it again, logs the error, and does not retry.
            return False

    def show_awaiting(self, reason: Reason) -> None:
        """Show the task run as waiting for a device, and why; log it where the topic of the reason is new."""
        self.awaits = reason
        text = f"Waiting for {sentence(reason)}"
        if reason.topic not in self._told:
            self._told.add(reason.topic)
            self.say(text)
        self._show(Pending(name=AWAITING, message=text))

    def show_placed(self, text: str) -> None:
        """Log that the task run has a device; show it as starting, if it was shown as waiting."""
        self._told.clear()
        self.awaits = None
        self.say(text)
        if self.task_run.state_name == AWAITING:
            self._show(Pending(name=STARTING, message=f"{text}; starting its process"))

    def show_running(self) -> None:
        """Show the task run as running again, if it was shown as waiting or starting."""
        if self.task_run.state_name in (AWAITING, STARTING):
            self._show(Running())

    def _show(self, state: State[Any]) -> None:
        # Not through the engine's `set_state`: it would count another run.
        task_run = self.task_run
        before = task_run.state
        state.state_details.task_run_id = task_run.id
        state.state_details.flow_run_id = task_run.flow_run_id
        if before is not None and before.type == StateType.RUNNING:
            task_run.total_run_time += state.timestamp - before.timestamp
        task_run.state = state
        task_run.state_id = state.id
        task_run.state_type = state.type
        task_run.state_name = state.name
        emit_task_run_state_change_event(
            task_run=task_run, initial_state=before, validated_state=state
        )

    # Its child.

    def context_for_child(self) -> tuple[dict[str, Any], bool]:
        """Serialise the task run's context for a child.

        Returns:
            The context, and whether the body's prints go to the run's log.
        """
        task_run, flow_run = self._context, FlowRunContext.get()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_AsTheyAre.of_thread(str(task_run.client.api_url)))
            # Prefect would copy lists and dictionaries in the parameters, and turn models into dictionaries.
            stack.enter_context(task_run.model_copy(update={"parameters": {}}))
            if flow_run is not None:
                stack.enter_context(flow_run.model_copy(update={"parameters": {}}))
            context = serialize_context()
        task_run_context = context["task_run_context"]
        task_run_context["task"] = _travelling(self._task)
        task_run_context["parameters"] = task_run.parameters
        flow_run_context = context.get("flow_run_context")
        if flow_run is not None and flow_run_context:
            flow_run_context["parameters"] = flow_run.parameters or {}
            if flow_run_context.get("flow") is not None:
                flow_run_context["flow"] = _travelling(flow_run_context["flow"])
        tags = context.get("tags_context")
        if tags:
            # A task that is submitted from inside has its own tags.
            tags["current_tags"] = {t for t in tags["current_tags"] if not is_gpu_tag(t)}
        assets = AssetContext.get()
        context["asset_context"] = assets.serialize() if assets is not None else {}
        context["transactions"] = [_as_values(each) for each in _transactions()]
        return context, self._context.log_prints

    def environment_for_child(self) -> dict[str, str | None]:
        """Return the variables with which Prefect in a child speaks to the parent's server."""
        # No setting has the address of an ephemeral server.
        return {"PREFECT_API_URL": str(self._context.client.api_url)}

    @staticmethod
    def apply_changes(changes: ContextChanges) -> None:
        """Change the run's contexts in this thread as its body, which has completed, has changed them in a child."""
        transactions = _transactions()
        for transaction, values_set in zip(transactions, changes.transactions, strict=True):
            for name, value in values_set.items():
                transaction.set(name, value)
        if transactions:
            transactions[0].on_commit_hooks.extend(changes.on_commit)
            transactions[0].on_rollback_hooks.extend(changes.on_rollback)
        assets = AssetContext.get()
        if assets is not None:
            for key, metadata in changes.metadata.items():
                assets.add_asset_metadata(key, dict(metadata))

    @staticmethod
    def forward_log(log: dict[str, Any]) -> None:
        """Send on a record that a child logged for its run."""
        emit_api_log(log)

    @staticmethod
    def forward_event(event: str) -> None:
        """Send on an event that a child emitted."""
        worker = EventsWorker.instance()
        context = copy_context()
        # The child has attached related resources. This thread may be in another run by now.
        for variable in (FlowRunContext.__var__, TaskRunContext.__var__):
            context.run(cast(ContextVar[Any], variable).set, None)
        context.run(worker.send, Event.model_validate_json(event))


def _transactions() -> list[BaseTransaction]:
    """Return the transaction of this thread's task run, then each one around it."""
    found: list[BaseTransaction] = []
    transaction = get_transaction()
    # One around it that has ended gives as its parent the one that this thread is in.
    while transaction is not None and not any(transaction is each for each in found):
        found.append(transaction)
        transaction = transaction.get_parent()
    return found


def _stored(name: str, value: Any) -> StoredValue:
    try:
        return StoredValue(values.Apart.of(value, "argument", name))
    except ResultError as error:
        return StoredValue(error)


def _as_values(transaction: BaseTransaction) -> dict[str, Any]:
    """Return what a child makes its copy of a transaction from (`prefect_context.RunContexts`)."""
    names = ("key", "commit_mode", "isolation_level", "overwrite", "write_on_commit", "state")
    stored = transaction._stored_values.copy()
    return {
        "fields": {name: getattr(transaction, name) for name in names},
        "holder": transaction._holder,
        "values": {name: _stored(name, value) for name, value in stored.items()},
    }


def _around_events(context: TaskRunContext) -> Context:
    """Return a context from which Prefect reads the related resources of an event, without the run's value and arguments.

    Prefect keeps a copy of it until the event is sent.
    """
    around = copy_context()
    run = TaskRunContext.model_construct(task_run=_without_value(context.task_run))
    around.run(cast(ContextVar[Any], TaskRunContext.__var__).set, run)
    flow = FlowRunContext.get()
    if flow is not None:
        # It has the results of the flow's task runs.
        flow = FlowRunContext.model_construct(flow_run=flow.flow_run)
        around.run(cast(ContextVar[Any], FlowRunContext.__var__).set, flow)
    # It has the engine, which has the value.
    around.run(cast(ContextVar[Any], Transaction.__var__).set, None)
    return around


def _without_value(task_run: TaskRun) -> TaskRun:
    """Return a copy of a task run without its state, whose data is the value."""
    return task_run.model_copy(update={"state": None})


def _travelling(runnable: Any) -> Any:
    """Return a copy of a task or flow that names the run in a child, without what runs only here.

    A flow's function may refer to anything in its script (locks, clients, models). All of it would be
    pickled for each task, or refuse to be. The body itself travels in the call.
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


def without_parameters(
    context: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a child's context without parameters, the task's own parameters, and those of its flow.

    They are objects that the call has as arguments, too. Pickled with the call, each travels once.
    """
    parameters: dict[str, dict[str, Any]] = {}
    for name in ("task_run_context", "flow_run_context"):
        run = context.get(name) or {}
        parameters[name] = run.get("parameters") or {}
        if parameters[name]:
            context = {**context, name: {**run, "parameters": {}}}
    return context, parameters["task_run_context"], parameters["flow_run_context"]


def logs_need_prefect(task: Task[..., Any]) -> bool:
    """Return whether what a task's body logs or prints needs Prefect from the body's first line.

    Without Prefect a child has the levels of Prefect's default configuration. For the thread that submits the task.
    """
    logs = get_current_settings().logging
    return (
        should_log_prints(task)
        or bool(logs.extra_loggers)
        or logs.config_path.exists()
        # Prefect reads levels, handlers and `propagate` of loggers from these.
        or any(
            name.startswith(("PREFECT_LOGGING_ROOT_", "PREFECT_LOGGING_LOGGERS_"))
            for name in os.environ
        )
    )


def prefect_log_level() -> str:
    """Return the level of Prefect's loggers, as the settings of this thread have it."""
    return get_current_settings().logging.level


class _AsTheyAre(SettingsContext):
    """Settings that are pickled as they are.

    To serialise them took 14 ms of CPU for each task, and to validate them in the child 25 ms; to
    pickle and unpickle them takes 0.2 ms (measured, Prefect 3.8.8).
    """

    @classmethod
    def of_thread(cls, url: str) -> _AsTheyAre:
        """Return this thread's settings, to be entered while its run is serialised.

        Args:
            url: Of the parent's server: without it each child would start its own.
        """
        current = SettingsContext.get()
        assert current is not None, "Prefect always has settings"
        settings = current.settings
        if settings.api.url != url:
            api = settings.api.model_copy(update={"url": url})
            settings = settings.model_copy(update={"api": api})
        # Prefect's validation changes the settings that all threads share for a moment, and fails if two do so.
        return cls.model_construct(profile=current.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """See `SettingsContext.serialize`."""
        profile = SettingsContext.model_construct({"profile"}, profile=self.profile)
        return {**profile.serialize(include_secrets), "settings": self.settings}
