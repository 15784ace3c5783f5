"""The threads of Prefect's engine, and the order in which their task runs request devices.

Each GPU task has a thread, which ends with the task. A `ThreadPoolExecutor` would keep two thousand threads for a flow
that maps two thousand tasks. The number of threads has no bound: waiting tasks could use up all threads, and none could
run. The broker limits the processes. `RunnerThreads` runs tasks without a `gpu` tag.

Engine threads reach their bodies in any order. A task run gets its `SubmitTicket` at `submit`. Before it requests a
budget or a device, it waits for earlier task runs that will make a request within tens of milliseconds. A task run that
waits for its inputs, or for another's first run, delays no other. `scheduling` orders the requests.

`submit` returns `AwaitedFuture`: in a GPU task's process it tells the broker when the body waits for tasks that it
submitted (`scheduling.nested`).
"""

from __future__ import annotations

import bisect
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

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.engine.task_engine import RunnerTaskRunEngine, run_task
from prefect_gpu.process_resources import start_thread

#: Prefix of the threads' names.
NAME = "prefect-gpu-engine"

#: Seconds without an arrival after which a task run no longer waits for earlier ones: one may wait invisibly, as for a
#: slot of a tag's concurrency limit. Of 200 mapped tasks on two cores, 45 arrived after a later one, by at most 0.1 s.
PATIENCE_S = 2.0


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


class SubmitOrder:
    """A runner's task runs that have not requested a device yet."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or RealClock()
        #: Guards `places` and the attributes of each.
        self.lock = threading.Lock()
        #: Sorted by number.
        self.places: list[SubmitTicket] = []

    def add(self, number: int, waits: Callable[[], bool] = lambda: False) -> SubmitTicket:
        """Return a new ticket with this number. `waits` returns whether inputs are not done; it must not block."""
        place = SubmitTicket(self, number, waits)
        with self.lock:
            place.insert()
        return place

    def wake_first(self) -> None:
        """Wake the first task run that waits for its turn. The caller holds the lock."""
        if (first := self.first_waiting()) is not None and first.turn is not None:
            first.turn.notify()

    def first_waiting(self) -> SubmitTicket | None:
        """Return the first ticket that waits for its turn; `None`: no ticket waits. The caller holds the lock."""
        return next((each for each in self.places if each.turn is not None), None)


class SubmitTicket:
    """One task run's place in a `SubmitOrder`. For the task run's own thread."""

    def __init__(self, order: SubmitOrder, number: int, waits: Callable[[], bool]) -> None:
        self._order = order
        self.number = number
        #: Returns whether the task run waits for something other than its turn. Called under the lock of the order.
        self.waits = waits
        #: Notified when the turn may have come; `None`: the task run does not wait for its turn.
        self.turn: threading.Condition | None = None

    def insert(self) -> None:
        """Add the ticket to its order. The caller holds the lock."""
        bisect.insort(self._order.places, self, key=lambda each: each.number)

    def take_turn(self) -> None:
        """Wait until no earlier task run is about to make a request; then delay later task runs until `leave`."""
        order = self._order
        with order.lock:
            self.waits = lambda: False
            if self not in order.places:
                self.insert()
            self.turn = threading.Condition(order.lock)
            while not all(each.waits() for each in self._in_front()):
                # Only the first waiting task run has a time limit: the others wait for it.
                limit_s = PATIENCE_S if order.first_waiting() is self else None
                if not order.clock.wait(self.turn, limit_s):
                    for each in self._in_front():
                        if each.turn is None:
                            order.places.remove(each)
                    order.wake_first()
            self.turn = None
            order.wake_first()

    def yield_while(self, waits: Callable[[], bool]) -> None:
        """Delay no other task run while `waits`, which must not block, returns true."""
        with self._order.lock:
            self.waits = waits
            self._order.wake_first()

    def leave(self) -> None:
        """Note that the task run has requested its device, or never will. `take_turn` adds the ticket again."""
        with self._order.lock:
            if self in self._order.places:
                self._order.places.remove(self)
                self._order.wake_first()

    def _in_front(self) -> list[SubmitTicket]:
        return self._order.places[: self._order.places.index(self)]


class Inputs:
    """The parameters and `wait_for` of a task run, whose futures must be done before its body can be called."""

    def __init__(self, *values: Any) -> None:
        self._values = values
        #: Futures that were not done at the last check; `None`: not checked yet.
        self._open: list[Any] | None = None

    def wait(self) -> bool:
        """Return whether a future among the inputs is not done."""
        if self._open is None:
            # Not searched at `submit`: parameters may be large collections, and the check is rare.
            values, self._values = self._values, ()
            self._open = _futures_in(values)
        while self._open and _is_done(self._open[-1]):
            self._open.pop()
        return bool(self._open)


def _futures_in(values: Any) -> list[Any]:
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, PrefectFuture):
            found.append(value)

    # A user's collection that cannot be visited fails in the task run's own thread.
    with contextlib.suppress(Exception):
        visit_collection(values, visit, return_data=False)
    return found


def _is_done(future: Any) -> bool:
    # Futures of other runners may lack the attribute; their state takes a call of the API.
    wrapped = getattr(future, "wrapped_future", None)
    return wrapped is not None and bool(wrapped.done())


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
