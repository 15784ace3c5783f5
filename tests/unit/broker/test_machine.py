"""The machine alone: events in, commands out, without a thread, a clock or a ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_gpu.broker import events
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.broker.machine import Machine
from prefect_gpu.broker.machine_state import MachineSettings
from prefect_gpu.broker.phases import IllegalTransition, Phase, Trigger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.backfill import PATIENCE
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, Reading, Request
from prefect_gpu.units import GIB

DEVICE = Device("SIM-0", 0, "a model", 24 * GIB, "simulated", "here")
SETTINGS = MachineSettings(
    "simulated", "spread", 8, None, 0, PATIENCE, True, (), (), remote=False, own_pid=1, broker=0
)
EMPTY = Ledger().view()


def reading(at_s: float = 1.0) -> events.Read:
    return events.Read(Reading(at_s, (DeviceSnapshot(DEVICE, at_s, 24 * GIB),), 64 * GIB))


def ticket(name: str, gib: int, sequence: int = 1) -> Ticket:
    return Ticket(Request(name, name, sequence, 0.0, gib * GIB))


@pytest.fixture
def machine() -> Machine:
    return Machine(SETTINGS, (DEVICE,), EMPTY)


def plan_of(machine: Machine, *tickets: Ticket) -> events.Append:
    """Submit requests, and return what is to be written for them."""
    for each in tickets:
        machine.handle(events.Submitted(each), 1.0)
    machine.handle(reading(), 1.0)
    (append,) = machine.handle(events.ScheduleDue(), 1.0)
    assert isinstance(append, events.Append)
    return append


def decided(commands: list[events.Command]) -> list[Ticket]:
    return [each.ticket for each in commands if isinstance(each, events.Decide)]


def test_a_request_asks_for_a_reading_once_and_is_placed_once_its_plan_is_written(
    machine: Machine,
) -> None:
    a = ticket("a", 20)
    assert machine.handle(events.Submitted(a), 1.0) == []
    asked, sampled = machine.handle(events.ScheduleDue(), 1.0)
    assert asked == events.ReadDevices() and sampled == events.SampleDevices(True)
    assert machine.handle(reading(), 1.0) == []
    (append,) = machine.handle(events.ScheduleDue(), 1.0)
    assert isinstance(append, events.Append)
    assert append.plan.changes["a"].reservations[0].reserved_bytes == 20 * GIB
    assert "a" in machine.known.waiting
    assert decided(machine.handle(events.Appended(append.plan, True), 1.0)) == [a]
    assert list(machine.known.placed) == ["a"] and not machine.known.waiting


def test_a_plan_that_could_not_be_written_is_made_again_on_what_others_have_written(
    machine: Machine,
) -> None:
    a, b = ticket("a", 20), ticket("b", 4, sequence=2)
    append = plan_of(machine, a, b)
    assert [r.id for r, _ in append.plan.made] == ["a", "b"]
    # Another flow was faster.
    ledger = Ledger()
    theirs = replace(append.plan.changes["a"].reservations[0], request_id="theirs")
    entry = replace(append.plan.changes["a"], request=replace(a.request, id="theirs"))
    entry = replace(entry, reservations=(theirs,))
    assert ledger.try_write(ledger.view().version, {"theirs": entry})
    machine.handle(events.Rows(ledger.view(), {"theirs": entry}), 1.0)
    (again,) = machine.handle(events.Appended(append.plan, False), 1.0)
    assert isinstance(again, events.Append)
    assert [r.id for r, _ in again.plan.made] == ["b"]
    assert again.plan.version == ledger.view().version


def test_a_request_that_was_withdrawn_while_its_plan_was_written_is_released(
    machine: Machine,
) -> None:
    a = ticket("a", 20)
    append = plan_of(machine, a)
    assert a.withdraw()
    machine.handle(events.Appended(append.plan, True), 1.0)
    assert machine.handle(events.Withdrawn(a), 1.0) == [events.Release("a", a, 0)]
    assert not machine.known.placed and not a.withdraw()


def test_where_the_devices_are_lost_all_requests_are_refused_also_later_ones(
    machine: Machine,
) -> None:
    early, late = ticket("early", 20), ticket("late", 20)
    machine.handle(events.Submitted(early), 1.0)
    told = [
        *machine.handle(events.DevicesLost("gone"), 1.0),
        *machine.handle(events.Submitted(late), 1.0),
    ]
    refused = [each for each in told if isinstance(each, events.Decide)]
    assert [each.ticket for each in refused] == [early, late]
    assert all(isinstance(each.error, DeviceError) for each in refused)
    assert not machine.known.waiting


def test_what_an_event_has_led_to_before_it_failed_is_done_with_the_next_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = ticket("a", 20)
    machine.handle(events.Appended(plan_of(machine, a).plan, True), 1.0)
    a.pid, a.on_measured = 7, lambda at_s, measured: None
    with monkeypatch.context() as patch:
        patch.setattr(machine.known.view, "compare", None)
        with pytest.raises(TypeError):
            machine.handle(reading(2.0), 2.0)
    (told,) = machine.handle(events.Tick(), 2.0)
    assert isinstance(told, events.TellMeasured) and told.at_s == 2.0


def test_an_event_that_cannot_come_raises_with_the_last_ones_of_its_request(
    machine: Machine,
) -> None:
    a = ticket("a", 20)
    machine.handle(events.Appended(plan_of(machine, a).plan, True), 1.0)
    machine.handle(events.Attached(a, 7), 1.0)
    with pytest.raises(
        IllegalTransition, match=r"'away' came when running; before: admitted, placed, started"
    ):
        machine.handle(events.Moved(a, Trigger.MOVED_OUT, "away"), 1.0)
    assert a.phase is Phase.RUNNING
