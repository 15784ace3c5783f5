"""Folders that are full, read-only or missing: what a flow needs of them, and what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys

import psutil
import pytest

from prefect_gpu.units import GIB
from tests.integration.programs import LIMIT_S, Workplace

PROGRAM = """
import os
import sys
import tempfile

import numpy

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

method = sys.argv[1]


@task(tags=gpu(memory="64MiB", framework="none"))
def double(array):
    return array * 2


@flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB", start_method=method))
def doubles():
    # Large enough for a memory file.
    found = double.map([numpy.full(1 << 20, n) for n in range(3)]).result()
    return [int(array[-1]) for array in found]


print("RESULT", doubles())
"""

UNSHARE = ("unshare", "--mount")


@pytest.fixture
def mounts() -> tuple[str, ...]:
    """What runs a command with mounts of its own."""
    if shutil.which(UNSHARE[0]) is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run(
        [*UNSHARE, "mount", "-t", "tmpfs", "tried", "/mnt"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")
    return UNSHARE


def run(
    place: Workplace, mounts: tuple[str, ...], prepare: str, method: str, program: str = PROGRAM
) -> str:
    """Run a program after shell commands; return its errors."""
    place.write("doubles.py", program)
    done = subprocess.run(
        [*mounts, "sh", "-ec", f'{prepare}\nexec "$@"', "sh", sys.executable, "doubles.py", method],
        cwd=place.folder,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "RESULT [0, 2, 4]" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


#: A folder of four kibibytes that is full.
FULL = """
mkdir -p "$FOLDER"
mount -t tmpfs -o size=4k full "$FOLDER"
head -c 4096 /dev/zero > "$FOLDER/all" || true
"""
READ_ONLY = """
mkdir -p "$FOLDER"
mount -t tmpfs -o size=4k,ro empty "$FOLDER"
"""


@pytest.mark.parametrize(
    ("prepare", "method"),
    [
        pytest.param(FULL, "spawn", id="full"),
        pytest.param(FULL, "forkserver", id="full, forkserver", marks=pytest.mark.slow),
        pytest.param(READ_ONLY, "spawn", id="read-only", marks=pytest.mark.slow),
        pytest.param(READ_ONLY, "forkserver", id="read-only, forkserver", marks=pytest.mark.slow),
    ],
)
def test_tasks_run_where_no_temporary_file_and_no_shared_memory_can_be_had(
    place: Workplace, mounts: tuple[str, ...], prepare: str, method: str
) -> None:
    place.environment["TMPDIR"] = str(place.folder / "temporary")
    prepare = prepare.replace("$FOLDER", place.environment["TMPDIR"])
    run(place, mounts, f"{prepare}\nmount -t tmpfs -o size=4k,ro none /dev/shm", method)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_tasks_run_where_prefects_home_cannot_be_written(
    place: Workplace, mounts: tuple[str, ...], prepare: str
) -> None:
    run(place, mounts, prepare.replace("$FOLDER", place.environment["PREFECT_HOME"]), "spawn")


@pytest.mark.parametrize("prepare", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_ledger_that_cannot_be_written_is_said_once_and_tasks_run(
    place: Workplace, mounts: tuple[str, ...], prepare: str
) -> None:
    folder = place.environment["PREFECT_INTEGRATIONS_GPU_LEDGER"]
    program = PROGRAM.replace("simulated:1x24GiB", "host")
    errors = run(place, mounts, prepare.replace("$FOLDER", folder), "spawn", program)
    assert errors.count("GPU tasks of other processes are not seen") == 1, errors
    assert folder in errors


@pytest.mark.slow
def test_values_of_four_gibibytes_travel_and_their_memory_comes_back(place: Workplace) -> None:
    if psutil.virtual_memory().available < 16 * GIB:
        pytest.skip("less than 16 GiB of memory are free")
    # A cache policy would pickle each value once more, to hash it.
    changes = {
        "numpy.full(1 << 20, n) for n in range(3)": "numpy.full(1 << 29, 2)",
        "int(array[-1]) for array in found": "int(found[0][-1]), found[0].nbytes",
        "@task(": "@task(cache_policy=NO_CACHE, ",
        "from prefect import": "from prefect.cache_policies import NO_CACHE\nfrom prefect import",
    }
    program = PROGRAM
    for old, new in changes.items():
        program = program.replace(old, new)
    place.write("large.py", program)
    done = place.run("large.py", "spawn")
    assert f"RESULT [4, {4 * GIB}]" in done.stdout
