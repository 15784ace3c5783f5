"""A person suspends a running task and resumes it, with the commands, on a real server and a driver that is a fake."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.runner import suspender
from prefect_gpu.suspension.driver_calls import DriverCalls
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

FAKE = Path(__file__).parents[1] / "fakes" / "fake_driver.py"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Use a fake driver, for simulated devices too."""
    made: list[DriverCalls] = []

    def use(*faults: str) -> None:
        made.append(DriverCalls([sys.executable, str(FAKE), str(tmp_path), *faults]))
        monkeypatch.setattr(suspender, "shared_calls", lambda: made[-1])
        monkeypatch.setattr(suspender, "refusal", lambda candidate: "")
        monkeypatch.setattr(suspender, "lost_tasks", set)

    yield use
    for calls in made:
        calls.close()


def command(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "prefect_gpu", *words],
        capture_output=True,
        text=True,
        timeout=api.PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr


count = task(bodies.count_turns, tags=gpu(memory="4GiB"))


class Running:
    """A flow on a thread of its own, whose one task counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices = f"{api.ONE}@{uuid4().hex}"
        self.name = f"count-{uuid4().hex[:8]}"
        self.ends: list[Any] = []
        futures: list[Any] = []

        @flow(task_runner=GPUTaskRunner(devices=self.devices))
        def counts() -> Any:
            futures.append(count.with_options(task_run_name=self.name).submit(str(folder)))
            futures[0].wait()
            return futures[0].state

        def run() -> None:
            self.ends.append(counts(return_state=True))

        self.began_s = time.monotonic()
        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.pid = api.until(lambda: self.read("run"), "the body")
        self.id = str(futures[0].task_run_id)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def status(self) -> str:
        return psutil.Process(int(self.read("run"))).status()

    def end(self) -> Any:
        Path(self.folder, "go").touch()
        # After an assertion that has failed it may still be away. A command takes a second to import Prefect.
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.status() == psutil.STATUS_STOPPED:
                command("resume", self.name)
        self.thread.join(api.PATIENCE_S)
        return self.ends[0].result()


def test_a_task_is_suspended_and_resumed_by_hand(
    driver: Callable[..., None], tmp_path: Path
) -> None:
    driver()
    run = Running(tmp_path)
    try:
        code, said = command("suspend", run.name)
        assert (code, said.splitlines()[-1][: len(run.name) + 7]) == (0, f"{run.name}: away:"), said
        began_s = time.monotonic()
        assert "3GiB in host memory" in said
        assert run.status() == psutil.STATUS_STOPPED
        turns = run.read("turns")
        _, shown = command("status", "--devices", run.devices)
        assert re.search(rf"{run.name}\s+away: 3GiB in host memory", shown), shown
        code, said = command("suspend", run.id[:8])
        assert code == 0, said
        assert run.read("turns") == turns
        away_s = time.monotonic() - began_s
        code, said = command("resume", run.id)
        assert (code, said.splitlines()[-1]) == (0, f"{run.name}: runs"), said
        api.until(lambda: int(run.read("turns") or 0) > int(turns), "another turn")
    finally:
        state = run.end()
    assert state.result()[1] == 1
    names = api.names(state.state_details.task_run_id)
    # Moving, and away.
    assert names[-5:] == ["Running", "AwaitingGPU", "AwaitingGPU", "Running", "Completed"]
    waits = api.history(state.state_details.task_run_id)[-3]
    assert "prefect-gpu resume: its memory is" in waits.message
    report = api.artifacts(task_run_id=state.state_details.task_run_id, count=1)[0]
    assert "| Suspended | " in report.data and "3GiB to host memory in" in report.data
    metadata = report.metadata_ or {}
    assert float(metadata["suspended_s"]) >= away_s
    body_s = time.monotonic() - run.began_s
    assert float(metadata["run_s"]) <= body_s - away_s


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_a_process_that_the_driver_loses_runs_again_and_is_not_suspended_again(
    driver: Callable[..., None], tmp_path: Path, step: str
) -> None:
    driver(f"{step}=2")
    run = Running(tmp_path)
    try:
        command("suspend", run.name)
        if step == "restore":
            command("resume", run.name)
        api.until(lambda: run.read("run") not in ("", run.pid), "another process")
    finally:
        state = run.end()
    assert state.result()[1] == 2
    assert "Retrying" not in api.names(state.state_details.task_run_id)
    outcomes = [
        (artifact.metadata_ or {})["outcome"]
        for artifact in api.artifacts(task_run_id=state.state_details.task_run_id, count=2)
    ]
    assert outcomes == ["died", "completed"]


def test_a_suspended_task_ends_at_once_when_it_is_cancelled(
    driver: Callable[..., None], tmp_path: Path
) -> None:
    driver()
    devices = f"{api.ONE}@{uuid4().hex}"

    name = f"count-{uuid4().hex[:8]}"

    @flow(task_runner=GPUTaskRunner(devices=devices))
    def fails() -> None:
        count.with_options(task_run_name=name).submit(str(tmp_path))
        api.until((tmp_path / "run").exists)
        code, said = command("suspend", name)
        assert code == 0, said
        raise ValueError((tmp_path / "run").read_text())

    with pytest.raises(ValueError, match=r"^\d+$") as raised:
        fails()
    assert not psutil.pid_exists(int(str(raised.value)))


def test_what_cannot_be_suspended_goes_on_and_says_why(tmp_path: Path) -> None:
    run = Running(tmp_path)
    try:
        code, said = command("suspend", run.name)
        assert code == 1
        assert f"{run.name}: not suspended: only memory of NVIDIA GPUs can be moved" in said
        turns = run.read("turns")
        api.until(lambda: int(run.read("turns") or 0) > int(turns), "another turn")
        code, said = command("suspend", "nothing-of-this-name")
        assert code == 2
        assert "'nothing-of-this-name' names no GPU task of this machine" in said
        assert run.name in said
    finally:
        state = run.end()
    assert state.result()[1] == 1
