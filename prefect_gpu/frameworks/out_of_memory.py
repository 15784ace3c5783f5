"""What a child saw when memory ran out, and how much its error says was wanted.

Reads texts only, so it works on errors that crossed a pipe. Whether an error is one is the adapters'
to say (`is_out_of_memory`), and what follows from it `scheduling.ladder`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefect_gpu.units import parse_bytes

#: The size in each framework's message: torch "Tried to allocate 2.00 GiB", JAX and TensorFlow
#: "trying to allocate 5.00GiB" or "... 5368709120 bytes", CuPy "allocating 5,368,709,120 bytes",
#: ONNX Runtime "requested buffer of size 5368709120".
_WANTED = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|failed to allocate|"
    r"buffer of size)\s+(?:request for\s+)?([0-9][0-9.,]*)\s*([KMGT]i?B|bytes|B)?\b",
    re.IGNORECASE,
)


def parse_wanted_bytes(text: str) -> int | None:
    """Read how much the failed allocation asked for; `None`: the message does not say."""
    match = _WANTED.search(text)
    if match is None:
        return None
    number, unit = match[1].rstrip(".,").replace(",", ""), match[2] or "bytes"
    try:
        return int(number) if unit.lower() in ("bytes", "b") else parse_bytes(number + unit)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What the child saw when a body ended for want of device memory. Bytes; `None`: unknown."""

    #: As in `gpu:framework=`; empty: none of ours (a simulated device).
    framework: str
    #: What the failed allocation asked for.
    wanted_bytes: int | None = None
    #: What the frameworks held from the driver then, or had allocated where they keep no such number.
    held_bytes: int | None = None
    #: What the device showed for this process, and had free; of the fullest of its devices.
    process_bytes: int | None = None
    free_bytes: int | None = None
    #: UUID of that device; empty: not asked.
    device_uuid: str = ""
    #: The error says by itself whether the process's own cap refused.
    says_own_cap: bool | None = None
