"""Requests made inside a GPU task that holds memory while it waits for their results.

Pure. Such a request is *stuck* if it can start only after the end of a task that waits for stuck requests (a deadlock).
Its *ancestors* are the GPU tasks around it. A waiting ancestor lends a stuck request the unused bytes of its own
reservation, which counts for less until the borrower has ended. If that is still too little memory, the request is
*hopeless*: the scheduler refuses one hopeless request at a time.

`scheduling_pass` places all other requests. The process of a task reports whether its body waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import DeviceState, lent_bytes
from prefect_gpu.scheduling.model import DeviceKey, Placement, Request, Reservation
from prefect_gpu.scheduling.placement import (
    Board,
    PlacementStyle,
    devices_of,
    fits_now,
    need_bytes,
    select_devices,
)
from prefect_gpu.scheduling.scheduling_pass import order_key
from prefect_gpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class Holder:
    """A placed request, whose task may make requests of its own."""

    #: Ids of the requests of the GPU tasks around it, outermost first.
    ancestors: tuple[str, ...] = ()
    #: Whether the task's body is blocked until tasks that it submitted end.
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Placed requests, reservations and measured memory of all devices after a scheduling pass."""

    #: All devices, with the reservations of the pass so far.
    states: Sequence[DeviceState]
    #: Placed requests by id. A reservation of a request that is missing here counts as one whose task does not wait.
    holders: Mapping[str, Holder]
    #: Bytes that a request's processes hold, by device and request id.
    measured: Mapping[DeviceKey, Mapping[str, int]]

    def waits(self, request_id: str) -> bool:
        """Return whether a request is placed and its task's body waits for tasks that it submitted."""
        return request_id in self.holders and self.holders[request_id].waits

    def unused_bytes(self, reservation: Reservation, lent: Mapping[str, int]) -> int:
        """Return the bytes of a reservation that its processes do not use and that are not lent (`lent`: by request)."""
        request_id = reservation.request_id
        held = self.measured.get(reservation.device_key, {}).get(request_id, 0)
        return max(0, reservation.reserved_bytes - lent.get(request_id, 0) - held)

    def after(self, request: Request, placement: Placement) -> Scene:
        """Return the scene with one more request placed."""
        held = {each.device_key: each for each in placement.reservations}
        return Scene(
            [s.after(held[s.device.key]) if s.device.key in held else s for s in self.states],
            {**self.holders, request.id: Holder(request.ancestors)},
            self.measured,
        )


@dataclass(frozen=True, slots=True)
class Rescue:
    """Placements of stuck requests, or a hopeless request to refuse."""

    placements: tuple[tuple[Request, Placement], ...] = ()
    #: Request to refuse if it stays hopeless for longer than a moment; `None`: no request.
    hopeless: Request | None = None


def rescue(
    waiting: Sequence[Request],
    scene: Scene,
    style: PlacementStyle = "spread",
    max_tasks: int | None = None,
    now_s: float = 0.0,
) -> Rescue:
    """Return placements for this broker's stuck requests in memory lent by their ancestors, or a request to refuse.

    Devices kept for other requests are used, too: those requests wait for the ancestors. Of several hopeless requests
    the last in the queue is to be refused: the end of its ancestor may be enough for the others.

    `waiting` has the requests of all brokers that were made inside tasks and still wait after a scheduling pass.
    `max_tasks` is the most tasks on a device at a time, waiting tasks not counted; `None`: as many as fit.
    """
    stuck = find_stuck(waiting, scene, lends=False)
    placements: list[tuple[Request, Placement]] = []
    for request in sorted(waiting, key=order_key):
        if request.origin or not (request.id in stuck or _is_quiet(request, scene)):
            continue
        placement = _lend(request, scene, style, max_tasks, now_s)
        if placement is not None:
            placements.append((request, placement))
            scene = scene.after(request, placement)
    if placements:
        return Rescue(tuple(placements))
    never = find_stuck(waiting, scene, lends=True)
    last = max((r for r in waiting if r.id in never), key=order_key, default=None)
    return Rescue(hopeless=None if last is None or last.origin else last)


def find_stuck(waiting: Iterable[Request], scene: Scene, lends: bool) -> set[str]:
    """Return the ids of stuck requests: each can start only after the end of a task that waits for one of them.

    Assumed are: a task that does not wait ends; a waiting task ends once all requests made inside it have ended; a
    request starts, and then ends, if devices could hold it beside the tasks that do not end. `lends`: waiting ancestors
    lend their unused memory.
    """
    left = {request.id: request for request in waiting}
    inside: dict[str, set[str]] = {}
    for request_id, around in [
        *((r.id, r.ancestors) for r in left.values()),
        *((i, h.ancestors) for i, h in scene.holders.items()),
    ]:
        for ancestor in around:
            inside.setdefault(ancestor, set()).add(request_id)
    staying = {i for i, holder in scene.holders.items() if holder.waits}
    while True:
        starts = {i for i, r in left.items() if _could_start(r, scene, staying, lends)}
        for request_id in starts:
            del left[request_id]
        ends = {i for i in staying if not inside.get(i, set()) & (left.keys() | staying)}
        staying -= ends
        if not starts and not ends:
            return set(left)


