"""Arithmetic of the benchmarks: how fast tasks could end at best, and whether an aim was met.

Standard library only; nothing is read or measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What one task takes when it is alone on the machine."""

    name: str
    #: Seconds from its start to its end, the start of its process left out.
    duration_s: float
    #: Most bytes that it held on each of its devices.
    memory_bytes: int
    #: Seconds for which devices computed, summed over its devices.
    busy_s: float
    #: Seconds of CPU time.
    cpu_s: float
    #: Devices that it has at a time.
    devices: int = 1
    #: Names of the tasks that must end before it starts.
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """A time that no schedule can beat, and why."""

    #: Seconds by the name of what makes them necessary.
    terms: Mapping[str, float]

    @property
    def binds(self) -> str:
        """The term that is largest."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def seconds(self) -> float:
        """The largest term."""
        return self.terms[self.binds]


def lower_bound(costs: Sequence[Cost], devices: int, device_bytes: int, cores: int) -> Bound:
    """Work out the least makespan of tasks on equal devices.

    Args:
        costs: The tasks; at least one.
        devices: How many devices there are.
        device_bytes: Memory of each.
        cores: CPU cores of the machine.

    Raises:
        ValueError: No task, a task that no device holds, or one after a task that is not there.
    """
    if not costs:
        raise ValueError("no tasks: a bound needs at least one")
    for cost in costs:
        if cost.memory_bytes > device_bytes or cost.devices > devices:
            raise ValueError(
                f"{cost.name!r} takes {cost.memory_bytes} bytes on {cost.devices} device(s); "
                f"there are {devices} of {device_bytes}"
            )
    return Bound(
        {
            "longest chain": _longest_chain(costs),
            "memory × time": sum(c.memory_bytes * c.duration_s * c.devices for c in costs)
            / (device_bytes * devices),
            "larger than half a device": sum(
                c.duration_s * c.devices for c in costs if 2 * c.memory_bytes > device_bytes
            )
            / devices,
            "GPU busy": sum(c.busy_s for c in costs) / devices,
            "CPU": sum(c.cpu_s for c in costs) / cores,
        }
    )


def _longest_chain(costs: Sequence[Cost]) -> float:
    by_name = {cost.name: cost for cost in costs}
    ends: dict[str, float] = {}

    def end_s(name: str, within: tuple[str, ...]) -> float:
        if name not in by_name:
            raise ValueError(f"{within[-1]!r} is after {name!r}, which is not there")
        if name in within:
            raise ValueError(f"a circle of tasks: {' after '.join((*within, name))}")
        if name not in ends:
            cost = by_name[name]
            before = (end_s(other, (*within, name)) for other in cost.after)
            ends[name] = cost.duration_s + max(before, default=0.0)
        return ends[name]

    return max(end_s(cost.name, ()) for cost in costs)


@dataclass(frozen=True, slots=True)
class Check:
    """An aim and what was measured."""

    name: str
    measured: float
    limit: float
    unit: str = ""
    #: The measured value must reach the limit; otherwise it must not pass it.
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the aim was met."""
        if self.at_least:
            return self.measured >= self.limit
        return self.measured <= self.limit

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "MISSED"
        sign = "≥" if self.at_least else "≤"
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{verdict}  {self.name}: {self.measured:.4g}{unit} (aim {sign} {self.limit:g}{unit})"
        )


@dataclass(frozen=True, slots=True)
class Use:
    """What one task had of a device in a row, beside what it takes alone. Times in seconds."""

    #: What it takes alone.
    cost: Cost
    #: Bytes that were set aside for it.
    budget_bytes: int
    #: When its device was chosen; when the device answered it; when its body ended; when the last of
    #: its memory was seen.
    placed_s: float
    ready_s: float
    ended_s: float
    gone_s: float


def account(uses: Iterable[Use], makespan_s: float, device_bytes: int) -> dict[str, float]:
    """Return how the memory of one device was used during a row.

    Args:
        uses: One for each task.
        makespan_s: How long the row took.
        device_bytes: Memory of the device.

    Returns:
        Seconds of the whole device by what they were for; they add up to the makespan. The first is the
        bound's `memory × time`.
    """
    found = dict.fromkeys(
        (
            "as alone",
            "budgets above peaks",
            "processes start",
            "work takes longer than alone",
            "processes end",
        ),
        0.0,
    )
    for use in uses:
        alone_s, peak = use.cost.duration_s, use.cost.memory_bytes
        found["as alone"] += peak * alone_s / device_bytes
        found["budgets above peaks"] += (use.budget_bytes - peak) * alone_s / device_bytes
        found["processes start"] += use.budget_bytes * (use.ready_s - use.placed_s) / device_bytes
        longer_s = use.ended_s - use.ready_s - alone_s
        found["work takes longer than alone"] += use.budget_bytes * longer_s / device_bytes
        ending_s = max(0.0, use.gone_s - use.ended_s)
        found["processes end"] += use.budget_bytes * ending_s / device_bytes
    found["nobody's"] = makespan_s - sum(found.values())
    return found


def longest_first(costs: Iterable[Cost]) -> list[Cost]:
    """Order tasks by their seconds, the longest first: short ones fill what is left at the end."""
    return sorted(costs, key=lambda c: (-c.duration_s, c.name))


def budget_bytes(peak_bytes: int, devices: int = 1) -> int:
    """Return the budget for a measured peak: 1 % and 256 MiB above it, on several devices 900 MiB more.

    What is allowed to its framework is the budget less a context measured elsewhere, which may be
    larger than the task's own by some 150 MiB (H200: 520 to 676 MiB by what PyTorch loads). On several
    devices the runner leaves 900 MiB of it to NCCL (`prefect_gpu.frameworks.context`).
    """
    return int(peak_bytes * 1.01) + (256 + (900 if devices > 1 else 0)) * 2**20
