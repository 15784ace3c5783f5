"""What the last reading of the devices says, and how old it may be."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.ledger import ProcessLedger
from prefect_gpu.lookout import FRESH_S, SILENT_S, Lookout
from prefect_gpu.scheduling.model import (
    Device,
    DeviceSnapshot,
    Placement,
    ProcessUse,
    Reading,
    Request,
)
from prefect_gpu.ticket import Ticket
from prefect_gpu.units import GIB

DEVICE = Device("SIM-0", 0, "a model", 24 * GIB, "simulated", "here")
ALL_FREE = DeviceSnapshot(DEVICE, 0.0, 24 * GIB)


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.placed: dict[str, Ticket] = {}
        self.lookout = Lookout(
            (DEVICE,),
            "simulated",
            ProcessLedger(),
            GIB,
            8,
            (),
            self.clock,
            self.placed,
            self.placed.values,
        )

    def take(self, snapshot: DeviceSnapshot = ALL_FREE, error: str = "") -> Reading:
        reading = Reading(self.clock.now(), (snapshot,), 64 * GIB, error)
        self.lookout.forget()
        self.lookout.take(reading)
        return reading


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_reading_is_decided_on_while_it_is_fresh(rig: Rig) -> None:
    assert not rig.lookout.fresh
    rig.take()
    rig.clock.advance(FRESH_S)
    assert rig.lookout.fresh
    rig.clock.advance(0.1)
    assert not rig.lookout.fresh


def test_it_says_what_of_the_devices_is_waited_for(rig: Rig) -> None:
    assert rig.lookout.silence == "the first reading of the devices"
    rig.take()
    assert rig.lookout.silence == ""
    rig.clock.advance(SILENT_S + 1)
    assert rig.lookout.silence == "the devices to answer (nothing heard for 6.0s)"
    rig.take(error="NVML is gone")
    assert rig.lookout.silence == "the devices to answer (NVML is gone)"


def test_what_a_process_of_ours_holds_is_its_requests_and_not_foreign(rig: Rig) -> None:
    ticket = Ticket(Request("r", "task", 0, 0.0), pid=7)
    ticket.placement = Placement("r", (DEVICE,), (4 * GIB,), ())
    rig.placed["r"] = ticket
    uses = (ProcessUse(7, 7, 3 * GIB), ProcessUse(8, None, 2 * GIB))
    reading = rig.take(replace(ALL_FREE, free_bytes=19 * GIB, processes=uses))
    assert list(rig.lookout.sizes(reading)) == [(ticket, (3 * GIB,))]
    (room,) = rig.lookout.survey(reading)
    assert room.foreign_bytes == 2 * GIB
    assert rig.lookout.foreign_growth_bytes({DEVICE.key: GIB}) == GIB


def test_a_survey_holds_until_it_is_forgotten(rig: Rig) -> None:
    reading = rig.take()
    (before,) = rig.lookout.survey(reading)
    assert rig.lookout.survey(reading)[0] is before
    rig.lookout.forget()
    assert rig.lookout.survey(reading)[0] is not before


def test_what_a_device_could_ever_promise_is_known_better_once_it_was_read(rig: Rig) -> None:
    assert rig.lookout.capacities(()) == {DEVICE: 23 * GIB}
    rig.take(replace(ALL_FREE, free_bytes=22 * GIB, system_reserved_bytes=2 * GIB))
    assert rig.lookout.capacities(()) == {DEVICE: 21 * GIB}


def test_other_sizes_to_promise_are_noted_once(rig: Rig) -> None:
    assert rig.lookout.note_usable(rig.take())
    assert not rig.lookout.note_usable(rig.take())
    assert rig.lookout.note_usable(rig.take(replace(ALL_FREE, system_reserved_bytes=GIB)))


def test_a_device_that_does_not_work_is_told_once_and_when_it_answers(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefect_gpu")
    broken = replace(ALL_FREE, error="it fell off the bus")
    for snapshot in (broken, broken, ALL_FREE, ALL_FREE):
        rig.lookout.tell(rig.take(snapshot))
    assert [record.getMessage() for record in caplog.records] == [
        "device SIM-0 is set aside: it fell off the bus",
        "device SIM-0 answers again",
    ]
