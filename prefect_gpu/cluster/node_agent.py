"""The agent of one flow on one node of a cluster: the node's devices, ledger, launcher and guardian.

The flow chooses devices by the last news of the node. The node's own broker, on the ledger of all flows of the machine,
confirms or refuses the choice, and then reserves, reads and releases as on one machine. `membership` makes a Ray actor
of the agent. Before the first launch, an agent only reads devices.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import assert_never

from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.broker.host_ledger import host_ledger
from prefect_gpu.broker.ledger import Entry
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import RealClock
from prefect_gpu.cluster import wire
from prefect_gpu.devices.host import count_cores
from prefect_gpu.devices.nvml import NvmlMissingError
from prefect_gpu.devices.reader import DeviceReader, ProcessMemory
from prefect_gpu.devices.shared_folder import shared_folder
from prefect_gpu.devices.spec import VISIBLE_VARIABLE, DeviceSpec, open_reader
from prefect_gpu.errors import CapacityError, DeviceError, NodeRefusedError
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import child_environment
from prefect_gpu.process_resources import start_thread
from prefect_gpu.processes.interpreter import import_paths, working_folder
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildHandle,
    ChildRefused,
    ChildStarted,
    Launcher,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.messages import Asked, BodyStarted, CountersRead
from prefect_gpu.processes.standby_kind import Kind, standby_changes
from prefect_gpu.processes.standby_plan import most_by_default
from prefect_gpu.processes.standby_pool import Announcement, StandbyPool, standby_pool
from prefect_gpu.scheduling.model import Reading
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.suspension.eligibility import REFUSED
from prefect_gpu.values.transport import AVAILABLE, MemoryFile, ReceivedValue, write_file

logger = logging.getLogger(__name__)

#: Seconds that the node's broker may take to confirm devices. Processes that have just ended may still hold them.
CONFIRM_S = 2.0

#: Seconds after which `listen` returns without news.
LISTEN_S = 1.0

#: Problem of a node without NVIDIA's driver, for which no warning is logged.
NO_DRIVER = "it has no NVIDIA driver"

#: Why no task of a cluster is suspended, as text for people.
NOT_SUSPENDED = "it is of a flow on a Ray cluster, whose tasks are not suspended"

#: Change of `busy_fraction` from which a reading is sent at once.
BUSY_STEP = 0.1


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a flow for its agent on a node."""

    name: str
    devices: DeviceSpec
    placement: PlacementStyle
    max_tasks_per_device: int | None
    headroom_bytes: int | None
    #: Folder of the node's ledger; `None`: a folder of the user.
    ledger: Path | None = None
    #: Most standbys on the node; `None`: by the number of cores.
    standby: int | None = None
    #: `sys.argv`, working folder and `sys.path` of the flow, which the agent uses as far as the folders exist.
    argv: tuple[str, ...] = ()
    cwd: str = ""
    sys_path: tuple[str, ...] = ()
    #: Results are in the messages: a flow that is a client of Ray never gets objects stored by an actor (Ray 2.60).
    inline_results: bool = False


class NodeStandbys:
    """The standbys of one flow on one node, in the pool of the node's broker. Any thread may use it."""

    def __init__(self, pool: StandbyPool, fresh: Launcher) -> None:
        self._pool = pool
        self._fresh = fresh
        self.most = 0
        self._lock = threading.Lock()
        #: Announcements of the expected tasks, by the flow's kind.
        self._announced: dict[Kind, list[Announcement]] = {}
        #: Kinds with this node's environment, by the flow's kind.
        self._here: dict[Kind, Kind] = {}

    def expect(self, command: wire.Expect) -> None:
        """Keep a standby for each expected task of a kind, at most `most` for the kind."""
        with self._lock:
            announced = self._announced.setdefault(command.kind, [])
            wanted = min(command.count, self.most)
            while len(announced) > wanted:
                announced.pop().retract()
            while len(announced) < wanted:
                announced.append(self._announce(command))
            if not announced:
                del self._announced[command.kind]

    def launcher_for(self, expected: wire.Expect | None) -> Launcher:
        """Return a task's launcher: an announcement in the standby pool or, without standbys, of fresh processes."""
        with self._lock:
            if expected is None or not self.most:
                return self._fresh
            if announced := self._announced.get(expected.kind):
                return announced.pop()
            # The task was placed before it was announced. A standby of an earlier task may wait.
            return self._announce(expected)

    def _announce(self, expected: wire.Expect) -> Announcement:
        here = self._here.get(expected.kind)
        if here is None:
            changes = standby_changes(expected.policy)
            here = self._here[expected.kind] = replace(expected.kind, environment=changes)
        return self._pool.announce(here)

    def ready(self) -> Mapping[str, int]:
        """Return the numbers of waiting standbys by the key of the flow's kind, without zeros."""
        found = self._pool.ready_by_kind
        with self._lock:
            return {kind.key: found[here] for kind, here in self._here.items() if found[here]}


