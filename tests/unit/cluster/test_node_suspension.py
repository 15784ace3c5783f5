"""A task of a cluster that is suspended on its node: a flow's broker, a node's agent, and a driver that is a fake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.ticket import BY_HAND, Ticket
from prefect_gpu.cli.suspend_command import find
from prefect_gpu.clock import DEADLOCK_S, RealClock
from prefect_gpu.cluster import node_agent, node_suspension
from prefect_gpu.cluster.flow_side import ClusterReader
from prefect_gpu.devices.simulated import SimulatedMemory
from prefect_gpu.errors import NodeRefusedError
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ChildStarted, ValueArrived
from prefect_gpu.scheduling.model import Request
from prefect_gpu.suspension import suspended
from prefect_gpu.suspension.driver_calls import DriverCallError
from prefect_gpu.suspension.remote import NEWS, RemoteSuspender
from prefect_gpu.suspension.suspended import Stage, Suspension
from prefect_gpu.units import GIB
from prefect_gpu.values.transport import ReceivedValue
from tests.unit.cluster.cluster_rig import spec_for
from tests.unit.cluster.test_node_agent import FakeChild, Scene, wait_until

#: How long a task says that it takes: it does not end sooner than it could be moved.
LONG_S = 10_000.0


class Driver:
    """Moves what simulated processes hold."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.away: set[int] = set()
        #: By process id: device to the one where it began.
        self.onto: dict[int, dict[str, str]] = {}
        self.fails = ""

    def unsupported(self) -> str:
        return ""

    def call(self, step: str, pid: int, *words: str, deadline_s: float) -> int:
        self.made.append(step)
        if step == self.fails:
            raise DriverCallError(step, 999)
        if step == "checkpoint":
            self.away.add(pid)
        elif step == "restore":
            self.onto[pid] = {new: old for old, new in zip(words[::2], words[1::2], strict=True)}
            self.away.remove(pid)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    held_bytes = SimulatedMemory.held_bytes

    def seen_bytes(memory: SimulatedMemory, device_uuid: str) -> int:
        pid = memory._pid
        if pid is None or pid in made.away:
            return 0
        return held_bytes(memory, made.onto.get(pid, {}).get(device_uuid, device_uuid))

    monkeypatch.setattr(SimulatedMemory, "held_bytes", seen_bytes)
    monkeypatch.setattr(suspended, "shared_calls", lambda: made)
    monkeypatch.setattr(suspended, "refusal", lambda candidate: "")
    monkeypatch.setattr(suspended, "ROOM_S", 0.01)
    return made


class FlowTask:
    """A task of the flow: what an attempt does with its process, as far as that is suspended."""

    child: FakeChild

    def __init__(self, flow: Flow, name: str, gib: float, **of_request: Any) -> None:
        self.flow, self.gib = flow, gib
        self.heard: list[Any] = []
        self.suspender: RemoteSuspender | None = None
        self.agrees = True
        asked = Request(
            "", name, next_sequence(), 0.0, int(gib * GIB), task_run_name=name, **of_request
        )
        self.ticket = flow.broker.submit(replace(asked, expected_s=LONG_S))

    def start(self) -> FlowTask:
        placement = self.flow.broker.wait(self.ticket, DEADLOCK_S, lambda reason: None)
        request = self.ticket.request
        spec = replace(spec_for(placement), task_name=request.task_name, request=request)
        self.handle = self.flow.scene.flow.start(spec, self.hear)
        self.child = self.flow.scene.next_child().begin()
        size_bytes = int((self.gib - 1) * GIB)
        uuid = placement.devices[0].uuid
        assert not self.child.ask("simulated_allocate", device_uuid=uuid, size_bytes=size_bytes)
        return self

    def hear(self, message: Any) -> None:
        broker = self.flow.broker
        if isinstance(message, ChildStarted):
            self.suspender = RemoteSuspender(self, lambda command: self.handle.answer(command))
            self.ticket.on_made_way = self.suspender.make_way
            self.ticket.on_held_back = self.suspender.ask
            broker.attach(self.ticket, message.pid)
        elif isinstance(message, NEWS):
            assert self.suspender is not None
            self.suspender.take(message)
        elif isinstance(message, ChildExited):
            assert self.suspender is not None
            self.suspender.end()
            broker.end(self.ticket)
        elif isinstance(message, ChildRefused):
            self.heard.append(message.error)

    @property
    def entry(self) -> Entry:
        """What the flow's ledger has of it."""
        found = self.flow.broker.entry(self.ticket)
        assert found is not None
        return found

    @property
    def stages(self) -> list[str]:
        return [each[0] for each in self.heard if isinstance(each, tuple)]

    def reaches(self, stage: Stage) -> None:
        wait_until(lambda: self.stages[-1:] == [stage])

    def exit(self) -> None:
        self.child.exit()

    # A `RemoteSubject`.

    def lost_before(self) -> bool:
        return False

    def device_uuid(self) -> str:
        return self.ticket.devices[0].uuid

    def hold_back(self, away: bool, shared: bool) -> None:
        self.flow.broker.hold_back(self.ticket, away, shared)

    def wait_again(self) -> None:
        self.heard.append("waits again")
        self.flow.broker.wait_again(self.ticket)

    def comes_back(self) -> bool:
        return self.agrees and self.flow.broker.comes_back(self.ticket)

    def tell(self, stage: Stage, text: str) -> None:
        self.flow.broker.show_suspension(self.ticket, stage, text)
        self.heard.append((stage, text))

    def begun(self) -> None:
        self.heard.append(self.ticket.held_back_for)

    def ended(self, suspension: Suspension | None) -> None:
        self.heard.append(suspension)

    def lost(self, why: str) -> None:
        self.heard.append(RuntimeError(why))


