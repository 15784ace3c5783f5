"""Which marks are kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.measurements import (
    FIRST_STEPS,
    LAST_STEPS,
    MARKS_PER_STEP,
    Mark,
    MarkKeeper,
)


def mark(step: int, at_s: float = 0.0) -> Mark:
    return Mark(at_s, "a", step=step)


def test_marks_of_the_first_and_the_last_steps_are_kept() -> None:
    keeper = MarkKeeper()
    for step in range(10):
        keeper.add(mark(step, step), mark(step, step + 0.5))
    assert [m.step for m in keeper.marks()] == [0, 0, 1, 1, 2, 2, 8, 8, 9, 9]


def test_marks_are_in_order_of_time_and_are_taken_once() -> None:
    keeper = MarkKeeper()
    keeper.add(mark(0, 2.0), mark(0, 1.0), mark(1, 3.0))
    assert [m.at_s for m in keeper.take()] == [1.0, 2.0, 3.0]
    assert keeper.take() == ()


@given(st.lists(st.integers(0, 12), max_size=300))
def test_marks_are_bounded_and_the_newest_step_is_kept(steps: list[int]) -> None:
    keeper = MarkKeeper()
    for step in steps:
        keeper.add(mark(step))
    kept = Counter(m.step for m in keeper.marks())
    assert len(kept) <= FIRST_STEPS + LAST_STEPS
    assert all(count <= MARKS_PER_STEP for count in kept.values())
    assert max(kept, default=-1) == max(steps, default=-1)
    for step in range(FIRST_STEPS):
        assert kept[step] == min(steps.count(step), MARKS_PER_STEP)
