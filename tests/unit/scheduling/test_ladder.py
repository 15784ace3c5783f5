"""Whose fault an out-of-memory was, and what the next process gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.scheduling.ladder import (
    MOST_PROCESSES,
    MOST_SHARED,
    REMEDIES,
    WANTED_FACTOR,
    Cause,
    Evidence,
    NextAttempt,
    OomHistory,
    classify,
    last_words,
    needed_bytes,
    next_attempt,
)
from prefect_gpu.units import GIB, MIB
from tests.cases import cases

CAUSES: tuple[Cause, ...] = get_args(Cause)
SHARED: tuple[Cause, ...] = ("foreign", "crowded")
CAPACITY = 80 * GIB

sizes = st.integers(0, 200 * GIB)
maybe = st.none() | sizes


def seen(**changes: Any) -> Evidence:
    """A process with a budget of 6 GiB, 5 of them for its framework."""
    fields: dict[str, Any] = {
        "budget_bytes": 6 * GIB,
        "cap_bytes": 5 * GIB,
        "context_bytes": GIB,
        "wanted_bytes": GIB,
        "held_bytes": 3 * GIB,
        "process_bytes": 4 * GIB,
        "free_bytes": 0,
    }
    return Evidence(**{**fields, **changes})


evidences = st.builds(
    Evidence,
    budget_bytes=st.integers(MIB, 200 * GIB),
    cap_bytes=maybe,
    context_bytes=sizes,
    wanted_bytes=maybe,
    held_bytes=maybe,
    process_bytes=maybe,
    free_bytes=maybe,
    foreign_growth_bytes=sizes,
    says_own_cap=st.none() | st.booleans(),
    alone=st.booleans(),
)


@cases(
    "evidence, cause",
    {
        "the error says so": (seen(says_own_cap=True), "own_cap"),
        "the device could have given it": (seen(free_bytes=2 * GIB), "own_cap"),
        "the device could just have given it": (seen(free_bytes=GIB), "own_cap"),
        "the error says it was not": (seen(free_bytes=GIB, says_own_cap=False), "crowded"),
        "others took what is missing": (seen(free_bytes=0, foreign_growth_bytes=GIB), "foreign"),
        "others took the part that is missing": (
            seen(free_bytes=GIB // 2, foreign_growth_bytes=GIB // 2),
            "foreign",
        ),
        "others took too little": (seen(free_bytes=0, foreign_growth_bytes=GIB - 1), "crowded"),
        "within its cap on a full device": (seen(), "crowded"),
        "past its cap, on a full device too": (seen(held_bytes=4 * GIB + 1), "own_cap"),
        "others go first": (seen(held_bytes=5 * GIB, foreign_growth_bytes=GIB), "foreign"),
        "no task of ours beside it": (seen(alone=True), "own_cap"),
        "alone but for other people": (seen(alone=True, foreign_growth_bytes=GIB), "foreign"),
        "no cap, past its budget": (seen(cap_bytes=None, process_bytes=5 * GIB + 1), "own_cap"),
        "no cap, within its budget": (seen(cap_bytes=None, process_bytes=5 * GIB), "crowded"),
        "no cap, free again since then": (seen(cap_bytes=None, free_bytes=9 * GIB), "crowded"),
        "nothing known": (seen(cap_bytes=None, process_bytes=None, held_bytes=None), "crowded"),
        "the device was not asked, a cap": (seen(free_bytes=None), "own_cap"),
        "the device was not asked, no cap": (seen(free_bytes=None, cap_bytes=None), "crowded"),
        "the device was not asked, the error says it was not the cap": (
            seen(free_bytes=None, says_own_cap=False),
            "crowded",
        ),
        "size unknown, something was free": (seen(wanted_bytes=None, free_bytes=1), "own_cap"),
        "size unknown, others grew on a full device": (
            seen(wanted_bytes=None, foreign_growth_bytes=64 * MIB),
            "foreign",
        ),
        "size unknown, others grew by next to nothing": (
            seen(wanted_bytes=None, foreign_growth_bytes=MIB),
            "crowded",
        ),
    },
)
def test_the_cause_of_an_out_of_memory(evidence: Evidence, cause: Cause) -> None:
    assert classify(evidence) == cause


@given(evidences)
def test_only_processes_that_grew_are_blamed(evidence: Evidence) -> None:
    cause = classify(evidence)
    assert cause in ("own_cap", "foreign", "crowded")
    if cause == "foreign":
        assert evidence.foreign_growth_bytes > 0
    if evidence.says_own_cap:
        assert cause == "own_cap"
    if evidence.alone and evidence.free_bytes is not None:
        assert cause != "crowded"


@cases(
    "evidence, needed_gib",
    {
        "what the process held and what it asked for": (seen(), 5),
        "its framework knows better than a reading": (seen(held_bytes=4 * GIB), 6),
        "held, context and wanted": (seen(process_bytes=None), 5),
        "the message does not say": (seen(wanted_bytes=None), None),
        "what it held is not known": (seen(held_bytes=None, process_bytes=None), None),
    },
)
def test_what_it_would_have_needed(evidence: Evidence, needed_gib: int | None) -> None:
    assert needed_bytes(evidence) == (None if needed_gib is None else needed_gib * GIB)


@cases(
    "changes, budget_bytes",
    {
        "half as much again": ({"wanted_bytes": None}, 9 * GIB),
        "half as much again is more than it wanted": ({}, 9 * GIB),
        "what it wanted and a tenth": ({"wanted_bytes": 16 * GIB}, 22 * GIB),
        "a whole device, if there is no more": ({"wanted_bytes": 100 * GIB}, None),
        "nearly a whole device is a whole one": ({"budget_bytes": 60 * GIB}, None),
    },
)
def test_its_own_cap_gives_it_more(changes: dict[str, Any], budget_bytes: int | None) -> None:
    rung = next_attempt(OomHistory(), "own_cap", seen(**changes), CAPACITY)
    assert isinstance(rung, NextAttempt) and rung.budget_bytes == budget_bytes
    whole = budget_bytes is None
    assert rung.climb == OomHistory(2, whole_device=whole, reached_bytes=rung.budget_bytes or 0)
    assert "6GiB" in rung.reason or "60GiB" in rung.reason


@cases(
    "whole_gib, given_gib",
    {
        "not known": (0, 9),
        "less than half as much again": (8, 9),
        "what past runs had in full": (20, 20),
        "more than the device has": (90, None),
    },
)
def test_a_budget_that_left_first_steps_out_is_followed_by_one_that_does_not(
    whole_gib: int, given_gib: int | None
) -> None:
    own = next_attempt(OomHistory(), "own_cap", seen(), CAPACITY, whole_gib * GIB)
    assert isinstance(own, NextAttempt)
    assert own.budget_bytes == (None if given_gib is None else given_gib * GIB)
    shared = next_attempt(OomHistory(), "crowded", seen(), CAPACITY, whole_gib * GIB)
    assert isinstance(shared, NextAttempt) and shared.budget_bytes == 6 * GIB


def test_among_devices_that_differ_a_whole_device_is_the_largest() -> None:
    climb = OomHistory(processes=MOST_PROCESSES - 1, reached_bytes=7 * GIB)
    rung = next_attempt(climb, "own_cap", seen(), CAPACITY, alike=False)
    assert isinstance(rung, NextAttempt) and rung.budget_bytes == CAPACITY
    assert rung.climb == OomHistory(MOST_PROCESSES, reached_bytes=CAPACITY)
    answer = next_attempt(
        OomHistory(2), "own_cap", seen(budget_bytes=CAPACITY), CAPACITY, alike=False
    )
    assert isinstance(answer, str) and answer.startswith("a whole device was not enough")


def test_a_whole_device_that_was_not_enough_is_the_end() -> None:
    climb = OomHistory(processes=2, whole_device=True)
    answer = next_attempt(climb, "own_cap", seen(budget_bytes=80 * GIB), CAPACITY)
    assert answer == "a whole device was not enough, 80GiB; it would have needed 5GiB in all"


AGAIN = "; without gpu:oom=fail it runs again by itself"
NEEDED = "it would have needed 5GiB in all"
FILLED = f"other people's processes filled the device though it was within its 4GiB; {NEEDED}"


@cases(
    "cause, given, words",
    {
        "more would have helped": (
            *("own_cap", 6 * GIB, f"4GiB were not enough; {NEEDED}: write gpu:memory=6GiB{AGAIN}"),
        ),
        "a whole device would have helped": (
            *("own_cap", None, f"4GiB were not enough; {NEEDED}: write gpu:memory=100%{AGAIN}"),
        ),
        "others took it": ("foreign", 4 * GIB, f"{FILLED}: {REMEDIES['foreign']}{AGAIN}"),
        "no device is enough": ("own_cap", "that is all", f"that is all: {REMEDIES['own_cap']}"),
        "tasks beside it": ("crowded", "it ran full", f"it ran full: {REMEDIES['crowded']}"),
        "not a matter of devices": ("host", "no help", "no help"),
    },
)
def test_the_end_says_why_and_what_to_write(
    cause: Cause, given: int | str | None, words: str
) -> None:
    rung = given if isinstance(given, str) else NextAttempt(OomHistory(2), given, "")
    assert last_words(cause, seen(budget_bytes=4 * GIB), rung, CAPACITY, "nvml") == words


def test_a_tag_that_was_not_found_on_a_gpu_says_so() -> None:
    said = last_words(
        "own_cap", seen(), NextAttempt(OomHistory(2), 6 * GIB, ""), CAPACITY, "simulated"
    )
    assert "write gpu:memory=6GiB (simulated devices only); without" in said


def test_a_tag_that_is_rounded_up_is_no_more_than_a_device_gives() -> None:
    # 7.86 GiB, which reads as 7.9.
    capacity = int(7.86 * GIB)
    rung = NextAttempt(OomHistory(2, reached_bytes=capacity - 1), capacity - 1, "")
    assert "write gpu:memory=100%;" in last_words("own_cap", seen(), rung, capacity, "nvml")
    assert "write gpu:memory=7.9GiB;" in last_words("own_cap", seen(), rung, 8 * GIB, "nvml")


def test_what_is_not_its_fault_costs_it_nothing_until_the_third_time() -> None:
    climb = OomHistory()
    given: list[int | None] = []
    for cause in ("crowded", "foreign", "crowded"):
        rung = next_attempt(climb, cause, seen(), CAPACITY)
        assert isinstance(rung, NextAttempt)
        given.append(rung.budget_bytes)
        climb = rung.climb
    assert given == [6 * GIB, 6 * GIB, None]
    assert climb == OomHistory(4, shared=3, whole_device=True, reached_bytes=seen().budget_bytes)
    end = next_attempt(climb, "foreign", seen(), CAPACITY)
    assert isinstance(end, str) and "ran full 4 times though the task was within its 6GiB" in end


def test_its_own_fault_in_between_begins_the_count_anew() -> None:
    rung = next_attempt(OomHistory(processes=2, shared=2), "own_cap", seen(), CAPACITY)
    assert isinstance(rung, NextAttempt) and rung.climb.shared == 0


def test_a_probe_displaced_by_other_programs_gets_another_whole_device() -> None:
    # Its first process had a whole device; others filled it once.
    rung = next_attempt(
        OomHistory(whole_device=True), "foreign", seen(budget_bytes=70 * GIB), CAPACITY
    )
    assert isinstance(rung, NextAttempt) and rung.budget_bytes is None
    assert rung.climb == OomHistory(processes=2, shared=1, whole_device=True)


@pytest.mark.parametrize("cause", ["host", "unknown"])
def test_what_no_device_memory_can_help_never_climbs(cause: Cause) -> None:
    assert next_attempt(OomHistory(), cause, seen(), CAPACITY) == (
        f"more memory of a device does not help ({cause})"
    )


def test_the_reason_names_the_processes_that_filled_the_device() -> None:
    foreign = next_attempt(OomHistory(), "foreign", seen(), CAPACITY)
    crowded = next_attempt(OomHistory(), "crowded", seen(), CAPACITY)
    assert isinstance(foreign, NextAttempt) and foreign.reason.startswith(
        "other people's processes"
    )
    assert isinstance(crowded, NextAttempt) and crowded.reason.startswith("tasks beside it")


def test_the_last_process_has_a_whole_device() -> None:
    """A body that needs much more than was learned, and takes it in small pieces, reaches it."""
    climb, budget, given = OomHistory(), GIB, []
    while not climb.whole_device:
        rung = next_attempt(climb, "own_cap", seen(budget_bytes=budget, wanted_bytes=MIB), CAPACITY)
        assert isinstance(rung, NextAttempt)
        climb = rung.climb
        given.append(budget := rung.budget_bytes or CAPACITY)
    assert climb.processes == MOST_PROCESSES
    assert given[-1] == CAPACITY > 2 * given[-2]


def test_the_fifth_process_is_the_last() -> None:
    answer = next_attempt(OomHistory(processes=5), "own_cap", seen(), CAPACITY)
    assert answer == (
        "5 processes have run out of memory, the last with 6GiB; it would have needed 5GiB in all"
    )


@given(
    st.lists(st.tuples(st.sampled_from(CAUSES), evidences), min_size=5, max_size=8),
    st.integers(GIB, 200 * GIB),
    st.booleans(),
)
def test_a_climb_ends_and_never_goes_down(
    failures: list[tuple[Cause, Evidence]], capacity_bytes: int, whole_device: bool
) -> None:
    climb = OomHistory(whole_device=whole_device)
    budget = min(failures[0][1].budget_bytes, capacity_bytes)
    shared = 0
    for cause, evidence in failures:
        answer = next_attempt(climb, cause, replace(evidence, budget_bytes=budget), capacity_bytes)
        if isinstance(answer, str):
            return
        assert cause == "own_cap" or cause in SHARED
        shared = shared + 1 if cause in SHARED else 0
        assert answer.climb.processes == climb.processes + 1 <= MOST_PROCESSES
        assert answer.climb.shared == shared <= MOST_SHARED
        assert answer.climb.whole_device >= climb.whole_device
        assert (answer.budget_bytes is None) == answer.climb.whole_device
        following = capacity_bytes if answer.budget_bytes is None else answer.budget_bytes
        assert following >= budget
        if cause == "own_cap" and answer.budget_bytes is not None:
            assert following >= int(1.5 * budget)
        climb, budget = answer.climb, following
    raise AssertionError("it went on for longer than allowed")


@pytest.mark.parametrize("cause", ["own_cap", "foreign", "crowded"])
def test_a_first_run_beside_others_asks_for_what_its_error_says_it_needs(cause: Cause) -> None:
    # It held 3 GiB with its context, and wanted half a GiB more.
    first = seen(
        budget_bytes=3 * GIB,
        cap_bytes=2 * GIB,
        held_bytes=2 * GIB,
        process_bytes=3 * GIB,
        wanted_bytes=GIB // 2,
        shared_probe=True,
    )
    needed = needed_bytes(first)
    assert needed == int(3.5 * GIB)
    rung = next_attempt(OomHistory(), cause, first, CAPACITY)
    assert isinstance(rung, NextAttempt)
    assert rung.budget_bytes == int(needed * WANTED_FACTOR)
    assert rung.climb == OomHistory(2, reached_bytes=int(needed * WANTED_FACTOR), from_error=True)
    # Its error has said what one allocation wanted, not what came after it.
    assert rung.budget_bytes is not None
    second = seen(budget_bytes=rung.budget_bytes)
    whole = next_attempt(rung.climb, "own_cap", second, CAPACITY)
    assert isinstance(whole, NextAttempt)
    assert (whole.budget_bytes, whole.climb.from_error) == (None, False)


@cases(
    "changes",
    {
        "its error does not say what it needs": {"wanted_bytes": None},
        "it needs as much as a device has": {"held_bytes": 79 * GIB},
        "it says less than it had": {"held_bytes": 0, "process_bytes": GIB},
    },
)
def test_a_first_run_beside_others_gets_a_whole_device_if_its_error_does_not_help(
    changes: dict[str, Any],
) -> None:
    rung = next_attempt(OomHistory(), "own_cap", seen(shared_probe=True, **changes), CAPACITY)
    assert isinstance(rung, NextAttempt) and rung.budget_bytes is None and not rung.climb.from_error
