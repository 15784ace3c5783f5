"""PyTorch: cap, allocator options, threads, counters, out-of-memory, CUDA storages to the host.

Caps hold for PyTorch's caching allocator alone: the context, NCCL and what extensions take from the
driver escape it, which is why a cap is the budget less the context. Named `torch_adapter`, not
`torch`: a script's folder on `sys.path` must never shadow the framework.
"""

from __future__ import annotations

import gc
import math
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks import torch_trace
from prefect_gpu.frameworks.adapter import Counters, FrameworkPolicy, PeakTrace
from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory
from prefect_gpu.frameworks.values import is_named, load, loaded
from prefect_gpu.units import MIB

#: Bytes that `allocation=all` leaves of the cap. Taken whole, the first small tensor would need a
#: new 2 MiB segment over the cap, and the allocator would give up the whole cache to get it.
ALL_MARGIN_BYTES = 64 * MIB

#: Bytes to which PyTorch rounds a large block (`kRoundLarge` of its caching allocator).
LARGE_BLOCK_BYTES = 2 * MIB


#: Bytes from which a storage in host memory travels as a buffer: a whole part of a value
#: (`processes.transport.FILE_BYTES`). A smaller one PyTorch pickles itself, as one that can be resized.
LARGE_STORAGE_BYTES = 1 * MIB


class TorchAdapter:
    """PyTorch on CUDA devices; on the host only its threads are set."""

    name = "torch"
    module = "torch"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Give the allocator's variables; both names, since 2.9 renamed `PYTORCH_CUDA_ALLOC_CONF`."""
        variables: dict[str, str | None] = {}
        if policy.allocator_options:
            text = ",".join(f"{key}:{value}" for key, value in policy.allocator_options.items())
            variables["PYTORCH_ALLOC_CONF"] = text
            variables["PYTORCH_CUDA_ALLOC_CONF"] = text
        if not policy.caching:
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        elif policy.cap_bytes(self.name) is not None:
            # Inherited from a shell, it would switch the cap off without a word.
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = None
        return variables

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: bound the threads now, and the memory as soon as CUDA starts.

        CUDA is not started here, `allocation=all` apart: a body that stays on the CPU pays nothing.

        Raises:
            FrameworkError: PyTorch sees other devices than were allotted, or refuses the policy.
        """
        torch = load("torch")
        _bound_threads(torch, policy.cpus)
        if policy.device_kind != "nvml":
            return
        self._check_devices(torch, len(policy.device_uuids))
        caps = policy.cap_bytes(self.name)
        if caps is None:
            return
        if not policy.caching:
            raise FrameworkError(
                self.name,
                "gpu:caching=off disables the cap that gpu:allocation="
                f"{policy.allocation} asks for; use gpu:allocation=growth with it",
            )
        # `_lazy_call` queues until CUDA is initialised, as `torch.cuda.manual_seed` does; private,
        # but there since 1.0. In 2.13 the public setter initialises CUDA at once (0.3 s).
        torch.cuda._lazy_call(lambda: _cap_devices(torch, caps))
        if policy.allocation == "all":
            _take_all(torch, caps)

    def standby_environment(self) -> dict[str, str]:
        """Have `torch.cuda.is_available()` ask NVML: modules call it as they are imported.

        By default it initialises the driver, which fixes the devices for good. `device_count` asks
        NVML already, and neither answer is kept before CUDA starts (2.6 to 2.13).
        """
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Name what the caching allocator reads when CUDA starts; the backend is chosen at the import."""
        if name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            return _backend(before) == _backend(after)
        return name in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NVML_BASED_CUDA_CHECK")

    def heat(self) -> None:
        """Child: make the context and load cuBLAS; its workspace and the peaks are given back."""
        _heat(load("torch"))

    def applies_hot(self, name: str, before: str | None, after: str | None) -> bool:
        """Name what is read anew each time. The allocator has read all of its options."""
        return name == "PYTORCH_NVML_BASED_CUDA_CHECK"

    def apply_hot(self, policy: FrameworkPolicy) -> None:
        """Child: do nothing: once CUDA has started, `apply` caps at once."""

    def has_started(self) -> bool:
        """Child: tell whether CUDA was initialised through PyTorch."""
        return _started_cuda() is not None

    def counters(self) -> Counters | None:
        """Child: read the caching allocator's counters, summed over the devices."""
        cuda = _started_cuda()
        return None if cuda is None else _read_counters(cuda)

    def sample(self) -> tuple[int, int] | None:
        """Child: read two of the counters, without the flattening that `memory_stats` does."""
        cuda = _started_cuda()
        return None if cuda is None else _sample(cuda)

    def begin_trace(self) -> PeakTrace | None:
        """Child: have the caching allocator record what it does, if nobody does so already."""
        return None if _started_cuda() is None else torch_trace.begin_trace(load("torch"))

    def release_cached(self) -> None:
        """Child: empty the caching allocator's cache, what `allocation=all` took included."""
        cuda = _started_cuda()
        if cuda is not None:
            cuda.empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the allocator's own error, the driver's, and the libraries' that want room."""
        if is_named(error, "torch", ("OutOfMemoryError",)):
            return True
        return looks_out_of_memory(error) == self.name

    def reduce_to_host(self, value: Any) -> Any:
        """Child: copy a CUDA storage to the host, and carry a bare or a large one better than pickle.

        Storages, not tensors: tensors, views, parameters, modules and sparse tensors all reduce to
        storages, so each keeps its class, strides and `requires_grad`. A tensor wraps its storage in
        a new `TypedStorage` each time it is pickled (2.11, 2.13); reducing that to the one
        `UntypedStorage` inside keeps memory that is shared before the trip shared after it.
        """
        torch = loaded("torch")
        storage = getattr(torch, "storage", None)
        if storage is None:
            return NotImplemented
        if isinstance(value, storage.TypedStorage):
            untyped = value._untyped_storage
            if untyped.device.type != "cuda" and not _is_large(untyped):
                return NotImplemented
            return _rebuild_typed, (untyped, value.dtype)
        # On the host too: PyTorch pickles a bare storage (of a `uint16` tensor, say) so that it
        # cannot be unpickled (2.11 and 2.13: "'UntypedStorage' has no attribute 'dtype'").
        if isinstance(value, storage.UntypedStorage) and value.device.type in ("cuda", "cpu"):
            return reduce_storage(value)
        return NotImplemented

    def calibrate(self) -> int:
        """Child: load cuBLAS, cuBLASLt, cuDNN and cuFFT, empty the cache, read what stays."""
        torch = load("torch")
        return _calibrate(torch)

    def _check_devices(self, torch: Any, allotted: int) -> None:
        # Counts through NVML where it can: no context.
        found = torch.cuda.device_count()
        if found != allotted:
            why = (
                "this PyTorch is built without CUDA"
                if torch.version.cuda is None
                else "its CUDA libraries may be missing or newer than the driver"
            )
            raise FrameworkError(
                self.name,
                f"{allotted} GPU(s) allotted, {found} found: {why}; install a build for this "
                f"driver, or name what the task uses on the GPU with gpu:framework",
            )


