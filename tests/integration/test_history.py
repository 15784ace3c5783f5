"""Histories on a real Prefect API: kept by one process, read by another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.reports import publish
from prefect_gpu.reports.history import (
    PrefectHistory,
    delete_history,
    history_artifact_key,
    read_histories,
)
from prefect_gpu.reports.publish import Publisher
from prefect_gpu.scheduling.history import KEPT_RUNS, HistoryKey, PastRun, learn
from prefect_gpu.units import GIB, MIB
from tests.integration import engine_api as api

RUN = PastRun(
    ended_at=1_795_000_000.25,
    outcome="completed",
    budget_bytes=6 * GIB,
    cap_bytes=6 * GIB - 620 * MIB,
    live_bytes=5 * GIB,
    steady_live_bytes=4 * GIB,
    process_bytes=6 * GIB,
    context_bytes=620 * MIB,
    alloc_retries=2,
    step_s=0.027,
    run_s=41.2,
)


@pytest.fixture
def key(prefect_server: str) -> HistoryKey:
    """A history that no other test writes to."""
    return HistoryKey("Évaluate models", "evaluate", "NVIDIA H200", "0b", "", uuid4().hex[:12])


def connect() -> SyncPrefectClient:
    return get_client(sync_client=True)


@contextmanager
def opened() -> Iterator[PrefectHistory]:
    """A store as one flow run has it; on leaving, everything was published."""
    publisher = Publisher(connect, logger=logging.getLogger("reports"))
    yield PrefectHistory(connect, publisher)
    publisher.close(timeout_s=60)
    assert publisher.lost == 0


def numbered(number: int) -> PastRun:
    return replace(RUN, ended_at=RUN.ended_at + number)


def versions(key: HistoryKey) -> list[Artifact]:
    with connect() as client:
        answer = client.request(
            "POST",
            "/artifacts/filter",
            json={
                "artifacts": {"key": {"any_": [history_artifact_key(key)]}},
                "limit": 200,
                "sort": "CREATED_DESC",
            },
        )
    return [Artifact.model_validate(found) for found in answer.json()]


def test_a_later_flow_run_reads_what_an_earlier_one_kept(key: HistoryKey) -> None:
    with opened() as store:
        assert list(store.runs(key)) == []
        store.add(key, RUN)
        store.add(key, replace(RUN, outcome="oom", cause="own_cap", wanted_bytes=9 * GIB))
    with opened() as store:
        newest, oldest = store.runs(key)
        assert oldest == RUN
        assert newest == replace(RUN, outcome="oom", cause="own_cap", wanted_bytes=9 * GIB)
        assert list(store.runs(replace(key, device_name="NVIDIA L4"))) == []


def test_it_is_one_artifact_on_no_run_that_a_person_can_read(key: HistoryKey) -> None:
    with opened() as store:
        for number in range(3):
            store.add(key, numbered(number))
    with connect() as client:
        latest = Artifact.model_validate(
            client.request("GET", f"/artifacts/{history_artifact_key(key)}/latest").json()
        )
    assert latest.task_run_id is latest.flow_run_id is None
    assert latest.type == "markdown"
    assert latest.data.count("| completed |") == 3
    assert "**Next budget: 5.8GiB of each device" in latest.data
    assert [v.data.count("| completed |") for v in reversed(versions(key))] == [1, 2, 3]


def test_the_newest_runs_are_read_of_more_than_are_kept(key: HistoryKey) -> None:
    count = KEPT_RUNS + 5
    with opened() as store:
        for number in range(count):
            store.add(key, numbered(number))
    assert len(versions(key)) == count
    with opened() as store:
        assert list(store.runs(key)) == [numbered(n) for n in reversed(range(5, count))]


def test_hosts_that_add_at_the_same_time_lose_nothing(key: HistoryKey) -> None:
    with opened() as one, opened() as other, ThreadPoolExecutor(2) as pool:

        def work(store: PrefectHistory, first: int) -> None:
            for number in range(first, first + 8):
                store.runs(key)
                store.add(key, numbered(number))

        for future in [pool.submit(work, one, 0), pool.submit(work, other, 100)]:
            future.result(timeout=DEADLOCK_S)
    with opened() as store:
        found = {run.ended_at for run in store.runs(key)}
    assert found == {numbered(n).ended_at for n in (*range(8), *range(100, 108))}


def test_a_history_teaches_the_same_from_the_api_as_from_memory(key: HistoryKey) -> None:
    runs = [RUN, replace(RUN, budget_bytes=5 * GIB, outcome="oom", cause="own_cap")]
    with opened() as store:
        for run in runs:
            store.add(key, run)
    with opened() as store:
        lesson = learn(store.runs(key))
    assert lesson is not None and lesson == learn(runs)
    assert lesson.floor_bytes == 6 * GIB


def test_the_histories_of_a_task_are_listed_with_their_numbers(
    key: HistoryKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(key, learn_by="1", learn_by_lines='[["batch", "0", 16.0]]')
    other = replace(key, learn_by="2", learn_by_lines='[["batch", "0", 32.0]]').on("NVIDIA L4")
    with opened() as store:
        for each in (one, other, replace(one, flow_name="nightly"), replace(one, task_name="é")):
            store.add(each, RUN)
    monkeypatch.setattr(publish, "PAGE", 2)
    with opened() as store:
        third = replace(key, learn_by="3")
        store.add(third, RUN)
        found = set(store.siblings(key))
        assert found == {one, other, third}
        assert {each.lines for each in found} == {(), *(each.lines for each in (one, other))}
        assert set(store.siblings(replace(key, qualified_name="train"))) == set()


def test_an_api_that_is_away_costs_one_error_and_counted_runs(
    key: HistoryKey, caplog: pytest.LogCaptureFixture
) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        publisher = Publisher(connect, logger=logging.getLogger("reports"))
        store = PrefectHistory(connect, publisher)
    # The settings that held where the store was made are those of the flow.
    with pytest.raises(OSError, match="ConnectError"):
        store.runs(key)
    with pytest.raises(OSError, match="ConnectError"):
        store.siblings(key)
    store.add(key, RUN)
    assert list(store.runs(key)) == [RUN]
    api.until(lambda: bool(publisher._last_error))
    publisher.close(timeout_s=2)
    assert publisher.lost == 1 and "1 memory report was lost: ConnectError" in caplog.text
    assert versions(key) == []


def test_a_flow_that_runs_keeps_what_it_has_read_of_a_history_that_is_deleted(
    key: HistoryKey,
) -> None:
    with opened() as store:
        store.add(key, RUN)
    with opened() as running:
        assert list(running.runs(key)) == [RUN]
        with connect() as client:
            assert delete_history(history_artifact_key(key), client) == 1
            assert delete_history(history_artifact_key(key), client) == 0
        assert list(running.runs(key)) == [RUN]
        running.add(key, numbered(7))
    with opened() as store:
        assert list(store.runs(key)) == [numbered(7)]


def test_histories_are_read_with_the_keys_that_they_were_kept_with(
    key: HistoryKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = replace(key, learn_by_words="batch=3")
    with opened() as store:
        store.add(named, RUN)
        store.add(named, numbered(1))
        store.add(key.on("NVIDIA L4"), numbered(2))
    with connect() as client:
        client.create_artifact(ArtifactCreate(key="gpu-history-odd", type="markdown", data=""))
        client.create_artifact(ArtifactCreate(key="not-gpu-history-odd", type="markdown", data=""))
        monkeypatch.setattr(publish, "PAGE", 2)
        found = {each.artifact_key: each for each in read_histories(client)}
        ours = read_histories(client, lambda found: found == key)
    kept = found[history_artifact_key(key)]
    assert kept.key == named and kept.key.learn_by_words == "batch=3"
    assert kept.runs == (numbered(1), RUN)
    assert found[history_artifact_key(key.on("NVIDIA L4"))].runs == (numbered(2),)
    assert "gpu-history-odd" not in found and "not-gpu-history-odd" not in found
    assert {each.key.task_name for each in ours} == {key.task_name}
