"""The PyTorch adapter: cap, allocator options, threads, counters, traces of allocations, copies of storages to NumPy.

A cap holds for PyTorch's caching allocator alone. The context, NCCL and extensions take memory from the driver
directly, so a cap is the budget minus the context.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any

from prefect_gpu.errors import FrameworkError
from prefect_gpu.frameworks.adapter import (
    ALLOCATOR_VARIABLES,
    SUBPROCESS_CAP,
    CaptureWatch,
    Counters,
    EndTrace,
    FrameworkAdapter,
    FrameworkPolicy,
    framework_version,
    imported,
    options_without,
)
from prefect_gpu.units import MIB

#: Bytes of the cap that `allocation=all` leaves free for the 2 MiB segment of the first small tensor. Above the cap
#: the allocator would free the whole cache for this segment.
ALL_MARGIN_BYTES = 64 * MIB

#: Bytes to which PyTorch rounds a large block (`kRoundLarge` of its caching allocator).
LARGE_BLOCK_BYTES = 2 * MIB

#: Least bytes of a host storage that is pickled as a buffer, as `values.transport.FILE_BYTES`. PyTorch itself pickles
#: a smaller storage, which can then be resized.
LARGE_STORAGE_BYTES = 1 * MIB

#: First release of PyTorch seen to know `per_process_memory_fraction`. Older ones refuse unknown options.
SUBPROCESS_CAP_VERSION = (2, 11)

#: Most events of each device in a trace; a block has three. Reading 150 takes 0.5 ms, 20,000 take 8 ms (H200, PyTorch
#: 2.11, 2026-11-21). A step with more events has no traced peak.
MAX_EVENTS = 50_000

#: Most events of each device in a snapshot, as in PyTorch's own examples: 6 MiB of file (PyTorch 2.11).
HISTORY_EVENTS = 100_000

#: Bytes to which the allocator rounds a block (`kMinBlockSize`); a trace has the requested size.
BLOCK_BYTES = 512

#: Functions in `torch._C` that switch recording on and off. All public functions for this call one of them.
_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")

_captures = CaptureWatch()


class TorchAdapter(FrameworkAdapter):
    """Applies a policy to PyTorch: memory on CUDA devices, and the number of threads, on the host, too."""

    name = "torch"

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the variables of PyTorch's allocator; its options under the old and the new name."""
        variables: dict[str, str | None] = {}
        if policy.allocator_options:
            text = ",".join(f"{key}:{value}" for key, value in policy.allocator_options.items())
            variables |= dict.fromkeys(ALLOCATOR_VARIABLES, text)
        if not policy.caching:
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        elif policy.cap_bytes(self.name) is not None:
            # If inherited from a shell, this variable would switch the cap off silently.
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = None
        return variables

    def cap_subprocesses(self, policy: FrameworkPolicy, environ: MutableMapping[str, str]) -> None:
        """Cap the processes that the body starts (`torchrun`, `multiprocessing`), by an option of the allocator.

        The option is one fraction for all devices, the smallest. The child itself has the exact caps of
        `_cap_devices`.
        """
        fraction = policy.cap_fraction(self.name)
        if fraction is None or not policy.caching or _installed_version() < SUBPROCESS_CAP_VERSION:
            return
        environ[SUBPROCESS_CAP] = option = f"per_process_memory_fraction:{fraction:.6f}"
        # PyTorch reads the first variable that is set.
        names = [name for name in ALLOCATOR_VARIABLES if name in environ]
        for name in names or ALLOCATOR_VARIABLES[-1:]:
            environ[name] = ",".join([*options_without(option, environ.get(name, "")), option])

    def apply(self, policy: FrameworkPolicy) -> None:
        """Set the threads now, and the cap when CUDA starts. Only `allocation=all` starts CUDA here."""
        torch = import_module("torch")
        _bound_threads(torch, policy.cpus)
        if policy.device_kind != "nvml":
            return
        # `device_count` asks NVML, without a context.
        why = (
            "this PyTorch is built without CUDA"
            if torch.version.cuda is None
            else "its CUDA libraries may be missing or newer than the driver"
        )
        self.check_devices(
            policy,
            torch.cuda.device_count(),
            f": {why}; install a build for this driver, or name what the task uses on the GPU with gpu:framework",
        )
        _watch_captures(torch)
        if policy.snapshot_path:
            torch.cuda._lazy_call(lambda: record_history(torch))
        caps = policy.cap_bytes(self.name)
        if caps is None:
            return
        if not policy.caching:
            raise FrameworkError(
                self.name,
                "gpu:caching=off disables the cap that gpu:allocation="
                f"{policy.allocation} asks for; use gpu:allocation=growth with it",
            )
        # `_lazy_call` queues until CUDA is initialised, as `torch.cuda.manual_seed` does; private, but there since 1.0.
        # In 2.13 the public setter initialises CUDA at once (0.3 s).
        torch.cuda._lazy_call(lambda: _cap_devices(torch, caps))
        # The body may have set options of its own before it imported PyTorch.
        self.cap_subprocesses(policy, os.environ)
        if policy.allocation == "all":
            _take_all(torch, caps)

    def standby_environment(self) -> dict[str, str]:
        """Return the variable that makes `torch.cuda.is_available()` ask NVML: modules call this function at import.

        By default the call initialises the driver, which fixes the devices. `device_count` always asks NVML, and
        neither answer is cached before CUDA starts (2.6 to 2.13).
        """
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Return whether PyTorch reads a variable when CUDA starts. The allocator's backend is chosen at the import."""
        if name in ALLOCATOR_VARIABLES:
            return _backend(before) == _backend(after)
        return name in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NVML_BASED_CUDA_CHECK")

    def started(self) -> Any:
        """Return the module `torch.cuda` once CUDA has been initialised, else `None`."""
        torch = imported("torch", "cuda")
        # Another thread may be importing PyTorch.
        if torch is None or not hasattr(torch.cuda, "is_initialized"):
            return None
        return torch.cuda if torch.cuda.is_initialized() else None

    def counters(self) -> Counters | None:
        """Return the caching allocator's counters, summed over the devices; `None`: CUDA has not started."""
        cuda = self.started()
        if cuda is None:
            return None
        # Not `memory_stats`, which flattens the result: a thread reads it every few milliseconds.
        stats = [cuda.memory_stats_as_nested_dict(i) for i in range(cuda.device_count())]

        def total(kind: str, which: str) -> int:
            return sum(int(device[kind]["all"][which]) for device in stats if device)

        return Counters(
            live_bytes=total("allocated_bytes", "current"),
            reserved_bytes=total("reserved_bytes", "current"),
            peak_live_bytes=total("allocated_bytes", "peak"),
            peak_reserved_bytes=total("reserved_bytes", "peak"),
            alloc_retries=sum(int(device["num_alloc_retries"]) for device in stats if device),
            # The backend `cudaMallocAsync` does not count freed bytes, and reports 0.
            freed_bytes=total("reserved_bytes", "freed") if _is_native(cuda) else None,
        )

    def begin_trace(self) -> EndTrace | None:
        """Begin to record the caching allocator's allocations; `None`: CUDA has not started, or the body records."""
        return begin_trace(import_module("torch")) if self.has_started() else None

    def memory_summary(self) -> str:
        """Return `torch.cuda.memory_summary()` of each device; empty: CUDA has not started."""
        cuda = self.started()
        if cuda is None:
            return ""
        return "\n".join(cuda.memory_summary(index) for index in range(cuda.device_count()))

    def write_snapshot(self, path: str) -> bool:
        """Write `torch.cuda.memory._dump_snapshot()`, private but documented; `False`: CUDA has not started."""
        cuda = self.started()
        if cuda is None:
            return False
        cuda.memory._dump_snapshot(path)
        return True

    def release_cached(self) -> None:
        """Empty the caching allocator's cache, including the memory of `allocation=all`."""
        cuda = self.started()
        if cuda is not None:
            cuda.empty_cache()

    def release_unused(self) -> None:
        """Empty the caching allocator's cache, unless a CUDA graph is being captured.

        Captures are counted, since `empty_cache` depends on the release during a capture on another thread: it raises,
        or does nothing (pytorch/pytorch#158152, #182062), or may check the calling thread's stream alone (#175374). If
        it raises (also within `torch.cuda.use_mem_pool`), nothing was released. A captured graph's blocks are in a
        pool of their own, which is not emptied. `cudaMallocAsync` is left alone: it would first wait for the whole
        device, which invalidates captures.
        """
        cuda = self.started()
        if cuda is None or not _is_native(cuda):
            return
        with _captures.none_begins() as none_is:
            if none_is:
                cuda.empty_cache()

    def reduce_to_host(self, value: Any) -> Any:
        """Return a pickle reduction of a storage; `NotImplemented`: a small typed storage on the host, or another value.

        Tensors, views, parameters, modules and sparse tensors are pickled with their storages. Reducing only storages
        keeps their class, strides and `requires_grad`. A tensor wraps its storage in a new `TypedStorage` each time it
        is pickled (2.11, 2.13). Reducing the wrapper to the `UntypedStorage` inside keeps shared memory shared.
        """
        # On the host, too, if untyped: PyTorch pickles a `uint16` tensor's storage so that it cannot be unpickled
        # (2.11 and 2.13: "'UntypedStorage' has no attribute 'dtype'").
        return reduce_large(value, typed_on=("cuda",), untyped_on=("cuda", "cpu"))

    def calibrate(self) -> int:
        """Load cuBLAS, cuBLASLt, cuDNN and cuFFT, empty the cache, and return the bytes that are still held."""
        torch = import_module("torch")
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


