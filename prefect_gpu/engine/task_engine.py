"""Prefect's engine as subclasses: what differs for the task runs of a task runner, and how one is run to its end.

`GPUTaskRunEngine` runs GPU tasks, `RunnerTaskRunEngine` the synchronous tasks without a `gpu` tag that the runner runs in threads.
It calls a copy of the task, from `with_body`. No attribute of Prefect's classes is replaced. What is shown of errors is in `tracebacks`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import textwrap
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from prefect import Task, flow_engine, get_run_logger
from prefect._internal.uuid7 import uuid7
from prefect.client.schemas.objects import State
from prefect.context import SyncClientContext
from prefect.exceptions import CancelledRun, CrashedRun, MissingContextError, TerminationSignal
from prefect.states import Cancelled, Crashed, Failed
from prefect.task_engine import SyncTaskRunEngine

from prefect_gpu.engine.flow_run import SharedClient
from prefect_gpu.engine.tag_limits import TagLimits
from prefect_gpu.engine.tracebacks import CallingLine, speaks_for_itself
from prefect_gpu.errors import (
    NO_ROOM,
    ChildDiedError,
    DeviceError,
    PlacementError,
    PlacementTimeoutError,
    PolicyError,
    PrefectGPUError,
    ResultError,
)

#: Characters of an error's text that a log line, or the message of a state, repeats.
LONGEST_LINE = 160

#: Arguments of `run_task_sync` that the engine is made with.
_OF_ENGINE = ("parameters", "task_run", "wait_for", "context")


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


#: How a line begins that this package adds to an error.
NOTE = "prefect_gpu: "


def add_note(error: BaseException, text: str) -> None:
    """Add a line to what is shown of an error that ends a task run out of memory, and to the task run's state.

    Python 3.10 keeps the line without showing it in a traceback.
    """
    if sys.version_info >= (3, 11):
        error.add_note(NOTE + text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), NOTE + text]  # type: ignore[attr-defined]


class RunnerTaskRunEngine(SyncTaskRunEngine[..., Any]):
    """Prefect's engine for one task run that ends with its task runner.

    Args:
        pause: Waits for a number of seconds; raises `CancelledByRunner` once the runner ends.
        task: The task.
        arguments: Other arguments of Prefect's `run_task_sync`.
    """

    def __init__(
        self, pause: Callable[[float], object], task: Task[..., Any], arguments: Mapping[str, Any]
    ) -> None:
        given: dict[str, Any] = {name: arguments.get(name) for name in _OF_ENGINE}
        super().__init__(task=task, **given)
        self._pause = pause

    def wait_until_ready(self) -> None:
        """Wait until the next retry, or the end of the runner: nothing could end the sleep of Prefect's engine."""
        retry_at = self.state.state_details.scheduled_time
        if retry_at is not None:
            self._pause(retry_at.timestamp() - time.time())
        super().wait_until_ready()

    def handle_crash(self, exc: BaseException) -> None:
        """Set the final state. What the runner ends is no crash, and has no error line."""
        if not isinstance(exc, CancelledByRunner):
            super().handle_crash(exc)
            return
        # As Prefect's engine does. A state that the body returns would be stored as its result.
        self.set_state(exc.state(), force=True)
        self._raised = exc
        self._telemetry.record_exception(exc)
        self._telemetry.end_span_on_failure(str(exc))

    def log_finished_message(self) -> None:
        """Log the final state; as an error, unless the runner has ended the task run."""
        if isinstance(self._raised, CancelledByRunner):
            self.logger.info(f"Finished in state {self.state}")
        else:
            super().log_finished_message()


#: Errors after which a retry could only fail the same way: the author or the machine must change.
_HOPELESS = (PolicyError, PlacementError, DeviceError, ResultError)


def is_hopeless(error: object) -> bool:
    """Return whether a retry could only fail the same way."""
    # An exception of the body may not come again, even if it could not be pickled; so may a lack of memory.
    own_error = isinstance(error, ResultError) and (
        error.what == "exception" or error.type_name == NO_ROOM
    )
    # A device that was busy for as long as `gpu:wait` allows may be free the next time.
    may_pass = own_error or isinstance(error, PlacementTimeoutError)
    return isinstance(error, _HOPELESS) and not may_pass


