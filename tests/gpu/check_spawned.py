"""Processes that a body starts on the device, with functions of the script itself, as PyTorch's tutorials do.

    python -m tests.gpu.check_spawned

One body starts `DistributedDataParallel` over NCCL with `torch.multiprocessing.spawn`, one process for each of its
devices, another the same with `torchrun`. Another starts a `Pool` of two processes on one device, and one more a process
that asks for twice the budget. The functions that they run and the classes that they return are defined here, in
`__main__`. All processes count towards their task, and each of them is capped.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    GIB,
    gather,
    last_of,
    nvml_handles,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

#: What each process of the pool takes.
EACH_BYTES = GIB

#: Seconds for which it is held. The runner reads NVML every 0.25 s.
HOLD_S = 2.0


@dataclass
class Trained:
    """What a process of the pool returns."""

    rank: int
    device: str


def make_model() -> Any:
    import torch

    return torch.nn.Linear(512, 512)


def train(rank: int, world: int, port: int, steps: int) -> None:
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    model = DistributedDataParallel(make_model().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
    time.sleep(HOLD_S)
    torch.distributed.destroy_process_group()


def hold(rank: int) -> Trained:
    import torch

    block = torch.ones(EACH_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    time.sleep(HOLD_S)
    return Trained(rank, str(block.device))


def in_ddp(devices: int) -> str:
    import socket

    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(devices, port, 5), nprocs=devices)
    return f"{devices} processes"


#: What `torchrun` runs: the same module, as a script.
RUN_RANK = """
import os
from tests.gpu.check_spawned import train
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
train(rank, world, int(os.environ["MASTER_PORT"]), 5)
"""


def in_torchrun(devices: int) -> str:
    import os
    import subprocess
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(RUN_RANK, encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ended = subprocess.run(
            [*launcher, f"--nproc-per-node={devices}", str(script)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        raise RuntimeError(f"torchrun ended with {ended.returncode}: {ended.stderr[-4000:]}")
    return f"{devices} processes"


def ask_for(size_bytes: int) -> str:
    import torch

    try:
        torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return f"{type(error).__name__}: {str(error).partition('. GPU')[0]}"
    return ""


def beyond_the_cap(times: int) -> str:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from prefect_gpu import current_allocation

    allocation = current_allocation()
    assert allocation is not None and allocation.budget_bytes is not None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        refused = pool.submit(ask_for, times * allocation.budget_bytes).result()
    if not refused:
        raise RuntimeError("a process got more than the budget of its task")
    return refused


def in_pool(processes: int) -> str:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        trained = pool.map(hold, range(processes), chunksize=1)
    assert [each.rank for each in trained] == list(range(processes))
    assert all(type(each) is Trained for each in trained)
    return f"{processes} processes"


def check(options: argparse.Namespace) -> list[str]:
    """Run both, and compare what their reports say with what the processes took."""
    devices = max(1, min(2, len(nvml_handles())))
    kinds = {
        "DDP, torch.multiprocessing.spawn": (in_ddp, devices, 0),
        "DDP, torchrun": (in_torchrun, devices, 0),
        "Pool, spawn": (in_pool, 2, 2 * EACH_BYTES),
        "twice the budget, ProcessPoolExecutor": (beyond_the_cap, 2, 0),
    }
    tasks = {
        name: task(
            name=body.__name__,
            timeout_seconds=BODY_S,
            tags=gpu(
                memory="8GiB",
                framework="torch",
                count=devices if body in (in_ddp, in_torchrun) else 1,
            ),
        )(body)
        for name, (body, _, _) in kinds.items()
    }
    flow = run_flow(
        "spawned",
        lambda: gather(
            {name: tasks[name].submit(count) for name, (_, count, _) in kinds.items()}, BODY_S
        ),
        options.devices,
    )
    processes = read_processes(flow.id, len(kinds))
    problems, rows = [], []
    for name, (_, _, least) in kinds.items():
        ended = flow.value[name]
        report = last_of(processes, ended)
        peak = None if report is None else report.bytes("peak_process_bytes")
        rows.append((name, ended.value or ended.words, size(peak)))
        if ended.error is not None:
            problems.append(f"{name}: {ended.words}")
        if (peak or 0) <= least:
            problems.append(f"{name}: its report says {size(peak)} MiB at most")
    table(["in the body", "ended", "reported-peak"], rows)
    for name in kinds:
        report = last_of(processes, flow.value[name])
        found = None if report is None else report.section("Devices and processes")
        say(f"{name}: what its report says of its devices and processes\n{found}\n")
        # One row for the device, one for each process that used it.
        if options.devices == "nvml" and len(re.findall(r"\| \d+, ", found or "")) < 1:
            problems.append(f"{name}: its report names no process")
    say(f"{devices} device(s); sizes in MiB, of all processes of a task together")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=180)


if __name__ == "__main__":
    sys.exit(main())
