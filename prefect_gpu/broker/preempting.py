"""What a pass writes into the ledger about tasks that are suspended for others.

    plan ─▶ asked ─▶ (its runner suspends it) ─▶ away ─▶ its device is released ─▶ comes back through the queue

A task that is asked keeps its reservation until all tasks that are suspended for the same request are away. Then one
write gives the devices to that request, so no other request can take them, and none of the tasks comes back too early.
Which tasks are suspended is decided in `scheduling.preemption`, anew in each pass. What was asked of a task that is in no
plan any more is withdrawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_gpu.broker.ledger import Entry
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceKey, Request
from prefect_gpu.scheduling.preemption import Plan, Running, plan

#: Major version of the driver from which a process can come back on another device.
MOVES_DRIVER = 580

#: Most GPUs of a machine on which a process comes back on another device. With more it was not tried (driver 580.159.04), and a
#: restore that the driver refuses loses the process.
MOST_GPUS = 4


@dataclass(frozen=True, slots=True)
class Preemption:
    """What is to be written about tasks that are suspended for others."""

    #: Entries by request id.
    changes: Mapping[str, Entry]
    #: Plans of own requests whose tasks are all away: the request can be placed there, and the entries of those tasks
    #: without their devices.
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
    """Return what becomes of the running tasks for the requests that wait.

    Args:
        blocked: Waiting requests of all brokers in the order of the queue. Those without an origin are the own ones.
            The first ones, without those that something else than devices keeps from their start.
        waiting: Ids of all own requests that wait.
        entries: Of all tasks that have devices, by request id.
        states: The devices, after the placements of the pass.
        measured_bytes: Returns what the process of a request holds of a device.
        host_room_bytes: Bytes of each machine's own memory that can be filled, by `Device.host`.
        now_s: Monotonic seconds.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        silent: Owners that send no heartbeats: what they own is not suspended.
        refuses: Returns whether no process may start for a request on a node now.
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
        for request_id in found.suspended:
            if entries[request_id].suspended_for != request.id:
                changes[request_id] = replace(entries[request_id], suspended_for=request.id)
        if not changes.keys() & found.suspended.keys() and all(
            entries[i].away for i in found.suspended
        ):
            left = {
                i: _make_way(entries[i], _homes(entries[i], devices), now_s, moved)
                for i, moved in found.suspended.items()
            }
            ready.append((found, left))
    quiet = {state.device.key for state in states if state.snapshot.error}
    for request_id, entry in entries.items():
        asker = plans.get(entry.suspended_for)
        if entry.suspended_for not in waiting or (asker and request_id in asker.suspended):
            continue
        # A device that does not answer for a moment is in no plan, which is no reason to bring a task back to it.
        if not any(each.device_key in quiet for each in entry.reservations):
            changes[request_id] = withdraw(entry)
    return Preemption(changes, ready)


def withdraw(entry: Entry) -> Entry:
    """Return the entry of a task that is not to be suspended for another request any more."""
    return replace(entry, suspended_for="")


def share(entry: Entry, devices: Mapping[DeviceKey, Device], now_s: float) -> Entry:
    """Return the entry of a task that a person has suspended: if others may have its device, its request waits for room.

    It keeps its device where that is not there: no other device is known that it could come back on.

    Args:
        entry: Of the task, which has one device.
        devices: Those that are there.
        now_s: Monotonic seconds.
    """
    if not (entry.held_back and entry.shared and entry.away and entry.reservations):
        return entry
    homes = _homes(entry, devices)
    return _make_way(entry, homes, now_s) if homes else entry


def ask_to_leave(entry: Entry) -> Entry:
    """Return the entry of a first run, which has one device, whose memory is wanted on the host for those beside it."""
    if entry.away or entry.suspended_for or entry.held_back or entry.pid is None:
        return entry
    return replace(entry, leaves=True)


def leave(entry: Entry, devices: Mapping[DeviceKey, Device], now_s: float) -> Entry:
    """Return the entry of a first run that has left its device to those beside it: its request waits for room.

    It asks for its cap, to which its framework keeps, as a task with a budget does. So others cannot take its room again.

    Args:
        entry: Of the task, which has one device.
        devices: Those that are there.
        now_s: Monotonic seconds.
    """
    if not (entry.leaves and entry.away and entry.reservations):
        return entry
    homes = _homes(entry, devices)
    return _make_way(entry, homes, now_s) if homes else replace(entry, leaves=False)


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
        leaves=entry.leaves,
        since_s=entry.placed_s,
        rests_until_s=entry.rests_until_s,
        # A flow that was stopped suspends nothing.
        suspended_for=entry.suspended_for if entry.away or entry.owner not in silent else "",
        away=entry.away,
    )


def _homes(entry: Entry, devices: Mapping[DeviceKey, Device]) -> tuple[DeviceKey, ...]:
    """Return the devices on which the process of a task can come back."""
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
    """Return whether a process can come back on another device than this one."""
    found = re.match(r"\d+", device.driver)
    return device.kind != "nvml" or (
        found is not None and int(found[0]) >= MOVES_DRIVER and 0 < device.machine_gpus <= MOST_GPUS
    )


def _make_way(entry: Entry, homes: Iterable[DeviceKey], now_s: float, moved: bool = False) -> Entry:
    """Return the entry of a task that is away and leaves its device to other requests.

    Args:
        entry: Of the task, which has one device.
        homes: Devices that it may come back on.
        now_s: Monotonic seconds.
        moved: Another device has the room for it: its return is placed first.
    """
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
        # It runs already, and its body has what it needs of the machine.
        host_bytes=0,
        expected_s=None if own.ends_s is None else max(0.0, own.ends_s - now_s),
        submitted_s=now_s,
        standby="",
    )
    return replace(entry, request=request, suspended_for="", leaves=False, reservations=())
