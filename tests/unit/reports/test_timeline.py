from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.measurements import Mark, Suspension
from prefect_gpu.reports.canvas import (
    MUTED,
    byte_ticks,
    shorten,
    text_width,
    time_label,
    time_ticks,
)
from prefect_gpu.reports.model import CAUSE_WORDS, OUTCOME_WORDS
from prefect_gpu.reports.timeline import (
    BAR_LIMIT,
    LANE_LIMIT,
    PHASE_TINTS,
    flow_gantt_svg,
    task_timeline_svg,
)
from prefect_gpu.scheduling.ladder import Cause
from prefect_gpu.units import GIB, KIB, MIB
from tests.fakes.reports import PLACED_AT, device, flow_reports, on_node, task_report

NASTY = '<script>alert("x")</script> & `|` \x00\x1b \ud800 評価'


def words(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [e for e in root.iter() if e.tag.endswith("script")]
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]


def height(svg: str) -> float:
    return float(ElementTree.fromstring(svg).attrib["height"])


def numbers_are_on_paper(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for e in root.iter():
        if e.tag.endswith(("text", "rect")):
            assert 0 <= float(e.attrib["x"]) <= width, e.attrib
            assert 0 <= float(e.attrib["y"]) <= height, e.attrib
        if e.tag.endswith("rect"):
            assert float(e.attrib["x"]) + float(e.attrib["width"]) <= width + 1
            assert float(e.attrib["y"]) + float(e.attrib["height"]) <= height


def test_a_timeline_shows_peaks_budget_marks_and_units() -> None:
    svg = task_timeline_svg(task_report())
    peaks = ("process, peak 5.5GiB", "held by framework, peak 4.9GiB", "live, peak 4.7GiB")
    others = ("budget 6GiB (tag)", "load weights", "train", "done", "4 GiB", "20 s")
    assert {*peaks, *others} <= {*words(svg)}
    numbers_are_on_paper(svg)
    assert svg == task_timeline_svg(task_report())


LABELS: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": (
        {"samples": (), "marks": (), "peak_process_bytes": 0},
        "too short to be measured",
    ),
    "a budget off the scale": (
        {"budget_bytes": 139 * GIB, "budget_source": "probe"},
        "▲ budget 139GiB (probe), above",
    ),
    "a slow start": ({"start_s": 20.0}, "starting"),
    "host memory": ({"source": "host"}, "process (resident), peak"),
    "simulated": ({"source": "simulated"}, "process (simulated), peak"),
    "two devices": ({"devices": (device(), device(1))}, "budget 2 × 6GiB (tag)"),
}


@pytest.mark.parametrize(("changes", "says"), LABELS.values(), ids=LABELS)
def test_a_timeline_labels_its_numbers(changes: dict[str, Any], says: str) -> None:
    assert any(says in text for text in words(task_timeline_svg(task_report(**changes))))


def test_user_text_cannot_break_out_of_a_chart() -> None:
    report = task_report(task_run_name=NASTY, marks=(Mark(9, NASTY),), devices=(device(),))
    assert "<script" not in task_timeline_svg(report)
    assert any("script" in text for text in words(task_timeline_svg(report)))
    words(flow_gantt_svg([report]))


def test_marks_whose_name_would_overlap_keep_their_line() -> None:
    crowd = tuple(Mark(10 + i / 100, f"step {i:04d}") for i in range(30))
    report = task_report(
        marks=(*crowd, Mark(44.5, "a name of some length at the end"), Mark(5, ""))
    )
    svg = task_timeline_svg(report)
    assert [text for text in words(svg) if text.startswith("step")] == ["step 0000"]
    assert any("some length" in text for text in words(svg))
    assert svg.count('stroke-dasharray="2 3"') == 32
    numbers_are_on_paper(svg)


def training(steps: int) -> tuple[Mark, ...]:
    """Steps of three phases, of which the second is the longest."""
    names = (("forward", 0.1), ("backward", 0.5), ("step", 0.05))
    return tuple(
        Mark(4 + i + j * 0.2, name, took, step=i)
        for i in range(steps)
        for j, (name, took) in enumerate(names)
    )


def test_phases_are_bands_with_one_colour_for_each_name() -> None:
    svg = task_timeline_svg(task_report(marks=(*training(4), Mark(9, "done"))))
    rects = [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("rect")]
    bands = [e for e in rects if e.attrib["fill"] in PHASE_TINTS]
    labels = [text for text in words(svg) if text in ("forward", "backward", "step")]
    assert labels == ["forward", "backward", "step"], "each name is in the legend once"
    assert len(bands) == 2 * 12 + len(labels)
    assert len({e.attrib["fill"] for e in bands}) == 3
    numbers_are_on_paper(svg)


def test_a_legend_without_room_counts_the_rest() -> None:
    phases = tuple(Mark(4 + i, f"phase number {i}", 0.5) for i in range(20))
    svg = task_timeline_svg(task_report(marks=phases))
    named = [text for text in words(svg) if text.startswith("phase number")]
    assert 2 <= len(named) < 20
    assert f"+ {20 - len(named)}" in words(svg)
    numbers_are_on_paper(svg)


def test_every_cause_has_its_words() -> None:
    assert {*CAUSE_WORDS} == {*get_args(Cause)}


def test_charts_show_for_what_a_process_was_suspended() -> None:
    away = Suspension(2.0, 62.0, 1.5, 0.5, 8 * GIB, "task 'urgent'")
    report = task_report(run_s=10.0, suspensions=(away,))
    area = f'fill="{MUTED}" fill-opacity'
    for svg in (task_timeline_svg(report), flow_gantt_svg([report])):
        numbers_are_on_paper(svg)
        assert svg.count(area) == 1
    assert {"suspended", "for task 'urgent'"} <= {*words(task_timeline_svg(report))}
    # Without room for the words there is the area alone.
    short = task_report(run_s=10_000.0, suspensions=(away,))
    assert "suspended" not in words(task_timeline_svg(short))


