"""The base class of framework adapters, the policy that they apply, and a child's environment variables.

An adapter applies a policy to one framework of a child process. `registry` lists the adapters. Budgets and devices
are chosen elsewhere. This module does not read its own process's environment. `tests/gpu/test_late_policy.py` shows
on real devices which variables may change late.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from prefect_gpu.errors import FrameworkError
from prefect_gpu.scheduling.model import DeviceKind

#: Numbers of threads that OpenMP, MKL, OpenBLAS, NumExpr, Accelerate and TensorFlow read when they load.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

#: Variables that say how many threads to start. Most are read as a library loads.
CPU_VARIABLES = frozenset({*THREAD_VARIABLES, "NPROC"})

#: Variables for frameworks that no tag names. By default TensorFlow takes all of a device, JAX three quarters.
MODEST_DEFAULTS = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

#: Variables with options of PyTorch's allocator; 2.9 renamed the first.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: In a child: the allocator option that caps the processes of its body. GPU tasks among them have their own budget.
SUBPROCESS_CAP = "PREFECT_GPU_SUBPROCESS_CAP"


def child_environment(
    policy: FrameworkPolicy, adapters: Iterable[FrameworkAdapter], inherited: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables of a child that differ from its inherited environment; `None`: remove the variable.

    The variables of the devices are always included. `adapters` is the result of `registry.adapters_for(policy)`.
    """
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
        # For code that uses indices: NVML's order.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def options_without(option: str, text: str) -> list[str]:
    """Return the options in a variable of PyTorch's allocator, without one of them."""
    return [part for part in text.split(",") if part not in ("", option)]


def late_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    adapters: Collection[FrameworkAdapter],
    *,
    cpus_stated: bool,
) -> dict[str, str | None] | None:
    """Return the variables to set or remove (`None`) in a process that has imported its modules.

    Args:
        before: The environment in which it imported its modules.
        after: The environment that the task needs.
        adapters: All adapters: a variable belongs to one of them.
        cpus_stated: Whether a tag states the number of threads. A computed number may be set late: frameworks that
            have a call for it follow it.

    Returns:
        `None`: the change comes too late.
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
    """Return whether a variable that belongs to no framework may change late."""
    if name == "CUDA_VISIBLE_DEVICES":
        # The driver reads it when it is initialised. A module that found no device may have chosen the CPU.
        return old is None or old.strip() not in ("", "-1", "NoDevFiles")
    # Prefect's settings are sent with the run, and win over the environment.
    return name == "CUDA_DEVICE_ORDER" or name.startswith("PREFECT_")


AllocationMode = Literal["limit", "growth", "all"]


@dataclass(frozen=True, slots=True)
class FrameworkPolicy:
    """The policy of the frameworks of one child process. It is sent to the child."""

    #: Kind of the devices. Caps hold on "nvml"; on "host" a framework runs on the CPU without a cap.
    device_kind: DeviceKind
    #: Devices of the task, in its order.
    device_uuids: tuple[str, ...]
    #: All memory of each device, in bytes.
    total_bytes: tuple[int, ...]
    #: Budget on each device in bytes, the context included.
    budget_bytes: tuple[int, ...]
    #: Bytes of context to leave out of the cap, by framework name; missing: 0.
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    #: "limit": cap at budget − context. "growth": no cap. "all": take the budget at start.
    allocation: AllocationMode = "growth"
    #: Under a cap, frameworks that can grow take memory on demand: for first runs, whose cap is not their need.
    on_demand: bool = False
    #: PyTorch allocator options, `{"max_split_size_mb": "128"}`.
    allocator_options: Mapping[str, str] = field(default_factory=dict)
    #: `False`: PyTorch's caching allocator is switched off.
    caching: bool = True
    #: CPU threads that the frameworks may start, at least 1.
    cpus: int = 1
    #: Whether a tag states `cpus`; otherwise it was computed from the machine.
    cpus_stated: bool = False
    #: Names of the frameworks that tags name; empty: none.
    frameworks: tuple[str, ...] = ()
    #: Names of the frameworks that detection found, if tags name none.
    detected: tuple[str, ...] = ()
    #: Fraction of the budget by framework, from `gpu:framework=torch:70%`. Others share the rest equally.
    shares: Mapping[str, float] = field(default_factory=dict)
    #: File for PyTorch's snapshot at an out-of-memory; empty: PyTorch does not record its allocations.
    snapshot_path: str = ""

    def share(self, framework: str) -> float:
        """Return the fraction of each budget that a framework may use.

        The fractions of the frameworks that tags name, or else of the detected ones, add up to at most 1. Another
        framework gets the rest. Without a rest it gets the whole budget: detection can be wrong, and without memory
        the framework fails. The frameworks may then exceed the budget, which the driver's readings show.
        """
        if framework in self.shares:
            return self.shares[framework]
        expected = self.frameworks or self.detected
        open_ended = [name for name in expected if name not in self.shares]
        # Rounded: 0.6, 0.3 and 0.1 leave 1e-16.
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
        """Return a framework's smallest cap as a fraction of its device's memory; `None`: no cap."""
        caps = self.cap_bytes(framework)
        return None if caps is None else min(map(operator.truediv, caps, self.total_bytes))


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a framework's allocator, summed over the child's devices, in bytes."""

    #: Allocated now.
    live_bytes: int
    #: Held from the driver now; `None`: the allocator does not count it.
    reserved_bytes: int | None
    #: Largest `live_bytes` since the start.
    peak_live_bytes: int
    #: Largest `reserved_bytes` since the start; `None` as above.
    peak_reserved_bytes: int | None
    #: Allocations that succeeded only after the cache was emptied, as near the cap; `None`: not counted.
    alloc_retries: int | None = None
    #: Bytes returned to the driver since the start; `None`: not counted. While unchanged, `reserved_bytes` has not
    #: fallen.
    freed_bytes: int | None = None


