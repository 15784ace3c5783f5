"""Changes of ledger entries when a process starts, is suspended (for a request or a person), or resumes. Pure.

A task to be suspended keeps its reservation until all tasks suspended for the same request are away. Then one write gives
all their devices to that request, so that no other request takes them, and no task resumes too early.
`scheduling.preemption` chooses the tasks anew in each pass; a task that is in no plan any more loses the request's wish.
`phases` has the phases of an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_gpu.broker.ledger import Entry
from prefect_gpu.broker.phases import Phase, Trigger, Wish, Wisher, next_phase
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceKey, Request, Reservation
from prefect_gpu.scheduling.preemption import REST_S, Plan, Running, plan

#: Seconds after which a task that could not be suspended may be asked again: it may hold memory by then.
ASK_AGAIN_S = 10.0

#: By step of a suspension: seconds from then without a suspension for another request.
_RESTS_S = {
    Trigger.NOT_MOVED: ASK_AGAIN_S,
    Trigger.MOVING_IN: REST_S,
    Trigger.MOVED_IN: REST_S,
}

#: Major version of the driver from which a process can resume on another device.
MOVES_DRIVER = 580

#: Most GPUs of a machine on which a process resumes on another device. More were not tried (driver 580.159.04), and a
#: restore that the driver refuses loses the process.
MOST_GPUS = 4


@dataclass(frozen=True, slots=True)
class Preemption:
    """Ledger entries, by request id, by which tasks are suspended for waiting requests."""

    changes: Mapping[str, Entry]
    #: Plans of own requests that can be placed, since all tasks of the plan are away. Each plan comes with the entries of
    #: these tasks without their devices.
    ready: Sequence[tuple[Plan, Mapping[str, Entry]]]


def preempt(
    blocked: Sequence[Request],
    waiting: Container[str],
    entries: Mapping[str, Entry],
    states: Sequence[DeviceState],
    measured_bytes: Callable[[str, Device], int],
    host_room_bytes: Mapping[str, int],
    now_s: float,
    max_tasks: int | None = None,
    silent: Collection[str] = (),
    refuses: Callable[[Request, str], bool] = lambda request, node: False,
) -> Preemption:
    """Return entries that suspend or no longer suspend tasks for waiting requests; see `scheduling.preemption.plan`.

    Own requests in `blocked` have no origin; `waiting` has the ids of all own requests in the queue. `entries` are all
    tasks with devices. Tasks of `silent` owners (without heartbeats) are not suspended. `measured_bytes` returns the
    bytes that the process of a request holds on a device.
    """
    devices = {state.device.key: state.device for state in states}
    running = {
        request_id: _running(entry, devices, measured_bytes, silent)
        for request_id, entry in entries.items()
        if entry.reservations
    }
    plans = {
        each.request_id: each
        for each in plan(blocked, states, running, host_room_bytes, now_s, max_tasks, refuses)
    }
    changes: dict[str, Entry] = {}
    ready: list[tuple[Plan, Mapping[str, Entry]]] = []
    for request in blocked:
        found = plans.get(request.id)
        if request.origin or found is None:
            continue
        wish = Wish(Wisher.REQUEST, request.id)
        for request_id in found.suspended:
            if entries[request_id].wish != wish:
                changes[request_id] = replace(entries[request_id], wish=wish)
        if not changes.keys() & found.suspended.keys() and all(
            entries[i].away for i in found.suspended
        ):
            left = {
                i: _release(entries[i], _homes(entries[i], devices), now_s, moved)
                for i, moved in found.suspended.items()
            }
            ready.append((found, left))
    quiet = {state.device.key for state in states if state.snapshot.error}
    for request_id, entry in entries.items():
        asked_by = entry.suspended_for
        if asked_by is None or asked_by not in waiting:
            continue
        if asked_by in plans and request_id in plans[asked_by].suspended:
            continue
        # A device that does not answer for a moment is in no plan. A task on that device is not resumed for this.
        if not any(each.device_key in quiet for each in entry.reservations):
            changes[request_id] = replace(entry, wish=None)
    return Preemption(changes, ready)


def start(entry: Entry, pid: int) -> Entry:
    """Return the entry with the process id of a process that has started, perhaps in place of an ended standby."""
    return replace(entry, phase=next_phase(entry.phase, Trigger.STARTED), pid=pid)


def lower(entry: Entry, reservations: tuple[Reservation, ...]) -> Entry:
    """Return the entry with smaller reservations; unchanged if it has other devices now."""
    keys = [each.device_key for each in reservations]
    same = keys == [each.device_key for each in entry.reservations]
    return replace(entry, reservations=reservations) if same else entry


def hold_back(entry: Entry, away: bool, shared: bool = False) -> Entry:
    """Return the entry with a person's wish to suspend the process (`away`), or without that wish.

    `shared`: other requests may get the memory that the suspension frees.
    """
    wish = None if entry.held_back else entry.wish
    # The wish needs a new answer, so the text of an earlier refusal is removed.
    told = "" if entry.phase is Phase.RUNNING else entry.suspension
    return replace(
        entry, wish=Wish(Wisher.PERSON, shared=shared) if away else wish, suspension=told
    )


def ask_to_leave(entry: Entry) -> Entry:
    """Return the entry of a first run with the wish to suspend it for other first runs on its one device."""
    if entry.wish is not None or entry.phase is not Phase.RUNNING:
        return entry
    return replace(entry, wish=Wish(Wisher.FIRST_RUNS, shared=True))


def withdraw(entry: Entry, wish: Wish) -> Entry:
    """Return the entry without `wish`; unchanged if it has another wish now."""
    return replace(entry, wish=None) if entry.wish == wish else entry


def move(entry: Entry, step: Trigger, text: str, now_s: float) -> Entry:
    """Return the entry after a step of the suspension of its process."""
    return replace(
        entry,
        phase=next_phase(entry.phase, step),
        wish=None if step is Trigger.NOT_MOVED else entry.wish,
        suspension=text,
        rests_until_s=now_s + _RESTS_S[step] if step in _RESTS_S else entry.rests_until_s,
    )


def resume(entry: Entry, keys: tuple[DeviceKey, ...], text: str, now_s: float) -> Entry:
    """Return the entry of a process that begins to resume on `keys`; unchanged if it has other devices or a wish."""
    reserved = keys == tuple(each.device_key for each in entry.reservations)
    if not reserved or entry.wish is not None:
        return entry
    return move(entry, Trigger.MOVING_IN, text, now_s)


def share(entry: Entry, wish: Wish, devices: Mapping[DeviceKey, Device], now_s: float) -> Entry:
    """Return the entry of a suspended task with its one device released for all requests; unchanged if `wish` is outdated.

    A task keeps a device that is missing from `devices`: no other device is known on which the task could resume. A first
    run then asks for its cap as a budget; its framework respects the cap. So others cannot take its room again.
    """
    if entry.wish != wish:
        return entry
    homes = _homes(entry, devices)
    if homes:
        return _release(entry, homes, now_s)
    return entry if entry.held_back else withdraw(entry, wish)


def _running(
    entry: Entry,
    devices: Mapping[DeviceKey, Device],
    measured_bytes: Callable[[str, Device], int],
    silent: Collection[str],
) -> Running:
    request, own = entry.request, entry.reservations
    device = devices.get(own[0].device_key)
    held_bytes = 0 if device is None else measured_bytes(request.id, device)
    return Running(
        request_id=request.id,
        priority=request.priority,
        preemptible=request.preemptible
        and entry.pid is not None
        and device is not None
        and len(own) == 1
        and own[0].probe is None
        and not entry.held_back
        and entry.owner not in silent,
        devices=_homes(entry, devices),
        moved_bytes=held_bytes or own[0].reserved_bytes,
        leaves=entry.wish is not None and entry.wish.by is Wisher.FIRST_RUNS,
        since_s=entry.placed_s,
        rests_until_s=entry.rests_until_s,
        # A stopped flow suspends nothing.
        suspended_for=(entry.suspended_for or "")
        if entry.away or entry.owner not in silent
        else "",
        away=entry.away,
    )


def _homes(entry: Entry, devices: Mapping[DeviceKey, Device]) -> tuple[DeviceKey, ...]:
    """Return the devices on which the process of a task can resume."""
    device = devices.get(entry.reservations[0].device_key)
    if device is None:
        return ()
    request = entry.request
    if (request.devices and not request.returns) or not _can_move(device):
        return (device.key,)
    may_use = set(entry.devices)
    return tuple(
        key
        for key, each in devices.items()
        if key in may_use and (not request.returns or each.uuid in request.devices)
        if (each.name, each.total_bytes, each.host)
        == (device.name, device.total_bytes, device.host)
    )


def _can_move(device: Device) -> bool:
    """Return whether a process on this device can resume on another one."""
    found = re.match(r"\d+", device.driver)
    return device.kind != "nvml" or (
        found is not None and int(found[0]) >= MOVES_DRIVER and 0 < device.machine_gpus <= MOST_GPUS
    )


def _release(entry: Entry, homes: Iterable[DeviceKey], now_s: float, moved: bool = False) -> Entry:
    """Return the entry of a suspended task without its one device; `moved`: its request to resume is placed first."""
    (own,) = entry.reservations
    request = replace(
        entry.request,
        returns=True,
        returns_first=moved,
        memory=own.reserved_bytes,
        exclusive=own.exclusive,
        count=1,
        devices=tuple(uuid for _, uuid in homes),
        nodes=(),
        # The process exists, and its body has its host memory.
        host_bytes=0,
        expected_s=None if own.ends_s is None else max(0.0, own.ends_s - now_s),
        submitted_s=now_s,
        standby="",
    )
    return replace(
        entry,
        phase=next_phase(entry.phase, Trigger.RELEASED),
        # A person's wish keeps the request out of the queue.
        wish=entry.wish if entry.held_back else None,
        request=request,
        reservations=(),
    )
