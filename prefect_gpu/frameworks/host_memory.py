"""What frameworks take of the machine's own memory as they load. Of a device's: `context`."""

from __future__ import annotations

from collections.abc import Iterable

from prefect_gpu.units import MIB

#: What a child takes of the machine's own memory before its body has begun, by framework, beside
#: `HOST_BYTES_LEAST` for Python and Prefect: private bytes after a calibration, 16 cores, H200
#: (docs/evidence/gpu-host-memory.txt: torch 2.11, TensorFlow 2.21, JAX 0.11, CuPy 14).
HOST_BYTES = {"torch": 1048 * MIB, "tensorflow": 1776 * MIB, "jax": 1264 * MIB, "cupy": 536 * MIB}
HOST_BYTES_LEAST = 78 * MIB


def host_bytes_of(frameworks: Iterable[str]) -> int:
    """Give what a child with these frameworks takes of the machine's memory before its body, in bytes."""
    return HOST_BYTES_LEAST + sum(HOST_BYTES.get(name, 0) for name in frameworks)
