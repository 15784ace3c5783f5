"""The budget for a new value of a parameter, estimated from runs with other values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.history import (
    MOST_ABOVE,
    MOST_BELOW,
    MOST_LOOKS,
    REACH,
    ROUND_BYTES,
    STRETCH,
    LearnedBudget,
    estimate,
)
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


def estimated(value: float, needs: Mapping[float, LearnedBudget]) -> LearnedBudget | None:
    found = estimate(value, needs, needs.get)
    return None if found is None else found.budget


def need_gib(value: float, needs: Mapping[float, LearnedBudget]) -> float | None:
    found = estimated(value, needs)
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
        "almost none": (100, {"x50": 0, "x30": 0}, 0.06),
        "with zero, between": (4, {"x0": 1, "x8": 3}, 2.0),
        "with zero, above": (16, {"x0": 1, "x8": 3}, None),
        "with zero and another": (16, {"x0": 1, "x4": 2, "x8": 3}, 5.0),
        "as far as it may be": (8 * 32, {"x16": 1.5, "x32": 2.5}, 16.5),
        "as far below": (4, {"x32": 1.5, "x64": 2.5}, 0.62),
        "and with others": (64, {"x4": 1.5, "x8": 2.5}, 16.5),
        "too far above": (8 * 32 + 1, {"x16": 1.5, "x32": 2.5}, None),
        "too far below": (1, {"x16": 1.5, "x32": 2.5}, None),
        "too far for known values that are near each other": (96, {"x24": 1.5, "x32": 2}, None),
        "noise of near values": (256, {"x41": 1.05, "x42": 1, "x43": 1.1}, None),
        "noise, and a value that is farther": (128, {"x1": 1, "x41": 1.1, "x42": 1}, 1.0),
        "a step": (4000, {"x512": 0.5, "x513": 1}, None),
        "steeper than memory ever is": (64, {"x16": 1, "x32": 16}, None),
        "sinks faster than memory ever does": (64, {"x16": 4, "x32": 1}, None),
        "values on both sides": (256, {"x66": 2, "x67": 2.01, "x68": 2.4, "x512": 2.5}, 2.44),
    },
)
def test_needs_follow_the_value(
    value: float, needs_gib: dict[str, float], expected: float | None
) -> None:
    assert need_gib(value, known(**needs_gib)) == expected


def test_zero_and_less_are_estimated_between_known_values_only() -> None:
    needs = {-8.0: budget(GIB), 8.0: budget(3 * GIB)}
    assert need_gib(0.0, needs) == 2.0
    assert estimated(-16.0, needs) is None
    assert estimated(0.0, {1.0: budget(GIB), 8.0: budget(3 * GIB)}) is None


def test_the_margin_is_what_known_values_need_above_their_estimates() -> None:
    # From 8 and 32, 16 would need 10 by the line and by the power law, and needs 12.
    needs = {8.0: budget(10 * GIB), 16.0: budget(12 * GIB), 32.0: budget(10 * GIB)}
    found = estimated(24.0, needs)
    assert found is not None and found.growth == pytest.approx(1.2) and found.runs == 0
    power = 12 * (10 / 12) ** math.log2(1.5)
    assert need_gib(24.0, needs) == pytest.approx(power * 1.2, abs=0.01)


@pytest.mark.parametrize("middle", [1 / (MOST_BELOW + 0.1), MOST_ABOVE + 0.1, 1e-9])
def test_values_that_say_nothing_of_each_other_are_no_estimate(middle: float) -> None:
    assert estimated(24.0, known(x8=1, x16=1, x32=1)) is not None
    assert estimated(24.0, known(x8=1, x16=middle, x32=1)) is None


def test_a_context_counts_once_and_a_whole_need_is_estimated_too() -> None:
    needs = {
        16.0: budget(GIB, whole_bytes=4 * GIB),
        32.0: budget(2 * GIB, whole_bytes=6 * GIB, context_bytes=CONTEXT),
    }
    found = estimated(64.0, needs)
    assert found is not None
    assert (found.context_bytes, found.need_bytes) == (CONTEXT, 4 * GIB + CONTEXT)
    assert found.budget_bytes == found.need_bytes and found.whole_bytes == 10 * GIB


def test_three_values_on_each_side_are_used_that_are_apart_and_have_runs() -> None:
    needs = {float(x): budget(x * GIB) for x in range(1, 100)}
    del needs[60.0], needs[61.0]
    asked: list[float] = []

    def read(value: float) -> LearnedBudget | None:
        asked.append(value)
        return needs.get(value)

    found = estimate(50.5, map(float, range(1, 100)), read)
    assert found is not None and found.values == (34.0, 41.0, 50.0, 51.0, 62.0, 75.0)
    assert asked == [51.0, 62.0, 75.0, 50.0, 41.0, 34.0] and found.distance == 0
    needs.clear()
    asked.clear()
    assert estimate(50.5, map(float, range(1, 100)), read) is None
    assert len(asked) == 2 * MOST_LOOKS


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

    found = estimated(value, {first: budget(size(first)), second: budget(size(second))})
    low, high = sorted((first, second))
    rough = 64 * MIB + 2 * ROUND_BYTES + 1e-6 * size(max(value, high))
    if found is None:
        away = max(low / value, value / high)
        far = away > REACH * 0.999 or away > (high / low) ** STRETCH * 0.999
        assert far or high < 1.21 * low
    elif low <= value <= high:
        assert found.need_bytes - CONTEXT >= size(value) - rough
        assert found.need_bytes - CONTEXT <= size(high) + rough
    else:
        assert found.need_bytes - CONTEXT <= size(value) + rough


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e12, math.nextafter(1e12, 0), 5e-324]))


@given(st.dictionaries(numbers, st.integers(0, 2**40), max_size=5), numbers)
def test_any_numbers_give_a_size_or_none(needs: dict[float, int], value: float) -> None:
    found = estimated(value, {x: budget(need) for x, need in needs.items()})
    assert found is None or found.need_bytes >= CONTEXT
