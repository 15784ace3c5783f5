"""Which open requests join the queue: the order of `submit`, and one first run at a time for each history. Pure.

A task run has its place in the order of `submit` before it makes a request, from the moment when its inputs are there and
its request may come at any moment. It delays later task runs for at most `PATIENCE_S`.

A request whose need is unknown on a device model is a first run there. While another one of the same history waits for
devices, or has a device to itself, or has ended and its run is not kept yet, the request uses other models, or stays open.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from prefect_gpu.broker.machine_state import MachineState
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import NEVER_BYTES, Device, ModelBudgets, Placement, Request
from prefect_gpu.scheduling.reasons import Reason, WaitKind

#: Seconds after which a request no longer waits for an earlier task run, which may wait invisibly, as for a slot of a
#: tag's concurrency limit. Of 200 mapped tasks on two cores, 45 asked after a later one, by at most 0.1 s.
PATIENCE_S = 2.0


def admit(known: MachineState, now_s: float) -> list[tuple[Ticket, Request]]:
    """Return the open requests that join the queue now, in order, each as it is to be placed; update `known`."""
    before = _first_to_come(known, now_s)
    #: By history: task runs of which it is the first run.
    first: dict[HistoryKey, set[int]] = {}
    for sequence, ticket in known.first_runs.items():
        for key in ticket.claims:
            first.setdefault(key, set()).add(sequence)
    capacities: dict[object, dict[Device, int]] = {}
    joining: list[tuple[Ticket, Request]] = []
    heads = [(members[0], group) for group, members in known.open_groups.items()]
    heapq.heapify(heads)
    while heads:
        (sequence, request_id), group = heapq.heappop(heads)
        if sequence > before:
            break
        ticket = known.open[request_id]
        where = ticket.request.devices, ticket.request.nodes
        if ticket.histories and where not in capacities:
            capacities[where] = known.view.capacities(*where)
        request = _admitted(ticket, first, capacities.get(where, {}))
        if request is None:
            # Nor may any other of its group.
            continue
        joining.append((ticket, request))
        known.close(ticket)
        if members := known.open_groups.get(group):
            heapq.heappush(heads, (members[0], group))
        if ticket.histories:
            known.first_runs[sequence] = ticket
            for key in ticket.claims:
                first.setdefault(key, set()).add(sequence)
    return joining


def _first_to_come(known: MachineState, now_s: float) -> float:
    """Return the first task run whose request the later ones wait for; infinity: they wait for none."""
    last = max((members[-1][0] for members in known.open_groups.values()), default=0)
    held = known.held
    while known.to_come and known.to_come[0] < last:
        if not held or held[-1][0] < last:
            held.append((last, now_s))
        sequence, since_s = held[0]
        if now_s - since_s < PATIENCE_S:
            return known.to_come[0]
        del held[0], known.to_come[: bisect.bisect(known.to_come, sequence)]
    held.clear()
    return math.inf


def _admitted(
    ticket: Ticket, first: Mapping[HistoryKey, set[int]], capacities: Mapping[Device, int]
) -> Request | None:
    """Return an open request as it is placed beside the first runs in `first`; `None`: it must not be placed yet."""
    request, histories = ticket.request, ticket.histories
    busy = {name for name, key in histories.items() if first.get(key, set()) - {request.sequence}}
    free = frozenset(key for name, key in histories.items() if name not in busy)
    if busy and not free and busy >= {device.name for device in capacities}:
        return None
    ticket.claims = free
    return _beside(request, busy, capacities, bool(free)) if busy else request


def claims(
    placement: Placement, histories: Mapping[str, HistoryKey], over: bool
) -> frozenset[HistoryKey]:
    """Return the histories for which a placed request is the first run that others wait for; `over`: its outcome is known."""
    if not over and any(reservation.probe for reservation in placement.reservations):
        # It shares its device: another one may start beside it.
        return frozenset()
    key = histories.get(placement.devices[0].name)
    return frozenset() if key is None else frozenset({key})


def _beside(
    request: Request, busy: Collection[str], capacities: Mapping[Device, int], probes: bool
) -> Request:
    """Return a request as it is placed beside the first runs on models in `busy`; `probes`: it is one on another model."""
    fraction = request.probe_fraction if probes else 0.0
    others = Counter(device.host for device in capacities if device.name not in busy)
    if max(others.values(), default=0) < request.count:
        # It needs one of these devices.
        return replace(request, probe_fraction=fraction)
    known = request.memory.by_model if isinstance(request.memory, ModelBudgets) else ()
    never = dict.fromkeys(busy, NEVER_BYTES)
    budgets = ModelBudgets(tuple(sorted({**dict(known), **never}.items())))
    return replace(request, probe_fraction=fraction, memory=budgets)


def explain(known: MachineState, ticket: Ticket) -> Reason:
    """Return why an open request is not in the queue, by the last call of `admit`."""
    earlier = bool(known.to_come) and ticket.request.sequence > known.to_come[0]
    if earlier or not ticket.histories:
        return Reason(WaitKind.EARLIER)
    return Reason(WaitKind.FIRST_RUN, tasks=(ticket.request.task_name,))
