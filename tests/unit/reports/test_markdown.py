from __future__ import annotations

import base64
import re
from dataclasses import fields, replace
from typing import Any, get_args
from uuid import UUID
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_gpu.reports.markdown import (
    escape,
    flow_markdown,
    flow_metadata,
    readable_size,
    suggest_budget,
    task_markdown,
)
from prefect_gpu.reports.model import BudgetSource, Mark, Outcome, Sample, Source, TaskReport
from prefect_gpu.units import GIB, MIB, parse_bytes
from tests.fakes.reports import PLACED_AT, device, flow_reports, task_report


def pictures(markdown: str) -> list[ElementTree.Element]:
    found = re.findall(r"!\[.*?\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown)
    return [ElementTree.fromstring(base64.b64decode(data)) for data in found]


def headline(report: TaskReport) -> str:
    return task_markdown(report).splitlines()[0].strip("*")


def test_metadata_has_every_field_of_the_design_as_a_short_string() -> None:
    metadata = task_report().metadata()
    assert [*metadata] == [
        "schema",
        "task_key",
        "device_uuid",
        "device_name",
        "framework",
        "outcome",
        "attempt",
        "budget_bytes",
        "budget_source",
        "peak_process_bytes",
        "peak_live_bytes",
        "peak_reserved_bytes",
        "context_bytes",
        "leaked_bytes",
        "queued_s",
        "start_s",
        "run_s",
        "samples",
        "source",
    ]
    assert all(isinstance(value, str) and len(value) < 500 for value in metadata.values())
    assert task_report(peak_live_bytes=None).metadata()["peak_live_bytes"] == "unknown"


def test_a_task_report_has_table_picture_phases_and_raw_numbers() -> None:
    report = task_report()
    text = task_markdown(report)
    assert len(pictures(text)) == 1
    assert "| Budget | **6GiB**, from its tag |" in text
    assert "| train | 9.2s | 24.0s | 2.4GiB | 3.7GiB | 4.9GiB | 4.9GiB |" in text
    assert "<details>" in text and f"| `budget_bytes` | {6 * GIB} |" in text
    assert text == task_markdown(task_report())
    assert "### Phases" not in task_markdown(replace(report, marks=()))
    assert "GPU memory" not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Completed in 41.2s: it needed 5.5GiB of its 6GiB budget (92%)."),
        ({"outcome": "oom"}, "Ran out of memory after 41.2s: it had taken 5.5GiB of its 6GiB"),
        ({"outcome": "died", "run_s": 0.0}, "Died: it had taken 5.5GiB of its 6GiB budget (92%)."),
        ({"budget_bytes": 5 * GIB}, "it took 5.5GiB, 510MiB more than its budget of 5GiB."),
        ({"budget_bytes": 99 * GIB, "budget_source": "probe"}, "with the whole device (99GiB)"),
        ({"peak_process_bytes": 0}, "no memory was seen, of a budget of 6GiB."),
    ],
    ids=["completed", "oom", "died", "over its budget", "probe", "nothing measured"],
)
def test_the_headline_says_need_against_budget(changes: dict[str, Any], says: str) -> None:
    assert says in headline(task_report(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "host"}, "host memory, resident set; not GPU memory"),
        ({"source": "simulated"}, "**simulated**"),
        ({"source": "framework"}, "plus the measured context"),
        ({"leaked_bytes": 400 * MIB}, "400MiB did not come back"),
        ({"leaked_bytes": None}, "| Leaked | cannot be told here |"),
        ({"error": "boom\nsecond line"}, "> ⚠️ boom second line"),
        ({"peak_live_bytes": None, "framework": "none"}, "unknown (framework: none)"),
        ({"devices": (device(), device(1))}, "**6GiB** on each device"),
        ({"devices": ()}, "| Device | none |"),
        ({"attempt": 2}, "completed (process 2)"),
        ({"wasted_byte_seconds": 9e12}, "100%"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_task_report_is_honest_about(changes: dict[str, Any], says: str) -> None:
    assert says in task_markdown(task_report(**changes))


def test_names_and_errors_cannot_break_the_page() -> None:
    nasty = "a|b `code` <img src=x onerror=alert(1)> [x](http://evil) **bold**\n# head _i_ me@x.org"
    report = task_report(
        task_run_name=nasty, task_name=nasty, error=nasty, marks=(Mark(9, nasty),), outcome="failed"
    )
    for text in (task_markdown(report), flow_markdown([report])):
        assert "<img" not in text and "http://" not in text and "[x](" not in text
        assert re.search(r"(?<!\\)`code", text) is None
        tables = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
        for table in tables:
            cells = [len(re.split(r"(?<!\\)\|", line)) for line in table.strip().splitlines()]
            assert len(set(cells)) == 1, table


def test_escaped_text_is_one_bounded_line() -> None:
    assert escape("x" * 500) == "x" * 79 + "…"
    assert escape("a & b_c") == r"a &amp; b\_c"
    assert escape("see https://x.org") == "see https:/&#8203;/x.org"


TEXT = st.text(max_size=40)
BYTES = st.integers(0, 2**43)
SECONDS = st.floats(0, 1e7)


@st.composite
def reports(draw: st.DrawFn) -> TaskReport:
    count = draw(st.integers(0, 3))
    times = sorted(draw(st.lists(SECONDS, max_size=12)))
    drawn: dict[str, Any] = {
        "task_name": draw(TEXT),
        "task_key": draw(TEXT),
        "task_run_name": draw(TEXT),
        "task_run_id": UUID(int=draw(st.integers(0, 5))),
        "devices": tuple(replace(device(i), name=draw(TEXT)) for i in range(count)),
        "framework": draw(TEXT),
        "outcome": draw(st.sampled_from(get_args(Outcome))),
        "budget_source": draw(st.sampled_from(get_args(BudgetSource))),
        "source": draw(st.sampled_from(get_args(Source))),
        "attempt": draw(st.integers(1, 5)),
        "samples": tuple(Sample(at, *(draw(st.none() | BYTES) for _ in range(3))) for at in times),
        "marks": tuple(Mark(at, draw(TEXT), draw(st.none() | SECONDS)) for at in times[:4]),
        "error": draw(TEXT),
        "placed_at": PLACED_AT + draw(SECONDS),
        "wasted_byte_seconds": draw(st.floats(0, 1e18)),
        "history_key": draw(st.sampled_from(["", "a"])),
    }
    for field in fields(TaskReport):
        if field.name in ("peak_live_bytes", "peak_reserved_bytes", "leaked_bytes"):
            drawn[field.name] = draw(st.none() | BYTES)
        elif field.name in ("budget_bytes", "peak_process_bytes", "context_bytes"):
            drawn[field.name] = draw(BYTES)
        elif field.name in ("queued_s", "start_s", "run_s"):
            drawn[field.name] = draw(SECONDS)
    return task_report(**drawn)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(reports(), max_size=4))
