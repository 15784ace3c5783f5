"""ONNX Runtime: recognised when it runs out of memory; not capped yet.

Its arena is limited per session by a provider option (`gpu_mem_limit`), and there is no
environment variable or process-wide call for it. Until a helper gives those options, a budget is
a reservation only for this framework, threads are bounded by `OMP_NUM_THREADS` at most, and it has
no counters (reports then show the process as the driver does).
"""

from __future__ import annotations

from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.frameworks.values import is_named, load, says


class OnnxRuntimeAdapter:
    """ONNX Runtime's CUDA provider, as far as this package reaches into it: see the module."""

    name = "onnxruntime"
    module = "onnxruntime"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Give nothing: there is no variable for its memory."""
        return {}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: where a tag names it, check that it has a CUDA provider.

        Raises:
            FrameworkError: It has none, and would silently use the CPU.
        """
        if policy.device_kind != "nvml" or self.name not in policy.frameworks:
            return
        providers = load("onnxruntime").get_available_providers()
        if "CUDAExecutionProvider" not in providers:
            raise FrameworkError(
                self.name,
                f"{len(policy.device_uuids)} GPU(s) allotted, but no CUDAExecutionProvider among "
                f"{', '.join(providers)}; install onnxruntime-gpu",
            )

    def counters(self) -> Counters | None:
        """Give nothing: its arenas have no counters in Python."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the arena's message: it has no error class of its own."""
        return is_named(error, "onnxruntime", ("Fail", "RuntimeException")) and says(
            error, "bfc_arena", "Failed to allocate memory", "out of memory"
        )

    def reduce_to_host(self, value: Any) -> Any:
        """Leave everything: sessions return NumPy arrays."""
        return NotImplemented

    def calibrate(self) -> int:
        """Refuse: a calibration needs a model file.

        Raises:
            FrameworkError: Always; the fallback context is used.
        """
        raise FrameworkError(self.name, "cannot be calibrated without a model")
