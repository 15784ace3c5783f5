"""What a report says of a process, from what was learned of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.measurements import Mark, StepFacts, UnitUse
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.messages import BodyEnded
from prefect_gpu.reports.model import ProcessPeak, TaskReport, Verdict, past_run
from prefect_gpu.runner.process_record import MOST_PROCESSES, ProcessRecord
from prefect_gpu.scheduling.history import HistoryKey, learn
from prefect_gpu.scheduling.memory import OVERSHOOT_BYTES
from prefect_gpu.scheduling.model import DeviceKind, DeviceWork, Placement
from prefect_gpu.units import GIB, MIB
from tests.cases import cases
from tests.unit.scheduling.values import device

CALL: Any = SimpleNamespace(
    plan=SimpleNamespace(task_name="evaluate", task_key="evaluate-1a", policy=GPUPolicy()),
    identity=HistoryKey("evaluate", "evaluate", learn_by="ab12"),
    run=SimpleNamespace(
        task_run=SimpleNamespace(id=UUID(int=1), name="evaluate-0", flow_run_id=UUID(int=2))
    ),
)

DIED = Verdict("died")


def record() -> ProcessRecord:
    return ProcessRecord(Placement("1", (device(),), (6 * GIB,)), placed_s=0.0, queued_s=1.5)


def test_reports_are_as_far_apart_as_their_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that woke late put a reservation over the next one: 38 GiB on a device of 24."""
    placement = Placement("1", (device(),), (6 * GIB,))
    first = ProcessRecord(placement, 100.0, 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    second = ProcessRecord(placement, 107.5, 0.0)
    apart = made_of(second).placed_at - made_of(first).placed_at
    assert apart == pytest.approx(7.5, abs=1e-6)


def made_of(
    learned: ProcessRecord, kind: DeviceKind = "nvml", verdict: Verdict = DIED
) -> TaskReport:
    return learned.report(CALL, kind, 2, "tag", None, ("torch",), verdict, 0, None)


def counters(live: int, reserved: int | None) -> Counters:
    return Counters(live, reserved, live, reserved)


#: A fact about a process, added to its record.
Fact = Callable[[ProcessRecord], object]


def reading(gib: float) -> Fact:
    return lambda learned: learned.add_reading(1.0, (int(gib * GIB),))


def counted(live_gib: float, reserved_gib: float | None, by: str = "torch") -> Fact:
    reserved = None if reserved_gib is None else int(reserved_gib * GIB)
    return lambda learned: learned.add_counters(counters(int(live_gib * GIB), reserved), (by,))


def assumed(context_mib: int) -> Fact:
    return lambda learned: learned.set_caps(None, context_mib * MIB, {})


def finished(**said: Any) -> Fact:
    return lambda learned: learned.add_end(BodyEnded(raised=False, **said))


NEARLY_ALL = device().total_bytes / GIB - 0.5


@cases(
    "facts, peak_gib, context_gib, live_gib, reserved_gib, source, kind",
    {
        "the context is what the device shows above the allocator": (
            *([reading(3), counted(1, 2)], 3, 1, 1, 2),
        ),
        "a client of MPS knows its context": (
            *([reading(3), counted(1, 2), finished(context_bytes=3 * GIB // 2)], 3, 1.5, 1, 2),
        ),
        "too short for a reading: its counters": (
            *([assumed(512), counted(1, 2)], 2.5, 0.5, 1, 2, "framework"),
        ),
        "an assumed context adds up to no more than the device": (
            [assumed(900), counted(1, NEARLY_ALL)],
            *(device().total_bytes / GIB, 900 / 1024, 1, NEARLY_ALL, "framework"),
        ),
        "without counters the reading stands alone": ([reading(1)], 1, 0, None, None),
        "a resident set that no reading saw": (
            *([finished(host_peak_bytes=2 * GIB)], 2, 0, None, None, "host", "host"),
        ),
        "peaks that the body reset still count": (
            *([reading(5), counted(3, 4), counted(1, 1)], 5, 1, 3, 4),
        ),
        "simulated devices know what a child could not say": (
            [counted(1, 1, ""), lambda learned: learned.add_peaks(3 * GIB, 3 * GIB)],
            *(3, 0, 3, 3, "simulated", "simulated"),
        ),
        "an allocator that keeps no reserved bytes": (
            *([reading(3), counted(1, None, "jax")], 3, 0, 1, None),
        ),
    },
    *("nvml", "nvml"),
)
def test_memory_in_a_report(
    facts: list[Fact],
    peak_gib: float,
    context_gib: float,
    live_gib: float | None,
    reserved_gib: float | None,
    source: str,
    kind: DeviceKind,
) -> None:
    learned = record()
    for add in facts:
        add(learned)
    found = made_of(learned, kind)
    assert (found.peak_process_bytes, found.context_bytes) == (peak_gib * GIB, context_gib * GIB)
    live, reserved = found.peak_live_bytes, found.peak_reserved_bytes
    assert (None if live is None else live / GIB) == live_gib
    assert (None if reserved is None else reserved / GIB) == reserved_gib
    assert (found.source, found.attempt, found.queued_s) == (source, 2, 1.5)
    assert found.history_key == "ab12", "advice on a task with gpu:learn_by is by history"
    assert (found.outcome, found.pid) == ("died", None)


def test_counters_that_ended_before_the_body_teach_nothing() -> None:
    learned = record()
    for add in (counted(1, 2), reading(5), finished()):
        add(learned)
    report = made_of(learned, verdict=Verdict("completed"))
    assert report.peak_live_bytes == 1 * GIB, "it is shown"
    past = past_run(report)
    assert (past.live_bytes, past.steady_live_bytes, past.process_bytes) == (None, None, 5 * GIB)


def test_one_process_on_one_device_needs_no_table_of_processes() -> None:
    learned = record()
    learned.pid = 5
    learned.add_processes([{5: GIB}])
    assert made_of(learned).processes == ()


def test_each_process_and_device_is_reported_with_its_own_peak() -> None:
    learned = ProcessRecord(
        Placement("1", (device(index=3), device(index=2)), (6 * GIB, 2 * GIB)), 0.0, 1.5
    )
    for on_first, on_second in (({5: 3, 6: 1}, {}), ({5: 2, 6: 4}, {6: 1})):
        learned.add_reading(1.0, (sum(on_first.values()), sum(on_second.values())))
        learned.add_processes([on_first, on_second])
    report = made_of(learned)
    assert report.budgets_bytes == (6 * GIB, 2 * GIB) and report.budget_total_bytes == 8 * GIB
    assert report.device_peaks_bytes == (6, 1)
    assert [report.share_on(each) for each in report.devices] == [6 / 7, 1 / 7]
    assert report.processes == (
        ProcessPeak(3, None, 6, 6 * GIB),
        ProcessPeak(3, 6, 4, 6 * GIB),
        ProcessPeak(3, 5, 3, 6 * GIB),
        ProcessPeak(2, None, 1, 2 * GIB),
        ProcessPeak(2, 6, 1, 2 * GIB),
    )


def test_a_body_that_starts_processes_all_the_time_fills_no_memory() -> None:
    learned = record()
    for pid in range(2 * MOST_PROCESSES):
        learned.add_processes([{pid: GIB}])
    assert len(made_of(learned).processes) == MOST_PROCESSES + 1


def test_of_several_devices_each_has_a_context() -> None:
    devices = device(0), device(1)
    learned = ProcessRecord(Placement("1", devices, (6 * GIB, 6 * GIB)), 0.0, 0.0)
    learned.set_caps(None, 500 * MIB, {})
    learned.add_counters(counters(1 * GIB, 2 * GIB), ("torch",))
    report = made_of(learned)
    assert report.context_bytes == 1000 * MIB
    assert report.peak_process_bytes == 2 * GIB + 1000 * MIB


@pytest.mark.parametrize(
    ("shown", "assumed", "ended", "context"),
    [
        # 2 GiB were held at most, and given back; spikes leave no reading between equal counters.
        pytest.param(2048 + 900, 766, True, 900, id="a reading met the peak"),
        pytest.param(2048 + 150, 766, True, 766, id="one met half of it: what is assumed holds"),
        pytest.param(1500, 766, True, 766, id="none did"),
        pytest.param(2048 + 150, 0, True, 150, id="nothing is known of contexts"),
        pytest.param(20_000, 766, False, 766, id="it died with more than its counters ever said"),
        pytest.param(2048 + 150, 0, False, 150, id="it died, and nothing is known of contexts"),
    ],
)
def test_a_context_that_nothing_shows_is_never_far_too_small(
    shown: int, assumed: int, ended: bool, context: int
) -> None:
    learned = record()
    learned.set_caps(None, assumed * MIB, {})
    for freed in range(3):
        spiking = Counters(GIB, GIB, 2 * GIB, 2 * GIB, 0, freed * GIB)
        learned.add_counters(spiking, ("torch",))
        learned.add_reading(1.0 + freed, (shown * MIB,))
    if ended:
        spiking = Counters(GIB, GIB, 2 * GIB, 2 * GIB, 0, 9 * GIB)
        learned.add_end(BodyEnded(False, counters=spiking))
    assert made_of(learned).context_bytes == context * MIB


def test_a_death_is_reported_with_the_last_reading_that_showed_memory() -> None:
    learned = record()
    assert learned.last_process_bytes is None
    for gib in (1, 0):
        reading(gib)(learned)
        learned.add_counters(counters(1, 2), ("torch",))
    assert learned.last_process_bytes == GIB


def test_marks_are_in_seconds_since_the_placement() -> None:
    learned = record()
    learned.started_s = 4.0
    learned.add_steps(None, [Mark(2.0, "b", 0.5), Mark(1.0, "a")])
    learned.add_end(BodyEnded(False, marks=(Mark(3.0, "c"),)))
    assert made_of(learned).marks == (Mark(5.0, "a"), Mark(6.0, "b", 0.5), Mark(7.0, "c"))


def test_the_marks_of_a_long_body_stay_few() -> None:
    learned = record()
    for step in range(1000):
        learned.add_steps(None, [Mark(float(step), "a", step=step)])
    assert [m.step for m in made_of(learned).marks] == [0, 1, 2, 998, 999]


def test_the_last_that_is_known_of_steps_counts() -> None:
    learned = record()
    assert made_of(learned).steps is None
    learned.add_steps(StepFacts(count=1), ())
    learned.add_steps(StepFacts(count=2), ())
    learned.add_steps(None, ())
    assert made_of(learned).steps == StepFacts(count=2)
    learned.add_end(BodyEnded(False, steps=StepFacts(count=3)))
    assert made_of(learned).steps == StepFacts(count=3)


def test_an_out_of_memory_is_logged_with_the_decision_about_it() -> None:
    learned = record()
    shortage = OutOfMemory("torch", wanted_bytes=GIB)
    learned.add_end(BodyEnded(True, shortage))
    assert learned.out_of_memory == shortage
    learned.set_caps(5 * GIB, 0, {})
    report = made_of(learned, verdict=Verdict("oom", "no memory", "own_cap", 7 * GIB))
    assert (report.cap_bytes, report.cause, report.wanted_bytes) == (5 * GIB, "own_cap", 7 * GIB)
    assert (report.memory_summary, report.snapshot_path) == ("", "")


def test_what_the_framework_says_of_an_out_of_memory_is_reported() -> None:
    learned = record()
    said = OutOfMemory("torch", summary="page", snapshot_path="/a.pickle")
    learned.add_end(BodyEnded(True, said))
    report = made_of(learned)
    assert (report.memory_summary, report.snapshot_path) == ("page", "/a.pickle")
    assert report.compact().memory_summary == ""


@cases(
    "used, seen",
    {
        "no framework: simulated devices": ((), GIB),
        "PyTorch": (("torch",), GIB),
        "JAX frees before anybody looks": (("jax",), None),
        "one of two": (("torch", "tensorflow"), None),
    },
)
def test_steady_memory_is_reported_only_where_samples_can_see_it(
    used: tuple[str, ...], seen: int | None
) -> None:
    learned = record()
    learned.add_counters(counters(GIB, GIB), used)
    learned.add_steps(StepFacts(5, 2 * GIB, GIB, 0.1), ())
    steps = made_of(learned).steps
    assert steps is not None
    assert (steps.steady_live_bytes, steps.first_live_bytes) == (seen, 2 * GIB)


class Slow(int):
    """A number that has another thread do something whenever it is compared."""

    def __new__(cls, value: int, other: Callable[[], None]) -> Slow:
        number = super().__new__(cls, value)
        number.other = other
        return number

    other: Callable[[], None]

    def __gt__(self, value: int) -> bool:
        thread = threading.Thread(target=self.other)
        thread.start()
        # A lock that covers the comparison keeps the other thread waiting.
        thread.join(0.05)
        return int(self) > value


def test_counters_that_two_threads_add_at_once_are_both_counted() -> None:
    learned = record()
    threads: list[threading.Thread] = []

    def add_more() -> None:
        threads.append(threading.current_thread())
        learned.add_counters(Counters(0, 0, 0, (4 + len(threads)) * GIB), ("torch",))

    learned.add_counters(Counters(0, 0, 0, GIB), ("torch",))
    learned.add_counters(Counters(0, 0, 0, Slow(2 * GIB, add_more)), ("torch",))
    for thread in threads:
        thread.join()
    assert made_of(learned).peak_reserved_bytes == (4 + len(threads)) * GIB


def watch(watched: bool = True) -> ProcessRecord:
    placement = Placement("1", (device(0), device(1)), (6 * GIB, 4 * GIB))
    return ProcessRecord(placement, 0.0, 0.0, watched)


def test_what_the_driver_may_round_up_is_no_overshoot() -> None:
    rounded = (6 * GIB + OVERSHOOT_BYTES, 4 * GIB + OVERSHOOT_BYTES)
    assert watch().add_reading(1.0, rounded) is None


def test_one_device_above_its_own_budget_is_an_overshoot_once() -> None:
    learned = watch()
    assert learned.add_reading(1.0, (6 * GIB, 4 * GIB)) is None
    assert learned.add_reading(2.0, (6 * GIB, 5 * GIB)) == (5 * GIB, 4 * GIB)
    assert learned.add_reading(3.0, (7 * GIB, 5 * GIB)) is None


def test_without_a_budget_to_keep_to_there_is_no_overshoot() -> None:
    assert watch(watched=False).add_reading(1.0, (9 * GIB, 9 * GIB)) is None


@cases(
    "counted, peak_gib",
    {"its counters plus the context stood in": (True, 3), "there are no counters": (False, 0)},
)
def test_a_device_whose_figures_are_not_attributed_is_not_named_as_the_source(
    counted: bool, peak_gib: int
) -> None:
    there = replace(device(), attributed=False)
    learned = ProcessRecord(Placement("1", (there,), (6 * GIB,)), placed_s=0.0, queued_s=1.5)
    learned.add_reading(1.0, (peak_gib * GIB,))
    if counted:
        learned.add_counters(counters(1 * GIB, 2 * GIB), ("torch",))
    report = made_of(learned)
    assert (report.peak_process_bytes, report.source) == (peak_gib * GIB, "framework")
    run = past_run(report)
    assert run.process_bytes == (peak_gib * GIB or None)
    assert learn([replace(run, outcome="completed")]) is None or counted


# What it computed.


def works(busy: dict[int | None, float], energy_j: float | None = 0.0) -> list[DeviceWork | None]:
    return [DeviceWork(busy, energy_j)]


def test_a_process_computes_for_a_part_of_its_bodys_time_and_takes_its_part_of_the_energy() -> None:
    learned = record()
    learned.pid = 7
    learned.add_work(0.5, works({7: 1.0}))
    learned.started_s = 1.0
    learned.add_work(1.0, works({7: 1.0}, 100.0))
    # Alone, beside another, and idle.
    learned.add_work(2.0, works({7: 0.5}, 300.0))
    learned.add_work(4.0, works({7: 0.25, None: 0.75}, 700.0))
    learned.add_work(5.0, works({8: 1.0}, 900.0))
    learned.ended_s = 5.0
    learned.add_work(9.0, works({7: 1.0}, 9000.0))
    made = made_of(learned)
    assert made.busy_fraction == pytest.approx((0.5 + 2 * 0.25) / 4)
    assert made.energy_j == pytest.approx(200 + 400 * 0.25)


def test_the_time_of_a_suspension_is_left_out() -> None:
    learned = record()
    learned.pid, learned.started_s = 7, 0.0
    learned.add_work(0.0, works({7: 1.0}, 0.0))
    learned.add_work(1.0, works({7: 1.0}, 10.0))
    learned.add_absence(1.5)
    learned.add_work(31.0, works({7: 1.0}, 9000.0))
    learned.add_work(32.0, works({7: 0.0}, 9000.0))
    made = made_of(learned)
    assert (made.busy_fraction, made.energy_j) == (0.5, 10.0)


def test_units_count_for_a_process_while_no_other_computes() -> None:
    learned = record()
    learned.pid, learned.started_s = 7, 0.0
    units = UnitUse(0.2, 0.1, 0.0)
    readings: list[tuple[float, dict[int | None, float], UnitUse | None]] = [
        (0.0, {7: 1.0}, units),
        (1.0, {7: 1.0}, units),
        (2.0, {7: 0.5, None: 0.5}, UnitUse(0.9, 0.9, 0.9)),
        (3.0, {7: 1.0}, None),
        (6.0, {7: 1.0}, UnitUse(0.4, 0.1, 0.0)),
    ]
    for at_s, busy, used in readings:
        learned.add_work(at_s, [DeviceWork(busy, 0.0, used)])
    made = made_of(learned)
    assert made.multiprocessors == pytest.approx((0.2 + 3 * 0.4) / 4)
    assert (made.tensor_cores, made.bandwidth) == (pytest.approx(0.1), 0.0)
    # Beside another for most of the time.
    learned.add_work(60.0, works({7: 0.5, None: 0.5}))
    assert made_of(learned).multiprocessors is None


@pytest.mark.parametrize(
    ("readings", "busy", "energy"),
    [
        pytest.param([], None, None, id="no reading"),
        pytest.param([[None], [None]], None, None, id="the driver does not say"),
        pytest.param([works({7: 0.4}, None)] * 2, 0.4, None, id="no counter of energy"),
        pytest.param([works({}, 5.0), works({}, 9.0)], 0.0, 0.0, id="nothing computed"),
        pytest.param([works({7: 0.4}), [None], works({7: 0.4})], 0.4, 0.0, id="a reading failed"),
        pytest.param(
            [works({7: 0.4}, e) for e in (100.0, None, 300.0)], 0.4, 200.0, id="one counter failed"
        ),
        pytest.param(
            [works({7: 0.4}, e) for e in (900.0, 5.0, 9.0)],
            0.4,
            4.0,
            id="the driver was loaded again",
        ),
    ],
)
def test_work_that_is_not_known(
    readings: list[list[DeviceWork | None]], busy: float | None, energy: float | None
) -> None:
    learned = record()
    learned.pid, learned.started_s = 7, 0.0
    for at, each in enumerate(readings):
        learned.add_work(float(at), each)
    made = made_of(learned)
    assert (made.busy_fraction, made.energy_j) == (busy, energy)


def test_the_work_on_several_devices_is_their_mean() -> None:
    devices = device(), device(1)
    learned = ProcessRecord(Placement("1", devices, (6 * GIB, 6 * GIB)), 0.0, 0.0)
    learned.pid, learned.started_s = 7, 0.0
    for at in range(3):
        energy = 10.0 * at
        learned.add_work(
            float(at), [DeviceWork({7: 1.0}, energy), DeviceWork({7: 0.5, None: 0.5}, energy)]
        )
    made = made_of(learned)
    assert (made.busy_fraction, made.energy_j) == (0.75, 30.0)
