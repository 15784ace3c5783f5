"""The processes of the GPU tasks that this process has started, and their host memory.

A *root* is the child process of one GPU task; its dataloaders and helpers belong to it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection

import psutil

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.shared_folder import read_namespace
from prefect_gpu.scheduling.model import ProcessUse

#: Least seconds between two scans of the process table: a new helper's memory shows up to this much late.
SCAN_INTERVAL_S = 1.0

#: Least interval between scans, as a multiple of a scan's time: a shared node has thousands of processes.
SCAN_SHARE = 20

#: Most sessions to follow: a process table that changes during a scan could have a cycle.
MAX_DEPTH = 64

#: Name of the first PID namespace (`PROC_PID_INIT_INO` in the kernel), outside of containers.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


class HostProcesses:
    """Reads the processes of this host. Any of them may end at any time."""

    def pids(self) -> Collection[int]:
        """Return the ids of all processes."""
        return psutil.pids()

    def session_of(self, pid: int) -> int | None:
        """Return the session id of a process; `None`: not found. Takes 1 µs; other facts need a file of `/proc`."""
        try:
            # As an argument 0 would mean this process, as a result a session of another namespace.
            return (os.getsid(pid) if pid > 0 else None) or None
        except (OSError, OverflowError):
            return None

    def parent_of(self, pid: int) -> int | None:
        """Return the process id of a process's parent; `None`: not found."""
        try:
            return psutil.Process(pid).ppid()
        except psutil.Error:
            return None

    def resident_bytes(self, pid: int) -> int:
        """Return the resident memory of a process; 0 if it has ended, even if it is not yet reaped."""
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            return 0

    def in_initial_namespace(self) -> bool:
        """Return whether process ids here are the host's own, by which a driver lists processes."""
        return read_namespace() == INITIAL_PID_NAMESPACE


class ProcessTable:
    """Finds the processes that belong to roots, the children of GPU tasks. Used by one thread at a time."""

    def __init__(self, processes: HostProcesses | None = None, clock: Clock | None = None) -> None:
        self.processes = processes or HostProcesses()
        self._clock: Clock = clock or RealClock()
        self._members: frozenset[int] = frozenset()
        self._scan_due_s = float("-inf")

    def root_of(
        self, pid: int, roots: Collection[int], parent_of: Callable[[int], int | None] | None = None
    ) -> int | None:
        """Return the nearest root of a process: itself, its session's leader or an ancestor; `None`: none, or not seen.

        A process leaves its parent's session only to lead its own. So a session's processes descend from its leader,
        and the search goes from session to session: a few hundred parents on a host with thousands of processes. `pid`
        may be of another namespace; each of `roots` leads a session; `parent_of` replaces `HostProcesses.parent_of`.
        """
        parent_of = parent_of or self.processes.parent_of
        current: int | None = pid
        for _ in range(MAX_DEPTH):
            if current in roots:
                return current
            session = None if current is None else self.processes.session_of(current)
            if current is None or session is None:
                return None
            if session in roots:
                return session
            parent = parent_of(session)
            # A leader may have ended before other processes of its session.
            current = parent_of(current) if parent is None else parent
        return None

    def resident(self, roots: Collection[int]) -> tuple[ProcessUse, ...]:
        """Return the resident memory of all processes that belong to the roots, the roots first."""
        if not roots:
            return ()
        started_s = self._clock.now()
        if started_s >= self._scan_due_s:
            parent_of = functools.cache(self.processes.parent_of)
            found = (p for p in self.processes.pids() if self.root_of(p, roots, parent_of))
            self._members = frozenset(found)
            took_s = self._clock.now() - started_s
            self._scan_due_s = started_s + max(SCAN_INTERVAL_S, SCAN_SHARE * took_s)
        uses = []
        for pid in (*roots, *sorted(self._members.difference(roots))):
            # Asked each time: another process may have the id by now.
            root = self.root_of(pid, roots)
            used_bytes = 0 if root is None else self.processes.resident_bytes(pid)
            if used_bytes:
                uses.append(ProcessUse(pid, root, used_bytes))
        return tuple(uses)
