"""Files in the current folder that are named like modules: nothing imports them unless a flow's `sys.path` says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_gpu.cli import doctor
from prefect_gpu.cli.commands import app
from prefect_gpu.cli.doctor import Build
from prefect_gpu.clock import DEADLOCK_S
from tests.fakes.traps import Traps
from tests.process.rig import Rig
from tests.process.warm import Source

#: Arguments of each command. None of them needs a server.
COMMANDS = (
    ("--version",),
    ("version",),
    ("check", "gpu:memory=1GiB"),
    ("devices", "--devices", "simulated:1x1GiB"),
    ("status", "--devices", "simulated:1x1GiB"),
    ("suspend", "train"),
    ("resume", "train"),
    ("doctor",),
    ("simulate", "tasks.csv"),
    ("report", "quiet-fox"),
    ("recommend", "quiet-fox"),
    ("history", "list"),
    ("history", "reset", "train"),
)

#: What the console script is, with a framework that is imported within a moment.
SCRIPT = f"""
import sys
from prefect_gpu.cli import doctor, main
doctor.PROGRAMS = {{"packaging": "import packaging.version; found = '1', '', 0"}}
for command in {COMMANDS!r}:
    print(command, main(command), flush=True)
"""


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traps:
    """Traps in the current folder."""
    traps = Traps(tmp_path / "current")
    monkeypatch.chdir(traps.folder)
    return traps


def run(*words: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=4 * DEADLOCK_S,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(doctor.__file__).parents[2]),
            "PREFECT_API_URL": "http://127.0.0.1:9/api",
            "PREFECT_CLIENT_MAX_RETRIES": "0",
        },
    )


def test_no_command_imports_a_file_of_the_current_folder(traps: Traps, tmp_path: Path) -> None:
    assert {name for name in app if not name.startswith("-")} <= {words[0] for words in COMMANDS}
    script = tmp_path / "bin" / "prefect-gpu"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = run(str(script))
    assert len(done.stdout.splitlines()) >= len(COMMANDS), done.stderr
    assert "ok      packaging" in done.stdout
    assert traps.imported == []


def test_nor_does_the_package_that_is_run_as_a_module(traps: Traps) -> None:
    # Python itself imports these with the current folder first, before any line of the package.
    for name in run("-c", "import runpy, sys; print(*sys.modules)", cwd="/").stdout.split():
        traps.remove(name)
    done = run("-m", "prefect_gpu", "devices", "--devices", "simulated:1x1GiB")
    assert done.returncode == 0, done.stderr
    assert traps.imported == []


def test_a_framework_is_looked_at_where_the_packages_are(
    traps: Traps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        doctor.PROGRAMS,  # type: ignore[arg-type]
        "torch",
        "import packaging.version; found = '1', '', 0",
    )
    assert isinstance(doctor.look_at("torch"), Build)
    assert traps.imported == []


def where() -> tuple[str, list[str]]:
    return os.getcwd(), sys.path


def test_a_task_starts_there_and_imports_from_the_paths_of_its_flow(traps: Traps, rig: Rig) -> None:
    folder, paths = rig.call(where)
    assert folder == str(traps.folder) and folder not in paths
    assert traps.imported == []


def test_a_source_of_forks_starts_there_and_imports_from_the_paths_of_its_flow(
    traps: Traps,
) -> None:
    source = Source("fractions")
    source.close()
    assert source.warmed.problem == "" and traps.imported == []
