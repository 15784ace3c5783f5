"""The threads that Prefect's engine runs in: one for each GPU task, gone when the task is over.

A `ThreadPoolExecutor` keeps every thread until it is shut down: a flow that maps two thousand tasks would
keep two thousand threads to its end. The number of threads has no bound here, which waiting tasks would
fill so that nothing could run; the broker decides how many tasks have a process.

Before it calls a body, Prefect's engine asks the API for a slot of each of the task's tags, limited or not. That
is a write, and a server on SQLite does not stand many (Prefect 3.8.8): it refused about one in four of them
while tasks came seconds apart, and Prefect's client then sleeps for two seconds. `TagLimits` has the engine ask
only for slots that exist. Whether any tag is limited is a question that only reads, and one answer serves a
runner's tasks for a while. A server that refuses either question for a moment is asked again after a tenth of a
second.

The limits themselves are enforced by Prefect's server: a task that has one asks as ever.

`AwaitedFuture` is what `submit` returns: in the process of a GPU task it tells the broker when the body waits for tasks
that it has submitted (`scheduling.nested`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import httpx
from prefect import task_engine
from prefect.client.orchestration import SyncPrefectClient
from prefect.concurrency import services
from prefect.futures import PrefectConcurrentFuture, PrefectFuture

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.process_resources import start_thread

#: Begins the names of the threads.
NAME = "prefect-gpu-engine"

#: Seconds for which an answer of the API holds. A limit that is made later is respected after that.
KNOWN_S = 10.0

#: Seconds before the first further tries of a question that the server was too busy to answer. Prefect's client
#: alone tries again after 2, 4, 8, 16 and 32 s; what is not answered by then waits for the rest of these.
RETRY_DELAYS_S = (0.1, 0.3, 1.0)

#: The questions, by the end of their paths: which limits there are, and for slots.
_PATHS = ("/concurrency_limits/filter", "/concurrency_limits/increment-with-lease")

#: Where a request counts its further tries.
_TRIES = "prefect_gpu_tries"

#: Limits that are read at a time; the API returns no more.
_PAGE = 200

Lend = Callable[[], AbstractContextManager[SyncPrefectClient]]


def start_engine(call: Callable[[], Any], number: int) -> Future[Any]:
    """Run a call in a new thread; return the future of its result, which cannot be cancelled.

    Args:
        call: What to run.
        number: Ends the name of the thread.

    Raises:
        CapacityError: The system starts no more threads.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    start_thread(functools.partial(_run, future, call), f"{NAME}_{number}", daemon=False)
    return future


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the thread's last frame
        future.set_exception(error)
    finally:
        # What it raised holds this frame.
        del future, call


class BodyWaits:
    """Counts the threads of this process that wait for GPU tasks which its body has submitted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since_s: float | None = None

    def since(self) -> float | None:
        """Return the monotonic seconds since when at least one thread waits; `None`: none does."""
        return self._since_s

    def change(self, by: int) -> None:
        """Count one thread more, or one less."""
        with self._lock:
            self._count += by
            if not self._count:
                self._since_s = None
            elif self._since_s is None:
                self._since_s = time.monotonic()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count this thread, unless it is that of an engine: that a task waits for another says nothing of the body."""
        by = 0 if threading.current_thread().name.startswith(NAME) else 1
        self.change(by)
        try:
            yield
        finally:
            self.change(-by)


#: Of this process. Only processes of GPU tasks read it.
BODY_WAITS = BodyWaits()


class AwaitedFuture(PrefectConcurrentFuture[Any]):
    """The future of a GPU task: it counts who waits for it."""

    def wait(self, timeout: float | None = None) -> None:
        """See `PrefectFuture.wait`."""
        with BODY_WAITS.counted():
            super().wait(timeout)

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        """See `PrefectFuture.result`."""
        with BODY_WAITS.counted():
            return super().result(timeout, raise_on_failure)

    def _add_prefect_done_callback(self, fn: Callable[[PrefectFuture[Any]], None]) -> None:
        # Of Prefect's `as_completed`, and `wait` with a timeout: they wait for the callback.
        BODY_WAITS.change(1)
        self._wrapped_future.add_done_callback(lambda _: BODY_WAITS.change(-1))
        super()._add_prefect_done_callback(fn)


