"""`serve`: Prefect's background tasks (`task.delay()`) with a GPU task runner.

Prefect's task worker fetches task runs, reads their parameters and respects `limit`. `GPUTaskWorker` passes task runs
of GPU tasks to a task runner. Checked against Prefect 3.6.20, 3.8.8 and 3.9.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import anyio
import uvicorn
from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.task_engine import run_task_async
from prefect.task_worker import TaskWorker, create_status_server
from prefect.utilities.engine import capture_sigterm

from prefect_gpu.errors import PolicyError, SettingError
from prefect_gpu.policy import parse_tags
from prefect_gpu.task_runner import GPUTaskRunner


class _Service:
    """One call of `serve`: an entered runner, and the seconds for which task runs are fetched (`None`: no limit)."""

    def __init__(self, runner: GPUTaskRunner, timeout_s: float | None) -> None:
        self.runner = runner
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopped = False
        #: Stops the worker's subscription; `None`: there is no subscription.
        self._cancel: Callable[[], object] | None = None

    async def fetch(self, subscribe: Coroutine[Any, Any, None]) -> None:
        """Await the worker's subscription, which fetches task runs; cancel it after the time limit or by `stop`."""
        # Only the subscription is cancelled. Prefect would also cancel the task runs, and log an error for each.
        with anyio.move_on_after(self._timeout_s) as scope:
            loop = asyncio.get_running_loop()
            with self._lock:
                self._cancel = functools.partial(loop.call_soon_threadsafe, scope.cancel)
                if self._stopped:
                    scope.cancel()
            try:
                await subscribe
            finally:
                with self._lock:
                    self._cancel = None

    def stop(self) -> None:
        """Cancel the subscription, from any thread: no more task runs are fetched."""
        with self._lock:
            self._stopped = True
            if self._cancel is not None:
                self._cancel()


class GPUTaskWorker(TaskWorker):
    """Prefect's task worker, which gives GPU task runs to a task runner."""

    def __init__(
        self, tasks: tuple[Task[..., Any], ...], limit: int | None, service: _Service
    ) -> None:
        super().__init__(*tasks, limit=limit)
        self._service = service
        self._asynchronous = {each.task_key for each in self.tasks if each.isasync}
        for served in self.tasks:
            # These are copies. Prefect's worker submits only synchronous task runs to its executor.
            served.isasync = False
        self._executor = _Executor(limit, self._start)

    async def _subscribe_to_task_scheduling(self) -> None:
        # Prefect's method has no annotation.
        subscribe: Callable[[], Coroutine[Any, Any, None]] = super()._subscribe_to_task_scheduling
        await self._service.fetch(subscribe())

    def _start(
        self, task: Task[..., Any], task_run: TaskRun, **engine: Any
    ) -> Future[State[Any]] | None:
        """Start a background task run from the worker's event loop; `None`: the executor is to run it."""
        own, around = run_tags(task, task_run, engine.get("context"))
        called, of_run = copy.copy(task), copy.copy(task)
        of_run.tags = own
        called.isasync = of_run.isasync = task.task_key in self._asynchronous
        engine["task_run"] = task_run
        future = self._service.runner.submit_background(of_run, engine, around)
        if future is None and called.isasync:
            coroutine: Coroutine[Any, Any, Any] = run_task_async(called, **engine)
            return asyncio.run_coroutine_threadsafe(coroutine, asyncio.get_running_loop())
        return future


class _Executor(ThreadPoolExecutor):
    """The threads of a worker. `start` starts a task run without a thread; `None`: the task run needs a thread."""

    def __init__(self, limit: int | None, start: Callable[..., Future[State[Any]] | None]) -> None:
        super().__init__(max_workers=limit or None)
        self._start = start

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # `fn` is the `run` of a context, and `args` has Prefect's engine.
        started: Future[Any] | None = fn(self._start, **kwargs)
        return super().submit(fn, *args, **kwargs) if started is None else started


def run_tags(
    task: Task[..., Any], task_run: TaskRun, context: dict[str, Any] | None
) -> tuple[set[str], set[str]]:
    """Return the tags of a background run's task, and the tags of `prefect.tags` contexts around its call of `delay`.

    The task run has both kinds, and the tags of the flow run that called `delay`. The caller may have changed the tags
    of the served task (`with_options`). `context` was serialised by Prefect; `None`: the call had no parameters.
    """
    of_run, of_task = set(task_run.tags), set(task.tags)
    if context is None:
        return of_run & of_task, of_run - of_task
    around = set((context.get("tags_context") or {}).get("current_tags", ()))
    flow_run = (context.get("flow_run_context") or {}).get("flow_run") or {}
    return of_run - around | of_run & of_task, around - set(flow_run.get("tags", ()))


