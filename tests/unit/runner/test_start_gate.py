"""The gate delays threads and stops none."""

from prefect_gpu.runner.engine_threads import StartGate


def test_a_place_is_given_back_once_however_often_it_is_left() -> None:
    gate = StartGate(starts=1, patience_s=0)
    first = gate.enter()
    first.leave()
    first.leave()
    second, third = gate.enter(), gate.enter()
    third.leave()
    assert gate.enter() is not None
    second.leave()


def test_a_thread_that_finds_no_place_goes_on_without_one_and_gives_none_back() -> None:
    gate = StartGate(starts=1, patience_s=0)
    held, without = gate.enter(), gate.enter()
    without.leave()
    still_without = gate.enter()
    held.leave()
    # The place of `held` is free once, and so is taken once.
    taken = gate.enter()
    still_without.leave()
    assert gate.enter() is not None
    taken.leave()
