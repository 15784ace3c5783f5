"""Free memory of a device for new reservations, and memory that an ended process did not return.

Pure. The formula for a device d and the processes j of this package's tasks on d:

    foreign(d) = used(d) - sum of measured(j)
    free(d)    = min(driver_free, total - system_reserved - foreign - sum of max(reserved, measured)) - headroom

A probe (first run, need unknown) that shares its device reserves its cap, and the caps may add up to more than the
device has. For one more probe they count less (`probes`), unless a task with a budget is on the device. `placement`
chooses devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prefect_gpu.scheduling.model import Device, DeviceSnapshot, Reservation
from prefect_gpu.units import MIB

#: Bytes by which a process may exceed its budget without a warning: contexts differ by some MiB from one run to the
#: next, allocators' segments and the driver's rounding are tens of MiB.
OVERSHOOT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device in a scheduling pass: a snapshot, the reservations, and the free memory computed from both."""

    snapshot: DeviceSnapshot
    #: Bytes free for new reservations; negative where foreign processes took reserved memory.
    free_bytes: int
    #: Bytes that processes of other programs hold.
    foreign_bytes: int
    #: Bytes that could be reserved on the empty device: usable − headroom.
    capacity_bytes: int
    reservations: tuple[Reservation, ...] = ()
    #: Bytes free for one more probe; `None`: as many as `free_bytes`.
    probe_bytes: int | None = None

    @property
    def free_for_probes_bytes(self) -> int:
        """Bytes free for one more probe: the device's other probes count at less than their caps."""
        return self.free_bytes if self.probe_bytes is None else self.probe_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes free for one more probe or one more task with a budget, the larger of the two."""
        return max(self.free_bytes, self.free_for_probes_bytes)

    @property
    def has_budgets(self) -> bool:
        """Whether a task that is not a shared probe is on the device."""
        return any(reservation.probe is None for reservation in self.reservations)

    @property
    def device(self) -> Device:
        """The device of the snapshot."""
        return self.snapshot.device

    def after(self, reservation: Reservation) -> DeviceState:
        """Return the device's state with one more reservation."""
        probe_bytes = None
        if reservation.probe is not None and not self.has_budgets:
            probe_bytes = self.free_for_probes_bytes - reservation.probe.counts_bytes
        return DeviceState(
            self.snapshot,
            self.free_bytes
            - reservation.reserved_bytes
            + sum(size for _, size in reservation.loans),
            self.foreign_bytes,
            self.capacity_bytes,
            (*self.reservations, reservation),
            probe_bytes,
        )


