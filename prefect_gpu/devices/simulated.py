"""Simulated devices, whose memory is only counted: for tests, and for trying out a schedule.

Code in a child requests memory through `prefect_gpu.testing`. Flows share devices that have a name: each flow holds a
file with the memory of its children, and readers add up the files of all flows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import read_machine
from prefect_gpu.devices.reader import DeviceReader, ProcessMemory
from prefect_gpu.devices.shared_folder import SharedFolder, read_namespace
from prefect_gpu.errors import DeviceError, ProtocolError
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, ProcessUse
from prefect_gpu.units import format_bytes, format_seconds, parse_bytes

logger = logging.getLogger(__name__)

SIMULATED_ACCEPTED = (
    "a number of devices and their size, as in 2x24GiB or 1x80GiB,2x24GiB, with @NAME for devices that all "
    "processes of the machine share which say that name"
)

#: Most devices; a larger number is a typing error.
MAX_DEVICES = 1024

#: Seconds after a failure of the shared folder until it is used again.
AGAIN_S = 60.0

_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_GROUP = re.compile(r"\s*(?:([0-9]+)\s*[x×]\s*)?(.+)", re.IGNORECASE)


@dataclass(eq=False, repr=False)
class SimulatedOutOfMemoryError(RuntimeError):
    """A simulated device, or a cap on it, has less memory than was requested."""

    #: Read by `frameworks.out_of_memory`: an out-of-memory without a framework.
    __prefect_gpu_out_of_memory__ = True

    #: UUID of the device; empty: not known. Set in the child.
    device_uuid = ""

    requested_bytes: int
    #: Free and total memory of the device.
    free_bytes: int
    total_bytes: int
    #: Cap of the process on the device; `None`: no cap.
    cap_bytes: int | None
    #: Allocated memory of the process on the device.
    live_bytes: int

    def __post_init__(self) -> None:
        # Pickle calls the class with `args` in the other process.
        self.args = tuple(vars(self).values())

    @property
    def hit_cap(self) -> bool:
        """Whether the request exceeds the process's own cap."""
        wanted_bytes = self.live_bytes + self.requested_bytes
        return self.cap_bytes is not None and wanted_bytes > self.cap_bytes

    def __repr__(self) -> str:
        # The text, as in errors of frameworks, not the numbers.
        return f"{type(self).__name__}({str(self)!r})"

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
    """The number and sizes of simulated devices. Runners of a process share equal devices.

    Args:
        devices: Number and size, as in `2x24GiB`, or `1x80GiB,2x24GiB` for different devices. With a name, as in
            `2x24GiB@NAME`, all processes share them.
        context: Memory of every process on its devices before its first allocation, as in `512MiB`.

    Raises:
        DeviceError: A text is no such size.
    """

    #: Total memory of each device, in bytes.
    sizes_bytes: tuple[int, ...]
    #: Memory of every process on each of its devices before any allocation, in bytes.
    context_bytes: int
    #: Name under which processes share the devices; empty: for this process and its tasks' processes only.
    name: str
    #: The given text, for messages.
    text: str = field(compare=False)

    def __init__(self, devices: str, context: str | None = None) -> None:
        sizes, at, name = devices.partition("@")
        if at and not _NAME.fullmatch(name):
            raise DeviceError(
                f"simulated devices {devices!r}: {name!r} is no name; accepted: up to 40 letters, digits and ._-"
            )
        object.__setattr__(self, "sizes_bytes", _parse_sizes(sizes))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "text", devices)
        try:
            context_bytes = 0 if context is None else parse_bytes(context)
        except ValueError as error:
            raise DeviceError(f"context of simulated devices: {error}; accepted: 512MiB") from error
        object.__setattr__(self, "context_bytes", context_bytes)
        too_small = [size for size in self.sizes_bytes if size < self.context_bytes]
        if too_small:
            raise DeviceError(
                f"simulated devices {devices!r}: a context of {context} does not fit into a "
                f"device of {format_bytes(too_small[0])}; give larger devices"
            )

    def on_node(self, node: str) -> SimulatedDevices:
        """Return these devices on one node of a cluster: named after the node, and shared by all processes there."""
        name = re.sub(r"[^\w.-]", "-", f"{self.name}-{node}".strip("-"))[:40]
        sizes, _, _ = self.text.partition("@")
        devices = SimulatedDevices(f"{sizes}@{name}")
        object.__setattr__(devices, "context_bytes", self.context_bytes)
        return devices

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


#: Used bytes by device UUID and process id.
Use = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class FlowUse:
    """Memory of another flow's children on simulated devices."""

    #: PID namespace of the process ids; see `shared_folder.read_namespace`.
    namespace: str
    use: Use


