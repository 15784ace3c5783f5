from __future__ import annotations

import gc
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError

from prefect_gpu.reports import publish
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.publish import Publisher, artifact_key, publish_flow_report
from tests.fakes.reports import flow_reports, task_report

PATIENCE_S = 60.0


class FakeAPI:
    """Takes artifacts; fails with what is in `errors` first; opens only while `go` is set."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.keys: list[str] = []
        self.opened = 0
        self.go = threading.Event()
        self.go.set()

    @contextmanager
    def connect(self) -> Iterator[SyncPrefectClient]:
        self.opened += 1
        self.go.wait(PATIENCE_S)
        yield cast(SyncPrefectClient, self)

    def create_artifact(self, artifact: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.keys.append(artifact.key)


def answered(status: int) -> PrefectHTTPStatusError:
    request = httpx.Request("POST", "http://api/artifacts/")
    return PrefectHTTPStatusError(
        f"{status}", request=request, response=httpx.Response(status, request=request)
    )


def publisher(api: FakeAPI) -> Publisher:
    return Publisher(
        api.connect, logger=logging.getLogger("reports"), retry_delays_s=(0.001, 0.001)
    )


@given(st.text(max_size=300), st.sampled_from(["gpu-memory", "gpu-flow", "", "!!"]))
def test_any_name_makes_a_key_that_prefect_accepts(name: str, prefix: str) -> None:
    key = artifact_key(prefix, name)
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", key)
    assert len(key) <= 100
    assert key == artifact_key(prefix, name)


def test_keys_read_like_their_names_and_stay_apart() -> None:
    assert artifact_key("gpu-memory", "Evaluate ResNet_50!") == "gpu-memory-evaluate-resnet-50"
    assert artifact_key("gpu-memory", "評価").startswith("gpu-memory-")
    assert artifact_key("gpu-memory", "!") != artifact_key("gpu-memory", "?")
    assert artifact_key("gpu-memory", "x" * 200) != artifact_key("gpu-memory", "x" * 201)


def test_reports_arrive_in_order(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeAPI()
    it = publisher(api)
    it.publish(task_report())
    it.put(partial(publish_flow_report, flow_reports(), flow_name="nightly", flow_run_id=None))
    it.close(PATIENCE_S)
    assert api.keys == ["gpu-memory-evaluate", "gpu-flow-nightly"]
    assert it.lost == 0 and not caplog.records


def test_a_connection_error_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeAPI(OSError("reset"), answered(503))
    it = publisher(api)
    it.publish(task_report())
    it.close(PATIENCE_S)
    assert len(api.keys) == 1 and api.opened == 3 and not caplog.records


def test_a_refusal_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeAPI(answered(422))
    it = publisher(api)
    it.publish(task_report())
    it.close(PATIENCE_S)
    assert api.keys == [] and it.lost == 1 and api.errors == []
    assert "1 memory report was lost: PrefectHTTPStatusError: 422" in caplog.text


def test_an_api_that_does_not_answer_costs_one_try_for_each_report_after_the_first() -> None:
    api = FakeAPI(*(OSError("away") for _ in range(4)))
    it = publisher(api)
    for _ in range(3):
        it.publish(task_report())
    it.close(PATIENCE_S)
    # Three tries for the first, one for the second, and the third arrives.
    assert api.opened == 5 and it.lost == 2 and len(api.keys) == 1


def test_a_hanging_api_loses_reports_but_not_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publish, "WAITING_LIMIT", 2)
    api = FakeAPI()
    api.go.clear()
    it = publisher(api)
    for _ in range(3):
        it.publish(task_report())
    it.close(0.01)
    it.close(0.01)
    (record,) = caplog.records
    assert "3 memory reports were lost" in record.getMessage()
    assert "2 others were waiting" in record.getMessage()
    api.go.set()


def test_a_report_after_the_end_is_counted_and_never_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = publisher(FakeAPI())
    it.close(PATIENCE_S)
    assert not caplog.records
    it.publish(task_report())
    it.close(PATIENCE_S)
    assert "1 memory report was lost: it came after" in caplog.text


def test_a_published_report_is_not_kept_in_memory() -> None:
    class Watched(TaskReport):
        __slots__ = ("__weakref__",)

    api = FakeAPI()
    it = publisher(api)
    base = task_report()
    report = Watched(**{name: getattr(base, name) for name in TaskReport.__dataclass_fields__})
    watcher = weakref.ref(report)
    gone = threading.Event()
    weakref.finalize(report, gone.set)
    it.publish(report)
    del report
    assert gone.wait(PATIENCE_S)
    gc.collect()
    assert watcher() is None
    it.close(PATIENCE_S)


def test_only_the_newest_waiting_jobs_of_a_series_are_published() -> None:
    api = FakeAPI()
    api.go.clear()
    done: list[str] = []
    made = publisher(api)

    def put(name: str, series: str | None) -> None:
        made.put(lambda client: done.append(name), series=series, most=2)

    # The thread has this one, and hangs in opening its client.
    put("first", None)
    for index in range(5):
        put(f"a{index}", "a")
        put(f"alone{index}", None)
    put("b0", "b")
    api.go.set()
    made.close(PATIENCE_S)
    assert made.lost == 0
    in_order = [f"alone{i}" for i in range(3)] + ["a3", "alone3", "a4", "alone4", "b0"]
    assert done == ["first", *in_order]


def test_jobs_of_a_series_that_come_one_by_one_are_all_published() -> None:
    api = FakeAPI()
    made = publisher(api)
    done: list[int] = []
    for index in range(5):
        published = threading.Event()

        def job(client: object, index: int = index, published: threading.Event = published) -> None:
            done.append(index)
            published.set()

        made.put(job, series="a", most=1)
        assert published.wait(PATIENCE_S)
    made.close(PATIENCE_S)
    assert done == list(range(5))


def test_a_dropped_job_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "WAITING_LIMIT", 4)
    api = FakeAPI()
    api.go.clear()
    done: list[int] = []
    made = publisher(api)
    made.put(lambda client: done.append(-1))
    for index in range(20):
        made.put(lambda client, index=index: done.append(index), series="a", most=1)  # type: ignore[misc]
    api.go.set()
    made.close(PATIENCE_S)
    assert made.lost == 0
    assert done[-1] == 19


def test_a_thread_that_cannot_be_started_loses_no_report_if_a_later_one_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    api = FakeAPI()
    made = publisher(api)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.publish(task_report())
    made.publish(task_report())
    made.close(PATIENCE_S)
    assert len(api.keys) == 2
    assert not caplog.records


def test_reports_that_no_thread_can_publish_are_lost_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = publisher(FakeAPI())
    made.publish(task_report())
    made.close(PATIENCE_S)
    assert (
        "1 memory report was lost: the thread 'prefect-gpu-publisher' could not be started"
        in caplog.text
    )
