"""Histories as artifacts, on a made-up API, and in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from prefect_gpu.cli.run_commands import _history_json
from prefect_gpu.clock import FakeClock
from prefect_gpu.reports import publish
from prefect_gpu.reports.history import (
    AWAY_S,
    READ_TRIES,
    KeptHistory,
    MemoryHistory,
    PrefectHistory,
    delete_history,
    history_artifact_key,
    history_markdown,
    history_summary,
)
from prefect_gpu.reports.publish import Publisher
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, HistoryStore, PastRun
from prefect_gpu.units import GIB, MIB
from tests.fakes.reports import PATIENCE_S, answered

KEY = HistoryKey("Évaluate models", "evaluate", "NVIDIA H200", "0123456789ab", "", "nightly")
OTHER = HistoryKey("train", "train", "NVIDIA H200")
#: Changes of a run that ran out of memory.
SHORT: dict[str, Any] = {
    "outcome": "oom",
    "cause": "own_cap",
    "budget_bytes": 4 * GIB,
    "cap_bytes": 3 * GIB,
}


def run(number: int = 0, **changes: Any) -> PastRun:
    fields: dict[str, Any] = {
        "ended_at": 1_795_000_000.0 + number,
        "outcome": "completed",
        "budget_bytes": 6 * GIB,
        "live_bytes": 4 * GIB,
        "process_bytes": 5 * GIB,
        "context_bytes": 600 * MIB,
    }
    return PastRun(**{**fields, **changes})


class FakeAPI:
    """Keeps artifacts as Prefect does; raises the exceptions in `errors` first."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.artifacts: list[dict[str, Any]] = []
        self.asked: list[str] = []
        #: Readings of a key wait for its event, if it has one.
        self.gates: dict[str, threading.Event] = {}
        self.waiting = threading.Semaphore(0)
        self.retries: list[int] = []
        self._lock = threading.Lock()

    @contextmanager
    def connect(self) -> Iterator[SyncPrefectClient]:
        yield cast(SyncPrefectClient, self)

    def create_artifact(self, artifact: Any) -> None:
        with self._lock:
            if self.errors:
                raise self.errors.pop(0)
            self.artifacts.insert(0, artifact.model_dump(mode="json", exclude_unset=True))

    def request(self, method: str, path: str, *, json: Any, timeout: float) -> httpx.Response:
        assert (method, path, json["sort"]) == ("POST", "/artifacts/filter", "CREATED_DESC")
        assert 0 < timeout <= PATIENCE_S
        (key,) = json["artifacts"]["key"]["any_"]
        with self._lock:
            self.asked.append(key)
            self.retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        self.waiting.release()
        if key in self.gates:
            assert self.gates[key].wait(PATIENCE_S)
        with self._lock:
            if self.errors:
                raise self.errors.pop(0)
            found = [a for a in self.artifacts if a["key"] == key]
        return httpx.Response(200, json=found[: json["limit"]])


class Setting:
    """A store on an API, with its publisher and clock."""

    def __init__(self, api: FakeAPI | None = None) -> None:
        self.api = api or FakeAPI()
        self.clock = FakeClock()
        self.publisher = Publisher(
            self.api.connect, logger=logging.getLogger("reports"), retry_delays_s=(0.001, 0.001)
        )
        self.store: HistoryStore = PrefectHistory(
            self.api.connect, self.publisher, clock=self.clock
        )

    def close(self) -> None:
        self.publisher.close(PATIENCE_S)


def kept(*numbers: int) -> FakeAPI:
    """An API that an earlier process has given these runs of `KEY`."""
    it = Setting()
    for number in numbers:
        it.store.add(KEY, run(number))
    it.close()
    return it.api


# Every store.


@pytest.fixture(params=["memory", "prefect"])
def store(request: pytest.FixtureRequest) -> Iterator[HistoryStore]:
    if request.param == "memory":
        yield MemoryHistory()
        return
    it = Setting()
    yield it.store
    it.close()


def test_an_added_run_counts_at_once_and_the_newest_is_first(store: HistoryStore) -> None:
    assert list(store.runs(KEY)) == []
    store.add(KEY, run(1))
    assert list(store.runs(KEY)) == [run(1)]
    store.add(KEY, run(2))
    assert list(store.runs(KEY)) == [run(2), run(1)]
    assert list(store.runs(OTHER)) == []


