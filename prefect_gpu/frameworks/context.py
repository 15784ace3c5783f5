"""The context of a framework: device memory of CUDA and its libraries, outside the framework's own allocator.

Measured contexts are stored on disk. `runner.context_size` measures them and chooses the figure for a budget.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from prefect_gpu.frameworks.adapter import framework_version
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB, MIB

#: Context in bytes if its measurement failed: NVML's figure minus the allocator's, one process on an H200, driver 580,
#: CUDA 13, 2026-11-20. Other GPUs and drivers showed 290 to 670 MiB.
FALLBACK_CONTEXT_BYTES: Mapping[str, int] = {
    # torch 2.11 after `calibrate`, which loads cuBLASLt and cuFFT too; 676 with cuBLAS alone.
    "torch": 766 * MIB,
    # TensorFlow 2.21: 3260 MiB shown for a limit of 2048 MiB.
    "tensorflow": int(1.2 * GIB),
    "jax": 636 * MIB,  # JAX 0.11 after `calibrate`; 602 to 618 in a plain program
    "cupy": 594 * MIB,  # CuPy 14 after `calibrate`; 588 in a plain program
    # ONNX Runtime 1.31: 680 after a small product, and 90 for cuDNN and cuFFT, as they added to torch.
    "onnxruntime": 770 * MIB,
}

#: Memory of NCCL, outside the framework's allocator, in bytes on each device of a task with several devices: 820 MiB
#: in JAX's sharding and TensorFlow's MirroredStrategy, two H100, driver 580, NCCL of CUDA 13, 2026-11-24.
COLLECTIVES_BYTES = 900 * MIB


def context_key(framework: str, device: Device) -> str:
    """Return the key of a context in a `ContextStore`: framework, version, device model and driver, as one line."""
    return json.dumps([framework, framework_version(framework), device.name, device.driver])


def with_collectives(context_bytes: int, budget_bytes: int) -> int:
    """Return a context in bytes with NCCL's buffers added: at most half of the rest of the device's budget."""
    return context_bytes + max(0, min(COLLECTIVES_BYTES, (budget_bytes - context_bytes) // 2))


class ContextStore:
    """Measured contexts in one JSON file, shared by the user's processes; by default in the user's cache folder.

    A file that cannot be read counts as empty. If it cannot be written, figures last as long as this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else default_path()
        self._own: dict[str, int] = {}

    def get(self, key: str) -> int | None:
        """Return a measured context in bytes by its `context_key`; `None`: not measured yet."""
        return self._own[key] if key in self._own else self._read().get(key)

    def put(self, key: str, context_bytes: int) -> None:
        """Store a measured context. If two processes write at once, the last one wins."""
        self._own[key] = context_bytes
        entries = {**self._read(), key: context_bytes}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Other processes may read and write now, so each writes a file of its own and renames it.
            written = self.path.with_suffix(f".{os.getpid()}-{id(entries)}")
            written.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
            written.replace(self.path)

    def _read(self) -> dict[str, int]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        entries = entries if isinstance(entries, dict) else {}
        return {k: v for k, v in entries.items() if type(v) is int and v >= 0}


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file for measured contexts, in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "prefect_gpu" / "contexts.json"
