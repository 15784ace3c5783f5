from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.measurements import StepFacts
from prefect_gpu.reports.advice import tags_table, task_tags, teach
from prefect_gpu.reports.markdown import task_markdown
from prefect_gpu.reports.model import TaskReport, past_run, read_metadata
from prefect_gpu.runner.run_log import flow_summary
from prefect_gpu.scheduling.history import learn
from prefect_gpu.scheduling.ladder import Evidence, OomHistory, last_words, next_attempt
from prefect_gpu.units import GIB, MIB, parse_bytes, readable_size
from tests.fakes.reports import CONTEXT, device, task_report


def run(live_gib: float, **changes: Any) -> TaskReport:
    """A process of which only its live peak and the context matter."""
    live = int(live_gib * GIB)
    fields: dict[str, Any] = {
        "peak_live_bytes": live,
        "peak_reserved_bytes": live,
        "peak_process_bytes": live + CONTEXT,
        "budget_bytes": 12 * GIB,
    }
    return task_report(**{**fields, **changes})


def rows(*reports: TaskReport) -> list[str]:
    return [
        line for line in tags_table(task_tags(reports)).splitlines()[2:] if line.startswith("|")
    ]


def row(*reports: TaskReport) -> list[str]:
    """The cells of the only row: task, budget now, write, because."""
    (line,) = rows(*reports)
    return [cell.strip() for cell in line.strip("|").split("|")]


def written(*reports: TaskReport) -> str:
    """The size that the only row says to write, or its other text."""
    return re.sub(r"^`gpu:memory=([^`]*)`$", r"\1", row(*reports)[2])


def test_the_tag_to_write_is_the_budget_that_a_history_of_the_same_runs_teaches() -> None:
    runs = [run(3), run(4), run(2)]
    lesson = learn(past_run(report) for report in runs)
    assert lesson is not None
    assert written(*runs) == readable_size(lesson.budget_bytes) == "5.8GiB"


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([], id="no run"),
        pytest.param([run(3, outcome="failed")], id="a run that failed"),
    ],
)
def test_without_a_completed_run_nothing_is_learned(reports: list[TaskReport]) -> None:
    assert teach(reports) == (None, "")


PEAK = "live peak 4GiB × 1.3 + context 612MiB"
HOST = " (host devices only: the machine's memory, not a GPU's)"
NONE_HELPS = "no tag helps: it must take less"
#: Changes of a report without memory of a framework, and of one that reached its cap.
NO_FRAMEWORK: dict[str, Any] = {"peak_live_bytes": None, "peak_reserved_bytes": None}
SHORT: dict[str, Any] = {"outcome": "oom", "cause": "own_cap"}

ROWS: dict[str, tuple[list[TaskReport], str, str]] = {
    "the live peak": ([run(4)], "5.8GiB", PEAK),
    "the steady live peak if there were steps": (
        [run(13, budget_bytes=40 * GIB, steps=StepFacts(9, 13 * GIB, 4 * GIB))],
        "5.8GiB",
        f"steady {PEAK}",
    ),
    "the largest of several": ([run(2), run(4)], "5.8GiB", f"{PEAK}, of 2 processes"),
    "a run that died held more": (
        [run(2), run(4, outcome="died")],
        "5.8GiB",
        f"{PEAK}, of a run that died",
    ),
    "a small one has a margin for segments": (
        [run(0.1)],
        "800MiB",
        "live peak 102MiB + 64MiB + context 612MiB, rounded up",
    ),
    "the printed product is the tag": ([run(2, context_bytes=0)], "2.6GiB", "live peak 2GiB × 1.3"),
    "no framework reports its memory": (
        [run(4, source="host", context_bytes=0, **NO_FRAMEWORK)],
        f"`gpu:memory=6GiB`{HOST}",
        "peak 4.6GiB × 1.3",
    ),
    "less was too little": (
        [run(5, budget_bytes=6 * GIB, cap_bytes=5 * GIB, **SHORT), run(2)],
        "9GiB",
        "with less it ran out of memory or slowed down",
    ),
    "less was too little, and runs differ": (
        [run(5, budget_bytes=4 * GIB, **SHORT), run(4), run(6)],
        "12.5GiB",
        "live peak 6GiB × 1.3 × 1.50 for larger inputs + context 612MiB, rounded up, of 2 processes",
    ),
    "none completed, but its error says what it wanted": (
        [run(5, wanted_bytes=30 * GIB, **SHORT)],
        "33GiB",
        "none completed; it ran out of memory at its cap, where it would have needed 30GiB",
    ),
    "none completed, for an unknown reason": (
        [run(5, outcome="oom")],
        "more than 12GiB",
        "none completed",
    ),
    "no more than there is": ([run(120, budget_source="probe")], "100%", "live peak 120GiB"),
    "the most of several task runs": (
        [run(2), run(4, task_run_id=UUID(int=1))],
        "5.8GiB",
        f"{PEAK}; the most of 2 task runs",
    ),
    "more than a device can give": (
        [run(5, wanted_bytes=150 * GIB, **SHORT)],
        NONE_HELPS,
        "the largest device gives 140GiB",
    ),
    "no kind of devices if no tag helps": (
        [run(5, wanted_bytes=150 * GIB, source="simulated", **SHORT)],
        NONE_HELPS,
        "the largest device gives 140GiB",
    ),
    "not more than all": (
        [run(5, outcome="oom", budget_bytes=140 * GIB)],
        NONE_HELPS,
        "it ran out of memory with 140GiB",
    ),
    "memory on several devices is a tag for each": (
        [run(8, devices=(device(), device(1)), context_bytes=2 * CONTEXT)],
        "5.8GiB",
        PEAK,
    ),
}