def reduce_large(value: Any, typed_on: Sequence[str] = (), untyped_on: Sequence[str] = ()) -> Any:
    """Return a pickle reduction of a large host storage without a copy, or `NotImplemented`; PyTorch's own copies twice.

    A storage on a device type that is named for its class is reduced, too. The parent process names none: its CUDA
    storages arrive on a device.
    """
    torch = imported("torch", "storage")
    if torch is None:
        return NotImplemented
    if isinstance(value, torch.storage.TypedStorage):
        untyped = value._untyped_storage
        if untyped.device.type in typed_on or _is_large(untyped):
            return _rebuild_typed, (untyped, value.dtype)
    elif isinstance(value, torch.storage.UntypedStorage):
        if value.device.type in untyped_on or _is_large(value):
            return reduce_storage(value)
    return NotImplemented


def reduce_compiled(value: Any) -> Any:
    """Return a pickle reduction of a compiled or scripted function, scripted module or operator, or `NotImplemented`.

    Functions are compiled again from their original functions. Operators are pickled by name.
    """
    if type(value).__module__ == "torch._ops":
        # First: `torch.ops` has an attribute of every name.
        return _reduce_operator(value)
    original = getattr(value, "_torchdynamo_orig_callable", None)
    if original is not None:
        variables = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        context, backend = (
            variables[n].cell_contents if n in variables else None for n in ("self", "callback")
        )
        while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
            backend = inner
        options = {
            "backend": backend or "inductor",
            "fullgraph": bool(getattr(context, "fullgraph", False)),
            "dynamic": getattr(context, "_dynamic", None),
        }
        return _call, ("compile", (original,), options)
    if type(value).__name__.endswith("ScriptFunction"):
        original = getattr(value, "_torchdynamo_inline", None)
        return NotImplemented if original is None else (_call, ("jit.script", (original,), {}))
    if type(value).__name__ == "RecursiveScriptModule":
        buffer = io.BytesIO()
        import_module("torch").jit.save(value, buffer)
        return _load_scripted, (buffer.getvalue(),)
    return NotImplemented


