"""Brokers of several processes on one ledger: one order of requests, and nobody waits for a broker that does nothing."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker.broker import POLL_S, Ticket
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.broker.planning import PASSIVE_S
from prefect_gpu.devices import simulated
from prefect_gpu.devices.shared_folder import SILENT_S, SharedFolder
from prefect_gpu.scheduling.backfill import NO_BACKFILL, Patience
from prefect_gpu.scheduling.model import Device, Request, Reservation
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig, indices
from tests.unit.broker.broker_rig import thread_rig as thread_rig


class Machine(Rig):
    """Brokers of two processes on the same devices."""

    def __init__(self, folder: Path, devices: str = "1x24GiB", **of_broker: Any) -> None:
        self._folder = folder
        super().__init__(devices, ledger=self.open(), **of_broker)
        self.other = self.another(ledger=self.open(), **of_broker)

    def open(self) -> Ledger:
        return Ledger(
            lambda: HostStore(
                self._folder, lambda path: SharedFolder(path, self.clock.now), owners_s=0.0
            ),
            lambda: self.clock.now(),
        )

    def pass_time(self, seconds: float) -> None:
        """Move the clock, in steps short enough that both brokers show that they work."""
        while seconds > 0:
            self.clock.advance(min(seconds, SILENT_S / 4))
            seconds -= SILENT_S / 4
            self.look()

    def waits_anywhere(self, *tickets: Ticket) -> bool:
        self.look()
        return not any(ticket.decided for ticket in tickets)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    return partial(Machine, tmp_path)


def test_two_processes_do_not_take_the_same_memory_twice(machine: Callable[..., Machine]) -> None:
    rig = machine()
    first = rig.place("a", 15)
    second = rig.submit("b", 15, broker=rig.other)
    assert rig.waits_anywhere(second)
    assert rig.why(second).startswith("15GiB on device 0; most free 9GiB")
    rig.broker.end(first)
    rig.look()
    rig.decided(second)


def test_an_exclusive_task_has_the_device_to_itself_in_all_processes(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    rig.place("a", 1, exclusive=True)
    second = rig.submit("b", 1, broker=rig.other)
    assert rig.waits_anywhere(second)


def test_what_another_processs_task_takes_is_not_foreign(machine: Callable[..., Machine]) -> None:
    rig = machine()
    first = rig.place("a", 10)
    rig.start(first, gib=8)
    rig.look()
    rig.decided(rig.submit("b", 14, broker=rig.other))


def test_the_first_that_was_submitted_starts_first_in_whatever_process(
    machine: Callable[..., Machine],
) -> None:
    rig = machine(patience=NO_BACKFILL)
    running = rig.place("a", 20)
    early = rig.submit("early", 20, broker=rig.other)
    rig.look()
    late = rig.submit("late", 4)
    assert rig.waits_anywhere(late), "it would pass the first"
    assert "1 ahead in the queue" in rig.why(late)
    rig.broker.end(running)
    rig.look()
    rig.decided(early)
    rig.look()
    rig.decided(late)


def test_a_broker_looks_every_50_ms_whether_another_process_has_given_up_memory(
    thread_rig: Rig, tmp_path: Path
) -> None:
    rig = thread_rig
    one, two = (
        rig.another(ledger=Ledger(lambda: HostStore(tmp_path), rig.clock.now)) for _ in range(2)
    )
    running = rig.place("a", 15, broker=one)
    rig.start(running, gib=12)
    large = rig.submit("large", 15, broker=two)
    small = rig.submit("small", 10, broker=two)
    rig.exit(running)
    assert rig.next_recovered() == ("a", 0)
    while not large.decided:
        # A thread announces its wait before the clock knows of it, so one advance may come too early.
        with contextlib.suppress(queue.Empty):
            rig.clock.waits.get(timeout=0.2)
        rig.clock.advance(POLL_S)
    assert not small.decided


def test_a_higher_priority_starts_first_in_whatever_process(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    running = rig.place("a", 20)
    low = rig.submit("low", 20)
    high = rig.submit("high", 20, broker=rig.other, priority=1)
    assert rig.waits_anywhere(low, high)
    rig.broker.end(running)
    rig.look()
    rig.decided(high)
    assert not low.decided


def test_how_often_a_request_was_passed_is_counted_in_all_processes(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    rig.place("a", 20)
    blocked = rig.submit("blocked", 20)
    rig.look()
    for number in range(3):
        rig.decided(rig.submit(f"small {number}", 1, broker=rig.other))
    rig.look()
    assert "later tasks that started before it: 3" in rig.why(blocked)


def of_stopped(rig: Machine, *entries: Entry) -> Ledger:
    """Write entries of a process that sends no heartbeats."""
    stopped = rig.open()
    changes = {entry.request.id: entry for entry in entries}
    assert stopped.try_write(stopped.view().version, changes)
    return stopped


def waits_in(rig: Machine, name: str, gib: float, **fields: Any) -> Entry:
    request = Request(name, name, 0, 0.0, memory=int(gib * GIB), **fields)
    return Entry(request, devices=(rig.broker.devices[0].key,), max_processes=9)


def holds_in(rig: Machine, name: str, gib: float, **fields: Any) -> Entry:
    held = Reservation(name, *rig.broker.devices[0].key, int(gib * GIB), **fields)
    return replace(waits_in(rig, name, gib), reservations=(held,))


def test_a_request_of_a_stopped_process_that_could_start_is_passed(
    machine: Callable[..., Machine],
) -> None:
    rig = machine(patience=NO_BACKFILL)
    stopped = of_stopped(rig, waits_in(rig, "hung", 20))
    rig.look()
    mine = rig.submit("mine", 20)
    assert rig.waits_anywhere(mine)
    rig.pass_time(SILENT_S / 2)
    assert rig.waits_anywhere(mine)
    rig.pass_time(SILENT_S)
    rig.decided(mine)
    assert not stopped.problem


@pytest.mark.parametrize("ends_s", [None, 1e9], ids=["it drains", "a device is kept for it"])
def test_a_blocked_request_of_a_stopped_process_keeps_no_device(
    machine: Callable[..., Machine], ends_s: float | None
) -> None:
    rig = machine(patience=Patience(passes=0, wait_s=1e9, heads=1))
    stopped = of_stopped(
        rig, holds_in(rig, "runs", 12, ends_s=ends_s), waits_in(rig, "blocked", 20)
    )
    rig.look()
    mine = rig.submit("mine", 10)
    assert rig.waits_anywhere(mine)
    rig.pass_time(SILENT_S * 1.5)
    rig.decided(mine)
    assert not stopped.problem


def test_a_request_of_a_stopped_process_that_the_machines_memory_blocks_blocks_no_other(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    stopped = of_stopped(
        rig, holds_in(rig, "runs", 1), waits_in(rig, "large", 1, host_bytes=100 * GIB)
    )
    rig.look()
    mine = rig.submit("mine", 1)
    assert rig.waits_anywhere(mine)
    rig.pass_time(SILENT_S * 1.5)
    rig.decided(mine)
    assert not stopped.problem


def test_a_process_that_goes_on_has_its_place_again(machine: Callable[..., Machine]) -> None:
    rig = machine(patience=NO_BACKFILL)
    first = rig.place("first", 20)
    stopped = of_stopped(rig, waits_in(rig, "early", 20))
    rig.look()
    second = rig.submit("second", 4)
    rig.pass_time(SILENT_S * 1.5)
    rig.decided(second)
    stopped.beat()
    rig.look()
    rig.broker.end(second)
    third = rig.submit("third", 4)
    assert rig.waits_anywhere(third), "the stopped one is before it"
    rig.broker.end(first)


def test_requests_of_a_process_with_limits_of_its_own_are_passed_no_more_often_than_others(
    machine: Callable[..., Machine],
) -> None:
    patience = Patience(passes=3, wait_s=1e9, heads=1)
    rig = machine(patience=patience)
    # It leaves the device alone while another task is there, which the first does not know.
    limited = rig.another(ledger=rig.open(), patience=patience, max_tasks_per_device=1)
    running = [rig.place("running", 4), rig.place("running", 4)]
    victim = rig.submit("victim", 4, broker=limited)
    assert rig.waits_anywhere(victim)
    started = 0
    for _ in range(10):
        late = rig.submit("late", 4)
        rig.pass_time(PASSIVE_S + 1)
        if not late.decided:
            break
        started += 1
        running.append(late)
        rig.broker.end(running.pop(0))
        rig.look()
    # One more starts before it is seen that the first does not.
    assert 0 < started <= patience.passes + 1
    assert not victim.decided
    for each in running:
        rig.broker.end(each)
    rig.look()
    rig.decided(victim)


def test_nothing_adds_up_in_a_broker_in_which_nothing_waits(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    rig.place("runs", 1)
    for number in range(20):
        ticket = rig.submit(f"short {number}", 1, broker=rig.other)
        rig.decided(ticket)
        rig.other.end(ticket)
        rig.look()
    known = rig.machines[0].known
    assert len(known.entries) == 1 and not known.elsewhere


def test_a_broker_with_all_the_processes_that_it_may_have_holds_nobody_up(
    machine: Callable[..., Machine],
) -> None:
    rig = machine(patience=NO_BACKFILL)
    device = rig.broker.devices[0]
    third = rig.open()
    runs = Reservation("runs", *device.key, GIB)
    entries = {
        "runs": Entry(
            Request("runs", "runs", 0, 0.0),
            phase=Phase.PLACED,
            reservations=(runs,),
            max_processes=1,
        ),
        "waits": Entry(
            Request("waits", "waits", 1, 0.0, memory=20 * GIB),
            devices=(device.key,),
            max_processes=1,
        ),
    }
    assert third.try_write(third.view().version, entries)
    rig.decided(rig.submit("mine", 20))


def test_tasks_for_each_device_are_counted_in_all_processes(
    machine: Callable[..., Machine],
) -> None:
    rig = machine("2x24GiB", max_tasks_per_device=1)
    first, second = rig.place("a", 1), rig.place("b", 1, broker=rig.other)
    assert indices(first) != indices(second)
    third = rig.submit("c", 1)
    assert rig.waits_anywhere(third)
    assert "max_tasks_per_device is 1" in rig.why(third)


def test_the_share_of_the_processors_is_among_all_processes(
    machine: Callable[..., Machine],
) -> None:
    rig = machine()
    rig.place("a", 1)
    rig.place("b", 1, broker=rig.other)
    assert (rig.broker.processes, rig.other.processes) == (2, 2)


def test_other_brokers_are_seen_by_the_devices_that_are_shared(
    machine: Callable[..., Machine],
) -> None:
    rig = machine("2x24GiB", patience=NO_BACKFILL)
    rig.place("a", 20, devices=("0",))
    blocked = rig.submit("blocked", 20, devices=("0",), broker=rig.other)
    rig.look()
    assert indices(rig.place("free", 20)) == [1], "the first waits for the other device alone"
    assert rig.waits_anywhere(blocked)


def test_a_ledger_that_cannot_be_used_is_named_where_a_task_waits(tmp_path: Path) -> None:
    missing = tmp_path / "not there"
    rig = Rig(ledger=Ledger(lambda: HostStore(missing)))
    rig.place("a", 20)
    waiting = rig.submit("b", 20)
    assert rig.waits(waiting)
    assert f"the ledger in {missing} cannot be used" in rig.why(waiting)


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_process_of_another_container_takes_is_not_foreign(
    tmp_path: Path, alone: bool
) -> None:
    def in_container(namespace: str) -> Ledger:
        def store() -> HostStore:
            made = HostStore(tmp_path)
            made.namespace = namespace
            return made

        return Ledger(store)

    rig = Rig(ledger=in_container("pid:[1]"))
    rig.reader.lists_processes = False
    other = rig.another(ledger=in_container("pid:[2]"))
    theirs = rig.place("theirs", 10, broker=other)
    rig.start(theirs, gib=8)
    # Its own counters say so, where the device names no process.
    theirs.stand_in_bytes = 8 * GIB
    mine = [] if alone else [rig.place("mine", 1)]
    for each in mine:
        rig.start(each)
    assert not rig.ledger.view().processes.keys() - {each.request.id for each in mine}
    waiting = rig.submit("beside them", 12)
    # What the other says counts from the next reading on.
    for _ in range(2):
        rig.look()
    rig.decided(waiting)


def test_a_task_knows_who_was_on_its_device_with_it(machine: Callable[..., Machine]) -> None:
    rig = machine("2x24GiB")
    one = rig.place("one", 1, devices=("0",))
    rig.place("elsewhere", 1, devices=("1",))
    two = rig.place("two", 1, devices=("0",), broker=rig.other)
    three = rig.place("three", 1, devices=("0",))
    assert tuple(three.neighbours) == ("one", "two (another flow)")
    rig.broker.end(three)
    rig.place("four", 1, devices=("0",))
    assert tuple(one.neighbours) == ("two (another flow)", "three", "four")
    assert next(iter(two.neighbours)) == "one (another flow)"


def test_where_ids_are_of_another_namespace_flows_of_one_container_say_what_they_hold(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "Device", partial(Device, attributed=False))
    rig = machine()
    theirs = rig.place("theirs", 10, broker=rig.other)
    rig.start(theirs, gib=8)
    theirs.stand_in_bytes = 8 * GIB
    rig.look()
    rig.decided(rig.submit("beside them", 14))