#: Ends a trace and returns the peak of allocated bytes in it, `None`: unknown. Never raises.
EndTrace: TypeAlias = Callable[[], int | None]


class CaptureWatch:
    """Counts the running captures of CUDA graphs of one framework, on all threads.

    CUDA tells only whether a given stream is captured, and a framework does not name its streams. So counting functions
    replace the methods that begin and end a capture.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may run anywhere.
        self._lock = threading.RLock()
        self._watched: set[type] = set()
        self._under_way = 0
        #: Whether a capture has begun in this process, or cannot be watched.
        self.begun = False

    def watch(self, owner: type, begin: str, end: str) -> None:
        """Watch a class, by the names of its methods. A class that cannot be changed counts as capturing for ever."""
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
        """Let no capture begin in a `with` block; yield whether no capture is running."""
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
                # A capture whose end failed counts as running.
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
    """One framework, without state; methods marked *Child* run in the child process only.

    The defaults suit a framework that has no environment variables and no counters.
    """

    #: Name of the framework in `gpu:framework=`.
    name: ClassVar[str]
    #: Root of its import name: "torch", "tensorflow".
    module: ClassVar[str]
    #: Variables of the framework's processes. A value in the flow's process takes precedence.
    default_environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Variables that the framework reads when it first uses a device.
    late_variables: ClassVar[tuple[str, ...]] = ()

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Return environment variables of a child; `None` removes an inherited one. Pure."""
        return {}

    def cap_subprocesses(self, policy: FrameworkPolicy, environ: MutableMapping[str, str]) -> None:
        """Child: cap the processes that the body starts, by variables of `environ` that they inherit.

        The framework need not be imported: a body may only start `torchrun`.
        """

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: apply cap, growth and threads, just after the framework was imported.

        Raises:
            FrameworkError: The framework finds other devices than the allotted ones, or refuses the policy.
        """
        raise NotImplementedError

    def check_devices(self, policy: FrameworkPolicy, found: int, likely_reason: str) -> None:
        """Raise `FrameworkError` unless the framework has found all allotted devices."""
        allotted = len(policy.device_uuids)
        if found != allotted:
            problem = f"{allotted} GPU(s) allotted, {found} found{likely_reason}"
            raise FrameworkError(self.name, problem)

    def standby_environment(self) -> dict[str, str]:
        """Return variables for a process that imports the framework before its task is known. Pure.

        Inherited values take precedence. The variables are removed when the task begins.
        """
        return {}

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Return whether a variable belongs to this framework and may change after the import. Pure.

        `before` is its value at the import, `after` when the framework first uses a device; `None`: not set.
        """
        return name in self.late_variables

    def has_started(self) -> bool:
        """Child: return whether the framework uses devices: a policy comes too late. Must not start anything."""
        return False

    def counters(self) -> Counters | None:
        """Child: read the allocator's counters; `None` before the framework used a device.

        A thread calls this method every few milliseconds. It must neither initialise the device nor reset a counter
        that user code may read.
        """
        return None

    def begin_trace(self) -> EndTrace | None:
        """Child: begin a trace over all devices, by the rules of `counters`; `None`: not possible now. Never raises."""
        return None

    def memory_summary(self) -> str:
        """Child: return the framework's own summary of its memory; empty: no summary."""
        return ""

    def write_snapshot(self, path: str) -> bool:
        """Child: write the framework's own snapshot of its memory, or raise `OSError`; `False`: no memory used."""
        return False

    def release_cached(self) -> None:
        """Child: return the allocator's cached memory to the driver, if the framework has used a device."""

    def release_unused(self) -> None:
        """Child: as `release_cached`, but not during the capture of a CUDA graph. May raise any error.

        Called unnoticed by the body, on a thread of its own, inside `cuda_driver.unbound_by_captures`.
        """

    def reduce_to_host(self, value: Any) -> Any:
        """Child: return a pickle reduction that rebuilds a device value from host memory; else `NotImplemented`."""
        return NotImplemented

    def calibrate(self) -> int:
        """Child: use the device as real work would (products, convolutions, transforms).

        Returns:
            Bytes that the allocator then holds from the driver, on device 0. The process's other memory is the context.
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
    """Return an imported module; `None`: it lacks an attribute, as while another thread imports it."""
    found = look_at(name, "__dict__") or ()
    return sys.modules.get(name) if all(wanted in found for wanted in attributes) else None


def host_value(value: Any) -> Any:
    """Return the value. Pickled host copies name this function, and rebuild through it."""
    return value