@pytest.mark.parametrize(("reports", "write", "because"), ROWS.values(), ids=ROWS)
def test_a_row_has_the_tag_to_write_and_the_reason(
    reports: list[TaskReport], write: str, because: str
) -> None:
    assert written(*reports) == write
    assert because in row(*reports)[3]


FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "near enough": ({"budget_bytes": int(5.9 * GIB)}, True),
    "less, and it was enough": ({"budget_bytes": 5 * GIB}, True),
    "far more than it needs": ({"budget_bytes": 9 * GIB}, False),
    "less than it took": ({"budget_bytes": 4 * GIB}, False),
    "less, and its allocator gave up its cache": (
        {"budget_bytes": 5 * GIB, "steps": StepFacts(9, None, 4 * GIB, 0.1, 3)},
        False,
    ),
    "within a tenth": ({"budget_bytes": int(6.3 * GIB)}, True),
    "more than a tenth above": ({"budget_bytes": int(6.5 * GIB)}, False),
    "a learned budget within a tenth": (
        {"budget_bytes": int(6.3 * GIB), "budget_source": "learned"},
        True,
    ),
    "a learned budget further away": (
        {"budget_bytes": 5 * GIB, "budget_source": "learned"},
        False,
    ),
    "a first run": ({"budget_bytes": int(5.9 * GIB), "budget_source": "probe"}, False),
}


@pytest.mark.parametrize(("changes", "fits"), FITS.values(), ids=FITS)
def test_a_tag_that_fits_is_left_as_it_is(changes: dict[str, Any], fits: bool) -> None:
    assert ("Nothing to change" in tags_table(task_tags([run(4, **changes)]))) is fits


@pytest.mark.parametrize("changes", [{"outcome": "died"}, {"outcome": "oom", "cause": "foreign"}])
def test_a_task_of_which_nothing_is_known_is_named(changes: dict[str, Any]) -> None:
    unknown = run(4, task_name="lost", **changes)
    said = "No tag to change is known: no process of lost showed what it needs."
    assert tags_table(task_tags([unknown])) == said
    assert "lost" not in tags_table(task_tags([run(4), unknown])), "there is a table of tags"


def test_a_probe_counts_only_if_its_history_has_no_other_completed_run() -> None:
    probe = run(13, budget_source="probe", history_key="big", task_run_id=UUID(int=1))
    other = run(4, budget_source="learned", history_key="small")
    assert written(probe) == "17.5GiB"
    assert written(replace(probe, history_key="small"), other) == "5.8GiB"
    steady = replace(probe, history_key="small", steps=StepFacts(9, 13 * GIB, 5 * GIB))
    assert written(steady, other) == "7.1GiB"
    differ = replace(steady, steps=StepFacts(9, 13 * GIB, 5 * GIB, alike=False))
    assert written(differ, other) == "5.8GiB"


def test_each_set_of_learn_by_values_has_a_row_of_its_own() -> None:
    found = rows(
        run(3, history_key="a", learn_by="batch_size=8"),
        run(4, history_key="b", learn_by="batch_size=64"),
        run(5, history_key="c"),
    )
    assert [line.split(" | ")[0::2] for line in found] == [
        ["| evaluate (c)", "`gpu:memory=7.1GiB`"],
        [r"| evaluate (batch_size=64)", "`gpu:memory=5.8GiB`"],
        [r"| evaluate (batch_size=8)", "`gpu:memory=4.5GiB`"],
    ]
    assert "`task.with_options(tags=...)`" in tags_table(task_tags([run(3, history_key="a")]))


