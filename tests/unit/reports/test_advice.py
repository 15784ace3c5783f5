from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.measurements import Sample, StepFacts
from prefect_gpu.reports.advice import advise, tag_advice
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.units import GIB, MIB
from tests.fakes.reports import CONTEXT, device, task_report


def quiet(**changes: Any) -> TaskReport:
    """A process that completed within its budget and calls for no advice: 4 GiB live of 6."""
    fields: dict[str, Any] = {
        "marks": (),
        "samples": (),
        "cap_bytes": 6 * GIB - CONTEXT,
        "peak_live_bytes": 4 * GIB,
        "peak_reserved_bytes": 4 * GIB,
        "peak_process_bytes": 4 * GIB + CONTEXT,
    }
    return task_report(**{**fields, **changes})


def ran_out(**changes: Any) -> TaskReport:
    """A process that reached its cap."""
    fields: dict[str, Any] = {"outcome": "oom", "cause": "own_cap", "wanted_bytes": 7 * GIB}
    return quiet(**{**fields, **changes})


def grew(step_bytes: float | None, count: int = 100, live_gib: int = 4) -> StepFacts:
    """Steps after each of which more bytes stay allocated."""
    return StepFacts(count, 2 * GIB, live_gib * GIB, 0.1, 0, step_bytes)


def about(report: TaskReport, word: str) -> list[str]:
    return [sentence for sentence in advice(report) if word in sentence]


def advice(report: TaskReport) -> tuple[str, ...]:
    return advise(report, tag_advice([report]))


NO_REASON: dict[str, dict[str, Any]] = {
    "completed within its budget": {},
    "an error that is not about memory": {"outcome": "failed", "error": "ValueError: no"},
    "timed out": {"outcome": "timeout"},
    "cancelled": {"outcome": "cancelled"},
    "died": {"outcome": "died"},
    "nothing is known of its memory": {
        "peak_live_bytes": None,
        "peak_reserved_bytes": None,
        "framework": "none",
        "source": "host",
    },
    "a probe": {"budget_source": "probe", "budget_bytes": 140 * GIB},
    "what grows are numbers, not graphs": {"steps": StepFacts(90, GIB, GIB, 0.03, 0, 1000.0)},
    "one step": {"steps": StepFacts(1)},
    "growth in too few steps": {"steps": grew(500.0 * MIB, count=3)},
    "growth of too little a step": {"steps": grew(0.5 * MIB)},
    "growth of too little in all": {"steps": grew(2.0 * MIB, count=20)},
    "unknown growth": {"steps": grew(None)},
    "memory that shrinks": {"steps": grew(-20.0 * MIB)},
}


@pytest.mark.parametrize("changes", NO_REASON.values(), ids=NO_REASON)
def test_a_report_without_a_reason_gets_no_advice(changes: dict[str, Any]) -> None:
    assert advise(quiet(**changes)) == ()


CAPPED = "It reached its cap of 5.4GiB, of a budget of 6GiB, and would have needed"
UNKNOWN = {"wanted_bytes": None, "cap_bytes": None}
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "half more, if that is more than it wanted": (
        {},
        f"{CAPPED} 7GiB in all: write `gpu:memory=9GiB`.",
    ),
    "the wanted memory and a little": (
        {"wanted_bytes": 20 * GIB},
        f"{CAPPED} 20GiB in all: write `gpu:memory=22GiB`.",
    ),
    "its error does not say, and there was no cap": (
        UNKNOWN,
        "It reached its budget of 6GiB: write `gpu:memory=9GiB`.",
    ),
    "the process as a whole passed its budget": (
        {"peak_process_bytes": 8 * GIB, "wanted_bytes": None},
        "It took 8GiB, more than its budget of 6GiB: write `gpu:memory=9GiB`.",
    ),
    "more than there is": (
        {"wanted_bytes": 150 * GIB},
        f"{CAPPED} 150GiB in all; the largest device gives 140GiB, so no tag helps: it must take less.",
    ),
    "it had all there is": (
        {**UNKNOWN, "budget_bytes": 139 * GIB},
        "It reached its budget of 139GiB; the largest device gives 140GiB, so no tag helps: it must",
    ),
    "the whole device is left to try": (
        {**UNKNOWN, "budget_bytes": 100 * GIB},
        "It reached its budget of 100GiB: write `gpu:memory=100%`.",
    ),
    "several devices": (
        {**UNKNOWN, "devices": (device(), device(1))},
        "It reached its budget of 6GiB on each device: write `gpu:memory=9GiB`.",
    ),
    "a later attempt gives no tag": (
        {"next_words": "6GiB were not enough; it gets 9GiB"},
        f"{CAPPED} 7GiB in all. The task run has another attempt: 6GiB were not enough; it gets 9GiB.",
    ),
    "other programs took it": (
        {"cause": "foreign"},
        "Processes outside prefect_gpu took the memory that was reserved for it;",
    ),
    "our tasks took it": (
        {"cause": "crowded"},
        "Tasks on the same device took more than they had reserved; it used 4.6GiB of",
    ),
    "the machine's memory": (
        {"cause": "host", "outcome": "died"},
        "The machine's own memory, or that of its container or job",
    ),
    "unknown": (
        {"cause": "unknown", "outcome": "died"},
        "It was killed for an unknown reason; it used 4.6GiB of its 6GiB. The kernel's log",
    ),
}


