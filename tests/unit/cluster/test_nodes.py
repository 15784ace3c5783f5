"""What a flow hears of the nodes, and what it makes of it: processes, readings, memory."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.cluster import flow_side
from prefect_gpu.cluster.flow_side import ClusterReader, NodeMemory, Nodes, RemoteHandle
from prefect_gpu.cluster.wire import (
    Kill,
    Launch,
    PeaksKnown,
    Send,
    SentCall,
    SentResult,
    send_result,
)
from prefect_gpu.errors import ChildDiedError, DeviceError, NodeRefusedError
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ChildStarted, ValueArrived
from prefect_gpu.scheduling.model import Request
from prefect_gpu.units import GIB
from tests.unit.cluster.cluster_rig import (
    FakeStore,
    Heard,
    agent_of,
    make_device,
    make_node,
    make_nodes,
    news_of,
    place_on,
    reading_of,
    spec_for,
)

STARTED, EXITED = ChildStarted(7), ChildExited(0, "")


def launch(child: str) -> Launch:
    spec = spec_for(place_on(make_device("a")))
    return Launch(child, Request("", "train", 0, 0.0), spec, SentCall(b""), None)


def start(nodes: Nodes, name: str, child: str) -> Heard:
    heard = Heard()
    nodes.start(name, launch(child), heard)
    return heard


def value_of(nodes: Nodes, value: Any) -> SentResult:
    packed = values.dumps(value, "return value", "value")
    return send_result(packed.open(), nodes.store)


# Processes.


def test_nodes_are_listed_in_the_order_in_which_they_joined() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    assert nodes.all() == (a, b)
    nodes.leave("a", "dead")
    nodes.leave("a", "dead")
    assert nodes.all() == (b,)


def test_the_node_of_the_flow_comes_first_also_after_its_agent_was_started_again() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    for agent in ("first", "second"):
        own = replace(make_node("own", agent=agent), near=True)
        nodes.join(own)
        assert nodes.all() == (own, a, b)


def test_a_process_hears_what_its_own_child_says_and_nothing_after_its_end() -> None:
    nodes, (a, _) = make_nodes("a", "b")
    one, two = start(nodes, "a", "one"), start(nodes, "b", "two")
    nodes.take("a", news_of(a, ("one", STARTED), ("unknown", STARTED), ("one", EXITED)))
    nodes.take("a", news_of(a, ("one", STARTED)))
    assert [one.next(), one.next()] == [STARTED, EXITED]
    assert one.nothing and two.nothing
    assert [each.child for each in agent_of(a).of(Launch)] == ["one"]
    nodes.leave("a", "dead")
    assert one.nothing


def test_a_node_that_leaves_ends_its_processes_once_and_says_why() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    one, two = start(nodes, "a", "one"), start(nodes, "b", "two")
    for node, child in ((a, "one"), (b, "two")):
        nodes.take(node.name, news_of(node, (child, STARTED)))
    nodes.leave("a", "node a is dead")
    nodes.leave("a", "node a is dead")
    assert one.next() == STARTED
    assert one.next() == ChildExited(-9, "", killed_because="node a is dead")
    assert one.nothing
    assert two.next() == STARTED and two.nothing


def test_a_process_that_was_lost_before_it_was_heard_is_refused_and_not_placed_again() -> None:
    nodes, _ = make_nodes("a")
    heard = start(nodes, "a", "one")
    nodes.leave("a", "node a is dead")
    (error,) = [heard.next().error]
    assert isinstance(error, ChildDiedError) and not isinstance(error, NodeRefusedError)
    assert "train" in str(error) and "node a is dead" in str(error)
    assert heard.nothing


def test_an_agent_that_was_started_again_ends_the_processes_of_the_old_one_and_its_news() -> None:
    nodes, (old,) = make_nodes("a")
    heard = start(nodes, "a", "one")
    nodes.take("a", news_of(old, ("one", STARTED)))
    again = make_node("a", agent="second agent of a")
    nodes.join(again)
    assert heard.next() == STARTED
    assert "started again" in heard.next().killed_because
    assert nodes.all() == (again,)
    heard = start(nodes, "a", "one")
    nodes.take("a", reading_of(old))
    nodes.take("a", news_of(old, ("one", EXITED)))
    nodes.take("b", news_of(old, ("one", EXITED)))
    assert heard.nothing
    assert not nodes.all()[0].reading.snapshots


def test_a_node_that_is_gone_starts_nothing() -> None:
    nodes, _ = make_nodes("a")
    with pytest.raises(NodeRefusedError, match=r"node b .*left"):
        nodes.start("b", launch("one"), Heard())


def test_a_launch_that_could_not_be_sent_leaves_no_process_behind() -> None:
    nodes, (a,) = make_nodes("a")
    heard = Heard()

    def fail(commands: Any) -> None:
        raise RuntimeError("cannot be pickled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_of(a), "tell", fail)
        with pytest.raises(RuntimeError, match="pickled"):
            nodes.start("a", launch("one"), heard)
    nodes.leave("a", "dead")
    assert heard.nothing


def test_a_listener_that_raises_hears_the_next_message(caplog: pytest.LogCaptureFixture) -> None:
    nodes, (a,) = make_nodes("a")
    heard: list[Any] = []

    def listen(message: Any) -> None:
        heard.append(message)
        raise RuntimeError("no")

    nodes.start("a", launch("one"), listen)
    nodes.take("a", news_of(a, ("one", STARTED), ("one", EXITED)))
    assert heard == [STARTED, EXITED]
    assert caplog.text.count("raised on") == 2


def test_a_large_value_keeps_its_place_and_does_not_hold_up_other_processes() -> None:
    store, go = FakeStore(), threading.Event()
    store.before_get = lambda: go.wait(DEADLOCK_S)
    nodes, (a,) = make_nodes("a", store=store)
    one, two = start(nodes, "a", "one"), start(nodes, "a", "two")
    value = value_of(nodes, "x" * (2 << 20))
    nodes.take("a", news_of(a, ("one", STARTED), ("one", value), ("one", EXITED)))
    nodes.take("a", news_of(a, ("two", STARTED), ("two", EXITED)))
    assert [two.next(), two.next()] == [STARTED, EXITED]
    assert one.next() == STARTED and one.nothing
    go.set()
    arrived = one.next()
    assert isinstance(arrived, ValueArrived)
    assert values.loads(arrived.data, "return value") == "x" * (2 << 20)
    assert one.next() == EXITED


@pytest.mark.parametrize("leaves", [False, True], ids=["it exits", "its node leaves"])
def test_a_value_that_is_lost_ends_the_process_once(leaves: bool) -> None:
    store, go = FakeStore(), threading.Event()
    store.before_get = lambda: go.wait(DEADLOCK_S)
    nodes, (a,) = make_nodes("a", store=store)
    heard = start(nodes, "a", "one")
    nodes.take("a", news_of(a, ("one", STARTED), ("one", value_of(nodes, "x" * (2 << 20)))))
    store.kept.clear()
    if leaves:
        nodes.leave("a", "node a is dead")
    else:
        nodes.take("a", news_of(a, ("one", EXITED)))
    known = next(iter(nodes._children.values()), None)
    assert known is None
    go.set()
    assert heard.next() == STARTED
    assert "lost on the way: the object is lost" in heard.next().killed_because
    for thread in threading.enumerate():
        if thread.name == "prefect-gpu-value":
            thread.join(DEADLOCK_S)
    assert heard.nothing


def test_a_process_is_steered_by_commands() -> None:
    _, (a,) = make_nodes("a")
    handle = RemoteHandle(a, "one")
    handle.answer("yes")
    handle.kill()
    assert agent_of(a).commands == [Send("one", "yes"), Kill("one")]
    RemoteHandle(None, "one").kill()


# Readings.


def test_a_reading_has_all_devices_in_the_order_of_their_nodes() -> None:
    nodes, (a, _) = make_nodes("a", "b")
    nodes.join(c := make_node("c", count=2))
    reader = ClusterReader(nodes, "simulated")
    nodes.take("c", reading_of(c, 3))
    nodes.take("a", reading_of(a, 1, host_available_bytes=5))
    devices = reader.devices()
    assert [device.host for device in devices] == ["a", "b", "c", "c"]
    snapshots = reader.read(())
    assert tuple(snapshot.device for snapshot in snapshots) == devices
    assert [snapshot.free_bytes // GIB for snapshot in snapshots] == [1, 0, 3, 3]
    assert snapshots[1].error == "the first reading of node b has not come"
    assert not any(snapshots[at].error for at in (0, 2, 3))
    read = {name: node.available_bytes for name, node in reader.nodes().items()}
    assert read == {"a": 5, "b": 0, "c": 0}


def test_devices_of_a_node_that_is_silent_are_set_aside_until_it_is_heard_again() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    reader = ClusterReader(nodes, "simulated")
    for node in (a, b):
        nodes.take(node.name, reading_of(node))
    a.heard_s = time.monotonic() - flow_side.SILENT_S - 1
    first, second = reader.read(())
    assert first.error == "node a has not answered for more than 2s"
    assert not second.error
    # It answers, and its driver does not.
    nodes.take("a", news_of(a))
    nodes.take("a", reading_of(a, now_s=10.0, read_s=10.0 - flow_side.SILENT_S - 1))
    assert reader.read(())[0].error
    nodes.take("a", reading_of(a))
    assert not any(snapshot.error for snapshot in reader.read(()))


def test_snapshots_that_say_the_same_again_stay_the_same_objects() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    reader = ClusterReader(nodes, "simulated")
    for node in (a, b):
        nodes.take(node.name, reading_of(node))
    before = reader.read(())
    nodes.take("a", reading_of(a, at_s=1.0))
    nodes.take("b", reading_of(b, free_gib=3))
    after = reader.read(())
    assert after[0] is before[0]
    assert after[1].free_bytes == 3 * GIB


def test_ready_standbys_of_a_node_are_those_that_it_has_last_named() -> None:
    nodes, (a, _) = make_nodes("a", "b")
    reader = ClusterReader(nodes, "simulated")
    nodes.take("a", reading_of(a, standbys={"kind": 2}))
    nodes.take("a", reading_of(a))
    found = {name: node.standbys for name, node in reader.nodes().items()}
    assert found == {"a": {"kind": 2}, "b": {}}
    nodes.take("a", reading_of(a, standbys={}))
    assert reader.nodes()["a"].standbys == {}


def test_what_ails_a_node_is_said_of_its_devices() -> None:
    nodes, (a,) = make_nodes("a")
    reader = ClusterReader(nodes, "simulated")
    nodes.take("a", reading_of(a, error="NVML does not answer"))
    assert [snapshot.error for snapshot in reader.read(())] == ["NVML does not answer"]
    nodes.take("a", reading_of(a))
    assert [snapshot.error for snapshot in reader.read(())] == [""]


def test_without_a_node_nothing_can_be_read() -> None:
    nodes, _ = make_nodes("a")
    reader = ClusterReader(nodes, "simulated")
    nodes.leave("a", "dead")
    assert reader.devices() == ()
    with pytest.raises(DeviceError, match="no node"):
        reader.read(())


# Memory.


def test_memory_of_a_process_is_what_its_node_says() -> None:
    nodes, (a, b) = make_nodes("a", "b")
    reader = ClusterReader(nodes, "simulated")
    start(nodes, "b", "one")
    memory = reader.process_memory([b.facts.devices[0].uuid], [2 * GIB])
    assert memory.context_bytes == GIB // 2
    assert memory.cap_bytes == (2 * GIB - GIB // 2,)
    assert memory.live_bytes() is None and memory.detach() is None
    memory.attach(7)
    nodes.take("a", reading_of(a, live_bytes={7: 1}))
    nodes.take("b", reading_of(b, live_bytes={7: 5, 8: 6}))
    assert memory.live_bytes() == 5
    nodes.take("b", news_of(b, ("one", PeaksKnown(7, 9, 1)), ("one", EXITED)))
    assert memory.detach() == (9, 1)
    assert memory.detach() is None
    assert not b.peaks


def test_a_process_without_a_cap_and_devices_that_are_gone() -> None:
    nodes, (a,) = make_nodes("a")
    reader = ClusterReader(nodes, "simulated")
    assert reader.process_memory([a.facts.devices[0].uuid], None).cap_bytes is None
    unknown = reader.process_memory(["SIM-gone"], None)
    assert not isinstance(unknown, NodeMemory)
    unknown.attach(1)
    assert unknown.live_bytes() is None and unknown.detach() is None


def test_what_real_devices_hold_is_measured() -> None:
    _, (a,) = make_nodes("a")
    memory = NodeMemory("nvml", a, [2 * GIB])
    assert memory.context_bytes is None and memory.cap_bytes is None


def test_a_refused_process_ends_with_that() -> None:
    nodes, (a,) = make_nodes("a")
    heard = start(nodes, "a", "one")
    refused = ChildRefused(NodeRefusedError("a", "no room"))
    nodes.take("a", news_of(a, ("one", refused), ("one", EXITED)))
    assert heard.next() is refused and heard.nothing
