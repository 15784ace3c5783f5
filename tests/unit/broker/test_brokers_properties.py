"""Whole brokers of several processes on one ledger that end, stop and go on between any two steps.

A broker here makes its passes when the test says so, not on a thread of its own: the same steps give the same log.
What is promised is checked from the rows of the log, after each transaction.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefect_gpu.broker.broker import Broker, Ticket, next_sequence
from prefect_gpu.broker.host_ledger import _ENTRY, HostStore
from prefect_gpu.broker.ledger import Entry, Ledger, Row, Written
from prefect_gpu.broker.planning import PASSIVE_S
from prefect_gpu.clock import FakeClock
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.backfill import Patience
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.scheduling_pass import order_key
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Reader
from tests.unit.broker.test_ledger import release_lock

CAPACITY = 8
HOST = 16
PATIENCE = Patience(passes=2, wait_s=6.0, heads=1)

REQUESTS = st.fixed_dictionaries(
    {
        "gib": st.sampled_from([3, 1, 2, 5, CAPACITY, 3, 4, None, 0.5, CAPACITY + 1]),
        "count": st.sampled_from([1, 1, 1, 1, 1, 2]),
        "exclusive": st.sampled_from([False] * 5 + [True]),
        "priority": st.sampled_from([0, 0, 0, 0, 1]),
        "host_bytes": st.sampled_from([0] * 6 + [(HOST // 2 + 1) * GIB, (HOST + 1) * GIB]),
    }
)


class Killed(BaseException):
    """Ends a process in the middle of what it does."""


class WatchedStore:
    """A store at whose writes something happens."""

    def __init__(self, store: HostStore, observe: Callable[[int], None]) -> None:
        self.inner = store
        self.owner, self.namespace, self.node = store.owner, store.namespace, store.node
        self.changed, self.read, self.beat = store.changed, store.read, store.beat
        self._observe = observe
        #: Done once, before the next write, and after it.
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        self.number = 0

    @property
    def silent(self) -> frozenset[str]:
        return self.inner.silent

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def write(
        self, after: int, changes: Sequence[Row], conflicts: Callable[[Row], bool]
    ) -> Written:
        before, self.before = self.before, None
        if before is not None:
            before()
        written = self.inner.write(after, changes, conflicts)
        self._observe(after)
        done, self.after = self.after, None
        if done is not None:
            done()
        return written


class Owner:
    """A process with a broker of its own."""

    def __init__(self, machine: Machine) -> None:
        now = machine.clock.now
        inner = HostStore(machine.folder, lambda path: SharedFolder(path, now), owners_s=0.0)
        self.store = WatchedStore(inner, machine.observe)
        self.ledger = Ledger(lambda: self.store, now)
        self.broker = Broker(
            machine.reader,
            self.ledger,
            clock=machine.clock,
            headroom_bytes=0,
            max_tasks_per_device=machine.max_tasks,
            max_processes=100,
            patience=PATIENCE,
            read_host_available=lambda: HOST * GIB,
            stepped=True,
        )
        self.tickets: list[Ticket] = []
        #: It makes no pass.
        self.stopped = False
        #: Others may take it for one that does nothing, until it has looked.
        self.was_stopped = False

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if not ticket.decided]

    @property
    def placed(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.placement is not None]


class Machine(RuleBasedStateMachine):
    """Rules are steps of processes, of those who end them, and of time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = FakeClock()
        self.pids = iter(range(10_000, 100_000))
        self.owners: list[Owner] = []
        #: The collector would say for them that they have left.
        self.dead: list[Owner] = []
        #: Processes of owners that were killed.
        self.orphans: list[int] = []
        # What the log says.
        self.log: sqlite3.Connection | None = None
        self.number = 0
        self.entries: dict[str, Entry] = {}
        #: By request id: the row with which it began to wait, how often it was passed, and when first.
        self.since_row: dict[str, int] = {}
        self.passed: dict[str, int] = {}
        self.passed_s: dict[str, float] = {}

    def teardown(self) -> None:
        # While the files are there: SQLite's connection to a file that was removed stays open.
        for owner in (*self.owners, *self.dead):
            owner.store.inner.close()
        if self.log is not None:
            self.log.close()
        shutil.rmtree(self.folder)

    # What a process does.

    @initialize(
        devices=st.integers(1, 2),
        max_tasks=st.sampled_from([None, None, None, 1, 2]),
        asked=st.lists(st.tuples(st.integers(0, 1), REQUESTS), min_size=3, max_size=8),
    )
    def begin(
        self, devices: int, max_tasks: int | None, asked: list[tuple[int, dict[str, Any]]]
    ) -> None:
        self.switch_on(devices, max_tasks)
        for at, fields in asked:
            self.ask(self.owners[at], **fields)
        self.all_look()

    # Each example leaves some rules out; the most common steps are one rule.
    @rule(
        first=st.integers(0, 9),
        step=st.sampled_from(["submit", "start", "end", "end", "end", "withdraw"]),
        asked=st.lists(REQUESTS, min_size=1, max_size=3),
        part=st.sampled_from([0.0, 0.5, 1.0]),
        lookers=st.integers(0, 3),
    )
    def work(
        self, first: int, step: str, asked: list[dict[str, Any]], part: float, lookers: int
    ) -> None:
        """One process takes a step, and it and some of those after it look."""
        if not self.running:
            return
        owner = self.running[first % len(self.running)]
        if step == "submit":
            for fields in asked:
                self.ask(owner, **fields)
        elif step == "start":
            self.start_bodies(owner, part)
        elif step == "end":
            for ticket in owner.placed[: len(asked)]:
                self.end_ticket(owner, ticket)
        elif owner.waiting:
            ticket = owner.waiting[first % len(owner.waiting)]
            assert owner.broker.withdraw(ticket)
            owner.tickets.remove(ticket)
        for looker in (self.running[first % len(self.running) :] + self.running)[:lookers]:
            if looker in self.owners:
                self.look_at(looker)

    # What happens to it.

    @precondition(lambda self: len(self.dead) < 3)
    @rule(
        first=st.integers(0, 9), how=st.sampled_from(["now", "before its next write", "after it"])
    )
    def kill(self, first: int, how: str) -> None:
        owner = self.owners[first % len(self.owners)]

        def die() -> None:
            raise Killed

        if how == "now":
            self.bury(owner)
        elif how == "after it":
            owner.store.after = die
        else:
            owner.store.before = die

    @rule(first=st.integers(0, 9), own=REQUESTS, other=REQUESTS)
    def another_writes_before_it_does(
        self, first: int, own: dict[str, Any], other: dict[str, Any]
    ) -> None:
        """Between a decision of one process and its write, another one decides and writes."""
        if len(self.running) < 2:
            return
        one, two = (self.running * 2)[first % len(self.running) :][:2]

        def look() -> None:
            if two in self.owners and two.store.before is None:
                self.look_at(two)

        self.ask(one, **own)
        self.ask(two, **other)
        one.store.before = look
        self.look_at(one)

    @rule(first=st.integers(0, 9))
    def stop_or_go_on(self, first: int) -> None:
        owner = self.owners[first % len(self.owners)]
        owner.stopped = not owner.stopped
        if owner.stopped:
            owner.was_stopped = True
        else:
            self.look_at(owner)

    @rule(seconds=st.sampled_from([0.5, PASSIVE_S + 1, PATIENCE.wait_s]))
    def time_passes(self, seconds: float) -> None:
        self.orphans_end()
        while seconds > 0:
            # None of those that look is away for long.
            self.clock.advance(min(seconds, PASSIVE_S / 2))
            seconds -= PASSIVE_S / 2
            self.all_look()

    @rule()
    def all_tasks_end(self) -> None:
        """End what runs, and what starts then, until nothing waits: nobody waits for ever."""
        for owner in self.owners:
            owner.stopped = False
            owner.store.before = owner.store.after = None
        self.orphans_end()
        # One that has ended a task may look after those that wait for its memory: they see it in the next round.
        for _ in range(2 * sum(len(owner.tickets) for owner in self.owners) + 2):
            for owner in self.owners:
                for ticket in owner.placed:
                    self.end_ticket(owner, ticket)
            self.all_look()
            if not any(owner.tickets for owner in self.owners):
                break
        waiting = [ticket.request for owner in self.owners for ticket in owner.waiting]
        assert not waiting
        self.all_look()
        assert not self.owners[0].ledger.view().by_device

    # Used by rules.

    def switch_on(self, devices: int, max_tasks: int | None = None) -> None:
        self.reader = Reader(SimulatedDevices(f"{devices}x{CAPACITY}GiB"), self.clock)
        self.max_tasks = max_tasks
        self.owners += [Owner(self), Owner(self)]

    def ask(self, owner: Owner, gib: float | None, **fields: Any) -> Ticket:
        sequence = next_sequence()
        memory = gib if gib is None or isinstance(gib, float) else gib * GIB
        request = Request("", f"task {sequence}", sequence, 0.0, memory, **fields)
        owner.tickets.append(ticket := owner.broker.submit(request))
        return ticket

    def start_bodies(self, owner: Owner, part: float) -> None:
        with self.may_die(owner):
            for ticket in owner.placed:
                if ticket.pid is None:
                    self.start_process(owner, ticket, part)
                owner.broker.mark_running(ticket)

    def start_process(self, owner: Owner, ticket: Ticket, part: float) -> None:
        assert ticket.placement is not None
        pid = next(self.pids)
        uuids = [device.uuid for device in ticket.devices]
        self.reader.attach(pid, uuids)
        owner.broker.attach(ticket, pid)
        if not self.orphans:
            # Their memory was promised to others at their owner's end.
            for uuid, budget in zip(uuids, ticket.placement.budget_bytes, strict=True):
                self.reader.allocate(pid, uuid, int(part * budget))

    def orphans_end(self) -> None:
        for pid in self.orphans:
            self.reader.detach(pid)
        self.orphans.clear()

    @property
    def running(self) -> list[Owner]:
        return [owner for owner in self.owners if not owner.stopped]

    def look_at(self, owner: Owner) -> None:
        with self.may_die(owner):
            owner.broker.look()
            owner.was_stopped = False
            owner.tickets = [ticket for ticket in owner.tickets if ticket.error is None]

    def all_look(self) -> None:
        for owner in self.running:
            if owner in self.owners:
                self.look_at(owner)

    def end_ticket(self, owner: Owner, ticket: Ticket) -> None:
        if ticket.pid is not None:
            self.reader.detach(ticket.pid)
        owner.broker.end(ticket)
        owner.tickets.remove(ticket)

    @contextlib.contextmanager
    def may_die(self, owner: Owner) -> Iterator[None]:
        try:
            yield
        except Killed:
            self.bury(owner)

    def bury(self, owner: Owner) -> None:
        """Do what `kill -9` does: the kernel releases the lock, and its children go on for a while. Another starts."""
        release_lock(owner.store.inner)
        self.owners[self.owners.index(owner)] = Owner(self)
        self.dead.append(owner)
        self.orphans += [ticket.pid for ticket in owner.tickets if ticket.pid is not None]

    # What must hold.

    def observe(self, known: int) -> None:
        """Check all rows since the last call: what a process has just written, and what it removed.

        Args:
            known: Number of the last row that the process had read when it decided.
        """
        if self.log is None:
            self.log = sqlite3.connect(self.folder / "ledger.db", check_same_thread=False)
        query = "SELECT number, request, entry FROM log WHERE number > ? ORDER BY number"
        rows = self.log.execute(query, (self.number,)).fetchall()
        at_once = {request_id for _, request_id, text in rows if text is not None}
        for number, request_id, text in rows:
            entry = None if text is None else _ENTRY.validate_json(text)
            before = self.entries.pop(request_id, None)
            if entry is not None and entry.reservations and not (before and before.reservations):
                self.count_passes(entry, at_once, known)
            if entry is not None:
                self.entries[request_id] = entry
                self.since_row.setdefault(request_id, number)
                self.check(entry)
            self.number = number

    def count_passes(self, placed: Entry, at_once: set[str], known: int) -> None:
        """Count for each blocked request that a later one has taken a device for which it waits."""
        stopped = {owner.store.owner for owner in self.owners if owner.was_stopped}
        living = {owner.store.owner for owner in self.owners}
        shapes = set()
        waiting = [entry for entry in self.entries.values() if not entry.reservations]
        for entry in sorted(waiting, key=lambda entry: order_key(entry.request)):
            request = entry.request
            shape = (entry.origin, request.memory, type(request.memory), request.count)
            first = (*shape, request.exclusive) not in shapes
            shapes.add((*shape, request.exclusive))
            if order_key(request) > order_key(placed.request) or not first:
                continue
            if entry.owner not in living or entry.owner in stopped:
                continue
            if self.since_row[request.id] > known or self.fits(request):
                # Who placed it did not know of this one, or has not delayed it.
                continue
            self.passed[request.id] = self.passed.get(request.id, 0) + 1
            first_s = self.passed_s.setdefault(request.id, self.clock.now())
            assert self.passed[request.id] <= PATIENCE.passes, f"{request} was passed too often"
            assert self.clock.now() - first_s < PATIENCE.wait_s, f"{request} was passed too long"

    def fits(self, request: Request) -> bool:
        """Return whether the reservations alone leave room for a request."""
        found = 0
        for device in self.reader.devices():
            held = self.reserved(device.uuid)
            free = CAPACITY * GIB - sum(r.reserved_bytes for r in held)
            need = request.need_bytes(device)
            alone = need is None or request.exclusive
            full = self.max_tasks is not None and len(held) >= self.max_tasks
            closed = full or any(r.exclusive for r in held) or (alone and held)
            found += not closed and free >= (need or 0)
        return found >= request.count

    def reserved(self, uuid: str) -> list[Any]:
        every = (r for entry in self.entries.values() for r in entry.reservations)
        return [reservation for reservation in every if reservation.device_uuid == uuid]

    def check(self, entry: Entry) -> None:
        for device in self.reader.devices():
            held = self.reserved(device.uuid)
            assert sum(r.reserved_bytes for r in held) <= CAPACITY * GIB
            assert len(held) < 2 or not any(r.exclusive for r in held)
            assert len(held) < 2 or self.max_tasks is None or len(held) <= self.max_tasks
        if entry.reservations:
            uuids = {r.device_uuid for r in entry.reservations}
            assert len(uuids) == len(entry.reservations) == entry.request.count
        holding = [each for each in self.entries.values() if each.reservations]
        promised = sum(each.request.host_bytes for each in holding if not each.running)
        assert len(holding) < 2 or promised <= HOST * GIB or entry not in holding

    @invariant()
    def every_process_sees_the_others(self) -> None:
        assert not any(owner.ledger.problem for owner in self.owners)

    @invariant()
    def who_has_a_placement_has_its_reservation(self) -> None:
        for owner in self.owners:
            for ticket in owner.placed:
                assert ticket.request.id in self.entries
                assert self.entries[ticket.request.id].reservations == ticket.placement.reservations


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A process that was killed says that its lock is gone."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    made.switch_on(devices=1)
    yield made
    made.teardown()


