"""The flow's ledger over all nodes, and what it asks a node to start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.cluster.flow_side import ClusterLauncher, ClusterStore, Node, Nodes
from prefect_gpu.cluster.wire import Kill, Launch
from prefect_gpu.errors import NodeRefusedError
from prefect_gpu.processes.launch_spec import ChildRefused
from prefect_gpu.scheduling.model import Device, ModelBudgets, Probe, Request, Reservation
from prefect_gpu.units import GIB
from prefect_gpu.values import transport
from tests.unit.cluster.cluster_rig import (
    FakeStore,
    Heard,
    agent_of,
    make_device,
    make_nodes,
    news_of,
    other_entry,
    place_on,
    spec_for,
)


class Scene:
    """Two nodes with one device each, and the ledger of a flow."""

    def __init__(self) -> None:
        self.nodes, (self.a, self.b) = make_nodes("a", "b")
        self.store = ClusterStore(self.nodes)
        self.ledger = Ledger(lambda: self.store)
        self.calls = 0
        self.ledger.subscribe(self._count)

    def _count(self) -> None:
        self.calls += 1

    def others(self, node: Node, *entries: Entry, now_s: float = 0.0) -> None:
        held = {entry.request.id: entry for entry in entries}
        self.nodes.take(node.name, news_of(node, others=held, now_s=now_s))

    def held(self, node: Node) -> list[tuple[str, int]]:
        (device,) = node.facts.devices
        held = self.ledger.view().by_device.get(device.key, ())
        return [(r.request_id, r.reserved_bytes // GIB) for r in held]

    def reserve(self, request_id: str, device: Device, version: int | None = None) -> bool:
        version = self.ledger.view().version if version is None else version
        request = Request(request_id, "mine", 1, 0.0, GIB)
        reservations = (Reservation(request_id, *device.key, GIB),)
        entry = Entry(request, phase=Phase.PLACED, reservations=reservations, devices=(device.key,))
        return self.ledger.try_write(version, {request_id: entry})


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_others_hold_on_the_nodes_is_in_the_view(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    scene.others(scene.a, other_entry(device, 2), other_entry(device, 3, "another"))
    scene.others(scene.b, other_entry(scene.b.facts.devices[0], 1, "there"))
    assert scene.held(scene.a) == [("other", 2), ("another", 3)]
    assert scene.held(scene.b) == [("there", 1)]
    scene.others(scene.a, other_entry(device, 2))
    assert scene.held(scene.a) == [("other", 2)]
    assert scene.held(scene.b) == [("there", 1)]
    assert scene.ledger.entry("other").owner != scene.ledger.view().owner
    scene.nodes.leave("a", "dead")
    assert scene.held(scene.a) == []
    assert scene.held(scene.b) == [("there", 1)]


def test_a_reservation_of_others_refuses_a_decision_that_was_made_without_it(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    version = scene.ledger.view().version
    scene.others(scene.a, other_entry(device))
    assert not scene.reserve("mine", device, version)
    assert scene.held(scene.a) == [("other", 2)]
    assert scene.reserve("mine", device)
    assert scene.held(scene.a) == [("other", 2), ("mine", 1)]
    assert scene.ledger.entry("mine").owner == scene.ledger.view().owner


def test_what_changes_without_a_new_reservation_refuses_nothing(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    scene.others(scene.a, other_entry(device), other_entry(device, request_id="ends"))
    version = scene.ledger.view().version
    scene.others(scene.a, other_entry(device, pid=5))
    assert scene.reserve("mine", device, version)
    assert scene.held(scene.a) == [("other", 2), ("mine", 1)]
    scene.ledger.release("mine")
    assert scene.held(scene.a) == [("other", 2)]


def test_the_same_entries_again_are_no_change(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    version = scene.ledger.view().version
    calls = scene.calls
    scene.others(scene.a, other_entry(device, ends_s=100.0), now_s=50.0)
    scene.ledger.poll()
    assert scene.calls == calls + 1, "watchers are called for changes of others"
    version = scene.ledger.view().version
    scene.ledger.poll()
    calls = scene.calls
    # It was longer on its way.
    scene.others(scene.a, other_entry(device, ends_s=100.0), now_s=49.0)
    assert not scene.store.changed()
    assert scene.ledger.view().version == version
    scene.ledger.poll()
    assert scene.calls == calls


def test_times_of_others_are_on_the_clock_of_the_flow(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    scene.others(scene.a, other_entry(device, ends_s=130.0), now_s=100.0)
    (held,) = scene.ledger.view().by_device[device.key]
    assert held.ends_s == pytest.approx(time.monotonic() + 30, abs=10)


def test_rows_that_are_not_read_do_not_pile_up(scene: Scene) -> None:
    (device,) = scene.a.facts.devices
    version = scene.ledger.view().version
    for pid in range(100):
        scene.others(scene.a, other_entry(device, pid=pid))
    rows = scene.store.read(0)
    assert [(row.request_id, row.promises) for row in rows] == [("other", True)]
    # That it came is not forgotten, whatever follows.
    scene.others(scene.a)
    scene.others(scene.a, other_entry(device))
    scene.others(scene.a, other_entry(device, pid=1))
    assert not scene.reserve("mine", device, version)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.dictionaries(st.sampled_from("uvw"), st.integers(1, 3)),
            st.booleans(),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_the_view_is_what_nodes_say_and_what_the_flow_wrote(
    steps: Sequence[tuple[str, dict[str, int], bool, bool]],
) -> None:
    scene = Scene()
    said: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    mine: set[str] = set()
    version = scene.ledger.view().version
    new = False
    for number, (name, entries, reads, writes) in enumerate(steps):
        node = scene.a if name == "a" else scene.b
        (device,) = node.facts.devices
        named = {f"{name}-{each}": size for each, size in entries.items()}
        new = new or bool(named.keys() - said[name].keys())
        said[name] = named
        scene.others(node, *(other_entry(device, size, i) for i, size in named.items()))
        if reads:
            version, new = scene.ledger.view().version, False
        if writes:
            wrote = scene.reserve(f"mine-{number}", scene.a.facts.devices[0], version)
            assert wrote == (not new)
            if wrote:
                mine.add(f"mine-{number}")
                # The next decision is made on a view with it.
                version = scene.ledger.view().version
    for node in (scene.a, scene.b):
        theirs = set(said[node.name].items())
        own = {(each, 1) for each in mine} if node is scene.a else set()
        assert set(scene.held(node)) == theirs | own


# The launcher.


def launch(nodes: Nodes, spec: Any) -> tuple[Heard, Any]:
    heard = Heard()
    return heard, ClusterLauncher(nodes).start(spec, heard)


def test_a_launch_names_exactly_what_was_reserved() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    (device,) = b.facts.devices
    placement = place_on(device, gib=[2.5])
    _, handle = launch(nodes, spec_for(placement, host_bytes=77))
    assert not agent_of(a).commands
    (command,) = agent_of(b).of(Launch)
    request = command.request
    assert (request.devices, request.count) == ((device.uuid,), 1)
    assert request.need_bytes(device) == int(2.5 * GIB) and not request.exclusive
    assert (request.host_bytes, request.task_name) == (77, "train")
    assert command.budget_bytes == placement.budget_bytes
    assert command.spec.placement == placement
    # The call travels beside it.
    assert not command.spec.call.body and command.call.body
    handle.kill()
    assert agent_of(b).of(Kill) == [Kill(command.child)]


def test_a_launch_on_devices_of_several_models_asks_for_the_bytes_of_each() -> None:
    nodes, (a,) = make_nodes("a")
    devices = (make_device("a", 1, 8, "small"), make_device("a", 0, 80, "large"))
    launch(nodes, spec_for(place_on(*devices, gib=[2, 20])))
    (command,) = agent_of(a).of(Launch)
    assert command.request.devices == tuple(device.uuid for device in devices)
    assert command.request.count == 2
    assert [command.request.need_bytes(device) for device in devices] == [2 * GIB, 20 * GIB]


def test_whole_devices_of_one_model_with_different_memory_free_can_be_confirmed() -> None:
    nodes, (a,) = make_nodes("a")
    devices = (make_device("a", 0), make_device("a", 1))
    placement = place_on(*devices, gib=[8, 7], exclusive=True)
    launch(nodes, spec_for(placement, allocation="growth"))
    (command,) = agent_of(a).of(Launch)
    assert command.request.exclusive
    for device, free in zip(devices, placement.budget_bytes, strict=True):
        assert command.request.need_bytes(device) <= free
    assert isinstance(command.request.memory, ModelBudgets)
    assert command.budget_bytes is None


@pytest.mark.parametrize(("counts_gib", "fraction"), [(2, 1.0), (8, 0.5)])
def test_a_launch_of_a_probe_that_shares_its_device_has_its_cap_confirmed(
    counts_gib: int, fraction: float
) -> None:
    nodes, (a,) = make_nodes("a")
    (device,) = a.facts.devices
    probe = Probe(1.0, counts_gib * GIB)
    launch(nodes, spec_for(place_on(device, gib=[8], probe=probe)))
    (command,) = agent_of(a).of(Launch)
    request = command.request
    assert request.confirms_probe and request.probe_fraction == fraction
    assert request.need_bytes(device) == 8 * GIB and not request.exclusive


def test_a_node_that_is_gone_refuses() -> None:
    nodes, (a,) = make_nodes("a")
    nodes.leave("a", "dead")
    heard, handle = launch(nodes, spec_for(place_on(*a.facts.devices)))
    refused = heard.next()
    assert isinstance(refused, ChildRefused)
    assert isinstance(refused.error, NodeRefusedError) and refused.error.node == "a"
    handle.kill()
    assert not agent_of(a).commands


@pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")
def test_what_several_launches_take_is_stored_once() -> None:
    store = FakeStore()
    nodes, (a,) = make_nodes("a", store=store)
    launcher = ClusterLauncher(nodes)
    spec = spec_for(place_on(*a.facts.devices), "x" * (2 << 20))
    for _ in range(3):
        launcher.start(replace(spec), Heard())
    assert store.puts == 1
    assert len({each.call.files for each in agent_of(a).of(Launch)}) == 1
