"""Attacks on the processes of flows: what kills, stops, forks or hides them leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.rig import eventually, is_alive

#: Starts this Python in a PID namespace of its own, in which `/proc` still numbers processes as the machine does.
UNSHARE = ("unshare", "--pid", "--fork")


def can_unshare() -> bool:
    try:
        return not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    except FileNotFoundError:
        return False


needs_unshare = pytest.mark.skipif(
    not can_unshare(), reason="this machine does not allow a PID namespace (unshare --pid)"
)


@needs_unshare
def test_under_another_namespaces_proc_a_process_with_a_childs_number_is_left_alone() -> None:
    program = """
import os, subprocess, sys, time
from prefect_gpu.processes import guardian
child = subprocess.Popen(["sleep", "600"], env={guardian.TOKEN_VARIABLE: "mine"})
marked = f"{guardian.TOKEN_VARIABLE}=mine".encode()
me = os.readlink("/proc/self")
while True:
    with open(f"/proc/{me}/task/{me}/children") as file:
        number = int(file.read())
    with open(f"/proc/{number}/environ", "rb") as file:
        if marked in file.read():
            break
    time.sleep(0.01)
# The next process gets the number that the machine gave to the child.
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(number - 1))
bystander = subprocess.Popen(["sleep", "600"])
print(bystander.pid == number)
guardian.kill_strays({1 << 23: "mine"})
time.sleep(0.1)
print(bystander.poll())
for process in (child, bystander):
    process.kill()
    process.wait()
"""
    done = subprocess.run([*UNSHARE, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\nNone\n", done.stderr


#: A parent with a fork server and its fork, a fresh process that has started others, and a standby. Prints the process
#: ids of the guardian, the fork server, the standby and the two tasks.
PARENT = """
import os, sys, time
from tests.process import bodies
from tests.process.rig import Rig, spec_of
from tests.process.test_fork_server_pool import Pool
from tests.process.warm import Warm
folder = sys.argv[1]
pool, rig = Pool(), Rig()
rig.launcher = pool.launcher
forked = pool.start(spec_of(bodies.wait_long, f"{folder}/forked"))
fresh = rig.start(bodies.start_others, folder, "live")
warm = Warm(rig)
warm.announce()
(standby,) = warm.wait_ready()
guardian = pool.launcher._guardian.process.pid
print(guardian, pool.server_pid, standby, forked.pid, fresh.pid, flush=True)
time.sleep(600)
"""


@dataclass
class Parent:
    """A process with all kinds of processes, and their ids."""

    process: subprocess.Popen[str]
    guardian: int
    fork_server: int
    standby: int
    forked: int
    fresh: int
    #: Started by the fresh one: in its group, in a session of its own, as a daemon.
    others: list[int]

    @property
    def pids(self) -> list[int]:
        """All of them, without the parent."""
        named = [self.guardian, self.fork_server, self.standby, self.forked, self.fresh]
        return [*named, *self.others]

    def is_gone(self) -> bool:
        """Whether none is left."""
        return not any(map(is_alive, self.pids))


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        ready = [tmp_path / "forked", tmp_path / "ready"]
        assert eventually(lambda: all(path.exists() for path in ready))
        others = [int(word) for word in (tmp_path / "pids").read_text().split()]
        guardian, fork_server, standby, forked, fresh = pids
        pids += others
        yield Parent(process, guardian, fork_server, standby, forked, fresh, others)
    finally:
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_stopped_processes_do_not_outlive_a_parent_that_was_killed(parent: Parent) -> None:
    for pid in (parent.fork_server, parent.standby, parent.forked, parent.fresh, *parent.others):
        os.kill(pid, signal.SIGSTOP)
    parent.process.kill()
    assert eventually(parent.is_gone)


def test_nothing_outlives_a_parent_that_was_killed_while_its_guardian_was_stopped(
    parent: Parent,
) -> None:
    os.kill(parent.guardian, signal.SIGSTOP)
    parent.process.kill()
    assert eventually(parent.is_gone)


def test_nothing_outlives_a_parent_that_was_killed_with_its_guardian(parent: Parent) -> None:
    # It must not start another one.
    os.kill(parent.process.pid, signal.SIGSTOP)
    os.kill(parent.guardian, signal.SIGKILL)
    parent.process.kill()
    assert eventually(parent.is_gone)
