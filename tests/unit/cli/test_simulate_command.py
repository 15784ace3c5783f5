"""Lists of tasks replayed in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.cli import simulate_command
from prefect_gpu.cli.simulate_command import figures
from prefect_gpu.cli.task_list import ListedTask
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.scheduling.backfill import NO_BACKFILL, PATIENCE, Patience
from prefect_gpu.scheduling.model import Request
from prefect_gpu.scheduling.placement import PlacementStyle
from prefect_gpu.units import GIB

TWO = SimulatedDevices("2x24GiB")

#: On devices that are free to the last byte.
simulate = partial(simulate_command.simulate, headroom_bytes=0)


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


def starts(tickets: Sequence[Ticket]) -> dict[str, float]:
    return {t.request.task_name: t.placed_s for t in tickets if t.placement is not None}


def test_a_device_keeps_the_headroom_of_a_real_one() -> None:
    tasks = [task("a", 10, 12), task("b", 10, 12)]
    one = SimulatedDevices("1x24GiB")
    assert starts(simulate(tasks, one)) == {"a": 0.0, "b": 0.0}
    assert starts(simulate_command.simulate(tasks, one)) == {"a": 0.0, "b": 10.0}


def test_tasks_start_when_and_where_there_is_free_memory() -> None:
    tasks = [
        task("a", 10, 20),
        task("b", 20, 20),
        task("c", 5, 20),
        task("late", 1, 2, arrival_s=3.0),
        task("after both", 4, after=(0, 1)),
        task("two", 7, 24, count=2),
    ]
    tickets = simulate(tasks, TWO)
    later = {"late": 3.0, "c": 10.0, "after both": 27.0, "two": 20.0}
    assert starts(tickets) == {"a": 0.0, "b": 0.0, **later}
    assert [len(ticket.devices) for ticket in tickets] == [1, 1, 1, 1, 1, 2]
    found = figures(tasks, tickets, TWO)
    assert (found["makespan_s"], found["max_wait_s"]) == (31.0, 20.0)
    assert found["mean_wait_s"] == pytest.approx((10 + 7 + 20) / 6)
    assert found["utilisation"] == pytest.approx((200 + 400 + 100 + 2 + 96 + 336) / (48 * 31))


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
    tickets = simulate(tasks, TWO)
    first, second, third, fine = (str(ticket.error) for ticket in tickets)
    assert "larger than any device" in first
    assert second == "comes after 'huge', which can never run"
    assert (third, fine) == ("comes after 'after it', which can never run", "None")
    assert starts(tickets) == {"fine": 0.0}
    assert figures(tasks, tickets, TWO)["makespan_s"] == 2.0
    assert set(figures(tasks[:1], simulate(tasks[:1], TWO), TWO).values()) == {0.0}


def test_limits_on_the_number_of_tasks_are_kept() -> None:
    tasks = [task(name, 10, 1) for name in "abcd"]
    assert [*starts(simulate(tasks, TWO, max_tasks_per_device=1)).values()] == [0, 0, 10, 10]
    assert [*starts(simulate(tasks, TWO, max_processes=1)).values()] == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("tasks", "bound_s"),
    [
        pytest.param([task("a", 10, 12), task("b", 10, 1)], 10, id="the longest task"),
        pytest.param([task(name, 10, 12) for name in "abcde"], 12.5, id="all memory"),
        pytest.param([task("a", 10), task("b", 10), task("c", 10)], 15, id="a device to itself is all of it"),
        pytest.param([task("a", 5, 1, arrival_s=2.0), task("b", 3, 1, arrival_s=9.0), task("c", 4, 1, arrival_s=3.0, after=(0, 1))], 14, id="a chain, from the first arrival"),
    ],
)  # fmt: skip
def test_lower_bounds(tasks: list[ListedTask], bound_s: float) -> None:
    found = figures(tasks, simulate(tasks, TWO), TWO)["lower_bound_s"]
    assert found == pytest.approx(bound_s)


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
    settings = {"max_tasks_per_device": max_tasks, "style": style, "patience": patience}
    tickets = simulate(tasks, there, **settings)
    again = simulate(tasks, there, **settings)
    assert starts(tickets) == starts(again), "the same every time"
    ran = [
        (each, ticket, ticket.ended_s)
        for each, ticket in zip(tasks, tickets, strict=True)
        if ticket.placement is not None and ticket.ended_s is not None
    ]
    assert len(ran) == sum(ticket.error is None for ticket in tickets), "it ran or can never run"
    for each, ticket, ended_s in ran:
        assert ended_s == ticket.placed_s + each.duration_s
        assert ticket.placed_s >= ticket.request.submitted_s >= each.arrival_s
        for before in each.after:
            before_s = tickets[before].ended_s
            assert before_s is not None and before_s <= ticket.request.submitted_s
        assert len(set(ticket.devices)) == each.request.count
    if ran:
        found = figures(tasks, tickets, there)
        assert found["makespan_s"] >= found["lower_bound_s"] * (1 - 1e-9)
    for moment in {ticket.placed_s for _, ticket, _ in ran}:
        held: dict[int, list[ListedTask]] = {}
        for each, ticket, ended_s in ran:
            for device in ticket.devices if ticket.placed_s <= moment < ended_s else ():
                held.setdefault(device.index, []).append(each)
        for index, those in held.items():
            size = there.sizes_bytes[index]
            assert sum(least_bytes(each.request, size) for each in those) <= size, (
                "more than there is"
            )
            assert len(those) == 1 or not any(each.request.exclusive for each in those)
            assert max_tasks is None or len(those) <= max_tasks


def least_bytes(request: Request, size: int) -> int:
    """Return the fewest bytes that a request takes on a device of `size` bytes."""
    if request.exclusive or not isinstance(request.memory, int | float):
        return size
    return request.memory if isinstance(request.memory, int) else int(request.memory * size)


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
    patience = Patience(passes, wait_s, heads=0)
    tickets, _, passed = noting(tasks, TWO, style=style, patience=patience)
    # In the order of submission.
    order = sorted(zip(tickets, tasks, strict=True), key=lambda each: each[0].request.submitted_s)
    for at, (blocked, _) in enumerate(order):
        assert blocked.placement is not None
        passed_at = sorted(
            later.placed_s
            for later, _ in order[at + 1 :]
            if blocked.request.submitted_s <= later.placed_s < blocked.placed_s
        )
        assert len(passed_at) <= passes
        assert len(passed_at) == passed[blocked.request.task_name]
        # All at the moment of the first count as one.
        assert all(s == passed_at[0] or s < passed_at[0] + wait_s for s in passed_at)
        if passed_at:
            # Then all drains: what ran there ends, and those before it go first, each as bounded.
            over_s = max(passed_at[-1], passed_at[0])
            ahead = sum(each.duration_s for _, each in order[:at])
            assert blocked.placed_s <= over_s + wait_s + ahead + max(t.duration_s for t in tasks)


@given(plain, st.sampled_from(["spread", "pack"]), st.integers(1, 3))
def test_with_right_durations_a_blocked_task_starts_when_it_was_expected(
    tasks: list[ListedTask], style: PlacementStyle, count: int
) -> None:
    there = SimulatedDevices(f"{count}x24GiB")
    # Only the first in order has devices kept, until it has started.
    patience = Patience(10**6, math.inf, heads=1)
    known = [
        replace(t, request=replace(t.request, expected_s=t.duration_s, count=1)) for t in tasks
    ]
    tickets, promised_s, _ = noting(known, there, style=style, patience=patience)
    for ticket in tickets:
        assert ticket.placement is not None
        assert ticket.placed_s <= promised_s.get(ticket.request.task_name, math.inf) + 1e-6


class Notes(Ledger):
    """A ledger that notes, by the name of a task, what `noting` says."""

    first_s: ClassVar[dict[str, float]] = {}
    passed: ClassVar[dict[str, int]] = {}

    def try_write(self, version: int, changes: Mapping[str, Entry]) -> bool:
        for entry in changes.values():
            name, status = entry.request.task_name, entry.status
            self.passed[name] = status.passed
            if status.starts_s is not None:
                self.first_s.setdefault(name, status.starts_s)
        return super().try_write(version, changes)


def noting(
    tasks: list[ListedTask], there: SimulatedDevices, **settings: object
) -> tuple[list[Ticket], dict[str, float], dict[str, int]]:
    """Simulate. Return also when the first devices kept for a task were expected to be free, and how often it was passed."""
    Notes.first_s.clear()
    Notes.passed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate_command, "Ledger", Notes)
        return simulate(tasks, there, **settings), Notes.first_s, Notes.passed
