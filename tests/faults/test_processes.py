"""Attacks on the processes of flows: what kills, stops, forks or hides them leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
