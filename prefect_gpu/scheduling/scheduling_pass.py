"""One scheduling pass: which waiting requests start now, which never can, and why the others wait.

Pure: a queue (the waiting requests, by shape and in order), the devices of one reading and the machine's own memory go in, and decisions come out. How a
device is chosen is in `placement`, which requests may pass a blocked one in `backfill`, how free memory is
computed in `memory`.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import PATIENCE, Backfill, BlockedStatus, Patience
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Memory, Placement, Request
from prefect_gpu.scheduling.placement import Board, check_possible, describe_wait, select_devices
from prefect_gpu.units import format_bytes, format_seconds

#: What requests are sorted by; no two are equal.
OrderKey: TypeAlias = tuple[int, int, str]


def order_key(request: Request) -> OrderKey:
    """Return the sort key of the queue: higher priority first, then first come."""
    return -request.priority, request.sequence, request.id


class Shape(NamedTuple):
    """What a request needs, where, and about how long: where one of a shape must wait, so must the others."""

    memory: Memory
    #: 1 byte and 100 % are equal numbers.
    is_fraction: bool
    device_count: int
    devices: tuple[str, ...]
    exclusive: bool
    #: Power of two above the seconds that it is expected to run; `None`: not known. Where a long request
    #: would delay a blocked one, a shorter one may not.
    length: int | None = None
    #: The broker that it waits at.
    origin: str = ""

    @classmethod
    def of(cls, request: Request) -> Shape:
        """Return the shape of a request."""
        return cls(
            request.memory,
            isinstance(request.memory, float),
            request.count,
            request.devices,
            request.exclusive,
            None if request.expected_s is None else math.frexp(request.expected_s)[1],
            request.origin,
        )


#: The waiting requests of one shape with their keys, in order.
Lane: TypeAlias = list[tuple[OrderKey, Request]]


def _least_bytes(request: Request) -> int:
    """Return the bytes that a request asks for of a device at least; 0 where it depends on the device."""
    return request.memory if type(request.memory) is int else 0


class RequestQueue:
    """The waiting requests, by shape. Not safe to use from several threads at once.

    Args:
        requests: Those that wait from the beginning, in any order.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._lanes: dict[Shape, Lane] = {}
        #: By the id of each request.
        self._shapes: dict[str, Shape] = {}
        #: What has happened to blocked requests, by id; those to which nothing has are left out.
        self.statuses: dict[str, BlockedStatus] = {}
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in heapq.merge(*self._lanes.values()))

    @property
    def lanes(self) -> Collection[Lane]:
        """One lane for each shape; none is empty."""
        return self._lanes.values()

    @property
    def least_bytes(self) -> int:
        """The fewest bytes of a device that a request asks for; 0 where they depend on the device."""
        return min((_least_bytes(lane[0][1]) for lane in self.lanes), default=0)

    def add(self, request: Request) -> None:
        """Add a request; its id is that of no other."""
        shape = self._shapes[request.id] = Shape.of(request)
        bisect.insort(self._lanes.setdefault(shape, []), (order_key(request), request))

    def remove(self, request: Request) -> bool:
        """Take a request out; return whether it was there."""
        shape = self._shapes.pop(request.id, None)
        if shape is None:
            return False
        lane = self._lanes[shape]
        del lane[bisect.bisect_left(lane, (order_key(request),))]
        if not lane:
            del self._lanes[shape]
        self.statuses.pop(request.id, None)
        return True


