"""Hot standbys: on which device the next one goes, who takes one, and which must go for whom.

A hot standby has its context on one device ahead of its task. It never keeps a task from a device:
placement counts what it holds as free (`memory.survey`), and here is said which of them must end before
what was decided may start. Pure; how one is made and ended is `processes.standby`'s, and how many
standbys there are `standbys`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefect_gpu.scheduling.board import PlacementStyle, is_busy
from prefect_gpu.scheduling.memory import Room, StandbyHold
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request
from prefect_gpu.scheduling.placement import could_hold, is_open

#: Hot standbys of one kind on a device. Each holds a context (0.5 to 0.7 GiB) and saves a task 0.2 s;
#: after two in a row the next is hot again while the second's task still reads its data.
MOST_ON_DEVICE = 2


@dataclass(frozen=True, slots=True)
class Settled:
    """What becomes of placements that were decided as if no hot standby were there."""

    #: Those that can be made now, with the hot standby that each takes (empty: none).
    made: tuple[tuple[Request, Placement, str], ...]
    #: Hot standbys that must end first for the others, which are decided anew once they are gone.
    given_up: tuple[str, ...]


def settle(
    placements: Iterable[tuple[Request, Placement]],
    rooms: Iterable[Room],
    offers: Mapping[str, Hashable],
    kinds: Mapping[str, Hashable],
) -> Settled:
    """Say which placements can be made beside the hot standbys, and which of these must go.

    Args:
        placements: As decided, in order, on devices counted as if no hot standby were there.
        rooms: All devices before these placements.
        offers: Hot standbys that a task of their kind may take, and the kind, in order of preference.
        kinds: By request id: the kind of standby that suits it. One that is missing takes none.
    """
    free: dict[DeviceKey, int] = {}
    there: dict[DeviceKey, dict[str, StandbyHold]] = {}
    for room in rooms:
        free[room.device.key] = room.free_bytes
        there[room.device.key] = {hold.request_id: hold for hold in room.standbys}
    made: list[tuple[Request, Placement, str]] = []
    given_up: dict[str, None] = {}
    for request, placement in placements:
        taken = _find(placement, there, offers, kinds.get(request.id))
        must_go: list[str] = []
        for reservation in placement.reservations:
            key = reservation.device_key
            # Its context is part of the budget of the task that takes it.
            there[key].pop(taken, None)
            free[key] -= reservation.reserved_bytes
            # Alone means alone, whatever they hold.
            left = -1 if reservation.exclusive else free[key]
            must_go += _too_many(tuple(there[key].values()), left, given_up)
        if must_go:
            given_up.update(dict.fromkeys(must_go))
        else:
            made.append((request, placement, taken))
    return Settled(tuple(made), tuple(given_up))


def in_the_way(request: Request, rooms: Iterable[Room]) -> tuple[str, ...]:
    """Name the hot standbys on devices that a request which found none could have to itself.

    A driver takes some memory for each process that it lists, 9 MiB on an H200, which is nobody's and
    comes back with the process. Who needs a device to the last byte would wait for it for ever.

    Args:
        request: What is asked; it waits.
        rooms: The devices that it may use.
    """
    alone = [r for r in rooms if not r.reservations and is_open(r) and could_hold(request, r)]
    if len(alone) < request.count:
        return ()
    # Where the fewest must go.
    alone.sort(key=lambda room: len(room.standbys))
    return tuple(hold.request_id for room in alone[: request.count] for hold in room.standbys)


def _find(
    placement: Placement,
    there: Mapping[DeviceKey, Mapping[str, StandbyHold]],
    offers: Mapping[str, Hashable],
    kind: Hashable,
) -> str:
    if kind is None or len(placement.devices) != 1:
        return ""
    here = there[placement.devices[0].key]
    return next((i for i, offered in offers.items() if offered == kind and i in here), "")


def _too_many(
    standbys: Sequence[StandbyHold], left_bytes: int, given_up: Container[str]
) -> list[str]:
    """Name those that must go so that the rest fits; what goes already holds its memory still."""
    held = sum(hold.held_bytes for hold in standbys)
    going: list[str] = []
    # Those that go anyway, first.
    for hold in sorted(standbys, key=lambda hold: hold.request_id not in given_up):
        if held <= left_bytes:
            break
        going.append(hold.request_id)
        held -= hold.held_bytes
    return going


def choose_device(
    rooms: Iterable[Room],
    style: PlacementStyle,
    context_of: Callable[[Device], int],
    count_on: Callable[[DeviceKey], int],
    avoid: Container[str] = (),
) -> Room | None:
    """Pick the device for one more hot standby: where the next task is likely to be placed.

    Args:
        rooms: All devices.
        style: As tasks are placed.
        context_of: Gives the bytes that it will hold of a device.
        count_on: Gives how many of its kind are there.
        avoid: UUIDs of devices where it does not work.

    Returns:
        `None`: there is no room for one. Nobody is ever ended for it.
    """
    sign = -1 if style == "spread" else 1
    fitting = [
        room
        for room in rooms
        if is_open(room)
        and room.device.uuid not in avoid
        and count_on(room.device.key) < MOST_ON_DEVICE
        and room.beside_bytes >= context_of(room.device)
    ]

    def rank(room: Room) -> tuple[int, bool, int, int]:
        # One on each device before a second on any.
        return count_on(room.device.key), is_busy(room), sign * room.free_bytes, room.device.index

    return min(fitting, key=rank, default=None)
