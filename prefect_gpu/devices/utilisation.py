"""How busy devices are, over the last readings rather than at one instant.

What follows from it is decided in `scheduling.board`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from prefect_gpu.scheduling.model import DeviceKey, DeviceSnapshot

#: Seconds over which the mean is taken. NVML's own figure is over 1/6 to 1 s, and a training that waits
#: for its data, or saves a checkpoint, is idle for about as long.
WINDOW_S = 3.0


class Utilisation:
    """Keeps what readings of the last `WINDOW_S` seconds said. For one thread."""

    def __init__(self) -> None:
        #: Seconds and part of the time, oldest first.
        self._seen: dict[DeviceKey, deque[tuple[float, float]]] = {}

    def smooth(self, snapshots: tuple[DeviceSnapshot, ...]) -> tuple[DeviceSnapshot, ...]:
        """Give the snapshots with the mean over the last readings as their `busy_fraction`.

        A device that does not tell begins anew when it does.
        """
        return tuple(self._smooth(snapshot) for snapshot in snapshots)

    def _smooth(self, snapshot: DeviceSnapshot) -> DeviceSnapshot:
        now = snapshot.busy_fraction
        if now is None or snapshot.error:
            self._seen.pop(snapshot.device.key, None)
            return snapshot
        seen = self._seen.setdefault(snapshot.device.key, deque())
        seen.append((snapshot.at_s, now))
        while seen[0][0] < snapshot.at_s - WINDOW_S:
            seen.popleft()
        return replace(snapshot, busy_fraction=sum(part for _, part in seen) / len(seen))
