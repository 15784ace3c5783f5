"""A broker over the devices of several nodes, which join and leave."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.broker import broker
from prefect_gpu.broker.broker import MOST_REST_S, Broker, Ticket
from prefect_gpu.broker.device_view import RECOVERY_S
from prefect_gpu.broker.planning import STANDBY_TAKEN_S
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, NodeReading
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Reader, Rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig


class NodesReader(Reader):
    """Two simulated devices on each node."""

    #: The nodes that are in the cluster now.
    there: tuple[str, ...] = ("a", "b")
    #: By name.
    limits: Mapping[str, NodeReading] = {}

    def _of_node(self, device: Device) -> Device:
        return replace(device, host="abc"[device.index // 2], index=device.index % 2)

    def devices(self) -> tuple[Device, ...]:
        found = map(self._of_node, super().devices())
        return tuple(device for device in found if device.host in self.there)

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        found = [replace(s, device=self._of_node(s.device)) for s in super().read(roots)]
        return tuple(each for each in found if each.device.host in self.there)

    def nodes(self) -> Mapping[str, NodeReading]:
        return {name: self.limits[name] for name in self.there if name in self.limits}


class NodesRig(Rig):
    reader: NodesReader

    def another(self, **of_broker: Any) -> Broker:
        if not isinstance(self.reader, NodesReader):
            self.reader = NodesReader(self.reader.spec, self.clock)
        return super().another(**of_broker)


@pytest.fixture
def nodes() -> NodesRig:
    return NodesRig("6x24GiB")


def where(ticket: Ticket) -> list[str]:
    assert ticket.placement is not None
    return [f"{device.host}:{device.index}" for device in ticket.placement.devices]


def test_several_devices_are_of_one_node(nodes: NodesRig) -> None:
    assert where(nodes.place("one", 20, devices=("a:1",))) == ["a:1"]
    assert where(nodes.place("two", 20, count=2)) == ["b:0", "b:1"]
    assert nodes.waits(nodes.submit("three", 20, count=2))


def test_a_task_runs_on_the_nodes_that_it_names(nodes: NodesRig) -> None:
    assert where(nodes.place("one", 20, nodes=("b",))) == ["b:0"]
    refused = nodes.submit("two", 20, nodes=("c",))
    nodes.decided(refused)
    assert isinstance(refused.error, PlacementError)
    assert "gpu:node=c names no node of this runner; accepted: a, b" in str(refused.error)


def test_memory_and_processes_are_counted_on_each_node(nodes: NodesRig) -> None:
    nodes.reader.limits = {"a": NodeReading(4 * GIB), "b": NodeReading(8 * GIB, max_processes=2)}
    assert where(nodes.place("one", 1, host_bytes=3 * GIB, nodes=("a",))) == ["a:0"]
    assert where(nodes.place("two", 1, host_bytes=3 * GIB)) == ["b:0"]
    assert where(nodes.place("three", 1, host_bytes=3 * GIB)) == ["b:1"]
    waits = nodes.submit("four", 1, host_bytes=3 * GIB)
    assert nodes.waits(waits)
    assert nodes.why(waits) == (
        "3GiB of host memory for its process on any of 2 nodes; 1GiB available (a)"
    )
    assert nodes.broker.wants_host_memory
    assert nodes.broker.host_promised_bytes == 9 * GIB


def test_a_node_with_a_ready_standby_is_preferred_once_for_each(nodes: NodesRig) -> None:
    nodes.reader.limits = {
        "a": NodeReading(64 * GIB),
        "b": NodeReading(64 * GIB, standbys={"kind": 1, "of others": 9}),
    }
    assert where(nodes.place("one", 1, standby="kind")) == ["b:0"]
    # The node has not said yet that it is taken.
    assert where(nodes.place("two", 1, standby="kind")) == ["a:0"]
    nodes.clock.advance(STANDBY_TAKEN_S + 0.1)
    nodes.broker.look()
    assert where(nodes.place("three", 1, standby="kind")) == ["b:1"]
    assert where(nodes.place("four", 1)) == ["a:1"]


def test_what_has_waited_for_a_while(nodes: NodesRig) -> None:
    for name in "abcd":
        nodes.place(name, 20)
    early = nodes.submit("early", 20)
    assert nodes.waits(early)
    nodes.clock.advance(10)
    late = nodes.submit("late", 20)
    assert nodes.waits(late)
    assert nodes.broker.waiting(5) == [early.request]
    assert nodes.broker.waiting(0) == [early.request, late.request]
    nodes.broker.max_processes = 5
    assert nodes.broker.waiting(0) == [early.request], "one more may start"


@pytest.mark.parametrize(("round_s", "rest_s"), [(0.01, 0.04), (1.0, MOST_REST_S)])
def test_on_a_cluster_the_thread_rests_by_what_a_round_has_taken(
    thread_rig: Rig, monkeypatch: pytest.MonkeyPatch, round_s: float, rest_s: float
) -> None:
    calls = itertools.count()
    # A round asks for it twice.
    monkeypatch.setattr(broker, "thread_time", lambda: next(calls) * round_s)
    thread_rig.reader.remote = True
    thread_rig.submit("one", 1)
    rests = ("prefect-gpu-broker", pytest.approx(rest_s))
    while thread_rig.clock.waits.get(timeout=DEADLOCK_S) != rests:
        pass
    ticket = thread_rig.submit("two", 1)
    thread_rig.clock.advance(rest_s * 0.99)
    assert not ticket.decided
    while not ticket.decided:
        # Another round, if the first reading has come late.
        thread_rig.clock.advance(rest_s)
        with contextlib.suppress(queue.Empty):
            thread_rig.clock.waits.get(timeout=0.2)


def test_devices_of_a_node_that_joins_are_used(nodes: NodesRig) -> None:
    for name in "abcd":
        nodes.place(name, 20)
    waits = nodes.submit("e", 20)
    assert nodes.waits(waits)
    nodes.reader.there = ("a", "b", "c")
    nodes.decided(waits)
    assert where(waits) == ["c:0"]
    assert [device.host for device in nodes.broker.devices] == ["a", "a", "b", "b", "c", "c"]
    assert len(nodes.broker.capacities((), ("c",))) == 2
    entry = nodes.ledger.entry(waits.request.id)
    assert entry is not None and {r.device_key for r in entry.reservations} <= set(entry.devices)


def test_a_node_that_has_left_gets_no_task_and_those_there_can_end(nodes: NodesRig) -> None:
    there = nodes.place("there", 20, nodes=("b",))
    nodes.start(there, 10)
    nodes.reader.there = ("a",)
    nodes.broker.look()
    assert [device.host for device in nodes.broker.devices] == ["a", "a"]
    assert where(nodes.place("one", 20)) == ["a:0"]
    assert where(nodes.place("two", 20)) == ["a:1"]
    assert nodes.waits(nodes.submit("three", 20))
    assert not there.neighbours
    assert nodes.broker.foreign_growth_bytes(there, patience_s=0.0) == 0
    nodes.exit(there)
    nodes.broker.look()
    assert len(nodes.reservations()) == 3, "no reading shows its memory"
    nodes.clock.advance(RECOVERY_S)
    assert nodes.next_recovered() == ("there", None)
    assert len(nodes.reservations()) == 2


def test_a_reading_without_devices_leaves_them_as_they_are(nodes: NodesRig) -> None:
    nodes.place("one", 20)
    nodes.reader.there = ()
    nodes.broker.look()
    assert len(nodes.broker.devices) == 4


def test_two_brokers_of_a_cluster_keep_one_order(nodes: NodesRig) -> None:
    other = nodes.another()
    for name in "abcd":
        nodes.place(name, 20)
    first = nodes.submit("first", 20, nodes=("b",), broker=other)
    assert nodes.waits(first)
    nodes.reader.there = ("a", "b", "c")
    nodes.broker.look()
    second = nodes.place("second", 20)
    assert where(second) == ["c:0"]
    assert not first.decided


def fill(nodes: NodesRig, *devices: str, gib: float = 20) -> dict[str, list[bool]]:
    """Place a preemptible task that holds 10 GiB on each device; return what each is asked for, by its device."""
    asked: dict[str, list[bool]] = {}
    for name in devices:
        ticket = nodes.place(name, gib, devices=(name,), preemptible=True)
        nodes.start(ticket, 10)
        ticket.on_held_back = asked.setdefault(name, []).append
    nodes.clock.advance(1000)
    return asked


def test_a_task_makes_way_where_its_nodes_own_memory_has_the_room(nodes: NodesRig) -> None:
    nodes.reader.limits = {"a": NodeReading(8 * GIB), "b": NodeReading(64 * GIB)}
    asked = fill(nodes, "a:0", "a:1", "b:0", "b:1")
    urgent = nodes.submit("urgent", 20, priority=5)
    assert nodes.waits(urgent)
    nodes.broker.look()
    assert sorted(map(str, asked.values())) == ["[True]", "[]", "[]", "[]"]
    assert not asked["a:0"] and not asked["a:1"]


def test_no_task_makes_way_on_a_node_that_may_start_no_process(nodes: NodesRig) -> None:
    free = NodeReading(64 * GIB)
    nodes.reader.limits = {"a": free, "b": replace(free, max_processes=2)}
    asked = fill(nodes, "b:0", "b:1")
    urgent = nodes.submit("urgent", 20, priority=5, nodes=("b",))
    assert nodes.waits(urgent)
    nodes.broker.look()
    assert not asked["b:0"] and not asked["b:1"]
    nodes.reader.limits = {"a": free, "b": free}
    nodes.broker.look()
    assert sorted(map(str, asked.values())) == ["[True]", "[]"]


def test_a_task_is_not_moved_to_another_node(nodes: NodesRig) -> None:
    nodes.reader.limits = dict.fromkeys("ab", NodeReading(64 * GIB))
    asked = fill(nodes, "a:0", gib=12)
    nodes.place("beside it", 20, devices=("a:1",))
    assert nodes.waits(nodes.submit("equal", 20, devices=("a:0",)))
    nodes.broker.look()
    assert not asked["a:0"]
    nodes.submit("urgent", 20, devices=("a:0",), priority=5)
    nodes.broker.look()
    assert asked["a:0"] == [True]
