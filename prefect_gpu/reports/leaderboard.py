"""Leaderboard of task runs: order by a metric, text in markdown. Pure. `flow_leaderboard` makes and publishes rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_gpu.reports.canvas import GRID, INK, MUTED, Canvas, byte_ticks, shorten
from prefect_gpu.reports.markup import escape, image, table
from prefect_gpu.units import format_bytes, format_joules, format_seconds

#: Most rows in the plot and in the table.
MOST_ROWS = 200

#: Size of the plot and its left, right, top and bottom margins, in pixels.
_WIDTH, _HEIGHT = 720.0, 360.0
_MARGINS = 84.0, 110.0, 36.0, 54.0
_POINT = "#2563eb"

#: Larger values are not drawn: the axis' range would overflow.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class LeaderboardRow:
    """One task run in a leaderboard."""

    name: str
    #: Value of the metric; `None`: the run has none.
    value: float | None
    #: Run time; `None`: not known.
    seconds: float | None = None
    #: Peak bytes of the run's process; `None`: not known.
    peak_bytes: int | None = None
    device: str = ""
    #: Why the run has no value; empty: not known.
    problem: str = ""
    #: Part of the run time in which the GPU computed for the process, from 0 to 1; `None`: not known.
    busy_fraction: float | None = None
    #: Energy in joules that the GPU took for the process; `None`: not known.
    energy_j: float | None = None


def rank(rows: Sequence[LeaderboardRow], smaller_is_better: bool) -> list[LeaderboardRow]:
    """Return rows ordered from best to worst value: equal values by time, rows without a number last."""
    sign = 1 if smaller_is_better else -1

    def place(row: LeaderboardRow) -> tuple[bool, float, float]:
        none = row.value is None or math.isnan(row.value)
        value = 0.0 if row.value is None or none else sign * row.value
        return none, value, math.inf if row.seconds is None else row.seconds

    return sorted(rows, key=place)


def leaderboard_markdown(ranked: Sequence[LeaderboardRow], metric: str) -> str:
    """Return a leaderboard in markdown: the best run, a plot of the metric against memory, and a table."""
    parts = [f"**No entry has a value of {escape(metric)}.**"]
    best = ranked[0] if ranked else None
    if best is not None and best.value is not None:
        memory = "" if best.peak_bytes is None else f", with {format_bytes(best.peak_bytes)}"
        parts = [f"**Best: {escape(best.name)}, {escape(metric)} {best.value:.6g}{memory}.**"]
    shown = ranked[:MOST_ROWS]
    if svg := _plot(shown, metric):
        parts.append(image(f"{metric} against memory", svg))
    heads = ["#", "name", escape(metric), "time", "peak memory", "GPU computed", "energy", "device"]
    rows = [
        [
            str(at),
            escape(row.name),
            escape(row.problem, 200) if row.value is None else f"{row.value:.6g}",
            "" if row.seconds is None else format_seconds(row.seconds),
            "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "" if row.busy_fraction is None else f"{row.busy_fraction:.0%}",
            "" if row.energy_j is None else format_joules(row.energy_j),
            escape(row.device),
        ]
        for at, row in enumerate(shown, 1)
    ]
    parts.append(table(heads, rows, right=(0, 2, 3, 4, 5, 6)))
    if len(ranked) > len(shown):
        parts.append(f"{len(ranked) - len(shown)} more are left out.")
    return "\n\n".join(parts)


def _plot(ranked: Sequence[LeaderboardRow], metric: str) -> str:
    """Return a plot of the metric against memory; empty: fewer than two rows have both."""
    points = [
        (at, row.peak_bytes, row.value, row.name)
        for at, row in enumerate(ranked, 1)
        if row.peak_bytes is not None and row.value is not None and abs(row.value) <= _LARGEST
    ]
    if len(points) < 2:
        return ""
    left, right, top, bottom = _MARGINS
    most_bytes = max(1.0, *(size * 1.05 for _, size, _, _ in points))
    low, high = min(p[2] for p in points), max(p[2] for p in points)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    # An axis goes below 0 only for negative values.
    low, high = low - room if low < 0 else max(0.0, low - room), high + room

    def x(size: float) -> float:
        return left + (_WIDTH - left - right) * size / most_bytes

    def y(value: float) -> float:
        return top + (_HEIGHT - top - bottom) * (high - value) / (high - low)

    canvas = Canvas(_WIDTH, _HEIGHT, f"{metric} against memory")
    for size, label in byte_ticks(most_bytes):
        canvas.line([(x(size), top), (x(size), _HEIGHT - bottom)], GRID)
        canvas.text(x(size), _HEIGHT - bottom + 18, label, size=12, fill=MUTED, anchor="middle")
    for step in range(5):
        value = low + (high - low) * step / 4
        canvas.line([(left, y(value)), (_WIDTH - right, y(value))], GRID)
        canvas.text(left - 8, y(value) + 4, _tick(value), size=12, fill=MUTED, anchor="end")
    middle = (left + _WIDTH - right) / 2
    canvas.text(middle, _HEIGHT - 12, "peak memory of the process", size=12, anchor="middle")
    canvas.text(12, top - 14, shorten(metric, 200, 12), size=12, bold=True)
    for at, size, value, name in reversed(points):
        canvas.dot(x(size), y(value), _POINT)
        label = shorten(f"{at} {name}", right, 11)
        canvas.text(x(size) + 7, y(value) + 4, label, size=11, fill=INK, halo=True)
    return canvas.svg()


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
