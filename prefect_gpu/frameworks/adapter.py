"""The base class of framework adapters, the policy that they apply, and a child's environment variables.

An adapter applies the policy of a GPU task to one framework in the task's child process. `registry` lists adapters.
This module does not read its own process's environment. `tests/gpu/test_late_policy.py` shows on real devices which
variables may change after a framework's import.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from prefect_gpu.errors import FrameworkError
from prefect_gpu.scheduling.model import DeviceKind

#: Thread numbers of OpenMP, MKL, OpenBLAS, NumExpr, Accelerate and TensorFlow, which read them when they load.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

#: All variables with a number of threads (`NPROC`: XLA's). Most are read when a library loads.
CPU_VARIABLES = frozenset({*THREAD_VARIABLES, "NPROC"})

#: For frameworks that no tag names. By default TensorFlow takes all memory of a device, JAX three quarters.
MODEST_DEFAULTS = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

#: Variables with options of PyTorch's allocator. PyTorch 2.9 renamed the first to the second.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: Distribution packages of each framework; the first installed one gives the version.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "jax": ("jax",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
}

#: Variable of a child: the allocator option that caps its body's processes, except GPU tasks (with own budgets).
SUBPROCESS_CAP = "PREFECT_GPU_SUBPROCESS_CAP"


def child_environment(
    policy: FrameworkPolicy, adapters: Iterable[FrameworkAdapter], inherited: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables to change in a child's inherited environment, devices always; `None`: remove one."""
    wanted: dict[str, str | None] = dict.fromkeys(THREAD_VARIABLES, str(policy.cpus))
    if policy.device_kind == "nvml":
        if policy.frameworks != ("none",):
            wanted.update(MODEST_DEFAULTS)
        devices = ",".join(policy.device_uuids)
    else:
        # A task on a host or simulated device must not use a GPU.
        devices = ""
    if option := inherited.get(SUBPROCESS_CAP):
        wanted[SUBPROCESS_CAP] = None
        for name in ALLOCATOR_VARIABLES:
            wanted[name] = ",".join(options_without(option, inherited.get(name, ""))) or None
    for adapter in adapters:
        wanted.update(adapter.environment(policy))
        for name, value in adapter.default_environment.items():
            wanted[name] = inherited.get(name, value)
    changed = {name: value for name, value in wanted.items() if inherited.get(name) != value}
    return {
        **changed,
        "CUDA_VISIBLE_DEVICES": devices,
        # Indices of devices then follow NVML's order.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def options_without(option: str, text: str) -> list[str]:
    """Return the options in `text`, the comma-separated value of an allocator variable of PyTorch, except `option`."""
    return [part for part in text.split(",") if part not in ("", option)]


def late_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    adapters: Collection[FrameworkAdapter],
    *,
    cpus_stated: bool,
) -> dict[str, str | None] | None:
    """Return the variables to change in a process that has imported its modules; `None`: a change comes too late.

    `before` is the environment at the imports, `after` the one that the task needs; a value of `None` removes a
    variable. A number of threads that no tag states (`cpus_stated`) may change late: frameworks with a call for it
    follow it.
    """
    changes: dict[str, str | None] = {}
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        late = _applies_late(name, old) or any(a.applies_late(name, old, new) for a in adapters)
        if not late and (cpus_stated or name not in CPU_VARIABLES):
            return None
        changes[name] = new
    return changes


def _applies_late(name: str, old: str | None) -> bool:
    """Return whether a variable that belongs to no framework may change after the imports."""
    if name == "CUDA_VISIBLE_DEVICES":
        # The driver reads the variable at its start. A module that found no device at import may have chosen the CPU.
        return old is None or old.strip() not in ("", "-1", "NoDevFiles")
    # Prefect's settings are sent with the run, and take precedence over the environment. pytest tells in a variable of
    # its own which test runs.
    # The driver reads those of MPS at its start.
    late = ("CUDA_DEVICE_ORDER", "PYTEST_CURRENT_TEST")
    return name in late or name.startswith(("PREFECT_", "CUDA_MPS_"))


AllocationMode = Literal["limit", "growth", "all"]


