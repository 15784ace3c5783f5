"""Find out which tags have a concurrency limit, so that Prefect's engine requests slots of limited tags alone.

Before each body, Prefect's engine requests a slot for each tag. If a set of tags has no limit, the engine caches that
for 5 s. A request is a write: a SQLite server busy with a thousand task runs refused it for more than the 62 s of
retries of Prefect's client, and the task run crashed (Prefect 3.8.8). This module reads the limits and puts the answer
into Prefect's cache. A task with a limited tag requests its slot as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from prefect.client.orchestration import SyncPrefectClient
from prefect.concurrency import services

from prefect_gpu.clock import Clock, RealClock

#: Seconds for which an answer of the API is used. A new limit takes effect after these and Prefect's own 5 s.
KNOWN_S = 10.0

#: Limits read in one call, the API's maximum.
_PAGE = 200


class TagLimits:
    """The tags with a concurrency limit, read from the API and kept for `KNOWN_S`. Safe to use from several threads."""

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
