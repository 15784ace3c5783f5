"""Memory over time as SVG: of one process, and of a flow run's devices.

It covers drawing. What the numbers mean is told by `markdown`, shapes and axes are in `canvas`.
Both functions are pure: the same report gives the same text.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from prefect_gpu.reports.canvas import (
    GRID,
    MUTED,
    Canvas,
    byte_ticks,
    clean,
    shorten,
    text_width,
    time_ticks,
)
from prefect_gpu.reports.model import Mark, Outcome, Sample, TaskReport
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import MIB, format_bytes, format_seconds

#: The v2 UI's column is 580 pixels in a window of 1280 and 800 in one of 1600; a wider image would
#: be scaled down until its text cannot be read.
WIDTH = 720

PROCESS = "#3b82f6"
PROCESS_EDGE = "#2563eb"
LIVE = "#0f766e"
RESERVED = "#9333ea"
BUDGET = "#b45309"

#: One colour an outcome. Told apart with the common kinds of colour blindness too; bars also say
#: any outcome but "completed" in words.
OUTCOME_COLOURS: Mapping[Outcome, str] = {
    "completed": "#3b82f6",
    "failed": "#d97706",
    "oom": "#dc2626",
    "died": "#475569",
    "timeout": "#a855f7",
    "cancelled": "#9ca3af",
}

OUTCOME_WORDS: Mapping[Outcome, str] = {
    "completed": "completed",
    "failed": "failed",
    "oom": "out of memory",
    "died": "died",
    "timeout": "timed out",
    "cancelled": "cancelled",
}

#: Tints of phases, one a name in the order of their coming, then from the first again. Pale enough
#: to leave the lines above them readable.
PHASE_TINTS = ("#f59e0b", "#10b981", "#6366f1", "#ec4899", "#64748b", "#06b6d4")

#: Bars drawn one by one; a flow of more shows its longest.
GANTT_LIMIT = 1500

#: A budget this many times above all readings would press them flat: it is then told in words.
_TALLEST_BUDGET = 3.0


def outline(
    samples: Sequence[Sample], value: Callable[[Sample], int | None], buckets: int
) -> list[tuple[float, int]]:
    """Give a series as points for a line, keeping the extremes of each stretch of time.

    Args:
        samples: In order of time.
        value: Reads one number; `None` leaves the point out.
        buckets: Stretches; each gives at most two points, its smallest and its largest reading.
    """
    points = [(s.at_s, v) for s in samples if (v := value(s)) is not None]
    if len(points) <= 2 * buckets:
        return points
    size = -(-len(points) // buckets)
    kept = [points[0]]
    for i in range(0, len(points), size):
        group = points[i : i + size]
        kept += sorted({min(group, key=_amount), max(group, key=_amount)})
    kept.append(points[-1])
    return kept


def _amount(point: tuple[float, int]) -> int:
    return point[1]


def task_timeline_svg(report: TaskReport) -> str:
    """Draw one process's memory over time, with its budget and its phase marks.

    Takes about 2.6 ms (178 samples, two shared cores). The time axis starts when the task was placed.
    """
    marks = sorted(report.marks, key=lambda mark: mark.at_s)
    left, right = 74, WIDTH - 20
    rows, spots = _place_marks(marks, _end_s(report), left, right)
    top = 62 + 17 * rows
    bottom = top + 226
    height = bottom + 52
    canvas = Canvas(WIDTH, height, f"Memory of {report.task_run_name} over time")

    series = (
        ("process", PROCESS_EDGE, outline(report.samples, lambda s: s.process_bytes, 300)),
        ("frameworks held", RESERVED, outline(report.samples, lambda s: s.reserved_bytes, 300)),
        ("live", LIVE, outline(report.samples, lambda s: s.live_bytes, 300)),
    )
    peaks = (report.peak_process_bytes, report.peak_reserved_bytes, report.peak_live_bytes)
    budget = report.budget_total_bytes
    highest = max([*(peak or 0 for peak in peaks), *(v for _, _, line in series for _, v in line)])
    off_scale = highest > 0 and budget > _TALLEST_BUDGET * highest
    top_bytes = 1.12 * max(highest, 0 if off_scale else budget, MIB)

    def x_of(at_s: float) -> float:
        return left + (right - left) * min(1.0, max(0.0, at_s / _end_s(report)))

    def y_of(size: float) -> float:
        return bottom - (bottom - top) * min(1.0, max(0.0, size / top_bytes))

    start_x = x_of(report.start_s)
    if report.start_s > 0:
        canvas.rect(left, top, start_x - left, bottom - top, "#f3f4f6")
    for size, label in byte_ticks(top_bytes):
        canvas.path([(left, y_of(size)), (right, y_of(size))], stroke=GRID, width=1)
        canvas.text(left - 10, y_of(size) + 4, label, fill=MUTED, anchor="end")
    _time_axis(canvas, _end_s(report), x_of, bottom, "time since the task was placed")

    _draw_bands(canvas, marks, x_of, top, bottom)
    process = series[0][2]
    if process:
        ends = [(process[0][0], 0), *process, (process[-1][0], 0)]
        area = [(x_of(at), y_of(size)) for at, size in ends]
        canvas.path(area, fill=PROCESS, opacity=0.18)
    for (_, colour, line), width in zip(series, (2, 1.5, 2), strict=True):
        if line:
            canvas.path([(x_of(t), y_of(v)) for t, v in line], stroke=colour, width=width)
    if process:
        peak_at, peak = max(process, key=_amount)
        canvas.dot(x_of(peak_at), y_of(peak), PROCESS_EDGE)
    else:
        canvas.text(
            (left + right) / 2,
            (top + bottom) / 2,
            "too short to be measured: the process ended before its first reading",
            fill=MUTED,
            anchor="middle",
            halo=True,
        )
    if start_x - left > 58:
        x, y = (left + start_x) / 2, (top + bottom) / 2
        canvas.text(x, y, "starting", fill=MUTED, anchor="middle")

    for spot, mark in zip(spots, marks, strict=True):
        spot_y = 62 + 17 * spot.row - 10 if spot.text else top
        # A phase has its band; of its line only what leads to its name is left.
        end_y = bottom if mark.duration_s is None else top
        if spot_y < end_y:
            canvas.path([(spot.x, spot_y), (spot.x, end_y)], stroke=MUTED, width=1, dash="2 3")
    # Above all lines, so that the line of a later mark does not run through an earlier spot.
    for spot in spots:
        if spot.text:
            x = spot.x + (4 if spot.anchor == "start" else -4)
            canvas.text(x, 62 + 17 * spot.row, spot.text, size=12, anchor=spot.anchor, halo=True)

    words = f"budget {_budget_words(report)}"
    if off_scale:
        canvas.text(
            right - 8,
            top + 16,
            f"▲ {words}, above this chart",
            fill=BUDGET,
            anchor="end",
            halo=True,
        )
    else:
        y = y_of(budget)
        canvas.path([(left, y), (right, y)], stroke=BUDGET, width=1.5, dash="7 4")
        canvas.text(right - 8, y - 7, words, fill=BUDGET, anchor="end", bold=True, halo=True)

    names = (_process_words(report), "held by framework", "live")
    x = 20.0
    for (_, colour, line), name, peak_bytes in zip(series, names, peaks, strict=True):
        if line:
            tall = 10 if line is process else 4
            canvas.rect(x, 28 - tall / 2, 16, tall, colour, radius=2)
            label = f"{name}, peak {format_bytes(peak_bytes)}"
            canvas.text(x + 22, 33, label)
            x += 22 + text_width(label, 13) + 12
    return canvas.svg()


def _draw_bands(
    canvas: Canvas, marks: Sequence[Mark], x_of: Callable[[float], float], top: float, bottom: float
) -> None:
    """Draw each phase as a tinted stretch of the time axis, those of one name alike."""
    tints: dict[str, str] = {}
    for mark in marks:
        if mark.duration_s is None:
            continue
        tint = tints.setdefault(mark.name, PHASE_TINTS[len(tints) % len(PHASE_TINTS)])
        x = x_of(mark.at_s)
        width = max(1.5, x_of(mark.at_s + mark.duration_s) - x)
        words = f"{mark.name}, step {mark.step}, {format_seconds(mark.duration_s)}"
        canvas.rect(x, top, width, bottom - top, tint, opacity=0.13)
        canvas.rect(x, top - 5, width, 5, tint, title=words)


def _process_words(report: TaskReport) -> str:
    if report.source == "host":
        return "process (resident)"
    return "process (simulated)" if report.source == "simulated" else "process"


def _budget_words(report: TaskReport) -> str:
    each = format_bytes(report.budget_bytes)
    times = f"{len(report.devices)} × " if len(report.devices) > 1 else ""
    return f"{times}{each} ({report.budget_source})"


def _end_s(report: TaskReport) -> float:
    """Where a chart of one process ends."""
    latest = [report.held_s, *(sample.at_s for sample in report.samples[-1:])]
    return max(*latest, *(mark.at_s + (mark.duration_s or 0) for mark in report.marks), 0.05)


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where the name of a mark goes."""

    x: float
    row: int = 0
    #: Empty: there is no room for it.
    text: str = ""
    anchor: str = "start"


