import pytest

from prefect_gpu.frameworks.out_of_memory import parse_wanted_bytes
from prefect_gpu.frameworks.registry import ADAPTERS
from prefect_gpu.units import GIB, MIB


def error(module, name, text, base=Exception):
    """Make an error of a class that looks like a framework's."""
    return type(name, (base,), {"__module__": module})(text)


OUT_OF_MEMORY = {
    "torch": [
        error("torch", "OutOfMemoryError", "anything", RuntimeError),
        error("torch", "AcceleratorError", "CUDA error: out of memory", RuntimeError),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    "tensorflow": [
        error("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", "OOM when"),
        type("InternalError", (type(error("tensorflow.x", "OpError", "")),), {})("out of memory"),
    ],
    "jax": [
        error("jaxlib._jax", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory", RuntimeError)
    ],
    "cupy": [
        error("cupy.cuda.memory", "OutOfMemoryError", "Out of memory", MemoryError),
        error("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorMemoryAllocation"),
    ],
    "onnxruntime": [
        error("onnxruntime.capi.onnxruntime_pybind11_state", "Fail", "bfc_arena.cc:376 Available")
    ],
}
OTHER = [
    ValueError("CUDA out of memory"),
    RuntimeError("shapes do not match"),
    MemoryError(),
    error("torch", "AcceleratorError", "CUDA error: an illegal memory access", RuntimeError),
    error("tensorflow.python.framework.errors_impl", "InvalidArgumentError", "bad shape"),
    error("jaxlib._jax", "JaxRuntimeError", "INVALID_ARGUMENT", RuntimeError),
    error("onnxruntime.capi.onnxruntime_pybind11_state", "Fail", "no such file"),
    error("somewhere.else", "OutOfMemoryError", ""),
]


@pytest.mark.parametrize("framework", ADAPTERS)
def test_each_framework_recognises_its_own_and_no_others(framework):
    for owner, errors in OUT_OF_MEMORY.items():
        for raised in errors:
            assert ADAPTERS[framework].is_out_of_memory(raised) is (owner == framework)
    for raised in OTHER:
        assert not ADAPTERS[framework].is_out_of_memory(raised)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total", int(2.5 * GIB)),
        ("Tried to allocate 20.00 MiB (GPU 0", 20 * MIB),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5368709120 bytes.", 5 * GIB),
        ("Out of memory while trying to allocate 5.00GiB.", 5 * GIB),
        ("Out of memory allocating 5,368,709,120 bytes (allocated so far: 0 bytes)", 5 * GIB),
        ("Failed to allocate memory for requested buffer of size 536870912", 512 * MIB),
        ("failed to allocate 2.00GiB (2147483648 bytes) from device", 2 * GIB),
        ("failed to allocate request for 1.50GiB", int(1.5 * GIB)),
        ("OOM when allocating tensor with shape[1024] and type float", None),
        ("tried to allocate 1.2.3 GiB", None),
        ("", None),
    ],
)
def test_what_a_message_says_was_wanted(text, expected):
    assert parse_wanted_bytes(text) == expected
