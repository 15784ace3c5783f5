"""One row of `overhead.py`, measured in the process that this is run in.

Which rows there are, in which order and for how long is `overhead`'s, and so is what the figures are
held against. The body is in `_bodies`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _bodies
import _common

#: Variables for a process that is to tell what of its memory is in use.
MALLOC_BY_SYSTEM = {"PYTHONMALLOC": "malloc"}

# Children are to have what they always have.
_BY_SYSTEM = os.environ.pop("PYTHONMALLOC", "") == "malloc"

#: Seconds after the last result at which memory is read: reports are on their way to the API.
SETTLE_S = 2.0

#: Seconds for which a standby is waited for.
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run tasks."""

    title: str
    #: Makes Prefect's task runner; `None`: Prefect has no part in it.
    runner: Callable[[], Any] | None
    #: An interpreter starts for each task, which takes seconds (or it is the baseline of those):
    #: fewer tasks will do.
    slow: bool = False
    #: Tasks have the tags of a GPU task.
    tagged: bool = True
    #: A module that may not be installed.
    needs: str = ""


def _ours(**settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        from prefect_gpu import GPUTaskRunner

        return GPUTaskRunner(devices="host", **settings)

    return make


def _threads() -> Any:
    from prefect.task_runners import ThreadPoolTaskRunner

    return ThreadPoolTaskRunner()


def _pool() -> Any:
    from prefect.task_runners import ProcessPoolTaskRunner

    return ProcessPoolTaskRunner()


ROWS = {
    "threads": Row("`ThreadPoolTaskRunner`", _threads),
    "threads-few": Row("`ThreadPoolTaskRunner`, few tasks", _threads, slow=True),
    "threads-untagged": Row("`ThreadPoolTaskRunner`, no tags", _threads, tagged=False),
    "pool": Row("`ProcessPoolTaskRunner`", _pool),
    "ray": Row("`RayTaskRunner`", lambda: _common.ray_runner(0), needs="prefect_ray"),
    "spawn": Row("multiprocessing spawn, no Prefect", None, slow=True),
    "cold": Row("ours, fresh interpreters", _ours(start_method="spawn", standby=0), slow=True),
    "standby": Row('ours, `start_method="spawn"`', _ours(start_method="spawn"), slow=True),
    "forks": Row('ours, `start_method="auto"`', _ours(start_method="auto")),
    "forks-bare": Row("… and `reports=False`", _ours(start_method="auto", reports=False)),
}


def measure(name: str, tasks: int, one_by_one: int, kind: str, framework: str) -> dict[str, Any]:
    """Measure one row.

    Args:
        name: Of `ROWS`.
        tasks: Mapped at once.
        one_by_one: Submitted each after the end of the one before, for the latency; 0: none.
        kind: Of the flow: "sync" or "async".
        framework: That the bodies of those that come one by one import.

    Returns:
        The figures, in units that their names say.
    """
    row = ROWS[name]
    if row.runner is None:
        return _measure_spawn(tasks, one_by_one)
    return _Flows(row, row.runner, framework).measure(name, tasks, one_by_one, kind)


class _Flows:
    def __init__(self, row: Row, make_runner: Callable[[], Any], framework: str) -> None:
        from prefect import flow, task

        from prefect_gpu import gpu

        tags = gpu(memory="64MiB", framework=framework) if row.tagged else []
        work = task(_bodies.nothing, name="work", tags=tags)
        imports = task(_bodies.import_one, name="imports", tags=tags)

        @flow(task_runner=make_runner())
        def many_sync(count: int) -> Any:
            futures = work.map(range(count))
            return _collect(futures)

        @flow(task_runner=make_runner())
        async def many_async(count: int) -> Any:
            futures = work.map(range(count))
            return _collect(futures)

        @flow(task_runner=make_runner())
        def one_by_one(count: int, is_standby: bool) -> list[float]:
            latencies = []
            for _ in range(count):
                submitted = time.time()
                latencies.append(imports.submit(framework).result() - submitted)
                if is_standby:
                    _wait_for_standby()
            return latencies

        self._many = {"sync": many_sync, "async": lambda count: asyncio.run(many_async(count))}
        self._one_by_one = one_by_one

    def measure(self, name: str, tasks: int, one_by_one: int, kind: str) -> dict[str, Any]:
        many = self._many[kind]
        # Imports, threads, pools and the template.
        many(2)
        rss, used = settled_rss_bytes(), used_bytes()
        began, before = time.monotonic(), cpu_s()
        seen = many(tasks)
        cpu = cpu_s() - before - seen.looking_cpu_s
        found = {
            "tasks": tasks,
            "flow": kind,
            "finished": seen.finished,
            "results_s": seen.at_s - began,
            "tasks_per_s": tasks / (seen.at_s - began),
            "flow_s": time.monotonic() - began - seen.looking_s,
            "parent_cpu_s": cpu,
            "parent_cpu_per_task_s": cpu / tasks,
            "parent_rss_per_task_bytes": (seen.rss_bytes - rss) / tasks,
            "parent_threads": seen.threads,
            "parent_peak_rss_bytes": peak_rss_bytes(),
        }
        if used is not None and seen.used_bytes is not None:
            found["parent_kept_per_task_bytes"] = (seen.used_bytes - used) / tasks
        if one_by_one:
            with _Starts() as starts:
                # The first has nothing that could be ready.
                latencies = self._one_by_one(one_by_one + 1, name == "standby")
            found["first_latency_s"], *found["latencies_s"] = latencies
            found.update(starts.figures())
        return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen in a flow that goes on, its tasks over and its futures there."""

    #: How many gave what they should.
    finished: int
    #: Monotonic seconds of the last result.
    at_s: float
    threads: int
    rss_bytes: int
    #: Bytes that are allocated; `None`: not known.
    used_bytes: int | None
    #: Seconds that passed while this was seen, and seconds of CPU that it took.
    looking_s: float
    looking_cpu_s: float


def _collect(futures: Any) -> _Seen:
    """Wait for all, and see what is kept while the flow goes on."""
    # Imported here, so that the processes of the row without Prefect do not import it.
    from prefect.events.worker import EventsWorker

    finished = sum(future.result()[0] == index for index, future in enumerate(futures))
    at_s = time.monotonic()
    # Prefect sends its events behind the tasks, whatever the runner.
    EventsWorker.instance().wait_until_empty()
    time.sleep(SETTLE_S)
    before = cpu_s()
    found = threading.active_count(), settled_rss_bytes(), used_bytes()
    return _Seen(finished, at_s, *found, time.monotonic() - at_s, cpu_s() - before)


def _wait_for_standby() -> None:
    from prefect_gpu.processes.standby_pool import standby_pool

    deadline = time.monotonic() + READY_S
    while not standby_pool().ready_by_kind.total() and time.monotonic() < deadline:
        time.sleep(0.01)


class _Starts:
    """Record the seconds from placement to first line, and of serialising the call."""

    def __enter__(self) -> _Starts:
        from prefect_gpu.runner.active_runner import ActiveRunner
        from prefect_gpu.runner.task_plan import TaskCall

        self._dumps: list[float] = []
        self._starts: list[float] = []
        self._real = TaskCall.pack, ActiveRunner.report
        real_dump, real_report = self._real

        def dump(task: Any, *args: Any) -> Any:
            began = time.perf_counter()
            try:
                return real_dump(task, *args)
            finally:
                self._dumps.append(time.perf_counter() - began)

        def report(run: Any, found: Any) -> None:
            self._starts.append(found.start_s)
            real_report(run, found)

        TaskCall.pack = dump  # type: ignore[method-assign]
        ActiveRunner.report = report  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        from prefect_gpu.runner.active_runner import ActiveRunner
        from prefect_gpu.runner.task_plan import TaskCall

        TaskCall.pack, ActiveRunner.report = self._real  # type: ignore[method-assign]

    def figures(self) -> dict[str, list[float]]:
        """Return the seconds of each task but the first; empty for other runners."""
        if not self._starts:
            return {}
        pairs = list(zip(self._starts, self._dumps, strict=True))[1:]
        return {
            "start_s": [start for start, _ in pairs],
            "serialise_s": [dump for _, dump in pairs],
            "beyond_s": [start - dump for start, dump in pairs],
        }


def _measure_spawn(tasks: int, one_by_one: int) -> dict[str, Any]:
    """Run plain processes, as many at a time as `GPUTaskRunner` would."""
    spawn = multiprocessing.get_context("spawn")
    places = max(8, 4 * (os.cpu_count() or 1))
    answers = spawn.SimpleQueue()

    def start(index: int) -> Any:
        process = spawn.Process(target=_bodies.nothing_to, args=(answers, index))
        process.start()
        return process

    rss = settled_rss_bytes()
    began, before = time.monotonic(), cpu_s()
    seen: set[int] = set()
    running: list[Any] = []
    for index in range(tasks):
        running.append(start(index))
        if len(running) == places:
            running.pop(0).join()
        while not answers.empty():
            seen.add(answers.get()[0])
    while len(seen) < tasks:
        seen.add(answers.get()[0])
    results_s = time.monotonic() - began
    for process in running:
        process.join()
    cpu = cpu_s() - before
    latencies = []
    for index in range(one_by_one):
        submitted = time.time()
        process = start(index)
        latencies.append(answers.get()[1] - submitted)
        process.join()
    return {
        "tasks": tasks,
        "flow": "none",
        "finished": len(seen),
        "results_s": results_s,
        "tasks_per_s": tasks / results_s,
        "parent_cpu_s": cpu,
        "parent_cpu_per_task_s": cpu / tasks,
        "parent_rss_per_task_bytes": (settled_rss_bytes() - rss) / tasks,
        "parent_peak_rss_bytes": peak_rss_bytes(),
        "latencies_s": latencies,
    }


def cpu_s() -> float:
    """Seconds of CPU that this process has used, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    # macOS counts in bytes, Linux in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Mallinfo2(ctypes.Structure):
    """What `mallinfo2(3)` gives, for all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


def used_bytes() -> int | None:
    """Return the bytes that are allocated; `None` if they are not known.

    Only the system's allocator says it: a process that is to tell runs with `MALLOC_BY_SYSTEM`.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None or not _BY_SYSTEM:
        return None
    ask.restype = _Mallinfo2
    gc.collect()
    found = ask()
    return int(found.uordblks + found.hblkhd)


def settled_rss_bytes() -> int:
    """Return the resident set after free memory was returned to the system."""
    gc.collect()
    if sys.platform != "linux":
        return peak_rss_bytes()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