def _place_marks(
    marks: Sequence[Mark], end_s: float, left: float, right: float
) -> tuple[int, list[_Spot]]:
    """Lay the labels of marks out in up to three rows; one that has no room has no text.

    Moments come first, then the longest phase of each name, then all others, longer ones first.
    """
    longest: dict[str, int] = {}
    for index, mark in enumerate(marks):
        other = marks[longest.setdefault(mark.name, index)]
        if (mark.duration_s or 0.0) > (other.duration_s or 0.0):
            longest[mark.name] = index

    def rank(index: int) -> tuple[bool, bool, float]:
        took_s = marks[index].duration_s
        if took_s is None:
            return False, False, 0.0
        return True, index != longest[marks[index].name], -took_s

    rows: tuple[list[tuple[float, float]], ...] = ([], [], [])
    spots: dict[int, _Spot] = {}
    for index in sorted(range(len(marks)), key=rank):
        x = left + (right - left) * min(1.0, max(0.0, marks[index].at_s / end_s))
        text = shorten(clean(marks[index].name), 170, 12)
        width = text_width(text, 12) + 4
        # Right of its line; left of it where the chart ends.
        anchor, begin = ("start", x) if x + width <= right else ("end", x - width)
        end = begin + width + 8
        room = [
            row
            for row, taken in enumerate(rows)
            if text and begin >= left and all(end <= a or begin >= b for a, b in taken)
        ]
        if room:
            rows[room[0]].append((begin, end))
            spots[index] = _Spot(x, room[0], text, anchor)
        else:
            spots[index] = _Spot(x)
    return max((spot.row + 1 for spot in spots.values() if spot.text), default=0), [
        spots[index] for index in range(len(marks))
    ]


