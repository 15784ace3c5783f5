"""What a task can do itself when device memory is short: give back what is cached, ask for less.

    size = find_batch_size(train_one_step, start=256)
    freed_bytes = release_cached()

Both act on the process that calls them, and work outside a GPU task too. What happens when a body
fails for want of memory is not decided here: see `scheduling.ladder`.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Mapping

from prefect_gpu import inside
from prefect_gpu.devices.own import OwnMemory
from prefect_gpu.frameworks.adapter import FrameworkAdapter
from prefect_gpu.frameworks.out_of_memory import causes
from prefect_gpu.frameworks.registry import ADAPTERS

#: Gives what the driver shows for this process, in bytes by device UUID; without those it tells
#: nothing of.
ReadOwn = Callable[[], Mapping[str, int]]


def release_cached() -> int:
    """Give the memory that frameworks keep for later back to the driver, in the right order.

    First what only garbage still holds, then the frameworks' caches, then what those held. Tensors
    that the program can still reach stay. PyTorch and CuPy give their caches back; JAX gives back
    little, and compiles its programs anew; TensorFlow and ONNX Runtime give nothing.

    Returns:
        Bytes that the driver shows less for this process, over the task's devices; 0 outside a GPU
        task, where the driver does not tell, and where nothing came back.
    """
    return release(ADAPTERS.values(), _read_own)


def release(adapters: Iterable[FrameworkAdapter], read_own: ReadOwn) -> int:
    """Do what `release_cached` does, with these frameworks and this reading of the driver."""
    before = read_own()
    gc.collect()
    for adapter in adapters:
        if adapter.module in sys.modules:
            adapter.release_cached()
    gc.collect()
    after = read_own()
    return sum(max(0, size - after.get(uuid, size)) for uuid, size in before.items())


def find_batch_size(fn: Callable[[int], object], start: int, *, least: int = 1) -> int:
    """Find a batch size that fits, by trying `start`, its half, and so on.

    In the second process of a task run the first try is half of `start`, in the third a quarter: what
    did not fit before need not be tried again. Caches are given back between two tries.

    Args:
        fn: Does with a batch of that size what the task will do with each: a whole training step, not
            the forward pass alone. What it returns is thrown away.
        start: The largest size to try.
        least: The smallest: the last try, whatever the halves.

    Returns:
        The first size for which `fn` did not run out of device memory.

    Raises:
        ValueError: `start` or `least` is no whole number, or not 1 <= least <= start.
        BaseException: What `fn` raised: any other error, or the out-of-memory of `least`.
    """
    for name, size in (("start", start), ("least", least)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} is no batch size; a whole number from 1 on is")
    if least > start:
        raise ValueError(f"least={least} is more than start={start}")
    allocation = inside.current_allocation()
    attempt = 1 if allocation is None else allocation.attempt
    # What the caller is just handling becomes the context of whatever `fn` raises.
    handled = sys.exc_info()[1]
    size = max(least, start >> (attempt - 1))
    while True:
        try:
            fn(size)
            return size
        except Exception as error:
            if size == least or not _says_out_of_memory(error, handled):
                raise
        # Out here the error is gone, and with it the frames that hold what `fn` allocated.
        release_cached()
        size = max(least, size // 2)


def _says_out_of_memory(error: BaseException, handled: BaseException | None) -> bool:
    for cause in causes(error, until=handled):
        try:
            # Simulated devices mark theirs.
            if getattr(cause, "__prefect_gpu_out_of_memory__", False):
                return True
            if any(adapter.is_out_of_memory(cause) for adapter in ADAPTERS.values()):
                return True
        except Exception:  # noqa: BLE001
            # An error of the user's whose own text or attributes raise: none.
            continue
    return False


def _read_own() -> dict[str, int]:
    allocation = inside.current_allocation()
    if allocation is None:
        return {}
    uses = _own_memory(allocation.device_uuids).read()
    return {u.device_uuid: u.process_bytes for u in uses if u.process_bytes is not None}


@functools.cache
def _own_memory(device_uuids: tuple[str, ...]) -> OwnMemory:
    # Opening the driver takes tens of milliseconds.
    return OwnMemory(device_uuids)