@dataclass(frozen=True, slots=True)
class HostState:
    """What the machine itself has left for processes."""

    #: Bytes that new processes could use, as the kernel says.
    available_bytes: int
    #: Of these, bytes reserved for processes that were started and have not taken them yet.
    reserved_bytes: int
    #: Processes of this broker that run.
    processes: int
    #: Most of them at a time.
    max_processes: int
    #: Processes that run in all, those of other brokers of the machine with them.
    all_processes: int = 0

    @property
    def full(self) -> bool:
        """Whether no process at all may start now."""
        return self.processes >= self.max_processes

    def refusal(self, request: Request) -> str:
        """Return why no process may start for a request now; empty: it may."""
        if self.full:
            return f"{self.processes} processes run, and max_processes is {self.max_processes}"
        left = self.available_bytes - self.reserved_bytes
        # While no process of a flow runs, waiting would not bring memory back: an estimate alone must not
        # stop a flow for ever.
        if max(self.processes, self.all_processes) and request.host_bytes > left:
            return (
                f"{format_bytes(request.host_bytes)} of the machine's own memory for its process; "
                f"{format_bytes(max(0, left))} available"
            )
        return ""

    def after(self, request: Request) -> HostState:
        """Return what is left once a process was started for a request."""
        return HostState(
            self.available_bytes,
            self.reserved_bytes + request.host_bytes,
            self.processes + (not request.origin),
            self.max_processes,
            self.all_processes + 1,
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one scheduling pass decided."""

    placements: tuple[tuple[Request, Placement], ...]
    refusals: tuple[tuple[Request, PlacementError], ...]
    #: What has happened to requests that go on waiting, by id: for `RequestQueue.statuses`.
    statuses: Mapping[str, BlockedStatus]


def decide(
    queue: RequestQueue,
    board: Board,
    host: HostState,
    patience: Patience = PATIENCE,
    now_s: float = 0.0,
    slots: Mapping[str, int] = MappingProxyType({}),
    passive: Collection[str] = (),
) -> Decisions:
    """Decide which requests start now and which never can.

    Requests of other brokers are among them, so that all brokers of a machine keep one order. What is decided for
    those is carried out by their own brokers.

    Requests are considered by priority, then first come. A blocked one limits those behind it, as `backfill`
    says. One that the machine's own memory blocks blocks all, since each needs some of it. Of each shape the
    first request alone is considered until it starts, so a pass costs as much as there are shapes, not
    requests.

    That a request is blocked is noted only if a later one is considered, and so could pass it.

    Args:
        queue: Waiting requests; left as it is.
        board: All devices; placements are booked on it.
        host: The machine's own memory and processes.
        patience: How far a blocked request may be passed.
        now_s: Monotonic seconds.
        slots: Processes that each other broker may start, by origin. One that is not named starts none.
        passive: Origins of requests that count as blocked even if they fit, because their brokers do not start
            them for a reason that is not known here.
    """
    left = dict(slots)
    backfill = Backfill(board, queue.statuses, patience, now_s)
    placements: list[tuple[Request, Placement]] = []
    refusals: list[tuple[Request, PlacementError]] = []
    #: The requests that are considered next, one of each shape: its order, its lane, its place there.
    turns: list[tuple[OrderKey, Request, Lane, int]] = []
    for lane in queue.lanes:
        key, request = lane[0]
        possible = board.surely_fits(request, request.count)
        if not possible and (impossible := _refuse(lane, board)):
            refusals += impossible
        else:
            turns.append((key, request, lane, 0))
    turns.sort()
    #: Blocked requests that are not noted yet.
    blocked: list[tuple[Request, list[int] | None, bool]] = []
    most_free_bytes = board.most_free_bytes()
    # Turns are added behind the one that is considered.
    for number, (_, request, lane, position) in enumerate(turns, 1):
        if most_free_bytes < 0 or host.full:
            break
        if request.origin and left.get(request.origin, 0) <= 0:
            # Nor do those behind it in its lane, which has no other origin.
            continue
        named = board.named(request) if request.devices else None
        chosen: list[int] | None = None
        unknown = request.origin in passive
        if not unknown and _least_bytes(request) <= most_free_bytes:
            for each in blocked:
                backfill.block(*each)
            blocked.clear()
            if backfill.all_drain:
                break
            chosen = board.choose(request, named, backfill.kept, backfill.allows)
        if chosen is None:
            blocked.append((request, named, unknown))
            continue
        if host.refusal(request):
            break
        placements.append((request, board.place(request, chosen, now_s)))
        if request.origin:
            # Whom it passes is counted by its own broker, when it starts.
            left[request.origin] -= 1
        else:
            backfill.count_passes(chosen)
        host = host.after(request)
        most_free_bytes = board.most_free_bytes()
        if position + 1 < len(lane):
            bisect.insort(turns, (*lane[position + 1], lane, position + 1), lo=number)
    return Decisions(tuple(placements), tuple(refusals), backfill.statuses)


def _refuse(lane: Lane, board: Board) -> list[tuple[Request, PlacementError]]:
    """Refuse all requests of a lane if the first of them is impossible."""
    refusals: list[tuple[Request, PlacementError]] = []
    for _, request in lane:
        try:
            check_possible(request, board.states, board.held_by_parent)
        except PlacementError as error:
            refusals.append((request, error))
        else:
            break
    return refusals


def explain(
    request: Request,
    queue: RequestQueue,
    states: Sequence[DeviceState],
    host: HostState,
    patience: Patience = PATIENCE,
    now_s: float = 0.0,
    max_tasks: int | None = None,
) -> str:
    """Return why a request waits, in one line that a person can act on.

    Args:
        request: A request of `queue`.
        queue: Waiting requests.
        states: All devices.
        host: The machine's own memory and processes.
        patience: How far it may be passed.
        now_s: Monotonic seconds.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.

    Raises:
        PlacementError: It names devices that are not there.
    """
    eligible = select_devices(request, states)
    reason = host.refusal(request) or describe_wait(request, eligible, max_tasks)
    keys = {state.device.key for state in eligible}
    ahead = sum(
        before
        for lane in queue.lanes
        if (before := bisect.bisect_left(lane, (order_key(request),)))
        and _may_use_one(lane[0][1], states, keys)
    )
    if ahead:
        reason += f"; {ahead} ahead in the queue"
    status = queue.statuses.get(request.id)
    if status is not None:
        reason += _describe_status(status, patience, now_s)
    return reason


def _describe_status(status: BlockedStatus, patience: Patience, now_s: float) -> str:
    """Return whether other requests pass a blocked one, and what is done for it, as text."""
    text = ""
    if status.passed:
        text += f"; {status.passed} passed it"
    if status.is_over(patience, now_s):
        return text + "; no task may pass it any more, the devices that it could use drain for it"
    if status.kept and status.starts_s is not None:
        names = ", ".join(uuid for _, uuid in status.kept[:3])
        more = len(status.kept) - 3
        text += f"; {names}{f' and {more} more' if more > 0 else ''} kept for it"
        if status.starts_s > now_s:
            text += f", free in about {format_seconds(status.starts_s - now_s)}"
    return text


def _may_use_one(
    request: Request, states: Sequence[DeviceState], keys: Collection[tuple[str, str]]
) -> bool:
    """Return whether a request may use one of some devices."""
    if not request.devices:
        return True
    try:
        return any(state.device.key in keys for state in select_devices(request, states))
    except PlacementError:
        # The next pass refuses it.
        return False