def _time_axis(
    canvas: Canvas, end_s: float, x_of: Callable[[float], float], y: float, title: str
) -> None:
    canvas.path([(x_of(0), y), (x_of(end_s), y)], stroke=MUTED, width=1)
    for at_s, label in time_ticks(end_s):
        canvas.path([(x_of(at_s), y), (x_of(at_s), y + 5)], stroke=MUTED, width=1)
        near_edge = x_of(at_s) > WIDTH - 50
        canvas.text(
            WIDTH - 20 if near_edge else x_of(at_s),
            y + 19,
            label,
            fill=MUTED,
            anchor="end" if near_edge else "middle",
        )
    canvas.text(WIDTH - 20, y + 38, title, size=12, fill=MUTED, anchor="end")


def flow_gantt_svg(reports: Sequence[TaskReport]) -> str:
    """Draw what ran where and when, with each device's memory below its bars.

    A bar is one process: as long as it held its reservation, filled by the share of it that it
    used. Bars are numbered in the order of `reports`, as in the flow's table. Takes about 4
    ms for 19 processes.
    """
    numbered = [(i, report) for i, report in enumerate(reports, 1) if report.devices]
    start = min((report.placed_at for _, report in numbered), default=0.0)
    end_s = max((r.placed_at - start + _held_s(r) for _, r in numbered), default=1.0)
    devices = sorted(
        {device for _, report in numbered for device in report.devices},
        key=lambda device: (device.host, device.index, device.uuid),
    )
    left, right = 158, WIDTH - 20
    top = 52
    lanes = [_Lane(device, numbered, start) for device in devices]
    bottom = top + sum(lane.height for lane in lanes) + (0 if lanes else 40)
    canvas = Canvas(WIDTH, bottom + 50, "What ran on each device, and the memory it held")

    def x_of(at_s: float) -> float:
        return left + (right - left) * at_s / end_s

    for at_s, _ in time_ticks(end_s):
        canvas.path([(x_of(at_s), top - 4), (x_of(at_s), bottom)], stroke=GRID, width=1)
    y = float(top)
    for lane in lanes:
        _draw_lane(canvas, lane, x_of, y, left, right)
        y += lane.height
    if not lanes:
        canvas.text(
            WIDTH / 2, top + 24, "no process was placed on a device", fill=MUTED, anchor="middle"
        )
    _time_axis(canvas, end_s, x_of, bottom, "time since the first process was placed")
    _gantt_legend(canvas, {report.outcome for _, report in numbered})
    return canvas.svg()


