"""What does a GPU task cost the flow's own process, above a task in a thread?

Prefect's engine runs there for every task, whatever the runner; a process for each task must not
make the parent a bottleneck. Peers, on the same tasks (10 ms of sleep) in the same run: Prefect's
`ThreadPoolTaskRunner`, which is the baseline, and its `ProcessPoolTaskRunner`. Ours runs on host
devices, so any machine will do, with and without memory reports. All rows have the same tasks, tags
included: Prefect asks its API about the concurrency limit of every tag.

    python benchmarks/overhead.py                          # 100 tasks, three times each
    python benchmarks/overhead.py --tasks 1000 --flow async --repeats 1
    python benchmarks/overhead.py --tiny                   # that it runs, in seconds

A last table has what a process that waited ahead saves: from the placement of a task to its first
line, with a cold start, and with a standby that was ready. The time that serialising the call and
Prefect's context takes in between is shown apart: neither changes it. With `--framework torch` the
body imports PyTorch.

Each row is measured in a fresh process against one Prefect server, after a first flow of two tasks
that is not counted (imports, threads, pools). CPU is `RUSAGE_SELF` of the flow's process: its
children are not in it. Latency is `submit` → first line of the body, one task at a time.

Prints JSON (versions, seed, every run), then a table of medians and spreads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from typing import Any

import _common

BASELINE = "ThreadPoolTaskRunner"
ROWS = {
    "threads": BASELINE,
    "pool": "ProcessPoolTaskRunner",
    "ours": "GPUTaskRunner",
    "ours-bare": "GPUTaskRunner, reports=False",
}

STARTS = {"cold": "standby=0", "ready": "standby=1, ready"}

#: Seconds that a task takes, so that it does something.
BODY_S = 0.01


def body(index: int) -> tuple[int, float, int]:
    """Note when the first line ran, and where."""
    started = time.time()
    time.sleep(BODY_S)
    return index, started, os.getpid()


def cpu_s() -> float:
    """Seconds of CPU that this process has used, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes() -> int:
    """Give the largest resident set of this process so far."""
    # macOS counts in bytes, Linux in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def make_runner(row: str, max_processes: int | None) -> Any:
    """Make the task runner of a row."""
    from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

    from prefect_gpu import GPUTaskRunner

    if row == "threads":
        return ThreadPoolTaskRunner()
    if row == "pool":
        return ProcessPoolTaskRunner(max_workers=max_processes)
    return GPUTaskRunner(devices="host", max_processes=max_processes, reports=row == "ours")


def measure_row(row: str, tasks: int, kind: str, max_processes: int | None) -> None:
    """Run the flow of one row in this process, and tell."""
    import asyncio

    from prefect import flow, task

    from prefect_gpu import gpu

    work = task(body, name="work", tags=gpu(memory="64MiB", framework="none"))
    runner = make_runner(row, max_processes)

    @flow(task_runner=runner)
    def many_sync(count: int) -> list[tuple[int, float, int]]:
        return work.map(list(range(count))).result()

    @flow(task_runner=runner)
    async def many_async(count: int) -> list[tuple[int, float, int]]:
        return [future.result() for future in work.map(list(range(count)))]

    @flow(task_runner=runner)
    def one_by_one(count: int) -> list[float]:
        latencies = []
        for index in range(count):
            submitted = time.time()
            latencies.append(work.submit(index).result()[1] - submitted)
        return latencies

    def run(count: int) -> list[tuple[int, float, int]]:
        return asyncio.run(many_async(count)) if kind == "async" else many_sync(count)

    run(2)
    began, before = time.monotonic(), cpu_s()
    results = run(tasks)
    wall, cpu = time.monotonic() - began, cpu_s() - before
    assert [r[0] for r in results] == list(range(tasks))
    peak = peak_rss_bytes()
    latencies = one_by_one(2 if tasks < 10 else 6)
    _common.tell(
        {
            "row": row,
            "flow": kind,
            "tasks": tasks,
            "parent_cpu_s": cpu,
            "parent_cpu_per_task_s": cpu / tasks,
            "wall_s": wall,
            "processes": len({r[2] for r in results} - {os.getpid()}),
            "first_latency_s": latencies[0],
            "later_latencies_s": latencies[1:],
            "parent_peak_rss_bytes": peak,
        }
    )


def start_body(framework: str) -> None:
    """Import what a GPU task would."""
    if framework != "none":
        __import__(framework)


