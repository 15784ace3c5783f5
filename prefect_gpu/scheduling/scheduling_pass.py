"""One scheduling pass: which waiting requests start now, which can never start, and why the others wait.

Pure. Arguments are the queue, the devices of one reading and the host resources of the machine or of each cluster node.
`placement` chooses devices, `backfill` decides which requests may pass a blocked request, `memory` computes free memory.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling import placement
from prefect_gpu.scheduling.backfill import PATIENCE, Backfill, BlockedStatus, Patience
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Placement, Request
from prefect_gpu.scheduling.placement import Board, Named, least_bytes
from prefect_gpu.scheduling.reasons import MOST_NAMES, Reason, WaitKind, shown_bytes, shown_names

#: Sort key of requests; the keys of two requests are never equal.
OrderKey: TypeAlias = tuple[bool, int, int, str]


def order_key(request: Request) -> OrderKey:
    """Return the sort key of the queue: `returns_first`, then higher priority, then earlier arrival."""
    return not request.returns_first, -request.priority, request.sequence, request.id


#: Needs, devices and rough duration of a request: if a request must wait, so must later requests of the same shape.
Shape: TypeAlias = tuple[object, ...]


def shape_of(request: Request) -> Shape:
    """Return the shape of a request."""
    return (
        request.memory,
        # 1 byte and 100 % (1.0) are equal numbers.
        isinstance(request.memory, float),
        request.count,
        request.devices,
        request.exclusive,
        # The power of two above the expected seconds: a short request may pass where a long one may not.
        None if request.expected_s is None else math.frexp(request.expected_s)[1],
        request.origin,
        request.nodes,
        request.probe_fraction,
        request.returns,
        request.fills,
    )


#: The waiting requests of one shape with their sort keys, in order.
Lane: TypeAlias = list[tuple[OrderKey, Request]]


class RequestQueue:
    """The waiting requests, by shape, at first those of `requests`. Not safe to use from several threads."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._lanes: dict[Shape, Lane] = {}
        #: By request id.
        self._shapes: dict[str, Shape] = {}
        #: Statuses by request id. A missing request was never passed, and never had devices kept.
        self.statuses: dict[str, BlockedStatus] = {}
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in heapq.merge(*self._lanes.values()))

    @property
    def lanes(self) -> Collection[Lane]:
        """Lists of waiting requests, one for each shape; no list is empty."""
        return self._lanes.values()

    @property
    def least_bytes(self) -> int:
        """Least bytes of a device that a waiting request asks for; 0: they depend on the device, or no request waits."""
        return min((least_bytes(lane[0][1]) for lane in self.lanes), default=0)

    def add(self, request: Request) -> None:
        """Add a request, whose id must be unique."""
        shape = self._shapes[request.id] = shape_of(request)
        bisect.insort(self._lanes.setdefault(shape, []), (order_key(request), request))

    def remove(self, request: Request) -> bool:
        """Remove a request; return whether it was there."""
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
    """Host memory and number of processes of the machine, of one cluster node, or of a whole cluster."""

    #: Bytes that new processes could use, by the kernel's estimate; `NEVER_BYTES` for a whole cluster.
    available_bytes: int
    #: Part of `available_bytes` reserved for started processes that have not taken it yet.
    reserved_bytes: int
    #: Running processes of this broker, and the most that are allowed.
    processes: int
    max_processes: int
    #: Running processes of all brokers.
    all_processes: int = 0
    #: Resources of each node of a whole cluster, by `Device.host`. A missing node has no limit.
    nodes: Mapping[str, HostState] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether the limit on processes is reached."""
        return self.processes >= self.max_processes

    @property
    def left_bytes(self) -> int:
        """Bytes neither taken nor reserved; less than 0: more is reserved than available."""
        return self.available_bytes - self.reserved_bytes

    def refuses(self, request: Request, node: str = "") -> bool:
        """Return whether no process may start for a request now, on a node of a cluster if one is named."""
        # While no process runs, waiting frees no memory: the kernel's estimate must not stop a flow for ever.
        running = max(self.processes, self.all_processes)
        short = running > 0 and request.host_bytes > self.left_bytes
        return self.full or short or (node in self.nodes and self.nodes[node].refuses(request))

    def after(self, request: Request) -> HostState:
        """Return the resources left once a process is started for a request; those of nodes stay."""
        return replace(
            self,
            reserved_bytes=self.reserved_bytes + request.host_bytes,
            processes=self.processes + (not request.origin),
            all_processes=self.all_processes + 1,
        )


class _NodeLimits:
    """The choice of devices in one scheduling pass, within the host resources of each node of a cluster."""

    def __init__(self, nodes: Mapping[str, HostState], board: Board, backfill: Backfill) -> None:
        self._board = board
        self._backfill = backfill
        self._nodes = dict(nodes)
        #: Nodes on which no further request starts in this pass.
        self._closed = {name for name, host in self._nodes.items() if host.full}
        #: Nodes without enough host memory for the last request of `choose`.
        self._short: set[str] = set()
        board.close(self._closed)

    def allows(self, at: int, request: Request) -> bool:
        """Return whether host resources and backfill allow a request on device `at`."""
        node = self._board.states[at].device.host
        if node in self._closed:
            return False
        of_node = self._nodes.get(node)
        if of_node is not None and of_node.refuses(request):
            self._short.add(node)
            return False
        return self._backfill.allows(at, request)

    def choose(self, request: Request, named: Named | None) -> list[int] | None:
        """Return devices for a request on a node with host resources for it; `None`: the request must wait."""
        self._short.clear()
        return self._board.choose(request, named, self.allows)

    def close_for(self, request: Request, named: Named | None) -> bool:
        """Close a node with devices but too little host memory for the request of `choose`; return whether it found one."""
        board = self._board
        for node in sorted(self._short, key=lambda name: (-self._nodes[name].left_bytes, name)):
            there = board.nodes[node] if named is None else named.keys() & set(board.nodes[node])
            fit = (
                at for at in there if self._backfill.allows(at, request) and board.fits(request, at)
            )
            if sum(1 for _ in fit) >= request.count:
                self._close(node)
                return True
        return False

    def start(self, request: Request, node: str) -> None:
        """Count a process started for a request on a node."""
        of_node = self._nodes.get(node)
        if of_node is not None:
            self._nodes[node] = of_node = of_node.after(request)
            if of_node.full:
                self._close(node)

    def _close(self, node: str) -> None:
        self._closed.add(node)
        self._board.close((node,))


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of one scheduling pass."""

    placements: tuple[tuple[Request, Placement], ...]
    refusals: tuple[tuple[Request, PlacementError], ...]
    #: New statuses of waiting requests, by id: for `RequestQueue.statuses`.
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
    """Return which requests start now and which can never start.

    Requests are considered in the order of `order_key`. Requests of other brokers are included, so that all brokers of a
    machine keep one order; each broker carries out the decisions on its own requests. A blocked request limits later
    requests (`backfill`). A request that lacks host memory blocks all later requests, since each needs some. Only the
    first request of each shape is considered until it starts: the cost of a pass grows with shapes, not requests.

    In a cluster, a request may start on any node with host resources for it. If a request lacks only host memory, on each
    node with devices for it, then the node with most host memory left is closed to later requests: the request is likely
    to start there first. A cluster of one node behaves as one machine.

    Args:
        queue: Waiting requests; not changed.
        board: All devices; placements are booked on it.
        host: Host memory and processes of the machine, or of each node.
        patience: Limits on the later requests that may pass a blocked request.
        now_s: Monotonic seconds.
        slots: Number of processes that each other broker may start, by `Request.origin`; a missing broker: none.
        passive: Other brokers, by `Request.origin`, that do not start fitting requests; their requests count as blocked.
    """
    left = dict(slots)
    backfill = Backfill(board, queue.statuses, patience, now_s)
    limits = _NodeLimits(host.nodes, board, backfill)
    placements: list[tuple[Request, Placement]] = []
    refusals: list[tuple[Request, PlacementError]] = []
    #: The next request of each shape: sort key, request, list of its shape, position in that list.
    turns: list[tuple[OrderKey, Request, Lane, int]] = []
    for lane in queue.lanes:
        key, request = lane[0]
        impossible = [] if board.surely_fits(request) else _refuse(lane, board)
        refusals += impossible
        if not impossible:
            turns.append((key, request, lane, 0))
    turns.sort()
    #: Arguments of delayed calls of `backfill.block`: a limit is needed only if a later request is considered.
    blocked: list[tuple[Request, Named | None, bool]] = []
    most_free_bytes = board.most_free_bytes()
    # The loop adds turns behind the current one.
    for number, (_, request, lane, position) in enumerate(turns, 1):
        if most_free_bytes < 0 or host.full:
            break
        if request.origin and left.get(request.origin, 0) <= 0:
            # All requests of its lane have the same origin.
            continue
        named = board.named(request) if request.devices or request.nodes else None
        chosen: list[int] | None = None
        unknown = request.origin in passive
        if not unknown and least_bytes(request) <= most_free_bytes:
            for each in blocked:
                backfill.block(*each)
            blocked.clear()
            if backfill.all_drain:
                break
            chosen = limits.choose(request, named)
            if chosen is None and limits.close_for(request, named):
                most_free_bytes = board.most_free_bytes()
                continue
        if chosen is None:
            blocked.append((request, named, unknown))
            continue
        if host.refuses(request):
            break
        placements.append((request, board.place(request, chosen, now_s)))
        limits.start(request, board.states[chosen[0]].device.host)
        if request.origin:
            # The broker of the request counts the passes when it starts the request.
            left[request.origin] -= 1
        else:
            backfill.count_passes(chosen)
        host = host.after(request)
        most_free_bytes = board.most_free_bytes()
        if position + 1 < len(lane):
            bisect.insort(turns, (*lane[position + 1], lane, position + 1), lo=number)
    return Decisions(tuple(placements), tuple(refusals), backfill.statuses)


