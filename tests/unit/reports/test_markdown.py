from __future__ import annotations

import base64
import re
from dataclasses import replace
from typing import Any, get_args
from uuid import UUID
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_gpu.measurements import COMPACT_SAMPLES, Mark, Sample, StepFacts
from prefect_gpu.reports.advice import task_tags
from prefect_gpu.reports.markdown import (
    flow_markdown,
    flow_metadata,
    task_markdown,
    task_summary,
)
from prefect_gpu.reports.model import (
    BudgetSource,
    Outcome,
    ProcessPeak,
    Source,
    TaskReport,
    UnstartedRun,
    past_run,
)
from prefect_gpu.runner.run_log import flow_summary
from prefect_gpu.scheduling.history import known_floor_bytes, learn
from prefect_gpu.scheduling.ladder import Cause
from prefect_gpu.units import GIB, MIB, parse_bytes
from tests.fakes.reports import PLACED_AT, device, flow_reports, on_node, task_report

PEAK = ProcessPeak(1, None, 9 * GIB, 6 * GIB)


def pictures(markdown: str) -> list[ElementTree.Element]:
    found = re.findall(r"!\[.*?\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown)
    return [ElementTree.fromstring(base64.b64decode(data)) for data in found]


def test_metadata_has_every_field_of_the_design_as_a_short_string() -> None:
    metadata = task_report(steps=StepFacts(40, None, 4 * GIB, 0.027, 3)).metadata()
    published = {
        "schema": "1",
        "task_key": "evaluate-1f0c9a7e",
        "device_uuid": "GPU-1a2b3c4d-7f3e-4c11-9a52-0c9d1e000000",
        "device_name": "NVIDIA H200",
        "framework": "torch",
        "outcome": "completed",
        "attempt": "1",
        "budget_bytes": "6442450944",
        "budget_source": "tag",
        "peak_process_bytes": "5903063449",
        "peak_live_bytes": "5057323991",
        "peak_reserved_bytes": "5261334937",
        "context_bytes": "641728512",
        "leaked_bytes": "0",
        "queued_s": "12.700",
        "start_s": "3.400",
        "run_s": "41.200",
        "samples": "178",
        "source": "nvml",
        # Beyond the design's.
        "cap_bytes": "none",
        "cause": "none",
        "shared_with": "none",
        "steady_live_bytes": "4294967296",
        "task_name": "evaluate",
        "qualified_name": "",
        "learn_by": "",
        "learn_by_words": "",
        "priority": "0",
        "exclusive": "False",
        "device_total_bytes": "150753352089",
        "placed_at": "1795000000.000",
        "held_s": "44.600",
        "wanted_bytes": "unknown",
        "capacity_bytes": "unknown",
        "counted_out": "True",
        "steps": "40",
        "alloc_retries": "3",
        "alike": "True",
        "step_s": "0.027",
    }
    assert metadata == published and [*metadata] == [*published]
    assert all(isinstance(value, str) and len(value) < 500 for value in metadata.values())
    many = task_report(shared_with=("n" * 200,) * 20)
    assert len(many.metadata()["shared_with"]) < 500
    assert task_report(peak_live_bytes=None).metadata()["peak_live_bytes"] == "unknown"


def test_a_task_report_has_a_table_a_chart_phases_and_raw_numbers() -> None:
    report = task_report()
    text = task_markdown(report)
    assert len(pictures(text)) == 1
    assert "| Budget | **6GiB**, from its tag |" in text
    assert "| 0 | train | 2,457.6 | 3,799.0 | 5,017.6 | 5,017.6 | 24s |" in text
    assert "| 0 | done | – | – | – | – | – |" in text
    raw = text.partition("<summary>Raw numbers, in bytes and seconds</summary>\n<pre>\n")[2]
    assert f"\nbudget_bytes: {6 * GIB}\n" in raw and raw.endswith("\n</pre>\n</details>\n")
    assert text == task_markdown(task_report())
    assert "### Phases" not in task_markdown(replace(report, marks=()))
    assert "GPU memory" not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"budget_source": "estimated", "estimated_from": "batch_size 16, 32"},
            "| Budget | **6GiB**, estimated from batch_size 16, 32 |",
        ),
        (
            {"busy_fraction": 0.31, "energy_j": 12_400.0},
            "| GPU computed | 31% of the time, 12.4kJ |",
        ),
        ({"busy_fraction": 0.31}, "| GPU computed | 31% of the time |"),
        (
            {"multiprocessors": 0.18, "tensor_cores": 0.006, "bandwidth": 0.02},
            "| Units in use | 18% of multiprocessors, 1% of tensor cores, 2% of memory bandwidth |",
        ),
        ({}, "**Completed in 41.2s: it needed 5.5GiB of its 6GiB budget (92%).**"),
        ({"outcome": "oom"}, "**Ran out of memory after 41.2s: it had taken 5.5GiB of its 6GiB"),
        (
            {"outcome": "died", "run_s": 0.0},
            "**Died: it had taken 5.5GiB of its 6GiB budget (92%).**",
        ),
        ({"budget_bytes": 5 * GIB}, "it took 5.5GiB, 510MiB more than its budget of 5GiB.**"),
        (
            {"budget_bytes": 99 * GIB, "budget_source": "probe"},
            "of the 99GiB that its device had free",
        ),
        ({"peak_process_bytes": 0}, "no memory was seen, of a budget of 6GiB.**"),
        (
            {"devices": (device(), device(1)), "budgets_bytes": (4 * GIB, 8 * GIB)},
            "it needed 5.5GiB of its 12GiB budget on 2 devices together (46%).**",
        ),
        ({"source": "host"}, "host memory, resident set; not GPU memory"),
        ({"source": "simulated"}, "**simulated**"),
        ({"source": "framework"}, "plus the measured context"),
        ({"leaked_bytes": 400 * MIB}, "400MiB did not come back"),
        ({"error": "boom\nsecond line"}, "\n\n⚠️ boom second line\n\n"),
        ({"devices": (device(), device(1))}, "**6GiB** on each device"),
        ({"devices": ()}, "| Device | none |"),
        ({"attempt": 2}, "completed (attempt 2)"),
        ({"wasted_byte_seconds": 9e12}, "100%"),
        ({"cap_bytes": 5 * GIB}, "| Cap | 5GiB, what a framework could allocate |"),
        ({"outcome": "died", "stderr_tail": "Traceback <x>"}, "<pre>\nTraceback &lt;x&gt;\n</pre>"),
        ({"learn_by": "batch_size=8"}, "| Values | batch_size=8 |"),
        ({}, "| Unused reservation | 21% |"),
        (
            {"budget_bytes": 40 * GIB},
            "| Tag for next time | `gpu:memory=6.8GiB` (live peak 4.7GiB × 1.3 + context 612MiB, rounded up) |",
        ),
        (
            {"steps": StepFacts(90, 13 * GIB, 4 * GIB, 0.027, 2)},
            "| Steps | 90 finished, up to 13GiB allocated in the first, 4GiB in steady ones, 27ms each,",
        ),
        (
            {"steps": StepFacts(90, 5 * GIB, 4 * GIB, 0.027, alike=False)},
            "| Steps | 90 finished, up to 5GiB allocated in the first, 4GiB in steady ones, which differ,",
        ),
        (
            {"snapshot_path": "/data/of|us/4f-1.pickle"},
            r"| Memory snapshot | /data/of\|us/4f-1.pickle; open it in [",
        ),
        ({"marks": (Mark(9, "for`ward | <b>", 0.5, GIB, GIB),)}, r"for\`ward \| &lt;b&gt;"),
        ({"steps": StepFacts(1)}, "| Steps | 1 finished |"),
        ({"steps": StepFacts(9, alloc_retries=2)}, "9 finished, its cache given up 2 times |"),
        (
            {"outcome": "oom", "cause": "foreign", "wanted_bytes": 7 * GIB},
            "| Out of memory put down to | other people's processes; it would have needed 7GiB |",
        ),
        (
            {"pid": 7, "processes": (PEAK, replace(PEAK, pid=7, peak_bytes=3 * GIB))},
            "| 1 | all | 9GiB | 150% |\n| 1 | 7, the task's own | 3GiB | 50% |",
        ),
        (
            {"processes": (ProcessPeak(0, 8, GIB, 6 * GIB),) * 51},
            "| 0 | 8, started by it | 1GiB | 17% |\n\n… and 1 more, not shown.",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_task_report_is_honest_about(changes: dict[str, Any], says: str) -> None:
    assert says in task_markdown(task_report(**changes))


def test_a_task_report_has_no_row_for_a_value_that_is_unknown_or_absent() -> None:
    sizes = ("cap_bytes", "leaked_bytes", "peak_live_bytes", "peak_reserved_bytes")
    text = task_markdown(task_report(context_bytes=0, **dict.fromkeys(sizes)))
    facts = text.partition("| Task run |")[2].partition("<details>")[0]
    for row in ("Cap", "Leaked", "Peak allocated", "Peak held", "Shared with", "unknown", "Memory"):
        assert row not in facts
    text = task_markdown(task_report(context_bytes=0))
    for word in ("| Context |", "| Steps |", "| Values |", "NVML |", "stderr", "Tag for next"):
        assert word not in text
    assert "Tag for next" not in task_markdown(task_report(budget_bytes=40 * GIB, next_words="x"))


def test_a_task_report_is_summed_up_in_one_line() -> None:
    report = task_report(task_run_name="eval-wide\n", outcome="oom", attempt=2)
    assert task_summary(report) == "eval-wide · attempt 2 · out of memory · 5.5GiB of 6GiB"


def test_no_notice_is_a_block_quote() -> None:
    # The v2 UI puts quotation marks around it.
    report = task_report(error="no", leaked_bytes=GIB, source="host", outcome="failed")
    for text in (task_markdown(report), flow_markdown([report])):
        assert not [line for line in text.splitlines() if line.startswith(">")]


def test_names_and_errors_cannot_break_the_page() -> None:
    nasty = "a|b `code` <img src=x onerror=alert(1)> [x](http://evil) **bold**\n# head _i_ me@x.org"
    report = task_report(
        task_run_name=nasty, task_name=nasty, error=nasty, marks=(Mark(9, nasty),), outcome="failed"
    )
    for text in (task_markdown(report), flow_markdown([report])):
        assert "<img" not in text
        # No Markdown is read in a block of HTML.
        text = re.sub(r"^<details>\n.*?^</details>\n", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "Raw numbers" not in text
        assert "http://" not in text and "[x](" not in text
        assert re.search(r"(?<!\\)`code", text) is None
        tables = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
        for table in tables:
            cells = [len(re.split(r"(?<!\\)\|", line)) for line in table.strip().splitlines()]
            assert len(set(cells)) == 1, table


def test_advice_is_a_list() -> None:
    text = task_markdown(task_report(outcome="oom", cause="own_cap"))
    advice = text.partition("### What would help\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(advice) > 1 and all(line.startswith("- ") for line in advice)


def test_the_memory_summary_of_a_framework_is_folded_and_cannot_leave_its_block() -> None:
    page = "|====|\n\n``` </pre> \x1b[31m <b>\n"
    text = task_markdown(task_report(outcome="oom", memory_summary=page))
    head = "<details>\n<summary>PyTorch's memory summary when memory ran out</summary>\n<pre>\n"
    shown = text.partition(head)[2].partition("\n</pre>\n</details>\n\n")[0].splitlines()
    assert shown == ["|====|", "``` &lt;/pre&gt; �[31m &lt;b&gt;"]
    assert text.count("\n<summary>") == 2
    assert task_markdown(task_report(outcome="oom")).count("\n<summary>") == 1


def test_memory_that_was_not_seen_is_not_said_to_be_none() -> None:
    unseen = task_report(
        peak_process_bytes=0, outcome="died", framework="none", peak_live_bytes=GIB
    )
    assert "| not seen, of 6GiB |" in flow_markdown([unseen])
    assert "| Peak allocated (live) | 1GiB |" in task_markdown(unseen)


def test_a_table_of_marks_alone_has_no_column_for_their_time() -> None:
    marks = (Mark(9, "after forward", None, 3 * MIB, 4 * MIB, 2 * GIB, 2 * GIB, 2700 * MIB),)
    text = task_markdown(task_report(marks=marks))
    assert "| peak reserved | NVML |\n" in text
    assert "| 0 | after forward | 3.0 | 4.0 | 2,048.0 | 2,048.0 | 2,700.0 |\n" in text


TEXT = st.text(max_size=40)
PHASES = TEXT | st.sampled_from(["forward", "loss", "backward", "step"])
BYTES = st.integers(0, 2**43)
SECONDS = st.floats(0, 1e7)
NO_BYTES, NO_SECONDS = st.none() | BYTES, st.none() | SECONDS
GROWTH = st.none() | st.floats(-1e12, 1e12)
STEPS = st.builds(
    StepFacts, st.integers(0, 10**6), NO_BYTES, NO_BYTES, NO_SECONDS, st.integers(0, 9), GROWTH
)
DEVICES = st.lists(TEXT, max_size=3).map(
    lambda names: tuple(replace(device(at), name=name) for at, name in enumerate(names))
)
TIMES = st.lists(SECONDS, max_size=12).map(sorted)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("task_name", "task_key", "task_run_name", "framework", "error"), TEXT),
    **dict.fromkeys(("peak_live_bytes", "peak_reserved_bytes", "leaked_bytes"), NO_BYTES),
    **dict.fromkeys(("cap_bytes", "wanted_bytes"), NO_BYTES),
    **dict.fromkeys(("budget_bytes", "peak_process_bytes", "context_bytes"), BYTES),
    **dict.fromkeys(("queued_s", "start_s", "run_s"), SECONDS),
    "task_run_id": st.integers(0, 5).map(lambda number: UUID(int=number)),
    "devices": DEVICES,
    "outcome": st.sampled_from(get_args(Outcome)),
    "budget_source": st.sampled_from(get_args(BudgetSource)),
    "source": st.sampled_from(get_args(Source)),
    "attempt": st.integers(1, 5),
    "placed_at": SECONDS.map(lambda seconds: PLACED_AT + seconds),
    "wasted_byte_seconds": st.floats(0, 1e18),
    "history_key": st.sampled_from(["", "a"]),
    "cause": st.sampled_from(["", *get_args(Cause)]),
    "steps": st.none() | STEPS,
    "capacity_bytes": st.integers(GIB, 140 * GIB),
}


@st.composite
def reports(draw: st.DrawFn) -> TaskReport:
    times = draw(TIMES)
    samples = tuple(Sample(at, *(draw(NO_BYTES) for _ in range(3))) for at in times)
    marks = tuple(
        Mark(at, draw(PHASES), draw(NO_SECONDS), *(draw(NO_BYTES) for _ in "apr"))
        for at in times[:4]
    )
    return task_report(samples=samples, marks=marks, **draw(st.fixed_dictionaries(FIELDS)))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(reports(), max_size=4))