def test_a_gantt_chart_names_devices_and_outcomes() -> None:
    svg = flow_gantt_svg(flow_reports())
    found = words(svg)
    assert {"device 0", "device 1", "NVIDIA H200", "140GiB", "out of memory", "died"} <= {*found}
    numbers_are_on_paper(svg)
    assert svg == flow_gantt_svg(flow_reports())


def test_a_gantt_chart_without_processes_says_so() -> None:
    assert "no process was placed on a device" in words(flow_gantt_svg([]))
    assert "no process was placed on a device" in words(flow_gantt_svg([task_report(devices=())]))


def test_a_gantt_chart_stacks_bars_that_overlap_and_reuses_tracks() -> None:
    apart = flow_gantt_svg([task_report(placed_at=PLACED_AT + i * 100) for i in range(5)])
    at_once = flow_gantt_svg([task_report(placed_at=PLACED_AT + i) for i in range(5)])
    assert height(at_once) > height(apart)


def test_a_gantt_chart_of_thousands_of_processes_stays_small() -> None:
    one = task_report().compact()
    crowd = [replace(one, placed_at=PLACED_AT + i / 10, task_run_name=f"t{i}") for i in range(1600)]
    svg = flow_gantt_svg(crowd)
    words(svg)
    assert svg.count("<rect") < 1520 and height(svg) < 4000


def test_a_gantt_chart_has_a_lane_for_each_device_of_each_node_in_order() -> None:
    devices = [on_node(name, i) for name in ("gpu-10", "gpu-2", "head") for i in (1, 0)]
    svg = flow_gantt_svg([task_report(devices=(each,)) for each in devices])
    labels = [text for text in words(svg) if ":" in text]
    assert labels == [f"{name}:{i}" for name in ("gpu-2", "gpu-10", "head") for i in (0, 1)]
    assert not any(text.startswith(("device", "not drawn")) for text in words(svg))
    numbers_are_on_paper(svg)


def test_the_label_of_a_lane_keeps_the_end_of_a_long_name() -> None:
    def label(node: str) -> list[str]:
        found = words(flow_gantt_svg([task_report(devices=(on_node(node, 7),))]))
        return found[: found.index("NVIDIA H200")]

    assert "".join(label("ip-10-0-12-34.ec2")) == "ip-10-0-12-34.ec2:7"
    first, second = label("ray-" + "gpu-worker-" * 20 + "x7k2p")
    assert first.startswith("ray-gpu") and first.endswith("…")
    assert second.endswith("worker-x7k2p:7")


def test_a_gantt_chart_of_many_nodes_says_what_it_leaves_out() -> None:
    one = task_report().compact()
    devices = [on_node(f"n{node}", i) for node in range(1000) for i in range(8)]
    reports = [replace(one, devices=(each,)) for each in devices]
    # The longest is drawn.
    reports[-1] = replace(reports[-1], run_s=100.0)
    svg = flow_gantt_svg(reports)
    assert f"not drawn: {8000 - LANE_LIMIT:,} devices that held no more memory" in words(svg)
    assert "n999:7" in words(svg)
    assert len(svg) < 200_000
    numbers_are_on_paper(svg)
    assert height(svg) < 120 * LANE_LIMIT


def test_the_bars_of_many_devices_are_limited_together() -> None:
    one = replace(task_report().compact(), samples=())
    most = BAR_LIMIT // LANE_LIMIT
    reports = [
        replace(one, devices=(on_node(f"n{node}", 0),), placed_at=PLACED_AT + i * 50)
        for node in range(LANE_LIMIT)
        for i in range(most + 1)
    ]
    svg = flow_gantt_svg(reports)
    assert f"not drawn: {LANE_LIMIT} shorter processes" in words(svg)


def test_every_outcome_has_words_and_a_colour() -> None:
    reports = [
        task_report(outcome=outcome, placed_at=PLACED_AT + 60 * i, samples=())
        for i, outcome in enumerate(OUTCOME_WORDS)
    ]
    found = words(flow_gantt_svg(reports))
    assert {*OUTCOME_WORDS.values()} <= {*found}


@given(st.floats(1, 2**44))
def test_byte_ticks_are_few_round_and_within(top_bytes: float) -> None:
    ticks = byte_ticks(top_bytes)
    assert 1 <= len(ticks) <= 12
    assert ticks[0] == (0, "0")
    assert ticks[-1][0] <= top_bytes * 1.001


@given(st.floats(0.05, 1e9))
def test_time_ticks_are_few_and_within(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 1 <= len(ticks) <= 18
    assert ticks[-1][0] <= end_s * 1.001


def test_labels_of_an_axis_are_short_and_name_the_unit_that_fits() -> None:
    assert [*map(time_label, (0, 2.5, 90, 7500))] == ["0", "2.5 s", "1:30 min", "2:05 h"]
    assert byte_ticks(6 * GIB)[-1][1] == "6 GiB"
    assert byte_ticks(300 * MIB)[1][1] == "100 MiB"
    assert byte_ticks(10 * KIB)[-1][1] == "10 KiB"


def test_text_is_measured_and_cut() -> None:
    assert text_width("評", 10) > text_width("a", 10)
    assert shorten("evaluate", 1000, 11) == "evaluate"
    assert shorten("evaluate-resnet50", 70, 11).endswith("…")
    assert shorten("evaluate-resnet50", 12, 11) == ""
