"""Requests that wait for a broker: the reasons that they are given, and how their wait ends."""

from __future__ import annotations

import queue

import pytest

from prefect_gpu.broker import broker
from prefect_gpu.broker.broker import Ticket, Withdrawn
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PlacementTimeoutError
from prefect_gpu.scheduling.backfill import NO_BACKFILL
from prefect_gpu.scheduling.reasons import Reason, WaitKind, sentence
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig, Waiter
from tests.unit.broker.broker_rig import rig as rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig

# Waiting.


def test_a_waiting_request_gets_its_reason_and_each_change_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.place("a", 20)
    explained: queue.SimpleQueue[str] = queue.SimpleQueue()
    explain = rig.broker.explain

    def listen(ticket: Ticket) -> Reason:
        reason = explain(ticket)
        explained.put(sentence(reason))
        return reason

    monkeypatch.setattr(rig.broker, "explain", listen)
    monkeypatch.setattr(broker, "AGAIN_S", 2.0)
    waiter = Waiter(rig, rig.submit("b", 6))

    def advance(duration_s: float) -> str:
        rig.broker.look()
        rig.clock.wait_for_waiters(1)
        rig.clock.advance(duration_s)
        return explained.get(timeout=DEADLOCK_S)

    before, after = "6GiB on device 0; most free 4GiB", "6GiB on device 0; most free 1GiB"
    assert advance(1.0) == before
    assert advance(2.0) == before
    rig.reader.occupy("SIM-0", 3 * GIB)
    assert advance(2.0) == after
    assert [waiter.next_told() for _ in range(2)] == [before, after]
    assert waiter.told.empty(), "the same reason is not told twice"


def test_a_limit_ends_the_wait_and_lets_others_pass() -> None:
    rig = Rig(patience=NO_BACKFILL)
    rig.place("a", 20)
    waiter = Waiter(rig, rig.submit("b", 6), limit_s=0.5)
    behind = rig.submit("c", 4)
    assert rig.waits(behind)
    rig.clock.wait_for_waiters(1)
    rig.clock.advance(0.5)
    result = waiter.result()
    assert isinstance(result, PlacementTimeoutError)
    assert str(result) == (
        "gpu:wait=500ms is over: 'b' still waited for 6GiB on device 0; most free 4GiB"
    )
    rig.decided(behind)


def test_what_is_placed_as_the_limit_is_reached_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rig.place("a", 20)
    second = rig.submit("b", 6)

    def explain(ticket: Ticket) -> Reason:
        rig.broker.end(first)
        rig.decided(ticket)
        return Reason(WaitKind.FIRST_READING)

    monkeypatch.setattr(rig.broker, "explain", explain)
    assert rig.broker.wait(second, 0.0, lambda _: None) is second.placement


def test_a_request_whose_wait_ends_in_an_error_holds_nothing(rig: Rig) -> None:
    first = rig.place("a", 20)
    second = rig.submit("b", 6)
    waiter = Waiter(rig, second)

    def fail(_: Reason) -> None:
        # The worst moment: it is placed, and no thread is there to take it.
        rig.broker.end(first)
        rig.decided(second)
        raise RuntimeError("the API is gone")

    waiter.on_waiting = fail
    rig.broker.look()
    rig.clock.wait_for_waiters(1)
    rig.clock.advance(1)
    assert isinstance(waiter.result(), RuntimeError)
    assert [rig.next_recovered() for _ in "ab"] == [("a", 0), ("b", 0)]
    assert not rig.reservations()


def test_a_withdrawn_head_no_longer_blocks() -> None:
    rig = Rig(patience=NO_BACKFILL)
    first = rig.place("a", 20)
    head, behind = rig.submit("b", 6), rig.submit("c", 4)
    waiter = Waiter(rig, head)
    assert rig.waits(head, behind)
    assert rig.broker.withdraw(head)
    assert isinstance(waiter.result(), Withdrawn)
    rig.decided(behind)
    assert not rig.broker.withdraw(head)
    assert not rig.broker.withdraw(first), "it was placed"


def test_withdrawing_at_the_moment_of_placing_leaks_nothing(thread_rig: Rig) -> None:
    rig = thread_rig
    # Either the waiting thread has a placement and ends it, or nothing is held.
    for _ in range(50):
        ticket = rig.submit("a", 20)
        if not rig.broker.withdraw(ticket):
            assert ticket.placement is not None
            rig.broker.end(ticket)
            rig.next_recovered()
        else:
            assert ticket.placement is None
    rig.place("b", 24)


def test_before_the_first_reading(rig: Rig) -> None:
    waiting = rig.submit("a", 6)
    assert rig.why(waiting) == "the first reading of the devices"
    rig.decided(waiting)
    assert rig.why(rig.submit("b", devices=("9",))).startswith("its refusal: gpu:device=9 names no")


# What standbys must know.


def test_reserved_host_memory_is_reported_until_it_is_used(rig: Rig) -> None:
    ticket = rig.place("one", 1, host_bytes=3 * GIB)
    assert rig.broker.host_promised_bytes == 3 * GIB
    rig.broker.mark_running(ticket)
    rig.broker.look()
    assert rig.broker.host_promised_bytes == 0
    rig.broker.end(ticket)


def test_a_request_that_waits_for_host_memory_gets_that_reason(rig: Rig) -> None:
    first = rig.place("first", 1)
    assert not rig.broker.wants_host_memory
    rig.host_available_bytes = 2 * GIB
    # Seen before the request comes: one is decided by the last reading.
    rig.broker.look()
    rig.submit("second", 1, host_bytes=3 * GIB)
    rig.broker.look()
    assert rig.broker.wants_host_memory
    rig.host_available_bytes = 4 * GIB
    rig.broker.look()
    assert not rig.broker.wants_host_memory
    rig.broker.end(first)


def test_one_that_waits_for_a_device_alone_wants_nothing_of_the_machines(rig: Rig) -> None:
    first = rig.place("first", 20)
    rig.submit("second", 20, host_bytes=GIB)
    rig.broker.look()
    assert not rig.broker.wants_host_memory
    rig.broker.end(first)
