"""Hot standbys as the broker keeps them: lent, taken, given up, and never in anybody's way."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.hot import MOST_ON_DEVICE
from prefect_gpu.ticket import Loan, Ticket
from prefect_gpu.units import GIB, MIB
from tests.unit.broker_rig import MakeRig, Reader, Rig, WatchedBroker, decided, indices
from tests.unit.broker_rig import make_rig as make_rig
from tests.unit.broker_rig import rig as rig

KIND = "torch"


class Hot:
    """Hot standbys of a rig, which hold 1 GiB each."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        #: Ids of those that were asked to end, in that order.
        self.asked: list[str] = []
        self.loans: dict[str, Loan] = {}
        self.pids: dict[str, int] = {}

    def lend(
        self, name: str, kind: str = KIND, broker: WatchedBroker | None = None, **options: Any
    ) -> Loan | None:
        pid = next(self.rig.pids)
        loan = (broker or self.rig.broker).lending.lend(
            name, kind, pid, lambda device: GIB, lambda: self.asked.append(name), **options
        )
        if loan is not None:
            self.loans[name], self.pids[name] = loan, pid
        return loan

    def make(self, name: str, kind: str = KIND, broker: WatchedBroker | None = None) -> Loan:
        """One that has started."""
        loan = self.lend(name, kind, broker)
        assert loan is not None
        self.rig.reader.attach(self.pids[name], [loan.device.uuid])
        self.rig.reader.allocate(self.pids[name], loan.device.uuid, GIB)
        (broker or self.rig.broker).lending.offer(loan)
        return loan

    def end(self, name: str, broker: WatchedBroker | None = None) -> None:
        """Its process is gone."""
        self.rig.reader.detach(self.pids[name])
        (broker or self.rig.broker).lending.end(self.loans[name])

    def reserved(self) -> dict[str, int]:
        return {
            r.request_id: r.reserved_bytes // GIB
            for r in self.rig.ledger.view().reservations
            if r.standby
        }


@pytest.fixture
def hot(rig: Rig) -> Hot:
    return Hot(rig)


def free_gib(broker: WatchedBroker) -> float:
    broker.read()
    with broker._changed:
        reading = broker._lookout.reading
        assert reading is not None
        (room,) = broker._lookout.survey(reading)
        return room.free_bytes / GIB


# It is lent a device.


def test_its_context_is_promised_before_it_is_made_and_is_nobodys_of_others(
    rig: Rig, hot: Hot
) -> None:
    loan = hot.make("s")
    assert loan.device.uuid == "SIM-0"
    assert hot.reserved() == {"s": 1}
    ticket = rig.place("a", 4)
    rig.broker.read()
    assert ticket.foreign_before == {loan.device.key: 0}
    assert rig.broker.foreign_growth_bytes(ticket, patience_s=0) == 0
    assert free_gib(rig.broker) == 20, "it counts as gone"
    assert ticket.standby is None and hot.asked == []
    assert rig.broker.processes == 1, "it is no task"


def test_no_more_on_a_device_than_the_most_and_none_without_room(rig: Rig, hot: Hot) -> None:
    for number in range(MOST_ON_DEVICE):
        hot.make(f"s{number}")
    assert hot.lend("one more") is None
    assert hot.lend("another kind", "cupy") is not None
    ticket = rig.place("a", 24 - MOST_ON_DEVICE - 1)
    assert hot.lend("too many", "jax") is None
    assert hot.asked == [] and ticket.standby is None


def test_a_driver_that_does_not_answer_lends_nothing(rig: Rig, hot: Hot) -> None:
    rig.reader.break_driver()
    assert hot.lend("s", patience_s=0) is None
    assert hot.reserved() == {}


def test_one_that_never_touched_its_device_leaves_at_once(rig: Rig, hot: Hot) -> None:
    loan = hot.lend("s")
    assert loan is not None
    rig.broker.lending.end(loan)
    rig.broker.settle()
    assert hot.reserved() == {} and not rig.broker._recovery.ending


# A task takes it.


def test_a_task_of_its_kind_takes_it_and_with_it_its_context(rig: Rig, hot: Hot) -> None:
    loan = hot.make("s")
    ticket = rig.place("a", 24, standby=KIND)
    assert ticket.standby is loan and hot.asked == []
    assert hot.reserved() == {}, "in the same step"
    assert ticket.pid == hot.pids["s"], "what it holds is the task's"
    assert free_gib(rig.broker) == 0
    rig.broker.attach(ticket, hot.pids["s"])
    assert ticket.standby is None
    rig.broker.lending.end(loan)
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0), "all of it came back, the context too"
    assert free_gib(rig.broker) == 24


def test_what_does_not_come_back_of_its_context_has_leaked(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    rig.broker.attach(ticket, hot.pids["s"])
    rig.reader.detach(hot.pids["s"])
    rig.reader.leave_behind("SIM-0", GIB)
    rig.broker.end(ticket)
    rig.broker.read()
    rig.clock.advance(6)
    assert rig.next_recovered() == ("a", GIB)


@pytest.mark.parametrize("kind", [None, "cupy"])
def test_a_task_of_another_kind_leaves_it(rig: Rig, hot: Hot, kind: str | None) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=kind)
    assert ticket.standby is None and ticket.pid is None and hot.reserved() == {"s": 1}


def test_one_that_is_not_offered_is_not_taken(rig: Rig, hot: Hot) -> None:
    assert hot.lend("s") is not None
    assert rig.place("a", 4, standby=KIND).standby is None