class Flow:
    """A flow with one node."""

    def __init__(self, folder: Path, devices: str) -> None:
        self.scene = Scene(folder, devices=devices)
        wait_until(lambda: bool(self.scene.node.snapshots))
        reader = ClusterReader(self.scene.nodes, "simulated")
        self.broker = Broker(reader, self.scene.ledger, max_processes=100)
        self.by_hand = Ledger(lambda: HostStore(folder))

    def close(self) -> None:
        self.by_hand._open().close()
        self.scene.close()
        self.broker._sampler.stop()

    def ask(self, name: str, away: bool, shared: bool = False) -> None:
        """Do what `prefect-gpu suspend` and `resume` do on the node's machine."""
        (request_id,) = find(self.by_hand.running(), name)
        self.by_hand.hold_back(request_id, away, shared)

    def on_node(self, name: str) -> Entry:
        """What the node's ledger has of a task."""
        (entry,) = find(self.by_hand.running(), name).values()
        return entry

    def held(self) -> list[tuple[str, float]]:
        return sorted(self.scene.held())

    def holds(self, *held: tuple[str, float]) -> None:
        wait_until(lambda: self.held() == sorted(held))


@pytest.fixture
def make_flow(tmp_path: Path, driver: Driver) -> Iterator[Callable[..., Flow]]:
    made: list[Flow] = []

    def make(devices: str = "simulated:1x8GiB") -> Flow:
        made.append(Flow(tmp_path, devices))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def flow(make_flow: Callable[..., Flow]) -> Flow:
    return make_flow()


def training(flow: Flow, gib: float = 6, **of_request: Any) -> FlowTask:
    return FlowTask(flow, "train", gib, preemptible=True, **of_request).start()


def test_a_task_makes_way_on_its_node_and_comes_back(flow: Flow, driver: Driver) -> None:
    train = training(flow)
    urgent = FlowTask(flow, "urgent", 6, priority=5).start()
    assert train.heard[:2] == [("moving out", "moving to the host"), "task 'urgent'"]
    assert train.stages == ["moving out", "away"] and train.suspender is not None
    assert train.suspender.away and train.suspender.away_s is not None
    assert driver.made == ["lock", "checkpoint"]
    assert not train.entry.reservations and flow.held() == [("urgent", 6)]
    urgent.exit()
    train.reaches("running")
    suspension = train.heard[-2]
    assert suspension.moved_bytes == 5 * GIB and suspension.seconds >= suspension.out_s
    assert not train.suspender.away and not train.entry.away and train.entry.reservations
    assert flow.held() == [("train", 6)]
    assert not flow.on_node("train").away
    assert driver.made == ["lock", "checkpoint", "restore", "unlock"]


def test_nothing_is_suspended_for_a_task_of_the_same_priority(flow: Flow, driver: Driver) -> None:
    train = training(flow)
    other = FlowTask(flow, "other", 6)
    wait_until(lambda: flow.broker.entry(other.ticket) is not None)
    train.exit()
    other.start()
    assert not driver.made


