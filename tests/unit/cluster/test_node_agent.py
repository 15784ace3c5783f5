"""A node's agent and a flow's `Nodes`, with simulated devices and processes that do as they are told."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.preempting import hold_back
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.cluster import node_agent
from prefect_gpu.cluster.flow_side import (
    ClusterLauncher,
    ClusterReader,
    ClusterStore,
    Node,
    Nodes,
    RemoteHandle,
)
from prefect_gpu.cluster.node_agent import NodeAgent, NodeSettings, NodeStandbys, is_alike
from prefect_gpu.cluster.wire import EndAll, Expect, NodeFacts, OpenFile, SharedResult, can_share
from prefect_gpu.devices.spec import parse_spec
from prefect_gpu.errors import NodeRefusedError
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
)
from prefect_gpu.processes.messages import Answered, Asked, BodyStarted
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    DeviceWork,
    Probe,
    Reading,
    Request,
)
from prefect_gpu.suspension.eligibility import REFUSED
from prefect_gpu.units import GIB
from prefect_gpu.values import transport
from prefect_gpu.values.transport import write_file
from tests.unit.cluster.cluster_rig import FakeStore, Heard, place_on, spec_for
from tests.unit.cluster.test_expected import KIND, POLICY, FakePool
from tests.unit.scheduling.values import device

needs_files = pytest.mark.skipif(not transport.AVAILABLE, reason="no memory files on this system")

#: Of processes that there are not.
FIRST_PID = 5_000_000


class FakeChild:
    """One process on the node, which says what the test has it say."""

    def __init__(self, spec: LaunchSpec, say: Listener, pid: int) -> None:
        self.spec, self.say, self.pid = spec, say, pid
        self.answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self.killed = threading.Event()

    def answer(self, message: Any) -> None:
        self.answers.put(message)

    def kill(self) -> None:
        self.killed.set()

    def begin(self) -> FakeChild:
        self.say(ChildStarted(self.pid))
        self.say(BodyStarted())
        return self

    def exit(self) -> None:
        self.say(ChildExited(0, ""))

    def ask(self, method: str, **arguments: Any) -> Any:
        self.say(Asked(method, arguments))
        return self.answers.get(timeout=DEADLOCK_S).error


class FakeLauncher:
    def __init__(self) -> None:
        self.started: queue.SimpleQueue[FakeChild] = queue.SimpleQueue()
        self.count = 0

    def start(self, spec: LaunchSpec, listener: Listener) -> FakeChild:
        self.count += 1
        child = FakeChild(spec, listener, FIRST_PID + self.count)
        self.started.put(child)
        return child


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLOCK_S
    while not condition():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


class Scene:
    """One node, and a flow that listens to it."""

    def __init__(self, folder: Path, shares: bool = True) -> None:
        self.folder = folder
        self.launcher = FakeLauncher()
        self.store = FakeStore()
        spec = parse_spec("simulated:1x8GiB")
        settings = NodeSettings("n1", spec, "spread", None, None, ledger=folder, standby=0)
        self.agent = NodeAgent(settings, self.store, None, "1", self.launcher)
        self.nodes = Nodes(self.store)
        self.ledger = Ledger(lambda: ClusterStore(self.nodes))
        self.ledger.view()
        facts = self.agent.facts() if shares else replace(self.agent.facts(), probe=None)
        self.node = Node("n1", self.agent, facts)
        self.nodes.join(self.node)
        self.flow = ClusterLauncher(self.nodes)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        seen = 0
        while not self._closing.is_set():
            news = self.agent.listen(seen, 0.05)
            seen = news.number
            self.nodes.take("n1", news)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.agent.tell([EndAll()])
        assert self.agent._broker is not None
        self.agent._broker._sampler.stop()

    @property
    def device(self) -> Device:
        (device,) = self.agent.facts().devices
        return device

    def launch(self, gib: float, *args: Any) -> tuple[Heard, RemoteHandle]:
        heard = Heard()
        spec = spec_for(place_on(self.device, gib=[gib]), *args)
        return heard, self.flow.start(spec, heard)

    def next_child(self) -> FakeChild:
        return self.launcher.started.get(timeout=DEADLOCK_S)

    def held(self) -> list[tuple[str, float]]:
        """What the node's own ledger has, as another flow of the machine reads it."""
        ledger = Ledger(lambda: HostStore(self.folder))
        try:
            held = [r for group in ledger.view().by_device.values() for r in group]
            return [(r.task_name, r.reserved_bytes / GIB) for r in held]
        finally:
            ledger._open().close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    # A launch that fits is confirmed, however slow the machine is. Tests of refusals set less.
    monkeypatch.setattr(node_agent, "CONFIRM_S", DEADLOCK_S)
    made = Scene(tmp_path)
    yield made
    made.close()


