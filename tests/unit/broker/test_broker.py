"""Which request gets what of one broker or several, and what faults and the broker's end do to requests."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

import prefect_gpu.broker.planning
from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.events import Event, Handle, LedgerChanged
from prefect_gpu.broker.ledger import Changes, Entry, Ledger
from prefect_gpu.broker.machine import Machine
from prefect_gpu.broker.phases import Phase
from prefect_gpu.broker.planning import HOPELESS_S
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.errors import CapacityError, DeviceError, PlacementError
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    DeviceSnapshot,
    DeviceWork,
    ProcessUse,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.scheduling_pass import Decisions
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import (
    Reader,
    Rig,
    Waiter,
    indices,
    threads_refused,
)
from tests.unit.broker.broker_rig import rig as rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig

# Which request gets what.


def test_two_of_40_percent_run_together_and_the_third_after_them(rig: Rig) -> None:
    first, second = (rig.place(name, memory=0.4) for name in "ab")
    third = rig.submit("c", memory=0.4)
    assert rig.waits(third)
    rig.start(first)
    rig.exit(first)
    rig.decided(third)
    assert rig.next_recovered() == ("a", 0)
    assert (indices(second), indices(third)) == ([0], [0])


def test_the_first_decision_waits_for_a_reading_and_later_ones_for_a_fresh_one(rig: Rig) -> None:
    rig.broker.end(rig.place("a", 20))
    rig.next_recovered()
    rig.reader.occupy("SIM-0", 10 * GIB)
    rig.clock.advance(60)
    late = rig.submit("b", 20)
    assert rig.waits(late)
    rig.reader.vacate()
    rig.decided(late)


def test_a_driver_that_answers_slowly_is_decided_on_all_the_same(rig: Rig) -> None:
    rig.reader.during = lambda: rig.clock.advance(3)
    rig.place("a", 6)


def test_the_impossible_is_refused(rig: Rig) -> None:
    ticket = rig.submit("a", 25)
    rig.decided(ticket)
    result = Waiter(rig, ticket).result()
    assert isinstance(result, PlacementError)
    assert "larger than any device" in str(result)


def test_devices_that_are_lost_for_good_refuse_what_waits_and_what_comes(rig: Rig) -> None:
    rig.place("runs", 20)
    waits = Waiter(rig, rig.submit("waits", 20))
    rig.broker.give_up("the cluster is gone")
    rig.broker.look()
    result = waits.result()
    assert isinstance(result, DeviceError) and "the cluster is gone" in str(result)
    with pytest.raises(DeviceError, match="the cluster is gone"):
        rig.submit("later", 1)


def test_memory_that_the_driver_keeps_is_learned_later(rig: Rig) -> None:
    read = Reader.read

    def with_reserved(roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        snapshots = read(rig.reader, roots)
        return tuple(s if s.error else replace(s, system_reserved_bytes=GIB) for s in snapshots)

    rig.reader.read = with_reserved  # type: ignore[method-assign]
    rig.reader.failed["SIM-0"] = "GPU is lost"
    waiting = rig.submit("a", 24)
    assert rig.waits(waiting)
    rig.reader.failed.clear()
    rig.decided(waiting)
    assert isinstance(waiting.error, PlacementError)


def test_ends_that_are_seen_together_are_one_scheduling_pass(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [rig.place(name, 10) for name in "ab"]
    for ticket in running:
        rig.start(ticket, gib=8)
    waiting = [rig.submit(name, 10) for name in "cd"]
    assert rig.waits(*waiting)
    passes: list[int] = []
    decide = prefect_gpu.broker.planning.decide

    def count(*args: Any) -> Decisions:
        decisions = decide(*args)
        passes.append(len(decisions.placements))
        return decisions

    monkeypatch.setattr(prefect_gpu.broker.planning, "decide", count)
    for ticket in running:
        rig.exit(ticket)
    rig.decided(*waiting)
    assert [count for count in passes if count] == [2]


def test_max_processes_and_host_memory() -> None:
    rig = Rig(max_processes=2)
    first = rig.place("a", 1, host_bytes=60 * GIB)
    hungry = rig.submit("b", 1, host_bytes=10 * GIB)
    assert rig.waits(hungry)
    assert "10GiB of host memory" in rig.why(hungry)
    # Once its body runs, its memory is in what the machine tells.
    rig.broker.mark_running(first)
    rig.decided(hungry)
    third = rig.submit("c", 1)
    assert rig.waits(third)
    assert rig.broker.processes == 2
    assert rig.why(third) == "another process to end (max_processes is 2)"


def test_max_tasks_per_device() -> None:
    rig = Rig(max_tasks_per_device=1)
    first = rig.place("a", 1)
    second = rig.submit("b", 1)
    assert rig.waits(second)
    assert rig.why(second) == (
        "1GiB on device 0; max_tasks_per_device is 1, and as many tasks run on each"
    )
    rig.start(first)
    rig.exit(first)
    rig.decided(second)
    assert second.placement is not None


def test_a_busy_device_is_passed_over_while_another_fits() -> None:
    rig = Rig("2x24GiB")
    rig.reader.busy["SIM-0"] = 0.95
    assert [indices(rig.place(name, 6)) for name in "abcde"] == [[1], [1], [1], [1], [0]]


def test_a_reading_tells_a_task_what_its_devices_computed() -> None:
    rig = Rig("2x24GiB")
    rig.reader.work["SIM-1"] = work = DeviceWork({7: 0.5}, 100.0)
    told = []
    tickets = [rig.place(name, 6, devices=(name,)) for name in "01"]
    for ticket in tickets:
        ticket.on_measured = lambda at_s, found: told.append([each.work for each in found])
        rig.start(ticket)
    rig.broker.look()
    assert told[-2:] == [[None], [work]]


def test_a_short_task_passes_a_blocked_one_that_it_does_not_delay() -> None:
    rig = Rig()
    first = rig.place("a", 20, expected_s=100.0)
    head = rig.submit("b", 23, expected_s=50.0)
    rig.clock.advance(40.0)
    rig.broker.look()
    long = rig.submit("c", 1.5, expected_s=61.0)
    assert rig.waits(head, long)
    assert rig.why(head) == (
        "23GiB on device 0; most free 4GiB; device 0 kept for it, free in about 1m"
    )
    rig.place("d", 3, expected_s=59.0)
    assert first.placement is not None
    assert [r.ends_s for r in first.placement.reservations] == [1100.0]


def test_memory_that_others_or_an_overuse_take_is_not_given_away(rig: Rig) -> None:
    rig.reader.occupy("SIM-0", 4 * GIB)
    first = rig.place("a", 6)
    rig.start(first, gib=8)
    rig.broker.look()
    assert rig.why(rig.submit("b", 13)).startswith("13GiB on device 0; most free 12GiB")


# Several brokers, and a broker inside a task.


class ContestedLedger(Ledger):
    """Another broker is quicker, once."""

    rival: Reservation | None = None

    def try_write(self, version: int, changes: Changes) -> bool:
        if self.rival is not None:
            rival, self.rival = self.rival, None
            request = Request(rival.request_id, "rival", 0, 0.0)
            entry = Entry(request, phase=Phase.PLACED, reservations=(rival,))
            assert super().try_write(version, {request.id: entry})
        return super().try_write(version, changes)


def test_a_broker_that_lost_a_race_decides_again() -> None:
    ledger = ContestedLedger()
    rig = Rig("2x24GiB", ledger=ledger)
    device = rig.broker.devices[0]
    ledger.rival = Reservation("rival", *device.key, 20 * GIB)
    assert indices(rig.place("a", 20)) == [1]


def test_brokers_that_share_a_ledger_see_each_other(rig: Rig) -> None:
    other = rig.another()
    first = rig.place("a", 10)
    rig.start(first, gib=8)
    rig.broker.look()
    # Its reservation counts, and its process is not counted again as foreign.
    second = rig.place("b", 14, broker=other)
    third = rig.submit("c", 10, broker=other)
    other.look()
    assert not third.decided
    assert "most free 0B" in rig.why(third)
    rig.exit(first)
    assert rig.next_recovered() == ("a", 0)
    # Its own reading still shows the process, which no request names now.
    other.look()
    rig.decided(third)
    assert (indices(second), indices(third)) == ([0], [0])


def test_what_the_task_around_this_process_holds_counts_once() -> None:
    device = SimulatedReader(SimulatedDevices("1x24GiB")).devices()[0]
    outer = Reservation("outer", *device.key, 10 * GIB)
    rig = Rig(around=(outer,), ancestors=("outer",), waits_since=lambda: 0.0)
    rig.reader.attach(os.getpid(), ["SIM-0"])
    rig.reader.allocate(os.getpid(), "SIM-0", 6 * GIB)
    nested = rig.place("nested", 13)
    rig.start(nested, gib=2)
    rig.broker.look()
    waiting = rig.submit("next", 2)
    assert rig.waits(waiting)
    assert rig.why(waiting) == "2GiB on device 0; most free 1GiB"
    refused = rig.submit("never", 19)
    assert rig.waits(refused)
    rig.clock.advance(HOPELESS_S)
    rig.decided(refused)
    assert "from inside a GPU task" in str(refused.error)
    assert "holds 10GiB and uses 6GiB" in str(refused.error)


class NvmlLike(Reader):
    kind: DeviceKind = "nvml"

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        own = ProcessUse(os.getpid(), None, GIB)
        return tuple(replace(s, processes=(own,)) for s in super().read(roots))


def test_a_context_in_the_flows_process_is_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.reader = NvmlLike(SimulatedDevices("1x24GiB"), rig.clock)
    broker = rig.another()
    rig.place("a", 1, broker=broker)
    for _ in range(2):
        broker.look()
    assert caplog.text.count("this process itself holds GPU memory") == 1


def test_no_devices() -> None:
    class Empty(SimulatedReader):
        def devices(self) -> tuple[Device, ...]:
            return ()

    with pytest.raises(DeviceError, match="no device"):
        Broker(Empty(SimulatedDevices("1x1GiB")), Ledger())


# Faults of others, and of ours.


def test_a_callback_that_fails_harms_no_other_request(
    thread_rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = thread_rig
    first, second = rig.place("a", 10), rig.place("b", 10)
    measured: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the task's")

    first.on_measured = first.on_recovered = fail
    second.on_measured = lambda at_s, found: measured.put(found[0].total_bytes)
    for ticket in (first, second):
        rig.start(ticket, gib=4)
    rig.broker.refresh()
    while measured.get(timeout=DEADLOCK_S) != 4 * GIB:
        # The reading had begun before its process was known.
        rig.broker.refresh()
    waiting = rig.submit("c", 10)
    rig.exit(first)
    rig.decided(waiting)
    assert "a fault of the task's" in caplog.text


def test_an_internal_error_does_not_end_the_thread(
    thread_rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(prefect_gpu.broker.planning, "decide", fail)
    ticket = thread_rig.submit("a", 6)
    assert failed.wait(DEADLOCK_S)
    assert not ticket.decided
    monkeypatch.undo()
    thread_rig.broker.refresh()
    thread_rig.decided(ticket)
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("name", ["broker", "sampler"])
def test_a_thread_that_cannot_be_started_fails_one_request_and_the_next_tries_again(
    thread_rig: Rig, name: str
) -> None:
    told = rf"'prefect-gpu-{name}' could not be started .*can't start new thread.*ulimit -u"
    with threads_refused(name), pytest.raises(CapacityError, match=told):
        thread_rig.submit("a", 1)
    assert thread_rig.place("b", 20).placement is not None


def test_an_error_in_the_question_whether_the_task_around_waits_does_not_end_the_thread(
    thread_rig: Rig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = iter([RuntimeError("a fault of the channel")] * 3)

    def waits_since() -> float | None:
        for error in failing:
            raise error
        return None

    thread_rig.place("a", 6, broker=thread_rig.another(waits_since=waits_since))
    assert "a fault of the channel" in caplog.text


def test_a_broker_without_requests_does_not_collect_the_changes_of_others(rig: Rig) -> None:
    handled: list[Event] = []

    def note(machine: Machine) -> Handle:
        return lambda event, now_s: handled.append(event) or machine.handle(event, now_s)

    idle = rig.another(record=note)
    for n in range(5):
        rig.broker.end(rig.place(f"t{n}", 1))
        rig.next_recovered()
    idle.look()
    assert handled.count(LedgerChanged()) == 1


def test_nothing_is_kept_of_requests_that_are_gone(rig: Rig) -> None:
    for n in range(20):
        ticket = rig.place(f"t{n}", 20)
        rig.start(ticket, gib=1)
        rig.exit(ticket)
        rig.next_recovered()
    running = rig.place("running", 20)
    assert rig.broker.withdraw(rig.submit("withdrawn", 20))
    rig.broker.end(running)
    rig.decided(rig.submit("refused", 99))
    rig.broker.look()
    (machine,) = rig.machines
    known = machine.known
    assert not known.queue and not known.waiting and not known.placed and not known.entries
    assert not known.recovery.ending
    assert not rig.reservations() and not rig.ledger.view().processes


def test_a_process_that_replaces_a_standby_is_the_one_in_the_ledger(rig: Rig) -> None:
    ticket = rig.place("a", 20)
    for _ in range(2):
        pid = rig.start(ticket, gib=1)
        rig.broker.look()
    entry = rig.ledger.entry(ticket.request.id)
    assert entry is not None and entry.pid == pid == ticket.pid
