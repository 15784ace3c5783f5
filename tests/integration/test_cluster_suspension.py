"""A task of a Ray cluster makes way for an urgent one, and is suspended by hand, with a driver on its node that is a fake."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow, task
from prefect.runtime import task_run

from prefect_gpu import current_allocation, gpu
from prefect_gpu.testing import allocate
from tests.fakes import suspending
from tests.integration import engine_api as api
from tests.integration.programs import wait_for
from tests.integration.test_cluster import connection, ray, started
from tests.integration.test_cluster import pytestmark as of_ray
from tests.integration.test_suspend import command

pytestmark = [*of_ray, pytest.mark.slow]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@task(tags=gpu(memory="16GiB", framework="none", preemptible=True))
def train(folder: str) -> tuple[int, str]:
    """Count until a file comes."""
    allocation = current_allocation()
    assert allocation is not None
    with allocate("1GiB"):
        turns = 0
        Path(folder, "run").write_text(f"{task_run.name} {os.getpid()}")
        while not Path(folder, "go").exists():
            turns += 1
            # Replaced: a reader, or a stop, must not find it while it is written.
            Path(folder, "turns.new").write_text(str(turns))
            Path(folder, "turns.new").replace(Path(folder, "turns"))
            time.sleep(0.02)
        return allocation.attempt, allocation.device_uuids[0]


@task(tags=gpu(memory="16GiB", framework="none", priority=5))
def urgent(folder: str) -> str:
    allocation = current_allocation()
    assert allocation is not None
    with allocate("15GiB"):
        Path(folder, "urgent").touch()
        while not Path(folder, "urgent-go").exists():
            time.sleep(0.02)
        return allocation.device_uuids[0]


def test_a_task_of_a_cluster_makes_way_and_is_suspended_by_hand(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    # Which kinds of devices the tag has an effect on is asked in the flow.
    suspending.install(driver, replaced=monkeypatch.setattr).close()

    def status() -> str:
        return psutil.Process(int(read(tmp_path / "run").split()[1])).status()

    def goes_on() -> None:
        turns = read(tmp_path / "turns")
        wait_for(lambda: int(read(tmp_path / "turns") or 0) > int(turns))

    with started() as machines:

        @flow(task_runner=machines.runner())
        def main() -> Any:
            for member in connection()._members.values():
                call = member.actor.handle.__ray_call__
                ray.get(call.remote(lambda agent: suspending.install(driver) and None))
            training = train.submit(str(tmp_path))
            try:
                api.until(lambda: len(read(tmp_path / "run").split()) == 2, "the body")
                name = read(tmp_path / "run").split()[0]
                asks = urgent.submit(str(tmp_path))
                api.until((tmp_path / "urgent").exists, "the urgent task")
                assert status() == psutil.STATUS_STOPPED
                Path(tmp_path, "urgent-go").touch()
                goes_on()
                code, said = command("suspend", name)
                assert code == 0 and "1GiB in host memory" in said, said
                assert status() == psutil.STATUS_STOPPED
                code, said = command("resume", name)
                assert (code, said.splitlines()[-1]) == (0, f"{name}: runs"), said
                goes_on()
            finally:
                Path(tmp_path, "urgent-go").touch()
                Path(tmp_path, "go").touch()
            return asks.result(), training.result(), training.task_run_id

        where, (attempt, device), run_id = main()
    assert (attempt, device) == (1, where), "it ran once, on the device of the other"
    names = api.names(run_id)
    assert names.count("AwaitingGPU") >= 2 and names[-2:] == ["Running", "Completed"], names
    reasons = " ".join(state.message or "" for state in api.history(run_id))
    assert "suspended for task 'urgent'" in reasons and "prefect-gpu resume" in reasons, reasons
    (report,) = api.artifacts(task_run_id=run_id, count=1)
    assert report.data.count("1GiB to host memory in") == 2, report.data