def test_a_launch_is_confirmed_runs_and_is_released_after_its_end(scene: Scene) -> None:
    heard, _ = scene.launch(5, "an argument")
    child = scene.next_child()
    assert scene.held() == [("train", 5)]
    assert values.load_call(child.spec.call).args == ("an argument",)
    child.begin()
    assert heard.next() == ChildStarted(child.pid)
    assert heard.next() == BodyStarted()
    child.exit()
    assert heard.next() == ChildExited(0, "")
    wait_until(lambda: scene.held() == [])
    assert not scene.agent._hosted and heard.nothing


def test_probes_whose_caps_add_up_to_more_than_the_device_are_confirmed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scene.device.total_bytes / GIB
    for part in (0.75, 0.5):
        placement = place_on(scene.device, gib=[whole * part], probe=Probe(0.0, GIB))
        scene.flow.start(spec_for(placement), Heard())
        scene.next_child()
    assert scene.held() == [("train", whole * 0.75), ("train", whole * 0.5)]
    # A task with a budget must fit beside them.
    monkeypatch.setattr(node_agent, "CONFIRM_S", 0.1)
    heard, _ = scene.launch(whole * 0.1)
    assert isinstance(heard.next(), ChildRefused)


LARGE = "x" * (2 << 20)


def return_large(scene: Scene) -> Any:
    """Return what the flow gets of a large value."""
    heard, _ = scene.launch(5)
    child = scene.next_child().begin()
    child.say(ValueArrived(values.dumps(LARGE, "return value", "value").open()))
    child.exit()
    assert [type(heard.next()) for _ in range(2)] == [ChildStarted, BodyStarted]
    return heard.next()


@needs_files
def test_a_large_result_on_the_flows_machine_is_the_childs_own_memory(scene: Scene) -> None:
    arrived = return_large(scene)
    assert values.loads(arrived.data, "return value") == LARGE
    assert scene.store.puts == 0
    # Closed once the flow has it.
    wait_until(lambda: not scene.agent._shared)


def test_a_large_result_of_another_machine_goes_through_the_store(tmp_path: Path) -> None:
    scene = Scene(tmp_path, shares=False)
    try:
        arrived = return_large(scene)
    finally:
        scene.close()
    assert values.loads(arrived.data, "return value") == LARGE
    assert scene.store.puts == 1


@needs_files
def test_a_result_whose_agent_is_gone_is_lost_with_that_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = SharedResult(b"", (OpenFile(FIRST_PID, 3),))
    monkeypatch.setattr(node_agent.wire, "share_result", lambda value: gone)
    lost = return_large(scene)
    assert isinstance(lost, ChildExited)
    assert "lost on the way" in lost.killed_because and str(FIRST_PID) in lost.killed_because


@needs_files
def test_files_are_shared_only_with_a_flow_that_reads_the_agents_own() -> None:
    own = write_file([memoryview(b"agent")])
    facts = NodeFacts("agent", "1", "simulated", (), 0, 1)
    assert not can_share(facts)
    with open(os.devnull) as other:
        for descriptor, expected in ((own.fileno(), True), (other.fileno(), False)):
            probe = OpenFile(os.getpid(), descriptor)
            assert can_share(replace(facts, probe=probe)) is expected
            assert not can_share(replace(facts, probe=probe, agent="another"))


def test_a_launch_that_does_not_fit_is_refused_with_the_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.launch(5)
    scene.next_child().begin()
    # From now on: the first was to be confirmed, however long that takes.
    monkeypatch.setattr(node_agent, "CONFIRM_S", 0.1)
    heard, _ = scene.launch(4)
    refused = heard.next()
    assert isinstance(refused, ChildRefused)
    assert isinstance(refused.error, NodeRefusedError)
    assert "4GiB" in str(refused.error) and "n1" in str(refused.error)
    assert scene.held() == [("train", 5)]
    assert scene.launcher.count == 1


@contextlib.contextmanager
def another_flow(scene: Scene, **request: Any) -> Iterator[tuple[Broker, Ledger, Ticket]]:
    """Reserve 6 GiB of the node's device for a task of another flow of its machine."""
    assert scene.agent._broker is not None
    ledger = Ledger(lambda: HostStore(scene.folder))
    broker = Broker(scene.agent._broker.reader, ledger)
    asked = Request("", "theirs", next_sequence(), 0.0, 6 * GIB, **request)
    try:
        ticket = broker.submit(asked)
        broker.wait(ticket, DEADLOCK_S, lambda reason: None)
        yield broker, ledger, ticket
    finally:
        broker._sampler.stop()
        ledger._open().close()