def _reduce_operator(value: Any) -> Any:
    schema = getattr(value, "_schema", None)
    name = str(getattr(value, "_qualified_op_name", "") or getattr(schema, "name", ""))
    names = {
        "_Ops": (),
        "_OpNamespace": (getattr(value, "name", ""),),
        "OpOverloadPacket": tuple(name.split("::")),
        "OpOverload": (*name.split("::"), getattr(value, "_overloadname", "")),
    }.get(type(value).__name__)
    return NotImplemented if names is None else (_find, ("ops", *names))


def _find(*names: str) -> Any:
    # A namespace of operators may have a dot in its name.
    return functools.reduce(getattr, names, import_module("torch"))


def _call(path: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _find(*path.split("."))(*arguments, **options)


def _load_scripted(data: bytes) -> Any:
    return import_module("torch").jit.load(io.BytesIO(data), map_location="cpu")


def _is_large(storage: Any) -> bool:
    return storage.device.type == "cpu" and bool(storage.nbytes() >= LARGE_STORAGE_BYTES)


def reduce_storage(storage: Any) -> tuple[Any, ...]:
    """Return a pickle reduction of an `UntypedStorage` on any device to bytes in host memory."""
    host = storage.cpu()
    if host.nbytes() == 0:
        return _rebuild_untyped, (b"",)
    torch = import_module("torch")
    view = torch.empty(0, dtype=torch.uint8).set_(host)
    return _rebuild_untyped, (view.numpy(),)


def _rebuild_untyped(data: Any) -> Any:
    """Return a storage in host memory over bytes or a NumPy array of bytes."""
    # `uint8`, as PyTorch rebuilds an `UntypedStorage`: `_rebuild_tensor_v3` relies on it.
    torch = import_module("torch")
    if len(data) == 0:
        return _typed(torch, torch.UntypedStorage(0), torch.uint8)
    if not data.flags.writeable:  # An out-of-band buffer; PyTorch has no read-only storages.
        data = data.copy()
    return _typed(torch, torch.from_numpy(data).untyped_storage(), torch.uint8)


def _rebuild_typed(storage: Any, dtype: Any) -> Any:
    """Return a `TypedStorage`, as `_rebuild_tensor_v2` expects, over the memory of a rebuilt storage."""
    return _typed(import_module("torch"), storage._untyped_storage, dtype)


def _typed(torch: Any, untyped: Any, dtype: Any) -> Any:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _backend(options: str | None) -> str:
    """Return the backend in a value of `PYTORCH_ALLOC_CONF`; empty: PyTorch's own."""
    for option in (options or "").split(","):
        key, _, value = option.partition(":")
        if key.strip() == "backend" and value.strip() != "native":
            return value.strip()
    return ""


def _bound_threads(torch: Any, cpus: int) -> None:
    torch.set_num_threads(cpus)
    if torch.get_num_interop_threads() != cpus:
        # This number may be set only once, before the first inter-op work: a user's own setting stays.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(cpus)


def _watch_captures(torch: Any) -> None:
    # PyTorch 2.13 has the second class, which does not use the first.
    owners = (torch.cuda, "CUDAGraph"), (getattr(torch, "accelerator", None), "Graph")
    for module, name in owners:
        if (owner := getattr(module, name, None)) is not None:
            _captures.watch(owner, "capture_begin", "capture_end")


def _cap_devices(torch: Any, caps: tuple[int, ...]) -> None:  # needs a GPU
    for index, cap in enumerate(caps):
        # CUDA's total is below NVML's (by 0.6 GiB on an H200), and the fraction is of CUDA's.
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction_for(cap, total), index)