def test_a_task_that_ends_before_its_process_has_it_ended(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    rig.broker.end(ticket)
    assert rig.next_recovered() == ("a", 0)
    assert hot.asked == ["s"]
    assert free_gib(rig.broker) == 23, "what it holds still is ours"
    hot.end("s")
    assert free_gib(rig.broker) == 24
    rig.broker.settle()
    assert not rig.broker.lending.loans and not rig.broker._recovery.ending


def test_a_task_that_gets_another_process_has_it_ended(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    pid = rig.start(ticket, 2)
    assert ticket.pid == pid and ticket.standby is None
    rig.broker.settle()
    assert hot.asked == ["s"]
    rig.broker.read()
    assert rig.broker.foreign_growth_bytes(ticket, patience_s=0) == 0
    hot.end("s")
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


def test_one_that_died_before_its_task_came_is_waited_for(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    hot.end("s")
    rig.start(ticket)
    rig.broker.read()
    assert not rig.broker.lending.loans and not rig.broker._recovery.ending
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


# It is in nobody's way.


@pytest.mark.parametrize(
    ("gib", "options"),
    [
        pytest.param(24, {}, id="all of the device"),
        pytest.param(4, {"exclusive": True}, id="alone"),
        pytest.param(None, {}, id="a probe"),
    ],
)
def test_it_goes_before_whoever_needs_its_memory_starts(
    rig: Rig, hot: Hot, gib: float | None, options: dict[str, Any], caplog: Any
) -> None:
    hot.make("s")
    ticket = rig.submit("a", gib, **options)
    rig.broker.read()
    assert rig.waits(ticket) and hot.asked == ["s"]
    rig.broker.read()
    assert rig.waits(ticket), "it still holds it"
    assert hot.asked == ["s"], "asked once"
    with caplog.at_level(logging.WARNING):
        hot.end("s")
        decided(ticket)
    assert ticket.placement is not None
    assert ticket.placement.budget_bytes == ((4 if gib == 4 else 24) * GIB,)
    assert hot.reserved() == {} and not caplog.records
    rig.start(ticket)
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


def test_a_task_of_the_whole_device_is_not_kept_from_it_by_a_drivers_bookkeeping(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    # On an H200 in use by nobody as long as a process of ours is listed.
    rig.reader.occupy("SIM-0", 9 * MIB)
    ticket = rig.submit("a", 24)
    rig.broker.read()
    assert rig.waits(ticket) and hot.asked == ["s"]
    rig.reader.vacate("SIM-0")
    hot.end("s")
    decided(ticket)
    assert ticket.placement is not None


def test_a_probe_takes_the_one_of_its_kind_and_has_the_others_gone(rig: Rig, hot: Hot) -> None:
    hot.make("own")
    hot.make("other", "cupy")
    ticket = rig.submit("a", standby=KIND)
    rig.broker.read()
    assert rig.waits(ticket) and hot.asked == ["other"]
    hot.end("other")
    decided(ticket)
    assert ticket.placement is not None and ticket.placement.budget_bytes == (24 * GIB,)
    assert ticket.standby is hot.loans["own"]


def test_a_smaller_task_behind_does_not_get_what_it_gives_up(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    head = rig.submit("a", 22)
    second = rig.submit("b", 1.5)
    behind = rig.submit("c", 1)
    rig.broker.read()
    assert second.placement is None and hot.asked == ["s"]
    hot.end("s")
    decided(head, second)
    assert rig.waits(behind)


def test_memory_that_others_take_is_theirs_and_it_stays_until_a_task_needs_it(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    rig.reader.occupy("SIM-0", 20 * GIB)
    assert free_gib(rig.broker) == 4
    ticket = rig.place("a", 3)
    assert hot.asked == [] and list(ticket.foreign_before.values()) == [20 * GIB]


def test_two_brokers_see_each_others(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = rig.another()
    hot = Hot(rig)
    hot.make("s")
    small = rig.submit("small", 4, broker=other, standby=KIND)
    decided(small)
    assert small.standby is None and list(small.foreign_before.values()) == [0]
    assert free_gib(other) == 20
    large = rig.submit("large", 20, broker=other)
    other.read()
    assert not large.decided
    rig.broker.settle()
    assert hot.asked == ["s"]
    hot.end("s")
    rig.broker.read()
    other.read()
    decided(large)
    assert large.placement is not None


def test_another_device_is_left_alone(make_rig: MakeRig) -> None:
    rig = make_rig("2x24GiB")
    hot = Hot(rig)
    first, second = hot.make("s"), hot.make("t")
    assert {first.device.index, second.device.index} == {0, 1}
    ticket = rig.submit("a", devices=("1",))
    rig.broker.read()
    assert hot.asked == [next(n for n, loan in hot.loans.items() if loan.device.index == 1)]
    hot.end(hot.asked[0])
    decided(ticket)
    assert indices(ticket) == [1]


def test_a_broker_that_closes_has_them_end(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    rig.broker.close()
    assert hot.asked == ["s"]
    hot.end("s")
    assert hot.reserved() == {}
    assert hot.lend("t") is None


def test_a_device_that_lists_no_process_counts_it_as_promised(rig: Rig, hot: Hot) -> None:
    rig.reader.lists_processes = False
    hot.make("s")
    assert free_gib(rig.broker) == 24
    ticket: Ticket = rig.place("a", 4, standby=KIND)
    assert list(ticket.foreign_before.values()) == [0]
    assert isinstance(rig.reader, Reader) and rig.reader.spec == SimulatedDevices("1x24GiB")
