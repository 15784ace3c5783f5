"""What children do in `test_late_policy`. The frameworks are imported by name, as a task would."""

from __future__ import annotations

import os
from typing import Any

from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory


def devices(framework: str) -> tuple[str, int]:
    """The only device's UUID as the environment has it, and how many the framework sees."""
    if framework == "torch":
        import torch

        torch.ones(1, device="cuda")
        count = torch.cuda.device_count()
    elif framework == "tensorflow":
        import tensorflow as tf

        count = len(tf.config.list_physical_devices("GPU"))
    elif framework == "jax":
        import jax

        count = len(jax.devices("gpu"))
    else:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    return os.environ["CUDA_VISIBLE_DEVICES"], count


def fill(framework: str, sizes: tuple[int, ...]) -> list[str]:
    """Allocate each size in turn and return the results."""
    found = []
    for size in sizes:
        try:
            _take(framework, size)
            found.append("had")
        except Exception as error:
            found.append("out of memory" if looks_out_of_memory(error) else repr(error))
    return found


def _take(framework: str, size_bytes: int) -> Any:
    if framework == "torch":
        import torch

        # Not a sum of it, which PyTorch makes of a copy eight times as large.
        return torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")[0].item()
    if framework == "tensorflow":
        import tensorflow as tf

        with tf.device("GPU:0"):
            return tf.zeros([size_bytes // 4], tf.float32)[0].numpy()
    if framework == "jax":
        import jax.numpy as jnp

        return float(jnp.zeros(size_bytes // 4, jnp.float32).block_until_ready()[0])
    import cupy

    return float(cupy.zeros(size_bytes // 4, cupy.float32)[0])


def driver_shows(framework: str, size_bytes: int) -> int:
    """Bytes that NVML shows for this process after an allocation."""
    _take(framework, size_bytes)
    from prefect_gpu.devices.own import OwnMemory

    (use,) = OwnMemory((os.environ["CUDA_VISIBLE_DEVICES"],)).read()
    assert use.process_bytes is not None
    return use.process_bytes


def allocator_settings() -> dict[str, Any]:
    import torch

    torch.ones(1, device="cuda")
    settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return {name: str(value) for name, value in settings.items()}


def allocator_backend() -> str:
    import torch

    torch.ones(1, device="cuda")
    return str(torch.cuda.get_allocator_backend())


def reserved_after_free() -> int:
    import torch

    tensor = torch.ones(1 << 24, device="cuda")
    del tensor
    return int(torch.cuda.memory_reserved())


def asked_at_import() -> tuple[bool, int, str]:
    import torch

    from tests.gpu import late_asks

    return late_asks.AVAILABLE, torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"]
