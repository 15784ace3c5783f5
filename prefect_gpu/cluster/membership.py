"""Ray: the connection, the nodes, an agent on each node, and the object store.

The only module that imports Ray. The thread `prefect-gpu-cluster` listens to all agents, and adds and removes nodes.
The thread `prefect-gpu-cluster-head` asks the head for the nodes: Ray blocks that call while the head does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.cluster.flow_side import (
    ClusterAnnouncement,
    ClusterLauncher,
    ClusterReader,
    ClusterStore,
    ExpectedTasks,
    Node,
    Nodes,
)
from prefect_gpu.cluster.node_agent import NO_DRIVER, NodeAgent, NodeSettings
from prefect_gpu.cluster.wire import Command, EndAll, NodeFacts
from prefect_gpu.devices.spec import VISIBLE_VARIABLE
from prefect_gpu.errors import DeviceError
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.process_resources import start_thread
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, Request
from prefect_gpu.units import format_seconds
from prefect_gpu.version import VERSION

logger = logging.getLogger(__name__)

#: Seconds between two queries of the nodes.
LOOK_S = 1.0

#: Seconds between two messages about expected tasks.
EXPECT_S = 0.25

#: Seconds in which the address of a cluster must accept a connection.
CONNECT_S = 10.0

#: Attempts of a client to connect: Ray's process for it may die at its start, since the head forks it while
#: other threads call gRPC (seen with Ray 2.60).
CLIENT_TRIES = 3

#: Seconds between two calls of an agent that Ray is restarting.
RESTART_S = 0.5

#: Seconds after which Ray 2.60 ends a process whose head does not answer.
RAY_ENDS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", 60))  # noqa: SIM112 - Ray's own name

#: Seconds without an answer of the head after which the cluster is given up, before Ray ends the process.
HEAD_S = RAY_ENDS_S / 2

#: Seconds that Ray may take to disconnect from a cluster that is given up.
DISCONNECT_S = 10.0

#: Seconds that a request waits until Ray's autoscaler is asked for nodes. Also the limit of that call.
WAITED_S = 5.0

#: Seconds that agents may take to start before the flow goes on without their nodes.
START_S = 60.0


#: Seconds that `read_cluster` waits for the first readings of all devices.
READING_S = 5.0


def import_ray() -> Any:
    """Import Ray; raise `DeviceError` if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise DeviceError(
            f"address= needs Ray, which cannot be imported ({error}); install prefect-gpu[ray]"
        ) from error


class RayStore:
    """Ray's object store; see `wire.ObjectStore`."""

    def __init__(self) -> None:
        self._ray = import_ray()

    def put(self, data: memoryview) -> Any:
        """Store bytes and return Ray's reference to them."""
        return self._ray.put(pickle.PickleBuffer(data))

    def get(self, reference: Any) -> memoryview:
        """Return the bytes of a reference; raise Ray's error if they are lost."""
        return memoryview(self._ray.get(reference)).cast("B")

    def holds(self, part: Any) -> bool:
        """Return whether a part is a reference of Ray's."""
        return isinstance(part, self._ray.ObjectRef)


def make_agent(settings: NodeSettings) -> NodeAgent:
    """Return a new agent of the node on which this process, a Ray actor, runs."""
    return NodeAgent(settings, RayStore(), visible_devices(), VERSION)


def visible_devices() -> str | None:
    """Return `CUDA_VISIBLE_DEVICES` of this node; `None`: all of its devices.

    Ray sets the variable for actors with GPUs. Other actors read the variable of the node's own Ray process: a machine
    may run several nodes with different devices.
    """
    given = import_ray().get_runtime_context().get_accelerator_ids().get("GPU", [])
    if given:
        return os.environ.get(VISIBLE_VARIABLE, ",".join(given))
    try:
        raylet = int(os.environ.get("RAY_RAYLET_PID", os.getppid()))
        return psutil.Process(raylet).environ().get(VISIBLE_VARIABLE)
    except (psutil.Error, ValueError):
        return None


@dataclass
class _Member:
    """One node of the cluster, as Ray knows it: the `Agent` of a `Node`."""

    name: str
    actor: Any
    #: Ray's reference of the awaited answer (facts, then news); `None`: no answer is awaited.
    waits_for: Any
    facts: NodeFacts | None = None
    #: Whether the flow runs on this node.
    near: bool = False
    seen: int = 0
    #: Monotonic seconds when the agent is asked for its facts again; `None`: no time is set.
    asks_s: float | None = None
    #: Monotonic seconds when the node's devices were added to the flow's.
    joined_s: float = float("inf")

    def tell(self, commands: Sequence[Command]) -> None:
        """Send commands to the agent; return at once."""
        try:
            self.actor.tell.remote(commands)
        except Exception:
            # The listening thread notices that the actor or the connection is gone.
            logger.debug("an agent could not be told %s", commands, exc_info=True)


