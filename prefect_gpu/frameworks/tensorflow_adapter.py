"""TensorFlow and Keras on it: cap or growth, threads, counters, out-of-memory, arrays to NumPy.

TensorFlow fixes its devices when its runtime starts (the first operation), and a device can have
growth or a limit, never both. A limit is taken whole at the first operation, so `allocation=limit`
and `allocation=all` differ only in when.
"""

from __future__ import annotations

import pickle
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy
from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory, says_host_memory
from prefect_gpu.frameworks.values import host_value, is_named, load, loaded, says
from prefect_gpu.units import MIB


class TensorFlowAdapter:
    """TensorFlow on CUDA devices; on the host only its threads are set."""

    name = "tensorflow"
    module = "tensorflow"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Give growth where the policy says so; an inherited one is removed where there is a cap.

        `TF_FORCE_GPU_ALLOW_GROWTH` overrides what the program sets, and excludes a limit.
        """
        growth = policy.cap_bytes(self.name) is None
        return {
            "TF_FORCE_GPU_ALLOW_GROWTH": "true" if growth else None,
            "TF_NUM_INTRAOP_THREADS": str(policy.cpus),
            "TF_NUM_INTEROP_THREADS": str(policy.cpus),
        }

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: configure devices and threads before TensorFlow's runtime starts.

        Raises:
            FrameworkError: It sees other devices than were allotted (it would silently use the
                CPU), or its runtime has started already.
        """
        tf = load("tensorflow")
        try:
            _bound_threads(tf, policy.cpus)
            if policy.device_kind == "nvml":
                self._configure_devices(tf, policy)
        except (RuntimeError, ValueError) as error:
            raise FrameworkError(
                self.name,
                f"refused the policy ({error}); its runtime must not start before the task's body",
            ) from error

    def standby_environment(self) -> dict[str, str]:
        """Give nothing."""
        return {}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Name what TensorFlow reads when its runtime starts, with the first operation."""
        return name in (
            "TF_FORCE_GPU_ALLOW_GROWTH",
            "TF_NUM_INTRAOP_THREADS",
            "TF_NUM_INTEROP_THREADS",
        )

    def has_started(self) -> bool:
        """Child: tell whether the runtime has started: devices and threads are fixed."""
        return loaded("tensorflow") is not None and _runtime_started()

    def counters(self) -> Counters | None:
        """Child: read what the GPU allocators have in use; they keep no count of what they hold."""
        tf = loaded("tensorflow")
        if tf is None or not _runtime_started():
            return None
        return _read_counters(tf)

    def sample(self) -> tuple[int, int] | None:
        """Child: read what the GPU allocators have in use; they count no retries."""
        counters = self.counters()
        return None if counters is None else (counters.live_bytes, 0)

    def release_cached(self) -> None:
        """Do nothing: TensorFlow keeps its regions until the process ends."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise `ResourceExhaustedError` of a device, and the driver's errors in other classes."""
        if says_host_memory(error):
            return False
        if is_named(error, "tensorflow", ("ResourceExhaustedError",)):
            return True
        if looks_out_of_memory(error) == self.name:
            return True
        return is_named(error, "tensorflow", ("OpError",)) and says(
            error, "out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED", "RESOURCE_EXHAUSTED"
        )

    def reduce_to_host(self, value: Any) -> Any:
        """Child: turn eager tensors and variables into NumPy, on CPU too, so that flows see one type.

        Raises:
            pickle.PicklingError: A Keras model in a child with a GPU: rebuilding it in the parent
                would start TensorFlow there and take the GPU's memory.
        """
        tf = loaded("tensorflow")
        if tf is None or not hasattr(tf, "Variable"):
            return NotImplemented
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            return host_value, (value.numpy(),)
        if isinstance(value, tf.Variable):
            return host_value, (value.numpy(),)
        return _reduce_keras(tf, value)

    def calibrate(self) -> int:
        """Child: load cuBLAS, cuDNN and cuFFT. Needs growth.

        Returns:
            The peak in use, rounded up to the 2 MiB regions that growth takes: TensorFlow tells no
            more, and never gives memory back.
        """
        return _calibrate(load("tensorflow"))

    def _configure_devices(self, tf: Any, policy: FrameworkPolicy) -> None:
        gpus = tf.config.list_physical_devices("GPU")
        allotted = len(policy.device_uuids)
        if len(gpus) != allotted:
            why = (
                "GPU libraries (CUDA, cuDNN) that it could not open, which it says in a log line"
                if tf.test.is_built_with_cuda()
                else "a build without CUDA"
            )
            raise FrameworkError(
                self.name,
                f"{allotted} GPU(s) allotted, {len(gpus)} found, so it would silently use the CPU; "
                f"the likely reason is {why}; install tensorflow[and-cuda], or name what the task "
                f"uses on the GPU with gpu:framework",
            )
        caps = policy.cap_bytes(self.name)
        _limit_devices(tf, gpus, caps)
        if policy.allocation == "all":
            _start_devices(tf, len(gpus))


def _bound_threads(tf: Any, cpus: int) -> None:
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() != cpus:
        threading.set_intra_op_parallelism_threads(cpus)
    if threading.get_inter_op_parallelism_threads() != cpus:
        threading.set_inter_op_parallelism_threads(cpus)


def _limit_devices(tf: Any, gpus: list[Any], caps: tuple[int, ...] | None) -> None:
    for index, gpu in enumerate(gpus):
        if caps is None:
            tf.config.experimental.set_memory_growth(gpu, True)
            continue
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=max(1, caps[index] // MIB))
        tf.config.set_logical_device_configuration(gpu, [limit])


def _start_devices(tf: Any, count: int) -> None:  # needs a GPU
    for index in range(count):
        with tf.device(f"GPU:{index}"):
            tf.zeros([1]).numpy()


def _runtime_started() -> bool:
    # `tf.config.list_logical_devices` would start it; there is no public way to ask.
    module = loaded("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    return bool(getattr(context, "_initialized", False))


def _read_counters(tf: Any) -> Counters | None:
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


def _reduce_keras(tf: Any, value: Any) -> Any:
    keras = loaded("keras")
    if keras is None or not hasattr(keras, "Variable") or keras.backend.backend() != "tensorflow":
        return NotImplemented
    if isinstance(value, keras.Variable):
        return host_value, (value.numpy(),)
    if isinstance(value, keras.Model) and tf.config.list_physical_devices("GPU"):
        raise pickle.PicklingError(
            "rebuilding a Keras model outside the task would start TensorFlow there and take the "
            "GPU's memory: return model.get_weights(), or model.save(path) and the path"
        )
    return NotImplemented


def _calibrate(tf: Any) -> int:  # needs a GPU
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