class SimulatedUse:
    """The files through which flows share simulated devices of one name. For several threads, each within `alone`.

    `DeviceError`: another flow describes the devices differently. `OSError`: the folder cannot be used.
    """

    def __init__(self, folder: SharedFolder, name: str, devices: Sequence[object]) -> None:
        self._folder = folder
        self._lock = f"simulated {name}"
        # A name has no space.
        self._prefix = f"{self._lock} "
        self._devices = list(devices)
        self._written = ""
        self._name = f"{self._prefix}{uuid4().hex}"
        with self.alone():
            for theirs, _ in self.others():
                if theirs != self._devices:
                    raise DeviceError(
                        f"simulated devices @{name}: this flow says {self._devices} (bytes of each, and of a context) "
                        f"and one that runs says {theirs}; accepted: the same in all flows, or another name"
                    )
            self._hold = folder.hold(self._name)
            self.write({})
        # At its end each flow removes its file: nobody else would remove the last flow's.
        weakref.finalize(self, _remove, folder.path / self._name, os.getpid())

    def alone(self) -> AbstractContextManager[None]:
        """Return a context manager that waits for, and excludes, reads and writes of other flows."""
        return self._folder.locked(self._lock)

    def write(self, use: Use) -> None:
        """Record how much simulated memory the children of this flow hold."""
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
        """Yield each other flow's devices and its children's memory on them; `OSError`: a file cannot be read."""
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
            except FileNotFoundError:
                # The flow ended after the check that it runs, and removed its file.
                continue
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                why = f"({type(error).__name__}: {error}): another program has written to it"
                raise OSError(f"{path} cannot be read {why}") from error


class SimulatedReader(DeviceReader):
    """Reads simulated devices, for any thread. With `folder`, processes share the devices.

    `DeviceError`: another process describes devices of that name differently. `OSError`: the folder cannot be used.
    """

    kind: DeviceKind = "simulated"

    def __init__(
        self, spec: SimulatedDevices, clock: Clock | None = None, folder: SharedFolder | None = None
    ) -> None:
        self.spec = spec
        self._clock: Clock = clock or RealClock()
        host, machine = socket.gethostname(), read_machine()
        prefix = f"SIM-{spec.name}-" if spec.name else "SIM-"
        self.by_uuid: dict[str, Device] = {}
        for i, size in enumerate(spec.sizes_bytes):
            uuid, name = f"{prefix}{i}", f"simulated {format_bytes(size)}"
            self.by_uuid[uuid] = Device(uuid, i, name, size, self.kind, host, machine=machine)
        self._devices = tuple(self.by_uuid.values())
        #: Guards all below.
        self._lock = threading.Lock()
        #: Memory of this flow's processes on the devices, by process id. Used within `account`.
        self.attached: dict[int, SimulatedMemory] = {}
        self._shared: SimulatedUse | None = None
        #: Called with the folder when devices without a name are first shared with processes of tasks.
        self.on_shared: Callable[[Path], object] = lambda folder: None
        #: Folders through which processes of tasks share devices without a name.
        self._folders: dict[SimulatedDevices, Path] = {}
        #: Held while a folder is made, not `_lock`: `on_shared` takes a broker's locks, whose threads take `_lock`.
        self._sharing = threading.Lock()
        if folder is not None:
            self._share(folder)
        #: Memory of other flows' processes.
        self._elsewhere: Sequence[FlowUse] = ()
        #: Clock time from which the record is shared again, after a failure.
        self._shared_from_s = -math.inf

    @contextlib.contextmanager
    def account(self) -> Iterator[None]:
        """Lock the record of all processes' simulated memory. While its folder fails, the flow has a record of its own."""
        with self._lock, contextlib.ExitStack() as alone:
            shared = self._shared if self._clock.now() >= self._shared_from_s else None
            if shared is not None:
                try:
                    alone.enter_context(shared.alone())
                    self._elsewhere = [use for _, use in shared.others()]
                except OSError as error:
                    shared = None
                    self._share_nothing(error)
            yield
            if shared is None:
                return
            try:
                shared.write({uuid: dict(self._own(uuid)) for uuid in self.by_uuid})
            except OSError as error:
                self._share_nothing(error)

    def _own(self, device_uuid: str) -> Iterator[tuple[int, int]]:
        """Yield the process id and bytes of each process of this flow on a device."""
        for pid, memory in self.attached.items():
            if held_bytes := memory.held_bytes(device_uuid):
                yield pid, held_bytes

    def _share(self, folder: SharedFolder) -> None:
        sizes = [*self.spec.sizes_bytes, self.spec.context_bytes]
        self._shared = SimulatedUse(folder, self.spec.name or "private", sizes)
        if not self.spec.name:
            self._folders[self.spec] = folder.path

    def folder_for(self, spec: SimulatedDevices) -> Path:
        """Return the folder through which tasks' processes share devices without a name; the first call makes it."""
        with self._sharing:
            folder = self._folders.get(spec)
            if folder is not None:
                return folder
            folder = self._folders[spec] = Path(tempfile.mkdtemp(prefix="prefect-gpu-"))
            weakref.finalize(self, _remove, folder, os.getpid())
            if spec == self.spec:
                with self._lock:
                    self._share(SharedFolder(folder))
                # Write the memory of this flow's processes before another process reads.
                with self.account():
                    pass
                self.on_shared(folder)
            return folder

    def _share_nothing(self, error: OSError) -> None:
        self._shared_from_s, self._elsewhere = self._clock.now() + AGAIN_S, ()
        name = f" @{self.spec.name}" if self.spec.name else ""
        text = "memory of other flows on simulated devices%s is not seen for %s: %s"
        logger.warning(text, name, format_seconds(AGAIN_S), error)

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return a snapshot of every device; see `DeviceReader.read`."""
        with self.account():
            at_s = self._clock.now()
            return tuple(
                DeviceSnapshot(
                    device=device,
                    at_s=at_s,
                    free_bytes=self.free_bytes(uuid),
                    # A process that is no root any more may still have memory.
                    processes=tuple(
                        ProcessUse(pid, pid if pid in roots else None, held_bytes)
                        for pid, held_bytes in self._processes(uuid)
                    ),
                )
                for uuid, device in self.by_uuid.items()
            )

    def process_memory(
        self, device_uuids: Sequence[str], budget_bytes: Sequence[int] | None
    ) -> SimulatedMemory:
        """Return a record for a new process's memory; see `DeviceReader.process_memory`."""
        return SimulatedMemory(self, device_uuids, budget_bytes)

    def free_bytes(self, device_uuid: str) -> int:
        """Return the free memory of a device. Call it within `account`."""
        held_bytes = sum(held_bytes for _, held_bytes in self._own(device_uuid))
        held_bytes += sum(sum(each.use.get(device_uuid, {}).values()) for each in self._elsewhere)
        return max(0, self.by_uuid[device_uuid].total_bytes - held_bytes)

    def _processes(self, device_uuid: str) -> Iterator[tuple[int, int]]:
        """Yield the process id and bytes of each process of this PID namespace on a device."""
        yield from self._own(device_uuid)
        for each in self._elsewhere:
            if each.namespace == read_namespace():
                yield from each.use.get(device_uuid, {}).items()


