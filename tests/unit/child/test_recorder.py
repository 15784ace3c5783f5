"""What a `Recorder` makes of phases, marks and steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefect_gpu.child.recorder import KEPT_NAMES, READ_SHARE, Recorder
from prefect_gpu.clock import FakeClock
from prefect_gpu.measurements import FIRST_STEPS, MARKS_PER_STEP, Mark, StepFacts
from tests.fakes.memory_source import FakeSource


class Rig:
    """A recorder over memory and time that a test moves."""

    def __init__(self) -> None:
        self.source = FakeSource()
        self.clock = FakeClock()
        self.recorder = Recorder(self.source, self.clock)  # type: ignore[arg-type]
        self.recorder.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = self.recorder.begin_phase(name)
        yield
        self.recorder.end_phase(phase)

    def do(self, *names: str, each_s: float = 1.0) -> None:
        for name in names:
            with self.phase(name):
                self.clock.advance(each_s)

    def marks(self) -> tuple[Mark, ...]:
        return self.recorder.take()[1]

    def steps(self) -> StepFacts:
        facts = self.recorder.take()[0]
        assert facts is not None
        return facts

    def rows(self) -> list[tuple[str, int]]:
        return [(m.name, m.step) for m in self.marks()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


# What a phase shows.


def test_a_phase_shows_its_beginning_its_length_and_the_memory_at_its_end(rig: Rig) -> None:
    rig.source.hold(3, reserved=10)
    rig.source.process = 99
    rig.clock.advance(2)
    with rig.phase("forward"):
        rig.source.hold(5, reserved=12)
        rig.clock.advance(1.5)
        rig.source.hold(4, reserved=12)
    assert rig.marks() == (Mark(2.0, "forward", 1.5, 4, 5, 12, 12, process_bytes=99, step=0),)


def test_a_peak_from_before_a_phase_is_not_the_phases(rig: Rig) -> None:
    rig.source.spike(50)
    with rig.phase("a"):
        rig.source.hold(7)
    with rig.phase("b"):
        rig.source.spike(9)
    first, second = rig.marks()
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (7, 50)
    assert second.peak_allocated_bytes == 7, "the framework's own peak did not rise above 50"


def test_a_peak_between_two_frameworks_peaks_is_seen_by_a_sample(rig: Rig) -> None:
    rig.source.spike(50)
    with rig.phase("a"):
        rig.source.hold(20)
        rig.recorder.sample()
        rig.source.hold(7)
    assert rig.marks()[0].peak_allocated_bytes == 20


def test_a_peak_that_the_body_reset_counts_from_there(rig: Rig) -> None:
    rig.source.spike(50)
    rig.recorder.counters()
    rig.source.peak_live = 0
    with rig.phase("a"):
        rig.source.spike(9)
    with rig.phase("b"):
        rig.source.spike(11)
    assert [m.peak_allocated_bytes for m in rig.marks()] == [9, 11]


def test_phases_nest(rig: Rig) -> None:
    with rig.phase("outer"):
        rig.clock.advance(1)
        with rig.phase("inner"):
            rig.source.spike(9)
        rig.source.hold(3)
    outer, inner = rig.marks()
    assert (inner.name, inner.peak_allocated_bytes) == ("inner", 9)
    assert (outer.name, outer.peak_allocated_bytes, outer.allocated_bytes) == ("outer", 9, 3)


def test_a_mark_shows_the_peaks_since_the_last(rig: Rig) -> None:
    rig.source.spike(9)
    rig.clock.advance(1)
    rig.recorder.mark("a")
    rig.source.hold(4)
    rig.clock.advance(1)
    rig.recorder.mark("b")
    first, second = rig.marks()
    assert (first.at_s, first.duration_s, first.peak_allocated_bytes) == (1.0, None, 9)
    assert (second.allocated_bytes, second.peak_allocated_bytes) == (4, 4)


def test_a_phase_without_memory_readings_has_a_time(rig: Rig) -> None:
    rig.source.touched = False
    rig.do("a")
    rig.recorder.sample()
    rig.recorder.step()
    rig.recorder.step()
    facts, marks = rig.recorder.take()
    assert marks == (Mark(0.0, "a", 1.0),)
    assert facts == StepFacts(count=2, step_s=0.0, alike=False)


def test_an_allocator_that_keeps_no_reserved_bytes_shows_none(rig: Rig) -> None:
    rig.source.hold(5)
    rig.source.reserved = rig.source.peak_reserved = None
    rig.do("a")
    (mark,) = rig.marks()
    assert (mark.peak_allocated_bytes, mark.reserved_bytes, mark.peak_reserved_bytes) == (
        5, None, None,
    )  # fmt: skip


# Where steps begin.


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        pytest.param("fb fb fb", "00 11 22", id="a cycle"),
        pytest.param("lfb fb fb", "000 11 22", id="what comes once is before the first step's end"),
        pytest.param("e fb fb e fb", "0 00 11 1 22", id="epochs around the steps begin none"),
        pytest.param("fbv fb fbv", "000 11 222", id="what comes now and then begins none"),
        pytest.param("fbvv fb", "0001 11", id="the first name that comes again begins the steps"),
        pytest.param("abcd", "0000", id="names that never come again"),
    ],
)
def test_the_first_name_that_comes_again_begins_steps(rig: Rig, names: str, steps: str) -> None:
    rig.do(*names.replace(" ", ""))
    assert rig.rows() == list(
        zip(names.replace(" ", ""), map(int, steps.replace(" ", "")), strict=True)
    )


def test_marks_begin_steps_too(rig: Rig) -> None:
    for name in "ab" * 3:
        rig.recorder.mark(name)
    assert rig.rows() == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_steps_end_where_the_body_calls_step(rig: Rig) -> None:
    rig.do("f", "b")
    rig.recorder.step()
    rig.do("f", "f", "b")
    rig.recorder.step()
    rig.do("f")
    rig.recorder.finish()
    facts, marks = rig.recorder.take()
    assert facts is not None and facts.count == 2
    assert [(m.name, m.step) for m in marks] == [
        ("f", 0), ("b", 0), ("f", 1), ("f", 1), ("b", 1), ("f", 2),
    ]  # fmt: skip


def test_the_last_named_step_ends_when_the_body_returns(rig: Rig) -> None:
    for peak in (13, 5):
        with rig.phase("f"):
            rig.source.spike(peak)
            rig.recorder.sample()
            rig.clock.advance(2)
        rig.clock.advance(7)
    assert rig.steps().count == 1
    rig.recorder.finish()
    facts = rig.steps()
    # From its begin to the end of its last phase.
    assert (facts.count, facts.step_s) == (2, 2.0)
    assert (facts.first_live_bytes, facts.steady_live_bytes) == (13, 0)


def test_a_mark_at_the_end_of_each_turn_has_no_step_after_it(rig: Rig) -> None:
    for _ in range(3):
        rig.recorder.mark("done")
    rig.recorder.finish()
    assert rig.steps().count == 2


def test_samples_and_peaks_count_for_the_steps(rig: Rig) -> None:
    rig.source.spike(13)
    rig.recorder.step()
    rig.source.hold(4)
    rig.recorder.sample()
    rig.source.hold(2)
    rig.recorder.step()
    facts = rig.steps()
    assert (facts.first_live_bytes, facts.steady_live_bytes, rig.source.traced) == (13, 4, 0)
    rig.source.spike(14)
    rig.recorder.step()
    assert rig.steps().steady_live_bytes == 14


def test_steps_of_which_only_the_ends_were_read_show_no_steady_memory(rig: Rig) -> None:
    # The framework's own peak, 13, was reached in the first step and again in each: it shows in none of the later ones.
    for _ in range(FIRST_STEPS + 4):
        rig.source.spike(13)
        rig.source.hold(0)
        rig.clock.advance(1)
        rig.recorder.step()
    facts = rig.steps()
    assert (facts.first_live_bytes, facts.steady_live_bytes, facts.alike) == (13, None, False)
    rig.source.hold(12)
    rig.recorder.sample()
    rig.source.hold(0)
    rig.recorder.step()
    assert rig.steps().steady_live_bytes == 12


def test_a_retry_begins_the_steady_steps_anew(rig: Rig) -> None:
    for number in range(8):
        rig.source.hold(10 - number)
        rig.source.retries = int(number >= 5)
        rig.clock.advance(1)
        rig.recorder.sample()
        rig.recorder.step()
    facts = rig.steps()
    assert (facts.alloc_retries, facts.steady_live_bytes) == (1, 5)


# What is traced.


def test_a_peak_between_two_samples_is_exact_in_a_later_step(rig: Rig) -> None:
    # A CNN on an H200: its steps queue 73 ms of work in 7 and are at 1807 MiB for a moment; looks
    # every 5 ms saw 1539.
    rig.source.traceable = True
    rig.source.spike(13_000)
    rig.recorder.step()
    rig.source.hold(1539)
    rig.recorder.sample()
    rig.source.spike(1807)
    rig.source.hold(1200)
    rig.recorder.step()
    facts = rig.steps()
    assert (facts.first_live_bytes, facts.steady_live_bytes) == (13_000, 1807)


def test_only_steps_that_are_read_in_full_are_traced(rig: Rig) -> None:
    rig.source.traceable = True
    rig.source.on_trace = lambda: rig.clock.advance(1)
    traced = []
    for _ in range(FIRST_STEPS + 400):
        traced.append(rig.source.traced)
        assert len(rig.source.traces) <= 1
        rig.clock.advance(2)
        rig.recorder.step()
    assert traced[:FIRST_STEPS] == [0, 1, 2], "the first has the framework's own peak"
    # A step takes 2 s, a trace another 2: its time counts as that of readings does.
    assert 2 < traced[-1] <= 2 + 2 * 400 / READ_SHARE


def test_a_trace_without_a_peak_leaves_the_samples(rig: Rig) -> None:
    rig.source.traceable = True
    rig.recorder.step()
    rig.source.traces[0].peak = None
    rig.source.hold(4)
    rig.recorder.step()
    assert rig.steps().steady_live_bytes == 4


def test_a_traced_peak_of_a_step_that_released_the_cache_is_not_steady(rig: Rig) -> None:
    rig.source.traceable = True
    rig.recorder.step()
    rig.source.spike(50)
    rig.source.retries = 1
    rig.recorder.step()
    rig.source.spike(7)
    rig.recorder.step()
    assert rig.steps().steady_live_bytes == 7


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped before", "not stopped"])
def test_no_trace_outlives_a_body_that_returns(rig: Rig, stopped: bool) -> None:
    rig.source.traceable = True
    rig.source.spike(50)
    rig.do("f", "f")
    rig.source.spike(9)
    if stopped:
        rig.recorder.stop()
    rig.recorder.finish()
    assert rig.source.traces == []
    assert rig.steps().steady_live_bytes == 9, "the last step is not over, and counts"


def test_no_trace_begins_after_the_body(rig: Rig) -> None:
    rig.source.traceable = True
    rig.recorder.step()
    rig.recorder.stop()
    # A thread that the body left behind.
    rig.recorder.step()
    assert (rig.source.traces, rig.source.traced) == ([], 1)


def test_a_fork_leaves_the_trace_to_its_parent(rig: Rig) -> None:
    rig.source.traceable = True
    rig.recorder.step()
    (trace,) = rig.source.traces
    rig.recorder.forget()
    rig.recorder.stop()
    assert rig.source.traces == [trace]


# What it costs.


def test_steps_are_read_in_full_as_far_as_the_time_allows(rig: Rig) -> None:
    rig.source.on_counters = lambda: rig.clock.advance(1)
    read = []
    for _ in range(FIRST_STEPS + 60):
        before = rig.source.readings
        rig.do("f", each_s=10)
        read.append(rig.source.readings - before)
    # At the begin and the end of the phase, and for the boundary before it.
    assert read[:FIRST_STEPS] == [2, 3, 3]
    later = read[FIRST_STEPS:]
    # A step takes 10 s, a reading 1 s.
    assert 0 < sum(later) <= (10 * len(later) + sum(later)) / READ_SHARE + 3
    assert rig.source.samples > len(later) / 2, "the other steps end with a quick look"
    assert rig.marks()[-1].step > FIRST_STEPS


def test_short_steps_are_not_all_sampled_at_their_end(rig: Rig) -> None:
    rig.source.on_sample = lambda: rig.clock.advance(1)
    for _ in range(FIRST_STEPS):
        rig.recorder.step()
    # Nothing is read in full from here on.
    rig.source.on_counters = lambda: rig.clock.advance(1000)
    rig.recorder.step()
    for _ in range(1000):
        rig.clock.advance(10)
        rig.recorder.step()
    facts = rig.steps()
    assert facts.count == FIRST_STEPS + 1001
    assert 90 <= rig.source.samples <= 10 * 1000 / READ_SHARE


def test_a_retry_in_a_step_that_is_not_read_in_full_is_no_peak_of_later_ones(rig: Rig) -> None:
    rig.source.on_counters = lambda: rig.clock.advance(1)
    for _ in range(FIRST_STEPS + 1):
        rig.recorder.step()
    rig.source.spike(50)
    rig.source.retries = 1
    rig.recorder.step()
    for _ in range(200):
        rig.source.hold(7)
        rig.clock.advance(1)
        rig.recorder.sample()
        rig.recorder.step()
    assert rig.steps().steady_live_bytes == 7


def test_a_name_that_is_new_is_measured_in_any_step(rig: Rig) -> None:
    rig.source.on_counters = lambda: rig.clock.advance(1)
    for _ in range(FIRST_STEPS + 2):
        rig.do("f")
        rig.recorder.step()
    rig.do("evaluate")
    assert rig.marks()[-1].name == "evaluate"


def test_only_the_first_of_many_names_are_remembered_and_measured(rig: Rig) -> None:
    for number in range(KEPT_NAMES + 10):
        rig.do(f"epoch {number}")
    assert len(rig.marks()) == MARKS_PER_STEP
    assert rig.source.questions == MARKS_PER_STEP


def test_several_threads_may_use_a_recorder_at_once(rig: Rig) -> None:
    def work() -> None:
        for _ in range(50):
            rig.recorder.end_phase(rig.recorder.begin_phase("f"))
            rig.recorder.sample()
            rig.recorder.step()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.steps().count == 200


def test_a_lock_held_at_a_fork_is_left_behind(rig: Rig) -> None:
    held = threading.Thread(target=rig.recorder._lock.acquire)
    held.start()
    held.join()
    rig.recorder.forget()
    rig.recorder.step()
    assert rig.steps().count == 1
