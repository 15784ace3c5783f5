"""Conversion of bytes and seconds to and from text, for tags and messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

#: Bytes of each unit of a size, by its lower-case spelling.
UNIT_BYTES = {
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

#: Seconds of each unit of a duration.
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

SIZES_ACCEPTED = (
    "a positive number with a unit, KiB MiB GiB TiB (1024) or KB MB GB TB (1000), as in 6GiB"
)
DURATIONS_ACCEPTED = "a positive number with a unit, ms s m h d, as in 10m"

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")


def _split(text: str) -> tuple[float, str] | None:
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), match[2]) if match else None


def _parse(text: str, units: Mapping[str, float], usual: str, what: str) -> float:
    """Return the value of a number with one of the `units`; the error for a missing unit suggests `usual`."""
    parts, given = _split(text), text.strip()
    if parts is None:
        raise ValueError(f"{given!r} is not a number with a unit")
    number, unit = parts
    if unit == "":
        raise ValueError(f"{given!r} has no unit; did you mean {given}{usual}?")
    factor = units.get(unit.lower())
    if factor is None:
        raise ValueError(f"{unit!r} is not a unit of {what}")
    if number <= 0:
        raise ValueError(f"{given!r} is not more than zero")
    return number * factor


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `6GiB` or `1.5 gb`, rounded down; raise `ValueError` with the reason."""
    size = int(_parse(text, UNIT_BYTES, "GiB", "bytes"))
    if not size:
        raise ValueError(f"{text.strip()!r} is less than a byte")
    return size


def parse_size(text: str) -> int | float:
    """Return the bytes (`int`) of a size, or the fraction (`float`) of a percentage in (0, 100]; raise `ValueError`."""
    parts = _split(text)
    if parts is not None and parts[1] == "%":
        if not 0 < parts[0] <= 100:
            raise ValueError(f"{text.strip()!r} is not a percentage above 0 and up to 100")
        return parts[0] / 100
    return parse_bytes(text)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `10m`, `1.5 h` or `500ms`; raise `ValueError` with the reason."""
    return _parse(text, UNIT_SECONDS, "s", "time")


def format_bytes(size_bytes: int | float | None) -> str:
    """Return bytes as readable text: `23.7GiB`, `512MiB`, `0B`, or `unknown` for `None`."""
    if size_bytes is None:
        return "unknown"
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # A value that rounds to 1024 of the smaller unit is 1 of this unit.
        if size >= factor - factor / 2048:
            places = 0 if size >= 100 * factor else 1
            return f"{sign}{size / factor:.{places}f}".removesuffix(".0") + unit
    return f"{sign}{int(size)}B"


def readable_size(size_bytes: float) -> str:
    """Return a size as short text, rounded up: `2.1GiB`, `37GiB`, `320MiB`."""
    if size_bytes > 992 * MIB:
        step = 0.1 if size_bytes <= 10 * GIB else 0.5 if size_bytes <= 32 * GIB else 1
        # Counted in whole steps first, so that 2.1 does not become 2.1000000000000001.
        steps = math.ceil(size_bytes / GIB / step - 1e-9)
        return f"{round(steps * step, 1):g}GiB"
    return f"{max(1, math.ceil(size_bytes / MIB / 32)) * 32}MiB"


def size_in_tag(size_bytes: float, most_bytes: int | None) -> str:
    """Return a size as text for a `gpu:memory` tag: `100%` if it exceeds a device's `most_bytes` (`None`: unknown)."""
    text = readable_size(size_bytes)
    return text if most_bytes is None or parse_bytes(text) <= most_bytes else "100%"


def format_seconds(seconds: float | None) -> str:
    """Return seconds as readable text: `12.3s`, `1s`, `85ms`, `4m 05s`, `10m`, or `unknown` for `None`."""
    if seconds is None:
        return "unknown"
    # A value that rounds to 1000ms is 1s, and a value that rounds to 60.0s is 1m.
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s".removesuffix(" 00s")
    return f"{minutes // 60}h {minutes % 60:02d}m".removesuffix(" 00m")


def format_joules(joules: float) -> str:
    """Return an energy as readable text: `850J`, `12.4kJ`, `3.1MJ`."""
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3)):
        if joules >= 0.9995 * factor:
            return f"{joules / factor:.1f}".removesuffix(".0") + unit
    return f"{joules:.0f}J"


def format_percent(fraction: float) -> str:
    """Return a fraction as a whole percentage: `31%`."""
    return f"{fraction:.0%}"


def text_of(value: _Value | None, as_text: Callable[[_Value], str] = str, absent: str = "") -> str:
    """Return a value as text, or `absent` in place of `None`."""
    return absent if value is None else as_text(value)


def counted(number: int, word: str, plural: str = "") -> str:
    """Return a number with its word: `1 task`, `3 tasks`, `2 histories`. `plural`: the plural, unless it ends in `s`."""
    return f"{number} {word if number == 1 else plural or word + 's'}"
