"""The base class of device readers (`nvml`, `host`, `simulated`), which return devices and snapshots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, NodeReading


class ProcessMemory:
    """A reader's record of one process's memory. This base class is for real devices: it records nothing."""

    #: Memory of the process on each device before any allocation, in bytes; `None`: measured elsewhere.
    context_bytes: int | None = None
    #: Bytes that the process may allocate on each device; `None`: its frameworks set the cap.
    cap_bytes: tuple[int, ...] | None = None

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind

    def attach(self, pid: int) -> None:
        """Set the process of this record. A second process replaces a first one, which ended early."""

    def live_bytes(self) -> int | None:
        """Return the allocated bytes of the process; `None`: not known."""
        return None

    def detach(self) -> tuple[int, int] | None:
        """Free the ended process's memory; return its peak in bytes and its number of devices (`None`: unknown)."""
        return None

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a child's request to its devices; errors are raised in the child. `ProtocolError`: unknown request."""
        raise ProtocolError(f"{method} is for simulated devices; these are {self._kind}")


class DeviceReader:
    """Reads the devices of one `DeviceSpec`. Used by one thread at a time."""

    kind: DeviceKind
    #: Whether the devices belong to other machines.
    remote = False
    _devices: tuple[Device, ...] = ()

    def devices(self) -> tuple[Device, ...]:
        """Return the devices, in the order of their `index`; on one machine the same every time.

        On a cluster they are sorted by node, and are the devices of the last `read`: nodes join and leave.
        """
        return self._devices

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return a snapshot of every device, in the order of `devices()`; a device that fails has one with `error`.

        `roots` are process ids of our living children, each of which leads a session. A process belongs to a root if
        it is in its session or descends from it. `DeviceError`: no device can be read.
        """
        raise NotImplementedError

    def nodes(self) -> Mapping[str, NodeReading]:
        """Return the room for processes of each node of a cluster, as of the last `read`; empty: one machine."""
        return {}

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> ProcessMemory:
        """Return a record for a new process's memory on some devices, for any thread. `budget_bytes=None`: no cap."""
        return ProcessMemory(self.kind)

    def mps_refusal(self) -> str:
        """Return why processes on these devices cannot be clients of MPS, for any thread; empty: they can."""
        return "MPS is for NVIDIA GPUs of this machine"

    def close(self) -> None:
        """Close the reader; the next reading opens it again."""
