"""Stores of the histories of tasks: in memory, or as Prefect artifacts that outlive the process.

Both stores implement `scheduling.history.HistoryStore`; budgets are learned in `scheduling.history`. Artifacts are
written by the thread of `publish`. Each run is one version of the history's artifact, with the run's numbers as
metadata and a page about the last runs as text. Versions never change, so hosts that run the same task at the same time
lose no runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import get_settings_context
from prefect.exceptions import ObjectNotFound

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.reports import publish
from prefect_gpu.reports.canvas import clean
from prefect_gpu.reports.markup import escape, table
from prefect_gpu.reports.model import CAUSE_WORDS, OUTCOME_WORDS
from prefect_gpu.reports.publish import (
    KEY_LIMIT,
    Publisher,
    artifact_key,
    bounded_settings,
    cut_values,
    first_line,
    may_pass,
    read_pages,
)
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun, learn
from prefect_gpu.units import counted, format_bytes, format_seconds, text_of

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_Read = TypeVar("_Read")

HISTORY_PREFIX = "gpu-history"

#: Version of the metadata, raised when a field changes its meaning. 2: each flow has its own histories.
SCHEMA = "2"

#: Timeout in seconds of one reading, for which a task waits, and number of tries. An answer takes 5 ms (Prefect 3.8.8);
#: the second try is for a connection that was closed in the meantime.
READ_TIMEOUT_S = 10.0
READ_TRIES = 2

#: Seconds without further calls after the API did not answer.
AWAY_S = 60.0

#: Runs of one history that may wait to be written; older runs are dropped. Only `KEPT_RUNS` are ever read.
MOST_WAITING = 2 * KEPT_RUNS

#: Characters of the digest in an artifact's key: 48 bits distinguish histories of the same name.
DIGEST_CHARS = 12


class MemoryHistory:
    """A history store in memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[HistoryKey, tuple[PastRun, ...]] = {}

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """Return the last runs of a history, newest first; see `HistoryStore.runs`."""
        with self._lock:
            return self._runs.get(key, ())

    def siblings(self, key: HistoryKey) -> Collection[HistoryKey]:
        """Return the keys of all histories of a task in a flow; see `HistoryStore.siblings`."""
        with self._lock:
            return [other for other in self._runs if other.task == key.task]

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """Store a run; see `HistoryStore.add`."""
        self.put(key, run)

    def put(
        self, key: HistoryKey, *newer: PastRun, older: Sequence[PastRun] = ()
    ) -> tuple[PastRun, ...]:
        """Add newer runs, and older runs that are not stored yet; return the stored runs, at most `KEPT_RUNS`."""
        with self._lock:
            kept = (*newer, *self._runs.get(key, ()))
            self._runs[key] = kept = (*kept, *(run for run in older if run not in kept))[:KEPT_RUNS]
            return kept


class PrefectHistory:
    """A history store of artifact versions in Prefect's API. Safe to use from several threads.

    A history is read from the API once, under the Prefect settings of the store's creation, so later runs of other
    processes are not seen. The publisher writes the runs of this process.
    """

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[SyncPrefectClient]],
        publisher: Publisher,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._lend = lend
        self._publisher = publisher
        self._clock = clock or RealClock()
        self._settings = get_settings_context()
        self._known = MemoryHistory()
        #: Guards the attributes below. Held for moments only.
        self._lock = threading.Lock()
        #: Locks by history: a thread that reads a history from the API holds its lock, and other readers wait.
        self._reading: dict[HistoryKey, threading.Lock] = {}
        #: Histories already read from the API.
        self._is_read: set[HistoryKey] = set()
        self._away_until_s = -math.inf
        self._away_because = ""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """Return the last runs of a history, newest first; see `HistoryStore.runs`.

        Without an answer of the API, return this process's runs. If there are none, raise `OSError`, for `AWAY_S`
        seconds without another call.
        """
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            if key not in self._is_read:
                try:
                    read = partial(_read_runs, history_artifact_key(key))
                    self._known.put(key, older=self._read(read))
                    self._is_read.add(key)
                except OSError:
                    if not self._known.runs(key):
                        raise
        return self._known.runs(key)

    def siblings(self, key: HistoryKey) -> Collection[HistoryKey]:
        """Return the keys of all histories of a task in a flow; see `HistoryStore.siblings`."""
        found = self._read(lambda client: [each for _, each in _read_keys(client, _key_front(key))])
        return {*self._known.siblings(key), *(each for each in found if each.task == key.task)}

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """Store a run in memory, and let the publisher write it; see `HistoryStore.add`."""
        version, runs = uuid4().hex, self._known.put(key, run)
        self._publisher.put(
            lambda client: publish_run(key, version, runs, client), series=key, most=MOST_WAITING
        )

    def _read(self, read: Callable[[SyncPrefectClient], _Read]) -> _Read:
        with self._lock:
            if self._clock.now() < self._away_until_s:
                raise OSError(self._away_because)
        with bounded_settings(self._settings, READ_TIMEOUT_S):
            for left in reversed(range(READ_TRIES)):
                try:
                    with self._lend() as client:
                        return read(client)
                except Exception as error:
                    # Process boundary: any fault of the API or of the network.
                    if left and may_pass(error):
                        continue
                    with self._lock:
                        self._away_until_s = self._clock.now() + AWAY_S
                        self._away_because = first_line(error)
                    raise OSError(first_line(error)) from error
        raise AssertionError("the last try returns or raises")


