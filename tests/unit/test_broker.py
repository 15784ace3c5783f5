"""The broker, driven through simulated devices and a clock that the test moves."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import prefect_gpu.waiting_list
from prefect_gpu.broker import Broker, Ticket, Withdrawn, shared_broker
from prefect_gpu.clock import DEADLOCK_S, FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.errors import DeviceError, PlacementError, PlacementTimeoutError
from prefect_gpu.ledger import ProcessLedger
from prefect_gpu.recovery import RECOVERY_POLL_S, RECOVERY_S
from prefect_gpu.scheduling.backfill import NO_BACKFILL
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    DeviceSnapshot,
    Placement,
    ProcessUse,
    Reading,
    Reservation,
)
from prefect_gpu.units import GIB


class WatchedBroker(Broker):
    """Says when it has nothing to do."""

    resting = False
    #: Readings that the sampler has begun, and how many had begun when the last one came.
    begun = 0
    came = 0

    def _roots(self) -> list[int]:
        self.begun += 1
        return super()._roots()

    def _on_reading(self, reading: Reading) -> None:
        with self._changed:
            self.came = self.begun
            super()._on_reading(reading)

    def _wait_for_work(self) -> None:
        self.resting = True
        self._changed.notify_all()
        super()._wait_for_work()
        self.resting = False

    def settle(self) -> None:
        """Block until all that has come was looked at, and the thread waits on the clock."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.resting and not (self._arrived or self._dirty or self._calls),
                DEADLOCK_S,
            )

    def read(self) -> None:
        """Have the devices read, and block until the broker has looked at it."""
        before = self.begun
        self.refresh()
        with self._changed:
            assert self._changed.wait_for(lambda: self.came > before, DEADLOCK_S)
        self.settle()


class Reader(SimulatedReader):
    """Does on demand what drivers do."""

    #: Called within each reading.
    during: Callable[[], object] = staticmethod(lambda: None)
    #: As in a container.
    lists_processes = True

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        self.during()
        snapshots = super().read(roots)
        if self.lists_processes:
            return snapshots
        return tuple(replace(snapshot, processes=()) for snapshot in snapshots)


