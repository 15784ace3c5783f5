"""Lends a broker's devices to hot standbys: `processes.heater` on this machine.

How large a context will be it asks `contexts`; the promise is the broker's to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from prefect_gpu.broker import Broker
from prefect_gpu.contexts import ContextMeter
from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.processes.kind import Kind
from prefect_gpu.scheduling.model import Device
from prefect_gpu.ticket import Loan


@dataclass(frozen=True)
class BrokerHeater:
    """Lends the devices of one broker.

    Args:
        _broker: Hands them out.
        _meter: Knows how large contexts are.
    """

    _broker: Broker
    _meter: ContextMeter

    @property
    def device_count(self) -> int:
        """Devices that tasks may be placed on."""
        return len(self._broker.devices)

    def lend(
        self,
        standby_id: str,
        kind: Kind,
        pid: int,
        give_up: Callable[[], None],
        avoid: Container[str],
    ) -> BrokerLent | None:
        """See `processes.heater.Heater.lend`."""
        known: dict[str, int] = {}

        def context_of(device: Device) -> int:
            # A look at the devices asks for each, and what is known is in a file.
            if device.uuid not in known:
                known[device.uuid] = self._context_bytes(kind.hot, device)
            return known[device.uuid]

        loan = self._broker.lending.lend(standby_id, kind, pid, context_of, give_up, avoid)
        if loan is None:
            return None
        return BrokerLent(self._broker, loan, pid)

    def _context_bytes(self, framework: str, device: Device) -> int:
        reader = self._broker.reader
        if isinstance(reader, SimulatedReader):
            return reader.spec.context_bytes
        return self._meter.known(device)[framework]


@dataclass(frozen=True)
class BrokerLent:
    """See `processes.heater.Lent`."""

    _broker: Broker
    _loan: Loan
    _pid: int

    @property
    def device_uuid(self) -> str:
        """Where."""
        return self._loan.device.uuid

    @property
    def environment(self) -> Mapping[str, str | None]:
        """The variables that say so, as a task's process has them."""
        if self._loan.device.kind != "nvml":
            return {}
        return {"CUDA_VISIBLE_DEVICES": self.device_uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def offer(self) -> None:
        """Let tasks take it."""
        if isinstance(self._broker.reader, SimulatedReader):
            self._broker.reader.attach(self._pid, (self.device_uuid,))
        self._broker.lending.offer(self._loan)

    def end(self) -> None:
        """Have its memory waited for, unless it is a task's by now."""
        if isinstance(self._broker.reader, SimulatedReader) and self._loan.touched:
            self._broker.reader.detach(self._pid)
        self._broker.lending.end(self._loan)
