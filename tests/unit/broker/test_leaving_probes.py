"""First runs that share a device and are suspended for the others there, at a broker."""

from __future__ import annotations

import pytest

from prefect_gpu.broker.broker import Ticket
from prefect_gpu.broker.device_view import SUSPENDED_BYTES
from prefect_gpu.broker.ledger import Entry
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.preempting import ASK_AGAIN_S
from prefect_gpu.broker.ticket import BY_HAND, FOR_FIRST_RUNS
from prefect_gpu.scheduling.model import Device
from prefect_gpu.scheduling.probes import FIRST_S
from prefect_gpu.units import GIB, MIB
from tests.unit.broker.broker_rig import Rig
from tests.unit.broker.broker_rig import rig as rig
from tests.unit.broker.test_suspended_tasks import ask_by_hand, may_resume


class FirstRun:
    """A first run that shares its device, with the process and the runner that it has in a flow."""

    def __init__(self, rig: Rig, name: str, gib: float, device: str = "0") -> None:
        self.rig, self.gib, self.uuid = rig, gib, f"SIM-{device}"
        self.ticket: Ticket = rig.place(name, probe_fraction=1.0, devices=(device,))
        self.pid = rig.start(self.ticket, gib)
        #: What its runner was asked for, in that order.
        self.asked: list[bool] = []
        self.ended: list[Device] = []
        self.ticket.on_held_back = self.asked.append
        self.ticket.on_short = self.ended.append
        self.ticket.may_leave = True

    @property
    def entry(self) -> Entry:
        found = self.rig.ledger.entry(self.ticket.request.id)
        assert found is not None
        return found

    def hear(self) -> list[bool]:
        self.rig.broker.look()
        return self.asked

    def grow(self, gib: float) -> None:
        """Take more, and have it seen."""
        self.rig.clock.advance(1)
        self.rig.reader.allocate(self.pid, self.uuid, int((gib - self.gib) * GIB))
        self.gib = gib
        self.rig.broker.look()

    def move_out(self) -> None:
        self.rig.broker.show_suspension(self.ticket, Trigger.MOVING_OUT, "moving to the host")
        self.rig.reader.detach(self.pid)
        self.rig.clock.advance(5)
        self.rig.broker.show_suspension(self.ticket, Trigger.MOVED_OUT, "away")
        self.rig.broker.look()

    def move_in(self) -> None:
        assert may_resume(self.rig, self.ticket)
        self.rig.reader.attach(self.pid, [self.uuid])
        self.rig.reader.allocate(self.pid, self.uuid, int(self.gib * GIB))
        self.rig.broker.show_suspension(self.ticket, Trigger.MOVED_IN, "")
        self.rig.broker.look()


@pytest.fixture
def two(rig: Rig) -> tuple[FirstRun, FirstRun]:
    """Return two first runs that are past their first seconds, the older one first."""
    old = FirstRun(rig, "old", 2)
    rig.clock.advance(1)
    new = FirstRun(rig, "new", 8)
    rig.broker.look()
    rig.clock.advance(FIRST_S)
    rig.broker.look()
    return old, new


