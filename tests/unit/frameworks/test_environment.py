"""The environment of a child, and what of it may change late; `tests/gpu/test_late_policy.py` uses a GPU."""

import pytest

from prefect_gpu.frameworks.adapter import (
    THREAD_VARIABLES,
    child_environment,
    late_changes,
)
from prefect_gpu.frameworks.registry import ADAPTERS, adapters_for
from prefect_gpu.units import GIB
from tests.unit.frameworks.policies import policy


def environment(inherited=None, **changes):
    p = policy(**changes)
    return child_environment(p, adapters_for(p), inherited or {})


def test_nvml_devices_are_addressed_by_uuid_in_the_tasks_order():
    found = environment(
        device_uuids=("GPU-bb", "GPU-aa"),
        total_bytes=(80 * GIB,) * 2,
        budget_bytes=(8 * GIB,) * 2,
    )
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-bb,GPU-aa"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("kind", ["host", "simulated"])
def test_without_a_real_device_no_gpu_can_be_seen(kind):
    found = environment({"CUDA_VISIBLE_DEVICES": "0"}, device_kind=kind, allocation="limit")
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_every_thread_variable_is_the_policys_cpus():
    found = environment(cpus=3)
    assert {found[name] for name in THREAD_VARIABLES} == {"3"}
    # XLA's threads compile, in a burst: on a GPU they are bounded where a tag says so.
    assert "NPROC" not in found
    assert environment(cpus=3, cpus_stated=True)["NPROC"] == "3"
    assert environment(cpus=3, device_kind="host")["NPROC"] == "3"


def test_what_is_inherited_as_wanted_is_not_repeated():
    assert "OMP_NUM_THREADS" not in environment({"OMP_NUM_THREADS": "2"}, cpus=2)
    assert environment({"OMP_NUM_THREADS": "8"}, cpus=2)["OMP_NUM_THREADS"] == "2"


def test_allocator_options_are_given_under_both_names():
    found = environment(
        allocator_options={"max_split_size_mb": "128", "expandable_segments": "True"}
    )
    text = "max_split_size_mb:128,expandable_segments:True"
    assert found["PYTORCH_ALLOC_CONF"] == found["PYTORCH_CUDA_ALLOC_CONF"] == text


def test_without_allocator_options_the_users_own_stay():
    assert "PYTORCH_ALLOC_CONF" not in environment({"PYTORCH_ALLOC_CONF": "backend:native"})


def test_caching_off_reaches_pytorch():
    assert environment(caching=False)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def test_an_inherited_caching_switch_is_removed_where_it_would_disable_the_cap():
    inherited = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert environment(inherited, allocation="limit")["PYTORCH_NO_CUDA_MEMORY_CACHING"] is None
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environment(inherited)


def test_tensorflow_has_growth_or_a_limit_and_never_both():
    name = "TF_FORCE_GPU_ALLOW_GROWTH"
    assert environment()[name] == "true"
    assert environment({name: "true"}, allocation="limit")[name] is None
    assert name not in environment(allocation="limit")


def test_jax_keeps_to_the_cap_of_a_probe_and_takes_memory_as_it_needs_it():
    found = environment(allocation="limit", context_bytes={"jax": 2 * GIB}, on_demand=True)
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.075000"


@pytest.mark.parametrize(
    ("allocation", "preallocate", "fraction"),
    [("growth", "false", None), ("limit", "true", "0.075000"), ("all", "true", "0.075000")],
)
def test_jax_gets_a_fraction_of_the_total_under_the_new_name_alone(
    allocation, preallocate, fraction
):
    inherited = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
        "XLA_CLIENT_MEM_FRACTION": ".9",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    found = environment(inherited, allocation=allocation, context_bytes={"jax": 2 * GIB})
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == preallocate
    assert found["XLA_CLIENT_MEM_FRACTION"] == fraction
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] is None
    # The platform's allocator would know no fraction.
    removed = found.get("XLA_PYTHON_CLIENT_ALLOCATOR", "stays") is None
    assert removed == (allocation != "growth")


def test_jax_and_cupy_take_the_smallest_cap_of_several_devices():
    found = environment(
        allocation="limit",
        device_uuids=("GPU-aa", "GPU-bb"),
        total_bytes=(80 * GIB, 40 * GIB),
        budget_bytes=(8 * GIB, 2 * GIB),
    )
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.050000"
    assert found["CUPY_GPU_MEMORY_LIMIT"] == str(2 * GIB)


def test_cupys_inherited_limit_is_removed_where_the_policy_has_none():
    assert environment({"CUPY_GPU_MEMORY_LIMIT": "1"})["CUPY_GPU_MEMORY_LIMIT"] is None


def test_frameworks_that_tags_leave_out_do_not_take_the_device():
    found = environment(frameworks=("torch",), allocation="limit")
    assert found["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_CLIENT_MEM_FRACTION" not in found


def test_none_leaves_every_framework_as_it_is():
    found = environment(frameworks=("none",), allocation="limit")
    assert set(found) == {*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


def test_onnxruntime_has_no_variables():
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


def test_tensorflow_does_not_inform_of_itself_unless_the_user_asked():
    name = "TF_CPP_MIN_LOG_LEVEL"
    assert environment(frameworks=("tensorflow",))[name] == "1"
    assert name not in environment({name: "0"}, frameworks=("tensorflow",))
    assert name not in environment(frameworks=("torch",))
    adapters = ADAPTERS.values()
    # A standby without it can still be the process of such a task.
    assert late_changes({}, {name: "1"}, adapters, cpus_stated=False) == {name: "1"}
