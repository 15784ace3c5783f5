"""The tasks on the devices of this machine, and the waiting requests: `prefect-gpu status`.

The host's ledger lists the tasks of all flows that hold or want memory; the devices show the memory in use. Both are
read once. The rest is arithmetic over values with the brokers' own functions (`scheduling.memory`), and reasons of
waits are the brokers', too (`scheduling.scheduling_pass.explain`). Nothing is changed.

    devices, ledger, names of processes -> Found -> machine_status (pure) -> Status -> status_lines, or JSON
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from prefect_gpu.broker.broker import HEADROOM_BYTES
from prefect_gpu.broker.host_ledger import HostStore, Owner
from prefect_gpu.broker.ledger import Entry, StoreError
from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.spec import DeviceSpec, open_reader
from prefect_gpu.errors import DeviceError
from prefect_gpu.live.table import (
    DEVICE_HEADS,
    DeviceStatus,
    Row,
    device_row,
    device_status,
    table_lines,
)
from prefect_gpu.scheduling.memory import DeviceState, device_state, measure
from prefect_gpu.scheduling.model import DeviceKey, DeviceSnapshot, Reservation
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue, explain, order_key
from prefect_gpu.suspension.suspended import REFUSED
from prefect_gpu.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class HeldBy:
    """One device of a task that holds memory, in bytes."""

    index: int
    budget_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """A task that has devices."""

    task: str
    #: Name and id of the task run; empty: there is none.
    task_run: str
    task_run_id: str
    #: `runs`, `starts` (the process is not ready yet), or the state of its suspension.
    state: str
    devices: tuple[HeldBy, ...]
    #: Seconds since the task got its devices; `None`: unknown.
    seconds: float | None
    #: Id of the task's process; `None`: no process yet, or its id is of another container.
    pid: int | None
    #: Id of the flow's process; `None`: its id is of another container.
    flow_pid: int | None
    user: str
    #: `first run`: the need is unknown, and the budget is the most that it may take. `whole device`: the task got all
    #: free memory of its devices. Empty: it has a budget.
    mark: str = ""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process of another program that holds memory of a device."""

    pid: int
    index: int
    #: `None`: the driver reports no figure.
    used_bytes: int | None
    name: str
    user: str


@dataclass(frozen=True, slots=True)
class WaitingStatus:
    """A waiting task. Tasks are listed in the order of the queue."""

    task: str
    #: Name and id of the task run.
    task_run: str
    task_run_id: str
    priority: int
    #: Seconds since the submission.
    seconds: float
    reason: str
    flow_pid: int | None
    user: str


@dataclass(frozen=True, slots=True)
class Status:
    """The content of `prefect-gpu status`."""

    devices: tuple[DeviceStatus, ...]
    tasks: tuple[TaskStatus, ...]
    waiting: tuple[WaitingStatus, ...]
    others: tuple[OtherProcess, ...]
    #: A sentence about hidden flows, and the option that shows them. `None`: some flows are shown, or none is hidden.
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """All readings of the machine, taken at one time."""

    snapshots: Sequence[DeviceSnapshot]
    #: Entries of the ledger, by request id.
    entries: Mapping[str, Entry]
    #: Owners in the ledger, by name.
    owners: Mapping[str, Owner]
    #: Monotonic seconds at which requests got their devices, by request id.
    placed_s: Mapping[str, float]
    #: PID namespace of the reader.
    namespace: str
    #: Bytes of host memory that new processes could use.
    available_bytes: int
    #: Monotonic seconds of the readings.
    now_s: float
    #: Requested devices.
    spec: DeviceSpec
    #: Returns the name and the user of a process.
    describe: Callable[[int], tuple[str, str]] = lambda pid: ("?", "?")


def machine_status(found: Found) -> Status:
    """Return the status of a machine from its readings."""
    there = {snapshot.device.key for snapshot in found.snapshots}
    entries = {
        request_id: entry
        for request_id, entry in found.entries.items()
        if there.intersection(_keys(entry))
    }
    held: dict[DeviceKey, Mapping[str, int]] = {}
    states: list[DeviceState] = []
    for snapshot in found.snapshots:
        key = snapshot.device.key
        held[key] = _measure(snapshot, entries, found.namespace)
        reservations = [
            each for e in entries.values() for each in e.reservations if each.device_key == key
        ]
        headroom_bytes = HEADROOM_BYTES[snapshot.device.kind]
        states.append(device_state(snapshot, reservations, held[key], headroom_bytes))
    holding = {i: entry for i, entry in entries.items() if entry.reservations}
    return Status(
        devices=tuple(map(device_status, states)),
        tasks=tuple(
            _task(found, request_id, entry, held)
            for request_id, entry in sorted(
                holding.items(), key=lambda each: found.placed_s.get(each[0], 0.0)
            )
        ),
        waiting=_waiting(found, entries, states),
        others=tuple(
            OtherProcess(use.pid, s.device.index, use.used_bytes, *found.describe(use.pid))
            for s in found.snapshots
            for use in s.processes
            if use.root_pid is None
        ),
        hint=None if entries else _hint(found),
    )


