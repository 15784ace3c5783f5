"""Values of single tags, from text and to text: `6GiB`, `0,GPU-1a`, `torch:70%`, `[256:1,>:4]`.

A reader raises `ValueError` saying what is wrong with the text; what a writer gives reads back as the
same value. Which tag holds which value, and what contradicts what, is in `prefect_gpu.policy`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from prefect_gpu.units import UNIT_BYTES, UNIT_SECONDS, parse_bytes, parse_duration, parse_size

#: Names that `gpu:framework=` accepts; `none`: no adapter applies anything.
FRAMEWORKS = ("torch", "tensorflow", "jax", "cupy", "onnxruntime", "none")

#: Sizes from here on are refused: no device has 8 PiB, and above it the floating-point numbers
#: that sizes are read with skip whole bytes.
_BYTES_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class FrameworkShare:
    """A framework that the policy applies to, and its part of the budget."""

    #: One of `FRAMEWORKS`.
    name: str
    #: Part of the budget, in (0, 1]; `None`: what the others leave.
    fraction: float | None = None


# -- values from text --------------------------------------------------------------------------


def read_memory(text: str) -> int | float:
    """Read `6GiB` as bytes (`int`), `40%` as a fraction (`float`)."""
    size = parse_size(text)
    if not 0 < size < _BYTES_LIMIT:
        raise ValueError(f"{text!r} is not more than zero and less than 8192TiB")
    return size


def read_wait(text: str) -> float:
    """Read `10m` as seconds."""
    seconds = parse_duration(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not more than zero and finite")
    return seconds


def whole(least: int | None = None) -> Callable[[str], int]:
    """Make a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(f"{text!r} is not a whole number")
        if least is not None and int(text) < least:
            raise ValueError(f"{int(text)} is less than {least}")
        return int(text)

    return read


def word(*words: str) -> Callable[[str], str]:
    """Make a reader of these words, in any case; it gives them in this spelling."""
    spelt = {word.lower(): word for word in words}

    def read(text: str) -> str:
        if text.lower() in spelt:
            return spelt[text.lower()]
        close = difflib.get_close_matches(text.lower(), spelt, n=1)
        hint = f"; did you mean {spelt[close[0]]}?" if close else ""
        raise ValueError(f"{text!r} is not known{hint}")

    return read


def read_devices(text: str) -> tuple[str, ...]:
    """Read `0,GPU-1a` as indices and UUID prefixes, in their order, prefixes as written."""
    devices = []
    for device in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"[0-9]{1,9}", device):
            device = str(int(device))
        elif not re.fullmatch(r"(?i:GPU|MIG|HOST|SIM)-[\w./:-]+", device, re.ASCII):
            raise ValueError(f"{device!r} is neither an index nor a UUID prefix")
        if device in devices:
            raise ValueError(f"device {device} is named twice")
        devices.append(device)
    return tuple(devices)


def read_share(text: str) -> FrameworkShare:
    """Read `torch` or `torch:70%`."""
    name, colon, share = (part.strip() for part in text.partition(":"))
    name = word(*FRAMEWORKS)(name)
    if not colon:
        return FrameworkShare(name)
    if name == "none":
        raise ValueError("none has no share")
    fraction = parse_size(share) if share.endswith("%") else 0
    if not isinstance(fraction, float) or fraction <= 0:
        raise ValueError(f"share {share!r} is not a percentage")
    return FrameworkShare(name, fraction)


def read_parameter(text: str) -> str:
    """Read the name of a parameter, whose case matters."""
    if not text.isidentifier():
        raise ValueError(f"{text!r} is not a name of a parameter")
    return text


def _read_threshold(text: str) -> str:
    if not re.fullmatch(r"0?\.[0-9]{1,17}", text) or float(text) == 0:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return text if text.startswith("0") else f"0{text}"


