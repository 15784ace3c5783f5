"""The nodes of a cluster, as the flow's process sees them: their devices, reservations and processes.

`ClusterReader` is the `DeviceReader` of all nodes, `ClusterStore` the store of a ledger that includes other flows'
reservations, and `ClusterLauncher` starts processes on the node of a placement. All three read `Nodes`. Standbys: the
node of a task is not known before its placement, so all nodes get the same numbers of `ExpectedTasks`.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from prefect_gpu.broker.ledger import Entry, Row, Store, Written
from prefect_gpu.cluster import wire
from prefect_gpu.devices.reader import DeviceReader, ProcessMemory
from prefect_gpu.errors import ChildDiedError, DeviceError, NodeRefusedError
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildHandle,
    ChildRefused,
    LaunchSpec,
    Listener,
    ValueArrived,
    tell,
)
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKind,
    DeviceSnapshot,
    ModelBudgets,
    NodeReading,
    Reading,
    Request,
)
from prefect_gpu.scheduling.probes import AT_ONCE_FRACTION
from prefect_gpu.units import format_seconds
from prefect_gpu.values.transport import MemoryFile, PackedValue

#: Seconds without news after which no task is placed on a node.
SILENT_S = 2.0


class Agent(Protocol):
    """A node's agent, as the flow calls it."""

    def tell(self, commands: Sequence[wire.Command]) -> None:
        """Send commands, in order; return at once. They are lost if the agent is gone."""


@dataclass(eq=False)
class Node:
    """One node that has devices for the flow. Guarded by the lock of `Nodes`."""

    name: str
    agent: Agent
    facts: wire.NodeFacts
    #: Whether the flow runs on this node, so that values of its tasks need not travel.
    near: bool = False
    reading: Reading = field(default_factory=lambda: Reading(0.0, (), 0))
    #: Monotonic seconds of this process when the last news came.
    heard_s: float = field(default_factory=time.monotonic)
    live_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Seconds to add to the node's clock for this process's: the least seen, which includes the shortest transfer.
    ahead_s: float = float("inf")
    #: Peak bytes and number of simulated devices by process id, until they are read.
    peaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: Numbers of waiting standbys, by the key of their kind.
    standbys: Mapping[str, int] = field(default_factory=dict)

    def keep(self, reading: Reading) -> None:
        """Replace the node's reading. Snapshots of devices with unchanged figures stay, with their time."""
        last = {snapshot.device.uuid: snapshot for snapshot in self.reading.snapshots}
        kept = []
        for new in reading.snapshots:
            known = last.get(new.device.uuid, new)
            # The counter of energy differs each time. Of an idle device nobody needs it.
            same = replace(new, at_s=known.at_s, work=known.work) == known
            kept.append(known if same and _is_idle(new) and _is_idle(known) else new)
        self.reading = replace(reading, snapshots=tuple(kept))


def _is_idle(snapshot: DeviceSnapshot) -> bool:
    return snapshot.work is None or not snapshot.work.busy


