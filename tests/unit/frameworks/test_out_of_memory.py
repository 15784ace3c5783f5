import pytest

from prefect_gpu.frameworks.out_of_memory import causes, looks_out_of_memory, parse_wanted_bytes
from prefect_gpu.frameworks.registry import ADAPTERS
from prefect_gpu.units import GIB, MIB


def error(module, name, text, base=Exception):
    """Make an error of a class that looks like a framework's."""
    return type(name, (base,), {"__module__": module})(text)


CAPI = "onnxruntime.capi.onnxruntime_pybind11_state"
TF = "tensorflow.python.framework.errors_impl"
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory"
SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB"
KERAS = "Exception encountered when calling Dense.call().\n\n"

OUT_OF_MEMORY = {
    "torch": [
        error("torch", "OutOfMemoryError", "anything", RuntimeError),
        error("torch", "OutOfMemoryError", "beside a std::bad_alloc", RuntimeError),
        error("torch", "AcceleratorError", "CUDA error: out of memory", RuntimeError),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError(KERAS + SHORT),
        error("lightning.pytorch.utilities.exceptions", "MisconfigurationException", SHORT),
        error("their_module", "TrainingError", f"step 3: {SHORT}", RuntimeError),
        Exception(SHORT),
        error("torch._inductor.exc", "InductorError", f"OutOfMemoryError: {SHORT}"),
        error("torch._dynamo.exc", "BackendCompilerFailed", f"raised:\nOutOfMemoryError: {SHORT}"),
        error(
            "torch.multiprocessing.spawn",
            "ProcessRaisedException",
            f"\n\n-- Process 0 terminated:\nTraceback:\ntorch.OutOfMemoryError: {SHORT}",
        ),
        RuntimeError("No executable batch size found, reached zero."),
    ],
    "tensorflow": [
        error(TF, "ResourceExhaustedError", "OOM when"),
        type("InternalError", (type(error("tensorflow.x", "OpError", "")),), {})("out of memory"),
        RuntimeError(
            f"{KERAS}{{{{function_node __wrapped__MatMul}}}} "
            "OOM when allocating tensor with shape[9,9] and type float on /job:localhost/replica:0/"
            "task:0/device:GPU:0 by allocator GPU_0_bfc [Op:MatMul]"
        ),
    ],
    "jax": [
        error("jaxlib._jax", "JaxRuntimeError", EXHAUSTED, RuntimeError),
        error("jaxlib._jax", "JaxRuntimeError", "INTERNAL: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError(f"{EXHAUSTED} while trying to allocate 5368709120 bytes."),
        RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 5.00GiB (5368709120B) on"),
    ],
    "cupy": [
        error("cupy.cuda.memory", "OutOfMemoryError", "Out of memory", MemoryError),
        error("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorMemoryAllocation"),
        RuntimeError("Out of memory allocating 512 bytes (allocated so far: 0 bytes)."),
    ],
    "onnxruntime": [
        error(CAPI, "Fail", "bfc_arena.cc:376 Available"),
        error(CAPI, "EPFail", "CUDA failure: out of memory"),
        RuntimeError(
            "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::"
            "AllocateRawInternal(size_t, bool) Available memory of 256 is smaller than requested bytes of 512"
        ),
        RuntimeError(
            "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:121 CUBLAS failure 3: "
            "CUBLAS_STATUS_ALLOC_FAILED ; GPU=0"
        ),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=a"),
    ],
}
OTHER = [
    ValueError("CUDA out of memory"),
    RuntimeError("shapes do not match"),
    MemoryError(),
    error("torch", "AcceleratorError", "CUDA error: an illegal memory access", RuntimeError),
    error(TF, "InvalidArgumentError", "bad shape"),
    error("jaxlib._jax", "JaxRuntimeError", "INVALID_ARGUMENT", RuntimeError),
    error(CAPI, "Fail", "no such file"),
    error("somewhere.else", "OutOfMemoryError", ""),
    NotImplementedError("CUDA out of memory"),
    KeyboardInterrupt("CUDA out of memory"),
    error("grpc._channel", "_InactiveRpcError", "StatusCode.RESOURCE_EXHAUSTED: message is larger"),
    # The machine's own memory.
    RuntimeError("std::bad_alloc; CUDA out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:130] DefaultCPUAllocator: not enough memory: you tried"
    ),
    error(
        "numpy._core._exceptions", "_ArrayMemoryError", "Unable to allocate 64. TiB", MemoryError
    ),
    error("their_module", "NoMemory", "CUDA out of memory", MemoryError),
    error(
        TF,
        "ResourceExhaustedError",
        "OOM when allocating tensor with shape[9] and type float on /job:localhost/replica:0/task:0/"
        "device:CPU:0 by allocator mklcpu [Op:Fill] name: ",
    ),
    RuntimeError(
        "OOM when allocating tensor with shape[9] and type float on by allocator gpu_host_bfc"
    ),
]


def test_each_error_has_one_framework_and_others_have_none():
    assert set(OUT_OF_MEMORY) == set(ADAPTERS)
    for owner, errors in OUT_OF_MEMORY.items():
        for raised in errors:
            assert looks_out_of_memory(raised) == owner
    for raised in OTHER:
        assert looks_out_of_memory(raised) == ""


def test_causes_are_followed_through_what_is_hidden_and_once_around_a_circle():
    first, second, third = ValueError(1), KeyError(2), RuntimeError(3)
    third.__cause__, second.__context__ = second, first
    second.__suppress_context__ = True
    assert list(causes(third)) == [third, second, first]
    first.__context__ = third
    assert list(causes(third)) == [third, second, first]


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
        (
            "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.00 GiB is free.",
            int(1.5 * GIB),
        ),
        ("OOM when allocating tensor with shape[1000,1000,1000] and type float", 4 * 10**9),
        ("OOM when allocating tensor with shape[8, 2] and type bfloat16 on", 32),
        ("OOM when allocating tensor with shape[] and type double on", 8),
        ("OOM when allocating tensor with shape[1024] and type variant on", None),
        ("Out of memory allocating 5368709120 bytes", 5 * GIB),
        ("Available memory of 1048576 is smaller than requested bytes of 536870912", 512 * MIB),
        ("tried to allocate 1.2.3 GiB", None),
        ("", None),
    ],
)
def test_what_a_message_says_was_wanted(text, expected):
    assert parse_wanted_bytes(text) == expected


class Falsy(Exception):
    def __bool__(self):
        return False


class Group(Exception):
    """As `ExceptionGroup`, which Python 3.10 lacks."""

    def __init__(self, *exceptions):
        self.exceptions = exceptions


def test_a_cause_counts_whatever_its_truth():
    error, cause = ValueError(), Falsy()
    error.__cause__ = cause
    error.__context__ = KeyError()
    assert list(causes(error)) == [error, cause]


def test_members_of_groups_are_looked_at_once_and_before_what_comes_after():
    inner, shared, last = ValueError(), KeyError(), OSError()
    inner.__context__ = shared
    group = Group(inner, Group(shared), "no error")
    group.__context__ = last
    assert list(causes(group)) == [group, inner, shared, group.exceptions[1], last]


def test_what_was_being_handled_is_left_out_of_each_member():
    handled, first, second = ValueError(), KeyError(), OSError()
    first.__context__ = handled
    group = Group(first, second)
    assert list(causes(group, until=handled)) == [group, first, second]
