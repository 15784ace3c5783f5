from __future__ import annotations

import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.settings import PREFECT_HOME, temporary_settings

from prefect_gpu.live.progress import RunCounts
from prefect_gpu.reports import publish
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.publish import ProgressArtifact, Publisher, artifact_key
from tests.fakes.ctrl_c import press_ctrl_c_in
from tests.fakes.reports import PATIENCE_S, FakeAPI, answered, flow_reports, task_report


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Iterator[Path]:
    """Where reports are written that cannot be published."""
    with temporary_settings({PREFECT_HOME: tmp_path / "home"}):
        yield tmp_path / "home"


def written(home: Path) -> dict[str, str]:
    """Return all files under a folder, by the names in it."""
    return {path.name: path.read_text("utf-8") for path in home.rglob("*") if path.is_file()}


def publisher(api: FakeAPI, delay_s: float = 0.001) -> Publisher:
    logger = logging.getLogger("reports")
    return Publisher(api.connect, logger=logger, retry_delays_s=(delay_s, delay_s))


def publish_all(it: Publisher, *names: str) -> None:
    """Publish a report of each task, and close."""
    for name in names:
        it.publish(task_report(task_name=name))
    it.close(PATIENCE_S)


@pytest.fixture
def hung() -> Iterator[FakeAPI]:
    """An API that does not answer until `go` is set."""
    api = FakeAPI()
    api.go.clear()
    yield api
    api.go.set()


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
    it.publish_flow(flow_reports(), flow_name="nightly", flow_run_id=None)
    it.close(PATIENCE_S)
    assert api.keys == ["gpu-memory-evaluate", "gpu-flow-nightly"]
    assert it.lost == 0 and not caplog.records


def test_a_connection_error_is_tried_again(caplog: pytest.LogCaptureFixture, home: Path) -> None:
    api = FakeAPI(OSError("reset"), answered(503))
    publish_all(publisher(api), "one")
    assert len(api.keys) == 1 and api.opened == 3
    assert not caplog.records and written(home) == {}


def test_a_report_that_the_api_refuses_is_written_to_a_file_at_once(
    caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    api = FakeAPI(answered(422))
    it = publisher(api)
    flow_run_id = uuid4()
    it.publish(task_report(task_name="../a b/☃", flow_run_id=flow_run_id))
    it.close(PATIENCE_S)
    assert api.keys == [] and (it.saved, it.lost) == (1, 0) and api.opened == 1
    folder = home / "prefect-gpu" / "reports" / str(flow_run_id)
    ((name, text),) = written(folder).items()
    assert name == "gpu-memory-a-b-1.md" and "data:image/svg+xml" in text
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"1 memory report was not published but written to {folder}: PrefectHTTPStatusError: 422."
    )


