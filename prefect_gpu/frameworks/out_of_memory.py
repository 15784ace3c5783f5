"""Recognise an out-of-memory error of a device, its framework, and the size of the failed allocation.

Only classes and texts are read, so errors from another process are recognised, and no framework is imported. Host
memory (`MemoryError`, `std::bad_alloc`) is not covered: more memory on a device does not help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prefect_gpu.units import parse_bytes

#: Frameworks whose error classes are in a module of another name.
_OTHER_ROOTS: Final[Mapping[str, str]] = {"jaxlib": "jax", "cupy_backends": "cupy"}

#: Lower-case texts by framework and error class. One must occur in the error; the empty text occurs in every error.
#: An error of a framework's class is compared with texts of this framework only.
_CLASSES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "torch": {"OutOfMemoryError": ("",)},
    "tensorflow": {
        "ResourceExhaustedError": ("",),
        "OpError": ("out of memory", "out_of_memory", "alloc_failed", "resource_exhausted"),
    },
    # JAX has one class for every failure, so the status in the text counts.
    "jax": dict.fromkeys(
        ("JaxRuntimeError", "XlaRuntimeError"),
        ("resource_exhausted", "cuda_error_out_of_memory", "alloc_failed"),
    ),
    "cupy": {
        "OutOfMemoryError": ("",),
        **dict.fromkeys(
            ("CUDARuntimeError", "CUBLASError", "CUDADriverError"),
            ("memoryallocation", "out of memory", "alloc_failed"),
        ),
    },
    # Arena and driver have no error class of their own. An arena in host memory raises the same error, which counts as
    # a device's in a GPU task.
    "onnxruntime": dict.fromkeys(
        ("Fail", "RuntimeException", "EPFail"), ("failed to allocate memory", "out of memory")
    ),
}

#: Text of the error that Accelerate's `find_executable_batch_size` (1.15; used by Hugging Face's `Trainer`) raises,
#: without a cause, after an out-of-memory for each size down to one. The function also catches cuDNN's "not supported"
#: and shortage of host memory, so the error counts only if the allocator was refused memory.
NO_BATCH_SIZE: Final = "no executable batch size found"

#: Lower-case texts by framework for errors of other classes; all parts of a text must occur. The first match counts:
#: messages of ONNX Runtime and TensorFlow quote messages of other frameworks.
_TEXTS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "onnxruntime": (
        ("bfc_arena",),
        ("bfcarena",),
        # ONNX Runtime's text for CUDA's error 2, `cudaErrorMemoryAllocation`.
        ("cuda failure 2:", "out of memory"),
        ("onnxruntime", "failed to allocate memory"),
        ("onnxruntime", "_alloc_failed"),
    ),
    "tensorflow": (("oom when allocating tensor",),),
    # gRPC has the same status for a message that is too long.
    "jax": (("resource_exhausted", "out of memory"), ("resource_exhausted", "failed to allocate")),
    "cupy": (("out of memory allocating", "allocated so far"), ("cudaerrormemoryallocation",)),
    "torch": (
        ("cuda out of memory",),
        ("cuda error: out of memory",),
        # With expandable segments PyTorch asks the driver directly.
        ("cuda driver error: out of memory",),
        ("triton error [cuda]: out of memory",),
        ("cublas_status_alloc_failed",),
        ("cudnn_status_alloc_failed",),
        # cuDNN 9's name for the status above.
        ("cudnn_status_internal_error_device_allocation_failed",),
        ("cusolver_status_alloc_failed",),
        ("cusparse_status_alloc_failed",),
        ("cufft_alloc_failed",),
        (NO_BATCH_SIZE,),
    ),
}

#: Texts of errors about host memory, pinned memory included. TensorFlow names the allocator: `cpu`, `mklcpu`,
#: `gpu_host_bfc`; a device's is `GPU_0_bfc`.
_HOST = re.compile(
    r"std::bad_alloc|DefaultCPUAllocator|by allocator \w*(?:cpu|host)", re.IGNORECASE
)

#: Built-in error classes whose texts are compared. Others, such as `ValueError`, are about arguments.
_PLAIN: Final = (RuntimeError, Exception, BaseException, object)


def causes(error: BaseException, until: BaseException | None = None) -> Iterator[BaseException]:
    """Yield an error, its members if it is a group, and its causes and contexts, each once.

    A context that `from None` hides is included: Keras re-raises errors in this way. `until` is left out, and so are
    errors that are reached only through it.
    """
    seen: set[int] = set() if until is None else {id(until)}
    waiting: list[BaseException] = [error]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # `or` would ask a user's error class for its truth value.
        cause = current.__cause__
        cause = current.__context__ if cause is None else cause
        if cause is not None:
            waiting.append(cause)
        waiting.extend(reversed(_members(current)))


def _members(error: BaseException) -> list[BaseException]:
    # Python 3.10 has no class for groups, only the package `exceptiongroup`.
    try:
        found = getattr(error, "exceptions", ())
    except Exception:  # noqa: BLE001 - a property of a user's class may raise anything
        return []
    if not isinstance(found, (tuple, list)):
        return []
    return [member for member in found if isinstance(member, BaseException)]


def find_out_of_memory(
    error: BaseException,
    frameworks: Collection[str] = _TEXTS.keys(),
    until: BaseException | None = None,
) -> tuple[BaseException, str] | None:
    """Return the first out-of-memory of a device among an error's `causes`, and its framework; `None`: there is none.

    The framework is one of `frameworks`, or empty for a simulated device. For `until` see `causes`.
    """
    for cause in causes(error, until):
        try:
            if getattr(cause, "__prefect_gpu_out_of_memory__", False):
                return cause, ""
            framework = looks_out_of_memory(cause)
        except Exception:  # noqa: BLE001 - the text or attributes of a user's error may raise
            continue
        if framework in frameworks:
            return cause, framework
    return None


def looks_out_of_memory(error: BaseException) -> str:
    """Return the framework whose device ran out of memory, by an error's class and text; empty: another error.

    Causes are not read. An error of Keras, Lightning or a user is recognised, too, if it has the framework's text and
    is a `RuntimeError` or of a class of their own.
    """
    text = str(error).lower()
    on_host = _HOST.search(text) is not None
    bases = type(error).__mro__
    owner = None
    for base in bases:
        root = base.__module__.partition(".")[0]
        framework = _OTHER_ROOTS.get(root, root)
        if framework in _CLASSES:
            owner = owner or framework
            known = _CLASSES[framework].get(base.__name__, ())
            # TensorFlow has one class for the memory of devices and of the host.
            certain = "" in known and framework != "tensorflow"
            if certain or (not on_host and any(part in text for part in known)):
                return framework
    if on_host or any(base.__module__ == "builtins" and base not in _PLAIN for base in bases):
        return ""
    for name, texts in _TEXTS.items():
        if owner in (None, name) and any(all(part in text for part in parts) for parts in texts):
            return name
    return ""


#: The size in each framework's message: torch "Tried to allocate 2.00 GiB", JAX and TensorFlow "trying to allocate
#: 5.00GiB" or "... 5368709120 bytes", CuPy "allocating 5,368,709,120 bytes", ONNX Runtime "requested buffer of size
#: 5368709120" and "requested bytes of 5368709120".
_WANTED = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|failed to allocate|"
    r"buffer of size|requested bytes of)\s+(?:request for\s+)?([0-9][0-9.,]*)\s*"
    r"([KMGT]i?B|bytes|B)?\b",
    re.IGNORECASE,
)

#: TensorFlow: "OOM when allocating tensor with shape[1000,1000] and type float".
_WANTED_TENSOR = re.compile(r"allocating tensor with shape\s*\[([0-9, ]*)\] and type (\w+)")

#: Bytes of one element by TensorFlow's name of its type.
_ELEMENT_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn"), 1),
    **dict.fromkeys(("half", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
    **dict.fromkeys(("float", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("double", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def parse_wanted_bytes(text: str) -> int | None:
    """Return the bytes that a failed allocation requested, from an error's text; `None`: the text does not say."""
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
    """An out-of-memory on a device, as the child process saw it. Sizes are in bytes; `None`: unknown."""

    #: Name of the framework; empty: no framework (a simulated device).
    framework: str
    #: Size of the failed allocation.
    wanted_bytes: int | None = None
    #: Memory that the frameworks hold from the driver; their allocated memory, if they do not count it.
    held_bytes: int | None = None
    #: Memory of this process, and free memory, on the fullest of its devices.
    process_bytes: int | None = None
    free_bytes: int | None = None
    #: UUID of the fullest device; empty: not read.
    device_uuid: str = ""
    #: Whether the process's own cap refused the allocation; `None`: the error does not say.
    says_own_cap: bool | None = None
    #: The framework's own summary of its memory; empty: no summary.
    summary: str = ""
    #: File with the framework's snapshot of its memory; empty: no file.
    snapshot_path: str = ""
