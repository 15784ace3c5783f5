"""What children do in `test_release_unused`. The frameworks are imported inside, as a task would."""

from __future__ import annotations

import time
from pathlib import Path

GIB = 1 << 30


def pause(folder: str, name: str) -> None:
    """Say that it is there, and wait until the parent has done its part."""
    Path(folder, name).touch()
    while not Path(folder, f"{name}-done").exists():
        time.sleep(0.005)


def torch_graph(folder: str, watched: bool) -> dict[str, float]:
    """Hold 1 GiB and cache 4 GiB; pause within the capture of a graph, and after it.

    Args:
        folder: For the pauses.
        watched: Capture as programs do; else in a way that nothing watches.
    """
    import torch

    live = torch.full((GIB // 4,), 1.5, device="cuda")
    # Freed at once: it stays in the cache.
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    x = torch.ones(1024, device="cuda")
    # Its kernels are loaded before the capture.
    y = x * 2 + 1
    graph = torch.cuda.CUDAGraph() if watched else torch._C._CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=None, capture_error_mode="global")
        y = x * 2
        pause(folder, "capturing")
        y = y + 1
        graph.capture_end()
    found = {"within": torch.cuda.memory_reserved()}
    x.fill_(3)
    graph.replay()
    found |= {"least": float(y.min()), "most": float(y.max())}
    pause(folder, "idle")
    found["after"] = torch.cuda.memory_reserved()
    x.fill_(5)
    graph.replay()
    found |= {"least-after": float(y.min()), "most-after": float(y.max())}
    # What was given back can be had again.
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    return {**found, "live": float(live.mean())}


def cupy_graph(folder: str) -> dict[str, float]:
    """Hold 1 GiB and cache 4 GiB; pause before a graph is captured, and after it."""
    import cupy

    pool = cupy.get_default_memory_pool()
    live = cupy.full(GIB // 8, 1.5)
    cupy.empty(4 * GIB, dtype=cupy.uint8)
    pause(folder, "idle")
    found = {"before": pool.total_bytes()}
    cupy.empty(4 * GIB, dtype=cupy.uint8)
    x, y = cupy.ones(1024), cupy.empty(1024)
    # Compiled before the capture.
    cupy.add(x * 2, 1, out=y)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        # The graph refers to the first product, which the pool has back.
        cupy.add(x * 2, 1, out=y)
        graph = stream.end_capture()
    pause(folder, "captured")
    found["after"] = pool.total_bytes()
    x.fill(3)
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream=stream)
    stream.synchronize()
    return {**found, "least": float(y.min()), "most": float(y.max()), "live": float(live.mean())}
