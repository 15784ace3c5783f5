"""Where the runs of tasks are kept: in memory, and as Prefect artifacts that outlive every process.

Both follow `scheduling.history.HistoryStore`. What runs teach is `scheduling.history`, the page that a
person reads is `history_page`, the thread that writes to the API is `publish`.

Every run is a version of its own of the artifact that its history has, with the run's numbers in the
version's metadata: nobody reads a version to change it, so hosts that run the same task at the same
time lose none of each other's runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import SettingsContext, get_settings_context

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.reports.history_page import history_markdown
from prefect_gpu.reports.publish import (
    KEY_LIMIT,
    Publisher,
    artifact_key,
    bounded_settings,
    cut_values,
    may_pass,
)
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import Settings

HISTORY_PREFIX = "gpu-history"

#: Version of the metadata's meaning; rises when a field changes its meaning.
SCHEMA = "1"

#: Seconds that one reading may take, and how often it is tried: a task waits for it. An answer takes
#: 5 ms (Prefect 3.8.8); the second try is for a connection that was closed meanwhile.
READ_TIMEOUT_S = 10.0
READ_TRIES = 2

#: Seconds for which an API that did not answer is not asked again.
AWAY_S = 60.0

#: Runs of one history that may wait to be written; older ones are dropped where tasks end faster than
#: the API takes artifacts. Nobody reads more than `KEPT_RUNS`; twice as many leave room to read more.
MOST_WAITING = 2 * KEPT_RUNS

#: Characters of the digest in an artifact's key: 48 bits tell histories of one name apart.
DIGEST_CHARS = 12


class MemoryHistory:
    """Keeps runs as long as this object lives. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[HistoryKey, tuple[PastRun, ...]] = {}

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """See `HistoryStore.runs`."""
        with self._lock:
            return self._runs.get(key, ())

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """See `HistoryStore.add`."""
        with self._lock:
            self._runs[key] = (run, *self._runs.get(key, ()))[:KEPT_RUNS]


