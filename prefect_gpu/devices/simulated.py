"""Devices that exist only in this process: for tests, and to try out a schedule.

Covers the arithmetic of a device's memory: contexts, caps, foreign processes, leaks, and failures on
demand. How a task in a child requests memory is in `prefect_gpu.testing`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.reader import ProcessMemory
from prefect_gpu.errors import DeviceError, ProtocolError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, ProcessUse
from prefect_gpu.units import format_bytes, parse_bytes

SIMULATED_ACCEPTED = "a number of devices and their size, as in 2x24GiB or 1x80GiB,2x24GiB"

#: A larger number is a typing error.
MAX_DEVICES = 1024

#: The foreign process on a device: process 1 always exists and is never one of our children.
FOREIGN_PID = 1

_GROUP = re.compile(r"\s*(?:([0-9]+)\s*[x×]\s*)?(.+)", re.IGNORECASE)


class SimulatedOutOfMemoryError(RuntimeError):
    """A simulated device, or a cap on it, has less memory than was requested.

    Args:
        requested_bytes: The size that was requested.
        free_bytes: What the device had.
        total_bytes: All of the device.
        cap_bytes: What the process may allocate there; `None`: no cap.
        live_bytes: What the process had allocated there.
    """

    #: Marks an out-of-memory that belongs to no framework; the child looks for it.
    __prefect_gpu_out_of_memory__ = True

    #: The device that refused it; empty: not known. Set in the child.
    device_uuid = ""

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
        """Return whether the process's own cap refused it, however much the device had."""
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
    """The number and sizes of simulated devices. Runners of a process share equal ones.

    Args:
        devices: As in `2x24GiB`, or `1x80GiB,2x24GiB` for devices that differ.
        context: What every process holds on its devices before it allocates: `512MiB`.

    Raises:
        DeviceError: A text is not such a size.
    """

    #: All memory of each device, in bytes.
    sizes_bytes: tuple[int, ...]
    #: Held by every process on each of its devices, in bytes.
    context_bytes: int
    #: As given, for messages.
    text: str = field(compare=False)

    def __init__(self, devices: str, context: str | None = None) -> None:
        # The class is frozen, so that only this may set them.
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
    """A process on the devices."""

    #: Cap in bytes by UUID; `None`: no cap.
    caps: dict[str, int | None]
    #: What it has allocated, by UUID.
    counters: dict[str, SimulatedCounters]


class SimulatedReader:
    """Reads simulated devices, and keeps account of their memory. Any thread may use it.

    Args:
        spec: The devices.
        clock: Sets the time of the snapshots.
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

    def devices(self) -> tuple[Device, ...]:
        """Return the devices; see `DeviceReader.devices`."""
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

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> SimulatedMemory:
        """Return the account of a new process; see `DeviceReader.process_memory`."""
        return SimulatedMemory(self, device_uuids, budget_bytes)

    def close(self) -> None:
        """Do nothing: memory stays allocated."""

    # Called for processes.

    def attach(
        self, root_pid: int, device_uuids: Sequence[str], cap_bytes: Sequence[int] | None = None
    ) -> None:
        """Add a process to its devices, on which its context counts from now on.

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
        """Remove a process from its devices and free all that it held. Ignore an unknown process.

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
        """Allocate memory for a process.

        Returns:
            An id for `free`.

        Raises:
            SimulatedOutOfMemoryError: Its cap or the device has less.
            DeviceError: The device failed, is unknown, or is not one of the process's.
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
        """Free an allocation; ignore one that is already free."""
        with self._lock:
            entry = self._allocations.pop(allocation_id, None)
            if entry is not None:
                root_pid, device_uuid, size_bytes = entry
                self._count(self._attached[root_pid], device_uuid, -size_bytes)

    def root_counters(self, root_pid: int) -> dict[str, SimulatedCounters]:
        """Return what a process has allocated, by device UUID; empty if it is not attached."""
        with self._lock:
            attached = self._attached.get(root_pid)
            return dict(attached.counters) if attached else {}

    # Called by tests.

    def occupy(self, device_uuid: str, size_bytes: int) -> None:
        """Allocate memory for the foreign process, in addition to what it has.

        Raises:
            SimulatedOutOfMemoryError: The device has less.
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
        """Free memory of the foreign process; `None`: all of it."""
        with self._lock:
            self._device(device_uuid)
            held_bytes = self._foreign[device_uuid]
            left_bytes = 0 if size_bytes is None else held_bytes - size_bytes
            self._foreign[device_uuid] = max(0, left_bytes)

    def leave_behind(self, device_uuid: str, size_bytes: int) -> None:
        """Leak memory, so that no process holds it. A negative size returns it."""
        with self._lock:
            self._device(device_uuid)
            self._leaked[device_uuid] = max(0, self._leaked[device_uuid] + size_bytes)

    def compute(self, device_uuid: str, busy_fraction: float | None) -> None:
        """Make a device report that it computes this fraction of the time; `None`: no report."""
        with self._lock:
            self._device(device_uuid)
            self._busy.pop(device_uuid, None)
            if busy_fraction is not None:
                self._busy[device_uuid] = busy_fraction

    def fail(self, device_uuid: str, reason: str = "GPU is lost") -> None:
        """Make one device fall off the bus."""
        with self._lock:
            self._device(device_uuid)
            self._failed[device_uuid] = reason

    def recover(self, device_uuid: str) -> None:
        """Make a failed device work again."""
        with self._lock:
            self._failed.pop(device_uuid, None)

    def break_driver(self, reason: str = "driver does not answer") -> None:
        """Make every reading raise `DeviceError`."""
        with self._lock:
            self._broken = reason

    def mend_driver(self) -> None:
        """Make readings work again."""
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
            # A process that is not among the roots any more may still hold memory.
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


class SimulatedMemory(ProcessMemory):
    """One process and what it holds of simulated devices.

    Args:
        reader: The devices.
        device_uuids: Those that it was placed on.
        budget_bytes: On each of them, the context included; `None`: no cap.
    """

    def __init__(
        self,
        reader: SimulatedReader,
        device_uuids: Sequence[str],
        budget_bytes: Sequence[int] | None,
    ) -> None:
        super().__init__(reader.kind)
        self._reader = reader
        self._device_uuids = tuple(device_uuids)
        self._pid: int | None = None
        context = self.context_bytes = reader.spec.context_bytes
        if budget_bytes is not None:
            self.cap_bytes = tuple(max(1, budget - context) for budget in budget_bytes)

    def attach(self, pid: int) -> None:
        """See `ProcessMemory.attach`."""
        if self._pid is not None:
            self._reader.detach(self._pid)
        self._pid = pid
        self._reader.attach(pid, self._device_uuids, self.cap_bytes)

    def live_bytes(self) -> int | None:
        """See `ProcessMemory.live_bytes`."""
        if self._pid is None:
            return None
        return sum(c.live_bytes for c in self._reader.root_counters(self._pid).values())

    def detach(self) -> tuple[int, int] | None:
        """See `ProcessMemory.detach`."""
        if self._pid is None:
            return None
        left = self._reader.detach(self._pid)
        return sum(counters.peak_live_bytes for counters in left.values()), len(left)

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `ProcessMemory.answer`."""
        if self._pid is None:
            raise ProtocolError(f"{method} was asked for before there was a process")
        if method == "simulated_allocate":
            return self._reader.allocate(self._pid, **arguments)
        if method == "simulated_free":
            self._reader.free(**arguments)
            return None
        raise ProtocolError(f"a child asked for {method!r}, which is unknown")
