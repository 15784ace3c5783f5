"""Which processes belong to which of our children, and what they hold of the machine's memory.

A *root* is the process of one GPU task; its dataloaders and helpers belong to it. Covers one host's
process table; it does not know devices.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.scheduling.model import ProcessUse

#: Least seconds between two scans of the whole process table. In between, the processes found last
#: are read again, so a helper's memory shows up to this much late.
SCAN_INTERVAL_S = 1.0

#: A scan may take one part in this many of the time: 15 µs a process, thousands on a shared node.
SCAN_SHARE = 20

#: One scan in this many reads every process; the others only those that are new: most of a machine's
#: processes are there all the time, and no stranger becomes ours.
FULL_SCAN = 10

#: Parents to follow at most: a process table that changes while it is read could have a cycle.
MAX_DEPTH = 64

#: What the kernel calls the first pid namespace (`PROC_PID_INIT_INO`): outside of containers.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The part of `/proc/PID/stat` that says whose a process is and what it holds."""

    parent_pid: int
    session_id: int
    #: Pages in memory.
    resident_pages: int


def parse_stat(text: str) -> ProcessStat:
    """Read `/proc/PID/stat`. The command in it may hold spaces and parentheses."""
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(
        parent_pid=int(fields[1]), session_id=int(fields[3]), resident_pages=int(fields[21])
    )


def read_text(path: str) -> str:
    """Read a file of the kernel's.

    Not through `open`, which takes twice as long: some are read four times a second for as long as a
    task runs, others for every process of the machine.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        # The kernel gives some of them in pieces.
        while piece := os.read(descriptor, 65536):
            pieces.append(piece)
    finally:
        os.close(descriptor)
    return b"".join(pieces).decode("utf-8", "replace")


def find_root(
    pid: int, roots: Collection[int], stat_of: Callable[[int], ProcessStat | None]
) -> int | None:
    """Find the root that a process is, is in the session of, or descends from.

    Args:
        pid: Any process id, perhaps of another namespace.
        roots: Our children.
        stat_of: Gives a process's stat, `None` if there is no such process.

    Returns:
        The nearest root; `None`: it is not ours, or not to be seen from here.
    """
    for _ in range(MAX_DEPTH):
        if pid in roots:
            return pid
        stat = stat_of(pid)
        if stat is None:
            return None
        if stat.session_id in roots:
            return stat.session_id
        pid = stat.parent_pid
    return None


class ProcessTable:
    """The processes of this machine, read from `/proc`, else through psutil (macOS).

    Used by one thread at a time.

    Args:
        proc: Where `/proc` is.
        clock: Says when to scan again.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Clock | None = None) -> None:
        self._proc = str(proc)
        self._clock: Clock = clock or RealClock()
        self._has_proc = (proc / "self" / "stat").exists()
        self._stat_of = self.read_stat if self._has_proc else _read_stat_by_psutil
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._members: frozenset[int] = frozenset()
        self._scan_due_s = float("-inf")
        #: Processes of the last scan, as they were when they were first seen, and the scans so far.
        self._seen: dict[int, ProcessStat | None] = {}
        self._scans = -1

    def root_of(self, pid: int, roots: Collection[int]) -> int | None:
        """Find the root that a process belongs to; see `find_root`."""
        return find_root(pid, roots, self._stat_of)

    def resident(self, roots: Collection[int]) -> tuple[ProcessUse, ...]:
        """Read the resident memory of every process of every root, roots first."""
        if not roots:
            return ()
        if not self._has_proc:
            return _resident_by_psutil(roots)
        started_s = self._clock.now()
        if started_s >= self._scan_due_s:
            if started_s > self._scan_due_s + SCAN_INTERVAL_S:
                # Nobody has asked for a while: ids that were strangers' may be ours by now.
                self._seen = {}
            self._members = self._scan(roots)
            took_s = self._clock.now() - started_s
            self._scan_due_s = started_s + max(SCAN_INTERVAL_S, SCAN_SHARE * took_s)
        uses = []
        # Each process is read once: it is also on the way of its descendants to their root.
        stat_of = functools.cache(self.read_stat)
        for pid in (*roots, *sorted(self._members.difference(roots))):
            stat = stat_of(pid)
            # A member is looked up again each time: its pid may be somebody else's by now.
            root = None if stat is None else find_root(pid, roots, stat_of)
            # One that is dead and not yet reaped has no pages: it holds nothing, however long its
            # parent takes to look.
            if stat is not None and root is not None and stat.resident_pages:
                uses.append(ProcessUse(pid, root, stat.resident_pages * self._page_bytes))
        return tuple(uses)

    def read_stat(self, pid: int) -> ProcessStat | None:
        """Read one process's stat; `None` if there is no such process."""
        try:
            return parse_stat(read_text(f"{self._proc}/{pid}/stat"))
        except (OSError, ValueError, IndexError):
            # Gone, between listing and reading or while it was read.
            return None

    def holds_gpu(self, pid: int) -> bool:
        """Say whether a process of ours has a GPU's device file open."""
        folder = f"{self._proc}/{pid}/fd"
        try:
            links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
        except OSError:
            return False
        return any(link.startswith(("/dev/nvidia", "/dev/dxg")) for link in links)

    def in_initial_namespace(self) -> bool:
        """Say whether our process ids are the machine's own, as a driver knows them."""
        try:
            return os.readlink(f"{self._proc}/self/ns/pid") == INITIAL_PID_NAMESPACE
        except OSError:
            return False

    def _scan(self, roots: Collection[int]) -> frozenset[int]:
        """Find all processes of some roots.

        Of those that were there at the last scan only such are read whose parent is gone: the others
        have the ancestors that they had. One whose id was a stranger's a second ago is found by the
        scan that reads all of them.
        """
        pids = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._scans += 1
        known = self._seen if self._scans % FULL_SCAN else {}
        # 0: its parent is none that is seen from here, and never was.
        parents = {0, *pids}
        stats = {
            pid: stat
            if (stat := known.get(pid)) is not None and stat.parent_pid in parents
            else self.read_stat(pid)
            for pid in pids
        }
        self._seen = stats
        return frozenset(pid for pid in pids if find_root(pid, roots, stats.get) is not None)


def _read_stat_by_psutil(pid: int) -> ProcessStat | None:
    import psutil

    try:
        parent_pid = psutil.Process(pid).ppid()
        return ProcessStat(parent_pid=parent_pid, session_id=os.getsid(pid), resident_pages=0)
    except (psutil.Error, OSError, ValueError):
        return None


def _resident_by_psutil(roots: Collection[int]) -> tuple[ProcessUse, ...]:
    import psutil

    uses: dict[int, ProcessUse] = {}
    for root in roots:
        try:
            top = psutil.Process(root)
            processes = [top, *top.children(recursive=True)]
        except psutil.Error:
            continue
        for process in processes:
            try:
                resident_bytes = process.memory_info().rss
            except psutil.Error:
                continue
            uses.setdefault(process.pid, ProcessUse(process.pid, root, resident_bytes))
    return tuple(uses.values())
