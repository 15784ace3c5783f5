"""The time that a body has, while its process is suspended and resumed."""

from __future__ import annotations

from prefect_gpu.runner.attempt import TimeLimit


def test_time_that_is_suspended_does_not_count() -> None:
    limit = TimeLimit()
    limit.set(10.0)
    limit.pause(4.0)
    assert limit.left_s(100.0) is None
    limit.resume(100.0)
    assert limit.left_s(101.0) == 5.0
    assert limit.left_s(200.0) == 0.0


def test_a_body_that_has_ended_while_it_was_suspended_has_no_limit_again() -> None:
    limit = TimeLimit()
    limit.set(10.0)
    limit.pause(4.0)
    limit.lift()
    limit.resume(100.0)
    assert limit.left_s(200.0) is None


def test_without_a_limit_there_is_none_after_a_suspension() -> None:
    limit = TimeLimit()
    limit.pause(4.0)
    limit.resume(5.0)
    assert limit.left_s(6.0) is None


def test_a_body_that_begins_while_its_process_is_suspended_has_its_time_after_that() -> None:
    limit = TimeLimit()
    limit.pause(4.0)
    limit.set(10.0)
    assert limit.left_s(100.0) is None
    limit.resume(100.0)
    assert limit.left_s(100.0) == 6.0