def _hint(found: Found) -> str | None:
    simulated = found.spec.simulated
    if simulated is not None and not simulated.name:
        devices = f"simulated:{simulated.text}"
        return (
            f"{devices} is private to each process, so no tasks of flows are shown; write {devices}@NAME in the flow "
            "and for --devices"
        )
    if any(snapshot.device.kind == "host" for snapshot in found.snapshots):
        return (
            "flows on simulated devices are not shown here; write simulated:2x24GiB@NAME in the flow and for "
            "--devices"
        )
    return None


def _keys(entry: Entry) -> tuple[DeviceKey, ...]:
    return tuple(each.device_key for each in entry.reservations) or entry.devices


def _measure(
    snapshot: DeviceSnapshot, entries: Mapping[str, Entry], namespace: str
) -> dict[str, int]:
    key = snapshot.device.key
    roots, stand_ins = {}, {}
    for request_id, entry in entries.items():
        if entry.pid is not None and key in _keys(entry):
            if entry.namespace == namespace:
                roots[entry.pid] = request_id
            if entry.held_bytes:
                held = dict(zip(entry.devices, entry.held_bytes, strict=True))
                stand_ins[request_id] = held.get(key, 0)
    return measure(snapshot, roots, stand_ins)


def _task(
    found: Found, request_id: str, entry: Entry, held: Mapping[DeviceKey, Mapping[str, int]]
) -> TaskStatus:
    index_of = {snapshot.device.key: snapshot.device.index for snapshot in found.snapshots}

    def held_by(reservation: Reservation) -> HeldBy:
        key = reservation.device_key
        used_bytes = held[key].get(request_id, 0)
        return HeldBy(index_of[key], reservation.reserved_bytes, used_bytes)

    placed_s = found.placed_s.get(request_id)
    owner = found.owners.get(entry.owner, Owner())
    mark = ""
    if any(reservation.probe for reservation in entry.reservations):
        mark = "first run"
    elif entry.request.memory is None:
        mark = "whole device"
    return TaskStatus(
        task=entry.request.task_name,
        task_run=entry.request.task_run_name,
        task_run_id=entry.request.task_run_id,
        state=_state(entry),
        devices=tuple(held_by(r) for r in entry.reservations if r.device_key in index_of),
        seconds=None if placed_s is None else found.now_s - placed_s,
        pid=entry.pid if entry.namespace == found.namespace else None,
        flow_pid=owner.pid if owner.namespace == found.namespace else None,
        user=owner.user,
        mark=mark,
    )


def _state(entry: Entry) -> str:
    if entry.suspension and not entry.suspension.startswith(REFUSED):
        return entry.suspension
    return "runs" if entry.running else "starts"


def _waiting(
    found: Found, entries: Mapping[str, Entry], states: Sequence[DeviceState]
) -> tuple[WaitingStatus, ...]:
    waiting = [entry for entry in entries.values() if not entry.reservations]
    queue = RequestQueue(entry.request for entry in waiting if not entry.held_back)
    queue.statuses = {e.request.id: e.status for e in waiting}
    holding = [e for e in entries.values() if e.reservations]
    promised_bytes = sum(0 if e.running else e.request.host_bytes for e in holding)
    of_origin = Counter(e.origin for e in holding)

    def reason(entry: Entry) -> str:
        if entry.held_back:
            return entry.suspension
        own, most = of_origin[entry.origin], entry.max_processes
        host = HostState(found.available_bytes, promised_bytes, own, most, len(holding))
        usable = [state for state in states if state.device.key in entry.devices]
        waits = sentence(explain(entry.request, queue, usable, host, now_s=found.now_s))
        return f"{entry.suspension}; {waits}" if entry.suspension else waits

    return tuple(
        WaitingStatus(
            task=entry.request.task_name,
            task_run=entry.request.task_run_name,
            task_run_id=entry.request.task_run_id,
            priority=entry.request.priority,
            seconds=found.now_s - entry.request.submitted_s,
            reason=reason(entry),
            flow_pid=owner.pid if owner.namespace == found.namespace else None,
            user=owner.user,
        )
        for entry in sorted(waiting, key=lambda entry: order_key(entry.request))
        for owner in [found.owners.get(entry.owner, Owner())]
    )


