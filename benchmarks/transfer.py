"""How fast do large arrays come back from a task and go into tasks, and how much memory does it take?

Two questions, for an array of 300 MB and one of 2 GB (float64):

- *returned*: seconds from the last line of the body to the value in the flow, every page of it read.
- *taken by three*: seconds from the first of three submits to the moment when the last body has read
  every page of its argument, less the same with an argument of eight bytes: what is left is the
  array's way, without the start of processes.

    python benchmarks/transfer.py            # what docs/benchmarks.md shows
    python benchmarks/transfer.py --tiny     # that it runs, in seconds

Peers: `ThreadPoolTaskRunner` (nothing travels: the floor), Prefect's `ProcessPoolTaskRunner`, and a
plain `multiprocessing.Pipe` that sends the array to or from spawned processes without any Prefect.
Fair to all: one running Prefect server whose URL everybody has, compiled bytecode, `NO_CACHE` (the
default policy would hash every argument), each row in a fresh process that first runs the same with
eight bytes, rows in random order. Each run begins when what was started ahead is ready: the pool's three
workers, and under ours one process, so that two of the three tasks start cold. Eight bytes and the array
take turns, a row's quick ones several times: what is told is the difference of their medians. Clocks
are `CLOCK_MONOTONIC`, one for all processes of a machine.

Memory is measured in runs of its own, since looking takes time. A process of its own samples every
20 ms: the sum of `Pss - Pss_Shmem` of `/proc/PID/smaps_rollup` over the row's process and all its
descendants (itself left out), plus `Shmem` of `/proc/meminfo` above its value at the start. `Shmem`
counts every page of a memory file once, mapped or not; it is the whole machine's, so nobody else may
use shared memory meanwhile. *Extra* is the peak from the body's last line (or the first submit) until
0.5 s after the end, less the last sample before it (with the array in the task, or in the flow), less the
same with eight bytes; in multiples of the array. A row that would need more memory than the machine has
available, going by its smaller array, is not run for the larger, and the table says so.

Prints JSON (versions, machine, seed, every run), then a table of medians and spreads.
"""

from __future__ import annotations

import abc
import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common
import _devices

ROWS = {
    "ours": "GPUTaskRunner",
    "threads": "ThreadPoolTaskRunner",
    "pool": "ProcessPoolTaskRunner",
    "pipe": "multiprocessing.Pipe, no Prefect",
}

WAYS = {"returned": "returned", "taken": "taken by three"}

#: Seconds between two looks at memory, and for which a state that is to be seen is held.
LOOK_S = 0.02
HOLD_S = 0.5

#: Seconds for which no process may come or go before memory is compared.
SETTLE_S = 2.0

TASKS = 3

#: Turns of a row in one process: no more after so many, or after so many seconds.
MOST_TURNS = 5
ENOUGH_S = 20.0

#: Longest wait, in seconds, for pool workers and standbys to become ready.
IDLE_S = 30.0

#: Seconds that one of the three waits for the others.
TOGETHER_S = 300.0

#: Part of the available memory that a row may be expected to take.
SAFE_FRACTION = 0.7


def touch(array: Any) -> float:
    """Read something of every page."""
    return float(array[::512].sum())


def give(count: int, seed: int, hold_s: float) -> tuple[Any, float]:
    """Make an array; return it, and when that was."""
    import numpy as np

    array = np.arange(count, dtype=np.float64)
    array += seed
    time.sleep(hold_s)
    return array, time.monotonic()


def take(array: Any, folder: str, number: int, hold_s: float) -> tuple[float, float]:
    """Read an argument; return what was read, and when. All three hold theirs at a time."""
    found = touch(array)
    at = time.monotonic()
    Path(folder, str(number)).touch()
    while len(os.listdir(folder)) < TASKS:
        if time.monotonic() > at + TOGETHER_S:
            raise SystemExit("the three tasks do not run at a time")
        time.sleep(0.01)
    time.sleep(hold_s)
    return found, at