class Cluster:
    """The connection of one runner to a Ray cluster, from `open` to `close`.

    Args:
        address: An address as Ray knows it: `auto`, `host:port`, `ray://host:port`.
        settings: Settings of each node's agent, without the node's name.
        num_gpus: GPUs to reserve of each node in Ray's own count; `None`: none, and all devices are used.
    """

    def __init__(self, address: str, settings: NodeSettings, num_gpus: float | None = None) -> None:
        self._address = address
        self._settings = settings
        self._num_gpus = num_gpus
        self._ray = import_ray()
        self._connected_here = False
        #: Ray's id of the flow's node; `None`: the flow is a client outside the cluster.
        self._own_id: str | None = None
        self.nodes = Nodes(RayStore())
        self.launcher = ClusterLauncher(self.nodes)
        self.expected = ExpectedTasks()
        self._expected_s = float("-inf")
        self._members: dict[str, _Member] = {}
        #: Reasons why nodes are not used, by the name of the node.
        self.aside: dict[str, str] = {}
        #: The head's last answer about the nodes, until it is handled.
        self._told: Any = None
        #: Monotonic seconds of that answer, and of the last check of its age.
        self._answered_s = time.monotonic()
        self._checked_s = time.monotonic()
        #: Why the cluster was given up; empty: it is in use.
        self._lost = ""
        #: The broker of all devices; `None`: only `open` was called.
        self.broker: Broker | None = None
        #: Whether Ray's autoscaler has a request of this flow.
        self._asked = False
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self) -> DeviceKind:
        """Connect, start an agent on each node, and wait for the agents of the current nodes; return the devices' kind.

        Raises `DeviceError` if there is no cluster at the address, or none of its nodes has a device.
        """
        if not self._ray.is_initialized():
            try:
                _connect(self._ray, self._address)
            except Exception as error:
                raise DeviceError(
                    f"address={self._address!r}: no Ray cluster answers there ({_last_line(error)}); start one with "
                    f"`ray start --head`, or leave address out to use this machine's devices"
                ) from error
            self._connected_here = True
        try:
            if not self._ray.util.client.ray.is_connected():
                self._own_id = self._ray.get_runtime_context().get_node_id()
            self._look(self._ray.nodes())
            until_s = time.monotonic() + START_S
            while any(m.facts is None for m in self._members.values()):
                if time.monotonic() > until_s:
                    break
                self._listen(0.5)
            known = self.nodes.all()
            if not known:
                why = "; ".join(f"{name}: {why}" for name, why in self.aside.items())
                what = "no node of the cluster has a device for GPU tasks"
                raise DeviceError(
                    f"address={self._address!r}: {what}" + (f" ({why})" if why else "")
                )
            self._answered_s = self._checked_s = time.monotonic()
            self._threads.append(start_thread(self._ask_head, "prefect-gpu-cluster-head"))
            self._threads.append(start_thread(self._run, "prefect-gpu-cluster"))
            return known[0].facts.kind
        except BaseException:
            self._leave()
            raise

    def start(self, max_processes: int | None) -> None:
        """Open the connection and the broker of all devices, for at most `max_processes` at a time. Raises as `open`."""
        kind, given = self.open(), self._settings
        try:
            self.broker = Broker(
                ClusterReader(self.nodes, kind),
                Ledger(lambda: ClusterStore(self.nodes)),
                style=given.placement,
                # Each node's own limit counts too, and nodes may join.
                max_processes=max_processes or sys.maxsize,
                max_tasks_per_device=given.max_tasks_per_device,
                headroom_bytes=given.headroom_bytes,
                # Each node's own broker knows its host memory.
                read_host_available=lambda: sys.maxsize,
                preempts=False,
            )
        except BaseException:
            # All nodes may have left meanwhile.
            self.close()
            raise
        if self._lost:
            self.broker.give_up(self._lost)

    def announce(self, kind: Kind, policy: FrameworkPolicy) -> ClusterAnnouncement:
        """Announce a submitted task to the nodes and return its launcher; `policy`: without devices and budget."""
        return ClusterAnnouncement(self.launcher, self.expected, kind, policy)

    def _wanted_gpus(self) -> list[int]:
        """Return the numbers of GPUs that tasks wait for; see `wanted_gpus`."""
        broker = self.broker
        waiting = [] if broker is None or broker.kind == "host" else broker.waiting(WAITED_S)
        if broker is None or not waiting:
            return []
        most = self._settings.max_tasks_per_device or sys.maxsize
        return wanted_gpus(waiting, broker.capacities(()), most)

    def close(self) -> None:
        """End the agents and their processes, and Ray's connection unless the program had it before `open`."""
        self._closing.set()
        for thread in () if self._lost else self._threads:
            thread.join(5.0)
        self._leave()

    def _leave(self) -> None:
        # Without a connection, Ray's functions would make one, and perhaps wait forever.
        if not self._lost and self._ray.is_initialized():
            try:
                self._ask_autoscaler((), ())
            except Exception:
                logger.debug("the request to the autoscaler could not be withdrawn", exc_info=True)
            for member in self._members.values():
                try:
                    self._ray.kill(member.actor)
                except Exception:
                    logger.debug("an agent could not be ended", exc_info=True)
        self._members.clear()
        if self._connected_here:
            self._connected_here = False
            if not self._lost:
                self._ray.shutdown()
                return
            # Ray's shutdown would wait for the head until Ray ends the process, here and at the interpreter's exit.
            atexit.unregister(self._ray.shutdown)
            start_thread(self._ray.shutdown, "prefect-gpu-cluster-end").join(DISCONNECT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                told, self._told = self._told, None
                if told is not None:
                    self._look(told)
                self._tell_expected()
                self._listen(EXPECT_S)
                if why := self._find_lost():
                    self._give_up(why)
                    return
            except Exception as error:
                if self._closing.is_set():
                    return
                if why := self._find_lost():
                    self._give_up(f"{why}: {error}")
                    return
                logger.exception("the Ray cluster could not be asked; it is tried again")
                for member in self._members.values():
                    self.nodes.leave(member.name, f"the Ray cluster does not answer: {error}")
                    member.facts, member.waits_for = None, None
                    member.asks_s = time.monotonic() + LOOK_S
                self._closing.wait(LOOK_S)

    def _ask_head(self) -> None:
        while not self._closing.wait(LOOK_S) and self._ray.is_initialized():
            try:
                told = self._told = self._ray.nodes()
                self._answered_s = time.monotonic()
                self._ask_autoscaler(told, self._wanted_gpus())
            except Exception:
                logger.debug("the head of the Ray cluster did not answer", exc_info=True)

    def _ask_autoscaler(self, told: Sequence[Any], wanted: Sequence[int]) -> None:
        """Have an agent ask Ray's autoscaler for the used and the wanted GPUs: a client of Ray cannot (Ray 2.60)."""
        if wanted or self._asked:
            members, used_s = dict(self._members), time.monotonic() - WAITED_S
            used = {i for i, each in members.items() if each.joined_s <= used_s}
            there = [each["Resources"].get("GPU", 0) for each in told if each["NodeID"] in used]
            # The agent that joined first, since others may not have started.
            agent = min(members.values(), key=lambda each: each.joined_s).actor
            self._asked = True
            asked = agent.ask_autoscaler.remote([*there, *wanted] if wanted else [])
            self._ray.get(asked, timeout=WAITED_S)
            self._asked = bool(wanted)

    def _find_lost(self) -> str:
        """Return why the cluster counts as lost; empty: it may still answer."""
        if not self._ray.is_initialized():
            return f"the connection to the Ray cluster at address={self._address!r} is lost"
        now_s = time.monotonic()
        if now_s - self._checked_s > HEAD_S / 2:
            # This process itself was stopped meanwhile, not the head.
            self._answered_s = now_s
        self._checked_s = now_s
        # Ray disconnects its client by a time limit of its own.
        if now_s - self._answered_s < HEAD_S or self._ray.util.client.ray.is_connected():
            return ""
        head = f"the head of the Ray cluster at address={self._address!r}"
        return f"{head} has not answered for {format_seconds(HEAD_S)}"

    def _give_up(self, why: str) -> None:
        """Remove all nodes, and end the processes on reachable nodes."""
        logger.error("%s; its tasks are given up", why)
        self._lost = why
        if self.broker is not None:
            # Before the processes count as killed.
            self.broker.give_up(why)
        for member in self._members.values():
            if self._ray.is_initialized():
                member.tell([EndAll()])
            self.nodes.leave(member.name, why)

    def _tell_expected(self) -> None:
        """Send changed numbers of expected tasks to all nodes, at most once in `EXPECT_S` seconds."""
        now_s = time.monotonic()
        if now_s - self._expected_s < EXPECT_S:
            return
        self._expected_s = now_s
        commands = self.expected.take()
        if commands:
            for node in self.nodes.all():
                node.agent.tell(commands)

    def _look(self, told: Any) -> None:
        """Start an agent on each new node, and remove nodes that Ray's head calls dead; `told`: the head's answer."""
        alive = {each["NodeID"]: each for each in told if each["Alive"]}
        for node_id in self._members.keys() - alive.keys():
            member = self._members.pop(node_id)
            self.nodes.leave(member.name, f"node {member.name} of the Ray cluster is dead")
            logger.warning("node %s has left the Ray cluster", member.name)
        names = [member.name for member in self._members.values()]
        for node_id, node in alive.items():
            if node_id in self._members:
                continue
            name = str(node.get("NodeName") or node["NodeManagerHostname"])
            if name == node.get("NodeManagerAddress"):
                name = str(node["NodeManagerHostname"])
            if name in names:
                name = f"{name}#{node_id[-6:]}"
            names.append(name)
            self._members[node_id] = self._start(node_id, name)

    def _start(self, node_id: str, name: str) -> _Member:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        is_client = bool(self._ray.util.client.ray.is_connected())
        settings = replace(self._settings, name=name, inline_results=is_client)
        handle = self._agent_class.options(scheduling_strategy=strategy).remote(settings)
        near = node_id == self._own_id
        return _Member(name, handle, handle.facts.remote(), near=near)

    @functools.cached_property
    def _agent_class(self) -> Any:
        """The actor class of all agents. Ray sends it to the nodes once."""
        ray = self._ray

        class Agent:
            def __init__(self, settings: NodeSettings) -> None:
                from prefect_gpu.cluster.membership import make_agent

                self._name = settings.name
                self._agent = make_agent(settings)

            def __repr__(self) -> str:
                # Ray prints this text before each line that a task on the node prints.
                return f"node {self._name}"

            @ray.method(concurrency_group="listen")  # type: ignore[untyped-decorator]
            def facts(self) -> Any:
                return self._agent.facts()

            @ray.method(concurrency_group="listen")  # type: ignore[untyped-decorator]
            def listen(self, seen: int) -> Any:
                return self._agent.listen(seen)

            def ask_autoscaler(self, gpus: Sequence[float]) -> None:
                from ray.autoscaler.sdk import request_resources

                request_resources(bundles=[{"GPU": number} for number in gpus if number])

            @ray.method(concurrency_group="tell")  # type: ignore[untyped-decorator]
            def tell(self, commands: Sequence[Any]) -> None:
                self._agent.tell(commands)

        return ray.remote(
            num_cpus=0,
            num_gpus=self._num_gpus or 0,
            max_restarts=-1,
            # Only Prefect repeats a task's body.
            max_task_retries=0,
            # One call at a time: commands keep their order.
            concurrency_groups={"listen": 1, "tell": 1},
        )(Agent)

    def _listen(self, limit_s: float) -> None:
        """Wait for answers of the agents, at most `limit_s`, and handle them."""
        for each in self._members.values():
            if each.asks_s is not None and time.monotonic() >= each.asks_s:
                each.asks_s = None
                each.waits_for = each.actor.facts.remote()
        waits = {member.waits_for: i for i, member in self._members.items() if member.waits_for}
        if not waits:
            self._closing.wait(limit_s)
            return
        ready, _ = self._ray.wait(list(waits), num_returns=1, timeout=limit_s)
        if ready:
            more, _ = self._ray.wait(list(waits), num_returns=len(waits), timeout=0)
            ready = list(dict.fromkeys([*ready, *more]))
        for reference in ready:
            node_id = waits[reference]
            member = self._members.get(node_id)
            if member is None:
                continue
            try:
                said = self._ray.get(reference)
            except Exception as error:
                if self._find_lost():
                    # The broker must know the reason before the node's tasks are refused.
                    raise
                self._lose(member, error)
                continue
            if isinstance(said, NodeFacts):
                self._take_facts(member, said)
            else:
                if member.facts is None or said.agent != member.facts.agent:
                    # The agent was started again, without its earlier processes.
                    self._lose(member, None)
                    continue
                member.seen = said.number
                self.nodes.take(member.name, said)
                member.waits_for = member.actor.listen.remote(member.seen)

    def _take_facts(self, member: _Member, facts: NodeFacts) -> None:
        problem = facts.problem
        if facts.version != VERSION:
            problem = f"it has prefect-gpu {facts.version}, and the flow has {VERSION}"
        if not problem and not facts.devices:
            problem = "it has no devices"
        kinds = {node.facts.kind for node in self.nodes.all()}
        if not problem and kinds and facts.kind not in kinds:
            problem = f"its devices are {facts.kind}, and those of other nodes {', '.join(kinds)}"
        if problem:
            self._set_aside(member, problem)
            return
        self.aside.pop(member.name, None)
        member.facts, member.seen = facts, 0
        member.joined_s = time.monotonic()
        # The agent may have been unreachable, with processes that the flow has given up.
        member.tell([EndAll()])
        self.nodes.join(Node(member.name, member, facts, member.near))
        if known := self.expected.take(everything=True):
            member.tell(known)
        member.waits_for = member.actor.listen.remote(0)

    def _set_aside(self, member: _Member, problem: str) -> None:
        if self.aside.get(member.name) != problem:
            level = logging.DEBUG if problem == NO_DRIVER else logging.WARNING
            logger.log(level, "node %s of the Ray cluster is set aside: %s", member.name, problem)
        self.aside[member.name] = problem
        member.facts = member.facts or NodeFacts("", "", "nvml", (), 0, 0, problem)
        member.waits_for = None

    def _lose(self, member: _Member, error: Exception | None) -> None:
        """Count the processes of a failed agent as killed, and ask for its facts again: Ray restarts the agent."""
        why = f"the agent of node {member.name} of the Ray cluster died"
        self.nodes.leave(member.name, why)
        text = "" if error is None else f": {str(error).strip().splitlines()[0][:300]}"
        died_at_start = member.facts is None
        member.facts, member.waits_for = None, None
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            # The agent's process is gone or unreachable: Ray itself restarts the process or connects again.
            if not died_at_start:
                logger.warning("%s%s", why, text)
            member.asks_s = time.monotonic() + RESTART_S
            return
        if died_at_start and error is not None:
            cause = getattr(error, "cause", None) or error
            self._set_aside(member, f"its agent could not be started: {_last_line(cause)}")
            return
        logger.warning("%s%s", why, text)
        member.waits_for = member.actor.facts.remote()


def _connect(ray: Any, address: str) -> None:
    """Connect this process to a cluster, or raise an error (Ray's or `OSError`)."""
    _try_connection(address)
    for left in reversed(range(CLIENT_TRIES)):
        try:
            ray.init(address=address, log_to_driver=True, logging_level="warning")
            return
        except Exception as error:
            # A failed client leaves Ray in its client mode, in which `init` on a node fails (2.60).
            ray.shutdown()
            if not left or not isinstance(error, ConnectionAbortedError):
                raise


def _try_connection(address: str) -> None:
    """Raise `OSError` if no process listens at an address. Ray 2.60 itself would try 20 times, for 41 s each."""
    if address == "auto":
        # Without the variable, Ray finds a cluster of this machine.
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:300] if lines else type(error).__name__


