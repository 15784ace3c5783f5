"""The machine's own memory as a device, and how much of it is available to us.

Used where there is no GPU, and for unified-memory machines by `nvml`. What a control group allows
counts; swap does not.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.roots import ProcessTable, read_text
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot

#: Version 1 writes "no limit" as the largest page-aligned signed 64-bit number; nothing real is
#: near it.
_NO_LIMIT_BYTES = 2**60

#: Those lines of `/proc/meminfo` that matter here; all are in its first three.
_MEMINFO = re.compile(r"^(MemTotal|MemFree|MemAvailable): +([0-9]+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The machine's memory as far as we may use it."""

    #: Lower of what the machine has and what the control groups allow.
    total_bytes: int
    #: Lower of the kernel's estimate and what the control groups have left.
    available_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What one control group says."""

    #: Most that its processes may hold together; `None`: no limit.
    limit_bytes: int | None
    #: Held now, page cache included.
    used_bytes: int = 0
    #: Page cache that the kernel drops before it refuses memory.
    reclaimable_bytes: int = 0

    @property
    def available_bytes(self) -> int | None:
        """Bytes left below the limit; `None`: no limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes + self.reclaimable_bytes)


@dataclass(frozen=True, slots=True)
class GroupFolder:
    """Where a control group's memory files are."""

    path: Path
    #: 1 or 2: which file names it uses.
    version: int


def parse_group_folders(cgroup_text: str, mountinfo_text: str) -> tuple[GroupFolder, ...]:
    """Find the control groups whose memory limits hold for us, ours first, then its ancestors.

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
    # In a container the mount's root is our group's own path, or a namespace has made both "/".
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
    """Read `memory.max`, `memory.high`, `memory.current` and `memory.stat`; empty: no such file.

    `memory.high` counts as a limit: past it the kernel slows the group down to a crawl.
    """
    limits = [bound for text in (limit, high) if (bound := _number(text)) is not None]
    return GroupMemory(
        limit_bytes=min(limits, default=None),
        used_bytes=_number(current) or 0,
        reclaimable_bytes=_stat_value(stat, "inactive_file"),
    )


def parse_group_v1(limit: str, usage: str, stat: str) -> GroupMemory:
    """Read `memory.limit_in_bytes`, `memory.usage_in_bytes` and `memory.stat`."""
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
    """Lower the machine's figures to what its control groups leave."""
    totals = [group.limit_bytes for group in groups if group.limit_bytes is not None]
    available = [left for group in groups if (left := group.available_bytes) is not None]
    total_bytes = min([machine.total_bytes, *totals])
    return HostMemory(
        total_bytes=total_bytes,
        available_bytes=min([machine.available_bytes, total_bytes, *available]),
    )


class HostMemoryReader:
    """Reads how much of the machine's memory we may use. Any thread may use it.

    Args:
        proc: Where `/proc` is.
        read_machine: Gives the machine's figures, without control groups.
    """

    def __init__(
        self, proc: Path = Path("/proc"), read_machine: Callable[[], HostMemory] | None = None
    ) -> None:
        self._read_machine = read_machine or functools.partial(_read_machine, proc / "meminfo")
        # A process is hardly ever moved to another group: looked up once.
        self._folders = parse_group_folders(
            _text(f"{proc}/self/cgroup"), _text(f"{proc}/self/mountinfo")
        )

    def read(self) -> HostMemory:
        """Read it now."""
        return bound_by_groups(self._read_machine(), [_read_group(f) for f in self._folders])


def _read_group(folder: GroupFolder) -> GroupMemory:
    limits = ("memory.max", "memory.high") if folder.version == 2 else ("memory.limit_in_bytes",)
    use = "memory.current" if folder.version == 2 else "memory.usage_in_bytes"
    found = [_text(f"{folder.path}/{name}") for name in limits]
    # Most groups have no limit, and `memory.stat` takes the kernel longer than all else here.
    limited = any(_number(text) is not None for text in found)
    found += [_text(f"{folder.path}/{name}") if limited else "" for name in (use, "memory.stat")]
    return parse_group_v2(*found) if folder.version == 2 else parse_group_v1(*found)


def _text(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _read_machine(meminfo: Path) -> HostMemory:
    """Read the machine's figures from `/proc/meminfo`; through psutil where it does not say."""
    return parse_meminfo(_text(str(meminfo))) or _read_machine_by_psutil()


def parse_meminfo(text: str) -> HostMemory | None:
    """Read `/proc/meminfo`; `None`: it does not say what is available, or says none.

    In some containers it says that more is available than there is (as `psutil` knows): then what is
    free counts.
    """
    found = {name: int(size) * 1024 for name, size in _MEMINFO.findall(text)}
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    # Some kernels and containers say 0 (psutil's issue 1915), and psutil estimates it.
    if total is None or not available:
        return None
    if available > total:
        available = found.get("MemFree", total)
    return HostMemory(total_bytes=total, available_bytes=available)


def _read_machine_by_psutil() -> HostMemory:
    import psutil

    memory = psutil.virtual_memory()
    return HostMemory(total_bytes=memory.total, available_bytes=memory.available)


@functools.cache
def default_host_memory() -> HostMemoryReader:
    """Give the reader of this machine, made at first use."""
    return HostMemoryReader()


def read_host_available_bytes() -> int:
    """Read how many bytes of the machine's memory new processes could use."""
    return default_host_memory().read().available_bytes


def host_uuid(hostname: str) -> str:
    """Make the UUID of a machine's memory: `HOST-node-3-example-org`."""
    return "HOST-" + (re.sub(r"[^A-Za-z0-9]+", "-", hostname).strip("-") or "localhost")


class HostReader:
    """The machine's memory as one device; a process counts by its resident set.

    Args:
        hostname: Name of the machine; `None`: ask it.
        memory: Reads the machine's memory.
        table: Reads its processes.
        clock: Stamps the snapshots.
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
        """List the one device; its total is that of the first call."""
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

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
