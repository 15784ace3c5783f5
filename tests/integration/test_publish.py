"""Reports reach a real Prefect API and can be read back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import Artifact
from prefect.context import get_settings_context
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_HOME,
    temporary_settings,
)

from prefect_gpu.live.progress import RunCounts
from prefect_gpu.reports import publish
from prefect_gpu.reports.markdown import flow_metadata
from prefect_gpu.reports.publish import (
    ProgressArtifact,
    Publisher,
    bounded_settings,
    flow_artifact,
    task_artifact,
)
from tests.fakes.reports import device, flow_reports, task_report
from tests.integration import engine_api as api


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def read(client: SyncPrefectClient, key: str) -> list[Artifact]:
    # Not `client.read_artifacts`: the sync one sends null for what it was not given, and the API
    # refuses that (Prefect 3.8.8).
    answer = client.request(
        "POST", "/artifacts/filter", json={"artifacts": {"key": {"any_": [key]}}, "limit": 200}
    )
    return [Artifact.model_validate(found) for found in answer.json()]


def test_a_task_report_comes_back_with_all_its_metadata(client: SyncPrefectClient) -> None:
    report = task_report(task_name="Évaluate ResNet_50", task_run_id=uuid4(), flow_run_id=uuid4())
    client.create_artifact(task_artifact(report))
    (artifact,) = read(client, "gpu-memory-evaluate-resnet-50")
    assert artifact.metadata_ == report.metadata()
    assert artifact.type == "markdown"
    assert (artifact.task_run_id, artifact.flow_run_id) == (report.task_run_id, report.flow_run_id)
    assert "data:image/svg+xml;base64," in artifact.data


def test_a_value_that_is_too_long_is_cut_and_does_not_stop_the_report(
    client: SyncPrefectClient,
) -> None:
    devices = tuple(device(i) for i in range(16))
    client.create_artifact(task_artifact(task_report(task_name="wide", devices=devices)))
    (artifact,) = read(client, "gpu-memory-wide")
    assert len(artifact.metadata_["device_uuid"]) == 500


def test_a_flow_report_comes_back_on_its_flow_run(client: SyncPrefectClient) -> None:
    flow_run_id = uuid4()
    reports = flow_reports()
    client.create_artifact(flow_artifact(reports, flow_name="nightly", flow_run_id=flow_run_id))
    (artifact,) = read(client, "gpu-flow-nightly")
    assert artifact.flow_run_id == flow_run_id
    assert artifact.metadata_ == flow_metadata(reports)


def test_a_publisher_drains_from_its_thread_under_the_settings_of_the_flow(
    client: SyncPrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(lambda: get_client(sync_client=True))
    began = time.perf_counter()
    for i in range(10):
        publisher.publish(task_report(task_name="drained", attempt=i + 1))
    publisher.publish_flow(flow_reports(), flow_name="drained", flow_run_id=None)
    accepted_s = time.perf_counter() - began
    publisher.close(timeout_s=60)
    found = read(client, "gpu-memory-drained")
    assert sorted(int(a.metadata_["attempt"]) for a in found) == list(range(1, 11))
    assert len(read(client, "gpu-flow-drained")) == 1
    assert publisher.lost == 0 and caplog.records == []
    assert accepted_s < time.perf_counter() - began


def test_the_progress_of_a_flow_run_is_one_artifact_that_changes(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PROGRESS_S", 0.01)
    flow_run_id = uuid4()
    counts = [RunCounts(4, 1, 2, {"Completed": 1})]
    progress = ProgressArtifact(lambda: counts[0], flow_name="Progress", flow_run_id=flow_run_id)
    publisher = Publisher(lambda: get_client(sync_client=True))
    publisher.show_progress(progress)
    deadline = time.monotonic() + 60
    while not (found := read(client, "gpu-progress-progress")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (first,) = found
    assert (first.type, first.data, first.flow_run_id) == ("progress", 25, flow_run_id)
    assert first.description == "1 of 4 ended, 1 running, 2 waiting for a device"
    counts[0] = RunCounts(4, 0, 0, {"Completed": 3, "Failed": 1}, over=True)
    publisher.close(timeout_s=60)
    (last,) = read(client, "gpu-progress-progress")
    assert (last.id, last.data) == (first.id, 100)
    assert last.description == "4 of 4 ended: 3 Completed, 1 Failed"


def test_an_unreachable_api_costs_one_warning_that_counts(
    prefect_server: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    away = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_HOME: tmp_path}
    with temporary_settings(away):
        publisher = Publisher(
            lambda: get_client(sync_client=True), logger=logging.getLogger("reports")
        )
        for _ in range(3):
            publisher.publish(task_report())
        api.until(lambda: bool(publisher._last_error))
        publisher.close(timeout_s=2)
        publisher.close(timeout_s=2)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = f"3 memory reports were not published but written to {publisher.folder}"
    assert said in record.getMessage() and "ConnectError" in record.getMessage()
    assert publisher.folder is not None and publisher.folder.is_relative_to(tmp_path)
    assert len(list(publisher.folder.iterdir())) == 3


def test_an_api_that_never_answers_does_not_hold_up_the_end_of_a_flow(
    prefect_server: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    never = threading.Event()

    @contextmanager
    def hang() -> Iterator[SyncPrefectClient]:
        never.wait(60)
        raise OSError("gone")
        yield

    with temporary_settings({PREFECT_HOME: tmp_path}):
        publisher = Publisher(hang, logger=logging.getLogger("reports"))
    publisher.publish(task_report())
    publisher.publish(task_report())
    began = time.monotonic()
    publisher.close(timeout_s=0.2)
    assert time.monotonic() - began < 30
    assert "2 memory reports were not published but written to" in caplog.text
    assert "took longer than 0.2s" in caplog.text
    never.set()


def test_bounded_settings_are_those_that_prefect_would_make() -> None:
    with temporary_settings({PREFECT_API_URL: "http://elsewhere/api"}):
        context = get_settings_context()
        bounded = bounded_settings(context, 3.0)
        expected = context.settings.copy_with_update(
            {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: 3.0}
        )
        assert bounded.settings == expected
        assert bounded.settings.to_environment_variables() == expected.to_environment_variables()
        assert context.settings.api.request_timeout != 3.0, "the flow's own were changed"
