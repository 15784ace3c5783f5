"""Use of simulated devices that processes of a machine share by a name.

Each flow holds a file with the memory of its children. Readers add up the files of all flows.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from prefect_gpu.devices.shared_folder import SharedFolder, read_namespace
from prefect_gpu.errors import DeviceError

#: Bytes by UUID of a device and process id.
Use = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class FlowUse:
    """Memory of the children of another flow."""

    #: PID namespace of their process ids; see `shared_folder.read_namespace`.
    namespace: str
    use: Use


class SimulatedUse:
    """The files of one name. Safe to use from several threads, within `alone`. All flows describe the same `devices`.

    Raises:
        DeviceError: Another flow describes the devices differently.
        OSError: The folder cannot be used.
    """

    def __init__(self, folder: SharedFolder, name: str, devices: Sequence[object]) -> None:
        self._folder = folder
        self._lock = f"simulated {name}"
        # A name has no space.
        self._prefix = f"{self._lock} "
        self._devices = list(devices)
        self._written = ""
        self._name = f"{self._prefix}{uuid.uuid4().hex}"
        with self.alone():
            for theirs, _ in self.others():
                if theirs != self._devices:
                    raise DeviceError(
                        f"simulated devices @{name}: this flow says {self._devices} (bytes of each, and of a context) "
                        f"and one that runs says {theirs}; accepted: the same in all flows, or another name"
                    )
            self._hold = folder.hold(self._name)
            self.write({})
        # No other flow would remove the file of the last one.
        weakref.finalize(self, _remove, folder.path / self._name, os.getpid())

    def alone(self) -> AbstractContextManager[None]:
        """Wait until no other flow reads or writes."""
        return self._folder.locked(self._lock)

    def write(self, use: Use) -> None:
        """Write the memory of the children of this flow."""
        if self._hold is None or not self._hold.held:
            # A fork of the flow has no children here.
            return
        said = {"devices": self._devices, "namespace": read_namespace(), "use": use}
        text = json.dumps(said, sort_keys=True)
        if text != self._written:
            written = os.pwrite(self._hold.descriptor, text.encode(), 0)
            os.ftruncate(self._hold.descriptor, written)
            self._written = text

    def others(self) -> Iterator[tuple[list[object], FlowUse]]:
        """Yield each other flow's devices, and its children's memory on them; raise `OSError` for an unreadable file."""
        for path in self._folder.path.glob(f"{self._prefix}*"):
            if path.name == self._name or not self._folder.is_held(path.name):
                continue
            try:
                said = json.loads(path.read_bytes())
                use = {
                    device: {int(pid): int(size) for pid, size in held.items()}
                    for device, held in said["use"].items()
                }
                yield said["devices"], FlowUse(said["namespace"], use)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                why = f"({type(error).__name__}: {error}): another program has written to it"
                raise OSError(f"{path} cannot be read {why}") from error


def _remove(path: Path, pid: int) -> None:
    """Remove the file of a flow at its end. A fork of the flow leaves it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            path.unlink()