class TagLimits:
    """Knows which names have a concurrency limit. For all engine threads of a runner.

    Args:
        lend: Returns an API client for use in a `with` block.
        clock: Time.
    """

    def __init__(self, lend: Lend, clock: Clock | None = None) -> None:
        self._lend = lend
        self._clock: Clock = clock or RealClock()
        #: Held while the API is asked, so that many threads ask once.
        self._lock = threading.Lock()
        self._limited: frozenset[str] = frozenset()
        self._until_s = 0.0

    def among(self, names: list[str]) -> list[str]:
        """Return those names that may have a limit: all, where the API does not answer."""
        if not names:
            return names
        with self._lock:
            if self._clock.now() >= self._until_s:
                try:
                    self._limited = self._read()
                except Exception:  # noqa: BLE001 - the engine asks as it would have, and may fail
                    return names
                self._until_s = self._clock.now() + KNOWN_S
            limited = self._limited
        return [name for name in names if name in limited]

    def _read(self) -> frozenset[str]:
        found: set[str] = set()
        with self._lend() as client:
            _add_hook(client, _retry_soon)
            while True:
                page = client.read_global_concurrency_limits(_PAGE, len(found))
                found.update(limit.name for limit in page)
                if len(page) < _PAGE:
                    return frozenset(found)


def _retry_soon(response: httpx.Response) -> None:
    """Make Prefect's client ask again soon, if the server was too busy for one of the questions."""
    request = response.request
    tries = request.extensions.get(_TRIES, 0)
    refused = response.status_code == 503 and "Retry-After" not in response.headers
    if refused and request.url.path.endswith(_PATHS) and tries < len(RETRY_DELAYS_S):
        response.headers["Retry-After"] = str(RETRY_DELAYS_S[tries])
        request.extensions[_TRIES] = tries + 1


async def _retry_soon_async(response: httpx.Response) -> None:
    """See `_retry_soon`."""
    _retry_soon(response)


def _add_hook(client: Any, hook: Callable[[httpx.Response], Any]) -> None:
    """Call a function with each response that a client of Prefect's gets."""
    # Prefect's own name for it (3.8.8). In a version without that name its client asks as ever.
    hooks = getattr(getattr(client, "_client", None), "event_hooks", {}).get("response", [hook])
    if hook not in hooks:
        hooks.append(hook)


#: The limits of the runner whose task this thread's engine runs.
_current: ContextVar[TagLimits | None] = ContextVar("prefect_gpu_tag_limits", default=None)


@contextlib.contextmanager
def asked_first(limits: TagLimits) -> Iterator[None]:
    """Make the engine of this thread ask only for the slots of tags that are limited."""
    token = _current.set(limits)
    try:
        yield
    finally:
        _current.reset(token)


def _only_limited(concurrency: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(concurrency)
    def ask(names: Any, *args: Any, **kwargs: Any) -> Any:
        limits = _current.get()
        if limits is not None and isinstance(names, list):
            names = limits.among(names)
        return concurrency(names, *args, **kwargs)

    return ask


def _retried_soon(acquire: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(acquire)
    async def ask(service: Any, *args: Any, **kwargs: Any) -> Any:
        _add_hook(getattr(service, "_client", None), _retry_soon_async)
        return await acquire(service, *args, **kwargs)

    return ask


# The engine's own names (Prefect 3.8.8). In a version without them it asks as ever.
if hasattr(task_engine, "_concurrency"):
    task_engine._concurrency = _only_limited(task_engine._concurrency)
_service: Any = getattr(services, "ConcurrencySlotAcquisitionWithLeaseService", None)
if hasattr(_service, "acquire"):
    _service.acquire = _retried_soon(_service.acquire)