def test_a_process_that_was_stopped_is_passed_no_more_often_than_others(machine: Machine) -> None:
    stopped, busy = machine.owners
    first = machine.ask(busy, CAPACITY)
    machine.look_at(busy)
    waits = machine.ask(stopped, 5)
    machine.look_at(stopped)
    small = [machine.ask(busy, 4) for _ in range(8)]
    machine.look_at(busy)
    stopped.stopped = stopped.was_stopped = True
    machine.end_ticket(busy, first)
    machine.look_at(busy)
    machine.time_passes(PASSIVE_S + 1)
    assert [ticket.decided for ticket in small] == [True] * 2 + [False] * 6
    stopped.stopped = False
    machine.look_at(stopped)
    for ticket in small[: PATIENCE.passes + 2]:
        machine.end_ticket(busy, ticket)
        machine.look_at(busy)
        machine.look_at(stopped)
    assert waits.decided
    assert machine.passed[waits.request.id] == PATIENCE.passes


def test_requests_of_a_stopped_process_are_passed_together(machine: Machine) -> None:
    stopped, busy = machine.owners
    first = machine.ask(busy, CAPACITY)
    machine.look_at(busy)
    machine.ask(stopped, 3)
    large = machine.ask(stopped, CAPACITY)
    machine.look_at(stopped)
    stopped.stopped = stopped.was_stopped = True
    machine.end_ticket(busy, first)
    machine.ask(busy, 1)
    waits = machine.ask(busy, 5)
    machine.look_at(busy)
    assert not waits.decided, "the first of the stopped process could start"
    machine.ask(busy, 1)
    # It passes the large one, and writes so.
    machine.time_passes(PASSIVE_S / 2)
    assert machine.entries[large.request.id].status.passed == 2
    assert not waits.decided
    machine.time_passes(PASSIVE_S)
    assert waits.decided


def test_brokers_keep_one_order_and_never_promise_twice_whatever_ends() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_brokers_keep_one_order_through_many_steps() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=200, stateful_step_count=60, deadline=None)
    )
