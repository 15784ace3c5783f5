"""Facts about an out-of-memory error in a child, read while the body's frames still hold their memory.

`frameworks.out_of_memory` recognises the errors, and `scheduling.ladder` chooses the next budget.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from prefect_gpu.child.readings import Readings
from prefect_gpu.devices.own import OwnUse
from prefect_gpu.frameworks.out_of_memory import (
    NO_BATCH_SIZE,
    OutOfMemory,
    find_out_of_memory,
    parse_wanted_bytes,
)

#: Most characters of a framework's memory summary. PyTorch writes 5,000 for each device.
SUMMARY_CHARS = 64_000

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMG]iB)"

# Patterns are not compiled here: that takes 1.5 ms, and most children never need them.

#: Error texts of PyTorch from 2.0 on. If reserved and wanted bytes exceed the allowed bytes, PyTorch refuses without
#: asking the driver. The text has "allowed" whenever a fraction is set, even if the device refused.
_TORCH_DEVICE = r"GPU ([0-9]+) has a total capacity"
_TORCH_FREE = rf"of which {_SIZE} is free"
_TORCH_WANTED = rf"Tried to allocate {_SIZE}"
_TORCH_ALLOCATED = rf"Of the allocated memory {_SIZE} is allocated by PyTorch"
_TORCH_CACHED = rf"{_SIZE} is reserved by PyTorch but unallocated"
_TORCH_ALLOWED = rf"{_SIZE} allowed;"

#: Error text of CuPy, whose pool has a limit as well. Sizes are in whole bytes.
_CUPY = (
    r"Out of memory allocating [0-9,]+ bytes \(allocated so far: ([0-9,]+) bytes"
    r"(?:, limit set to: ([0-9,]+) bytes)?\)"
)


def parse_refusal(framework: str, text: str) -> tuple[OutOfMemory, int | None]:
    """Return the facts in an error text of PyTorch or CuPy, and its device's index from 0 (`None`: not in the text)."""
    wanted = parse_wanted_bytes(text)
    cupy = re.search(_CUPY, text)
    if cupy is not None:
        held, limit = (None if n is None else int(n.replace(",", "")) for n in cupy.groups())
        over_limit = None if limit is None else (wanted or 0) + (held or 0) > limit
        return OutOfMemory(framework, wanted, held, says_own_cap=over_limit), None
    device = re.search(_TORCH_DEVICE, text)
    free = _find_size(_TORCH_FREE, text)
    asked, allocated, cached, allowed = sizes = [
        _find_size(pattern, text)
        for pattern in (_TORCH_WANTED, _TORCH_ALLOCATED, _TORCH_CACHED, _TORCH_ALLOWED)
    ]
    over_cap = None
    if asked and allocated and cached and allowed:
        over = asked[0] + allocated[0] + cached[0] - allowed[0]
        rounding = sum(size[1] for size in sizes if size)
        over_cap = None if rounding and abs(over) <= rounding else over > 0
    found = OutOfMemory(
        framework,
        wanted,
        held_bytes=allocated[0] + cached[0] if allocated and cached else None,
        free_bytes=free[0] if free else None,
        says_own_cap=over_cap,
    )
    return found, None if device is None else int(device[1])


def _find_size(pattern: str, text: str) -> tuple[int, int] | None:
    """Return the size in bytes that a pattern finds, and the largest error of its rounding to two decimals."""
    match = re.search(pattern, text)
    if match is None:
        return None
    unit = _UNITS[match[2]]
    return int(float(match[1]) * unit), 0 if unit == 1 else unit // 200 + 1


def find_shortage(
    error: BaseException, frameworks: Collection[str], readings: Readings
) -> OutOfMemory | None:
    """Return facts about the out-of-memory error of `frameworks` in an exception or its causes; `None`: none."""
    found = find_out_of_memory(error, frameworks)
    if found is None:
        return None
    cause, framework = found
    if not framework:
        return _read_simulated(cause)
    if NO_BATCH_SIZE in str(cause).lower():
        counters = readings.counters()
        if counters is None or not counters.alloc_retries:
            return None
    return replace(
        _read_state(framework, str(cause), readings),
        summary=readings.memory_summary(framework)[:SUMMARY_CHARS],
        # Last: with a path for it, PyTorch imports its compiler for the stacks, which takes 4 s (2.11, 2.13).
        snapshot_path=readings.write_snapshot(framework),
    )


def _read_state(framework: str, text: str, readings: Readings) -> OutOfMemory:
    found, device = parse_refusal(framework, text)
    counters = readings.counters()
    if len(readings.device_uuids) == 1 and counters is not None:
        # Exact, unlike the rounded text. Counters are sums over devices, so only for one device.
        reserved = counters.reserved_bytes
        found = replace(found, held_bytes=counters.live_bytes if reserved is None else reserved)
    use = _choose(readings.own(), device)
    if use is None:
        return found
    return replace(
        found,
        process_bytes=use.process_bytes,
        free_bytes=found.free_bytes if use.free_bytes is None else use.free_bytes,
        device_uuid=use.device_uuid,
    )


def _choose(uses: Sequence[OwnUse], device: int | None) -> OwnUse | None:
    """Return the use of the device that the error names (by index), else of the device with least free memory."""
    if device is not None and device < len(uses):
        return uses[device]
    known = [use for use in uses if use.free_bytes is not None]
    fullest = min(known, key=lambda use: use.free_bytes or 0, default=None)
    return uses[0] if fullest is None and len(uses) == 1 else fullest


def _read_simulated(error: BaseException) -> OutOfMemory:
    """Return the facts in the attributes of a simulated device's error."""
    wanted: int | None = getattr(error, "requested_bytes", None)
    return OutOfMemory(
        framework="",
        wanted_bytes=parse_wanted_bytes(str(error)) if wanted is None else wanted,
        held_bytes=getattr(error, "live_bytes", None),
        free_bytes=getattr(error, "free_bytes", None),
        device_uuid=getattr(error, "device_uuid", ""),
        says_own_cap=getattr(error, "hit_cap", None),
    )
