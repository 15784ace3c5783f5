"""The requests of one broker: each as a ticket, and what a scheduling pass over the waiting ones decides.

It is used under the broker's lock. How a pass decides is `scheduling.scheduling_pass`, which task takes which
hot standby `scheduling.standbys`. Having devices read, writing reservations and waking waiting threads is `broker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from prefect_gpu.clock import Clock
from prefect_gpu.errors import PlacementError, PrefectGPUError
from prefect_gpu.scheduling.backfill import BlockedStatus, Patience
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request, Reservation
from prefect_gpu.scheduling.placement import Board, PlacementStyle, select_devices
from prefect_gpu.scheduling.scheduling_pass import (
    Decisions,
    HostState,
    RequestQueue,
    decide,
    explain,
)
from prefect_gpu.scheduling.standbys import in_the_way, settle


@dataclass
class Ticket:
    """One request, from its submission until its memory is back. Made by `Broker.submit`."""

    request: Request
    #: Kind of the hot standbys that suit it; `None`: none does.
    kind: Hashable = None
    #: Notified when it is decided.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: It was placed, refused or withdrawn.
    decided: bool = False
    placement: Placement | None = None
    error: PrefectGPUError | None = None
    #: Monotonic seconds when it was placed.
    placed_s: float = 0.0
    #: Process that holds what was reserved; `None`: none yet, or no longer.
    pid: int | None = None
    #: Id of the hot standby that is kept for it, until a process has its task; empty: none is.
    standby_id: str = ""
    #: Whether the body has begun: what the process needs of the machine's memory is then taken.
    running: bool = False
    #: Bytes that its own counters (plus context) give, where the device cannot tell.
    stand_in_bytes: int = 0
    #: Called with monotonic seconds and the bytes on each of its devices, in the task's order, at
    #: every reading while it runs.
    on_measured: Callable[[float, tuple[int, ...]], None] | None = None
    #: Called with the bytes that did not come back (`None`: not known), once.
    on_recovered: Callable[[int | None], None] | None = None
    #: What others' processes held on its devices when it was placed, in bytes.
    foreign_before: dict[DeviceKey, int] = field(default_factory=dict)
    #: Bytes that no process held on its devices when it was placed, and what others leaked there since.
    ownerless_before: dict[DeviceKey, int | None] = field(default_factory=dict)
    #: Monotonic seconds when its process ended; `None`: it has not.
    ended_s: float | None = None
    ended_pid: int | None = None
    #: Bytes that were still missing at the last reading since then; `None`: not known.
    missing_bytes: int | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices; none before it was placed."""
        return () if self.placement is None else self.placement.devices

    def decide(
        self, placement: Placement | None = None, error: PrefectGPUError | None = None
    ) -> None:
        """Place it, refuse it, or withdraw it, and wake the thread that waits for it."""
        with self.changed:
            self.placement, self.error = placement, error
            self.decided = True
            self.changed.notify_all()

    def wait(self, clock: Clock, until_s: float) -> bool:
        """Wait for a decision; return whether there was one in time."""
        with self.changed:
            while not self.decided:
                left_s = until_s - clock.now()
                if left_s <= 0:
                    return False
                clock.wait(self.changed, left_s)
            return True


class Withdrawn(Exception):  # noqa: N818  # not an error: the wait was given up
    """A request was withdrawn while it waited."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one scheduling pass decided. It holds once its reservations are written."""

    #: Requests that can start now, where, and the id of the hot standby that each takes (empty: none).
    placed: Sequence[tuple[Ticket, Placement, str]]
    #: Requests that never can start, and why.
    refused: Sequence[tuple[Ticket, PlacementError]]
    #: Hot standbys that must end for others, which are decided again once their memory is back.
    given_up: Sequence[str]
    #: What has happened to requests that go on waiting, by id.
    statuses: Mapping[str, BlockedStatus]

    @property
    def reservations(self) -> list[Reservation]:
        """The reservations of the placements."""
        return [r for _, placement, _ in self.placed for r in placement.reservations]

    @property
    def taken(self) -> list[str]:
        """Ids of the hot standbys that are taken: the reservations replace theirs."""
        return [standby_id for _, _, standby_id in self.placed if standby_id]