def _could_start(request: Request, scene: Scene, staying: Collection[str], lends: bool) -> bool:
    """Return whether a request could start once all tasks except `staying` have ended."""
    eligible = devices_of(request, scene.states)
    lenders = _lenders(request, scene) if lends else frozenset()
    found = 0
    for state in eligible:
        left = [r for r in state.reservations if r.request_id in staying]
        lent = lent_bytes(left)
        free = state.capacity_bytes
        for each in left:
            held = scene.measured.get(state.device.key, {}).get(each.request_id, 0)
            if each.request_id in lenders or (lends and each.probe is not None):
                free -= held
            else:
                free -= max(each.reserved_bytes - lent.get(each.request_id, 0), held)
        beside = tuple(r for r in left if r.request_id not in lenders)
        empty = DeviceState(state.snapshot, free, 0, state.capacity_bytes, beside)
        # A device that does not answer may answer again.
        found += bool(state.snapshot.error) or fits_now(request, empty)
    return not eligible or found >= request.count


def _is_quiet(request: Request, scene: Scene) -> bool:
    """Return whether each task on a request's devices waits, and no task submitted inside such a task runs."""
    busy = {a for i, h in scene.holders.items() if not h.waits for a in (i, *h.ancestors)}
    states = devices_of(request, scene.states)
    held = [each.request_id for state in states for each in state.reservations]
    return bool(states) and all(scene.waits(each) and each not in busy for each in held)


def _lenders(request: Request, scene: Scene) -> frozenset[str]:
    return frozenset(i for i in request.ancestors if scene.waits(i))


def _lend(
    request: Request, scene: Scene, style: PlacementStyle, max_tasks: int | None, now_s: float
) -> Placement | None:
    """Place a request as if the unused memory of its waiting ancestors were free; `None`: too little memory now."""
    lenders = _lenders(request, scene)
    states = [
        state
        for state in scene.states
        if max_tasks is None
        or sum(not scene.waits(r.request_id) for r in state.reservations) < max_tasks
    ]
    board = Board([_seen_from_inside(each, scene, lenders) for each in states], style)
    try:
        chosen = board.choose(request, board.named(request))
    except PlacementError:
        # A device that the request names is not on the board: it has `max_tasks` tasks.
        return None
    if chosen is None:
        return None
    placement = board.place(request, chosen, now_s)
    reservations = tuple(
        replace(each, loans=_loans(each, request, states[at], scene, lenders))
        for at, each in zip(chosen, placement.reservations, strict=True)
    )
    return replace(placement, reservations=reservations)


def _seen_from_inside(state: DeviceState, scene: Scene, lenders: Collection[str]) -> DeviceState:
    """Return a device without the reservations of `lenders`, and with their unused memory free."""
    # Waiting probes count at the memory that they hold: their reservations may add up to more than the device has.
    lent = lent_bytes(state.reservations)
    more = sum(
        scene.unused_bytes(each, lent)
        for each in state.reservations
        if each.request_id in lenders or (each.probe is not None and scene.waits(each.request_id))
    )
    headroom = state.snapshot.usable_bytes - state.capacity_bytes
    free = max(state.free_bytes, min(state.free_bytes + more, state.snapshot.free_bytes - headroom))
    beside = tuple(each for each in state.reservations if each.request_id not in lenders)
    return replace(state, free_bytes=free, reservations=beside, probe_bytes=None)


def _loans(
    reservation: Reservation,
    request: Request,
    state: DeviceState,
    scene: Scene,
    lenders: Collection[str],
) -> tuple[tuple[str, int], ...]:
    """Return how many bytes of a reservation each outer task (`lenders`) lends, the innermost first; the rest is free."""
    lent = lent_bytes(state.reservations)
    unused = Counter[str]()
    for each in state.reservations:
        if each.request_id in lenders:
            unused[each.request_id] = scene.unused_bytes(each, lent)
    loans: list[tuple[str, int]] = []
    left = reservation.reserved_bytes
    for lender in reversed(request.ancestors):
        if (taken := min(left, unused[lender])) > 0:
            loans.append((lender, taken))
            left -= taken
    return tuple(loans)


def refusal(request: Request, scene: Scene) -> PlacementError:
    """Return the error for a hopeless request: it lists the tasks on its devices and their memory, with advice."""
    whose = set(request.ancestors)
    devices: list[str] = []
    outer = "the outer task"
    for state in select_devices(request, scene.states):
        need = need_bytes(request, state)
        asked = "a device to itself" if need is None else format_bytes(need)
        parts = [
            f"{state.device.label}: {asked} asked, {format_bytes(state.capacity_bytes)} usable"
        ]
        for each in state.reservations:
            held = scene.measured.get(state.device.key, {}).get(each.request_id, 0)
            holds = f"holds {format_bytes(each.reserved_bytes)} and uses {format_bytes(held)}"
            if each.request_id in whose:
                outer = f"the outer task {each.task_name!r}"
                parts.append(f"{outer} {holds}")
            else:
                parts.append(f"{each.task_name!r} {holds}")
        devices.append("; ".join(parts))
    return PlacementError(
        f"{request.task_name!r} was submitted from inside a GPU task, {outer} waits for it, and it can never start while "
        f"tasks that wait hold what they hold; give the outer task a smaller gpu:memory or no gpu tag, or submit "
        f"{request.task_name!r} from the flow",
        tuple(devices),
    )