def _refuse(lane: Lane, board: Board) -> list[tuple[Request, PlacementError]]:
    """Return the errors of requests at the start of a list that can never be placed."""
    refusals: list[tuple[Request, PlacementError]] = []
    for _, request in lane:
        try:
            placement.check_possible(request, board.states_of(request))
            break
        except PlacementError as error:
            refusals.append((request, error))
    return refusals


def explain(
    request: Request,
    queue: RequestQueue,
    states: Sequence[DeviceState],
    host: HostState,
    patience: Patience = PATIENCE,
    now_s: float = 0.0,
    max_tasks: int | None = None,
) -> Reason:
    """Return why a request of the queue waits. `states` has all devices, other arguments as for `decide` and `Board`."""
    try:
        eligible = placement.select_devices(request, states)
    except PlacementError as error:
        return Reason(WaitKind.REFUSAL, detail=error.problem)
    reason = _host_reason(request, eligible, host) or placement.device_reason(
        request, eligible, max_tasks
    )
    keys = {state.device.key for state in eligible}
    ahead, tasks = 0, dict[tuple[str, bool], None]()
    for lane in sorted(queue.lanes):
        before = bisect.bisect_left(lane, (order_key(request),))
        first = lane[0][1]
        if before and any(s.device.key in keys for s in placement.devices_of(first, states)):
            ahead += before
            tasks[first.task_name, bool(first.origin)] = None
    reason = replace(reason, ahead=ahead, ahead_tasks=tuple(tasks)[: MOST_NAMES + 1])
    status = queue.statuses.get(request.id)
    if status is None:
        return reason
    if status.is_over(patience, now_s):
        return replace(reason, passed=status.passed, drains=True)
    # A kept device may just have left the readings.
    labels = {s.device.key: s.device.label for s in states if s.device.key in status.kept}
    kept = shown_names(labels.get(key, key[1]) for key in status.kept)
    free_in_s = None if status.starts_s is None else max(0.0, status.starts_s - now_s)
    return replace(reason, passed=status.passed, kept=kept, free_in_s=free_in_s)


def _host_reason(request: Request, states: Sequence[DeviceState], host: HostState) -> Reason | None:
    """Return why host resources allow no process for a request on any node of `states`; `None`: a node allows one."""
    names = list[str]()
    if host.nodes and not host.full:
        names, nodes = list(dict.fromkeys(state.device.host for state in states)), host.nodes
        if not all(host.refuses(request, name) for name in names):
            return None
        # The node where the request is likely to start first.
        names.sort(key=lambda name: (nodes[name].full, -nodes[name].left_bytes))
        host = nodes[names[0]]
    where = partial(Reason, nodes=len(names), where=names[0] if names else None)
    if host.full:
        return where(WaitKind.PROCESSES, limit=host.max_processes)
    if not host.refuses(request):
        return None
    free, at = shown_bytes(host.left_bytes), names[0] if len(names) > 1 else None
    return where(WaitKind.HOST_MEMORY, (request.host_bytes,), free, at)
