"""A server that refuses a tag's slot is asked again: soon at first, then less and less often."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect import task
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.states import Completed

from prefect_gpu.runner import prefect_engine
from prefect_gpu.runner.prefect_engine import CancelledByRunner


@task
def work() -> None:
    """Do nothing: the engine is replaced."""


@pytest.fixture(autouse=True)
def without_the_random_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_engine.random, "uniform", lambda low, high: 1.0)


def run(monkeypatch: pytest.MonkeyPatch, refusals: int, pause: Callable[[float], None]) -> Any:
    left = [ConcurrencySlotAcquisitionError("503")] * refusals

    def engine(*_: Any, **__: Any) -> Any:
        if left:
            raise left.pop()
        return Completed()

    monkeypatch.setattr(prefect_engine, "run_task_sync", engine)
    client: Any = SimpleNamespace(open=lambda: None)
    # In a copy of the context, since the engine's thread has one of its own.
    with prefect_engine.paused_by(pause):
        return copy_context().run(
            prefect_engine.run_engine, client, work, {"task_run_id": uuid4()}, lambda: None
        )


def test_the_second_try_comes_after_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    assert run(monkeypatch, 1, waits.append).is_completed()
    assert waits == [0.1]


def test_a_server_that_stays_busy_is_asked_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    assert run(monkeypatch, len(prefect_engine.SLOT_DELAYS_S), waits.append).is_completed()
    assert waits == sorted(waits) and waits[-1] == 60.0


def test_a_server_that_never_answers_crashes_the_task_run(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    state = run(monkeypatch, len(prefect_engine.SLOT_DELAYS_S) + 1, waits.append)
    assert state.is_crashed()


def test_the_end_of_the_runner_ends_the_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(duration_s: float) -> None:
        raise CancelledByRunner

    state = run(monkeypatch, 1, end)
    assert state.is_cancelled() and state.message == "the flow ended before this task"
