"""SVG charts of the memory over time of a process, and of the devices of a flow run. Pure. `canvas` draws shapes."""

from __future__ import annotations

import heapq
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_gpu.measurements import Mark
from prefect_gpu.reports.canvas import (
    BUDGET,
    FRAME,
    GRID,
    LIVE,
    MUTED,
    PAPER,
    SHADE,
    Canvas,
    byte_ticks,
    clean,
    shorten,
    text_width,
    time_ticks,
)
from prefect_gpu.reports.model import OUTCOMES, TaskReport
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import MIB, format_bytes

#: Width in pixels. Prefect's v2 UI shows 580 in a window of 1280, 800 in one of 1600: wider images have too small text.
WIDTH = 720

#: Left and right end of the time axis of a flow run, in pixels.
_GANTT = 158, WIDTH - 20

PROCESS = "#3b82f6"
PROCESS_EDGE = "#2563eb"
RESERVED = "#9333ea"
REFUSED = "#dc2626"
HELD = "#94a3b8"

#: Colours of phases, in the order of their names' first occurrence, repeated cyclically.
PHASE_TINTS = ("#f59e0b", "#10b981", "#6366f1", "#ec4899", "#64748b", "#06b6d4")

#: Most devices in a chart; the devices with the most reserved memory over time are drawn.
LANE_LIMIT = 64

#: Most bars for one device and for all devices: the longest are drawn. A bar takes some 500 bytes of the artifact.
GANTT_LIMIT = 1500
BAR_LIMIT = 12_000

#: Rounding error, in seconds, of a double with seconds since the epoch, and of the sum of two.
EPOCH_PRECISION_S = 1e-6

#: Converts seconds to pixels.
_Scale: TypeAlias = Callable[[float], float]
#: Times in seconds, each with its bytes.
_Series: TypeAlias = list[tuple[float, int]]
#: The bytes of a point of a series.
_amount: Callable[[tuple[float, int]], int] = operator.itemgetter(1)

#: Largest height of the memory axis if a refused allocation is drawn, as a multiple of the height without it.
_TALLEST_REQUEST = 1.5

#: A budget above this multiple of the largest reading is written in words: to scale, it would flatten the readings.
_TALLEST_BUDGET = 3.0


