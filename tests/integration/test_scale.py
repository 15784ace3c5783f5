"""Hundreds of GPU tasks at once: all end, in order, and never more processes than allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import Workplace, workplace

#: A fresh interpreter costs about a second of CPU, nearly all of it to import Prefect. A thousand tasks:
#: `python benchmarks/overhead.py --tasks 1000`.
TASKS = 200

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


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(1200)
# Once each: how a flow waits has nothing to do with how its tasks' processes come to be.
@pytest.mark.parametrize(("kind", "start_method"), [("sync", "spawn"), ("async", "forkserver")])
def test_many_short_tasks(place: Workplace, kind: str, start_method: str) -> None:
    place.write("many.py", PROGRAM)
    done = place.run("many.py", kind, str(TASKS), start_method, limit_s=1200)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["pids"] == TASKS
    assert found["at_once"] <= max(8, 4 * found["cores"])
    # Nothing of a task stays in the flow's process: a leak shows two hundred times.
    assert found["threads_left"] == []
    assert found["files_left"] < 50
