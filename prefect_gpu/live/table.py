"""Plain tables for a terminal, and the one of devices, which `prefect-gpu status` and the live view of a flow share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import format_bytes

#: A row of a table.
Row: TypeAlias = tuple[str, ...]

#: The heads above rows of `device_row`.
DEVICE_HEADS: Row = ("index", "device", "total", "used", "reserved", "free", "busy", "")


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    #: In use by any process; `None`: the device does not answer.
    used_bytes: int | None
    #: Reserved for our tasks, whether they have taken it or not.
    reserved_bytes: int
    #: Free for a further task, at the headroom of the reader; `None`: the device does not answer.
    free_bytes: int | None
    #: Part of the time (0 to 1) in which it computed; `None`: not known.
    busy_fraction: float | None
    #: Why it cannot be used; empty: it can.
    error: str


def device_status(state: DeviceState) -> DeviceStatus:
    """Return what is shown of a device."""
    snapshot, device = state.snapshot, state.device
    return DeviceStatus(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=None if snapshot.error else snapshot.used_bytes,
        reserved_bytes=min(
            device.total_bytes, sum(each.reserved_bytes for each in state.reservations)
        ),
        free_bytes=None if snapshot.error else max(0, state.free_bytes),
        busy_fraction=snapshot.busy_fraction,
        error=snapshot.error,
    )


def device_label(device: Device) -> str:
    """Return what tags call a device: its index, and in a cluster its node before that."""
    return device.label if device.in_cluster else str(device.index)


def device_row(device: DeviceStatus, label: str = "") -> Row:
    """Return the row of a device.

    Args:
        device: The device.
        label: What stands for its index; empty: the index does.
    """
    busy = "" if device.busy_fraction is None else f"{device.busy_fraction:.0%}"
    sizes = (device.total_bytes, device.used_bytes, device.reserved_bytes, device.free_bytes)
    return (
        label or str(device.index),
        device.name,
        *("?" if size is None else format_bytes(size) for size in sizes),
        busy,
        device.error,
    )


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are two spaces apart.

    Args:
        rows: All of one length, the heads first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
