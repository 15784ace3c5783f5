"""Processes of other users: what they can read of a flow, and what becomes of those that tasks start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.units import MIB
from tests.integration.kill_flow import read_pids
from tests.integration.programs import Workplace, wait_for
from tests.process.rig import is_alive

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

#: On most systems the user nobody, who owns nothing.
NOBODY = 65534

#: Two tasks, each with an argument in a memory file and a process of another user in a session of its own.
PROGRAM = f"""
import os, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

NOTES = os.path.abspath("pids.txt")


@task(tags=gpu(memory="64MiB", framework="none"))
def hands_over(data, index):
    # Opened as the user that the flow has.
    notes = open(NOTES, "a", buffering=1)
    if not os.fork():
        os.setsid()
        os.setgid({NOBODY})
        os.setuid({NOBODY})
        taken = bytearray(100 << 20)
        notes.write(f"other {{os.getpid()}}\\n")
        time.sleep(600)
    notes.write(f"child {{os.getpid()}}\\n")
    time.sleep(600)


@flow(task_runner=GPUTaskRunner(devices="simulated:1x1GiB@others", standby=1, reports=False))
def others():
    futures = [hands_over.submit(bytes(8 << 20), index) for index in range(2)]
    futures[0].wait()
    futures[1].wait()


if __name__ == "__main__":
    others()
"""

#: Prints what it can read of some processes, and of a folder.
SPY = r"""
folder=$1; shift
cat "$folder"/* 2>/dev/null
for pid; do
    ls -l /proc/$pid/fd/ 2>/dev/null
    cat /proc/$pid/fd/* /proc/$pid/environ /proc/$pid/maps 2>/dev/null
    dd if=/proc/$pid/mem count=1 2>/dev/null
done
true
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp(prefix="prefect-gpu-others-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_other_users_read_nothing_and_their_processes_are_measured_and_killed(
    place: Workplace, open_folder: Path
) -> None:
    place.environment["PREFECT_INTEGRATIONS_GPU_LEDGER"] = str(open_folder)
    place.write("others.py", PROGRAM)
    process = place.start("others.py", stdout=subprocess.DEVNULL)
    pids = read_pids(place, 4, process)
    sessions = {os.getsid(pid): pid for pid in pids}
    assert len(sessions) == 4
    assert list(open_folder.iterdir())

    spied = subprocess.run(
        ["sh", "-c", SPY, "sh", str(open_folder), *map(str, place.processes())],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        check=True,
    )
    assert spied.stdout == b""

    children = [pid for pid, kind in pids.items() if kind == "child"]
    uses = {use.pid: use for use in ProcessTable().resident(children)}
    for pid, kind in pids.items():
        assert uses[pid].root_pid in children
        if kind == "other":
            assert (uses[pid].used_bytes or 0) >= 100 * MIB

    os.kill(children[0], signal.SIGKILL)
    mine = [pid for pid in pids if uses[pid].root_pid == children[0]]
    wait_for(lambda: not any(map(is_alive, mine)))
    rest = [pid for pid in pids if pid not in mine]
    assert len(rest) == 2 and all(map(is_alive, rest))
    process.kill()
    wait_for(lambda: not any(map(is_alive, rest)))
    process.communicate()
