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


def about(report: TaskReport, word: str) -> list[str]:
    return [sentence for sentence in advice(report) if word in sentence]


def advice(report: TaskReport) -> tuple[str, ...]:
    return advise(report, tag_advice([report]))


@pytest.mark.parametrize(
    "report",
    [
        quiet(),
        quiet(outcome="failed", error="ValueError: no"),
        quiet(outcome="timeout"),
        quiet(outcome="cancelled"),
        quiet(outcome="died"),
        quiet(peak_live_bytes=None, peak_reserved_bytes=None, framework="none", source="host"),
        quiet(budget_source="probe", budget_bytes=140 * GIB),
        quiet(steps=StepFacts(90, 4 * GIB, 4 * GIB, 0.03, 0, 1000.0)),
        quiet(steps=StepFacts(1)),
    ],
    ids=[
        "completed within its budget",
        "an error that is not about memory",
        "timed out",
        "cancelled",
        "died",
        "nothing is known of its memory",
        "a probe has a whole device on purpose",
        "what grows are numbers, not graphs",
        "one step",
    ],
)
def test_a_report_without_a_reason_gets_no_advice(report: TaskReport) -> None:
    assert advise(report) == ()


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (
            {},
            (
                "It reached its cap of 5.4GiB, of a budget of 6GiB, and would have needed 7GiB in all: "
                "write `gpu:memory=9GiB`."
            ),
        ),
        (
            {"wanted_bytes": 20 * GIB},
            (
                "It reached its cap of 5.4GiB, of a budget of 6GiB, and would have needed 20GiB in all: "
                "write `gpu:memory=22GiB`."
            ),
        ),
        (
            {"wanted_bytes": None, "cap_bytes": None},
            "It reached its budget of 6GiB: write `gpu:memory=9GiB`.",
        ),
        (
            {"peak_process_bytes": 8 * GIB, "wanted_bytes": None},
            "It took 8GiB, more than its budget of 6GiB: write `gpu:memory=9GiB`.",
        ),
        (
            {"wanted_bytes": 150 * GIB},
            (
                "It reached its cap of 5.4GiB, of a budget of 6GiB, and would have needed 150GiB in all; "
                "the largest device gives 140GiB, so no tag helps: it must take less."
            ),
        ),
        (
            {"budget_bytes": 139 * GIB, "cap_bytes": None, "wanted_bytes": None},
            (
                "It reached its budget of 139GiB; the largest device gives 140GiB, so no tag helps: it must take "
                "less."
            ),
        ),
        (
            {"budget_bytes": 100 * GIB, "cap_bytes": None, "wanted_bytes": None},
            "It reached its budget of 100GiB: write `gpu:memory=100%`.",
        ),
        (
            {"devices": (device(), device(1)), "wanted_bytes": None, "cap_bytes": None},
            "It reached its budget of 6GiB on each device: write `gpu:memory=9GiB`.",
        ),
        (
            {"cause": "foreign"},
            "Processes outside prefect_gpu took the memory that was reserved for it;",
        ),
        (
            {"cause": "crowded"},
            "Tasks on the same device took more than they had reserved; it used 4.6GiB of",
        ),
        (
            {"cause": "host", "outcome": "died"},
            "The machine's own memory, or that of its container or job",
        ),
        (
            {"cause": "unknown", "outcome": "died"},
            "It was killed for an unknown reason; it used 4.6GiB of its 6GiB.",
        ),
    ],
    ids=[
        "half more, where that is more than it wanted",
        "what it wanted and a little",
        "its error does not say, and there was no cap",
        "the process as a whole passed its budget",
        "more than there is",
        "it had all there is",
        "the whole device is left to try",
        "several devices",
        "others took it",
        "ours took it",
        "the machine's memory",
        "unknown",
    ],
)
def test_the_first_sentence_names_the_cause(changes: dict[str, Any], first: str) -> None:
    assert advice(ran_out(**changes))[0].startswith(first)


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
    return (
        Sample(1, None, int(live_gib * GIB), 4 * GIB),
        Sample(2, None, GIB, 4 * GIB),
        Sample(3, 5 * GIB),
    )


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