class Row(abc.ABC):
    """How one row runs bodies."""

    @abc.abstractmethod
    def returned(self, *arguments: Any) -> Any:
        """Run `give` and hand on its value."""

    @abc.abstractmethod
    def taken(self, array: Any, folder: str, hold_s: float) -> list[Any]:
        """Run `take` in three tasks at a time."""


def give_to(connection: Any, *arguments: Any) -> None:
    """Run `give` in a process of `multiprocessing`."""
    connection.send(give(*arguments))


def take_from(connection: Any) -> None:
    """Run `take` in a process of `multiprocessing`."""
    connection.send(take(*connection.recv()))


class Pipe(Row):
    """Processes and pipes of `multiprocessing`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")

    def _start(self, body: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=body, args=(child_end, *arguments))
        process.start()
        child_end.close()
        return process, parent_end

    def returned(self, *arguments: Any) -> Any:
        process, connection = self._start(give_to, *arguments)
        found = connection.recv()
        # Wait for its end after the value has arrived, as in the other rows.
        threading.Thread(target=process.join).start()
        return found

    def taken(self, array: Any, folder: str, hold_s: float) -> list[Any]:
        started = [self._start(take_from) for _ in range(TASKS)]
        for number, (_, connection) in enumerate(started):
            connection.send((array, folder, number, hold_s))
        found = [connection.recv() for _, connection in started]
        for process, _ in started:
            process.join()
        return found


class Runner(Row):
    """A task runner of Prefect's kind; within its flow."""

    def __init__(self, tags: list[str]) -> None:
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        options: dict[str, Any] = {"tags": tags, "cache_policy": NO_CACHE, "persist_result": False}
        self._give = task(give, name="give", **options)
        self._take = task(take, name="take", **options)

    def returned(self, *arguments: Any) -> Any:
        return self._give.submit(*arguments).result()

    def taken(self, array: Any, folder: str, hold_s: float) -> list[Any]:
        futures = [self._take.submit(array, folder, n, hold_s) for n in range(TASKS)]
        return [future.result() for future in futures]


def measure_row(name: str, way: str, size_bytes: int, seed: int, sampled: bool, turns: int) -> None:
    """Run one row's tasks with eight bytes, then with the array, and tell."""
    if name == "pipe":
        _common.tell(measure(Pipe(), way, size_bytes, seed, sampled, turns))
        return
    from prefect import flow
    from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

    from prefect_gpu import GPUTaskRunner, gpu

    runner: Any
    tags: list[str] = []
    if name == "pool":
        runner = ProcessPoolTaskRunner(max_workers=TASKS)
    elif name == "threads":
        runner = ThreadPoolTaskRunner()
    else:
        runner = GPUTaskRunner(devices="host")
        tags = list(gpu(memory="1GiB", framework="none"))

    @flow(task_runner=runner)
    def transfer() -> dict[str, Any]:
        return measure(Runner(tags), way, size_bytes, seed, sampled, turns)

    _common.tell(transfer())


