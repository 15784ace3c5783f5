"""Brokers of several processes on one ledger: tasks that hold a device and wait for tasks which they have submitted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prefect_gpu.broker.broker import POLL_S, Broker
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.planning import HOPELESS_S
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig
from tests.unit.broker.broker_rig import thread_rig as thread_rig


class Outer:
    """A task on a device, and the broker of its process, which shares a ledger with the flow's."""

    def __init__(self, rig: Rig, name: str, gib: float, **others: Any) -> None:
        self.rig = rig
        self.ticket = rig.place(name, gib, **others)
        self.pid = rig.start(self.ticket)
        #: When its body began to wait; `None`: it computes.
        self.waits_s: float | None = None
        self.broker: Broker = rig.another(
            ancestors=(*self.ticket.request.ancestors, self.id), waits_since=lambda: self.waits_s
        )

    @property
    def id(self) -> str:
        return self.ticket.request.id

    def submit(self, name: str, gib: float) -> Ticket:
        return self.rig.submit(name, gib, broker=self.broker)

    def waits(self) -> None:
        self.waits_s = self.rig.clock.now()


def loans(rig: Rig, ticket: Ticket) -> list[tuple[str, float]]:
    entry = rig.ledger.entry(ticket.request.id)
    assert entry is not None
    return [(lender, size / GIB) for each in entry.reservations for lender, size in each.loans]


def test_tasks_that_hold_all_the_room_lend_it_to_those_inside_them() -> None:
    rig = Rig("1x9GiB")
    first, second = Outer(rig, "first", 4), Outer(rig, "second", 4)
    inner = [first.submit("a", 4), first.submit("b", 4), second.submit("c", 4)]
    first.waits()
    rig.look()
    assert not any(each.decided for each in inner), "the second one computes, and will end"
    second.waits()
    rig.look()
    assert [each.decided for each in inner] == [False, False, True], "with it the second one ends"
    assert loans(rig, inner[2]) == [(second.id, 4)]
    second.broker.end(inner[2])
    third = second.submit("d", 6)
    rig.look()
    assert [each.decided for each in inner] == [True, False, True], "the second one waits again"
    assert loans(rig, inner[0]) == [(first.id, 4)] and not third.decided
    first.broker.end(inner[0])
    rig.look()
    rig.decided(inner[1])
    assert loans(rig, inner[1]) == [(first.id, 4)]


def test_a_request_that_nothing_helps_fails_once_readings_have_shown_it_for_a_while() -> None:
    rig = Rig("1x9GiB")
    outer = Outer(rig, "outer", 8)
    rig.reader.allocate(outer.pid, "SIM-0", 7 * GIB)
    inner = outer.submit("inner", 4)
    rig.look()
    rig.clock.advance(HOPELESS_S)
    rig.look()
    assert not inner.decided, "the outer task computes, and may free its memory"
    outer.waits()
    rig.look()
    assert not inner.decided
    rig.clock.advance(HOPELESS_S)
    rig.look()
    rig.decided(inner)
    assert "the outer task 'outer' holds 8GiB and uses 7GiB" in str(inner.error)


def test_entries_of_a_ledger_that_is_shared_later_are_seen_by_others(tmp_path: Path) -> None:
    own, told = Ledger(), list[str]()
    own.subscribe(lambda: told.append("changed"))
    assert not own.shares and own.try_write(own.view().version, {})
    own.share(lambda: HostStore(tmp_path))
    own.share(lambda: HostStore(tmp_path / "elsewhere"))
    assert own.shares and not own.problem and told


def test_a_body_that_goes_on_while_its_broker_has_nothing_else_to_do_is_known_to_go_on(
    thread_rig: Rig, tmp_path: Path
) -> None:
    rig = thread_rig
    rig.ledger = Ledger(lambda: HostStore(tmp_path), rig.clock.now)
    rig.broker = rig.another()
    outer = Outer(rig, "outer", 8)

    def until_ledger_says(waits: bool) -> bool:
        until_s = time.monotonic() + DEADLOCK_S
        while (found := rig.ledger.entry(outer.id)) is None or found.waits is not waits:
            rig.clock.advance(POLL_S)
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    inner = outer.submit("inner", 4)
    outer.waits()
    assert until_ledger_says(waits=True)
    rig.decided(inner)
    outer.broker.end(inner)
    assert rig.next_recovered() == ("inner", 0)
    # Until the broker's thread has found nothing to do.
    time.sleep(0.2)
    outer.waits_s = None
    assert until_ledger_says(waits=False)
