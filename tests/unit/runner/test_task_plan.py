"""What is known of a task when it is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import task

from prefect_gpu.policy import GPUPolicy
from prefect_gpu.runner.task_plan import PlanMaker


@task
def body() -> None:
    pass


def test_a_relative_folder_for_snapshots_is_in_the_folder_that_the_flow_starts_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maker = PlanMaker(Path("snapshots"))
    monkeypatch.chdir("/")
    assert maker.make(body, GPUPolicy(), 0).snapshots == tmp_path / "snapshots"


def test_a_task_records_for_no_snapshots_by_default() -> None:
    assert PlanMaker().make(body, GPUPolicy(), 0).snapshots is None
