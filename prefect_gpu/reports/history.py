"""Histories of tasks, kept in memory or as Prefect artifacts that outlive the process.

Both stores implement `scheduling.history.HistoryStore`, where budgets are learned. `publish` has the thread that
writes.

Each run is one version of the history's artifact, with the run's numbers as metadata. Versions never change, so hosts
that run the same task at the same time lose no runs. The text of a version is a page about the last runs and the next
budget.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import get_settings_context
from prefect.exceptions import ObjectNotFound

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.reports.canvas import clean
from prefect_gpu.reports.markup import escape, table
from prefect_gpu.reports.model import CAUSE_WORDS, OUTCOME_WORDS
from prefect_gpu.reports.publish import (
    KEY_LIMIT,
    Publisher,
    artifact_key,
    bounded_settings,
    cut_values,
    may_pass,
)
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun, learn
from prefect_gpu.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

HISTORY_PREFIX = "gpu-history"

#: Version of the metadata. It rises when a field changes its meaning. 2: a history is of one flow.
SCHEMA = "2"

#: Seconds for one reading, for which a task waits, and how often it is tried. An answer takes 5 ms (Prefect 3.8.8);
#: the second try is for a connection that was closed in the meantime.
READ_TIMEOUT_S = 10.0
READ_TRIES = 2

#: Seconds without calls after an API did not answer.
AWAY_S = 60.0

#: Items in one answer of the API.
PAGE = 200

#: Runs of one history that may wait to be written; older ones are dropped. Only `KEPT_RUNS` are ever read.
MOST_WAITING = 2 * KEPT_RUNS

#: Characters of the digest in an artifact's key: 48 bits distinguish histories of the same name.
DIGEST_CHARS = 12


class MemoryHistory:
    """A history store in memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[HistoryKey, tuple[PastRun, ...]] = {}

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """See `HistoryStore.runs`."""
        with self._lock:
            return self._runs.get(key, ())

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """See `HistoryStore.add`."""
        self.put(key, run)

    def put(
        self, key: HistoryKey, *newer: PastRun, older: Sequence[PastRun] = ()
    ) -> tuple[PastRun, ...]:
        """Add runs before and after the kept ones, each run once; return all kept runs."""
        with self._lock:
            kept = (*newer, *self._runs.get(key, ()))
            self._runs[key] = kept = (*kept, *(run for run in older if run not in kept))[:KEPT_RUNS]
            return kept