class Nodes:
    """The nodes of a cluster that have devices, and the flow's processes there. Safe to use from several threads."""

    def __init__(self, store: wire.ObjectStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._children: dict[str, _Child] = {}
        #: Called with a node's name and the entries of other flows there.
        self.on_others: Callable[[str, Mapping[str, Entry]], None] = lambda node, entries: None

    def all(self) -> tuple[Node, ...]:
        """Return the nodes as they joined, the flow's own first: placement chooses the first of equal devices."""
        with self._lock:
            return tuple(self._nodes.values())

    def join(self, node: Node) -> None:
        """Add a node, and remove an earlier node of the same name, whose agent was started again."""
        self.leave(node.name, f"the agent of node {node.name} was started again")
        if wire.can_share(node.facts):
            node.agent.tell([wire.ShareFiles()])
        with self._lock:
            self._nodes[node.name] = node
            if node.near:
                self._nodes = {node.name: node, **self._nodes}

    def leave(self, name: str, why: str) -> None:
        """Remove a node; its processes count as killed, with `why` in the errors of their tasks."""
        with self._lock:
            node = self._nodes.pop(name, None)
            lost = {i: each for i, each in self._children.items() if each.node is node}
            for i in lost:
                del self._children[i]
        if node is None:
            return
        self.on_others(name, {})
        for each in lost.values():
            each.order.take(partial(each.lose, why))

    def start(self, name: str, launch: wire.Launch, listener: Listener) -> Node:
        """Send a launch to a node and return the node; raise `NodeRefusedError` if the node is gone."""
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                raise NodeRefusedError(name, "it has left the cluster")
            self._children[launch.child] = _Child(node, listener, launch.spec.task_name)
        try:
            node.agent.tell([launch])
        except BaseException:
            with self._lock:
                self._children.pop(launch.child, None)
            raise
        return node

    def take(self, name: str, news: wire.News) -> None:
        """Handle the news of a node's agent; ignore those of an earlier agent."""
        now_s = time.monotonic()
        with self._lock:
            node = self._nodes.get(name)
            if node is None or node.facts.agent != news.agent:
                return
            if news.reading is not None:
                # A reading may be old although the agent answers: a driver may hang.
                node.heard_s = now_s - max(0.0, news.now_s - news.reading.at_s)
                node.keep(news.reading)
                node.live_bytes = news.live_bytes
            if news.standbys is not None:
                node.standbys = news.standbys
        if news.others is not None:
            # With the latest difference instead of the least, all entries would change with every message.
            node.ahead_s = min(node.ahead_s, now_s - news.now_s)
            self.on_others(name, {i: _as_here(e, node.ahead_s) for i, e in news.others.items()})
        for child, message in news.heard:
            self._hear(node, child, message)

    def _hear(self, node: Node, child: str, message: Any) -> None:
        with self._lock:
            known = self._children.get(child)
            if isinstance(message, (ChildExited, ChildRefused)):
                self._children.pop(child, None)
        if known is None:
            return
        if isinstance(message, wire.PeaksKnown):
            node.peaks[message.pid] = message.live_bytes, message.devices
        elif isinstance(message, (wire.SentResult, wire.SharedResult)):
            known.order.take(partial(self._fetch, child, known, message), slow=True)
        else:
            known.order.take(partial(known.pass_on, message))

    def _fetch(self, name: str, child: _Child, result: wire.SentResult | wire.SharedResult) -> None:
        """Get a child's value and pass it on, on a thread of its own."""
        try:
            if isinstance(result, wire.SharedResult):
                value = wire.open_shared(result)
            else:
                value = wire.receive_result(result, self.store)
        except Exception as error:  # noqa: BLE001 - a boundary: the task fails by it
            why = f"its value was lost on the way: {error}"
            child.pass_on(ChildExited(wire.LOST_CODE, "", killed_because=why))
        else:
            child.pass_on(ValueArrived(value))
        finally:
            if isinstance(result, wire.SharedResult):
                child.node.agent.tell([wire.Release(name)])


@dataclass(eq=False)
class _Child:
    """A process on a node, and the listener to its messages."""

    node: Node
    listener: Listener
    task_name: str
    order: wire.InOrder = field(default_factory=wire.InOrder)
    #: Whether the first, and whether the last message (`ChildExited`, `ChildRefused`) was passed on. Used in `order`.
    began: bool = False
    ended: bool = False

    def lose(self, why: str) -> None:
        """Tell the listener that the process is lost with its node. Called in `order`."""
        if self.began:
            self.pass_on(ChildExited(wire.LOST_CODE, "", killed_because=why))
        else:
            # The process may have begun: no `NodeRefusedError`, by which the task would be placed again.
            how = "was lost before anything was heard of it"
            self.pass_on(ChildRefused(ChildDiedError(self.task_name, 0, how, why)))

    def pass_on(self, message: Any) -> None:
        """Pass a message to the listener, unless the process has ended. Called in `order`."""
        if self.ended:
            return
        self.began = True
        self.ended = isinstance(message, (ChildExited, ChildRefused))
        tell(self.listener, message)


def _as_here(entry: Entry, ahead_s: float) -> Entry:
    """Return a node's entry with times of the flow's clock."""
    reservations = (
        replace(r, ends_s=None if r.ends_s is None else r.ends_s + ahead_s)
        for r in entry.reservations
    )
    return replace(entry, reservations=tuple(reservations))


class ClusterReader(DeviceReader):
    """Reader of all nodes' devices, which are of one kind, from the last news of the agents."""

    remote = True

    def __init__(self, nodes: Nodes, kind: DeviceKind) -> None:
        self._nodes = nodes
        self.kind = kind

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the current nodes."""
        return tuple(device for node in self._nodes.all() for device in node.facts.devices)

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return the last snapshot of each device. `roots` is not used: the nodes' own brokers know their processes."""
        nodes = self._nodes.all()
        if not nodes:
            raise DeviceError("no node of the cluster with devices is left")
        now_s = time.monotonic()
        return tuple(snapshot for node in nodes for snapshot in _snapshots(node, now_s))

    def nodes(self) -> Mapping[str, NodeReading]:
        """Return each node's available host memory, limit of processes, and waiting standbys."""
        return {
            node.name: NodeReading(
                node.reading.host_available_bytes, node.facts.max_processes, node.standbys
            )
            for node in self._nodes.all()
        }

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> ProcessMemory:
        """Return the account of a new process on devices of one node; `budget_bytes`: `None`: no cap."""
        wanted = set(device_uuids)
        for node in self._nodes.all():
            if wanted & {device.uuid for device in node.facts.devices}:
                return NodeMemory(self.kind, node, budget_bytes)
        return ProcessMemory(self.kind)


def _snapshots(node: Node, now_s: float) -> Sequence[DeviceSnapshot]:
    silent_s = now_s - node.heard_s
    snapshots, error = node.reading.snapshots, node.reading.error
    if silent_s > SILENT_S:
        error = f"node {node.name} has not answered for more than {format_seconds(SILENT_S)}"
    elif not snapshots and not error:
        error = f"the first reading of node {node.name} has not come"
    if error:
        return [DeviceSnapshot(device, now_s, 0, error=error) for device in node.facts.devices]
    return snapshots


class NodeMemory(ProcessMemory):
    """Memory of a process on a node, as the node's agent reports it; `budget_bytes`: `None`: no cap."""

    def __init__(self, kind: DeviceKind, node: Node, budget_bytes: Sequence[int] | None) -> None:
        super().__init__(kind)
        self._node = node
        self._pid: int | None = None
        if kind == "simulated":
            context = self.context_bytes = node.facts.context_bytes
            if budget_bytes is not None:
                self.cap_bytes = tuple(max(1, budget - context) for budget in budget_bytes)

    def attach(self, pid: int) -> None:
        """Set the process; a second process replaces the first."""
        self._pid = pid

    def live_bytes(self) -> int | None:
        """Return the allocated bytes of the process on simulated devices; `None`: not known."""
        return None if self._pid is None else self._node.live_bytes.get(self._pid)

    def detach(self) -> tuple[int, int] | None:
        """Return the peak of allocated bytes and the number of devices of the ended process; `None`: not known."""
        return None if self._pid is None else self._node.peaks.pop(self._pid, None)


class ClusterStore(Store):
    """Store of the flow's ledger, with rows of other flows' reservations on the nodes. It keeps no own rows.

    On a cluster, the life of a flow shows in its agents (Ray actors), which end with it.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.owner = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._number = 0
        #: Unread rows of other flows, the last of each request, by request id, in the order of their numbers.
        self._rows: dict[str, Row] = {}
        #: Last entries of other flows, by node.
        self._others: dict[str, Mapping[str, Entry]] = {}
        nodes.on_others = self.take

    def take(self, node: str, entries: Mapping[str, Entry]) -> None:
        """Replace the entries of other flows on a node, and add a row for each change."""
        with self._lock:
            before = self._others.get(node, {})
            if entries == before:
                return
            self._others[node] = entries
            for request_id, entry in entries.items():
                if before.get(request_id) != entry:
                    self._add(request_id, request_id not in before, entry)
            for request_id in before.keys() - entries.keys():
                self._add(request_id, False, None)

    def _add(self, request_id: str, promises: bool, entry: Entry | None) -> None:
        # Unread rows of one request are joined: a flow without waiting requests may not read for hours.
        unread = self._rows.pop(request_id, None)
        self._number += 1
        promises = promises or (unread is not None and unread.promises)
        self._rows[request_id] = Row(self._number, request_id, promises, entry)

    def _take_rows(self) -> Sequence[Row]:
        rows, self._rows = tuple(self._rows.values()), {}
        return rows

    def changed(self) -> bool:
        """Return whether there are unread rows of other flows."""
        with self._lock:
            return bool(self._rows)

    def read(self, after: int) -> Sequence[Row]:
        """Return the unread rows of other flows."""
        with self._lock:
            return self._take_rows()

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        """Accept the flow's own changes, unless an unread row of another flow conflicts; see `Store.write`."""
        with self._lock:
            rows = self._take_rows()
            if any(conflicts(row) for row in rows):
                return Written(rows, None)
            self._number += len(changes)
            return Written(rows, self._number)


class ClusterLauncher:
    """The `Launcher` of processes on the nodes of their placements."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._sent: weakref.WeakKeyDictionary[MemoryFile, wire.Part] = weakref.WeakKeyDictionary()
        self._sends = threading.Lock()

    def start(
        self, spec: LaunchSpec, listener: Listener, standby: wire.Expect | None = None
    ) -> RemoteHandle:
        """Start a process on its node, or pass a `NodeRefusedError` to `listener`; `standby`: see `wire.Launch`."""
        assert spec.placement is not None, "it was placed"
        # A calibration has no request.
        placement, asked = spec.placement, spec.request
        with self._sends:
            call = wire.send_call(spec.call, self._nodes.store, self._sent)
        child = uuid.uuid4().hex
        policy = spec.prepare.policy
        exclusive = any(r.exclusive for r in placement.reservations)
        # Exclusive devices of one model may differ in free memory. The least suffices: no other task may use them.
        held = placement.reservations[0]
        probe_fraction = 0.0
        if held.probe is not None:
            # A task that allocates its whole cap at once counts with the cap.
            at_once = held.probe.counts_bytes >= held.reserved_bytes
            probe_fraction = AT_ONCE_FRACTION if at_once else 1.0
        choose = min if exclusive else max
        by_model: dict[str, int] = {}
        for device, size in zip(placement.devices, placement.budget_bytes, strict=True):
            by_model[device.name] = choose(size, by_model.get(device.name, size))
        request = Request(
            id="",
            task_name=spec.task_name,
            sequence=0,
            submitted_s=0.0,
            memory=ModelBudgets(tuple(by_model.items())),
            count=len(placement.devices),
            devices=tuple(device.uuid for device in placement.devices),
            exclusive=exclusive,
            host_bytes=0 if asked is None else asked.host_bytes,
            task_run_id="" if asked is None else asked.task_run_id,
            task_run_name="" if asked is None else asked.task_run_name,
            flow_run_id="" if asked is None else asked.flow_run_id,
            probe_fraction=probe_fraction,
            confirms_probe=held.probe is not None,
        )
        launch = wire.Launch(
            child,
            request,
            replace(spec, call=PackedValue(bytearray())),
            call,
            None if policy.allocation == "growth" else placement.budget_bytes,
            standby,
        )
        name = placement.devices[0].host
        try:
            node = self._nodes.start(name, launch, listener)
        except NodeRefusedError as error:
            tell(listener, ChildRefused(error))
            return RemoteHandle(None, child)
        return RemoteHandle(node, child)


class RemoteHandle:
    """The `ChildHandle` of a process on a node (`None`: the node refused the process)."""

    def __init__(self, node: Node | None, child: str) -> None:
        self._node = node
        self._child = child

    def answer(self, message: Any) -> None:
        """Send a message to the process; it is dropped if the process has ended."""
        if self._node is not None:
            self._node.agent.tell([wire.Send(self._child, message)])

    def kill(self) -> None:
        """Kill the process and every process that it started."""
        if self._node is not None:
            self._node.agent.tell([wire.Kill(self._child)])


class ExpectedTasks:
    """Counts a flow's submitted tasks that have no process yet, by kind of standby. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()
        self._policies: dict[Kind, FrameworkPolicy] = {}
        self._changed: set[Kind] = set()

    def add(self, kind: Kind, policy: FrameworkPolicy, number: int) -> None:
        """Change the count of a kind's tasks by a number, which may be negative."""
        with self._lock:
            self._counts[kind] += number
            self._policies[kind] = policy
            self._changed.add(kind)

    def take(self, everything: bool = False) -> tuple[wire.Expect, ...]:
        """Return the counts that changed since the last call; `everything`: all counts except 0, for a new node."""
        with self._lock:
            kinds = set(self._counts) if everything else self._changed
            found = tuple(
                wire.Expect(kind, self._policies[kind], self._counts[kind])
                for kind in kinds
                if not everything or self._counts[kind]
            )
            if not everything:
                self._changed = set()
                for kind in [kind for kind, count in self._counts.items() if not count]:
                    del self._counts[kind], self._policies[kind]
            return found


class ClusterAnnouncement:
    """The `Launcher` of one task on a cluster. The task counts as expected until its first process starts."""

    def __init__(
        self,
        launcher: ClusterLauncher,
        expected: ExpectedTasks,
        kind: Kind,
        policy: FrameworkPolicy,
    ) -> None:
        #: Name of the task's kind of standby, as in `Request.standby`.
        self.standby = kind.key
        self._launcher = launcher
        self._expected = expected
        self._kind = kind
        self._policy = policy
        self._lock = threading.Lock()
        self._counted = True
        expected.add(kind, policy, 1)

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Start a process for the task on the node of its placement."""
        self.retract()
        return self._launcher.start(spec, listener, wire.Expect(self._kind, self._policy, 0))

    def retract(self) -> None:
        """Remove the task from the expected tasks; a second call does nothing."""
        with self._lock:
            if not self._counted:
                return
            self._counted = False
        self._expected.add(self._kind, self._policy, -1)
