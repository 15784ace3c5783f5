"""Who may pass a blocked request: what is kept for it, how often it may be passed, when all drains.

A request that cannot start gets devices kept for it: those where it is expected to start first, by the
expected ends of what runs there. A later one may have such a device only if it is expected to end
before, or leaves enough memory for then (EASY backfilling, Lifka 1995, over memory instead of nodes).
Where ends are not known nothing can be kept; it may then be passed a number of times, or for a time.
After either, and when it is overdue on what was kept, nobody passes it on any device that it could use.

What is kept stays kept: it is not weighed anew at each look, so that wrong expectations delay a blocked
request by what runs on its devices, and never for ever. Pure; the order of requests is `queue`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefect_gpu.scheduling.board import Board
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.placement import could_hold, fits_empty, least_whole_bytes, need_bytes

#: Seconds after which devices are looked for again for a request for which none could be told.
LOOK_AGAIN_S = 5.0

#: Devices in each list of a board that are weighed to be kept for a request. Those with most free, and
#: those where somebody ends first, are the likely ones; a thousand would cost a look a millisecond.
WEIGHED_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Patience:
    """How far a blocked request may be passed."""

    #: Later ones that may pass it where they may delay it; 0: nobody passes, first come, first served.
    passes: int
    #: Seconds from when it was first passed, or devices were kept for it, after which nobody may.
    wait_s: float
    #: Blocked requests, the first in order, that get devices kept before they are passed at all.
    heads: int


#: What the runner uses. Makespan over its lower bound in simulations of 600 tasks of 24 shapes on 4
#: devices of 80 GiB (and of 2,000 on 16), mean of 3 seeds: first come, first served 1.99 (1.41). Where no
#: duration is known, by passes: 8 1.84 (1.30), 32 1.63 (1.19), 128 1.51 (1.15); by seconds, at 128
#: passes: 600 1.51, 3600 1.24. Half of what that gains is had at 64 and 1800 for half of the delay.
#: Where durations are known, 1.34 (1.17) with 1 head, 1.29 (1.17) with any number: a choice costs more
#: for each, and those that were passed `passes` times get devices kept all the same.
PATIENCE = Patience(passes=64, wait_s=1800.0, heads=1)

#: First come, first served: a blocked request blocks all behind it on the devices that it could use.
NO_BACKFILL = Patience(passes=0, wait_s=0.0, heads=0)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a blocked request has seen so far. The queue keeps it until it starts or goes."""

    #: How often later ones passed it that may have delayed it.
    passed: int = 0
    #: Monotonic seconds when it was first passed so or had devices kept; `None`: neither.
    since_s: float | None = None
    #: Devices that are kept for it.
    kept: tuple[DeviceKey, ...] = ()
    #: Monotonic seconds at which it is expected to start on them; `None`: none are kept.
    starts_s: float | None = None
    #: Monotonic seconds when devices were last looked for; `None`: not yet.
    looked_s: float | None = None


def is_over(standing: Standing, patience: Patience, now_s: float) -> bool:
    """Tell whether nobody may pass a blocked request any more on the devices that it could use."""
    if standing.since_s is None:
        return patience.passes == 0
    until_s = standing.since_s + patience.wait_s
    if standing.kept:
        # Nothing passes it there that delays it: time alone is no reason to stop the others.
        return now_s >= max(until_s, standing.starts_s or 0.0)
    return now_s >= until_s or standing.passed >= patience.passes


def ready_s(request: Request, room: Room, now_s: float, most: int | None) -> float | None:
    """Work out when a device is expected to have room for a request.

    Args:
        request: What is asked.
        room: The device.
        now_s: Now.
        most: Most reservations on it at a time; `None`: as many as fit.

    Returns:
        `None`: not known, or never as far as is known.
    """
    need = need_bytes(request, room)
    alone = need is None or request.exclusive
    least = least_whole_bytes(room) if need is None else need
    free = room.free_bytes
    at_s = now_s
    held = sorted(room.reservations, key=_end_s)
    for left in range(len(held), -1, -1):
        fits = free >= least and (left == 0 or not alone)
        if fits and (most is None or left < most):
            if not any(r.exclusive for r in held[len(held) - left :]):
                return at_s
        if left:
            ending = held[len(held) - left]
            if ending.ends_s is None:
                return None
            at_s = max(at_s, ending.ends_s)
            free += ending.reserved_bytes
    return None