@pytest.mark.parametrize(("changes", "first"), CAUSES.values(), ids=CAUSES)
def test_the_first_sentence_names_the_cause(changes: dict[str, Any], first: str) -> None:
    said = advice(ran_out(**changes))[0]
    assert said == first if first.endswith(".") else said.startswith(first)


@pytest.mark.parametrize("cause", ["foreign", "host", "unknown"])
def test_a_task_is_not_advised_to_take_less_if_others_took_its_memory(cause: str) -> None:
    assert len(advise(ran_out(cause=cause))) == 1


@pytest.mark.parametrize("cause", ["own_cap", "crowded", ""])
def test_a_task_that_took_too_much_is_advised_how_to_take_less(cause: str) -> None:
    sentence = advise(ran_out(cause=cause))[-1]
    for remedy in ("find_batch_size", "mixed precision", "accumulation", "checkpointing", "phase("):
        assert remedy in sentence


def held_at_the_peak(live_gib: float) -> tuple[Sample, ...]:
    """Readings of an allocator that holds 4 GiB: at the live peak, later, and an unknown one."""
    live = int(live_gib * GIB)
    return Sample(1, None, live, 4 * GIB), Sample(2, None, GIB, 4 * GIB), Sample(3, 5 * GIB)


def test_fragmentation_is_memory_that_is_free_at_the_live_peak() -> None:
    (sentence,) = about(ran_out(samples=held_at_the_peak(2.8)), "expandable_segments")
    assert "1.2GiB (30% of its 4GiB)" in sentence and "max_split_size_mb=128" in sentence


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(ran_out(samples=held_at_the_peak(3.8)), id="little is unused"),
        pytest.param(
            ran_out(samples=held_at_the_peak(3), framework="tensorflow"), id="not PyTorch"
        ),
        pytest.param(quiet(samples=held_at_the_peak(3)), id="the process completed"),
        pytest.param(ran_out(), id="nothing is known"),
    ],
)
def test_fragmentation_is_reported_only_of_pytorch_after_an_out_of_memory_error(
    report: TaskReport,
) -> None:
    assert not about(report, "expandable_segments")


LEAKS: dict[str, tuple[float, dict[str, Any], str]] = {
    "completed": (
        20.0 * MIB,
        {},
        r"grew by 20MiB a step over 100 steps.*`loss\.item\(\)`.* 71 more steps fit\.",
    ),
    "one more": (
        1.3 * GIB,
        {"framework": "jax"},
        r"`float\(loss\)`\. At this rate 1 more step fits\.",
    ),
    "out of memory": (
        20.0 * MIB,
        {"outcome": "oom", "cause": "own_cap"},
        r"looks like a leak.*\.detach\(\)`\.$",
    ),
    "without a cap the budget is the limit": (
        20.0 * MIB,
        {"cap_bytes": None, "budget_source": "probe"},
        r"71 more steps fit",
    ),
}


