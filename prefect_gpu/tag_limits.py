"""Which tags have a concurrency limit, so that Prefect's engine asks only for slots that exist.

Before it calls a body the engine asks the API for a slot of each of the task's tags, limited or not.
That is a write. A server on SQLite refused about one in four of them while tasks came seconds apart,
whereupon the client sleeps for two seconds (Prefect 3.8.8). Whether any tag is limited is a question
that only reads, and one answer serves a runner's tasks for a while.

Limits are Prefect's: they are enforced by its server, and a task that has one asks as ever.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from prefect import task_engine
from prefect.client.orchestration import SyncPrefectClient

from prefect_gpu.clock import Clock, RealClock

#: Seconds for which an answer of the API holds: a limit that is made later is heeded by then.
KNOWN_S = 10.0

#: Limits that are read at a time; the API gives no more.
_PAGE = 200

Lend = Callable[[], AbstractContextManager[SyncPrefectClient]]


class TagLimits:
    """Knows which names have a concurrency limit. For all engine threads of a runner.

    Args:
        lend: Gives an API client for a while.
        clock: Time.
    """

    def __init__(self, lend: Lend, clock: Clock | None = None) -> None:
        self._lend = lend
        self._clock: Clock = clock or RealClock()
        #: Held while the API is asked, so that a crowd asks once.
        self._lock = threading.Lock()
        self._limited: frozenset[str] = frozenset()
        self._until_s = 0.0

    def among(self, names: list[str]) -> list[str]:
        """Give those that may have a limit: all, where the API does not say."""
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
            while True:
                page = client.read_global_concurrency_limits(_PAGE, len(found))
                found.update(limit.name for limit in page)
                if len(page) < _PAGE:
                    return frozenset(found)


#: Of the runner whose task this thread's engine runs.
_current: ContextVar[TagLimits | None] = ContextVar("prefect_gpu_tag_limits", default=None)


@contextlib.contextmanager
def asked_first(limits: TagLimits) -> Iterator[None]:
    """Have the engine, in this thread, ask only for the slots of tags that are limited."""
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


# The engine's own name for it (Prefect 3.8.8); where there is none it asks as ever.
if hasattr(task_engine, "_concurrency"):
    task_engine._concurrency = _only_limited(task_engine._concurrency)
