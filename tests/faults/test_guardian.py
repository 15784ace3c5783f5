"""Guardians that are killed one after the other, and then the process that they serve."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from prefect_gpu.processes import guardian
from tests.process.rig import eventually, is_alive

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="without /proc only process groups are found"
)

PARENT = """
import sys, time
from tests.process import bodies
from tests.process.rig import Rig
Rig().start(bodies.wait_long, sys.argv[1])
time.sleep(600)
"""


def guardians(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in parent.children():
        with contextlib.suppress(psutil.Error):
            if guardian.__file__ in process.cmdline():
                found.append(process)
    return found


def test_no_child_outlives_its_parent_though_its_guardians_are_killed_one_after_the_other(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ready)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    parent = psutil.Process(process.pid)
    left: list[int] = []
    try:
        assert eventually(ready.exists)
        killed: set[int] = set()
        for _ in range(3):
            # Each as soon as it is there.
            assert eventually(lambda: bool(guardians(parent)))
            (found,) = guardians(parent)
            assert found.pid not in killed
            killed.add(found.pid)
            found.kill()
            assert eventually(lambda: not any(map(is_alive, killed)))
        assert eventually(lambda: bool(guardians(parent)))
        left = [child.pid for child in parent.children(recursive=True)]
        assert len(left) == 2, "the child and its guardian"
        process.kill()
        assert eventually(lambda: not any(map(is_alive, left)))
    finally:
        for pid in (process.pid, *left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
