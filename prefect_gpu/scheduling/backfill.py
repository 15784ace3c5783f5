"""Which later requests may start before (*pass*) a blocked request: EASY backfilling (Lifka 1995), over device memory.

A request is blocked if no device has room for it now. For the first blocked request the scheduler *keeps* the devices
where the expected ends of running tasks let the request start soonest. A later request may start on a kept device only
if it is expected to end before that start, or leaves enough memory free for the blocked request. If no expected ends
are known, no device is kept, and the blocked request may be passed a limited number of times, for a limited time
(`Patience`). Once a limit is reached, or the expected start on kept devices is overdue, all devices that the blocked
request could use *drain*: no later request may start there.

Kept devices stay the same from pass to pass. So wrong expectations delay a blocked request by the tasks on its devices,
but never for ever. A suspended process that waits to resume (`Request.returns`) has kept devices, too: the devices with
the soonest expected start or, if no ends are known, the devices with most free memory, which drain. Times are monotonic
seconds. `scheduling_pass` decides the order of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Request, Reservation
from prefect_gpu.scheduling.placement import (
    Board,
    Named,
    could_hold,
    crowds,
    least_whole_bytes,
    need_bytes,
    shares,
)
from prefect_gpu.scheduling.probes import allowance_bytes

#: Seconds between two searches for devices to keep for a blocked request, if the first search found none.
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on the later requests that may start before a blocked request."""

    #: Most later requests that may pass a blocked request and may delay it. 0: none (first come, first served).
    passes: int
    #: Seconds in which later requests may pass, from the first one that passed or from the choice of kept devices.
    wait_s: float
    #: Number of blocked requests, first in the queue, with devices kept before any request passes them.
    heads: int


#: The runner's default. Makespan divided by its lower bound in simulations of 600 tasks of 24 shapes on 4 devices of
#: 80 GiB (in brackets: 2,000 tasks on 16 devices), mean of 3 seeds. First come, first served: 1.99 (1.41). Durations
#: unknown, 600 s: 8 passes 1.84 (1.30), 32 passes 1.63 (1.19), 128 passes 1.51 (1.15). 128 passes, 3600 s: 1.24 (1.13).
#: 64 passes, 1800 s: 1.39 (1.15), chosen because a blocked task is delayed half as long. With these limits and known
#: durations: 1.25 (1.13). More heads changed less than the seeds.
PATIENCE = Patience(passes=64, wait_s=1800.0, heads=1)

#: First come, first served: a blocked request blocks all later ones on the devices that it could use.
NO_BACKFILL = Patience(passes=0, wait_s=0.0, heads=0)


class BlockedStatus(NamedTuple):
    """State of a blocked request between two passes. `RequestQueue.statuses` stores it until the request leaves."""

    #: Number of later requests that started first and may have delayed this one.
    passed: int = 0
    #: Monotonic seconds when a request first passed this one, or devices were kept for it; `None`: neither.
    since_s: float | None = None
    #: Devices that are kept for the request.
    kept: tuple[DeviceKey, ...] = ()
    #: Monotonic seconds of the expected start on `kept`; `None`: none are kept, or they drain for a suspended process.
    starts_s: float | None = None
    #: Monotonic seconds of the last search for devices to keep; `None`: no search yet.
    looked_s: float | None = None

    def is_over(self, patience: Patience, now_s: float) -> bool:
        """Return whether a limit of `patience` is reached, so that no later request may pass any more."""
        if self.since_s is None:
            return patience.passes == 0
        until_s = self.since_s + patience.wait_s
        if self.kept:
            # Passing requests cause no delay on kept devices: elapsed time alone is no reason to stop them.
            return now_s >= max(until_s, self.starts_s or 0.0)
        return now_s >= until_s or self.passed >= patience.passes


def ready_s(request: Request, state: DeviceState, now_s: float, max_tasks: float) -> float | None:
    """Return when a device is expected to have room for a request; `None`: not known, or never.

    `max_tasks` is the result of `Board.max_tasks_on`.
    """
    need = _need_bytes(request, state)
    alone = need is None or request.exclusive
    least = least_whole_bytes(state) if need is None else need
    free = state.free_bytes
    at_s = now_s
    # Latest end first: `pop` then takes the soonest end.
    held = sorted(state.reservations, key=_end_s, reverse=True)
    while at_s < math.inf:
        joins = not (alone or crowds(request, held) or any(each.exclusive for each in held))
        if free >= least and len(held) < max_tasks and (joins or not held):
            return at_s
        if not held:
            break
        ended = held.pop()
        at_s = max(at_s, _end_s(ended))
        free += ended.reserved_bytes
    return None


def _need_bytes(request: Request, state: DeviceState) -> int | None:
    """Return the bytes that must be free for a request; `None`: a whole device."""
    return allowance_bytes(state) if shares(request, state) else need_bytes(request, state)


