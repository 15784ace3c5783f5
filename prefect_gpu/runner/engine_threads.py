"""The threads of Prefect's engine, and the waits of their task runs.

Each GPU task has a thread, which ends with the task. A `ThreadPoolExecutor` would keep two thousand threads for a flow
that maps two thousand tasks. The number of threads has no bound: waiting tasks could use up all threads, and none could
run. The broker limits the processes. `RunnerThreads` runs tasks without a `gpu` tag.

Engine threads reach their bodies in any order, so the broker keeps the order of `submit` (`broker.opening`). A task run
delays no other before its inputs are there (`when_there`).

`submit` returns `AwaitedFuture`: in a GPU task's process it tells the broker when the body waits for tasks that it
submitted (`scheduling.nested`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_engine import run_task_sync
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.collections import visit_collection
from typing_extensions import Self

from prefect_gpu.engine.task_engine import RunnerTaskRunEngine, run_task
from prefect_gpu.process_resources import start_thread

#: Prefix of the threads' names.
NAME = "prefect-gpu-engine"

#: Most values of a task run's inputs that are searched for futures at `submit`; of a list of a million numbers, a
#: thousandth of the time that Prefect takes to visit it.
MOST_INPUTS = 1000


def start_engine(call: Callable[[], Any], number: int) -> Future[Any]:
    """Start a thread for a call; return the future of the result. Raise `CapacityError` if no thread can start."""
    future: Future[Any] = Future()
    # From now on the future cannot be cancelled.
    future.set_running_or_notify_cancel()
    start_thread(functools.partial(_run, future, call), f"{NAME}_{number}", daemon=False)
    return future


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        future.set_exception(error)
    finally:
        # The exception refers to this frame.
        del future, call


class RunnerThreads(ThreadPoolTaskRunner[Any]):
    """Prefect's thread runner for tasks without a `gpu` tag. Tasks that wait for a retry end with the runner."""

    def __init__(self, pause: Callable[[float], object]) -> None:
        super().__init__(max_workers=sys.maxsize)
        self._pause = pause

    def __enter__(self) -> Self:
        super().__enter__()
        self._executor = _Executor(self._pause)
        return self


class _Executor(ThreadPoolExecutor):
    """Executor that runs `RunnerTaskRunEngine` where Prefect's thread runner submits Prefect's engine."""

    def __init__(self, pause: Callable[[float], object]) -> None:
        super().__init__(max_workers=sys.maxsize)
        self._pause = pause

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if args == (run_task_sync,):
            # `fn` is the `run` method of a context.
            args = (self._run_engine,)
        return super().submit(fn, *args, **kwargs)

    def _run_engine(self, task: Task[..., Any], **arguments: Any) -> State[Any]:
        return run_task(RunnerTaskRunEngine(self._pause, task, arguments), arguments)


def when_there(inputs: Any, call: Callable[[], object]) -> None:
    """Call `call` once the futures in a task run's inputs are done: now, or on the thread that ends the last one.

    There is no call if a future does not tell when it is done (of another runner, without a state in this process).
    """
    left = iter(_futures_in(inputs))

    def go_on(_: object = None) -> None:
        for future in left:
            wrapped = getattr(future, "wrapped_future", None)
            if wrapped is None:
                return
            if not wrapped.done():
                wrapped.add_done_callback(go_on)
                return
        call()

    go_on()


class _Enough(BaseException):
    """Ends a search."""


def _futures_in(inputs: Any) -> list[Any]:
    """Return the futures among the first `MOST_INPUTS` values."""
    found: list[Any] = []
    left = MOST_INPUTS

    def visit(value: Any) -> None:
        nonlocal left
        left -= 1
        if isinstance(value, PrefectFuture):
            found.append(value)
        if not left:
            raise _Enough

    # A user's collection that cannot be visited fails in the task run's own thread.
    with contextlib.suppress(Exception, _Enough):
        visit_collection(inputs, visit, return_data=False)
    return found


class BodyWaits:
    """Counts the threads of a GPU task's process that wait for tasks submitted by the process's body."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since_s: float | None = None

    def since(self) -> float | None:
        """Return the monotonic seconds since when at least one thread waits; `None`: no thread waits."""
        return self._since_s

    def change(self, by: int) -> None:
        """Change the count by +1 or -1."""
        with self._lock:
            self._count += by
            if not self._count:
                self._since_s = None
            elif self._since_s is None:
                self._since_s = time.monotonic()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count this thread inside the `with` block, unless it is an engine's: that thread does not run the body."""
        by = 0 if threading.current_thread().name.startswith(NAME) else 1
        self.change(by)
        try:
            yield
        finally:
            self.change(-by)


#: The count of this process, read only in processes of GPU tasks.
BODY_WAITS = BodyWaits()


class AwaitedFuture(PrefectConcurrentFuture[Any]):
    """The future of a GPU task run. `BODY_WAITS` counts the threads that wait for it."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the task run. See `PrefectFuture.wait`."""
        with BODY_WAITS.counted():
            super().wait(timeout)

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        """Return the task run's result. See `PrefectFuture.result`."""
        with BODY_WAITS.counted():
            return super().result(timeout, raise_on_failure)

    def _add_prefect_done_callback(self, fn: Callable[[PrefectFuture[Any]], None]) -> None:
        # Called by Prefect's `as_completed`, and by `wait` with a timeout, which wait for the callback.
        BODY_WAITS.change(1)
        self._wrapped_future.add_done_callback(lambda _: BODY_WAITS.change(-1))
        super()._add_prefect_done_callback(fn)
