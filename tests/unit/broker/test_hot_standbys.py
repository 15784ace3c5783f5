"""Hot standbys as the broker keeps them: lent a device, taken by a task, given up for other tasks."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.model import Device
from prefect_gpu.scheduling.standbys import MOST_ON_DEVICE
from prefect_gpu.units import GIB, MIB
from tests.unit.broker.broker_rig import MakeRig, Reader, Rig, WatchedBroker, decided, indices
from tests.unit.broker.broker_rig import make_rig as make_rig
from tests.unit.broker.broker_rig import rig as rig

KIND = "torch"


class Hot:
    """Hot standbys of a rig, which hold 1 GiB each."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        #: Ids of those that were asked to end, in that order.
        self.asked: list[str] = []
        self.lent: dict[str, Device] = {}
        self.pids: dict[str, int] = {}

    def lend(
        self, name: str, kind: str = KIND, broker: WatchedBroker | None = None, **options: Any
    ) -> Device | None:
        pid = next(self.rig.pids)
        lent = (broker or self.rig.broker).lend_device(
            name, kind, "a framework", pid, lambda: self.asked.append(name), **options
        )
        if lent is not None:
            self.lent[name], self.pids[name] = lent, pid
        return lent

    def make(self, name: str, kind: str = KIND, broker: WatchedBroker | None = None) -> str:
        """Start one; return the UUID of its device."""
        lent = self.lend(name, kind, broker)
        assert lent is not None
        (broker or self.rig.broker).offer_standby(name)
        self.rig.reader.allocate(self.pids[name], lent.uuid, GIB)
        return lent.uuid

    def end(self, name: str, broker: WatchedBroker | None = None) -> None:
        """Its process is gone."""
        (broker or self.rig.broker).end_standby(name)

    def reserved(self) -> dict[str, int]:
        return {r.request_id: r.reserved_bytes // GIB for r in self.rig.reservations() if r.standby}


@pytest.fixture
def hot(rig: Rig) -> Hot:
    return Hot(rig)


def free_gib(broker: WatchedBroker) -> float:
    broker.read()
    with broker._changed:
        (state,) = broker._states()
        return state.free_bytes / GIB


# It is lent a device.


def test_the_context_of_a_hot_standby_is_reserved_before_it_starts_and_is_not_foreign(
    rig: Rig, hot: Hot
) -> None:
    assert hot.make("s") == "SIM-0"
    assert hot.reserved() == {"s": 1}
    ticket = rig.place("a", 4)
    rig.broker.read()
    assert list(ticket.foreign_before.values()) == [0]
    assert rig.broker.foreign_growth_bytes(ticket, patience_s=0) == 0
    assert free_gib(rig.broker) == 20, "it counts as gone"
    assert not ticket.standby_id and hot.asked == []
    assert rig.broker.processes == 1, "it is no task"


def test_a_device_has_a_limited_number_of_hot_standbys_of_a_kind_and_none_without_free_memory(
    rig: Rig, hot: Hot
) -> None:
    for number in range(MOST_ON_DEVICE):
        hot.make(f"s{number}")
    assert hot.lend("one more") is None
    assert hot.lend("another kind", "cupy") is not None
    ticket = rig.place("a", 24 - MOST_ON_DEVICE - 1)
    assert hot.lend("too many", "jax") is None
    assert hot.asked == [] and not ticket.standby_id


def test_no_hot_standby_starts_while_the_driver_does_not_answer(rig: Rig, hot: Hot) -> None:
    rig.reader.broken = "gone"
    assert hot.lend("s", patience_s=0) is None
    assert hot.reserved() == {}


def test_a_hot_standby_that_never_used_its_device_is_released_at_once(rig: Rig, hot: Hot) -> None:
    assert hot.lend("s") is not None
    rig.broker.end_standby("s")
    rig.broker.settle()
    assert hot.reserved() == {}


# A task takes it.


def test_a_task_takes_a_hot_standby_of_its_kind_and_its_context(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 24, standby=KIND)
    assert ticket.standby_id == "s" and hot.asked == []
    assert hot.reserved() == {}, "in the same step"
    assert ticket.pid == hot.pids["s"], "what it holds is the task's"
    assert free_gib(rig.broker) == 0
    rig.broker.attach(ticket, hot.pids["s"])
    assert not ticket.standby_id
    rig.broker.end_standby("s")
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0), "all of it came back, the context too"
    assert free_gib(rig.broker) == 24


def test_the_context_of_a_taken_hot_standby_leaks_if_it_does_not_come_back(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    rig.broker.attach(ticket, hot.pids["s"])
    rig.reader.detach(hot.pids["s"])
    rig.reader.leaked_bytes["SIM-0"] = GIB
    rig.broker.end(ticket)
    rig.broker.read()
    rig.clock.advance(6)
    assert rig.next_recovered() == ("a", GIB)


@pytest.mark.parametrize("kind", [None, "cupy"])
def test_a_task_of_another_kind_does_not_take_a_hot_standby(
    rig: Rig, hot: Hot, kind: str | None
) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=kind)
    assert not ticket.standby_id and ticket.pid is None and hot.reserved() == {"s": 1}