class WaitingList:
    """The waiting requests. Not safe to use from several threads at once.

    Args:
        style: How to choose among devices that fit.
        max_tasks_per_device: Most tasks on a device at a time; `None`: as many as fit.
        held_by_parent: What the GPU task around this process holds.
        patience: How far a blocked request may be passed by later ones.
        clock: Time.
    """

    def __init__(
        self,
        style: PlacementStyle,
        max_tasks_per_device: int | None,
        held_by_parent: tuple[Reservation, ...],
        patience: Patience,
        clock: Clock,
    ) -> None:
        self._style = style
        self._max_tasks_per_device = max_tasks_per_device
        self._held_by_parent = held_by_parent
        self._patience = patience
        self._clock = clock
        self._queue = RequestQueue()
        #: Those of the queue, by request id.
        self._tickets: dict[str, Ticket] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Add a request."""
        self._queue.add(ticket.request)
        self._tickets[ticket.request.id] = ticket

    def remove(self, ticket: Ticket) -> bool:
        """Remove a request; return whether it was there."""
        self._tickets.pop(ticket.request.id, None)
        return self._queue.remove(ticket.request)

    def wants_host_bytes(self, left_bytes: int) -> bool:
        """Return whether a request needs more of the machine's memory than is left."""
        return any(ticket.request.host_bytes > left_bytes for ticket in self._tickets.values())

    def explain(self, ticket: Ticket, states: Sequence[DeviceState], host: HostState) -> str:
        """Return why a request waits, in one line.

        Args:
            ticket: A waiting request.
            states: All devices.
            host: The machine's own memory and processes.
        """
        try:
            return explain(
                ticket.request,
                self._queue,
                states,
                host,
                self._patience,
                self._clock.now(),
                self._max_tasks_per_device,
            )
        except PlacementError as error:
            # The next pass refuses it.
            return error.problem

    def propose(
        self, states: Sequence[DeviceState], host: HostState, offers: Mapping[str, Hashable]
    ) -> Proposal:
        """Decide which requests start, which never can, and which hot standbys must end. Changes nothing.

        Args:
            states: All devices.
            host: The machine's own memory and processes.
            offers: Hot standbys that a task of their kind may take, and the kind, in order of preference.
        """
        board = Board(
            states,
            self._style,
            self._max_tasks_per_device,
            self._held_by_parent,
            self._queue.least_bytes,
        )
        decisions = decide(self._queue, board, host, self._patience, self._clock.now())
        made = [(request, placement, "") for request, placement in decisions.placements]
        given_up: Sequence[str] = ()
        if any(state.standbys for state in states):
            kinds = {r.id: self._tickets[r.id].kind for r, _ in decisions.placements}
            settled = settle(decisions.placements, states, offers, kinds)
            made, given_up = list(settled.made), settled.given_up
            if offers and not given_up:
                given_up = self._in_the_way(decisions, states, host)
        tickets = self._tickets
        return Proposal(
            [(tickets[request.id], placement, hot) for request, placement, hot in made],
            [(tickets[request.id], error) for request, error in decisions.refusals],
            given_up,
            decisions.statuses,
        )

    def note(self, statuses: Mapping[str, BlockedStatus]) -> None:
        """Keep what a scheduling pass did to requests that go on waiting."""
        self._queue.note(statuses)

    def _in_the_way(
        self, decisions: Decisions, states: Sequence[DeviceState], host: HostState
    ) -> tuple[str, ...]:
        """Return the hot standbys that keep the first request without a device from one."""
        settled = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
        first = next((r for r in self._queue if r.id not in settled), None)
        if first is None or host.refusal(first):
            return ()
        return in_the_way(first, select_devices(first, states))
