"""Devices that exist only in this process: for tests, and for trying out a schedule.

Covers the arithmetic of a device's memory: contexts, caps, other people's processes, leaks, and
failures on demand. How a task in a child asks for memory is in `prefect_gpu.testing`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, ProcessUse
from prefect_gpu.units import format_bytes, parse_bytes

SIMULATED_ACCEPTED = "a number of devices and their size, as in 2x24GiB or 1x80GiB,2x24GiB"

#: More is a slip of the keyboard.
MAX_DEVICES = 1024

#: Stands for whoever else uses a device: process 1 always exists and is never ours.
FOREIGN_PID = 1

_GROUP = re.compile(r"\s*(?:([0-9]+)\s*[x×]\s*)?(.+)", re.IGNORECASE)


class SimulatedOutOfMemoryError(RuntimeError):
    """A simulated device, or a cap on it, cannot give what was asked.

    Args:
        requested_bytes: What was asked for.
        free_bytes: What the device had.
        total_bytes: All of the device.
        cap_bytes: What the process may allocate there; `None`: no cap.
        live_bytes: What the process had allocated there.
    """

    #: How the child knows an out-of-memory that belongs to no framework.
    __prefect_gpu_out_of_memory__ = True

    def __init__(
        self,
        requested_bytes: int,
        free_bytes: int,
        total_bytes: int,
        cap_bytes: int | None,
        live_bytes: int,
    ) -> None:
        super().__init__(requested_bytes, free_bytes, total_bytes, cap_bytes, live_bytes)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        self.cap_bytes = cap_bytes
        self.live_bytes = live_bytes

    @property
    def hit_cap(self) -> bool:
        """Whether the process's own cap refused it, however much the device had."""
        return self.cap_bytes is not None and self.live_bytes + self.requested_bytes > (
            self.cap_bytes
        )

    def __str__(self) -> str:
        text = (
            f"out of memory: tried to allocate {format_bytes(self.requested_bytes)}; "
            f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free; "
            f"{format_bytes(self.live_bytes)} allocated by this process"
        )
        if self.cap_bytes is not None:
            text += f"; cap {format_bytes(self.cap_bytes)}"
        return text


@dataclass(frozen=True, init=False)
class SimulatedDevices:
    """How many simulated devices of which size. Equal ones are shared by the runners of a process.

    Args:
        devices: As in `2x24GiB`, or `1x80GiB,2x24GiB` for devices that differ.
        context: What every process holds on its devices before it allocates: `512MiB`.

    Raises:
        DeviceError: A text that is no such size.
    """

    #: All memory of each device, in bytes, in order.
    sizes_bytes: tuple[int, ...]
    #: Held by every process on each of its devices, in bytes.
    context_bytes: int
    #: As given, for messages.
    text: str = field(compare=False)

    def __init__(self, devices: str, context: str | None = None) -> None:
        # Frozen: this is the one place that may set them.
        object.__setattr__(self, "sizes_bytes", _parse_sizes(devices))
        object.__setattr__(self, "context_bytes", 0 if context is None else _parse_context(context))
        object.__setattr__(self, "text", devices)
        too_small = [size for size in self.sizes_bytes if size < self.context_bytes]
        if too_small:
            raise DeviceError(
                f"simulated devices {devices!r}: a context of {context} does not fit into a "
                f"device of {format_bytes(too_small[0])}; give larger devices"
            )

    def __repr__(self) -> str:
        context = f", context='{self.context_bytes}B'" if self.context_bytes else ""
        return f"SimulatedDevices({self.text!r}{context})"


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    try:
        for part in text.split(","):
            match = _GROUP.fullmatch(part)
            if match is None:
                raise ValueError("a part of it is empty")
            count = int(match[1]) if match[1] else 1
            if not 1 <= count <= MAX_DEVICES:
                raise ValueError(f"{count} is not between 1 and {MAX_DEVICES} devices")
            sizes += [parse_bytes(match[2])] * count
    except ValueError as error:
        raise DeviceError(
            f"simulated devices {text!r}: {error}; accepted: {SIMULATED_ACCEPTED}"
        ) from error
    return tuple(sizes)


