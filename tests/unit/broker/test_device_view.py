"""What the last reading of the devices says, and how old it may be."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest

from prefect_gpu.broker.device_view import FRESH_S, SILENT_S, DeviceView
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.clock import FakeClock
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    Placement,
    ProcessUse,
    Reading,
    Request,
    Reservation,
)
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.units import GIB

DEVICE = Device("SIM-0", 0, "a model", 24 * GIB, "simulated", "here")
OTHER = Device("SIM-1", 1, "a model", 24 * GIB, "simulated", "here")
ALL_FREE = DeviceSnapshot(DEVICE, 0.0, 24 * GIB)


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger()
        self.placed: dict[str, Ticket] = {}
        self.view = DeviceView((DEVICE,), "simulated", GIB, (), os.getpid())

    def take(self, *snapshots: DeviceSnapshot, error: str = "") -> Reading:
        reading = Reading(self.clock.now(), snapshots or (ALL_FREE,), 64 * GIB, error)
        self.view.take(reading, self.clock.now())
        return reading

    def reserve(
        self, name: str, gib: int, device: Device = DEVICE, pid: int | None = None
    ) -> Ticket:
        """Place a request, whose process may run."""
        held = Reservation(name, *device.key, gib * GIB)
        ticket = Ticket(Request(name, "task", 0, 0.0), pid=pid)
        phase = Phase.PLACED if pid is None else Phase.RUNNING
        entry = Entry(ticket.request, phase=phase, reservations=(held,), pid=pid)
        assert self.ledger.try_write(self.ledger.view().version, {name: entry})
        ticket.placement = Placement(name, (device,), (gib * GIB,), (held,))
        self.placed[name] = ticket
        return ticket

    def states(self) -> list[DeviceState]:
        return self.view.states(self.ledger.view(), self.placed)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_reading_is_decided_on_while_it_is_fresh(rig: Rig) -> None:
    assert not rig.view.is_fresh(rig.clock.now())
    rig.take()
    rig.clock.advance(FRESH_S)
    assert rig.view.is_fresh(rig.clock.now())
    rig.clock.advance(0.1)
    assert not rig.view.is_fresh(rig.clock.now())


def test_it_says_what_of_the_devices_is_waited_for(rig: Rig) -> None:
    assert rig.view.silence(rig.clock.now()) == Reason(WaitKind.FIRST_READING)
    rig.take()
    assert rig.view.silence(rig.clock.now()) is None
    rig.clock.advance(SILENT_S + 1)
    assert rig.view.silence(rig.clock.now()) == Reason(
        WaitKind.DEVICES_SILENT, detail="nothing heard for 6s"
    )
    rig.take(error="NVML is gone")
    assert rig.view.silence(rig.clock.now()) == Reason(
        WaitKind.DEVICES_SILENT, detail="NVML is gone"
    )


def test_without_a_good_reading_there_is_no_state(rig: Rig) -> None:
    assert rig.states() == []
    rig.take(error="NVML is gone")
    assert rig.states() == []


def test_memory_of_a_child_belongs_to_its_request_and_is_not_foreign(rig: Rig) -> None:
    rig.reserve("r", 4, pid=7)
    uses = (ProcessUse(7, 7, GIB), ProcessUse(9, 7, 2 * GIB), ProcessUse(8, None, 2 * GIB))
    rig.take(replace(ALL_FREE, free_bytes=19 * GIB, processes=uses))
    (state,) = rig.states()
    assert state.foreign_bytes == 2 * GIB
    assert rig.view.measured_bytes("r", DEVICE) == 3 * GIB
    assert rig.view.measured_by_pid(7, DEVICE) == {7: GIB, 9: 2 * GIB}
    assert rig.view.measured_by_pid(8, DEVICE) == {}
    assert rig.view.measured_bytes("another", DEVICE) == 0


def test_where_a_device_lists_no_process_its_own_counters_stand_in(rig: Rig) -> None:
    rig.reserve("r", 4, pid=7).stand_in_bytes = 3 * GIB
    rig.take(replace(ALL_FREE, free_bytes=20 * GIB))
    (state,) = rig.states()
    assert (state.foreign_bytes, rig.view.measured_bytes("r", DEVICE)) == (GIB, 3 * GIB)


def test_a_process_that_the_ledger_does_not_name_is_counted_once_it_is_given(rig: Rig) -> None:
    ending = rig.reserve("r", 4)
    ending.ended_pid = 7
    rig.ledger.release("r")
    rig.take(replace(ALL_FREE, free_bytes=20 * GIB, processes=(ProcessUse(7, 7, 4 * GIB),)))
    (state,) = rig.view.states(rig.ledger.view(), {}, [ending])
    assert (state.foreign_bytes, state.free_bytes) == (0, 19 * GIB)


def test_each_device_counts_its_own_reservations(rig: Rig) -> None:
    rig.reserve("a", 2)
    rig.reserve("b", 3, OTHER)
    rig.take(ALL_FREE, replace(ALL_FREE, device=OTHER))
    assert [state.free_bytes // GIB for state in rig.states()] == [21, 20]


def test_only_a_device_whose_reservations_have_changed_is_computed_again(rig: Rig) -> None:
    rig.take(ALL_FREE, replace(ALL_FREE, device=OTHER))
    before = rig.states()
    rig.reserve("a", 2, OTHER)
    after = rig.states()
    assert after[0] is before[0]
    assert after[1].free_bytes == 21 * GIB
    # Nothing new was heard of the first device.
    rig.take(ALL_FREE, replace(ALL_FREE, device=OTHER))
    assert rig.states()[0] is before[0]
    rig.view.compute_again([DEVICE])
    assert rig.states()[0] is not before[0]
    kept = rig.states()
    rig.take(replace(ALL_FREE), replace(ALL_FREE, device=OTHER))
    assert rig.states()[0] is not kept[0]


def test_equal_reservations_are_no_news_whether_or_not_they_are_the_same_objects(rig: Rig) -> None:
    """A replay, in which each change of the ledger makes all objects anew, computes no more states than its broker."""
    rig.reserve("a", 2)
    rig.take()
    before = rig.states()
    ledger = pickle.loads(pickle.dumps(rig.ledger.view()))
    assert rig.view.states(ledger, {})[0] is before[0]


def test_what_a_device_could_ever_hold_is_known_better_once_it_was_read(rig: Rig) -> None:
    assert rig.view.capacities(()) == {DEVICE: 23 * GIB}
    rig.take(replace(ALL_FREE, free_bytes=22 * GIB, system_reserved_bytes=2 * GIB))
    assert rig.view.capacities(()) == {DEVICE: 21 * GIB}


def test_a_device_that_does_not_work_is_logged_once_and_when_it_answers(
    rig: Rig,
) -> None:
    broken = replace(ALL_FREE, error="it fell off the bus")
    assert [rig.view.compare(rig.take(each)) for each in (broken, broken, ALL_FREE, ALL_FREE)] == [
        (
            [(DEVICE, "it fell off the bus")],
            [("device 0 (SIM-0) is set aside: it fell off the bus", True)],
        ),
        ([], []),
        ([], [("device 0 (SIM-0) answers again", False)]),
        ([], []),
    ]


def test_a_node_that_is_silent_is_one_line_and_another_when_it_answers(
    rig: Rig,
) -> None:
    works = [
        replace(ALL_FREE, device=replace(DEVICE, uuid=f"SIM-{node}-{at}", index=at, host=node))
        for node in "ab"
        for at in range(2)
    ]
    silent = [replace(each, error=f"node {each.device.host} is silent") for each in works]
    lost = [replace(works[0], error="it fell off the bus"), *works[1:]]
    told = []
    for snapshots in (silent, silent, [*silent[:2], *works[2:]], works, works, lost):
        told += [note.text for note in rig.view.compare(rig.take(*snapshots))[1]]
    assert told == [
        "devices 0, 1 of node a are set aside: node a is silent",
        "devices 0, 1 of node b are set aside: node b is silent",
        "devices 0, 1 of node b answer again",
        "devices 0, 1 of node a answer again",
        "device 0 (SIM-a-0) is set aside: it fell off the bus",
    ]


def test_the_log_names_a_device_by_its_node(rig: Rig) -> None:
    device = replace(ALL_FREE.device, host="gpu-2", in_cluster=True)
    _, notes = rig.view.compare(rig.take(replace(ALL_FREE, device=device, error="lost")))
    assert [note.text for note in notes] == ["gpu-2:0 (SIM-0) is set aside: lost"]
