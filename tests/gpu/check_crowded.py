"""A first run whose neighbour takes more and more of their GPU is suspended, and goes on after the neighbour's end.

    python -m tests.gpu.check_crowded [--held 12]

Neither has a budget. At first the older one leaves room for two of the younger one, a training; then it grows until it
leaves less than the training holds. Both must end in their first process, and the training with the losses that it
has undisturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from prefect import task

from prefect_gpu import current_allocation, gpu
from prefect_gpu.scheduling.probes import FIRST_S
from tests.gpu._checks import (
    GIB,
    Ended,
    gather,
    logs_of,
    own_bytes,
    read_processes,
    run,
    run_flow,
    say,
)
from tests.gpu.check_suspend_by_hand import train

#: Seconds that anything may take here.
LIMIT_S = 290.0

#: Room that the older one leaves at first and at last, and takes in a second, in parts of what the training holds.
FIRST, LAST, A_SECOND = 2.25, 0.65, 1 / 48

#: Steps of the training: it is on the device until the other one has grown.
STEPS = 3000


@task(tags=gpu(framework="torch"))
def grow(folder: str, training_gib: int) -> tuple[int, float]:
    """Take more and more of the device; return the number of this process in its task run, and the GiB that it held."""
    import torch

    total, training = torch.cuda.mem_get_info()[1], training_gib * GIB
    piece = int(training * A_SECOND)
    held = [torch.zeros(int(total - training * FIRST), dtype=torch.uint8, device="cuda")]
    while not Path(folder, "run").exists():
        time.sleep(0.1)
    time.sleep(FIRST_S)
    while sum(each.numel() for each in held) < total - training * LAST:
        held.append(torch.zeros(piece, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        time.sleep(1.0)
    time.sleep(2.0)
    allocation = current_allocation()
    assert allocation is not None
    return allocation.attempt, own_bytes() / GIB


def check(options: argparse.Namespace) -> list[str]:
    if options.devices != "nvml":
        return ["only memory of NVIDIA GPUs is moved"]
    problems = []
    training = train.with_options(tags=gpu(framework="torch"))
    with tempfile.TemporaryDirectory() as folder:

        def crowded() -> dict[str, Ended]:
            futures = {
                "grow": grow.submit(folder, options.held),
                "train": training.submit(folder, options.held, STEPS),
            }
            return gather(futures, LIMIT_S)

        first = run_flow("first runs", crowded, options.devices)
        for name, ended in first.value.items():
            if ended.words:
                problems.append(f"{name} failed: {ended.words}")
        processes = read_processes(first.id, 2)
        if problems:
            return problems
        attempt, held_gib = first.value["grow"].value
        say(f"the older one held {held_gib:.1f} GiB at last, in process {attempt} of its task run")
        moved = first.value["train"]
        lines = logs_of(moved.task_run_id, "suspended for other first runs")
        for line in logs_of(moved.task_run_id, ""):
            say(f"  log of the training: {line}")
        if not lines:
            problems.append("the training was not suspended")
        counts = {name: len(processes.get(e.task_run_id, ())) for name, e in first.value.items()}
        say(f"processes: {counts}")
        if set(counts.values()) != {1}:
            problems.append("a first run was lost to its neighbour")
        quiet = run_flow(
            "undisturbed",
            lambda: gather({"train": training.submit(folder, options.held, STEPS)}, LIMIT_S),
            options.devices,
        ).value["train"]
        say(f"digest of the losses: {str(moved.value)[:16]}, undisturbed {str(quiet.value)[:16]}")
        if moved.value != quiet.value or quiet.value is None:
            problems.append("the losses differ")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--held", type=int, default=12, help="GiB of the training, at most two fifths of the device"
    )
    return run(check, parser, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
