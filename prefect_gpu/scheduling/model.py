"""Devices, snapshots, requests, placements and reservations: the values of all scheduling decisions.

`memory` computes free memory, `placement` chooses devices, `scheduling_pass` orders requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, Union

from prefect_gpu.measurements import UnitUse

DeviceKind = Literal["nvml", "host", "simulated"]

#: Text that advice adds to a memory size, by the kind of device where it was found: only a GPU needs a context.
ONLY_ON: Mapping[DeviceKind, str] = {
    "nvml": "",
    "host": " (host devices only: the machine's memory, not a GPU's)",
    "simulated": " (simulated devices only)",
}

#: More bytes than any device has: a request for them is never placed.
NEVER_BYTES = 1 << 60

#: Machine and UUID of a device: a UUID is unique on its machine only.
DeviceKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Device:
    """Identity and fixed properties of one device."""

    #: `GPU-…`, `MIG-…`, `HOST-…` or `SIM-…`; unique on its machine.
    uuid: str
    #: Position among the runner's devices on the same node, from 0, as in `gpu:device=0`.
    index: int
    #: Product name, as NVML reports it: "NVIDIA H200".
    name: str
    #: Total memory, with the driver's own part.
    total_bytes: int
    #: Kind of the device reader.
    kind: DeviceKind
    #: Name of the node. Several nodes of a cluster may be on one machine.
    host: str
    #: Index among NVML's devices, which is not CUDA's; `None`: not a device of NVML.
    nvml_index: int | None = None
    #: Driver version, by which context sizes differ: "580.159.04"; empty for host and simulated devices.
    driver: str = ""
    #: Identity of the machine since boot, the same in all its containers (host names differ); empty: `host` identifies it.
    machine: str = ""
    #: Whether memory can be attributed to the flow's processes; `False` in a container, see `devices.nvml`.
    attributed: bool = True
    #: Whether `host` is the name of a cluster node. Reports and messages then show it.
    in_cluster: bool = False
    #: Number of GPUs of the machine, with those that the runner does not use; 0: not known.
    machine_gpus: int = 0
    key: DeviceKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: a scheduling pass looks up the key of each device.
        object.__setattr__(self, "key", (self.machine or self.host, self.uuid))

    @property
    def node(self) -> str:
        """Name of the cluster node; empty: not in a cluster."""
        return self.host if self.in_cluster else ""

    @property
    def label(self) -> str:
        """Name in messages: `device 0`, or in a cluster `NODE:0`, as in `gpu:device=NODE:0`."""
        return f"{self.host}:{self.index}" if self.in_cluster else f"device {self.index}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Memory of one process on one device, as a device reader reports it."""

    pid: int
    #: Process id of the task's child process: this process or an ancestor of it. `None`: no such process, or not known.
    root_pid: int | None
    #: `None`: the driver does not report it (WSL).
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """How much a device computed, as of one reading."""

    #: Fraction of the time in which kernels of a process ran, by process id of the task's child; `None`: other processes.
    busy: Mapping[int | None, float] = field(default_factory=dict)
    #: Energy in joules that the device has taken since its driver was loaded; `None`: not known.
    energy_j: float | None = None
    #: Use of the device's units by all processes, since the reading before; `None`: not known.
    units: UnitUse | None = None


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One reading of one device."""

    device: Device
    #: Monotonic seconds of the reading.
    at_s: float
    #: Free bytes by the driver's count, which is exact. Sums over processes are not.
    free_bytes: int
    #: Bytes of `device.total_bytes` that the driver always reserves.
    system_reserved_bytes: int = 0
    processes: tuple[ProcessUse, ...] = ()
    #: Why the device cannot be used ("fell off the bus"): the other fields are then invalid. Empty: no error.
    error: str = ""
    #: Fraction of the time in which the device computed, over the last readings; `None`: not known.
    busy_fraction: float | None = None
    #: What its processes computed; `None`: not known.
    work: DeviceWork | None = field(default=None, hash=False)

    @property
    def used_bytes(self) -> int:
        """Bytes that processes hold, listed or not: total less free less the driver's own."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes - self.free_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that the empty device could give to processes."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes)


