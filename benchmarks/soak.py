"""What does a flow of very many GPU tasks gather in its own process: memory, descriptors, threads, time?

Tasks do nothing, on host devices, a few at a time, each submitted as an earlier one ends: 500 with a fresh interpreter
each, 5,000 as forks. Peer in the same run: as many tasks of Prefect's `ThreadPoolTaskRunner`. Each row is measured in
a fresh process against one Prefect server.

    python benchmarks/soak.py                           # all, 20 minutes on two cores
    python benchmarks/soak.py --rows threads-5000 forks # the forks alone
    python benchmarks/soak.py --tiny                    # that it runs

The flow keeps the number that each task returned, nothing else. After every hundredth task: bytes that are
allocated (flows run on the system's allocator for that), open descriptors, threads. Growth a task is
the slope of the straight line through the looks (least squares: a look finds 3 MB more or less, as Prefect's events
happen to be on their way); above threads is what the runner keeps.

Prints a table, the medians of the first and the last hundred tasks, whether each target is met, and JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import _bodies
import _common
import _overhead_row

#: Bytes that the flow's process may keep a task above threads, and tasks after which it is looked at.
KEPT_ABOVE_BYTES = 10_000
EVERY = 100

#: Descriptors and threads by which the last look may differ from the first: connections and standbys come and go.
LEVEL = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run tasks, how many, and how many at a time."""

    runner: str
    tasks: int
    at_once: int
    #: The row with which it is compared; empty: it is such a row.
    baseline: str = ""


ROWS = {
    "threads-500": Row("threads", 500, 4),
    "spawned": Row("cold", 500, 4, "threads-500"),
    "threads-5000": Row("threads", 5000, 8),
    "forks": Row("forks", 5000, 8, "threads-5000"),
}


def measure_row(name: str, tasks: int) -> dict[str, Any]:
    """Run the tasks of one row, and look at this process meanwhile."""
    from prefect import flow, task

    from prefect_gpu import gpu

    row = ROWS[name]
    make_runner = _overhead_row.ROWS[row.runner].runner
    assert make_runner is not None
    work = task(_bodies.nothing, name="work", tags=gpu(memory="64MiB", framework="none"))  # type: ignore[call-overload]
    every = min(EVERY, max(1, tasks // 4))
    seconds: list[float] = []
    looks: list[dict[str, Any]] = []

    @flow(task_runner=make_runner())
    def soak() -> int:
        running: deque[tuple[int, float, Any]] = deque()
        finished = 0
        for index in range(tasks + row.at_once):
            if len(running) == row.at_once or index >= tasks:
                number, began, future = running.popleft()
                finished += future.result()[0] == number
                del future
                seconds.append(time.monotonic() - began)
                if len(seconds) % every == 0:
                    looks.append({"tasks": len(seconds), **look()})
            if index < tasks:
                running.append((index, time.monotonic(), work.submit(index)))
        return finished

    finished = soak()
    return {
        "row": name,
        "tasks": tasks,
        "finished": finished,
        "looks": looks,
        "kept_per_task_bytes": statistics.linear_regression(
            [look["tasks"] for look in looks], [look["used_bytes"] for look in looks]
        ).slope,
        "first_s": statistics.median(seconds[:every]),
        "last_s": statistics.median(seconds[-every:]),
    }


def look() -> dict[str, Any]:
    """Return what this process has now. Events that Prefect sends behind the tasks have left."""
    from prefect.events.worker import EventsWorker

    EventsWorker.instance().wait_until_empty()
    # Reports are on their way too.
    time.sleep(1.0)
    gc.collect()
    used = _overhead_row.used_bytes()
    return {
        "used_bytes": _overhead_row.settled_rss_bytes() if used is None else used,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def checks(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Compare the measurements with the targets."""
    lines = []
    for name, row in ROWS.items():
        if name not in runs or row.baseline not in runs:
            continue
        run, base = runs[name], runs[row.baseline]
        above = run["kept_per_task_bytes"] - base["kept_per_task_bytes"]
        lines.append(
            _line(
                f"{name}: the flow's process keeps at most {KEPT_ABOVE_BYTES / 1000:g} kB a task above threads",
                above <= KEPT_ABOVE_BYTES,
                f"{above / 1000:.1f} kB",
            )
        )
        for what in ("descriptors", "threads"):
            first, last = run["looks"][0][what], run["looks"][-1][what]
            met = last - first <= LEVEL
            lines.append(_line(f"{name}: {what} are level", met, f"{first} and {last}"))
        done = run["finished"] == run["tasks"]
        lines.append(_line(f"{name}: every task finishes", done, f"{run['finished']}"))
    return lines


def _line(name: str, met: bool, found: str) -> str:
    return f"{'PASS' if met else 'MISSED'}: {name}: {found}"


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--tasks", type=int, default=None, help="of each row, not its own number")
    parser.add_argument("--api-url", default=None, help="use this Prefect server")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        _common.tell(measure_row(given.row, given.tasks))
        return
    if given.tiny:
        given.tasks = 8
    runs = {}
    with _common.prefect_server(given.api_url) as url:
        for name in given.rows:
            tasks = given.tasks or ROWS[name].tasks
            _common.say(f"{name}, {tasks} tasks")
            told: list[dict[str, Any]] = []
            problem = _common.stream(
                __file__,
                ["--row", name, "--tasks", str(tasks)],
                url,
                4 * 3600.0,
                told.append,
                environment=_overhead_row.MALLOC_BY_SYSTEM,
            )
            if not told:
                raise SystemExit(f"{name}: {problem}")
            runs[name] = told[0]
    print(json.dumps({"versions": _common.versions(), "runs": list(runs.values())}))
    print("\nThe flow's own process\n")
    table = []
    for name, run in runs.items():
        first, last = run["looks"][0], run["looks"][-1]
        table.append(
            [
                f"{_overhead_row.ROWS[ROWS[name].runner].title}, {run['tasks']:,} tasks",
                f"{first['used_bytes'] / 2**20:.1f} → {last['used_bytes'] / 2**20:.1f}",
                f"{run['kept_per_task_bytes'] / 1000:.1f}",
                f"{first['descriptors']} → {last['descriptors']}",
                f"{first['threads']} → {last['threads']}",
                f"{run['first_s'] * 1000:.0f} → {run['last_s'] * 1000:.0f}",
            ]
        )
    heads = ["runner", "allocated, MiB", "kB a task", "descriptors", "threads"]
    _common.print_table([*heads, f"median of {EVERY} tasks, ms"], table)
    print()
    for line in checks(runs):
        print(line)


if __name__ == "__main__":
    main()
