"""Which open requests join the queue: the order of `submit`, and one first run at a time for each history. Pure.

A task run has its place in the order of `submit` before it makes a request, since its inputs and its budget are chosen
first. It delays later task runs for as long as its inputs are there and its request may come at any moment.

A request whose need is unknown on a device model is a first run there. While another one of the same history waits for
devices, or has a device to itself, or has ended and its run is not kept yet, the request uses other models, or stays open.
"""

from __future__ import annotations

import math
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


def admit(
    known: MachineState, pending: Collection[int], now_s: float
) -> list[tuple[Ticket, Request]]:
    """Return the open requests that join the queue now, in order, each as it is to be placed; update `known`.

    `pending` has the task runs (`Request.sequence`) of `known.to_come` whose inputs are not there yet.
    """
    if not known.open:
        known.held = None
        return []
    found = sorted(known.open.values(), key=lambda ticket: ticket.request.sequence)
    before = _first_to_come(known, pending, [t.request.sequence for t in found], now_s)
    #: By history: task runs of which it is the first run.
    first: dict[HistoryKey, set[int]] = {}
    for sequence, ticket in known.first_runs.items():
        for key in ticket.claims:
            first.setdefault(key, set()).add(sequence)
    capacities: dict[object, dict[Device, int]] = {}
    joining: list[tuple[Ticket, Request]] = []
    for ticket in found:
        request, histories = ticket.request, ticket.histories
        if request.sequence > before:
            break
        if histories:
            busy = {
                name
                for name, key in histories.items()
                if first.get(key, set()) - {request.sequence}
            }
            where = request.devices, request.nodes
            if busy and where not in capacities:
                capacities[where] = known.view.capacities(*where)
            free = frozenset(key for name, key in histories.items() if name not in busy)
            if busy and not free and busy >= {device.name for device in capacities[where]}:
                continue
            if busy:
                request = _beside(request, busy, capacities[where], bool(free))
            ticket.claims = free
            known.first_runs[request.sequence] = ticket
            for key in free:
                first.setdefault(key, set()).add(request.sequence)
        joining.append((ticket, request))
    return joining


def _first_to_come(
    known: MachineState, pending: Collection[int], asked: list[int], now_s: float
) -> float:
    """Return the first task run whose request the later ones wait for; infinity: they wait for none."""
    while True:
        first = next((each for each in known.to_come if each not in pending), math.inf)
        held = next((each for each in asked if each > first), None)
        if held is None:
            known.held = None
            return math.inf
        if known.held is None or known.held[0] != first:
            known.held = first, now_s
        if now_s - known.held[1] < PATIENCE_S:
            return first
        known.to_come = [each for each in known.to_come if each > held]


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
    if sum(device.name not in busy for device in capacities) < request.count:
        # It needs one of these devices.
        return replace(request, probe_fraction=fraction)
    known = request.memory.by_model if isinstance(request.memory, ModelBudgets) else ()
    never = dict.fromkeys(busy, NEVER_BYTES)
    budgets = ModelBudgets(tuple(sorted({**dict(known), **never}.items())))
    return replace(request, probe_fraction=fraction, memory=budgets)


def explain(known: MachineState, ticket: Ticket) -> Reason:
    """Return why an open request is not in the queue, by the last call of `admit`."""
    earlier = known.held is not None and ticket.request.sequence > known.held[0]
    if earlier or not ticket.histories:
        return Reason(WaitKind.EARLIER)
    return Reason(WaitKind.FIRST_RUN, tasks=(ticket.request.task_name,))
