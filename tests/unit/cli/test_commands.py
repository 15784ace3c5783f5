"""`prefect_gpu.cli.commands`: what each command prints, and its exit code."""

from __future__ import annotations

import io
import json
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from prefect_gpu.cli import commands as cli
from prefect_gpu.cli import run_commands
from prefect_gpu.cli.commands import app, main
from prefect_gpu.devices import spec as device_spec
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, ProcessUse
from prefect_gpu.units import GIB

Patch = pytest.MonkeyPatch

Capture = pytest.CaptureFixture[str]


def test_check_prints_the_policy(capsys: Capture) -> None:
    tags = "gpu:memory=6GiB gpu:framework=torch:70% gpu:framework=jax gpu:wait=10m"
    assert main(["check", *tags.split(), "gpu:alloc.backend=native"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "memory             6GiB (6442450944 bytes) on each device" in lines
    assert "frameworks         jax, torch 70%" in lines
    assert "allocation         limit" in lines
    assert "allocator options  backend=native" in lines
    assert "wait               10m" in lines
    assert lines[-1].startswith('tags: "gpu" "gpu:memory=6GiB" "gpu:framework=torch:70%"')


@pytest.mark.parametrize(
    ("tags", "line"),
    [
        pytest.param(["nightly"], "no gpu tag", id="a task for a thread"),
        pytest.param(["gpu"], "memory             learned from earlier runs; a first run shares a device while it has room\n", id="no budget"),
        pytest.param(["gpu"], "allocation         limit\n", id="a first run is capped"),
        pytest.param(
            ["gpu:allocation=growth"],
            "memory             learned from earlier runs; a first run has a device to itself: "
            "gpu:allocation=growth leaves no room for others\n",
            id="no budget and no cap",
        ),
        pytest.param(["gpu:exclusive"], "a device to itself: gpu:exclusive\n", id="exclusive"),
        pytest.param(["gpu:exclusive", "gpu:memory=1GiB"], "allocation         limit\n", id="exclusive with a budget"),
        pytest.param(["gpu:memory=40%"], "40% of each device", id="a part of each device"),
        pytest.param(["gpu:cpus=4", "gpu:caching=off"], "caching            off", id="the rest"),
    ],
)  # fmt: skip
def test_check_explains_tags(capsys: Capture, tags: list[str], line: str) -> None:
    assert main(["check", *tags]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "tag",
    [
        *("memory=1GiB", "count=2", "device=0", "node=a", "framework=torch", "allocation=all", "alloc.backend=native"),
        *("caching=off", "exclusive", "oom=fail", "enforce=kill", "priority=5", "preemptible", "wait=1m", "cpus=2"),
        "learn_by=x",
    ],
)  # fmt: skip
def test_check_has_a_row_for_each_key(capsys: Capture, tag: str) -> None:
    assert main(["check", "gpu"]) == 0
    without = capsys.readouterr().out.splitlines()
    assert main(["check", f"gpu:{tag}"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(without) and rows[:-1] != without[:-1]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        pytest.param(["gpu=1"], "no gpu tag", id="alone"),
        pytest.param(["gpu", "gpu=1"], "memory  ", id="beside a gpu tag"),
        pytest.param(["gpu=1", "--json"], "null", id="as JSON"),
    ],
)
def test_check_suggests_what_was_meant(capsys: Capture, arguments: list[str], printed: str) -> None:
    assert main(["check", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(printed)
    assert captured.err == "prefect-gpu: 'gpu=1' has no meaning; did you mean 'gpu:count=1'?\n"


def test_check_prints_json(capsys: Capture) -> None:
    tags = ["gpu:memory=6GiB", "gpu:framework=torch:70%", "gpu:wait=10m"]
    assert main(["check", *tags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["memory"], found["wait_s"], found["count"]) == (6 * GIB, 600, 1)
    assert found["stated"] == ["framework", "memory", "wait"]
    assert main(["check", "nightly", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) is None


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


def test_devices_takes_its_default_from_the_settings(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_DEVICES", "simulated:8GiB")
    assert main(["devices", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)
    assert device["total_bytes"] == device["free_bytes"] == 8 * GIB
    assert (device["kind"], device["processes"]) == ("simulated", [])


def test_devices_names_a_setting_that_cannot_be_read(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PREFECT_INTEGRATIONS_GPU_STANDBY", "many")
    assert main(["devices"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(
        "prefect-gpu: PREFECT_INTEGRATIONS_GPU_STANDBY='many': 'many' is neither 'auto' nor a number"
    )


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


def test_devices_shows_the_error_of_a_device(capsys: Capture, monkeypatch: Patch) -> None:
    reader = _Reader(
        DeviceSnapshot(DEVICE, 0.0, 100 * GIB, processes=(ProcessUse(7, None, GIB),)),
        DeviceSnapshot(DEVICE, 0.0, 0, error="fell off the bus"),
    )
    monkeypatch.setattr(device_spec, "open_reader", lambda spec, environ, shared: reader)
    assert main(["devices", "--devices", "nvml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("140GiB  100GiB                      1")
    assert lines[2].endswith("unusable: fell off the bus")
    assert reader.closed

    assert main(["devices", "--devices", "nvml", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["processes"] == [{"pid": 7, "used_bytes": GIB}]
    assert (second["free_bytes"], second["error"]) == (None, "fell off the bus")


def test_devices_says_when_there_are_none(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(device_spec, "open_reader", lambda spec, environ, shared: _Reader())
    assert main(["devices", "--devices", "nvml"]) == 0
    assert capsys.readouterr().out == "no devices\n"


def test_devices_refuses_an_unknown_specification(capsys: Capture) -> None:
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


def test_simulate_prints_the_schedule_of_a_list(capsys: Capture, task_file: str) -> None:
    assert main(["simulate", task_file, "--devices", "2x80GiB", "--tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tasks        5, of which 4 ran" in lines
    assert "makespan     16m, 1.45 × the lower bound" in lines
    assert "lower bound  11m" in lines
    assert "b     0ms        10m     10m      15m    0,1" in lines
    assert lines[-1].startswith("huge can never run: gpu:memory=99GiB is larger than any device")


def test_simulate_prints_json(capsys: Capture, task_file: str) -> None:
    options = ["--json", "--placement", "pack"]
    assert main(["simulate", task_file, "--devices", "2x80GiB", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["makespan_s"], found["lower_bound_s"], found["max_wait_s"]) == (960, 660, 600)
    assert [task["started_s"] for task in found["tasks"]] == [0, 600, 0, 900, None]
    assert found["tasks"][1]["devices"] == [0, 1]


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        pytest.param([], [0, 0, 100], id="backfill"),
        pytest.param(["--max-tasks-per-device", "1"], [0, 110, 100], id="one at a time"),
        pytest.param(["--max-processes", "1"], [0, 110, 100], id="one at all"),
    ],
)
def test_simulate_schedules_as_its_options_ask(
    capsys: Capture, monkeypatch: Patch, options: list[str], starts: list[float]
) -> None:
    text = "duration,memory,priority\n100,20GiB,2\n50,4GiB,0\n10,20GiB,1\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["simulate", "-", "--devices", "simulated:1x25GiB", "--json", *options]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert [task["started_s"] for task in tasks] == starts


@pytest.mark.parametrize(
    ("content", "devices", "says"),
    [
        pytest.param("duration,memory\n1,8\n", "1GiB", "tasks.csv, line 2: column 'memory'", id="a bad field"),
        pytest.param(None, "1GiB", "tasks.csv cannot be read", id="no such file"),
        pytest.param("duration\n1\n", "abacus", "abacus", id="bad devices"),
    ],
)  # fmt: skip
def test_simulate_names_what_is_wrong_with_its_input(
    capsys: Capture, tmp_path: Path, content: str | None, devices: str, says: str
) -> None:
    path = tmp_path / "tasks.csv"
    if content is not None:
        path.write_text(content)
    assert main(["simulate", str(path), "--devices", devices]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param([], "a COMMAND is required; accepted: devices, status, suspend, resume, doctor, check, report, recommend, simulate, version, history (see prefect-gpu --help)", id="no command"),
        pytest.param(["list"], 'Unknown command "list". Available commands: devices, status, suspend, resume, doctor, check, report, recommend, simulate, version, history', id="unknown command"),
        pytest.param(["check"], 'Command "check" parameter TAGS requires an argument', id="no tag"),
        pytest.param(["version", "now"], "nothing is expected here: now", id="more than is expected"),
        pytest.param(["devices", "--jsn"], "Unknown option: --jsn. Did you mean --json?; accepted: --address, --devices, --json, --help", id="unknown option"),
        pytest.param(["simulate", "-"], 'Command "simulate" parameter --devices requires an argument', id="missing option"),
        pytest.param(["simulate", "-", "--devices", "1GiB", "--placement", "tight"], 'Invalid value "tight" for --placement. Choose from: "spread", "pack"', id="unknown placement"),
        pytest.param(["simulate", "-", "--devices", "1GiB", "--max-tasks-per-device", "0"], 'Invalid value "0" for --max-tasks-per-device. Must be >= 1', id="no task at all"),
        pytest.param(["simulate", "-", "--devices", "1GiB", "--max-processes", "two"], "for --max-processes: 'two' is not a whole number (see prefect-gpu simulate --help)", id="word for a number"),
        pytest.param(["simulate", "-", "--devices", "1GiB", "--max-processes", "1.5"], "for --max-processes: '1.5' is not a whole number", id="fraction for a number"),
        pytest.param(["simulate", "-", "--devices", "1GiB", "--max-tasks-per-device", "0x2"], "for --max-tasks-per-device: '0x2' is not a whole number", id="hexadecimal number"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_the_accepted_values(
    capsys: Capture, arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("prefect-gpu: ")
    assert says in line


def test_help_names_every_option(capsys: Capture) -> None:
    assert main(["simulate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--max-processes" in text and "--no-" not in text


NAMES = [name for name in app if not name.startswith("-")]
COMMANDS = [[], *([name] for name in NAMES), ["history", "list"], ["history", "reset"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "itself")
def test_help_has_examples_that_can_be_read(capsys: Capture, command: list[str]) -> None:
    assert main([*command, "--help"]) == 0
    _, _, below = capsys.readouterr().out.partition("\nExamples:")
    examples = [shlex.split(line) for line in below.splitlines() if line.strip()]
    assert examples, "the help has an example"
    for program, *words in examples:
        assert program == "prefect-gpu" and words[: len(command)] == command
        app.parse_args(words)


def test_an_example_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(CycloptsError):
        app.parse_args(["devices", "--jsn"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_is_that_of_the_package(capsys: Capture, monkeypatch: Patch, word: str) -> None:
    monkeypatch.setattr(cli, "version", lambda name: f"1.2.3 of {name}")
    assert main([word]) == 0
    assert capsys.readouterr().out == "prefect-gpu 1.2.3 of prefect-gpu\n"


def test_the_package_runs_as_a_module(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("sys.argv", ["prefect-gpu", "check", "nightly"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("prefect_gpu", run_name="__main__")
    assert "no gpu tag" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stops", "code"),
    [(BrokenPipeError, 1), (KeyboardInterrupt, 130)],
    ids=["a closed pipe", "Ctrl-C"],
)
def test_a_command_that_is_stopped_ends_without_a_traceback(
    capfd: Capture, monkeypatch: Patch, stops: type[BaseException], code: int
) -> None:
    def stopped(tokens: list[str]) -> None:
        raise stops

    monkeypatch.setattr(cli, "app", stopped)
    kept = os.dup(1)
    try:
        assert main(["status"]) == code
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_cannot_be_written_are_escaped(monkeypatch: Patch, encoding: str) -> None:
    out, error = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding))
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(error, encoding))
    with monkeypatch.context() as patch:
        patch.setattr(cli, "app", lambda tokens: "é 界 \ud800")
        assert main(["status"]) == 0
    assert main(["check", "gpu:node=界"]) == 2
    sys.stderr.flush()
    text = {"ascii": r"\xe9 \u754c \ud800", "latin-1": r"é \u754c \ud800", "utf-8": r"é 界 \ud800"}
    assert out.getvalue().decode(encoding) == f"{text[encoding]}\n"
    assert b"is not a name of a node" in error.getvalue()


@pytest.mark.parametrize("tokens", [["check", "gpu"], ["--help"], ["simulate", "--help"]])
def test_a_full_disk_is_one_line(capfd: Capture, monkeypatch: Patch, tokens: list[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(tokens) == 2
        monkeypatch.undo()
    said = "prefect-gpu: the output cannot be written: No space left on device\n"
    assert capfd.readouterr().err == said


def test_a_closed_output_is_refused_before_a_command_runs(
    capfd: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr(cli, "app", lambda tokens: pytest.fail("it was started"))
    assert main(["history", "reset", "--all", "--yes"]) == 2
    assert capfd.readouterr().err == "prefect-gpu: the output cannot be written: it is closed\n"


@pytest.mark.parametrize("error", [None, "/dev/full"])
def test_unwritable_errors_keep_the_exit_code(
    capfd: Capture, monkeypatch: Patch, error: str | None
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", error and full)
        assert main(["check", "gpu:memory=8"]) == 2
        assert main(["check", "gpu=1"]) == 1
        assert main(["unknown"]) == 2
        monkeypatch.undo()
    # Not on standard output, which a program may read.
    assert "did you mean" not in capfd.readouterr().out


def test_an_error_is_one_line_without_control_characters(capsys: Capture) -> None:
    assert main(["check", "gpu:memory=\x1b]0;title\x07\n\u202e8GiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prefect-gpu: gpu:memory=�]0;title� �8GiB: ") and line.isprintable()


@pytest.mark.parametrize("command", ["check", "report", "simulate", "history"])
def test_an_argument_that_is_not_utf_8_is_refused(capsys: Capture, command: str) -> None:
    assert main([command, os.fsdecode(b"gpu:node=\xff")]) == 2
    assert capsys.readouterr().err == (
        "prefect-gpu: the argument 'gpu:node=\\xff' is not UTF-8, and no file has that name (see prefect-gpu --help)\n"
    )


def test_a_file_whose_name_is_not_utf_8_is_read(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.csv")
    file.write_text("name,duration\na,1s\n")
    assert main(["simulate", str(file), "--devices", "1x8GiB"]) == 0
    assert capsys.readouterr().out


def test_a_question_without_an_input_is_answered_with_no(monkeypatch: Patch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert not run_commands._agreed("Delete it?")
