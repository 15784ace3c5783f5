"""A process that takes more of a device than its budget, as readings of the device show it.

What each framework's own allocator refuses is in `frameworks`; what is done about it, in `attempt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.scheduling.model import Placement


@dataclass(frozen=True, slots=True)
class Overshoot:
    """A reading above the budget, on one device."""

    seen_bytes: int
    budget_bytes: int


class BudgetWatch:
    """Looks whether a process as a whole keeps to its budget, and tells once.

    Args:
        placement: Where it runs, and its budget on each device.
        states_memory: Its tags say how much it may take.
    """

    def __init__(self, placement: Placement, states_memory: bool) -> None:
        self._budget_bytes = placement.budget_bytes
        # All of a device that nobody else of ours is on: there is nothing to keep to.
        alone = any(reservation.exclusive for reservation in placement.reservations)
        self._over = alone and not states_memory

    def look(self, sizes_bytes: Sequence[int]) -> Overshoot | None:
        """Take a reading; give what it shows the first time that it is too much.

        Args:
            sizes_bytes: What the process holds of each device, in the placement's order.
        """
        if self._over:
            return None
        for size, budget in zip(sizes_bytes, self._budget_bytes, strict=True):
            if size > budget + OVERSHOOT_BYTES:
                self._over = True
                return Overshoot(size, budget)
        return None
