"""The last reading of a broker's devices, and the free memory beside the reservations.

Covers the age of the reading, device states, memory by child process, warnings about a reading, and tickets of ended
processes until their memory is free (`RecoveryWatch`). `broker` asks for readings; the arithmetic is `scheduling.memory`.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import compress
from operator import ne
from typing import NamedTuple

from prefect_gpu.broker.ledger import Entry, LedgerView
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import (
    DeviceState,
    Recovery,
    device_state,
    judge_recovery,
    measure,
    ownerless_bytes,
)
from prefect_gpu.scheduling.model import (
    Device,
    DeviceKey,
    DeviceKind,
    DeviceSnapshot,
    DeviceWork,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.placement import check_possible, select_devices
from prefect_gpu.scheduling.probes import Growth, Leaving, choose_leaving, counted_bytes, observe
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import MIB, format_bytes, format_seconds

#: Most seconds for which a reservation is kept after its process has ended, until its memory is free. Measured: 0 to 0.13 s
#: on an H200; up to 1.5 s reported elsewhere; a zombie process may keep its memory for ever.
RECOVERY_S = 5.0

#: Seconds between two readings while memory of an ended process is missing.
RECOVERY_POLL_S = 0.02

#: Most bytes still missing on an otherwise empty device that do not count as a leak.
LEAK_TOLERANCE_BYTES = 2 * MIB

#: Bytes in use that NVML attributes to no process, for each listed process. Measured on an H200, driver 580: 8.8 MiB with
#: one process, 5.6 MiB for each further one (`docs/evidence/gpu-bookkeeping.txt`). Smaller leaks show only once the
#: device is quieter.
BOOKKEEPING_BYTES = 9 * MIB

#: Bytes in use for each suspended process, which NVML does not list. Measured on an H100, driver 580: 3.2 to 3.3 MiB for
#: one (`docs/evidence/gpu-suspend-by-hand.txt`).
SUSPENDED_BYTES = 4 * MIB


class Note(NamedTuple):
    """One line for the log, at level WARNING (`warns`) or INFO."""

    text: str
    warns: bool


class RecoveryWatch:
    """Tickets of ended processes whose device memory is not free yet. Not safe to use from several threads at once."""

    def __init__(self) -> None:
        #: By request id.
        self.ending: dict[str, Ticket] = {}
        self._poll_s = 0.0
        #: Devices that list no process of the flow although one holds memory there (in containers).
        self._hiding: set[DeviceKey] = set()
        #: Devices that have listed a process of the flow.
        self._listing: set[DeviceKey] = set()
        #: Number of suspended processes on the machine.
        self.suspended = 0

    @property
    def poll_s(self) -> float | None:
        """Monotonic seconds at which the next reading is due; `None`: no ticket needs one."""
        return self._poll_s if self.ending else None

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Add the ticket of a process that has just ended; a reading is due at once."""
        self.ending[ticket.request.id] = ticket
        self._poll_s = now_s

    def take_baseline(self, ticket: Ticket, reading: Reading) -> None:
        """Set `ownerless_before` of a ticket: memory of no process on its devices, before its own process starts."""
        assert ticket.placement is not None
        ticket.ownerless_before = {
            device.key: _ownerless(reading, device.key) for device in ticket.placement.devices
        }

    def check(self, reading: Reading, placed: Collection[Ticket]) -> list[Ticket]:
        """Remove and return the tickets whose memory is free by a good new reading; `placed` are tickets that still run."""
        self._find_hiding(reading, placed)
        done = [ticket for ticket in self.ending.values() if self._is_back(ticket, reading)]
        for ticket in done:
            del self.ending[ticket.request.id]
        return done

    def give_up(
        self, now_s: float, reading: Reading | None, placed: Collection[Ticket]
    ) -> tuple[list[Ticket], list[Note]]:
        """Remove and return the tickets that have waited for `RECOVERY_S`, with log lines about their leaks.

        `now_s` is the clock's time, not the last reading's: a driver that hangs gives no readings.
        """
        done, notes = list[Ticket](), list[Note]()
        for ticket in tuple(self.ending.values()):
            assert ticket.ended_s is not None
            if now_s - ticket.ended_s < RECOVERY_S:
                continue
            done.append(ticket)
            del self.ending[ticket.request.id]
            if reading is None or reading.error:
                continue
            # Judged again: `_note_leak` may have raised `ownerless_before` by the leak of an earlier ticket.
            self._is_back(ticket, reading)
            if ticket.missing_bytes:
                notes.append(self._note_leak(ticket, reading, (*placed, *self.ending.values())))
        return done, notes

    def poll(self, now_s: float) -> bool:
        """Return whether a reading is due now; if so, set the time of the next one."""
        if not self.ending or now_s < self._poll_s:
            return False
        self._poll_s = now_s + RECOVERY_POLL_S
        return True

    def _is_back(self, ticket: Ticket, reading: Reading) -> bool:
        assert ticket.placement is not None and ticket.ended_s is not None
        if reading.at_s < ticket.ended_s:
            return False
        found = [self._judge(ticket, device, reading) for device in ticket.placement.devices]
        known = [each.missing_bytes for each in found if each.missing_bytes is not None]
        ticket.missing_bytes = sum(known) if len(known) == len(found) else None
        return all(each.complete for each in found)

    def _judge(self, ticket: Ticket, device: Device, reading: Reading) -> Recovery:
        assert ticket.ended_pid is not None
        snapshot = _snapshot_of(reading, device.key)
        if snapshot is None:
            return Recovery(complete=False, missing_bytes=None)
        before = None if device.key in self._hiding else ticket.ownerless_before.get(device.key)
        bookkeeping = BOOKKEEPING_BYTES if device.kind == "nvml" else 0
        return judge_recovery(
            snapshot,
            ticket.ended_pid,
            before,
            LEAK_TOLERANCE_BYTES,
            bookkeeping,
            self.suspended * SUSPENDED_BYTES,
        )

    def _note_leak(self, ticket: Ticket, reading: Reading, others: Collection[Ticket]) -> Note:
        # Reported once: other tasks on the device must not be blamed for the same bytes.
        assert ticket.placement is not None
        for device in ticket.placement.devices:
            now = _ownerless(reading, device.key)
            for other in others:
                before = other.ownerless_before.get(device.key)
                if before is not None and now is not None:
                    other.ownerless_before[device.key] = max(before, now)
        return Note(
            f"{format_bytes(ticket.missing_bytes)} of device memory did not come back within "
            f"{format_seconds(RECOVERY_S)} of the end of task {ticket.request.task_name!r} "
            f"(pid {ticket.ended_pid}); the device's free memory is counted without it",
            warns=True,
        )

    def _find_hiding(self, reading: Reading, placed: Collection[Ticket]) -> None:
        """Note devices that list no process of the flow although the process's own counters report memory there."""
        # On such a device memory without a listed process may be another task's.
        listed = {use.root_pid for s in reading.snapshots for use in s.processes}
        for snapshot in reading.snapshots:
            if any(use.root_pid is not None for use in snapshot.processes):
                self._listing.add(snapshot.device.key)
        # A device that has once listed a process of the flow is not hiding: a killed process leaves the list before its
        # end is known here (seen on an H200).
        self._hiding -= self._listing
        for ticket in placed:
            if ticket.pid is not None and ticket.stand_in_bytes and ticket.pid not in listed:
                assert ticket.placement is not None
                keys = {device.key for device in ticket.placement.devices}
                self._hiding |= keys - self._listing