@dataclass(frozen=True, slots=True)
class FrameworkPolicy:
    """Devices, budgets and allocator settings for all frameworks of one child process. Sent to the child."""

    #: Caps hold on "nvml"; on "host" a framework runs on the CPU without a cap.
    device_kind: DeviceKind
    #: UUIDs of the task's devices, in the order in which the task sees them.
    device_uuids: tuple[str, ...]
    #: Total memory of each device, in bytes.
    total_bytes: tuple[int, ...]
    #: Memory that the task may take of each device, in bytes, CUDA context included.
    budget_bytes: tuple[int, ...]
    #: CUDA context in bytes by framework name, which a cap leaves out; missing: 0.
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    #: "limit": cap at budget − context. "growth": no cap. "all": the same cap, taken whole at the start.
    allocation: AllocationMode = "growth"
    #: Whether capped frameworks take memory on demand, if they can: for first runs, whose memory need is unknown.
    on_demand: bool = False
    #: Options of PyTorch's allocator, `{"max_split_size_mb": "128"}`.
    allocator_options: Mapping[str, str] = field(default_factory=dict)
    #: `False`: PyTorch's caching allocator is switched off.
    caching: bool = True
    #: CPU threads that the frameworks may start, at least 1.
    cpus: int = 1
    #: Whether a tag states `cpus`; otherwise it was computed from the machine.
    cpus_stated: bool = False
    #: Names of the frameworks that tags name; empty: no tag names one.
    frameworks: tuple[str, ...] = ()
    #: Names of the frameworks that detection found, if tags name none.
    detected: tuple[str, ...] = ()
    #: Fraction of the budget by framework, from `gpu:framework=torch:70%`. Others share the rest equally.
    shares: Mapping[str, float] = field(default_factory=dict)
    #: File for PyTorch's snapshot at an out-of-memory; empty: PyTorch does not record its allocations.
    snapshot_path: str = ""

    def share(self, framework: str) -> float:
        """Return the fraction of each budget that a framework may use.

        The fractions of the expected frameworks (named by tags, else detected) add up to at most 1. Any other
        framework gets the rest or, without a rest, the whole budget: detection can be wrong, and a framework without
        memory fails. All frameworks together may then exceed the budget, which the driver's readings show.
        """
        if framework in self.shares:
            return self.shares[framework]
        expected = self.frameworks or self.detected
        open_ended = [name for name in expected if name not in self.shares]
        # Rounded: 1 − (0.6 + 0.3 + 0.1) is 1e-16.
        rest = max(0.0, round(1.0 - sum(self.shares.values()), 6))
        if framework in open_ended:
            return rest / len(open_ended)
        return 1.0 if open_ended else rest or 1.0

    def cap_bytes(self, framework: str) -> tuple[int, ...] | None:
        """Return the bytes on each device that a framework's allocator may take; `None`: no cap."""
        if self.device_kind != "nvml" or self.allocation == "growth":
            return None
        context = self.context_bytes.get(framework, 0)
        share = self.share(framework)
        return tuple(max(1, int(budget * share) - context) for budget in self.budget_bytes)

    def cap_fraction(self, framework: str) -> float | None:
        """Return a framework's cap as a fraction of device memory, the smallest of all devices; `None`: no cap."""
        caps = self.cap_bytes(framework)
        return (
            None
            if caps is None
            else min(a / b for a, b in zip(caps, self.total_bytes, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """Memory in bytes as counted by a framework's allocator, summed over the child's devices."""

    #: Allocated now.
    live_bytes: int
    #: Held from the driver now, cache included; `None`: the allocator does not count it.
    reserved_bytes: int | None
    #: Largest `live_bytes` since the start.
    peak_live_bytes: int
    #: Largest `reserved_bytes` since the start; `None` as above.
    peak_reserved_bytes: int | None
    #: Allocations that succeeded only after the cache was emptied, as near the cap; `None`: not counted.
    alloc_retries: int | None = None
    #: Bytes returned to the driver since the start; while unchanged, `reserved_bytes` has not fallen. `None`: not
    #: counted.
    freed_bytes: int | None = None


#: Function that ends a trace of allocations and returns its peak of allocated bytes (`None`: unknown). Never raises.
EndTrace: TypeAlias = Callable[[], int | None]


class CaptureWatch:
    """Counts the running captures of CUDA graphs of one framework, on all threads.

    CUDA tells only whether a given stream is being captured, and a framework does not list its streams. So counting
    functions replace the methods that begin and end a capture.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may run anywhere.
        self._lock = threading.RLock()
        self._watched: set[type] = set()
        self._under_way = 0
        #: Whether a capture has begun in this process, or captures cannot be counted.
        self.begun = False

    def watch(self, owner: type, begin: str, end: str) -> None:
        """Count a class's captures by its methods `begin` and `end`. If they cannot be replaced, one never ends."""
        if owner in self._watched:
            return
        self._watched.add(owner)
        try:
            setattr(owner, begin, self._counted(getattr(owner, begin), begins=True))
            setattr(owner, end, self._counted(getattr(owner, end), begins=False))
        except (AttributeError, TypeError):
            self._count(1)

    @contextlib.contextmanager
    def none_begins(self) -> Iterator[bool]:
        """Block captures that would begin during a `with` block; yield `True` if no capture is running."""
        with self._lock:
            yield self._under_way == 0

    def _counted(self, method: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if begins:
                self._count(1)
            try:
                result = method(*args, **kwargs)
            except BaseException:
                # A capture still counts as running if its end has failed.
                if begins:
                    self._count(-1)
                raise
            if not begins:
                self._count(-1)
            return result

        return counted

    def _count(self, change: int) -> None:
        with self._lock:
            self.begun = True
            self._under_way = max(0, self._under_way + change)


class FrameworkAdapter:
    """Base class of adapters, without state: applies a policy to one framework, and reads the framework's memory.

    `environment`, `standby_environment` and `applies_late` are pure. The other methods act on the calling process, a
    child. The defaults suit a framework without environment variables and counters.
    """

    #: Name of the framework in `gpu:framework=`, and the root of its import name: "torch", "tensorflow".
    name: ClassVar[str]
    #: Default variables of the framework's children. A value in the flow's process takes precedence.
    default_environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Variables that the framework reads when it first uses a device, so that they may change after its import.
    late_variables: ClassVar[tuple[str, ...]] = ()

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return the variables of a child that apply a policy; `None`: remove an inherited variable. Pure."""
        return {}

    def cap_subprocesses(self, policy: FrameworkPolicy, environ: MutableMapping[str, str]) -> None:
        """Cap processes that the body starts (`torchrun`) by variables in `environ`, even without an import here."""

    def apply(self, policy: FrameworkPolicy) -> None:
        """Apply a policy right after the framework's import. `FrameworkError`: wrong devices, or policy refused."""
        raise NotImplementedError

    def check_devices(self, policy: FrameworkPolicy, found: int, likely_reason: str) -> None:
        """Raise `FrameworkError`, with `likely_reason`, unless the framework has found all allotted devices."""
        allotted = len(policy.device_uuids)
        if found != allotted:
            problem = f"{allotted} GPU(s) allotted, {found} found{likely_reason}"
            raise FrameworkError(self.name, problem)

    def standby_environment(self) -> dict[str, str]:
        """Return variables for a standby, a process that imports the framework before its task is known. Pure.

        Inherited values take precedence. The variables are removed when the task begins.
        """
        return {}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Return whether a variable is this framework's and may change after its import; `None`: not set. Pure."""
        return name in self.late_variables

    def started(self) -> Any:
        """Return the framework's module once the framework uses devices, else `None`. Must not start anything."""
        return None

    def has_started(self) -> bool:
        """Return whether the framework uses devices already, too late to apply a policy."""
        return self.started() is not None

    def counters(self) -> Counters | None:
        """Return the allocator's counters; `None`: the framework has not used a device.

        A thread calls this method every few milliseconds: it must not initialise a device, nor reset a user's counter.
        """
        return None

    def begin_trace(self) -> EndTrace | None:
        """Begin a trace of allocations on all devices, by the rules of `counters`; `None`: impossible. Never raises."""
        return None

    def memory_summary(self) -> str:
        """Return the framework's own summary of its memory as text; empty: no summary."""
        return ""

    def write_snapshot(self, path: str) -> bool:
        """Write the framework's memory snapshot to a file, or raise `OSError`; `False`: no memory used, no file."""
        return False

    def release_cached(self) -> None:
        """Return the allocator's cached memory to the driver, if the framework has used a device."""

    def release_unused(self) -> None:
        """Return cached memory to the driver, unless a CUDA graph is being captured. May raise any error.

        Called on a thread of its own while the body runs, inside `cuda_driver.unbound_by_captures`.
        """

    def reduce_to_host(self, value: Any) -> Any:
        """Return a pickle reduction that rebuilds a device value in host memory; `NotImplemented`: no such value."""
        return NotImplemented

    def calibrate(self) -> int:
        """Do work on device 0 (products, convolutions, transforms); return the bytes that the allocator then holds.

        All other memory of the process on the device is the framework's context.
        """
        raise NotImplementedError


def look_at(module: str, attribute: str) -> Any:
    """Return an attribute of a module in `sys.modules`, importing nothing; `None`: no such module or attribute.

    `getattr` would load a module of `importlib.util.LazyLoader`, such as Ray imported by `prefect_ray`.
    """
    try:
        return object.__getattribute__(sys.modules.get(module), attribute)
    except AttributeError:
        return None


def imported(name: str, *attributes: str) -> Any:
    """Return a module of `sys.modules`; `None`: missing, or still without `attributes`, as during an import."""
    found = look_at(name, "__dict__") or ()
    return sys.modules.get(name) if all(wanted in found for wanted in attributes) else None


@functools.cache
def framework_version(framework: str) -> str:
    """Return the installed version of a framework from package metadata, importing nothing; empty: unknown."""
    # Imported late: it takes 15 ms, and a child does not need it.
    import importlib.metadata

    for distribution in DISTRIBUTIONS.get(framework, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


def host_value(value: Any) -> Any:
    """Return `value`. Pickle reductions of device values name this function to rebuild the copy in host memory."""
    return value