def _installed_version() -> tuple[int, ...]:
    """Return the first two numbers of PyTorch's version, importing nothing; empty: not installed."""
    loaded = imported("torch", "__version__")
    text = framework_version("torch") if loaded is None else loaded.__version__
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def fraction_for(cap_bytes: int, total_bytes: int) -> float:
    """Return the smallest fraction of `total_bytes` that PyTorch rounds down to `cap_bytes`."""
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
            taken = f"{size} bytes of device {index} at the start"
            problem = f"gpu:allocation=all could not take {taken}: {error}"
            raise FrameworkError("torch", problem) from error
        # The memory returns to the cache, not to the driver.
        del block


def _is_native(cuda: Any) -> bool:
    return bool(cuda.get_allocator_backend() == "native")


#: Whether this process has begun to record for a snapshot at an out-of-memory. The body may have stopped this.
_records_history = False


def record_history(torch: Any) -> None:
    """Start PyTorch's record of allocations and stacks, once CUDA has started. Never raises: a body can do without."""
    global _records_history
    try:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=HISTORY_EVENTS
        )
        _records_history = True
    except Exception as error:  # noqa: BLE001 - the driver's own pool cannot record
        sys.stderr.write(f"prefect_gpu: PyTorch does not record for snapshots: {error!r}\n")


