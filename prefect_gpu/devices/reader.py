"""The base class of device readers (`nvml`, `host`, `simulated`), which return devices and snapshots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, NodeReading


class ProcessMemory:
    """A reader's account of one process; empty for real devices."""

    #: Bytes of context on each device; `None`: measured elsewhere.
    context_bytes: int | None = None
    #: Bytes that the process may allocate on each device; `None`: its frameworks set the cap.
    cap_bytes: tuple[int, ...] | None = None

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind

    def attach(self, pid: int) -> None:
        """Set the process. A second process replaces the first, which ended early."""

    def live_bytes(self) -> int | None:
        """Return the allocated bytes of the process; `None`: not known."""
        return None

    def detach(self) -> tuple[int, int] | None:
        """Free all memory of the process, which has ended.

        Returns:
            The peak of allocated bytes, and the number of devices of the process; `None`: not known.
        """
        return None

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out a request of the process to its devices. The child raises the error of a device.

        Raises:
            ProtocolError: The request is unknown.
        """
        raise ProtocolError(f"{method} is for simulated devices; these are {self._kind}")


class DeviceReader:
    """Reads the devices of one specification. Used by one thread at a time."""

    #: Kind of the devices.
    kind: DeviceKind
    #: Whether the devices belong to other machines.
    remote = False
    _devices: tuple[Device, ...] = ()

    def devices(self) -> tuple[Device, ...]:
        """Return the devices, in the order of their `index`; on one machine the same every time.

        On a cluster they are sorted by node, and are those of the last `read`: nodes join and leave.
        """
        return self._devices

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return a snapshot of every device, in the order of `devices()`; one with `error` for a device that fails.

        Args:
            roots: Process ids of our living children, each of which leads a session. A process belongs to a root if it
                is in its session or descends from it.

        Raises:
            DeviceError: No device can be read.
        """
        raise NotImplementedError

    def nodes(self) -> Mapping[str, NodeReading]:
        """Return each node's room for processes on a cluster, as of the last `read`; empty: one machine."""
        return {}

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> ProcessMemory:
        """Return the account of a new process on some devices. Any thread may call it. `budget_bytes`: `None`: no cap."""
        return ProcessMemory(self.kind)

    def close(self) -> None:
        """Close the reader; the next reading opens it again."""
