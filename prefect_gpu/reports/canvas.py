"""A drawing surface for the charts: shapes in pixels, text that cannot break out, nice axis steps.

It covers what both charts share. What they show is in `timeline`.

`drawsvg` writes the SVG. Against `svg.py` it imports in 8 ms instead of 70 (beside Prefect), draws
a chart in half the time, and escapes text itself. It does not escape attributes: those here are
numbers and this package's own words, never a user's.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

import drawsvg  # type: ignore[import-untyped, unused-ignore]

from prefect_gpu.units import GIB, KIB, MIB, TIB

INK = "#1f2937"
MUTED = "#6b7280"
GRID = "#e5e7eb"
PAPER = "#ffffff"
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

#: Characters that XML 1.0 forbids, and lone surrogates, which cannot be encoded.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_NICE_SECONDS = (
    *(step * 10.0**power for power in range(-3, 1) for step in (1, 2, 5)),
    *(10.0, 15.0, 30.0),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600.0 * hours for hours in (1, 2, 3, 6, 12)),
    *(86400.0 * days for days in (1, 2, 7, 14, 28)),
)


def clean(text: str) -> str:
    """Put text on one line and drop what XML cannot hold."""
    return " ".join(_FORBIDDEN.sub("�", text).split())


def text_width(text: str, size: float) -> float:
    """Estimate the width of text in pixels, generously: fonts differ between browsers."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return size * (0.58 * (len(text) - wide) + 1.05 * wide)


def shorten(text: str, width: float, size: float, *, keep_end: bool = False) -> str:
    """Cut text to `width` pixels with an ellipsis; empty where not even four letters fit."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[1:] if keep_end else text[:-1]
    if len(text) < 4:
        return ""
    return "…" + text.lstrip(" -_") if keep_end else text.rstrip(" -_") + "…"


def byte_ticks(top_bytes: float, steps: int = 5) -> list[tuple[float, str]]:
    """Give about `steps` round positions from 0 to `top_bytes`, each with its label."""
    factor, unit = next(
        ((f, u) for f, u in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB")) if top_bytes >= f),
        (KIB, "KiB"),
    )
    step = _nice_number(top_bytes / factor / steps)
    count = int(top_bytes / factor / step + 1e-9)
    return [(i * step * factor, f"{i * step:g} {unit}" if i else "0") for i in range(count + 1)]


def time_ticks(end_s: float, steps: int = 6) -> list[tuple[float, str]]:
    """Give about `steps` round moments from 0 to `end_s`, each with its label."""
    rough = end_s / steps
    step = next((s for s in _NICE_SECONDS if s >= rough * 0.999), _NICE_SECONDS[-1])
    # A task of years would still have a handful of labels.
    step *= max(1, math.ceil(end_s / step / (2 * steps)))
    return [(i * step, time_label(i * step)) for i in range(int(end_s / step + 1e-9) + 1)]


def time_label(seconds: float) -> str:
    """Write a moment on an axis: `0`, `2.5 s`, `45 s`, `1:30 min`, `2:05 h`."""
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
    """One SVG image on its own light background, so that it reads in a dark UI too."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._drawing = drawsvg.Drawing(width, height, font_family=FONT)
        self._drawing.append_title(clean(title))
        self.rect(0.5, 0.5, width - 1, height - 1, PAPER, outline="#d1d5db", radius=8)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        outline: str = "none",
        opacity: float = 1,
        radius: float = 0,
        title: str = "",
    ) -> None:
        """Draw a rectangle; `title` is what a pointer resting on it shows."""
        shape = drawsvg.Rectangle(
            *_round(x, y, width, height),
            fill=fill,
            **({} if opacity == 1 else {"fill_opacity": opacity}),
            **({} if outline == "none" else {"stroke": outline}),
            **({"rx": radius} if radius else {}),
        )
        if title:
            shape.append_title(clean(title))
        self._drawing.append(shape)

    def path(
        self,
        points: Sequence[tuple[float, float]],
        *,
        stroke: str = "none",
        width: float = 1.5,
        fill: str = "none",
        opacity: float = 1,
        dash: str = "",
    ) -> None:
        """Draw a line through the points, or an area where `fill` is given."""
        self._drawing.append(
            drawsvg.Path(
                _path(points),
                fill=fill,
                **({} if opacity == 1 else {"fill_opacity": opacity}),
                **({} if stroke == "none" else {"stroke": stroke, "stroke_width": width}),
                **({"stroke_dasharray": dash} if dash else {}),
                **({"stroke_linejoin": "round"} if stroke != "none" else {}),
            )
        )

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
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Write text with its baseline at `y`; `halo` keeps it legible over lines."""
        around = {"stroke": PAPER, "stroke_width": 4, "stroke_linejoin": "round"}
        self._drawing.append(
            drawsvg.Text(
                clean(text),
                size,
                *_round(x, y),
                fill=fill,
                **({} if anchor == "start" else {"text_anchor": anchor}),
                **({"font_weight": 600} if bold else {}),
                **({**around, "paint_order": "stroke"} if halo else {}),
            )
        )

    def svg(self) -> str:
        """Give the finished image."""
        return str(self._drawing.as_svg(header=""))


def _round(*numbers: float) -> Iterable[float]:
    return (round(number, 1) for number in numbers)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
