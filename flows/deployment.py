"""Deploy a flow with GPU tasks from a local folder, and run it with a process worker.

Each line in a terminal of its own, from the repository, or with `&` behind the ones that stay:

    prefect server start
    prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api
    prefect work-pool create gpu-pool --type process
    python flows/deployment.py --pool gpu-pool
    prefect worker start --pool gpu-pool --limit 2
    prefect deployment run nightly/gpu --param sizes='[128, 256]'

`prefect flow-run ls` shows the run, `prefect-gpu report NAME` its memory. The worker starts each flow run in a process of
its own, and the flow its GPU tasks. Flow runs that a machine's workers run at the same time share its devices through the
ledger: `--limit` bounds flow runs, not GPU tasks.

    python flows/deployment.py --serve

does without pool and worker: this process runs what is asked of `nightly/gpu` until it is ended. The devices are those
of the machine where the worker runs, and `PREFECT_INTEGRATIONS_GPU_DEVICES` in its environment names others, as in
`simulated:2x8GiB`. Needs torch (`pip install prefect-gpu[torch]`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu, report_metric


@task(tags=gpu(memory="2GiB", framework="torch"), retries=1, task_run_name="multiply-{size}")
def multiply(size: int) -> float:
    """Multiply two random matrices; return the mean of the product."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.rand(size, size, device=device) for _ in range(2))
    mean = (left @ right).mean().item()
    report_metric("mean", mean)
    return mean


# No devices here: a worker elsewhere loads this flow, and has its own.
@flow(name="nightly", task_runner=GPUTaskRunner(), log_prints=True)
def nightly(sizes: list[int]) -> list[float]:
    """Multiply matrices of each size."""
    means = multiply.map(sizes).result()
    print(f"means: {', '.join(f'{mean:.2f}' for mean in means)}")
    return means


def main() -> None:
    """Deploy the flow of this file, or serve it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", default="gpu-pool", help="an existing work pool, of type process")
    parser.add_argument("--serve", action="store_true", help="run it in this process instead")
    options = parser.parse_args()
    parameters = {"sizes": [256, 512]}
    if options.serve:
        nightly.serve(name="gpu", parameters=parameters)
        return
    file = Path(__file__).resolve()
    # A worker of another machine needs the file at the same place, or a git repository as the source.
    flow.from_source(str(file.parent), f"{file.name}:nightly").deploy(
        "gpu", work_pool_name=options.pool, parameters=parameters
    )


if __name__ == "__main__":
    main()
