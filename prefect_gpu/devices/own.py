"""The driver's readings about this process: its memory on its devices, and their free memory.

Used in a child at the end of a phase and after an out-of-memory. `sampler` reads the devices in the parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.scheduling.model import DeviceSnapshot


@dataclass(frozen=True, slots=True)
class OwnUse:
    """Memory of this process on one device, in bytes; `None`: the driver does not report it."""

    device_uuid: str
    #: Held by this process and its descendants.
    process_bytes: int | None = None
    free_bytes: int | None = None


class OwnMemory:
    """Reads the driver's figures for this process on its devices. Never raises.

    The first reading opens the driver, which takes tens of milliseconds; a later one takes less than one. After a
    failure all figures are `None`, so that a body does not wait again. Several threads may use NVML at once.
    """

    def __init__(
        self,
        device_uuids: Sequence[str],
        open_reader: Callable[[Sequence[str]], DeviceReader] | None = None,
    ) -> None:
        self._device_uuids = tuple(device_uuids)
        self._open_reader = open_reader or _open_nvml
        self._reader: DeviceReader | None = None
        self._failed = False

    def read(self) -> tuple[OwnUse, ...]:
        """Return this process's memory on every device, in the order of `device_uuids`."""
        found: dict[str, OwnUse] = {}
        if not self._failed:
            try:
                if self._reader is None:
                    self._reader = self._open_reader(self._device_uuids)
                pid = os.getpid()
                found = {s.device.uuid: _own_use(s, pid) for s in self._reader.read((pid,))}
            except Exception:  # noqa: BLE001 - a body must not fail for a measurement
                self._failed = True
        return tuple(found.get(uuid, OwnUse(uuid)) for uuid in self._device_uuids)


def _own_use(snapshot: DeviceSnapshot, pid: int) -> OwnUse:
    uuid = snapshot.device.uuid
    if snapshot.error:
        return OwnUse(uuid)
    own = [use.used_bytes for use in snapshot.processes if use.root_pid == pid]
    known = [size for size in own if size is not None]
    # In a container the driver may list the process under another id.
    process_bytes = sum(known) if own and len(known) == len(own) else None
    return OwnUse(uuid, process_bytes, snapshot.free_bytes)


def _open_nvml(device_uuids: Sequence[str]) -> DeviceReader:
    # Imported late: most children never need it.
    from prefect_gpu.devices.nvml import NvmlReader

    return NvmlReader(visible=",".join(device_uuids))
