"""For tests, and for trying out a schedule: devices that exist on paper only, and a clock to move.

    @flow(task_runner=GPUTaskRunner(devices=SimulatedDevices("2x24GiB")))

Inside a GPU task `allocate` takes memory of its simulated device. Real frameworks are not held to
simulated devices: a tensor counts only in the machine's own memory.
"""

from __future__ import annotations

from types import TracebackType

from prefect_gpu import inside
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedOutOfMemoryError
from prefect_gpu.processes.channel import current_channel
from prefect_gpu.units import format_bytes, parse_bytes

__all__ = [
    "FakeClock",
    "SimulatedAllocation",
    "SimulatedDevices",
    "SimulatedOutOfMemoryError",
    "allocate",
]


class SimulatedAllocation:
    """Memory of a simulated device, held until `free`, the end of a `with` block or the process."""

    def __init__(self, allocation_id: int, size_bytes: int) -> None:
        self._id: int | None = allocation_id
        #: Bytes held.
        self.size_bytes = size_bytes

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        channel = current_channel()
        if self._id is not None and channel is not None:
            channel.ask("simulated_free", allocation_id=self._id)
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
    allocation_id = channel.ask(
        "simulated_allocate",
        device_uuid=allocation.device_uuids[device],
        size_bytes=size_bytes,
    )
    return SimulatedAllocation(allocation_id, size_bytes)