def _held_s(report: TaskReport) -> float:
    return max(report.held_s, 0.001)


class _Lane:
    """One device: its processes in tracks that do not overlap, and its memory over time."""

    def __init__(
        self, device: Device, numbered: Iterable[tuple[int, TaskReport]], start: float
    ) -> None:
        self.device = device
        mine = [(n, r) for n, r in numbered if device in r.devices]
        if len(mine) > GANTT_LIMIT:
            mine = heapq.nlargest(GANTT_LIMIT, mine, key=lambda item: _held_s(item[1]))
        mine.sort(key=lambda item: (item[1].placed_at, item[0]))
        #: Number, report, seconds from the flow's first placement, track.
        self.bars: list[tuple[int, TaskReport, float, int]] = []
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        self.tracks = 0
        for number, report in mine:
            at_s = report.placed_at - start
            while busy and busy[0][0] <= at_s + 1e-6:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                track = heapq.heappop(free)
            else:
                track, self.tracks = self.tracks, self.tracks + 1
            heapq.heappush(busy, (at_s + _held_s(report), track))
            self.bars.append((number, report, at_s, track))
        #: Pixels from one track to the next: 64 tasks at once still fit a screen.
        self.pitch = max(7.0, min(24.0, 320 / self.tracks))
        self.bars_height = self.tracks * self.pitch
        self.height = max(self.bars_height + 10 + 46 + 22, 112)

        self.reserved = _steps((at, r.budget_bytes, _held_s(r)) for _, r, at, _ in self.bars)
        self.used = _used_steps(self.bars)
        self.peak_reserved = max((size for _, size in self.reserved), default=0)


def _steps(holds: Iterable[tuple[float, int, float]]) -> list[tuple[float, int]]:
    """Sum what is held from `at_s` for `held_s` seconds into one stepped line."""
    changes: list[tuple[float, int]] = []
    for at_s, size, held_s in holds:
        changes += [(at_s, size), (at_s + held_s, -size)]
    return _accumulate(changes)