def test_only_the_last_runs_are_kept(store: HistoryStore) -> None:
    for number in range(KEPT_RUNS + 5):
        store.add(KEY, run(number))
    assert list(store.runs(KEY)) == [run(n) for n in reversed(range(5, KEPT_RUNS + 5))]


def test_the_keys_of_a_tasks_histories_are_its_siblings() -> None:
    store = MemoryHistory()
    alike = [KEY, KEY.on("NVIDIA L4"), replace(KEY, learn_by="1")]
    for key in (*alike, OTHER, replace(KEY, flow_name=None), replace(KEY, qualified_name="f")):
        store.add(key, run())
    assert set(store.siblings(replace(KEY, learn_by="2"))) == set(alike)


def test_equal_runs_of_different_processes_are_both_kept(store: HistoryStore) -> None:
    store.add(KEY, run())
    store.add(KEY, run())
    assert len(store.runs(KEY)) == 2


def test_threads_lose_none_of_each_others_runs(store: HistoryStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: (store.add(KEY, run(n)), store.runs(KEY)), range(KEPT_RUNS)))
    assert {r.ended_at for r in store.runs(KEY)} == {run(n).ended_at for n in range(KEPT_RUNS)}


# The store on Prefect's API.


def test_a_later_store_finds_what_an_earlier_one_kept() -> None:
    later = Setting(kept(0, 1, 2))
    assert list(later.store.runs(KEY)) == [run(2), run(1), run(0)]
    assert list(later.store.runs(OTHER)) == []


def test_an_artifact_is_of_no_run_and_says_what_it_is_about() -> None:
    it = Setting()
    it.store.add(KEY, run(cap_bytes=5 * GIB))
    it.close()
    (artifact,) = it.api.artifacts
    assert artifact["key"] == history_artifact_key(KEY)
    assert artifact["key"].startswith("gpu-history-evaluate-models-")
    assert not {"task_run_id", "flow_run_id"} & set(artifact)
    assert artifact["metadata_"] == {
        "schema": "2",
        "version": artifact["metadata_"]["version"],
        "flow_name": "nightly",
        "task_name": "Évaluate models",
        "qualified_name": "evaluate",
        "device_name": "NVIDIA H200",
        "learn_by": "0123456789ab",
        **run(cap_bytes=5 * GIB).to_texts(),
    }


def test_a_key_is_read_once_then_this_process_adds_to_it() -> None:
    it = Setting(kept(1))
    for number in (2, 3):
        it.store.runs(KEY)
        it.store.add(KEY, run(number))
    assert list(it.store.runs(KEY)) == [run(3), run(2), run(1)]
    assert len(it.api.asked) == 1
    it.close()


def test_an_own_run_that_the_api_has_already_counts_once() -> None:
    it = Setting()
    it.store.add(KEY, run(1))
    it.close()  # it has arrived
    it.store.add(KEY, run(2))  # and this one never does
    assert list(it.store.runs(KEY)) == [run(2), run(1)]


def test_a_run_that_was_published_twice_counts_once() -> None:
    api = kept(1, 2)
    # As when the API kept it, but its answer was lost.
    api.artifacts.insert(0, api.artifacts[0])
    assert list(Setting(api).store.runs(KEY)) == [run(2), run(1)]


UNREADABLE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "without the flow in its key": {"schema": "1"},
    "of a later schema": {"schema": "3"},
    "null": {"outcome": None},
    "a null number": {"budget_bytes": None},
    "no number": {"budget_bytes": "6GiB"},
    "a version that is nothing": {"version": None},
}


@pytest.mark.parametrize("metadata", UNREADABLE.values(), ids=UNREADABLE)
def test_a_version_that_cannot_be_read_is_left_out(metadata: dict[str, Any] | None) -> None:
    api = kept(1, 2, 3)
    broken = api.artifacts[1]
    broken["metadata_"] = {**broken["metadata_"], **metadata} if metadata else metadata
    assert list(Setting(api).store.runs(KEY)) == [run(3), run(1)]


def test_fields_of_a_later_version_do_not_hide_a_run() -> None:
    api = kept(0)
    api.artifacts[0]["metadata_"]["colour"] = "green"
    assert list(Setting(api).store.runs(KEY)) == [run()]


