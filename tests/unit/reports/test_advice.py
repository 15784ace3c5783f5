from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.reports.advice import advise
from prefect_gpu.reports.model import Mark, Sample, StepFacts, TaskReport
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


def training(*steps: dict[str, tuple[float, float]]) -> tuple[Mark, ...]:
    """Phases of steps, each with GiB allocated at its end and at its peak."""
    marks = []
    for number, step in enumerate(steps):
        for name, (end, peak) in step.items():
            sizes = [round(x * GIB) for x in (end, peak, 4, 4)]
            marks.append(Mark(float(len(marks)), name, 0.9, *sizes, step=number))
    return tuple(marks)


def about(report: TaskReport, word: str) -> list[str]:
    return [sentence for sentence in advise(report) if word in sentence]


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
def test_there_is_no_advice_where_nothing_calls_for_any(report: TaskReport) -> None:
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
                "its device has 140GiB, so no tag helps: it must take less."
            ),
        ),
        (
            {"budget_bytes": 139 * GIB, "cap_bytes": None, "wanted_bytes": None},
            (
                "It reached its budget of 139GiB; its device has 140GiB, so no tag helps: it must take "
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
        ({"cause": "foreign"}, "Processes that are not ours took the memory that it was promised;"),
        (
            {"cause": "crowded"},
            "Tasks beside it took more than they had reserved; it had 4.6GiB of",
        ),
        (
            {"cause": "host", "outcome": "died"},
            "The machine's own memory ran out, not the device's:",
        ),
        (
            {"cause": "unknown", "outcome": "died"},
            "It was killed and nothing says why; it had 4.6GiB of its 6GiB.",
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
        "nobody knows",
    ],
)
def test_the_first_sentence_says_whose_fault_it_was(changes: dict[str, Any], first: str) -> None:
    assert advise(ran_out(**changes))[0].startswith(first)


def test_a_task_is_not_told_to_take_less_where_others_took_its_memory() -> None:
    marks = training({"forward": (3, 3), "backward": (1, 4)})
    for cause in ("foreign", "host", "unknown"):
        assert len(advise(ran_out(cause=cause, marks=marks))) == 1
    assert len(advise(ran_out(cause="crowded", marks=marks))) > 1


def test_fragmentation_is_told_from_pytorchs_own_error() -> None:
    error = "torch.OutOfMemoryError: … and 1.20 GiB is reserved by PyTorch but unallocated. If …"
    (sentence,) = about(ran_out(error=error), "expandable_segments")
    assert "1.2GiB (30% of its 4GiB)" in sentence and "max_split_size_mb=128" in sentence
    assert not about(ran_out(error=error.replace("1.20", "0.10")), "expandable_segments")
    assert not about(ran_out(error=error.replace("GiB", "bytes")), "expandable_segments")
    assert not about(ran_out(error=error, framework="tensorflow"), "expandable_segments")
    assert not about(quiet(error=error), "expandable_segments")


@pytest.mark.parametrize(
    ("live_gib", "told"),
    [(3.0, True), (3.8, False)],
    ids=["a quarter is unused", "little is unused"],
)
def test_fragmentation_is_told_from_readings_at_the_live_peak(live_gib: float, told: bool) -> None:
    samples = (
        Sample(1, None, int(live_gib * GIB), 4 * GIB),
        Sample(2, None, GIB, 4 * GIB),
        Sample(3, 5 * GIB),
    )
    assert bool(about(ran_out(samples=samples), "expandable_segments")) is told


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
def test_steady_growth_is_suspected_to_be_a_leak(
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
def test_other_growth_is_not(steps: StepFacts) -> None:
    assert advise(quiet(steps=steps)) == ()


def test_a_first_step_far_above_the_rest_is_explained() -> None:
    steps = StepFacts(90, 13 * GIB, 4 * GIB, 0.03)
    (sentence,) = about(quiet(steps=steps), "first step")
    assert "up to 13GiB allocated, later ones 4GiB" in sentence and "cudnn.benchmark" in sentence
    assert "cudnn" not in about(quiet(steps=steps, framework="jax"), "first step")[0]
    assert not about(quiet(steps=replace(steps, first_live_bytes=5 * GIB)), "first step")
    small = StepFacts(90, 130 * MIB, 40 * MIB)
    assert not about(quiet(steps=small), "first step")
    assert not about(ran_out(steps=steps), "first step")


def test_an_allocator_that_gave_up_its_cache_asks_for_more() -> None:
    steps = StepFacts(90, 4 * GIB, 4 * GIB, 0.034, 3)
    (sentence,) = advise(quiet(steps=steps))
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
        "nobody knows where",
        "host",
        "a failed one took it too",
    ],
)
def test_taking_more_than_the_budget_is_explained(changes: dict[str, Any], says: str) -> None:
    report = quiet(**{"peak_process_bytes": 6 * GIB + 512 * MIB, **changes})
    (sentence,) = about(report, "above its budget")
    assert re.search(says, sentence), sentence
    assert not about(replace(report, peak_process_bytes=6 * GIB + 64 * MIB), "above its budget")


