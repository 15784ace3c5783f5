"""Figures of reports that cannot be: above their device's memory, or not the same in two reports."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any
from uuid import UUID
from xml.etree import ElementTree

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_gpu.measurements import Sample
from prefect_gpu.reports.advice import tag_advice, tags_table, task_tags
from prefect_gpu.reports.markdown import flow_markdown, task_markdown
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.timeline import flow_gantt_svg, task_timeline_svg
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB, MIB, parse_bytes
from tests.fakes.reports import PLACED_AT, device, task_report

#: The need of a request that ran out of memory, and the refused allocation, may be of any size.
REQUESTS = re.compile(r"(would have needed|refused:) [\d.]+\w+")
SIZES = re.compile(r"[\d.]+ ?[KMGT]iB\b")

#: Sizes are rounded to a tenth, or up to a tag that reads well.
ROUNDED = 1.02


def sizes(text: str) -> list[int]:
    """Return the figures of a text in bytes; pictures have theirs checked as text of their own."""
    text = re.sub(r"\(data:image[^)]*\)", "", text)
    return [parse_bytes(size) for size in SIZES.findall(REQUESTS.sub("", text))]


def words(svg: str) -> list[str]:
    found = (e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text"))
    return ["".join(e.itertext()) for e in found]


def allowed(report: TaskReport) -> float:
    return ROUNDED * sum(each.total_bytes for each in report.devices)


class Schedule:
    """Places processes as a broker does: reservations are at most the memory of the device."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = devices
        self.now = PLACED_AT
        self.running: list[TaskReport] = []

    def place(self, report: TaskReport) -> TaskReport:
        def free(one: Device) -> int:
            held = sum(r.budget_on(one) for r in self.running if one in r.devices)
            return one.total_bytes - held

        while any(free(one) < report.budget_on(one) for one in report.devices):
            first = min(self.running, key=lambda r: r.placed_at + r.held_s)
            self.running.remove(first)
            self.now = max(self.now, first.placed_at + first.held_s)
        placed = replace(report, placed_at=self.now)
        self.running.append(placed)
        return placed


@st.composite
def flows(draw: st.DrawFn) -> list[TaskReport]:
    totals = draw(st.lists(st.sampled_from([9.5, 24, 80]), min_size=1, max_size=3))
    devices = [replace(device(at, total), name=f"{total} GiB") for at, total in enumerate(totals)]
    schedule = Schedule(devices)
    found = []
    for number in range(draw(st.integers(1, 5))):
        name, values = draw(st.sampled_from("ab")), draw(st.sampled_from(["", "n=1", "n=2"]))
        count = draw(st.integers(1, len(devices)))
        attempts = draw(st.integers(1, 3))
        for attempt in range(1, attempts + 1):
            last = attempt == attempts
            shortage = not last or draw(st.booleans())
            found.append(
                schedule.place(
                    draw(
                        processes(
                            draw(st.permutations(devices))[:count],
                            outcome="oom" if shortage else "completed",
                            cause=draw(st.sampled_from(["own_cap", "foreign"])) if shortage else "",
                            next_words="it gets more" if shortage and not last else "",
                            attempt=attempt,
                            task_name=name,
                            task_run_id=UUID(int=number),
                            history_key=values,
                            learn_by=values,
                        )
                    )
                )
            )
    return found


@st.composite
def processes(draw: st.DrawFn, devices: list[Device], **given_fields: Any) -> TaskReport:
    budgets = [draw(st.integers(256 * MIB, each.total_bytes)) for each in devices]
    shares = st.sampled_from([0, 0.3, 1])
    peaks = [int(draw(shares) * each.total_bytes) for each in devices]
    live = int(sum(peaks) * draw(st.floats(0, 1)))
    shortage = given_fields["outcome"] == "oom"
    times = sorted(draw(st.lists(st.floats(0, 30), min_size=1, max_size=4)))
    samples = [Sample(at, int(sum(peaks) * draw(st.floats(0, 1))), live, live) for at in times]
    return task_report(
        devices=tuple(devices),
        budgets_bytes=tuple(budgets),
        budget_bytes=min(budgets),
        device_peaks_bytes=tuple(peaks),
        budget_source=draw(st.sampled_from(["tag", "learned", "estimated", "probe"])),
        cap_bytes=draw(st.none() | st.just(min(budgets))),
        peak_process_bytes=sum(peaks),
        peak_live_bytes=live,
        peak_reserved_bytes=live,
        context_bytes=min(draw(st.integers(0, GIB)), sum(peaks)),
        wanted_bytes=draw(st.none() | st.integers(0, 200 * GIB)) if shortage else None,
        refused_bytes=draw(st.none() | st.integers(1, 200 * GIB)) if shortage else None,
        samples=(Sample(0.0, sum(peaks), live, live), *samples),
        start_s=draw(st.floats(0, 5)),
        run_s=draw(st.floats(0, 30)),
        marks=(),
        **given_fields,
    )


many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(flows())
def test_no_figure_of_a_task_report_is_above_the_memory_of_its_devices(
    reports: list[TaskReport],
) -> None:
    for report in reports:
        chart = words(task_timeline_svg(report))
        for text in (task_markdown(report), *chart):
            assert max(sizes(text), default=0) <= allowed(report), text


@many
@given(flows())
def test_no_figure_of_a_flow_report_is_above_the_memory_of_its_devices(
    reports: list[TaskReport],
) -> None:
    known = {one for report in reports for one in report.devices}
    most = ROUNDED * max(one.total_bytes for one in known)
    assert max(sizes(tags_table(task_tags(reports))), default=0) <= most
    for line in flow_markdown(reports).splitlines():
        assert max(sizes(line), default=0) <= ROUNDED * sum(one.total_bytes for one in known)
    compact = [report.compact() for report in reports]
    lanes = [text for text in words(flow_gantt_svg(compact)) if text.startswith("peak ")]
    in_order = [one for one in sorted(known, key=lambda one: one.index) for _ in range(2)]
    for text, one in zip(lanes, in_order, strict=True):
        assert max(sizes(text), default=0) <= ROUNDED * one.total_bytes, text


def said(reports: list[TaskReport]) -> list[str]:
    """What the last report of a task run says to write, and why."""
    text = task_markdown(reports[-1], [report.compact() for report in reports[:-1]])
    return [
        f"{write} | {why}"
        for write, why in re.findall(r"\| Tag for next time \| (.*?) \((.*)\) \|", text)
    ]


@many
@given(flows())
def test_the_advice_for_a_task_is_the_same_in_the_task_report_and_in_the_flow_report(
    reports: list[TaskReport],
) -> None:
    groups: dict[tuple[str, str], dict[UUID, list[TaskReport]]] = defaultdict(dict)
    for report in reports:
        runs = groups[report.task_name, report.learn_by]
        runs.setdefault(report.task_run_id, []).append(report)
    for runs in groups.values():
        for attempts in runs.values():
            rows = [
                " | ".join(line.strip("| ").split(" | ")[2:])
                for line in tags_table(
                    task_tags([report.compact() for report in attempts])
                ).splitlines()[2:]
                if line.startswith("|")
            ]
            assert rows == said(attempts)
        # The task run with the largest need decides. First runs on an empty device are left out.
        if any(r.budget_source == "probe" for attempts in runs.values() for r in attempts):
            continue
        found = [advice for attempts in runs.values() if (advice := tag_advice(attempts))]
        table = tags_table(task_tags([report for attempts in runs.values() for report in attempts]))
        for line in table.splitlines()[2:]:
            if line.startswith("|"):
                assert f"| {max(found, key=lambda advice: advice.rank).write} |" in line
