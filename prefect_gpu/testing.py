"""Simulated devices and a clock that a test moves, for tests and for trying out a schedule.

    @flow(task_runner=GPUTaskRunner(devices=SimulatedDevices("2x24GiB")))

Inside a GPU task `allocate` takes memory of its simulated device and counts it, as a framework does. Real
frameworks do not use simulated devices: a tensor takes the machine's own memory only.
"""

from __future__ import annotations

import threading

from prefect_gpu import in_task
from prefect_gpu.child.channel import current_channel
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedOutOfMemoryError
from prefect_gpu.frameworks.adapter import Counters, EndTrace
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
    """The allocations of this process on its simulated devices. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Bytes allocated now, and most bytes allocated at once, by UUID.
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._retries = 0
        #: The most bytes allocated at once, by UUID, since the trace began; `None`: nothing is traced.
        self._traced: dict[str, int] | None = None

    def count(self, device_uuid: str, change_bytes: int) -> None:
        with self._lock:
            live = self._live[device_uuid] = self._live.get(device_uuid, 0) + change_bytes
            self._peak[device_uuid] = max(self._peak.get(device_uuid, 0), live)
            if self._traced is not None:
                self._traced[device_uuid] = max(self._traced.get(device_uuid, 0), live)

    def count_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def counters(self) -> Counters | None:
        with self._lock:
            if not self._live and not self._retries:
                return None
            live, peak = sum(self._live.values()), sum(self._peak.values())
            # Without a cache, reserved bytes are allocated bytes.
            return Counters(live, live, peak, peak, self._retries)

    def begin_trace(self) -> EndTrace | None:
        with self._lock:
            if not self._live:
                return None
            self._traced = dict(self._live)
            return self.end_trace

    def end_trace(self) -> int | None:
        with self._lock:
            traced, self._traced = self._traced, None
            return None if traced is None else sum(traced.values())


_tally = _Tally()


def tally() -> Counters | None:
    """Return this process's allocations on simulated devices as a framework's counters; `None`: no allocation yet."""
    return _tally.counters()


def begin_trace() -> EndTrace | None:
    """Trace this process's peak on simulated devices, one trace at a time. `None`: no allocation yet."""
    return _tally.begin_trace()


def note_allocation_retry() -> None:
    """Count an allocation that succeeded only after the cache was released, as under a cap that is too low."""
    _tally.count_retry()


class SimulatedAllocation:
    """Memory of a simulated device, held until `free`, the end of a `with` block or of the process."""

    def __init__(self, device_uuid: str, size_bytes: int) -> None:
        self._device_uuid = device_uuid
        self._held = True
        #: Bytes held.
        self.size_bytes = size_bytes

    def free(self) -> None:
        """Release the memory. A second call does nothing."""
        channel = current_channel()
        if self._held and channel is not None:
            channel.ask("simulated_free", device_uuid=self._device_uuid, size_bytes=self.size_bytes)
            _tally.count(self._device_uuid, -self.size_bytes)
        self._held = False

    def __enter__(self) -> SimulatedAllocation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def __repr__(self) -> str:
        state = format_bytes(self.size_bytes) if self._held else "freed"
        return f"<SimulatedAllocation {state}>"


def allocate(size: str | int, device: int = 0) -> SimulatedAllocation:
    """Allocate memory of one of this task's simulated devices, as a framework would.

    Args:
        size: Size as in "3GiB", or a number of bytes.
        device: Index among the task's own devices, from 0.

    Raises:
        SimulatedOutOfMemoryError: The task's cap or the device has less memory left.
        RuntimeError: The caller is not a GPU task on simulated devices.
    """
    channel = current_channel()
    allocation = in_task.current_allocation()
    if channel is None or allocation is None:
        raise RuntimeError(
            "prefect_gpu.testing.allocate works inside a GPU task on simulated devices only; "
            'submit the task under GPUTaskRunner(devices="simulated:1x24GiB")'
        )
    if not 0 <= device < len(allocation.device_uuids):
        raise ValueError(
            f"device={device} is not one of this task's {len(allocation.device_uuids)} devices, from 0"
        )
    size_bytes = parse_bytes(size) if isinstance(size, str) else size
    device_uuid = allocation.device_uuids[device]
    try:
        channel.ask("simulated_allocate", device_uuid=device_uuid, size_bytes=size_bytes)
    except SimulatedOutOfMemoryError as error:
        error.device_uuid = device_uuid
        raise
    _tally.count(device_uuid, size_bytes)
    return SimulatedAllocation(device_uuid, size_bytes)