def test_a_budget_that_is_far_too_large_names_the_tag() -> None:
    (sentence,) = advise(quiet(budget_bytes=40 * GIB))
    assert "40GiB is far more than it needs: `gpu:memory=5.8GiB` would do" in sentence
    assert "live peak 4GiB × 1.3 + context 612MiB" in sentence
    assert advise(quiet(budget_bytes=40 * GIB, budget_source="learned")) == ()
    assert advise(quiet(budget_bytes=11 * GIB)) == ()


FIRST = {"zero_grad": (0.4, 0.4), "forward": (2.4, 2.5), "loss": (2.9, 3.2), "backward": (0.8, 4.0)}


def test_the_largest_phase_is_named_with_what_came_in_it() -> None:
    report = ran_out(marks=training(FIRST))
    (sentence,) = about(report, "largest phase")
    assert "“backward” (step 0): 4GiB allocated, of which 1.1GiB (27%) came there" in sentence
    alone = ran_out(marks=training({"forward": (2, 3)}, {"forward": (2, 3)}))
    assert not about(alone, "largest phase")
    unknown = tuple(Mark(m.at_s, m.name, 1.0) for m in report.marks)
    assert not about(ran_out(marks=unknown), "largest phase")
    process = tuple(Mark(i, f"p{i}", 1.0, process_bytes=(i + 1) * GIB) for i in range(3))
    assert "“p2” (step 0): 3GiB held by the process." in about(ran_out(marks=process), "largest")[0]


def test_what_came_in_a_phase_is_not_told_across_steps_that_are_missing() -> None:
    marks = training({"forward": (1, 1)}, {"backward": (1, 4)})
    gap = (marks[0], replace(marks[1], step=7))
    assert "came there" in about(ran_out(marks=marks), "largest phase")[0]
    assert "came there" not in about(ran_out(marks=gap), "largest phase")[0]


def test_activations_are_blamed_where_the_forward_pass_leaves_much() -> None:
    (sentence,) = about(ran_out(marks=training(FIRST)), "forward pass")
    assert "leaves 2.5GiB (62% of the peak)" in sentence
    for remedy in ("find_batch_size", "accumulation", "torch.autocast", "torch.utils.checkpoint"):
        assert remedy in sentence
    other = about(ran_out(marks=training(FIRST), framework="tensorflow"), "forward pass")[0]
    assert "tf.recompute_grad" in other and "torch" not in other


def test_optimizer_states_are_blamed_where_its_step_leaves_much() -> None:
    marks = training({**FIRST, "step": (2.4, 2.6)}, FIRST)
    (sentence,) = about(ran_out(marks=marks), "8 bits")
    assert "leaves 1.6GiB (40% of the peak)" in sentence
    assert not about(ran_out(marks=training({**FIRST, "step": (1.0, 1.2)})), "8 bits")
    whole = training({"load": (0.5, 0.5), "first step": (3, 4)})
    assert not about(ran_out(marks=whole), "8 bits")


def test_what_an_optimizer_takes_for_a_moment_is_blamed_where_it_makes_the_peak() -> None:
    marks = training({"backward": (2, 3), "optimizer.step": (2.2, 4)})
    (sentence,) = about(ran_out(marks=marks), "fused")
    assert "takes 1.8GiB for a moment" in sentence
    assert not about(ran_out(marks=training({"backward": (2, 4), "step": (2.2, 3)})), "fused")


def test_advice_on_training_is_conditional_where_no_training_was_seen() -> None:
    for marks in ((), training({"load": (1, 1), "predict": (2, 4)})):
        (sentence,) = about(ran_out(marks=marks), "find_batch_size")
        assert "If it trains:" in sentence and "If it only predicts:" in sentence
    (sentence,) = about(ran_out(marks=training({"backward": (1, 4), "step": (1, 2)})), "batch")
    assert sentence.startswith("No phase stands out")


def test_the_most_useful_comes_first() -> None:
    report = ran_out(
        marks=training({**FIRST, "step": (2.4, 2.6)}, FIRST),
        error="1.20 GiB is reserved by PyTorch but unallocated",
        steps=StepFacts(100, 2 * GIB, 4 * GIB, 0.1, 0, 20.0 * MIB),
    )
    words = ("its cap", "expandable", "leak", "largest phase", "forward pass", "optimizer's step")
    found = advise(report)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
