"""Devices, their states and requests for the tests of scheduling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from prefect_gpu.scheduling.memory import DeviceState, device_state
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, ProcessUse, Request, Reservation
from prefect_gpu.scheduling.scheduling_pass import HostState
from prefect_gpu.units import GIB

HOST = "node"
_numbers = itertools.count()


def device(index: int = 0, gib: float = 24, host: str = HOST) -> Device:
    return Device(f"SIM-{index}", index, "simulated", int(gib * GIB), "simulated", host)


def snapshot(
    index: int = 0,
    gib: float = 24,
    used_gib: float = 0,
    reserved_gib: float = 0,
    processes: tuple[ProcessUse, ...] = (),
    error: str = "",
    **of_device: Any,
) -> DeviceSnapshot:
    """A device of which `used_gib` are in use."""
    free_bytes = int((gib - reserved_gib - used_gib) * GIB)
    return DeviceSnapshot(
        device(index, gib, **of_device), 0.0, free_bytes, int(reserved_gib * GIB), processes, error
    )


def reserved(
    index: int = 0, gib: float = 1, by: str = "other", exclusive: bool = False, host: str = HOST
) -> Reservation:
    return Reservation(by, host, f"SIM-{index}", int(gib * GIB), exclusive, f"task {by}")


def state(
    index: int = 0,
    gib: float = 24,
    held: Iterable[Reservation] = (),
    measured: Mapping[str, int] | None = None,
    headroom_gib: float = 0,
    **of_snapshot: Any,
) -> DeviceState:
    taken = snapshot(index, gib, **of_snapshot)
    return device_state(taken, tuple(held), measured or {}, int(headroom_gib * GIB))


def request(
    gib: float | None = None, share: float | None = None, name: str = "", **others: Any
) -> Request:
    """Ask for GiB, or a share of the device, or (neither) a device to itself."""
    number = next(_numbers)
    memory = share if gib is None else int(gib * GIB)
    others.setdefault("sequence", number)
    return Request(
        name or f"r{number}", name or f"task {number}", submitted_s=0.0, memory=memory, **others
    )


def host(available_gib: float = 64, processes: int = 0, max_processes: int = 99) -> HostState:
    return HostState(int(available_gib * GIB), 0, processes, max_processes)