def task_timeline_svg(report: TaskReport) -> str:
    """Return a chart of one process's memory over time, with its budget, phases and marks.

    The time axis starts at the placement. A chart takes about 2.6 ms (178 samples, two shared cores).
    """
    ends = (mark.at_s + (mark.duration_s or 0) for mark in report.marks)
    end_s = max(report.held_s, *ends, 0.05)
    marks = sorted(report.marks, key=lambda mark: mark.at_s)
    names = dict.fromkeys(mark.name for mark in marks if mark.duration_s is not None)
    tints = dict(zip(names, itertools.cycle(PHASE_TINTS), strict=False))
    left, right, top = 74, WIDTH - 20, 84 if marks else 62
    bottom = top + 226
    title = f"Memory of {report.task_run_name} over time"
    canvas = Canvas(WIDTH, bottom + (84 if tints else 52), title)

    process, reserved, live = (
        [(s.at_s, size) for s in report.samples if (size := getattr(s, name)) is not None]
        for name in ("process_bytes", "reserved_bytes", "live_bytes")
    )
    words = {"host": "process (resident)", "simulated": "process (simulated)"}
    lines = (
        (process, words.get(report.source, "process"), report.peak_process_bytes, PROCESS_EDGE),
        (reserved, "held by framework", report.peak_reserved_bytes, RESERVED),
        (live, "live", report.peak_live_bytes, LIVE),
    )
    budget = report.budget_total_bytes
    highest = max(max([peak or 0, *map(_amount, line)]) for line, _, peak, _ in lines)
    off_scale = highest > 0 and budget > _TALLEST_BUDGET * highest
    top_bytes: float = max(highest, 0 if off_scale else budget, MIB)
    # Room for labels, but no tick above the devices' memory.
    total = sum(device.total_bytes for device in report.devices)
    top_bytes = max(top_bytes, min(1.12 * top_bytes, total or 1.12 * top_bytes))
    refused = _refused(report)
    scale_bytes = top_bytes
    if refused is not None:
        # The refused allocation may be of any size: only the lower part of a large one is drawn.
        scale_bytes = max(top_bytes, min(1.05 * sum(refused), _TALLEST_REQUEST * top_bytes))

    def x_of(at_s: float) -> float:
        return left + (right - left) * min(1.0, max(0.0, at_s / end_s))

    def y_of(size: float) -> float:
        return bottom - (bottom - top) * min(1.0, max(0.0, size / scale_bytes))

    start_x = x_of(report.start_s)
    canvas.rect(left, top, start_x - left, bottom - top, SHADE)
    for size, label in byte_ticks(top_bytes):
        canvas.line([(left, y_of(size)), (right, y_of(size))], GRID)
        canvas.text(left - 10, y_of(size) + 4, label, fill=MUTED, anchor="end")
    _time_axis(canvas, end_s, x_of, bottom, "time since the task was placed")
    _draw_marks(canvas, marks, tints, x_of, top, bottom)

    if process:
        corners = [(process[0][0], 0), *process, (process[-1][0], 0)]
        canvas.area([(x_of(at), y_of(size)) for at, size in corners], PROCESS, 0.18)
    for line, _, _, colour in lines:
        if line:
            canvas.line([(x_of(at), y_of(size)) for at, size in line], colour, width=2)
    if process:
        peak_at, peak = max(process, key=_amount)
        canvas.dot(x_of(peak_at), y_of(peak), PROCESS_EDGE)
    else:
        text = "too short to be measured: the process ended before its first reading"
        x, y = (left + right) / 2, (top + bottom) / 2
        canvas.text(x, y, text, fill=MUTED, anchor="middle", halo=True)
    if refused is not None:
        held, request = refused
        ended_s = report.start_s + report.run_s + report.suspended_s
        x, y = min(x_of(ended_s), right - 1), y_of(held + request)
        x = max(left, x - 13)
        canvas.rect(x, y, 14, y_of(held) - y, REFUSED, stroke=REFUSED, opacity=0.15, dash="4 3")
        # Below the budget's line: the label of the line is above it.
        y = min(y_of(held) + 16, bottom - 6)
        label = f"refused: {format_bytes(request)}"
        canvas.text(x - 6, y, label, fill=REFUSED, anchor="end", bold=True, halo=True)
    for each in report.suspensions:
        x, end_x = x_of(each.begun_s), x_of(each.ended_s)
        canvas.rect(x, top, max(1.0, end_x - x), bottom - top, MUTED, opacity=0.15)
        for row, text in enumerate(("suspended", f"for {each.reason}" if each.reason else "")):
            if label := shorten(clean(text), end_x - x - 6, 12):
                middle, y = (x + end_x) / 2, (top + bottom) / 2 + 16 * row
                canvas.text(middle, y, label, size=12, fill=MUTED, anchor="middle", halo=True)
    if start_x - left > 58:
        x, y = (left + start_x) / 2, (top + bottom) / 2
        canvas.text(x, y, "starting", fill=MUTED, anchor="middle")

    times = f"{len(report.devices)} × " if len(report.devices) > 1 else ""
    text = f"budget {times}{format_bytes(report.budget_bytes)} ({report.budget_source})"
    if off_scale:
        text, y = f"▲ {text}, above this chart", float(top + 16)
    else:
        y = y_of(budget) - 7
        canvas.line([(left, y + 7), (right, y + 7)], BUDGET, width=1.5, dash="7 4")
    canvas.text(right - 8, y, text, fill=BUDGET, anchor="end", bold=True, halo=True)

    peaks = ((name, peak, colour) for line, name, peak, colour in lines if line)
    canvas.legend(((f"{n}, peak {format_bytes(p)}", colour, 0.5) for n, p, colour in peaks), 28)
    canvas.legend(((name, tint, 0.5) for name, tint in tints.items()), bottom + 62)
    return canvas.svg()


def _refused(report: TaskReport) -> tuple[int, int] | None:
    """Return the bytes held when memory ran out and the bytes of the refused allocation; `None`: none was refused."""
    if not report.refused_bytes:
        return None
    held = (s.process_bytes for s in reversed(report.samples) if s.process_bytes)
    return next(held, report.peak_process_bytes), report.refused_bytes


