"""`prefect_gpu.settings`: the environment under Prefect's names for integrations."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prefect_gpu import GPUTaskRunner
from prefect_gpu.errors import SettingError
from prefect_gpu.settings import GPUSettings
from prefect_gpu.units import MIB

Patch = pytest.MonkeyPatch

PREFIX = "PREFECT_INTEGRATIONS_GPU_"


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: Patch) -> None:
    for name in (
        "DEVICES",
        "PLACEMENT",
        "MAX_PROCESSES",
        "MAX_TASKS_PER_DEVICE",
        "HEADROOM",
        "REPORTS",
        "LIVE_VIEW",
        "PROGRESS",
        "STANDBY",
        "START_METHOD",
        "LEDGER",
        "MEMORY_SNAPSHOTS",
    ):
        monkeypatch.delenv(PREFIX + name, raising=False)


def test_settings_have_defaults() -> None:
    settings = GPUSettings()
    assert settings.model_dump() == {
        "devices": "auto",
        "placement": "spread",
        "max_processes": None,
        "max_tasks_per_device": None,
        "start_method": "spawn",
        "headroom": None,
        "ledger": None,
        "memory_snapshots": None,
        "reports": True,
        "live_view": True,
        "progress": True,
        "standby": "auto",
        "address": None,
        "num_gpus": None,
    }


def test_the_environment_sets_every_setting(monkeypatch: Patch) -> None:
    monkeypatch.setenv(PREFIX + "DEVICES", "simulated:2x24GiB")
    monkeypatch.setenv(PREFIX + "PLACEMENT", "pack")
    monkeypatch.setenv(PREFIX + "MAX_PROCESSES", "3")
    monkeypatch.setenv(PREFIX + "MAX_TASKS_PER_DEVICE", "2")
    monkeypatch.setenv(PREFIX + "HEADROOM", "512 MiB")
    monkeypatch.setenv(PREFIX + "REPORTS", "false")
    monkeypatch.setenv(PREFIX + "LIVE_VIEW", "off")
    monkeypatch.setenv(PREFIX + "PROGRESS", "0")
    monkeypatch.setenv(PREFIX + "LEDGER", "/mnt/ledger")
    monkeypatch.setenv(PREFIX + "MEMORY_SNAPSHOTS", "snapshots")
    settings = GPUSettings()
    assert settings.ledger == Path("/mnt/ledger")
    assert settings.memory_snapshots == Path("snapshots")
    assert settings.devices == "simulated:2x24GiB"
    assert settings.placement == "pack"
    assert not settings.live_view and not settings.progress
    assert settings.max_processes == 3
    assert settings.max_tasks_per_device == 2
    assert settings.headroom == 512 * MIB
    assert settings.reports is False


def test_an_empty_folder_for_snapshots_is_none(monkeypatch: Patch) -> None:
    monkeypatch.setenv(PREFIX + "MEMORY_SNAPSHOTS", "")
    assert GPUSettings().memory_snapshots is None


@pytest.mark.parametrize(
    ("text", "standby"), [("auto", "auto"), (" Auto", "auto"), ("0", 0), ("12", 12)]
)
def test_standby_is_a_word_or_a_number(monkeypatch: Patch, text: str, standby: object) -> None:
    monkeypatch.setenv(PREFIX + "STANDBY", text)
    assert GPUSettings().standby == standby


@pytest.mark.parametrize("value", ["hot", "-1", -1, True, 1.5, "1.5", ""])
def test_other_values_of_standby_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="neither 'auto' nor a number"):
        GPUSettings(standby=value)


def test_a_cluster_starts_no_forks() -> None:
    with pytest.raises(ValidationError, match="leave it out beside address="):
        GPUSettings(address="auto", start_method="forkserver")


def test_gpus_are_reserved_on_a_cluster_alone() -> None:
    assert GPUSettings(address="auto", num_gpus=2).num_gpus == 2
    with pytest.raises(ValidationError, match="name it with address="):
        GPUSettings(num_gpus=2)


def test_headroom_may_be_zero(monkeypatch: Patch) -> None:
    monkeypatch.setenv(PREFIX + "HEADROOM", "0")
    assert GPUSettings().headroom == 0


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param("HEADROOM", "8", "did you mean 8GiB", id="headroom without a unit"),
        pytest.param("HEADROOM", "9" * 400 + "GiB", "accepted", id="headroom beyond numbers"),
        pytest.param("PLACEMENT", "random", "spread", id="an unknown placement"),
        pytest.param("MAX_PROCESSES", "0", "greater than or equal to 1", id="no process at all"),
        pytest.param("MAX_TASKS_PER_DEVICE", "0", "greater than or equal to 1", id="no task at all"),
        pytest.param("MAX_TASKS_PER_DEVICE", "two", "valid integer", id="a word for a number"),
        pytest.param("DEVICES", "", "at least 1 character", id="no devices named"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(monkeypatch: Patch, name: str, text: str, problem: str) -> None:
    monkeypatch.setenv(PREFIX + name, text)
    with pytest.raises(ValidationError, match=problem):
        GPUSettings()


def test_settings_can_be_pickled_with_a_flow() -> None:
    settings = GPUSettings(devices="0,1")
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_runner_names_the_argument_or_the_setting_that_is_wrong(monkeypatch: Patch) -> None:
    wrong: Any = "random"
    with pytest.raises(ValueError, match=r"^GPUTaskRunner\(placement='random'\): it should be "):
        GPUTaskRunner(placement=wrong)
    refused = r"^GPUTaskRunner\(standby='hot'\): 'hot' is neither 'auto' nor a number of processes"
    unknown: Any = "hot"
    with pytest.raises(SettingError, match=refused):
        GPUTaskRunner(standby=unknown)
    with pytest.raises(
        SettingError, match=r"^start_method='forkserver' is for one machine; leave "
    ):
        GPUTaskRunner(address="auto", start_method="forkserver")
    monkeypatch.setenv(PREFIX + "MAX_PROCESSES", "0")
    with pytest.raises(SettingError, match=f"^{PREFIX}MAX_PROCESSES: it should be greater"):
        GPUTaskRunner(placement="pack")


def test_a_runner_prints_as_it_was_written() -> None:
    assert repr(GPUTaskRunner()) == "GPUTaskRunner()"
    written = "GPUTaskRunner(devices='simulated:2x24GiB', placement='pack', standby=0)"
    assert repr(pickle.loads(pickle.dumps(eval(written)))) == written
