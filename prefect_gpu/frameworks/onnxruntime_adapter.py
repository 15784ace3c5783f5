"""ONNX Runtime: capped by options that the task passes on, since nothing else caps it.

Each session has an arena of its own, limited by an option of its CUDA provider. There is no
environment variable and no call for the process, so a task asks `onnxruntime_provider_options` and
hands them to each session. A session made without them is not capped, and of several that are each
has the whole limit. Threads are bounded by `OMP_NUM_THREADS` at most. Arenas cannot be read from
Python: there are no counters, and reports show the process as the driver does.
"""

from __future__ import annotations

from typing import Any

from prefect_gpu import inside
from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.frameworks.onnx_model import INPUTS, calibration_model, weight_bytes
from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory
from prefect_gpu.frameworks.values import is_named, load, says
from prefect_gpu.units import MIB

#: Bytes that the arena of a calibration may take: many times what its model needs, so that cuDNN
#: can try every way to convolve.
CALIBRATION_ARENA_BYTES = 128 * MIB

#: What `apply` was given: ONNX Runtime cannot keep it, and only sessions of later can use it.
_applied: FrameworkPolicy | None = None

#: Sessions of a calibration. Without them the libraries' own memory would go before it was read.
_kept: list[Any] = []


class OnnxRuntimeAdapter:
    """ONNX Runtime's CUDA provider, as far as this package reaches into it: see the module."""

    name = "onnxruntime"
    module = "onnxruntime"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Give nothing: there is no variable for its memory."""
        return {}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: keep the policy for the options, and check for a CUDA provider where a tag names it.

        Raises:
            FrameworkError: It has none, and would silently use the CPU.
        """
        global _applied
        _applied = policy
        if policy.device_kind != "nvml" or self.name not in policy.frameworks:
            return
        providers = load("onnxruntime").get_available_providers()
        if "CUDAExecutionProvider" not in providers:
            raise FrameworkError(
                self.name,
                f"{len(policy.device_uuids)} GPU(s) allotted, but no CUDAExecutionProvider among "
                f"{', '.join(providers)}; install onnxruntime-gpu",
            )

    def standby_environment(self) -> dict[str, str]:
        """Give nothing."""
        return {}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Name nothing: it has no variables."""
        return False

    def has_started(self) -> bool:
        """Child: know nothing of sessions; what they start of the driver is seen there."""
        return False

    def counters(self) -> Counters | None:
        """Give nothing: its arenas have no counters in Python."""
        return None

    def sample(self) -> tuple[int, int] | None:
        """Give nothing, as `counters`."""
        return None

    def release_cached(self) -> None:
        """Do nothing: an arena is its session's, and goes with it.

        A single run can shrink it: `RunOptions` with `memory.enable_memory_arena_shrinkage`.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the arena's message and the driver's: they have no error class of their own.

        An arena in the machine's own memory says the same, so in a GPU task it is taken for a
        device's.
        """
        if looks_out_of_memory(error) == self.name:
            return True
        return is_named(error, "onnxruntime", ("Fail", "RuntimeException", "EPFail")) and says(
            error, "Failed to allocate memory", "out of memory"
        )

    def reduce_to_host(self, value: Any) -> Any:
        """Leave everything: sessions return NumPy arrays."""
        return NotImplemented

    def calibrate(self) -> int:
        """Child: load cuBLAS, cuDNN and cuFFT with a model that is written here.

        Returns:
            The model's weights, inputs and outputs, which the arena surely holds. What else it holds
            (workspaces, 128 MiB at most) nobody tells: it counts as context, on the safe side.
        """
        return _calibrate(load("onnxruntime"))


def onnxruntime_provider_options(device: int = 0) -> dict[str, str]:
    """Give the options of ONNX Runtime's CUDA provider that hold a session to this task's budget.

        options = onnxruntime_provider_options()
        providers = [("CUDAExecutionProvider", options)]
        session = onnxruntime.InferenceSession(path, providers=providers)

    The limit is each session's: for two at a time, halve `gpu_mem_limit`. Arenas grow by what is
    asked, not by powers of two as they do by themselves. ONNX Runtime cannot take an arena at its
    start, so `gpu:allocation=all` is a limit here; with `growth`, on devices that are no GPUs and
    outside a GPU task there is none.

    Args:
        device: Which of the task's devices, from 0.

    Raises:
        ValueError: The task has no such device.
    """
    allocation = inside.current_allocation()
    if device < 0 or (allocation is not None and device >= len(allocation.device_uuids)):
        raise ValueError(f"device={device} is no device of this task; its first is 0")
    if allocation is None:
        return provider_options(device, None)
    # With its first import the policy is applied.
    load("onnxruntime")
    if _applied is None:
        # Tags name other frameworks; what they leave is nobody's.
        return provider_options(device, allocation.cap_bytes)
    caps = _applied.cap_bytes(OnnxRuntimeAdapter.name)
    return provider_options(device, None if caps is None else caps[device])


def provider_options(device: int, limit_bytes: int | None) -> dict[str, str]:
    """Write the options: which device, and how large an arena may become (`None`: any size). Pure."""
    options = {"device_id": str(device), "arena_extend_strategy": "kSameAsRequested"}
    if limit_bytes is not None:
        options["gpu_mem_limit"] = str(limit_bytes)
    return options


def _calibrate(onnxruntime: Any) -> int:  # needs a GPU
    if hasattr(onnxruntime, "preload_dlls"):
        # CUDA's libraries may have come as Python packages, where the system does not look.
        onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    # Else what the GPU cannot do is quietly done on the processor, all of it if need be.
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    cuda = ("CUDAExecutionProvider", provider_options(0, CALIBRATION_ARENA_BYTES))
    session = onnxruntime.InferenceSession(calibration_model(), options, providers=[cuda])
    numpy = load("numpy")
    given = {name: numpy.ones(shape, numpy.float32) for name, shape in INPUTS.items()}
    made = session.run(None, given)
    _kept.append(session)
    return weight_bytes() + sum(int(array.nbytes) for array in (*given.values(), *made))
