"""What a request asks of a device, whether it can have it now, later or never, and what to say of it.

Pure, over single rooms. Which of many devices is chosen is in `board`, whose turn it is in `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKey,
    Placement,
    Request,
    Reservation,
)
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
    chosen: dict[DeviceKey, Room] = {}
    for name in request.devices:
        matches = _find_named(name, rooms)
        if len(matches) != 1:
            problem = "names no device" if not matches else "names more than one device"
            raise PlacementError(
                f"gpu:device={name} {problem} of this runner; accepted: an index from 0 to "
                f"{len(rooms) - 1}, or the beginning of a UUID",
                tuple(f"{room.device.index}: {room.device.uuid}" for room in rooms),
            )
        (match,) = matches
        if match.device.key in chosen:
            raise PlacementError(
                f"gpu:device={','.join(request.devices)} names device {match.device.uuid} "
                f"twice; name each device once"
            )
        chosen[match.device.key] = match
    return list(chosen.values())


def _find_named(name: str, rooms: Sequence[Room]) -> list[Room]:
    if name.isdigit():
        index = int(name)
        if index < len(rooms) and rooms[index].device.index == index:
            return [rooms[index]]
        return [room for room in rooms if room.device.index == index]
    name = name.lower()
    found = [room for room in rooms if room.device.uuid.lower().startswith(name)]
    # SIM-1 is all of one name and the beginning of SIM-10.
    return [room for room in found if room.device.uuid.lower() == name] or found


def need_bytes(request: Request, room: Room) -> int | None:
    """Bytes that a request asks of one device; `None`: all that is free.

    A percentage is of the device's total, but never more than can be promised: 100 % is everything
    that the driver and the headroom leave.
    """
    if type(request.memory) is int:
        # As nearly all ask, and a look asks for each of them.
        return request.memory
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
    fitting = [room for room in eligible if fits_empty(request, room)]
    if len(fitting) < request.count:
        if request.memory is None and not fitting:
            raise PlacementError(
                f"no device here has memory left to give beside its headroom, so "
                f"{request.task_name!r} can never start; lower the headroom or name other devices",
                tuple(describe_capacity(room) for room in eligible),
            )
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
    held = {reservation.device_key: reservation for reservation in held_by_parent}
    if not held:
        return
    beside = [room for room in fitting if _fits_beside(request, room, held.get(room.device.key))]
    if len(beside) < request.count:
        raise PlacementError(
            f"{request.task_name!r} was submitted from inside a GPU task and could never start "
            f"while that one holds what it holds; give the outer task a smaller gpu:memory or "
            f"another device",
            tuple(
                f"{room.device.uuid}: the outer task holds "
                f"{format_bytes(held[room.device.key].reserved_bytes)} of "
                f"{format_bytes(room.capacity_bytes)}"
                for room in fitting
                if room.device.key in held
            ),
        )


def could_hold(request: Request, room: Room, held_by_parent: Iterable[Reservation] = ()) -> bool:
    """Tell whether a device could hold a request once all that runs there, but a parent, is gone."""
    if not fits_empty(request, room):
        return False
    key = room.device.key
    return all(_fits_beside(request, room, r) for r in held_by_parent if r.device_key == key)


def fits_empty(request: Request, room: Room) -> bool:
    """Tell whether a device could hold a request if nobody else were there."""
    return 0 < room.capacity_bytes >= (need_bytes(request, room) or 0)


def _fits_beside(request: Request, room: Room, held: Reservation | None) -> bool:
    if held is None:
        return True
    need = need_bytes(request, room)
    if need is None or request.exclusive or held.exclusive:
        return False
    return need + held.reserved_bytes <= room.capacity_bytes


def fits_now(request: Request, room: Room) -> bool:
    """Tell whether one device can hold a request now."""
    if not is_open(room):
        return False
    need = need_bytes(request, room)
    if (need is None or request.exclusive) and room.reservations:
        return False
    return room.free_bytes >= (least_whole_bytes(room) if need is None else need)


def least_whole_bytes(room: Room) -> int:
    """Bytes free below which a device is not given to a task that asks for all of it."""
    return min(LEAST_WHOLE_BYTES, room.capacity_bytes // 4)


def is_open(room: Room) -> bool:
    """Tell whether a device can take anything: it works, and nobody has it to himself."""
    if room.snapshot.error:
        return False
    for reservation in room.reservations:  # noqa: SIM110 - `any` takes twice as long, at every step
        if reservation.exclusive:
            return False
    return True


def place(request: Request, rooms: Sequence[Room], now_s: float = 0.0) -> Placement:
    """Promise rooms to a request.

    Args:
        request: What is asked.
        rooms: The devices that it gets, in order; each can hold it now.
        now_s: Monotonic seconds.
    """
    ends_s = None if request.expected_s is None else now_s + request.expected_s
    devices: list[Device] = []
    budgets: list[int] = []
    reservations: list[Reservation] = []
    for room in rooms:
        need = need_bytes(request, room)
        device = room.snapshot.device
        budget = room.free_bytes if need is None else need
        devices.append(device)
        budgets.append(budget)
        reservations.append(
            Reservation(
                request.id,
                device.host,
                device.uuid,
                budget,
                request.exclusive or need is None,
                request.task_name,
                ends_s,
            )
        )
    return Placement(request.id, tuple(devices), tuple(budgets), tuple(reservations))


def describe_capacity(room: Room) -> str:
    """Say how large a device is, for a refusal."""
    if room.snapshot.error:
        return f"{room.device.uuid}: {room.snapshot.error}"
    return f"{room.device.uuid}: {format_bytes(room.capacity_bytes)} usable"


def describe_wait(request: Request, rooms: Sequence[Room], max_tasks: int | None = None) -> str:
    """Say what a request waits for: `6.6GiB on any of 2 devices; most free 3.1GiB`.

    Args:
        request: What is asked.
        rooms: The devices that it may use.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
    """
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
    if max_tasks is not None and all(
        len(room.reservations) >= max_tasks for room in rooms if not room.snapshot.error
    ):
        tasks = "a task runs" if max_tasks == 1 else f"{max_tasks} tasks run"
        return f"{amount} on {where}; {tasks} on each, and max_tasks_per_device is {max_tasks}"
    alone = None in needs or request.exclusive
    if alone or not any(is_open(room) for room in rooms):
        holders = sorted({r.task_name for room in rooms for r in room.reservations})
        if holders:
            named = ", ".join(holders[:3]) + (" and others" if len(holders) > 3 else "")
            there = "running there" if alone else "running there alone"
            return f"{amount} on {where}; {there}: {named}"
    # To 64 MiB: a message that changes with every allocation of somebody else tells nothing more.
    most = max(0, max(room.free_bytes for room in rooms if not room.snapshot.error))
    return f"{amount} on {where}; most free {format_bytes(most - most % (64 * MIB))}"
