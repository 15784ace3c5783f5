"""A hyperparameter sweep: one GPU task for each combination, as many at a time as devices hold.

A small network learns scikit-learn's handwritten digits, with each combination of width, learning rate and dropout.

    python flows/sweep.py
    python flows/sweep.py --devices host --widths 32 64 --rates 0.01 --dropouts 0.0 --epochs 2

No task has a memory tag. Memory depends on the width, so each width has a history of its own (`gpu:learn_by`): first
tasks run side by side while a device has room, and the others with the budget that these needed. It prints the best
combination, and the budget of each task. The artifact `gpu-leaderboard-…` has the order, with seconds and memory.
Needs scikit-learn and torch (`pip install prefect-gpu[examples]`).
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

# The example beside this one.
from evaluate_models import check_installed, load_digits
from prefect import flow, task, unmapped

from prefect_gpu import (
    GPUTaskRunner,
    current_allocation,
    gpu,
    publish_leaderboard,
    report_metric,
    step,
)
from prefect_gpu.units import format_bytes

BATCH_SIZE = 64


@task(
    tags=gpu(framework="torch", learn_by=["width"]),
    task_run_name="width={width}, rate={rate}, dropout={dropout}",
)
def train(
    width: int, rate: float, dropout: float, data: dict[str, Any], epochs: int
) -> dict[str, Any]:
    """Train with one combination; return its accuracy on held-out digits, and its budget."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ).to(device)
    x, y, test_x, test_y = (
        torch.from_numpy(data[key]).to(device) for key in ("train_x", "train_y", "test_x", "test_y")
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        # Batches of one size: the budget is then what a step takes, not what the first one took.
        for batch in torch.randperm(len(x), device=device).split(BATCH_SIZE)[:-1]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            step()
    model.eval()
    with torch.inference_mode():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    report_metric("accuracy", accuracy)
    allocation = current_allocation()
    budget = format_bytes(allocation.budget_bytes) if allocation else "none"
    return {"accuracy": accuracy, "budget": budget}


@flow(name="sweep", task_runner=GPUTaskRunner())
def sweep(
    widths: list[int], rates: list[float], dropouts: list[float], epochs: int = 10
) -> list[dict[str, Any]]:
    """Train with each combination; return them, best first. One that fails is left out."""
    grid = list(itertools.product(widths, rates, dropouts))
    futures = train.map(
        *([combination[i] for combination in grid] for i in range(3)),
        data=unmapped(load_digits.submit(seed=0)),
        epochs=epochs,
    )
    publish_leaderboard(futures, "accuracy")
    found = [
        {"width": width, "rate": rate, "dropout": dropout, **future.result()}
        for (width, rate, dropout), future in zip(grid, futures, strict=True)
        if future.state.is_completed()
    ]
    return sorted(found, key=lambda row: -row["accuracy"])


def main() -> None:
    """Read the arguments, run the flow, print what it found."""
    check_installed("sklearn", "torch")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, simulated:2x8GiB")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-2])
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    run = sweep.with_options(task_runner=GPUTaskRunner(devices=options.devices))
    rows = run(options.widths, options.rates, options.dropouts, options.epochs)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if rows:
        print(
            "best: " + ", ".join(f"{name} {rows[0][name]}" for name in ("width", "rate", "dropout"))
        )


if __name__ == "__main__":
    main()