def _snapshot_of(reading: Reading, key: DeviceKey) -> DeviceSnapshot | None:
    return next((s for s in reading.snapshots if s.device.key == key), None)


def _ownerless(reading: Reading, key: DeviceKey) -> int | None:
    snapshot = _snapshot_of(reading, key)
    return None if snapshot is None else ownerless_bytes(snapshot)


#: Most age in seconds of the reading for a scheduling pass. With an older one, a new reading is requested first.
FRESH_S = 0.5

#: Seconds after which all device states are computed again, even with unchanged snapshots: other flows may have written
#: process ids since.
KEPT_S = 2.0

#: Seconds without a reading after which the devices count as silent.
SILENT_S = 5.0


class DeviceView:
    """The last reading of one broker's devices. Not safe to use from several threads at once.

    `devices`, all of one kind, are used until the first reading. `around` are the reservations of the GPU task that this
    process (`own_pid`) runs inside, if the ledger does not list them.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        kind: DeviceKind,
        headroom_bytes: int,
        around: tuple[Reservation, ...],
        own_pid: int,
    ) -> None:
        self.devices = devices
        self._kind = kind
        self._headroom_bytes = headroom_bytes
        self._around = around
        self._own_pid = own_pid
        self.reading: Reading | None = None
        #: Keys of the devices in the reading's snapshots.
        self._keys: Sequence[DeviceKey] = ()
        #: Monotonic seconds when the reading came. `Reading.at_s` is earlier, when it began: a driver may be slow.
        self._came_s = 0.0
        #: By device and request id: bytes that the request's process holds.
        self._measured: dict[DeviceKey, Mapping[str, int]] = {}
        #: By device and request id: memory growth of each probe (a first run that shares its device).
        self._growths: dict[DeviceKey, dict[str, Growth]] = {}
        #: By device and child process: bytes of that process and its descendants, by process id.
        self._by_root: dict[DeviceKey, dict[int, dict[int, int]]] = {}
        #: Work of the processes of each device, by device.
        self._works: dict[DeviceKey, DeviceWork | None] = {}
        #: Monotonic seconds when the states of all devices were last dropped.
        self._all_s = float("-inf")
        #: States of the devices, and the reservations that each was computed for (`None`: not computed yet).
        self._states: list[DeviceState] = []
        self._computed_for: Sequence[tuple[Reservation, ...] | None] = ()
        #: By device: its error, after a failure; empty: the device works again.
        self._set_aside: dict[DeviceKey, str] = {}
        self._context_told = False

    def take(self, reading: Reading, now_s: float) -> None:
        """Replace the last reading by one that came at `now_s` (monotonic seconds)."""
        before = () if self.reading is None else self.reading.snapshots
        self.reading = reading
        self._came_s = now_s
        keys, self._keys = self._keys, [snapshot.device.key for snapshot in reading.snapshots]
        devices = tuple(snapshot.device for snapshot in reading.snapshots)
        if devices and devices != self.devices:
            # Nodes have joined or left the cluster.
            self.devices = devices
            there = set(self._keys)
            self._measured = {key: each for key, each in self._measured.items() if key in there}
            self._growths = {key: each for key, each in self._growths.items() if key in there}
        # On a cluster most snapshots are unchanged, since only some nodes have sent new ones.
        if keys != self._keys or self._came_s - self._all_s >= KEPT_S:
            before, self._all_s, self._by_root, self._works = (), self._came_s, {}, {}
            self._states = [DeviceState(snapshot, 0, 0, 0) for snapshot in reading.snapshots]
            self._computed_for = [None] * len(self._keys)
        computed_for = list(self._computed_for)
        for at, snapshot in enumerate(reading.snapshots):
            if before and snapshot is before[at]:
                continue
            computed_for[at] = None
            self._states[at] = DeviceState(snapshot, 0, 0, 0)
            by_root: dict[int, dict[int, int]] = {}
            for use in snapshot.processes if snapshot.device.attributed else ():
                if use.root_pid is not None and use.used_bytes is not None:
                    of_root = by_root.setdefault(use.root_pid, {})
                    of_root[use.pid] = of_root.get(use.pid, 0) + use.used_bytes
            self._by_root[snapshot.device.key] = by_root
            self._works[snapshot.device.key] = snapshot.work
        self._computed_for = computed_for

    def compute_again(self, devices: Iterable[Device]) -> None:
        """Have the next call of `states` compute these devices' states again, since a process there is known now."""
        keys = {device.key for device in devices}
        self._computed_for = [
            None if key in keys else done
            for key, done in zip(self._keys, self._computed_for, strict=True)
        ]

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the last reading, with or without an error, is recent enough for a scheduling pass."""
        return self.reading is not None and now_s - self._came_s <= FRESH_S

    def silence(self, now_s: float) -> Reason | None:
        """Return the reason why no request can be placed: no reading yet, or silent devices; `None`: the devices answer."""
        if self.reading is None:
            return Reason(WaitKind.FIRST_READING)
        silent_s = now_s - self._came_s
        if self.reading.error or silent_s > SILENT_S:
            why = self.reading.error or f"nothing heard for {format_seconds(silent_s)}"
            return Reason(WaitKind.DEVICES_SILENT, detail=why)
        return None

    def capacities(self, names: tuple[str, ...], nodes: tuple[str, ...] = ()) -> dict[Device, int]:
        """Return the bytes that could be reserved on each named device if empty; an unknown name: on all devices."""
        states = self._empty_states()
        try:
            states = select_devices(Request("", "", 0, 0.0, devices=names, nodes=nodes), states)
        except PlacementError:
            # A name is unknown. The request itself is refused for that.
            pass
        return {state.device: state.capacity_bytes for state in states}

    def check(self, request: Request) -> None:
        """Raise `PlacementError` if a request could not be placed even on empty devices."""
        check_possible(request, self._empty_states())

    def _empty_states(self) -> list[DeviceState]:
        reading = self.reading
        known = {} if reading is None else {s.device.key: s.usable_bytes for s in reading.snapshots}
        sizes = [known.get(device.key, device.total_bytes) for device in self.devices]
        return [
            DeviceState(DeviceSnapshot(device, 0.0, 0), 0, 0, max(0, size - self._headroom_bytes))
            for device, size in zip(self.devices, sizes, strict=True)
        ]

    def states(
        self, view: LedgerView, tickets: Mapping[str, Ticket], ending: Iterable[Ticket] = ()
    ) -> list[DeviceState]:
        """Return the state of each device; an empty list if the last reading is missing or has an error.

        A state is computed again only if the device's snapshot or reservations have changed. `tickets` are the broker's
        placed requests by id, `ending` its requests of ended processes whose memory may not be free yet.
        """
        reading = self.reading
        if reading is None or reading.error:
            return []
        held = [view.by_device.get(key, ()) for key in self._keys]
        ended = {ticket.request.id: ticket for ticket in ending}
        for at in compress(range(len(held)), map(ne, held, self._computed_for)):
            key, snapshot = self._keys[at], reading.snapshots[at]
            known = {r.request_id for r in held[at]}
            parents = [r for r in self._around if r.device_key == key and r.request_id not in known]
            self._measured[key] = measured = _measure(
                snapshot, view, tickets, ended, parents, self._own_pid
            )
            counts = self._count_probes(key, held[at], measured, reading.at_s)
            self._states[at] = device_state(
                snapshot, (*held[at], *parents), measured, self._headroom_bytes, counts
            )
        self._computed_for = held
        return list(self._states)

    def _count_probes(
        self,
        key: DeviceKey,
        held: Iterable[Reservation],
        measured: Mapping[str, int],
        now_s: float,
    ) -> dict[str, int]:
        """Update the growth of a device's probes; return by request id the bytes that each counts for another probe."""
        probes = {r.request_id: r for r in held if r.probe is not None}
        before = self._growths.get(key, {})
        if not probes and not before:
            return {}
        grown = {i: observe(before.get(i), now_s, measured.get(i, 0)) for i in probes}
        self._growths[key] = {i: each for i, each in grown.items() if each is not None}
        if not self._growths[key]:
            del self._growths[key]
        return {i: counted_bytes(r, grown[i], now_s) for i, r in probes.items()}

    def probes_to_leave(
        self, running: Mapping[str, Entry], silent: Container[str], fixed: Set[str]
    ) -> Iterator[tuple[Leaving, Device]]:
        """Yield the probes of all brokers that are to be suspended or ended for others on their device, with this device.

        The states are from the last call of `states`. `running` has the entries of all tasks with devices by request id,
        `silent` the owners without heartbeats, which suspend nothing, `fixed` further requests that cannot be suspended.
        """
        reading = self.reading
        if reading is None or reading.error or not self._growths:
            return
        now_s = reading.at_s
        goes = {i for i, entry in running.items() if entry.wish is not None}
        away = goes | {i for i, e in running.items() if e.away}
        # One probe is suspended at a time: the next needs a reading of the host memory that includes the first.
        if any(not running[i].away and running[i].owner not in silent for i in goes):
            fixed = running.keys()
        fixed = fixed | {
            i
            for i, e in running.items()
            if e.pid is None
            or len(e.reservations) > 1
            or e.rests_until_s > now_s
            or e.owner in silent
            # No task of a cluster is suspended.
            or e.request.confirms_probe
        }
        for key, state in zip(self._keys, self._states, strict=True):
            growths = self._growths.get(key, {})
            found = choose_leaving(state, growths, now_s, self._headroom_bytes, away, fixed)
            if found is not None:
                yield found, state.device

    @property
    def measured(self) -> Mapping[DeviceKey, Mapping[str, int]]:
        """Bytes held by each request's process, by device and request id, from the last call of `states`."""
        return self._measured

    def measured_bytes(self, request_id: str, device: Device) -> int:
        """Return the bytes that a request's process holds on a device, from the last call of `states`."""
        return self._measured.get(device.key, {}).get(request_id, 0)

    def measured_by_pid(self, root_pid: int, device: Device) -> Mapping[int, int]:
        """Return the bytes that a child process and its descendants hold on a device, by process id."""
        return self._by_root.get(device.key, {}).get(root_pid, {})

    def work(self, device: Device) -> DeviceWork | None:
        """Return what a device's processes computed, from the last reading; `None`: not known."""
        return self._works.get(device.key)

    def compare(self, reading: Reading) -> tuple[list[tuple[Device, str]], list[Note]]:
        """Return newly failed devices with their errors, and log lines about devices that failed, or that work again.

        All devices of a node with the same change share one line. Another line warns of CUDA in this process.
        """
        notes = self._note_context(reading)
        #: Devices by node and error; an empty error: the devices answer again.
        changed: dict[tuple[str, str], list[Device]] = {}
        for snapshot in reading.snapshots:
            device, error = snapshot.device, snapshot.error
            if error != self._set_aside.get(device.key, ""):
                changed.setdefault((device.host, error), []).append(device)
                self._set_aside[device.key] = error
        for (node, error), devices in changed.items():
            several = len(devices) > 1
            # The driver's own log names the device by its UUID.
            name = f"{devices[0].label} ({devices[0].uuid})"
            if several:
                name = f"devices {', '.join(str(each.index) for each in devices)} of node {node}"
            if error:
                text = f"{name} {'are' if several else 'is'} set aside: {error}"
            else:
                text = f"{name} {'answer' if several else 'answers'} again"
            notes.append(Note(text, warns=bool(error)))
        return [(d, error) for (_, error), found in changed.items() if error for d in found], notes

    def _note_context(self, reading: Reading) -> list[Note]:
        if self._context_told or self._kind != "nvml" or self._around:
            return []
        shown = (s.processes for s in reading.snapshots if s.device.attributed)
        if not any(p.pid == self._own_pid for processes in shown for p in processes):
            return []
        self._context_told = True
        text = (
            "this process itself holds GPU memory, which counts as foreign until it ends: call GPU "
            "tasks with .submit or .map, not directly, and keep CUDA out of the flow"
        )
        return [Note(text, warns=True)]


