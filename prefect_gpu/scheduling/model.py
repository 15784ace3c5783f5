"""The values that scheduling decides over: devices, snapshots, requests, placements, reservations.

Free memory is computed in `memory`, a device is chosen in `placement`, requests are ordered in `scheduling_pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, Union

DeviceKind = Literal["nvml", "host", "simulated"]

#: Words that advice adds to a size found on other devices than GPUs: a GPU also needs memory for a context.
ONLY_ON: Mapping[DeviceKind, str] = {
    "nvml": "",
    "host": " (host devices only: the machine's memory, not a GPU's)",
    "simulated": " (simulated devices only)",
}

#: Machine and UUID of a device.
DeviceKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Device:
    """One device that exists, keyed by `uuid`; nothing here changes while a process runs."""

    #: `GPU-…`, `MIG-…`, `HOST-…` or `SIM-…`; unique on its host.
    uuid: str
    #: Position among the runner's devices on its own node, from 0, as in `gpu:device=0`.
    index: int
    #: Product name, as NVML reports it: "NVIDIA H200".
    name: str
    #: Its whole memory in bytes, the driver's own part included.
    total_bytes: int
    #: The reader that knows it.
    kind: DeviceKind
    #: Name of its node. Several nodes of a cluster may be on one machine.
    host: str
    #: Index among NVML's devices, which is not CUDA's; `None`: NVML does not know it.
    nvml_index: int | None = None
    #: Driver version, by which context sizes differ: "580.159.04"; empty for host and simulated devices.
    driver: str = ""
    #: Identity of its machine since boot, equal in all containers (their names differ); empty: `host` identifies it.
    machine: str = ""
    #: Whether the driver's numbers by process can be attributed to the flow's; false in a container: `devices.nvml`.
    attributed: bool = True
    #: Whether `host` is the name of a node of a cluster. Reports and messages then name it.
    in_cluster: bool = False
    #: GPUs of the machine, also those that the runner does not use; 0: not known.
    machine_gpus: int = 0
    #: Machine and UUID: a UUID is unique on its machine only.
    key: DeviceKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: a scheduling pass looks it up for each device.
        object.__setattr__(self, "key", (self.machine or self.host, self.uuid))

    @property
    def node(self) -> str:
        """Name of its cluster node; empty: not in a cluster."""
        return self.host if self.in_cluster else ""

    @property
    def label(self) -> str:
        """Its name in messages: `device 0`, and in a cluster node and index, as in `gpu:device=NODE:0`."""
        return f"{self.host}:{self.index}" if self.in_cluster else f"device {self.index}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Memory of one process on one device, as a reader saw it."""

    pid: int
    #: Id of the child process that it is or was started by; `None`: there is none, or the reader cannot tell.
    root_pid: int | None
    #: Bytes that it holds; `None` where the driver does not say (WSL).
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One reading of one device."""

    device: Device
    #: Monotonic seconds of the reading.
    at_s: float
    #: Bytes free, as the driver reports it. It is exact where sums over processes are not.
    free_bytes: int
    #: Bytes of `device.total_bytes` that the driver always reserves.
    system_reserved_bytes: int = 0
    #: Processes that hold memory on it.
    processes: tuple[ProcessUse, ...] = ()
    #: Why the device cannot be used ("fell off the bus"), and the other numbers mean nothing; empty: it can.
    error: str = ""
    #: Part of the time (0 to 1) in which the device computed, over the last readings; `None`: not known.
    busy_fraction: float | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that processes hold, known or not: total less free less reserved by the driver."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes - self.free_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that an otherwise empty device could give to processes."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes)


@dataclass(frozen=True, slots=True)
class NodeReading:
    """Resources of one cluster node for processes."""

    #: Bytes of the node's own memory that new processes could use.
    available_bytes: int
    #: Most processes of one broker at a time on the node; `None`: as many as the broker may have.
    max_processes: int | None = None
    #: Standbys that wait for a task, by their kind as `Request.standby` names it.
    standbys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """All devices of one runner's specification, read in one go."""

    #: Monotonic seconds.
    at_s: float
    snapshots: tuple[DeviceSnapshot, ...]
    #: Bytes of this machine's memory for new processes: the lower of the kernel's estimate and the control group's rest.
    host_available_bytes: int
    #: Why nothing could be read (NVML stopped answering); empty: `snapshots` is good.
    error: str = ""
    #: Cluster nodes by `Device.host`; a node that is missing has no limit. Empty: all devices are in this machine.
    nodes: Mapping[str, NodeReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelBudgets:
    """Bytes on each device by its model, as histories know them."""

    #: Model name and bytes. A missing model: a device to itself.
    by_model: tuple[tuple[str, int], ...]

    def get(self, device_name: str) -> int | None:
        """Return the bytes for a model; `None`: it is missing."""
        return dict(self.by_model).get(device_name)


#: Memory asked of each device: bytes (`int`), a fraction of its total (`float` in (0, 1]), bytes by model, or a device
#: to itself because the need is not known (`None`).
Memory: TypeAlias = Union[int, float, ModelBudgets, None]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Request:
    """Devices and memory that one process of a task asks for."""

    #: Unique among all requests of this Python process.
    id: str
    task_name: str
    #: Order of arrival: nanoseconds of the machine's monotonic clock at `submit`, no two equal in a process.
    sequence: int
    #: Monotonic seconds when the request was made.
    submitted_s: float
    #: Memory asked of each device.
    memory: Memory = None
    #: Devices asked for, all on one node or none.
    count: int = 1
    #: Indices ("0"), nodes and indices ("gpu-2:0") or UUID prefixes ("GPU-1a"), in the author's order; empty: any.
    devices: tuple[str, ...] = ()
    #: No other GPU task may be on its devices.
    exclusive: bool = False
    #: Higher starts first.
    priority: int = 0
    #: Bytes of the machine's own memory that the process is expected to take.
    host_bytes: int = 0
    #: Seconds for which it is expected to hold its devices, from its past runs; `None`: not known.
    expected_s: float | None = None
    #: Another broker of the machine at which it waits; empty: the deciding broker.
    origin: str = ""
    #: Names of the nodes that it may use; empty: any.
    nodes: tuple[str, ...] = ()
    #: Kind of standby that suits it; nodes that have one are preferred. Empty: none suits.
    standby: str = ""
    #: Its task run, with a name for people, and its flow run; empty: not known.
    task_run_id: str = ""
    task_run_name: str = ""
    flow_run_id: str = ""
    #: Cap of a probe that may share a device, as a part (0 to 1] of the device's offer; see `probes`. 0: not shared.
    probe_fraction: float = 0.0
    #: `memory` has the caps that another broker has chosen for a probe.
    confirms_probe: bool = False
    #: Its process may be suspended for a request of higher priority, or moved to another device; see `preemption`.
    preemptible: bool = False
    #: It resumes a suspended process.
    returns: bool = False
    #: It resumes a process that is moved, since another device has room for it; it is considered before all others.
    returns_first: bool = False
    #: Requests of the GPU tasks inside which it was made, by id, the outermost first; see `nested`.
    ancestors: tuple[str, ...] = ()

    def need_bytes(self, device: Device) -> int | None:
        """Return the bytes of `device` that the request asks for; `None`: all that it has free."""
        if self.memory is None:
            return None
        if isinstance(self.memory, ModelBudgets):
            return self.memory.get(device.name)
        if isinstance(self.memory, float):
            return int(self.memory * device.total_bytes)
        return self.memory


@dataclass(frozen=True, slots=True)
class Probe:
    """Marks the reservation of a task with unknown need that shares its device."""

    #: Monotonic seconds when it was placed.
    since_s: float
    #: Least bytes at which it counts for other probes until its growth has settled.
    counts_bytes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of one device that are kept for one request."""

    request_id: str
    #: Machine of the device, as in `Device.key`.
    machine: str
    device_uuid: str
    #: Bytes reserved, the context included.
    reserved_bytes: int
    #: No other GPU task may be on the device while this holds.
    exclusive: bool = False
    #: Name of the task, for messages.
    task_name: str = ""
    #: Monotonic seconds of its expected end; `None`: not known.
    ends_s: float | None = None
    #: `None`: its task's need is known, or it has the device to itself. Otherwise `reserved_bytes` is the process's cap,
    #: and the caps of several probes may add up to more than the device has.
    probe: Probe | None = None
    #: Part of `reserved_bytes` lent by requests of tasks around it, by request id; see `nested`.
    loans: tuple[tuple[str, int], ...] = ()

    @property
    def device_key(self) -> DeviceKey:
        """Key of the device, as in `Device.key`."""
        return self.machine, self.device_uuid


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one request runs: its devices in order, and its budget on each."""

    request_id: str
    devices: tuple[Device, ...]
    #: Bytes on each of `devices`, the context included.
    budget_bytes: tuple[int, ...]
    reservations: tuple[Reservation, ...] = field(default=())
