"""`prefect_gpu.settings`: the environment under Prefect's names for integrations."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prefect_gpu import GPUTaskRunner, settings
from prefect_gpu.errors import SettingError
from prefect_gpu.settings import PREFIX, GPUSettings
from prefect_gpu.units import MIB

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: Patch) -> None:
    for name in GPUSettings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)


def test_settings_have_defaults() -> None:
    assert GPUSettings().model_dump() == {
        "devices": "auto",
        "placement": "spread",
        "max_processes": None,
        "max_tasks_per_device": None,
        "start_method": "auto",
        "headroom": None,
        "ledger": None,
        "memory_snapshots": None,
        "reports": True,
        "live_view": True,
        "progress": True,
        "standby": "auto",
        "address": None,
        "num_gpus": None,
        "sharing": "time",
        "one_busy_task_per_device": True,
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DEVICES", "simulated:2x24GiB", "simulated:2x24GiB"),
        ("PLACEMENT", "pack", "pack"),
        ("MAX_PROCESSES", "3", 3),
        ("MAX_TASKS_PER_DEVICE", "2", 2),
        ("HEADROOM", "512 MiB", 512 * MIB),
        ("HEADROOM", "0", 0),
        ("REPORTS", "false", False),
        ("LIVE_VIEW", "off", False),
        ("PROGRESS", "0", False),
        ("LEDGER", "/mnt/ledger", Path("/mnt/ledger")),
        ("LEDGER", "", None),
        ("LEDGER", "~/ledger", Path.home() / "ledger"),
        ("MEMORY_SNAPSHOTS", "snapshots", Path("snapshots")),
        ("MEMORY_SNAPSHOTS", "", None),
        *(("STANDBY", text, value) for text, value in (("auto", "auto"), (" Auto", "auto"), ("0", 0), ("12", 12))),
    ],
)  # fmt: skip
def test_the_environment_sets(monkeypatch: Patch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(PREFIX + name, text)
    assert getattr(GPUSettings(), name.lower()) == value


@pytest.mark.parametrize("value", ["hot", "-1", -1, True, 1.5, "1.5", ""])
def test_other_values_of_standby_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="neither 'auto' nor a number"):
        GPUSettings(standby=value)


def test_forkserver_is_another_word_for_auto_for_one_version() -> None:
    with pytest.warns(FutureWarning, match="'forkserver' is 'auto' now"):
        assert GPUSettings(start_method="forkserver").start_method == "auto"
    with pytest.raises(ValidationError, match="'fork' is neither 'auto' nor 'spawn'"):
        GPUSettings(start_method="fork")


def test_gpus_are_reserved_on_a_cluster_alone() -> None:
    assert GPUSettings(address="auto", num_gpus=2).num_gpus == 2
    with pytest.raises(ValidationError, match="name it with address="):
        GPUSettings(num_gpus=2)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param("HEADROOM", "8", "did you mean 8GiB", id="headroom without a unit"),
        pytest.param("HEADROOM", "9" * 400 + "GiB", "accepted", id="headroom beyond numbers"),
        pytest.param("PLACEMENT", "random", "spread", id="an unknown placement"),
        pytest.param("MAX_PROCESSES", "0", "greater than or equal to 1", id="no process at all"),
        pytest.param("MAX_TASKS_PER_DEVICE", "0", "greater than or equal to 1", id="no task at all"),
        pytest.param("MAX_TASKS_PER_DEVICE", "two", "valid integer", id="a word for a number"),
        pytest.param("LEDGER", "ledger", "not an absolute path, as in /mnt/ledger", id="a folder of the working folder"),
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"placement": "random"}, r"GPUTaskRunner\(placement='random'\): it should be "),
        ({"standby": "hot"}, r"GPUTaskRunner\(standby='hot'\): 'hot' is neither 'auto' nor a number of processes"),
        ({"num_gpus": 2, "start_method": "auto"}, "num_gpus= is for a cluster; name it "),
        ({"max_processes": None}, f"{PREFIX}MAX_PROCESSES='0': it should be greater"),
    ],
    ids=["an argument", "another", "two arguments", "a setting"],
)  # fmt: skip
def test_a_runner_names_its_wrong_value(
    monkeypatch: Patch, arguments: dict[str, Any], says: str
) -> None:
    if "max_processes" in arguments:
        monkeypatch.setenv(PREFIX + "MAX_PROCESSES", "0")
    with pytest.raises(SettingError, match=f"^{says}"):
        GPUTaskRunner(**arguments)


def test_a_runner_prints_as_it_was_written() -> None:
    assert repr(GPUTaskRunner()) == "GPUTaskRunner()"
    written = "GPUTaskRunner(devices='simulated:2x24GiB', placement='pack', standby=0)"
    assert repr(pickle.loads(pickle.dumps(eval(written)))) == written


@pytest.mark.parametrize(
    "other",
    [
        {"standby": 0},
        {"reports": False},
        {"start_method": "spawn"},
        {"memory_snapshots": "here"},
    ],
    ids=str,
)
def test_a_runner_with_another_argument_is_another_runner(other: dict[str, Any]) -> None:
    one, two = GPUTaskRunner(), GPUTaskRunner(**other)
    assert one != two and len({one, two, GPUTaskRunner()}) == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("STANDBYS", "did you mean PREFECT_INTEGRATIONS_GPU_STANDBY?"),
        ("start_methods", "did you mean PREFECT_INTEGRATIONS_GPU_START_METHOD?"),
        ("X", "settings: ADDRESS, DEVICES, "),
    ],
)
def test_a_variable_that_is_no_setting_is_warned_of(
    name: str, says: str, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(PREFIX + name, "2")
    settings._check_name.cache_clear()
    expected = re.escape(f"{PREFIX}{name} is no setting of prefect_gpu; {says}")
    with pytest.warns(UserWarning, match=f"^{expected}") as caught:
        GPUTaskRunner()
    assert [warning.filename for warning in caught] == [__file__]
    # Said once: another warning would be an error.
    GPUTaskRunner()
