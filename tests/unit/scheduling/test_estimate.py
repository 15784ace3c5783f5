"""The budget for a new value of a parameter, estimated from runs with other values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.estimate import MOST_MARGIN, REACH, estimate, nearest
from prefect_gpu.scheduling.history import ROUND_BYTES, LearnedBudget
from prefect_gpu.units import GIB, MIB
from tests.cases import cases

CONTEXT = 600 * MIB


def budget(need_bytes: float, **changes: Any) -> LearnedBudget:
    """A budget whose frameworks need so many bytes, beside the context."""
    need = int(need_bytes) + CONTEXT
    return replace(LearnedBudget(need, CONTEXT, 1, whole_bytes=need, need_bytes=need), **changes)


def known(**needs_gib: float) -> dict[float, LearnedBudget]:
    """Budgets by value: `known(x8=1.0)`."""
    return {float(name[1:]): budget(size * GIB) for name, size in needs_gib.items()}


def need_gib(found: LearnedBudget | None) -> float | None:
    return None if found is None else round((found.need_bytes - CONTEXT) / GIB, 2)


@cases(
    "value, needs_gib, expected",
    {
        "nothing": (8, {}, None),
        "one other value": (8, {"x16": 1}, None),
        "a line, between": (24, {"x16": 1.5, "x32": 2.5}, 2.0),
        "a line, above": (64, {"x16": 1.5, "x32": 2.5}, 4.5),
        "a line, below": (8, {"x16": 1.5, "x32": 2.5}, 1.0),
        "a square, between": (2, {"x1": 1, "x4": 16}, 4.0),
        "a square, above": (8, {"x1": 1, "x4": 16}, 64.0),
        "a square, below": (1, {"x2": 4, "x4": 16}, 1.0),
        "no influence": (3, {"x1": 2, "x2": 2}, 2.0),
        "less with more": (4, {"x1": 8, "x2": 4}, 2.0),
        "with zero, between": (4, {"x0": 1, "x8": 3}, 2.0),
        "with zero, above": (16, {"x0": 1, "x8": 3}, 5.0),
        "the nearest two of three": (64, {"x8": 1, "x16": 1.5, "x32": 2.5}, 4.5),
        "as far as it may be": (8 * 32, {"x16": 1.5, "x32": 2.5}, 16.5),
        "as far below": (4, {"x32": 1.5, "x64": 2.5}, 0.62),
        "and with others": (64, {"x4": 1.5, "x8": 2.5}, 16.5),
        "too far above": (8 * 32 + 1, {"x16": 1.5, "x32": 2.5}, None),
        "too far below": (1, {"x16": 1.5, "x32": 2.5}, None),
        "below zero, with a ratio to nothing": (16, {"x0": 1}, None),
    },
)
def test_needs_follow_the_value(
    value: float, needs_gib: dict[str, float], expected: float | None
) -> None:
    assert need_gib(estimate(value, known(**needs_gib))) == expected


def test_zero_and_less_are_estimated_between_known_values_only() -> None:
    needs = {-8.0: budget(GIB), 8.0: budget(3 * GIB)}
    assert need_gib(estimate(0.0, needs)) == 2.0
    assert estimate(-16.0, needs) is None
    assert estimate(0.0, {1.0: budget(GIB), 8.0: budget(3 * GIB)}) is None


def test_the_margin_is_what_known_values_miss_each_other_by() -> None:
    # From 8 and 32, 16 would need 10 by the line and by the power law, and needs 12.
    needs = {8.0: budget(10 * GIB), 16.0: budget(12 * GIB), 32.0: budget(10 * GIB)}
    found = estimate(64.0, needs)
    assert found is not None and found.growth == pytest.approx(1.2)
    # The two nearest ones sink from 12 to 10.
    beyond = max(10 - 2 * 2, 10 * 10 / 12)
    assert need_gib(found) == pytest.approx(beyond * 1.2, abs=0.01)
    assert found.runs == 0


def test_values_that_say_nothing_of_each_other_are_no_estimate() -> None:
    needs = known(x8=1, x16=MOST_MARGIN + 0.1, x32=1)
    assert estimate(64.0, needs) is None
    assert estimate(64.0, known(x8=1, x16=1, x32=1)) is not None


def test_a_context_counts_once_and_a_whole_need_is_estimated_too() -> None:
    needs = {
        16.0: budget(GIB, whole_bytes=4 * GIB),
        32.0: budget(2 * GIB, whole_bytes=6 * GIB, context_bytes=CONTEXT),
    }
    found = estimate(64.0, needs)
    assert found is not None
    assert (found.context_bytes, found.need_bytes) == (CONTEXT, 4 * GIB + CONTEXT)
    assert found.budget_bytes == found.need_bytes and found.whole_bytes == 10 * GIB


positive = st.floats(1, 1e6)


@given(positive, positive, positive, st.floats(0, 80), st.floats(1e-3, 1), st.floats(1, 2))
def test_a_base_and_a_power_are_bounded_by_two_of_their_values(
    first: float, second: float, value: float, base: float, factor: float, power: float
) -> None:
    """*a* + *c* × value^*p*: enough between two values, and never more than the larger of two exact laws beyond."""
    if first == second:
        return

    def size(x: float) -> float:
        return (base + factor * (x / 1e3) ** power) * GIB

    found = estimate(value, {first: budget(size(first)), second: budget(size(second))})
    low, high = sorted((first, second))
    rough = 2 * ROUND_BYTES + 1e-6 * size(max(value, high))
    if found is None:
        assert max(low / value, value / high) > REACH * (1 - 1e-9)
    elif low <= value <= high:
        assert found.need_bytes - CONTEXT >= size(value) - rough
        assert found.need_bytes - CONTEXT <= size(high) + rough
    else:
        assert found.need_bytes - CONTEXT <= size(value) + rough


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e12, math.nextafter(1e12, 0), 5e-324]))


@given(st.dictionaries(numbers, st.integers(0, 2**40), max_size=5), numbers)
def test_any_numbers_give_a_size_or_none(needs: dict[float, int], value: float) -> None:
    found = estimate(value, {x: budget(need) for x, need in needs.items()})
    assert found is None or found.need_bytes >= CONTEXT


def test_the_nearest_values_are_those_of_the_nearest_ratio() -> None:
    assert nearest(32.0, [8.0, 100.0, 24.0, 0.0, 64.0]) == [24.0, 64.0, 100.0, 8.0, 0.0]
