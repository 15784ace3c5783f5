"""`prefect-gpu suspend` and `resume`, as far as they read and write the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.cli import commands
from prefect_gpu.cli.commands import resume, suspend
from prefect_gpu.suspension.eligibility import REFUSED
from tests.unit.scheduling.values import request, reserved


class Flow:
    """A flow with a task, which does something at each look of the command."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(lambda: HostStore(folder))
        task = request(1, name="a", task_run_name="train")
        self.ledger.try_write(
            0, {"a": Entry(task, phase=Phase.RUNNING, reservations=(reserved(by="a"),))}
        )
        self.does: Callable[[], object] = lambda: pytest.fail("it waits")

    def wait(self, seconds: float) -> None:
        self.does()

    def shows(self, text: str, **fields: Any) -> None:
        self.ledger.rewrite("a", lambda entry: replace(entry, suspension=text, **fields))

    def entry(self) -> Entry:
        self.ledger.view()
        entry = self.ledger.entry("a")
        assert entry is not None
        return entry


@pytest.fixture
def a_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_LEDGER", str(tmp_path))
    flow = Flow(tmp_path)
    pause: Any = flow
    monkeypatch.setattr(commands, "_pause", pause)
    # It was asked to make way for another task earlier, and had no memory yet.
    flow.shows(f"{REFUSED}it holds no device memory yet")
    return flow


def test_an_earlier_refusal_is_not_taken_for_an_answer(
    a_flow: Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    a_flow.does = lambda: a_flow.shows("away: 1GiB", phase=Phase.AWAY)
    assert suspend("train") == 0
    assert a_flow.entry().held_back
    assert capsys.readouterr().out == "train: away: 1GiB\n"


def test_a_running_task_is_resumed_at_once(
    a_flow: Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume("train") == 0
    assert capsys.readouterr().out == "train: runs\n"