class _Hosted:
    """One process of the flow on this node."""

    def __init__(self, launch: wire.Launch) -> None:
        self.launch: wire.Launch | None = launch
        self.ticket: Ticket | None = None
        self.memory: ProcessMemory | None = None
        self.handle: ChildHandle | None = None
        self.launched = threading.Event()
        self.pid: int | None = None
        self.order = wire.InOrder()
        #: Whether to kill the process, perhaps before its start.
        self.killed = False

    def send(self, message: Any) -> None:
        """Send a message to the process, after its launch."""
        self.launched.wait()
        assert self.handle is not None
        self.handle.answer(message)

    def kill(self) -> None:
        """Kill the process; before its launch, make `NodeAgent._start` refuse or kill it."""
        self.killed = True
        if self.handle is not None:
            self.handle.kill()


class NodeAgent:
    """Serves one flow on one node, on any thread. `visible`: the node's `CUDA_VISIBLE_DEVICES`; `None`: all devices."""

    def __init__(
        self,
        settings: NodeSettings,
        store: wire.ObjectStore,
        visible: str | None,
        version: str,
        launcher: Launcher | None = None,
    ) -> None:
        self._name = settings.name
        self._store = store
        self._inline = settings.inline_results
        self._launcher = launcher or process_launcher()
        self._clock = RealClock()
        self._agent = uuid.uuid4().hex
        #: Guards all attributes below.
        self._changed = threading.Condition()
        self._number = 0
        #: Messages that the flow has not acknowledged: number, child and message.
        self._heard: deque[tuple[int, str, Any]] = deque()
        self._reading: Reading | None = None
        #: Number of the last change of the reading, other flows' entries or standbys.
        self._changed_at = 0
        self._others: dict[str, Entry] = {}
        #: Numbers of waiting standbys by the key of their kind; `_ready_at`: number of their last change.
        self._ready: Mapping[str, int] = {}
        self._ready_at = 0
        self._hosted: dict[str, _Hosted] = {}
        self._kept: weakref.WeakValueDictionary[Any, MemoryFile] = weakref.WeakValueDictionary()
        #: Whether the flow can open memory files of this process.
        self._shares = False
        #: Values that the flow has not opened yet, by child.
        self._shared: dict[str, ReceivedValue] = {}
        self._probe = self._make_probe()
        self._receives = threading.Lock()
        self._broker: Broker | None = None
        self._standbys = NodeStandbys(standby_pool(), self._launcher)
        if settings.argv:
            sys.argv[:] = settings.argv
        #: `sys.path` of the node itself, used after the flow's.
        self._own_paths = import_paths()
        self._follow(settings.cwd, settings.sys_path)
        problem = ""
        try:
            self._reader: DeviceReader | None = self._open(settings, visible)
        except NvmlMissingError:
            self._reader, problem = None, NO_DRIVER
        except DeviceError as error:
            self._reader, problem = None, str(error)
        devices = () if self._reader is None else self._reader.devices()
        self._devices = {
            device.uuid: replace(device, host=self._name, in_cluster=True) for device in devices
        }
        if self._reader is not None and devices:
            self._open_broker(self._reader, settings)
        reader, probe = self._reader, self._probe
        context = None if reader is None else reader.process_memory((), None).context_bytes
        self._facts = wire.NodeFacts(
            self._agent,
            version,
            "nvml" if reader is None else reader.kind,
            tuple(self._devices.values()),
            context or 0,
            0 if self._broker is None else self._broker.max_processes,
            problem,
            None if probe is None else wire.OpenFile(os.getpid(), probe.fileno()),
        )

    def _open_broker(self, reader: DeviceReader, settings: NodeSettings) -> None:
        self._broker = Broker(
            reader,
            host_ledger(settings.ledger),
            style=settings.placement,
            max_tasks_per_device=settings.max_tasks_per_device,
            headroom_bytes=settings.headroom_bytes,
            # The node's broker does not know the priorities of flows.
            preempts=False,
        )
        self._broker.watch(self._take_reading)
        most = most_by_default(count_cores(), self._broker.max_processes)
        self._standbys.most = most if settings.standby is None else settings.standby
        if self._standbys.most:
            shared = shared_folder(settings.ledger)
            standby_pool().open(self, self._standbys.most, self._broker, shared)

    def _make_probe(self) -> MemoryFile | None:
        try:
            return write_file([memoryview(self._agent.encode())]) if AVAILABLE else None
        except OSError:
            # The system forbids memory files (a sandbox). Results go through the store.
            return None

    @staticmethod
    def _open(settings: NodeSettings, visible: str | None) -> DeviceReader:
        environ = {} if visible is None else {VISIBLE_VARIABLE: visible}
        spec = settings.devices
        if spec.kind == "auto":
            # A node without GPUs offers no devices, not its host memory.
            spec = replace(spec, kind="nvml")
        if spec.simulated is not None:
            spec = replace(spec, simulated=spec.simulated.on_node(settings.name))
        return open_reader(spec, environ, shared=settings.ledger)

    def facts(self) -> wire.NodeFacts:
        """Return the node's devices and limits, for the flow."""
        return self._facts

    def listen(self, seen: int, limit_s: float = LISTEN_S) -> wire.News:
        """Wait for news, at most `limit_s`, and return them; forget messages up to number `seen`: the flow has them."""
        with self._changed:
            while self._heard and self._heard[0][0] <= seen:
                self._heard.popleft()
            self._changed.wait_for(lambda: self._heard or self._changed_at > seen, limit_s)
            return self._news(seen)

    def _news(self, seen: int) -> wire.News:
        heard = tuple((child, message) for _, child, message in self._heard)
        news = wire.News(self._agent, self._number, time.monotonic(), heard)
        reading = self._reading
        if reading is None:
            return news
        live = {
            hosted.pid: size
            for hosted in self._hosted.values()
            if hosted.pid is not None and hosted.memory is not None
            if (size := hosted.memory.live_bytes()) is not None
        }
        snapshots = (
            replace(each, device=self._devices[each.device.uuid]) for each in reading.snapshots
        )
        return replace(
            news,
            reading=replace(reading, snapshots=tuple(snapshots)),
            live_bytes=live,
            others=self._others,
            standbys=self._ready if self._ready_at > seen else None,
        )

    def _take_reading(self, reading: Reading) -> None:
        """Handle a reading of the node's devices, on the broker's thread."""
        assert self._broker is not None
        others, ready = self._broker.held_by_others(), self._standbys.ready()
        with self._changed:
            before = self._reading
            self._reading = reading
            alike = others == self._others and before is not None and is_alike(reading, before)
            if alike and ready == self._ready:
                # The reading is sent with the next news, at most a second later.
                return
            self._number += 1
            self._changed_at, self._others = self._number, others
            if ready != self._ready:
                self._ready_at, self._ready = self._number, ready
            self._changed.notify_all()

    def _tell(self, child: str, message: Any) -> None:
        with self._changed:
            self._number += 1
            self._heard.append((self._number, child, message))
            self._changed.notify_all()

    def tell(self, commands: Sequence[wire.Command]) -> None:
        """Carry out commands of the flow, in order, without waiting for processes."""
        for command in commands:
            match command:
                case wire.Expect():
                    self._standbys.expect(command)
                case wire.EndAll():
                    self._shared.clear()
                    with self._changed:
                        every = tuple(self._hosted.values())
                    for hosted in every:
                        hosted.kill()
                case wire.ShareFiles():
                    self._shares = True
                case wire.Release(child):
                    self._shared.pop(child, None)
                case wire.Launch(child):
                    self._take_launch(child, command)
                case wire.Kill(child):
                    if (found := self._find(child)) is not None:
                        found.kill()
                case wire.Send(child, message):
                    if (found := self._find(child)) is not None and found.handle is not None:
                        found.handle.answer(message)
                case _:
                    assert_never(command)

    def _find(self, child: str) -> _Hosted | None:
        with self._changed:
            return self._hosted.get(child)

    def _take_launch(self, child: str, launch: wire.Launch) -> None:
        hosted = _Hosted(launch)
        with self._changed:
            self._hosted[child] = hosted
        try:
            start_thread(partial(self._launch, hosted, child), "prefect-gpu-confirm")
        except CapacityError as error:
            self._forget(child)
            self._tell(child, ChildRefused(error))

    def _launch(self, hosted: _Hosted, child: str) -> None:
        launch, hosted.launch = hosted.launch, None
        assert launch is not None
        try:
            if self._broker is None:
                raise NodeRefusedError(self._name, "it has no devices")
            hosted.ticket = ticket = self._confirm(launch)
            try:
                self._start(hosted, child, launch, ticket)
            except BaseException:
                self._broker.end(ticket)
                raise
        except Exception as error:  # noqa: BLE001 - a boundary: the flow raises it
            self._forget(child)
            self._tell(child, ChildRefused(error))

    def _confirm(self, launch: wire.Launch) -> Ticket:
        """Reserve the devices that the flow chose in the node's ledger, or raise `NodeRefusedError`."""
        assert self._broker is not None
        request = replace(launch.request, sequence=next_sequence())
        ticket = self._broker.submit(request)
        if not ticket.wait(self._clock, self._clock.now() + CONFIRM_S):
            reason = self._broker.explain(ticket)
            if self._broker.withdraw(ticket):
                raise NodeRefusedError(self._name, sentence(reason))
        if ticket.error is not None:
            raise NodeRefusedError(self._name, str(ticket.error))
        # The answer to `prefect-gpu suspend` on the node's machine.
        show = self._broker.show_suspension
        ticket.on_held_back = lambda away: show(
            ticket, Trigger.NOT_MOVED, f"{REFUSED}{NOT_SUSPENDED}"
        )
        return ticket

    def _start(self, hosted: _Hosted, child: str, launch: wire.Launch, ticket: Ticket) -> None:
        assert self._broker is not None
        hosted.memory = self._broker.reader.process_memory(
            tuple(device.uuid for device in ticket.devices), launch.budget_bytes
        )
        spec = self._spec(launch)
        if hosted.killed:
            raise NodeRefusedError(self._name, "it was ended before it started")
        launcher = self._standbys.launcher_for(launch.standby)
        hosted.handle = launcher.start(spec, partial(self._hear, hosted, child))
        hosted.launched.set()
        if hosted.killed:
            hosted.handle.kill()

    def _spec(self, launch: wire.Launch) -> LaunchSpec:
        """Return a launch's spec with its call, this node's environment, and folders that exist on this node."""
        spec = launch.spec
        policy = spec.prepare.policy
        here = child_environment(policy, registry.adapters_for(policy), os.environ)
        with self._receives:
            self._follow(spec.cwd, spec.sys_path)
            cwd, sys_path = working_folder(), import_paths()
            call = wire.receive_call(launch.call, self._store, self._kept)
        return replace(
            spec,
            environment={**spec.environment, **here},
            call=call,
            cwd=cwd,
            sys_path=sys_path,
        )

    def _follow(self, cwd: str, sys_path: Sequence[str]) -> None:
        """Use the flow's working folder and `sys.path`, as far as they exist here; standbys start with them, too."""
        if cwd != working_folder() and os.path.isdir(cwd):
            os.chdir(cwd)
        paths = [path for path in sys_path if os.path.exists(path)]
        sys.path[:] = [*paths, *(path for path in self._own_paths if path not in paths)]

    def _hear(self, hosted: _Hosted, child: str, message: Any) -> None:
        """Handle a message of a process, on the launcher's thread."""
        broker, ticket, memory = self._broker, hosted.ticket, hosted.memory
        assert broker is not None and ticket is not None and memory is not None
        if isinstance(message, ChildStarted):
            hosted.pid = message.pid
            broker.attach(ticket, message.pid)
            memory.attach(message.pid)
        elif isinstance(message, BodyStarted):
            broker.mark_running(ticket)
        elif isinstance(message, CountersRead) and message.counters is not None:
            ticket.stand_in_bytes = message.counters.reserved_bytes or 0
        elif isinstance(message, Asked) and message.method.startswith("simulated_"):
            # All other questions are answered by the flow.
            self._answer(hosted, memory, message)
            return
        elif isinstance(message, ValueArrived):
            hosted.order.take(partial(self._send_value, child, message), slow=True)
            return
        elif isinstance(message, (ChildExited, ChildRefused)):
            if hosted.pid is not None:
                peaks = memory.detach()
                if peaks is not None:
                    known = wire.PeaksKnown(hosted.pid, *peaks)
                    hosted.order.take(partial(self._tell, child, known))
            broker.end(ticket)
            self._forget(child)
        hosted.order.take(partial(self._tell, child, message))

    def _send_value(self, child: str, arrived: ValueArrived) -> None:
        """Send a child's value to the flow, or share its files, on a thread of its own."""
        try:
            result: wire.SentResult | wire.SharedResult | None
            result = wire.share_result(arrived.data) if self._shares else None
            if result is not None:
                self._shared[child] = arrived.data
            else:
                result = wire.send_result(arrived.data, None if self._inline else self._store)
        except Exception as error:  # noqa: BLE001 - a boundary: the flow raises it
            why = f"its value could not be sent from node {self._name}: {error}"
            self._tell(child, ChildExited(wire.LOST_CODE, "", killed_because=why))
        else:
            self._tell(child, result)

    @staticmethod
    def _answer(hosted: _Hosted, memory: ProcessMemory, question: Asked) -> None:
        hosted.send(question.answer(lambda **given: memory.answer(question.method, given)))

    def _forget(self, child: str) -> None:
        with self._changed:
            self._hosted.pop(child, None)


def is_alike(one: Reading, other: Reading) -> bool:
    """Return whether two readings are alike, up to `work` and a difference of `BUSY_STEP` in `busy_fraction`."""
    if one.error != other.error or len(one.snapshots) != len(other.snapshots):
        return False
    return all(
        replace(a, at_s=b.at_s, busy_fraction=b.busy_fraction, work=b.work) == b
        and abs((a.busy_fraction or 0.0) - (b.busy_fraction or 0.0)) < BUSY_STEP
        for a, b in zip(one.snapshots, other.snapshots, strict=True)
    )
