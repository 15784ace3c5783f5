"""The caps of TensorFlow's GPUs, enforced in every way to open them.

A program opens GPUs with the options of a `ConfigProto`: with the first operation (`tf.config`), in each TensorFlow 1
session, in `tf.distribute.Server`, and in `list_local_devices`, which `tf.test.is_gpu_available` calls. All pass the
options to functions of TensorFlow's C interface, which this module replaces. TensorFlow keeps one allocator for each
logical device for the life of the process: the first to open a device fixes its size and its growth.

C++ code that opens a device by itself, before any of these, is not covered.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.units import MIB, format_bytes

logger = logging.getLogger(__name__)

#: Values of `TF_GPU_ALLOCATOR` that pass each allocation to the driver, without a limit.
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


def hold_caps(caps: tuple[int, ...] | None, total_bytes: tuple[int, ...]) -> None:
    """Apply the caps to every way to open GPUs in this process, or growth without caps.

    Args:
        caps: Bytes on each device, in the task's order; `None`: no cap.
        total_bytes: All memory of each device.
    """
    bound = _Bounds(caps, total_bytes).apply
    parse_config = import_module("tensorflow.core.protobuf.config_pb2").ConfigProto.FromString
    server_module = import_module("tensorflow.core.protobuf.tensorflow_server_pb2")

    def bound_serialized(config: bytes | None) -> bytes:
        serialized: bytes = bound(parse_config(config or b"")).SerializeToString()
        return serialized

    def new_session_options(
        call: Callable[..., Any], target: Any = None, config: Any = None
    ) -> Any:
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
        (session, "TF_NewSessionOptions", new_session_options),
        (session, "TF_NewServer", new_server),
        ("pywrap_tfe", "TFE_ContextOptionsSetConfig", set_context_config),
        ("client._pywrap_device_lib", "list_devices", list_devices),
        ("grappler._pywrap_tf_cluster", "TF_NewCluster", new_cluster),
    ):
        try:
            _replace(f"tensorflow.python.{module}", name, replacement)
        except (ImportError, AttributeError) as error:
            # Without a cap the replacement only sets growth, which a variable sets too.
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
    # The function may have the replacement of a standby's policy.
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
            # TensorFlow refuses it.
            return bounded
        if not split_devices:
            for device in devices:
                split_devices.add(memory_limit_mb=self._limits_of(options, device))
            # The number must be that of the program's visible devices.
            options.visible_device_list = ",".join(map(str, devices))
            # TensorFlow refuses both together. The fraction is no cap: `gpu_system_memory_size_in_mb` and
            # `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` override it, and above 1 it means managed memory.
            options.ClearField("per_process_gpu_memory_fraction")
        for device, split in zip(devices, split_devices, strict=True):
            self._bound_split(device, split)
        self._refuse_unlimited(options.experimental)
        return bounded

    def _limits_of(self, options: Any, device: int) -> list[float]:
        """Return the MiB of each logical device that a program asks for without a split."""
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
            # TensorFlow reads it when it makes the allocator, which is next.
            del os.environ["TF_GPU_ALLOCATOR"]
            self._warn_once(_UNLIMITED, f"TF_GPU_ALLOCATOR={named}")
        if experimental.use_cuda_malloc_async:
            experimental.use_cuda_malloc_async = False
            self._warn_once(_UNLIMITED, "use_cuda_malloc_async=True")

    def _warn_once(self, template: str, text: str) -> None:
        """Log the first warning of its kind in this process."""
        if template not in self._warned:
            self._warned.add(template)
            logger.warning(template, text)


def _visible_devices(config: Any, allotted: int) -> list[int] | None:
    """Return the devices that a program shows itself; `None`: its list is wrong."""
    named = config.gpu_options.visible_device_list
    try:
        devices = [int(index) for index in named.split(",")] if named else list(range(allotted))
    except ValueError:
        return None
    if any(not 0 <= device < allotted for device in devices):
        return None
    most = config.device_count.get("GPU", -1)
    return devices[:most] if most >= 0 else devices
