"""The environment of a child, and what of it may change late; `tests/gpu/test_late_policy.py` uses a GPU."""

import pytest

from prefect_gpu.frameworks.adapter import THREAD_VARIABLES, child_environment, late_changes
from prefect_gpu.frameworks.registry import ADAPTERS, adapters_for
from prefect_gpu.units import GIB
from tests.unit.frameworks.policies import TWO, policy


def environment(inherited=None, **changes):
    p = policy(**changes)
    return child_environment(p, adapters_for(p), inherited or {})


ABSENT = "absent"
OPTIONS = "max_split_size_mb:128,expandable_segments:True"
ALLOCATOR = {"max_split_size_mb": "128", "expandable_segments": "True"}
LIMIT = {"allocation": "limit"}
NO_CACHE, GROWTH = "PYTORCH_NO_CUDA_MEMORY_CACHING", "TF_FORCE_GPU_ALLOW_GROWTH"
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, PLATFORM = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
THREE_CPUS = dict.fromkeys(THREAD_VARIABLES, "3")
JAX_CONTEXT = {"context_bytes": {"jax": 2 * GIB}}
JAX_INHERITED = {OLD_FRACTION: ".9", FRACTION: ".9", PLATFORM: "platform"}
#: Policy, inherited environment, and the variables of the child.
ENVIRONMENTS = {
    "nvml devices are addressed by uuid in the task's order": (
        TWO | {"device_uuids": ("GPU-bb", "GPU-aa")},
        {},
        {"CUDA_VISIBLE_DEVICES": "GPU-bb,GPU-aa", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ),
    "on the host no GPU can be seen": (
        LIMIT | {"device_kind": "host"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ),
    "on a simulated device no GPU can be seen": (
        LIMIT | {"device_kind": "simulated"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ),
    # XLA's threads compile, in a burst: on a GPU they are bounded where a tag says so.
    "every thread variable is the policy's cpus": ({"cpus": 3}, {}, THREE_CPUS | {"NPROC": ABSENT}),
    "stated cpus": ({"cpus": 3, "cpus_stated": True}, {}, THREE_CPUS | {"NPROC": "3"}),
    "cpus on the host": ({"cpus": 3, "device_kind": "host"}, {}, THREE_CPUS | {"NPROC": "3"}),
    "what is inherited as wanted is not repeated": (
        {"cpus": 2},
        {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "8"},
        {"OMP_NUM_THREADS": ABSENT, "MKL_NUM_THREADS": "2"},
    ),
    "allocator options are given under both names": (
        {"allocator_options": ALLOCATOR},
        {},
        {"PYTORCH_ALLOC_CONF": OPTIONS, "PYTORCH_CUDA_ALLOC_CONF": OPTIONS},
    ),
    "without allocator options the user's own stay": (
        {},
        {"PYTORCH_ALLOC_CONF": "backend:native"},
        {"PYTORCH_ALLOC_CONF": ABSENT},
    ),
    "caching off reaches PyTorch": ({"caching": False}, {}, {NO_CACHE: "1"}),
    "an inherited caching switch that would disable the cap": (
        LIMIT,
        {NO_CACHE: "1"},
        {NO_CACHE: None},
    ),
    "an inherited caching switch without a cap": ({}, {NO_CACHE: "1"}, {NO_CACHE: ABSENT}),
    "TensorFlow has growth": ({}, {}, {GROWTH: "true"}),
    "or a limit, and never both": (LIMIT, {GROWTH: "true"}, {GROWTH: None}),
    "or a limit without growth to remove": (LIMIT, {}, {GROWTH: ABSENT}),
    "TensorFlow does not inform of itself": (
        {"frameworks": ("tensorflow",)},
        {},
        {"TF_CPP_MIN_LOG_LEVEL": "1"},
    ),
    "unless the user asked": (
        {"frameworks": ("tensorflow",)},
        {"TF_CPP_MIN_LOG_LEVEL": "0"},
        {"TF_CPP_MIN_LOG_LEVEL": ABSENT},
    ),
    "JAX keeps to the cap of a probe and takes memory as it needs it": (
        LIMIT | JAX_CONTEXT | {"on_demand": True},
        {},
        {PREALLOCATE: "false", FRACTION: "0.075000"},
    ),
    "JAX grows": (
        JAX_CONTEXT,
        JAX_INHERITED,
        {PREALLOCATE: "false", FRACTION: None, OLD_FRACTION: None, PLATFORM: ABSENT},
    ),
    **{
        # The platform's allocator would know no fraction.
        f"JAX gets a fraction of the total under the new name alone: {allocation}": (
            JAX_CONTEXT | {"allocation": allocation},
            JAX_INHERITED,
            {PREALLOCATE: "true", FRACTION: "0.075000", OLD_FRACTION: None, PLATFORM: None},
        )
        for allocation in ("limit", "all")
    },
    "JAX and CuPy take the smallest cap of several devices": (
        LIMIT | TWO | {"total_bytes": (80 * GIB, 40 * GIB), "budget_bytes": (8 * GIB, 2 * GIB)},
        {},
        {FRACTION: "0.050000", "CUPY_GPU_MEMORY_LIMIT": str(2 * GIB)},
    ),
    "CuPy's inherited limit is removed where the policy has none": (
        {},
        {"CUPY_GPU_MEMORY_LIMIT": "1"},
        {"CUPY_GPU_MEMORY_LIMIT": None},
    ),
    "frameworks that tags leave out do not take the device": (
        LIMIT | {"frameworks": ("torch",)},
        {},
        {GROWTH: "true", PREALLOCATE: "false", FRACTION: ABSENT, "TF_CPP_MIN_LOG_LEVEL": ABSENT},
    ),
}


@pytest.mark.parametrize(
    ("changes", "inherited", "expected"), ENVIRONMENTS.values(), ids=list(ENVIRONMENTS)
)
def test_environment(changes, inherited, expected):
    found = environment(inherited, **changes)
    assert {name: found.get(name, ABSENT) for name in expected} == expected


def test_none_leaves_every_framework_as_it_is():
    found = environment(frameworks=("none",), allocation="limit")
    assert set(found) == {*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    assert ADAPTERS["onnxruntime"].environment(policy(allocation="limit")) == {}


# Variables that may still change after the imports.

ALL = tuple(ADAPTERS.values())


def changes(before, after, cpus_stated=False):
    return late_changes(before, after, ALL, cpus_stated=cpus_stated)


LATE = {
    "devices": ("CUDA_VISIBLE_DEVICES", "0,1", "GPU-1"),
    "devices where none were named": ("CUDA_VISIBLE_DEVICES", None, "GPU-1"),
    "no device in the end": ("CUDA_VISIBLE_DEVICES", "0,1", ""),
    "their order": ("CUDA_DEVICE_ORDER", None, "PCI_BUS_ID"),
    "an option of PyTorch's allocator": ("PYTORCH_ALLOC_CONF", None, "max_split_size_mb:64"),
    "its old name": ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", None),
    "the same backend": (
        "PYTORCH_ALLOC_CONF",
        "backend:cudaMallocAsync",
        "a:1, backend:cudaMallocAsync",
    ),
    "PyTorch's own backend by name": ("PYTORCH_ALLOC_CONF", "backend:native", None),
    "no caching": ("PYTORCH_NO_CUDA_MEMORY_CACHING", None, "1"),
    "how PyTorch asks for devices": ("PYTORCH_NVML_BASED_CUDA_CHECK", "1", None),
    # A standby without it can still be the process of such a task.
    "TensorFlow's log": ("TF_CPP_MIN_LOG_LEVEL", None, "1"),
    "TensorFlow's growth": ("TF_FORCE_GPU_ALLOW_GROWTH", "true", None),
    "TensorFlow's threads": ("TF_NUM_INTRAOP_THREADS", "2", "3"),
    "JAX's fraction": ("XLA_CLIENT_MEM_FRACTION", None, "0.25"),
    "its old name too": ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5", None),
    "JAX's preallocation": ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "true"),
    "CuPy's limit": ("CUPY_GPU_MEMORY_LIMIT", None, "1073741824"),
    "Prefect's server": ("PREFECT_API_URL", None, "http://127.0.0.1:4200/api"),
}

TOO_LATE = {
    "devices where none could be seen": ("CUDA_VISIBLE_DEVICES", "", "GPU-1"),
    "devices that were forbidden": ("CUDA_VISIBLE_DEVICES", "-1", "GPU-1"),
    "PyTorch's backend": ("PYTORCH_ALLOC_CONF", None, "backend:cudaMallocAsync"),
    "PyTorch's backend, back": ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "a:1"),
    "flags of XLA": ("XLA_FLAGS", None, "--xla_gpu_autotune_level=0"),
    "Keras's backend": ("KERAS_BACKEND", "torch", "jax"),
    "a variable of the user's": ("MY_MODEL", "a", "b"),
    "one that was removed": ("MY_MODEL", "a", None),
    "where libraries are": ("LD_LIBRARY_PATH", None, "/opt"),
}


@pytest.mark.parametrize(
    ("name", "before", "after"), [*LATE.values(), *TOO_LATE.values()], ids=[*LATE, *TOO_LATE]
)
def test_whether_a_variable_may_change_late(name, before, after):
    old, new = (
        {"HOME": "/", **({} if value is None else {name: value})} for value in (before, after)
    )
    late = (name, before, after) in LATE.values()
    assert changes(old, new) == ({name: after} if late else None)


def test_threads_that_were_only_computed_are_set_late_and_those_asked_for_are_not():
    before, after = {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}
    assert changes(before, after) == {"OMP_NUM_THREADS": "1"}
    assert changes(before, after, cpus_stated=True) is None
    assert changes(before, before, cpus_stated=True) == {}