def leaves_room(
    request: Request,
    room: Room,
    head: Request,
    starts_s: float,
    now_s: float,
    most: int | None,
) -> bool:
    """Tell whether one more on a device lets a blocked request start there when it is expected to.

    Args:
        request: Who would join, now.
        room: The device.
        head: The blocked one.
        starts_s: When it is expected to start there.
        now_s: Now.
        most: Most reservations on it at a time; `None`: as many as fit.
    """
    if request.expected_s is not None and now_s + request.expected_s <= starts_s:
        return True
    need, later = need_bytes(request, room), need_bytes(head, room)
    if need is None or later is None or request.exclusive or head.exclusive:
        return False
    free = room.free_bytes - need
    tasks = 1
    for reservation in room.reservations:
        if _end_s(reservation) <= starts_s:
            free += reservation.reserved_bytes
        else:
            tasks += 1
    return free >= later and (most is None or tasks < most)


def _end_s(reservation: Reservation) -> float:
    return math.inf if reservation.ends_s is None else reservation.ends_s


@dataclass(frozen=True, slots=True)
class _Kept:
    """A device that is kept for a blocked request."""

    rank: int
    head: Request
    starts_s: float


@dataclass(slots=True)
class _Passable:
    """A blocked request for which nothing is kept."""

    rank: int
    request: Request
    standing: Standing
    #: Devices that its author named; `None`: any.
    named: Sequence[Room] | None
    #: Numbers of the groups of devices that could hold it, or places where it is not for all of one.
    groups: frozenset[int]
    places: frozenset[int] | None


