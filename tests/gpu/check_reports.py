"""Reports of a real run, which the README's pictures are made of.

    python -m tests.gpu.check_reports > reports.txt
    python -m tests.ui.capture --reports reports.txt --key gpu-memory-train --out docs/images/task-report.png
    python -m tests.ui.capture --reports reports.txt --key gpu-flow-train-models --out docs/images/flow-report.png
    python -m tests.ui.capture --reports reports.txt --key gpu-leaderboard-train-models --out docs/images/leaderboard.png

Four tasks train a ResNet-50 side by side with batches of different sizes. The budget of the largest is too small, so it
runs out of memory and runs again with more. The last line that is printed for the flow has all of its artifacts, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from prefect import task

from prefect_gpu import gpu, phase, publish_leaderboard, report_metric, step
from tests.gpu._checks import BODY_S, Ended, gather, read_all, read_processes, run, run_flow, say

#: Budgets by the images of a batch: enough, but for the last.
BUDGETS = {64: "3GiB", 128: "3GiB", 256: "4GiB", 512: "4GiB"}

#: For how long each trains.
TRAIN_S = 8.0

#: Begins the line with the artifacts.
ARTIFACTS = "ARTIFACTS "


def train(batch: int) -> int:
    """Train; return the number of steps."""
    import torch
    from torch.nn.functional import cross_entropy

    from tests.gpu._resnet import resnet50

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with phase("model"):
        model = resnet50().to(device)
        optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(batch, 3, 64, 64, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    began_s, steps = time.monotonic(), 0
    while time.monotonic() - began_s < TRAIN_S:
        optimizer.zero_grad()
        with phase("forward"):
            loss = cross_entropy(model(images), labels)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
        loss.item()
        step()
        steps += 1
    report_metric("images_per_s", steps * batch / (time.monotonic() - began_s))
    return steps


def check(options: argparse.Namespace) -> list[str]:
    """Run the flow and print its artifacts."""
    body = task(name="train", task_run_name="resnet50-batch-{batch}", timeout_seconds=BODY_S)(train)

    def train_all() -> dict[str, Ended]:
        futures = {
            str(batch): body.with_options(tags=gpu(memory=memory, framework="torch")).submit(batch)
            for batch, memory in BUDGETS.items()
        }
        publish_leaderboard(futures.values(), "images_per_s")
        return gather(futures, BODY_S)

    flow = run_flow("train-models", train_all, options.devices)
    problems = [f"batch {name}: {e.words}" for name, e in flow.value.items() if e.error is not None]
    read_processes(flow.id, len(BUDGETS) + 1)
    where = {"artifacts": {"flow_run_id": {"any_": [flow.id]}}, "sort": "CREATED_DESC"}
    artifacts = [
        {name: row[name] for name in ("key", "type", "description", "data", "metadata_")}
        for row in reversed(read_all("/artifacts/filter", where))
    ]
    keys = [artifact["key"] for artifact in artifacts]
    if keys.count("gpu-memory-train") != len(BUDGETS) + 1 or keys[-1] != "gpu-flow-train-models":
        problems.append(f"the reports are {keys}")
    say(ARTIFACTS + json.dumps(artifacts))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=120)


if __name__ == "__main__":
    sys.exit(main())
