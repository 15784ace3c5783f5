"""Tags that are wrong, or that the machine can never satisfy: no process is started for them, of whatever kind."""

from __future__ import annotations

import json

from tests.integration.programs import Workplace

PROGRAM = """
import json
import sys
import threading

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

processes = []


def note(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        processes.append(f"{event}: {arguments}")


@task
def never():
    pass


IMPOSSIBLE = [gpu(count=3), gpu(memory="80GiB"), gpu(memory="23.9GiB"), gpu(device=7)]
WRONG = [["gpu :memory=1GiB"], ["gpu", "gpu:memory=1"]]


def ends():
    futures = [never.with_options(tags=tags).submit() for tags in IMPOSSIBLE + WRONG]
    return [type(future.result(raise_on_failure=False)).__name__ for future in futures]


found = []
sys.addaudithook(note)
for options in ({"standby": 2}, {"start_method": "auto"}):
    runner = GPUTaskRunner(devices="simulated:2x24GiB", headroom="1GiB", reports=False, **options)
    found.append(flow(task_runner=runner)(ends)())
names = [thread.name for thread in threading.enumerate()]
print("FOUND", json.dumps({"ends": found, "processes": processes, "threads": names}))
"""


def test_for_a_tag_that_is_wrong_or_can_never_be_met_nothing_is_started(place: Workplace) -> None:
    place.write("never.py", PROGRAM)
    done = place.run("never.py")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["ends"] == [["PlacementError"] * 4 + ["PolicyError"] * 2] * 2
    assert found["processes"] == []
    # Neither what starts processes, nor what keeps standbys.
    assert not {"prefect-gpu-launcher", "prefect-gpu-standby"} & set(found["threads"])
