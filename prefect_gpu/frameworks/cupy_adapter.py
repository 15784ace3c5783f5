"""The CuPy adapter: caps CuPy's memory pool by an environment variable, reads the pool, converts arrays to NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import adapter
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy

_captures = adapter.CaptureWatch()


class CupyAdapter(adapter.FrameworkAdapter):
    """Applies a policy to CuPy's default memory pool. CuPy cannot use the CPU: without a GPU nothing is applied.

    `has_started` stays `False`: a question to the pool would initialise it. Callers ask the driver instead.
    """

    name = "cupy"
    late_variables = ("CUPY_GPU_MEMORY_LIMIT",)

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the variable with the pool's limit in bytes: the smallest cap, since all devices have one limit."""
        caps = policy.cap_bytes(self.name)
        return {"CUPY_GPU_MEMORY_LIMIT": None if caps is None else str(min(caps))}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Check the devices; for `allocation=all` fill the pool. `FrameworkError`: other devices, or no memory."""
        if policy.device_kind != "nvml":
            return
        cupy = import_module("cupy")
        try:
            found, problem = cupy.cuda.runtime.getDeviceCount(), ""
        except RuntimeError as error:  # CUDARuntimeError, where there is no device or no driver
            found, problem = 0, f" ({error})"
        self.check_devices(
            policy,
            found,
            f"{problem}; the likely reason is a cupy package for another CUDA version than the driver's",
        )
        # A base class of all streams has the methods.
        for owner in getattr(getattr(cupy.cuda, "Stream", None), "__mro__", ()):
            if "begin_capture" in vars(owner):
                _captures.watch(owner, "begin_capture", "end_capture")
        caps = policy.cap_bytes(self.name)
        if caps is not None and policy.allocation == "all":
            _take_all(cupy, caps)

    def counters(self) -> Counters | None:
        """Return the counters of the pool on the calling thread's device: to read another would create a context there.

        CuPy counts no peak: `peak_live_bytes` is the memory in use now, and the caller keeps its largest sample.
        """
        cupy = adapter.imported("cupy", "get_default_memory_pool")
        if cupy is None:
            return None
        pool = cupy.get_default_memory_pool()
        try:
            live, held = int(pool.used_bytes()), int(pool.total_bytes())
        except RuntimeError:  # No device: nothing is held.
            return None
        return Counters(live, held, live, held) if held else None

    def release_cached(self) -> None:
        """Empty the default pool on the calling thread's device, and the pool of pinned host memory."""
        if self.counters() is not None:
            _release(import_module("cupy"))

    def release_unused(self) -> None:
        """Empty the default pool on the calling thread's device, unless a CUDA graph was ever captured in this process.

        The pool does not know the blocks to which a graph refers: a block freed within a capture counts as unused.
        """
        if self.counters() is None:
            return
        with _captures.none_begins():
            if not _captures.begun:
                import_module("cupy").get_default_memory_pool().free_all_blocks()

    def reduce_to_host(self, value: Any) -> Any:
        """Return a pickle reduction of a CuPy array to NumPy; `NotImplemented`: another value."""
        cupy = adapter.imported("cupy", "ndarray")
        if cupy is None or not isinstance(value, cupy.ndarray):
            return NotImplemented
        return adapter.host_value, (value.get(),)

    def calibrate(self) -> int:
        """Load cuBLAS and cuFFT, empty the pool, and return the bytes that the pool still holds."""
        cupy = import_module("cupy")
        a = cupy.ones((512, 512), dtype=cupy.float32)
        float((a @ a).sum())
        float(cupy.abs(cupy.fft.rfft2(a)).sum())
        del a
        _release(cupy)
        return int(cupy.get_default_memory_pool().total_bytes())


def _take_all(cupy: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    size = min(caps)
    for index in range(len(caps)):
        with cupy.cuda.Device(index):
            try:
                # Freed at once, the memory stays in the pool.
                cupy.cuda.alloc(size // 512 * 512)
            except MemoryError as error:
                problem = f"gpu:allocation=all could not take {size} bytes: {error}"
                raise FrameworkError("cupy", problem) from error


def _release(cupy: Any) -> None:  # needs a GPU
    # Cached plans of Fourier transforms hold memory of the pool.
    cupy.fft.config.get_plan_cache().clear()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
