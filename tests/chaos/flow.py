"""The program of one flow of a chaos run.

    python -m tests.chaos.flow SEED NUMBER TASKS DEVICES COUNT

It writes one line of JSON for itself, and for each task run that has ended, to `flow-NUMBER.jsonl` in its folder, and
the events of its broker to `flow-NUMBER.events`. It submits no further tasks when there is a file `stop`.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import functools
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import types
import weakref
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from prefect import flow, task
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.transactions import Transaction

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.broker.broker import Broker
from prefect_gpu.devices.nvml import NvmlReader
from prefect_gpu.devices.simulated import SimulatedReader
from prefect_gpu.errors import DeviceError
from prefect_gpu.runner import active_runner
from prefect_gpu.values import transport
from tests import event_files
from tests.chaos import bodies, plan

#: Task runs that have not ended, at most.
WINDOW = 10

#: How often a flow is started at most. Prefect's server answers about half of the requests for a new flow run with 503
#: while others write: the transaction reads before it writes, and SQLite does not wait then.
STARTS = 3

#: Seconds without a word after which a flow writes into its log what its threads do.
SILENT_S = 60.0

#: Objects that are named of what holds one.
MOST_HOLDERS = 25


class Readings:
    """Makes the readings of devices fail for a second now and then."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._lock = threading.Lock()
        self._next_s = time.monotonic() + choose.uniform(3.0, 20.0)
        #: How many failed.
        self.failed = 0

    def patch(self, reader: type[Any]) -> None:
        """Change a class of readers."""
        read = reader.read

        def read_or_fail(*args: Any) -> Any:
            if self._fails():
                raise DeviceError("the driver does not answer (chaos)")
            return read(*args)

        reader.read = read_or_fail

    def _fails(self) -> bool:
        with self._lock:
            since_s = time.monotonic() - self._next_s
            if since_s > 1.0:
                self._next_s = time.monotonic() + self._choose.uniform(3.0, 20.0)
            fails = 0.0 <= since_s <= 1.0
            self.failed += fails
            return fails


def submit(job: plan.Job, framework: str) -> Any:
    """Submit the task of a job."""
    tags = gpu(
        memory=None if job.budget_gib is None else f"{job.budget_gib:g}GiB",
        count=job.count if job.count > 1 else None,
        allocation="growth" if job.sort == "greedy" else None,
        exclusive=job.sort == "exclusive",
        priority=job.priority or None,
        framework=framework,
    )
    tagged = task(
        bodies.work,
        # What runs without a budget learns from its history.
        name=f"{job.sort}-{job.gib:g}",
        tags=tags,
        retries=job.retries,
        retry_delay_seconds=job.retry_delay_s,
    )
    return tagged.submit(job, np.frombuffer(plan.argument(job), dtype=np.uint8))


def outcome(job: plan.Job, future: Any) -> dict[str, str]:
    """Wait for the end of a task run; return what became of it."""
    future.wait()
    state = future.state
    found = {"key": job.key, "task_run": str(future.task_run_id), "state": state.type.value}
    try:
        result = future.result(raise_on_failure=False)
    except BaseException as error:
        result = error
    if isinstance(result, BaseException):
        return {**found, "error": type(result).__name__, "text": str(result)[:2000]}
    right = zlib.crc32(result) == plan.value_sum(job)
    return {**found, "value": "right" if right else "wrong"}


def drop_what_prefect_keeps() -> None:
    """Drop the values of task runs that are in a copy of a context.

    Prefect keeps a copy with each event until it is sent, and with each service that a task run has started for as
    long as the process lives: while the API is away they are many. What is left after this is kept by something else.
    """
    for each in gc.get_objects():
        if type(each) is contextvars.Context:
            run, transaction = each.get(TaskRunContext.__var__), each.get(Transaction.__var__)
            if run is not None and run.task_run.state is not None:
                run.task_run.state.data = None
            if transaction is not None:
                transaction._staged_value = None
                # They have the engine, which has the value.
                transaction.on_rollback_hooks = []


def memory_files() -> list[str]:
    """Return the memory files that this process keeps open, but for those that Prefect keeps, and what holds each."""
    # Twice: first of all, what nothing keeps is no context of Prefect's.
    gc.collect()
    drop_what_prefect_keeps()
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    kept = [link for link in found if link.startswith("/memfd:")]
    return [*kept, *map(describe_holders, keepers())] if kept else []