def _draw_marks(
    canvas: Canvas,
    marks: Sequence[Mark],
    tints: Mapping[str, str],
    x_of: _Scale,
    top: float,
    bottom: float,
) -> None:
    """Draw phases as tinted areas, other marks as vertical lines with names."""
    free_x = 0.0
    for mark in marks:
        x = x_of(mark.at_s)
        if mark.duration_s is not None:
            width = max(1.5, x_of(mark.at_s + mark.duration_s) - x)
            canvas.rect(x, top, width, bottom - top, tints[mark.name], opacity=0.13)
            canvas.rect(x, top - 5, width, 5, tints[mark.name])
            continue
        canvas.line([(x, top - 10), (x, bottom)], MUTED, dash="2 3")
        # A name that would overlap the previous one is left out.
        text = shorten(clean(mark.name), 170, 12)
        width = text_width(text, 12)
        begin_x = min(x - 4, WIDTH - 16 - width)
        if text and begin_x >= free_x:
            canvas.text(begin_x, top - 14, text, size=12)
            free_x = begin_x + width + 8


def _time_axis(canvas: Canvas, end_s: float, x_of: _Scale, y: float, title: str) -> None:
    canvas.line([(x_of(0), y), (x_of(end_s), y)], MUTED)
    for at_s, label in time_ticks(end_s):
        x = x_of(at_s)
        canvas.line([(x, y), (x, y + 5)], MUTED)
        near_edge = x > WIDTH - 50
        anchor = "end" if near_edge else "middle"
        canvas.text(WIDTH - 20 if near_edge else x, y + 19, label, fill=MUTED, anchor=anchor)
    canvas.text(WIDTH - 20, y + 38, title, size=12, fill=MUTED, anchor="end")


