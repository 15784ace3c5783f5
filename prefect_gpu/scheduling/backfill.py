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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
#: duration is known, by passes within 600 s: 8 1.84 (1.30), 32 1.63 (1.19), 128 1.51 (1.15); 128 within
#: 3600 s 1.24 (1.13); 64 within 1800 s, which is chosen since a blocked task is delayed half as long,
#: 1.39 (1.15). Where durations are known 1.25 (1.13) with these, and more heads did not do better than
#: the seeds differ.
PATIENCE = Patience(passes=64, wait_s=1800.0, heads=1)

#: First come, first served: a blocked request blocks all behind it on the devices that it could use.
NO_BACKFILL = Patience(passes=0, wait_s=0.0, heads=0)


class Standing(NamedTuple):
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
    held: Sequence[Reservation] = room.reservations
    if len(held) > 1:
        held = sorted(held, key=_end_s)
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


def spare_bytes(room: Room, head: Request, starts_s: float, most: int | None) -> int:
    """Work out what one more may have of a device who is still there when a blocked request starts.

    Args:
        room: The device.
        head: The blocked one.
        starts_s: When it is expected to start there.
        most: Most reservations on it at a time; `None`: as many as fit.

    Returns:
        Bytes; less than 0: not even a request for none.
    """
    later = need_bytes(head, room)
    if later is None or head.exclusive:
        return -1
    free = room.free_bytes
    tasks = 1
    for reservation in room.reservations:
        if reservation.ends_s is not None and reservation.ends_s <= starts_s:
            free += reservation.reserved_bytes
        else:
            tasks += 1
    return free - later if most is None or tasks < most else -1


def _end_s(reservation: Reservation) -> float:
    return math.inf if reservation.ends_s is None else reservation.ends_s


class _Kept(NamedTuple):
    """A device that is kept for a blocked request."""

    rank: int
    head: Request
    starts_s: float


#: A blocked request and the devices that its author named; `None`: any.
Blocked: TypeAlias = tuple[Request, Sequence[Room] | None]

#: A blocked request for which nothing is kept: rank, request, what it has seen, the devices that its
#: author named (`None`: any). A plain tuple, since a look makes about ten of them.
_Passable: TypeAlias = tuple[int, Request, Standing, Sequence[Room] | None]