def test_a_hot_standby_that_is_not_offered_is_not_taken(rig: Rig, hot: Hot) -> None:
    assert hot.lend("s") is not None
    assert not rig.place("a", 4, standby=KIND).standby_id


def test_a_task_that_ends_before_it_has_a_process_ends_its_hot_standby(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    rig.broker.end(ticket)
    assert rig.next_recovered() == ("a", 0)
    assert hot.asked == ["s"]
    assert free_gib(rig.broker) == 23, "what it holds still is ours"
    hot.end("s")
    assert free_gib(rig.broker) == 24
    rig.broker.settle()
    assert hot.reserved() == {}


def test_a_task_that_gets_another_process_ends_its_hot_standby(rig: Rig, hot: Hot) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    pid = rig.start(ticket, 2)
    assert ticket.pid == pid and not ticket.standby_id
    rig.broker.settle()
    assert hot.asked == ["s"]
    rig.broker.read()
    assert rig.broker.foreign_growth_bytes(ticket, patience_s=0) == 0
    hot.end("s")
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


def test_the_memory_of_a_hot_standby_that_died_before_its_task_came_is_waited_for(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    ticket = rig.place("a", 4, standby=KIND)
    hot.end("s")
    rig.start(ticket)
    rig.broker.read()
    assert hot.reserved() == {} and free_gib(rig.broker) == 20
    rig.exit(ticket)
    assert rig.next_recovered() == ("a", 0)


# It ends for tasks that need its memory.


@pytest.mark.parametrize(
    ("gib", "options"),
    [
        pytest.param(24, {}, id="all of the device"),
        pytest.param(4, {"exclusive": True}, id="alone"),
        pytest.param(None, {}, id="a probe"),
    ],
)
def test_a_hot_standby_ends_before_a_task_that_needs_its_memory_starts(
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


def test_a_task_gets_a_whole_device_though_the_driver_keeps_memory_for_a_hot_standby(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    # On an H200 the driver keeps this for as long as it lists a process of ours.
    rig.reader.occupy("SIM-0", 9 * MIB)
    ticket = rig.submit("a", 24)
    rig.broker.read()
    assert rig.waits(ticket) and hot.asked == ["s"]
    rig.reader.vacate()
    hot.end("s")
    decided(ticket)
    assert ticket.placement is not None


def test_a_probe_takes_the_hot_standby_of_its_kind_and_the_others_end(rig: Rig, hot: Hot) -> None:
    hot.make("own")
    hot.make("other", "cupy")
    ticket = rig.submit("a", standby=KIND)
    rig.broker.read()
    assert rig.waits(ticket) and hot.asked == ["other"]
    hot.end("other")
    decided(ticket)
    assert ticket.placement is not None and ticket.placement.budget_bytes == (24 * GIB,)
    assert ticket.standby_id == "own"


def test_a_smaller_task_behind_does_not_get_the_memory_that_a_hot_standby_gives_up(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    head = rig.submit("a", 22)
    second = rig.submit("b", 1.5)
    behind = rig.submit("c", 1)
    rig.broker.read()
    assert second.placement is None and hot.asked == ["s"]
    hot.end("s")
    decided(head, second)
    assert rig.waits(behind)


def test_a_hot_standby_stays_while_other_users_take_memory_until_a_task_needs_it(
    rig: Rig, hot: Hot
) -> None:
    hot.make("s")
    rig.reader.occupy("SIM-0", 20 * GIB)
    assert free_gib(rig.broker) == 4
    ticket = rig.place("a", 3)
    assert hot.asked == [] and list(ticket.foreign_before.values()) == [20 * GIB]


def test_two_brokers_see_the_hot_standbys_of_each_other(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = rig.another()
    hot = Hot(rig)
    hot.make("s")
    small = rig.submit("small", 4, broker=other, standby=KIND)
    decided(small)
    assert not small.standby_id and list(small.foreign_before.values()) == [0]
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


def test_hot_standbys_on_other_devices_stay(make_rig: MakeRig) -> None:
    rig = make_rig("2x24GiB")
    hot = Hot(rig)
    assert {hot.make("s"), hot.make("t")} == {"SIM-0", "SIM-1"}
    ticket = rig.submit("a", devices=("1",))
    rig.broker.read()
    assert hot.asked == [next(name for name, lent in hot.lent.items() if lent.uuid == "SIM-1")]
    hot.end(hot.asked[0])
    decided(ticket)
    assert indices(ticket) == [1]


def test_a_hot_standby_counts_as_reserved_where_a_device_lists_no_process(
    rig: Rig, hot: Hot
) -> None:
    rig.reader.lists_processes = False
    hot.make("s")
    assert free_gib(rig.broker) == 24
    ticket: Ticket = rig.place("a", 4, standby=KIND)
    assert list(ticket.foreign_before.values()) == [0]
    assert isinstance(rig.reader, Reader) and rig.reader.spec == SimulatedDevices("1x24GiB")