def _end_s(reservation: Reservation) -> float:
    """Return when a reservation is expected to end; infinite: not known."""
    return math.inf if reservation.ends_s is None else reservation.ends_s


def spare_bytes(state: DeviceState, blocked: Request, starts_s: float, max_tasks: float) -> int:
    """Return the bytes that a later request may hold on a device when `blocked` starts; less than 0: not even 0."""
    need = _need_bytes(blocked, state)
    if need is None or blocked.exclusive:
        return -1
    ended = [each.reserved_bytes for each in state.reservations if _end_s(each) <= starts_s]
    tasks = 1 + len(state.reservations) - len(ended)
    return state.free_bytes + sum(ended) - need if tasks < max_tasks else -1


class _Blocked(NamedTuple):
    """A blocked request."""

    #: Position among the blocked requests of this pass.
    rank: int
    request: Request
    #: Devices that the request's tags name; `None`: any.
    named: Named | None
    #: Whether the request is blocked for an unknown reason, so that no device can be kept for it.
    unknown: bool


@dataclass(slots=True)
class _Kept:
    """A device that is kept for a blocked request."""

    blocked: _Blocked
    starts_s: float
    #: Result of the function `spare_bytes`; `None`: not computed since the last placement on the device.
    spare_bytes: int | None = None


