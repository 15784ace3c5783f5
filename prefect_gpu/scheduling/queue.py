"""Whose turn it is: which waiting requests start now, which can never, and why the rest wait.

Pure: a queue, the rooms of one tick and the machine's own memory go in; decisions come out. How a
device is chosen is in `placement`, how free memory is worked out in `memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Placement, Request, Reservation
from prefect_gpu.scheduling.placement import (
    PlacementStyle,
    check_possible,
    choose_devices,
    describe_wait,
    select_rooms,
)
from prefect_gpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What the machine itself has left for processes."""

    #: Bytes that new processes could use, as the kernel tells.
    available_bytes: int
    #: Bytes promised to processes that were started and have not taken them yet.
    promised_bytes: int
    #: Processes of ours that run.
    processes: int
    #: Most of them at a time.
    max_processes: int

    def refusal(self, request: Request) -> str:
        """Say why no process may start for `request` now; empty: it may."""
        if self.processes >= self.max_processes:
            return f"{self.processes} processes run, and max_processes is {self.max_processes}"
        left = self.available_bytes - self.promised_bytes
        # With nothing of ours running, waiting would not bring memory back: an estimate alone must
        # not stop a flow forever.
        if self.processes and request.host_bytes > left:
            return (
                f"{format_bytes(request.host_bytes)} of the machine's own memory for its process; "
                f"{format_bytes(max(0, left))} available"
            )
        return ""

    def after(self, request: Request) -> HostRoom:
        """Give what is left once a process was started for `request`."""
        return HostRoom(
            self.available_bytes,
            self.promised_bytes + request.host_bytes,
            self.processes + 1,
            self.max_processes,
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one look at the queue decided."""

    placements: tuple[tuple[Request, Placement], ...]
    refusals: tuple[tuple[Request, PlacementError], ...]


def order_key(request: Request) -> tuple[int, int]:
    """Sort key of the queue: priority, then first come."""
    return -request.priority, request.sequence


def decide(
    queue: Sequence[Request],
    rooms: Sequence[Room],
    host: HostRoom,
    style: PlacementStyle = "spread",
    held_by_parent: Iterable[Reservation] = (),
    checked: frozenset[str] | set[str] = frozenset(),
) -> Decisions:
    """Decide who starts now and who never can.

    A request that is blocked blocks those behind it on the devices that it could use.

    Args:
        queue: Waiting requests, sorted by `order_key`.
        rooms: All devices, read in one tick.
        host: The machine's own memory and processes.
        style: `spread` or `pack`.
        held_by_parent: What the GPU task around this process holds, if there is one.
        checked: Ids of requests that are known to be possible.
    """
    current = {room.device.uuid: room for room in rooms}
    blocked: set[str] = set()
    placements: list[tuple[Request, Placement]] = []
    refusals: list[tuple[Request, PlacementError]] = []
    held = tuple(held_by_parent)
    for request in queue:
        if request.id not in checked:
            try:
                check_possible(request, rooms, held)
            except PlacementError as error:
                refusals.append((request, error))
                continue
        if len(blocked) == len(current):
            # Nobody behind can start; go on only to refuse what is impossible.
            continue
        eligible = [current[room.device.uuid] for room in select_rooms(request, rooms)]
        usable = [room for room in eligible if room.device.uuid not in blocked]
        placement = (
            None if host.refusal(request) else choose_devices(request, usable, style)
        )
        if placement is None:
            blocked.update(room.device.uuid for room in eligible)
            if host.refusal(request):
                blocked.update(current)
            continue
        for reservation in placement.reservations:
            current[reservation.device_uuid] = current[reservation.device_uuid].after(reservation)
        host = host.after(request)
        placements.append((request, placement))
    return Decisions(tuple(placements), tuple(refusals))


def explain(
    request: Request, queue: Sequence[Request], rooms: Sequence[Room], host: HostRoom
) -> str:
    """Say why a request waits, in one line that a person can act on."""
    reason = host.refusal(request)
    eligible = select_rooms(request, rooms)
    if not reason:
        reason = describe_wait(request, eligible)
    mine = {room.device.uuid for room in eligible}
    ahead = 0
    for other in queue:
        if order_key(other) >= order_key(request):
            break
        if not other.devices or mine & {r.device.uuid for r in select_rooms(other, rooms)}:
            ahead += 1
    if ahead:
        reason += f"; {ahead} ahead in the queue"
    return reason
