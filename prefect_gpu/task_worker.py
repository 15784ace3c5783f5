"""`serve`: Prefect's background tasks (`task.delay()`) with a GPU task runner.

Prefect's task worker fetches task runs, reads their parameters and respects `limit`. It calls Prefect's engine
through the names in `_SEAMS`. This module replaces each name by a function that gives a GPU task run to the
runner of the worker's `serve` call. Under Prefect's own `serve` the function warns.

`prefect_gpu/__init__.py` imports this module when a process imports Prefect's task worker, so it imports neither the
runner nor devices. Checked against Prefect 3.8.8; `tests/integration/test_bridge.py` has a test for these names.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

import anyio
import prefect
from prefect import Task, task_worker
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_logger
from prefect.utilities.engine import capture_sigterm

from prefect_gpu.errors import ProtocolError, SettingError
from prefect_gpu.in_task import current_allocation
from prefect_gpu.policy import is_gpu_tag, parse_tags

if TYPE_CHECKING:
    from prefect_gpu.task_runner import GPUTaskRunner

#: Names of Prefect that are replaced here: each object, and its attribute.
_SEAMS: tuple[tuple[Any, str], ...] = (
    (task_worker, "run_task_sync"),
    (task_worker, "run_task_async"),
    (task_worker.TaskWorker, "_subscribe_to_task_scheduling"),
)

#: Names of GPU tasks that ran under Prefect's own `serve`; each is warned of once.
_warned: set[str] = set()


class _Service:
    """One call of `serve`.

    Args:
        runner: The entered runner of the GPU tasks.
        timeout_s: Seconds after which no more task runs are fetched; `None`: no limit.
    """

    def __init__(self, runner: GPUTaskRunner, timeout_s: float | None) -> None:
        self.runner = runner
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopped = False
        #: Stops the worker's subscription; `None`: there is no subscription.
        self._cancel: Callable[[], object] | None = None

    async def fetch(self, subscribe: Coroutine[Any, Any, None]) -> None:
        """Let Prefect's worker fetch task runs until the time is over, or until `stop`."""
        # Only the subscription is cancelled. Prefect would also cancel the task runs in their threads, and log
        # an error for each.
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
        """Fetch no more task runs. From any thread."""
        with self._lock:
            self._stopped = True
            if self._cancel is not None:
                self._cancel()


#: Call of `serve` around the caller; `None`: Prefect's own `serve` has started the worker, or there is no worker.
_service: ContextVar[_Service | None] = ContextVar("prefect_gpu_service", default=None)


def _start(task: Task[..., Any], task_run: TaskRun, **engine: Any) -> Future[State[Any]] | None:
    """Start a background task run on the runner of the current `serve` call; `None`: Prefect's worker runs it.

    Args:
        task: The served task.
        task_run: The task run from the worker.
        **engine: Other arguments of Prefect's engine.
    """
    service = _service.get()
    if service is not None:
        own, around = run_tags(task, task_run, engine.get("context"))
        task = copy.copy(task)
        task.tags = own
        return service.runner.submit_background(task, {"task_run": task_run, **engine}, around)
    tagged = any(map(is_gpu_tag, {*task.tags, *task_run.tags}))
    # The process of a GPU task has a device.
    if tagged and task.name not in _warned and current_allocation() is None:
        _warned.add(task.name)
        get_logger("task_worker").warning(
            "GPU task %r runs in the process of Prefect's own `serve`, where its gpu tags have no effect: no process, "
            "device or memory budget of its own. Serve it with prefect_gpu.serve(...).",
            task.name,
        )
    return None


def run_tags(
    task: Task[..., Any], task_run: TaskRun, context: dict[str, Any] | None
) -> tuple[set[str], set[str]]:
    """Return the tags of a background task run: tags of the task, and tags of `prefect.tags` contexts around `delay`.

    Args:
        task: The served task. The caller of `delay` may have changed its tags (`with_options`).
        task_run: The task run. It has both kinds of tags, and the tags of the flow run that called `delay`.
        context: Context of the call, as Prefect has serialised it; `None`: the call had no parameters.
    """
    of_run, of_task = set(task_run.tags), set(task.tags)
    if context is None:
        return of_run & of_task, of_run - of_task
    around = set((context.get("tags_context") or {}).get("current_tags", ()))
    flow_run = (context.get("flow_run_context") or {}).get("flow_run") or {}
    return of_run - around | of_run & of_task, around - set(flow_run.get("tags", ()))


