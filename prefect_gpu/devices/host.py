"""The host's memory as a device, its available bytes, the kernel's out-of-memory kills, and the cores.

Used where there is no GPU, and by `nvml` on machines with unified memory. Limits of control groups count; swap does
not. Functions with a `root` look for `proc` and `sys` in this folder.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot

#: From here on a limit means none: version 1 of control groups writes the largest page-aligned signed 64-bit number.
_NO_LIMIT_BYTES = 2**60

#: Kills, in `/proc/vmstat` and, of control groups, `memory.events` (v2) or `memory.oom_control` (v1, Linux 4.13).
_OOM_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory, as far as this process may use it."""

    #: The host's memory, or the limit of the control groups if lower.
    total_bytes: int
    #: The kernel's estimate of available memory, or the rest of the control groups' limit if lower.
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Names of a control group's files in one version of control groups."""

    #: Files with a limit. Above `memory.high` the kernel slows processes down severely, so it counts as a limit.
    limits: tuple[str, ...]
    #: File with the used memory, page cache included.
    used: str
    #: Key in `memory.stat`: page cache that the kernel frees before it refuses memory.
    reclaimable: str
    #: File with the number of kills.
    kills: str


_FILES = {
    1: _GroupFiles(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.oom_control",
    ),
    2: _GroupFiles(
        ("memory.max", "memory.high"), "memory.current", "inactive_file", "memory.events"
    ),
}


def _find_groups(root: Path, controller: str) -> tuple[tuple[Path, int], ...]:
    """Return the control groups whose limits hold for this process (its own and its ancestors), with their versions."""
    # Mounted there by systemd and container runtimes. A container may see only its own part of the tree.
    mounts = root / "sys" / "fs" / "cgroup"
    groups: list[tuple[Path, int]] = []
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, version = mounts, 2
        elif controller in controllers.split(","):
            top, version = mounts / controller, 1
        else:
            continue
        own = Path(path.lstrip("/"))
        groups += [(top / group, version) for group in (own, *own.parents)]
    return tuple(groups)


def read_core_quota(root: Path = Path("/")) -> float:
    """Return the number of cores that the control groups allow this process; infinite: no limit."""
    quotas = [math.inf]
    for folder, version in _find_groups(root, "cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        found = " ".join(_text(folder / name) for name in names).split()
        # Version 2 writes "max" where there is no limit, version 1 -1.
        if len(found) == 2 and all(each.isdigit() and int(each) for each in found):
            quotas.append(int(found[0]) / int(found[1]))
    return min(quotas)


def _read_group(folder: Path, files: _GroupFiles) -> HostMemory | None:
    """Return the memory limit of a control group, and how much of it is available; `None`: no limit."""
    found = [_number(_text(folder / name)) for name in files.limits]
    limits = [limit for limit in found if limit is not None]
    # Most groups have no limit, and reading `memory.stat` takes longest.
    if not limits:
        return None
    used_bytes = _number(_text(folder / files.used)) or 0
    reclaimable = rf"(?m)^{files.reclaimable} ([0-9]+)$"
    match = re.search(reclaimable, _text(folder / "memory.stat"))
    reclaimable_bytes = int(match[1]) if match else 0
    return HostMemory(min(limits), max(0, min(limits) - used_bytes + reclaimable_bytes))


def _number(text: str) -> int | None:
    limited = text.strip().isdigit() and int(text) < _NO_LIMIT_BYTES
    return int(text) if limited else None


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the host's memory, as far as control groups let this process use it."""
    machine = psutil.virtual_memory()
    bounds = [HostMemory(machine.total, machine.available)]
    for folder, version in _find_groups(root, "memory"):
        group = _read_group(folder, _FILES[version])
        if group is not None:
            bounds.append(group)
    total_bytes = min(bound.total_bytes for bound in bounds)
    return HostMemory(total_bytes, min(total_bytes, *(b.available_bytes for b in bounds)))


def count_cores() -> int:
    """Return how many cores this process may use, by its affinity and the quota of its control groups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, read_core_quota())))


def read_host_available_bytes() -> int:
    """Return how many bytes of the host's memory new processes could use."""
    return read_host_memory().available_bytes


def mps_runs() -> bool:
    """Return whether CUDA's Multi-Process Service seems to run for this user: its control pipe exists."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return os.path.exists(os.path.join(folder, "control"))


def read_oom_kills(root: Path = Path("/")) -> int:
    """Return a number that rises when the kernel kills any process for lack of memory.

    A container may hide the host's counter, and a control group counts only its own kills. So the number is the sum of
    both, and one kill may count several times.
    """
    groups = _find_groups(root, "memory")
    counters = [folder / _FILES[version].kills for folder, version in groups]
    matches = [_OOM_KILLS.search(_text(file)) for file in (root / "proc" / "vmstat", *counters)]
    return sum(int(match[1]) for match in matches if match is not None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def host_uuid(hostname: str) -> str:
    """Return the UUID of a host's memory as a device: `HOST-node-3-example-org`."""
    return "HOST-" + (re.sub(r"[^A-Za-z0-9]+", "-", hostname).strip("-") or "localhost")


def read_machine() -> str:
    """Return the kernel's boot id, the same in all containers of a machine; else the hostname."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class HostReader(DeviceReader):
    """Reads the host's memory as one device. A process counts with its resident set."""

    kind: DeviceKind = "host"

    def __init__(
        self,
        hostname: str | None = None,
        memory: Callable[[], HostMemory] = read_host_memory,
        table: ProcessTable | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or RealClock()
        self._memory = memory
        self._table = table or ProcessTable(clock=self._clock)
        host = hostname if hostname is not None else socket.gethostname()
        device = Device(host_uuid(host), 0, "host memory", memory().total_bytes, self.kind, host)
        self._devices = (replace(device, machine=read_machine()),)

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return one snapshot, of the host's memory; see `DeviceReader.read`."""
        at_s, (device,) = self._clock.now(), self._devices
        free_bytes = min(self._memory().available_bytes, device.total_bytes)
        return (DeviceSnapshot(device, at_s, free_bytes, processes=self._table.resident(roots)),)
