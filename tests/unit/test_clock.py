"""Both clocks, and that the fake one wakes whom it should."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import prefect_gpu.clock
from prefect_gpu.clock import DEADLOCK_S, Clock, FakeClock, RealClock


def run(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def end(thread: threading.Thread) -> None:
    thread.join(DEADLOCK_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("clock", [RealClock(), FakeClock()], ids=["real", "fake"])
def test_both_clocks_time_out_and_do_not_go_back(clock: Clock) -> None:
    before_s = clock.now()
    condition = threading.Condition()
    with condition:
        assert not clock.wait(condition, before_s)
    assert clock.now() >= before_s


def test_a_wait_ends_when_the_clock_has_moved_far_enough() -> None:
    clock, condition = FakeClock(), threading.Condition()
    woken, begun_s = threading.Event(), clock.now()

    def waiter() -> None:
        with condition:
            clock.wait(condition, begun_s + 1.0)
        woken.set()

    thread = run(waiter)
    clock.wait_for_waiters()
    clock.advance(0.5)
    assert not woken.is_set()
    clock.advance(0.5)
    end(thread)
    assert woken.is_set()


@pytest.mark.parametrize("limited", [False, True])
def test_a_notification_ends_a_wait(limited: bool) -> None:
    clock, condition, answers = FakeClock(), threading.Condition(), []

    def waiter() -> None:
        with condition:
            answers.append(clock.wait(condition, clock.now() + 5.0 if limited else None))

    thread = run(waiter)
    clock.wait_for_waiters()
    with condition:
        condition.notify_all()
    end(thread)
    assert answers == [True]


def test_a_clock_that_moves_between_a_reading_and_the_wait_delays_nothing() -> None:
    clock, condition = FakeClock(), threading.Condition()
    until_s = clock.now() + 1.0
    clock.advance(1.0)
    with condition:
        assert not clock.wait(condition, until_s)


def test_a_thread_that_never_waits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_gpu.clock, "DEADLOCK_S", 0.0)
    with pytest.raises(TimeoutError, match="no 1 waiting threads"):
        FakeClock().wait_for_waiters()
