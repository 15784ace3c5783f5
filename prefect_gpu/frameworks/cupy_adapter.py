"""CuPy: its pool is capped through the environment; counters, arrays to NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import adapter
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy

_captures = adapter.CaptureWatch()


class CupyAdapter(adapter.FrameworkAdapter):
    """CuPy's default memory pool. CuPy cannot use the CPU: without a GPU nothing is applied.

    `has_started` stays `False`: asking the pool would initialise it. The driver is asked instead.
    """

    name = "cupy"
    module = "cupy"
    # Read with the first allocation.
    late_variables = ("CUPY_GPU_MEMORY_LIMIT",)

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
        self._check_devices(cupy, policy)
        # A base of all streams has the methods.
        for owner in getattr(getattr(cupy.cuda, "Stream", None), "__mro__", ()):
            if "begin_capture" in vars(owner):
                _captures.watch(owner, "begin_capture", "end_capture")
        caps = policy.cap_bytes(self.name)
        if caps is not None and policy.allocation == "all":
            _take_all(cupy, caps)

    def counters(self) -> Counters | None:
        """Child: read the default pool on the calling thread's device: reading another would create a context there.

        CuPy keeps no peak: `peak_live_bytes` is the memory in use now, and the reader of samples keeps the largest.
        """
        cupy = adapter.imported("cupy", "get_default_memory_pool")
        return None if cupy is None else _read_counters(cupy)

    def release_cached(self) -> None:
        """Child: empty the default pool on the calling thread's device, and the pinned memory's."""
        if self.counters() is not None:
            _release(import_module("cupy"))

    def release_unused(self) -> None:
        """Child: empty the default pool on the calling thread's device, unless a CUDA graph was ever captured.

        The pool does not know which blocks a graph refers to: a block that was freed within a capture counts as unused.
        """
        if self.counters() is None:
            return
        with _captures.none_begins():
            if not _captures.begun:
                import_module("cupy").get_default_memory_pool().free_all_blocks()

    def reduce_to_host(self, value: Any) -> Any:
        """Child: reduce arrays to NumPy."""
        cupy = adapter.imported("cupy", "ndarray")
        if cupy is None or not isinstance(value, cupy.ndarray):
            return NotImplemented
        return adapter.host_value, (value.get(),)

    def calibrate(self) -> int:
        """Child: load cuBLAS and cuFFT, empty the pool, return the bytes that it still holds."""
        cupy = import_module("cupy")
        a = cupy.ones((512, 512), dtype=cupy.float32)
        float((a @ a).sum())
        float(cupy.abs(cupy.fft.rfft2(a)).sum())
        del a
        _release(cupy)
        return int(cupy.get_default_memory_pool().total_bytes())

    def _check_devices(self, cupy: Any, policy: FrameworkPolicy) -> None:
        try:
            found, problem = cupy.cuda.runtime.getDeviceCount(), ""
        except RuntimeError as error:  # CUDARuntimeError, where there is no device or no driver
            found, problem = 0, f" ({error})"
        self.check_devices(
            policy,
            found,
            f"{problem}; the likely reason is a cupy package for another CUDA version than the driver's",
        )


def _take_all(cupy: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    # The pool's limit is one for all devices (see `adapter`).
    size = min(caps)
    for index in range(len(caps)):
        with cupy.cuda.Device(index):
            try:
                # Freed at once: it stays in the pool.
                cupy.cuda.alloc(size // 512 * 512)
            except MemoryError as error:
                problem = f"gpu:allocation=all could not take {size} bytes: {error}"
                raise FrameworkError("cupy", problem) from error


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
