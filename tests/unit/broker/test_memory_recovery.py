"""When memory is back after its process has ended, and what a broker does while devices do not answer."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time

import pytest

from prefect_gpu.broker.broker import Ticket
from prefect_gpu.broker.device_view import RECOVERY_POLL_S, RECOVERY_S
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig, indices
from tests.unit.broker.broker_rig import rig as rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig


def test_without_a_process_there_is_nothing_to_wait_for(rig: Rig) -> None:
    ticket = rig.place("a", 20)
    rig.broker.end(ticket)
    assert rig.next_recovered() == ("a", 0)
    rig.broker.end(ticket)
    rig.broker.look()
    assert rig.recovered.empty(), "told once"


def test_released_memory_is_read_every_20_ms_until_it_is_back(thread_rig: Rig) -> None:
    rig = thread_rig
    ticket = rig.place("a", 20)
    rig.start(ticket, gib=20)
    behind = rig.submit("b", 20)
    pid = ticket.pid
    assert pid is not None
    begun, numbers = queue.SimpleQueue[int](), itertools.count()

    def during() -> None:
        begun.put(number := next(numbers))
        if number == 3:
            rig.reader.detach(pid)

    # A reading that began before its process was known says nothing of its end, but only the time tells.
    while pid not in rig.ledger.view().processes.values():
        time.sleep(0.001)
    rig.clock.advance(RECOVERY_POLL_S)
    rig.reader.during = during
    rig.broker.end(ticket)
    for _ in range(3):
        begun.get(timeout=DEADLOCK_S)
        assert rig.recovered.empty() and not behind.decided
        rig.clock.advance(RECOVERY_POLL_S)
    assert rig.next_recovered() == ("a", 0)
    rig.decided(behind)


def leak(rig: Rig, ticket: Ticket, gib: float) -> None:
    """End its process, leaving something behind."""
    assert ticket.pid is not None and ticket.placement is not None
    rig.reader.detach(ticket.pid)
    rig.reader.leaked_bytes[ticket.placement.devices[0].uuid] = int(gib * GIB)
    rig.broker.end(ticket)
    rig.broker.look()


def give_up(rig: Rig) -> None:
    rig.broker.look()
    rig.clock.advance(RECOVERY_S)


def test_a_leak_is_logged_after_5_s_and_blamed_on_no_other_task(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    leaker, beside = rig.place("leaker", 6), rig.place("beside", 6)
    for ticket in (leaker, beside):
        rig.start(ticket, gib=4)
    leak(rig, leaker, gib=2)
    later = rig.place("later", 6)
    assert rig.recovered.empty()
    give_up(rig)
    assert rig.next_recovered() == ("leaker", 2 * GIB)
    assert "2GiB of device memory did not come back" in caplog.text
    rig.exit(beside)
    assert rig.next_recovered() == ("beside", 0)
    rig.start(later, gib=1)
    rig.exit(later)
    assert rig.next_recovered() == ("later", 0)
    assert rig.why(rig.submit("d", 23)) == "23GiB on device 0; most free 22GiB"


def test_of_two_that_end_together_one_is_blamed(rig: Rig) -> None:
    tickets = [rig.place(name, 6) for name in "ab"]
    for ticket in tickets:
        rig.start(ticket, gib=4)
    leak(rig, tickets[0], gib=2)
    rig.exit(tickets[1])
    give_up(rig)
    assert [rig.next_recovered() for _ in tickets] == [("a", 2 * GIB), ("b", 0)]


def test_memory_of_other_programs_that_changes_is_no_leak(rig: Rig) -> None:
    rig.reader.occupy("SIM-0", 5 * GIB)
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    rig.reader.occupy("SIM-0", 3 * GIB)
    rig.exit(first)
    assert rig.next_recovered() == ("a", 0)
    second = rig.place("b", 6)
    rig.start(second, gib=4)
    rig.reader.vacate()
    rig.exit(second)
    assert rig.next_recovered() == ("b", 0)


def test_where_no_process_is_listed_counters_stand_in_and_nothing_counts_as_leaked(
    rig: Rig,
) -> None:
    rig.reader.lists_processes = False
    measured: queue.SimpleQueue[int] = queue.SimpleQueue()
    first, second = rig.place("a", 6), rig.place("b", 6)
    first.on_measured = lambda at_s, found: measured.put(found[0].total_bytes)
    for ticket, gib in ((first, 4), (second, 8)):
        rig.start(ticket, gib)
        ticket.stand_in_bytes = gib * GIB
    rig.broker.look()
    assert measured.get(timeout=DEADLOCK_S) == 4 * GIB
    assert rig.why(rig.submit("c", 20)) == "20GiB on device 0; most free 10GiB"
    rig.exit(first)
    assert rig.next_recovered() == ("a", None)
    rig.reader.lists_processes = True
    rig.broker.look()
    rig.exit(second)
    assert rig.next_recovered() == ("b", 0)


def test_a_process_that_left_the_list_before_its_end_was_heard_hides_nothing(rig: Rig) -> None:
    """Seen on an H200: killed processes are gone from NVML before their parent knows."""
    ticket = rig.place("a", 6)
    rig.start(ticket, gib=4)
    ticket.stand_in_bytes = 4 * GIB
    rig.broker.look()
    rig.reader.lists_processes = False
    rig.broker.look()
    rig.reader.lists_processes = True
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


def test_a_lost_device_shows_no_leak(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig("2x24GiB")
    first = rig.place("a", 20)
    rig.start(first, gib=4)
    rig.reader.failed["SIM-0"] = "fell off the bus"
    rig.exit(first)
    # The last reading, on which a placement may rest, was before.
    rig.broker.look()
    assert indices(rig.place("b", 20)) == [1]
    waiting = rig.submit("c", 20)
    for _ in range(2):
        rig.broker.look()
    assert caplog.text.count("device 0 (SIM-0) is set aside: fell off the bus") == 1
    give_up(rig)
    assert rig.next_recovered() == ("a", None)
    assert rig.waits(waiting)
    rig.reader.failed.clear()
    rig.decided(waiting)
    assert indices(waiting) == [0]
    assert "device 0 (SIM-0) answers again" in caplog.text


def test_a_driver_that_stops_answering_is_waited_for(rig: Rig) -> None:
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    rig.reader.broken = "gone"
    rig.broker.look()
    waiting = rig.submit("b", 6)
    assert rig.waits(waiting)
    assert rig.why(waiting) == "the devices to answer (simulated driver: gone)"
    rig.exit(first)
    give_up(rig)
    assert rig.next_recovered() == ("a", None)
    rig.reader.broken = ""
    rig.decided(waiting)


def test_a_driver_that_hangs_holds_up_neither_reservations_nor_waiters(thread_rig: Rig) -> None:
    rig = thread_rig
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    # So that a reading under way began before its end.
    rig.clock.advance(0.01)
    hangs, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert hangs.wait(DEADLOCK_S)

    rig.reader.during = hang
    try:
        rig.broker.end(first)
        assert entered.wait(DEADLOCK_S)
        rig.clock.advance(RECOVERY_S + 1)
        assert rig.next_recovered() == ("a", None)
        waiting = rig.submit("b", 6)
        assert rig.why(waiting) == "the devices to answer (nothing heard for 6s)"
    finally:
        hangs.set()
    rig.decided(waiting)


def test_devices_are_free_at_once_if_only_a_calibration_has_run() -> None:
    rig = Rig()
    ticket = rig.place("calibrated", 20)
    rig.broker.attach(ticket, 4242424)
    rig.broker.look()
    # The calibration's caller has seen its end.
    ticket.pid = None
    back: list[int | None] = []
    ticket.on_recovered = back.append
    rig.broker.end(ticket)
    rig.broker.look()
    assert back == [0] and not rig.reservations()
