"""Two evaluations on a simulated device with room for one of them, for a browser to look at.

    python -m tests.ui.two_models FILE

The first one ends once FILE exists, so the second one waits until then.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu, publish_leaderboard, report_metric
from prefect_gpu.testing import allocate

#: Seconds, for a test that has died.
MOST_S = 600


@task(tags=gpu(memory="8GiB"), task_run_name="{name}")
def evaluate(name: str, accuracy: float, until: str) -> None:
    """Hold memory until a file exists."""
    with allocate("6GiB"):
        report_metric("accuracy", accuracy)
        ends = time.monotonic() + MOST_S
        while not Path(until).exists() and time.monotonic() < ends:
            time.sleep(0.05)


@flow(name="two-models", task_runner=GPUTaskRunner(devices="simulated:1x12GiB"))
def two_models(until: str) -> None:
    """Evaluate two models, one after the other."""
    runs = [evaluate.submit("wide", 0.91, until), evaluate.submit("deep", 0.97, until)]
    publish_leaderboard(runs, "accuracy")


if __name__ == "__main__":
    two_models(sys.argv[1])
