"""The budget of a task with a new value of a `gpu:learn_by` parameter, estimated from runs with other values. Pure.

The estimate is taken from two curves through two known values: a line, and a power law (a line in logarithms). Most tasks
need *a* + *c* × value^*p* bytes, with *p* from 1 (size of a batch) to 2 (width of a layer or an image). Such a need is at
most the smaller of the two curves between the known values, and at least the larger one beyond them. It equals that curve
if *p* is 1 or *a* is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prefect_gpu.scheduling.history import LIVE_MARGIN_BYTES, LearnedBudget, round_up

#: Largest ratio of a value to the nearest known value, if all known values are smaller, or all are larger.
REACH = 8.0

#: Largest distance to such a value, as a multiple of the distance between the two known values of the curve. Distances are
#: logarithms of ratios: from 16 and 32, values up to 256 are estimated.
STRETCH = 3.0

#: Exponents of a power law beyond the known values. Outside these bounds, memory does not follow the value.
LEAST_POWER, MOST_POWER = -1.0, 3.0

#: Known values on each side of the new one that are used, and how many are looked at to find them.
MOST_VALUES = 3
MOST_LOOKS = 6

#: Smallest ratio of two known values that are used. Closer ones would show noise.
SPREAD = 1.2

#: Largest factor by which a known value may need more than its own estimate, and largest by which it may need less. If it
#: misses by more, memory does not follow the value.
MOST_ABOVE = 1.5
MOST_BELOW = 2.0

#: Smallest and largest value that is used, apart from 0 and of either sign.
SMALLEST, LARGEST = 1e-12, 1e12


class Estimate(NamedTuple):
    """An estimated budget."""

    #: Learned from 0 runs. Its `growth` is the margin: the largest factor by which a known value needs more than its own
    #: estimate from the others.
    budget: LearnedBudget
    #: Known values from which it was estimated, in order.
    values: tuple[float, ...]
    #: Logarithm of the ratio to the nearest known value; 0 between known values.
    distance: float


def estimate(
    value: float, others: Iterable[float], read: Callable[[float], LearnedBudget | None]
) -> Estimate | None:
    """Return the estimated budget for a value; `None`: other values say too little.

    `read` returns the budget that was learned for one of the `others`; `None`: none was.
    """
    if not _is_usable(value):
        return None
    known = _choose(value, filter(_is_usable, others), read)
    context = max((budget.context_bytes for budget in known.values()), default=0)
    needs = {
        x: float(max(budget.need_bytes - budget.context_bytes, LIVE_MARGIN_BYTES))
        for x, budget in known.items()
    }
    need = _curve(value, needs)
    whole = _curve(value, {x: max(needs[x], known[x].whole_bytes) for x in known})
    misses = [_miss(x, needs) for x in needs]
    margin = max([1.0, *misses])
    if need is None or whole is None or margin > MOST_ABOVE or min(misses) < 1 / MOST_BELOW:
        return None
    need_bytes = round_up(int(need * margin)) + context
    whole_bytes = max(round_up(int(whole)), need_bytes)
    budget = LearnedBudget(
        need_bytes, context, 0, growth=margin, whole_bytes=whole_bytes, need_bytes=need_bytes
    )
    values = sorted(known)
    inside = values[0] <= value <= values[-1]
    return Estimate(
        budget, tuple(values), 0.0 if inside else min(distance(value, x) for x in values)
    )


def _choose(
    value: float, others: Iterable[float], read: Callable[[float], LearnedBudget | None]
) -> dict[float, LearnedBudget]:
    """Return the budgets of the nearest known values on both sides of a value."""
    every = sorted(set(others))
    found: dict[float, LearnedBudget] = {}
    for side in ([x for x in every if x > value], [x for x in every[::-1] if x <= value]):
        last, looks, kept = None, 0, 0
        for x in side:
            if last is not None and distance(x, last) < math.log(SPREAD):
                continue
            if kept == MOST_VALUES or looks == MOST_LOOKS:
                break
            looks += 1
            budget = read(x)
            if budget is not None:
                found[x], last, kept = budget, x, kept + 1
    return found


def _is_usable(value: float) -> bool:
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def distance(value: float, other: float) -> float:
    """Return the logarithm of the ratio of two values; infinity unless both are positive."""
    return abs(math.log(value) - math.log(other)) if value > 0 and other > 0 else math.inf


def _miss(value: float, sizes: Mapping[float, float]) -> float:
    """Return by which factor a known value's size is above its estimate from the others; 1: there is no estimate."""
    again = _curve(value, {x: size for x, size in sizes.items() if x != value})
    return 1.0 if again is None else sizes[value] / again


def _curve(value: float, sizes: Mapping[float, float]) -> float | None:
    """Return the size for a value, from the sizes of at least two others; `None`: they say too little."""
    xs = sorted(sizes)
    if len(xs) < 2:
        return None
    if xs[0] <= value <= xs[-1]:
        at = max(1, next(i for i, x in enumerate(xs) if x >= value))
        return min(_curves(value, (xs[at - 1], xs[at]), sizes))
    near, *far = sorted(xs, reverse=value > xs[0])
    away = distance(value, near)
    # A support that is as far from the nearest value as the new value is, or the farthest one.
    finite = [x for x in far if math.isfinite(distance(x, near))] or [near]
    support = next((x for x in finite if distance(x, near) >= away - 1e-9), finite[-1])
    apart = distance(near, support)
    if apart < math.log(SPREAD) - 1e-9:
        return None
    if away > min(math.log(REACH), STRETCH * apart) + 1e-9:
        return None
    slope = math.log(sizes[near] / sizes[support]) / math.log(near / support)
    if not LEAST_POWER <= slope <= MOST_POWER:
        return None
    return max(_curves(value, (support, near), sizes))


def _curves(
    value: float, supports: tuple[float, float], sizes: Mapping[float, float]
) -> list[float]:
    """Return the size by the line through two values, and by the power law if all values are positive."""
    x0, x1 = supports
    y0, y1 = sizes[x0], sizes[x1]
    line = y0 + (y1 - y0) * ((value - x0) / (x1 - x0))
    if min(value, x0, x1) <= 0 or distance(x0, x1) < 1e-9:
        return [line]
    share = (math.log(value) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return [line, math.exp(math.log(y0) + share * math.log(y1 / y0))]
