"""One process of a `DistributedDataParallel` training; `torchrun` starts it as a script."""

from __future__ import annotations

import os
import time
from typing import Any

#: Seconds for which memory is held. The runner reads NVML every 0.25 s.
HOLD_S = 2.0


def hold(rank: int, device: Any) -> Any:
    """Take one GiB on the first device, two on the second; on the processor MiB."""
    import torch

    unit = 1 << (30 if torch.cuda.is_available() else 20)
    return torch.ones((rank + 1) * unit, dtype=torch.uint8, device=device)


def train(rank: int, world: int, address: str) -> None:
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    on_gpus = torch.cuda.is_available()
    device = torch.device(f"cuda:{rank}" if on_gpus else "cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=world)
    held = hold(rank, device)
    model = DistributedDataParallel(torch.nn.Linear(512, 512).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(64, 512, device=device)).square().mean().backward()
        optimizer.step()
    time.sleep(HOLD_S)
    del held
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
