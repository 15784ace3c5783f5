"""Whose turn it is: which waiting requests start now, which can never, and why the rest wait.

Pure: a queue, the devices of one look and the machine's own memory go in; decisions come out. How a
device is chosen is in `board`, who may pass a blocked request in `backfill`, how free memory is worked
out in `memory`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import PATIENCE, Blocked, Guard, Patience, Standing, is_over
from prefect_gpu.scheduling.board import Board
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Placement, Request, Reservation
from prefect_gpu.scheduling.placement import check_possible, describe_wait, place, select_rooms
from prefect_gpu.scheduling.queue import Lane, RequestQueue, Shape, order_key
from prefect_gpu.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What the machine itself has left for processes."""

    #: Bytes that new processes could use, as the kernel tells.
    available_bytes: int
    #: Bytes promised to processes that were started and have not taken them yet.
    promised_bytes: int
    #: Processes of ours that run.
    processes: int
    #: Most of them at a time.
    max_processes: int

    @property
    def full(self) -> bool:
        """Whether no process at all may start now."""
        return self.processes >= self.max_processes

    def refusal(self, request: Request) -> str:
        """Say why no process may start for `request` now; empty: it may."""
        if self.full:
            return f"{self.processes} processes run, and max_processes is {self.max_processes}"
        left = self.available_bytes - self.promised_bytes
        # With nothing of ours running, waiting would not bring memory back: an estimate alone must
        # not stop a flow forever.
        if self.processes and request.host_bytes > left:
            return (
                f"{format_bytes(request.host_bytes)} of the machine's own memory for its process; "
                f"{format_bytes(max(0, left))} available"
            )
        return ""

    def after(self, request: Request) -> HostRoom:
        """Give what is left once a process was started for `request`."""
        return HostRoom(
            self.available_bytes,
            self.promised_bytes + request.host_bytes,
            self.processes + 1,
            self.max_processes,
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one look at the queue decided."""

    placements: tuple[tuple[Request, Placement], ...]
    refusals: tuple[tuple[Request, PlacementError], ...]
    #: What has become of requests that go on waiting, by id: for `RequestQueue.note`.
    standings: Mapping[str, Standing] = field(default_factory=dict)
    #: Nobody else who waits can start before a device gets something back, or somebody comes or goes.
    complete: bool = False


def decide(
    queue: RequestQueue,
    board: Board,
    host: HostRoom,
    patience: Patience = PATIENCE,
    now_s: float = 0.0,
    held_by_parent: Iterable[Reservation] = (),
    checked: Collection[Shape] = frozenset(),
    after: Decisions | None = None,
) -> Decisions:
    """Decide who starts now and who never can.

    Requests are looked at by priority, then first come. One that is blocked keeps devices from those
    behind it, as `backfill` says; one that the machine's own memory blocks blocks all, since all need
    of it. A look costs as much as there are shapes that wait, not requests, and nearly nothing where
    only a device got something back on which none of them fits.

    What blocks somebody is noted only when another could pass it.

    Args:
        queue: Waiting requests; left as it is.
        board: All devices; what is placed is booked on it.
        host: The machine's own memory and processes.
        patience: How far a blocked request may be passed.
        now_s: Monotonic seconds.
        held_by_parent: What the GPU task around this process holds, if there is one.
        checked: Shapes that are known to be possible.
        after: The look before at the same queue and the same board, with the same patience, if since
            then nobody came, and nobody left but those whom it placed or refused; `None`: there was
            none, or there is other news, as with a board of new readings.
    """
    held = tuple(held_by_parent)
    placements: list[tuple[Request, Placement]] = []
    refusals: list[tuple[Request, PlacementError]] = []
    refused: set[Lane] = set()
    if checked is not queue.shapes:
        for lane in queue.lanes:
            if lane.shape not in checked and (impossible := _refuse(lane, board, held)):
                refusals += impossible
                refused.add(lane)
    #: Whoever waits and fits elsewhere may not have it, as the look before has found.
    only_returned = after is not None and after.complete
    most_free_bytes = board.most_free_bytes(only_returned)
    #: Lanes whose turn has not come and that are not too large for every device. Once there is none,
    #: nothing can start: what else is blocked is nobody's business, since nobody is behind it.
    able = queue.count_lanes(most_free_bytes)
    if refused:
        able -= sum(lane.least_bytes <= most_free_bytes for lane in refused)
    if host.full:
        return Decisions((), tuple(refusals))
    if not able or not board:
        board.forget_returned()
        return Decisions((), tuple(refusals), complete=True)
    turns = list(queue.firsts)
    if refused:
        turns = [turn for turn in turns if turn[2] not in refused]
    guard = Guard(board, queue.standings, patience, now_s, held)
    named: dict[int, list[Room]] = {}
    #: Above it a lane was too large from the beginning.
    ceiling_bytes = most_free_bytes
    host_is_short = False
    #: Blocked, and not told to the guard yet, which is asked only where there is something to choose.
    blocked: list[Blocked] = []
    for at, (_, number, lane, position) in enumerate(turns):
        request = lane[position] if position else lane.first
        least_bytes = lane.least_bytes
        among: list[Room] | None = None
        if request.devices:
            if number not in named:
                named[number] = select_rooms(request, board.rooms)
            among = named[number]
        chosen: list[Room] | None = None
        if least_bytes <= most_free_bytes:
            if blocked:
                all_drain = guard.block(blocked)
                blocked = []
                if all_drain:
                    break
            chosen = board.choose(request, guard, among)
        if chosen is None:
            if least_bytes <= ceiling_bytes:
                able -= 1
                if not able:
                    break
            blocked.append((request, among))
            continue
        if host.refusal(request):
            host_is_short = True
            break
        placement = place(request, chosen, now_s)
        board.take(placement)
        guard.count(chosen)
        host = host.after(request)
        placements.append((request, placement))
        following = lane[position + 1] if position + 1 < len(lane) else None
        if following is not None:
            # The loop comes to it: it is put behind the place that the loop is at.
            turn = (order_key(following), number, lane, position + 1)
            bisect.insort(turns, turn, lo=at + 1)
        else:
            able -= 1
        if only_returned and _frees_others(request, following, queue.standings):
            only_returned = False
            ceiling_bytes = board.most_free_bytes()
            able = sum(turn[2].least_bytes <= ceiling_bytes for turn in turns[at + 1 :])
        most_free_bytes = board.most_free_bytes(only_returned)
        if not able or not board or host.full:
            break
    guard.block(blocked)
    board.forget_returned()
    complete = not (host_is_short or host.full or guard.drains or guard.lets_go)
    return Decisions(tuple(placements), tuple(refusals), guard.finish(), complete)


def _frees_others(
    request: Request, following: Request | None, standings: Mapping[str, Standing]
) -> bool:
    """Tell whether somebody may now have what was free before but not for him.

    That is what was kept for a request that starts, and what one of its shape may have that is over
    sooner.
    """
    standing = standings.get(request.id)
    if standing is not None and standing.kept:
        return True
    return following is not None and following.expected_s != request.expected_s


def _refuse(
    lane: Lane, board: Board, held: Sequence[Reservation]
) -> list[tuple[Request, PlacementError]]:
    """Refuse all of a lane if the first of it is impossible."""
    if not (held or lane.shape.devices) and board.could_hold_at_all(lane.first):
        return []
    refusals: list[tuple[Request, PlacementError]] = []
    for request in lane:
        try:
            check_possible(request, board.rooms, held)
        except PlacementError as error:
            refusals.append((request, error))
        else:
            break
    return refusals


def explain(
    request: Request,
    queue: RequestQueue,
    rooms: Sequence[Room],
    host: HostRoom,
    patience: Patience = PATIENCE,
    now_s: float = 0.0,
    max_tasks: int | None = None,
) -> str:
    """Say why a request waits, in one line that a person can act on.

    Args:
        request: It waits in `queue`.
        queue: Waiting requests.
        rooms: All devices.
        host: The machine's own memory and processes.
        patience: How far it may be passed.
        now_s: Monotonic seconds.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.

    Raises:
        PlacementError: It names devices that are not there.
    """
    eligible = select_rooms(request, rooms)
    reason = host.refusal(request) or describe_wait(request, eligible, max_tasks)
    mine = {room.device.key for room in eligible}
    ahead = sum(
        before
        for lane in queue.lanes
        if (before := lane.count_before(request)) and _overlap(lane[0], rooms, mine)
    )
    if ahead:
        reason += f"; {ahead} ahead in the queue"
    standing = queue.standings.get(request.id)
    if standing is not None:
        reason += _describe_standing(standing, patience, now_s)
    return reason


def _describe_standing(standing: Standing, patience: Patience, now_s: float) -> str:
    """Say whether others pass a blocked request, and what is done for it."""
    text = ""
    if standing.passed:
        text += f"; {standing.passed} passed it"
    if is_over(standing, patience, now_s):
        return text + "; nobody may pass it any more, the devices that it could use drain for it"
    if standing.kept and standing.starts_s is not None:
        names = ", ".join(uuid for _, uuid in standing.kept[:3])
        more = len(standing.kept) - 3
        text += f"; {names}{f' and {more} more' if more > 0 else ''} kept for it"
        if standing.starts_s > now_s:
            text += f", free in about {format_seconds(standing.starts_s - now_s)}"
    return text


def _overlap(request: Request, rooms: Sequence[Room], mine: Collection[tuple[str, str]]) -> bool:
    """Tell whether a request may use one of some devices."""
    if not request.devices:
        return True
    try:
        return any(room.device.key in mine for room in select_rooms(request, rooms))
    except PlacementError:
        # It will be refused at the next look.
        return False
