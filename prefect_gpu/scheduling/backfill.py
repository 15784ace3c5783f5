"""Which requests may pass a blocked request.

Devices are kept for the first blocked requests: those where each is expected to start first, by the expected ends
of the tasks there. A later request may have a kept device only if it is expected to end before that start, or leaves
enough memory free (EASY backfilling, Lifka 1995, over memory instead of nodes). Where ends are not known, no device is
kept, and a blocked request may be passed a number of times, or for a time. After either, and when a request is overdue
on its kept devices, all devices that it could use drain: no later request may start there.

Kept devices are not chosen anew in each pass. So wrong expectations delay a blocked request by the tasks on its
devices, but never for ever. For the request of a suspended process one device is kept: the one where it is expected
to start first or, where ends are not known, the one with most free memory, which drains.

The order of requests is decided in `scheduling_pass`. Times are monotonic seconds.
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
    least_whole_bytes,
    need_bytes,
    shares,
)
from prefect_gpu.scheduling.probes import allowance_bytes

#: Seconds after which devices to keep are looked for again, for a request for which there were none.
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How far a blocked request may be passed."""

    #: Later requests that may pass it although they may delay it. 0: none (first come, first served).
    passes: int
    #: Seconds after which no request may pass any more, from the first pass or from when devices were kept.
    wait_s: float
    #: Number of blocked requests, the first in order, with devices kept before any request passes them.
    heads: int


#: The runner's default. Makespan over its lower bound in simulations of 600 tasks of 24 shapes on 4 devices of 80 GiB
#: (and of 2,000 on 16), mean of 3 seeds: first come, first served 1.99 (1.41). Where no duration is known, by passes
#: within 600 s: 8 1.84 (1.30), 32 1.63 (1.19), 128 1.51 (1.15); 128 within 3600 s 1.24 (1.13); 64 within 1800 s,
#: chosen since a blocked task is delayed half as long, 1.39 (1.15). Where durations are known 1.25 (1.13) with these;
#: more heads changed less than the seeds.
PATIENCE = Patience(passes=64, wait_s=1800.0, heads=1)

#: First come, first served: a blocked request blocks all later ones on the devices that it could use.
NO_BACKFILL = Patience(passes=0, wait_s=0.0, heads=0)


class BlockedStatus(NamedTuple):
    """History of a blocked request. The queue keeps it until the request leaves."""

    #: How often later requests passed it that may have delayed it.
    passed: int = 0
    #: Monotonic seconds when it was first passed or had devices kept; `None`: neither.
    since_s: float | None = None
    #: Devices that are kept for it.
    kept: tuple[DeviceKey, ...] = ()
    #: Monotonic seconds of its expected start on `kept`; `None`: none are kept, or they drain for a suspended process.
    starts_s: float | None = None
    #: Monotonic seconds when devices to keep were last looked for; `None`: not yet.
    looked_s: float | None = None

    def is_over(self, patience: Patience, now_s: float) -> bool:
        """Return whether the request's patience is used up: its devices are drained for it from now on."""
        if self.since_s is None:
            return patience.passes == 0
        until_s = self.since_s + patience.wait_s
        if self.kept:
            # No passing request delays it on kept devices: elapsed time alone is no reason to stop others.
            return now_s >= max(until_s, self.starts_s or 0.0)
        return now_s >= until_s or self.passed >= patience.passes


def ready_s(request: Request, state: DeviceState, now_s: float, max_tasks: float) -> float | None:
    """Return when a device is expected to have enough free memory for a request; `None`: not known, or never.

    `max_tasks` is the most reservations on it at a time; infinite: as many as fit.
    """
    need = _need_bytes(request, state)
    alone = need is None or request.exclusive
    least = least_whole_bytes(state) if need is None else need
    free = state.free_bytes
    at_s = now_s
    # The last to end first: they are taken from the end of the list.
    held = sorted(state.reservations, key=_end_s, reverse=True)
    while at_s < math.inf:
        joins = not alone and not any(reservation.exclusive for reservation in held)
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
    """Return the bytes that another request may hold on a device when a blocked one starts there, at `starts_s`.

    Less than 0: not even a request for 0 bytes may be there. `max_tasks` as for `ready_s`.
    """
    need = _need_bytes(blocked, state)
    if need is None or blocked.exclusive:
        return -1
    ended = [each.reserved_bytes for each in state.reservations if _end_s(each) <= starts_s]
    tasks = 1 + len(state.reservations) - len(ended)
    return state.free_bytes + sum(ended) - need if tasks < max_tasks else -1