def _used_steps(bars: Iterable[tuple[int, TaskReport, float, int]]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    for _, report, at_s, _ in bars:
        share = max(1, len(report.devices))
        points = outline(report.samples, lambda s: s.process_bytes, 100)
        # A process too short for a reading counts with its peak.
        points = points or [(0.0, report.peak_process_bytes)]
        before = 0
        for sample_s, size in points:
            changes.append((at_s + sample_s, (size - before) // share))
            before = size - (size - before) % share
        ended_s = max(_held_s(report), points[-1][0])
        changes.append((at_s + ended_s, -(before // share)))
    return _accumulate(changes)


def _accumulate(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    changes.sort()
    level = 0
    steps: list[tuple[float, int]] = []
    for at_s, change in changes:
        level += change
        if steps and steps[-1][0] == at_s:
            steps[-1] = (at_s, level)
        else:
            steps.append((at_s, level))
    return steps


def _draw_lane(
    canvas: Canvas,
    lane: _Lane,
    x_of: Callable[[float], float],
    y: float,
    left: float,
    right: float,
) -> None:
    device = lane.device
    canvas.path([(16, y), (right, y)], stroke="#d1d5db", width=1)
    room = left - 34
    canvas.text(20, y + 22, f"device {device.index}", size=14, bold=True)
    name = clean(device.name)
    if text_width(name, 12) > room:
        name = shorten(name.removeprefix("NVIDIA "), room, 12)
    canvas.text(20, y + 40, name, size=12)
    size = format_bytes(device.total_bytes)
    canvas.text(20 + room, y + 22, size, size=12, fill=MUTED, anchor="end")
    canvas.text(20, y + 57, shorten(clean(device.uuid), room, 11), size=11, fill=MUTED)

    for number, report, at_s, track in lane.bars:
        x = x_of(at_s)
        _draw_bar(
            canvas,
            number,
            report,
            x,
            y + 10 + track * lane.pitch,
            max(1.5, x_of(at_s + _held_s(report)) - x - 1),
            lane.pitch - (3 if lane.pitch > 10 else 1),
        )

    floor = y + lane.height - 12
    scale = 44 / max(lane.peak_reserved, max((size for _, size in lane.used), default=0), 1)
    canvas.path(_stairs(lane.reserved, x_of, floor, scale), fill="#94a3b8", opacity=0.35)
    canvas.path(_stairs(lane.used, x_of, floor, scale), fill=PROCESS, opacity=0.75)
    canvas.path([(left, floor), (right, floor)], stroke="#cbd5e1", width=1)
    peak_used = max((size for _, size in lane.used), default=0)
    for above, words, colour in (
        (15, f"peak reserved {format_bytes(lane.peak_reserved)}", MUTED),
        (0, f"peak used {format_bytes(peak_used)}", PROCESS_EDGE),
    ):
        canvas.text(left - 10, floor - above, words, size=11, fill=colour, anchor="end")


def _stairs(
    steps: Sequence[tuple[float, int]],
    x_of: Callable[[float], float],
    floor: float,
    scale: float,
) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    level = floor
    for at_s, size in steps:
        x = x_of(at_s)
        points.append((x, level))
        level = floor - scale * max(0, size)
        points.append((x, level))
    return [*points, (points[-1][0], floor)] if points else [(x_of(0), floor)]


def _draw_bar(
    canvas: Canvas,
    number: int,
    report: TaskReport,
    x: float,
    y: float,
    width: float,
    height: float,
) -> None:
    colour = OUTCOME_COLOURS[report.outcome]
    name = clean(report.task_run_name)
    words = "" if report.outcome == "completed" else f" – {OUTCOME_WORDS[report.outcome]}"
    canvas.rect(
        x,
        y,
        width,
        height,
        colour,
        opacity=0.22 if width >= 6 else 0.8,
        outline=colour if width >= 6 else "none",
        radius=2 if width >= 6 else 0,
        title=f"{number}: {name}, {format_bytes(report.peak_process_bytes)} of "
        f"{_budget_words(report)}, {format_seconds(report.held_s)}, {report.outcome}",
    )
    points = outline(report.samples, lambda s: s.process_bytes, 20) if width >= 24 else []
    if points:
        scale = height / max(1, report.budget_total_bytes)
        step = width / _held_s(report)
        line = [
            (x + min(width, step * at_s), y + height - min(height, scale * size))
            for at_s, size in points
        ]
        floor = y + height
        area = [(line[0][0], floor), *line, (x + width, line[-1][1]), (x + width, floor)]
        canvas.path(area, fill=colour, opacity=0.32)
    if height < 12:
        return
    room = width - 8
    for label in (f"{number}  {name}{words}", f"{number}{words}", f"{number}"):
        if text_width(label, 12) <= room:
            break
    else:
        return
    if label == f"{number}{words}" and not words and room > 60:
        # Its end tells a task run from its siblings: they share the task's name.
        label = f"{number}  "
        label += shorten(name, room - text_width(label, 12), 12, keep_end=True)
    canvas.text(x + 4, y + height / 2 + 4, label, size=12)


def _gantt_legend(canvas: Canvas, outcomes: Set[Outcome]) -> None:
    x = 20.0
    shown = [outcome for outcome in OUTCOME_COLOURS if outcome in outcomes]
    for outcome in shown:
        colour = OUTCOME_COLOURS[outcome]
        label = OUTCOME_WORDS[outcome]
        canvas.rect(x, 19, 16, 12, colour, opacity=0.5, outline=colour, radius=2)
        canvas.text(x + 22, 29, label)
        x += 22 + text_width(label, 13) + 10
    for label, colour, opacity in (("reserved", "#94a3b8", 0.35), ("used", PROCESS, 0.75)):
        width = 22 + text_width(label, 13)
        canvas.rect(x + 10, 19, 16, 12, colour, opacity=opacity)
        canvas.text(x + 32, 29, label)
        x += width + 10
