"""What a child sees when memory has run out: read at once, while the body's frames still hold theirs.

Which errors mean that is the adapters' to say; whose fault it was, `prefect_gpu.scheduling.ladder`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect_gpu.devices.own import OwnUse
from prefect_gpu.frameworks.adapter import FrameworkAdapter
from prefect_gpu.frameworks.out_of_memory import OutOfMemory, causes, parse_wanted_bytes
from prefect_gpu.processes.readings import Readings

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMG]iB)"

# Texts, not compiled: most children never need them, and would pay 1.5 ms for it.

#: PyTorch, from 2.0 on. "allowed" is there whenever a fraction is set, whoever refused. It refuses by
#: itself, before it asks the driver, if what it has reserved and what is wanted exceed that.
_TORCH_DEVICE = r"GPU ([0-9]+) has a total capacity"
_TORCH_WANTED = rf"Tried to allocate {_SIZE}"
_TORCH_FREE = rf"of which {_SIZE} is free"
_TORCH_ALLOWED = rf"{_SIZE} allowed;"
_TORCH_ALLOCATED = rf"Of the allocated memory {_SIZE} is allocated by PyTorch"
_TORCH_CACHED = rf"{_SIZE} is reserved by PyTorch but unallocated"

#: CuPy, of its pool, which refuses in the same way. In whole bytes.
_CUPY = (
    r"Out of memory allocating ([0-9,]+) bytes \(allocated so far: ([0-9,]+) bytes"
    r"(?:, limit set to: ([0-9,]+) bytes)?\)"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an error's text tells besides what was wanted. Bytes; `None`: it does not tell."""

    #: Which of the process's devices, from 0.
    device: int | None = None
    held_bytes: int | None = None
    free_bytes: int | None = None
    #: The process's own cap refused.
    own_cap: bool | None = None


@dataclass(frozen=True, slots=True)
class _Size:
    """Bytes as a text gives them."""

    value: int
    #: By how much they may be off, since the text rounds to two decimals.
    slack: int = 0

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.value + other.value, self.slack + other.slack)


def parse_refusal(text: str) -> Refusal:
    """Read what PyTorch and CuPy write of the device and of their own limit. Pure."""
    device = re.search(_TORCH_DEVICE, text)
    free, allowed = _find(_TORCH_FREE, text), _find(_TORCH_ALLOWED, text)
    wanted = _find(_TORCH_WANTED, text)
    allocated, cached = _find(_TORCH_ALLOCATED, text), _find(_TORCH_CACHED, text)
    held = None if allocated is None or cached is None else allocated + cached
    cupy = re.search(_CUPY, text)
    if cupy is not None:
        wanted, held = _Size(_whole_number(cupy[1])), _Size(_whole_number(cupy[2]))
        allowed = None if cupy[3] is None else _Size(_whole_number(cupy[3]))
    return Refusal(
        device=None if device is None else int(device[1]),
        held_bytes=None if held is None else held.value,
        free_bytes=None if free is None else free.value,
        own_cap=_is_over(wanted, held, allowed),
    )


def _is_over(wanted: _Size | None, held: _Size | None, allowed: _Size | None) -> bool | None:
    """Say whether it would have been more than is allowed; `None`: too close to tell, or unknown."""
    if wanted is None or held is None or allowed is None:
        return None
    asked = wanted + held
    over = asked.value - allowed.value
    slack = asked.slack + allowed.slack
    return None if slack and abs(over) <= slack else over > 0


def _find(pattern: str, text: str) -> _Size | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    unit = _UNITS[match[2]]
    return _Size(int(float(match[1]) * unit), 0 if unit == 1 else unit // 200 + 1)


def _whole_number(text: str) -> int:
    return int(text.replace(",", ""))


def find_shortage(
    error: BaseException, adapters: Sequence[FrameworkAdapter], readings: Readings
) -> OutOfMemory | None:
    """Look for an out-of-memory in an error and what caused it, and take stock if there is one.

    Args:
        error: What the body raised.
        adapters: Know their frameworks' errors.
        readings: Tell what is held now.
    """
    for current in causes(error):
        try:
            if getattr(current, "__prefect_gpu_out_of_memory__", False):
                return _simulated(current, readings)
            for adapter in adapters:
                if adapter.is_out_of_memory(current):
                    return _take_stock(adapter.name, str(current), readings)
        except Exception:
            # An error of the user's whose own text or attributes raise: no adapter's.
            pass
    return None


def _take_stock(framework: str, text: str, readings: Readings) -> OutOfMemory:
    found = OutOfMemory(framework, parse_wanted_bytes(text))
    refusal = parse_refusal(text)
    held = refusal.held_bytes
    counters = readings.counters()
    if len(readings.device_uuids) == 1 and counters is not None:
        # Exact, where the text is rounded; summed over devices, so not where there are several.
        known = counters.reserved_bytes
        held = counters.live_bytes if known is None else known
    found = replace(found, held_bytes=held, says_own_cap=refusal.own_cap)
    use = _choose(readings.own(), refusal.device)
    if use is None:
        return replace(found, free_bytes=refusal.free_bytes)
    return replace(
        found,
        process_bytes=use.process_bytes,
        free_bytes=refusal.free_bytes if use.free_bytes is None else use.free_bytes,
        device_uuid=use.device_uuid,
    )


def _choose(uses: Sequence[OwnUse], device: int | None) -> OwnUse | None:
    """Give the device that the error names, else the fullest."""
    if device is not None and device < len(uses):
        return uses[device]
    known = [use for use in uses if use.free_bytes is not None]
    fullest = min(known, key=lambda use: use.free_bytes or 0, default=None)
    return uses[0] if fullest is None and len(uses) == 1 else fullest


def _simulated(error: BaseException, readings: Readings) -> OutOfMemory:
    """Read an error that says by its attributes what it knows."""
    wanted = _whole(error, "requested_bytes")
    own_cap = getattr(error, "hit_cap", None)
    return OutOfMemory(
        framework="",
        wanted_bytes=parse_wanted_bytes(str(error)) if wanted is None else wanted,
        held_bytes=_whole(error, "live_bytes"),
        free_bytes=_whole(error, "free_bytes"),
        device_uuid=readings.refused_uuid(),
        says_own_cap=own_cap if isinstance(own_cap, bool) else None,
    )


def _whole(error: BaseException, name: str) -> int | None:
    value: Any = getattr(error, name, None)
    return value if isinstance(value, int) else None