def test_any_report_renders(given_reports: list[TaskReport]) -> None:
    texts = [flow_markdown(given_reports), *map(task_markdown, given_reports)]
    for report, text in zip(given_reports, texts[1:], strict=True):
        assert len(pictures(text)) == 1
        assert report.metadata() == report.compact().metadata()
    assert len(pictures(texts[0])) == (1 if given_reports else 0)
    if given_reports:
        advises_no_more_than_a_device_can_give(given_reports, "\n".join(texts))
    assert all(isinstance(value, str) for value in flow_metadata(given_reports).values())


def advises_no_more_than_a_device_can_give(given_reports: list[TaskReport], text: str) -> None:
    most = max(report.capacity_bytes or 0 for report in given_reports)
    for size in re.findall(r"gpu:memory=([\d.]+\w*B)", text + flow_summary({}, given_reports)):
        assert parse_bytes(size) <= most
    for tags in task_tags(given_reports):
        assert (tags.size_bytes or 0) <= most
    runs = [past_run(report) for report in given_reports]
    lesson = learn(runs)
    assert lesson is None or lesson.budget_bytes <= most
    assert known_floor_bytes(runs) <= most


def test_a_flow_report_lists_leaks_and_failures_first() -> None:
    text = flow_markdown(flow_reports(), flow_name="nightly")
    head, failure = (
        "17 task runs: 16 completed, 1 failed",
        "- **Failed**, timed out: slow-tokenizer",
    )
    parts = (head, failure, "- **Leak**", "![Devices", "### Tags", "### Every")
    assert sorted(parts, key=text.index) == [*parts]
    assert "; 19 attempts on 2 devices in " in text
    assert text.count("| completed, recovered after 1 retry |") == 2
    assert "bert" not in text.partition("![Devices")[0], "it has recovered"
    assert len(pictures(text)) == 1
    assert "First runs reserve what their device has free" in text


