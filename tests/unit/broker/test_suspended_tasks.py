"""Tasks that make way for others, at a broker: who is asked when, who gets the device, and who comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefect_gpu.broker.broker import Ticket
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.preempting import ASK_AGAIN_S, hold_back
from prefect_gpu.broker.ticket import BY_HAND
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.preemption import AGING_S, REST_S
from prefect_gpu.units import GIB
from tests.unit.broker.broker_rig import Rig, indices
from tests.unit.broker.broker_rig import rig as rig


def may_resume(rig: Rig, ticket: Ticket) -> bool:
    """Ask as a process does that is about to resume."""
    rig.broker.show_suspension(ticket, Trigger.MOVING_IN, "moving back")
    rig.broker.look()
    return ticket.may_resume.get(timeout=DEADLOCK_S)


def ask_by_hand(rig: Rig, ticket: Ticket, away: bool, shared: bool = False) -> None:
    """Write what a person wants."""
    assert rig.ledger.rewrite(ticket.request.id, lambda entry: hold_back(entry, away, shared))


class Training:
    """A preemptible task of 16 GiB that has run for a while, with the process and the runner that it has in a flow."""

    def __init__(self, rig: Rig, name: str = "training", gib: float = 16, **others: Any) -> None:
        self.rig, self.gib = rig, gib
        self.ticket: Ticket = rig.place(name, gib, **{"preemptible": True, **others})
        self.pid = rig.start(self.ticket, gib - 1)
        #: What its runner was asked for, in that order.
        self.asked: list[bool] = []
        self.ticket.on_held_back = self.asked.append
        rig.clock.advance(100)
        rig.broker.look()

    @property
    def entry(self) -> Entry:
        found = self.rig.ledger.entry(self.ticket.request.id)
        assert found is not None
        return found

    def hear(self) -> list[bool]:
        self.rig.broker.look()
        return self.asked

    def move_out(self) -> None:
        self.rig.broker.show_suspension(self.ticket, Trigger.MOVING_OUT, "moving to the host")
        self.rig.reader.detach(self.pid)
        self.rig.clock.advance(10)
        self.rig.broker.show_suspension(
            self.ticket, Trigger.MOVED_OUT, "away: 15GiB in host memory"
        )
        self.rig.broker.look()

    def move_in(self) -> None:
        assert may_resume(self.rig, self.ticket)
        self.rig.reader.attach(self.pid, ["SIM-0", "SIM-1"][: len(self.rig.broker.devices)])
        uuid = self.ticket.devices[0].uuid
        self.rig.reader.allocate(self.pid, uuid, int((self.gib - 1) * GIB))
        self.rig.broker.show_suspension(self.ticket, Trigger.MOVED_IN, "")
        self.rig.broker.look()


def suspended(rig: Rig, **others: Any) -> tuple[Training, Ticket]:
    """Return a training that has made way, and the task that it did it for."""
    training = Training(rig, **others)
    urgent = rig.submit("urgent", 20, priority=1)
    rig.broker.look()
    training.move_out()
    rig.decided(urgent)
    rig.start(urgent, 18)
    rig.broker.look()
    return training, urgent


def test_it_is_asked_makes_way_and_comes_back_before_new_tasks_of_its_priority(rig: Rig) -> None:
    training = Training(rig)
    urgent = rig.submit("urgent", 20, priority=1)
    assert rig.waits(urgent) and training.hear() == [True]
    assert training.ticket.held_back_for == "task 'urgent'"
    # It holds its device until it is away.
    assert [r.task_name for r in rig.reservations()] == ["training"]
    training.move_out()
    rig.decided(urgent)
    assert [r.task_name for r in rig.reservations()] == ["urgent"]
    rig.start(urgent, 18)
    later = rig.submit("later", 16)
    assert rig.waits(later)
    rig.exit(urgent)
    rig.broker.look()
    assert training.hear() == [True, False]
    assert rig.waits(later)
    assert [r.task_name for r in rig.reservations()] == ["training"]
    training.move_in()
    assert not training.entry.away and training.entry.suspension == ""


def test_one_that_has_come_back_rests(rig: Rig) -> None:
    training, urgent = suspended(rig)
    rig.exit(urgent)
    rig.broker.look()
    training.move_in()
    next_one = rig.submit("next", 20, priority=1)
    rig.clock.advance(REST_S - 1)
    assert rig.waits(next_one) and training.hear() == [True, False]
    rig.clock.advance(2)
    rig.broker.look()
    assert training.hear() == [True, False, True]


def test_one_that_refuses_keeps_its_device_and_is_asked_again_later(rig: Rig) -> None:
    training = Training(rig)
    urgent = rig.submit("urgent", 20, priority=1)
    rig.broker.look()
    assert training.hear() == [True]
    rig.broker.show_suspension(training.ticket, Trigger.NOT_MOVED, "not suspended: it uses jax")
    rig.broker.look()
    assert training.entry.wish is None
    assert training.hear() == [True] and rig.waits(urgent)
    rig.clock.advance(ASK_AGAIN_S + 1)
    rig.broker.look()
    assert training.hear() == [True, True]


@pytest.mark.parametrize("is_away", [False, True])
def test_it_goes_on_in_place_when_the_one_that_asked_is_gone(is_away: bool) -> None:
    rig = Rig("2x24GiB")
    first, second = (Training(rig, name) for name in "ab")
    urgent = rig.submit("urgent", 20, count=2, priority=1)
    rig.broker.look()
    assert first.hear() == second.hear() == [True]
    if is_away:
        # The other one is still on its way, so nobody has made way.
        first.move_out()
    rig.broker.withdraw(urgent)
    rig.broker.look()
    assert first.hear() == second.hear() == [True, False]
    assert [r.task_name for r in rig.reservations()] == ["a", "b"]
    assert first.entry.wish is second.entry.wish is None


def test_one_that_is_moved_goes_on_at_once_on_the_other_device() -> None:
    rig = Rig("2x24GiB")
    other = rig.place("other", 10, devices=("1",))
    rig.start(other, 8)
    training = Training(rig, gib=12)
    whole = rig.submit("whole", 20)
    rig.broker.look()
    assert training.hear() == [True]
    assert [r.device_uuid for r in training.entry.reservations] == ["SIM-0"]
    training.move_out()
    rig.decided(whole)
    assert indices(whole) == [0]
    assert training.hear() == [True, False]
    assert indices(training.ticket) == [1]
    training.move_in()
    assert [r.device_uuid for r in training.entry.reservations] == ["SIM-1"]


def test_one_that_comes_back_through_the_queue_may_be_on_another_device() -> None:
    rig = Rig("2x24GiB")
    other = rig.place("other", 20, devices=("1",))
    rig.start(other, 8)
    training, _ = suspended(rig)
    assert rig.waits()
    rig.exit(other)
    rig.broker.look()
    assert training.hear() == [True, False]
    assert indices(training.ticket) == [1]


def test_one_that_was_away_for_long_comes_back_before_tasks_of_higher_priority(rig: Rig) -> None:
    training, urgent = suspended(rig)
    higher = rig.submit("higher", 20, priority=1)
    rig.clock.advance(AGING_S + 1)
    rig.broker.look()
    assert training.ticket.request.priority == 1 and training.entry.request.priority == 1
    rig.exit(urgent)
    rig.broker.look()
    # It has the same priority by now, and came first.
    assert training.hear() == [True, False] and rig.waits(higher)


def test_one_that_is_cancelled_while_it_is_away_leaves_nothing(rig: Rig) -> None:
    training, urgent = suspended(rig)
    assert not rig.broker.withdraw(training.ticket)
    rig.broker.end(training.ticket)
    assert rig.next_recovered() == ("training", 0)
    rig.broker.look()
    assert rig.ledger.entry(training.ticket.request.id) is None
    rig.exit(urgent)
    assert rig.next_recovered() == ("urgent", 0)
    rig.place("next", 24)


def test_one_whose_devices_are_lost_is_told_so(rig: Rig) -> None:
    training, _ = suspended(rig)
    told: list[PrefectGPUError] = []
    training.ticket.on_no_return = told.append
    rig.broker.give_up("the driver is gone")
    rig.broker.look()
    assert [str(each) for each in told] == ["the driver is gone"]
    # Its process is still there, until its runner has ended it.
    rig.broker.end(training.ticket)
    assert rig.next_recovered() == ("training", 0)


def test_no_process_comes_back_while_its_memory_is_wanted_or_its_device_is_anothers(
    rig: Rig,
) -> None:
    training = Training(rig)
    urgent = rig.submit("urgent", 20, priority=1, broker=rig.another())
    rig.look()
    assert not may_resume(rig, training.ticket)
    training.move_out()
    rig.look()
    rig.decided(urgent)
    assert not may_resume(rig, training.ticket)
    assert training.entry.away


def test_it_goes_on_if_something_else_keeps_the_urgent_one_from_its_start(rig: Rig) -> None:
    training, other = Training(rig), rig.another(max_processes=1)
    urgent = rig.submit("urgent", 20, priority=1, broker=other)
    rig.look()
    assert training.asked == [True]
    rig.place("another", 1, priority=9, broker=other)
    rig.look()
    assert training.entry.reservations and not training.entry.suspended_for
    assert training.asked == [True, False] and not urgent.decided


@pytest.mark.parametrize("stopped", ["the flow of the urgent one", "its own flow"])
def test_nothing_is_suspended_any_more_if_a_flow_is_stopped(tmp_path: Path, stopped: str) -> None:
    stores: list[HostStore] = []

    def open_store() -> HostStore:
        # Once at the beginning it looks at whether the other process is alive.
        stores.append(HostStore(tmp_path, owners_s=1e9))
        return stores[-1]

    rig = Rig(ledger=Ledger(open_store))
    other = rig.another(ledger=Ledger(open_store))
    training = Training(rig)
    rig.submit("urgent", 20, priority=1, broker=other)
    rig.look()
    assert training.asked == [True] and training.entry.suspended_for
    if stopped == "its own flow":
        stores[1].silent = frozenset({stores[0].owner})
        rig.look()
    else:
        rig.reader.detach(training.pid)
        rig.broker.show_suspension(training.ticket, Trigger.MOVING_OUT, "moving to the host")
        rig.broker.show_suspension(training.ticket, Trigger.MOVED_OUT, "away")
        stores[0].silent = frozenset({stores[1].owner})
        rig.broker.look()
        rig.broker.look()
        assert training.asked == [True, False]
    assert not training.entry.suspended_for


def test_a_task_is_not_suspended_for_one_within_it(rig: Rig) -> None:
    training = Training(rig)
    inner = rig.another(ancestors=(training.ticket.request.id,))
    rig.place("filler", 7)
    rig.submit("inner", 2, priority=5, broker=inner)
    rig.look()
    assert not training.asked


# By a person.


def by_hand(rig: Rig, shared: bool) -> Training:
    training = Training(rig, preemptible=False)
    ask_by_hand(rig, training.ticket, True, shared)
    rig.broker.look()
    assert training.hear() == [True]
    assert training.ticket.held_back_for == BY_HAND
    training.move_out()
    return training


def test_what_a_person_freed_is_kept_from_others(rig: Rig) -> None:
    training = by_hand(rig, shared=False)
    other = rig.submit("other", 20)
    assert rig.waits(other)
    ask_by_hand(rig, training.ticket, False)
    rig.broker.look()
    assert training.hear() == [True, False]


def test_what_a_person_freed_to_be_shared_is_had_by_others(rig: Rig) -> None:
    training = by_hand(rig, shared=True)
    other = rig.place("other", 20)
    assert training.hear() == [True]
    rig.start(other, 18)
    # It is not even asked for a device before the person says so.
    rig.exit(other)
    rig.broker.look()
    assert rig.reservations() == [] and training.hear() == [True]
    ask_by_hand(rig, training.ticket, False)
    rig.broker.look()
    rig.broker.look()
    assert training.hear() == [True, False]
    assert [r.task_name for r in rig.reservations()] == ["training"]


def test_one_on_its_way_back_is_asked_away_before_others_get_its_device(rig: Rig) -> None:
    training = by_hand(rig, shared=False)
    ask_by_hand(rig, training.ticket, False)
    rig.broker.look()
    assert training.hear() == [True, False]
    ask_by_hand(rig, training.ticket, True, shared=True)
    rig.broker.look()
    assert training.hear() == [True, False, True] and rig.reservations() == []


def test_one_that_moves_out_although_no_one_wants_that_any_more_is_asked_back(rig: Rig) -> None:
    training = Training(rig)
    urgent = rig.submit("urgent", 20, priority=1)
    rig.broker.look()
    assert training.hear() == [True]
    # An old refusal comes after it was asked again.
    rig.broker.show_suspension(
        training.ticket, Trigger.NOT_MOVED, "not suspended: it holds none yet"
    )
    rig.broker.withdraw(urgent)
    rig.broker.look()
    training.move_out()
    assert training.hear() == [True, False]


def test_nothing_is_suspended_for_the_requests_of_a_broker_that_does_not_preempt(rig: Rig) -> None:
    training = Training(rig)
    other = rig.another(preempts=False)
    ticket = rig.submit("urgent", 20, priority=1, broker=other)
    for broker in (other, rig.broker):
        broker.look()
    assert training.hear() == [] and rig.waits(ticket)


def test_an_old_refusal_is_not_taken_for_the_answer_to_a_person(rig: Rig) -> None:
    training = Training(rig)
    rig.submit("urgent", 20, priority=1)
    rig.broker.look()
    rig.broker.show_suspension(
        training.ticket, Trigger.NOT_MOVED, "not suspended: it holds none yet"
    )
    rig.broker.look()
    ask_by_hand(rig, training.ticket, True)
    assert training.entry.held_back and training.entry.suspension == ""
    rig.broker.show_suspension(training.ticket, Trigger.MOVING_OUT, "moving to the host")
    rig.broker.look()
    ask_by_hand(rig, training.ticket, False)
    # Where it is on its way, that stays.
    assert training.entry.suspension == "moving to the host"
