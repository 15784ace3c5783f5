"""What past runs teach: the formula, the floor, and runs as texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.history import (
    LIVE_FACTOR,
    LIVE_MARGIN_BYTES,
    MOST_GROWTH,
    OOM_FACTOR,
    ROUND_BYTES,
    PastRun,
    busy_fraction,
    expected_s,
    growth_factor,
    known_floor_bytes,
    learn,
    learned_context_bytes,
)
from prefect_gpu.units import GIB, MIB
from tests.cases import cases

CONTEXT = 620 * MIB

sizes = st.integers(0, 256 * GIB)
times = st.floats(0, 1e6)


def gib(size: float) -> int:
    return int(size * GIB)


def run(live_gib: float | None = 4.0, budget_gib: float = 8.0, **changes: Any) -> PastRun:
    """A completed run under a cap."""
    fields: dict[str, Any] = {
        "ended_at": 1.0,
        "outcome": "completed",
        "budget_bytes": gib(budget_gib),
        "cap_bytes": gib(budget_gib) - CONTEXT,
        "live_bytes": None if live_gib is None else gib(live_gib),
        "process_bytes": gib(7.0),
        "context_bytes": CONTEXT,
        "run_s": 10.0,
    }
    return PastRun(**{**fields, **changes})


def probe(live_gib: float = 4.0, **changes: Any) -> PastRun:
    return run(live_gib, 139.0, cap_bytes=None, **changes)


def oom(budget_gib: float, **changes: Any) -> PastRun:
    return run(None, budget_gib, **{"outcome": "oom", "cause": "own_cap", **changes})


@st.composite
def past_runs(draw: st.DrawFn) -> PastRun:
    return PastRun(
        ended_at=draw(times),
        outcome=draw(st.sampled_from(["completed", "completed", "oom", "failed", "died"])),
        cause=draw(st.sampled_from(["", "own_cap", "foreign", "crowded"])),
        budget_bytes=draw(sizes),
        cap_bytes=draw(st.none() | sizes),
        live_bytes=draw(st.none() | sizes),
        steady_live_bytes=draw(st.none() | sizes),
        process_bytes=draw(sizes),
        context_bytes=draw(st.integers(0, 2 * GIB)),
        alloc_retries=draw(st.integers(0, 3)),
        step_s=draw(st.none() | times),
        run_s=draw(times),
        wanted_bytes=draw(st.none() | sizes),
    )


histories = st.lists(past_runs(), max_size=20)


@given(histories)
def test_what_holds_of_every_learned_budget(runs: list[PastRun]) -> None:
    lesson = learn(runs)
    assert learn(reversed(runs)) == lesson
    completed = [r for r in runs if r.outcome == "completed"]
    assert (lesson is None) == (not completed)
    if lesson is None:
        return
    assert lesson.runs == len(completed)
    assert lesson.budget_bytes >= max(lesson.floor_bytes, LIVE_MARGIN_BYTES)
    assert lesson.budget_bytes % ROUND_BYTES == 0
    for r in completed:
        live = r.live_bytes if r.steady_live_bytes is None else r.steady_live_bytes
        assert lesson.context_bytes >= r.context_bytes
        least = None if live is None else live + LIVE_MARGIN_BYTES + lesson.context_bytes
        assert lesson.budget_bytes >= (r.process_bytes if least is None else least)


@given(histories, past_runs(), st.integers(0, 64 * GIB))
def test_a_largest_run_that_is_larger_never_teaches_a_smaller_budget(
    runs: list[PastRun], last: PastRun, more_bytes: int
) -> None:
    # Of others, more would also mean that runs differ less.
    runs = [replace(r, live_bytes=0, steady_live_bytes=None) for r in runs]
    last = replace(last, outcome="completed", live_bytes=last.live_bytes or 0)
    grown = replace(
        last,
        live_bytes=(last.live_bytes or 0) + more_bytes,
        steady_live_bytes=(
            None if last.steady_live_bytes is None else last.steady_live_bytes + more_bytes
        ),
    )
    before, after = learn([last, *runs]), learn([grown, *runs])
    assert before and after and after.budget_bytes >= before.budget_bytes


@given(histories, st.integers(MIB, 256 * GIB))
def test_running_into_its_own_cap_always_raises_the_next_budget(
    runs: list[PastRun], budget_bytes: int
) -> None:
    lesson = learn([oom(0, budget_bytes=budget_bytes), *runs])
    if lesson is not None:
        assert lesson.budget_bytes > budget_bytes


@cases(
    "live_gib, steady_gib, least_gib, most_gib",
    {
        "without autotuning": (3.70, 3.70, 4.80, 4.83),
        "autotuned because the device was empty": (13.05, 3.71, 4.81, 4.84),
        "autotuned under its cap": (4.71, 3.71, 4.81, 4.84),
        "no evidence of steps": (13.05, None, 16.9, 17.0),
    },
)
def test_a_resnet_50_gets_what_it_was_measured_to_need(
    live_gib: float, steady_gib: float | None, least_gib: float, most_gib: float
) -> None:
    steady = None if steady_gib is None else gib(steady_gib)
    lesson = learn([probe(live_gib, steady_live_bytes=steady)])
    assert lesson and least_gib <= (lesson.budget_bytes - CONTEXT) / GIB <= most_gib
    assert lesson.context_bytes == CONTEXT and lesson.floor_bytes == 0


@cases(
    "live_mib, process_mib, budget_mib",
    {
        "a few segments at least, rounded": (1, 300, 366),
        "what its allocator held": (500, 1000, 1000),
        "not all that a cache took": (500, 4300, 1120),
        "a third of the live memory": (2000, 4300, 2900),
        "the process was not seen": (500, None, 950),
    },
)
def test_the_margin_above_the_live_memory(
    live_mib: int, process_mib: int | None, budget_mib: int
) -> None:
    process = None if process_mib is None else process_mib * MIB
    past = run(live_bytes=live_mib * MIB, process_bytes=process, context_bytes=300 * MIB)
    lesson = learn([past])
    assert lesson and lesson.budget_bytes == budget_mib * MIB


def test_memory_that_no_framework_reports_is_taken_from_the_process() -> None:
    lesson = learn([run(None, process_bytes=10 * GIB, budget_bytes=20 * GIB)])
    assert lesson and lesson.budget_bytes == 13 * GIB


def test_the_largest_run_counts() -> None:
    assert learn([run(2), run(5), run(3)]) == replace(learn([run(5)]), runs=3)


@pytest.mark.parametrize("outcome", ["failed", "oom", "died", "timeout", "cancelled"])
def test_a_run_that_did_not_complete_is_no_measure(outcome: str) -> None:
    assert learn([run(4), run(40, outcome=outcome)]) == learn([run(4)])
    assert learn([run(40, outcome=outcome)]) is None


@cases(
    "runs, floor_gib",
    {
        "nothing went wrong": ([], 0),
        "half as much again after running out": ([oom(6)], 9),
        "of the largest that was too small": ([oom(6), oom(9)], 13.5),
        "what it wanted, if that is more": ([oom(6, wanted_bytes=gib(20))], 20),
        "what was seen to be enough": ([oom(6), run(1, 7)], 7),
        "the least that was enough": ([oom(6), run(1, 9), run(1, 7)], 7),
        "enough for one run, too small for another": ([oom(6), run(1, 5)], 9),
        "others' memory says nothing of the budget": ([oom(6, cause="foreign")], 0),
        "nor does a full device": ([oom(6, cause="crowded")], 0),
        "a run without a cap proves no budget": ([oom(6), probe(1)], 9),
    },
)
def test_the_floor_remembers_what_was_too_small(runs: list[PastRun], floor_gib: float) -> None:
    lesson = learn([run(1, 2), *runs])
    assert lesson and lesson.floor_bytes == gib(floor_gib)
    assert lesson.budget_bytes >= lesson.floor_bytes


def test_steady_memory_that_was_too_little_is_followed_by_what_a_run_had_in_full() -> None:
    first = probe(20, steady_live_bytes=gib(4))
    lesson = learn([first])
    assert lesson and lesson.budget_bytes < gib(6) < gib(26) < lesson.whole_bytes
    next_lesson = learn([first, oom(lesson.budget_bytes / GIB)])
    assert next_lesson
    assert next_lesson.floor_bytes == pytest.approx(lesson.whole_bytes, abs=ROUND_BYTES)
    # A budget that was enough since is better evidence.
    settled = learn([first, oom(6), run(20, 9, steady_live_bytes=gib(4))])
    assert settled and settled.budget_bytes == settled.floor_bytes == gib(9)


def test_a_floor_outlives_the_run_that_showed_it() -> None:
    told = run(1, 6, ended_at=8.0, floor_bytes=gib(6))
    before = run(1, 4, ended_at=7.0, floor_bytes=gib(4))
    lesson = learn([run(1, 6, ended_at=9.0), told, before])
    assert lesson and lesson.floor_bytes == gib(6) == lesson.budget_bytes
    # What is shown wins over what is told: a budget was found since that was enough.
    assert known_floor_bytes([told, oom(4), run(1, 5)]) == gib(5)
    assert known_floor_bytes([run(1, 5)]) == 0


@cases(
    "slow, floor_gib",
    {
        "retries and slower steps": ({"alloc_retries": 9, "step_s": 1.06}, 5),
        "retries that cost nothing": ({"alloc_retries": 9, "step_s": 1.04}, 0),
        "slower for another reason": ({"alloc_retries": 0, "step_s": 2.0}, 0),
        "no steps, a slower body": ({"alloc_retries": 9, "run_s": 12.1}, 5),
        "no steps, noise": ({"alloc_retries": 9, "run_s": 11.9}, 0),
        "no cap to pinch": ({"alloc_retries": 9, "step_s": 2.0, "cap_bytes": None}, 0),
    },
)
def test_a_cap_that_pinched_goes_up_by_a_quarter(slow: dict[str, Any], floor_gib: float) -> None:
    lesson = learn([run(1, 4, **slow), probe(1, step_s=1.0)])
    assert lesson and lesson.floor_bytes == gib(floor_gib)


@cases(
    "sizes_gib, factor",
    {
        "nothing is known": ([], 1),
        "one run says nothing of others": ([4], 1),
        "all are equal": ([4, 4, 4], 1),
        "a run that took nothing says nothing": ([4, 0], 1),
        "as much more again": ([4, 6], 1.5),
        "in any order": ([6, 4], 1.5),
        "within bounds": ([4, 40], MOST_GROWTH),
        "the distance from the middle with three": ([4, 5, 9], 9 / 5),
        "less with more": ([4, 5, 6, 7, 8, 9, 12], (12 / 7) ** (2 / 6)),
        "one small run says nothing of large ones": ([0.01, *[30] * 10], 1),
    },
)
def test_runs_that_differ_let_expect_larger_ones(sizes_gib: list[float], factor: float) -> None:
    assert growth_factor([gib(size) for size in sizes_gib]) == pytest.approx(factor)


@given(st.lists(sizes, max_size=20))
def test_growth_has_bounds_and_no_order(sizes_bytes: list[int]) -> None:
    factor = growth_factor(sizes_bytes)
    assert 1 <= factor <= MOST_GROWTH
    assert factor == growth_factor(sizes_bytes[::-1])


def test_a_whole_device_that_was_too_small_says_nothing_of_smaller_budgets() -> None:
    # A typing error, say: it ran out of 2.6, 4, 6, 9 GiB, and at last of the whole device.
    typo = [oom(size, floor_bytes=gib(1)) for size in (2.6, 4, 6, 9)]
    lesson = learn([run(1.5, 2.6), *typo, oom(80, cap_bytes=None, process_bytes=gib(79))])
    assert lesson and lesson.budget_bytes == pytest.approx(gib(13.5), abs=ROUND_BYTES)


def test_a_process_that_was_killed_above_its_budget_had_too_small_a_one_without_a_cap_too() -> None:
    killed = oom(10, cap_bytes=None, process_bytes=gib(12))
    assert known_floor_bytes([run(4), killed]) == gib(15)


def test_a_tag_below_what_steps_need_does_not_show_that_first_steps_count() -> None:
    trained = probe(13.2, steady_live_bytes=gib(4.8))
    before, after = learn([trained]), learn([trained, oom(2)])
    assert before and after and after.budget_bytes == before.budget_bytes
    # Though it escalated to all that past runs took.
    escalated = run(4.8, 17.8, steady_live_bytes=gib(4.8))
    again = learn([trained, oom(2), escalated])
    assert again and again.budget_bytes == before.budget_bytes


def test_steady_and_full_live_memory_are_not_compared() -> None:
    lesson = learn([probe(13.2), *[run(6, steady_live_bytes=gib(4.8))] * 2, oom(5)])
    assert lesson and lesson.growth == 1


def test_runs_of_which_one_has_steps_that_differ_are_compared_by_what_they_had_within_caps() -> (
    None
):
    # A detection on images of changing size (H200): 5.1 GiB at most, steps of 4.4, then 11.5 and no two steps alike.
    runs = [probe(5.1, steady_live_bytes=gib(4.4)), run(11.5, 14.6)]
    lesson = learn([*runs, oom(6.5), oom(9.7)])
    assert lesson and lesson.growth == MOST_GROWTH
    assert lesson.budget_bytes > gib(11.5 * LIVE_FACTOR * MOST_GROWTH)
    # The same needs: no growth.
    alike = [probe(13.2, steady_live_bytes=gib(4.8)), run(4.8, 6.5)]
    lesson = learn([*alike, oom(4)])
    assert lesson and lesson.growth == 1


def test_runs_that_differ_are_given_more_only_after_a_budget_was_too_small() -> None:
    runs = [probe(4), run(6, 9.5)]
    before, after = learn(runs), learn([*runs, oom(5.8)])
    assert before and after
    assert (before.growth, after.growth) == (1, pytest.approx(1.5))
    assert after.budget_bytes == pytest.approx(
        gib(6 * LIVE_FACTOR * 1.5) + CONTEXT, abs=ROUND_BYTES
    )
    # By the next run that needs the same, it knows better.
    settled = learn([*runs, oom(5.8), run(6, 12.4)])
    assert settled and settled.growth == 1


def test_a_third_run_that_needs_as_much_more_fits_after_the_second_ran_out() -> None:
    """Three runs that need 4, 8 and 16 GiB: the budget of the second was too small, that of the third is not."""
    second = learn([probe(4)])
    assert second and second.budget_bytes < gib(8)
    third = learn([probe(4), oom(second.budget_bytes / GIB), run(8, 8.6)])
    assert third and third.budget_bytes - third.context_bytes > gib(16)


def test_what_pinched_is_seen_by_roomier_runs_only() -> None:
    lesson = learn([run(1, 4, alloc_retries=9, step_s=2.0), run(1, 3, step_s=1.0)])
    assert lesson and lesson.floor_bytes == 0, "no run was roomier"
    lesson = learn([run(1, 8, alloc_retries=9, step_s=2.0), oom(6), probe(1, step_s=1.0)])
    assert lesson and lesson.floor_bytes == 10 * GIB, "a pinched run does not prove its budget"


def test_a_context_is_the_largest_of_the_completed_runs() -> None:
    runs = [
        run(context_bytes=500 * MIB),
        run(context_bytes=700 * MIB),
        run(context_bytes=900 * MIB, outcome="died"),
    ]
    assert learned_context_bytes(runs) == 700 * MIB
    assert learned_context_bytes([run(context_bytes=0)]) is None
    assert learned_context_bytes([]) is None


@given(past_runs())
def test_a_run_comes_back_from_its_texts(past: PastRun) -> None:
    texts = past.to_texts()
    assert PastRun.from_texts(texts) == past
    assert all(0 < len(text) < 500 for text in texts.values())


def test_fields_of_later_versions_are_passed_over() -> None:
    assert PastRun.from_texts({**run().to_texts(), "colour": "green"}) == run()


@cases(
    "texts",
    {
        "nothing": {},
        "no time": {"outcome": "completed"},
        "no outcome": {"ended_at": "1.0"},
        "no number": {"ended_at": "noon", "outcome": "completed"},
        "a size with a unit": {"ended_at": "1.0", "outcome": "oom", "budget_bytes": "6GiB"},
    },
)
def test_what_is_no_run_is_refused(texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"is missing|could not convert|invalid literal"):
        PastRun.from_texts(texts)


@cases(
    "runs, seconds",
    {
        "nothing is known": ([], None),
        "a failed run tells nothing": ([run(outcome="failed", run_s=9.0)], None),
        "a run that was not timed tells nothing": ([run(run_s=0.0)], None),
        "its body, where no more is known": ([run(run_s=9.0)], 9.0),
        "the start of the process counts": ([run(run_s=9.0, start_s=2.0)], 11.0),
        "one that hung does not decide": ([run(run_s=s) for s in (1.0, 500.0, 3.0)], 3.0),
    },
)
def test_how_long_it_is_expected_to_take(runs: list[PastRun], seconds: float | None) -> None:
    assert expected_s(runs) == seconds


@cases(
    "runs, fraction",
    {
        "nothing is known": ([run(run_s=60.0)], None),
        "a failed run tells nothing": (
            [run(outcome="failed", run_s=60.0, busy_fraction=0.9)],
            None,
        ),
        "nor does a short one": ([run(run_s=9.0, busy_fraction=0.9)], None),
        "beside another it had a part": (
            [run(run_s=60.0, busy_fraction=x) for x in (0.95, 0.48)],
            0.95,
        ),
    },
)
def test_for_how_much_of_its_time_the_gpu_computes(
    runs: list[PastRun], fraction: float | None
) -> None:
    assert busy_fraction(runs) == fraction


def test_no_next_budget_is_more_than_a_device_could_give_at_the_newest_run() -> None:
    large = run(12)
    on_a_small_one = replace(large, capacity_bytes=gib(7.75), ended_at=large.ended_at + 1)
    lesson = learn([large, on_a_small_one])
    assert lesson and lesson.budget_bytes == gib(7.75) < gib(12) < lesson.need_bytes
    alone = learn([large])
    assert alone and alone.budget_bytes == alone.need_bytes == lesson.need_bytes


def test_no_floor_is_more_than_a_device_could_give() -> None:
    short = replace(oom(7), capacity_bytes=gib(7.75))
    assert known_floor_bytes([replace(short, capacity_bytes=None)]) == gib(7 * OOM_FACTOR)
    assert known_floor_bytes([short]) == gib(7.75)
    told = PastRun(ended_at=1, outcome="completed", floor_bytes=gib(9), capacity_bytes=gib(7.75))
    assert known_floor_bytes([told]) == gib(7.75)
