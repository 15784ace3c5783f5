"""The host's own memory as a device, how much of it is available, and kills for lack of it.

Used where there is no GPU, and by `nvml` on machines with unified memory. Limits of control groups
count; swap does not.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot

#: Version 1 of control groups writes "no limit" as the largest page-aligned signed 64-bit number. No
#: real limit is near it.
_NO_LIMIT_BYTES = 2**60

#: Kills, in `/proc/vmstat`, in `memory.events` of a control group of version 2, and in
#: `memory.oom_control` of one of version 1 (Linux 4.13 and later).
_OOM_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory, as far as this process may use it."""

    #: Lower of what the host has and what the control groups allow.
    total_bytes: int
    #: Lower of the kernel's estimate and what the control groups have left.
    available_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The memory of one control group."""

    #: Most that its processes may hold together; `None`: no limit.
    limit_bytes: int | None
    #: Held now, page cache included.
    used_bytes: int = 0
    #: Page cache that the kernel frees before it refuses memory.
    reclaimable_bytes: int = 0

    @property
    def available_bytes(self) -> int | None:
        """Return the bytes left below the limit; `None`: no limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes + self.reclaimable_bytes)


@dataclass(frozen=True, slots=True)
class GroupFolder:
    """The folder of a control group's memory files."""

    path: Path
    #: 1 or 2: which file names it uses.
    version: int


def parse_group_folders(cgroup_text: str, mountinfo_text: str) -> tuple[GroupFolder, ...]:
    """Return the control groups whose memory limits hold for a process: its own, then the ancestors.

    Args:
        cgroup_text: `/proc/self/cgroup`.
        mountinfo_text: `/proc/self/mountinfo`.
    """
    paths: dict[int, str] = {}
    for line in cgroup_text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[1] == "":
            paths[2] = parts[2]
        elif len(parts) == 3 and "memory" in parts[1].split(","):
            paths[1] = parts[2]
    folders: list[GroupFolder] = []
    for line in mountinfo_text.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, (kind, *rest) = mount.split(), (filesystem.split() or [""])
        if kind == "cgroup2":
            version = 2
        elif kind == "cgroup" and rest and "memory" in rest[-1].split(","):
            version = 1
        else:
            continue
        if version in paths and len(fields) > 4:
            folders += _ancestry(paths.pop(version), _unescape(fields[3]), fields[4], version)
    return tuple(folders)


def _ancestry(group: str, root: str, mount_point: str, version: int) -> list[GroupFolder]:
    # In a container the mount's root is the group's own path, or a namespace has made both "/".
    top = Path(_unescape(mount_point))
    relative = Path(group.removeprefix(root if root != "/" else "").lstrip("/"))
    if ".." in relative.parts:
        relative = Path()
    folder = top / relative
    return [
        GroupFolder(path, version)
        for path in (folder, *folder.parents)
        if path == top or top in path.parents
    ]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse_group_v2(limit: str, high: str, current: str, stat: str) -> GroupMemory:
    """Parse `memory.max`, `memory.high`, `memory.current` and `memory.stat`; empty: no such file.

    `memory.high` counts as a limit: above it the kernel slows the group down severely.
    """
    limits = [bound for text in (limit, high) if (bound := _number(text)) is not None]
    return GroupMemory(
        limit_bytes=min(limits, default=None),
        used_bytes=_number(current) or 0,
        reclaimable_bytes=_stat_value(stat, "inactive_file"),
    )


def parse_group_v1(limit: str, usage: str, stat: str) -> GroupMemory:
    """Parse `memory.limit_in_bytes`, `memory.usage_in_bytes` and `memory.stat`."""
    return GroupMemory(
        limit_bytes=_number(limit),
        used_bytes=_number(usage) or 0,
        reclaimable_bytes=_stat_value(stat, "total_inactive_file"),
    )


def _number(text: str) -> int | None:
    text = text.strip()
    if not text.isdigit() or int(text) >= _NO_LIMIT_BYTES:
        return None
    return int(text)


def _stat_value(stat: str, key: str) -> int:
    match = re.search(rf"^{key} ([0-9]+)$", stat, re.MULTILINE)
    return int(match[1]) if match else 0


def bound_by_groups(machine: HostMemory, groups: Collection[GroupMemory]) -> HostMemory:
    """Return the host's figures, bounded by what its control groups leave."""
    totals = [group.limit_bytes for group in groups if group.limit_bytes is not None]
    available = [left for group in groups if (left := group.available_bytes) is not None]
    total_bytes = min([machine.total_bytes, *totals])
    return HostMemory(
        total_bytes=total_bytes,
        available_bytes=min([machine.available_bytes, total_bytes, *available]),
    )


