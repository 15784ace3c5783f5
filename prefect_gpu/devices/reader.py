"""The base class of device readers: which devices exist, and a snapshot of each.

It does not choose devices, and it keeps no history. Implementations: `nvml`, `host`, `simulated`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prefect_gpu.errors import ProtocolError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, NodeReading


class ProcessMemory:
    """What a reader stores about one process; nothing, where the devices are real.

    Args:
        kind: Kind of the devices.
    """

    #: Bytes of context on each device; `None`: it is measured.
    context_bytes: int | None = None
    #: Bytes that the process may allocate on each device; `None`: its frameworks set the cap.
    cap_bytes: tuple[int, ...] | None = None

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind

    def attach(self, pid: int) -> None:
        """Set the process; a second one replaces the first, which ended early."""

    def live_bytes(self) -> int | None:
        """Return what the process has allocated now; `None`: not known."""
        return None

    def detach(self) -> tuple[int, int] | None:
        """Free all that the process holds, since it has ended.

        Returns:
            The most bytes that it had allocated, and the number of its devices; `None`: not known.
        """
        return None

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out a request of the process to its devices.

        Raises:
            ProtocolError: The request is unknown.
            Exception: The error of the device, which the child raises.
        """
        raise ProtocolError(f"{method} is for simulated devices; these are {self._kind}")


class DeviceReader:
    """Reads the devices of one specification. Used by one thread at a time."""

    #: Which kind of device it reads.
    kind: DeviceKind
    #: Whether the devices are those of other machines.
    remote = False

    def devices(self) -> tuple[Device, ...]:
        """Return the devices, in the order of their `index`; on one machine the same every time.

        On a cluster they are sorted by node, and change as nodes join and leave. A broker uses those of the last
        `read`.
        """
        raise NotImplementedError

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Read every device once, in the order of `devices()`.

        A device that cannot be read has a snapshot with `error` set; the others are still read.

        Args:
            roots: Process ids of our living children, each of which leads a session. A process
                belongs to a root if it is in its session or descends from it.

        Raises:
            DeviceError: No device can be read.
        """
        raise NotImplementedError

    def nodes(self) -> Mapping[str, NodeReading]:
        """Return what each node of a cluster has for processes, as the last `read` has found; empty: one machine."""
        return {}

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> ProcessMemory:
        """Return what is stored about a new process on some of the devices. Any thread may call it.

        Args:
            device_uuids: Its devices.
            budget_bytes: Budget on each of them, where the process has a cap; `None`: it has none.
        """
        return ProcessMemory(self.kind)

    def close(self) -> None:
        """Close what the reader has opened; reading again opens it."""
