"""A cluster as a runner uses it: a broker over all nodes, and what starts the processes of its tasks there."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.cluster.expected import ClusterAnnouncement
from prefect_gpu.cluster.flow_side import ClusterLauncher, ClusterReader, ClusterStore
from prefect_gpu.cluster.membership import Cluster
from prefect_gpu.cluster.node_agent import NodeSettings
from prefect_gpu.cluster.wanted import Bundles, count_bundles
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.standby_kind import Kind
from prefect_gpu.scheduling.model import Device, DeviceSnapshot

#: Seconds to wait for a node's first reading.
READING_S = 5.0

#: Seconds after which a request that waits does not fit what is there: the autoscaler is asked for more.
WAITED_S = 5.0


def read_cluster(
    address: str, settings: NodeSettings
) -> tuple[tuple[DeviceSnapshot, ...], Mapping[str, str]]:
    """Read the devices of all nodes once.

    Args:
        address: See `GPUTaskRunner`.
        settings: See `FlowCluster`.

    Returns:
        What each device shows, and the nodes that are set aside, with the reason.

    Raises:
        DeviceError: There is no cluster at the address, or none of its nodes has a device.
    """
    cluster = Cluster(address, settings)
    with _at_the_root():
        cluster.open()
    try:
        reader = ClusterReader(cluster.nodes, cluster.nodes.all()[0].facts.kind)
        until_s = time.monotonic() + READING_S
        found = reader.read(())
        while any(each.error for each in found) and time.monotonic() < until_s:
            threading.Event().wait(0.05)
            found = reader.read(())
        return found, cluster.aside
    finally:
        cluster.close()


@contextlib.contextmanager
def _at_the_root() -> Iterator[None]:
    """Connect to a cluster from `/`: the workers of Ray search the folder that a program connected from before all others.

    For a flow that is wanted, since its modules may be there.
    """
    folder = working_folder()
    os.chdir("/")
    try:
        yield
    finally:
        if folder:
            os.chdir(folder)


class FlowCluster:
    """The connection of one runner to a cluster, from its first GPU task until `close`.

    Args:
        address: See `GPUTaskRunner`.
        settings: What each node's agent is to do.
        num_gpus: See `GPUTaskRunner`.
        max_processes: Most processes at a time; `None`: as many as the nodes allow.
        context_bytes: Returns the size of a framework's context on a device.

    Raises:
        DeviceError: There is no cluster at the address, or none of its nodes has a device.
    """

    def __init__(
        self,
        address: str,
        settings: NodeSettings,
        num_gpus: float | None,
        max_processes: int | None,
        context_bytes: Callable[[str, Device], int],
    ) -> None:
        self._cluster = Cluster(address, settings, num_gpus)
        self._cluster.open()
        nodes = self._cluster.nodes
        known = nodes.all()
        #: Hands out the devices of all nodes.
        self.broker = Broker(
            ClusterReader(nodes, known[0].facts.kind),
            Ledger(lambda: ClusterStore(nodes)),
            style=settings.placement,
            # Each node's own limit counts too, and nodes may come.
            max_processes=max_processes or sys.maxsize,
            max_tasks_per_device=settings.max_tasks_per_device,
            headroom_bytes=settings.headroom_bytes,
            # Each node's own broker knows its memory.
            read_host_available=lambda: sys.maxsize,
            context_bytes=context_bytes,
            preempts=False,
        )
        self._max_tasks = settings.max_tasks_per_device
        self._cluster.watch(self.broker.give_up)
        if self.broker.kind != "host":
            self._cluster.watch_waiting(self._wanted, self._take_asked)
        #: Starts processes where their placements say.
        self.launcher = ClusterLauncher(nodes)

    def _wanted(self) -> Bundles:
        waiting, most = self.broker.waiting(WAITED_S)
        return count_bundles(waiting, self.broker.capacities((), ()), self._max_tasks, most)

    def _take_asked(self, text: str) -> None:
        self.broker.waiting_note = text

    def announce(self, kind: Kind, policy: FrameworkPolicy) -> ClusterAnnouncement:
        """Ask the nodes to keep a standby for a task that was submitted.

        Args:
            kind: What can be done ahead for it.
            policy: What its frameworks may do, but for devices and budget.
        """
        return ClusterAnnouncement(self.launcher, self._cluster.expected, kind, policy)

    def close(self) -> None:
        """End the agents and their processes, and the connection if it was made here."""
        self._cluster.close()