def peak_bytes(live_bytes: int, events: Sequence[Mapping[str, Any]], since_us: int = 0) -> int:
    """Return the peak of allocated bytes on one device, from the events of its trace, oldest first.

    The events are followed back from the end, where `live_bytes` are allocated, to `since_us` (microseconds since the
    epoch). Counters fall when a block is freed, not when the device has finished with it, so "free_requested" counts.
    A block from the cache may be larger than requested, by less than 1 MiB, which no event shows.
    """
    peak = now = live_bytes
    for event in reversed(events):
        if since_us and event["time_us"] < since_us:
            break
        sign = {"alloc": -1, "free_requested": 1}.get(event["action"])
        if sign is not None:
            now += sign * -(-event["size"] // BLOCK_BYTES) * BLOCK_BYTES
            peak = max(peak, now)
    return peak


def begin_trace(torch: Any) -> EndTrace | None:
    """Begin to record PyTorch's allocations; `None`: the body records itself, or the allocator cannot.

    CUDA must have started. Samples miss memory that is freed within a few milliseconds. The allocator's own peak
    covers the whole life of the process, and only the body may reset it. The allocator's trace has every event and
    resets nothing. If PyTorch records for a snapshot, the trace is the newest part of that record.
    """
    trace = None
    try:
        is_on = torch._C._cuda_isHistoryEnabled()
        if is_on and not _records_history:
            return None
        trace = TorchTrace(torch, shared=is_on)
        trace.begin()
    except Exception:  # noqa: BLE001 - a trace must not fail the body
        if trace is not None:
            trace.stop()
        return None
    return trace.end


class TorchTrace:
    """A running trace of PyTorch's allocations. It never switches off a recording that the body has started.

    `shared`: PyTorch already records for a snapshot, and continues afterwards.
    """

    def __init__(self, torch: Any, shared: bool) -> None:
        self._core = torch._C
        self._cuda = torch.cuda
        #: Start of the trace in microseconds since the epoch, if the record has older events; else 0.
        self._since_us = time.time_ns() // 1000 if shared else 0
        #: Whether the body has switched recording on or off.
        self._taken_over = False
        #: Replacement and original of each switch in `torch._C`, by name.
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Start to record without stacks, and notice from now on whether the body switches recording."""
        if not self._since_us:
            # Takes 20 µs. The record is empty: the end of an earlier recording has cleared it.
            self._cuda.memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS
            )
        for name in _SWITCHES:
            switch = getattr(self._core, name, None)
            if switch is not None:
                stand_in = self._stand_in(switch)
                self._replaced[name] = stand_in, switch
                setattr(self._core, name, stand_in)

    def end(self) -> int | None:
        """Stop the trace, and return the sum of the devices' peaks of allocated bytes. Never raises.

        The peaks need not coincide, so the sum may be too large, never too small. `None`: too many events, a recording
        of the body, or other rounding of blocks (`roundup_power2_divisions`).
        """
        try:
            return self._peak_bytes() if self._is_ours() else None
        except Exception:  # noqa: BLE001 - a trace must not fail the body
            return None
        finally:
            # Last, since stopping empties the trace.
            self.stop()

    def stop(self) -> None:
        """Stop the trace, and restore PyTorch's functions. Never raises."""
        with contextlib.suppress(Exception):
            for name, (stand_in, switch) in self._replaced.items():
                # The body may have replaced the switch too.
                if getattr(self._core, name) is stand_in:
                    setattr(self._core, name, switch)
            self._replaced.clear()
            if not self._since_us and self._is_ours():
                self._cuda.memory._record_memory_history(enabled=None)

    def _is_ours(self) -> bool:
        return not self._taken_over and bool(self._core._cuda_isHistoryEnabled())

    def _stand_in(self, switch: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._taken_over = True
            return switch(*args, **kwargs)

        return noticed

    def _peak_bytes(self) -> int | None:
        live_bytes = [
            int(self._cuda.memory_stats_as_nested_dict(i)["allocated_bytes"]["all"]["current"])
            for i in range(self._cuda.device_count())
        ]
        snapshot = self._cuda.memory._snapshot()
        rounding = snapshot.get("allocator_settings", {}).get("roundup_power2_divisions", {})
        if any(int(divisions) > 1 for divisions in rounding.values()):
            return None
        traces = snapshot["device_traces"]
        if not all(map(self._is_whole, traces)):
            return None
        # An unused device may have no trace.
        traces = [*traces, *([()] * (len(live_bytes) - len(traces)))]
        return sum(
            peak_bytes(live, events, self._since_us)
            for live, events in zip(live_bytes, traces, strict=True)
        )

    def _is_whole(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the trace has all events since its start."""
        if self._since_us:
            return not events or bool(events[0]["time_us"] < self._since_us)
        return len(events) < MAX_EVENTS
