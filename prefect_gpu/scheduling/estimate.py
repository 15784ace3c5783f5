"""The budget of a task with a new value of a `gpu:learn_by` parameter, estimated from runs with other values. Pure.

The estimate is taken from two curves through the two nearest known values: a line, and a power law (a line in
logarithms). Most tasks need *a* + *c* × value^*p* bytes, with *p* from 1 (size of a batch) to 2 (width of a layer or an
image). Such a need is at most the smaller of the two curves between the known values, and at least the larger one beyond
them. It equals that curve if *p* is 1 or *a* is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prefect_gpu.scheduling.history import LearnedBudget, round_up

#: Largest ratio of a value to the nearest known value, if all known values are smaller, or all are larger.
REACH = 8.0

#: Largest margin. If a known value needs more than that, compared with its own estimate, the values say too little.
MOST_MARGIN = 1.5

#: Smallest and largest value that is used, apart from 0 and of either sign: others would leave the range of numbers.
SMALLEST, LARGEST = 1e-12, 1e12


def estimate(value: float, known: Mapping[float, LearnedBudget]) -> LearnedBudget | None:
    """Return the estimated budget for a value, from the budgets of other values; `None`: they say too little.

    The budget has a margin, its `growth`: the largest factor by which one of three or more known values needs more than
    its own estimate from the others. It was learned from 0 runs.
    """
    known = {x: budget for x, budget in known.items() if _is_usable(x)}
    if not _is_usable(value):
        return None
    context = max((budget.context_bytes for budget in known.values()), default=0)
    needs = {x: float(budget.need_bytes - budget.context_bytes) for x, budget in known.items()}
    need = _curve(value, needs)
    whole = _curve(value, {x: float(budget.whole_bytes) for x, budget in known.items()})
    margin = max((_residual(x, needs) for x in needs), default=1.0)
    if need is None or whole is None or margin > MOST_MARGIN:
        return None
    need_bytes = round_up(int(need * margin)) + context
    whole_bytes = max(round_up(int(whole)), need_bytes)
    return LearnedBudget(
        need_bytes, context, 0, growth=margin, whole_bytes=whole_bytes, need_bytes=need_bytes
    )


def nearest(value: float, others: Iterable[float]) -> list[float]:
    """Return other values in the order of their ratio to a value, those of another sign last."""
    return sorted(others, key=lambda other: _distance(value, other))


def _is_usable(value: float) -> bool:
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def _distance(value: float, other: float) -> float:
    """Return the logarithm of the ratio of two values; infinity unless both are positive."""
    return abs(math.log(value) - math.log(other)) if value > 0 and other > 0 else math.inf


def _residual(value: float, sizes: Mapping[float, float]) -> float:
    """Return by which factor a known value's size is above its estimate from the others; 1: not above, or not known."""
    again = _curve(value, {x: size for x, size in sizes.items() if x != value})
    return 1.0 if not again else max(1.0, sizes[value] / again)


def _curve(value: float, sizes: Mapping[float, float]) -> float | None:
    """Return the size for a value, from the sizes of at least two others; `None`: there are fewer, or all are too far off."""
    if len(sizes) < 2:
        return None
    xs = sorted(sizes)
    inside = xs[0] <= value <= xs[-1]
    at = next((i for i, x in enumerate(xs) if x >= value), len(xs) - 1)
    x0, x1 = xs[max(at, 1) - 1], xs[max(at, 1)]
    if not inside and _distance(value, x1 if value > x1 else x0) > math.log(REACH) + 1e-9:
        return None
    y0, y1 = sizes[x0], sizes[x1]
    curves = [y0 + (y1 - y0) * ((value - x0) / (x1 - x0))]
    if min(value, x0, y0, y1) > 0 and _distance(x0, x1) > 1e-9:
        curves.append(y0 * (value / x0) ** (math.log(y1 / y0) / math.log(x1 / x0)))
    return min(curves) if inside else max(0.0, *curves)