def test_a_flow_report_has_the_tags_to_write() -> None:
    found = flow_reports()
    assert "| evaluate |" not in flow_markdown(found), "5.4GiB were learned, and 5 are enough"
    more = {"budget_bytes": 8 * GIB}
    text = flow_markdown([replace(r, **more) if r.budget_source == "learned" else r for r in found])  # type: ignore[arg-type]
    assert "| evaluate | 8GiB to 140GiB, learned, probe | `gpu:memory=5GiB` |" in text
    assert "Nothing to change" in flow_markdown([task_report()])


def test_a_flow_report_names_the_cause_of_an_out_of_memory_error() -> None:
    ran_out = task_report(outcome="oom", cause="own_cap", wanted_bytes=7 * GIB, error="no room")
    text = flow_markdown([ran_out, task_report(task_run_id=UUID(int=2))])
    assert (
        "- **Failed**, out of memory: evaluate-resnet50, put down to its own cap; it would have "
        "needed 7GiB: no room"
    ) in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert sum(line.endswith("| its own cap |") for line in rows) == 1
    assert sum(line.endswith("| – |") for line in rows) == 1
    again = task_report(attempt=2, budget_bytes=9 * GIB)
    assert "recovered after 1 retry" in flow_markdown([ran_out, again])
    assert "| cause |" not in flow_markdown(flow_reports())


