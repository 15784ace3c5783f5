"""The gate delays threads and stops none. It raises if more places are given back than it has."""

from prefect_gpu.runner.engine_threads import StartGate


def test_a_place_is_given_back_once_however_often_it_is_left() -> None:
    leave = StartGate(starts=1, patience_s=0).enter()
    leave()
    leave()


def test_a_thread_without_a_place_continues_and_returns_none() -> None:
    gate = StartGate(starts=1, patience_s=0)
    leave_with, leave_without = gate.enter(), gate.enter()
    leave_with()
    leave_without()