class PrefectHistory:
    """A history store of artifact versions in Prefect's API. Safe to use from several threads.

    A history is read from the API once, and runs of this process are added. Later runs of other processes are not
    seen.

    Args:
        lend: Returns a client for the flow's API, for use in a `with` block. Called in the thread that reads runs,
            under the settings that were active when the store was created.
        publisher: Writes runs and counts lost ones.
        clock: Measures the pause after an API did not answer.
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
        #: All runs known to this process.
        self._known = MemoryHistory()
        #: Guards the attributes below. Held for moments only.
        self._lock = threading.Lock()
        #: By history: held while a thread reads it from the API. Other readers wait.
        self._reading: dict[HistoryKey, threading.Lock] = {}
        #: Histories that were read.
        self._is_read: set[HistoryKey] = set()
        self._away_until_s = -math.inf
        self._away_because = ""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """See `HistoryStore.runs`.

        Without an answer of the API, return the runs of this process. If there are none, raise the error, and raise it
        again without a call for `AWAY_S` seconds.
        """
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            if key not in self._is_read:
                try:
                    self._known.put(key, older=self._read(key))
                    self._is_read.add(key)
                except OSError:
                    if not self._known.runs(key):
                        raise
        return self._known.runs(key)

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """See `HistoryStore.add`."""
        version, runs = uuid4().hex, self._known.put(key, run)
        self._publisher.put(
            lambda client: publish_run(key, version, runs, client), series=key, most=MOST_WAITING
        )

    def _read(self, key: HistoryKey) -> Sequence[PastRun]:
        with self._lock:
            if self._clock.now() < self._away_until_s:
                raise OSError(self._away_because)
        try:
            return self._ask(key)
        except Exception as error:
            # Process boundary: any fault of the API or of the network.
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            with self._lock:
                self._away_until_s = self._clock.now() + AWAY_S
                self._away_because = text
            raise OSError(text) from error

    def _ask(self, key: HistoryKey) -> Sequence[PastRun]:
        with bounded_settings(self._settings, READ_TIMEOUT_S):
            for left in reversed(range(READ_TRIES)):
                try:
                    with self._lend() as client:
                        return read_runs(key, client)
                except Exception as error:
                    if not left or not may_pass(error):
                        raise
        raise AssertionError("the last try returns or raises")


@functools.lru_cache(256)
def history_artifact_key(key: HistoryKey) -> str:
    """Return the artifact key of a history: `gpu-history-<task-slug>-<digest>`."""
    parts = key.flow_name, key.task_name, key.qualified_name, key.device_name, key.learn_by
    text = json.dumps(parts)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()[:DIGEST_CHARS]
    front = artifact_key(HISTORY_PREFIX, key.task_name)
    return f"{front[: KEY_LIMIT - DIGEST_CHARS - 1].rstrip('-')}-{digest}"


def publish_run(
    key: HistoryKey, version: str, runs: Sequence[PastRun], client: SyncPrefectClient
) -> None:
    """Create the version of a history's artifact that keeps one run. Any error of the client is raised.

    Args:
        key: The history.
        version: Identifies the run: a run that is published twice counts once.
        runs: Known runs of the history, newest first. The first run is kept.
        client: Of the flow.
    """
    client.create_artifact(
        # It belongs to no single flow run or task run.
        ArtifactCreate(
            key=history_artifact_key(key),
            type="markdown",
            description=history_summary(key, runs),
            data=history_markdown(key, runs),
            metadata_=cut_values(
                {
                    "schema": SCHEMA,
                    "version": version,
                    # Published even if empty.
                    "learn_by": key.learn_by,
                    **key.to_texts(),
                    **runs[0].to_texts(),
                }
            ),
        )
    )


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """One history in the API."""

    artifact_key: str
    key: HistoryKey
    #: The last `KEPT_RUNS`, newest first; at least one.
    runs: tuple[PastRun, ...]


def read_histories(
    client: SyncPrefectClient, tasks: Container[tuple[str | None, str, str]] | None = None
) -> list[KeptHistory]:
    """Return the histories in the API, ordered by task, without unreadable ones. Any error of the client is raised.

    Args:
        client: Of the API.
        tasks: Names of a flow, a task and its function: only their histories are read. `None`: all.
    """
    found: list[KeptHistory] = []
    for artifact in _latest(client):
        texts = artifact["metadata_"] or {}
        try:
            _read_texts(texts)
            key = HistoryKey.from_texts(texts)
        except ValueError:
            continue
        if tasks is None or (key.flow_name, key.task_name, key.qualified_name) in tasks:
            runs = _read_versions(artifact["key"], client)
            if runs:
                found.append(KeptHistory(artifact["key"], key, tuple(runs)))
    return sorted(
        found, key=lambda kept: (kept.key.task_name, kept.key.flow_name or "", kept.artifact_key)
    )


def _latest(client: SyncPrefectClient) -> Iterator[dict[str, Any]]:
    """Yield the newest version of each history."""
    for offset in itertools.count(0, PAGE):
        asked = {
            "artifacts": {"key": {"like_": f"{HISTORY_PREFIX}-"}},
            "limit": PAGE,
            "offset": offset,
        }
        page = client.request(
            "POST", "/artifacts/latest/filter", json=asked, timeout=READ_TIMEOUT_S
        ).json()
        # The filter matches the text anywhere in a key.
        yield from (each for each in page if each["key"].startswith(f"{HISTORY_PREFIX}-"))
        if len(page) < PAGE:
            return


def delete_history(key: str, client: SyncPrefectClient) -> int:
    """Delete all versions of the history with an artifact key; return the number of its runs.

    Any error of the client is raised. Versions that were deleted before it stay deleted.
    """
    deleted = 0
    while True:
        asked = {"artifacts": {"key": {"any_": [key]}}, "limit": PAGE}
        page = client.request(
            "POST", "/artifacts/filter", json=asked, timeout=READ_TIMEOUT_S
        ).json()
        for artifact in page:
            # Another command may have deleted the version in the meantime.
            with contextlib.suppress(ObjectNotFound):
                client.delete_artifact(UUID(artifact["id"]))
                deleted += 1
        if len(page) < PAGE:
            return deleted


def read_runs(key: HistoryKey, client: SyncPrefectClient) -> Sequence[PastRun]:
    """Return the last `KEPT_RUNS` readable runs of a history, newest first. Any error of the client is raised."""
    return _read_versions(history_artifact_key(key), client)


def _read_versions(key: str, client: SyncPrefectClient) -> Sequence[PastRun]:
    # The synchronous `client.read_artifacts` sends null for each filter that is not given, which the API refuses
    # (Prefect 3.8.8), and has no timeout.
    answer = client.request(
        "POST",
        "/artifacts/filter",
        json={
            "artifacts": {"key": {"any_": [key]}},
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
    return tuple(found.values())


def _read_texts(texts: dict[str, Any]) -> PastRun:
    # Other programs and users may write artifacts or edit them.
    if texts.get("schema") != SCHEMA or "version" not in texts:
        raise ValueError(f"no run of a task: {sorted(texts)}")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"not all values are texts: {texts}")
    return PastRun.from_texts(texts)


_OUTCOMES: Mapping[str, str] = {str(outcome): words for outcome, words in OUTCOME_WORDS.items()}

_HEADS = (
    "ended (UTC)",
    "outcome",
    "budget",
    "live peak",
    "steady live",
    "process peak",
    "context",
    "retries",
    "step",
    "cause",
)

_LEGEND = (
    "Sizes are those of one device. *Live* is what the frameworks had allocated, *steady* the same "
    "without the first step, *process peak* what the device showed for the whole process, *context* "
    "the part of it that no framework counts. *Retries* are allocations that succeeded only after "
    "the framework's cache was given up."
)


def history_markdown(key: HistoryKey, runs: Sequence[PastRun]) -> str:
    """Return the page of one history, whose `runs` are newest first."""
    within = "outside a flow" if key.flow_name is None else f"in flow {escape(key.flow_name)}"
    about = f"Task {escape(key.task_name)} {within}, on {escape(key.device_name)}"
    if key.learn_by:
        about += f", for {escape(key.learn_by_words or key.learn_by, 200)} (`gpu:learn_by`)"
    rows = [
        (
            _time(run.ended_at),
            _OUTCOMES.get(run.outcome) or escape(run.outcome),
            format_bytes(run.budget_bytes) + ("" if run.cap_bytes is not None else ", no cap"),
            *(
                "–" if size_bytes is None else format_bytes(size_bytes)
                for size_bytes in (run.live_bytes, run.steady_live_bytes)
            ),
            format_bytes(run.process_bytes),
            format_bytes(run.context_bytes) if run.context_bytes else "–",
            str(run.alloc_retries or "–"),
            "–" if run.step_s is None else format_seconds(run.step_s),
            CAUSE_WORDS.get(run.cause, escape(run.cause)) or "–",
        )
        for run in runs
    ]
    parts = (
        f"**{_lesson(runs)}**",
        f"{about}. A `gpu:memory` tag takes precedence over what is learned.",
        table(_HEADS, rows, right=range(2, 9)),
        _LEGEND,
    )
    return "\n\n".join(parts) + "\n"


def history_summary(key: HistoryKey, runs: Sequence[PastRun]) -> str:
    """Return a history as one line: `train · nightly · batch_size=32 · NVIDIA H200 · next budget 6GiB`."""
    lesson = learn(runs)
    budget = "not known" if lesson is None else format_bytes(lesson.budget_bytes)
    parts = (
        key.task_name,
        key.flow_name,
        key.learn_by_words,
        key.device_name,
        f"next budget {budget}",
    )
    return clean(" · ".join(filter(None, parts)))


def _lesson(runs: Sequence[PastRun]) -> str:
    lesson = learn(runs)
    if lesson is None:
        known = "whose memory was measured " if any(r.outcome == "completed" for r in runs) else ""
        return f"No run {known}has completed: the next one is a first run, to find out."
    count = "1 completed run" if lesson.runs == 1 else f"{lesson.runs} completed runs"
    all_of_it = ", all that a device can give" if lesson.need_bytes > lesson.budget_bytes else ""
    text = (
        f"Next budget: {format_bytes(lesson.budget_bytes)} of each device{all_of_it}, "
        f"{format_bytes(lesson.context_bytes)} of it for the context, learned from {count}."
    )
    if lesson.floor_bytes:
        text += (
            f" Not less than {format_bytes(lesson.floor_bytes)}: with a smaller one it ran out of "
            "memory or slowed down."
        )
    if lesson.growth >= 1.005:
        text += (
            f" Runs differ in what they need: it is {lesson.growth:.2f} times as large for that."
        )
    return text


def _time(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        # Another program may have written the artifact.
        return "–"
