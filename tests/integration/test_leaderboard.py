"""A leaderboard of the tasks of a flow, from what their bodies have reported."""

from __future__ import annotations

import json

import pytest
from prefect import flow, get_client, task

import prefect_gpu
from prefect_gpu import GPUTaskRunner, LeaderboardRow, gpu, publish_leaderboard, report_metric
from prefect_gpu.errors import ReportError
from prefect_gpu.testing import allocate
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")


@task(tags=gpu(memory="2GiB"), task_run_name="model-{number}")
def evaluate(number: int) -> int:
    with allocate("1GiB"):
        report_metric("accuracy", 0.5)
        report_metric("accuracy", 0.9 + number / 100)
    if number == 3:
        raise ValueError("no data")
    return number


@task
def plain() -> None:
    pass


@flow(task_runner=GPUTaskRunner(devices=api.TWO))
def compare() -> object:
    too_large = evaluate.with_options(tags=gpu(memory="2TiB"), task_run_name="too large")
    rows = [*evaluate.map([1, 2, 3]), too_large.submit(4), LeaderboardRow("baseline", 0.1)]
    publish_leaderboard(rows, "accuracy")
    found = publish_leaderboard(rows, "accuracy", key="my board")
    with pytest.raises(ReportError, match="had no process of this flow's runner"):
        publish_leaderboard([plain.submit()], "accuracy")
    with pytest.raises(ReportError, match="3 is no row; accepted: futures"):
        publish_leaderboard([3], "accuracy")  # type: ignore[list-item]
    return found


def test_tasks_are_ordered_by_what_they_have_reported() -> None:
    artifact_id = compare()
    with get_client(sync_client=True) as client:
        answer = client.request("GET", f"/artifacts/{artifact_id}").json()  # type: ignore[arg-type]
    assert answer["key"] == "my-board"
    values = json.loads(answer["metadata_"]["values"])
    assert list(values.items()) == [
        *(("model-2", 0.92), ("model-1", 0.91), ("baseline", 0.1), ("model-3", None)),
        ("too large", None),
    ]
    assert "gpu:memory=2TiB is larger than any device here" in answer["data"]
    assert "**Best: model-2, accuracy 0.92, with 1GiB.**" in answer["data"]
    artifacts = api.artifacts(flow_run_id=answer["flow_run_id"], count=6)
    first = next(each for each in artifacts if each.key == "gpu-leaderboard-compare")
    assert first.description == "Leaderboard · ordered by accuracy; first: model-2"
    report = prefect_gpu.report(answer["flow_run_id"])
    assert report.leaderboards == (answer["data"],) * 2
    processes = report.processes
    assert {each.figures["metric_accuracy"] for each in processes} == {"0.91", "0.92", "0.93"}
    assert all("| Result: accuracy | 0.9" in each.markdown for each in processes)


def test_outside_of_such_a_flow_it_is_refused() -> None:
    with pytest.raises(ReportError, match="in a flow whose task runner is GPUTaskRunner"):
        publish_leaderboard([], "accuracy")