@functools.lru_cache(256)
def history_artifact_key(key: HistoryKey) -> str:
    """Return the artifact key of a history: `gpu-history-<task-slug>-<digest>`."""
    parts = key.flow_name, key.task_name, key.qualified_name, key.device_name, key.learn_by
    text = json.dumps(parts)
    return _key_front(key) + hashlib.sha256(text.encode("ascii")).hexdigest()[:DIGEST_CHARS]


def _key_front(key: HistoryKey) -> str:
    """Return the start of the artifact keys of all histories of tasks with this name."""
    front = artifact_key(HISTORY_PREFIX, key.task_name)
    return f"{front[: KEY_LIMIT - DIGEST_CHARS - 1].rstrip('-')}-"


def publish_run(
    key: HistoryKey, version: str, runs: Sequence[PastRun], client: SyncPrefectClient
) -> None:
    """Create a version of a history's artifact for the newest run, `runs[0]`, with a page about all `runs`.

    `version` identifies the run, so a run that is published twice counts once. Errors of the client are raised.
    """
    # `learn_by` is published even if empty.
    texts = {"schema": SCHEMA, "version": version, "learn_by": key.learn_by}
    # The artifact belongs to no single flow run or task run.
    artifact = ArtifactCreate(
        key=history_artifact_key(key),
        type="markdown",
        description=history_summary(key, runs),
        data=history_markdown(key, runs),
        metadata_=cut_values({**texts, **key.to_texts(), **runs[0].to_texts()}),
    )
    client.create_artifact(artifact)


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """A task's history as read from the API."""

    artifact_key: str
    key: HistoryKey
    #: The last `KEPT_RUNS`, newest first; at least one.
    runs: tuple[PastRun, ...]


def read_histories(
    client: SyncPrefectClient, wanted: Callable[[HistoryKey], bool] = lambda key: True
) -> list[KeptHistory]:
    """Return the readable histories in the API with a wanted key, ordered by task name. Errors of the client are raised."""
    found = [
        KeptHistory(name, key, runs)
        for name, key in _read_keys(client, f"{HISTORY_PREFIX}-")
        if wanted(key) and (runs := _read_runs(name, client))
    ]
    return sorted(found, key=lambda k: (k.key.task_name, k.key.flow_name or "", k.artifact_key))


def delete_history(key: str, client: SyncPrefectClient) -> int:
    """Delete all versions of the history with the artifact key `key`; return the number of deleted runs.

    Errors of the client are raised; versions that were deleted before an error stay deleted.
    """
    asked = {"artifacts": {"key": {"any_": [key]}}}
    deleted = 0
    while True:
        # Always the first page: a deletion, also by another command, moves later versions to earlier pages.
        pages = read_pages(client, "artifacts", asked, timeout=READ_TIMEOUT_S)
        page = [*itertools.islice(pages, publish.PAGE)]
        for artifact in page:
            # Another command may have deleted the version in the meantime.
            with contextlib.suppress(ObjectNotFound):
                client.delete_artifact(UUID(artifact["id"]))
                deleted += 1
        if len(page) < publish.PAGE:
            return deleted


def _read_keys(client: SyncPrefectClient, front: str) -> Iterator[tuple[str, HistoryKey]]:
    """Yield the artifact key and the key of each readable history in the API whose artifact key starts with `front`."""
    asked = {"artifacts": {"key": {"like_": front}}}
    for artifact in read_pages(client, "artifacts/latest", asked, timeout=READ_TIMEOUT_S):
        # The filter matches the text anywhere in a key.
        if not artifact["key"].startswith(front):
            continue
        texts = artifact["metadata_"] or {}
        with contextlib.suppress(ValueError):
            _read_texts(texts)
            yield artifact["key"], HistoryKey.from_texts(texts)


