"""Bodies with phases, steps and shortages on a real device. Imported by children: no pytest."""

from __future__ import annotations

import time
from typing import Any

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


def spike(steps: int, control: bool = False) -> int:
    """Allocate far more than is left in each step, for less than a look takes.

    Args:
        steps: How many.
        control: Count the peak of each step with PyTorch's own counter instead, by resetting it.

    Returns:
        Peak of the last step in bytes, if `control`.
    """
    import torch

    def take(size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    weights = take(256 * MIB)
    for number in range(steps):
        if control:
            torch.cuda.reset_peak_memory_stats()
        if number == 0:
            take(1024 * MIB)
        # A large block, one that is cut from a segment, and small ones that are rounded.
        held: list[Any] = [take(512 * MIB), take(3 * MIB), *(take(1000) for _ in range(20))]
        held.clear()
        time.sleep(0.02)
        if not control:
            step()
    del weights
    return torch.cuda.max_memory_allocated()


def record(steps: int) -> tuple[bool, int]:
    """Switch recording on within the second step.

    Returns:
        Whether it is on at the end, and how many events it has.
    """
    import torch

    for number in range(steps):
        if number == 1:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        step()
    snapshot = torch.cuda.memory._snapshot()
    events = sum(e["action"] == "alloc" for e in snapshot["device_traces"][0])
    return torch._C._cuda_isHistoryEnabled(), events


def want(size_mib: int) -> None:
    import torch

    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")
    del held