def _sync(run_task_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_task_sync)
    def run(**arguments: Any) -> Any:
        started = _start(**arguments)
        return run_task_sync(**arguments) if started is None else started.result()

    return run


def _async(run_task_async: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_task_async)
    async def run(**arguments: Any) -> Any:
        started = _start(**arguments)
        if started is None:
            return await run_task_async(**arguments)
        return await asyncio.wrap_future(started)

    return run


def _fetching(subscribe: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(subscribe)
    async def fetch(worker: Any) -> None:
        service = _service.get()
        await (subscribe(worker) if service is None else service.fetch(subscribe(worker)))

    return fetch


# In a version of Prefect without these names its own `serve` works as ever, and that of this package raises an error.
_missing = [name for owner, name in _SEAMS if not hasattr(owner, name)]
if not _missing:
    for (_owner, _name), _wrap in zip(_SEAMS, (_sync, _async, _fetching), strict=True):
        setattr(_owner, _name, _wrap(getattr(_owner, _name)))


def serve(
    *tasks: Task[..., Any],
    runner: GPUTaskRunner | None = None,
    limit: int | None = 10,
    status_server_port: int | None = None,
    timeout: float | None = None,
) -> Coroutine[Any, Any, None] | None:
    """Serve tasks in the background, as `prefect.task_worker.serve` does, and run each GPU task in its own process.

    Other programs call the tasks with `task.delay(...)`. GPU tasks wait in one queue with the GPU tasks of all
    flows on the machine. Tasks without a `gpu` tag run in this process, as under Prefect's `serve`.

    `serve` returns after `timeout`, once all begun task runs have ended. At Ctrl-C and SIGTERM it ends the
    processes of GPU tasks, whose task runs become `Crashed`, and waits for other tasks.

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
        ProtocolError: This version of Prefect runs background tasks in another way.
    """
    from prefect_gpu.task_runner import GPUTaskRunner

    runner = GPUTaskRunner() if runner is None else runner
    _check(tasks, runner)
    start = functools.partial(
        task_worker.aserve, *tasks, limit=limit, status_server_port=status_server_port
    )
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return _serve_async(start, runner, timeout)
    with _served(start, runner, timeout) as ended:
        ended.result()
    return None


async def _serve_async(
    start: Callable[[], Coroutine[Any, Any, None]], runner: GPUTaskRunner, timeout_s: float | None
) -> None:
    with _served(start, runner, timeout_s) as ended:
        await asyncio.wrap_future(ended)


def _check(tasks: tuple[Any, ...], runner: Any) -> None:
    from prefect_gpu.task_runner import GPUTaskRunner

    if _missing:
        raise ProtocolError(
            f"Prefect {prefect.__version__} has no {', '.join(_missing)} in prefect.task_worker; "
            "prefect_gpu.serve was made for Prefect 3.8.8"
        )
    if not tasks:
        raise SettingError("serve() has no task; accepted: at least one task, made with @task")
    for each in tasks:
        if not isinstance(each, Task):
            raise SettingError(f"serve() was given {each!r}; accepted: tasks, made with @task")
        parse_tags(each.tags, ())
    if not isinstance(runner, GPUTaskRunner):
        raise SettingError(
            f"runner={runner!r} is no task runner of prefect_gpu; accepted: GPUTaskRunner(...)"
        )


@contextlib.contextmanager
def _served(
    start: Callable[[], Coroutine[Any, Any, None]], runner: GPUTaskRunner, timeout_s: float | None
) -> Iterator[Future[None]]:
    """Run Prefect's task worker beside a `with` block, in a thread and an event loop of its own.

    In the caller's loop the worker would delay signals until its threads have ended.

    Args:
        start: Starts the worker.
        runner: Runner of the GPU tasks.
        timeout_s: See `_Service`.

    Yields:
        A future that is done when the worker has ended.
    """
    with (
        capture_sigterm(),
        ThreadPoolExecutor(1, "prefect-gpu-task-worker") as thread,
        runner.duplicate() as entered,
    ):
        service, context = _Service(entered, timeout_s), copy_context()
        context.run(_service.set, service)
        ended = thread.submit(context.run, lambda: asyncio.run(start()))
        try:
            yield ended
        except BaseException:
            # First, or the worker would fetch another task run for each one that the runner ends.
            service.stop()
            raise
