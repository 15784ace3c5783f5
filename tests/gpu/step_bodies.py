"""Bodies with phases, steps and shortages on a real device. Imported by children: no pytest."""

from __future__ import annotations

from prefect_gpu import phase, step

MIB = 1 << 20


def train(steps: int) -> None:
    """256 MiB of weights, 128 MiB a step, and 512 MiB more in the first to try things out."""
    import torch

    def take(size_mib: int) -> torch.Tensor:
        return torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")

    weights = take(256)
    for number in range(steps):
        with phase("forward"):
            batch = take(128)
            if number == 0:
                take(512)
        with phase("backward"):
            batch.fill_(1)
        step()
    del weights


def want(size_mib: int) -> None:
    import torch

    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")
    del held
