"""`prefect_gpu.processes.standby_kind`: what is imported ahead for a task, and with which environment."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.processes.standby_kind import OWN_MODULES, kind_of
from tests.unit.processes import kind_bodies, task_bodies

NVML = FrameworkPolicy("nvml", (), (), (), cpus=3, frameworks=("torch",))


def kind(fn: Any, policy: FrameworkPolicy = NVML, **changes: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        kept = {n: v for n, v in os.environ.items() if n == "KERAS_BACKEND"}
        patch.setattr(os, "environ", kept)
        return kind_of(fn, policy, **{"size_bytes": 1, **changes})


def test_the_modules_that_a_standby_imports() -> None:
    found = kind(kind_bodies.imports_inside)
    assert found.always == (*OWN_MODULES, "torch")
    # By a module of the user's that has it as a global. Nothing of the user's, nothing of Python's.
    assert found.libraries == ("numpy",)
    assert found.modules == found.always + found.libraries
    assert kind(kind_bodies.multiplies).libraries == ("numpy", "numpy.linalg:norm")


def test_a_function_that_travels_by_value_brings_what_its_code_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__main__", "by_path_or_made_by_hand"):
        module = types.ModuleType(name)
        exec("import pytest\ndef f():\n import numpy", module.__dict__)
        if name != "__main__":
            monkeypatch.setitem(sys.modules, name, module)
        assert kind(module.f).libraries == ("numpy",)


def test_prefect_is_imported_ahead_for_tasks_that_use_it() -> None:
    def always(fn: Any, **changes: Any) -> Any:
        return kind(fn, with_prefect=False, **changes).always

    assert always(kind_bodies.imports_inside) == ("torch",)
    assert kind(kind_bodies.imports_inside).always == (*OWN_MODULES, "torch")
    # It comes with a module of the user's.
    assert always(task_bodies.with_helper.fn) == (*OWN_MODULES, "torch")


def test_what_is_not_installed_is_not_tried() -> None:
    assert "no_such_package_here" not in str(kind(kind_bodies.imports_nothing_there).libraries)


def test_the_device_is_not_known_and_never_none() -> None:
    environment = kind(kind_bodies.plain).environment_of({"CUDA_VISIBLE_DEVICES": "2", "X": "1"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2" and environment["X"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in kind(kind_bodies.plain).environment_of({})
    host = kind(kind_bodies.plain, replace(NVML, device_kind="host"))
    assert host.environment_of({"CUDA_VISIBLE_DEVICES": "2"})["CUDA_VISIBLE_DEVICES"] == ""


def test_modules_may_ask_pytorch_for_devices() -> None:
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    assert kind(kind_bodies.plain).environment_of({})[name] == "1"
    assert kind(kind_bodies.plain).environment_of({name: "0"})[name] == "0"
    other = kind(kind_bodies.plain, replace(NVML, frameworks=("jax",)))
    assert name not in other.environment_of({})


def test_threads_are_those_computed_and_only_stated_ones_make_another_kind() -> None:
    computed = kind(kind_bodies.plain)
    assert computed.environment_of({})["OMP_NUM_THREADS"] == "3"
    assert computed == kind(kind_bodies.plain, replace(NVML, cpus=5), size_bytes=7)
    assert computed != kind(kind_bodies.plain, replace(NVML, cpus_stated=True))


def test_allocator_options_are_there_from_the_start() -> None:
    policy = replace(NVML, allocator_options={"backend": "cudaMallocAsync"})
    found = kind(kind_bodies.plain, policy)
    assert found.environment_of({})["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"
    assert found != kind(kind_bodies.plain)


def test_a_standby_does_not_import_a_framework_that_the_tags_leave_out() -> None:
    found = kind(kind_bodies.imports_either)
    assert "torch.nn" in found.libraries and "tensorflow" not in str(found.modules)
    none = kind(kind_bodies.imports_either, replace(NVML, frameworks=("none",)))
    assert "torch" not in str(none.modules)


@pytest.mark.parametrize(
    ("backend", "imported"),
    [("", False), ("tensorflow", False), ("torch", True)],
    ids=["TensorFlow by default", "TensorFlow", "PyTorch"],
)
def test_keras_is_imported_ahead_only_for_its_backend(
    backend: str, imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if backend:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    found = kind(kind_bodies.imports_keras_or_torch)
    assert "torch.nn" in found.libraries and ("keras" in found.libraries) is imported


def test_on_the_host_no_framework_is_imported_ahead_where_the_code_has_several() -> None:
    # A process counts by its resident set there, and a branch of the task uses one of them.
    both = replace(NVML, frameworks=(), detected=("tensorflow", "torch"))
    assert "torch" in kind(kind_bodies.imports_either, both).always
    found = kind(kind_bodies.imports_either, replace(both, device_kind="host"))
    assert found.always == OWN_MODULES and "torch" not in str(found.libraries)
    stated = replace(both, device_kind="host", frameworks=("tensorflow", "torch"))
    assert {"tensorflow", "torch"} <= set(kind(kind_bodies.imports_either, stated).always)
    one = replace(both, device_kind="host", detected=("torch",))
    assert "torch" in kind(kind_bodies.imports_inside, one).always


def test_only_frameworks_whose_forks_were_shown_to_work_are_forked() -> None:
    assert not kind(kind_bodies.plain).forks
    for name, forked in (("torch", True), ("none", True), ("jax", True), ("tensorflow", False)):
        found = kind(kind_bodies.plain, replace(NVML, frameworks=(name,)), forks=True)
        assert found.forks is forked, name
