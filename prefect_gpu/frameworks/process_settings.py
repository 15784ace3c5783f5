"""Settings of libraries for the whole process, such as `torch.set_default_dtype`: a program makes them once, at its start.

A body finds the settings that the flow's process has when the child is started. Modules that are imported before the body
find the libraries' defaults, as in a script that makes its settings after its imports. Not here: settings of one thread,
which would not reach a task in a thread either (`torch.set_default_device`, `torch.set_grad_enabled`, Keras's dtype
policy), and numbers of threads, which the policy sets.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from prefect_gpu.frameworks.adapter import imported
from prefect_gpu.frameworks.hooks import AfterImport, is_lazy

logger = logging.getLogger(__name__)

#: Values of settings, of built-in types, by name of the library's module and name of the setting.
ProcessSettings: TypeAlias = Mapping[str, Mapping[str, Any]]


class _Setting(NamedTuple):
    #: Returns the value, given the library's module; may raise any error.
    read: Callable[[Any], Any]
    #: Sets the value, given the library's module; may raise any error.
    write: Callable[[Any, Any], object]


def _attribute(path: str) -> _Setting:
    *owners, name = path.split(".")

    def write(module: Any, value: Any) -> None:
        setattr(functools.reduce(getattr, owners, module), name, value)

    return _Setting(operator.attrgetter(path), write)


def _option(name: str) -> _Setting:
    """Return the setting of an option of JAX. Some values are of enums of JAX, which also takes their text."""

    def read(module: Any) -> Any:
        value = getattr(module.config, name)
        return value.value if isinstance(value, enum.Enum) else value

    return _Setting(read, lambda m, value: m.config.update(name, value))


def _functions(getter: str, setter: str) -> _Setting:
    """Return the setting that one function of a library returns, and another one sets."""
    return _Setting(
        lambda m: operator.attrgetter(getter)(m)(),
        lambda m, value: operator.attrgetter(setter)(m)(value),
    )


def _error(kind: str) -> _Setting:
    """Return the setting of what NumPy does at a kind of floating-point error."""

    def read(module: Any) -> str:
        how: str = module.geterr()[kind]
        if how in ("call", "log"):
            # What is called, and what a log is written to, are objects of this process.
            raise LookupError(how)
        return how

    return _Setting(read, lambda m, how: m.seterr(**{kind: how}))


_TORCH_ATTRIBUTES = (
    # The older names of a precision come first: they raise if a newer one was set.
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
    "backends.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
)

_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_log_compiles",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

_SETTINGS: Mapping[str, Mapping[str, _Setting]] = {
    "torch": {
        "default dtype": _Setting(
            lambda m: str(m.get_default_dtype()).removeprefix("torch."),
            lambda m, name: m.set_default_dtype(getattr(m, name)),
        ),
        "float32 matmul precision": _functions(
            "get_float32_matmul_precision", "set_float32_matmul_precision"
        ),
        **{path: _attribute(path) for path in _TORCH_ATTRIBUTES},
        "deterministic algorithms": _Setting(
            lambda m: (
                m.are_deterministic_algorithms_enabled(),
                m.is_deterministic_algorithms_warn_only_enabled(),
            ),
            # The public function imports 800 modules, for the setting of `torch._inductor` below.
            lambda m, value: m._C._set_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "detect anomaly": _Setting(
            lambda m: (m.is_anomaly_enabled(), m.is_anomaly_check_nan_enabled()),
            lambda m, value: m.set_anomaly_enabled(*value),
        ),
        # Kinds of `scaled_dot_product_attention` that may be used.
        **{
            f"{kind} attention": _functions(
                f"backends.cuda.{kind}_sdp_enabled", f"backends.cuda.enable_{kind}_sdp"
            )
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        },
    },
    "torch._inductor.config": {"deterministic": _attribute("deterministic")},
    "torch.multiprocessing": {
        "sharing strategy": _functions("get_sharing_strategy", "set_sharing_strategy")
    },
    "numpy": {kind: _error(kind) for kind in ("divide", "over", "under", "invalid")},
    "jax": {name: _option(name) for name in _JAX_OPTIONS},
    "tensorflow": {
        "functions run eagerly": _functions(
            "config.functions_run_eagerly", "config.run_functions_eagerly"
        ),
        "TF32": _functions(
            "config.experimental.tensor_float_32_execution_enabled",
            "config.experimental.enable_tensor_float_32_execution",
        ),
    },
    # No public function tells it, and none switches it off.
    "tensorflow.python.framework.config": {
        "deterministic operations": _Setting(
            lambda m: m.is_op_determinism_enabled(),
            lambda m, value: m.enable_op_determinism() if value else None,
        )
    },
    "keras": {"floatx": _functions("config.floatx", "config.set_floatx")},
}


def read() -> ProcessSettings:
    """Return the settings of this process, of the libraries that it has imported."""
    found: dict[str, dict[str, Any]] = {}
    for name, settings in _SETTINGS.items():
        module = imported(name)
        for setting in () if module is None or is_lazy(module) else settings:
            # Another version may lack a setting, and another thread may be importing the module.
            with contextlib.suppress(Exception):
                found.setdefault(name, {})[setting] = settings[setting].read(module)
    return found


def apply(wanted: ProcessSettings) -> None:
    """Set each library's settings now if it is imported, else right after its import."""
    AfterImport({name: functools.partial(_apply, name, wanted[name]) for name in wanted}).install()


def _apply(name: str, wanted: Mapping[str, Any]) -> None:
    module = sys.modules[name]
    # Twice, since a setting may change others.
    for _ in range(2):
        left = [setting for setting in wanted if not _set(module, name, setting, wanted[setting])]
    for setting in left:
        logger.warning(
            "%s: the setting %s is %r in the flow's process, and could not be made here",
            *(name, setting, wanted[setting]),
        )


def _set(module: Any, name: str, setting: str, value: Any) -> bool:
    """Set a setting, and return whether it has the value now. Another version, as on another node, may lack it."""
    try:
        read, write = _SETTINGS[name][setting]
        # Only what differs: to set a value to what it is may warn, and may be refused.
        if read(module) != value:
            write(module, value)
        return bool(read(module) == value)
    except Exception:  # noqa: BLE001 - any error of a library
        return False
