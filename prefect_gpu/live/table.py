"""Plain text tables, and the table of devices in `prefect-gpu status` and in the live view of a flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import format_bytes, format_percent, text_of

#: A row of a table.
Row: TypeAlias = tuple[str, ...]

#: Heads of the columns of `device_row`.
DEVICE_HEADS: Row = ("index", "device", "total", "used", "reserved", "free", "busy", "")


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Values of one device for a table."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    #: Bytes in use by all processes; `None`: the device does not answer.
    used_bytes: int | None
    #: Bytes reserved for this package's tasks, used or not.
    reserved_bytes: int
    #: Bytes free for new reservations, headroom subtracted; `None`: the device does not answer.
    free_bytes: int | None
    #: Fraction of time in which the device computed; `None`: not known.
    busy_fraction: float | None
    #: Why the device cannot be used; empty: it can.
    error: str


def device_status(state: DeviceState) -> DeviceStatus:
    """Return the values of a device for a table."""
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
    """Return a device's name as in `gpu:device`: the index, in a cluster `NODE:INDEX`."""
    return device.label if device.in_cluster else str(device.index)


def device_row(device: DeviceStatus, label: str = "") -> Row:
    """Return the table row of a device. A `label` that is not empty replaces the index."""
    sizes = (device.total_bytes, device.used_bytes, device.reserved_bytes, device.free_bytes)
    return (
        label or str(device.index),
        device.name,
        *(text_of(size, format_bytes, "?") for size in sizes),
        text_of(device.busy_fraction, format_percent),
        device.error,
    )


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: rows of equal length, the column heads first. No rows: no lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
