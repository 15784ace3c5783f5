"""A child on simulated devices: the parent plays the driver that it would have.

How much memory there is and who gets it is in `devices.simulated`; how the child asks, in
`prefect_gpu.testing`.
"""

from __future__ import annotations

from typing import Any

from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes.messages import Asked
from prefect_gpu.scheduling.model import Placement


class SimulatedChild:
    """One process and what it holds of simulated devices.

    Args:
        reader: The devices.
        placement: Where it was placed.
        capped: Whether its allocations are held to its budget, less a context.
    """

    def __init__(self, reader: SimulatedReader, placement: Placement, capped: bool) -> None:
        self._reader = reader
        self._placement = placement
        #: Bytes that a context takes on each device.
        self.context_bytes = reader.spec.context_bytes
        #: Bytes that its allocations may take on each device; `None`: no cap.
        self.cap_bytes = (
            tuple(max(1, budget - self.context_bytes) for budget in placement.budget_bytes)
            if capped
            else None
        )
        self._pid: int | None = None

    def attach(self, pid: int) -> None:
        """Say which process it is; a second time: the one before ended before it took the call."""
        if self._pid is not None:
            self._reader.detach(self._pid)
        self._pid = pid
        uuids = tuple(device.uuid for device in self._placement.devices)
        self._reader.attach(pid, uuids, self.cap_bytes)

    def live_bytes(self) -> int | None:
        """Give what it has allocated now; `None`: there is no process yet."""
        if self._pid is None:
            return None
        return sum(c.live_bytes for c in self._reader.root_counters(self._pid).values())

    def detach(self) -> tuple[int, int]:
        """Take back all that it holds, for it is gone.

        Returns:
            The most bytes that it had allocated, and the devices on which it had.
        """
        if self._pid is None:
            return 0, 0
        left = self._reader.detach(self._pid)
        return sum(counters.peak_live_bytes for counters in left.values()), len(left)

    def answer(self, question: Asked) -> Any:
        """Do what the process asks for.

        Raises:
            ProtocolError: It asks for something unknown.
            Exception: What the device answers; the child raises it.
        """
        if self._pid is None:
            raise ProtocolError(f"{question.method} was asked for before there was a process")
        if question.method == "simulated_allocate":
            return self._reader.allocate(self._pid, **question.arguments)
        if question.method == "simulated_free":
            self._reader.free(**question.arguments)
            return None
        raise ProtocolError(f"a child asked for {question.method!r}, which is unknown")
