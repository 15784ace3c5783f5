"""What PyTorch itself says of an out-of-memory, from the child to the report. Its CUDA is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from tests.cases import needs
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = [pytest.mark.usefixtures("prefect_server"), needs("torch")]


run_out = task(bodies.run_out_in_torch, tags=gpu(memory="1GiB", framework="torch", oom="fail"))


def report_of(folder: Path | None, *args: str) -> tuple[Any, str]:
    futures: list[Any] = []

    @flow(task_runner=GPUTaskRunner(devices="host", memory_snapshots=folder))
    def runs_out() -> None:
        futures.append(run_out.submit(*args))
        futures[0].wait()

    runs_out()
    assert "CUDA out of memory" in str(futures[0].state.message)
    (artifact,) = api.artifacts(task_run_id=futures[0].task_run_id, count=1)
    assert (artifact.metadata_ or {})["outcome"] == "oom"
    return futures[0].task_run_id, str(artifact.data)


def test_the_report_holds_pytorchs_summary_and_says_where_its_snapshot_lies(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "snapshots"
    task_run_id, text = report_of(folder)
    assert "page of device 0\npage of device 1\n</pre>" in text
    path = folder / f"{task_run_id}-1.pickle"
    assert path.read_bytes() == b"a snapshot"
    assert path.name in text


def test_without_a_folder_there_is_no_snapshot() -> None:
    _, text = report_of(None)
    assert "page of device 0" in text and "Memory snapshot" not in text


def test_what_pytorch_cannot_say_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, text = report_of(tmp_path / "file", "")
    assert "memory summary" not in text and "Memory snapshot" not in text