def test_a_flow_report_names_processes_that_took_more_than_they_reserved() -> None:
    text = flow_markdown([task_report(budget_bytes=5 * GIB)])
    assert "- **Above its budget**: evaluate-resnet50 took 510MiB more than its 5GiB" in text


def test_a_task_report_names_the_node() -> None:
    report = task_report(
        devices=(on_node("gpu_2", 3), on_node("gpu_2", 4)),
        processes=(ProcessPeak(3, None, GIB, 6 * GIB), ProcessPeak(4, None, GIB, 6 * GIB)),
    )
    text = task_markdown(report)
    assert r"| Device | gpu_2:3, NVIDIA H200, 140GiB; gpu_2:4, NVIDIA H200, 140GiB |" in text
    assert r"| gpu_2:4 | all | 1GiB | 17% |" in text
    assert report.metadata()["node"] == "gpu_2"
    assert "device 3" not in text
    assert "node" not in task_report(devices=()).metadata()


def test_a_flow_report_names_nodes() -> None:
    # A UUID is unique on its machine only.
    other = replace(on_node("b"), uuid=on_node("a").uuid)
    reports = [
        task_report(devices=(on_node("a"), on_node("a", 1)), outcome="died", leaked_bytes=GIB),
        task_report(devices=(other,), task_run_id=UUID(int=2)),
    ]
    text = flow_markdown(reports)
    assert "2 task runs: 1 completed, 1 crashed; 2 attempts on 3 devices of 2 nodes in" in text
    assert "**Crashed**: evaluate-resnet50 on a:0, 1" in text
    assert "did not come back after evaluate-resnet50 on a:0, NVIDIA H200" in text
    assert "| **crashed** | a:0, 1 |" in text and "| completed | b:0 |" in text
    found = flow_metadata(reports)
    assert (found["devices"], found["nodes"]) == ("3", "2")
    assert "nodes" not in flow_metadata(flow_reports())
    assert "nodes" not in flow_markdown(flow_reports())


