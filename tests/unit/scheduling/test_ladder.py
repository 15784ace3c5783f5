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
    limited=st.booleans(),
    alone=st.booleans(),
)


@cases(
    "evidence, cause",
    {
        "the error says so": (seen(says_own_cap=True), "own_cap"),
        "the device could have given it": (seen(free_bytes=2 * GIB), "own_cap"),
        "the device could just have given it": (seen(free_bytes=GIB), "own_cap"),
        "the error says it was not": (seen(free_bytes=GIB, says_own_cap=False), "crowded"),
        "the device has room, but the driver limits the process": (
            seen(free_bytes=GIB, says_own_cap=False, limited=True),
            "own_cap",
        ),
        "a limited process on a full device": (seen(limited=True), "crowded"),
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


def following(before: OomHistory, cause: Cause, *limits: Any, **changes: Any) -> NextAttempt:
    """The next attempt, which there must be; `changes` of `seen`."""
    answer = next_attempt(before, cause, seen(**changes), CAPACITY, *limits)
    assert isinstance(answer, NextAttempt)
    return answer


@cases(
    "cause, changes, budget_gib, before, after",
    {
        "half as much again": ("own_cap", {"wanted_bytes": None}, 9),
        "half as much again is more than it wanted": ("own_cap", {}, 9),
        "what it wanted and a tenth": ("own_cap", {"wanted_bytes": 16 * GIB}, 22),
        "a whole device, if there is no more": ("own_cap", {"wanted_bytes": 80 * GIB}, None),
        "nearly a whole device is a whole one": ("own_cap", {"budget_bytes": 60 * GIB}, None),
        "its own fault begins the count of others anew": (
            "own_cap",
            {},
            9,
            OomHistory(2, shared=2),
        ),
        "others' fault: the same again": ("foreign", {}, 6, OomHistory(), {"shared": 1}),
        "a full device: the same again": ("crowded", {}, 6, OomHistory(3), {"shared": 1}),
        # Its first process had a whole device; others filled it once.
        "a probe displaced by other programs gets another whole device": (
            *("foreign", {"budget_bytes": 70 * GIB}, None, OomHistory(whole_device=True)),
            {"shared": 1},
        ),
    },
    *(OomHistory(), {}),
)
def test_what_the_next_process_gets(
    cause: Cause,
    changes: dict[str, Any],
    budget_gib: int | None,
    before: OomHistory,
    after: dict[str, int],
) -> None:
    budget = None if budget_gib is None else budget_gib * GIB
    found = following(before, cause, **changes)
    history = OomHistory(before.processes + 1, whole_device=budget is None, **after)
    assert (found.budget_bytes, found.climb) == (
        *(budget, replace(history, reached_bytes=budget or 0)),
    )
    who = {"foreign": "other people's processes", "crowded": "tasks beside it"}
    asked = changes.get("budget_bytes", 6 * GIB) // GIB
    assert found.reason.startswith(who.get(cause, f"{asked}GiB were not enough"))


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
    own = following(OomHistory(), "own_cap", whole_gib * GIB)
    assert own.budget_bytes == (None if given_gib is None else given_gib * GIB)
    assert following(OomHistory(), "crowded", whole_gib * GIB).budget_bytes == 6 * GIB


def test_among_devices_that_differ_a_whole_device_is_the_largest() -> None:
    climb = OomHistory(processes=MOST_PROCESSES - 1, reached_bytes=7 * GIB)
    found = following(climb, "own_cap", 0, False)
    assert found.budget_bytes == CAPACITY
    assert found.climb == OomHistory(MOST_PROCESSES, reached_bytes=CAPACITY)


@cases(
    "before, cause, budget, alike, says",
    {
        "a whole device": (OomHistory(2, 0, True), "own_cap", 80, True, "a whole device was not enough, 80GiB; it would have needed 5GiB in all"),
        "the largest of several": (OomHistory(2), "own_cap", 80, False, "a whole device was not enough, 80GiB; it would have needed 5GiB in all"),
        "the fifth process": (OomHistory(5), "own_cap", 6, True, "5 processes have run out of memory, the last with 6GiB; it would have needed 5GiB in all"),
        "the machine's own memory": (OomHistory(), "host", 6, True, "more memory of a device does not help (host)"),
        "an unknown cause": (OomHistory(), "unknown", 6, True, "more memory of a device does not help (unknown)"),
    },
)  # fmt: skip
def test_after_which_process_none_follows(
    before: OomHistory, cause: Cause, budget: int, alike: bool, says: str
) -> None:
    assert next_attempt(before, cause, seen(budget_bytes=budget * GIB), CAPACITY, 0, alike) == says


def test_no_device_is_emptied_for_an_allocation_that_none_can_give() -> None:
    for changes in ({}, {"shared_probe": True}):
        asked = seen(wanted_bytes=81 * GIB, **changes)
        said = "it asked for 81GiB at once, more than the 80GiB of a whole device"
        assert next_attempt(OomHistory(), "own_cap", asked, CAPACITY) == said


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
    given = NextAttempt(OomHistory(2), 6 * GIB, "")
    said = last_words("own_cap", seen(), given, CAPACITY, "simulated")
    assert "write gpu:memory=6GiB (simulated devices only); without" in said


def test_a_tag_that_is_rounded_up_is_no_more_than_a_device_gives() -> None:
    # 7.86 GiB, which reads as 7.9.
    capacity = int(7.86 * GIB)
    rung = NextAttempt(OomHistory(2, reached_bytes=capacity - 1), capacity - 1, "")
    assert "write gpu:memory=100%;" in last_words("own_cap", seen(), rung, capacity, "nvml")
    assert "write gpu:memory=7.9GiB;" in last_words("own_cap", seen(), rung, 8 * GIB, "nvml")


def test_what_is_not_its_fault_costs_it_nothing_until_the_third_time() -> None:
    climb, given = OomHistory(), list[int | None]()
    for cause in ("crowded", "foreign", "crowded"):
        found = following(climb, cause)
        given.append(found.budget_bytes)
        climb = found.climb
    assert given == [6 * GIB, 6 * GIB, None]
    assert climb == OomHistory(4, shared=3, whole_device=True, reached_bytes=seen().budget_bytes)
    end = next_attempt(climb, "foreign", seen(), CAPACITY)
    assert isinstance(end, str) and "ran full 4 times though the task was within its 6GiB" in end


def test_the_last_process_has_a_whole_device() -> None:
    """A body that needs much more than was learned, and takes it in small pieces, reaches it."""
    climb, budget, given = OomHistory(), GIB, []
    while not climb.whole_device:
        found = following(climb, "own_cap", budget_bytes=budget, wanted_bytes=MIB)
        climb = found.climb
        given.append(budget := found.budget_bytes or CAPACITY)
    assert climb.processes == MOST_PROCESSES
    assert given[-1] == CAPACITY > 2 * given[-2]


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
    whole = following(rung.climb, "own_cap", budget_bytes=rung.budget_bytes)
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
    found = following(OomHistory(), "own_cap", shared_probe=True, **changes)
    assert found.budget_bytes is None and not found.climb.from_error