class PrefectHistory:
    """Keeps runs as versions of artifacts. Any thread may use it.

    A key is read from the API once; from then on this process's own runs are added to what was
    found. What other processes do meanwhile is seen by the next store.

    Args:
        client_factory: Opens a client for the flow's API. Called in the thread that asks for runs,
            under the settings that held where the store was made.
        publisher: Writes runs, and says how many were lost.
        clock: For how long an API that does not answer is left alone.
    """

    def __init__(
        self,
        client_factory: Callable[[], AbstractContextManager[SyncPrefectClient]],
        publisher: Publisher,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._client_factory = client_factory
        self._publisher = publisher
        self._clock = clock or RealClock()
        self._settings = get_settings_context()
        self._lock = threading.Lock()
        self._shelves: dict[HistoryKey, _Shelf] = {}
        self._away_until_s = -math.inf
        self._away_because = ""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """See `HistoryStore.runs`.

        Where the API does not answer, the runs of this process are given; if there are none, that is
        the error, now and, without asking, for `AWAY_S` seconds.
        """
        shelf = self._shelf(key)
        # Whoever wants the same history waits for the one reading; other histories do not.
        with shelf.reading:
            if not shelf.is_read:
                try:
                    shelf.take(self._read(key))
                except OSError:
                    if not shelf.runs():
                        raise
        return shelf.runs()

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """See `HistoryStore.add`."""
        version = uuid4().hex
        known = self._shelf(key).add(version, run)
        self._publisher.put(
            lambda client: publish_run(key, version, known, client),
            series=key,
            most=MOST_WAITING,
        )

    def _shelf(self, key: HistoryKey) -> _Shelf:
        with self._lock:
            return self._shelves.setdefault(key, _Shelf())

    def _read(self, key: HistoryKey) -> dict[str, PastRun]:
        with self._lock:
            if self._clock.now() < self._away_until_s:
                raise OSError(self._away_because)
        try:
            return self._ask(key)
        except Exception as error:
            # Process boundary: whatever an API, or what lies before it, does not do.
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            with self._lock:
                self._away_until_s = self._clock.now() + AWAY_S
                self._away_because = text
            raise OSError(text) from error

    def _ask(self, key: HistoryKey) -> dict[str, PastRun]:
        # A context of settings can be entered by one thread at a time.
        with SettingsContext(profile=self._settings.profile, settings=self._bounded):
            for left in reversed(range(READ_TRIES)):
                try:
                    with self._client_factory() as client:
                        return read_runs(key, client)
                except Exception as error:
                    if not left or not may_pass(error):
                        raise
        raise AssertionError("the last try returns or raises")

    @functools.cached_property
    def _bounded(self) -> Settings:
        return bounded_settings(self._settings, READ_TIMEOUT_S).settings


class _Shelf:
    """The runs of one key, as far as this process knows them."""

    def __init__(self) -> None:
        #: Held by the thread that asks the API.
        self.reading = threading.Lock()
        self._lock = threading.Lock()
        #: By version, newest first.
        self._runs: dict[str, PastRun] = {}
        self._is_read = False

    @property
    def is_read(self) -> bool:
        return self._is_read

    def runs(self) -> tuple[PastRun, ...]:
        with self._lock:
            return tuple(self._runs.values())

    def add(self, version: str, run: PastRun) -> tuple[PastRun, ...]:
        with self._lock:
            self._keep([(version, run), *self._runs.items()])
            return tuple(self._runs.values())

    def take(self, found: dict[str, PastRun]) -> None:
        """Take what the API has, of which this process may have added some."""
        with self._lock:
            own = [item for item in self._runs.items() if item[0] not in found]
            self._keep([*own, *found.items()])
            self._is_read = True

    def _keep(self, items: Iterable[tuple[str, PastRun]]) -> None:
        self._runs = dict(list(items)[:KEPT_RUNS])


@functools.lru_cache(256)
def history_artifact_key(key: HistoryKey) -> str:
    """Give the artifact's key of a history: `gpu-history-<task-slug>-<digest>`."""
    text = json.dumps(astuple(key))
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()[:DIGEST_CHARS]
    front = artifact_key(HISTORY_PREFIX, key.task_name)
    return f"{front[: KEY_LIMIT - DIGEST_CHARS - 1].rstrip('-')}-{digest}"


def publish_run(
    key: HistoryKey, version: str, runs: Sequence[PastRun], client: SyncPrefectClient
) -> None:
    """Create the version of a history's artifact that keeps one run.

    Args:
        key: Which history.
        version: Tells the run from all others: one that is published twice counts once.
        runs: What is known of the history, newest first; the first is the one to keep.
        client: Of the flow's API.

    Raises:
        Exception: Whatever the client raises when the API does not take it.
    """
    client.create_artifact(
        # On no run: it is about all of them.
        ArtifactCreate(
            key=history_artifact_key(key),
            type="markdown",
            description=f"What runs of {key.task_name} needed on {key.device_name}, by prefect_gpu.",
            data=history_markdown(key, runs),
            metadata_=cut_values(
                {
                    "schema": SCHEMA,
                    "version": version,
                    "task_name": key.task_name,
                    "qualified_name": key.qualified_name,
                    "device_name": key.device_name,
                    "learn_by": key.learn_by,
                    **runs[0].to_texts(),
                }
            ),
        )
    )


def read_runs(key: HistoryKey, client: SyncPrefectClient) -> dict[str, PastRun]:
    """Give the last `KEPT_RUNS` runs of a history by version, newest first.

    Versions that cannot be read are passed over.

    Raises:
        Exception: Whatever the client raises when the API does not answer.
    """
    # Not `client.read_artifacts`: the sync one sends null for what it was not given, which the API
    # refuses (Prefect 3.8.8), and takes no timeout, which a client that was opened by others needs.
    answer = client.request(
        "POST",
        "/artifacts/filter",
        json={
            "artifacts": {"key": {"any_": [history_artifact_key(key)]}},
            "limit": KEPT_RUNS,
            "sort": "CREATED_DESC",
        },
        timeout=READ_TIMEOUT_S,
    )
    found: dict[str, PastRun] = {}
    for artifact in answer.json():
        texts = artifact.get("metadata_") or {}
        try:
            run = _read_texts(texts)
        except ValueError:
            continue
        found.setdefault(texts["version"], run)
    return found


def _read_texts(texts: dict[str, Any]) -> PastRun:
    # Anybody may write artifacts, or edit them.
    if texts.get("schema") != SCHEMA or "version" not in texts:
        raise ValueError(f"no run of a task: {sorted(texts)}")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"not all are texts: {texts}")
    return PastRun.from_texts(texts)
