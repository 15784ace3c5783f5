"""The memory of a real child, and of what it started."""

from __future__ import annotations

import signal
import subprocess
import sys

from prefect_gpu.devices.process_tree import ProcessTable

#: Starts two helpers, one of them in a session of its own, and names them.
PARENT = """
import subprocess, sys
line = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
helpers = [
    subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=new) for new in (False, True)
]
for helper in helpers:
    helper.stdout.readline()
print(*[helper.pid for helper in helpers], flush=True)
sys.stdin.read()
for helper in helpers:
    helper.kill()
    helper.wait()
"""


def test_a_child_and_its_helpers_are_found_and_an_ended_child_is_not() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None and child.stdin is not None
        helpers = [int(pid) for pid in child.stdout.readline().split()]
        table = ProcessTable()
        uses = table.resident([child.pid])
        assert {use.pid for use in uses} == {child.pid, *helpers}
        assert {use.root_pid for use in uses} == {child.pid}
        assert all((use.used_bytes or 0) > 2**20 for use in uses)
        child.stdin.close()
    assert child.wait() in (0, -signal.SIGTERM)
    assert table.resident([child.pid]) == ()