def reduce_large(value: Any) -> Any:
    """Parent: a pickle reduction of a large storage in host memory that leaves its bytes in place.

    PyTorch's own copies them twice. CUDA storages are left to it: they arrive on a device.
    """
    storage = getattr(loaded("torch"), "storage", None)
    if storage is None:
        return NotImplemented
    if isinstance(value, storage.TypedStorage) and _is_large(value._untyped_storage):
        return _rebuild_typed, (value._untyped_storage, value.dtype)
    if isinstance(value, storage.UntypedStorage) and _is_large(value):
        return reduce_storage(value)
    return NotImplemented


def _is_large(storage: Any) -> bool:
    return storage.device.type == "cpu" and bool(storage.nbytes() >= LARGE_STORAGE_BYTES)


def reduce_storage(storage: Any) -> tuple[Any, ...]:
    """Reduce an `UntypedStorage` of any device to bytes in host memory."""
    host = storage.cpu()
    if host.nbytes() == 0:
        return _rebuild_untyped, (b"",)
    torch = load("torch")
    view = torch.empty(0, dtype=torch.uint8).set_(host)
    return _rebuild_untyped, (view.numpy(),)


def _rebuild_untyped(data: Any) -> Any:
    """Parent: a storage in host memory over `data`, bytes or a NumPy array of them.

    Of `uint8`, as PyTorch itself rebuilds an `UntypedStorage`: `_rebuild_tensor_v3` relies on it.
    """
    torch = load("torch")
    if len(data) == 0:
        return _typed(torch, torch.UntypedStorage(0), torch.uint8)
    if not data.flags.writeable:  # A buffer that travelled out of band; PyTorch has no read-only.
        data = data.copy()
    return _typed(torch, torch.from_numpy(data).untyped_storage(), torch.uint8)


