"""TensorFlow and Keras on it: cap or growth, threads, counters, arrays to NumPy.

TensorFlow fixes its devices when its runtime starts (the first operation). It then takes its limit whole, unless the
program asks for growth: `allocation=limit` and `allocation=all` differ only in the time. `tensorflow_devices` enforces
limits.
"""

from __future__ import annotations

import pickle
from importlib import import_module
from types import MappingProxyType
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import adapter
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy, host_value, imported
from prefect_gpu.frameworks.tensorflow_devices import hold_caps
from prefect_gpu.units import MIB


class TensorFlowAdapter(adapter.FrameworkAdapter):
    """TensorFlow on CUDA devices; on the host only its threads are set.

    `release_cached` does nothing: TensorFlow keeps its regions until the process ends.
    """

    name = "tensorflow"
    module = "tensorflow"
    # Otherwise each process writes three lines about oneDNN and the processor (2.21).
    default_environment = MappingProxyType({"TF_CPP_MIN_LOG_LEVEL": "1"})
    # Read when its runtime starts; the level of its log at any time.
    late_variables = (
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
    )

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return growth, which overrides settings of the program. Under a cap an inherited growth is removed."""
        growth = policy.cap_bytes(self.name) is None
        return {"TF_FORCE_GPU_ALLOW_GROWTH": "true" if growth else None}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: configure devices and threads before TensorFlow's runtime starts; refuse a started runtime."""
        tf = import_module("tensorflow")
        try:
            _bound_threads(tf, policy.cpus)
            if policy.device_kind == "nvml":
                self._configure_devices(tf, policy)
        except (RuntimeError, ValueError) as error:
            raise FrameworkError(
                self.name,
                f"refused the policy ({error}); its runtime must not start before the task's body",
            ) from error

    def has_started(self) -> bool:
        """Child: return whether the runtime has started, which fixes devices and threads."""
        return _started_tensorflow() is not None

    def counters(self) -> Counters | None:
        """Child: read the memory in use of the GPU allocators, which do not count reserved memory."""
        tf = _started_tensorflow()
        if tf is None:
            return None
        gpus = tf.config.list_logical_devices("GPU")
        if not gpus:
            return None
        infos = [tf.config.experimental.get_memory_info(f"GPU:{i}") for i in range(len(gpus))]
        return Counters(
            live_bytes=sum(int(info["current"]) for info in infos),
            reserved_bytes=None,
            peak_live_bytes=sum(int(info["peak"]) for info in infos),
            peak_reserved_bytes=None,
        )

    def reduce_to_host(self, value: Any) -> Any:
        """Child: reduce eager tensors and variables to NumPy, on the CPU too, so that flows see one type.

        An error of a session travels without its operation. `_reduce_keras` refuses Keras models.
        """
        tf = imported("tensorflow", "Tensor", "Variable", "config", "errors")
        if tf is None:
            return NotImplemented
        if isinstance(value, tf.errors.OpError) and value.op is not None:
            # A session's error names an operation, which belongs to a graph of this process.
            make, arguments = value.__reduce__()
            return make, tuple(None if each is value.op else each for each in arguments)
        if isinstance(value, (tf.Tensor, tf.Variable)) and hasattr(value, "numpy"):
            return host_value, (value.numpy(),)
        return _reduce_keras(tf, value)

    def calibrate(self) -> int:
        """Child: load cuBLAS, cuDNN and cuFFT; needs growth.

        Returns:
            The peak in use, rounded up to the 2 MiB regions that growth takes. TensorFlow reports no other figure, and
            never returns memory.
        """
        tf = import_module("tensorflow")
        with tf.device("GPU:0"):
            for dtype in (tf.float32, tf.bfloat16):
                a = tf.ones([512, 512], dtype)
                tf.reduce_sum(a @ a)
                images = tf.Variable(tf.ones([8, 32, 32, 16], dtype))
                kernel = tf.Variable(tf.ones([3, 3, 16, 16], dtype))
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME"))
                tape.gradient(loss, [images, kernel])
            tf.abs(tf.signal.rfft2d(tf.ones([64, 64]))).numpy()
        peak = int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        return -(-peak // (2 * MIB)) * 2 * MIB

    def _configure_devices(self, tf: Any, policy: FrameworkPolicy) -> None:
        gpus = tf.config.list_physical_devices("GPU")
        why = (
            "GPU libraries (CUDA, cuDNN) that it could not open, which it says in a log line"
            if tf.test.is_built_with_cuda()
            else "a build without CUDA"
        )
        self.check_devices(
            policy,
            len(gpus),
            f", so it would silently use the CPU; the likely reason is {why}; install "
            f"tensorflow[and-cuda], or name what the task uses on the GPU with gpu:framework",
        )
        if self.has_started():
            raise RuntimeError("its GPUs are open")
        hold_caps(policy.cap_bytes(self.name), policy.total_bytes)
        if policy.allocation == "all":
            _start_devices(tf, len(gpus))


def _bound_threads(tf: Any, cpus: int) -> None:
    threading = tf.config.threading
    for kind in ("intra", "inter"):
        if getattr(threading, f"get_{kind}_op_parallelism_threads")() != cpus:
            getattr(threading, f"set_{kind}_op_parallelism_threads")(cpus)


def _start_devices(tf: Any, count: int) -> None:  # needs a GPU
    for index in range(count):
        with tf.device(f"GPU:{index}"):
            tf.zeros([1]).numpy()


def _started_tensorflow() -> Any:
    """Return `tensorflow` once its runtime has started, else `None`."""
    # `tf.config.list_logical_devices` would start it; there is no public way to look.
    module = imported("tensorflow.python.eager.context", "_context")
    if module is None or not getattr(module._context, "_initialized", False):
        return None
    return imported("tensorflow", "config")


def reduce_traced(value: Any) -> Any:
    """Return a pickle reduction that traces a `tf.function` anew from its Python function, or `NotImplemented`."""
    if type(value).__name__ != "Function" or not hasattr(value, "python_function"):
        return NotImplemented
    options = {
        "input_signature": value.input_signature,
        "jit_compile": getattr(value, "_jit_compile", None),
        "reduce_retracing": getattr(value, "_reduce_retracing", False),
    }
    return _trace, (value.python_function, options)


def _trace(function: Any, options: dict[str, Any]) -> Any:
    return import_module("tensorflow").function(function, **options)


def _reduce_keras(tf: Any, value: Any) -> Any:
    """Refuse a Keras model in a child with a GPU: rebuilding it would start TensorFlow in the parent."""
    keras = imported("keras", "Variable", "Model", "backend")
    if keras is None or keras.backend.backend() != "tensorflow":
        return NotImplemented
    if isinstance(value, keras.Variable):
        return host_value, (value.numpy(),)
    if isinstance(value, keras.Model) and tf.config.list_physical_devices("GPU"):
        raise pickle.PicklingError(
            "rebuilding a Keras model outside the task would start TensorFlow there and take the "
            "GPU's memory: return model.get_weights(), or model.save(path) and the path"
        )
    return NotImplemented