class GPUTaskRunEngine(RunnerTaskRunEngine):
    """Prefect's engine for one GPU task.

    Args:
        pause: See `RunnerTaskRunEngine`.
        limits: Which tags have a concurrency limit.
        task: From `with_body`.
        arguments: See `RunnerTaskRunEngine`.
    """

    def __init__(
        self,
        pause: Callable[[float], object],
        limits: TagLimits,
        task: Task[..., Any],
        arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(pause, task, arguments)
        self._limits = limits

    def _wait_for_dependencies(self) -> None:
        super()._wait_for_dependencies()  # type: ignore[no-untyped-call]
        # Prefect's engine asks for slots next.
        assert self.task_run is not None, "the engine was started"
        self._limits.note_unlimited(self.task_run.tags)

    def can_retry(self, exc_or_state: Exception | State[Any]) -> bool:
        """Return whether the task's `retry_condition_fn` allows a retry that may end in another way."""
        error = exc_or_state.data if isinstance(exc_or_state, State) else exc_or_state
        return not is_hopeless(error) and super().can_retry(exc_or_state)

    def handle_exception(self, exc: Exception) -> None:
        """Retry, or set the final state: `Failed`, or `Crashed` where the task's process has died."""
        if not isinstance(exc, ChildDiedError):
            super().handle_exception(exc)
        elif self.retries >= self.task.retries or not self.handle_retry(exc):
            self.handle_crash(exc)

    def set_state(self, state: State[Any], force: bool = False) -> State[Any]:
        """Set a state. The message of one after an out-of-memory says what helps."""
        # Prefect's message has the error's own text and not its notes.
        data = state.data
        error = data if isinstance(data, Exception) else getattr(data, "result", None)
        for note in getattr(error, "__notes__", ()) if state.is_failed() else ():
            if note.startswith(NOTE):
                said = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                said = textwrap.shorten(said, LONGEST_LINE, placeholder=" …")
                state.message = f"Out of memory: {note.removeprefix(NOTE)} ({said})"
        return super().set_state(state, force=force)


def with_body(
    task: Task[..., Any],
    body: Callable[..., Any],
    submitted_at: CallingLine | None = None,
) -> Task[..., Any]:
    """Return a copy of a task whose body is replaced, for Prefect's engine to run in a thread.

    Args:
        task: The user's task; it is not changed.
        body: Called in place of `task.fn`, with its arguments, synchronously.
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

    shadow.fn = call_body
    shadow.isasync = False
    shadow.isgenerator = False
    # The time is counted from the body's first line in the child, whose process is killed.
    shadow.timeout_seconds = None
    return shadow


def run_task(engine: RunnerTaskRunEngine, arguments: Mapping[str, Any]) -> State[Any]:
    """Run a task run to its final state, as Prefect's `run_task_sync` does.

    Prefect's also asks after the body whether the flow run is to be suspended. Here a task run that has completed keeps its
    value, and the flow is suspended at its next call of Prefect.

    Args:
        engine: Was not started.
        arguments: Of `run_task_sync`.

    Raises:
        BaseException: The task run has crashed, or the engine failed before the body.
    """
    with engine.start(
        task_run_id=arguments.get("task_run_id"), dependencies=arguments.get("dependencies")
    ):
        while engine.is_running():
            engine.wait_until_ready()
            with (
                engine.asset_context(),
                engine.run_context(),
                engine.transaction_context() as transaction,
            ):
                engine.call_task_fn(transaction)
    return engine.state


def run_engine(
    client: SharedClient,
    limits: TagLimits,
    task: Task[..., Any],
    arguments: Mapping[str, Any],
    pause: Callable[[float], object],
) -> State[Any]:
    """Run a GPU task to its end, in this thread and its context.

    Args:
        client: For the engine.
        limits: See `GPUTaskRunEngine`.
        task: From `with_body`.
        arguments: Of Prefect's `run_task_sync`: the parameters, the task run or the id of a new one.
        pause: See `RunnerTaskRunEngine`.

    Returns:
        The final state, crashes included.
    """
    if SyncClientContext.get() is None:
        SyncClientContext.__var__.set(client.open())
    engine = GPUTaskRunEngine(pause, limits, task, arguments)
    try:
        return run_task(engine, arguments)
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        # An exception in the future would be raised by its `wait`, which Prefect's own futures never
        # do. The end of the runner, or an error of the engine itself, crashes this task run alone.
        ended = None if engine.task_run is None else engine.task_run.state
        if ended is None or not ended.is_final():
            ended = (
                error.state()
                if isinstance(error, CancelledByRunner)
                else Crashed(message=f"Execution was interrupted: {error!r}", data=error)
            )
        if not isinstance(ended.data, Exception):
            kind = CancelledRun if ended.is_cancelled() else CrashedRun
            ended.data = kind(ended.message or str(error))
            ended.data.__cause__ = error
        return ended


def failed_state(task_name: str, error: Exception) -> State[Any]:
    """Return the state of a task for which no engine could be started, and log it for the flow."""
    with contextlib.suppress(MissingContextError):
        get_run_logger().error("Task %r could not be started: %s", task_name, error)
    return Failed(message=f"Task could not be started: {error}", data=error)


def new_task_run_id() -> UUID:
    """Return an id for a new task run: ordered by time, as Prefect's own runners make them."""
    return uuid7()