class Guard:
    """What blocked requests ask of those behind them, for one look at the queue.

    Args:
        board: The devices.
        standings: What blocked requests have seen so far, by id.
        patience: How far each may be passed.
        now_s: Monotonic seconds.
        held_by_parent: What the GPU task around this process holds.
    """

    def __init__(
        self,
        board: Board,
        standings: Mapping[str, Standing],
        patience: Patience,
        now_s: float,
        held_by_parent: Sequence[Reservation] = (),
    ) -> None:
        self._board = board
        self._before = standings
        self._patience = patience
        self._now_s = now_s
        self._held = held_by_parent
        #: Groups that drain.
        self.drained: set[int] = set()
        #: Whether devices that were kept for somebody are not any more, though he has not started.
        self.lets_go = False
        #: Single devices that are kept (`_Kept`), or drain (`None`).
        self.places: dict[int, _Kept | None] = {}
        #: Of kept ones that were asked about: the room, and its `spare_bytes`.
        self._spare: dict[int, tuple[Room, int]] = {}
        self._passable: list[_Passable] = []
        self._blocked = 0
        self._standings: dict[str, Standing] = {}

    @property
    def drains(self) -> bool:
        """Whether some device drains for somebody."""
        return bool(self.drained) or None in self.places.values()

    def finish(self) -> dict[str, Standing]:
        """Give what has become of blocked requests in this look, by id.

        Those that nothing happened to are left out.
        """
        return self._standings

    def allows(self, place: int, room: Room, request: Request) -> bool:
        """Tell whether a later request may have a device of `places`."""
        kept = self.places[place]
        if kept is None:
            return False
        if request.expected_s is not None and self._now_s + request.expected_s <= kept.starts_s:
            return True
        need = need_bytes(request, room)
        if need is None or request.exclusive:
            return False
        # It would still be there. What can be spared does not depend on who asks.
        known = self._spare.get(place)
        if known is None or known[0] is not room:
            spare = spare_bytes(room, kept.head, kept.starts_s, self._board.most_on(room))
            self._spare[place] = known = room, spare
        return need <= known[1]

    def block(self, requests: Iterable[Blocked]) -> bool:
        """Take in that requests cannot start now. To be called in the order of the queue.

        Args:
            requests: The blocked ones.

        Returns:
            Whether all devices drain: nobody behind can start.
        """
        passes, wait_s, heads = self._patience.passes, self._patience.wait_s, self._patience.heads
        before, passable, now_s = self._before, self._passable, self._now_s
        rank = self._blocked - 1
        for rank, (request, named) in enumerate(requests, self._blocked):
            standing = before.get(request.id, _NEW)
            if rank >= heads:
                passed, since_s, kept, _, _ = standing
                # As nearly all are; see `is_over`.
                if not kept and passed < passes and (since_s is None or now_s < since_s + wait_s):
                    passable.append((rank, request, standing, named))
                    continue
            if self._block(rank, request, standing, named):
                return True
        self._blocked = rank + 1
        return False

    def _block(
        self, rank: int, request: Request, standing: Standing, named: Sequence[Room] | None
    ) -> bool:
        """Take in that one cannot start now; tell whether all devices drain."""
        patience = self._patience
        over = is_over(standing, patience, self._now_s)
        if standing.kept:
            if over:
                return self._drain(request, named)
            if self._keep(rank, request, standing):
                return False
            self.lets_go = True
            standing = standing._replace(kept=(), starts_s=None, looked_s=None)
            self._standings[request.id] = standing
        if (over or rank < patience.heads) and patience.passes:
            if self._keep_soonest(rank, request, standing, named):
                return False
        if over:
            return self._drain(request, named)
        # Devices may have been looked for in vain, which is noted.
        standing = self._standings.get(request.id, standing)
        self._passable.append((rank, request, standing, named))
        return False

    def count(self, chosen: Sequence[Room]) -> None:
        """Take in that a request was placed: those before it, which are blocked, were passed."""
        if not self._passable:
            return
        board = self._board
        held = self._held
        taken: list[tuple[int, int, float]] = []
        for room in chosen:
            at = board.place_of(room.device.key)
            if at is not None:
                # Those behind whom it is kept for wait for that one in any case, which is not delayed.
                kept = self.places.get(at)
                last = math.inf if kept is None else kept.rank
                taken.append((at, board.group_of(at).number, last))
        over: list[_Passable] = []
        passable = self._passable
        standings = self._standings
        passes = self._patience.passes
        # Where all are alike each could hold whatever waits: what none could was refused.
        all_alike = len(board.groups) == 1 and not held
        last_rank = max((last for _, _, last in taken), default=-1)
        for index, (rank, request, standing, named) in enumerate(passable):
            if rank > last_rank:
                continue
            if not (all_alike and named is None):
                if not self._could_use_one(request, named, rank, taken):
                    continue
            passed, since_s, kept_for, starts_s, looked_s = standing
            passed += 1
            if since_s is None:
                since_s = self._now_s
            standing = _new_tuple(Standing, (passed, since_s, kept_for, starts_s, looked_s))
            standings[request.id] = standing
            passable[index] = blocked = rank, request, standing, named
            if passed >= passes:
                over.append(blocked)
        for blocked in over:
            passable.remove(blocked)
            rank, request, standing, named = blocked
            if not self._keep_soonest(rank, request, standing, named):
                self._drain(request, named)

    def _could_use_one(
        self,
        request: Request,
        named: Sequence[Room] | None,
        rank: int,
        taken: Sequence[tuple[int, int, float]],
    ) -> bool:
        """Tell whether a blocked request could hold, and may wait for, one of what was taken."""
        if named is None and not self._held:
            reach = self._board.groups_for(request)
            return any(rank <= last and number in reach for _, number, last in taken)
        return any(rank <= last and self._could_use(request, named, at) for at, _, last in taken)

    def _could_use(self, request: Request, named: Sequence[Room] | None, place: int) -> bool:
        """Tell whether a device could hold a request that names devices or runs beside a parent."""
        room = self._board.rooms[place]
        if named is not None and room.device.key not in {other.device.key for other in named}:
            return False
        return could_hold(request, room, self._held)

    def _keep(self, rank: int, request: Request, standing: Standing) -> bool:
        """Keep what a standing names; tell whether it can hold the request at all, and is its own."""
        assert standing.starts_s is not None
        board, places = self._board, self.places
        kept = _new_tuple(_Kept, (rank, request, standing.starts_s))
        likely = board.places_for(request, standing.kept)
        if likely is not None and places.keys().isdisjoint(likely):
            # As nearly always.
            places.update(dict.fromkeys(likely, kept))
            return True
        found: dict[int, _Kept | None] = {}
        for key in standing.kept:
            place = board.place_of(key)
            if place is None:
                return False
            # One that drains for somebody before goes on to.
            if place in places:
                if places[place] is not None:
                    return False
                continue
            room = board.rooms[place]
            if room.snapshot.error or not fits_empty(request, room):
                return False
            found[place] = kept
        places.update(found)
        return True

    def _keep_soonest(
        self, rank: int, request: Request, standing: Standing, named: Sequence[Room] | None
    ) -> bool:
        """Keep the devices where a request is expected to start first; tell whether it is known."""
        now_s = self._now_s
        if standing.looked_s is not None and now_s < standing.looked_s + LOOK_AGAIN_S:
            return False
        found = self._find_soonest(request, named)
        if found is None:
            self._standings[request.id] = standing._replace(looked_s=now_s)
            return False
        starts_s, keys = found
        standing = Standing(
            passed=standing.passed,
            since_s=now_s if standing.since_s is None else standing.since_s,
            kept=keys,
            starts_s=starts_s,
            looked_s=now_s,
        )
        self._standings[request.id] = standing
        return self._keep(rank, request, standing)

    def _find_soonest(
        self, request: Request, named: Sequence[Room] | None
    ) -> tuple[float, tuple[DeviceKey, ...]] | None:
        board = self._board
        if named is not None:
            likely = [at for room in named if (at := board.place_of(room.device.key)) is not None]
        else:
            likely = list(board.soonest(WEIGHED_DEVICES + request.count))
        groups = board.groups_for(request) - self.drained
        times: list[tuple[float, int]] = []
        for at in likely:
            room = board.rooms[at]
            if at in self.places or board.group_of(at).number not in groups or room.snapshot.error:
                continue
            if self._held and not could_hold(request, room, self._held):
                continue
            time_s = ready_s(request, room, self._now_s, board.most_on(room))
            if time_s is not None:
                times.append((time_s, at))
        if len(times) < request.count:
            return None
        times.sort()
        chosen = times[: request.count]
        return chosen[-1][0], tuple(board.rooms[at].device.key for _, at in chosen)

    def _drain(self, request: Request, named: Sequence[Room] | None) -> bool:
        """Let nobody behind have a device that a request could use; tell whether all drain now."""
        board = self._board
        if named is None and not self._held:
            self.drained |= board.groups_for(request)
            return len(self.drained) == len(board.groups)
        for room in board.rooms if named is None else named:
            at = board.place_of(room.device.key)
            if at is not None and could_hold(request, room, self._held):
                self.places[at] = None
        return False


_NEW = Standing()

#: Makes a `Standing` or a `_Kept` in a third of the time that their own functions take.
_new_tuple = tuple.__new__