@dataclass(eq=False, repr=False)
class Backfill:
    """Limits that blocked requests set to later requests in one pass. A device is its position in `Board.states`."""

    _board: Board
    #: Statuses of blocked requests before the pass, by request id.
    _before: Mapping[str, BlockedStatus]
    _patience: Patience
    _now_s: float
    #: By device: the request for which it is kept; `None`: the device drains. Not used while all devices drain.
    kept: dict[int, _Kept | None] = field(default_factory=dict)
    #: Whether all devices drain, so that no later request can start.
    all_drain: bool = False
    #: Statuses that this pass has changed, by request id.
    statuses: dict[str, BlockedStatus] = field(default_factory=dict)
    #: Blocked requests that later requests may pass.
    _passable: list[_Blocked] = field(default_factory=list)
    _number: int = 0

    def allows(self, at: int, request: Request) -> bool:
        """Return whether a later request may start on device `at`. The caller has checked that it fits there."""
        if (kept := self.kept.get(at)) is None:
            return at not in self.kept
        if request.expected_s is not None and self._now_s + request.expected_s <= kept.starts_s:
            return True
        state = self._board.states[at]
        need = need_bytes(request, state)
        if need is None or request.exclusive:
            return False
        # The later request may still run when the blocked one starts. Many requests ask: the bytes are computed once.
        if kept.spare_bytes is None:
            most = self._board.max_tasks_on(state)
            kept.spare_bytes = spare_bytes(state, kept.blocked.request, kept.starts_s, most)
        return need <= kept.spare_bytes

    def block(self, request: Request, named: Named | None, unknown: bool = False) -> None:
        """Add a blocked request, and keep or drain devices for it. To be called in the order of the queue.

        `named` are the devices that the request's tags name; `None`: any. `unknown`: it waits for an unknown reason.
        """
        blocked = _Blocked(self._number, request, named, unknown)
        self._number += 1
        status = self._before.get(request.id, _NEW)
        if unknown:
            if status._replace(kept=()).is_over(self._patience, self._now_s):
                self._drain(blocked)
            else:
                self._passable.append(blocked)
            return
        if request.returns and self._patience.passes:
            self._keep_for_return(blocked, status)
            return
        over = status.is_over(self._patience, self._now_s)
        if status.kept and not over:
            if self._keep(blocked, status):
                return
            self.statuses[request.id] = status._replace(kept=(), starts_s=None, looked_s=None)
        elif status.kept:
            self._drain(blocked)
            return
        if (over or blocked.rank < self._patience.heads) and self._patience.passes:
            if self._keep_soonest(blocked):
                return
        if over:
            self._drain(blocked)
        else:
            self._passable.append(blocked)

    def count_passes(self, chosen: Sequence[int]) -> None:
        """Count a placement on the devices `chosen` as a pass of all blocked requests that it may delay."""
        for at in chosen:
            if (kept := self.kept.get(at)) is not None:
                kept.spare_bytes = None
        for blocked in tuple(self._passable):
            if not self._could_use(blocked, chosen):
                continue
            request = blocked.request
            status = self._status(request)
            since_s = self._now_s if status.since_s is None else status.since_s
            status = BlockedStatus(status.passed + 1, since_s, looked_s=status.looked_s)
            self.statuses[request.id] = status
            if status.passed >= self._patience.passes:
                self._passable.remove(blocked)
                if blocked.unknown or not self._keep_soonest(blocked):
                    self._drain(blocked)

    def _status(self, request: Request) -> BlockedStatus:
        return self.statuses.get(request.id) or self._before.get(request.id, _NEW)

    def _could_use(self, blocked: _Blocked, chosen: Sequence[int]) -> bool:
        """Return whether a placement on the devices `chosen` may delay a blocked request."""
        for at in chosen:
            kept = self.kept.get(at)
            if kept is not None and kept.blocked.rank < blocked.rank:
                # An earlier blocked request, for which the device is kept, delays this one in any case.
                continue
            if self._board.could_use(blocked.request, blocked.named, at):
                return True
        return False

    def _keep(self, blocked: _Blocked, status: BlockedStatus) -> bool:
        """Keep the devices in `status.kept`; return `False` if one is gone, broken, too small or already kept."""
        assert status.starts_s is not None
        found: dict[int, _Kept | None] = {}
        for key in status.kept:
            at = self._board.positions.get(key)
            if at is None:
                return False
            if at in self.kept:
                # The device already drains for an earlier request.
                if self.kept[at] is not None:
                    return False
                continue
            state = self._board.states[at]
            if state.snapshot.error or not could_hold(blocked.request, state):
                return False
            found[at] = _Kept(blocked, status.starts_s)
        self.kept.update(found)
        return True

    def _keep_for_return(self, blocked: _Blocked, status: BlockedStatus) -> None:
        """Keep devices for the return of a suspended process, where it can resume soonest."""
        request = blocked.request
        if status.starts_s is not None and self._now_s < status.starts_s:
            if self._keep(blocked, status):
                return
        if self._keep_soonest(blocked):
            # Without `since_s` there is no time limit: a return never drains all devices that it could use.
            self.statuses[request.id] = self.statuses[request.id]._replace(since_s=None)
            return
        states, positions = self._board.states, self._board.positions
        before = {positions[key] for key in status.kept if key in positions}
        usable = [
            (at not in before, at in self.kept, -states[at].free_bytes, at)
            for at in self._board.usable(request, blocked.named)
            # Devices that drain for an earlier request are left out.
            if not states[at].snapshot.error and self.kept.get(at, request) is not None
        ]
        best = self._first_on_one_node(request, [(0.0, at) for *_, at in sorted(usable)])
        self.kept.update(dict.fromkeys(at for _, at in best))
        self._note_drained()
        keys = tuple(states[at].device.key for _, at in best)
        self.statuses[request.id] = self._status(request)._replace(kept=keys, starts_s=None)

    def _keep_soonest(self, blocked: _Blocked) -> bool:
        """Keep the devices of one node where a request is expected to start soonest; return whether there are any."""
        request, now_s = blocked.request, self._now_s
        status = self._status(request)
        soon = status.looked_s is not None and now_s < status.looked_s + RETRY_S
        if soon or self.all_drain:
            return False
        self.statuses[request.id] = status = status._replace(looked_s=now_s)
        times = self._first_on_one_node(request, sorted(self._ready_times(blocked)))
        if len(times) < request.count:
            return False
        self.statuses[request.id] = status = status._replace(
            since_s=now_s if status.since_s is None else status.since_s,
            kept=tuple(self._board.states[at].device.key for _, at in times),
            starts_s=times[-1][0],
        )
        return self._keep(blocked, status)

    def _first_on_one_node(
        self, request: Request, times: list[tuple[float, int]]
    ) -> list[tuple[float, int]]:
        """Return the first `request.count` entries (seconds, device) of one node; fewer if no node has so many."""
        count, board = request.count, self._board
        if count == 1 or not board.several_nodes:
            return times[:count]
        by_node: dict[str, list[tuple[float, int]]] = {}
        for each in times:
            on_node = by_node.setdefault(board.states[each[1]].device.host, [])
            on_node.append(each)
            if len(on_node) == count:
                return on_node
        return []

    def _ready_times(self, blocked: _Blocked) -> list[tuple[float, int]]:
        """Return the known expected start times of a request, in monotonic seconds, each with the device's position."""
        board = self._board
        times: list[tuple[float, int]] = []
        for at in board.usable(blocked.request, blocked.named):
            state = board.states[at]
            if at in self.kept or state.snapshot.error:
                continue
            time_s = ready_s(blocked.request, state, self._now_s, board.max_tasks_on(state))
            if time_s is not None:
                times.append((time_s, at))
        return times

    def _drain(self, blocked: _Blocked) -> None:
        self.kept.update(dict.fromkeys(self._board.usable(blocked.request, blocked.named)))
        self._note_drained()

    def _note_drained(self) -> None:
        self.all_drain = list(self.kept.values()).count(None) == len(self._board.states)


_NEW = BlockedStatus()
