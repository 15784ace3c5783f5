"""What does a process for each task cost, and what does it leave behind?

Measured for one task after another: `submit` → first line of the body, → framework and device ready,
and what the task's memory is after its end, while the flow goes on. Peers: Prefect's
`ProcessPoolTaskRunner` and `ThreadPoolTaskRunner`, and plain `multiprocessing` (spawn, one process
for each task, no Prefect in it).

    python benchmarks/isolation.py                 # on a GPU with PyTorch: what the README shows
    python benchmarks/isolation.py --framework none
    python benchmarks/isolation.py --tiny          # that it runs, in seconds

Fair to all: one running Prefect server whose URL everybody has, compiled bytecode, each row in a
fresh process, rows in random order. The body allocates (4 GiB on a GPU), multiplies and lets go. On
an NVIDIA device "left" is what NVML counts for the flow's process and its children; without one it is
their resident memory beyond what it was before the first task, and the table says so. Ours has each
child on a device and under a cap as a user has it; its first task includes measuring the context.

Prints JSON (driver, device, versions, seed, every run), then a table of medians and spreads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import time
from typing import Any

import _common
import _devices

ROWS = {
    "ours": "GPUTaskRunner",
    "spawn": "multiprocessing spawn, no Prefect",
    "pool": "ProcessPoolTaskRunner",
    "threads": "ThreadPoolTaskRunner",
}

MIB = 2**20

#: Bytes that a body allocates: on a GPU as in the measurements of the README, on a host with room
#: for others.
GPU_BYTES = 4096 * MIB
HOST_BYTES = 256 * MIB

#: Seconds after a task's result at which what it left is read. A Python process with Prefect in it
#: takes 0.3 s to end, on a loaded machine more than half a second; what a reused process keeps stays.
SETTLE_S = 2.0


def body(framework: str, on_gpu: bool, size_bytes: int) -> dict[str, float]:
    """Allocate, compute and free; return when the first line ran and when the work was done."""
    started = time.time()
    if framework == "torch":
        import torch

        device = "cuda" if on_gpu else "cpu"
        torch.ones(1, device=device).sum().item()
        ready = time.time()
        kept = torch.ones(size_bytes // 4, device=device)
        kept[: 1024 * 1024].view(1024, 1024).matmul(torch.ones(1024, 1024, device=device)).sum()
    else:
        ready = time.time()
        kept = bytearray(size_bytes)
        # Touched, or the kernel gives no page.
        kept[::4096] = b"x" * len(range(0, size_bytes, 4096))
    del kept
    return {"started": started, "ready": ready, "pid": os.getpid()}


def spawned(queue: Any, *arguments: Any) -> None:
    """Run the body in a process of `multiprocessing`."""
    queue.put(body(*arguments))


def measure_row(row: str, framework: str, on_gpu: bool, later: int) -> None:
    """Run one row's tasks, one after another, and tell."""
    size_bytes = GPU_BYTES if on_gpu else HOST_BYTES
    arguments = (framework, on_gpu, size_bytes)
    tasks: list[dict[str, float]] = []

    def one(submit: Any) -> None:
        submitted = time.time()
        found = submit()
        ended = time.time()
        time.sleep(SETTLE_S)
        tasks.append(
            {
                "first_line_s": found["started"] - submitted,
                "ready_s": found["ready"] - submitted,
                "whole_s": ended - submitted,
                "left_bytes": _devices.held_bytes(on_gpu) - before,
                "device_left_bytes": _devices.used_bytes() - device_before,
            }
        )

    if row == "spawn":
        context = multiprocessing.get_context("spawn")

        def submit_spawned() -> dict[str, float]:
            queue = context.SimpleQueue()
            process = context.Process(target=spawned, args=(queue, *arguments))
            process.start()
            found = queue.get()
            process.join()
            return found

        before, device_before = _devices.held_bytes(on_gpu), _devices.used_bytes()
        for _ in range(1 + later):
            one(submit_spawned)
    else:
        from prefect import flow, task

        runner, tags = make_runner(row, framework, on_gpu)
        work = task(body, name="work", tags=tags)

        @flow(task_runner=runner)
        def one_by_one() -> None:
            nonlocal before, device_before
            before, device_before = _devices.held_bytes(on_gpu), _devices.used_bytes()
            for _ in range(1 + later):
                one(lambda: work.submit(*arguments).result())

        before = device_before = 0
        one_by_one()
    _common.tell({"row": row, "tasks": tasks})


