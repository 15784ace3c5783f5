"""What a child saw when memory ran out, whose text an error carries, and how much it says was wanted.

Reads classes and texts only, so it works on errors that crossed a pipe and imports no framework.
Each adapter adds the error classes of its own (`is_out_of_memory`); what follows from an
out-of-memory is `scheduling.ladder`'s. The machine's own memory (`MemoryError`, `std::bad_alloc`) is
none of it: more of a device would not help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prefect_gpu.units import parse_bytes

#: Packages whose own error classes say which framework failed, by the root of their modules. The
#: texts of an error of theirs are compared with that framework's alone.
_OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torch": "torch",
        "tensorflow": "tensorflow",
        "jax": "jax",
        "jaxlib": "jax",
        "cupy": "cupy",
        "cupy_backends": "cupy",
        "onnxruntime": "onnxruntime",
    }
)

#: Texts by framework, in lower case: all the parts of one must be there. In the order in which an
#: error that belongs to nobody is compared: ONNX Runtime's and TensorFlow's quote what others say.
_TEXTS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "onnxruntime": (
            ("bfc_arena",),
            ("bfcarena",),
            # As ONNX Runtime writes CUDA's error 2, `cudaErrorMemoryAllocation`.
            ("cuda failure 2:", "out of memory"),
            ("onnxruntime", "failed to allocate memory"),
            ("onnxruntime", "_alloc_failed"),
        ),
        "tensorflow": (("oom when allocating tensor",),),
        # The status alone is gRPC's too, for a message that is too long.
        "jax": (
            ("resource_exhausted", "out of memory"),
            ("resource_exhausted", "failed to allocate"),
        ),
        "cupy": (
            ("out of memory allocating", "allocated so far"),
            ("cudaerrormemoryallocation",),
        ),
        "torch": (
            ("cuda out of memory",),
            ("cuda error: out of memory",),
            # With expandable segments the driver is asked directly.
            ("cuda driver error: out of memory",),
            ("triton error [cuda]: out of memory",),
            ("cublas_status_alloc_failed",),
            ("cudnn_status_alloc_failed",),
            # cuDNN 9's name for it.
            ("cudnn_status_internal_error_device_allocation_failed",),
            ("cusolver_status_alloc_failed",),
            ("cusparse_status_alloc_failed",),
            ("cufft_alloc_failed",),
        ),
    }
)

#: What says that the machine's own memory ran out, pinned memory included. TensorFlow names the
#: allocator: `cpu`, `mklcpu`, `gpu_host_bfc`; a device's is `GPU_0_bfc`.
_HOST = re.compile(
    r"std::bad_alloc|DefaultCPUAllocator|by allocator \w*(?:cpu|host)", re.IGNORECASE
)

#: Built-in classes that an error which carries a framework's text may have. Not `ValueError` and
#: its like, which speak of arguments, and not `MemoryError`, which speaks of the machine.
_PLAIN: Final = (RuntimeError, Exception, BaseException, object)


def causes(error: BaseException, until: BaseException | None = None) -> Iterator[BaseException]:
    """Give an error, its members if it is a group, and what it was raised from or while handling.

    Each once. A context that `from None` hides counts: Keras raises its errors anew in this way.
    `until` is left out, and so is what is found only through it.
    """
    seen: set[int] = set() if until is None else {id(until)}
    waiting: list[BaseException] = [error]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # An error's truth is the user's to define.
        cause = current.__cause__
        cause = current.__context__ if cause is None else cause
        if cause is not None:
            waiting.append(cause)
        waiting.extend(reversed(_members(current)))


def _members(error: BaseException) -> list[BaseException]:
    # By its attribute: Python 3.10 has no class for groups, only the package `exceptiongroup`.
    try:
        found = getattr(error, "exceptions", ())
    except Exception:  # noqa: BLE001 - a property of the user's may raise anything
        return []
    if not isinstance(found, (tuple, list)):
        return []
    return [member for member in found if isinstance(member, BaseException)]


def looks_out_of_memory(error: BaseException) -> str:
    """Tell by its class and text that an error (not its causes) says a device's memory ran out.

    It covers what Keras, Lightning or a user raise anew as their own, or as a `RuntimeError`, with
    the framework's text inside.

    Returns:
        The framework that speaks, as in `gpu:framework=`; empty: nothing of the kind.
    """
    bases = type(error).__mro__
    if any(base.__module__ == "builtins" and base not in _PLAIN for base in bases):
        return ""
    text = str(error).lower()
    if _HOST.search(text):
        return ""
    owners = (_OWNERS.get(base.__module__.partition(".")[0]) for base in bases)
    owner = next((name for name in owners if name is not None), None)
    for name, texts in _TEXTS.items():
        if owner in (None, name) and any(all(part in text for part in parts) for parts in texts):
            return name
    return ""


def says_host_memory(error: BaseException) -> bool:
    """Tell by its text that it was the machine's own memory that ran out."""
    return _HOST.search(str(error)) is not None


#: The size in each framework's message: torch "Tried to allocate 2.00 GiB", JAX and TensorFlow
#: "trying to allocate 5.00GiB" or "... 5368709120 bytes", CuPy "allocating 5,368,709,120 bytes",
#: ONNX Runtime "requested buffer of size 5368709120" and "requested bytes of 5368709120".
_WANTED = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|failed to allocate|"
    r"buffer of size|requested bytes of)\s+(?:request for\s+)?([0-9][0-9.,]*)\s*"
    r"([KMGT]i?B|bytes|B)?\b",
    re.IGNORECASE,
)

#: TensorFlow: "OOM when allocating tensor with shape[1000,1000] and type float".
_WANTED_TENSOR = re.compile(r"allocating tensor with shape\s*\[([0-9, ]*)\] and type (\w+)")

#: Bytes of one element by TensorFlow's name of its type.
_ELEMENT_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8"), 1),
        **dict.fromkeys(("float8_e5m2", "float8_e4m3fn"), 1),
        **dict.fromkeys(("half", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
        **dict.fromkeys(("float", "int32", "uint32", "qint32"), 4),
        **dict.fromkeys(("double", "int64", "uint64", "complex64"), 8),
        "complex128": 16,
    }
)


def parse_wanted_bytes(text: str) -> int | None:
    """Read how much the failed allocation asked for; `None`: the message does not say."""
    match = _WANTED.search(text)
    if match is None:
        return _parse_tensor_bytes(text)
    number, unit = match[1].rstrip(".,").replace(",", ""), match[2] or "bytes"
    try:
        return int(number) if unit.lower() in ("bytes", "b") else parse_bytes(number + unit)
    except ValueError:
        return None


def _parse_tensor_bytes(text: str) -> int | None:
    match = _WANTED_TENSOR.search(text)
    if match is None or match[2] not in _ELEMENT_BYTES:
        return None
    lengths = [int(length) for length in match[1].split(",") if length.strip()]
    return math.prod(lengths) * _ELEMENT_BYTES[match[2]]


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What the child saw when a body ended for want of device memory. Bytes; `None`: unknown."""

    #: As in `gpu:framework=`; empty: none of ours (a simulated device).
    framework: str
    #: What the failed allocation asked for.
    wanted_bytes: int | None = None
    #: What the frameworks held from the driver then, or had allocated where they keep no such number.
    held_bytes: int | None = None
    #: What the device showed for this process, and had free; of the fullest of its devices.
    process_bytes: int | None = None
    free_bytes: int | None = None
    #: UUID of that device; empty: not asked.
    device_uuid: str = ""
    #: The error says by itself whether the process's own cap refused.
    says_own_cap: bool | None = None