def test_what_is_written_is_never_within_a_tenth_of_what_is_there() -> None:
    # 333 MiB, written as 352: 380 is more than a tenth above the one and not above the other.
    small = run(0.25, context_bytes=0, peak_process_bytes=GIB // 4, budget_bytes=350 * MIB)
    (tags,) = task_tags([small])
    assert (tags.size_bytes, tags.fits) == (352 * MIB, True)
    (tags,) = task_tags([replace(small, budget_bytes=380 * MIB)])
    assert tags.fits


@given(st.integers(1, 2**42))
def test_a_readable_size_is_at_least_what_was_asked_and_not_much_more(size: int) -> None:
    given_bytes = parse_bytes(readable_size(size))
    assert size - 1 <= given_bytes <= max(1.1 * size, size + 32 * MIB)


def test_a_readable_size_has_two_or_three_digits() -> None:
    sizes = (2.04 * GIB, 10.1 * GIB, 36.2 * GIB, 300 * MIB)
    assert [*map(readable_size, sizes)] == ["2.1GiB", "10.5GiB", "37GiB", "320MiB"]


def of_flow_run(number: int, *reports: TaskReport) -> list[TaskReport]:
    """Reports of one flow run; a larger number is a later one."""
    return [
        replace(
            report,
            flow_run_id=UUID(int=number),
            task_run_id=UUID(int=1000 * number + at),
            placed_at=report.placed_at + 1000 * number,
        )
        for at, report in enumerate(reports)
    ]


def test_tags_of_several_flow_runs_compare_with_the_budgets_of_the_newest() -> None:
    earlier = of_flow_run(1, run(4, budget_bytes=12 * GIB), run(3, budget_bytes=12 * GIB))
    (tags,) = task_tags(earlier)
    assert (tags.fits, tags.runs, tags.budgets_bytes) == (False, 2, (12 * GIB, 12 * GIB))
    assert tags.size_bytes == parse_bytes("5.8GiB")
    assert tags.saved_bytes == 12 * GIB - parse_bytes("5.8GiB")
    assert tags.peak_bytes == 4 * GIB + CONTEXT
    (tags,) = task_tags([*earlier, *of_flow_run(2, run(2, budget_bytes=parse_bytes("5.8GiB")))])
    assert (tags.fits, tags.runs, tags.saved_bytes) == (True, 3, 0)
    assert tags.why.endswith("the most of 3 task runs")


def test_a_task_of_which_nothing_is_known_has_no_tag_to_write() -> None:
    (tags,) = task_tags([run(5, outcome="oom", cause="foreign")])
    assert (tags.write, tags.runs, tags.saved_bytes) == ("", 0, None)


@pytest.mark.parametrize(
    ("source", "only"),
    [("host", HOST), ("simulated", " (simulated devices only)"), ("nvml", ""), ("framework", "")],
)
def test_advice_says_if_it_was_not_measured_on_gpus(source: Any, only: str) -> None:
    report = run(4, source=source)
    assert row(report)[2] == f"`gpu:memory=5.8GiB`{only}"
    (tags,) = task_tags([report])
    assert (tags.write, tags.write_words) == ("`gpu:memory=5.8GiB`", f"`gpu:memory=5.8GiB`{only}")
    line = flow_summary({}, [report]).splitlines()[-1]
    assert f"write gpu:memory=5.8GiB{only} in the tag of evaluate (now" in line
    assert f"| `gpu:memory=5.8GiB`{only} (live peak" in task_markdown(report)
    short = run(5, source=source, cap_bytes=4 * GIB, **SHORT)
    assert f": write `gpu:memory=18GiB`{only}." in task_markdown(short)


def test_what_the_host_has_shown_is_no_advice_for_a_gpu() -> None:
    on_host = run(9, source="host", peak_live_bytes=None, task_run_id=UUID(int=1))
    gpu, host = task_tags([on_host, run(4)])[::-1]
    assert (gpu.device_kind, gpu.write) == ("nvml", "`gpu:memory=5.8GiB`")
    assert (host.device_kind, host.write) == ("host", "`gpu:memory=12.5GiB`")


def test_a_size_above_the_device_is_the_whole_of_it() -> None:
    (tags,) = task_tags([run(130, budget_bytes=139 * GIB)])
    assert tags.write == "`gpu:memory=100%`" and tags.size_bytes == device().total_bytes


def test_a_tag_that_is_rounded_up_is_no_more_than_a_device_gives() -> None:
    small = device(0, 8)
    given = int(7.75 * GIB)
    # 5.5 × 1.3 + the context is 7.75 GiB, a little less than what the device gives: 7.8 would be more.
    report = run(5.5, devices=(small,), budget_bytes=given, capacity_bytes=given)
    (tags,) = task_tags([report])
    assert (tags.write, tags.size_bytes) == ("`gpu:memory=100%`", given)
    assert "the largest device" not in tags.why
    (tags,) = task_tags([replace(report, peak_live_bytes=7 * GIB)])
    assert (tags.write, tags.size_bytes) == ("`gpu:memory=100%`", given)
    assert tags.why == "live peak 7GiB × 1.3 + context 612MiB; the largest device gives 7.8GiB"


def test_no_tag_helps_where_a_device_cannot_give_what_was_wanted() -> None:
    wanted = {"wanted_bytes": int(7.9 * GIB), "capacity_bytes": int(7.75 * GIB), **SHORT}
    report = run(5, devices=(device(0, 8),), budget_bytes=6 * GIB, **wanted)
    assert row(report)[2:] == [NONE_HELPS, "the largest device gives 7.8GiB"]
    # Another device of the machine does.
    assert written(replace(report, capacity_bytes=23 * GIB)) == "9GiB"


def test_a_report_and_the_end_of_a_task_run_advise_the_same() -> None:
    given = int(7.75 * GIB)
    short = {"wanted_bytes": int(7.6 * GIB), **SHORT}
    evidence = Evidence(int(7.5 * GIB), int(7.5 * GIB), wanted_bytes=GIB, held_bytes=int(6.6 * GIB))
    rung = next_attempt(OomHistory(), "own_cap", evidence, given)
    assert "write gpu:memory=100%" in last_words("own_cap", evidence, rung, given, "nvml")
    capped = run(6, budget_bytes=evidence.budget_bytes, cap_bytes=7 * GIB, capacity_bytes=given)
    assert written(replace(capped, **short)) == "100%"
    # Without a cap it had all that other programs left of the device.
    assert written(replace(capped, cap_bytes=None, **short)) == NONE_HELPS


PUBLISHED: dict[str, dict[str, Any]] = {
    "a run with a tag": {},
    "a device whose capacity is known": {"capacity_bytes": 139 * GIB},
    "a learned budget": {"budget_source": "learned", "cap_bytes": 3 * GIB},
    "steps": {"steps": StepFacts(9, 13 * GIB, 3 * GIB, 0.05, 3), "cap_bytes": 14 * GIB},
    "steps that differ": {"steps": StepFacts(9, 13 * GIB, 3 * GIB, alike=False)},
    "out of memory": {"cap_bytes": 4 * GIB, "wanted_bytes": 9 * GIB, **SHORT},
    "two devices": {"devices": (device(0), device(1, 80))},
    "no framework": NO_FRAMEWORK,
    "learn_by": {"history_key": "1f0c", "learn_by": "batch=3", "counted_out": False},
    "a probe": {"budget_source": "probe", "source": "framework"},
}


@pytest.mark.parametrize("changes", PUBLISHED.values(), ids=PUBLISHED)
def test_published_figures_give_the_same_advice_and_the_same_run(changes: dict[str, Any]) -> None:
    report = run(4, **changes)
    read = read_metadata(report.metadata(), report.task_run_id, report.flow_run_id)
    assert task_tags([read]) == task_tags([report])
    assert read.metadata() == report.metadata()
    assert past_run(read) == replace(past_run(report), ended_at=past_run(read).ended_at)


@pytest.mark.parametrize("name", ["schema", "task_name", "placed_at", "device_total_bytes"])
def test_figures_of_another_version_are_a_value_error(name: str) -> None:
    figures = {key: value for key, value in run(4).metadata().items() if key != name}
    with pytest.raises(ValueError, match="the figures of a report have"):
        read_metadata(figures, UUID(int=1), None)


def test_an_outcome_of_a_later_version_does_not_fail_the_advice() -> None:
    sizes = {"peak_live_bytes": 2 * GIB, "peak_process_bytes": 3 * GIB, "source": "nvml"}
    done, other = (
        task_report(outcome="completed", **{**sizes, "peak_live_bytes": gib * GIB})
        for gib in (2, 9)
    )
    texts = done.metadata(), {**other.metadata(), "outcome": "evicted"}
    read = [read_metadata(text, done.task_run_id, done.flow_run_id) for text in texts]
    assert task_tags(read)[0].why.endswith("of 2 processes")