def _parse_context(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise DeviceError(f"context of simulated devices: {error}; accepted: 512MiB") from error


@dataclass(frozen=True, slots=True)
class SimulatedCounters:
    """What one process has allocated on one device, without its context."""

    #: Bytes now.
    live_bytes: int = 0
    #: Most bytes at once.
    peak_live_bytes: int = 0


@dataclass
class _Attached:
    """One process of ours on the devices."""

    #: UUID to cap in bytes; `None`: no cap.
    caps: dict[str, int | None]
    #: UUID to what it has allocated there.
    counters: dict[str, SimulatedCounters]


class SimulatedReader:
    """Reads simulated devices, and is where their memory is booked. Any thread may use it.

    Args:
        spec: The devices.
        clock: Stamps the snapshots.
    """

    kind: DeviceKind = "simulated"

    def __init__(self, spec: SimulatedDevices, clock: Clock | None = None) -> None:
        self.spec = spec
        self._clock: Clock = clock or RealClock()
        self._lock = threading.Lock()
        host = socket.gethostname()
        self._devices = {
            device.uuid: device
            for device in (
                Device(f"SIM-{i}", i, f"simulated {format_bytes(size)}", size, self.kind, host)
                for i, size in enumerate(spec.sizes_bytes)
            )
        }
        self._attached: dict[int, _Attached] = {}
        #: Allocation id to process, device and bytes.
        self._allocations: dict[int, tuple[int, str, int]] = {}
        self._next_id = 1
        self._foreign = dict.fromkeys(self._devices, 0)
        self._leaked = dict.fromkeys(self._devices, 0)
        self._failed: dict[str, str] = {}
        self._busy: dict[str, float] = {}
        self._broken = ""

    # What a `DeviceReader` does.

    def devices(self) -> tuple[Device, ...]:
        """List the devices; see `DeviceReader.devices`."""
        with self._lock:
            self._check_driver()
            return tuple(self._devices.values())

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Read every device once; see `DeviceReader.read`."""
        with self._lock:
            self._check_driver()
            at_s = self._clock.now()
            return tuple(
                DeviceSnapshot(
                    device=device,
                    at_s=at_s,
                    free_bytes=self._free_bytes(uuid),
                    processes=self._processes(uuid, roots),
                    error=self._failed.get(uuid, ""),
                    busy_fraction=self._busy.get(uuid),
                )
                for uuid, device in self._devices.items()
            )

    def close(self) -> None:
        """Do nothing: memory stays booked."""

    # What processes do.

    def attach(
        self, root_pid: int, device_uuids: Sequence[str], cap_bytes: Sequence[int] | None = None
    ) -> None:
        """Put a process on its devices: from now on its context counts there.

        Args:
            root_pid: The process.
            device_uuids: Its devices.
            cap_bytes: What it may allocate on each, without the context; `None`: no cap.

        Raises:
            DeviceError: There is no such device.
        """
        with self._lock:
            for uuid in device_uuids:
                self._device(uuid)
            caps: Sequence[int | None] = (
                cap_bytes if cap_bytes is not None else [None] * len(device_uuids)
            )
            self._attached[root_pid] = _Attached(
                caps=dict(zip(device_uuids, caps, strict=True)),
                counters={uuid: SimulatedCounters() for uuid in device_uuids},
            )

    def detach(self, root_pid: int) -> dict[str, SimulatedCounters]:
        """Take a process off its devices: all that it held is free. Unknown ones are ignored.

        Returns:
            Its last counters, by device UUID.
        """
        with self._lock:
            owned = [key for key, entry in self._allocations.items() if entry[0] == root_pid]
            for key in owned:
                del self._allocations[key]
            attached = self._attached.pop(root_pid, None)
            return attached.counters if attached else {}

    def allocate(self, root_pid: int, device_uuid: str, size_bytes: int) -> int:
        """Book memory for a process.

        Returns:
            An id to `free` it by.

        Raises:
            SimulatedOutOfMemoryError: Its cap or the device does not hold as much.
            DeviceError: The device failed, is unknown, or not among the process's own.
        """
        with self._lock:
            device = self._device(device_uuid)
            if device_uuid in self._failed:
                raise DeviceError(f"{device_uuid}: {self._failed[device_uuid]}")
            attached = self._attached.get(root_pid)
            if attached is None or device_uuid not in attached.caps:
                raise DeviceError(f"{device_uuid} is not a device of process {root_pid}")
            if size_bytes < 0:
                raise ValueError(f"cannot allocate {size_bytes} bytes")
            live_bytes = attached.counters[device_uuid].live_bytes
            cap_bytes = attached.caps[device_uuid]
            free_bytes = self._free_bytes(device_uuid)
            capped = cap_bytes is not None and live_bytes + size_bytes > cap_bytes
            if capped or size_bytes > free_bytes:
                raise SimulatedOutOfMemoryError(
                    size_bytes, free_bytes, device.total_bytes, cap_bytes, live_bytes
                )
            self._count(attached, device_uuid, size_bytes)
            allocation_id = self._next_id
            self._next_id += 1
            self._allocations[allocation_id] = (root_pid, device_uuid, size_bytes)
            return allocation_id

    def free(self, allocation_id: int) -> None:
        """Give an allocation back; one that is already free is left alone."""
        with self._lock:
            entry = self._allocations.pop(allocation_id, None)
            if entry is not None:
                root_pid, device_uuid, size_bytes = entry
                self._count(self._attached[root_pid], device_uuid, -size_bytes)

    def root_counters(self, root_pid: int) -> dict[str, SimulatedCounters]:
        """Give what a process has allocated, by device UUID; empty if it is not attached."""
        with self._lock:
            attached = self._attached.get(root_pid)
            return dict(attached.counters) if attached else {}

    # What a test does to the machine.

    def occupy(self, device_uuid: str, size_bytes: int) -> None:
        """Let somebody else's process take memory, on top of what it has.

        Raises:
            SimulatedOutOfMemoryError: The device does not have as much.
        """
        with self._lock:
            device = self._device(device_uuid)
            free_bytes, held_bytes = self._free_bytes(device_uuid), self._foreign[device_uuid]
            if size_bytes > free_bytes:
                raise SimulatedOutOfMemoryError(
                    size_bytes, free_bytes, device.total_bytes, None, held_bytes
                )
            self._foreign[device_uuid] += size_bytes

    def vacate(self, device_uuid: str, size_bytes: int | None = None) -> None:
        """Let somebody else's process give memory back; `None`: all of it."""
        with self._lock:
            self._device(device_uuid)
            held_bytes = self._foreign[device_uuid]
            left_bytes = 0 if size_bytes is None else held_bytes - size_bytes
            self._foreign[device_uuid] = max(0, left_bytes)

    def leave_behind(self, device_uuid: str, size_bytes: int) -> None:
        """Leak memory: gone from the device, and nobody's. Negative gives it back."""
        with self._lock:
            self._device(device_uuid)
            self._leaked[device_uuid] = max(0, self._leaked[device_uuid] + size_bytes)

    def compute(self, device_uuid: str, busy_fraction: float | None) -> None:
        """Let a device compute for a part of the time (0 to 1); `None`: it does not tell."""
        with self._lock:
            self._device(device_uuid)
            self._busy.pop(device_uuid, None)
            if busy_fraction is not None:
                self._busy[device_uuid] = busy_fraction

    def fail(self, device_uuid: str, reason: str = "GPU is lost") -> None:
        """Let one device fall off the bus."""
        with self._lock:
            self._device(device_uuid)
            self._failed[device_uuid] = reason

    def recover(self, device_uuid: str) -> None:
        """Bring a failed device back."""
        with self._lock:
            self._failed.pop(device_uuid, None)

    def break_driver(self, reason: str = "driver does not answer") -> None:
        """Let every reading raise `DeviceError`."""
        with self._lock:
            self._broken = reason

    def mend_driver(self) -> None:
        """Let readings work again."""
        with self._lock:
            self._broken = ""

    def _check_driver(self) -> None:
        if self._broken:
            raise DeviceError(f"simulated driver: {self._broken}")

    def _device(self, uuid: str) -> Device:
        try:
            return self._devices[uuid]
        except KeyError:
            known = ", ".join(self._devices)
            raise DeviceError(f"{uuid} is no simulated device; there are {known}") from None

    def _held_bytes(self, attached: _Attached, uuid: str) -> int:
        if uuid not in attached.counters:
            return 0
        return self.spec.context_bytes + attached.counters[uuid].live_bytes

    def _free_bytes(self, uuid: str) -> int:
        held_bytes = sum(self._held_bytes(attached, uuid) for attached in self._attached.values())
        taken_bytes = held_bytes + self._foreign[uuid] + self._leaked[uuid]
        return max(0, self._devices[uuid].total_bytes - taken_bytes)

    def _processes(self, uuid: str, roots: Collection[int]) -> tuple[ProcessUse, ...]:
        uses = [
            # A process that is dead to the runner but still holds memory is nobody's of ours.
            ProcessUse(pid, pid if pid in roots else None, held_bytes)
            for pid, attached in self._attached.items()
            if (held_bytes := self._held_bytes(attached, uuid)) > 0
        ]
        if self._foreign[uuid]:
            uses.append(ProcessUse(FOREIGN_PID, None, self._foreign[uuid]))
        return tuple(uses)

    def _count(self, attached: _Attached, uuid: str, change_bytes: int) -> None:
        before = attached.counters[uuid]
        live_bytes = before.live_bytes + change_bytes
        attached.counters[uuid] = SimulatedCounters(
            live_bytes, max(before.peak_live_bytes, live_bytes)
        )
