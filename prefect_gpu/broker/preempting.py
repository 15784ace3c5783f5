"""Ledger entries of tasks that are suspended for others.

    plan ─▶ asked ─▶ (its runner suspends it) ─▶ away ─▶ its device is released ─▶ returns through the queue

A task that is asked keeps its reservation until all tasks that are suspended for the same request are away. Then one
write gives the devices to that request, so no other request can take them, and none of the tasks returns too early.
`scheduling.preemption` chooses the tasks anew in each pass; a task in no plan any more is no longer asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_gpu.broker.ledger import Entry
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceKey, Request
from prefect_gpu.scheduling.preemption import Plan, Running, plan

#: Major version of the driver from which a process can resume on another device.
MOVES_DRIVER = 580

#: Most GPUs of a machine on which a process resumes on another device. More were not tried (driver 580.159.04), and a
#: restore that the driver refuses loses the process.
MOST_GPUS = 4


@dataclass(frozen=True, slots=True)
class Preemption:
    """Entries to write about tasks that are suspended for others."""

    #: Entries by request id.
    changes: Mapping[str, Entry]
    #: Plans of own requests whose tasks are all away, so that the request can be placed, each with the entries of these
    #: tasks without their devices.
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
    """Return the changes to running tasks for waiting requests.

    Args:
        blocked: The first waiting requests of all brokers in queue order that only lack devices; own ones have no origin.
        waiting: Ids of all own waiting requests.
        entries: Entries of all tasks that have devices, by request id.
        states: The devices, after the placements of the pass.
        measured_bytes: Returns the bytes that the process of a request holds on a device.
        host_room_bytes: Bytes of each machine's own memory that can be filled, by `Device.host`.
        now_s: Monotonic seconds.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        silent: Owners without heartbeats, whose tasks are not suspended.
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
        # A device that does not answer for a moment is in no plan, which is no reason to resume a task on it.
        if not any(each.device_key in quiet for each in entry.reservations):
            changes[request_id] = withdraw(entry)
    return Preemption(changes, ready)


def withdraw(entry: Entry) -> Entry:
    """Return the entry of a task that is no longer to be suspended for another request."""
    return replace(entry, suspended_for="")


def share(entry: Entry, devices: Mapping[DeviceKey, Device], now_s: float) -> Entry:
    """Return the entry of a task that a person has suspended: if others may have its one device, its request waits.

    It keeps its device where that is missing from `devices`: no other device is known on which it could resume.
    """
    if not (entry.held_back and entry.shared and entry.away and entry.reservations):
        return entry
    homes = _homes(entry, devices)
    return _make_way(entry, homes, now_s) if homes else entry


def ask_to_leave(entry: Entry) -> Entry:
    """Return the entry of a first run with one device that is to be suspended for the first runs beside it."""
    if entry.away or entry.suspended_for or entry.held_back or entry.pid is None:
        return entry
    return replace(entry, leaves=True)


def leave(entry: Entry, devices: Mapping[DeviceKey, Device], now_s: float) -> Entry:
    """Return the entry of a suspended first run that leaves its one device to others: its request waits to resume.

    It asks for its cap, which its framework respects, as a task with a budget does. So others cannot take its room again.
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
        # A stopped flow suspends nothing.
        suspended_for=entry.suspended_for if entry.away or entry.owner not in silent else "",
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


def _make_way(entry: Entry, homes: Iterable[DeviceKey], now_s: float, moved: bool = False) -> Entry:
    """Return the entry of a suspended task that leaves its one device; `moved`: its return is placed first."""
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
        # It runs already, and its body has its host memory.
        host_bytes=0,
        expected_s=None if own.ends_s is None else max(0.0, own.ends_s - now_s),
        submitted_s=now_s,
        standby="",
    )
    return replace(entry, request=request, suspended_for="", leaves=False, reservations=())