def test_the_newest_is_suspended_and_comes_back_with_its_cap_for_a_budget(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    cap = new.ticket.placement.budget_bytes[0] if new.ticket.placement else 0
    old.grow(15)
    assert new.hear() == [True] and not new.ended and old.hear() == []
    assert new.ticket.held_back_for == FOR_FIRST_RUNS
    # It keeps its device until it is away.
    old.grow(15.5)
    assert new.hear() == [True] and old.hear() == []
    assert {r.task_name for r in rig.reservations()} == {"old", "new"}
    new.move_out()
    assert [r.task_name for r in rig.reservations()] == ["old"]
    old.grow(22)
    assert new.hear() == [True] and new.entry.request.returns
    rig.exit(old.ticket)
    rig.broker.look()
    assert new.hear() == [True, False]
    (reservation,) = new.entry.reservations
    # It is safe from the others now.
    assert reservation.probe is None and reservation.reserved_bytes == cap
    new.move_in()
    assert new.entry.wish is None and not new.entry.away and not new.ended


def test_it_comes_back_only_where_its_whole_cap_fits(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    old.grow(15)
    new.move_out()
    third = rig.submit("third", probe_fraction=1.0)
    rig.clock.advance(5)
    rig.broker.look()
    # 8 GiB are free, which is what it holds. New first runs do not take them before it.
    assert new.hear() == [True] and rig.waits(third)
    # It is known what the other one needs.
    rig.learn(old.ticket, 16)
    rig.broker.look()
    assert new.hear() == [True]
    rig.exit(old.ticket)
    rig.broker.look()
    assert new.hear() == [True, False]
    new.move_in()
    assert [r.task_name for r in rig.reservations()] == ["new", "third"]


def test_one_whose_need_is_known_by_now_stays(rig: Rig, two: tuple[FirstRun, FirstRun]) -> None:
    old, new = two
    rig.learn(new.ticket, 7)
    old.grow(15)
    assert new.hear() == []


def test_what_is_learned_while_it_leaves_does_not_take_its_room(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    cap = new.entry.reservations[0].reserved_bytes
    old.grow(15)
    assert new.hear() == [True]
    rig.learn(new.ticket, 7)
    new.move_out()
    assert new.entry.request.memory == cap


def test_one_at_a_time_leaves_on_a_machine() -> None:
    rig = Rig("2x24GiB")
    runs = {}
    for index in range(2):
        for name in ("old", "new"):
            runs[name, index] = FirstRun(rig, f"{name} {index}", 8, f"{index}")
            rig.clock.advance(1)
    rig.broker.look()
    rig.clock.advance(FIRST_S)
    for index in range(2):
        runs["old", index].grow(15)
    asked = [each for each in runs.values() if each.hear()]
    assert [each.ticket.request.task_name for each in asked] == ["new 0"]
    asked[0].move_out()
    runs["old", 1].grow(15.5)
    assert runs["new", 1].hear() == [True]


def test_where_the_newest_refuses_the_next_one_goes(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    third = FirstRun(rig, "third", 1)
    rig.clock.advance(FIRST_S)
    rig.broker.look()
    old.grow(13.6)
    assert third.hear() == [True] and new.hear() == []
    rig.broker.show_suspension(third.ticket, Trigger.NOT_MOVED, "not suspended: it uses jax")
    third.hear()
    assert third.entry.wish is None
    old.grow(14)
    assert new.hear() == [True] and third.hear() == [True]
    rig.broker.show_suspension(new.ticket, Trigger.NOT_MOVED, "not suspended: it uses jax")
    # The oldest has the whole device as its cap.
    old.grow(14.4)
    assert new.hear() == [True] and third.hear() == [True] and old.hear() == []
    rig.clock.advance(ASK_AGAIN_S)
    old.grow(14.8)
    assert third.hear() == [True, True]


def test_what_is_learned_of_one_that_was_asked_counts_once_it_has_refused(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    old.grow(15)
    assert new.hear() == [True]
    rig.learn(new.ticket, 9)
    assert new.entry.reservations[0].reserved_bytes > 9 * GIB
    rig.broker.show_suspension(new.ticket, Trigger.NOT_MOVED, "not suspended: it uses jax")
    rig.broker.look()
    assert new.entry.reservations[0].reserved_bytes == 9 * GIB


def test_one_that_a_person_has_suspended_is_no_neighbour(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    third = FirstRun(rig, "third", 1)
    rig.clock.advance(FIRST_S)
    rig.broker.look()
    for each in (third, new):
        ask_by_hand(rig, each.ticket, True)
        rig.broker.look()
        each.move_out()
    old.grow(22.5)
    assert old.hear() == [] and old.entry.reservations
    assert third.entry.held_back and new.entry.held_back


def test_one_that_may_not_be_suspended_goes_on(rig: Rig, two: tuple[FirstRun, FirstRun]) -> None:
    old, new = two
    new.ticket.may_leave = False
    old.grow(15)
    assert new.hear() == old.hear() == [] and not new.ended and not old.ended


def test_in_its_first_seconds_it_is_ended(rig: Rig) -> None:
    old = FirstRun(rig, "old", 2)
    rig.clock.advance(1)
    new = FirstRun(rig, "new", 8)
    rig.broker.look()
    old.grow(15)
    assert len(new.ended) == 1 and new.hear() == []


def test_one_that_a_person_suspends_on_its_way_stays_away_until_resumed(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    old.grow(15)
    assert new.hear() == [True]
    ask_by_hand(rig, new.ticket, True)
    new.move_out()
    assert new.ticket.held_back_for == BY_HAND
    rig.exit(old.ticket)
    rig.broker.look()
    assert new.hear() == [True]
    ask_by_hand(rig, new.ticket, False)
    rig.broker.look()
    assert new.hear() == [True, False]


def test_a_task_of_higher_priority_starts_in_the_room_that_it_left(
    rig: Rig, two: tuple[FirstRun, FirstRun]
) -> None:
    old, new = two
    rig.learn(old.ticket, 16)
    known = rig.submit("known", 6, priority=1)
    old.grow(15)
    assert rig.waits(known)
    new.move_out()
    rig.decided(known)
    assert known.placement is not None
    rig.start(known, 4)
    rig.broker.look()
    # Its cap does not fit beside the budget.
    assert new.hear() == [True]
    rig.exit(known)
    rig.exit(old.ticket)
    rig.broker.look()
    assert new.hear() == [True, False]


def test_what_the_driver_keeps_for_one_that_is_away_is_not_missing_from_another(
    rig: Rig, two: tuple[FirstRun, FirstRun], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = two
    old.grow(15)
    new.move_out()
    rig.reader.leaked_bytes["SIM-0"] = SUSPENDED_BYTES - MIB
    old.ticket.on_recovered = lambda size: rig.recovered.put(("old", size))
    rig.exit(old.ticket)
    rig.broker.look()
    assert rig.next_recovered() == ("old", 0)
    assert "did not come back" not in caplog.text