def test_only_threads_that_want_the_same_history_wait_for_its_reading() -> None:
    it = Setting(kept(0))
    gate = it.api.gates[history_artifact_key(KEY)] = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        same = [pool.submit(it.store.runs, KEY) for _ in range(3)]
        assert it.api.waiting.acquire(timeout=PATIENCE_S)
        # While the first reading hangs, another key is read, and runs are added.
        assert list(pool.submit(it.store.runs, OTHER).result(PATIENCE_S)) == []
        it.store.add(KEY, run(1))
        assert not any(future.done() for future in same)
        gate.set()
        answers = [list(future.result(PATIENCE_S)) for future in same]
    assert answers == [[run(1), run()]] * 3
    assert it.api.asked.count(history_artifact_key(KEY)) == 1
    it.close()


def test_a_reading_uses_no_retries_of_prefects_own() -> None:
    it = Setting()
    before = PREFECT_CLIENT_MAX_RETRIES.value()
    it.store.runs(KEY)
    assert it.api.retries == [0] and PREFECT_CLIENT_MAX_RETRIES.value() == before != 0


def test_a_connection_error_is_tried_again_and_a_refusal_is_not() -> None:
    it = Setting()
    it.api.errors = [OSError("reset")] * (READ_TRIES - 1)
    assert list(it.store.runs(KEY)) == []
    assert len(it.api.asked) == READ_TRIES
    it.api.errors = [answered(401)]
    with pytest.raises(OSError, match="PrefectHTTPStatusError: 401"):
        it.store.runs(OTHER)
    assert len(it.api.asked) == READ_TRIES + 1


def test_an_api_that_does_not_answer_is_not_called_for_a_while() -> None:
    it = Setting()
    it.api.errors = [httpx.ConnectError("refused")] * READ_TRIES
    for key in (KEY, KEY, OTHER):
        with pytest.raises(OSError, match="ConnectError: refused"):
            it.store.runs(key)
    assert len(it.api.asked) == READ_TRIES
    it.clock.advance(AWAY_S)
    assert list(it.store.runs(KEY)) == []
    assert len(it.api.asked) == READ_TRIES + 1


def test_runs_of_this_process_replace_those_of_an_api_that_does_not_answer() -> None:
    it = Setting(kept(1))
    it.api.errors = [httpx.ConnectError("refused")] * READ_TRIES
    with pytest.raises(OSError, match="refused"):
        it.store.runs(KEY)
    it.store.add(KEY, run(2))
    assert list(it.store.runs(KEY)) == [run(2)]
    it.clock.advance(AWAY_S)
    assert list(it.store.runs(KEY)) == [run(2), run(1)]
    it.close()


def test_a_client_that_cannot_be_opened_is_an_api_that_does_not_answer() -> None:
    it = Setting()

    def closed() -> Any:
        raise RuntimeError("the client of this task runner is closed")

    with pytest.raises(OSError, match="RuntimeError: the client of this task runner is closed"):
        PrefectHistory(closed, it.publisher, clock=it.clock).runs(KEY)


def test_a_run_that_cannot_be_kept_counts_here_and_is_counted_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Setting()
    it.api.errors = [answered(422)]
    it.store.add(KEY, run())
    it.close()
    assert list(it.store.runs(KEY)) == [run()]
    assert it.publisher.lost == 1 and "was lost: PrefectHTTPStatusError: 422" in caplog.text


@given(st.builds(HistoryKey, st.text(max_size=120), *[st.text()] * 4, st.none() | st.text()))
def test_any_history_has_a_key_of_its_own_that_prefect_accepts(key: HistoryKey) -> None:
    front, _, digest = history_artifact_key(key).rpartition("-")
    assert front.startswith("gpu-history") and len(front) <= 87
    assert set(front) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and "--" not in front
    assert len(digest) == 12 and int(digest, 16) >= 0
    assert history_artifact_key(key) == history_artifact_key(replace(key, learn_by_words="x=1"))


def test_every_part_of_a_key_counts() -> None:
    names = ("abcd", "Abcd", "axcd", "abxd", "abcx")
    flows = ("", "a flow", "another flow")
    parts = [
        *map(tuple, names),
        *(("a", "b", end, "") for end in ("c", "cd")),
        *(("a", "b", "c", "d", "", flow) for flow in flows),
        *(("x" * length, "b", "c", "d") for length in (200, 201)),
    ]
    keys = {history_artifact_key(HistoryKey(*each)) for each in parts}
    assert len(keys) == 12 and max(map(len, keys)) <= 100


