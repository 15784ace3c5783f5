"""The protocol of a device reader: which devices exist, and a snapshot of each.

It does not choose devices, and it keeps no history. Implementations: `nvml`, `host`, `simulated`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot


class DeviceReader(Protocol):
    """Reads the devices of one specification. Used by one thread at a time."""

    #: Which kind of device it reads.
    kind: DeviceKind

    def devices(self) -> tuple[Device, ...]:
        """List the devices, in the order of their `index`; the same list every time.

        Raises:
            DeviceError: There is no driver, or a device that was named is not there.
        """
        ...

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Read every device once, in the order of `devices()`.

        A device that cannot be read yields a snapshot with `error` set; the others are read all
        the same.

        Args:
            roots: Process ids of our own children that are alive; each leads a session of its
                own. A process belongs to a root if it is in its session or descends from it.

        Raises:
            DeviceError: Nothing answers at all.
        """
        ...

    def close(self) -> None:
        """Give back what the reader holds; reading again opens it anew."""
        ...