@dataclass(frozen=True, slots=True)
class NodeReading:
    """Host memory, process limit and standbys of one cluster node."""

    #: Bytes of host memory for new processes.
    available_bytes: int
    #: Most processes that one broker may have on the node at a time; `None`: only the broker's own limit.
    max_processes: int | None = None
    #: Number of standbys that wait for a task, by kind (`Request.standby`).
    standbys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Snapshots of all devices of a runner, read together, with the host resources."""

    #: Monotonic seconds of the reading.
    at_s: float
    snapshots: tuple[DeviceSnapshot, ...]
    #: Bytes of this machine's memory for new processes: the lower of the kernel's estimate and the control group's rest.
    host_available_bytes: int
    #: Why no device could be read (NVML stopped answering); empty: no error.
    error: str = ""
    #: Cluster nodes by `Device.host`. A missing node has no limit. Empty: all devices are in this machine.
    nodes: Mapping[str, NodeReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelBudgets:
    """Learned budgets of a task, in bytes by device model (`Device.name`)."""

    #: Pairs of model and bytes. For a missing model no budget is known: the task gets a device to itself.
    by_model: tuple[tuple[str, int], ...]

    def get(self, device_name: str) -> int | None:
        """Return the bytes for a model; `None`: the model is missing."""
        return dict(self.by_model).get(device_name)


#: Memory asked of each device: bytes (`int`), a fraction of the device's total (`float` in (0, 1]), bytes by model, or
#: `None`: the need is not known, and the request asks for a device to itself.
Memory: TypeAlias = Union[int, float, ModelBudgets, None]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Request:
    """Devices and memory asked for one process of a task."""

    #: Unique among all requests of this Python process.
    id: str
    task_name: str
    #: Order of arrival: nanoseconds of the machine's monotonic clock at `submit`, no two equal in a process.
    sequence: int
    #: Monotonic seconds since when the task run wants these devices; 0: since the request was made.
    submitted_s: float
    memory: Memory = None
    #: Number of devices asked for, all on one node.
    count: int = 1
    #: Indices ("0"), nodes and indices ("gpu-2:0") or UUID prefixes ("GPU-1a"), in the author's order; empty: any.
    devices: tuple[str, ...] = ()
    #: Whether no other GPU task may be on the same devices.
    exclusive: bool = False
    #: Higher starts first.
    priority: int = 0
    #: Host memory that the process is expected to take.
    host_bytes: int = 0
    #: Seconds for which the process is expected to hold its devices, from past runs; `None`: not known.
    expected_s: float | None = None
    #: Another broker of the machine, in whose queue the request waits; empty: the broker that decides.
    origin: str = ""
    #: Names of the nodes that the request may use; empty: any.
    nodes: tuple[str, ...] = ()
    #: Kind of standby that can run the task: nodes with one are preferred. Empty: no kind.
    standby: str = ""
    #: Task run, its name for people, and its flow run; empty: not known.
    task_run_id: str = ""
    task_run_name: str = ""
    flow_run_id: str = ""
    #: Cap of a probe that may share a device, as a fraction of the memory offered to it; see `probes`. 0: not shared.
    probe_fraction: float = 0.0
    #: Whether `memory` has the caps that another broker has chosen for a probe.
    confirms_probe: bool = False
    #: Whether the process may be suspended for a request of higher priority, or moved to another device (`preemption`).
    preemptible: bool = False
    #: Whether the request resumes a suspended process.
    returns: bool = False
    #: Whether it resumes a process that moves to another device with room: considered before all other requests.
    returns_first: bool = False
    #: Ids of the requests of the GPU tasks inside which the request was made, outermost first; see `nested`.
    ancestors: tuple[str, ...] = ()
    #: Whether the task keeps a GPU busy by itself, from past runs: see `placement.crowds`.
    fills: bool = False
    #: Whether the process will be a client of MPS (`processes.mps`).
    client: bool = False

    def need_bytes(self, device: Device) -> int | None:
        """Return the bytes of `device` that the request asks for; `None`: all free memory."""
        if self.memory is None:
            return None
        if isinstance(self.memory, ModelBudgets):
            return self.memory.get(device.name)
        if isinstance(self.memory, float):
            return int(self.memory * device.total_bytes)
        return self.memory


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts in the reservation of a first run, whose need is unknown and which shares its device."""

    #: Monotonic seconds when the probe was placed.
    since_s: float
    #: Least bytes at which the probe counts for other probes, until its memory stops growing.
    counts_bytes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of one device that are promised to one request."""

    request_id: str
    #: Machine of the device, as in `Device.key`.
    machine: str
    device_uuid: str
    #: Bytes reserved, context included.
    reserved_bytes: int
    #: Whether no other GPU task may be on the device during the reservation.
    exclusive: bool = False
    task_name: str = ""
    #: Monotonic seconds of the expected end; `None`: not known.
    ends_s: float | None = None
    #: Set for a probe that shares its device: `reserved_bytes` is then its cap, and several caps may add up to more
    #: than the device has. `None`: the task's need is known, or it has the device to itself.
    probe: Probe | None = None
    #: Bytes of `reserved_bytes` that requests of the surrounding tasks lend, as pairs with their ids; see `nested`.
    loans: tuple[tuple[str, int], ...] = ()
    #: As in `Request`.
    fills: bool = False

    @property
    def device_key(self) -> DeviceKey:
        """Key of the device, as in `Device.key`."""
        return self.machine, self.device_uuid


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of one request, in order, and the budget on each, context included."""

    request_id: str
    devices: tuple[Device, ...]
    budget_bytes: tuple[int, ...]
    reservations: tuple[Reservation, ...] = field(default=())
