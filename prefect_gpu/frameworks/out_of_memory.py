"""How much memory an out-of-memory error says was wanted.

Reads texts only, so it works on errors that crossed a pipe. Whether an error is one is the adapters'
to say (`is_out_of_memory`), and what follows from it the broker's.
"""

from __future__ import annotations

import re

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