def test_the_report_of_an_empty_or_clean_flow_says_so() -> None:
    assert flow_markdown([]) == "**No GPU task ran.**\n"
    text = flow_markdown([task_report(source="host")])
    assert "Needs attention" not in text
    assert "1 task run: 1 completed; 1 attempt on 1 device" in text
    assert "not GPU memory" in text


def test_task_runs_that_never_got_a_process_are_listed_and_counted() -> None:
    wrong = UnstartedRun(UUID(int=1), "typo|1", "failed", "PolicyError: gpu:memroy", PLACED_AT)
    late = UnstartedRun(UUID(int=2), "late", "cancelled", "the flow ended", PLACED_AT)
    # It failed, then a retry got a process.
    again = replace(wrong, task_run_id=task_report().task_run_id)
    text = flow_markdown([task_report()], [wrong, late, again])
    assert text.startswith("**3 task runs: 1 completed, 1 failed, 1 cancelled; 1 attempt on 1 ")
    assert r"- **Failed**, no process was started: typo\|1: PolicyError: gpu:memroy" in text
    assert r"| 2 | typo\|1 | **failed**, no process was started | – | – | – | – |" in text
    found = flow_metadata([task_report()], [wrong, late, again])
    assert (found["task_runs"], found["failed"], found["unstarted"]) == ("3", "1", "2")
    alone = flow_markdown([], [wrong])
    assert alone.startswith("**1 task run: 1 failed; 0 attempts.**")
    assert not pictures(alone) and "### Tags" not in alone
    assert alone.endswith("| 1 | typo\\|1 | **failed**, no process was started |\n")


