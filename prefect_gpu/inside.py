"""What a task calls from inside: what it was given.

It shows facts; it neither measures nor changes anything. The child fills it in before the body runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the GPU task around the caller was given."""

    #: Bytes on each of its devices, the context included (the smallest, where they differ).
    budget_bytes: int
    #: Bytes that a framework's allocator may take; `None`: no cap is set.
    cap_bytes: int | None
    #: From 1: every process started for this task run, for whatever reason.
    attempt: int
    #: In the task's order: the framework's device 0 is the first.
    device_uuids: tuple[str, ...]
    #: Frameworks that adapters were applied for, as named by tags or found in the task.
    frameworks: tuple[str, ...]
    #: Nobody else of ours is on its devices.
    exclusive: bool = False


_current: Allocation | None = None


def current_allocation() -> Allocation | None:
    """Give what the GPU task around the caller was given; `None` outside one."""
    return _current


def set_current_allocation(allocation: Allocation | None) -> None:
    """Say what this process was given. For the child's start only."""
    global _current
    _current = allocation