class Guard:
    """What blocked requests ask of those behind them, for one look at the queue.

    Args:
        board: The devices.
        patience: How far each may be passed.
        now_s: Monotonic seconds.
        held_by_parent: What the GPU task around this process holds.
    """

    def __init__(
        self,
        board: Board,
        patience: Patience,
        now_s: float,
        held_by_parent: Sequence[Reservation] = (),
    ) -> None:
        self._board = board
        self._patience = patience
        self._now_s = now_s
        self._held = held_by_parent
        #: Groups that drain.
        self.drained: set[int] = set()
        #: Single devices that are kept (`_Kept`), or drain (`None`).
        self.places: dict[int, _Kept | None] = {}
        self._passable: list[_Passable] = []
        self._blocked = 0
        #: What has become of blocked requests in this look, by id; those that nothing happened to are
        #: left out.
        self.standings: dict[str, Standing] = {}

    @property
    def closed(self) -> bool:
        """Whether all devices drain: nobody behind can start."""
        return len(self.drained) == len(self._board.groups)

    def allows(self, place: int, room: Room, request: Request) -> bool:
        """Tell whether a later request may have a device of `places`."""
        kept = self.places[place]
        return kept is not None and leaves_room(
            request, room, kept.head, kept.starts_s, self._now_s, self._board.most_on(room)
        )

    def block(
        self, request: Request, standing: Standing | None, named: Sequence[Room] | None
    ) -> None:
        """Take in that a request cannot start now. To be called in the order of the queue.

        Args:
            request: The blocked one.
            standing: What the queue keeps of it.
            named: The devices that its author named; `None`: any.
        """
        rank = self._blocked
        self._blocked += 1
        patience = self._patience
        standing = standing or _NEW
        if standing.kept:
            if self._is_usable(request, standing):
                if is_over(standing, patience, self._now_s):
                    self._drain(request, named)
                else:
                    self._keep(rank, request, standing)
                return
            standing = replace(standing, kept=(), starts_s=None, looked_s=None)
            self.standings[request.id] = standing
        over = is_over(standing, patience, self._now_s)
        if (over or rank < patience.heads) and patience.passes:
            if self._keep_soonest(rank, request, standing, named):
                return
        if over:
            self._drain(request, named)
        else:
            self._let_pass(rank, request, standing, named)

    def count(self, chosen: Sequence[Room]) -> None:
        """Take in that a request was placed: those before it, which are blocked, were passed."""
        if not self._passable:
            return
        places = [self._board.place_of(room.device.key) for room in chosen]
        for blocked in tuple(self._passable):
            if not any(self._delays(at, blocked) for at in places if at is not None):
                continue
            standing = self.standings.get(blocked.request.id, blocked.standing)
            standing = replace(
                standing,
                passed=standing.passed + 1,
                since_s=self._now_s if standing.since_s is None else standing.since_s,
            )
            self.standings[blocked.request.id] = blocked.standing = standing
            if is_over(standing, self._patience, self._now_s):
                self._passable.remove(blocked)
                request, named = blocked.request, blocked.named
                if not self._keep_soonest(blocked.rank, request, standing, named):
                    self._drain(request, named)

    def _delays(self, place: int, blocked: _Passable) -> bool:
        kept = self.places.get(place)
        if kept is not None and kept.rank < blocked.rank:
            # It waits for that one in any case, which is not delayed.
            return False
        if blocked.places is not None:
            return place in blocked.places
        return self._board.group_of(place).number in blocked.groups

    def _is_usable(self, request: Request, standing: Standing) -> bool:
        """Tell whether what is kept can hold the request at all, and for nobody else."""
        for key in standing.kept:
            at = self._board.place_of(key)
            if at is None or self.places.get(at) is not None:
                return False
            room = self._board.rooms[at]
            if room.snapshot.error or not fits_empty(request, room):
                return False
        return True

    def _keep(self, rank: int, request: Request, standing: Standing) -> None:
        assert standing.starts_s is not None
        kept = _Kept(rank, request, standing.starts_s)
        for key in standing.kept:
            at = self._board.place_of(key)
            assert at is not None
            # One that drains for somebody before goes on to.
            self.places.setdefault(at, kept)

    def _keep_soonest(
        self, rank: int, request: Request, standing: Standing, named: Sequence[Room] | None
    ) -> bool:
        """Keep the devices where a request is expected to start first; tell whether it is known."""
        now_s = self._now_s
        if standing.looked_s is not None and now_s < standing.looked_s + LOOK_AGAIN_S:
            return False
        found = self._find_soonest(request, named)
        if found is None:
            self.standings[request.id] = replace(standing, looked_s=now_s)
            return False
        starts_s, keys = found
        self.standings[request.id] = standing = Standing(
            passed=standing.passed,
            since_s=now_s if standing.since_s is None else standing.since_s,
            kept=keys,
            starts_s=starts_s,
            looked_s=now_s,
        )
        self._keep(rank, request, standing)
        return True

    def _find_soonest(
        self, request: Request, named: Sequence[Room] | None
    ) -> tuple[float, tuple[DeviceKey, ...]] | None:
        board = self._board
        if named is not None:
            likely = [at for room in named if (at := board.place_of(room.device.key)) is not None]
        else:
            likely = list(board.soonest(WEIGHED_DEVICES + request.count))
        times: list[tuple[float, int]] = []
        for at in likely:
            room = board.rooms[at]
            if at in self.places or room.snapshot.error or not self._could_hold(request, room):
                continue
            if board.group_of(at).number in self.drained:
                continue
            time_s = ready_s(request, room, self._now_s, board.most_on(room))
            if time_s is not None:
                times.append((time_s, at))
        if len(times) < request.count:
            return None
        times.sort()
        chosen = times[: request.count]
        return chosen[-1][0], tuple(board.rooms[at].device.key for _, at in chosen)

    def _could_hold(self, request: Request, room: Room) -> bool:
        return could_hold(request, room, self._held)

    def _let_pass(
        self, rank: int, request: Request, standing: Standing, named: Sequence[Room] | None
    ) -> None:
        groups, places = self._reach(request, named)
        self._passable.append(_Passable(rank, request, standing, named, groups, places))

    def _drain(self, request: Request, named: Sequence[Room] | None) -> None:
        """Let nobody behind have a device that a request could use."""
        groups, places = self._reach(request, named)
        self.drained |= groups
        if places is not None:
            self.places.update(dict.fromkeys(places))

    def _reach(
        self, request: Request, named: Sequence[Room] | None
    ) -> tuple[frozenset[int], frozenset[int] | None]:
        """Say which devices could hold a request: whole groups, or single places."""
        board = self._board
        if named is None and not self._held:
            return frozenset(g.number for g in board.groups if fits_empty(request, g.some)), None
        rooms = board.rooms if named is None else named
        able = (board.place_of(r.device.key) for r in rooms if self._could_hold(request, r))
        return frozenset(), frozenset(at for at in able if at is not None)


_NEW = Standing()