def test_a_task_is_moved_to_another_device_of_its_node(
    make_flow: Callable[..., Flow], driver: Driver
) -> None:
    flow = make_flow("simulated:2x8GiB")
    first, second = (training(flow, 3) for _ in range(2))
    before = first.device_uuid(), second.device_uuid()
    assert len(set(before)) == 2
    urgent = FlowTask(flow, "urgent", 7).start()
    there = urgent.device_uuid()
    (moved,) = (each for each in (first, second) if each.stages)
    moved.reaches("running")
    assert first.device_uuid() == second.device_uuid() != there
    flow.holds(("train", 3), ("train", 3), ("urgent", 7))
    pid = moved.child.pid
    assert driver.onto[pid][moved.device_uuid()] == there
    wait_until(
        lambda: (
            {s.device.uuid: s.free_bytes // GIB for s in flow.broker.reader.read(())}
            == {there: 2, moved.device_uuid(): 4}
        )
    )


def test_a_person_on_the_nodes_machine_suspends_a_task_that_keeps_its_device(
    flow: Flow, driver: Driver
) -> None:
    train = training(flow, 6)
    flow.ask("train", away=True)
    train.reaches("away")
    assert train.heard[1] == BY_HAND
    assert "5GiB in host memory" in flow.on_node("train").suspension
    assert train.entry.held_back and train.entry.reservations
    # What is freed stays reserved, also for what is urgent.
    urgent = FlowTask(flow, "urgent", 6, priority=5)
    wait_until(lambda: flow.broker.entry(urgent.ticket) is not None)
    assert not urgent.ticket.decided and flow.held() == [("train", 6)]
    flow.ask("train", away=False)
    train.reaches("running")
    # It rests for a while.
    assert not urgent.ticket.decided
    assert flow.on_node("train").suspension == ""
    flow.broker.withdraw(urgent.ticket)


def test_a_person_lets_other_tasks_have_the_device(flow: Flow, driver: Driver) -> None:
    train = training(flow)
    flow.ask("train", away=True, shared=True)
    train.reaches("away")
    other = FlowTask(flow, "other", 6).start()
    flow.holds(("other", 6))
    flow.ask("train", away=False)
    wait_until(lambda: not train.entry.held_back)
    assert train.stages == ["moving out", "away"]
    other.exit()
    train.reaches("running")
    flow.holds(("train", 6))


def test_a_resume_by_hand_does_not_bring_back_what_has_made_way(flow: Flow) -> None:
    train = training(flow)
    urgent = FlowTask(flow, "urgent", 6, priority=5).start()
    flow.ask("train", away=True)
    wait_until(lambda: train.entry.held_back)
    flow.ask("train", away=False)
    wait_until(lambda: not train.entry.held_back)
    assert flow.held() == [("urgent", 6)]
    urgent.exit()
    train.reaches("running")


def test_it_is_restored_only_once_the_flow_agrees(flow: Flow, driver: Driver) -> None:
    train = training(flow)
    flow.ask("train", away=True)
    train.reaches("away")
    asked = threading.Event()

    def refuse() -> bool:
        asked.set()
        return train.agrees and flow.broker.comes_back(train.ticket)

    train.agrees = False
    train.comes_back = refuse  # type: ignore[method-assign]
    flow.ask("train", away=False)
    assert asked.wait(DEADLOCK_S)
    asked.clear()
    assert asked.wait(DEADLOCK_S), "it is asked again"
    assert "restore" not in driver.made
    train.agrees = True
    train.reaches("running")


def test_a_process_that_ends_while_it_is_away_leaves_nothing(flow: Flow) -> None:
    train = training(flow)
    urgent = FlowTask(flow, "urgent", 6, priority=5).start()
    train.exit()
    urgent.exit()
    flow.holds()
    wait_until(lambda: flow.broker.entry(train.ticket) is None)


def test_what_is_refused_goes_on_and_says_why(
    flow: Flow, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = training(flow)
    with monkeypatch.context() as patched:
        patched.setattr(suspended, "refusal", lambda candidate: "it uses numba")
        flow.ask("train", away=True)
        train.reaches("refused")
    assert train.heard == [("refused", "not suspended: it uses numba")]
    assert flow.on_node("train").suspension == "not suspended: it uses numba"
    assert not driver.made
    wait_until(lambda: not train.entry.held_back)
    flow.ask("train", away=True)
    train.reaches("away")


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_the_flow_hears_that_a_process_is_lost(flow: Flow, driver: Driver, step: str) -> None:
    driver.fails = step
    train = training(flow)
    flow.ask("train", away=True)
    if step == "restore":
        train.reaches("away")
        flow.ask("train", away=False)
    wait_until(lambda: any(isinstance(each, RuntimeError) for each in train.heard))
    assert step in str(train.heard[-1])


def on_two_devices(make_flow: Callable[..., Flow]) -> tuple[Flow, FlowTask, list[FlowTask]]:
    """Return a task that has made way, and what has the two devices."""
    flow = make_flow("simulated:2x8GiB")
    train = training(flow, 6, priority=-1)
    others = [FlowTask(flow, f"other {i}", 6).start() for i in range(2)]
    return flow, train, others


class Neighbour:
    """Another flow on the machine of the node."""

    def __init__(self, flow: Flow) -> None:
        agent = flow.scene.agent._broker
        assert agent is not None
        self.ledger = Ledger(lambda: HostStore(flow.scene.folder))
        self.broker = Broker(agent.reader, self.ledger)

    def take(self, gib: float, **of_request: Any) -> Ticket:
        asked = Request("", "theirs", next_sequence(), 0.0, int(gib * GIB), **of_request)
        return self.broker.submit(asked)

    def close(self) -> None:
        self.broker._sampler.stop()
        self.ledger._open().close()


def test_it_comes_back_elsewhere_where_another_flow_has_taken_its_device(
    make_flow: Callable[..., Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_suspension, "RESERVE_S", 0.1)
    flow, train, others = on_two_devices(make_flow)
    theirs = Neighbour(flow)
    lost_uuid, free_uuid = others[0].device_uuid(), others[1].device_uuid()
    # It waits before the task is asked back.
    ticket = theirs.take(6, devices=(lost_uuid,), priority=9)
    wait_until(lambda: theirs.ledger.entry(ticket.request.id) is not None)
    others[0].exit()
    assert ticket.wait(RealClock(), RealClock().now() + DEADLOCK_S)
    wait_until(lambda: "waits again" in train.heard or others[1].ticket.ended_s is None)
    others[1].exit()
    train.reaches("running")
    assert train.device_uuid() == free_uuid
    theirs.broker.end(ticket)
    theirs.close()


def test_a_person_may_ask_before_the_flow_knows_the_process(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = Broker.attach
    asked = threading.Event()

    def ask_first(broker: Broker, ticket: Ticket, pid: int) -> None:
        attach(broker, ticket, pid)
        if broker is flow.scene.agent._broker and not asked.is_set():
            asked.set()
            flow.ask("train", away=True)
            broker.refresh()
            # The node's broker sees it before the flow hears of the process.
            told = threading.Event()
            broker.watch(lambda reading: told.set())
            assert told.wait(DEADLOCK_S)

    monkeypatch.setattr(Broker, "attach", ask_first)
    train = training(flow)
    assert asked.is_set()
    train.reaches("away")
    assert train.heard[1] == BY_HAND


def test_what_a_flow_chose_suspends_nothing_on_the_node(
    flow: Flow, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "CONFIRM_S", 0.3)
    theirs = Neighbour(flow)
    ticket = theirs.take(6, preemptible=True, priority=-9, expected_s=LONG_S)
    assert ticket.wait(RealClock(), RealClock().now() + DEADLOCK_S)
    theirs.broker.attach(ticket, os.getpid())
    heard, _ = flow.scene.launch(6)
    assert isinstance(heard.next().error, NodeRefusedError)
    entry = theirs.ledger.entry(ticket.request.id)
    assert entry is not None and not entry.suspended_for
    theirs.broker.end(ticket)
    theirs.close()


def test_a_wish_that_a_refusal_of_something_else_has_ended_is_ended_for_the_flow_too(
    flow: Flow, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = training(flow)
    wait_until(lambda: train.suspender is not None)
    suspender = train.suspender
    assert suspender is not None

    def judge(candidate: object) -> str:
        # A person asks while what the flow has asked for is looked at.
        flow.ask("train", away=True)
        wait_until(lambda: train.entry.held_back)
        suspender._number += 1
        return "not yet"

    with monkeypatch.context() as patched:
        patched.setattr(suspended, "refusal", judge)
        suspender.ask(True)
        wait_until(lambda: "not yet" in flow.on_node("train").suspension)
        wait_until(lambda: not train.entry.held_back)
    assert not flow.on_node("train").held_back


def test_the_loss_of_a_process_does_not_overtake_what_it_has_returned(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = training(flow)
    agent = flow.scene.agent
    (hosted,) = agent._hosted.values()
    sends = threading.Event()
    order: list[str] = []
    tell = agent._tell
    monkeypatch.setattr(
        agent, "_tell", lambda child, m: order.append(type(m).__name__) or tell(child, m)
    )
    monkeypatch.setattr(
        agent, "_send_value", lambda child, m: sends.wait(DEADLOCK_S) and order.append("value")
    )
    train.child.say(ValueArrived(ReceivedValue(memoryview(b""))))
    assert hosted.suspension is not None
    hosted.suspension.lost("the driver has lost it")
    sends.set()
    wait_until(lambda: "ProcessLost" in order)
    assert order == ["value", "ProcessLost"]
