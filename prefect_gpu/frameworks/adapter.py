"""The protocol of a framework adapter, and the policy that it is given.

It covers what one child's frameworks must do. It does not choose budgets or devices: by the time an
adapter is asked, both are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from prefect_gpu.scheduling.model import DeviceKind

AllocationMode = Literal["limit", "growth", "all"]


@dataclass(frozen=True, slots=True)
class FrameworkPolicy:
    """What the frameworks of one child may do. Travels to the child."""

    #: Kind of the devices: caps hold on "nvml"; on "host" a framework runs on the CPU, uncapped.
    device_kind: DeviceKind
    #: Devices allotted, in the task's order.
    device_uuids: tuple[str, ...]
    #: All memory of each device, in bytes.
    total_bytes: tuple[int, ...]
    #: Budget on each device in bytes, the context included.
    budget_bytes: tuple[int, ...]
    #: Bytes of context to leave out of the cap, by framework name; missing: 0.
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    #: "limit": cap at budget − context. "growth": no cap. "all": take the budget at start.
    allocation: AllocationMode = "growth"
    #: PyTorch allocator options, `{"max_split_size_mb": "128"}`.
    allocator_options: Mapping[str, str] = field(default_factory=dict)
    #: `False`: PyTorch's caching allocator is switched off.
    caching: bool = True
    #: CPU threads that the frameworks may start, at least 1.
    cpus: int = 1
    #: A tag says that number; else it was computed from the machine.
    cpus_stated: bool = False
    #: Frameworks named by tags; empty: those that the task imports.
    frameworks: tuple[str, ...] = ()
    #: Frameworks that the task was found to use, where tags name none.
    detected: tuple[str, ...] = ()
    #: Fraction of the budget by framework name, from `gpu:framework=torch:70%`; those named by
    #: tags without one divide the rest equally.
    shares: Mapping[str, float] = field(default_factory=dict)

    def share(self, framework: str) -> float:
        """Fraction of each budget that is a framework's.

        Those of the frameworks that tags name, or else of those that were detected, add up to 1 at
        most. One that turns up beside them has what was promised to none of them. Where that is
        nothing it has all: detection can be wrong, and without memory it would fail for certain.
        Together they may then pass the budget, which readings of the driver show.
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
        """Bytes on each device that a framework's allocator may take; `None`: no cap."""
        if self.device_kind != "nvml" or self.allocation == "growth":
            return None
        context = self.context_bytes.get(framework, 0)
        share = self.share(framework)
        return tuple(max(1, int(budget * share) - context) for budget in self.budget_bytes)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a framework's own allocator says, summed over the child's devices, in bytes."""

    #: Allocated now.
    live_bytes: int
    #: Held from the driver now; `None` where the allocator keeps no such number.
    reserved_bytes: int | None
    #: Largest `live_bytes` since the start.
    peak_live_bytes: int
    #: Largest `reserved_bytes` since the start; `None` as above.
    peak_reserved_bytes: int | None
    #: Times that an allocation only succeeded after the cache was given up: the cap pinches.
    #: `None` where the allocator keeps no such number.
    alloc_retries: int | None = None
    #: Given back to the driver since the start, all told: where it has not changed, `reserved_bytes`
    #: has only risen. `None` as above.
    freed_bytes: int | None = None


class PeakTrace(Protocol):
    """A stretch of time of which a framework can tell the exact peak. It never raises."""

    def end(self) -> int | None:
        """Stop, and give the most that was allocated meanwhile, in bytes; `None`: unknown."""
        ...


@runtime_checkable
class TracingAdapter(Protocol):
    """What an adapter has besides where its framework can be traced."""

    def begin_trace(self) -> PeakTrace | None:
        """Child: begin a trace, over all the child's devices. Never raises.

        Keeps the promises of `counters`, and away from what the body records itself.

        Returns:
            `None`: it cannot be traced now.
        """
        ...


@runtime_checkable
class HeatingAdapter(Protocol):
    """What an adapter has besides where its framework may start before its task's policy is known."""

    def heat(self) -> None:
        """Child: make the context on device 0 and run a first kernel, so that libraries are loaded.

        The allocator holds nothing afterwards, and its counters stand as if nothing had been.
        """
        ...

    def applies_hot(self, name: str, before: str | None, after: str | None) -> bool:
        """Tell whether a variable of this framework's may change after `heat`. Pure.

        Arguments are those of `applies_late`.
        """
        ...

    def apply_hot(self, policy: FrameworkPolicy) -> None:
        """Child: apply what `apply` leaves to variables that were read when the framework started."""
        ...


class FrameworkAdapter(Protocol):
    """One framework. Stateless: every method may be called in the parent unless it says child."""

    #: As in `gpu:framework=`.
    name: str
    #: Root of its import name: "torch", "tensorflow".
    module: str

    def environment(self, policy: FrameworkPolicy) -> dict[str, str | None]:
        """Give the environment variables of a child; `None` removes an inherited one. Pure."""
        ...

    def apply(self, policy: FrameworkPolicy) -> None:
        """Child: apply cap, growth and threads, just after the framework was imported.

        Raises:
            FrameworkError: It finds no device where one was allotted, or refuses the policy.
        """
        ...

    def standby_environment(self) -> dict[str, str]:
        """Give variables for a process that imports the framework ahead of its task, unless inherited.

        They are gone when the task begins. Pure.
        """
        ...

    def applies_late(self, name: str, before: str | None, after: str | None) -> bool:
        """Tell whether a variable of this framework's may change after its import. Pure.

        Args:
            name: Any variable.
            before: Its value at the import; `None`: it was not set.
            after: Its value when the framework first uses a device.
        """
        ...

    def has_started(self) -> bool:
        """Child: tell whether the framework, imported, has begun to use devices.

        From then on some of its policy would come too late. Must not start anything.
        """
        ...

    def counters(self) -> Counters | None:
        """Child: read the allocator's counters; `None` before the framework touched a device.

        Must not initialise the device, and must not reset anything that user code may read.
        """
        ...

    def sample(self) -> tuple[int, int] | None:
        """Child: read bytes allocated now, and allocation retries so far, as cheaply as it goes.

        Called every few milliseconds from a thread, so it reads nothing else.

        Returns:
            Both summed over the child's devices; retries are 0 where the allocator does not count
            them. `None` as for `counters`, whose promises it keeps.
        """
        ...

    def release_cached(self) -> None:
        """Child: give the memory that the allocator keeps for later back to the driver.

        Does nothing before the framework touched a device, nor where it never gives any back.
        """
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether `error` itself (not its causes) says that device memory ran out."""
        ...

    def reduce_to_host(self, value: Any) -> Any:
        """Child: a pickle reduction (tuple) that rebuilds `value` from host memory.

        Returns:
            `NotImplemented` for anything that is not this framework's, or is on the host already.
        """
        ...

    def calibrate(self) -> int:
        """Child: use the device as real work would (products, convolutions, transforms).

        Returns:
            Bytes that the framework's allocator then holds from the driver, on device 0. What the
            driver shows above that is the context.
        """
        ...
