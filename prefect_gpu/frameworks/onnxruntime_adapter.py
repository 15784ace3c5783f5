"""The ONNX Runtime adapter: memory is capped by options that the task passes to its sessions.

Each session has an arena of its own, limited by an option of its CUDA provider. There is no environment variable and
no call for the whole process, so a task passes the result of `onnxruntime_provider_options` to each session. Each of
these sessions has the whole limit, other sessions have none. Threads are bounded by `OMP_NUM_THREADS`, if at all.
Arenas cannot be read from Python: there are no counters, and reports have the driver's figures.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prefect_gpu import in_task
from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import FrameworkAdapter, FrameworkPolicy
from prefect_gpu.units import MIB

#: Limit of a calibration's arena, many times its model's need: cuDNN can try every convolution algorithm.
CALIBRATION_ARENA_BYTES = 128 * MIB

#: The model of a calibration, a file of this package. It uses cuBLAS, cuDNN and cuFFT, in both precisions if they have
#: two, and runs on a GPU only. `onnx.save(onnx.parser.parse_model(TEXT), "calibration.onnx")` made it (onnx 1.23) from:
#:
#:     <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
#:     calibration (
#:         float[512, 512] rows, float[512, 512] matrix,
#:         float[8, 16, 32, 32] images, float[16, 16, 3, 3] kernel
#:     ) => (
#:         float[512, 512] product, float[8, 16, 30, 30] features, float[512, 257, 2] spectrum,
#:         float16[512, 512] half_product, float16[8, 16, 30, 30] half_features
#:     ) {
#:         product = MatMul (rows, matrix)
#:         features = Conv (images, kernel)
#:         half_rows = Cast <to = 10> (rows)
#:         half_matrix = Cast <to = 10> (matrix)
#:         half_images = Cast <to = 10> (images)
#:         half_kernel = Cast <to = 10> (kernel)
#:         half_product = MatMul (half_rows, half_matrix)
#:         half_features = Conv (half_images, half_kernel)
#:         spectrum = com.microsoft.Rfft <signal_ndim = 2> (rows)
#:     }
CALIBRATION_MODEL = "calibration.onnx"

#: Policy for later sessions, stored by `apply`: ONNX Runtime has no setting for it.
_applied: FrameworkPolicy | None = None

#: Sessions of calibrations. Without them the libraries' memory would be freed before the driver is asked.
_kept: list[Any] = []


class OnnxRuntimeAdapter(FrameworkAdapter):
    """Stores the policy for ONNX Runtime's CUDA provider, which has no environment variables and no counters.

    `has_started` stays `False`, since sessions cannot be listed: the driver is asked. `release_cached` does nothing:
    an arena is freed with its session, and a run can shrink it (`RunOptions` with
    `memory.enable_memory_arena_shrinkage`). `reduce_to_host` leaves every value: sessions return NumPy arrays.
    """

    name = "onnxruntime"

    def apply(self, policy: FrameworkPolicy) -> None:
        """Store the policy for later sessions; if a tag names ONNX Runtime, check that it has a CUDA provider."""
        global _applied
        _applied = policy
        if policy.device_kind != "nvml" or self.name not in policy.frameworks:
            return
        providers = import_module("onnxruntime").get_available_providers()
        if "CUDAExecutionProvider" not in providers:
            raise FrameworkError(
                self.name,
                f"{len(policy.device_uuids)} GPU(s) allotted, but no CUDAExecutionProvider among "
                f"{', '.join(providers)}; install onnxruntime-gpu",
            )

    def calibrate(self) -> int:
        """Load cuBLAS, cuDNN and cuFFT with a small model; return the bytes of the model's inputs and outputs.

        The arena's other memory (workspaces, 128 MiB at most) is unknown and counts as context.
        """
        onnxruntime = import_module("onnxruntime")
        options = provider_options(0, CALIBRATION_ARENA_BYTES)
        session, inputs = calibration_session(onnxruntime, options)
        outputs = session.run(None, inputs)
        _kept.append(session)
        return sum(int(array.nbytes) for array in (*inputs.values(), *outputs))


def onnxruntime_provider_options(device: int = 0) -> dict[str, str]:
    """Return the options of ONNX Runtime's CUDA provider that cap a session at this task's budget.

        options = onnxruntime_provider_options()
        providers = [("CUDAExecutionProvider", options)]
        session = onnxruntime.InferenceSession(path, providers=providers)

    Each session has the whole limit: for two at a time, halve `gpu_mem_limit`. Arenas grow by the requested size, not
    by powers of two as by default. ONNX Runtime cannot take an arena at its start, so `gpu:allocation=all` is a limit
    here. There is no limit with `growth`, on devices that are not GPUs, and outside a GPU task.

    Args:
        device: Index among the task's devices, from 0.

    Raises:
        ValueError: The task has no such device.
    """
    allocation = in_task.current_allocation()
    if device < 0 or (allocation is not None and device >= len(allocation.device_uuids)):
        raise ValueError(f"device={device} is no device of this task; its first is 0")
    if allocation is None:
        return provider_options(device, None)
    # The first import applies the policy.
    import_module("onnxruntime")
    if _applied is None:
        # Tags name other frameworks only: no policy was applied.
        return provider_options(device, allocation.cap_bytes)
    caps = _applied.cap_bytes(OnnxRuntimeAdapter.name)
    return provider_options(device, None if caps is None else caps[device])


def provider_options(device: int, limit_bytes: int | None) -> dict[str, str]:
    """Return CUDA provider options for a device index and an arena's limit in bytes (`None`: no limit). Pure."""
    options = {"device_id": str(device), "arena_extend_strategy": "kSameAsRequested"}
    if limit_bytes is not None:
        options["gpu_mem_limit"] = str(limit_bytes)
    return options


def calibration_model() -> bytes:
    """Return the calibration's model as a serialised ONNX file."""
    # Imported late: it takes 8 ms.
    import importlib.resources

    return (importlib.resources.files(__package__) / CALIBRATION_MODEL).read_bytes()


def calibration_session(onnxruntime: Any, provider: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return a session of the calibration's model on a GPU, and its inputs by name, filled with ones."""
    if hasattr(onnxruntime, "preload_dlls"):
        # CUDA's libraries may be in Python packages, where the system does not look.
        onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    # Otherwise operations that the GPU cannot run would run on the processor.
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(
        calibration_model(), options, providers=[("CUDAExecutionProvider", provider)]
    )
    numpy = import_module("numpy")
    return session, {i.name: numpy.ones(i.shape, numpy.float32) for i in session.get_inputs()}