class SimulatedMemory(ProcessMemory):
    """Memory of one process on simulated devices. Its context counts while it is attached, and in its budgets."""

    def __init__(
        self,
        reader: SimulatedReader,
        device_uuids: Sequence[str],
        budget_bytes: Sequence[int] | None,
    ) -> None:
        super().__init__(reader.kind)
        self._reader = reader
        self._pid: int | None = None
        context = self.context_bytes = reader.spec.context_bytes
        #: Caps in bytes by device UUID; empty: no cap.
        self._caps: dict[str, int] = {}
        if budget_bytes is not None:
            self.cap_bytes = tuple(max(1, budget - context) for budget in budget_bytes)
            self._caps = dict(zip(device_uuids, self.cap_bytes, strict=True))
        #: Allocated bytes by device UUID: now, and the peak.
        self._live = dict.fromkeys(device_uuids, 0)
        self._peak = dict(self._live)

    def attach(self, pid: int) -> None:
        """See `ProcessMemory.attach`."""
        self.detach()
        with self._reader.account():
            self._pid = pid
            self._live = dict.fromkeys(self._live, 0)
            self._peak = dict(self._live)
            self._reader.attached[pid] = self

    def live_bytes(self) -> int | None:
        """See `ProcessMemory.live_bytes`."""
        return None if self._pid is None else sum(self._live.values())

    def detach(self) -> tuple[int, int] | None:
        """See `ProcessMemory.detach`."""
        with self._reader.account():
            if self._pid is None:
                return None
            self._reader.attached.pop(self._pid, None)
            return sum(self._peak.values()), len(self._peak)

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `ProcessMemory.answer`."""
        if self._pid is None:
            raise ProtocolError(f"{method} was asked for before there was a process")
        if method == "simulated_allocate":
            return self._allocate(**arguments)
        if method == "simulated_free":
            return self._free(**arguments)
        if method == "simulated_share":
            return self._reader.folder_for(**arguments)
        raise ProtocolError(f"a child asked for {method!r}, which is unknown")

    def held_bytes(self, device_uuid: str) -> int:
        """Return the process's memory on a device in bytes, context included."""
        live_bytes = self._live.get(device_uuid)
        return 0 if live_bytes is None else self._reader.spec.context_bytes + live_bytes

    def _allocate(self, device_uuid: str, size_bytes: int) -> None:
        """Allocate memory, or raise an error that is raised again in the child."""
        if device_uuid not in self._live:
            raise DeviceError(f"{device_uuid} is not a device of process {self._pid}")
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        with self._reader.account():
            free_bytes = self._reader.free_bytes(device_uuid)
            refusal = SimulatedOutOfMemoryError(
                size_bytes,
                free_bytes,
                self._reader.by_uuid[device_uuid].total_bytes,
                self._caps.get(device_uuid),
                self._live[device_uuid],
            )
            if refusal.hit_cap or size_bytes > free_bytes:
                raise refusal
            live_bytes = self._live[device_uuid] = self._live[device_uuid] + size_bytes
            self._peak[device_uuid] = max(self._peak[device_uuid], live_bytes)

    def _free(self, device_uuid: str, size_bytes: int) -> None:
        with self._reader.account():
            self._live[device_uuid] -= size_bytes


def _remove(path: Path, pid: int) -> None:
    """Remove a folder or file if this is the process `pid` that made it, and not a fork."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
