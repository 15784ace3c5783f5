"""The content of `prefect-gpu status`: tasks on the devices of this machine, and waiting requests.

Devices, ledger and names of processes are read once, and not changed, into `Found`. `machine_status` (pure) makes a
`Status` of `Found`, with free memory and reasons for waiting from the brokers' own functions. `status_lines` makes text
of the status, `commands` makes JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
from prefect_gpu.scheduling.model import DeviceKey, DeviceSnapshot
from prefect_gpu.scheduling.reasons import sentence
from prefect_gpu.scheduling.scheduling_pass import HostState, RequestQueue, explain, order_key
from prefect_gpu.suspension.eligibility import REFUSED
from prefect_gpu.units import counted, format_bytes, format_percent, format_seconds, text_of


@dataclass(frozen=True, slots=True)
class HeldBy:
    """A task's budget, used memory and computing on one device."""

    index: int
    budget_bytes: int
    used_bytes: int
    #: Fraction of the time in which the task's kernels ran; `None`: not known (no such counter, or a client of MPS).
    busy_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submitted task."""

    task: str
    #: Name and id of the task run; empty: there is no task run.
    task_run: str
    task_run_id: str
    #: Seconds since the task got its devices or, if it waits, since its submission; `None`: unknown.
    seconds: float | None
    #: Id of the flow's process; `None`: a process of another container.
    flow_pid: int | None
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus(Submitted):
    """A task that has devices."""

    #: `runs`, `starts` (the process is not ready yet), or the state of its suspension.
    state: str
    devices: tuple[HeldBy, ...]
    #: Id of the task's process; `None`: no process yet, or a process of another container.
    pid: int | None
    #: `first run`: the need is unknown, and the budget is the most that the task may take. `whole device`: the task got
    #: all free memory of its devices. Empty: the budget is known.
    mark: str
    #: How the task shares its devices with others: `time` (by turns) or `mps` (at the same time).
    sharing: Literal["time", "mps"]


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process of another program with memory on a device."""

    pid: int
    index: int
    #: `None`: the driver does not report the memory of this process.
    used_bytes: int | None
    name: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStatus(Submitted):
    """A waiting task."""

    priority: int
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """The content of `prefect-gpu status`."""

    devices: tuple[DeviceStatus, ...]
    tasks: tuple[TaskStatus, ...]
    #: In the order of the queue.
    waiting: tuple[WaitingStatus, ...]
    others: tuple[OtherProcess, ...]
    #: Sentence on hidden flows and the option that shows them. `None`: some flows are shown, or no flow is hidden.
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """All readings of the machine, taken at one time."""

    snapshots: Sequence[DeviceSnapshot]
    #: Entries of the ledger, by request id.
    entries: Mapping[str, Entry]
    #: Processes of flows that own entries, by the name in `Entry.owner`.
    owners: Mapping[str, Owner]
    #: Monotonic seconds of the placement, by request id.
    placed_s: Mapping[str, float]
    #: PID namespace of this process: process ids of other namespaces are not shown.
    namespace: str
    #: Bytes of host memory that new processes could use.
    available_bytes: int
    #: Monotonic seconds of the readings.
    now_s: float
    spec: DeviceSpec
    #: Returns the name and the user of a process.
    describe: Callable[[int], tuple[str, str]]

    def submitted(self, entry: Entry, since_s: float | None) -> dict[str, Any]:
        """Return the fields of `Submitted` for an entry; `since_s`: the begin of its `seconds`."""
        request, owner = entry.request, self.owners.get(entry.owner, Owner())
        return {
            "task": request.task_name,
            "task_run": request.task_run_name,
            "task_run_id": request.task_run_id,
            "seconds": None if since_s is None else self.now_s - since_s,
            "flow_pid": owner.pid if owner.namespace == self.namespace else None,
            "user": owner.user,
        }