def _rebuild_typed(storage: Any, dtype: Any) -> Any:
    """Parent: what `_rebuild_tensor_v2` expects, over the memory of a rebuilt storage."""
    return _typed(load("torch"), storage._untyped_storage, dtype)


def _typed(torch: Any, untyped: Any, dtype: Any) -> Any:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _backend(options: str | None) -> str:
    """Give the allocator that `PYTORCH_ALLOC_CONF` names; empty: PyTorch's own."""
    for option in (options or "").split(","):
        key, _, value = option.partition(":")
        if key.strip() == "backend" and value.strip() != "native":
            return value.strip()
    return ""


def _bound_threads(torch: Any, cpus: int) -> None:
    torch.set_num_threads(cpus)
    if torch.get_num_interop_threads() == cpus:
        return
    try:
        torch.set_num_interop_threads(cpus)
    except RuntimeError:
        # May be set once, and not after the first inter-op work: a user's own setting stands.
        pass


def _cap_devices(torch: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    for index, cap in enumerate(caps):
        # CUDA's total is below NVML's (by 0.6 GiB on an H200), and the fraction is of CUDA's.
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction_for(cap, total), index)


def fraction_for(cap_bytes: int, total_bytes: int) -> float:
    """Give the smallest fraction of `total_bytes` that PyTorch rounds down to `cap_bytes`."""
    if cap_bytes >= total_bytes:
        return 1.0
    fraction = cap_bytes / total_bytes
    while int(fraction * total_bytes) < cap_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def _take_all(torch: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    for index, cap in enumerate(caps):
        room = cap - min(ALL_MARGIN_BYTES, cap // 8)
        size = room // LARGE_BLOCK_BYTES * LARGE_BLOCK_BYTES
        try:
            block = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{index}")
        except RuntimeError as error:
            raise FrameworkError(
                "torch",
                f"gpu:allocation=all could not take {size} bytes of device {index} at the start: "
                f"{error}",
            ) from error
        # Back into the cache, not to the driver.
        del block


def _started_cuda() -> Any:
    """Give `torch.cuda` once it has been initialised, else `None`."""
    cuda = getattr(loaded("torch"), "cuda", None)
    # Half of it may be imported, by another thread.
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    return cuda


def _sample(cuda: Any) -> tuple[int, int]:  # needs a GPU
    live_bytes = retries = 0
    for index in range(cuda.device_count()):
        stats = cuda.memory_stats_as_nested_dict(index)
        live_bytes += stats["allocated_bytes"]["all"]["current"]
        retries += stats["num_alloc_retries"]
    return live_bytes, retries


def _read_counters(cuda: Any) -> Counters:  # needs a GPU
    stats = [cuda.memory_stats(index) for index in range(cuda.device_count())]

    def total(key: str) -> int:
        return sum(int(device.get(key, 0)) for device in stats)

    return Counters(
        live_bytes=total("allocated_bytes.all.current"),
        reserved_bytes=total("reserved_bytes.all.current"),
        peak_live_bytes=total("allocated_bytes.all.peak"),
        peak_reserved_bytes=total("reserved_bytes.all.peak"),
        alloc_retries=total("num_alloc_retries"),
        # The driver's own pool does not count it, and says 0.
        freed_bytes=(
            total("reserved_bytes.all.freed") if cuda.get_allocator_backend() == "native" else None
        ),
    )


def _heat(torch: Any) -> None:  # needs a GPU
    torch.cuda.init()
    a = torch.ones(256, 256, device="cuda:0")
    (a @ a).sum().item()
    torch.cuda.synchronize()
    del a
    # cuBLAS keeps up to 32 MiB of the allocator's memory; a body that never multiplies would not
    # have them. Private, but there since 1.12.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def _calibrate(torch: Any) -> int:  # needs a GPU
    functional = torch.nn.functional
    with torch.device("cuda:0"):
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.ones(512, 512, dtype=dtype, requires_grad=True)
            functional.linear(a @ a, a, a[0]).sum().backward()
            images = torch.ones(8, 16, 32, 32, dtype=dtype, requires_grad=True)
            kernel = torch.ones(16, 16, 3, 3, dtype=dtype, requires_grad=True)
            functional.conv2d(images, kernel, padding=1).sum().backward()
        torch.fft.rfft2(torch.ones(64, 64)).abs().sum().item()
    torch.cuda.synchronize()
    del a, images, kernel
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(0))
