"""The values that scheduling decides over: devices, snapshots, requests, placements, reservations.

It covers what is known, not what follows from it: free memory is in `memory`, the choice of a device in
`placement`, the order of requests in `scheduling_pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, Union

DeviceKind = Literal["nvml", "host", "simulated"]

#: Words that advice adds to a size that was found on other devices than GPUs. A GPU needs memory for a context as well.
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
    #: Position among the runner's devices on its own node, from 0: what `gpu:device=0` counts.
    index: int
    #: Product name, as NVML reports it: "NVIDIA H200".
    name: str
    #: All of its memory, in bytes, what the driver keeps for itself included.
    total_bytes: int
    #: Which reader knows it.
    kind: DeviceKind
    #: Name of the node that it is in. Several nodes of a cluster may be on one machine.
    host: str
    #: Index among NVML's devices, `None` where NVML does not know it. Not CUDA's index.
    nvml_index: int | None = None
    #: Version of the driver, by which the sizes of contexts differ: "580.159.04"; empty for host and
    #: simulated devices.
    driver: str = ""
    #: Identity of that machine since its start, the same in all its containers, which have names of their own;
    #: empty: its name.
    machine: str = ""
    #: Whether what the driver shows of each process can be attributed to the flow's processes. In a container it
    #: cannot: see `devices.nvml`.
    attributed: bool = True
    #: Whether `host` is the name of a node of a cluster. Reports and messages then name it.
    in_cluster: bool = False
    #: GPUs of the machine, with those that are not the runner's; 0: not known.
    machine_gpus: int = 0
    #: Machine and UUID: a UUID is unique on its machine only.
    key: DeviceKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: a scheduling pass looks it up for each device.
        object.__setattr__(self, "key", (self.machine or self.host, self.uuid))

    @property
    def node(self) -> str:
        """Name of its node; empty: it is not in a cluster."""
        return self.host if self.in_cluster else ""

    @property
    def label(self) -> str:
        """Its name in messages: `device 0`, and in a cluster node and index, as in `gpu:device=NODE:0`."""
        return f"{self.host}:{self.index}" if self.in_cluster else f"device {self.index}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds on one device, as a reader saw it."""

    pid: int
    #: Child process that it belongs to (the child itself, or one that it started), by its id; `None`: it
    #: belongs to none, or the reader cannot tell.
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
    #: Bytes of `device.total_bytes` that the driver always keeps for itself.
    system_reserved_bytes: int = 0
    #: Processes that hold memory on it.
    processes: tuple[ProcessUse, ...] = ()
    #: Why the device cannot be used ("fell off the bus"); empty: it can. The numbers above then
    #: mean nothing.
    error: str = ""
    #: Part of the time (0 to 1) in which it computed, over the last readings; `None`: not known.
    busy_fraction: float | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that processes hold, known or not: all that is neither free nor the driver's."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes - self.free_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that an otherwise empty device could give to processes."""
        return max(0, self.device.total_bytes - self.system_reserved_bytes)


@dataclass(frozen=True, slots=True)
class NodeReading:
    """What one node of a cluster has for processes."""

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
    #: Bytes of the memory of this process's machine that new processes could use; the lower of the
    #: kernel's estimate and what the control group has left.
    host_available_bytes: int
    #: Why nothing could be read (NVML stopped answering); empty: `snapshots` is good.
    error: str = ""
    #: The nodes of a cluster, by `Device.host`; empty: all devices are in this machine. A node that is not named
    #: has no limit.
    nodes: Mapping[str, NodeReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelBudgets:
    """Bytes on each device by its model, as histories know them."""

    #: Name of the model and bytes. Of one that is not named, a device to itself.
    by_model: tuple[tuple[str, int], ...]

    def get(self, device_name: str) -> int | None:
        """Return the bytes for a model; `None`: it is not named."""
        return dict(self.by_model).get(device_name)


#: What a request asks of each device: bytes (`int`), a fraction of its total (`float` in (0, 1]), bytes
#: by model, or, where the need is not known, a device to itself (`None`).
Memory: TypeAlias = Union[int, float, ModelBudgets, None]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Request:
    """What one process of a task asks for."""

    #: Unique among all requests of this Python process.
    id: str
    task_name: str
    #: Order of arrival: nanoseconds of the machine's monotonic clock at `submit`, no two equal in a process.
    sequence: int
    #: Monotonic seconds when it was made.
    submitted_s: float
    #: Asked of each device.
    memory: Memory = None
    #: Devices asked for, all on one node or none.
    count: int = 1
    #: Indices ("0"), nodes and indices ("gpu-2:0") or UUID prefixes ("GPU-1a"), in the author's order; empty:
    #: any.
    devices: tuple[str, ...] = ()
    #: No other GPU task may be on its devices.
    exclusive: bool = False
    #: Higher starts first.
    priority: int = 0
    #: Bytes of the machine's own memory that the process is expected to take.
    host_bytes: int = 0
    #: Seconds for which it is expected to hold its devices, from its past runs; `None`: not known.
    expected_s: float | None = None
    #: Which other broker of the machine it waits at; empty: the one that decides.
    origin: str = ""
    #: Names of the nodes that it may use; empty: any.
    nodes: tuple[str, ...] = ()
    #: Kind of the standbys that suit it, by which a node of a cluster is preferred; empty: none does.
    standby: str = ""
    #: Which task run it is of, for people, and its flow run; empty: not known.
    task_run_id: str = ""
    task_run_name: str = ""
    flow_run_id: str = ""
    #: Where its need is not known: it may share a device with other tasks, capped at this part (0 to 1] of what the
    #: device offers; see `probes`. 0: it has a device to itself.
    probe_fraction: float = 0.0
    #: It asks for the caps in `memory`, which another broker has decided for a probe.
    confirms_probe: bool = False
    #: Its process may be suspended for a request of higher priority, or moved to another device; see `preemption`.
    preemptible: bool = False
    #: It is of a process that was suspended and waits for room to come back.
    returns: bool = False
    #: It is such a request of a process that was moved: another device had the room. It is considered before all others.
    returns_first: bool = False
    #: The requests of the GPU tasks that it was made inside of, by id, the outermost first; see `nested`.
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
    """What makes a reservation that of a task whose need is not known, and which shares its device."""

    #: Monotonic seconds when it was placed.
    since_s: float
    #: Bytes at which it counts for other probes, at least, until its growth has settled.
    counts_bytes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of one device that are kept for one request."""

    request_id: str
    #: As the device's key has it.
    machine: str
    device_uuid: str
    #: Bytes reserved, the context included.
    reserved_bytes: int
    #: No other GPU task may be on the device while this holds.
    exclusive: bool = False
    #: For messages.
    task_name: str = ""
    #: Monotonic seconds at which it is expected to end; `None`: not known.
    ends_s: float | None = None
    #: `None`: the need of its task is known, or it has the device to itself. Otherwise `reserved_bytes` is the most
    #: that its process can take, and reservations of several such tasks may add up to more than the device has.
    probe: Probe | None = None
    #: Bytes of these that requests around its own have reserved on the device and lend to it, by request id; see `nested`.
    loans: tuple[tuple[str, int], ...] = ()

    @property
    def device_key(self) -> DeviceKey:
        """Which device, as `Device.key` has it."""
        return self.machine, self.device_uuid


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one request runs: its devices in order, and its budget on each."""

    request_id: str
    devices: tuple[Device, ...]
    #: Bytes on each of `devices`, the context included.
    budget_bytes: tuple[int, ...]
    reservations: tuple[Reservation, ...] = field(default=())
