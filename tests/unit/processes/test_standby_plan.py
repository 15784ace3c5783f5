"""`prefect_gpu.processes.standby_plan`: how many wait, of which kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.processes.standby_plan import (
    KindDemand,
    Machine,
    StandbyPlan,
    most_by_default,
    plan_standbys,
)
from prefect_gpu.units import GIB
from tests.cases import cases

MACHINE = Machine(100 * GIB, 0, 2 * GIB, cores=8, most=4)


def demand(kind: str = "a", waiting: int = 0, **changes: object) -> KindDemand:
    plain = KindDemand(
        kind, waiting, latest=False, used=False, size_bytes=GIB, ready=0, importing=0
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


KEPT = demand(latest=True, used=True, ready=1)


@cases(
    "demands, starts, ends, limits, short",
    {
        "none is wanted": ([],),
        "one for one task": ([demand(waiting=1)], "a"),
        "one for the next like the last": ([demand(latest=True)], "a"),
        "one is enough": ([demand(waiting=1, latest=True, ready=1)],),
        "no more than the most": ([demand(waiting=9)], "aaaa"),
        "half the cores import at a time": ([demand(waiting=9)], "aaaa", "", {"most": 9}),
        "one core, one": ([demand(waiting=1)], "a", "", {"cores": 1}),
        "each kind has its turn": (
            *([demand(waiting=9), demand("b", waiting=1)], "ab", "", {"most": 2}),
        ),
        "none is wanted any more": ([demand(ready=2, importing=1)], "", "aaa"),
        "one is kept of what was of use before": ([KEPT, demand("b", used=True, ready=2)], "", "b"),
        "one that is forked, for any number of tasks": ([demand(waiting=9, forks=True)], "a"),
        "and no second one": ([demand(waiting=9, forks=True, importing=1)],),
        "also where no standbys are wanted": (
            [demand(waiting=1, forks=True)],
            "a",
            "",
            {"most": 0},
        ),
        "it takes no place of theirs": (
            *([demand(waiting=1, forks=True), demand("b", waiting=9)], "ab", "", {"most": 1}),
        ),
        "it is kept for the next task": ([demand(used=True, ready=1, forks=True)],),
        "but not for none": ([demand(ready=1, forks=True)], "", "a"),
        "nor where it is of no use": (
            *([demand(waiting=1, ready=1, forks=True, useful=False)], "", "a"),
        ),
        "unless another is wanted more": (
            [demand(latest=True, used=True), demand("b", used=True, ready=1)],
            *("", "b", {"most": 1}),
        ),
        "of no use": ([demand(waiting=2, useful=False, ready=1)], "", "a"),
        "as many as memory holds": ([demand(waiting=3)], "aa", "", {"available_bytes": 4 * GIB}),
        "what imports still takes its memory yet": (
            *([demand(waiting=3, importing=1)], "a", "", {"available_bytes": 4 * GIB}),
        ),
        "tasks come first": ([demand(waiting=3)], "", "", {"promised_bytes": 98 * GIB}),
        "short of memory, the least urgent ends first": (
            [demand(waiting=1, ready=1), demand("b", waiting=1, ready=1)],
            *("", "b", {"available_bytes": GIB}, True),
        ),
        "one that exists is not replaced by another that is as much wanted": (
            *([demand(waiting=1, ready=1), demand("b", waiting=1)], "", "", {"most": 1}),
        ),
    },
    *("", "", {}, False),
)
def test_plan(
    demands: list[KindDemand], starts: str, ends: str, limits: dict[str, int], short: bool
) -> None:
    plan = plan_standbys(demands, replace(MACHINE, **limits))
    assert plan == StandbyPlan(tuple(starts), tuple(ends), short)


def test_most_by_default() -> None:
    assert [most_by_default(cores, 8) for cores in (1, 2, 6, 64)] == [2, 2, 3, 8]
    assert most_by_default(64, 1) == 1


sizes = st.integers(0, 4 * GIB)
demands_of = st.lists(
    st.builds(
        KindDemand,
        kind=st.integers(0, 4),
        waiting=st.integers(0, 5),
        latest=st.booleans(),
        used=st.booleans(),
        size_bytes=sizes,
        ready=st.integers(0, 4),
        importing=st.integers(0, 4),
        useful=st.booleans(),
        forks=st.booleans(),
    ),
    unique_by=lambda d: d.kind,
    max_size=4,
)
machines = st.builds(
    Machine,
    available_bytes=st.integers(0, 40 * GIB),
    promised_bytes=sizes,
    reserve_bytes=sizes,
    cores=st.integers(1, 16),
    most=st.integers(0, 8),
)


@given(demands_of, machines)
def test_what_holds_for_every_plan(demands: list[KindDemand], machine: Machine) -> None:
    plan = plan_standbys(demands, machine)
    starts, ends = Counter(plan.starts), Counter(plan.ends)
    known = {d.kind: d for d in demands}
    assert starts.keys() | ends.keys() <= known.keys()
    assert not (starts and ends), "what is freed shows at the next look"
    for kind, d in known.items():
        assert ends[kind] <= d.ready + d.importing
        if starts[kind]:
            assert d.useful
            wanted = 1 if d.forks else max(d.waiting, int(d.latest))
            assert d.ready + d.importing + starts[kind] <= wanted
    if starts:
        assert sum(d.importing for d in demands) + starts.total() <= max(1, machine.cores // 2)
        single = [d for d in demands if not d.forks]
        held = sum(d.ready + d.importing + starts[d.kind] for d in single)
        assert held <= machine.most or not any(starts[d.kind] for d in single)
        taken = sum(known[kind].size_bytes * count for kind, count in starts.items())
        taken += sum(d.size_bytes * d.importing for d in demands)
        left = machine.available_bytes - machine.promised_bytes - machine.reserve_bytes
        assert taken <= left


@given(demands_of, machines)
def test_carried_out_again_and_again_it_comes_to_rest(
    demands: list[KindDemand], machine: Machine
) -> None:
    """Nothing is started only to be ended, for as long as nothing else changes."""
    started: set[object] = set()
    for _ in range(60):
        plan = plan_standbys(demands, machine)
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
        machine = replace(machine, available_bytes=machine.available_bytes + freed - taken)
    else:
        pytest.fail("it never comes to rest")
