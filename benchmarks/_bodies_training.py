"""The body of `_bodies` as a training begins: a model, an optimizer and one step, with PyTorch.

In a module of its own, as what a task's module names is imported before the task exists.
"""

from __future__ import annotations

import time
from typing import Any

from _bodies import times


def first_use(
    framework: str, on_gpu: bool, size_bytes: int, hold_s: float = 0.0
) -> dict[str, float]:
    """Train for one step, take memory, hold it, let go. Return times as `_bodies.first_use`."""
    line = time.time()
    import torch

    imported = time.time()
    device = "cuda" if on_gpu else "cpu"
    model = torch.nn.Linear(256, 1, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(64, 256, device=device)).pow(2).mean().backward()
    optimizer.step()
    if on_gpu:
        torch.cuda.synchronize()
    ready = time.time()
    kept = torch.ones(size_bytes // 4, device=device)
    kept.sum().item()
    time.sleep(hold_s)
    del kept
    return times(line, imported, ready)


def spawned(queue: Any, *arguments: Any) -> None:
    """Run the body in a process of `multiprocessing`."""
    queue.put(first_use(*arguments))
