"""Processes that a test makes up, for what the machine at hand does not have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prefect_gpu.devices.process_tree import HostProcesses


@dataclass
class FakeProcess:
    """One of them; `used_bytes` is 0 once it has ended and is not reaped."""

    parent: int
    session: int
    used_bytes: int


class FakeProcesses(HostProcesses):
    """A process table in memory. Notes whose parents are read, in `parents_read`."""

    def __init__(self) -> None:
        self.known: dict[int, FakeProcess] = {}
        self.parents_read: list[int] = []
        self.initial_namespace = True

    def add(
        self,
        pid: int,
        parent: int = 1,
        session: int | None = None,
        used_bytes: int = 1,
    ) -> None:
        """Add or change a process; by default it leads a session."""
        self.known[pid] = FakeProcess(parent, session or pid, used_bytes)

    def remove(self, pid: int) -> None:
        """End a process."""
        del self.known[pid]

    def pids(self) -> Collection[int]:
        return list(self.known)

    def session_of(self, pid: int) -> int | None:
        return self.known[pid].session if pid in self.known else None

    def parent_of(self, pid: int) -> int | None:
        self.parents_read.append(pid)
        return self.known[pid].parent if pid in self.known else None

    def resident_bytes(self, pid: int) -> int:
        return self.known[pid].used_bytes if pid in self.known else 0

    def in_initial_namespace(self) -> bool:
        return self.initial_namespace