class Rig:
    def __init__(self, devices: str = "1x24GiB", **of_broker: Any) -> None:
        self.clock = FakeClock()
        self.reader = Reader(SimulatedDevices(devices), self.clock)
        self.host_available_bytes = 64 * GIB
        self.ledger = ProcessLedger()
        self.pids = iter(range(1000, 2000))
        #: Name of the task to what did not come back, in that order.
        self.recovered: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
        self.brokers: list[WatchedBroker] = []
        self.broker = self.another(**of_broker)

    def another(self, **of_broker: Any) -> WatchedBroker:
        broker = WatchedBroker(
            self.reader,
            **{
                "ledger": self.ledger,
                "clock": self.clock,
                "read_host_available": lambda: self.host_available_bytes,
                **of_broker,
            },
        )
        self.brokers.append(broker)
        return broker

    def submit(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        memory = others.pop("memory", None if gib is None else int(gib * GIB))
        ticket = others.pop("broker", self.broker).submit(name, memory=memory, **others)
        assert isinstance(ticket, Ticket)
        ticket.on_recovered = lambda size: self.recovered.put((name, size))
        return ticket

    def place(self, name: str, gib: float | None = None, **others: Any) -> Ticket:
        ticket = self.submit(name, gib, **others)
        decided(ticket)
        assert ticket.placement is not None, ticket.error
        return ticket

    def start(self, ticket: Ticket, gib: float = 0, broker: Broker | None = None) -> int:
        """Start a process that takes so much of each of its devices."""
        assert ticket.placement is not None
        pid = next(self.pids)
        uuids = [device.uuid for device in ticket.placement.devices]
        self.reader.attach(pid, uuids)
        for uuid in uuids:
            self.reader.allocate(pid, uuid, int(gib * GIB))
        (broker or self.broker).attach(ticket, pid)
        return pid

    def exit(self, ticket: Ticket) -> None:
        """End its process; its memory is free."""
        assert ticket.pid is not None
        self.reader.detach(ticket.pid)
        self.broker.end(ticket)

    def next_recovered(self) -> tuple[str, int | None]:
        return self.recovered.get(timeout=DEADLOCK_S)

    def waits(self, *tickets: Ticket) -> bool:
        self.broker.settle()
        return not any(ticket.decided for ticket in tickets)


def decided(*tickets: Ticket) -> None:
    for ticket in tickets:
        with ticket.changed:
            assert ticket.changed.wait_for(lambda t=ticket: t.decided, DEADLOCK_S)


def indices(ticket: Ticket) -> list[int]:
    assert ticket.placement is not None
    return [device.index for device in ticket.placement.devices]


class Waiter:
    """Waits for a ticket in a thread, as an engine does."""

    def __init__(
        self, rig: Rig, ticket: Ticket, limit_s: float | None = None, again_s: float = 30.0
    ) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.outcome: queue.SimpleQueue[Placement | Exception] = queue.SimpleQueue()
        self.on_waiting: Callable[[str], None] = self.told.put

        def wait() -> None:
            try:
                self.outcome.put(
                    rig.broker.wait(
                        ticket, limit_s, lambda reason: self.on_waiting(reason), again_s=again_s
                    )
                )
            except Exception as error:
                self.outcome.put(error)

        self.thread = threading.Thread(target=wait, daemon=True)
        self.thread.start()

    def result(self) -> Placement | Exception:
        result = self.outcome.get(timeout=DEADLOCK_S)
        self.thread.join(DEADLOCK_S)
        return result

    def next_told(self) -> str:
        return self.told.get(timeout=DEADLOCK_S)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []
    # Runners of other tests in this process keep their shared brokers.
    before = set(threading.enumerate())

    def make(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.reader.during = lambda: None
        for broker in rig.brokers:
            broker.close()
    ours = {"prefect-gpu-broker", "prefect-gpu-sampler"}
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name in ours]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


MakeRig = Callable[..., Rig]


# Who gets what.


def test_two_of_40_percent_run_together_and_the_third_after_them(rig: Rig) -> None:
    first, second = (rig.place(name, memory=0.4) for name in "ab")
    third = rig.submit("c", memory=0.4)
    assert rig.waits(third)
    rig.start(first)
    rig.exit(first)
    decided(third)
    assert rig.next_recovered() == ("a", 0)
    assert (indices(second), indices(third)) == ([0], [0])


def test_the_first_decision_waits_for_a_reading_and_later_ones_for_a_fresh_one(rig: Rig) -> None:
    rig.broker.end(rig.place("a", 20))
    rig.next_recovered()
    rig.clock.advance(60)
    rig.reader.occupy("SIM-0", 10 * GIB)
    late = rig.submit("b", 20)
    rig.broker.read()
    assert rig.waits(late)
    rig.reader.vacate("SIM-0")
    rig.broker.read()
    decided(late)


def test_a_driver_that_answers_slowly_is_decided_on_all_the_same(rig: Rig) -> None:
    rig.reader.during = lambda: rig.clock.advance(3)
    rig.place("a", 6)


def test_the_impossible_is_refused(rig: Rig) -> None:
    result = Waiter(rig, rig.submit("a", 25)).result()
    assert isinstance(result, PlacementError)
    assert "larger than any device" in str(result)


def test_a_device_tells_later_what_its_driver_keeps(rig: Rig) -> None:
    rig.reader.fail("SIM-0")
    waiting = rig.submit("a", 24)
    rig.broker.read()
    assert rig.waits(waiting)
    read = Reader.read

    def with_reserved(roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        return tuple(replace(s, system_reserved_bytes=GIB) for s in read(rig.reader, roots))

    rig.reader.recover("SIM-0")
    rig.reader.read = with_reserved  # type: ignore[method-assign]
    rig.broker.read()
    decided(waiting)
    assert isinstance(waiting.error, PlacementError)


def test_max_processes_and_host_memory(make_rig: MakeRig) -> None:
    rig = make_rig(max_processes=2)
    first = rig.place("a", 1, host_bytes=60 * GIB)
    hungry = rig.submit("b", 1, host_bytes=10 * GIB)
    assert rig.waits(hungry)
    assert "10GiB of the machine's own memory" in rig.broker.explain(hungry)
    # Once its body runs, its memory is in what the machine tells.
    first.running = True
    rig.broker.read()
    decided(hungry)
    third = rig.submit("c", 1)
    assert rig.waits(third)
    assert rig.broker.processes == 2
    assert rig.broker.explain(third) == "2 processes run, and max_processes is 2"


def test_max_tasks_per_device(make_rig: MakeRig) -> None:
    rig = make_rig(max_tasks_per_device=1)
    first = rig.place("a", 1)
    second = rig.submit("b", 1)
    assert rig.waits(second)
    assert rig.broker.explain(second) == (
        "1GiB on SIM-0; a task runs on each, and max_tasks_per_device is 1"
    )
    rig.start(first)
    rig.exit(first)
    rig.broker.read()
    decided(second)
    assert second.placement is not None


def test_a_busy_device_is_passed_over_while_another_fits(make_rig: MakeRig) -> None:
    rig = make_rig("2x24GiB")
    rig.reader.compute("SIM-0", 0.95)
    assert [indices(rig.place(name, 6)) for name in "abcde"] == [[1], [1], [1], [1], [0]]


def test_a_short_task_passes_a_blocked_one_that_it_does_not_delay(make_rig: MakeRig) -> None:
    rig = make_rig()
    first = rig.place("a", 20, expected_s=100.0)
    head = rig.submit("b", 23, expected_s=50.0)
    rig.clock.advance(40.0)
    rig.broker.read()
    long = rig.submit("c", 1.5, expected_s=61.0)
    assert rig.waits(head, long)
    assert rig.broker.explain(head) == (
        "23GiB on SIM-0; most free 4GiB; SIM-0 kept for it, free in about 1m 00s"
    )
    rig.place("d", 3, expected_s=59.0)
    assert first.placement is not None
    assert [r.ends_s for r in first.placement.reservations] == [1100.0]


def test_somebody_elses_memory_and_overuse_are_not_given_away(rig: Rig) -> None:
    rig.reader.occupy("SIM-0", 4 * GIB)
    first = rig.place("a", 6)
    rig.start(first, gib=8)
    rig.broker.read()
    assert rig.broker.explain(rig.submit("b", 13)).startswith("13GiB on SIM-0; most free 12GiB")


# Waiting.


def test_a_waiter_is_told_why_and_again_when_it_changes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.place("a", 20)
    explained: queue.SimpleQueue[str] = queue.SimpleQueue()
    explain = rig.broker.explain

    def listen(ticket: Ticket) -> str:
        reason = explain(ticket)
        explained.put(reason)
        return reason

    monkeypatch.setattr(rig.broker, "explain", listen)
    waiter = Waiter(rig, rig.submit("b", 6), again_s=2.0)

    def advance(duration_s: float) -> str:
        rig.broker.read()
        rig.clock.wait_for_waiters(3)
        rig.clock.advance(duration_s)
        return explained.get(timeout=DEADLOCK_S)

    before, after = "6GiB on SIM-0; most free 4GiB", "6GiB on SIM-0; most free 1GiB"
    assert advance(1.0) == before
    assert advance(2.0) == before
    rig.reader.occupy("SIM-0", 3 * GIB)
    assert advance(2.0) == after
    assert [waiter.next_told() for _ in range(2)] == [before, after]
    assert waiter.told.empty(), "the same reason is not told twice"


def test_a_limit_ends_the_wait_and_lets_others_pass(make_rig: MakeRig) -> None:
    rig = make_rig(patience=NO_BACKFILL)
    rig.place("a", 20)
    waiter = Waiter(rig, rig.submit("b", 6), limit_s=0.5)
    behind = rig.submit("c", 4)
    assert rig.waits(behind)
    rig.clock.wait_for_waiters(3)
    rig.clock.advance(0.5)
    result = waiter.result()
    assert isinstance(result, PlacementTimeoutError)
    assert str(result) == (
        "gpu:wait=500ms is over: 'b' still waited for 6GiB on SIM-0; most free 4GiB"
    )
    decided(behind)


def test_what_is_placed_as_the_limit_is_reached_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rig.place("a", 20)
    second = rig.submit("b", 6)

    def explain(ticket: Ticket) -> str:
        rig.broker.end(first)
        decided(ticket)
        return "nothing any more"

    monkeypatch.setattr(rig.broker, "explain", explain)
    assert rig.broker.wait(second, 0.0, lambda _: None) is second.placement


def test_who_stops_waiting_holds_nothing(rig: Rig) -> None:
    first = rig.place("a", 20)
    second = rig.submit("b", 6)
    waiter = Waiter(rig, second)

    def fail(_: str) -> None:
        # The worst moment: it is placed, and nobody is there to take it.
        rig.broker.end(first)
        decided(second)
        raise RuntimeError("the API is gone")

    waiter.on_waiting = fail
    rig.broker.settle()
    rig.clock.wait_for_waiters(3)
    rig.clock.advance(1)
    assert isinstance(waiter.result(), RuntimeError)
    assert [rig.next_recovered() for _ in "ab"] == [("a", 0), ("b", 0)]
    assert rig.ledger.view().reservations == ()


def test_a_withdrawn_head_no_longer_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(patience=NO_BACKFILL)
    first = rig.place("a", 20)
    head, behind = rig.submit("b", 6), rig.submit("c", 4)
    waiter = Waiter(rig, head)
    assert rig.waits(head, behind)
    assert rig.broker.withdraw(head)
    assert isinstance(waiter.result(), Withdrawn)
    decided(behind)
    assert not rig.broker.withdraw(head)
    assert not rig.broker.withdraw(first), "it was placed"


def test_withdrawing_at_the_moment_of_placing_leaks_nothing(rig: Rig) -> None:
    # Whoever wins: the one who waits has a placement and ends it, or nothing is held.
    for _ in range(50):
        ticket = rig.submit("a", 20)
        if not rig.broker.withdraw(ticket):
            assert ticket.placement is not None
            rig.broker.end(ticket)
            rig.next_recovered()
        else:
            assert ticket.placement is None
        rig.broker.settle()
        assert rig.ledger.view().reservations == ()


# When memory is back.


def test_without_a_process_there_is_nothing_to_wait_for(rig: Rig) -> None:
    ticket = rig.place("a", 20)
    rig.broker.end(ticket)
    assert rig.next_recovered() == ("a", 0)
    rig.broker.end(ticket)
    rig.broker.settle()
    assert rig.recovered.empty(), "told once"


def test_memory_is_looked_for_every_20_ms_until_it_is_back(rig: Rig) -> None:
    ticket = rig.place("a", 20)
    rig.start(ticket, gib=20)
    behind = rig.submit("b", 20)
    rig.broker.read()
    pid = ticket.pid
    assert pid is not None
    rig.broker.end(ticket)
    for _ in range(3):
        rig.broker.read()
        assert rig.waits(behind)
        rig.clock.advance(RECOVERY_POLL_S)
    rig.broker.read()
    assert rig.recovered.empty()
    rig.reader.detach(pid)
    rig.clock.advance(RECOVERY_POLL_S)
    assert rig.next_recovered() == ("a", 0)
    decided(behind)


def leak(rig: Rig, ticket: Ticket, gib: float) -> None:
    """End its process, leaving something behind."""
    assert ticket.pid is not None and ticket.placement is not None
    rig.reader.detach(ticket.pid)
    rig.reader.leave_behind(ticket.placement.devices[0].uuid, int(gib * GIB))
    rig.broker.end(ticket)
    rig.broker.read()


def give_up(rig: Rig) -> None:
    rig.broker.read()
    rig.clock.advance(RECOVERY_S)


def test_a_leak_is_told_after_5_s_and_blamed_on_nobody_else(
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
    assert rig.broker.explain(rig.submit("d", 23)) == "23GiB on SIM-0; most free 22GiB"


def test_of_two_that_end_together_one_is_blamed(rig: Rig) -> None:
    tickets = [rig.place(name, 6) for name in "ab"]
    for ticket in tickets:
        rig.start(ticket, gib=4)
    leak(rig, tickets[0], gib=2)
    rig.exit(tickets[1])
    give_up(rig)
    assert [rig.next_recovered() for _ in tickets] == [("a", 2 * GIB), ("b", 0)]


def test_others_who_come_and_go_are_no_leak(rig: Rig) -> None:
    rig.reader.occupy("SIM-0", 5 * GIB)
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    rig.reader.occupy("SIM-0", 3 * GIB)
    rig.exit(first)
    assert rig.next_recovered() == ("a", 0)
    second = rig.place("b", 6)
    rig.start(second, gib=4)
    rig.reader.vacate("SIM-0")
    rig.exit(second)
    assert rig.next_recovered() == ("b", 0)


def test_where_no_process_is_listed_counters_stand_in_and_nothing_counts_as_leaked(
    rig: Rig,
) -> None:
    rig.reader.lists_processes = False
    measured: queue.SimpleQueue[int] = queue.SimpleQueue()
    first, second = rig.place("a", 6), rig.place("b", 6)
    first.on_measured = lambda at_s, sizes: measured.put(sum(sizes))
    for ticket, gib in ((first, 4), (second, 8)):
        rig.start(ticket, gib)
        ticket.stand_in_bytes = gib * GIB
    rig.broker.read()
    assert measured.get(timeout=DEADLOCK_S) == 4 * GIB
    assert rig.broker.explain(rig.submit("c", 20)) == "20GiB on SIM-0; most free 10GiB"
    rig.exit(first)
    assert rig.next_recovered() == ("a", None)
    rig.reader.lists_processes = True
    rig.broker.read()
    rig.exit(second)
    assert rig.next_recovered() == ("b", 0)


def test_a_process_that_left_the_list_before_its_end_was_heard_hides_nothing(rig: Rig) -> None:
    """Seen on an H200: killed processes are gone from NVML before their parent knows."""
    ticket = rig.place("a", 6)
    rig.start(ticket, gib=4)
    ticket.stand_in_bytes = 4 * GIB
    rig.broker.read()
    rig.reader.lists_processes = False
    rig.broker.read()
    rig.reader.lists_processes = True
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


def test_where_a_device_is_lost_nothing_can_be_told(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = make_rig("2x24GiB")
    first = rig.place("a", 20)
    rig.start(first, gib=4)
    rig.reader.fail("SIM-0", "fell off the bus")
    rig.exit(first)
    assert indices(rig.place("b", 20)) == [1]
    waiting = rig.submit("c", 20)
    for _ in range(2):
        rig.broker.read()
    assert caplog.text.count("device SIM-0 is set aside: fell off the bus") == 1
    give_up(rig)
    assert rig.next_recovered() == ("a", None)
    assert rig.waits(waiting)
    rig.reader.recover("SIM-0")
    rig.broker.read()
    decided(waiting)
    assert indices(waiting) == [0]
    assert "device SIM-0 answers again" in caplog.text


def test_a_driver_that_stops_answering_is_waited_for(rig: Rig) -> None:
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    rig.reader.break_driver("gone")
    rig.broker.read()
    waiting = rig.submit("b", 6)
    assert rig.waits(waiting)
    assert rig.broker.explain(waiting) == "the devices to answer (simulated driver: gone)"
    rig.exit(first)
    give_up(rig)
    assert rig.next_recovered() == ("a", None)
    rig.reader.mend_driver()
    rig.broker.read()
    decided(waiting)


def test_a_driver_that_hangs_holds_up_neither_reservations_nor_waiters(rig: Rig) -> None:
    first = rig.place("a", 6)
    rig.start(first, gib=4)
    rig.broker.settle()
    rig.clock.advance(0.01)
    hangs, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert hangs.wait(DEADLOCK_S)

    rig.reader.during = hang
    try:
        rig.broker.end(first)
        assert entered.wait(DEADLOCK_S)
        rig.broker.settle()
        rig.clock.advance(RECOVERY_S + 1)
        assert rig.next_recovered() == ("a", None)
        waiting = rig.submit("b", 6)
        assert rig.waits(waiting)
        assert rig.broker.explain(waiting) == "the devices to answer (nothing heard for 6.0s)"
    finally:
        hangs.set()
    decided(waiting)


def test_before_the_first_reading(rig: Rig) -> None:
    hangs = threading.Event()
    rig.reader.during = lambda: hangs.wait(DEADLOCK_S)
    waiting = rig.submit("a", 6)
    assert rig.broker.explain(waiting) == "the first reading of the devices"
    hangs.set()
    decided(waiting)
    assert rig.broker.explain(rig.submit("b", devices=("9",))).startswith("gpu:device=9 names no")


# Several brokers, and a broker inside a task.


class ContestedLedger(ProcessLedger):
    """Somebody else is quicker, once."""

    rival: Reservation | None = None

    def try_reserve(
        self, version: int, reservations: Sequence[Reservation], instead_of: Sequence[str] = ()
    ) -> bool:
        if self.rival is not None:
            rival, self.rival = self.rival, None
            assert super().try_reserve(version, [rival])
        return super().try_reserve(version, reservations, instead_of)


def test_who_lost_a_race_decides_again(make_rig: MakeRig) -> None:
    ledger = ContestedLedger()
    rig = make_rig("2x24GiB", ledger=ledger)
    device = rig.broker.devices[0]
    ledger.rival = Reservation("rival", device.host, device.uuid, 20 * GIB)
    assert indices(rig.place("a", 20)) == [1]


def test_brokers_that_share_a_ledger_see_each_other(rig: Rig) -> None:
    other = rig.another()
    first = rig.place("a", 10)
    rig.start(first, gib=8)
    rig.broker.read()
    # Its reservation counts, and its process not once more as somebody else's.
    second = rig.place("b", 14, broker=other)
    third = rig.submit("c", 10, broker=other)
    other.read()
    assert not third.decided
    assert "most free 0B" in other.explain(third)
    rig.exit(first)
    assert rig.next_recovered() == ("a", 0)
    # Its own reading still shows the process, which is nobody's now.
    other.read()
    decided(third)
    assert (indices(second), indices(third)) == ([0], [0])


def test_what_the_task_around_this_process_holds_counts_once(make_rig: MakeRig) -> None:
    device = SimulatedReader(SimulatedDevices("1x24GiB")).devices()[0]
    outer = Reservation("outer", device.host, device.uuid, 10 * GIB)
    rig = make_rig(held_by_parent=(outer,))
    rig.reader.attach(os.getpid(), ["SIM-0"])
    rig.reader.allocate(os.getpid(), "SIM-0", 6 * GIB)
    nested = rig.place("nested", 13)
    rig.start(nested, gib=2)
    rig.broker.read()
    waiting = rig.submit("next", 2)
    assert rig.waits(waiting)
    assert rig.broker.explain(waiting) == "2GiB on SIM-0; most free 1GiB"
    refused = rig.submit("never", 15)
    decided(refused)
    assert "from inside a GPU task" in str(refused.error)


class NvmlLike(Reader):
    kind: DeviceKind = "nvml"

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        own = ProcessUse(os.getpid(), None, GIB)
        return tuple(replace(s, processes=(own,)) for s in super().read(roots))


def test_a_context_in_this_process_is_told_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.reader = NvmlLike(SimulatedDevices("1x24GiB"), rig.clock)
    broker = rig.another()
    rig.place("a", 1, broker=broker)
    for _ in range(2):
        broker.read()
    assert caplog.text.count("this process itself holds GPU memory") == 1


def test_no_devices() -> None:
    class Empty(SimulatedReader):
        def devices(self) -> tuple[Device, ...]:
            return ()

    with pytest.raises(DeviceError, match="no device"):
        Broker(Empty(SimulatedDevices("1x1GiB")))


# Faults of others, and of ours.


def test_a_callback_that_fails_harms_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    first, second = rig.place("a", 10), rig.place("b", 10)
    measured: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the task's")

    first.on_measured = first.on_recovered = fail
    second.on_measured = lambda at_s, sizes: measured.put(sum(sizes))
    for ticket in (first, second):
        rig.start(ticket, gib=4)
    rig.broker.read()
    assert measured.get(timeout=DEADLOCK_S) == 4 * GIB
    waiting = rig.submit("c", 10)
    rig.exit(first)
    decided(waiting)
    assert "a fault of the task's" in caplog.text


def test_a_fault_of_ours_does_not_end_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(prefect_gpu.waiting_list, "decide", fail)
    ticket = rig.submit("a", 6)
    rig.broker.read()
    assert rig.waits(ticket)
    monkeypatch.undo()
    rig.broker.read()
    decided(ticket)
    assert "a fault of ours" in caplog.text


def test_nothing_is_kept_of_those_who_are_gone(rig: Rig) -> None:
    for n in range(20):
        ticket = rig.place(f"t{n}", 20)
        rig.start(ticket, gib=1)
        rig.exit(ticket)
        rig.next_recovered()
    rig.broker.withdraw(rig.submit("withdrawn", 1))
    decided(rig.submit("refused", 99))
    rig.broker.settle()
    broker, waiting = rig.broker, rig.broker._waiting
    assert not waiting._queue and not waiting._tickets and not broker._placed
    assert not waiting._possible and not waiting._kinds
    assert not broker._recovery.ending and not broker._calls
    assert rig.ledger.view().reservations == () and not rig.ledger.view().processes


# The end.


def test_closing_ends_every_wait(rig: Rig) -> None:
    running, ending = rig.place("running", 10), rig.place("ending", 10)
    for ticket in (running, ending):
        rig.start(ticket, gib=4)
    rig.broker.end(ending)
    rig.broker.read()
    waiters = [Waiter(rig, rig.submit(name, 10)) for name in "ab"]
    rig.broker.settle()
    rig.broker.close()
    assert all(isinstance(waiter.result(), Withdrawn) for waiter in waiters)
    # What was still there at the last look.
    assert rig.next_recovered() == ("ending", 4 * GIB)
    late = rig.submit("late", 1)
    assert isinstance(Waiter(rig, late).result(), Withdrawn)
    assert not rig.broker.withdraw(late)
    rig.broker.end(running)
    assert rig.next_recovered() == ("running", None)
    assert rig.ledger.view().reservations == ()
    rig.broker.close()


def test_a_broker_that_was_never_used_closes(rig: Rig) -> None:
    rig.broker.close()
    assert rig.broker.closed


def test_a_process_has_one_broker_for_each_specification(rig: Rig) -> None:
    key = object()
    broker = shared_broker(key, rig.another)
    assert shared_broker(key, rig.another) is broker
    assert shared_broker(object(), rig.another) is not broker
    broker.close()
    assert shared_broker(key, rig.another) is not broker


# What standbys must know.


def test_what_was_promised_of_the_machines_memory_is_told_until_it_is_taken(rig: Rig) -> None:
    ticket = rig.place("one", 1, host_bytes=3 * GIB)
    assert rig.broker.host_promised_bytes == 3 * GIB
    ticket.running = True
    assert rig.broker.host_promised_bytes == 0
    rig.broker.end(ticket)


def test_a_request_that_the_machines_memory_holds_up_is_told(rig: Rig) -> None:
    first = rig.place("first", 1)
    assert not rig.broker.wants_host_memory
    rig.host_available_bytes = 2 * GIB
    # Seen before the request comes: one is decided by the last reading.
    rig.broker.read()
    rig.submit("second", 1, host_bytes=3 * GIB)
    rig.broker.settle()
    assert rig.broker.wants_host_memory
    rig.host_available_bytes = 4 * GIB
    rig.broker.read()
    assert not rig.broker.wants_host_memory
    rig.broker.end(first)


def test_one_that_waits_for_a_device_alone_wants_nothing_of_the_machines(rig: Rig) -> None:
    first = rig.place("first", 20)
    rig.submit("second", 20, host_bytes=GIB)
    rig.broker.read()
    assert not rig.broker.wants_host_memory
    rig.broker.end(first)
