"""Bodies of tasks: the smallest use of a device (`dispatch.py`, and what others warm up with), and none.

In a module that any process can import: nothing at the top but time.
"""

from __future__ import annotations

import os
import time
from typing import Any


def first_use(
    framework: str, on_gpu: bool, size_bytes: int, hold_s: float = 0.0
) -> dict[str, float]:
    """Use a device for the first time, take memory, hold it, let go.

    Returns:
        Times of the first line, of the framework's import and of the device being ready, and what
        the last step took.
    """
    line = time.time()
    if framework == "torch":
        import torch

        imported = time.time()
        device = "cuda" if on_gpu else "cpu"
        torch.zeros(1, device=device)
        if on_gpu:
            torch.cuda.synchronize()
        ready = time.time()
        kept = torch.ones(size_bytes // 4, device=device)
        kept.sum().item()
    elif framework == "tensorflow":
        import tensorflow as tf

        imported = time.time()
        with tf.device("/GPU:0" if on_gpu else "/CPU:0"):
            tf.zeros([1]).numpy()
            ready = time.time()
            kept = tf.ones([size_bytes // 4])
            float(tf.reduce_sum(kept))
    elif framework == "jax":
        import jax

        imported = time.time()
        device = jax.devices("gpu" if on_gpu else "cpu")[0]
        jax.device_put(0.0, device).block_until_ready()
        ready = time.time()
        # Without a sum, for which XLA would try its kernels on a second array of this size, beyond the task's budget.
        kept = jax.numpy.ones(size_bytes // 4, device=device).block_until_ready()
    else:
        imported = ready = time.time()
        kept = bytearray(size_bytes)
    time.sleep(hold_s)
    del kept
    return times(line, imported, ready)


def times(line: float, imported: float, ready: float) -> dict[str, float]:
    """Return what a body tells: see `first_use`."""
    return {
        "line": line,
        "ready": ready,
        "import_s": imported - line,
        "init_s": ready - imported,
        "pid": os.getpid(),
    }


def spawned(queue: Any, *arguments: Any) -> None:
    """Run the body in a process of `multiprocessing`."""
    queue.put(first_use(*arguments))


def nothing(index: int) -> tuple[int, float, int]:
    """Note when the first line ran, and where: the body of `overhead.py`."""
    return index, time.time(), os.getpid()


def nothing_to(answers: Any, index: int) -> None:
    """Send what `nothing` returns to the parent process."""
    answers.put(nothing(index))


def import_one(framework: str) -> float:
    """Import what a GPU task would, unless it is "none"; give when the first line ran."""
    began = time.time()
    if framework != "none":
        __import__(framework)
    return began