def keepers() -> list[weakref.ref[Any]]:
    """Return what keeps memory files open: the files, and mappings of them."""
    files = [each for each in gc.get_objects() if isinstance(each, transport.MemoryFile)]
    return [weakref.ref(each) for each in (*files, *transport._mapped)]


def holders_of_arrays_on(memory: memoryview) -> list[Any]:
    """Return what refers to arrays that are made on some memory: arrays themselves are not known to `gc`."""
    found = []
    for each in gc.get_objects():
        for base in gc.get_referents(each):
            while isinstance(base, np.ndarray):
                base = base.base
                if base is memory:
                    found.append(each)
    return found


def rank_holder(holder: object) -> int:
    if isinstance(holder, BaseException):
        return 0
    return 2 if isinstance(holder, (types.FrameType, types.ModuleType, types.CellType)) else 1


def describe_holders(kept: weakref.ref[Any]) -> str:
    """Return through which objects something is kept, by their types: one path of those that there are."""
    path: list[str] = []
    here, seen = kept(), set[int]()
    while here is not None and len(path) < MOST_HOLDERS:
        about = ""
        if isinstance(here, types.FrameType):
            about = f" of {here.f_code.co_name}"
        elif isinstance(here, BaseException):
            about = f" {here}"
        elif isinstance(here, dict):
            about = f" with {list(here)[:6]}"
        path.append(f"{type(here).__module__}.{type(here).__qualname__}{about}"[:200])
        seen.add(id(here))
        holders = [each for each in gc.get_referrers(here) if id(each) not in seen]
        seen.add(id(holders))
        if not holders and isinstance(here, memoryview):
            holders = holders_of_arrays_on(here)
        # A module or a frame is where a path ends, and says less than what is in between. An error says more.
        holders.sort(key=rank_holder)
        here = holders[0] if holders else None
    return " in ".join(path)


def main() -> int:
    seed, number, count = map(int, sys.argv[1:4])
    devices, device_count = sys.argv[4], int(sys.argv[5])
    method = plan.method(number)
    # What was submitted and what came of it, for the checks.
    record = Path(f"flow-{number}.jsonl")

    def say(**what: object) -> None:
        faulthandler.dump_traceback_later(SILENT_S, repeat=True)
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**what, "at_s": time.monotonic()}) + "\n")

    faulthandler.dump_traceback_later(SILENT_S, repeat=True)
    readings = Readings(random.Random(f"{seed}/{number}/readings"))
    for reader in (SimulatedReader, NvmlReader):
        readings.patch(reader)
    record_events = event_files.record(Path(f"flow-{number}.events"))
    active_runner.Broker = functools.partial(Broker, record=record_events)  # type: ignore[misc]
    real = os.environ[bodies.MEMORY] == "torch"
    runner: Any = GPUTaskRunner(
        devices=devices,
        start_method="auto" if method == "forkserver" else "spawn",
        standby=2 if method == "standby" else 0,
        max_processes=4,
    )

    #: The flow run, once there is one.
    begun: list[str] = []

    @flow(name=f"chaos-{method}", task_runner=runner)
    def chaos() -> None:
        begun.append(str(flow_run.id))
        say(flow_run=begun[-1])
        waiting: deque[tuple[plan.Job, Any]] = deque()
        for job in plan.jobs(seed, number, count, device_count):
            if os.path.exists("stop"):
                break
            future = submit(job, "torch" if real else "none")
            say(submitted=job.key, task_run=str(future.task_run_id))
            waiting.append((job, future))
            if len(waiting) == WINDOW:
                say(**outcome(*waiting.popleft()))
        for job, future in waiting:
            say(**outcome(job, future))

    def start() -> None:
        for left in reversed(range(STARTS)):
            try:
                chaos()
            except PrefectHTTPStatusError as error:
                if begun or not left or error.response.status_code != 503:
                    raise
                say(refused=str(error)[:200])
            else:
                return

    try:
        start()
    except BaseException as error:
        kind = type(error)
        say(failed=f"{kind.__module__}.{kind.__qualname__}", text=str(error)[:2000])
        traceback.print_exc()
        return 1
    say(ended=True, failed_readings=readings.failed, memory_files=memory_files())
    return 0


if __name__ == "__main__":
    sys.exit(main())
