"""Lists of tasks replayed in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.cli import simulation
from prefect_gpu.cli.simulation import ListedTask, Schedule
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.units import GIB

TWO = SimulatedDevices("2x24GiB")

#: On devices that are free to the last byte.
simulate = partial(simulation.simulate, headroom_bytes=0)


def task(
    name: str,
    seconds: float,
    gib: float | None = None,
    arrival_s: float = 0.0,
    after: tuple[int, ...] = (),
    **asked: object,
) -> ListedTask:
    memory = None if gib is None else int(gib * GIB)
    request = Request("", name, 0, 0.0, memory, **{"expected_s": seconds, **asked})  # type: ignore[arg-type]
    return ListedTask(request, seconds, arrival_s, after)


def starts(schedule: Schedule) -> dict[str, float | None]:
    return {outcome.name: outcome.started_s for outcome in schedule.tasks}


def test_a_device_keeps_the_headroom_of_a_real_one() -> None:
    tasks = [task("a", 10, 12), task("b", 10, 12)]
    one = SimulatedDevices("1x24GiB")
    assert starts(simulate(tasks, one)) == {"a": 0.0, "b": 0.0}
    schedule = simulation.simulate(tasks, one)
    assert starts(schedule) == {"a": 0.0, "b": 10.0}
    assert schedule.bounds["large_s"] == 20.0


def test_tasks_start_when_and_where_there_is_free_memory() -> None:
    tasks = [
        task("a", 10, 20),
        task("b", 20, 20),
        task("c", 5, 20),
        task("late", 1, 2, arrival_s=3.0),
        task("after both", 4, after=(0, 1)),
        task("two", 7, 24, count=2),
    ]
    schedule = simulate(tasks, TWO)
    later = {"late": 3.0, "c": 10.0, "after both": 27.0, "two": 20.0}
    assert starts(schedule) == {"a": 0.0, "b": 0.0, **later}
    assert schedule.makespan_s == 31.0
    assert schedule.max_wait_s == 20.0
    assert schedule.utilisation == pytest.approx((200 + 400 + 100 + 2 + 96 + 336) / (48 * 31))


def test_a_short_task_passes_a_blocked_one_only_with_backfill() -> None:
    tasks = [task("a", 100, 20), task("head", 10, 24), task("short", 50, 4)]
    one = SimulatedDevices("1x24GiB")
    assert starts(simulate(tasks, one)) == {"a": 0.0, "head": 100.0, "short": 0.0}
    plain = simulate(tasks, one, patience=NO_BACKFILL)
    assert starts(plain) == {"a": 0.0, "head": 100.0, "short": 110.0}


@pytest.mark.parametrize("expected_s", [600.0, None], ids=["ends are known", "they are not"])
def test_tasks_that_pass_do_not_starve_one_of_higher_priority(expected_s: float | None) -> None:
    stream = [
        task(f"middle {n}", 20, 2, arrival_s=11.0 + 2 * n, priority=5, expected_s=expected_s and 20)
        for n in range(600)
    ]
    low = task("low", 600, 10, expected_s=expected_s)
    high = task("high", 60, 20, arrival_s=10.0, priority=9, expected_s=expected_s and 60)
    began = starts(simulate([low, high, *stream], SimulatedDevices("1x24GiB")))
    assert (began["low"], began["high"]) == (0.0, 600.0)
    assert began["middle 0"] == 11.0, "they do pass"


def test_a_task_that_can_never_run_is_refused_with_those_after_it() -> None:
    tasks = [
        task("huge", 1, 99),
        task("after it", 1, 1, after=(0,)),
        task("after that", 1, 1, after=(1,)),
        task("fine", 2, 1),
    ]
    schedule = simulate(tasks, TWO)
    first, second, third, fine = (o.refusal for o in schedule.tasks)
    assert "larger than any device" in first
    assert second == "comes after 'huge', which can never run"
    assert (third, fine) == ("comes after 'after it', which can never run", "")
    assert [o.name for o in schedule.tasks if o.ended_s is not None] == ["fine"]
    assert schedule.makespan_s == 2.0
    none = simulate(tasks[:1], TWO)
    assert (none.makespan_s, none.mean_wait_s, none.max_wait_s, none.utilisation) == (0, 0, 0, 0)


def test_limits_on_the_number_of_tasks_are_kept() -> None:
    tasks = [task(name, 10, 1) for name in "abcd"]
    assert simulate(tasks, TWO, max_tasks=1).makespan_s == 20.0
    assert simulate(tasks, TWO, max_processes=1).makespan_s == 40.0
    assert simulate(tasks, TWO, max_tasks=1).bounds["places_s"] == 20.0


@pytest.mark.parametrize(
    ("tasks", "chain_s", "memory_s", "large_s"),
    [
        pytest.param([], 0, 0, 0, id="nothing"),
        pytest.param([task("a", 10, 12)], 10, 2.5, 0, id="half a device is not large"),
        pytest.param([task("a", 10, 12.1), task("b", 6, 13)], 10, (121 + 78) / 48, 8, id="more is"),
        pytest.param([task("a", 10)], 10, 5, 5, id="a device to itself is all of it"),
        pytest.param([task("a", 10, 1, exclusive=True)], 10, 5, 5, id="so is an exclusive one"),
        pytest.param([task("a", 10, 24, count=2)], 10, 10, 10, id="several devices"),
        pytest.param([task("a", 5, 1, arrival_s=2.0), task("b", 3, 1, arrival_s=9.0), task("c", 4, 1, arrival_s=3.0, after=(0, 1))], 14, 12 / 48, 0, id="a chain, from the first arrival"),
    ],
)  # fmt: skip
def test_lower_bounds(
    tasks: list[ListedTask], chain_s: float, memory_s: float, large_s: float
) -> None:
    schedule = simulate(tasks, TWO)
    found = schedule.bounds
    assert found["chain_s"] == chain_s
    assert found["memory_s"] == pytest.approx(memory_s)
    assert found["large_s"] == large_s
    assert schedule.lower_bound_s == max(chain_s, found["memory_s"], large_s)


# For any list.

seconds = st.sampled_from([1.0, 2.5, 10.0, 60.0, 61.0, 400.0])
anything = st.builds(
    ListedTask,
    st.builds(
        Request,
        id=st.just(""),
        task_name=st.just("t"),
        sequence=st.just(0),
        submitted_s=st.just(0.0),
        memory=st.none() | st.sampled_from([0.1, 0.5, 1.0]) | st.sampled_from([1, 6, 12, 20, 24, 60]).map(lambda gib: gib * GIB),
        count=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1]),
        exclusive=st.sampled_from([False, False, True]),
        # Right, wrong or not known.
        expected_s=st.none() | seconds,
    ),
    seconds,
    st.sampled_from([0.0, 0.0, 5.0, 70.0]),
)  # fmt: skip
devices = st.lists(st.sampled_from([8, 24, 80]), min_size=1, max_size=4).map(
    lambda sizes: SimulatedDevices(",".join(f"{gib}GiB" for gib in sizes))
)
patiences = st.builds(
    Patience,
    passes=st.integers(0, 4),
    wait_s=st.sampled_from([0.0, 30.0, 600.0]),
    heads=st.integers(0, 3),
)


@st.composite
def lists(draw: st.DrawFn) -> list[ListedTask]:
    tasks = draw(st.lists(anything, max_size=20))
    for at in range(1, len(tasks)):
        before = draw(st.lists(st.integers(0, at - 1), max_size=2, unique=True))
        if draw(st.integers(0, 3)) == 0:
            tasks[at] = replace(tasks[at], after=tuple(before))
    return tasks


@given(
    lists(),
    devices,
    st.sampled_from(["spread", "pack"]),
    patiences | st.just(PATIENCE),
    st.none() | st.integers(1, 3),
)
def test_every_task_that_fits_starts_once_where_it_fits(
    tasks: list[ListedTask],
    there: SimulatedDevices,
    style: PlacementStyle,
    patience: Patience,
    max_tasks: int | None,
) -> None:
    asked = partial(simulate, tasks, there, max_tasks, style=style, patience=patience)
    schedule = asked()
    assert schedule == asked(), "the same every time"
    ran = [
        (each, o, o.started_s, o.ended_s)
        for each, o in zip(tasks, schedule.tasks, strict=True)
        if o.started_s is not None and o.ended_s is not None
    ]
    assert len(ran) == sum(not o.refusal for o in schedule.tasks), "it ran or can never run"
    for each, outcome, started_s, ended_s in ran:
        assert ended_s == started_s + each.duration_s
        assert started_s >= outcome.submitted_s >= each.arrival_s
        for before in each.after:
            before_s = schedule.tasks[before].ended_s
            assert before_s is not None and before_s <= outcome.submitted_s
        assert len(set(outcome.devices)) == each.request.count
    if ran:
        assert schedule.makespan_s >= schedule.lower_bound_s * (1 - 1e-9)
    for moment in {started_s for _, _, started_s, _ in ran}:
        held: dict[int, list[ListedTask]] = {}
        for each, outcome, started_s, ended_s in ran:
            for device in outcome.devices if started_s <= moment < ended_s else ():
                held.setdefault(device, []).append(each)
        for device, those in held.items():
            size = there.sizes_bytes[device]
            least_bytes = sum(int(each.least_bytes(size)) for each in those)
            assert least_bytes <= size, "more than there is"
            assert len(those) == 1 or not any(each.request.exclusive for each in those)
            assert max_tasks is None or len(those) <= max_tasks


#: No two of one shape, which wait for one another, and all of one priority.
plain = st.lists(
    st.builds(
        task,
        st.just("t"),
        seconds,
        st.sampled_from([1, 6, 12, 20, 22]),
        st.sampled_from([0.0, 0.0, 5.0, 70.0]),
        count=st.sampled_from([1, 1, 1, 2]),
        expected_s=st.none(),
    ),
    max_size=25,
).map(lambda tasks: list(starmap(unlike, enumerate(tasks))))


def unlike(at: int, each: ListedTask) -> ListedTask:
    """Return a task with some bytes more, which its name tells."""
    memory = (each.request.memory or 0) + at  # type: ignore[operator]
    return replace(each, request=replace(each.request, task_name=f"{at}", memory=memory))


@given(
    plain,
    st.sampled_from(["spread", "pack"]),
    st.integers(0, 4),
    st.sampled_from([0.0, 30.0, 600.0]),
)
def test_without_known_durations_no_task_is_passed_more_often_than_allowed(
    tasks: list[ListedTask], style: PlacementStyle, passes: int, wait_s: float
) -> None:
    schedule = simulate(tasks, TWO, style=style, patience=Patience(passes, wait_s, heads=0))
    # In the order of submission.
    order = sorted(zip(schedule.tasks, tasks, strict=True), key=lambda each: each[0].submitted_s)
    for at, (blocked, _) in enumerate(order):
        assert blocked.started_s is not None
        passed_at = sorted(
            later.started_s
            for later, _ in order[at + 1 :]
            if later.started_s is not None
            and blocked.submitted_s <= later.started_s < blocked.started_s
        )
        assert len(passed_at) <= passes
        assert len(passed_at) == blocked.passed
        # All at the moment of the first count as one.
        assert all(s == passed_at[0] or s < passed_at[0] + wait_s for s in passed_at)
        if passed_at:
            # Then all drains: what ran there ends, and those before it go first, each as bounded.
            over_s = max(passed_at[-1], passed_at[0])
            ahead = sum(each.duration_s for _, each in order[:at])
            assert blocked.started_s <= over_s + wait_s + ahead + max(t.duration_s for t in tasks)


@given(plain, st.sampled_from(["spread", "pack"]), st.integers(1, 3))
def test_with_right_durations_a_blocked_task_starts_when_it_was_expected(
    tasks: list[ListedTask], style: PlacementStyle, count: int
) -> None:
    there = SimulatedDevices(f"{count}x24GiB")
    # Only the first in order has devices kept, until it has started.
    patience = Patience(10**6, math.inf, heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "Ledger", Promises)
        Promises.first_s.clear()
        known = [
            replace(t, request=replace(t.request, expected_s=t.duration_s, count=1)) for t in tasks
        ]
        schedule = simulate(known, there, style=style, patience=patience)
    for outcome in schedule.tasks:
        assert outcome.started_s is not None
        assert outcome.started_s <= Promises.first_s.get(outcome.name, math.inf) + 1e-6


class Promises(Ledger):
    """Notes when the first devices that were kept for a task are expected to be free, by its name."""

    first_s: ClassVar[dict[str, float]] = {}

    def try_write(self, version: int, changes: Mapping[str, Entry]) -> bool:
        for entry in changes.values():
            if entry.status.starts_s is not None:
                self.first_s.setdefault(entry.request.task_name, entry.status.starts_s)
        return super().try_write(version, changes)
