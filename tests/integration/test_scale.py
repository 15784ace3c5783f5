"""Hundreds of GPU tasks at once: all end, in order, and never more processes than allowed."""

from __future__ import annotations

import json

import pytest

from tests.integration.programs import Workplace

PROGRAM = """
import asyncio
import json
import os
import sys
import threading
import time

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

COUNT = int(sys.argv[2])


@task(tags=gpu(memory="64MiB", framework="none"))
def work(index):
    began = time.monotonic()
    time.sleep(0.01)
    return index, os.getpid(), began, time.monotonic()


RUNNER = GPUTaskRunner(devices="host", start_method=sys.argv[3])


@flow(task_runner=RUNNER)
def many_sync():
    return work.map(list(range(COUNT))).result()


@flow(task_runner=RUNNER)
async def many_async():
    return [future.result() for future in work.map(list(range(COUNT)))]


results = asyncio.run(many_async()) if sys.argv[1] == "async" else many_sync()
assert [index for index, *_ in results] == list(range(COUNT))
print("FOUND", json.dumps({
    "pids": len({pid for _, pid, *_ in results}),
    "at_once": max(
        sum(1 for _, _, began, ended in results if began <= moment < ended)
        for _, _, moment, _ in results
    ),
    "cores": os.cpu_count(),
    "threads_left": sorted(t.name for t in threading.enumerate() if "engine" in t.name),
    "files_left": len(os.listdir("/proc/self/fd")),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(0)  # It may take as long as it takes, while tasks end.
@pytest.mark.parametrize(
    ("kind", "start_method", "tasks"),
    # How a flow waits and how processes are started do not depend on each other.
    [("sync", "spawn", 200), ("async", "forkserver", 200), ("sync", "forkserver", 1000)],
)
def test_many_short_tasks_all_end_and_leave_nothing(
    place: Workplace, kind: str, start_method: str, tasks: int
) -> None:
    place.write("many.py", PROGRAM)
    printed = place.run_while_it_prints("many.py", kind, str(tasks), start_method)
    (line,) = (line for line in printed.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["pids"] == tasks
    assert found["at_once"] <= max(8, 4 * found["cores"])
    # Nothing of a task stays in the flow's process: a leak would show once for each task.
    assert found["threads_left"] == []
    assert found["files_left"] < 50
