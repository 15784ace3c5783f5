"""CuPy: its pool is capped through the environment; counters, arrays to NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import (
    CaptureWatch,
    Counters,
    FrameworkAdapter,
    FrameworkPolicy,
    host_value,
    imported,
)

_captures = CaptureWatch()


class CupyAdapter(FrameworkAdapter):
    """CuPy's default memory pool. CuPy cannot use the CPU: without a GPU nothing is applied.

    `has_started` stays `False`: asking the pool would initialise it. The driver is asked instead.
    """

    name = "cupy"
    module = "cupy"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the pool's limit in bytes: the smallest cap, since all devices have one limit."""
        caps = policy.cap_bytes(self.name)
        return {"CUPY_GPU_MEMORY_LIMIT": None if caps is None else str(min(caps))}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: check the devices; with `allocation=all`, fill the pool.

        Raises:
            FrameworkError: CuPy sees other devices than the allotted ones, or cannot take its budget.
        """
        if policy.device_kind != "nvml":
            return
        cupy = import_module("cupy")
        _check_devices(cupy, len(policy.device_uuids))
        _watch_captures(cupy)
        caps = policy.cap_bytes(self.name)
        if caps is not None and policy.allocation == "all":
            _take_all(cupy, caps)

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Return `True` for the pool's limit, which CuPy reads with the first allocation."""
        return name == "CUPY_GPU_MEMORY_LIMIT"

    def counters(self) -> Counters | None:
        """Child: read the default pool on the calling thread's device.

        CuPy keeps no peak: `peak_live_bytes` is the memory in use now, and the reader of samples keeps the
        largest. Reading another device would create a context there.
        """
        cupy = imported("cupy", "get_default_memory_pool")
        return None if cupy is None else _read_counters(cupy)

    def release_cached(self) -> None:
        """Child: empty the default pool on the calling thread's device, and the pinned memory's."""
        cupy = imported("cupy", "get_default_memory_pool")
        if cupy is not None and _read_counters(cupy) is not None:
            _release(cupy)

    def release_unused(self) -> None:
        """Child: empty the default pool on the calling thread's device, unless a CUDA graph was ever captured.

        The pool does not know which blocks a graph refers to: a block that was freed within a capture counts as
        unused.
        """
        cupy = imported("cupy", "get_default_memory_pool")
        if cupy is None or _read_counters(cupy) is None:
            return
        with _captures.none_begins():
            if not _captures.begun:
                cupy.get_default_memory_pool().free_all_blocks()

    def reduce_to_host(self, value: Any) -> Any:
        """Child: reduce arrays to NumPy."""
        cupy = imported("cupy", "ndarray")
        if cupy is None or not isinstance(value, cupy.ndarray):
            return NotImplemented
        return host_value, (value.get(),)

    def calibrate(self) -> int:
        """Child: load cuBLAS and cuFFT, empty the pool, return the bytes that it still holds."""
        cupy = import_module("cupy")
        a = cupy.ones((512, 512), dtype=cupy.float32)
        float((a @ a).sum())
        float(cupy.abs(cupy.fft.rfft2(a)).sum())
        del a
        _release(cupy)
        return int(cupy.get_default_memory_pool().total_bytes())


def _check_devices(cupy: Any, allotted: int) -> None:
    try:
        found, problem = cupy.cuda.runtime.getDeviceCount(), ""
    except RuntimeError as error:  # CUDARuntimeError, where there is no device or no driver
        found, problem = 0, f" ({error})"
    if found != allotted:
        raise FrameworkError(
            "cupy",
            f"{allotted} GPU(s) allotted, {found} found{problem}; the likely reason is a cupy "
            f"package for another CUDA version than the driver's",
        )


def _watch_captures(cupy: Any) -> None:
    # A base of all streams has the method.
    for owner in getattr(getattr(cupy.cuda, "Stream", None), "__mro__", ()):
        if "begin_capture" in vars(owner):
            _captures.watch(owner, "begin_capture", "end_capture")


def _take_all(cupy: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    # The pool's limit is one for all devices (see `adapter`).
    size = min(caps)
    for index in range(len(caps)):
        with cupy.cuda.Device(index):
            try:
                # Freed at once: it stays in the pool.
                cupy.cuda.alloc(size // 512 * 512)
            except MemoryError as error:
                raise FrameworkError(
                    "cupy", f"gpu:allocation=all could not take {size} bytes: {error}"
                ) from error


def _release(cupy: Any) -> None:  # needs a GPU
    # Plans of transforms keep their work areas in the pool.
    cupy.fft.config.get_plan_cache().clear()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def _read_counters(cupy: Any) -> Counters | None:  # needs a GPU
    pool = cupy.get_default_memory_pool()
    try:
        live, held = int(pool.used_bytes()), int(pool.total_bytes())
    except RuntimeError:  # No device: nothing is held.
        return None
    if held == 0:
        return None
    return Counters(live, held, live, held)
