"""Functions for a task's body that is short of device memory: release caches, find a batch size, write a snapshot.

    size = find_batch_size(train_one_step, start=256)
    freed_bytes = release_cached()
    memory_snapshot("after-setup.pickle")

All functions act on the calling process, and work outside a GPU task, too.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable

from prefect_gpu import in_task
from prefect_gpu.devices.own import OwnMemory
from prefect_gpu.frameworks.out_of_memory import find_out_of_memory
from prefect_gpu.frameworks.registry import ADAPTERS


def release_cached() -> int:
    """Release the cached memory of all imported frameworks to the driver.

    Garbage is collected, caches are emptied, and garbage is collected again. Reachable tensors stay. PyTorch and CuPy
    free their caches. JAX frees little, and compiles its programs again. TensorFlow and ONNX Runtime free nothing.

    Returns:
        Bytes that became free on the task's devices, by the driver's figure for this process; 0 outside a GPU task, or
        if the driver reports no figure.
    """
    before = _read_own()
    gc.collect()
    for adapter in ADAPTERS.values():
        if adapter.name in sys.modules:
            adapter.release_cached()
    gc.collect()
    after = _read_own()
    return sum(max(0, size - after.get(uuid, size)) for uuid, size in before.items())


def memory_snapshot(path: str | os.PathLike[str]) -> bool:
    """Write PyTorch's memory snapshot to a new or existing file, to be opened at https://pytorch.org/memory_viz.

    The file has each segment and block of PyTorch's allocator on all devices of the process. If PyTorch records its
    allocations, the file also has their history with stacks: call `torch.cuda.memory._record_memory_history()` first,
    or use `GPUTaskRunner(memory_snapshots=...)`, which also writes a snapshot when a body fails with an out-of-memory.

    Returns:
        `False`: PyTorch has not used CUDA in this process, and nothing was written.

    Raises:
        OSError: The file cannot be written.
    """
    return ADAPTERS["torch"].write_snapshot(os.fspath(path))


def find_batch_size(fn: Callable[[int], object], start: int, *, least: int = 1) -> int:
    """Return the first batch size that fits on the device: `start`, half of it, and so on.

    The second process of a task run starts with half of `start`, the third with a quarter: sizes that did not fit are
    not tried again. Caches are emptied between two tries. A size fits if `fn` does not run out of device memory.

    Args:
        fn: Called with a batch size; its result is ignored. It does the task's work: a whole training step, not the
            forward pass alone.
        start: The largest size to try.
        least: The smallest size, which is tried last.

    Raises:
        ValueError: `start` or `least` is no whole number, or not 1 <= least <= start.
        BaseException: Any other error of `fn`, or its out-of-memory with `least`.
    """
    for name, size in (("start", start), ("least", least)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} is no batch size; a whole number from 1 on is")
    if least > start:
        raise ValueError(f"least={least} is more than start={start}")
    allocation = in_task.current_allocation()
    attempt = 1 if allocation is None else allocation.attempt
    # An error that the caller is handling becomes the context of errors of `fn`.
    handled = sys.exc_info()[1]
    size = max(least, start >> (attempt - 1))
    while True:
        try:
            fn(size)
            return size
        except Exception as error:
            if size == least or find_out_of_memory(error, until=handled) is None:
                raise
        # Outside the handler the error is gone, and with it the frames that hold `fn`'s tensors.
        release_cached()
        size = max(least, size // 2)


def _read_own() -> dict[str, int]:
    allocation = in_task.current_allocation()
    if allocation is None:
        return {}
    uses = _own_memory(allocation.device_uuids).read()
    return {u.device_uuid: u.process_bytes for u in uses if u.process_bytes is not None}


@functools.cache
def _own_memory(device_uuids: tuple[str, ...]) -> OwnMemory:
    # Opening the driver takes tens of milliseconds.
    return OwnMemory(device_uuids)
