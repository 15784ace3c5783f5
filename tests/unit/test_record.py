"""What a report says of a process, from what was learned of it."""

from __future__ import annotations

from uuid import UUID

import pytest

from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.record import ProcessRecord, TaskFacts
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.scheduling.model import DeviceKind, Placement
from prefect_gpu.units import GIB, MIB
from tests.unit.scheduling.values import device

FACTS = TaskFacts("evaluate", "evaluate-1a", UUID(int=1), "evaluate-0", UUID(int=2))


def record() -> ProcessRecord:
    return ProcessRecord(Placement("1", (device(),), (6 * GIB,)), placed_s=0.0, queued_s=1.5)


def made_of(learned: ProcessRecord, kind: DeviceKind = "nvml") -> TaskReport:
    return learned.report(FACTS, kind, 2, "tag", ("torch",), 0)


def counters(live: int, reserved: int | None) -> Counters:
    return Counters(live, reserved, live, reserved)


def test_the_context_is_what_the_device_shows_above_the_allocator() -> None:
    learned = record()
    learned.add_reading(1.0, 3 * GIB)
    learned.add_counters(counters(1 * GIB, 2 * GIB), ("torch",))
    report = made_of(learned)
    assert (report.peak_process_bytes, report.context_bytes) == (3 * GIB, 1 * GIB)
    assert (report.peak_live_bytes, report.peak_reserved_bytes) == (1 * GIB, 2 * GIB)
    assert (report.source, report.attempt, report.queued_s) == ("nvml", 2, 1.5)


def test_a_process_too_short_for_a_reading_is_known_by_its_counters() -> None:
    learned = record()
    learned.context_bytes = 500 * MIB
    learned.add_counters(counters(1 * GIB, 2 * GIB), ("torch",))
    report = made_of(learned)
    assert report.peak_process_bytes == 2 * GIB + 500 * MIB
    assert report.source == "framework"


def test_without_counters_the_reading_stands_alone() -> None:
    learned = record()
    learned.add_reading(1.0, GIB)
    report = made_of(learned)
    assert (report.peak_process_bytes, report.peak_live_bytes) == (GIB, None)
    assert (report.outcome, report.pid) == ("died", None)


def test_a_resident_set_that_no_reading_saw_is_the_childs_own() -> None:
    learned = record()
    learned.add_end(BodyEnded(raised=False, host_peak_bytes=2 * GIB))
    learned.add_value()
    report = made_of(learned, "host")
    assert (report.peak_process_bytes, report.source) == (2 * GIB, "host")
    assert report.outcome == "completed"


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        pytest.param(BodyEnded(False), "completed", id="a value"),
        pytest.param(BodyEnded(True, traceback="...\nValueError: no"), "failed", id="an error"),
        pytest.param(BodyEnded(True, out_of_memory=OutOfMemory("torch")), "oom", id="out of memory"),
    ],
)
def test_the_outcome_is_how_the_body_ended(ended: BodyEnded, outcome: str) -> None:
    learned = record()
    learned.add_end(ended)
    assert made_of(learned).outcome == "died", "it may still die sending its value"
    learned.add_value()
    assert made_of(learned).outcome == outcome


def test_a_body_that_ends_just_after_it_was_given_up_on_stays_given_up() -> None:
    learned = record()
    learned.outcome = "timeout"
    learned.add_end(BodyEnded(False))
    learned.add_value()
    assert made_of(learned).outcome == "timeout"


def test_the_last_reading_is_what_a_death_is_told_with() -> None:
    learned = record()
    assert learned.last_process_bytes is None
    learned.add_reading(1.0, GIB)
    learned.add_counters(counters(1, 2), ("torch",))
    assert learned.last_process_bytes == GIB


def test_peaks_that_the_body_reset_still_count() -> None:
    learned = record()
    learned.add_reading(1.0, 5 * GIB)
    learned.add_counters(counters(3 * GIB, 4 * GIB), ("torch",))
    learned.add_counters(counters(1 * GIB, 1 * GIB), ("torch",))
    report = made_of(learned)
    assert (report.peak_live_bytes, report.peak_reserved_bytes) == (3 * GIB, 4 * GIB)
    assert report.context_bytes == 1 * GIB


def test_a_killed_process_is_not_said_to_have_held_nothing() -> None:
    learned = record()
    learned.add_reading(1.0, GIB)
    learned.add_reading(1.2, 0)
    assert learned.last_process_bytes == GIB
