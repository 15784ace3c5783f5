"""Nodes of a cluster without Ray: an object store in a dictionary, and agents that note what they are told."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

from prefect_gpu import values
from prefect_gpu.broker.ledger import Entry
from prefect_gpu.broker.phases import Phase
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.cluster.flow_side import Node, Nodes
from prefect_gpu.cluster.wire import News, NodeFacts
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.in_task import Allocation
from prefect_gpu.processes.launch_spec import LaunchSpec
from prefect_gpu.processes.messages import Call, Prepare
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    Placement,
    Probe,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.units import GIB


class Reference:
    """What stands for stored bytes."""


class FakeStore:
    """Keeps bytes in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[Reference, bytes] = {}
        self.puts = 0
        #: Called before each `get`.
        self.before_get: Callable[[], object] = lambda: None

    def put(self, data: memoryview) -> Reference:
        self.puts += 1
        reference = Reference()
        self.kept[reference] = bytes(data)
        return reference

    def get(self, reference: Any) -> memoryview:
        self.before_get()
        if reference not in self.kept:
            raise RuntimeError("the object is lost")
        return memoryview(self.kept[reference])

    def holds(self, part: Any) -> bool:
        return isinstance(part, Reference)


class FakeAgent:
    """Notes the commands that it gets."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def tell(self, commands: Sequence[Any]) -> None:
        self.commands += commands

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, message: Any) -> None:
        self._queue.put(message)

    def next(self) -> Any:
        return self._queue.get(timeout=DEADLOCK_S)

    def until(self, kind: type) -> Any:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    @property
    def nothing(self) -> bool:
        return self._queue.empty()


def make_device(node: str, index: int = 0, gib: float = 8, name: str = "") -> Device:
    return Device(
        f"SIM-{node}-{index}",
        index,
        name or f"simulated {gib}GiB",
        int(gib * GIB),
        "simulated",
        node,
        machine=f"machine of {node}",
    )


def make_node(name: str, count: int = 1, agent: str = "") -> Node:
    devices = tuple(make_device(name, index) for index in range(count))
    facts = NodeFacts(agent or f"agent of {name}", "1", "simulated", devices, GIB // 2, 8)
    return Node(name, FakeAgent(), facts)


def agent_of(node: Node) -> FakeAgent:
    assert isinstance(node.agent, FakeAgent)
    return node.agent


_numbers = itertools.count(1)


def news_of(node: Node, *heard: tuple[str, Any], **fields: Any) -> News:
    """News without a reading, unless it is given."""
    return News(node.facts.agent, next(_numbers), fields.pop("now_s", 0.0), heard, **fields)


def reading_of(
    node: Node,
    free_gib: float = 8,
    at_s: float = 0.0,
    read_s: float = 0.0,
    host_available_bytes: int = 0,
    error: str = "",
    **fields: Any,
) -> News:
    """News with a reading, which has no snapshots if there is an error."""
    devices = () if error else node.facts.devices
    snapshots = tuple(DeviceSnapshot(each, at_s, int(free_gib * GIB)) for each in devices)
    reading = Reading(read_s, snapshots, host_available_bytes, error)
    return news_of(node, **{"reading": reading, "others": {}, **fields})


def other_entry(
    device: Device,
    gib: float = 2,
    request_id: str = "other",
    pid: int | None = None,
    ends_s: float | None = None,
) -> Entry:
    """What another flow holds."""
    size = int(gib * GIB)
    reservation = Reservation(request_id, *device.key, size, task_name="theirs", ends_s=ends_s)
    return Entry(
        Request(request_id, "theirs", 1, 0.0, size),
        owner="another agent",
        phase=Phase.PLACED if pid is None else Phase.RUNNING,
        reservations=(reservation,),
        devices=(device.key,),
        pid=pid,
        held_bytes=(0,),
    )


def place_on(
    *devices: Device,
    gib: Sequence[float] = (),
    exclusive: bool = False,
    probe: Probe | None = None,
) -> Placement:
    sizes = tuple(int(each * GIB) for each in gib or [2] * len(devices))
    return Placement(
        "r",
        devices,
        sizes,
        tuple(
            Reservation("r", *device.key, size, exclusive, probe=probe)
            for device, size in zip(devices, sizes, strict=True)
        ),
    )


def spec_for(
    placement: Placement, *args: Any, allocation: Any = "limit", host_bytes: int = 0
) -> LaunchSpec:
    uuids = tuple(device.uuid for device in placement.devices)
    totals = tuple(device.total_bytes for device in placement.devices)
    return LaunchSpec(
        "train",
        {},
        Prepare(
            FrameworkPolicy(
                "simulated", uuids, totals, placement.budget_bytes, allocation=allocation
            ),
            Allocation(min(placement.budget_bytes), None, 1, uuids, ()),
            0.1,
        ),
        values.dumps(Call(len, args, {}), "call", "call"),
        os.getcwd(),
        placement=placement,
        request=Request(
            "r",
            "train",
            1,
            0.0,
            host_bytes=host_bytes,
            task_run_id="11111111-2222",
            task_run_name="train-1",
        ),
    )


def make_nodes(*names: str, store: FakeStore | None = None) -> tuple[Nodes, list[Node]]:
    nodes = Nodes(store or FakeStore())
    made = [make_node(name) for name in names]
    for node in made:
        nodes.join(node)
    return nodes, made
