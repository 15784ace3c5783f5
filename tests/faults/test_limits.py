"""Limits of the system: threads that cannot be started, descriptors that run out."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ValueArrived
from tests.integration.programs import LIMIT_S, Workplace
from tests.process import bodies
from tests.process.rig import Rig, spec_of
from tests.process.warm import Source

THREADS = """
import json
import threading

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

start = threading.Thread.start
refused = []


def refuse_once(thread):
    kind = thread.name.rstrip("_0123456789")
    if kind.startswith("prefect-gpu-") and kind not in refused:
        refused.append(kind)
        raise RuntimeError("can't start new thread")
    start(thread)


threading.Thread.start = refuse_once


@task(tags=gpu(memory="64MiB", framework="none"))
def say(number):
    print("body", number)
    return number


def ends_of(count):
    futures = (say.submit(number) for number in range(count))
    ends = [future.result(raise_on_failure=False) for future in futures]
    return [end if isinstance(end, int) else f"{type(end).__name__}: {end}" for end in ends]


@flow(task_runner=GPUTaskRunner(devices="host", start_method="spawn", standby=0))
def with_fresh_processes():
    return ends_of(6)


@flow(task_runner=GPUTaskRunner(devices="host", start_method="spawn", standby=1))
def with_standbys():
    return ends_of(2)


@flow(task_runner=GPUTaskRunner(devices="host", start_method="auto"))
def with_forks():
    return ends_of(1)


ends = [*with_fresh_processes(), *with_standbys(), *with_forks()]
print("FOUND", json.dumps({"ends": ends, "refused": refused}))
"""


def test_each_thread_that_cannot_be_started_fails_at_most_one_task(place: Workplace) -> None:
    place.write("threads.py", THREADS)
    done = place.run("threads.py")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    names = ("engine", "broker", "sampler", "launcher", "standby", "output", "publisher")
    assert set(found["refused"]) == {f"prefect-gpu-{name}" for name in names}
    ends = found["ends"]
    # The broker's is tried again by the task's own request.
    for name, said in zip(("engine", "sampler", "launcher"), ends[:3], strict=True):
        assert said.startswith(f"CapacityError: the thread 'prefect-gpu-{name}"), said
        assert "can't start new thread" in said and "ulimit -u" in said
    # Output, reports and what is started ahead of a task fail none.
    assert ends[3:] == [3, 4, 5, 0, 1, 0]
    assert "lost" not in done.stderr
    # What the first body printed is held back until there is a thread that writes it.
    printed = [line for line in done.stdout.splitlines() if line.startswith("body")]
    assert printed == [f"body {number}" for number in ends[3:]]


#: What another user may do who reads and writes the files of the tests. Root, and who may exceed limits, has none.
ANOTHER_USER = [
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *(f"--{kind}=-all,+dac_override" for kind in ("inh-caps", "ambient-caps", "bounding-set")),
]

FEW_PROCESSES = """
import resource
import sys

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="64MiB", framework="none"))
def say():
    return 1


@flow(task_runner=GPUTaskRunner(devices="simulated:1x1GiB", start_method="auto"))
def few():
    futures = [say.submit() for _ in range(3)]
    for future in futures:
        future.wait()
        state = future.state
        print("FOUND", state.name if state.is_completed() else state.message, flush=True)


LIMIT = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (LIMIT, LIMIT))
few()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user"
)
@pytest.mark.parametrize("limit", [12, 14, 16, 18])
def test_a_flow_of_forks_ends_whatever_the_limit_of_processes(place: Workplace, limit: int) -> None:
    place.write("few.py", FEW_PROCESSES)
    done = subprocess.run(
        [*ANOTHER_USER, place.python, "few.py", str(limit)],
        cwd=place.folder,
        # The ledger of the tests is root's, and its folder refuses others.
        env={**place.environment, "PREFECT_INTEGRATIONS_GPU_LEDGER": str(place.folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(ends) == 3, done.stderr
    refused = [end for end in ends if end != "FOUND Completed"]
    # A thread that Prefect itself cannot start, for a concurrency slot, is named by Python alone.
    causes = (f"(ulimit -u) is {limit}", 'RuntimeError("can\'t start new thread")')
    assert all(any(cause in end for cause in causes) for end in refused), ends
    assert refused or limit > 12, "there is no room for its threads"
    assert not place.processes()


@contextlib.contextmanager
def descriptors_free(count: int) -> Iterator[None]:
    """Leave this process a few descriptors that it may open; its children have none of the others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, limits[1]))
    spare: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(spare.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)


def test_a_fork_without_descriptors_is_refused_by_the_limit_or_runs() -> None:
    rig = Rig()
    source = Source()
    try:
        assert rig.call(bodies.add, 1) == 1
        ends = []
        for free in range(16):
            heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
            value = None
            with descriptors_free(free):
                rig.launcher.start(spec_of(bodies.add, 1), heard.put, source.source.fork)
                while not isinstance(
                    message := heard.get(timeout=DEADLOCK_S), (ChildExited, ChildRefused)
                ):
                    if isinstance(message, ValueArrived):
                        value = values.loads(message.data, "return value")
            if isinstance(message, ChildRefused):
                assert isinstance(message.error, CapacityError), message
                assert "Too many open files" in str(message.error)
                assert "ulimit -n" in str(message.error)
            else:
                assert (value, message.code) == (1, 0)
            ends.append(value)
        assert ends[0] is None and ends[-1] == 1
    finally:
        rig.launcher.close(DEADLOCK_S)
        source.close()