def test_a_launch_suspends_no_task_of_the_node(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "CONFIRM_S", 0.3)
    least = {"priority": -9, "preemptible": True, "expected_s": 1e4}
    with another_flow(scene, **least) as (broker, ledger, ticket):
        broker.attach(ticket, os.getpid())
        heard, _ = scene.launch(6)
        assert isinstance(heard.next().error, NodeRefusedError)
        entry = ledger.entry(ticket.request.id)
        assert entry is not None and entry.reservations and not entry.suspended_for
        broker.end(ticket)


def test_a_person_who_suspends_a_task_is_refused_with_the_reason(scene: Scene) -> None:
    scene.launch(5)
    scene.next_child().begin()
    ledger = Ledger(lambda: HostStore(scene.folder))
    try:
        (request_id,) = ledger.running()
        for _ in range(2):
            ledger.rewrite(request_id, lambda entry: hold_back(entry, away=True))
            wait_until(lambda: ledger.running()[request_id].suspension != "")
            entry = ledger.running()[request_id]
            assert entry.suspension == f"{REFUSED}{node_agent.NOT_SUSPENDED}"
            assert not entry.held_back and not entry.away and entry.reservations
    finally:
        ledger._open().close()


def test_a_launch_larger_than_the_device_is_refused_at_once(scene: Scene) -> None:
    heard, _ = scene.launch(9)
    assert isinstance(heard.next().error, NodeRefusedError)
    assert scene.held() == []


def test_a_process_that_is_killed_before_it_is_confirmed_is_not_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "CONFIRM_S", DEADLOCK_S)
    scene.launch(5)
    first = scene.next_child().begin()
    heard, handle = scene.launch(4)
    handle.kill()
    first.exit()
    assert isinstance(heard.next().error, NodeRefusedError)
    assert scene.launcher.count == 1
    wait_until(lambda: scene.held() == [])


def test_a_process_is_killed_by_the_flow_and_where_all_are_ended(scene: Scene) -> None:
    _, handle = scene.launch(2)
    one = scene.next_child().begin()
    handle.kill()
    assert one.killed.wait(DEADLOCK_S)
    scene.launch(2)
    two = scene.next_child().begin()
    scene.agent.tell([EndAll()])
    assert two.killed.is_set()


def test_what_other_flows_hold_is_in_the_news_and_is_not_given_twice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "CONFIRM_S", 0.1)

    def seen() -> list[tuple[str, float]]:
        held = scene.ledger.view().by_device.get(scene.device.key, ())
        return [(r.task_name, r.reserved_bytes / GIB) for r in held]

    with another_flow(scene) as (broker, _, ticket):
        wait_until(lambda: seen() == [("theirs", 6)])
        heard, _ = scene.launch(4)
        assert isinstance(heard.next().error, NodeRefusedError)
        broker.end(ticket)
        wait_until(lambda: seen() == [])
        monkeypatch.setattr(node_agent, "CONFIRM_S", DEADLOCK_S)
        heard, _ = scene.launch(4)
        scene.next_child().begin()
        assert isinstance(heard.next(), ChildStarted)


def test_allocations_are_booked_on_the_node_and_known_to_the_flow(scene: Scene) -> None:
    reader = ClusterReader(scene.nodes, "simulated")
    memory = reader.process_memory([scene.device.uuid], None)
    heard, _ = scene.launch(5)
    child = scene.next_child().begin()
    memory.attach(child.pid)
    uuid = scene.device.uuid
    assert child.ask("simulated_allocate", device_uuid=uuid, size_bytes=3 * GIB) is None
    wait_until(lambda: memory.live_bytes() == 3 * GIB)
    wait_until(lambda: reader.read(())[0].free_bytes == 5 * GIB)
    error = child.ask("simulated_allocate", device_uuid=uuid, size_bytes=3 * GIB)
    assert "memory" in str(error).lower()
    child.exit()
    heard.until(ChildExited)
    assert memory.detach() == (3 * GIB, 1)
    wait_until(lambda: reader.read(())[0].free_bytes == 8 * GIB)


def test_a_question_that_the_flow_answers_reaches_it_and_the_answer_the_process(
    scene: Scene,
) -> None:
    heard, handle = scene.launch(1)
    child = scene.next_child().begin()
    child.say(Asked("calibrated", {"reserved_bytes": 5}))
    assert heard.until(Asked).arguments == {"reserved_bytes": 5}
    handle.answer(Answered(result=1))
    assert child.answers.get(timeout=DEADLOCK_S) == Answered(result=1)


