"""Processes of other users: what they can read of a flow, and what becomes of those that tasks start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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


#: Holds 20 of 24 GiB, or waits for them; says which, and then whether it has them after all.
MEMBER = """
import os, sys, tempfile
from pathlib import Path
from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.model import Request

def ask(folder, limit_s):
    ledger = Ledger(lambda: HostStore(Path(folder)))
    broker = Broker(SimulatedReader(SimulatedDevices("1x24GiB")), ledger)
    ticket = broker.submit(Request("", "task", next_sequence(), 0.0, 20 << 30))
    return broker, ledger, ticket, decided(ticket, limit_s)

def decided(ticket, limit_s):
    with ticket.changed:
        ticket.changed.wait_for(lambda: ticket.decided, limit_s)
    return ticket.decided

# As root: other users may not read the environment, so all that is needed is imported before.
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    _, ledger, _, ready = ask(folder, DEADLOCK_S)
    assert ready
    ledger._store.close()
os.setgroups([12000])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
os.umask(0o022)
broker, _, ticket, ready = ask(sys.argv[1], 2.0 if sys.argv[3] == "waits" else DEADLOCK_S)
print(ready, repr(broker.problem), flush=True)
sys.stdin.readline()
print(decided(ticket, DEADLOCK_S), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("mode", [0o2770, 0o3770], ids=["a folder of a group", "a sticky one"])
def test_users_of_a_group_share_a_ledger(mode: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="prefect-gpu-group-", dir="/var/tmp"))
    processes = []
    try:
        os.chown(folder, 0, 12000)
        folder.chmod(mode)

        def member(user: int, then: str) -> subprocess.Popen[str]:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", MEMBER, str(folder), str(user), then],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "HOME": "/nonexistent"},
                )
            )
            return processes[-1]

        def said(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        one = member(12001, "holds")
        assert said(one) == "True ''"
        other = member(12002, "waits")
        assert said(other) == "False ''"
        one.kill()
        one.wait()
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert said(other) == "True"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        shutil.rmtree(folder)