def measure_start(row: str, tasks: int, framework: str) -> None:
    """Run tasks one by one, each with a cold process or with one that waits, and tell."""
    from prefect import flow, task

    from prefect_gpu import GPUTaskRunner, gpu, task_runner
    from prefect_gpu.processes.standby import standby_pool

    dumps: list[float] = []
    starts: list[float] = []
    real_dump = task_runner._GPUTask._dump_call
    real_report = task_runner._Running.report

    def dump(self: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return real_dump(self, args, kwargs)
        finally:
            dumps.append(time.perf_counter() - began)

    def report(self: Any, found: Any) -> None:
        starts.append(found.start_s)
        real_report(self, found)

    task_runner._GPUTask._dump_call = dump  # type: ignore[method-assign]
    task_runner._Running.report = report  # type: ignore[method-assign]
    work = task(start_body, name="work", tags=gpu(memory="64MiB", framework=framework))

    @flow(task_runner=GPUTaskRunner(devices="host", standby=int(row == "ready")))
    def one_by_one() -> None:
        for _ in range(tasks + 1):
            work.submit(framework).result()
            while row == "ready" and not standby_pool().ready:
                time.sleep(0.01)

    one_by_one()
    # The first has nothing that could be ready.
    _common.tell(
        {
            "start": row,
            "framework": framework,
            "start_s": starts[1:],
            "serialise_s": dumps[1:],
            "beyond_s": [s - d for s, d in zip(starts[1:], dumps[1:], strict=True)],
        }
    )


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--flow", choices=("sync", "async"), default="sync")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--max-processes", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="of the order in which rows run")
    parser.add_argument("--api-url", default=None, help="use this Prefect server")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--framework", default="none", help="that standbys import: torch, …")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--start", choices=tuple(STARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        measure_start(given.start, given.tasks, given.framework)
        return
    if given.row:
        measure_row(given.row, given.tasks, given.flow, given.max_processes)
        return
    if given.tiny:
        given.tasks, given.repeats, given.rows = 3, 1, ["threads", "pool", "ours"]

    order = random.Random(given.seed)
    runs = []
    with _common.prefect_server(given.api_url) as url:
        found_versions = _common.versions()
        for repeat in range(given.repeats):
            for row in order.sample(given.rows, len(given.rows)):
                arguments = ["--row", row, "--tasks", str(given.tasks), "--flow", given.flow]
                if given.max_processes:
                    arguments += ["--max-processes", str(given.max_processes)]
                runs.append({"repeat": repeat, **_common.measure(__file__, arguments, url)})
        starts = []
        for repeat in range(given.repeats):
            for row in order.sample(list(STARTS), len(STARTS)):
                arguments = ["--start", row, "--framework", given.framework]
                arguments += ["--tasks", str(min(given.tasks, 10))]
                starts.append({"repeat": repeat, **_common.measure(__file__, arguments, url)})
    print(
        json.dumps(
            {"versions": found_versions, "seed": given.seed, "runs": runs + starts}, indent=1
        )
    )
    print(
        f"\n{given.tasks} tasks of {BODY_S * 1000:.0f} ms, {given.flow} flow, "
        f"{given.repeats} run(s) each: median (lowest–highest)\n"
    )
    print_rows(runs, given.rows)
    print(f"\nFrom placement to the first line (framework: {given.framework}), ms\n")
    print_starts(starts)


def print_rows(runs: list[dict[str, Any]], rows: list[str]) -> None:
    """Print a line for each row."""
    baseline = [r["parent_cpu_per_task_s"] for r in runs if r["row"] == "threads"]
    table = []
    for row in rows:
        own = [r for r in runs if r["row"] == row]
        cpu_ms = [r["parent_cpu_per_task_s"] * 1000 for r in own]
        above = "–"
        if baseline:
            above_ms = [ms - statistics.median(baseline) * 1000 for ms in cpu_ms]
            above = "0" if row == "threads" else _common.spread(above_ms)
        table.append(
            [
                ROWS[row],
                _common.spread(cpu_ms),
                above,
                _common.spread([r["wall_s"] for r in own]),
                _common.spread([r["first_latency_s"] for r in own], 2),
                _common.spread([s for r in own for s in r["later_latencies_s"]], 2),
                _common.spread([r["parent_peak_rss_bytes"] / 2**20 for r in own], 0),
            ]
        )
    _common.print_table(
        [
            "runner",
            "parent's CPU per task, ms",
            "above threads, ms",
            "wall, s",
            "first latency, s",
            "later, s",
            "parent's peak RSS, MiB",
        ],
        table,
    )


def print_starts(starts: list[dict[str, Any]]) -> None:
    """Print a line for each way to start."""
    table = []
    for row, name in STARTS.items():
        own = [s for s in starts if s["start"] == row]
        columns = [[v * 1000 for s in own for v in s[key]] for key in _START_COLUMNS]
        table.append([name, *map(_common.spread, columns)])
    _common.print_table(["process", *_START_COLUMNS.values()], table)


_START_COLUMNS = {
    "start_s": "placement → first line",
    "serialise_s": "of it serialising the call",
    "beyond_s": "beyond that",
}


if __name__ == "__main__":
    main()
