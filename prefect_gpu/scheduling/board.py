"""The devices that can be chosen now, in order of preference, kept up to date as promises come and go.

It picks devices for one request. Who may pick is decided in `turns`, which devices are kept for whom in
`backfill`, what one device can hold in `placement`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import DeviceKey, Placement, Request, Reservation
from prefect_gpu.scheduling.placement import (
    fits_empty,
    fits_now,
    is_open,
    least_whole_bytes,
    need_bytes,
    place,
    select_rooms,
)

#: Among devices that fit: the emptiest, or the fullest.
PlacementStyle = Literal["spread", "pack"]

#: A device that computes for more of the time than this is chosen only if no other fits: a task more
#: would slow down all that are there.
BUSY_FRACTION = 0.8

#: A device in a list: what it is sorted by, and its place.
Entry = tuple[float, int]


class Watch(Protocol):
    """Says which devices a request may not have although they have room."""

    @property
    def drained(self) -> Container[int]:
        """Numbers of groups that nobody may have."""
        ...

    @property
    def places(self) -> Container[int]:
        """Places to ask about."""
        ...

    def allows(self, place: int, room: Room, request: Request) -> bool:
        """Tell whether a request may have a device of `places`."""
        ...


class Group:
    """Devices of one model and size: what one could hold if it were empty, each could."""

    def __init__(self, number: int, some: Room) -> None:
        self.number = number
        #: How many they are.
        self.size = 0
        #: One of them.
        self.some = some
        self.least_whole_bytes = least_whole_bytes(some)
        #: Those that can take somebody, the preferred first: calm ones, and busy ones.
        self.open: tuple[list[Entry], list[Entry]] = ([], [])
        #: Of them, those that nobody of ours is on.
        self.idle: tuple[list[Entry], list[Entry]] = ([], [])
        #: Those that cannot until somebody ends, by when the first is expected to.
        self.shut: list[Entry] = []


class Board:
    """All devices of one look at the queue, or of many, if it is told of what comes back.

    A choice, a promise and a release cost little however many devices there are: each device stands in
    sorted lists of its group.

    Args:
        rooms: All devices, read in one tick.
        style: `spread` prefers the emptiest that fits: on large devices tasks slow each other down
            long before memory runs out. `pack` prefers the fullest.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        held_by_parent: What the GPU task around this process holds: it is no task of this runner.
    """

    def __init__(
        self,
        rooms: Sequence[Room],
        style: PlacementStyle = "spread",
        max_tasks: int | None = None,
        held_by_parent: Iterable[Reservation] = (),
    ) -> None:
        self.style: PlacementStyle = style
        self._max_tasks = max_tasks
        self.rooms = list(rooms)
        self._parents = {r.device_key for r in held_by_parent}
        self._sign = -1 if style == "spread" else 1
        self._places = {room.device.key: at for at, room in enumerate(self.rooms)}
        groups: dict[object, Group] = {}
        self._group_of: list[Group] = []
        for room in self.rooms:
            device = room.device
            like = device.name, device.total_bytes, room.capacity_bytes
            group = groups.get(like)
            if group is None:
                group = groups[like] = Group(len(groups), room)
            group.size += 1
            self._group_of.append(group)
        self.groups = tuple(groups.values())
        self._open = 0
        #: Places of devices that got something back; see `forget_returned`.
        self._returned: set[int] = set()
        #: Groups that could hold what asks for so much; see `groups_for`.
        self._reach: dict[object, frozenset[int]] = {}
        #: By request, until it is placed: what was asked of `places_for`, and the answer.
        self._asked: dict[str, tuple[tuple[DeviceKey, ...], tuple[int, ...] | None]] = {}
        #: By place: whether it computes so much that others are preferred.
        self._busy = [is_busy(room) for room in self.rooms]
        #: Whether any does. It stays so for as long as the board is used.
        self._some_busy = any(self._busy)
        #: By place: the lists that it stands in, and as what.
        self._filed: list[tuple[tuple[list[Entry], ...], Entry]] = []
        for at, room in enumerate(self.rooms):
            lists, entry = self._sort(at, room)
            self._filed.append((lists, entry))
            for each in lists:
                each.append(entry)
        for group in self.groups:
            for each in (*group.open, *group.idle, group.shut):
                each.sort()

    def __len__(self) -> int:
        """Count the devices that can take somebody."""
        return self._open

    def place_of(self, key: DeviceKey) -> int | None:
        """Give a device's place among `rooms`; `None`: it is not there."""
        return self._places.get(key)

    def group_of(self, at: int) -> Group:
        """Give the group of the device at a place."""
        return self._group_of[at]

    def groups_for(self, request: Request) -> frozenset[int]:
        """Give the numbers of the groups whose devices could hold a request if they were empty."""
        memory = request.memory
        # 1 byte and 100 % are equal numbers.
        key = memory if type(memory) is int else (memory, type(memory))
        reach = self._reach.get(key)
        if reach is None:
            able = (group.number for group in self.groups if fits_empty(request, group.some))
            reach = self._reach[key] = frozenset(able)
        return reach

    def could_hold_at_all(self, request: Request) -> bool:
        """Tell whether there are as many devices as a request wants that could hold it if empty."""
        reach = self.groups_for(request)
        return sum(self.groups[number].size for number in reach) >= request.count

    def places_for(self, request: Request, keys: tuple[DeviceKey, ...]) -> tuple[int, ...] | None:
        """Give the places of devices, if each works and could hold a request if it were empty.

        What is kept for a blocked request is asked about at every look. The answer is kept: neither
        promises nor releases change it.
        """
        known = self._asked.get(request.id)
        if known is None or known[0] is not keys:
            known = self._asked[request.id] = keys, self._find_places(request, keys)
        return known[1]

    def _find_places(self, request: Request, keys: tuple[DeviceKey, ...]) -> tuple[int, ...] | None:
        found: list[int] = []
        for key in keys:
            at = self._places.get(key)
            if (
                at is None
                or self.rooms[at].snapshot.error
                or not fits_empty(request, self.rooms[at])
            ):
                return None
            found.append(at)
        return tuple(found)

    def most_free_bytes(self, only_returned: bool = False) -> int:
        """Give the bytes free on the emptiest device that can take somebody; less than 0: none can.

        Args:
            only_returned: Among those that got something back since `forget_returned`.
        """
        most: float = -1
        sign = self._sign
        if only_returned:
            for at in self._returned:
                lists, entry = self._filed[at]
                if lists and lists[0] is not self._group_of[at].shut:
                    most = max(most, sign * entry[0])
            return int(most)
        at = 0 if sign < 0 else -1
        for group in self.groups:
            for order in group.open:
                if order and (free := sign * order[at][0]) > most:
                    most = free
        return int(most)

    def forget_returned(self) -> None:
        """Note that all that was given back so far is known to whoever waits."""
        self._returned.clear()

    def most_on(self, room: Room) -> int | None:
        """Give how many reservations a device may have; `None`: as many as fit."""
        if self._max_tasks is None:
            return None
        return self._max_tasks + (room.device.key in self._parents)

    def choose(
        self, request: Request, watch: Watch | None = None, among: Sequence[Room] | None = None
    ) -> list[Room] | None:
        """Pick devices that can hold a request now: calm ones first, then busy ones.

        Args:
            request: What is asked; `check_possible` has passed.
            watch: Says which devices it may not have.
            among: The devices that its author named, in his order; `None`: any.

        Returns:
            As many as it asks for, or `None`: wait and ask again.
        """
        if among is not None:
            return self._choose_named(request, watch, among)
        count = request.count
        memory = request.memory
        if count > 1 and type(memory) is int and self._count_roomy(memory) < count:
            # Most that wait for several devices: nobody is asked about the few that have room.
            return None
        found = self._prefer(request, watch, 0, count)
        if len(found) < count and self._some_busy:
            found += self._prefer(request, watch, 1, count - len(found))
        if len(found) < count:
            return None
        return [self.rooms[at] for at in found]

    def take(self, placement: Placement) -> None:
        """Book what a placement promises."""
        self._asked.pop(placement.request_id, None)
        for reservation in placement.reservations:
            at = self._places[reservation.device_key]
            self._put(at, self.rooms[at].after(reservation))

    def give_back(self, reservation: Reservation) -> None:
        """Book that a promise is over and its memory back."""
        at = self._places[reservation.device_key]
        self._put(at, self.rooms[at].without(reservation.request_id))
        self._returned.add(at)

    def soonest(self, limit: int) -> Iterator[int]:
        """Give the places of devices where there may be room first: a guess, `limit` of each list.

        Those that have most free come first, and those whose first task ends first.
        """
        for group in self.groups:
            for order in (*group.open, group.shut):
                backwards = self._sign > 0 and order is not group.shut
                for _, at in order[-limit:] if backwards else order[:limit]:
                    yield at

    def _count_roomy(self, least_bytes: int) -> int:
        """Count the devices that can take somebody and have so much free."""
        found = 0
        for group in self.groups:
            for order in group.open:
                if self._sign < 0:
                    found += bisect.bisect_right(order, (-least_bytes, len(self.rooms)))
                else:
                    found += len(order) - bisect.bisect_left(order, (least_bytes, -1))
        return found

    def _prefer(self, request: Request, watch: Watch | None, busy: int, wanted: int) -> list[int]:
        """Give the places of up to `wanted` devices that fit, the preferred first."""
        memory = request.memory
        spread = self._sign < 0
        drained: Container[int] = () if watch is None else watch.drained
        asked: Container[int] = () if watch is None else watch.places
        found: list[Entry] = []
        for group in self.groups:
            if group.number in drained:
                continue
            need = memory if type(memory) is int else need_bytes(request, group.some)
            order = (group.idle if need is None or request.exclusive else group.open)[busy]
            least = group.least_whole_bytes if need is None else need
            shift = (need or 0) * self._sign
            # A packed list begins with those that are too full.
            first = 0 if spread else bisect.bisect_left(order, (least, -1))
            left = wanted
            for position in range(first, len(order)):
                key, at = order[position]
                if spread and -key < least:
                    break
                if at in asked and watch is not None:
                    if not watch.allows(at, self.rooms[at], request):
                        continue
                found.append((key - shift, at))
                left -= 1
                if not left:
                    break
        if len(self.groups) > 1:
            found.sort()
        return [at for _, at in found[:wanted]]

    def _choose_named(
        self, request: Request, watch: Watch | None, among: Sequence[Room]
    ) -> list[Room] | None:
        fitting: list[tuple[bool, int, Room]] = []
        for position, named in enumerate(among):
            at = self._places[named.device.key]
            room = self.rooms[at]
            if not fits_now(request, room) or self._is_full(room):
                continue
            if watch is not None:
                if self._group_of[at].number in watch.drained:
                    continue
                if at in watch.places and not watch.allows(at, room, request):
                    continue
            fitting.append((is_busy(room), position, room))
        if len(fitting) < request.count:
            return None
        chosen = sorted(fitting, key=lambda one: one[:2])[: request.count]
        return [room for _, _, room in sorted(chosen, key=lambda one: one[1])]

    def _put(self, at: int, room: Room) -> None:
        lists, entry = self._filed[at]
        for each in lists:
            del each[bisect.bisect_left(each, entry)]
        if lists and lists[0] is not self._group_of[at].shut:
            self._open -= 1
        self.rooms[at] = room
        self._filed[at] = lists, entry = self._sort(at, room)
        for each in lists:
            bisect.insort(each, entry)

    def _sort(self, at: int, room: Room) -> tuple[tuple[list[Entry], ...], Entry]:
        """Say in which lists a device stands and as what."""
        if room.snapshot.error:
            return (), (0, at)
        group = self._group_of[at]
        if not is_open(room) or (self._max_tasks is not None and self._is_full(room)):
            first_s = min(
                (r.ends_s for r in room.reservations if r.ends_s is not None), default=math.inf
            )
            return (group.shut,), (first_s, at)
        self._open += 1
        busy = self._busy[at]
        entry = (self._sign * room.free_bytes, at)
        if room.reservations:
            return (group.open[busy],), entry
        return (group.open[busy], group.idle[busy]), entry

    def _is_full(self, room: Room) -> bool:
        most = self.most_on(room)
        return most is not None and len(room.reservations) >= most


def choose_devices(
    request: Request, rooms: Sequence[Room], style: PlacementStyle = "spread"
) -> Placement | None:
    """Pick devices for one request alone; see `Board.choose`.

    Args:
        request: What is asked; `check_possible` has passed.
        rooms: All devices, read in one tick.
        style: `spread` or `pack`.
    """
    among = select_rooms(request, rooms) if request.devices else None
    chosen = Board(rooms, style).choose(request, among=among)
    return None if chosen is None else place(request, chosen)


def is_busy(room: Room) -> bool:
    """Tell whether a device computes so much that another task is better placed elsewhere."""
    busy = room.snapshot.busy_fraction
    return busy is not None and busy > BUSY_FRACTION
