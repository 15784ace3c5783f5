"""What the pool of standbys asks of whoever hands out devices, so that a standby may start its framework.

The broker's side is `prefect_gpu.heating`; what the process does is `warming.heat`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Protocol

from prefect_gpu.processes.kind import Kind


class Lent(Protocol):
    """A device's memory that a hot standby has, until a task takes it over."""

    @property
    def device_uuid(self) -> str:
        """Where."""
        ...

    @property
    def environment(self) -> Mapping[str, str | None]:
        """Variables under which its framework starts there."""
        ...

    def offer(self) -> None:
        """Say that tasks may take the standby."""
        ...

    def end(self) -> None:
        """Say that its process is gone; without effect once a task has it. May be called with locks."""
        ...


class Heater(Protocol):
    """Lends devices to hot standbys. Safe to use from several threads; equal for equal devices."""

    @property
    def device_count(self) -> int:
        """Devices that tasks may be placed on."""
        ...

    def lend(
        self,
        standby_id: str,
        kind: Kind,
        pid: int,
        give_up: Callable[[], None],
        avoid: Container[str],
    ) -> Lent | None:
        """Reserve a context for a standby; may take a moment.

        Args:
            standby_id: What `LaunchSpec.standby` of the task that gets it will be.
            kind: What it was made for.
            pid: Its process.
            give_up: Ends it, when its memory is needed; called without locks.
            avoid: UUIDs of devices where its kind does not start.

        Returns:
            `None`: there is no room now.
        """
        ...
