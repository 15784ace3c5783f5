"""One scheduling pass over the queue: requests to place or refuse, and tasks to suspend for waiting requests.

`make_plan` applies the rules of `scheduling` to a `MachineState`. Its plan is to be written into the ledger, all or
nothing. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from prefect_gpu.broker.ledger import Entry, owner_of
from prefect_gpu.broker.machine_state import MachineState
from prefect_gpu.broker.phases import Trigger, next_phase
from prefect_gpu.broker.preempting import preempt
from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import BlockedStatus
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import DeviceKey, Placement, Reading, Request
from prefect_gpu.scheduling.nested import Holder, Scene, refusal, rescue
from prefect_gpu.scheduling.placement import Board
from prefect_gpu.scheduling.scheduling_pass import Decisions, HostState, decide

#: Seconds after which another broker's requests that seem to fit count as blocked: that broker may have unknown limits.
PASSIVE_S = 2.0

#: Seconds for which a placed task counts as using a ready standby process on its node. After that the node's own number
#: excludes the standby: the task has been sent there, and a reading has come.
STANDBY_TAKEN_S = 1.0

#: Most waiting requests in one pass for which tasks may be suspended.
MOST_BLOCKED = 32

#: Seconds for which a request must be hopeless (see `nested`) before it is refused: ended processes may still release
#: memory, and other flows may still write to the ledger.
HOPELESS_S = 1.0

#: Own requests that a pass places, with their placements.
Made: TypeAlias = tuple[tuple[Request, Placement], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions of one scheduling pass."""

    #: Version of the ledger on which the decisions were made.
    version: int
    #: Entries to write into the ledger, by request id.
    changes: Mapping[str, Entry]
    made: Made
    refusals: tuple[tuple[Request, PlacementError], ...]
    #: New statuses of blocked requests, by id.
    statuses: Mapping[str, BlockedStatus]
    #: Whether `changes` has entries of running tasks, which other brokers of this process must learn.
    suspends: bool
    #: Whether another pass is needed once this plan is written.
    again: bool
    #: By device: bytes held by processes of other programs.
    foreign_bytes: Mapping[DeviceKey, int]


def make_plan(known: MachineState, reading: Reading, now_s: float) -> Plan:
    """Return the decisions of one pass by the last good reading; update `known.passive_s` and `known.hopeless`."""
    states, host = known.states(), known.host_state(reading)
    decisions = _decide(known, reading, states, host, now_s)
    made = tuple((r, placement) for r, placement in decisions.placements if not r.origin)
    suspended: Mapping[str, Entry] = {}
    again = False
    if known.ledger.preemptible and known.settings.preempts:
        suspended, made, again = _preempt(known, decisions, made, states, host, now_s)
    return Plan(
        known.ledger.version,
        {**_changes(known, decisions, made, now_s), **suspended},
        made,
        decisions.refusals,
        decisions.statuses,
        bool(suspended),
        again,
        {state.device.key: state.foreign_bytes for state in states},
    )


def _decide(
    known: MachineState,
    reading: Reading,
    states: Sequence[DeviceState],
    host: HostState,
    now_s: float,
) -> Decisions:
    """Return the requests to place, and the requests to refuse since they can never be placed."""
    board = _board(known, states, known.queue.least_bytes, _ready_standbys(known, reading, now_s))
    passive = frozenset(o for o, since_s in known.passive_s.items() if now_s - since_s > PASSIVE_S)
    slots = _process_slots(known, passive, now_s)
    patience = known.settings.patience
    decisions = decide(known.queue, board, host, patience, now_s, slots, passive)
    if known.settings.ancestors:
        decisions = _rescue(known, reading, decisions, board, host, now_s)
    # Other brokers should soon start the requests that this pass has placed for them.
    could = {request.origin for request, _ in decisions.placements if request.origin}
    known.passive_s = {
        origin: known.passive_s.get(origin, now_s)
        for origin in (*could, *passive)
        if owner_of(origin) not in known.ledger.silent
    }
    return decisions


def _board(
    known: MachineState,
    states: Sequence[DeviceState],
    least_bytes: int = 0,
    standbys: Mapping[str, Mapping[str, int]] | None = None,
) -> Board:
    around = known.settings.ancestors
    return Board(
        states,
        known.settings.style,
        known.settings.max_tasks_per_device,
        [r for s in states if around for r in s.reservations if r.request_id in around],
        least_bytes,
        standbys or {},
    )


def _process_slots(known: MachineState, passive: Collection[str], now_s: float) -> dict[str, int]:
    """Return how many processes each other broker may start; 0: the broker is silent, or was passive for too long."""
    most_s = known.settings.patience.wait_s
    return {
        origin: 0
        if owner_of(origin) in known.ledger.silent
        or (origin in passive and now_s - known.passive_s[origin] > most_s)
        else most - known.ledger.holding.get(origin, 0)
        for origin, most in known.most_processes.items()
    }


def _ready_standbys(
    known: MachineState, reading: Reading, now_s: float
) -> Mapping[str, Mapping[str, int]]:
    """Return the number of ready standby processes in a cluster, by kind and node."""
    ready: dict[str, Counter[str]] = {}
    for name, node in reading.nodes.items():
        for kind, count in node.standbys.items():
            ready.setdefault(kind, Counter())[name] = count
    # The newest placement first.
    for ticket in reversed(known.placed.values()) if ready else ():
        if ticket.placed_s < now_s - STANDBY_TAKEN_S:
            break
        if ticket.request.standby in ready:
            ready[ticket.request.standby][ticket.devices[0].host] -= 1
    return ready


