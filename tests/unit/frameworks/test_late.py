"""`prefect_gpu.frameworks.late`: what may still change after the imports. GPUs have their say in
`tests/gpu/test_late_policy.py`."""

from __future__ import annotations

import pytest

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import HeatingAdapter
from prefect_gpu.frameworks.late import hot_changes, late_changes

ALL = tuple(registry.ADAPTERS.values())


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


def pair(name, before, after):
    return (
        {"HOME": "/", **({} if before is None else {name: before})},
        {"HOME": "/", **({} if after is None else {name: after})},
    )


@pytest.mark.parametrize("case", LATE.values(), ids=list(LATE))
def test_may_change_late(case):
    assert changes(*pair(*case)) == {case[0]: case[2]}


@pytest.mark.parametrize("case", TOO_LATE.values(), ids=list(TOO_LATE))
def test_would_change_too_late(case):
    assert changes(*pair(*case)) is None


def test_threads_that_were_only_computed_are_set_late_and_those_asked_for_are_not():
    before, after = {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}
    assert changes(before, after) == {"OMP_NUM_THREADS": "1"}
    assert changes(before, after, cpus_stated=True) is None
    assert changes(before, before, cpus_stated=True) == {}


# Once a framework has started.


def test_these_may_start_before_their_policy_is_known():
    assert [a.name for a in ALL if isinstance(a, HeatingAdapter)] == ["torch", "cupy"]


AFTER_START = {
    "how PyTorch asks for devices": ("torch", "PYTORCH_NVML_BASED_CUDA_CHECK", "1", None),
    "CuPy's limit": ("cupy", "CUPY_GPU_MEMORY_LIMIT", None, "1073741824"),
    "another framework's": ("torch", "CUPY_GPU_MEMORY_LIMIT", None, "1073741824"),
    "JAX's fraction": ("torch", "XLA_CLIENT_MEM_FRACTION", None, "0.25"),
    "an allocator that does not run": ("cupy", "PYTORCH_ALLOC_CONF", None, "max_split_size_mb:64"),
    "Prefect's server": ("torch", "PREFECT_API_URL", None, "http://127.0.0.1:4200/api"),
    "where nothing real has started": ("simulated", "PYTORCH_ALLOC_CONF", None, "a:1"),
}

TOO_LATE_AFTER_START = {
    "its device": ("torch", "CUDA_VISIBLE_DEVICES", "GPU-1", "GPU-2"),
    "more devices": ("torch", "CUDA_VISIBLE_DEVICES", "GPU-1", "GPU-1,GPU-2"),
    "their order": ("cupy", "CUDA_DEVICE_ORDER", None, "PCI_BUS_ID"),
    "an option of PyTorch's allocator": ("torch", "PYTORCH_ALLOC_CONF", None, "a:1"),
    "its old name": ("torch", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", None),
    "no caching": ("torch", "PYTORCH_NO_CUDA_MEMORY_CACHING", None, "1"),
    "what is too late as it is": ("torch", "MY_MODEL", "a", "b"),
}


def after_start(hot, name, before, after):
    return hot_changes(*pair(name, before, after), hot, ALL, cpus_stated=False)


@pytest.mark.parametrize("case", AFTER_START.values(), ids=list(AFTER_START))
def test_may_change_after_the_start(case):
    assert after_start(*case) == {case[1]: case[3]}


@pytest.mark.parametrize("case", TOO_LATE_AFTER_START.values(), ids=list(TOO_LATE_AFTER_START))
def test_would_change_too_late_after_the_start(case):
    assert after_start(*case) is None