def make_runner(row: str, framework: str, on_gpu: bool) -> tuple[Any, list[str]]:
    """Make the task runner of a row, and the tags that its task has."""
    from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

    from prefect_gpu import GPUTaskRunner, gpu

    if row == "pool":
        return ProcessPoolTaskRunner(), []
    if row == "threads":
        return ThreadPoolTaskRunner(), []
    tags = gpu(memory="6GiB" if on_gpu else "1GiB", framework=framework)
    return GPUTaskRunner(devices="nvml" if on_gpu else "host"), list(tags)


def main() -> None:
    """Measure every row, print JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--framework", choices=("auto", "torch", "none"), default="auto")
    parser.add_argument("--later", type=int, default=4, help="tasks after the first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0, help="of the order in which rows run")
    parser.add_argument("--api-url", default=None, help="use this Prefect server")
    parser.add_argument("--tiny", action="store_true", help="that it runs, not what it says")
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--on-gpu", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        measure_row(given.row, given.framework, given.on_gpu, given.later)
        return
    if given.tiny:
        given.framework, given.later, given.repeats = "none", 1, 1
    devices = _devices.nvidia()
    framework = given.framework
    if framework == "auto":
        framework = "torch" if importlib.util.find_spec("torch") else "none"
    on_gpu = bool(devices.get("devices")) and framework == "torch" and _devices.torch_sees_gpu()

    order = random.Random(given.seed)
    runs = []
    with _common.prefect_server(given.api_url) as url:
        found_versions = _common.versions("torch", "nvidia-ml-py")
        for repeat in range(given.repeats):
            for row in order.sample(given.rows, len(given.rows)):
                arguments = ["--row", row, "--framework", framework, "--later", str(given.later)]
                arguments += ["--on-gpu"] if on_gpu else []
                runs.append({"repeat": repeat, **_common.measure(__file__, arguments, url)})
    print(
        json.dumps(
            {
                "versions": found_versions,
                **devices,
                "framework": framework,
                "on_gpu": on_gpu,
                "allocated_bytes": GPU_BYTES if on_gpu else HOST_BYTES,
                "seed": given.seed,
                "runs": runs,
            },
            indent=1,
        )
    )
    what = "GPU memory (NVML)" if on_gpu else "no GPU was used: resident memory of all processes"
    print(f"\nframework: {framework}; left: {what}; median (lowest–highest)\n")
    print_rows(runs, given.rows)


def print_rows(runs: list[dict[str, Any]], rows: list[str]) -> None:
    """Print a line for each row."""
    table = []
    for row in rows:
        own = [r["tasks"] for r in runs if r["row"] == row]
        first = [tasks[0] for tasks in own]
        later = [task for tasks in own for task in tasks[1:]]
        table.append(
            [
                ROWS[row],
                _common.spread([t["first_line_s"] for t in first], 2),
                _common.spread([t["ready_s"] for t in first], 2),
                _common.spread([t["first_line_s"] for t in later], 3),
                _common.spread([t["ready_s"] for t in later], 3),
                _common.spread([t["left_bytes"] / MIB for t in later or first], 0),
            ]
        )
    _common.print_table(
        [
            "runner",
            "first task: line, s",
            "ready, s",
            "later tasks: line, s",
            "ready, s",
            "left after a task, MiB",
        ],
        table,
    )


if __name__ == "__main__":
    main()