@contextlib.contextmanager
def open_status(spec: DeviceSpec, folder: Path | None) -> Iterator[Callable[[], Status]]:
    """Open the devices and the ledger; yield a function that reads both.

    Args:
        spec: Requested devices.
        folder: Folder of the ledger; `None`: the user's.

    Raises:
        DeviceError: There are no such devices, or the ledger cannot be used.
    """
    try:
        with (
            contextlib.closing(HostStore(folder)) as store,
            contextlib.closing(open_reader(spec, os.environ, shared=folder)) as reader,
        ):
            yield lambda: _read_status(store, reader, spec)
    except StoreError as error:
        raise DeviceError(str(error)) from error


def _read_status(store: HostStore, reader: DeviceReader, spec: DeviceSpec) -> Status:
    # Removes the entries of processes that are gone.
    store.changed()
    rows = store.read(0)
    entries = {row.request_id: row.entry for row in rows if row.entry is not None}
    pids = [e.pid for e in entries.values() if e.pid and e.namespace == store.namespace]
    return machine_status(
        Found(
            snapshots=reader.read(pids),
            entries=entries,
            owners=store.read_owners(),
            placed_s=store.read_placed_s(),
            namespace=store.namespace,
            available_bytes=read_host_available_bytes(),
            now_s=time.monotonic(),
            spec=spec,
            describe=_describe,
        )
    )


def _describe(pid: int) -> tuple[str, str]:
    """Return the name and the user of a process; `?` where the kernel does not say."""
    name = user = "?"
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
    return name, user


def status_lines(status: Status) -> list[str]:
    """Return a status as lines for a terminal."""
    lines = table_lines([DEVICE_HEADS, *(device_row(device) for device in status.devices)])
    lines += ["", f"{len(status.tasks) or 'no'} {_plural(status.tasks, 'task')} on devices"]
    if status.tasks:
        heads: Row = ("task", "state", "device", "budget", "used", "for", "pid", "flow", "user")
        lines += table_lines([heads, *(row for task in status.tasks for row in _task_rows(task))])
    lines += ["", f"{len(status.waiting) or 'no'} {_plural(status.waiting, 'task')} waiting"]
    if status.waiting:
        heads = ("", "task", "for", "flow", "user", "what it waits for")
        lines += table_lines(
            [heads, *(_waiting_row(at, each) for at, each in enumerate(status.waiting, 1))]
        )
    if status.others:
        lines += ["", f"{len(status.others)} other {_plural(status.others, 'process', 'es')}"]
        heads = ("pid", "name", "device", "used", "user")
        lines += table_lines([heads, *map(_other_row, status.others)])
    if status.hint is not None:
        lines += ["", status.hint]
    return lines


def _plural(items: Sequence[Any], word: str, ending: str = "s") -> str:
    return word if len(items) == 1 else word + ending


def _task_rows(task: TaskStatus) -> list[Row]:
    """Return a row for each device; common values are in the first row."""
    state = f"{task.state}, {task.mark}" if task.mark else task.state
    first: Row = (task.task_run or task.task, state)
    last: Row = (_seconds(task.seconds), _pid(task.pid), _pid(task.flow_pid), task.user)
    rows: list[Row] = []
    for held in task.devices:
        sizes = (str(held.index), format_bytes(held.budget_bytes), format_bytes(held.used_bytes))
        rows.append((*first, *sizes, *last))
        first, last = ("", ""), ("", "", "", "")
    return rows


def _waiting_row(at: int, waiting: WaitingStatus) -> Row:
    reason = waiting.reason
    if waiting.priority:
        reason = f"priority {waiting.priority}: {reason}"
    place = (str(at), waiting.task_run or waiting.task, _seconds(waiting.seconds))
    return (*place, _pid(waiting.flow_pid), waiting.user, reason)


def _other_row(other: OtherProcess) -> Row:
    used = "?" if other.used_bytes is None else format_bytes(other.used_bytes)
    return (str(other.pid), other.name, str(other.index), used, other.user)


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else format_seconds(seconds)


def _pid(pid: int | None) -> str:
    return "?" if pid is None else str(pid)
