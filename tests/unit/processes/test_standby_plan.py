"""`prefect_gpu.processes.standby_plan`: how many wait, of which kind."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.processes.standby_plan import (
    KindDemand,
    StandbyPlan,
    most_by_default,
    plan_standbys,
)
from prefect_gpu.units import GIB
from tests.cases import cases

LIMITS = {"left_bytes": 98 * GIB, "most": 4, "imports": 4}


def demand(kind: str = "a", wanted: int = 0, **changes: object) -> KindDemand:
    plain = KindDemand(kind, wanted, spare=False, size_bytes=GIB, ready=0, importing=0)
    return replace(plain, **changes)  # type: ignore[arg-type]


KEPT = demand(wanted=1, spare=True, ready=1)


@cases(
    "demands, starts, ends, limits, short",
    {
        "none is wanted": ([],),
        "one for one task": ([demand(wanted=1)], "a"),
        "one is enough": ([demand(wanted=1, ready=1)],),
        "no more than the most": ([demand(wanted=9)], "aaaa"),
        "no more import at a time": ([demand(wanted=9)], "aaaa", "", {"most": 9}),
        "none beside those that import": (
            *([demand(wanted=3, importing=1)], "", "", {"imports": 1}),
        ),
        "each kind has its turn": (
            *([demand(wanted=9), demand("b", wanted=1)], "ab", "", {"most": 2}),
        ),
        "none is wanted any more": ([demand(ready=2, importing=1)], "", "aaa"),
        "one is kept of what was of use before": (
            *([KEPT, demand("b", spare=True, ready=2)], "", "b"),
        ),
        "but none is started for that": ([demand(spare=True)],),
        "one that is forked": ([demand(wanted=1, forks=True)], "a"),
        "and no second one": ([demand(wanted=1, forks=True, importing=1)],),
        "also where no standbys are wanted": (
            [demand(wanted=1, forks=True)],
            "a",
            "",
            {"most": 0},
        ),
        "it takes no place of theirs": (
            *([demand(wanted=1, forks=True), demand("b", wanted=9)], "ab", "", {"most": 1}),
        ),
        "it is kept for the next task": ([demand(spare=True, ready=1, forks=True)],),
        "but not for none": ([demand(ready=1, forks=True)], "", "a"),
        "unless another is wanted more": (
            [demand(wanted=1, spare=True), demand("b", spare=True, ready=1)],
            *("", "b", {"most": 1}),
        ),
        "as many as memory holds": ([demand(wanted=3)], "aa", "", {"left_bytes": 2 * GIB}),
        "what imports still takes its memory yet": (
            *([demand(wanted=3, importing=1)], "a", "", {"left_bytes": 2 * GIB}),
        ),
        "tasks come first": ([demand(wanted=3)], "", "", {"left_bytes": 0}),
        "short of memory, the least urgent ends first": (
            [demand(wanted=1, ready=1), demand("b", wanted=1, ready=1)],
            *("", "b", {"left_bytes": -GIB}, True),
        ),
        "a task waits for host memory, so all end": (
            [demand(wanted=2, ready=2), demand("b", spare=True, ready=1, forks=True)],
            *("", "baa", {"left_bytes": -math.inf}, True),
        ),
        "one that exists is not replaced by another that is as much wanted": (
            *([demand(wanted=1, ready=1), demand("b", wanted=1)], "", "", {"most": 1}),
        ),
    },
    *("", "", {}, False),
)
def test_plan(
    demands: list[KindDemand], starts: str, ends: str, limits: dict[str, Any], short: bool
) -> None:
    plan = plan_standbys(demands, **{**LIMITS, **limits})
    assert plan == StandbyPlan(tuple(starts), tuple(ends), short)


def test_most_by_default() -> None:
    assert [most_by_default(cores, 8) for cores in (1, 2, 6, 64)] == [2, 2, 3, 8]
    assert most_by_default(64, 1) == 1


sizes = st.integers(0, 4 * GIB)
demands_of = st.lists(
    st.builds(
        KindDemand,
        kind=st.integers(0, 4),
        wanted=st.integers(0, 5),
        spare=st.booleans(),
        size_bytes=sizes,
        ready=st.integers(0, 4),
        importing=st.integers(0, 4),
        forks=st.booleans(),
        # One is enough to fork from.
    ).map(lambda d: replace(d, wanted=min(d.wanted, 1)) if d.forks else d),
    unique_by=lambda d: d.kind,
    max_size=4,
)
limits_of = st.fixed_dictionaries(
    {
        "left_bytes": st.integers(-8 * GIB, 40 * GIB),
        "most": st.integers(0, 8),
        "imports": st.integers(1, 8),
    }
)


@given(demands_of, limits_of)
def test_what_holds_for_every_plan(demands: list[KindDemand], limits: dict[str, Any]) -> None:
    plan = plan_standbys(demands, **limits)
    starts, ends = Counter(plan.starts), Counter(plan.ends)
    known = {d.kind: d for d in demands}
    assert starts.keys() | ends.keys() <= known.keys()
    assert not (starts and ends), "what is freed shows at the next look"
    for kind, d in known.items():
        assert ends[kind] <= d.ready + d.importing
        if starts[kind]:
            assert d.ready + d.importing + starts[kind] <= d.wanted
    if starts:
        assert sum(d.importing for d in demands) + starts.total() <= limits["imports"]
        single = [d for d in demands if not d.forks]
        held = sum(d.ready + d.importing + starts[d.kind] for d in single)
        assert held <= limits["most"] or not any(starts[d.kind] for d in single)
        taken = sum(known[kind].size_bytes * count for kind, count in starts.items())
        taken += sum(d.size_bytes * d.importing for d in demands)
        assert taken <= limits["left_bytes"]


@given(demands_of, limits_of)
def test_carried_out_again_and_again_it_comes_to_rest(
    demands: list[KindDemand], limits: dict[str, Any]
) -> None:
    """Nothing is started only to be ended, for as long as nothing else changes."""
    started: set[object] = set()
    for _ in range(60):
        plan = plan_standbys(demands, **limits)
        if plan == StandbyPlan():
            break
        assert not started.intersection(plan.ends)
        started.update(plan.starts)
        starts, ends = Counter(plan.starts), Counter(plan.ends)
        freed = taken = 0
        after = []
        for d in demands:
            of_importing = min(ends[d.kind], d.importing)
            freed += d.size_bytes * (ends[d.kind] - of_importing)
            # All that imports is ready by the next look, and takes what it was thought to.
            ready = d.ready - (ends[d.kind] - of_importing) + d.importing - of_importing
            taken += d.size_bytes * (d.importing - of_importing)
            after.append(replace(d, ready=ready, importing=starts[d.kind]))
        demands = after
        limits = {**limits, "left_bytes": limits["left_bytes"] + freed - taken}
    else:
        pytest.fail("it never comes to rest")