def serve(
    *tasks: Task[..., Any],
    runner: GPUTaskRunner | None = None,
    limit: int | None = 10,
    status_server_port: int | None = None,
    timeout: float | None = None,
) -> Coroutine[Any, Any, None] | None:
    """Serve tasks in the background, as `prefect.task_worker.serve` does, and run each GPU task in its own process.

    Other programs call the tasks with `task.delay(...)`. GPU tasks wait in one queue with the GPU tasks of all flows on
    the machine. Tasks without a `gpu` tag run in this process, as under Prefect's `serve`. `serve` returns after
    `timeout`, once all begun task runs have ended. At Ctrl-C and SIGTERM, `serve` ends the processes of GPU tasks
    (their task runs become `Crashed`), and waits for other tasks.

    Args:
        *tasks: At least one task, made with `@task`.
        runner: Runs the GPU tasks; `None`: `GPUTaskRunner()`.
        limit: Most task runs at a time, including task runs that wait for a device. `None`: no limit for
            asynchronous tasks; Prefect's worker has a bounded number of threads for synchronous ones.
        status_server_port: Port for Prefect's page about the worker, `http://127.0.0.1:PORT/status`; `None`: no page.
        timeout: Seconds after which no more task runs are begun; `None`: no limit.

    Returns:
        `None`. Where an event loop runs, as in a notebook, a coroutine to be awaited.

    Raises:
        SettingError: `tasks` is empty or has a value that is no task, or `runner` is no `GPUTaskRunner`.
        PolicyError: A tag of a task is wrong.
        ValueError: `PREFECT_API_URL` is not set: Prefect's background tasks need a server.
    """
    runner = GPUTaskRunner() if runner is None else runner
    _check(tasks, runner)
    start = functools.partial(_run_worker, tasks, limit, status_server_port)
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return _serve_async(start, runner, timeout)
    with _served(start, runner, timeout) as ended:
        ended.result()
    return None


async def _run_worker(
    tasks: tuple[Task[..., Any], ...], limit: int | None, port: int | None, service: _Service
) -> None:
    """Run a worker, and Prefect's page about the worker (`port`), as `prefect.task_worker.aserve` does."""
    worker, page = GPUTaskWorker(tasks, limit, service), None
    if port is not None:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        app = create_status_server(worker)
        config = uvicorn.Config(app, access_log=False, log_level="warning", **where)
        page = asyncio.create_task(uvicorn.Server(config).serve())
    try:
        await worker.astart()
    finally:
        if page is not None:
            page.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await page


async def _serve_async(
    start: Callable[[_Service], Coroutine[Any, Any, None]],
    runner: GPUTaskRunner,
    timeout_s: float | None,
) -> None:
    with _served(start, runner, timeout_s) as ended:
        await asyncio.wrap_future(ended)


def _check(tasks: tuple[Any, ...], runner: Any) -> None:
    if not tasks:
        raise SettingError("serve() has no task; accepted: at least one task, made with @task")
    for each in tasks:
        if not isinstance(each, Task):
            raise SettingError(f"serve() was given {each!r}; accepted: tasks, made with @task")
        try:
            parse_tags(each.tags, ())
        except PolicyError as error:
            given = f"serve(), task {each.name!r}: {error.given}"
            raise PolicyError(given, error.problem, error.accepted) from None
    if not isinstance(runner, GPUTaskRunner):
        problem = "is no task runner of prefect_gpu; accepted: GPUTaskRunner(...)"
        raise SettingError(f"runner={runner!r} {problem}")


@contextlib.contextmanager
def _served(
    start: Callable[[_Service], Coroutine[Any, Any, None]],
    runner: GPUTaskRunner,
    timeout_s: float | None,
) -> Iterator[Future[None]]:
    """Run Prefect's task worker during a `with` block; yield a future that is done when the worker has ended."""
    # The worker has a thread and an event loop of its own: in the caller's loop it would delay signals.
    with (
        capture_sigterm(),
        ThreadPoolExecutor(1, "prefect-gpu-task-worker") as thread,
        runner.duplicate() as entered,
    ):
        service = _Service(entered, timeout_s)
        ended = thread.submit(copy_context().run, lambda: asyncio.run(start(service)))
        try:
            yield ended
        except BaseException:
            # Before the runner ends task runs: for each, the worker would fetch another.
            service.stop()
            raise