def _rescue(
    known: MachineState,
    reading: Reading,
    decisions: Decisions,
    board: Board,
    host: HostState,
    now_s: float,
) -> Decisions:
    """Add decisions on requests made inside tasks that hold memory and wait for the requests; see `nested`."""
    settings, since_s = known.settings, known.waits_since_s
    if since_s is None or reading.at_s < since_s or host.full:
        # An older reading does not show the current memory of the task that this process runs inside.
        return decisions
    holders = {i: Holder(e.request.ancestors, e.waits) for i, e in known.running.items()}
    for at, request_id in enumerate(settings.ancestors):
        innermost = at == len(settings.ancestors) - 1
        if innermost or request_id not in holders:
            holders[request_id] = Holder(settings.ancestors[:at], waits=True)
    decided = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
    waiting = [r for r in known.queue if r.ancestors and r.id not in decided]
    if not all(holder.waits for holder in holders.values()):
        # Running tasks may release host memory.
        waiting = [r for r in waiting if r.origin or not host.refuses(r, "")]
    scene = Scene(board.states, holders, known.view.measured)
    found = rescue(waiting, scene, settings.style, settings.max_tasks_per_device, now_s)
    placements = (*decisions.placements, *found.placements)
    if (last := found.hopeless) is None:
        known.hopeless = None
    elif known.hopeless is None or known.hopeless[0] != last.id:
        known.hopeless = last.id, reading.at_s
    elif reading.at_s - known.hopeless[1] >= HOPELESS_S:
        refused = (last, refusal(last, scene))
        return replace(decisions, refusals=(*decisions.refusals, refused))
    return replace(decisions, placements=placements)


def _preempt(
    known: MachineState,
    decisions: Decisions,
    made: Made,
    states: Sequence[DeviceState],
    host: HostState,
    now_s: float,
) -> tuple[Mapping[str, Entry], Made, bool]:
    """Return entries of tasks to suspend for waiting requests, all own placements, and whether another pass is needed."""
    # The placements include a request for which tasks were suspended; another pass may place more such requests.
    settings = known.settings
    hosts = host.nodes or dict.fromkeys(known.node_of.values(), host)
    decided = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
    waits = (
        r
        for r in known.queue
        if r.id not in decided and not all(each.refuses(r) for each in hosts.values())
    )
    # Not suspended: tasks that this process runs inside, which wait for it, and tasks with borrowed memory, which
    # would not be free for others.
    entries = {
        i: e
        for i, e in known.running.items()
        if i not in settings.ancestors and not any(r.loans for r in e.reservations)
    }
    by_key = {state.device.key: at for at, state in enumerate(states)}
    rooms = {name: each.left_bytes for name, each in hosts.items() if not each.full}
    after = list(states)
    for _, placement in decisions.placements:
        for reservation in placement.reservations:
            at = by_key[reservation.device_key]
            after[at] = after[at].after(reservation)
    found = preempt(
        () if host.full else tuple(itertools.islice(waits, MOST_BLOCKED)),
        known.waiting,
        entries,
        [state for state in after if state.device.host in rooms],
        known.view.measured_bytes,
        rooms,
        now_s,
        settings.max_tasks_per_device,
        known.ledger.silent,
        host.refuses,
    )
    changes = dict(found.changes)
    if decisions.placements:
        # The memory left by suspended tasks is known once these placements are written.
        return changes, made, bool(found.ready and made)
    for plan, left in found.ready[:1]:
        gone = {
            key: tuple(r for r in held if r.request_id not in left)
            for key, held in known.ledger.by_device.items()
        }
        board = _board(known, known.states(replace(known.ledger, by_device=gone)))
        request = known.waiting[plan.request_id].request
        named = {by_key[key]: place for place, key in enumerate(plan.devices)}
        node = known.node_of[plan.devices[0]]
        chosen = board.choose(request, named)
        if chosen is not None and not host.refuses(request, node):
            made = ((request, board.place(request, chosen, now_s)),)
            changes.update(left)
    return changes, made, False


def _changes(
    known: MachineState, decisions: Decisions, made: Made, now_s: float
) -> dict[str, Entry]:
    """Return the entries that a pass writes: new waiting requests, changed statuses of blocked ones, reservations."""
    changes: dict[str, Entry] = {}
    refused = {request.id for request, _ in decisions.refusals}
    for request_id, request in known.unwritten.items():
        if request_id in known.waiting and request_id not in refused:
            changes[request_id] = known.entry_of(request)
    for request_id, status in decisions.statuses.items():
        entry = changes.get(request_id) or known.entries.get(request_id)
        if entry is None or entry.status == status:
            continue
        # Only a request's own broker keeps devices for the request.
        if request_id in known.waiting or entry.status.passed < status.passed:
            changes[request_id] = replace(entry, status=status)
    for request, placement in made:
        entry = changes.get(request.id) or known.entries.get(request.id)
        entry = entry or known.entry_of(request)
        keys = [reservation.device_key for reservation in placement.reservations]
        if entry.devices is not known.device_keys and not set(keys) <= set(entry.devices):
            # These devices came after the request was submitted.
            entry = replace(entry, devices=tuple(dict.fromkeys((*entry.devices, *keys))))
        changes[request.id] = replace(
            entry,
            phase=next_phase(entry.phase, Trigger.PLACED),
            reservations=placement.reservations,
            placed_s=entry.placed_s or now_s,
        )
    return changes
