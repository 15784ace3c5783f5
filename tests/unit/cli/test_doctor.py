"""`prefect-gpu doctor`: what each answer of the machine means, and that a real one can be asked."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_gpu.cli import doctor
from prefect_gpu.cli.commands import main
from prefect_gpu.cli.doctor import Build, Finding, judge_framework
from prefect_gpu.devices import nvml
from prefect_gpu.scheduling.model import Device, DeviceSnapshot
from prefect_gpu.units import GIB, MIB
from tests.cases import needs
from tests.fakes.fake_nvml import FakeGpu, FakeNvml

Patch = pytest.MonkeyPatch

Capture = pytest.CaptureFixture[str]


def device(at: int, error: str = "", attributed: bool = True) -> DeviceSnapshot:
    made = Device(
        *(f"GPU-{at}", at, "NVIDIA H200", 141 * GIB, "nvml", "here", at, "580.1"),
        attributed=attributed,
    )
    return DeviceSnapshot(made, 0.0, 100 * GIB, error=error)


def test_devices_that_work_and_one_that_does_not() -> None:
    found, gpus = doctor.judge_devices([device(0), device(1, "fell off the bus"), device(2)], None)
    ok, problem = found
    assert gpus == 2
    assert ok == Finding("driver", "ok", "NVIDIA driver 580.1, 2 devices: NVIDIA H200")
    assert problem.level == "problem"
    assert problem.text == "device 1 (GPU-1): fell off the bus" and "reset" in problem.fix


def test_what_limits_the_view_of_the_devices_is_said() -> None:
    found, gpus = doctor.judge_devices([device(3, attributed=False)], "3")
    assert gpus == 1
    assert [each.level for each in found] == ["ok", "note", "note"]
    assert found[1].text == "CUDA_VISIBLE_DEVICES=3 limits the devices"
    assert "--pid=host" in found[2].fix


@pytest.mark.parametrize(
    ("build", "gpus", "level", "text"),
    [
        (Build("2.11", "12.8", 2), 2, "ok", "2.11 for CUDA 12.8 can use 2 devices"),
        (Build("2.11", "", 0), 0, "ok", "2.11 is a build for the CPU"),
        (Build("2.11", "", 0), 1, "problem", "its tasks do not use the 1 device"),
        (Build("2.11", "12.8", 0), 2, "problem", "2.11 for CUDA 12.8 can use 0 devices of 2"),
        (Build("0.5", "plugin", 1), 1, "ok", "0.5 for plugin can use 1 device"),
        (Build("1.23", "CUDAExecutionProvider", None), 1, "ok", "for CUDAExecutionProvider"),
        ("ImportError: libcudnn", 1, "problem", "cannot be imported: ImportError: libcudnn"),
    ],
    ids=["fits", "no GPU, CPU build", "CPU build", "sees none", "a plugin", "no count", "broken"],
)
def test_a_framework_is_judged_by_its_build(
    build: Build | str, gpus: int, level: str, text: str
) -> None:
    for name in doctor.PROGRAMS:
        found = judge_framework(name, build, gpus)
        assert (found.subject, found.level) == (name, level)
        assert text in found.text
        assert bool(found.fix) is (level == "problem")


@needs("torch")
def test_a_framework_says_what_it_was_built_for() -> None:
    found = doctor.look_at("torch")
    assert isinstance(found, Build)
    assert found.version and found.devices is not None


@pytest.mark.parametrize(("available", "gpus"), [(True, 3), (False, 0)])
def test_pytorch_is_asked_for_its_gpus_where_it_has_some(
    monkeypatch: Patch, available: bool, gpus: int
) -> None:
    cuda = SimpleNamespace(is_available=lambda: available, device_count=lambda: 3)
    version = SimpleNamespace(cuda=None, hip="6.2")
    torch = SimpleNamespace(__version__="2.11", cuda=cuda, version=version)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    answer: dict[str, Any] = {}
    exec(doctor.PROGRAMS["torch"], answer)
    assert answer["found"] == ("2.11", "6.2", gpus)


def test_a_framework_that_cannot_be_imported_says_why(monkeypatch: Patch) -> None:
    programs = {
        "a": "import no_such_module",
        "b": "import os; os._exit(3)",
        "c": "while True: pass",
    }
    monkeypatch.setattr(doctor, "PROGRAMS", programs)
    assert doctor.look_at("a") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert doctor.look_at("b") == "it ended with 3"
    monkeypatch.setattr(doctor, "FRAMEWORK_S", 0.2)
    assert "longer than" in str(doctor.look_at("c"))


def test_packages_of_a_version_that_does_not_work_are_named_with_what_is_accepted() -> None:
    needed = ["fastapi<0.151", "prefect>=3.6.20,<4", "torch>=2.6; extra == 'torch'"]
    versions = {"fastapi": "0.153.0", "prefect-gpu": "0.1.0"}
    fastapi, prefect = doctor.check_dependencies(needed, versions.get)
    assert fastapi.text == "fastapi 0.153.0; accepted: <0.151"
    assert fastapi.fix == 'pip install "fastapi<0.151"'
    assert prefect.text.startswith("prefect is not installed; accepted: ")
    versions |= {"fastapi": "0.150.0", "prefect": "3.8.8"}
    (found,) = doctor.check_dependencies(needed, versions.get)
    assert found.level == "ok" and "prefect 3.8.8, fastapi 0.150.0" in found.text


def test_a_package_that_is_used_from_its_source_is_examined_too(monkeypatch: Patch) -> None:
    def absent(name: str) -> str:
        if name == "prefect-gpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    monkeypatch.setattr(importlib.metadata, "version", absent)
    found = next(each.text for each in doctor.examine() if each.subject == "packages")
    assert found.startswith("prefect-gpu is not installed, prefect 1.0")


def test_limits_below_what_flows_need_say_how_to_raise_them() -> None:
    assert doctor.judge_limit("open files", 256, 1024, "ulimit -n 65536").fix == "ulimit -n 65536"
    assert doctor.judge_limit("open files", 4096, 1024, "x").text == "open files: 4,096"
    assert doctor.judge_limit("open files", resource.RLIM_INFINITY, 1024, "x").level == "ok"
    assert "--shm-size" in doctor.judge_shared(64 * MIB).fix
    assert doctor.judge_shared(16 * GIB).level == "ok"


def check_server(url: str | None) -> Finding:
    with temporary_settings({PREFECT_API_URL: url}):
        (found,) = doctor.check_server()
    return found


def test_a_server_that_answers_one_that_does_not_and_none(prefect_server: str) -> None:
    found = check_server(prefect_server)
    assert found.level == "ok" and prefect_server in found.text
    found = check_server("http://127.0.0.1:9/api")
    assert found.level == "problem" and "http://127.0.0.1:9/api does not answer" in found.text
    found = check_server("http://127.0.0.1:9")
    assert found.level == "problem"
    assert found.fix == "PREFECT_API_URL has no /api; did you mean http://127.0.0.1:9/api?"
    found = check_server(None)
    assert found.level == "note" and "prefect server start" in found.fix


def test_a_ledger_that_cannot_be_used_is_a_problem(tmp_path: Path, monkeypatch: Patch) -> None:
    assert [each.level for each in doctor.check_ledger()] == ["ok"]
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_LEDGER", str(tmp_path / "missing"))
    (found,) = doctor.check_ledger()
    assert found.level == "problem" and "PREFECT_INTEGRATIONS_GPU_LEDGER" in found.fix
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_PLACEMENT", "best")
    (found,) = doctor.check_ledger()
    assert found.level == "problem" and "PREFECT_INTEGRATIONS_GPU_PLACEMENT='best'" in found.text


def test_the_exit_code_says_whether_there_is_a_problem(monkeypatch: Patch, capsys: Capture) -> None:
    found = [Finding("driver", "ok", "two devices"), Finding("torch", "note", "old", "renew it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      driver       two devices",
        "note    torch        old",
        "                     -> renew it",
    ]
    found.append(Finding("jax", "problem", "broken", "mend it"))
    assert main(["doctor", "--json"]) == 1
    printed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [each["level"] for each in printed] == ["ok", "note", "problem"]


@pytest.mark.slow
def test_this_machine_is_examined_without_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect_gpu", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    subjects = [each["subject"] for each in found]
    assert {"driver", "packages", "server", "ledger", "limits"} <= set(subjects), done.stderr
    assert {each["subject"] for each in found if each["level"] == "problem"} <= {"server"}


@pytest.mark.parametrize(
    ("gpu", "path", "said"),
    [
        (FakeGpu("GPU-a"), "/nowhere", ["nvidia-cuda-mps-control is not found in PATH"]),
        (FakeGpu("GPU-a", compute_mode=3), None, ["GPU 0 is not in the default compute mode"]),
        (FakeGpu("GPU-a"), None, []),
    ],
)
def test_what_prevents_the_sharing_by_mps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: FakeGpu, path: str | None, said: list[str]
) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.touch(0o755)
    monkeypatch.setenv("PATH", path or str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "pynvml", FakeNvml(gpu))
    found, gpus = doctor.check_driver()
    assert gpus == 1
    texts = [each.text for each in found if each.subject == "mps"]
    assert texts == [f"sharing='mps' has no effect here: {why}" for why in said]