# The page of a history.


def test_the_page_of_a_history_has_the_next_budget_and_every_run() -> None:
    runs = [
        run(60, wanted_bytes=5 * GIB, **SHORT),
        run(0, steady_live_bytes=3 * GIB, step_s=0.027, alloc_retries=2),
    ]
    page = history_markdown(KEY, runs)
    assert page.startswith(
        "**Next budget: 6GiB of each device, 600MiB of it for the context, learned from 1 "
        "completed run. Not less than 6GiB: with a smaller one it ran out of memory or slowed "
        "down.**\n"
    )
    assert (
        "Task Évaluate models in flow nightly, on NVIDIA H200, for 0123456789ab (`gpu:learn_by`). A `gpu:memory` "
        "tag takes precedence"
    ) in page
    said = replace(KEY, learn_by_words="batch_size=32")
    assert r"for batch_size=32 (`gpu:learn_by`)" in history_markdown(said, runs)
    assert history_summary(said, runs) == (
        "Évaluate models · nightly · batch_size=32 · NVIDIA H200 · next budget 6GiB"
    )
    assert history_summary(OTHER, []).endswith(" · next budget not known")
    rows = [line for line in page.splitlines() if line.startswith("| 2026")]
    assert rows == [
        "| 2026-11-18 11:07 | out of memory | 4GiB | 4GiB | – | 5GiB | 600MiB | – | – | its own cap |",
        "| 2026-11-18 11:06 | completed | 6GiB, no cap | 4GiB | 3GiB | 5GiB | 600MiB | 2 | 27ms | – |",
    ]


def test_the_page_of_a_history_says_that_runs_differ() -> None:
    page = history_markdown(KEY, [run(3, live_bytes=6 * GIB), run(2, **SHORT), run(1)])
    assert "Runs differ in what they need: it is 1.50 times as large for that.**" in page


def test_the_page_of_a_history_without_a_completed_run_announces_a_probe() -> None:
    page = history_markdown(OTHER, [run(outcome="died", cause="unknown", ended_at=1e300)])
    assert "the next one is a first run, to find out" in page
    assert "\n| died |" in page and "| unknown |" in page
    assert "learn_by" not in page
    assert "Task train outside a flow, on NVIDIA H200." in page


def test_the_page_of_a_history_escapes_names() -> None:
    page = history_markdown(HistoryKey("a|b\n<i>", "x", "c|d"), [run(outcome="a|b", cause="c|d")])
    (row,) = [line for line in page.splitlines() if line.startswith("| 2026")]
    assert "| a\\|b |" in row and "| c\\|d |" in row
    assert "<i>" not in page


def test_a_list_of_histories_counts_task_runs() -> None:
    twice = [run(2, task_run_id="a"), run(1, task_run_id="a"), run(0, task_run_id="b")]
    history = KeptHistory("gpu-history-train-1f", OTHER, tuple(twice))
    assert _history_json(history)["runs"] == 2
    # Of processes whose task run is not known, each counts.
    assert _history_json(replace(history, runs=(run(1), run(0))))["runs"] == 2


class Versions:
    """The API's view of one history; another command deletes `others` versions after the first page was read."""

    def __init__(self, others: int) -> None:
        self.there = [str(UUID(int=number)) for number in range(5)]
        self.others = others

    def request(
        self, method: str, path: str, json: dict[str, Any], timeout: float
    ) -> httpx.Response:
        page = self.there[json["offset"] : json["offset"] + json["limit"]]
        del self.there[: self.others]
        self.others = 0
        return httpx.Response(200, json=[{"id": each} for each in page])

    def delete_artifact(self, artifact_id: UUID) -> None:
        if str(artifact_id) not in self.there:
            raise ObjectNotFound(Exception())
        self.there.remove(str(artifact_id))


@pytest.mark.parametrize("others", [0, 1, 2])
def test_all_versions_are_deleted_though_another_command_deletes_some(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PAGE", 2)
    api = Versions(others)
    assert delete_history("key", cast(SyncPrefectClient, api)) == 5 - others
    assert not api.there
