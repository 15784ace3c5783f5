"""Which tags have a concurrency limit, so that Prefect's engine asks for the slots of limited tags alone.

Before it calls a body, Prefect's engine asks the API for a slot of each of the task's tags, and remembers for 5 s that a set of tags
has no limit. To ask is a write, and a server on SQLite that is busy with a thousand task runs refused it for more than the 62 s
for which Prefect's client tries again (Prefect 3.8.8): the task run crashed. Whether any tag is limited is a question that only
reads. Its answer is put into Prefect's memory.

The limits themselves are enforced by Prefect's server: a task that has one asks as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from prefect.client.orchestration import SyncPrefectClient
from prefect.concurrency import services

from prefect_gpu.clock import Clock, RealClock

#: Seconds for which an answer of the API holds. A limit that is made later is respected after that, and after the 5 s of Prefect.
KNOWN_S = 10.0

#: Limits that are read at a time; the API returns no more.
_PAGE = 200


class TagLimits:
    """Knows which names have a concurrency limit. For all engine threads of a runner.

    Args:
        lend: Returns an API client for use in a `with` block.
        clock: Time.
    """

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[SyncPrefectClient]],
        clock: Clock | None = None,
    ) -> None:
        self._lend = lend
        self._clock: Clock = clock or RealClock()
        #: Held while the API is asked, so that many threads ask once.
        self._lock = threading.Lock()
        self._limited: frozenset[str] = frozenset()
        self._until_s = 0.0

    def note_unlimited(self, tags: Iterable[str]) -> None:
        """Put into Prefect's memory that a task run's tags have no limit, if so; not where the API does not answer."""
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
