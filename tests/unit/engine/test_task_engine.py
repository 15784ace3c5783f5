"""What Prefect's engine does otherwise for a GPU task: retries and crashes. No server is asked."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Failed, Running

from prefect_gpu.engine import task_engine
from prefect_gpu.engine.task_engine import CancelledByRunner, GPUTaskRunEngine
from prefect_gpu.errors import ChildDiedError, PlacementError, add_note


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> list[State[Any]]:
    """The states that are emitted, in order."""
    emitted: list[State[Any]] = []

    def emit(*, validated_state: State[Any], **_: Any) -> None:
        emitted.append(validated_state)

    monkeypatch.setattr("prefect.task_engine.emit_task_run_state_change_event", emit)
    return emitted


def new_engine(of: Task[..., Any], pause: Any = None) -> GPUTaskRunEngine:
    """Return an engine whose body has begun."""
    nothing: Any = None
    run = TaskRun(id=uuid4(), task_key=of.task_key, dynamic_key="0", state=Running(), run_count=1)
    return GPUTaskRunEngine(pause, nothing, of, of.fn, {"task_run": run})


def asked_of(answer: bool) -> tuple[Task[..., Any], list[Any]]:
    """Return a task with one retry, and the errors that its `retry_condition_fn` was asked about."""
    asked: list[Any] = []

    def condition(of: Any, run: Any, state: Any) -> bool:
        asked.append(state.data)
        return answer

    @task(retries=1, retry_condition_fn=condition)
    def work() -> None:
        pass

    return work, asked


def test_an_error_that_can_only_come_again_is_not_retried_and_no_condition_is_asked() -> None:
    work, asked = asked_of(True)
    engine = new_engine(work)
    assert not engine.can_retry(PlacementError("too large"))
    assert not engine.can_retry(Failed(data=PlacementError("too large")))
    assert asked == []
    error = ValueError()
    assert engine.can_retry(error) and asked == [error]


@pytest.mark.parametrize("retries", [True, False])
def test_a_dead_process_is_retried_if_its_condition_allows_it_and_then_crashes_the_task_run(
    states: list[State[Any]], retries: bool
) -> None:
    work, asked = asked_of(retries)
    engine, death = new_engine(work), ChildDiedError("work", 1, "was killed by SIGKILL")
    expected = ["Retrying", "Crashed"] if retries else ["Crashed"]
    for at in range(len(expected)):
        engine.handle_exception(death)
        assert [each.name for each in states] == expected[: at + 1]
    assert states[-1].data is death and asked == [death]
    assert not engine.is_running()


def test_the_end_of_the_runner_ends_the_wait_for_a_retry_and_is_no_error(
    states: list[State[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    @task(retries=1, retry_delay_seconds=600)
    def work() -> None:
        pass

    asked_s: list[float] = []

    def pause(seconds: float) -> None:
        asked_s.append(seconds)
        raise CancelledByRunner

    engine = new_engine(work, pause)
    engine.handle_exception(ValueError("of the body"))
    with pytest.raises(CancelledByRunner) as ended:
        engine.wait_until_ready()
    assert 0 < asked_s[0] <= 600
    caplog.clear()
    engine.handle_crash(ended.value)
    engine.log_finished_message()
    assert [each.name for each in states] == ["AwaitingRetry", "Cancelled"]
    assert {record.levelname for record in caplog.records} <= {"INFO", "DEBUG"}


def test_the_state_after_an_out_of_memory_says_what_helps(states: list[State[Any]]) -> None:
    error = MemoryError("no more")
    add_note(error, task_engine.NOTE + "gpu:memory=2GiB would do")
    work, _ = asked_of(False)
    new_engine(work).set_state(Failed(data=error, message="as Prefect words it"))
    assert states[-1].message == "Out of memory: gpu:memory=2GiB would do (MemoryError: no more)"