def measure(
    row: Row, way: str, size_bytes: int, seed: int, sampled: bool, most_turns: int
) -> dict[str, Any]:
    """Measure one way, with eight bytes and with all."""
    run = run_returned if way == "returned" else run_taken
    sampler = Sampler() if sampled else None
    try:
        # Imports and one-time starts are not measured.
        run(row, 1, seed, 0.0)
        hold_s = HOLD_S if sampled else 0.0
        turns: list[list[tuple[float, float]]] = []
        began = time.monotonic()
        while not turns or (
            not sampled and len(turns) < most_turns and time.monotonic() < began + ENOUGH_S
        ):
            spans = []
            for count in (1, size_bytes // 8):
                if sampler is not None:
                    settle()
                _devices.wait_until_idle(IDLE_S, None if sampler is None else sampler.pid)
                spans.append(run(row, count, seed, hold_s))
            turns.append(spans)
        if sampler is not None:
            time.sleep(HOLD_S)
    finally:
        looks = sampler.stop() if sampler is not None else []
    empty_s, full_s = ([s[n][1] - s[n][0] for s in turns] for n in (0, 1))
    found: dict[str, Any] = {
        "empty_s": statistics.median(empty_s),
        "full_s": statistics.median(full_s),
        "turns_s": [empty_s, full_s],
    }
    if looks:
        found["empty_bytes"], found["full_bytes"] = (rise(looks, *span) for span in turns[0])
        found["looks"] = len(looks)
    return found


def run_returned(row: Row, count: int, seed: int, hold_s: float) -> tuple[float, float]:
    """Return when the body returned and when the value was used."""
    array, returned_s = row.returned(count, seed, hold_s)
    check(touch(array), count, seed)
    ended = time.monotonic()
    time.sleep(hold_s)
    return returned_s, ended


def run_taken(row: Row, count: int, seed: int, hold_s: float) -> tuple[float, float]:
    """Return when the tasks were submitted and when the last body had used the array."""
    import numpy as np

    array = np.arange(count, dtype=np.float64)
    array += seed
    time.sleep(hold_s)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = row.taken(array, folder, hold_s)
    for read, _ in found:
        check(read, count, seed)
    return began, max(at for _, at in found)


def check(read: float, count: int, seed: int) -> None:
    """Raise `SystemExit` unless the array that arrived is the one that was sent."""
    pages = -(-count // 512)
    expected = 512.0 * (pages - 1) * pages / 2 + seed * pages
    if abs(read - expected) > 1e-9 * max(1.0, expected):
        raise SystemExit(f"another array arrived: {read} instead of {expected}")


# Memory.


def settle() -> None:
    """Wait until ending processes have ended; else the sample before a run includes them."""
    import psutil

    since, known = time.monotonic(), None
    while time.monotonic() < since + SETTLE_S:
        found = {process.pid for process in psutil.Process().children(recursive=True)}
        if found != known:
            since, known = time.monotonic(), found
        time.sleep(0.1)


class Sampler:
    """A process that samples the memory of this process and its descendants."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--sample", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        # Wait for the first sample.
        self._process.stdout.readline()
        self.pid = self._process.pid

    def stop(self) -> list[tuple[float, int]]:
        """Stop the process and return its samples: monotonic seconds and bytes."""
        out, _ = self._process.communicate("")
        return [(at, size) for at, size in json.loads(out)]


def sample(pid: int) -> None:
    """Sample until standard input ends, then print all samples."""
    import psutil

    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    first = read_kib("/proc/meminfo", "Shmem")
    looks = []
    while not over.wait(LOOK_S):
        total = read_kib("/proc/meminfo", "Shmem") - first
        try:
            root = psutil.Process(pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for process in processes:
            if process.pid == os.getpid():
                continue
            try:
                rollup = f"/proc/{process.pid}/smaps_rollup"
                text = Path(rollup).read_text(encoding="ascii")
            except OSError:
                continue
            total += kib_of(text, "Pss") - kib_of(text, "Pss_Shmem")
        looks.append((time.monotonic(), total * 1024))
        if len(looks) == 1:
            print("looking", flush=True)
    print(json.dumps(looks))


def read_kib(path: str, key: str) -> int:
    """Read one line of a file of `/proc`, in KiB."""
    return kib_of(Path(path).read_text(encoding="ascii"), key)


def kib_of(text: str, key: str) -> int:
    """Find a line `Key:   12 kB`; 0 where there is none."""
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def rise(looks: list[tuple[float, int]], began: float, ended: float) -> int:
    """Return the peak in bytes from `began` on, above the last sample before it."""
    before = [size for at, size in looks if at <= began][-1]
    return max(size for at, size in looks if began <= at <= ended + HOLD_S) - before


# All of it.


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[300_000_000, 2_000_000_000])
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs for times; memory: one in three"
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of rows, and in the arrays"
    )
    parser.add_argument("--api-url", default=None, help="use this Prefect server")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=MOST_TURNS, help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sample:
        sample(given.sample)
        return
    if given.row:
        measure_row(given.row, given.way, given.size, given.seed, given.sampled, given.turns)
        return
    if given.tiny:
        given.sizes, given.repeats, given.turns = [4_000_000], 1, 1
    can_look = Path("/proc/self/smaps_rollup").exists()

    order = random.Random(given.seed)
    runs: list[dict[str, Any]] = []
    with _common.prefect_server(given.api_url) as url:
        versions = _common.versions("numpy", "cloudpickle")
        versions["memory_bytes"] = (
            read_kib("/proc/meminfo", "MemTotal") * 1024 if can_look else None
        )
        for size in sorted(given.sizes):
            for repeat in range(given.repeats):
                for row in order.sample(given.rows, len(given.rows)):
                    for way in given.ways:
                        look = can_look and repeat % 3 == 0 and (not given.tiny or row == "ours")
                        for sampled in (False, True) if look else (False,):
                            need = expected_bytes(runs, row, way, size)
                            if can_look and need > SAFE_FRACTION * available_bytes():
                                print(f"{row}, {way}, {size}: left out", file=sys.stderr)
                                continue
                            arguments = ["--row", row, "--way", way, "--size", str(size)]
                            arguments += ["--seed", str(given.seed), "--turns", str(given.turns)]
                            arguments += ["--sampled"] if sampled else []
                            found = _common.measure(__file__, arguments, url)
                            about = {"row": row, "way": way, "size_bytes": size, "repeat": repeat}
                            runs.append({**about, "sampled": sampled, **found})
                            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"versions": versions, "seed": given.seed, "runs": runs}, indent=1))
    print("\nmedian (lowest–highest)\n")
    print_rows(runs, given.rows, given.ways, sorted(given.sizes))


def available_bytes() -> int:
    """Read what memory the machine has left."""
    return read_kib("/proc/meminfo", "MemAvailable") * 1024


def expected_bytes(runs: list[dict[str, Any]], row: str, way: str, size: int) -> float:
    """Return the bytes that a row is expected to need, from its earlier samples."""
    ratios = [extra(r) for r in runs if r["sampled"] and (r["row"], r["way"]) == (row, way)]
    return (1.0 + max(ratios, default=0.0)) * size


def extra(run: dict[str, Any]) -> float:
    """Return the memory of a run beyond the array, in multiples of the array."""
    return float((run["full_bytes"] - run["empty_bytes"]) / run["size_bytes"])


def seconds(run: dict[str, Any]) -> float:
    """Return the seconds that the array of a run took."""
    if run["way"] == "returned":
        return float(run["full_s"])
    return float(run["full_s"] - run["empty_s"])


def print_rows(
    runs: list[dict[str, Any]], rows: list[str], ways: list[str], sizes: list[int]
) -> None:
    """Print a line for each size, way and row."""
    table = []
    for size in sizes:
        for way in ways:
            of = {
                row: [r for r in runs if (r["row"], r["way"], r["size_bytes"]) == (row, way, size)]
                for row in rows
            }
            times = {row: [seconds(r) for r in own if not r["sampled"]] for row, own in of.items()}
            pipe = statistics.median(times["pipe"]) if times.get("pipe") else None
            for row in rows:
                faster = "–"
                if pipe is not None and times[row] and statistics.median(times[row]) > 0:
                    faster = f"{pipe / statistics.median(times[row]):.1f}"
                looked = [extra(r) for r in of[row] if r["sampled"]]
                table.append(
                    [
                        f"{size / 1e6:g} MB {WAYS[way]}",
                        ROWS[row],
                        _common.spread(times[row], 2) if times[row] else "left out",
                        faster,
                        _common.spread(looked, 2),
                    ]
                )
    _common.print_table(
        ["array", "runner", "s", "times as fast as the pipe", "extra memory, arrays"], table
    )


if __name__ == "__main__":
    main()