def wanted_gpus(
    waiting: Sequence[Request], capacities: Mapping[Device, int], max_tasks: int
) -> list[int]:
    """Return how many GPUs waiting requests need, as numbers of GPUs on one node. Requests of known need share GPUs."""
    smallest = min(capacities, key=capacities.__getitem__)
    gpus, shared = list[int](), 0.0
    for request in waiting:
        need_bytes = request.need_bytes(smallest)
        if request.nodes or not all(name.isdecimal() for name in request.devices):
            # The request names nodes or devices, which are in the cluster.
            continue
        if need_bytes is None or request.exclusive or request.count > 1:
            gpus.append(request.count)
        else:
            shared += 1 / max(1, min(capacities[smallest] // max(1, need_bytes), max_tasks))
    # As floats, eleven elevenths are a little more than one.
    return [*gpus, *[1] * math.ceil(shared - 1e-9)]


def read_cluster(
    address: str, settings: NodeSettings
) -> tuple[tuple[DeviceSnapshot, ...], Mapping[str, str]]:
    """Return a snapshot of each device of a cluster, and why nodes are not used, by name; raise as `Cluster.open`."""
    cluster = Cluster(address, settings)
    with _at_the_root():
        kind = cluster.open()
    try:
        reader = ClusterReader(cluster.nodes, kind)
        until_s = time.monotonic() + READING_S
        found = reader.read(())
        while any(each.error for each in found) and time.monotonic() < until_s:
            threading.Event().wait(0.05)
            found = reader.read(())
        return found, dict(cluster.aside)
    finally:
        cluster.close()


@contextlib.contextmanager
def _at_the_root() -> Iterator[None]:
    """Set the working folder to `/` meanwhile: Ray's workers import from the connecting program's folder first."""
    folder = working_folder()
    os.chdir("/")
    try:
        yield
    finally:
        if folder:
            os.chdir(folder)