def machine_status(found: Found) -> Status:
    """Return the status of a machine from its readings."""
    keys = {snapshot.device.key for snapshot in found.snapshots}
    entries = {i: each for i, each in found.entries.items() if keys.intersection(_keys(each))}
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
    holding = sorted(
        (request_id for request_id, entry in entries.items() if entry.reservations),
        key=lambda request_id: found.placed_s.get(request_id, 0.0),
    )
    return Status(
        devices=tuple(map(device_status, states)),
        tasks=tuple(_task(found, request_id, held) for request_id in holding),
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
        problem = f"{devices} is private to each process, so no tasks of flows are shown"
    elif any(snapshot.device.kind == "host" for snapshot in found.snapshots):
        devices, problem = "simulated:2x24GiB", "flows on simulated devices are not shown here"
    else:
        return None
    return f"{problem}; write {devices}@NAME in the flow and for --devices"


def _keys(entry: Entry) -> tuple[DeviceKey, ...]:
    return tuple(each.device_key for each in entry.reservations) or entry.devices


def _measure(
    snapshot: DeviceSnapshot, entries: Mapping[str, Entry], namespace: str
) -> dict[str, int]:
    """Return the bytes in use on a device, by request id."""
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


def _task(found: Found, request_id: str, held: Mapping[DeviceKey, Mapping[str, int]]) -> TaskStatus:
    entry = found.entries[request_id]
    snapshots = {snapshot.device.key: snapshot for snapshot in found.snapshots}
    mark = "whole device" if entry.request.memory is None else ""
    if any(reservation.probe for reservation in entry.reservations):
        mark = "first run"
    state = "runs" if entry.running else "starts"
    if entry.suspension and not entry.suspension.startswith(REFUSED):
        state = entry.suspension
    return TaskStatus(
        **found.submitted(entry, found.placed_s.get(request_id)),
        state=state,
        devices=tuple(
            HeldBy(
                snapshots[key].device.index,
                each.reserved_bytes,
                held[key].get(request_id, 0),
                _busy(found, entry, snapshots[key]),
            )
            for each in entry.reservations
            if (key := each.device_key) in snapshots
        ),
        pid=entry.pid if entry.namespace == found.namespace else None,
        mark=mark,
        sharing="mps" if entry.request.client else "time",
    )


def _busy(found: Found, entry: Entry, snapshot: DeviceSnapshot) -> float | None:
    here = entry.namespace == found.namespace
    # NVML shows the computing of clients as that of the server.
    if snapshot.work is None or entry.pid is None or entry.request.client or not here:
        return None
    return snapshot.work.busy.get(entry.pid, 0.0)


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
            **found.submitted(entry, entry.request.submitted_s),
            priority=entry.request.priority,
            reason=reason(entry),
        )
        for entry in sorted(waiting, key=lambda entry: order_key(entry.request))
    )


@contextlib.contextmanager
def open_status(spec: DeviceSpec, folder: Path | None) -> Iterator[Callable[[], Status]]:
    """Open devices and the ledger in a folder (`None`: the user's); yield a function that reads a new status.

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
    # This call removes the entries of ended processes.
    store.changed()
    entries = {row.request_id: row.entry for row in store.read(0) if row.entry is not None}
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
    """Return the name and the user of a process; `?`: not known."""
    name = user = "?"
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
    return name, user


def status_lines(status: Status) -> list[str]:
    """Return the lines that show a status in a terminal."""
    tasks = [row for task in status.tasks for row in _task_rows(task)]
    waiting = map(_waiting_row, status.waiting, itertools.count(1))
    others = [
        (str(o.pid), o.name, str(o.index), _text(o.used_bytes, format_bytes), o.user)
        for o in status.others
    ]
    return [
        *table_lines([DEVICE_HEADS, *map(device_row, status.devices)]),
        *("", f"{_number(status.tasks)} on devices"),
        *table_lines([_TASK_HEADS, *tasks] if tasks else []),
        *("", f"{_number(status.waiting)} waiting"),
        *table_lines([_WAITING_HEADS, *waiting] if status.waiting else []),
        *(("", counted(len(others), "other process", "other processes")) if others else ()),
        *table_lines([_OTHER_HEADS, *others] if others else []),
        *(("", status.hint) if status.hint else ()),
    ]


_TASK_HEADS = ("task", "state", "device", "budget", "used", "busy", "for", "pid", "flow", "user")
_WAITING_HEADS = ("", "task", "for", "flow", "user", "what it waits for")
_OTHER_HEADS = ("pid", "name", "device", "used", "user")


def _number(tasks: Sequence[Submitted]) -> str:
    return counted(len(tasks), "task") if tasks else "no tasks"


def _task_rows(task: TaskStatus) -> list[Row]:
    """Return a row for each device of a task. Values of the whole task are in the first row only."""
    state = ", ".join(filter(None, (task.state, task.mark, "MPS" * (task.sharing == "mps"))))
    first: Row = (task.task_run or task.task, state)
    pids = (_text(task.pid), _text(task.flow_pid))
    last: Row = (_text(task.seconds, format_seconds), *pids, task.user)
    rows: list[Row] = []
    for held in task.devices:
        sizes = (str(held.index), format_bytes(held.budget_bytes), format_bytes(held.used_bytes))
        rows.append((*first, *sizes, text_of(held.busy_fraction, format_percent), *last))
        first, last = ("", ""), ("", "", "", "")
    return rows


def _waiting_row(waiting: WaitingStatus, place: int) -> Row:
    reason = waiting.reason
    if waiting.priority:
        reason = f"priority {waiting.priority}: {reason}"
    task = (str(place), waiting.task_run or waiting.task, format_seconds(waiting.seconds))
    return (*task, _text(waiting.flow_pid), waiting.user, reason)


#: Text of a value; `?`: the value is not known.
_text = partial(text_of, absent="?")