def test_a_call_whose_bytes_are_lost_is_refused_and_holds_nothing(scene: Scene) -> None:
    def lose(reference: Any) -> Any:
        raise RuntimeError("the object is lost")

    scene.store.get = lose  # type: ignore[method-assign]
    heard, _ = scene.launch(5, "x" * (2 << 20))
    refused = heard.next()
    assert isinstance(refused, ChildRefused) and "lost" in str(refused.error)
    wait_until(lambda: scene.held() == [])


@contextlib.contextmanager
def an_agent(folder: Path, **settings: Any) -> Iterator[NodeAgent]:
    """Make an agent that no flow listens to."""
    spec = parse_spec("simulated:1x8GiB")
    given = NodeSettings("n1", spec, "spread", None, None, folder, standby=0, **settings)
    agent = NodeAgent(given, FakeStore(), None, "1", FakeLauncher())
    try:
        yield agent
    finally:
        if agent._broker is not None:
            agent._broker._sampler.stop()


def test_news_that_were_not_acknowledged_come_again(tmp_path: Path) -> None:
    with an_agent(tmp_path) as agent:
        agent._tell("one", "first")
        news = agent.listen(0, 0.0)
        assert news.heard == (("one", "first"),)
        agent._tell("one", "second")
        assert agent.listen(0, 0.0).heard == (("one", "first"), ("one", "second"))
        assert agent.listen(news.number, 0.0).heard == (("one", "second"),)
        assert agent.listen(agent._number, 0.0).heard == ()


def test_ready_standbys_are_told_when_they_change(tmp_path: Path) -> None:
    pool = FakePool()
    with an_agent(tmp_path) as agent:
        agent._standbys = NodeStandbys(pool, FakeLauncher())  # type: ignore[arg-type]
        agent._standbys.most = 2
        wait_until(lambda: agent._reading is not None)
        seen = agent.listen(0).number
        agent._standbys.expect(Expect(KIND, POLICY, 1))
        pool.ready_by_kind[pool.announced[0].kind] = 1
        wait_until(lambda: bool(agent.listen(seen, 0.0).standbys))
        news = agent.listen(seen, 0.0)
        assert news.standbys == {KIND.key: 1}
        assert agent.listen(news.number, 0.0).standbys is None
        assert agent.listen(seen, 0.0).standbys == {KIND.key: 1}, "it was not acknowledged"
        pool.ready_by_kind.clear()
        wait_until(lambda: agent.listen(news.number, 0.0).standbys == {})


def test_standbys_start_from_the_flows_folder_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, before, paths = tmp_path / "work", os.getcwd(), list(sys.path)
    work.mkdir()
    monkeypatch.chdir(before)
    monkeypatch.setattr(sys, "path", [*paths])
    sys_path = (str(tmp_path), "/is/not/here")
    with an_agent(tmp_path, cwd=str(work), sys_path=sys_path) as agent:
        assert os.getcwd() == str(work)
        assert sys.path[0] == str(tmp_path) and "/is/not/here" not in sys.path
        assert set(paths[1:]) <= set(sys.path)
        # The flow has imported a module that adds to its paths.
        agent._follow(before, ("/", *sys_path))
        assert os.getcwd() == before and sys.path[:2] == ["/", str(tmp_path)]


def test_a_node_whose_devices_cannot_be_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise node_agent.DeviceError("no driver")

    monkeypatch.setattr(node_agent, "open_reader", fail)
    with an_agent(tmp_path) as made:
        agent = made
    assert agent.facts().problem == "no driver" and not agent.facts().devices
    nodes = Nodes(FakeStore())
    nodes.join(Node("n1", agent, agent.facts()))
    heard = Heard()
    device = Device("SIM-0", 0, "simulated", 8 * GIB, "simulated", "n1")
    ClusterLauncher(nodes).start(spec_for(place_on(device)), heard)
    wait_until(lambda: bool(agent._heard))
    nodes.take("n1", agent.listen(0, 0.0))
    assert isinstance(heard.next().error, NodeRefusedError)


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"at_s": 2.0}, True),
        ({"work": DeviceWork({7: 0.5}, 9.0)}, True),
        ({"busy_fraction": 0.02}, True),
        ({"busy_fraction": 0.5}, False),
        ({"free_bytes": 1}, False),
    ],
)
def test_readings_that_are_alike_are_sent_once(changes: dict[str, Any], alike: bool) -> None:
    snapshot = DeviceSnapshot(device(), 1.0, 5 * GIB)
    changed = replace(snapshot, **changes)
    assert is_alike(Reading(1.0, (snapshot,), 0), Reading(2.0, (changed,), 0)) is alike
