"""`prefect_gpu.cli`: what each command prints, and its exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from prefect_gpu import cli
from prefect_gpu.cli import main
from prefect_gpu.devices import spec as device_spec
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, ProcessUse
from prefect_gpu.units import GIB

Capture = pytest.CaptureFixture[str]


def test_check_prints_the_policy(capsys: Capture) -> None:
    code = main(
        [
            "check",
            "gpu:memory=6GiB",
            "gpu:framework=torch:70%",
            "gpu:framework=jax",
            "gpu:wait=10m",
            "gpu:alloc.backend=native",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert "memory             6GiB (6442450944 bytes) on each device" in lines
    assert "frameworks         jax, torch 70%" in lines
    assert "allocation         limit" in lines
    assert "allocator options  backend=native" in lines
    assert "wait               10m 00s" in lines
    assert lines[-1].startswith('tags: "gpu" "gpu:memory=6GiB"')


@pytest.mark.parametrize(
    ("tags", "line"),
    [
        pytest.param(["nightly"], "no gpu tag", id="a task for a thread"),
        pytest.param(["gpu"], "memory             a device to itself", id="no budget"),
        pytest.param(["gpu:memory=40%"], "40% of each device", id="a part of each device"),
        pytest.param(["gpu:cpus=4", "gpu:caching=off"], "caching            off", id="the rest"),
    ],
)
def test_check_tells_what_tags_mean(capsys: Capture, tags: list[str], line: str) -> None:
    assert main(["check", *tags]) == 0
    assert line in capsys.readouterr().out


def test_check_refuses_a_bad_tag(capsys: Capture) -> None:
    assert main(["check", "gpu:memory=8"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("prefect-gpu: gpu:memory=8: ")
    assert "8GiB?" in printed.err


def test_devices_lists_what_the_runner_would_use(capsys: Capture) -> None:
    assert main(["devices", "--devices", "simulated:2x24GiB"]) == 0
    heads, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads == ["index", "uuid", "name", "total", "free", "processes"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(row[-3:] == ["24GiB", "24GiB", "0"] for row in rows)


def test_devices_takes_its_default_from_the_settings(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_DEVICES", "simulated:8GiB")
    assert main(["devices", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)
    assert device["total_bytes"] == device["free_bytes"] == 8 * GIB
    assert device["kind"] == "simulated"
    assert device["processes"] == []


class _Reader:
    """A reader of the snapshots that it is given."""

    kind = "nvml"

    def __init__(self, *snapshots: DeviceSnapshot) -> None:
        self.snapshots = snapshots
        self.closed = False

    def read(self, roots: tuple[int, ...]) -> tuple[DeviceSnapshot, ...]:
        return self.snapshots

    def close(self) -> None:
        self.closed = True


DEVICE = Device("GPU-1a", 0, "NVIDIA H200", 140 * GIB, "nvml", "here")


def test_devices_says_what_is_wrong_with_one(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = _Reader(
        DeviceSnapshot(DEVICE, 0.0, 100 * GIB, processes=(ProcessUse(7, None, GIB),)),
        DeviceSnapshot(DEVICE, 0.0, 0, error="fell off the bus"),
    )
    monkeypatch.setattr(device_spec, "open_reader", lambda spec, environ: reader)
    assert main(["devices", "--devices", "nvml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("140GiB  100GiB                      1")
    assert lines[2].endswith("unusable: fell off the bus")
    assert reader.closed

    assert main(["devices", "--devices", "nvml", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["processes"] == [{"pid": 7, "used_bytes": GIB}]
    assert (second["free_bytes"], second["error"]) == (None, "fell off the bus")


def test_devices_says_when_there_are_none(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_spec, "open_reader", lambda spec, environ: _Reader())
    assert main(["devices", "--devices", "nvml"]) == 0
    assert capsys.readouterr().out == "no devices\n"


def test_devices_refuses_what_is_not_there(capsys: Capture) -> None:
    assert main(["devices", "--devices", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err


LIST = """\
name,duration,memory,devices,after
a,10m,60GiB,,
b,5m,30GiB,2,
c,1m,10GiB,,
d,1m,,,a b
huge,1,99GiB,,
"""


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    path = tmp_path / "tasks.csv"
    path.write_text(LIST)
    return str(path)


def test_simulate_prints_what_came_of_a_list(capsys: Capture, task_file: str) -> None:
    assert main(["simulate", task_file, "--devices", "2x80GiB", "--tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tasks        5, of which 4 ran" in lines
    assert "makespan     16m 00s, 1.45 × the lower bound" in lines
    assert "lower bound  11m 00s (longest chain)" in lines
    assert "b     0ms        10m 00s  10m 00s  15m 00s  0,1      0" in lines
    assert lines[-1].startswith("huge can never run: gpu:memory=99GiB is larger than any device")


def test_simulate_prints_json(capsys: Capture, task_file: str) -> None:
    assert (
        main(["simulate", task_file, "--devices", "2x80GiB", "--json", "--placement", "pack"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["makespan_s"], found["lower_bound_s"], found["max_wait_s"]) == (960, 660, 600)
    assert [task["started_s"] for task in found["tasks"]] == [0, 600, 0, 900, None]
    assert found["tasks"][1]["devices"] == [0, 1]


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        pytest.param([], [0, 0, 100], id="backfill"),
        pytest.param(["--no-backfill"], [0, 100, 100], id="no backfill"),
        pytest.param(["--unknown-durations", "--max-tasks-per-device", "1"], [0, 110, 100], id="one at a time"),
        pytest.param(["--max-processes", "1"], [0, 110, 100], id="one at all"),
    ],
)  # fmt: skip
def test_simulate_takes_how_to_schedule(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: list[str], starts: list[float]
) -> None:
    text = "duration,memory,priority\n100,20GiB,2\n50,4GiB,0\n10,20GiB,1\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["simulate", "-", "--devices", "simulated:1x24GiB", "--json", *options]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert [task["started_s"] for task in tasks] == starts


@pytest.mark.parametrize(
    ("content", "devices", "says"),
    [
        pytest.param("duration,memory\n1,8\n", "1GiB", "tasks.csv, line 2, column 'memory'", id="a bad field"),
        pytest.param(None, "1GiB", "tasks.csv cannot be read", id="no such file"),
        pytest.param("duration\n1\n", "abacus", "abacus", id="bad devices"),
    ],
)  # fmt: skip
def test_simulate_says_what_is_wrong(
    capsys: Capture, tmp_path: Path, content: str | None, devices: str, says: str
) -> None:
    path = tmp_path / "tasks.csv"
    if content is not None:
        path.write_text(content)
    assert main(["simulate", str(path), "--devices", devices]) == 2
    assert says in capsys.readouterr().err


def test_simulate_refuses_no_tasks_at_all(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "-", "--devices", "1GiB", "--max-tasks-per-device", "0"])
    assert "'0' is no whole number from 1" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "version", lambda name: f"1.2.3 of {name}")
    assert main(["version"]) == 0
    assert capsys.readouterr().out == "prefect-gpu 1.2.3 of prefect-gpu\n"


def test_a_command_is_needed(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err