def flow_gantt_svg(reports: Sequence[TaskReport], numbers: Sequence[int] = ()) -> str:
    """Return a chart with a lane for each device: processes as bars over time, the device's memory below them.

    A bar spans the time in which a process held its reservation, and is filled to the process's peak. A chart of 19
    processes takes about 4 ms. `numbers`: row of each report's task run in the flow's table; empty: 1, 2, …
    """
    numbers = numbers or range(1, len(reports) + 1)
    numbered = [(i, r) for i, r in zip(numbers, reports, strict=True) if r.devices]
    start = min((report.placed_at for _, report in numbered), default=0.0)
    end_s = max((r.placed_at - start + max(r.held_s, 0.001) for _, r in numbered), default=1.0)
    by_device: dict[Device, list[tuple[int, TaskReport]]] = {}
    for each in numbered:
        for device in each[1].devices:
            by_device.setdefault(device, []).append(each)
    devices = heapq.nlargest(
        LANE_LIMIT,
        by_device,
        key=lambda device: sum(r.budget_bytes * r.held_s for _, r in by_device[device]),
    )
    devices.sort(key=lambda device: (_by_number(device.host), device.index, device.uuid))
    most = min(GANTT_LIMIT, BAR_LIMIT // max(1, len(devices)))
    (left, right), top = _GANTT, 52
    lanes = [_Lane(device, by_device[device], start, most) for device in devices]
    undrawn = sum(len(by_device[lane.device]) - len(lane.bars) for lane in lanes)
    left_out = _left_out_words(len(by_device) - len(lanes), undrawn)
    bottom = top + sum(lane.height for lane in lanes) + (0 if lanes else 40)
    title = "What ran on each device, and the memory it held"
    canvas = Canvas(WIDTH, bottom + (74 if left_out else 50), title)

    def x_of(at_s: float) -> float:
        return left + (right - left) * at_s / end_s

    for at_s, _ in time_ticks(end_s):
        canvas.line([(x_of(at_s), top - 4), (x_of(at_s), bottom)], GRID)
    y = float(top)
    for lane in lanes:
        _draw_lane(canvas, lane, x_of, y)
        y += lane.height
    if not lanes:
        words = "no process was placed on a device"
        canvas.text(WIDTH / 2, top + 24, words, fill=MUTED, anchor="middle")
    _time_axis(canvas, end_s, x_of, bottom, "time since the first process was placed")
    if left_out:
        canvas.text(WIDTH - 20, bottom + 62, left_out, size=12, fill=MUTED, anchor="end")
    outcomes = {report.outcome for _, report in numbered}
    legend = [(o.words, o.colour, 0.5) for name, o in OUTCOMES.items() if name in outcomes]
    canvas.legend([*legend, ("reserved", HELD, 0.35), ("used", PROCESS, 0.75)], 25)
    return canvas.svg()


def _by_number(name: str) -> list[str | int]:
    """Return a sort key for names: `gpu-2` comes before `gpu-10`."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def _left_out_words(devices: int, processes: int) -> str:
    """Return the count of undrawn devices and processes as text; empty: all are drawn."""
    words = []
    if devices:
        words.append(f"{devices:,} device{'' if devices == 1 else 's'} that held no more memory")
    if processes:
        words.append(f"{processes:,} shorter process{'' if processes == 1 else 'es'}")
    return f"not drawn: {' and '.join(words)}" if words else ""


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar in a device's lane: one process."""

    #: Number of the task run in the flow's table, from 1.
    number: int
    report: TaskReport
    #: Placement, in seconds since the first placement of the flow run.
    at_s: float
    #: Row of the bar in its lane, from 0.
    track: int

    @property
    def end_s(self) -> float:
        return self.at_s + max(self.report.held_s, 0.001)


class _Lane:
    """The part of a chart for one device: bars in tracks (rows without overlaps), and the device's memory over time."""

    def __init__(
        self, device: Device, numbered: Iterable[tuple[int, TaskReport]], start: float, most: int
    ) -> None:
        self.device = device
        longest = heapq.nlargest(most, numbered, key=lambda item: item[1].held_s)
        self.bars: list[_Bar] = []
        #: End, in seconds, of the last bar in each track.
        free_s: list[float] = []
        for number, report in sorted(longest, key=lambda item: (item[1].placed_at, item[0])):
            at_s = report.placed_at - start
            track = next((i for i, free in enumerate(free_s) if free <= at_s + 1e-6), len(free_s))
            bar = _Bar(number, report, at_s, track)
            free_s[track : track + 1] = [bar.end_s]
            self.bars.append(bar)
        #: Pixels from one track to the next, so that 64 tasks at once still fit a screen.
        self.pitch = max(7.0, min(24.0, 320 / len(free_s)))
        self.height = max(len(free_s) * self.pitch + 10 + 46 + 22, 112)
        self.reserved = _reserved(self.bars, device)
        self.used = _used(self.bars, device)


def _reserved(bars: Iterable[_Bar], device: Device) -> _Series:
    changes: _Series = []
    for bar in bars:
        size = bar.report.budget_on(device)
        # The next reservation may begin at the end of this reservation.
        end_s = max(bar.at_s, bar.at_s + bar.report.held_s - EPOCH_PRECISION_S)
        changes += [(bar.at_s, size), (end_s, -size)]
    # The budgets of probes (first runs) that share a device add up to more than its memory.
    return _sum_up(changes, device.total_bytes)


def _used(bars: Iterable[_Bar], device: Device) -> _Series:
    changes: _Series = []
    for bar in bars:
        report = bar.report
        points = [(s.at_s, s.process_bytes) for s in report.samples if s.process_bytes is not None]
        # A process without a reading counts with its peak.
        points = points or [(0.0, report.peak_process_bytes)]
        # Samples cover all devices of the process together.
        share = report.share_on(device)
        before = 0
        for at_s, total in points:
            size = int(total * share)
            changes.append((bar.at_s + at_s, size - before))
            before = size
        changes.append((max(bar.end_s, bar.at_s + points[-1][0]), -before))
    # A point of a compact report is the largest of several readings, so a sum of processes is an upper bound.
    return _sum_up(changes, device.total_bytes)


def _sum_up(changes: _Series, most_bytes: int) -> _Series:
    """Return the sum of all changes up to each time, at most `most_bytes`, in order of time."""
    changes = sorted(changes)
    sizes = itertools.accumulate(map(_amount, changes))
    levels = {at_s: min(size, most_bytes) for (at_s, _), size in zip(changes, sizes, strict=True)}
    return list(levels.items())


def _draw_lane(canvas: Canvas, lane: _Lane, x_of: _Scale, y: float) -> None:
    left, right = _GANTT
    canvas.line([(16, y), (right, y)], FRAME)
    _name_device(canvas, lane.device, y, left - 34)

    bar_height = lane.pitch - (3 if lane.pitch > 10 else 1)
    for bar in lane.bars:
        x = x_of(bar.at_s)
        width = max(1.5, x_of(bar.end_s) - x - 1)
        _draw_bar(canvas, bar, x, y + 10 + bar.track * lane.pitch, width, bar_height)

    floor = y + lane.height - 12
    peak_reserved, peak_used = (max(map(_amount, s), default=0) for s in (lane.reserved, lane.used))
    scale = 44 / max(peak_reserved, peak_used, 1)
    canvas.area(_stairs(lane.reserved, x_of, floor, scale), HELD, 0.35)
    canvas.area(_stairs(lane.used, x_of, floor, scale), PROCESS, 0.75)
    canvas.line([(left, floor), (right, floor)], FRAME)
    peak = f"peak reserved {format_bytes(peak_reserved)}"
    canvas.text(left - 10, floor - 15, peak, size=11, fill=MUTED, anchor="end")
    peak = f"peak used {format_bytes(peak_used)}"
    canvas.text(left - 10, floor, peak, size=11, fill=PROCESS_EDGE, anchor="end")


def _name_device(canvas: Canvas, device: Device, y: float, room: float) -> None:
    """Write a device's label and name at the left of its lane. In a cluster, a long label takes two lines."""
    total = format_bytes(device.total_bytes)
    name = clean(device.name)
    if text_width(name, 12) > room:
        name = shorten(name.removeprefix("NVIDIA "), room, 12)
    if not device.node:
        canvas.text(20, y + 22, device.label, size=14, bold=True)
        canvas.text(20 + room, y + 22, total, size=12, fill=MUTED, anchor="end")
        canvas.text(20, y + 40, name, size=12)
        canvas.text(20, y + 57, shorten(clean(device.uuid), room, 11), size=11, fill=MUTED)
        return
    label = clean(device.label)
    fit = next(n for n in range(len(label), 0, -1) if text_width(label[:n], 13) <= room)
    if len(label) > 2 * fit:
        # Names of nodes usually differ at their ends.
        label = f"{label[: fit - 1]}…{label[-fit:]}"
    for line in filter(None, (label[:fit], label[fit:])):
        canvas.text(20, y + 22, line, size=13, bold=True)
        y += 15
    canvas.text(20, y + 25, name, size=12)
    canvas.text(20, y + 39, total, size=12, fill=MUTED)


def _stairs(levels: _Series, x_of: _Scale, floor: float, scale: float) -> list[tuple[float, float]]:
    """Return the outline of the area under a stepped line, at most one step a pixel."""
    points = [(x_of(0), floor)]
    for at, group in itertools.groupby(levels, key=lambda level: round(x_of(level[0]))):
        steps = [size for _, size in group]
        # A pixel shows its largest value, which keeps all peaks; the next pixel begins with the last value.
        for x, size in ((at, max(steps)), (at + 1, steps[-1])):
            y = floor - scale * max(0, size)
            if y != points[-1][1]:
                points += [(x, points[-1][1]), (x, y)]
    return [*points, (points[-1][0], floor)]


def _draw_bar(canvas: Canvas, bar: _Bar, x: float, y: float, width: float, height: float) -> None:
    report, number = bar.report, bar.number
    outcome = OUTCOMES[report.outcome]
    colour = outcome.colour
    if width < 6:
        canvas.rect(x, y, width, height, colour, opacity=0.8)
        return
    canvas.rect(x, y, width, height, colour, opacity=0.22, stroke=colour, radius=2)
    filled = height * min(1.0, report.peak_process_bytes / max(1, report.budget_total_bytes))
    if height >= 12:
        canvas.rect(x, y + height - filled, width, filled, colour, opacity=0.25)
    for each in report.suspensions:
        share = width / max(report.held_s, 0.001)
        x_away, away = x + share * each.begun_s, max(1.0, share * each.seconds)
        # Background colour: the suspended process's memory is not on the device.
        canvas.rect(x_away, y + 1, away, height - 2, PAPER)
        canvas.rect(x_away, y + 1, away, height - 2, MUTED, opacity=0.2)
    if height < 12:
        return
    name = clean(report.task_run_name)
    if report.attempt > 1:
        name += f" (attempt {report.attempt})"
    words = "" if report.outcome == "completed" else f" – {outcome.words}"
    for label in (f"{number}  {name}{words}", f"{number}{words}", f"{number}"):
        if text_width(label, 12) <= width - 8:
            canvas.text(x + 4, y + height / 2 + 4, label, size=12)
            return
