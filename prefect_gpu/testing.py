"""For tests, and for trying out a schedule: devices that exist on paper only, and a clock to move.

    @flow(task_runner=GPUTaskRunner(devices=SimulatedDevices("2x24GiB")))

Inside a GPU task `allocate` takes memory of its simulated device, and a tally of it is kept, as a
framework keeps counters. Real frameworks are not held to simulated devices: a tensor counts only in
the machine's own memory.
"""

from __future__ import annotations

import threading
from types import TracebackType

from prefect_gpu import inside
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedOutOfMemoryError
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes.channel import current_channel
from prefect_gpu.units import format_bytes, parse_bytes

__all__ = [
    "FakeClock",
    "SimulatedAllocation",
    "SimulatedDevices",
    "SimulatedOutOfMemoryError",
    "allocate",
    "note_allocation_retry",
]


class _Tally:
    """What this process has allocated on its simulated devices. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: UUID to bytes now, and most bytes at once.
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._retries = 0
        #: Device that refused last; empty: none did.
        self.refused_uuid = ""

    def count(self, device_uuid: str, change_bytes: int) -> None:
        with self._lock:
            live = self._live[device_uuid] = self._live.get(device_uuid, 0) + change_bytes
            self._peak[device_uuid] = max(self._peak.get(device_uuid, 0), live)

    def count_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def counters(self) -> Counters | None:
        with self._lock:
            if not self._live and not self._retries:
                return None
            live, peak = sum(self._live.values()), sum(self._peak.values())
            # There is no cache: what is held is what is allocated.
            return Counters(live, live, peak, peak, self._retries)


_tally = _Tally()


def tally() -> Counters | None:
    """Give what this process has allocated on simulated devices; `None`: it has not.

    For the child, which takes it as a framework's counters.
    """
    return _tally.counters()


def refused_uuid() -> str:
    """Name the simulated device that refused an allocation last; empty: none did. For the child."""
    return _tally.refused_uuid


def note_allocation_retry() -> None:
    """Act as if an allocation had succeeded only after the allocator gave up its cache.

    A cap that pinches shows so with a real framework.
    """
    _tally.count_retry()


class SimulatedAllocation:
    """Memory of a simulated device, held until `free`, the end of a `with` block or the process."""

    def __init__(self, allocation_id: int, size_bytes: int, device_uuid: str) -> None:
        self._id: int | None = allocation_id
        self._device_uuid = device_uuid
        #: Bytes held.
        self.size_bytes = size_bytes

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        channel = current_channel()
        if self._id is not None and channel is not None:
            channel.ask("simulated_free", allocation_id=self._id)
            _tally.count(self._device_uuid, -self.size_bytes)
        self._id = None

    def __enter__(self) -> SimulatedAllocation:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        state = "freed" if self._id is None else format_bytes(self.size_bytes)
        return f"<SimulatedAllocation {state}>"


def allocate(size: str | int, device: int = 0) -> SimulatedAllocation:
    """Take memory of one of this task's simulated devices, as a framework would.

    Args:
        size: "3GiB", or bytes.
        device: Which of the task's own devices, from 0.

    Raises:
        SimulatedOutOfMemoryError: The task's cap or the device does not have it.
        RuntimeError: The caller is not a GPU task on simulated devices.
    """
    channel = current_channel()
    allocation = inside.current_allocation()
    if channel is None or allocation is None:
        raise RuntimeError(
            "prefect_gpu.testing.allocate works inside a GPU task on simulated devices only; "
            'submit the task under GPUTaskRunner(devices="simulated:1x24GiB")'
        )
    if not 0 <= device < len(allocation.device_uuids):
        raise ValueError(
            f"device={device} is none of this task's; it has {len(allocation.device_uuids)}"
        )
    size_bytes = parse_bytes(size) if isinstance(size, str) else size
    device_uuid = allocation.device_uuids[device]
    try:
        allocation_id = channel.ask(
            "simulated_allocate", device_uuid=device_uuid, size_bytes=size_bytes
        )
    except SimulatedOutOfMemoryError:
        _tally.refused_uuid = device_uuid
        raise
    _tally.count(device_uuid, size_bytes)
    return SimulatedAllocation(allocation_id, size_bytes, device_uuid)