def measure(
    snapshot: DeviceSnapshot, roots: Mapping[int, str], stand_ins: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes that the processes of each request hold on one device, by request id, without zeros.

    `roots` has the request ids of the child processes that may use the device, by process id. `stand_ins` has estimates
    in bytes, by request id, where the driver does not report memory by process. They come from a child's own counters
    plus the measured context (WSL, some containers and MIG set-ups), or from another flow (containers).
    """
    measured: dict[str, int] = {}
    untold: set[str] = set()
    listed = 0
    for process in snapshot.processes if snapshot.device.attributed else ():
        listed += process.used_bytes or 0
        request_id = roots.get(process.root_pid) if process.root_pid is not None else None
        if request_id is None:
            continue
        if process.used_bytes is None:
            untold.add(request_id)
        else:
            measured[request_id] = measured.get(request_id, 0) + process.used_bytes
    # An estimate counts at most the memory that no listed process explains: a task that computes on the first of its
    # two devices holds nothing on the second, whatever its counters say.
    unlisted = max(0, snapshot.used_bytes - listed)
    for request_id in dict.fromkeys((*roots.values(), *stand_ins)):
        if request_id in untold or request_id not in measured:
            known = measured.get(request_id, 0)
            added = min(unlisted, max(0, stand_ins.get(request_id, 0) - known))
            if added:
                measured[request_id] = known + added
                unlisted -= added
    return measured


def lent_bytes(reservations: Iterable[Reservation]) -> Mapping[str, int]:
    """Return the bytes that requests lend to requests made inside their tasks (`nested`), by the lender's request id."""
    lent: Counter[str] = Counter()
    for reservation in reservations:
        for lender, size_bytes in reservation.loans:
            lent[lender] += size_bytes
    return lent


def device_state(
    snapshot: DeviceSnapshot,
    reservations: Sequence[Reservation],
    measured: Mapping[str, int],
    headroom_bytes: int,
    probe_counts: Mapping[str, int] = MappingProxyType({}),
) -> DeviceState:
    """Return the state of one device by the formula of this module.

    `measured` is the result of `measure`; `headroom_bytes` are never reserved. `probe_counts` has, by
    request id, the bytes that first runs on the device count for another first run (`probes.counted_bytes`), by default
    their cap.
    """
    counted, usable = sum(measured.values()), snapshot.usable_bytes
    foreign = max(0, snapshot.used_bytes - counted)
    #: Bytes by which probes count less for another probe.
    less_bytes, budgets = 0, False
    lent = lent_bytes(reservations)
    for reservation in reservations:
        held = measured.get(reservation.request_id, 0)
        # Lent bytes count for the borrower.
        most = max(reservation.reserved_bytes - lent.get(reservation.request_id, 0), held)
        counted += most - held
        if reservation.probe is None:
            budgets = True
        else:
            count = probe_counts.get(reservation.request_id, reservation.reserved_bytes)
            less_bytes += most - max(min(count, most), held)

    def free(counted_bytes: int) -> int:
        return min(snapshot.free_bytes, usable - foreign - counted_bytes) - headroom_bytes

    return DeviceState(
        snapshot,
        free(counted),
        foreign,
        max(0, usable - headroom_bytes),
        tuple(reservations),
        None if budgets else free(counted - less_bytes),
    )


def ownerless_bytes(snapshot: DeviceSnapshot) -> int | None:
    """Return the bytes in use that no listed process holds. Memory that an ended process leaked adds to them.

    `None`: memory is not known by process, or a host device, where the kernel frees all memory of an ended process.
    """
    if snapshot.device.kind == "host" or snapshot.error or not snapshot.device.attributed:
        return None
    listed = 0
    for process in snapshot.processes:
        if process.used_bytes is None:
            return None
        listed += process.used_bytes
    return max(0, snapshot.used_bytes - listed)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Whether a device has the memory of an ended process free again, by a snapshot."""

    #: Whether no memory of the process is left, so that its reservation can be released.
    complete: bool
    #: Bytes that are not free yet; `None`: not known on this device.
    missing_bytes: int | None


def judge_recovery(
    snapshot: DeviceSnapshot,
    root_pid: int,
    ownerless_before: int | None,
    tolerance_bytes: int,
    bookkeeping_bytes: int = 0,
    suspended_bytes: int = 0,
) -> Recovery:
    """Return whether the memory of an ended process is free again, by a snapshot taken after its end.

    `ownerless_before` is the result of `ownerless_bytes` before the process started. Its growth is not reported up to
    `tolerance_bytes`, plus `bookkeeping_bytes` for each other listed process (the driver's memory beside the listed
    bytes), plus `suspended_bytes`, the driver's memory for suspended processes, which it does not list.
    """
    if snapshot.error:
        return Recovery(complete=False, missing_bytes=None)
    lingering = [p for p in snapshot.processes if p.root_pid == root_pid]
    held = sum(p.used_bytes or 0 for p in lingering)
    now = ownerless_bytes(snapshot)
    if snapshot.device.kind == "host":
        return Recovery(complete=not lingering, missing_bytes=held)
    if ownerless_before is None:
        return Recovery(complete=not lingering, missing_bytes=held if lingering else None)
    if now is None:
        # An ending process is listed without bytes for a moment (seen on an H200). The next reading decides.
        return Recovery(complete=False, missing_bytes=None)
    missing = held + max(0, now - ownerless_before)
    others = len(snapshot.processes) - len(lingering)
    if missing <= tolerance_bytes + others * bookkeeping_bytes + suspended_bytes:
        missing = 0
    return Recovery(complete=not lingering and missing == 0, missing_bytes=missing)
