"""The TensorFlow adapter, with Keras: cap or growth, threads, counters, conversion of tensors to NumPy.

TensorFlow fixes its devices when its runtime starts (the first operation). It then takes its limit whole, unless the
program asks for growth: `allocation=limit` and `allocation=all` differ only in the time.

A program opens GPUs with the options of a `ConfigProto`: with the first operation (`tf.config`), in each TensorFlow 1
session, in `tf.distribute.Server`, and in `list_local_devices`, which `tf.test.is_gpu_available` calls. All pass the
options to functions of TensorFlow's C interface, which `hold_caps` replaces. TensorFlow keeps one allocator for each
logical device until the process ends; its size and growth are fixed when the device is first opened. C++ code that
opens a device by itself, before any of these, is not covered.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import adapter
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy, host_value, imported
from prefect_gpu.units import MIB, format_bytes

logger = logging.getLogger(__name__)

#: Values of `TF_GPU_ALLOCATOR` for allocators without a limit, which pass each allocation to the driver.
UNLIMITED_ALLOCATORS = ("cuda_malloc", "cuda_malloc_async")

#: Warnings about options of a program.
_LOWERED = (
    "TensorFlow: %s, this task's cap: its budget less the CUDA context; gpu:memory states a larger "
    "budget, gpu:allocation=growth sets no cap"
)
_UNLIMITED = (
    "TensorFlow: %s is not used, since that allocator has no limit and would pass this task's cap; "
    "gpu:allocation=growth sets no cap"
)


class TensorFlowAdapter(adapter.FrameworkAdapter):
    """Applies a policy to TensorFlow; on the host only threads. TensorFlow never returns memory to the driver."""

    name = "tensorflow"
    # Otherwise each process writes three lines about oneDNN and the processor (2.21).
    default_environment = MappingProxyType({"TF_CPP_MIN_LOG_LEVEL": "1"})
    # Read when the runtime starts; the level of the log at any time.
    late_variables = (
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
    )

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the variable of growth, which overrides the program's settings; under a cap it is removed."""
        growth = policy.cap_bytes(self.name) is None
        return {"TF_FORCE_GPU_ALLOW_GROWTH": "true" if growth else None}

    def apply(self, policy: FrameworkPolicy) -> None:
        """Configure devices and threads before TensorFlow's runtime starts; `FrameworkError`: it has started."""
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

    def started(self) -> Any:
        """Return the module `tensorflow` once its runtime has started, which fixes devices and threads, else `None`."""
        # `tf.config.list_logical_devices` would start the runtime; there is no public way to look.
        module = imported("tensorflow.python.eager.context", "_context")
        if module is None or not getattr(module._context, "_initialized", False):
            return None
        return imported("tensorflow", "config")

    def counters(self) -> Counters | None:
        """Return the memory in use, summed over all GPUs; `None`: no GPU in use. Reserved memory is not counted."""
        tf = self.started()
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
        """Return a pickle reduction of an eager tensor or variable, on the CPU too, to a NumPy array.

        An error of a session loses its operation, which belongs to a graph of this process. `_reduce_keras` refuses
        Keras models. Any other value: `NotImplemented`.
        """
        tf = imported("tensorflow", "Tensor", "Variable", "config", "errors")
        if tf is None:
            return NotImplemented
        if isinstance(value, tf.errors.OpError) and value.op is not None:
            make, arguments = value.__reduce__()
            return make, tuple(None if each is value.op else each for each in arguments)
        # A variable of TensorFlow 1 has no `numpy`: the error names it.
        eager = isinstance(value, tf.Tensor) and hasattr(value, "numpy")
        if eager or isinstance(value, tf.Variable):
            return host_value, (value.numpy(),)
        return _reduce_keras(tf, value)

    def calibrate(self) -> int:
        """Load cuBLAS, cuDNN and cuFFT, and return the peak of used bytes, rounded up to 2 MiB; needs growth.

        Growth takes regions of 2 MiB. TensorFlow reports no other figure, and never returns memory.
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


def reduce_traced(value: Any) -> Any:
    """Return a pickle reduction of a `tf.function`, traced again from its Python function; else `NotImplemented`."""
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
    """Reduce a Keras variable to NumPy; refuse a model of a GPU, which would start TensorFlow in the parent."""
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


# Caps.


def hold_caps(caps: tuple[int, ...] | None, total_bytes: tuple[int, ...]) -> None:
    """Limit all GPUs that TensorFlow opens in this process, in any way, to the caps in bytes; `None`: let them grow."""
    bound = _Bounds(caps, total_bytes).apply
    parse_config = import_module("tensorflow.core.protobuf.config_pb2").ConfigProto.FromString
    server_module = import_module("tensorflow.core.protobuf.tensorflow_server_pb2")

    def bound_serialized(config: bytes | None) -> bytes:
        serialized: bytes = bound(parse_config(config or b"")).SerializeToString()
        return serialized

    def new_session(call: Callable[..., Any], target: Any = None, config: Any = None) -> Any:
        # With a target, the server has opened the devices.
        return call(target, config if target or config is None else bound(config))

    def set_context_config(call: Callable[..., Any], options: Any, config: bytes) -> Any:
        return call(options, bound_serialized(config))

    def list_devices(call: Callable[..., Any], config: bytes | None = None) -> Any:
        return call(bound_serialized(config))

    def new_server(call: Callable[..., Any], serialized: bytes) -> Any:
        server = server_module.ServerDef.FromString(serialized)
        server.default_session_config.CopyFrom(bound(server.default_session_config))
        return call(server.SerializeToString())

    def new_cluster(call: Callable[..., Any], *settings: Any) -> Any:
        # Grappler opens devices without options, so it must find them open.
        import_module("tensorflow.python.eager.context").ensure_initialized()
        return call(*settings)

    session = "client.pywrap_tf_session"
    for module, name, replacement in (
        (session, "TF_NewSessionOptions", new_session),
        (session, "TF_NewServer", new_server),
        ("pywrap_tfe", "TFE_ContextOptionsSetConfig", set_context_config),
        ("client._pywrap_device_lib", "list_devices", list_devices),
        ("grappler._pywrap_tf_cluster", "TF_NewCluster", new_cluster),
    ):
        try:
            _replace(f"tensorflow.python.{module}", name, replacement)
        except (ImportError, AttributeError) as error:
            # Without a cap the replacement only sets growth, which an environment variable sets, too.
            if caps is not None:
                version = getattr(import_module("tensorflow"), "__version__", "of this version")
                raise FrameworkError(
                    "tensorflow",
                    f"TensorFlow {version} has no {module}.{name}, through which it opens GPUs, so its memory "
                    f"cannot be limited; use 2.21, with which this was tested, or gpu:allocation=growth",
                ) from error


def _replace(module_name: str, name: str, replacement: Callable[..., Any]) -> None:
    module = import_module(module_name)
    call = getattr(module, name)
    # The policy of a standby may have replaced the function already.
    call = getattr(call, "__wrapped__", call)
    setattr(module, name, functools.wraps(call)(functools.partial(replacement, call)))


class _Bounds:
    def __init__(self, caps: tuple[int, ...] | None, total_bytes: tuple[int, ...]) -> None:
        self._caps = caps
        self._total_bytes = total_bytes
        #: Number of logical devices with which each device was first opened.
        self._opened: dict[int, int] = {}
        self._warned: set[str] = set()

    def apply(self, config: Any) -> Any:
        """Return a copy of a `ConfigProto` that keeps to the caps, or raise `FrameworkError`: see `_bound_split`."""
        bounded = type(config)()
        bounded.CopyFrom(config)
        options = bounded.gpu_options
        if self._caps is None:
            options.allow_growth = True
            return bounded
        split_devices = options.experimental.virtual_devices
        devices = _visible_devices(bounded, len(self._caps))
        if devices is None or len(split_devices) not in (0, len(devices)):
            # TensorFlow refuses the configuration.
            return bounded
        if not split_devices:
            for device in devices:
                split_devices.add(memory_limit_mb=self._limits_of(options, device))
            # TensorFlow requires as many splits as visible devices.
            options.visible_device_list = ",".join(map(str, devices))
            # TensorFlow refuses splits with a fraction. The fraction is no cap: `gpu_system_memory_size_in_mb` and
            # `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` override it, and above 1 it means managed memory.
            options.ClearField("per_process_gpu_memory_fraction")
        for device, split in zip(devices, split_devices, strict=True):
            self._bound_split(device, split)
        self._refuse_unlimited(options.experimental)
        return bounded

    def _limits_of(self, options: Any, device: int) -> list[float]:
        """Return the size in MiB of each logical device on a GPU that the program has not split itself."""
        assert self._caps is not None
        pieces = max(1, options.experimental.num_virtual_devices_per_gpu)
        fraction = options.per_process_gpu_memory_fraction
        most = self._caps[device]
        # 0 means all memory: a program that names no fraction gets no warning.
        asked = fraction * self._total_bytes[device] if fraction > 0 else most
        if asked > most:
            used = most / self._total_bytes[device]
            self._warn_once(
                _LOWERED,
                f"per_process_gpu_memory_fraction={fraction:g} is {format_bytes(int(asked))} of this GPU; "
                f"{used:.3g} ({format_bytes(most)}) is used",
            )
        return [min(asked, most) / pieces / MIB] * pieces

    def _bound_split(self, device: int, split: Any) -> None:
        assert self._caps is not None
        most = max(1, self._caps[device] // MIB)
        limits = [max(1, int(limit)) for limit in split.memory_limit_mb] or [most]
        if sum(limits) > most:
            self._warn_once(
                _LOWERED,
                f"logical devices of {format_bytes(sum(limits) * MIB)} on one GPU; "
                f"{format_bytes(most * MIB)} is used",
            )
        scale = min(1.0, most / sum(limits))
        split.memory_limit_mb[:] = [max(1, int(limit * scale)) for limit in limits]
        opened = self._opened.setdefault(device, len(limits))
        if len(limits) > opened:
            raise FrameworkError(
                "tensorflow",
                f"GPU {device} cannot be split into {len(limits)} logical devices: this process has opened "
                f"it as {opened}, which keep their memory, so that all together would pass the cap; split "
                f"it where it is first used, with tf.config.set_logical_device_configuration or in the "
                f"first session, or use gpu:allocation=growth",
            )

    def _refuse_unlimited(self, experimental: Any) -> None:
        named = os.environ.get("TF_GPU_ALLOCATOR", "")
        if named in UNLIMITED_ALLOCATORS:
            # TensorFlow reads the variable when it makes the allocator, which is next.
            del os.environ["TF_GPU_ALLOCATOR"]
            self._warn_once(_UNLIMITED, f"TF_GPU_ALLOCATOR={named}")
        if experimental.use_cuda_malloc_async:
            experimental.use_cuda_malloc_async = False
            self._warn_once(_UNLIMITED, "use_cuda_malloc_async=True")

    def _warn_once(self, template: str, text: str) -> None:
        """Log a warning, unless one with the same template was logged in this process."""
        if template not in self._warned:
            self._warned.add(template)
            logger.warning(template, text)


def _visible_devices(config: Any, allotted: int) -> list[int] | None:
    """Return the indices of the GPUs that a `ConfigProto` makes visible; `None`: its list is wrong."""
    named = config.gpu_options.visible_device_list
    try:
        devices = [int(index) for index in named.split(",")] if named else list(range(allotted))
    except ValueError:
        return None
    if any(not 0 <= device < allotted for device in devices):
        return None
    most = config.device_count.get("GPU", -1)
    return devices[:most] if most >= 0 else devices
