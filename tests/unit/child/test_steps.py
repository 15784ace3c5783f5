"""What a `StepBook` makes of readings and boundaries."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.child.recorder import KEPT_STEPS, LEAST_FOR_SLOPE, StepBook
from prefect_gpu.measurements import StepFacts


def book_of(*steps: Sequence[int], tail: Sequence[int] = ()) -> StepFacts | None:
    """Steps of a second each, by their readings; the last reading of each is the boundary's."""
    book = StepBook()
    for number, readings in enumerate(steps):
        for live in readings[:-1]:
            book.reading(live, 0)
        book.boundary(float(number), readings[-1], 0)
    for live in tail:
        book.reading(live, 0)
    return book.facts()


@pytest.mark.parametrize(
    ("peak", "steady"),
    [
        pytest.param(9, 9, id="a peak that no reading met"),
        pytest.param(3, 5, id="readings that met more"),
    ],
)
def test_a_peak_counts_in_the_step_that_is_open(peak: int, steady: int) -> None:
    book = StepBook()
    book.boundary(0.0, 2, 0)
    book.reading(peak)
    book.boundary(1.0, 5, 0)
    facts = book.facts()
    assert facts is not None
    assert (facts.steady_live_bytes, facts.first_live_bytes) == (steady, 2)


def test_readings_alone_are_no_evidence_of_steps() -> None:
    assert book_of(tail=[5, 9]) is None


@pytest.mark.parametrize(
    ("steps", "tail", "steady"),
    [
        pytest.param([[13, 2]], [], None, id="the first step is not steady"),
        pytest.param([[13, 2], [5, 3], [4, 3]], [], 5, id="the peak of the steps after the first"),
        pytest.param([[13, 6], [5, 3]], [], 6, id="memory left from the first step counts"),
        pytest.param([[13, 2], [5, 3]], [8], 8, id="memory after the last step counts"),
        pytest.param([[13, 2]], [8], None, id="one step and the open one are not steady"),
    ],
)
def test_memory_of_steady_steps(
    steps: list[list[int]], tail: list[int], steady: int | None
) -> None:
    facts = book_of(*steps, tail=tail)
    assert facts is not None and facts.count == len(steps)
    assert (facts.first_live_bytes, facts.steady_live_bytes) == (13, steady)
    assert facts.step_s == (1.0 if len(steps) > 1 else None)


def test_steady_begins_anew_after_a_step_with_a_retry() -> None:
    book = StepBook()
    book.boundary(0.0, 13, 1)
    book.boundary(1.0, 12, 1)
    book.reading(9, 2)
    assert book.released_cache
    book.boundary(2.0, 8, 2)
    assert not book.released_cache
    facts = book.facts()
    assert facts is not None
    assert (facts.steady_live_bytes, facts.alloc_retries) == (None, 1)
    book.reading(6, 2)
    book.boundary(3.0, 7, 2)
    facts = book.facts()
    # 8: what the step before left is there as this one begins.
    assert facts is not None and (facts.steady_live_bytes, facts.alloc_retries) == (8, 1)


def test_a_retry_after_the_last_step_leaves_no_steady_memory() -> None:
    book = StepBook()
    for at in range(6):
        book.boundary(float(at), 5, 0)
    book.reading(5, 1)
    facts = book.facts()
    assert facts is not None
    assert (facts.steady_live_bytes, facts.growth_bytes, facts.alloc_retries) == (None, None, 1)


def test_statistics_that_the_body_reset_are_no_retry() -> None:
    book = StepBook()
    book.boundary(0.0, 5, 7)
    book.boundary(1.0, 5, 0)
    book.boundary(2.0, 5, 2)
    facts = book.facts()
    assert facts is not None and facts.alloc_retries == 2