def _read_runs(key: str, client: SyncPrefectClient) -> tuple[PastRun, ...]:
    """Return the last `KEPT_RUNS` readable runs of the history with the artifact key `key`, newest first."""
    # The synchronous `client.read_artifacts` sends null for each filter that is not given, which the API refuses
    # (Prefect 3.8.8), and has no timeout.
    only = {"artifacts": {"key": {"any_": [key]}}}
    asked = {**only, "limit": KEPT_RUNS, "sort": "CREATED_DESC"}
    answer = client.request("POST", "/artifacts/filter", json=asked, timeout=READ_TIMEOUT_S)
    found: dict[str, PastRun] = {}
    for artifact in answer.json():
        texts = artifact.get("metadata_") or {}
        with contextlib.suppress(ValueError):
            run = _read_texts(texts)
            found.setdefault(texts["version"], run)
    return tuple(found.values())


def _read_texts(texts: dict[str, Any]) -> PastRun:
    # Other programs and users may write artifacts or edit them.
    if texts.get("schema") != SCHEMA or "version" not in texts:
        raise ValueError(f"no run of a task: {sorted(texts)}")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"not all values are texts: {texts}")
    return PastRun.from_texts(texts)


_size = partial(text_of, as_text=format_bytes, absent="–")

#: Columns of the table on a history's page: heading, and function that returns a run's cell.
_COLUMNS: Mapping[str, Callable[[PastRun], str]] = {
    "ended (UTC)": lambda run: _time(run.ended_at),
    "outcome": lambda run: OUTCOME_WORDS.get(run.outcome) or escape(run.outcome),
    "budget": lambda run: (
        format_bytes(run.budget_bytes) + ("" if run.cap_bytes is not None else ", no cap")
    ),
    "live peak": lambda run: _size(run.live_bytes),
    "steady live": lambda run: _size(run.steady_live_bytes),
    "process peak": lambda run: format_bytes(run.process_bytes),
    "context": lambda run: _size(run.context_bytes or None),
    "retries": lambda run: str(run.alloc_retries or "–"),
    "step": lambda run: text_of(run.step_s, format_seconds, "–"),
    "cause": lambda run: CAUSE_WORDS.get(run.cause, escape(run.cause)) or "–",
}

_LEGEND = (
    "Sizes are those of one device. *Live* is what the frameworks had allocated, *steady* the same "
    "without the first step, *process peak* what the device showed for the whole process, *context* "
    "the part of it that no framework counts. *Retries* are allocations that succeeded only after "
    "the framework's cache was given up."
)


def history_markdown(key: HistoryKey, runs: Sequence[PastRun]) -> str:
    """Return the page about one history in markdown; `runs` are newest first."""
    within = "outside a flow" if key.flow_name is None else f"in flow {escape(key.flow_name)}"
    about = f"Task {escape(key.task_name)} {within}, on {escape(key.device_name)}"
    if key.learn_by:
        about += f", for {escape(key.learn_by_words or key.learn_by, 200)} (`gpu:learn_by`)"
    rows = [[words(run) for words in _COLUMNS.values()] for run in runs]
    parts = (
        f"**{_lesson(runs)}**",
        f"{about}. A `gpu:memory` tag takes precedence over what is learned.",
        table([*_COLUMNS], rows, right=range(2, 9)),
        _LEGEND,
    )
    return "\n\n".join(parts) + "\n"


def history_summary(key: HistoryKey, runs: Sequence[PastRun]) -> str:
    """Return a history as one line: `train · nightly · batch_size=32 · NVIDIA H200 · next budget 6GiB`."""
    lesson = learn(runs)
    budget = "not known" if lesson is None else format_bytes(lesson.budget_bytes)
    names = (key.task_name, key.flow_name, key.learn_by_words, key.device_name)
    return clean(" · ".join(filter(None, (*names, f"next budget {budget}"))))


def _lesson(runs: Sequence[PastRun]) -> str:
    lesson = learn(runs)
    if lesson is None:
        known = "whose memory was measured " if any(r.outcome == "completed" for r in runs) else ""
        return f"No run {known}has completed: the next one is a first run, to find out."
    all_of_it = ", all that a device can give" if lesson.need_bytes > lesson.budget_bytes else ""
    text = (
        f"Next budget: {format_bytes(lesson.budget_bytes)} of each device{all_of_it}, "
        f"{format_bytes(lesson.context_bytes)} of it for the context, learned from "
        f"{counted(lesson.runs, 'completed run')}."
    )
    if lesson.floor_bytes:
        least = format_bytes(lesson.floor_bytes)
        text += f" Not less than {least}: with a smaller one it ran out of memory or slowed down."
    if lesson.growth >= 1.005:
        growth = f"{lesson.growth:.2f} times as large for that"
        text += f" Runs differ in what they need: it is {growth}."
    return text


def _time(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        # Another program may have written the artifact.
        return "–"
