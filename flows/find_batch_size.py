"""The largest batch with which a model trains in a given budget, and a training with it.

    python flows/find_batch_size.py --memory 8GiB --start 4096
    python flows/find_batch_size.py --memory 2GiB --start 256 --devices simulated:1x8GiB

The first task tries whole training steps with `--start` images, half of them, and so on, until one fits into its budget.
The second has the same budget and trains with what the first has found. On a GPU the budget caps PyTorch, which then
raises its out-of-memory. On simulated devices a step allocates 300 MiB and 30 MiB for each image, which is a rehearsal
of the search. Without a GPU nothing caps PyTorch: `--start` fits, as long as the machine's memory holds it.
Needs torch (`pip install prefect-gpu[torch]`).
"""

from __future__ import annotations

import argparse

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, current_allocation, find_batch_size, gpu, report_metric, step
from prefect_gpu.testing import allocate

PIXELS, CLASSES = 64, 100

#: Memory settles after a few steps: the optimizer's states come at the end of the first.
STEPS = 5


class Training:
    """A network for images, its optimizer, and training steps on random batches."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layers: list[nn.Module] = []
        for narrow, wide in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(narrow, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self._model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self._model.append(nn.Linear(256, CLASSES)).to(self._device)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def train(self, batch: int) -> None:
        """Take some steps with a batch of that size."""
        import torch

        for _ in range(STEPS):
            images = torch.randn(batch, 3, PIXELS, PIXELS, device=self._device)
            labels = torch.randint(CLASSES, (batch,), device=self._device)
            self._optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self._model(images), labels).backward()
            self._optimizer.step()
            step()


def rehearse(batch: int) -> None:
    """Take memory of a simulated device, as steps with a batch of that size would."""
    for _ in range(STEPS):
        with allocate(f"{300 + 30 * batch}MiB"):
            step()


@task
def search(start: int, simulated: bool) -> int:
    """Return the first of `start`, its half, and so on, that fits into the task's budget."""
    size = find_batch_size(rehearse if simulated else Training().train, start)
    report_metric("batch size", size)
    return size


@task
def train(batch: int, simulated: bool) -> str:
    """Train with a batch of that size; return what the task was given."""
    (rehearse if simulated else Training().train)(batch)
    return str(current_allocation())


@flow(name="find-batch-size", task_runner=GPUTaskRunner())
def find(memory: str, start: int, simulated: bool = False) -> tuple[int, str]:
    """Search within a budget, then train within it."""
    # "fail": after an out-of-memory the body would otherwise run again with more memory than asked for.
    tags = gpu(memory=memory, framework="none" if simulated else "torch", oom="fail")
    size = search.with_options(tags=tags).submit(start, simulated).result()
    return size, train.with_options(tags=tags).submit(size, simulated).result()


def main() -> None:
    """Read the arguments, run the flow, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="auto, host, nvml, simulated:1x8GiB")
    parser.add_argument("--memory", default="8GiB", help="the budget, as in 8GiB")
    parser.add_argument("--start", type=int, default=4096, help="the largest batch to try")
    options = parser.parse_args()
    simulated = options.devices.startswith("simulated")
    run = find.with_options(task_runner=GPUTaskRunner(devices=options.devices))
    size, allocation = run(options.memory, options.start, simulated)
    print(f"largest batch of {options.start}, its half, and so on, in {options.memory}: {size}")
    print(f"trained with it in {allocation}")


if __name__ == "__main__":
    main()
