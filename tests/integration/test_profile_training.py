"""The profiling flow, at its smallest, as a user runs it."""

from __future__ import annotations

import pytest

from tests.cases import needs
from tests.integration.programs import REPOSITORY, Workplace

pytestmark = needs("torch")

SCRIPT = str(REPOSITORY / "flows" / "profile_training.py")
SMALL = ["--devices=host", "--batch=2", "--hidden=8", "--vocabulary=50", "--length=4"]
TRAINING = ["beginning", "after forward", "after backward", "after optimizer step", "after cleanup"]
EVALUATION = ["beginning", "after forward", "after cleanup"]

#: The flow's search, on a simulated device: a batch takes a size that is known.
KNOWN = """
import sys

sys.path.insert(0, sys.argv[1])
import profile_training
from prefect import task
from prefect_gpu import GPUTaskRunner, find_batch_size
from prefect_gpu.testing import allocate


def take(batch):
    with allocate(f"{batch * 30 + 300}MiB"):
        return 0.25


@task
def largest_batch(start, *sizes):
    return find_batch_size(take, start)


@task
def train_briefly(batch, *sizes):
    return take(batch)


profile_training.largest_batch, profile_training.train_briefly = largest_batch, train_briefly
flow = profile_training.least_memory
flow.with_options(task_runner=GPUTaskRunner(devices="simulated:1x24GiB"))(2048, 80, 1, 1, 1)
"""


@pytest.mark.slow
def test_it_prints_every_moment_of_its_report(place: Workplace) -> None:
    # No sizes are given: those for a processor are taken.
    done = place.run(SCRIPT, "--devices=host", "--device-memory", "1GiB")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "No GPU is used: a training on the processor, with "
        "--batch 4, --hidden 32, --vocabulary 500, --length 8."
    )
    headline = next(line for line in lines if line.startswith("Completed in "))
    assert headline.endswith("%).") and "of its 1GiB budget" in headline
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    # No framework counts what PyTorch allocates on a processor, and columns of nothing are left out.
    assert cells[0] == ["step", "phase"]
    parts = [("step 1", TRAINING), ("step 2", TRAINING), ("evaluation", EVALUATION)]
    moments = [
        f"epoch {epoch}, {part}: {moment}"
        for epoch in (1, 2)
        for part, moments in parts
        for moment in moments
    ]
    assert [row[1] for row in cells[2:]] == [
        "model and optimizer",
        *moments,
        "after empty_cache",
    ]
    assert any("No GPU took part" in line for line in lines)
    for what, count in (("step", 4), ("evaluation", 2)):
        losses = next(line for line in lines if line.startswith(f"loss by {what}: "))
        assert len([float(loss) for loss in losses.partition(": ")[2].split(", ")]) == count


@pytest.mark.slow
def test_no_least_memory_is_made_up_where_none_is_enforced(place: Workplace) -> None:
    lines = place.run(SCRIPT, "--least", "900", *SMALL).stdout.splitlines()
    assert [line for line in lines if line.startswith(("under ", "batch "))] == [
        "under 900 MiB, of 8, its half, and so on: find_batch_size returns 8",
        "batch 8: no budget was found that breaks it, and a larger one that does not",
        "batch 4: no budget was found that breaks it, and a larger one that does not",
    ]


@pytest.mark.slow
def test_the_least_memory_is_found_to_32_mib(place: Workplace) -> None:
    program = place.write("known.py", KNOWN)
    lines = place.run(str(program), str(REPOSITORY / "flows")).stdout.splitlines()
    found = [line for line in lines if line.startswith(("under ", "batch "))]
    # 80 sentences would take 2,700 MiB, 40 take 1,500 and 20 take 900.
    assert found == [
        "under 2048 MiB, of 320, its half, and so on: find_batch_size returns 40",
        "batch 40: trains in 1516 MiB, 250 ms a step (in 2048 MiB: 250 ms); breaks in 1488 MiB",
        "batch 20: trains in 900 MiB, 250 ms a step (in 2048 MiB: 250 ms); breaks in 872 MiB",
    ]
