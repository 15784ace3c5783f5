"""Steps keep their order, slow or not."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.cluster.wire import InOrder
from tests.unit.broker.broker_rig import threads_refused

THREAD = "prefect-gpu-value"


def wait_for_no_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(DEADLOCK_S)
            assert not thread.is_alive()


def test_fast_steps_are_taken_at_once_by_the_caller() -> None:
    order, taken = InOrder(), list[int]()
    order.take(lambda: taken.append(threading.get_ident()))
    assert taken == [threading.get_ident()]


@given(st.lists(st.booleans(), max_size=30))
def test_steps_are_taken_in_the_order_in_which_they_came(slow: list[bool]) -> None:
    order, taken, last = InOrder(), list[int](), threading.Event()
    for number, each in enumerate(slow):
        order.take(lambda number=number: taken.append(number), slow=each)
    order.take(last.set)
    assert last.wait(DEADLOCK_S)
    assert taken == list(range(len(slow)))
    wait_for_no_thread()


def test_what_follows_a_slow_step_waits_for_it() -> None:
    order, taken = InOrder(), list[str]()
    go, done = threading.Event(), threading.Event()

    def slow() -> None:
        assert go.wait(DEADLOCK_S)
        taken.append("slow")

    order.take(lambda: taken.append("first"))
    order.take(slow, slow=True)
    order.take(lambda: taken.append("second"))
    order.take(lambda: taken.append("third"), slow=True)
    order.take(done.set)
    assert taken == ["first"]
    go.set()
    assert done.wait(DEADLOCK_S)
    assert taken == ["first", "slow", "second", "third"]
    wait_for_no_thread()
    order.take(lambda: taken.append(threading.current_thread().name))
    assert taken[-1] == threading.current_thread().name


@pytest.mark.parametrize("slow", [False, True])
def test_a_step_that_raises_is_logged_and_the_next_is_taken(
    slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    order, done = InOrder(), threading.Event()

    def fail() -> None:
        raise RuntimeError("no more room")

    with caplog.at_level(logging.ERROR, "prefect_gpu"):
        order.take(fail, slow=slow)
        order.take(done.set)
        assert done.wait(DEADLOCK_S)
    assert "no more room" in caplog.text
    wait_for_no_thread()


def test_where_no_thread_starts_the_caller_takes_slow_steps() -> None:
    order, taken = InOrder(), list[str]()
    with threads_refused(THREAD):
        order.take(lambda: taken.append("slow"), slow=True)
        order.take(lambda: taken.append("next"))
    assert taken == ["slow", "next"]