def test_an_api_that_is_away_for_long_gets_all_reports_in_order_when_it_is_back(
    caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    api = FakeAPI(*(httpx.ConnectError("away") for _ in range(50)))
    publish_all(publisher(api), "one", "two", "three")
    assert api.keys == ["gpu-memory-one", "gpu-memory-two", "gpu-memory-three"]
    assert api.opened == 53 and not caplog.records and written(home) == {}


@pytest.mark.parametrize("error", [answered(500), httpx.ReadTimeout("slow"), ValueError("odd")])
def test_a_report_that_fails_by_itself_does_not_hold_up_the_others(
    error: Exception, home: Path
) -> None:
    api = FakeAPI(*[error] * publish.TRIES)
    publish_all(publisher(api), "one", "two")
    assert api.keys == ["gpu-memory-two"]
    assert list(written(home)) == ["gpu-memory-one-1.md"]


def test_the_time_for_which_an_api_asks_not_to_be_called_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ("7", "99999999", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "")
    errors = [answered(429, **{"Retry-After": text}) for text in texts]
    waits_s = [publish.read_retry_after(each) for each in (*errors, answered(503), OSError("away"))]
    assert waits_s == [7.0, publish.LONGEST_WAIT_S, *[0.0] * 5]
    api = FakeAPI(answered(429, **{"Retry-After": "200"}))
    it = publisher(api)
    it.publish(task_report())
    while api.errors:
        threading.Event().wait(0.001)
    it.publish(task_report())
    it.close(0.01)
    assert api.opened == 1 and it.saved == 2


def test_reports_that_cannot_be_written_either_are_lost_with_both_reasons(
    caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    home.mkdir(exist_ok=True)
    (home / "prefect-gpu").touch()
    publish_all(publisher(FakeAPI(answered(422))), "one")
    (record,) = caplog.records
    assert "1 memory report was lost: PrefectHTTPStatusError: 422; " in record.getMessage()
    assert "prefect-gpu" in record.getMessage()


def test_a_hanging_api_delays_the_end_only_by_what_is_allowed_and_loses_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: Path, hung: FakeAPI
) -> None:
    monkeypatch.setattr(publish, "WAITING_LIMIT", 2)
    it = publisher(hung)
    for _ in range(3):
        it.publish(task_report())
    it.close(0.01)
    it.close(0.01)
    (record,) = caplog.records
    assert "3 memory reports were not published but written to" in record.getMessage()
    assert "2 others were waiting" in record.getMessage()
    assert len(written(home)) == 3


def interrupted(it: Publisher) -> None:
    press_ctrl_c_in(Publisher.close)
    with pytest.raises(KeyboardInterrupt):
        it.close(PATIENCE_S)


def test_ctrl_c_while_it_publishes_loses_no_report(home: Path, hung: FakeAPI) -> None:
    it = publisher(hung)
    for _ in range(3):
        it.publish(task_report())
    interrupted(it)
    hung.go.set()
    it.close(PATIENCE_S)
    assert len(hung.keys) == 3 and not it.saved and not home.exists()


def test_ctrl_c_twice_while_it_publishes_writes_what_is_left_to_files(
    caplog: pytest.LogCaptureFixture, home: Path, hung: FakeAPI
) -> None:
    it = publisher(hung)
    for _ in range(3):
        it.publish(task_report())
    interrupted(it)
    interrupted(it)
    it.end("told to end")
    it.end("told again")
    (record,) = caplog.records
    assert record.getMessage().startswith("3 memory reports were not published but written to")
    assert ": told to end." in record.getMessage()
    assert len(written(home)) == 3


def test_a_report_after_the_end_is_written_to_a_file_and_never_raises(
    caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    it = publisher(FakeAPI())
    it.close(PATIENCE_S)
    assert not caplog.records
    publish_all(it, "late")
    assert "1 memory report was not published" in caplog.text
    assert "it came after the flow" in caplog.text
    assert len(written(home)) == 1


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


def test_only_the_newest_waiting_jobs_of_a_series_are_published(hung: FakeAPI) -> None:
    done: list[str] = []
    made = publisher(hung)

    def put(name: str, series: str | None) -> None:
        made.put(lambda client: done.append(name), series=series, most=2)

    # The thread has taken this job, and hangs in opening its client.
    put("first", None)
    for index in range(5):
        put(f"a{index}", "a")
        put(f"alone{index}", None)
    put("b0", "b")
    hung.go.set()
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


def test_a_dropped_job_does_not_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch, hung: FakeAPI
) -> None:
    monkeypatch.setattr(publish, "WAITING_LIMIT", 4)
    done: list[int] = []
    made = publisher(hung)
    made.put(lambda client: done.append(-1))
    for index in range(20):
        made.put(lambda client, index=index: done.append(index), series="a", most=1)  # type: ignore[misc]
    hung.go.set()
    made.close(PATIENCE_S)
    assert made.lost == 0
    assert done[-1] == 19


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_loses_no_report_if_a_later_one_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api = FakeAPI()
    made = publisher(api)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.publish(task_report())
    publish_all(made, "later")
    assert len(api.keys) == 2
    assert not caplog.records


def test_reports_that_no_thread_can_publish_are_written_to_files_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    publish_all(publisher(FakeAPI()), "one")
    assert "1 memory report was not published but written to" in caplog.text
    assert "the thread 'prefect-gpu-publisher' could not be started" in caplog.text


class ProgressAPI(FakeAPI):
    """Accepts also a progress artifact and its changes."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(*errors)
        #: What the artifact has said, in order.
        self.said: list[tuple[float, str]] = []
        self.changed = threading.Condition()
        self.takes_progress = True
        #: Set: the API answers that it has created the progress artifact.
        self.answers = threading.Event()
        self.answers.set()

    def create_artifact(self, artifact: Any) -> Any:
        if artifact.type == "progress" and not self.takes_progress:
            raise OSError("reset")
        super().create_artifact(artifact)
        if artifact.type == "progress":
            self._say(artifact.data, artifact.description)
            assert self.answers.wait(PATIENCE_S)
        return artifact.model_copy(update={"id": UUID(int=7)})

    def request(self, method: str, path: str, *, path_params: Any, json: Any) -> None:
        assert (method, path, path_params) == ("PATCH", "/artifacts/{id}", {"id": UUID(int=7)})
        self._say(json["data"], json["description"])

    def _say(self, share: float, words: str) -> None:
        with self.changed:
            self.said.append((share, words))
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.said) >= count, PATIENCE_S)


class Flow:
    """A flow whose progress is read."""

    def __init__(self) -> None:
        self.counts = RunCounts(4, 1, 3)
        self.read = threading.Semaphore(0)

    def artifact(self) -> ProgressArtifact:
        return ProgressArtifact(self._read, flow_name="nightly", flow_run_id=uuid4())

    def _read(self) -> RunCounts:
        self.read.release()
        return self.counts

    def wait_until_read(self) -> None:
        # The first reading may have begun before the call.
        for _ in range(2):
            assert self.read.acquire(timeout=PATIENCE_S)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is published at once."""
    monkeypatch.setattr(publish, "PROGRESS_S", 0.001)
    monkeypatch.setattr(publish, "PROGRESS_FAILED_S", 0.001)


def test_progress_is_published_where_there_is_news_and_how_the_flow_has_ended(soon: None) -> None:
    api, flow = ProgressAPI(), Flow()
    it = publisher(api)
    it.show_progress(flow.artifact())
    api.wait_for(1)
    flow.wait_until_read()
    flow.counts = RunCounts(4, 1, 1, {"Completed": 2})
    api.wait_for(2)
    flow.counts = RunCounts(4, 0, 0, {"Completed": 4}, over=True)
    it.close(PATIENCE_S)
    assert api.keys == ["gpu-progress-nightly"]
    assert api.said == [
        (0.0, "0 of 4 ended, 1 running, 3 waiting for a device"),
        (50.0, "2 of 4 ended, 1 running, 1 waiting for a device"),
        (100.0, "4 of 4 ended: 4 Completed"),
    ]


def test_a_flow_that_is_over_soon_has_no_progress_artifact() -> None:
    api, flow = ProgressAPI(), Flow()
    it = publisher(api)
    it.show_progress(flow.artifact())
    publish_all(it, "evaluate")
    assert api.keys == ["gpu-memory-evaluate"] and api.said == []


def test_a_flow_may_end_while_its_progress_artifact_is_created(soon: None) -> None:
    api, flow = ProgressAPI(), Flow()
    api.answers.clear()
    it = publisher(api)
    it.show_progress(flow.artifact())
    api.wait_for(1)
    flow.counts = RunCounts(4, 0, 0, {"Completed": 4}, over=True)
    closing = threading.Thread(target=it.close, args=[PATIENCE_S])
    closing.start()
    with it._changed:
        assert it._changed.wait_for(lambda: it._closed, PATIENCE_S)
    api.answers.set()
    closing.join()
    assert [share for share, _ in api.said] == [0.0, 100.0]


def test_progress_that_the_api_does_not_take_is_left_out_and_no_report_is_lost(
    soon: None, caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    api, flow = ProgressAPI(OSError("reset"), answered(500), answered(422)), Flow()
    # A report that waited for a progress artifact to be tried again would wait for ever.
    it = publisher(api, delay_s=1e4)
    it.show_progress(flow.artifact())
    api.wait_for(1)
    publish_all(it, "evaluate")
    assert api.keys == ["gpu-progress-nightly", "gpu-memory-evaluate"]
    assert it.lost == it.saved == 0 and not caplog.records and written(home) == {}


def test_a_report_does_not_wait_until_failed_progress_is_tried_again(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    api, flow = ProgressAPI(), Flow()
    api.takes_progress = False
    it = publisher(api, delay_s=1e4)
    it.show_progress(flow.artifact())
    flow.wait_until_read()
    publish_all(it, "evaluate")
    assert api.keys == ["gpu-memory-evaluate"] and not caplog.records


def test_reports_that_wait_go_before_progress(soon: None) -> None:
    api, flow = ProgressAPI(), Flow()
    api.go.clear()
    it = publisher(api)
    it.publish(task_report())
    it.show_progress(flow.artifact())
    for _ in range(3):
        it.publish(task_report())
    api.go.set()
    api.wait_for(1)
    it.close(PATIENCE_S)
    assert api.keys == ["gpu-memory-evaluate"] * 4 + ["gpu-progress-nightly"]


def test_an_api_that_is_away_at_the_end_is_not_asked_for_progress(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    api, flow = ProgressAPI(), Flow()
    it = publisher(api)
    it.show_progress(flow.artifact())
    api.wait_for(1)
    with it._changed:
        it._progress_s = time.monotonic() + 3600
        assert it._changed.wait_for(it._is_done, PATIENCE_S)
    flow.counts = RunCounts(4, 0, 0, {"Completed": 4}, over=True)
    api.errors = [answered(500)] * publish.TRIES
    publish_all(it, "evaluate")
    assert len(api.said) == 1
    assert "1 memory report was not published" in caplog.text
