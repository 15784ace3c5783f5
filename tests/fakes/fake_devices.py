"""Simulated devices on which other programs, leaks and failures are at hand.

A process of a test is named by its id: `attach`, `allocate` and `detach` do for it what `Attempt` does
for a child.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from prefect_gpu.clock import Clock
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, DeviceWork

#: The other program on a device: process 1 always exists and is never one of our children.
FOREIGN_PID = 1


class FakeDevices(SimulatedReader):
    """Simulated devices that do on demand what others and drivers do."""

    def __init__(self, spec: SimulatedDevices, clock: Clock | None = None) -> None:
        super().__init__(spec, clock)
        #: By UUID: bytes that no process holds, why it fails, how busy it is, what its processes computed.
        self.leaked_bytes: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.busy: dict[str, float] = {}
        self.work: dict[str, DeviceWork] = {}
        #: Why no reading can be taken; empty: they can.
        self.broken = ""

    def devices(self) -> tuple[Device, ...]:
        if self.broken:
            raise DeviceError(f"simulated driver: {self.broken}")
        return super().devices()

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        self.devices()
        return tuple(
            replace(
                snapshot,
                error=self.failed.get(snapshot.device.uuid, ""),
                busy_fraction=self.busy.get(snapshot.device.uuid),
                work=self.work.get(snapshot.device.uuid),
            )
            for snapshot in super().read(roots)
        )

    def free_bytes(self, device_uuid: str) -> int:
        return max(0, super().free_bytes(device_uuid) - self.leaked_bytes.get(device_uuid, 0))

    def attach(self, pid: int, uuids: Sequence[str], caps: Sequence[int] | None = None) -> None:
        context = self.spec.context_bytes
        budgets = None if caps is None else [cap + context for cap in caps]
        self.process_memory(uuids, budgets).attach(pid)

    def allocate(self, pid: int, uuid: str, size_bytes: int) -> None:
        ask = {"device_uuid": uuid, "size_bytes": size_bytes}
        self.attached[pid].answer("simulated_allocate", ask)

    def detach(self, pid: int) -> None:
        self.attached[pid].detach()

    def occupy(self, uuid: str, size_bytes: int) -> None:
        """Allocate memory for another program, in addition to what it has."""
        if FOREIGN_PID not in self.attached:
            self.attach(FOREIGN_PID, [device.uuid for device in self.devices()])
        self.allocate(FOREIGN_PID, uuid, size_bytes)

    def vacate(self) -> None:
        """End the other program."""
        self.detach(FOREIGN_PID)
