"""A training on a node of a Ray cluster makes way for an urgent task, and is then suspended by hand.

    python -m tests.gpu.check_cluster_suspension [--held 16] [--steps 900]

The node is this machine, with one GPU. The urgent task needs more than is free beside the training, so the training's memory
goes to the host until the urgent task has ended. After that `prefect-gpu suspend` and `resume` do the same on the node. The
losses must be equal bit for bit to those of a training that nothing disturbed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from tests.gpu._checks import GIB, MIB, logs_of, nvml_handles, run, say, settle, used_bytes
from tests.gpu.check_suspend_by_hand import command, held_by, train

#: Seconds that anything may take here.
LIMIT_S = 280.0

#: What the urgent task leaves free beside its own memory: the runner's headroom, its context, and some.
LEFT_BYTES = 4 * GIB


@task
def urgent(folder: str, gib: int) -> float:
    """Hold most of the device until a file is there."""
    import torch

    held = torch.ones(gib * GIB // 4, device="cuda")
    Path(folder, "urgent").touch()
    while not Path(folder, "urgent-go").exists():
        time.sleep(0.02)
    return float(held[-1])


def until(condition: Any, what: str) -> None:
    """Wait until something is so.

    Raises:
        RuntimeError: It was not, for `LIMIT_S`.
    """
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"after {LIMIT_S:.0f} s still not: {what}")
        time.sleep(0.02)


def begun(folder: Path) -> tuple[str, int]:
    """Wait for the first step of a training; return its task run's name and its process."""

    def words() -> list[str]:
        return (folder / "run").read_text().split() if (folder / "run").exists() else []

    until(lambda: len(words()) == 2, "a first step")
    name, pid = words()
    return name, int(pid)


def check(options: argparse.Namespace) -> list[str]:
    import pynvml

    ray = importlib.import_module("ray")
    problems: list[str] = []
    total = int(pynvml.nvmlDeviceGetMemoryInfo(nvml_handles()[0]).total)
    urgent_gib = (total - LEFT_BYTES) // GIB
    tagged = train.with_options(
        tags=gpu(memory=f"{options.held + 2}GiB", framework="torch", preemptible=True)
    )
    asks = urgent.with_options(
        tags=gpu(memory=f"{urgent_gib + 1}GiB", framework="torch", priority=5)
    )
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        os.environ["PREFECT_INTEGRATIONS_GPU_LEDGER"] = str(folder / "ledger")
        for name in ("ledger", "moved", "quiet"):
            (folder / name).mkdir()

        @flow(task_runner=GPUTaskRunner(address="auto", devices=options.devices))
        def trains() -> tuple[str, str, Any]:
            moved = tagged.submit(str(folder / "moved"), options.held, options.steps)
            name, pid = begun(folder / "moved")
            say(f"the training holds {held_by(pid) / MIB:.0f} MiB")
            began_s = time.monotonic()
            asked = asks.submit(path, urgent_gib)
            until((folder / "urgent").exists, "the urgent task runs")
            say(
                f"the urgent task held {urgent_gib} GiB {time.monotonic() - began_s:.1f} s after submit"
            )
            if away := held_by(pid):
                problems.append(f"{away} bytes were left for the urgent task")
            (folder / "urgent-go").touch()
            began_s = time.monotonic()
            if asked.result() != 1.0:
                problems.append("the urgent task computed something else")
            until(lambda: held_by(pid) > 0, "the training is back")
            say(f"back {time.monotonic() - began_s:.1f} s after the urgent task was told to end")
            time.sleep(1)
            code, _ = command("suspend", name)
            if code or held_by(pid):
                problems.append(f"suspend ended with {code}, and {held_by(pid)} bytes were left")
            command("status")
            if command("resume", name)[0]:
                problems.append("it was not resumed")
            first = moved.result()
            return (
                first,
                tagged.submit(str(folder / "quiet"), options.held, options.steps).result(),
                moved.task_run_id,
            )

        before = used_bytes()
        ray.init(num_gpus=1, include_dashboard=False, log_to_driver=False)
        try:
            first, second, task_run_id = trains()
        finally:
            ray.shutdown()
        say(f"digest of the losses: {first[:16]} suspended twice, {second[:16]} undisturbed")
        if first != second or len(first) != 64:
            problems.append(f"the trainings differ: {first}, {second}")
        for line in logs_of(str(task_run_id), ""):
            say(f"  log: {line}")
        left = [now - then for now, then in zip(settle(before), before, strict=True)]
        say(f"left on the devices: {', '.join(f'{size / MIB:+.1f} MiB' for size in left)}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", type=int, default=16, help="GiB of a training")
    parser.add_argument("--steps", type=int, default=900)
    return run(check, parser, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
