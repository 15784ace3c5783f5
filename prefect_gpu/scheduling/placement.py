"""Which devices a request gets: now, later or never.

Pure choice among rooms. In which order requests are looked at is decided in `queue`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import (
    DeviceKey,
    ModelBudgets,
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
    fitting = [room for room in eligible if _fits_empty(request, room)]
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
    if not _fits_empty(request, room):
        return False
    key = room.device.key
    return all(_fits_beside(request, room, r) for r in held_by_parent if r.device_key == key)


def _fits_empty(request: Request, room: Room) -> bool:
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
    if not _is_open(room):
        return False
    need = need_bytes(request, room)
    if (need is None or request.exclusive) and room.reservations:
        return False
    if need is None:
        return room.free_bytes >= min(LEAST_WHOLE_BYTES, room.capacity_bytes // 4)
    return need <= room.free_bytes


def _is_open(room: Room) -> bool:
    """Tell whether a device can take anything: it works, and nobody has it to himself."""
    if room.snapshot.error:
        return False
    return not any(reservation.exclusive for reservation in room.reservations)


class Choices:
    """The devices that can still be chosen in one pass over the queue, the preferred first.

    It changes as the pass goes on: `take` books a placement, `block` withholds devices for a request
    that waits for them. Sorted once, so that a choice costs little however many devices there are.

    Args:
        rooms: All devices, read in one tick.
        style: `spread` prefers the emptiest that fits: on large devices tasks slow each other down
            long before memory runs out. `pack` prefers the fullest.
    """

    def __init__(self, rooms: Sequence[Room], style: PlacementStyle = "spread") -> None:
        self._sign = -1 if style == "spread" else 1
        self._places = {room.device.key: place for place, room in enumerate(rooms)}
        #: By place; `None`: cannot be chosen any more.
        self._rooms: list[Room | None] = [room if _is_open(room) else None for room in rooms]
        #: Free bytes (negative for `spread`) and place of each that can be chosen.
        self._order = sorted(
            (self._sign * room.free_bytes, place)
            for place, room in enumerate(self._rooms)
            if room is not None
        )
        #: All devices are of one size: what one could hold, each could.
        self.alike = len({(room.device.total_bytes, room.capacity_bytes) for room in rooms}) == 1

    def __len__(self) -> int:
        return len(self._order)

    def choose(self, request: Request, among: Collection[Room] | None = None) -> Placement | None:
        """Pick devices that can hold a request now.

        Args:
            request: What is asked; `check_possible` has passed.
            among: The devices that its author named, in his order; `None`: any.

        Returns:
            The placement with its reservations, all devices or none, or `None`: wait and ask again.
        """
        chosen: list[Room] = []
        for room in self._preferred(request) if among is None else self._now(among):
            if fits_now(request, room):
                chosen.append(room)
                if len(chosen) == request.count:
                    return _place(request, chosen)
        return None

    def take(self, placement: Placement) -> None:
        """Book what a placement promises."""
        for reservation in placement.reservations:
            place = self._places[reservation.device_key]
            room = self._rooms[place]
            assert room is not None
            self._remove(place, room)
            room = room.after(reservation)
            if _is_open(room):
                self._rooms[place] = room
                bisect.insort(self._order, (self._sign * room.free_bytes, place))

    def block(self, rooms: Iterable[Room]) -> None:
        """Withhold devices from all that ask later in this pass."""
        for room in rooms:
            place = self._places[room.device.key]
            current = self._rooms[place]
            if current is not None:
                self._remove(place, current)

    def _remove(self, place: int, room: Room) -> None:
        del self._order[bisect.bisect_left(self._order, (self._sign * room.free_bytes, place))]
        self._rooms[place] = None

    def _now(self, rooms: Iterable[Room]) -> Iterator[Room]:
        """Give the rooms as this pass has left them."""
        for room in rooms:
            current = self._rooms[self._places[room.device.key]]
            if current is not None:
                yield current

    def _preferred(self, request: Request) -> Iterator[Room]:
        """Give the rooms that may hold a request, the preferred first."""
        by_model = isinstance(request.memory, ModelBudgets)
        if by_model or (isinstance(request.memory, float) and not self.alike):
            rooms = [room for room in self._rooms if room is not None]
            yield from sorted(rooms, key=lambda room: self._sign * _left(request, room))
            return
        first, last = 0, len(self._order)
        if request.memory is not None and self._order:
            some = self._rooms[self._order[0][1]]
            assert some is not None
            need = need_bytes(request, some) or 0
            if self._sign < 0:
                last = bisect.bisect_right(self._order, (-need, len(self._rooms)))
            else:
                first = bisect.bisect_left(self._order, (need, -1))
        for position in range(first, last):
            room = self._rooms[self._order[position][1]]
            assert room is not None
            yield room


def _place(request: Request, rooms: Sequence[Room]) -> Placement:
    budgets = tuple(_budget(request, room) for room in rooms)
    reservations = tuple(
        Reservation(
            request_id=request.id,
            host=room.device.host,
            device_uuid=room.device.uuid,
            reserved_bytes=budget,
            exclusive=request.exclusive or need_bytes(request, room) is None,
            task_name=request.task_name,
        )
        for room, budget in zip(rooms, budgets, strict=True)
    )
    return Placement(request.id, tuple(room.device for room in rooms), budgets, reservations)


def choose_devices(
    request: Request, rooms: Sequence[Room], style: PlacementStyle = "spread"
) -> Placement | None:
    """Pick devices for one request alone; see `Choices.choose`.

    Args:
        request: What is asked; `check_possible` has passed.
        rooms: The devices that it may be placed on, read in one tick; in the author's order where
            he named devices.
        style: `spread` or `pack`.
    """
    return Choices(rooms, style).choose(request, rooms if request.devices else None)


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
    alone = None in needs or request.exclusive
    if alone or not any(_is_open(room) for room in rooms):
        holders = sorted({r.task_name for room in rooms for r in room.reservations})
        if holders:
            named = ", ".join(holders[:3]) + (" and others" if len(holders) > 3 else "")
            there = "running there" if alone else "running there alone"
            return f"{amount} on {where}; {there}: {named}"
    # To 64 MiB: a message that changes with every allocation of somebody else tells nothing more.
    most = max(0, max(room.free_bytes for room in rooms if not room.snapshot.error))
    return f"{amount} on {where}; most free {format_bytes(most - most % (64 * MIB))}"
