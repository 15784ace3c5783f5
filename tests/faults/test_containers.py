"""Flows in containers of one machine: process ids and names of hosts of their own, one folder of the ledger."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from prefect_gpu.units import GIB
from tests.faults.test_many_flows import check_capacity, read_log
from tests.integration.programs import LIMIT_S, Workplace, lines_of

PROGRAM = """
import os
import sys
import time
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.testing import allocate

name, seen = sys.argv[1], Path("seen.txt")


def say(text):
    with seen.open("a") as file:
        file.write(text + chr(10))


def wait_for_all(text):
    while not all(f"{text} {each}" in seen.read_text() for each in "ab"):
        time.sleep(0.01)


@task(tags=gpu(memory="60%", framework="none"))
def alone():
    say("begin")
    with allocate("12GiB"):
        time.sleep(0.3)
    say("end")


@task(tags=gpu(memory="10GiB", framework="none"))
def together():
    with allocate("9GiB"):
        say(f"beside {name}")
        wait_for_all("beside")
        return current_allocation().shared_with


@flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB@containers"))
def contained():
    say(f"submits {name}")
    wait_for_all("submits")
    for future in [alone.submit() for _ in range(3)]:
        future.result()
    # One that waits for the other flow must not take the room that a task of that flow waits for.
    say(f"was alone {name}")
    wait_for_all("was alone")
    return together.submit().result()


print("SHARED WITH", contained())
print("ENDED", os.getpid())
"""

UNSHARE = ("unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def container() -> tuple[str, ...]:
    if shutil.which(UNSHARE[0]) is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*UNSHARE, "hostname", "tried"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no PID namespace can be made here: {tried.stderr.strip()}")
    return UNSHARE


@pytest.mark.slow
def test_two_containers_share_a_device(place: Workplace, container: tuple[str, ...]) -> None:
    place.write("contained.py", PROGRAM)
    flows = [
        subprocess.Popen(
            [
                *container,
                "sh",
                "-c",
                f'hostname box-{name}; exec "$@"',
                "sh",
                sys.executable,
                "contained.py",
                name,
            ],
            cwd=place.folder,
            env=place.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for name in "ab"
    ]
    outputs = ""
    for each in flows:
        output, errors = each.communicate(timeout=LIMIT_S)
        # The first process of its namespace.
        assert "ENDED 1" in output, errors
        outputs += output
    # The one that was placed second, at least.
    assert "SHARED WITH ('together (another flow)',)" in outputs
    lines = [line for line in lines_of(place.folder / "seen.txt") if line in ("begin", "end")]
    assert lines == ["begin", "end"] * 6, "two tasks that need more than half ran at once"
    check_capacity(read_log(place.folder / "ledger"), 24 * GIB)