@pytest.mark.parametrize(("step_bytes", "changes", "says"), LEAKS.values(), ids=LEAKS)
def test_steady_growth_from_step_to_step_is_reported_as_a_leak(
    step_bytes: float, changes: dict[str, Any], says: str
) -> None:
    (sentence,) = about(quiet(steps=grew(step_bytes), **changes), "leak")
    assert re.search(says, sentence), sentence


def test_an_allocator_that_gave_up_its_cache_is_advised_a_larger_tag() -> None:
    steps = StepFacts(90, 4 * GIB, 4 * GIB, 0.034, 3)
    (sentence,) = advice(quiet(steps=steps))
    assert "3 times after the first step" in sentence and "34ms" in sentence
    assert "`gpu:memory=7.5GiB`" in sentence
    assert advice(quiet(steps=steps, cap_bytes=None)) == ()


CONTEXT_UNKNOWN = r"^First run: it took 512MiB above its budget of 6GiB, since its context was not"
ABOVE: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({}, CONTEXT_UNKNOWN),
    "no cap": ({"cap_bytes": None}, r"no framework was capped.*`gpu:allocation=limit`"),
    "past the cap": (
        {"peak_reserved_bytes": 7 * GIB},
        r"child processes, extensions.*`gpu:enforce=kill`",
    ),
    "unknown where": ({"peak_reserved_bytes": None}, r"child processes, extensions"),
    "host": ({"source": "host", "cap_bytes": None}, r"on host devices a budget is a reservation"),
    "a failed process took it, too": ({"outcome": "failed"}, CONTEXT_UNKNOWN),
}


@pytest.mark.parametrize(("changes", "says"), ABOVE.values(), ids=ABOVE)
def test_memory_above_the_budget_is_explained(changes: dict[str, Any], says: str) -> None:
    report = quiet(**{"peak_process_bytes": 6 * GIB + 512 * MIB, **changes})
    (sentence,) = about(report, "above its budget")
    assert re.search(says, sentence), sentence
    assert not about(replace(report, peak_process_bytes=6 * GIB + 64 * MIB), "above its budget")


def test_a_body_that_ended_before_its_memory_was_read_says_nothing_about_tags() -> None:
    unseen = quiet(peak_live_bytes=None, peak_reserved_bytes=None, peak_process_bytes=0)
    assert tag_advice([unseen]) is None
    seen = quiet(budget_bytes=60 * GIB)
    assert tag_advice([unseen, seen]) == tag_advice([seen])


def test_the_most_useful_advice_comes_first() -> None:
    found = advise(ran_out(samples=held_at_the_peak(2.8), steps=grew(20.0 * MIB)))
    words = ("its cap", "expandable", "leak", "smaller batch")
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"busy_fraction": 0.03}, "The GPU computed for 3% of this task's time and waited"),
        ({"busy_fraction": 0.3}, ""),
        ({"busy_fraction": 0.03, "run_s": 4.0}, ""),
        # Those beside it have their turn.
        ({"busy_fraction": 0.03, "shared_with": ("other",)}, ""),
        ({"busy_fraction": 0.03, "exclusive": True}, ""),
        ({"busy_fraction": 0.03, "outcome": "died"}, ""),
        ({"busy_fraction": 0.03, "budget_bytes": 140 * GIB}, ""),
    ],
)
def test_a_process_that_leaves_its_device_idle(changes: dict[str, Any], says: str) -> None:
    found = about(quiet(**changes), "computed")
    assert [sentence[: len(says)] for sentence in found] == ([says] if says else [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Its kernels ran for 94% of the time, and used 18% of the multiprocessors"),
        ({"multiprocessors": None}, ""),
        ({"multiprocessors": 0.5}, ""),
        # Kernels that use the whole chip, for half of the time.
        ({"busy_fraction": 0.487, "multiprocessors": 0.474}, ""),
        ({"exclusive": True}, ""),
        ({"devices": (device(), device(1))}, ""),
        # It is advised otherwise.
        ({"busy_fraction": 0.2}, ""),
        ({"run_s": 4.0}, ""),
        ({"outcome": "died"}, ""),
    ],
)
def test_a_process_with_small_kernels(changes: dict[str, Any], says: str) -> None:
    found = about(
        quiet(**{"busy_fraction": 0.94, "multiprocessors": 0.18, **changes}), "multiprocessors"
    )
    assert [sentence[: len(says)] for sentence in found] == ([says] if says else [])
