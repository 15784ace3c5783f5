"""Subclasses of Prefect's task engine, functions that run a task run to its final state, and tracebacks of its errors.

`GPUTaskRunEngine` runs a GPU task with another body than the task's function. `RunnerTaskRunEngine` runs synchronous
tasks without a `gpu` tag in the runner's threads. Logs and states of a task run are in `task_run`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any
from uuid import UUID

from prefect import Task, flow_engine, get_run_logger
from prefect._internal.uuid7 import uuid7
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.concurrency import services
from prefect.context import SyncClientContext
from prefect.exceptions import CancelledRun, CrashedRun, MissingContextError, TerminationSignal
from prefect.states import Cancelled, Crashed, Failed
from prefect.task_engine import SyncTaskRunEngine
from prefect.transactions import Transaction
from prefect.utilities.callables import call_with_parameters

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.engine.flow_run import SharedClient
from prefect_gpu.errors import (
    NO_ROOM,
    ChildDiedError,
    DeviceError,
    PlacementError,
    PlacementTimeoutError,
    PolicyError,
    PrefectGPUError,
    ProtocolError,
    ResultError,
)

#: Characters of an error's text in a log line or in the message of a state.
LONGEST_LINE = 160

#: Arguments of `run_task_sync` that Prefect's engine takes in its constructor.
_OF_ENGINE = ("parameters", "task_run", "wait_for", "context")


class CancelledByRunner(BaseException):
    """Raised in a task run that its runner ends, because the flow has ended, in state `Cancelled` or `Crashed`."""

    def __init__(
        self, message: str = "the flow ended before this task", crashed: bool = False
    ) -> None:
        super().__init__(message)
        self.crashed = crashed

    def state(self) -> State[Any]:
        """Return the final state of the ended task run."""
        return (Crashed if self.crashed else Cancelled)(message=str(self))


#: State messages by the exception that ended the flow's engine, as in Prefect.
_ENDINGS: Mapping[type[BaseException], str] = {
    TerminationSignal: "Execution was aborted by a termination signal.",
    KeyboardInterrupt: "Execution was aborted by an interrupt signal.",
    CancelledError: "Execution was cancelled by the runtime environment.",
}


def ended_by(error: BaseException | None) -> CancelledByRunner:
    """Return the exception that ends a flow's task runs after `error` ended its engine; `None`: its function failed."""
    # A worker or `serve` sets the intent before it sends the signal (Prefect 3.8.8).
    intent = getattr(flow_engine, "_termination_intent", lambda: "")
    if isinstance(error, TerminationSignal) and intent() == "cancel":
        return CancelledByRunner("the flow run was cancelled")
    for kind, message in _ENDINGS.items():
        if isinstance(error, kind):
            return CancelledByRunner(message, crashed=True)
    return CancelledByRunner()


#: Prefix of the notes that this package adds to errors.
NOTE = "prefect_gpu: "


#: Seconds for which an answer of the API is used. A new limit takes effect after these and Prefect's own 5 s.
KNOWN_S = 10.0

#: Limits read in one call, the API's maximum.
_PAGE = 200


class TagLimits:
    """The tags with a concurrency limit, read from the API and kept for `KNOWN_S`. Safe to use from several threads.

    Before each body, Prefect's engine requests a slot for each tag, and caches for 5 s which sets of tags have no limit. A
    request is a write: a SQLite server busy with a thousand task runs refused it for more than the 62 s of retries of
    Prefect's client, and the task run crashed (Prefect 3.8.8). So the limits are read, and Prefect's cache is filled.
    """

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[SyncPrefectClient]],
        clock: Clock | None = None,
    ) -> None:
        self._lend = lend
        self._clock: Clock = clock or RealClock()
        #: Held during the call of the API, so that many threads make one call.
        self._lock = threading.Lock()
        self._limited: frozenset[str] = frozenset()
        self._until_s = 0.0

    def note_unlimited(self, tags: Iterable[str]) -> None:
        """Note in Prefect's cache if none of a task run's tags has a limit. Do nothing if the API does not answer."""
        names = frozenset(f"tag:{tag}" for tag in tags)
        with self._lock:
            if self._clock.now() >= self._until_s:
                try:
                    self._limited = self._read()
                except Exception:  # noqa: BLE001 - the engine asks, and may fail
                    return
                self._until_s = self._clock.now() + KNOWN_S
            if names & self._limited:
                return
        with services._cache_lock:
            services._no_limits_cache[names] = True

    def _read(self) -> frozenset[str]:
        found: set[str] = set()
        with self._lend() as client:
            while True:
                page = client.read_global_concurrency_limits(_PAGE, len(found))
                found.update(limit.name for limit in page)
                if len(page) < _PAGE:
                    return frozenset(found)