def test_any_report_renders(given_reports: list[TaskReport]) -> None:
    for report in given_reports:
        assert len(pictures(task_markdown(report))) == 1
        assert report.metadata() == report.compact().metadata()
    assert len(pictures(flow_markdown(given_reports))) == (1 if given_reports else 0)
    assert all(isinstance(value, str) for value in flow_metadata(given_reports).values())


def test_a_flow_report_calls_leaks_and_failures_out_first() -> None:
    text = flow_markdown(flow_reports(), flow_name="nightly")
    order = [
        text.index(part)
        for part in (
            "16 of 19",
            "- **Leak**",
            "- **Out of memory**",
            "![Devices",
            "### Tags",
            "### Every",
        )
    ]
    assert order == sorted(order)
    assert text.count("(process 2)") == 2
    assert len(pictures(text)) == 1
    assert "Probes account for" in text


def test_a_flow_report_advises_only_where_the_tag_does_not_fit() -> None:
    text = flow_markdown(flow_reports())
    assert "| evaluate | 5.4GiB to 140GiB, learned, probe | `gpu:memory=5.5GiB` |" in text
    assert "`gpu:memory=6.9GiB` | largest peak 6.2GiB, of a run that died |" in text
    fitting = task_report(peak_process_bytes=int(5.45 * GIB))
    assert "Nothing to change" in flow_markdown([fitting])
    alone = task_report(budget_source="probe", budget_bytes=140 * GIB)
    assert "with a device to itself; less may do" in flow_markdown([alone])
    assert "| more than 6GiB | none completed |" in flow_markdown([task_report(outcome="oom")])
    assert "Nothing to change" in flow_markdown([task_report(outcome="died")])


def test_a_probe_counts_where_its_own_history_has_nothing_better() -> None:
    probe = task_report(budget_source="probe", peak_process_bytes=13 * GIB, history_key="big")
    other = task_report(budget_source="learned", peak_process_bytes=4 * GIB, history_key="small")
    assert suggest_budget([probe, other]) == "14.5GiB"
    assert suggest_budget([replace(probe, history_key="small"), other]) == "4.4GiB"
    assert suggest_budget([]) is None


def test_a_flow_of_nothing_and_a_clean_flow_say_so() -> None:
    assert flow_markdown([]) == "**No GPU process was started.**\n"
    text = flow_markdown([task_report(source="host")])
    assert "Needs attention" not in text
    assert "1 of 1 process completed on 1 device" in text
    assert "not GPU memory" in text


def test_a_flow_of_thousands_is_cut_but_counts_all() -> None:
    many = [task_report(outcome="failed", samples=(), marks=()) for _ in range(1100)]
    text = flow_markdown(many)
    assert "… and 100 more processes, not shown." in text
    assert "… and 1050 more failures" in text


def test_a_compact_report_is_small_and_keeps_the_numbers() -> None:
    report = task_report()
    small = report.compact()
    assert len(small.samples) <= 24 and small.marks == ()
    assert small.metadata() == report.metadata()


@settings(deadline=None)
@given(st.integers(1, 2**42))
def test_a_readable_size_is_at_least_what_was_asked_and_not_much_more(size: int) -> None:
    given_bytes = parse_bytes(readable_size(size))
    assert size - 1 <= given_bytes <= max(1.1 * size, size + 32 * MIB)


@pytest.mark.parametrize(
    ("size", "text"),
    [(2.04 * GIB, "2.1GiB"), (10.1 * GIB, "10.5GiB"), (36.2 * GIB, "37GiB"), (300 * MIB, "320MiB")],
    ids=str,
)
def test_readable_sizes(size: float, text: str) -> None:
    assert readable_size(size) == text
