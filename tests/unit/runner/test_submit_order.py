"""First come is the order of `submit`, whichever thread is first."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from uuid import UUID

import pytest
from prefect.futures import PrefectConcurrentFuture

from prefect_gpu.clock import DEADLOCK_S, FakeClock
from prefect_gpu.runner.engine_threads import PATIENCE_S, Inputs, SubmitOrder, SubmitTicket


class Tasks:
    """Threads that take their turn."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.order = SubmitOrder(self.clock)
        self.passed: list[int] = []
        self._threads: list[threading.Thread] = []

    def come(self, *places: SubmitTicket) -> None:
        """Let the threads of some tasks come in, each after the one before it waits or has passed."""
        for place in places:
            waiting, done = len(self.clock._waiters), len(self.passed)
            self._threads.append(threading.Thread(target=self._come, args=(place,)))
            self._threads[-1].start()
            while len(self.clock._waiters) == waiting and len(self.passed) == done:
                threading.Event().wait(0.001)

    def _come(self, place: SubmitTicket) -> None:
        place.take_turn()
        self.passed.append(place.number)
        place.leave()

    def join(self) -> list[int]:
        for thread in self._threads:
            thread.join(DEADLOCK_S)
            assert not thread.is_alive()
        return self.passed


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


def test_those_whose_threads_are_faster_wait_for_those_that_were_submitted_before(
    tasks: Tasks,
) -> None:
    first, second, third = (tasks.order.add(number) for number in (1, 2, 3))
    tasks.come(third, second)
    assert tasks.passed == []
    tasks.come(first)
    assert tasks.join() == [1, 2, 3]


def test_one_that_ends_without_asking_holds_up_none(tasks: Tasks) -> None:
    cached, second = tasks.order.add(1), tasks.order.add(2)
    tasks.come(second)
    cached.leave()
    assert tasks.join() == [2]


def test_one_that_waits_for_its_inputs_is_passed_and_is_in_front_once_it_has_them(
    tasks: Tasks,
) -> None:
    future: Future[int] = Future()
    upstream = PrefectConcurrentFuture(UUID(int=1), future)
    inputs = Inputs({"data": [upstream]}, None)
    first, second, third = (
        tasks.order.add(1, inputs.wait),
        tasks.order.add(2),
        tasks.order.add(3, Inputs({"data": upstream}, None).wait),
    )
    tasks.come(second)
    assert tasks.passed == [2]
    future.set_result(1)
    tasks.come(third, first)
    assert tasks.join() == [2, 1, 3]


def test_one_that_waits_for_anothers_first_run_is_passed_meanwhile(tasks: Tasks) -> None:
    first, second, third = (tasks.order.add(number) for number in (1, 2, 3))
    probing = [True]
    first.take_turn()
    first.yield_while(lambda: probing[0])
    tasks.come(second)
    assert tasks.passed == [2]
    probing.clear()
    first.waits = lambda: False
    tasks.come(third, first)
    assert tasks.join() == [2, 1, 3]


def test_those_that_do_not_come_are_passed_after_a_while_and_hold_up_none_from_then_on(
    tasks: Tasks,
) -> None:
    stuck, second, third = (tasks.order.add(number) for number in (1, 2, 3))
    tasks.come(second)
    tasks.clock.advance(PATIENCE_S)
    assert tasks.join() == [2]
    tasks.come(third)
    assert tasks.join() == [2, 3]
    tasks.come(stuck)
    assert tasks.join() == [2, 3, 1]


def test_a_later_one_is_as_patient_with_one_that_waits_itself(tasks: Tasks) -> None:
    stuck, second, third = (tasks.order.add(number) for number in (1, 2, 3))
    tasks.come(third, second)
    tasks.clock.advance(PATIENCE_S)
    assert tasks.join() == [2, 3]
    stuck.leave()


def test_a_retry_is_at_the_place_of_its_task_run(tasks: Tasks) -> None:
    first, second = tasks.order.add(1), tasks.order.add(2)
    first.take_turn()
    first.leave()
    # The retry.
    first.take_turn()
    tasks.come(second)
    assert tasks.passed == []
    first.leave()
    assert tasks.join() == [2]
