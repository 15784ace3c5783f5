"""SVG charts: shapes in pixels, text, axis steps. `drawsvg` escapes text, not attributes: they have no user's text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import drawsvg  # type: ignore[import-untyped, unused-ignore]

from prefect_gpu.units import GIB, KIB, MIB, TIB

INK = "#1f2937"
MUTED = "#6b7280"
GRID = "#e5e7eb"
PAPER = "#ffffff"
#: Colours of frames, background areas, the line of live memory, and budgets.
FRAME, SHADE, LIVE, BUDGET = "#d1d5db", "#f3f4f6", "#0f766e", "#b45309"
#: Colours in place of those above if the page around an image prefers a dark scheme.
_DARK = {
    INK: "#e5e7eb",
    MUTED: "#9ca3af",
    GRID: "#374151",
    PAPER: "#111827",
    FRAME: "#4b5563",
    SHADE: "#1f2937",
    LIVE: "#2dd4bf",
    BUDGET: "#f59e0b",
}
_DARK_STYLE = "".join(
    f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
    for light, dark in _DARK.items()
)
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

#: Zero-width characters that join letters and emoji, without effect on other text.
_JOINERS = "\u200c\u200d"

_Point: TypeAlias = tuple[float, float]

_NICE_SECONDS = (
    *(step * 10.0**power for power in range(-3, 1) for step in (1, 2, 5)),
    *(10.0, 15.0, 30.0),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600.0 * hours for hours in (1, 2, 3, 6, 12)),
    *(86400.0 * days for days in (1, 2, 7, 14, 28)),
)


def clean(text: str) -> str:
    """Return text as one line of printable characters, safe for encoding and XML.

    White space becomes single spaces; control characters, lone surrogates and direction marks become `�`.
    """
    line = " ".join(text.split())
    return "".join(each if each.isprintable() or each in _JOINERS else "�" for each in line)


def text_width(text: str, size: float) -> float:
    """Return a text's estimated width in pixels, rather too large than too small, because fonts differ."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return size * (0.58 * (len(text) - wide) + 1.05 * wide)


def shorten(text: str, width: float, size: float) -> str:
    """Return text cut to `width` pixels with an ellipsis; empty: fewer than four letters fit. `size`: font size."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip(" -_") + "…" if len(text) >= 4 else ""


def byte_ticks(top_bytes: float, steps: int = 5) -> list[tuple[float, str]]:
    """Return about `steps` round sizes from 0 to `top_bytes`, each with its label."""
    units = (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB")
    factor, unit = next((unit for unit in units if top_bytes >= unit[0]), (KIB, "KiB"))
    step = _nice_number(top_bytes / factor / steps)
    count = int(top_bytes / factor / step + 1e-9)
    return [(i * step * factor, f"{i * step:g} {unit}" if i else "0") for i in range(count + 1)]


def time_ticks(end_s: float, steps: int = 6) -> list[tuple[float, str]]:
    """Return about `steps` round times from 0 to `end_s`, each with its label."""
    rough = end_s / steps
    step = next((s for s in _NICE_SECONDS if s >= rough * 0.999), _NICE_SECONDS[-1])
    # The longest step is four weeks. Multiples of it give few labels to a task of years, too.
    step *= max(1, math.ceil(end_s / step / (2 * steps)))
    return [(i * step, time_label(i * step)) for i in range(int(end_s / step + 1e-9) + 1)]


def time_label(seconds: float) -> str:
    """Return a label on a time axis: `0`, `2.5 s`, `45 s`, `1:30 min`, `2:05 h`."""
    if seconds == 0:
        return "0"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"


def _nice_number(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)


class Canvas:
    """An SVG image whose background is dark if the page around the image prefers a dark scheme."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._drawing = drawsvg.Drawing(width, height, font_family=FONT)
        self._drawing.append_title(clean(title))
        self._drawing.append_css(f"@media (prefers-color-scheme:dark){{{_DARK_STYLE}}}")
        self.rect(0.5, 0.5, width - 1, height - 1, PAPER, stroke=FRAME, radius=8)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        stroke: str | None = None,
        opacity: float | None = None,
        radius: float | None = None,
        dash: str | None = None,
    ) -> None:
        """Draw a rectangle."""
        style = {"fill": fill, "fill_opacity": opacity, "stroke": stroke, "stroke_dasharray": dash}
        self._drawing.append(drawsvg.Rectangle(*_round(x, y, width, height), **style, rx=radius))

    def line(
        self, points: Sequence[_Point], stroke: str, *, width: float = 1, dash: str | None = None
    ) -> None:
        """Draw a line through the points."""
        style = {"stroke": stroke, "stroke_width": width, "stroke_dasharray": dash}
        path = drawsvg.Path(_path(points), fill="none", **style, stroke_linejoin="round")
        self._drawing.append(path)

    def area(self, points: Sequence[_Point], fill: str, opacity: float) -> None:
        """Draw a filled polygon with the points as corners."""
        self._drawing.append(drawsvg.Path(_path(points), fill=fill, fill_opacity=opacity))

    def dot(self, x: float, y: float, fill: str) -> None:
        """Draw a small round mark."""
        x, y = _round(x, y)
        self._drawing.append(drawsvg.Circle(x, y, 3.5, fill=fill, stroke=PAPER, stroke_width=1.5))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str | None = None,
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Write text with its baseline at `y`. A halo in the background colour keeps text legible over lines."""
        style = {"fill": fill, "text_anchor": anchor, "font_weight": 600 if bold else None}
        if halo:
            style |= {"stroke": PAPER, "stroke_width": 4, "stroke_linejoin": "round"}
            style |= {"paint_order": "stroke"}
        self._drawing.append(drawsvg.Text(clean(text), size, *_round(x, y), **style))

    def legend(self, entries: Iterable[tuple[str, str, float]], y: float) -> None:
        """Draw entries (words, colour, opacity) as squares with words in a row at `y`; count the entries left out."""
        x, left = 20.0, list(entries)
        for at, (words, colour, opacity) in enumerate(left):
            width = 22 + text_width(words, 13)
            if x + width > self._drawing.width - 20:
                self.text(x, y + 5, f"+ {len(left) - at}", fill=MUTED)
                return
            self.rect(x, y - 6, 16, 12, colour, opacity=opacity, stroke=colour, radius=2)
            self.text(x + 22, y + 5, words)
            x += width + 12

    def svg(self) -> str:
        """Return the finished image."""
        return str(self._drawing.as_svg(header=""))


def _round(*numbers: float) -> Iterable[float]:
    return (round(number, 1) for number in numbers)


def _path(points: Sequence[_Point]) -> str:
    """Return points as SVG path data; a horizontal or vertical step has one number."""
    words: list[str] = []
    before: tuple[str, str] | None = None
    for point in points:
        x, y = (f"{number:.1f}".removesuffix(".0") for number in point)
        if before is None:
            words.append(f"M{x},{y}")
        elif y == before[1]:
            words.append(f"H{x}")
        elif x == before[0]:
            words.append(f"V{y}")
        else:
            words.append(f"L{x},{y}")
        before = x, y
    return "".join(words)