def _read_divisions(text: str) -> str:
    if not text.startswith("["):
        if _power_of_two(text):
            return str(int(text))
        raise ValueError(f"{text!r} is not a power of two")
    if not text.endswith("]"):
        raise ValueError("the list has no closing bracket")
    pairs = [pair.partition(":") for pair in re.sub(r"\s", "", text[1:-1]).split(",")]
    for position, (size, _, divisions) in enumerate(pairs, 1):
        if not _power_of_two(size) and not (size == ">" and position == len(pairs)):
            raise ValueError(f"{size!r} is neither a power of two nor a last `>`")
        if divisions != "0" and not _power_of_two(divisions):
            raise ValueError(f"{divisions!r} divisions are neither 0 nor a power of two")
    return f"[{','.join(f'{size}:{divisions}' for size, _, divisions in pairs)}]"


def _power_of_two(text: str) -> bool:
    return bool(re.fullmatch(r"[1-9][0-9]{0,11}", text)) and int(text).bit_count() == 1


# -- text from values --------------------------------------------------------------------------


def format_number(value: float) -> str:
    """Write a number without an exponent, in the fewest digits that read back the same."""
    return format(Decimal(repr(float(value))), "f").removesuffix(".0")


def _shortest(texts: Iterable[str], value: object, read: Callable[[str], object]) -> list[str]:
    """Choose the shortest text that reads back as `value`, the earliest of equals."""
    good = [text for text in texts if _reads_as(text, value, read)]
    if not good:
        raise ValueError(f"{value!r} cannot be written as a tag")
    return [min(good, key=len)]


def _reads_as(text: str, value: object, read: Callable[[str], object]) -> bool:
    try:
        return read(text) == value
    except (ValueError, OverflowError):
        return False


def write_memory(memory: int | float | None) -> list[str]:
    """Write bytes or a fraction in the shortest text that reads back the same."""
    if memory is None:
        return []
    if isinstance(memory, float):
        # 0.07 * 100 is 7.000000000000001: a neighbour reads back as well, and shorter.
        hundred = memory * 100
        near = (math.nextafter(hundred, 0), hundred, math.nextafter(hundred, 101))
        return _shortest((f"{format_number(each)}%" for each in near), memory, parse_size)
    units = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB")
    sizes = (Decimal(memory) / UNIT_BYTES[unit.lower()] for unit in units)
    texts = (f"{size.normalize():f}{unit}" for size, unit in zip(sizes, units, strict=True))
    return _shortest(texts, memory, parse_bytes)


def write_wait(wait_s: float | None) -> list[str]:
    """Write seconds in the shortest text that reads back the same."""
    if wait_s is None:
        return []
    texts = (f"{format_number(wait_s / each)}{unit}" for unit, each in UNIT_SECONDS.items())
    return _shortest(texts, wait_s, parse_duration)


def write_share(share: FrameworkShare) -> str:
    """Write `torch` or `torch:70%`."""
    return ":".join((share.name, *write_memory(share.fraction)))


def write_plain(value: object) -> list[str]:
    """Write a number or a word; `None` is not said."""
    return [] if value is None else [str(value)]


#: What PyTorch's allocator reads, by option: what is accepted, and how it is read. Newer releases
#: check these in the child only, where a mistake costs a process, and read `True` in this
#: spelling alone; releases differ on whether 20 itself is allowed.
ALLOCATOR_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max_split_size_mb": (
        "a whole number of MiB above 20, as in gpu:alloc.max_split_size_mb=128",
        lambda text: str(whole(21)(text)),
    ),
    "garbage_collection_threshold": (
        "a number between 0 and 1, as in gpu:alloc.garbage_collection_threshold=0.8",
        _read_threshold,
    ),
    "expandable_segments": ("true or false", word("True", "False")),
    "roundup_power2_divisions": (
        "a power of two, or a list of size:divisions pairs as in [256:1,512:2,>:4]",
        _read_divisions,
    ),
    "backend": ("native or cudaMallocAsync", word("native", "cudaMallocAsync")),
}
