"""What a broker does for hot standbys: lends them a device, hands them to tasks, has them go.

It works under the broker's lock and on the broker's readings. Who takes one, which must go and where the
next one is made is decided in `scheduling.hot`; how one is made is `processes.standby`'s. Whoever has them
made may call with a lock of his own held; what is his is called without the broker's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prefect_gpu.clock import Clock
from prefect_gpu.recovery import RecoveryWatch
from prefect_gpu.scheduling.board import PlacementStyle
from prefect_gpu.scheduling.hot import choose_device
from prefect_gpu.scheduling.ledger import Ledger, LedgerView
from prefect_gpu.scheduling.memory import Room
from prefect_gpu.scheduling.model import Device, Placement, Reading, Request, Reservation
from prefect_gpu.shelf import Shelf
from prefect_gpu.ticket import Loan, Ticket


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lending needs of its broker. All but `call_later` is called with the lock."""

    #: Waits so many seconds at most for a reading to decide on; `None`: there is none.
    read: Callable[[float], Reading | None]
    #: Gives all rooms of a reading with the promises of a view.
    survey: Callable[[Reading, LedgerView], Sequence[Room]]
    #: Has something done by the broker's thread, without the lock, and has it look at the queue.
    call_later: Callable[[Callable[[], object]], None]
    #: Whether the broker has closed.
    closed: Callable[[], bool]


class Lending:
    """The hot standbys of one broker. Safe to use from several threads.

    Args:
        changed: The broker's lock, which may be taken again by who has it.
        ledger: Where promises are written.
        recovery: Waits for the memory of those that have ended.
        clock: Time.
        style: How tasks are placed.
        surroundings: What it needs of its broker.
    """

    def __init__(
        self,
        changed: threading.Condition,
        ledger: Ledger,
        recovery: RecoveryWatch,
        clock: Clock,
        style: PlacementStyle,
        surroundings: Surroundings,
    ) -> None:
        self._changed = changed
        self._ledger = ledger
        self._recovery = recovery
        self._clock = clock
        self._style = style
        self._around = surroundings
        self._shelf = Shelf()

    @property
    def loans(self) -> Collection[Loan]:
        """All that hold something which is no task's, as they are now."""
        return self._shelf.loans

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Their places in the ledger."""
        return tuple(loan.ticket for loan in self._shelf.loans)

    @property
    def offers(self) -> Mapping[str, Hashable]:
        """Kinds of those that a task may take, by id."""
        return self._shelf.offers

    def lend(
        self,
        request_id: str,
        kind: Hashable,
        pid: int,
        context_of: Callable[[Device], int],
        give_up: Callable[[], None],
        avoid: Container[str] = (),
        patience_s: float = 0.5,
    ) -> Loan | None:
        """Reserve the context of a hot standby that is about to be made.

        Args:
            request_id: Unique in the ledger.
            kind: Of the tasks that may take it.
            pid: The process; it has not touched a device yet.
            context_of: Gives the bytes that it will hold of a device.
            give_up: Ends it, once its memory is needed; called without a lock of ours.
            avoid: UUIDs of devices where it does not work.
            patience_s: Seconds to wait for a reading.

        Returns:
            `None`: there is no room beside those that are there, or the devices do not answer.
        """
        with self._changed:
            reading = self._around.read(patience_s)
            if reading is None or self._around.closed():
                return None
            view = self._ledger.view()
            room = choose_device(
                self._around.survey(reading, view),
                self._style,
                context_of,
                lambda key: self._shelf.count(kind, key),
                avoid,
            )
            if room is None:
                return None
            device, size = room.device, context_of(room.device)
            name = "a hot standby"
            promise = Reservation(
                request_id, device.host, device.uuid, size, task_name=name, standby=True
            )
            if not self._ledger.try_reserve(view.version, [promise]):
                # Somebody was faster; it is asked again soon.
                return None
            ticket = Ticket(Request(request_id, name, -1, self._clock.now()), pid=pid)
            ticket.placement = Placement(request_id, (device,), (size,), (promise,))
            self._recovery.take_baseline(ticket, reading)
            loan = self._shelf.add(Loan(ticket, kind, give_up))
            self._ledger.attach(request_id, pid)
            self._ledger.lend(request_id, lambda: self._reclaim(loan))
            return loan

    def offer(self, loan: Loan) -> None:
        """Say that tasks may take a hot standby: it is about to start its context."""
        with self._changed:
            loan.touched = True
            # Unless it was asked to end meanwhile.
            loan.offered = not loan.ending
            # Where the device does not list it, this is what it is taken to hold.
            assert loan.ticket.placement is not None
            loan.ticket.stand_in_bytes = loan.ticket.placement.budget_bytes[0]

    def end(self, loan: Loan) -> None:
        """Say that the process of a hot standby is gone; without effect once a task had it."""
        release = partial(self._ledger.release, loan.id)
        with self._changed:
            loan.ended, loan.offered = True, False
            if not self._shelf.remove(loan):
                return
            if not self._around.closed():
                if loan.touched:
                    self._await(loan)
                else:
                    self._around.call_later(release)
                return
        release()

    def hand_over(self, loan_id: str, ticket: Ticket) -> None:
        """Make a hot standby a request's: its promise stands in place of the standby's already."""
        with self._changed:
            loan = self._shelf.take(loan_id)
            ticket.standby = loan
            ticket.pid = loan.ticket.pid
            ticket.stand_in_bytes = loan.ticket.stand_in_bytes
            if ticket.pid is not None:
                self._ledger.attach(ticket.request.id, ticket.pid)

    def leave(self, ticket: Ticket) -> None:
        """Say that a request will not use the hot standby that was kept for it, if there is one: it ends."""
        with self._changed:
            loan, ticket.standby = ticket.standby, None
            if loan is None:
                return
            if ticket.pid == loan.ticket.pid:
                ticket.pid = None
                ticket.stand_in_bytes = 0
            # Its promise went to the request; what it holds until it is gone is ours all the same.
            loan.ending, loan.offered = True, False
            if loan.ended:
                self._await(loan)
            else:
                self._shelf.add(loan)
                self._around.call_later(loan.give_up)

    def _await(self, loan: Loan) -> None:
        """Wait for the memory of one whose process is gone."""
        ticket = loan.ticket
        ticket.ended_s = self._clock.now()
        ticket.ended_pid, ticket.pid = ticket.pid, None
        self._recovery.begin(ticket, ticket.ended_s)
        self._around.call_later(lambda: None)

    def _reclaim(self, loan: Loan) -> None:
        """Somebody needs its memory: from the ledger, without a lock."""
        with self._changed:
            if not self._shelf.holds(loan) or loan.ending:
                # A task has it, or it is ending already.
                return
            loan.ending, loan.offered = True, False
        loan.give_up()
