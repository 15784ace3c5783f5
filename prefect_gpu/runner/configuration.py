"""The arguments of a runner, and what it opens by them: a broker, a cluster, the use of MPS.

All runners of this Python process with the same arguments share a broker. `processes.mps` has the daemon of NVIDIA's
Multi-Process Service, and the variables of clients.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.host_ledger import HostStore, host_ledger
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.child.channel import current_channel
from prefect_gpu.devices.host import read_machine
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.shared_folder import SharedFolder, shared_folder
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.devices.spec import DeviceSpec, open_reader
from prefect_gpu.errors import PolicyError, ProtocolError
from prefect_gpu.in_task import current_allocation
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.interpreter import import_paths, working_folder
from prefect_gpu.processes.mps import MpsDaemon, MpsError
from prefect_gpu.runner.engine_threads import BODY_WAITS
from prefect_gpu.scheduling.model import Reservation
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.settings import read_settings

if TYPE_CHECKING:
    from prefect_gpu.cluster.membership import Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The arguments of a runner; see `GPUTaskRunner`."""

    devices: DeviceSpec
    placement: PlacementStyle
    max_processes: int | None
    max_tasks_per_device: int | None
    #: `None`: the default for the kind of device.
    headroom_bytes: int | None
    reports: bool
    standby: int | str
    start_method: str
    #: How tasks of a device compute: "time" or "mps".
    sharing: str = "time"
    #: `None`: no memory snapshots.
    memory_snapshots: Path | None = None
    #: Address of a Ray cluster; empty: this machine.
    address: str = ""
    #: GPUs of each node to reserve in Ray; `None`: nothing is reserved, and all GPUs are used.
    num_gpus: float | None = None
    live_view: bool = False
    #: Whether reports include a progress artifact.
    progress: bool = False

    @property
    def of_broker(self) -> tuple[object, ...]:
        """The arguments that a broker has: runners for which they are equal share one."""
        limits = self.max_processes, self.max_tasks_per_device, self.headroom_bytes
        return self.devices, self.placement, *limits, self.num_gpus

    def check(self, policy: GPUPolicy) -> None:
        """Raise `PolicyError` if a task has `gpu:compute` and the runner shares GPUs by time."""
        if policy.compute is not None and self.sharing != "mps":
            raise PolicyError(
                f"gpu:compute={policy.compute * 100:.6g}%",
                "tasks of this runner share a GPU by time",
                'no gpu:compute, or GPUTaskRunner(sharing="mps")',
            )

    def make_broker(self, folder: Path | None) -> Broker:
        """Return a new broker of the devices of this machine; `folder` has the ledger. Raise `DeviceError`: none."""
        simulated, allocation = self.devices.simulated, current_allocation()
        reader: DeviceReader
        if simulated is None or simulated.name:
            reader, ledger = (
                open_reader(self.devices, os.environ, shared=folder),
                host_ledger(folder),
            )
        elif around := _folder_around(simulated):
            reader = SimulatedReader(simulated, folder=SharedFolder(around))
            ledger = host_ledger(around)
        else:
            # A reader and ledger of this broker alone: devices of two specifications have the same UUIDs.
            reader, ledger = SimulatedReader(simulated), Ledger()
            reader.on_shared = lambda path: ledger.share(functools.partial(HostStore, path))
        return Broker(
            reader,
            ledger=ledger,
            style=self.placement,
            max_processes=self.max_processes,
            max_tasks_per_device=self.max_tasks_per_device,
            headroom_bytes=self.headroom_bytes,
            around=_held_by_parent(),
            ancestors=() if allocation is None else allocation.requests,
            waits_since=BODY_WAITS.since,
        )

    def connect(self) -> Cluster:
        """Return the cluster at the address; raise `DeviceError` if it has no devices."""
        # Imported here: the module imports Ray, which most runners do not need.
        from prefect_gpu.cluster.membership import Cluster
        from prefect_gpu.cluster.node_agent import NodeSettings

        settings = NodeSettings(
            name="",
            devices=self.devices,
            placement=self.placement,
            max_tasks_per_device=self.max_tasks_per_device,
            headroom_bytes=self.headroom_bytes,
            ledger=read_settings().ledger,
            standby=self.standby if isinstance(self.standby, int) else None,
            argv=tuple(sys.argv),
            cwd=working_folder(),
            sys_path=import_paths(),
        )
        cluster = Cluster(self.address, settings, self.num_gpus)
        cluster.start(self.max_processes)
        return cluster


def _folder_around(devices: SimulatedDevices) -> Path | None:
    """Return the folder for sharing unnamed simulated devices with the surrounding GPU task; `None`: none."""
    channel, allocation = current_channel(), current_allocation()
    if channel is None or allocation is None or not allocation.device_uuids[0].startswith("SIM-"):
        return None
    try:
        return Path(channel.ask("simulated_share", spec=devices))
    except (OSError, ProtocolError) as error:
        logger.warning("%r are this process's own: %s", devices, error)
        return None


def _held_by_parent() -> tuple[Reservation, ...]:
    """Return the reservations of the GPU task around this process, if there is one."""
    allocation = current_allocation()
    if allocation is None:
        return ()
    return tuple(
        Reservation(
            request_id=allocation.requests[-1] if allocation.requests else "",
            machine=read_machine(),
            device_uuid=uuid,
            reserved_bytes=allocation.budget_bytes,
            exclusive=allocation.exclusive,
            task_name="the task around it",
        )
        for uuid in allocation.device_uuids
    )


class MpsUse:
    """Joins the daemon for the first task. Safe to use from several threads; `warn` is called once, if MPS cannot be used."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        #: Guards all below; held while the daemon starts.
        self._lock = threading.Lock()
        self._daemon: MpsDaemon | None = None
        #: Whether the daemon could not be used.
        self._failed = False

    def pipes(self, reader: DeviceReader) -> str | None:
        """Return the folder by which clients find the daemon; `None`: MPS cannot be used with these devices."""
        with self._lock:
            if not self._failed:
                try:
                    if self._daemon is not None:
                        self._daemon.revive()
                        return self._daemon.pipes
                    if problem := reader.mps_refusal():
                        raise MpsError(problem)
                    folder = shared_folder(None).path / "mps"
                    self._daemon = MpsDaemon(str(folder), os.environ)
                    return self._daemon.pipes
                except (MpsError, OSError) as error:
                    self._failed = True
                    self._warn(
                        f"sharing='mps' has no effect: {error}. Tasks on a GPU compute by turns."
                    )
            return None

    def leave(self) -> None:
        """Stop using the daemon; without effect if it was not used."""
        with self._lock:
            if self._daemon is not None:
                self._daemon.leave()