def _measure(
    snapshot: DeviceSnapshot,
    view: LedgerView,
    tickets: Mapping[str, Ticket],
    ended: Mapping[str, Ticket],
    parents: Iterable[Reservation],
    own_pid: int,
) -> Mapping[str, int]:
    """Return the bytes that each request's process holds on a device, by request id."""
    if snapshot.error:
        return {}
    key = snapshot.device.key
    # Memory of this process itself is not foreign if it runs inside a GPU task.
    roots = dict[int, str]()
    for held in parents:
        roots[own_pid] = held.request_id
    here: dict[str, Ticket] = {}
    for reservation in view.by_device.get(key, ()):
        request_id = reservation.request_id
        pid = view.processes.get(request_id)
        if pid is not None:
            roots[pid] = request_id
            if request_id in tickets:
                here[request_id] = tickets[request_id]
    for request_id, ticket in ended.items():
        pid = ticket.ended_pid
        if pid is not None and any(device.key == key for device in ticket.devices):
            roots[pid] = request_id
            here[request_id] = ticket
    stand_ins = {
        request_id: ticket.stand_in_bytes // len(ticket.devices)
        for request_id, ticket in here.items()
        if ticket.pid is not None and ticket.devices
    }
    for reservation in view.by_device.get(key, ()):
        elsewhere = view.held_bytes.get(reservation.request_id, {})
        if key in elsewhere and reservation.request_id not in here:
            stand_ins[reservation.request_id] = elsewhere[key]
    return measure(snapshot, roots, stand_ins) if roots or stand_ins else {}
