"""The gate slows a crowd down and stops nobody."""

import threading

from prefect_gpu.start_gate import StartGate


def test_a_place_is_given_back_once_however_often_it_is_left() -> None:
    gate = StartGate(starts=1, patience_s=0)
    first = gate.enter()
    first.leave()
    first.leave()
    second, third = gate.enter(), gate.enter()
    third.leave()
    assert gate.enter() is not None
    second.leave()


def test_who_finds_no_place_goes_on_without_one_and_gives_none_back() -> None:
    places = threading.Semaphore(1)
    gate = StartGate(starts=0, patience_s=0)
    gate._places = places
    held, without = gate.enter(), gate.enter()
    without.leave()
    assert not places.acquire(blocking=False)
    held.leave()
    assert places.acquire(blocking=False)
