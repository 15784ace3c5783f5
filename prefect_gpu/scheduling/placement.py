"""Which devices a request gets: now, later or never.

Pure choice among rooms. In which order requests are looked at is decided in `queue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Device, Placement, Request, Reservation
from prefect_gpu.units import GIB, MIB, format_bytes

#: Among devices that fit: the emptiest, or the fullest.
PlacementStyle = Literal["spread", "pack"]

#: A task that has a device to itself is not started with less than this: a context alone takes
#: 0.5 to 1.2 GiB (measured on an H200 with PyTorch and TensorFlow); smaller devices: a quarter.
LEAST_WHOLE_BYTES = 2 * GIB


def select_rooms(request: Request, rooms: Sequence[Room]) -> list[Room]:
    """Give the rooms that a request may use, in the author's order.

    Raises:
        PlacementError: A device that was named is not there.
    """
    if not request.devices:
        return list(rooms)
    chosen: list[Room] = []
    for name in request.devices:
        matches = [room for room in rooms if _is_named(room.device, name)]
        if len(matches) != 1:
            problem = "names no device" if not matches else "names more than one device"
            raise PlacementError(
                f"gpu:device={name} {problem} of this runner; accepted: an index from 0 to "
                f"{len(rooms) - 1}, or the beginning of a UUID",
                tuple(f"{room.device.index}: {room.device.uuid}" for room in rooms),
            )
        if matches[0] in chosen:
            raise PlacementError(
                f"gpu:device={','.join(request.devices)} names device {matches[0].device.uuid} "
                f"twice; name each device once"
            )
        chosen.append(matches[0])
    return chosen


def _is_named(device: Device, name: str) -> bool:
    if name.isdigit():
        return device.index == int(name)
    return device.uuid.lower().startswith(name.lower())


def need_bytes(request: Request, room: Room) -> int | None:
    """Bytes that a request asks of one device; `None`: all that is free.

    A percentage is of the device's total, but never more than can be promised: 100 % is everything
    that the driver and the headroom leave.
    """
    need = request.need_bytes(room.device)
    if need is not None and isinstance(request.memory, float):
        return min(need, room.capacity_bytes)
    return need


def check_possible(
    request: Request, rooms: Sequence[Room], held_by_parent: Iterable[Reservation] = ()
) -> None:
    """Make sure that a request could be placed on the empty machine.

    Args:
        request: What is asked.
        rooms: All devices of the runner.
        held_by_parent: What the GPU task holds that submitted this one from inside.

    Raises:
        PlacementError: It can never be placed; the message says what the largest device is.
    """
    eligible = select_rooms(request, rooms)
    if request.count > len(eligible):
        among = f"{len(eligible)} named" if request.devices else f"{len(eligible)} here"
        raise PlacementError(
            f"gpu:count={request.count} asks for more devices than there are ({among}); lower the "
            f"count or name other devices",
            tuple(describe_capacity(room) for room in eligible),
        )
    fitting = [room for room in eligible if (need_bytes(request, room) or 0) <= room.capacity_bytes]
    if len(fitting) < request.count:
        need = max(need_bytes(request, room) or 0 for room in eligible)
        largest = max(eligible, key=lambda room: room.capacity_bytes)
        problem = (
            f"larger than any device here (largest: {largest.device.uuid}, "
            f"{format_bytes(largest.capacity_bytes)} usable)"
            if not fitting
            else f"asked on {request.count} devices, and only {len(fitting)} could hold it"
        )
        raise PlacementError(
            f"gpu:memory={format_bytes(need)} is {problem}; lower the tag or name other devices",
            tuple(describe_capacity(room) for room in eligible),
        )
    held = {(r.host, r.device_uuid): r for r in held_by_parent}
    if not held:
        return
    beside = [room for room in fitting if _fits_beside(request, room, held.get(_key(room.device)))]
    if len(beside) < request.count:
        raise PlacementError(
            f"{request.task_name!r} was submitted from inside a GPU task and could never start "
            f"while that one holds what it holds; give the outer task a smaller gpu:memory or "
            f"another device",
            tuple(
                f"{room.device.uuid}: the outer task holds "
                f"{format_bytes(held[_key(room.device)].reserved_bytes)} of "
                f"{format_bytes(room.capacity_bytes)}"
                for room in fitting
                if _key(room.device) in held
            ),
        )


def _key(device: Device) -> tuple[str, str]:
    return device.host, device.uuid


def _fits_beside(request: Request, room: Room, held: Reservation | None) -> bool:
    if held is None:
        return True
    need = need_bytes(request, room)
    if need is None or request.exclusive or held.exclusive:
        return False
    return need + held.reserved_bytes <= room.capacity_bytes


def fits_now(request: Request, room: Room) -> bool:
    """Tell whether one device can hold a request now."""
    if room.snapshot.error:
        return False
    if any(reservation.exclusive for reservation in room.reservations):
        return False
    need = need_bytes(request, room)
    if (need is None or request.exclusive) and room.reservations:
        return False
    if need is None:
        return room.free_bytes >= min(LEAST_WHOLE_BYTES, room.capacity_bytes // 4)
    return need <= room.free_bytes


def choose_devices(
    request: Request, rooms: Sequence[Room], style: PlacementStyle = "spread"
) -> Placement | None:
    """Pick devices that can hold a request now.

    Args:
        request: What is asked; `check_possible` has passed.
        rooms: The devices that it may be placed on, read in one tick.
        style: `spread` takes the emptiest that fits: on large devices tasks slow each other down
            long before memory runs out. `pack` takes the fullest.

    Returns:
        The placement with its reservations, all devices or none, or `None`: wait and ask again.
    """
    fitting = [room for room in rooms if fits_now(request, room)]
    if len(fitting) < request.count:
        return None
    if not request.devices:
        sign = -1 if style == "spread" else 1
        fitting.sort(key=lambda room: (sign * _left(request, room), room.device.index))
    chosen = fitting[: request.count]
    budgets = tuple(_budget(request, room) for room in chosen)
    alone = request.exclusive or request.memory is None
    reservations = tuple(
        Reservation(
            request_id=request.id,
            host=room.device.host,
            device_uuid=room.device.uuid,
            reserved_bytes=budget,
            exclusive=alone,
            task_name=request.task_name,
        )
        for room, budget in zip(chosen, budgets, strict=True)
    )
    return Placement(request.id, tuple(room.device for room in chosen), budgets, reservations)


def _budget(request: Request, room: Room) -> int:
    need = need_bytes(request, room)
    return room.free_bytes if need is None else need


def _left(request: Request, room: Room) -> int:
    return room.free_bytes - (need_bytes(request, room) or 0)


def describe_capacity(room: Room) -> str:
    """Say how large a device is, for a refusal."""
    if room.snapshot.error:
        return f"{room.device.uuid}: {room.snapshot.error}"
    return f"{room.device.uuid}: {format_bytes(room.capacity_bytes)} usable"


def describe_wait(request: Request, rooms: Sequence[Room]) -> str:
    """Say what a request waits for: `6.6GiB on any of 2 devices; most free 3.1GiB`."""
    needs = {need_bytes(request, room) for room in rooms}
    amount = (
        "a device to itself"
        if None in needs
        else " or ".join(format_bytes(need) for need in sorted(n for n in needs if n is not None))
    )
    if request.exclusive and None not in needs:
        amount += " and nobody else"
    where = (
        rooms[0].device.uuid
        if len(rooms) == 1
        else f"any of {len(rooms)} devices"
        if request.count == 1
        else f"{request.count} of {len(rooms)} devices"
    )
    broken = [room for room in rooms if room.snapshot.error]
    if len(broken) == len(rooms):
        return f"{amount} on {where}; {broken[0].device.uuid}: {broken[0].snapshot.error}"
    if None in needs or request.exclusive:
        holders = sorted({r.task_name for room in rooms for r in room.reservations})
        if holders:
            named = ", ".join(holders[:3]) + (" and others" if len(holders) > 3 else "")
            return f"{amount} on {where}; running there: {named}"
    # To 64 MiB: a message that changes with every allocation of somebody else tells nothing more.
    most = max(0, max(room.free_bytes for room in rooms if not room.snapshot.error))
    return f"{amount} on {where}; most free {format_bytes(most - most % (64 * MIB))}"
