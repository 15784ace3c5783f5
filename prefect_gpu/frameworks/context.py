"""What a framework takes of a device outside its own allocator: measured once, kept on disk.

It stores and looks up. Measuring is `calibration`, in a child; which figure a budget uses is the
broker's.
"""

from __future__ import annotations

import collections
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from prefect_gpu.units import GIB, MIB

#: Bytes used where a calibration failed: NVML less the allocator's own, one process on an H200,
#: driver 580, CUDA 13, 2026-11-20. Other GPUs and drivers were seen to have 290 to 670 MiB.
FALLBACK_CONTEXT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        # torch 2.11 after `calibrate`, which loads cuBLASLt and cuFFT too; 676 with cuBLAS alone.
        "torch": 766 * MIB,
        # TensorFlow 2.21: 3260 MiB shown for a limit of 2048 MiB (FACTS.md).
        "tensorflow": int(1.2 * GIB),
        "jax": 636 * MIB,  # JAX 0.11 after `calibrate`; 602 to 618 in a plain program (FACTS.md)
        "cupy": 594 * MIB,  # CuPy 14 after `calibrate`; 588 in a plain program (FACTS.md)
        # ONNX Runtime 1.31: 680 after a small product (FACTS.md), and 90 for cuDNN and cuFFT, which
        # is what they added to torch.
        "onnxruntime": 770 * MIB,
    }
)

#: For any other framework.
DEFAULT_CONTEXT_BYTES = 700 * MIB


@dataclass(frozen=True, slots=True)
class ContextKey:
    """What a context's size depends on."""

    #: As in `gpu:framework=`.
    framework: str
    #: Its installed version; empty: unknown.
    version: str
    #: Product name of the device.
    device_name: str
    #: Driver version.
    driver: str

    def text(self) -> str:
        """Give the key as one line, unique for its fields."""
        return json.dumps([self.framework, self.version, self.device_name, self.driver])


def fallback_context_bytes(framework: str) -> int:
    """Give the context to assume where none could be measured."""
    return FALLBACK_CONTEXT_BYTES.get(framework, DEFAULT_CONTEXT_BYTES)


class ContextWatch:
    """Sees the context of one process: what the device shows above what its allocators hold.

    The two are read at different times by different processes, so each reading of the device is set
    against the largest that the allocators held between the counters before and after it. Where they
    gave nothing back in between, what they held only rose, and the later counters bound it: the
    context can then only be too small, and the largest of many is right. Where they gave something
    back, they may have held any amount for a moment (`cudnn.benchmark` tries its workspaces that
    way), and the reading says nothing. Where they do not count what they give back, the most that
    they ever held bounds a moment that rose above it, and no other. What is read after the last
    counters says nothing either: a process may take gigabytes before it dies without a word. For one
    thread at a time.
    """

    def __init__(self) -> None:
        self._reserved_bytes: int | None = None
        self._freed_bytes: int | None = None
        self._peak_bytes = 0
        #: Readings since the last counters, in bytes: the newest.
        self._pending: collections.deque[int] = collections.deque(maxlen=8)
        self._seen_bytes: int | None = None

    def add_reading(self, process_bytes: int) -> None:
        """Take what the device shows for the process."""
        if process_bytes and self._reserved_bytes is not None:
            self._pending.append(process_bytes)

    def add_reserved(
        self,
        reserved_bytes: int | None,
        peak_bytes: int | None = None,
        freed_bytes: int | None = None,
    ) -> None:
        """Take what its allocators say; `None`: they do not.

        Args:
            reserved_bytes: What they hold.
            peak_bytes: The most they ever held.
            freed_bytes: What they gave back so far, all told.
        """
        before, self._reserved_bytes = self._reserved_bytes, reserved_bytes
        freed_before, self._freed_bytes = self._freed_bytes, freed_bytes
        peak_before, self._peak_bytes = self._peak_bytes, max(self._peak_bytes, peak_bytes or 0)
        if before is not None and reserved_bytes is not None and freed_before == freed_bytes:
            # A peak that rose did so between the two.
            rose = self._peak_bytes if self._peak_bytes > peak_before else 0
            self._settle(max(before, reserved_bytes, rose))
        self._pending.clear()

    def seen_bytes(self) -> int | None:
        """Give the largest context seen so far; `None`: none."""
        return self._seen_bytes

    def _settle(self, reserved_bytes: int) -> None:
        for process_bytes in self._pending:
            if process_bytes > reserved_bytes > 0:
                self._seen_bytes = max(self._seen_bytes or 0, process_bytes - reserved_bytes)


class ContextStore:
    """Measured contexts in one JSON file, shared by the user's processes.

    Losing it costs a calibration, so a file that cannot be read counts as empty and one that cannot
    be written is left: figures then last as long as this object.

    Args:
        path: The file; `None`: `prefect_gpu/contexts.json` in the user's cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else default_path()
        self._own: dict[str, int] = {}

    def get(self, key: ContextKey) -> int | None:
        """Look a context up, in bytes; `None`: not measured yet."""
        text = key.text()
        return self._own[text] if text in self._own else self._read().get(text)

    def put(self, key: ContextKey, context_bytes: int) -> None:
        """Keep a measured context. Of two processes that write at once the last wins."""
        self._own[key.text()] = context_bytes
        entries = {**self._read(), key.text(): context_bytes}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, json.dumps(entries, indent=1, sort_keys=True))
        except OSError:
            pass

    def _read(self) -> dict[str, int]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {k: v for k, v in entries.items() if type(v) is int and v >= 0}


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Give the file in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "prefect_gpu" / "contexts.json"


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
