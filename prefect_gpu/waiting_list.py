"""The requests of one broker that wait: which there are, what is known of each, and what a look at them says.

A book, kept under the broker's lock. Whose turn it is is decided in `scheduling.turns`, and who goes for whom
in `scheduling.hot`; having devices read, writing promises and telling those who wait is `broker`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from prefect_gpu.clock import Clock
from prefect_gpu.errors import PlacementError
from prefect_gpu.scheduling.backfill import Patience, Standing
from prefect_gpu.scheduling.board import Board, PlacementStyle
from prefect_gpu.scheduling.hot import in_the_way, settle
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Placement, Reservation
from prefect_gpu.scheduling.placement import select_rooms
from prefect_gpu.scheduling.queue import RequestQueue, Shape
from prefect_gpu.scheduling.turns import Decisions, HostRoom, decide, explain
from prefect_gpu.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at those who wait came to. Until its promises are written, it is a proposal."""

    #: Those that can start now, where, and the id of the hot standby that each takes (empty: none).
    placed: Sequence[tuple[Ticket, Placement, str]]
    #: Those that never can, and why.
    refused: Sequence[tuple[Ticket, PlacementError]]
    #: Hot standbys that must end for others, which are decided anew once their memory is back.
    given_up: Sequence[str]
    #: What has become of requests that go on waiting, by id.
    standings: Mapping[str, Standing]
    #: What the placements promise.
    promises: Sequence[Reservation]
    #: Hot standbys that are taken, by id: these promises stand in place of theirs.
    taken: Sequence[str]


class WaitingList:
    """Those who wait. Not safe to use from several threads at once.

    Args:
        style: How to choose among devices that fit.
        max_tasks_per_device: Most tasks on a device at a time; `None`: as many as fit.
        held_by_parent: What the GPU task around this process holds.
        patience: How far a task that is blocked may be passed by later ones.
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
        #: Those in the queue, by request id.
        self._tickets: dict[str, Ticket] = {}
        #: By request id: the kind of hot standby that suits it. One that is missing takes none.
        self._kinds: dict[str, Hashable] = {}
        #: Shapes of requests in the queue that are known to be possible.
        self._possible: frozenset[Shape] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: Ticket, kind: Hashable = None) -> None:
        """Let one wait; `kind` is of the hot standbys that suit it, `None`: none does."""
        request = ticket.request
        self._queue.add(request)
        self._tickets[request.id] = ticket
        if kind is not None:
            self._kinds[request.id] = kind

    def remove(self, ticket: Ticket) -> bool:
        """Strike one out; tell whether it was there."""
        request = ticket.request
        if self._tickets.pop(request.id, None) is None:
            return False
        self._queue.remove(request)
        self._kinds.pop(request.id, None)
        return True

    def clear(self) -> Sequence[Ticket]:
        """Strike all out; give them."""
        tickets = tuple(self._tickets.values())
        self._tickets.clear()
        self._kinds.clear()
        self._queue = RequestQueue()
        return tickets

    def wants_host_bytes(self, left_bytes: int) -> bool:
        """Tell whether one needs more of the machine's memory than is left."""
        return any(ticket.request.host_bytes > left_bytes for ticket in self._tickets.values())

    def explain(self, ticket: Ticket, rooms: Sequence[Room], host: HostRoom) -> str:
        """Say why one waits, in one line.

        Args:
            ticket: It waits.
            rooms: All devices.
            host: The machine's own memory and processes.
        """
        try:
            return explain(
                ticket.request,
                self._queue,
                rooms,
                host,
                self._patience,
                self._clock.now(),
                self._max_tasks_per_device,
            )
        except PlacementError as error:
            # About to be refused.
            return error.problem

    def look(self, rooms: Sequence[Room], host: HostRoom, offers: Mapping[str, Hashable]) -> Look:
        """Say who starts now, who never can, and which hot standbys must go. Changes nothing.

        Args:
            rooms: All devices.
            host: The machine's own memory and processes.
            offers: Hot standbys that a task of their kind may take, and the kind, in order of preference.
        """
        decisions = decide(
            self._queue,
            Board(rooms, self._style, self._max_tasks_per_device, self._held_by_parent),
            host,
            self._patience,
            self._clock.now(),
            self._held_by_parent,
            self._possible,
        )
        settled = settle(decisions.placements, rooms, offers, self._kinds)
        given_up = settled.given_up
        if offers and not given_up:
            given_up = self._in_the_way(decisions, rooms, host)
        tickets = self._tickets
        return Look(
            [(tickets[request.id], placement, loan) for request, placement, loan in settled.made],
            [(tickets[request.id], error) for request, error in decisions.refusals],
            given_up,
            decisions.standings,
            [r for _, placement, _ in settled.made for r in placement.reservations],
            [loan_id for _, _, loan_id in settled.made if loan_id],
        )

    def note_standings(self, look: Look) -> None:
        """Keep what a look did to those who go on waiting."""
        self._queue.note(look.standings)

    def note_possible(self) -> None:
        """Take all that wait for possible: a look was at all of them, and those it refused are out."""
        self._possible = self._queue.shapes

    def forget_possible(self) -> None:
        """Have the next look check of all whether they are possible."""
        self._possible = frozenset()

    def _in_the_way(
        self, decisions: Decisions, rooms: Sequence[Room], host: HostRoom
    ) -> tuple[str, ...]:
        """Name the hot standbys that keep the first who found no device from one."""
        settled = {r.id for r, _ in (*decisions.placements, *decisions.refusals)}
        first = next((r for r in self._queue if r.id not in settled), None)
        if first is None or host.refusal(first):
            return ()
        return in_the_way(first, select_rooms(first, rooms))
