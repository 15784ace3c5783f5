# The cure for "too many open files": workers of a loader share tensors through the file system.
import os

import torch.multiprocessing
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from torch.utils.data import DataLoader, TensorDataset

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


@task(tags=TAGS)
def load():
    data = TensorDataset(torch.arange(8.0))
    total = sum(float(batch.sum()) for (batch,) in DataLoader(data, batch_size=4, num_workers=2))
    return torch.multiprocessing.get_sharing_strategy(), total


@flow(task_runner=RUNNER)
def main():
    assert load.submit().result() == ("file_system", 28.0)


if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.multiprocessing.set_start_method("spawn")
    main()