def test_names_in_a_flow_report_link_to_their_task_runs() -> None:
    report = task_report(task_run_name="a]b", outcome="failed")
    text = flow_markdown([report], link=lambda task_run_id: f"http://ui/{task_run_id.int}")
    assert text.count(rf"[a\]b](http://ui/{0x5EED})") == 2


def test_the_report_of_thousands_of_processes_is_cut_but_counts_all() -> None:
    many = [
        task_report(outcome="failed", samples=(), marks=(), task_run_id=UUID(int=i))
        for i in range(1100)
    ]
    text = flow_markdown(many)
    assert "… and 800 more task runs, not shown." in text
    assert "… and 1050 more failures" in text


def test_a_compact_report_is_small() -> None:
    small = task_report().compact()
    assert len(small.samples) <= 24 and small.marks == ()


def test_the_report_of_a_flow_of_500_task_runs_is_below_500_kilobytes() -> None:
    one = task_report()

    def process(number: int, attempt: int) -> TaskReport:
        sizes = (at * number % 6 * GIB for at in range(COMPACT_SAMPLES))
        return replace(
            one,
            task_run_id=UUID(int=number),
            task_run_name=f"evaluate-{'x' * 40}-{number}",
            attempt=attempt,
            placed_at=1e9 + 12.3 * number + 700 * attempt,
            outcome="failed" if number % 5 == 0 else "completed",
            error="ValueError: the checkpoint has no weights" if number % 5 == 0 else "",
            samples=tuple(Sample(0.7 * at, size) for at, size in enumerate(sizes)),
        )

    many = [process(number, attempt) for number in range(500) for attempt in (1, 2)]
    text = flow_markdown(many, link=lambda run: f"http://127.0.0.1:4200/runs/task-run/{run}")
    assert len(text.encode()) < 500_000
    assert "500 task runs" in text
    # All that failed are in its table, and as many others as a browser shows at once.
    table = text.partition("### Every task run")[2]
    assert all(f"| {number + 1} | [evaluate-" in table for number in range(0, 500, 5))
    assert table.count("[evaluate-") == 300
    assert "… and 200 more task runs, not shown." in table


def test_a_process_that_ended_before_its_memory_was_read_is_not_the_drivers_silence() -> None:
    unread = task_report(source="framework")
    assert "The driver does not report" in flow_markdown([unread])
    assert "The driver does not report" not in flow_markdown([unread, task_report(source="nvml")])


def test_the_report_of_a_flow_says_for_how_much_of_the_time_gpus_computed() -> None:
    busy = task_report(busy_fraction=0.9, run_s=30.0, energy_j=9000.0)
    idle = task_report(busy_fraction=0.1, run_s=10.0, energy_j=500.0, task_run_id=UUID(int=2))
    unknown = task_report(task_run_id=UUID(int=3))
    text = flow_markdown([busy, idle, unknown])
    assert "**GPUs computed: 70% of the time of these tasks, 9.5kJ.**" in text
    assert "GPUs computed" not in flow_markdown([unknown])