class HostMemoryReader:
    """Reads how much of the host's memory this process may use. Any thread may use it.

    Args:
        proc: The folder `/proc`, which says where the control groups are.
        read_machine: Returns the host's figures, without control groups; `None`: psutil does.
    """

    def __init__(
        self, proc: Path = Path("/proc"), read_machine: Callable[[], HostMemory] | None = None
    ) -> None:
        self._read_machine = read_machine or _read_machine
        # A process is hardly ever moved to another group: read once.
        self._folders = _read_group_folders(proc)

    def read(self) -> HostMemory:
        """Read it now."""
        return bound_by_groups(self._read_machine(), [_read_group(f) for f in self._folders])


class OomKills:
    """Reads how many processes the kernel has killed for lack of memory. Any thread may use it.

    A container may hide the host's counter, and a control group counts only its own kills, so both
    are read. The counters do not say which processes were killed.

    Args:
        proc: The folder `/proc`, which says where the control groups are.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._files = [proc / "vmstat"] + [
            folder.path / ("memory.events" if folder.version == 2 else "memory.oom_control")
            for folder in _read_group_folders(proc)
        ]

    def read(self) -> int:
        """Return the sum of the counters, 0 for each that is missing.

        One kill may count several times. Only a comparison with an earlier sum has a meaning: it is
        higher if there was a kill.
        """
        matches = [_OOM_KILLS.search(_text(file)) for file in self._files]
        return sum(int(match[1]) for match in matches if match is not None)


def _read_group_folders(proc: Path) -> tuple[GroupFolder, ...]:
    return parse_group_folders(_text(proc / "self" / "cgroup"), _text(proc / "self" / "mountinfo"))


def _read_machine() -> HostMemory:
    memory = psutil.virtual_memory()
    return HostMemory(total_bytes=memory.total, available_bytes=memory.available)


def _read_group(folder: GroupFolder) -> GroupMemory:
    limits = ("memory.max", "memory.high") if folder.version == 2 else ("memory.limit_in_bytes",)
    use = "memory.current" if folder.version == 2 else "memory.usage_in_bytes"
    found = [_text(folder.path / name) for name in limits]
    # Most groups have no limit, and reading `memory.stat` takes longest.
    limited = any(_number(text) is not None for text in found)
    found += [_text(folder.path / name) if limited else "" for name in (use, "memory.stat")]
    return parse_group_v2(*found) if folder.version == 2 else parse_group_v1(*found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@functools.cache
def default_host_memory() -> HostMemoryReader:
    """Return the reader of this host, made at first use."""
    return HostMemoryReader()


def read_host_available_bytes() -> int:
    """Return how many bytes of the host's memory new processes could use."""
    return default_host_memory().read().available_bytes


def host_uuid(hostname: str) -> str:
    """Return the UUID of a host's memory: `HOST-node-3-example-org`."""
    return "HOST-" + (re.sub(r"[^A-Za-z0-9]+", "-", hostname).strip("-") or "localhost")


class HostReader(DeviceReader):
    """The host's memory as one device; a process counts with its resident set.

    Args:
        hostname: Name of the host; `None`: it is read.
        memory: Reads the host's memory.
        table: Reads its processes.
        clock: Sets the time of the snapshots.
    """

    kind: DeviceKind = "host"

    def __init__(
        self,
        hostname: str | None = None,
        memory: HostMemoryReader | None = None,
        table: ProcessTable | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or RealClock()
        self._hostname = hostname if hostname is not None else socket.gethostname()
        self._memory = memory or default_host_memory()
        self._table = table or ProcessTable(clock=self._clock)
        self._device: Device | None = None

    def devices(self) -> tuple[Device, ...]:
        """Return the one device; its total is that of the first call."""
        if self._device is None:
            self._device = Device(
                uuid=host_uuid(self._hostname),
                index=0,
                name="host memory",
                total_bytes=self._memory.read().total_bytes,
                kind=self.kind,
                host=self._hostname,
            )
        return (self._device,)

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Read it once; see `DeviceReader.read`."""
        (device,) = self.devices()
        at_s = self._clock.now()
        available_bytes = self._memory.read().available_bytes
        return (
            DeviceSnapshot(
                device=device,
                at_s=at_s,
                free_bytes=min(available_bytes, device.total_bytes),
                processes=self._table.resident(roots),
            ),
        )
