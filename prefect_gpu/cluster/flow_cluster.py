"""A runner's connection to a cluster: a broker over all nodes, and a launcher of processes on them."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.cluster.expected import ClusterAnnouncement
from prefect_gpu.cluster.flow_side import ClusterLauncher, ClusterReader, ClusterStore
from prefect_gpu.cluster.membership import WAITED_S, Cluster
from prefect_gpu.cluster.node_agent import NodeSettings
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, Request

#: Seconds that `read_cluster` waits for the first readings of all devices.
READING_S = 5.0


def read_cluster(
    address: str, settings: NodeSettings
) -> tuple[tuple[DeviceSnapshot, ...], Mapping[str, str]]:
    """Return a snapshot of each device of a cluster, and why nodes are not used, by name; raise as `FlowCluster`."""
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


class FlowCluster:
    """The connection of one runner to a Ray cluster, until `close`. For the arguments see `GPUTaskRunner`.

    Raises `DeviceError` if there is no cluster at the address, or none of its nodes has a device.
    """

    def __init__(
        self,
        address: str,
        settings: NodeSettings,
        num_gpus: float | None,
        max_processes: int | None,
    ) -> None:
        self._cluster = Cluster(address, settings, num_gpus)
        kind = self._cluster.open()
        nodes = self._cluster.nodes
        try:
            self.broker = Broker(
                ClusterReader(nodes, kind),
                Ledger(lambda: ClusterStore(nodes)),
                style=settings.placement,
                # Each node's own limit counts too, and nodes may join.
                max_processes=max_processes or sys.maxsize,
                max_tasks_per_device=settings.max_tasks_per_device,
                headroom_bytes=settings.headroom_bytes,
                # Each node's own broker knows its host memory.
                read_host_available=lambda: sys.maxsize,
                preempts=False,
            )
        except BaseException:
            # All nodes may have left meanwhile.
            self._cluster.close()
            raise
        self._max_tasks = settings.max_tasks_per_device or sys.maxsize
        self._cluster.watch(self.broker.give_up)
        self._cluster.wanted_gpus = self._wanted_gpus
        self.launcher = ClusterLauncher(nodes)

    def _wanted_gpus(self) -> list[int]:
        waiting = [] if self.broker.kind == "host" else self.broker.waiting(WAITED_S)
        return wanted_gpus(waiting, self.broker.capacities(()), self._max_tasks) if waiting else []

    def announce(self, kind: Kind, policy: FrameworkPolicy) -> ClusterAnnouncement:
        """Announce a submitted task to the nodes and return its launcher; `policy`: without devices and budget."""
        return ClusterAnnouncement(self.launcher, self._cluster.expected, kind, policy)

    def close(self) -> None:
        """End the agents and their processes, and Ray's connection unless the program had it before."""
        self._cluster.close()