@dataclass(slots=True)
class _Kept:
    """The blocked request that a device is kept for."""

    #: Position of the request among the blocked ones of this pass.
    rank: int
    request: Request
    starts_s: float
    #: From `spare_bytes`; `None`: not computed since the last placement there.
    spare_bytes: int | None = None


class _Passable(NamedTuple):
    """A blocked request that later requests may pass."""

    rank: int
    request: Request
    #: Devices that its tags name; `None`: any.
    named: Named | None
    #: Its reason to wait is not known here, so no device can be kept for it.
    unknown: bool = False


@dataclass(eq=False, repr=False)
class Backfill:
    """Limits that the blocked requests of one scheduling pass set to later ones."""

    _board: Board
    #: Statuses of blocked requests before the pass, by id.
    _before: Mapping[str, BlockedStatus]
    _patience: Patience
    _now_s: float
    #: Kept devices by position; `None`: the device drains. Not used while all drain.
    kept: dict[int, _Kept | None] = field(default_factory=dict)
    #: Whether all devices drain, so that no later request can start.
    all_drain: bool = False
    #: Statuses of blocked requests that this pass has changed, by id.
    statuses: dict[str, BlockedStatus] = field(default_factory=dict)
    _passable: list[_Passable] = field(default_factory=list)
    _blocked: int = 0

    def allows(self, at: int, request: Request) -> bool:
        """Return whether a later request may have a device, which has free memory for it."""
        if (kept := self.kept.get(at)) is None:
            return at not in self.kept
        if request.expected_s is not None and self._now_s + request.expected_s <= kept.starts_s:
            return True
        state = self._board.states[at]
        need = need_bytes(request, state)
        if need is None or request.exclusive:
            return False
        # The request would still run at that time. The number is kept, since many requests ask for it.
        if kept.spare_bytes is None:
            most = self._board.max_tasks_on(state)
            kept.spare_bytes = spare_bytes(state, kept.request, kept.starts_s, most)
        return need <= kept.spare_bytes

    def block(self, request: Request, named: Named | None, unknown: bool = False) -> None:
        """Note that a request cannot start now; to be called in the order of the queue.

        `named` has the devices of its tag; `None`: any. `unknown`: its reason to wait is not known here.
        """
        rank = self._blocked
        self._blocked += 1
        status = self._before.get(request.id, _NEW)
        if unknown:
            if status._replace(kept=()).is_over(self._patience, self._now_s):
                self._drain(request, named)
            else:
                self._passable.append(_Passable(rank, request, named, unknown))
            return
        if request.returns and self._patience.passes:
            self._keep_for_return(rank, request, named, status)
            return
        over = status.is_over(self._patience, self._now_s)
        if status.kept and not over:
            if self._keep(rank, request, status):
                return
            self.statuses[request.id] = status._replace(kept=(), starts_s=None, looked_s=None)
        elif status.kept:
            self._drain(request, named)
            return
        if (over or rank < self._patience.heads) and self._patience.passes:
            if self._keep_soonest(rank, request, named):
                return
        if over:
            self._drain(request, named)
        else:
            self._passable.append(_Passable(rank, request, named))

    def count_passes(self, chosen: Sequence[int]) -> None:
        """Note a placement: the placed request has passed the blocked requests before it."""
        for at in chosen:
            if (kept := self.kept.get(at)) is not None:
                kept.spare_bytes = None
        for blocked in tuple(self._passable):
            if not self._could_use(blocked, chosen):
                continue
            request = blocked.request
            status = self._status(request)
            since_s = self._now_s if status.since_s is None else status.since_s
            # No devices are kept for it.
            status = BlockedStatus(status.passed + 1, since_s, looked_s=status.looked_s)
            self.statuses[request.id] = status
            if status.passed >= self._patience.passes:
                self._passable.remove(blocked)
                if blocked.unknown or not self._keep_soonest(blocked.rank, request, blocked.named):
                    self._drain(request, blocked.named)

    def _status(self, request: Request) -> BlockedStatus:
        """Return the status of a blocked request, with the changes of this pass."""
        return self.statuses.get(request.id) or self._before.get(request.id, _NEW)

    def _could_use(self, blocked: _Passable, chosen: Sequence[int]) -> bool:
        """Return whether the use of some devices may delay a blocked request."""
        rank, request, named, _ = blocked
        for at in chosen:
            kept = self.kept.get(at)
            if kept is not None and kept.rank < rank:
                # The request that the device is kept for delays it in any case.
                continue
            if self._board.could_use(request, named, at):
                return True
        return False

    def _keep(self, rank: int, request: Request, status: BlockedStatus) -> bool:
        """Keep the devices of a status; return `False` if one is gone, kept, broken or too small."""
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
            if self._board.states[at].snapshot.error or not could_hold(
                request, self._board.states[at]
            ):
                return False
            found[at] = _Kept(rank, request, status.starts_s)
        self.kept.update(found)
        return True

    def _keep_for_return(
        self, rank: int, request: Request, named: Named | None, status: BlockedStatus
    ) -> None:
        """Keep as many devices as a suspended process needs, where it can resume soonest."""
        if status.starts_s is not None and self._now_s < status.starts_s:
            if self._keep(rank, request, status):
                return
        if self._keep_soonest(rank, request, named):
            # No time limit: a returning request never drains all the devices that it could use.
            self.statuses[request.id] = self.statuses[request.id]._replace(since_s=None)
            return
        states, positions = self._board.states, self._board.positions
        before = {positions[key] for key in status.kept if key in positions}
        usable = [
            (at not in before, at in self.kept, -states[at].free_bytes, at)
            for at in self._board.usable(request, named)
            # Without devices that drain for an earlier request.
            if not states[at].snapshot.error and self.kept.get(at, request) is not None
        ]
        best = self._first_on_one_node(request, [(0.0, at) for *_, at in sorted(usable)])
        self.kept.update(dict.fromkeys(at for _, at in best))
        self._note_drained()
        keys = tuple(states[at].device.key for _, at in best)
        self.statuses[request.id] = self._status(request)._replace(kept=keys, starts_s=None)

    def _keep_soonest(self, rank: int, request: Request, named: Named | None) -> bool:
        """Keep the devices, all of one node, where a request is expected to start first; return whether any are known."""
        now_s = self._now_s
        status = self._status(request)
        soon = status.looked_s is not None and now_s < status.looked_s + RETRY_S
        if soon or self.all_drain:
            return False
        self.statuses[request.id] = status = status._replace(looked_s=now_s)
        times = self._first_on_one_node(request, sorted(self._ready_times(request, named)))
        if len(times) < request.count:
            return False
        self.statuses[request.id] = status = status._replace(
            since_s=now_s if status.since_s is None else status.since_s,
            kept=tuple(self._board.states[at].device.key for _, at in times),
            starts_s=times[-1][0],
        )
        return self._keep(rank, request, status)

    def _first_on_one_node(
        self, request: Request, times: list[tuple[float, int]]
    ) -> list[tuple[float, int]]:
        """Return the first entries of one node, as many as a request's devices; fewer: no node has so many."""
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

    def _ready_times(self, request: Request, named: Named | None) -> list[tuple[float, int]]:
        """Return the expected start times of a request, each with its device's position, where known."""
        board = self._board
        times: list[tuple[float, int]] = []
        for at in board.usable(request, named):
            state = board.states[at]
            if at in self.kept or state.snapshot.error:
                continue
            time_s = ready_s(request, state, self._now_s, board.max_tasks_on(state))
            if time_s is not None:
                times.append((time_s, at))
        return times

    def _drain(self, request: Request, named: Named | None) -> None:
        """Drain all devices that a request could use: no later request may start there."""
        self.kept.update(dict.fromkeys(self._board.usable(request, named)))
        self._note_drained()

    def _note_drained(self) -> None:
        self.all_drain = list(self.kept.values()).count(None) == len(self._board.states)


_NEW = BlockedStatus()
