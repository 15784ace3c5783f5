"""A task whose node refuses it is placed again: the same attempt, the same budget, no report."""

from __future__ import annotations

import threading

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.engine.task_engine import CancelledByRunner
from prefect_gpu.errors import NodeRefusedError, PlacementError, PlacementTimeoutError
from prefect_gpu.runner import process_run
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import GIB
from tests.unit.runner.test_body_run import Full, Scene, own_cap
from tests.unit.runner.test_body_run import _attempts_are_fake as _attempts_are_fake

REFUSED = NodeRefusedError("a", "4GiB on any of 1 devices; most free 3GiB")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_run, "REFUSED_S", 0.0)


def test_a_task_that_was_refused_is_placed_again_with_the_same_number() -> None:
    scene = Scene(REFUSED, REFUSED, 7)
    assert scene.call.run() == 7
    assert scene.numbers == [1, 1, 1]
    assert scene.budgets == [2 * GIB] * 3
    assert not scene.told
    assert scene.call.finished


def test_refusals_are_no_processes_of_the_climb() -> None:
    scene = Scene(own_cap(), *[REFUSED] * 9, own_cap(), 7)
    assert scene.call.run() == 7
    assert scene.numbers == [1, *[2] * 10, 3]
    assert scene.budgets == [2 * GIB, *[3 * GIB] * 10, int(4.5 * GIB)]
    assert scene.call.climb.processes == 3


def test_what_ran_out_before_a_refusal_is_what_is_raised_when_there_is_no_place() -> None:
    scene = Scene(own_cap(), REFUSED, PlacementError("no device is left"))
    with pytest.raises(Full):
        scene.call.run()


def test_a_person_sees_why_it_waits_and_not_with_each_refusal() -> None:
    scene = Scene(*[REFUSED] * 5, 7)
    shown: list[Reason] = []
    scene.run.show_awaiting = shown.append
    scene.call.run()
    (reason,) = shown
    assert sentence(reason) == f"other devices: {REFUSED}"


def test_a_node_that_always_refuses_does_not_outlast_the_wait() -> None:
    scene = Scene(REFUSED, REFUSED, wait_s=0.0, memory=None)
    with pytest.raises(PlacementTimeoutError, match=r"is over: node a .* refused the task: 4GiB"):
        scene.call.run()
    assert scene.numbers == [1]
    assert [over for over, _ in scene.kept] == [True]


def test_a_task_run_that_is_refused_is_still_the_first_run() -> None:
    scene = Scene(REFUSED, 7, memory=None)
    scene.call.run()
    assert [over for over, _ in scene.kept] == [False, True]


def test_a_task_that_is_cancelled_after_a_refusal_ends() -> None:
    scene = Scene(REFUSED, "wait")
    raised = threading.Event()

    def run() -> None:
        try:
            scene.call.run()
        except CancelledByRunner:
            raised.set()

    thread = threading.Thread(target=run)
    thread.start()
    # The refused one.
    assert scene.closed.acquire(timeout=DEADLOCK_S)
    scene.call.cancel()
    assert raised.wait(DEADLOCK_S)
    thread.join()
    assert scene.call.finished