class RunnerTaskRunEngine(SyncTaskRunEngine[..., Any]):
    """Prefect's engine for one synchronous task run that ends when its task runner ends.

    `pause` waits for a number of seconds, and raises `CancelledByRunner` once the runner ends. `arguments` are further
    arguments of Prefect's `run_task_sync`.
    """

    def __init__(
        self, pause: Callable[[float], object], task: Task[..., Any], arguments: Mapping[str, Any]
    ) -> None:
        given: dict[str, Any] = {name: arguments.get(name) for name in _OF_ENGINE}
        super().__init__(task=task, **given)
        self._pause = pause

    def wait_until_ready(self) -> None:
        """Wait for the next retry, or until the runner ends. The runner could not interrupt Prefect's own sleep."""
        retry_at = self.state.state_details.scheduled_time
        if retry_at is not None:
            self._pause(retry_at.timestamp() - time.time())
        super().wait_until_ready()

    def handle_crash(self, exc: BaseException) -> None:
        """Set the final state after a crash. If the runner ended the task run, set its state and log no error."""
        if not isinstance(exc, CancelledByRunner):
            super().handle_crash(exc)
            return
        # The steps of Prefect's method. A state returned by the body instead would be stored as its result.
        self.set_state(exc.state(), force=True)
        self._raised = exc
        self._telemetry.record_exception(exc)
        self._telemetry.end_span_on_failure(str(exc))

    def log_finished_message(self) -> None:
        """Log the final state: as information if the runner ended the task run, otherwise as Prefect does."""
        if isinstance(self._raised, CancelledByRunner):
            self.logger.info(f"Finished in state {self.state}")
        else:
            super().log_finished_message()


#: Errors that a retry cannot cure: the author or the machine must change something.
_HOPELESS = (PolicyError, PlacementError, DeviceError, ResultError)


def is_hopeless(error: object) -> bool:
    """Return whether a retry would fail with the same error."""
    # An unpicklable exception of the body, or a lack of memory for pickling, may not occur again.
    own_error = isinstance(error, ResultError) and (
        error.what == "exception" or error.type_name == NO_ROOM
    )
    # A device that was busy for all of `gpu:wait` may be free the next time.
    may_pass = own_error or isinstance(error, PlacementTimeoutError)
    return isinstance(error, _HOPELESS) and not may_pass