@pytest.mark.parametrize(
    ("steps", "changes", "says"),
    [
        (
            StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 20.0 * MIB),
            {},
            r"grew by 20MiB a step over 100 steps.*`loss\.item\(\)`.* 71 more steps fit\.",
        ),
        (
            StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 1.3 * GIB),
            {"framework": "jax"},
            r"`float\(loss\)`\. At this rate 1 more step fits\.",
        ),
        (
            StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 20.0 * MIB),
            {"outcome": "oom", "cause": "own_cap"},
            r"looks like a leak.*\.detach\(\)`\.$",
        ),
        (
            StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 20.0 * MIB),
            {"cap_bytes": None, "budget_source": "probe"},
            r"71 more steps fit",
        ),
    ],
    ids=["completed", "one more", "out of memory", "without a cap the budget is the limit"],
)
def test_steady_growth_from_step_to_step_is_reported_as_a_leak(
    steps: StepFacts, changes: dict[str, Any], says: str
) -> None:
    (sentence,) = about(quiet(steps=steps, **changes), "leak")
    assert re.search(says, sentence), sentence


@pytest.mark.parametrize(
    "steps",
    [
        StepFacts(3, GIB, 4 * GIB, 0.1, 0, 500.0 * MIB),
        StepFacts(100, GIB, 4 * GIB, 0.1, 0, 0.5 * MIB),
        StepFacts(20, GIB, 4 * GIB, 0.1, 0, 2.0 * MIB),
        StepFacts(100, GIB, 4 * GIB, 0.1, 0, None),
        StepFacts(100, GIB, 4 * GIB, 0.1, 0, -20.0 * MIB),
    ],
    ids=["too few steps", "too little a step", "too little in all", "unknown", "it shrinks"],
)
def test_small_or_unknown_growth_is_not_reported_as_a_leak(steps: StepFacts) -> None:
    assert advise(quiet(steps=steps)) == ()


def test_an_allocator_that_gave_up_its_cache_is_advised_a_larger_tag() -> None:
    steps = StepFacts(90, 4 * GIB, 4 * GIB, 0.034, 3)
    (sentence,) = advice(quiet(steps=steps))
    assert "3 times after the first step" in sentence and "34ms" in sentence
    assert "`gpu:memory=7.5GiB`" in sentence
    assert advise(quiet(steps=steps, cap_bytes=None)) == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            r"^First run: it took 512MiB above its budget of 6GiB, since its context was not known",
        ),
        ({"cap_bytes": None}, r"no framework was capped.*`gpu:allocation=limit`"),
        ({"peak_reserved_bytes": 7 * GIB}, r"child processes, extensions.*`gpu:enforce=kill`"),
        ({"peak_reserved_bytes": None}, r"child processes, extensions"),
        ({"source": "host", "cap_bytes": None}, r"on host devices a budget is a reservation"),
        ({"outcome": "failed"}, r"^First run: it took 512MiB"),
    ],
    ids=[
        "context",
        "no cap",
        "past the cap",
        "unknown where",
        "host",
        "a failed one took it too",
    ],
)
def test_memory_above_the_budget_is_explained(changes: dict[str, Any], says: str) -> None:
    report = quiet(**{"peak_process_bytes": 6 * GIB + 512 * MIB, **changes})
    (sentence,) = about(report, "above its budget")
    assert re.search(says, sentence), sentence
    assert not about(replace(report, peak_process_bytes=6 * GIB + 64 * MIB), "above its budget")


def test_a_budget_that_is_far_too_large_names_the_tag() -> None:
    tag = tag_advice([quiet(budget_bytes=40 * GIB)])
    assert tag is not None and tag.write == "`gpu:memory=5.8GiB`" and not tag.fits
    assert tag.why == "live peak 4GiB × 1.3 + context 612MiB"
    assert (fit := tag_advice([quiet()])) is not None and fit.fits


def test_a_body_that_ended_before_its_memory_was_read_says_nothing_about_tags() -> None:
    unseen = quiet(peak_live_bytes=None, peak_reserved_bytes=None, peak_process_bytes=0)
    assert tag_advice([unseen]) is None
    seen = quiet(budget_bytes=60 * GIB)
    assert tag_advice([unseen, seen]) == tag_advice([seen])


def test_an_attempt_that_is_followed_by_another_gives_no_tag() -> None:
    first = advice(ran_out(next_words="6GiB were not enough; it gets 9GiB"))[0]
    assert first == (
        "It reached its cap of 5.4GiB, of a budget of 6GiB, and would have needed 7GiB in all. The "
        "task run has another attempt: 6GiB were not enough; it gets 9GiB."
    )


def test_the_most_useful_advice_comes_first() -> None:
    report = ran_out(
        samples=held_at_the_peak(2.8), steps=StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 20.0 * MIB)
    )
    words = ("its cap", "expandable", "leak", "smaller batch")
    found = advise(report)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