@pytest.mark.parametrize(
    ("peaks", "alike"),
    [
        pytest.param([13, 4], False, id="one step after the first shows nothing of others"),
        pytest.param([13, 4, 4], True, id="equal after the first"),
        pytest.param([13, 400, 399, 401], True, id="equal within a few thousandths"),
        pytest.param([13, 4, 4, 1], True, id="a last batch that is smaller"),
        pytest.param([13, 1, 4, 1, 4], True, id="an evaluation in between"),
        pytest.param([13, 4, 5], False, id="inputs of two sizes"),
        pytest.param([13, 3, 4, 3, 5, 2], False, id="inputs of many sizes"),
        pytest.param([4, 4, 4, 9], False, id="one that took more than all others"),
    ],
)
def test_steps_are_alike_if_the_two_that_took_the_most_are(peaks: list[int], alike: bool) -> None:
    facts = book_of(*([peak * 100, 100] for peak in peaks))
    assert facts is not None and facts.alike is alike


def test_steps_before_a_retry_say_nothing_of_those_after_it() -> None:
    book = StepBook()
    for number, (peak, retries) in enumerate([(9, 0), (8, 0), (4, 1), (5, 1), (5, 1)]):
        book.reading(peak, retries)
        book.boundary(float(number), 1, retries)
    facts = book.facts()
    assert facts is not None and facts.alike


def test_steps_without_readings_have_a_time_only() -> None:
    book = StepBook()
    for at_s in (0.0, 3.0, 5.0):
        book.boundary(at_s)
    assert book.facts() == StepFacts(count=3, step_s=2.5, alike=False)


def test_the_median_is_of_the_last_steps() -> None:
    book = StepBook()
    for number in range(5000):
        book.boundary(float(number))
    for number in range(KEPT_STEPS):
        book.boundary(5000.0 + 3 * number)
    facts = book.facts()
    assert facts is not None and (facts.count, facts.step_s) == (5000 + KEPT_STEPS, 3.0)


@pytest.mark.parametrize("growth", [0, 7, -3])
def test_growth_is_measured_per_step(growth: int) -> None:
    ends = [100_000 + growth * number for number in range(LEAST_FOR_SLOPE + 1)]
    facts = book_of(*([end] for end in ends))
    assert facts is not None and facts.growth_bytes == pytest.approx(growth)
    short = book_of(*([end] for end in ends[:-1]))
    assert short is not None and short.growth_bytes is None


#: A step: its readings, and whether the allocator gave up its cache at the first of them.
STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(STEPS)
def test_the_facts_equal_those_computed_from_all_readings(
    steps: list[tuple[list[int], bool]],
) -> None:
    book, retries = StepBook(), 0
    for number, (readings, retried) in enumerate(steps):
        retries += retried
        for live in readings[:-1]:
            book.reading(live, retries)
        book.boundary(float(number), readings[-1], retries)
    facts = book.facts()

    # Each step begins with what the one before it left.
    tops = [
        max([*readings, *(steps[i - 1][0][-1:] if i else ())])
        for i, (readings, _) in enumerate(steps)
    ]
    first_steady = max([i for i, (_, retried) in enumerate(steps) if retried and i] or [0]) + 1
    ends = [readings[-1] for readings, _ in steps]
    assert facts is not None
    assert facts.count == len(steps)
    assert facts.first_live_bytes == tops[0]
    assert facts.alloc_retries == sum(retried for _, retried in steps[1:])
    # A step of which only the ends were read shows no peak.
    steady = [tops[i] for i in range(first_steady, len(steps)) if len(steps[i][0]) > 1]
    assert facts.steady_live_bytes == (max([*steady, ends[-1]]) if steady else None)
    steady_ends = ends[first_steady:]
    if len(steady_ends) < LEAST_FOR_SLOPE:
        assert facts.growth_bytes is None
    else:
        slope, _ = statistics.linear_regression(range(len(steady_ends)), steady_ends)
        assert facts.growth_bytes == pytest.approx(slope, rel=1e-6, abs=1e-3)