class GPUTaskRunEngine(RunnerTaskRunEngine):
    """Prefect's engine for one run of a GPU task, which calls `body` in place of the task's function, in this thread."""

    def __init__(
        self,
        pause: Callable[[float], object],
        limits: TagLimits,
        task: Task[..., Any],
        body: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(pause, task, arguments)
        self._limits = limits
        self._body = body

    @contextlib.contextmanager
    def run_context(self) -> Iterator[Any]:
        """Enter Prefect's context of one call of the body, as Prefect's method does, but without the timeout."""
        # The runner enforces the timeout: it counts from the body's first line, and kills the child process.
        with self.setup_run_context():
            try:
                assert self.task_run is not None, "the engine was started"
                self.logger.debug(
                    f"Executing task {self.task.name!r} for task run {self.task_run.name!r}..."
                )
                if self.is_cancelled():
                    raise CancelledError("Task run cancelled by the task runner")
                yield self
            except TimeoutError as error:
                self.handle_timeout(error)
            except Exception as error:  # noqa: BLE001 - as Prefect's method
                self.handle_exception(error)

    def call_task_fn(self, transaction: Transaction) -> Any:
        """Call the body, or read the result of a cached run, as Prefect's method does with the task's function."""
        if transaction.is_committed():
            result = transaction.read()
        else:
            result = call_with_parameters(self._body, self.parameters or {})
        self.handle_success(result, transaction=transaction)
        return result

    def _wait_for_dependencies(self) -> None:
        super()._wait_for_dependencies()  # type: ignore[no-untyped-call]
        # Prefect's engine requests concurrency slots next.
        assert self.task_run is not None, "the engine was started"
        self._limits.note_unlimited(self.task_run.tags)

    def can_retry(self, exc_or_state: Exception | State[Any]) -> bool:
        """Return whether the task's `retry_condition_fn` allows a retry and the retry may succeed."""
        error = exc_or_state.data if isinstance(exc_or_state, State) else exc_or_state
        return not is_hopeless(error) and super().can_retry(exc_or_state)

    def handle_exception(self, exc: Exception) -> None:
        """Retry the task run, or set its final state: `Failed`, or `Crashed` if its child process died."""
        if not isinstance(exc, ChildDiedError):
            super().handle_exception(exc)
        elif self.retries >= self.task.retries or not self.handle_retry(exc):
            self.handle_crash(exc)

    def set_state(self, state: State[Any], force: bool = False) -> State[Any]:
        """Set the task run's state. After an out-of-memory, the state's message is the advice in its notes with `NOTE`."""
        # Prefect's message has the error's text without its notes.
        data = state.data
        error = data if isinstance(data, Exception) else getattr(data, "result", None)
        for note in getattr(error, "__notes__", ()) if state.is_failed() else ():
            if note.startswith(NOTE):
                said = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                said = textwrap.shorten(said, LONGEST_LINE, placeholder=" …")
                state.message = f"Out of memory: {note.removeprefix(NOTE)} ({said})"
        return super().set_state(state, force=force)


def in_place_of(
    function: Callable[..., Any], body: Callable[..., Any], submitted_at: CallingLine | None = None
) -> Callable[..., Any]:
    """Return `body` with the signature of a task's function and with tracebacks for the user.

    The traceback of this package's errors has one line of the user's code: `submitted_at`, which submitted the task.
    """

    @functools.wraps(function)
    def call_body(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        except Exception as error:
            if not speaks_for_itself(error):
                raise
            told = error
        # This package's frames would appear between the user's frames and Prefect's.
        try:
            line = submitted_at if isinstance(told, PrefectGPUError) else None
            raise told.with_traceback(None if line is None else line.traceback())
        finally:
            # `told` refers to this frame.
            del told

    return call_body


def run_task(engine: RunnerTaskRunEngine, arguments: Mapping[str, Any]) -> State[Any]:
    """Run a task run to its final state, as `run_task_sync` does, and return it; raise if it crashed or never began."""
    # `run_task_sync` checks after the body whether to suspend the flow run. Here a completed task run keeps its value,
    # and the flow run is suspended at its next call of Prefect.
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
    body: Callable[..., Any],
    arguments: Mapping[str, Any],
    pause: Callable[[float], object],
) -> State[Any]:
    """Run a GPU task to its end, in this thread and its context; return the final state, also after a crash."""
    if SyncClientContext.get() is None:
        SyncClientContext.__var__.set(client.open())
    engine = GPUTaskRunEngine(pause, limits, task, body, arguments)
    try:
        return run_task(engine, arguments)
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        # Prefect's own futures never raise in `wait`; a future with an exception would. So an error of the engine, or
        # the end of the runner, crashes this task run alone.
        ended = None if engine.task_run is None else engine.task_run.state
        if ended is None or not ended.is_final():
            ended = Crashed(message=f"Execution was interrupted: {error!r}", data=error)
            if isinstance(error, CancelledByRunner):
                ended = error.state()
        if not isinstance(ended.data, Exception):
            kind = CancelledRun if ended.is_cancelled() else CrashedRun
            ended.data = kind(ended.message or str(error))
            ended.data.__cause__ = error
        return ended


def failed_state(task_name: str, error: Exception) -> State[Any]:
    """Log that a task's engine could not be started; return the state `Failed` for its task run."""
    with contextlib.suppress(MissingContextError):
        get_run_logger().error("Task %r could not be started: %s", task_name, error)
    return Failed(message=f"Task could not be started: {error}", data=error)


def new_task_run_id() -> UUID:
    """Return an id for a new task run, ordered by time as in Prefect's own runners."""
    return uuid7()


# Tracebacks: the user's lines in the flow and in the child, and few lines of this package.

#: Packages whose frames lie between the user's `submit` and the task runner.
_NOT_USERS = ("prefect", "prefect_gpu")


class ChildTraceback(Exception):  # noqa: N818  # shown as a cause, never raised
    """The traceback of an exception in a child process, as text; shown as the cause of that exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nin the process of the GPU task:\n{self.text}"


def attach_traceback(error: BaseException, text: str) -> None:
    """Attach a child process's traceback, as text, to an exception: as the cause at the end of its chain of causes."""
    _shown(error)[-1].__cause__ = ChildTraceback(text)


def _shown(error: BaseException | None) -> list[BaseException]:
    """Return an exception, its shown cause or context, the cause or context of that exception, and so on."""
    found: dict[int, BaseException] = {}
    while error is not None and id(error) not in found:
        found[id(error)] = error
        hidden = error.__cause__ is not None or error.__suppress_context__
        error = error.__cause__ if hidden else error.__context__
    return [*found.values()]


def has_traceback(error: BaseException | None) -> bool:
    """Return whether `attach_traceback` was called with this exception."""
    return any(isinstance(each, ChildTraceback) for each in _shown(error))


def speaks_for_itself(error: Exception) -> bool:
    """Return whether an error is clear without this package's frames: the package's own error, or one from a child."""
    if isinstance(error, ProtocolError):
        # A defect of this package: the frames help.
        return False
    return isinstance(error, PrefectGPUError) or has_traceback(error)


@dataclass(frozen=True, slots=True)
class CallingLine:
    """A line of the user's code, without its frame: a frame would keep all local variables alive."""

    file: str
    line: int
    function: str
    #: First line of the function.
    first_line: int
    module: str

    def traceback(self) -> TracebackType:
        """Return a traceback that shows this line alone, without local variables."""
        # Only running code has a frame: this code object is given the line's file and function.
        code = compile("here.append(frame())", self.file, "exec")
        code = code.replace(co_name=self.function, co_firstlineno=self.first_line)
        here: list[FrameType] = []
        exec(code, {"here": here, "frame": sys._getframe, "__name__": self.module})
        # -1: the position inside the line is unknown.
        return TracebackType(None, here.pop(), -1, self.line)


def calling_line() -> CallingLine | None:
    """Return the innermost line of this thread's stack outside Prefect and this package; `None`: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    if frame is None:
        return None
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    return CallingLine(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno, module)
