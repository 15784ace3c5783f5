"""Measurements of one task process: memory over time, marks and phases, steps, suspensions.

Their size is bounded for tasks of any length. Child and parent build them from their own readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Most points of a `SeriesBuilder`: four minutes of four readings a second, after which neighbouring points merge.
#: A chart of 860 pixels cannot show more; a point takes about 200 bytes.
SERIES_LIMIT = 1000

#: Points of one process in a flow's report (2 kB), which draws them in a bar a few hundred pixels wide.
COMPACT_SAMPLES = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """A point of a process's memory over time."""

    #: Seconds since the task was placed.
    at_s: float
    #: Bytes of the whole process on all its devices; `None`: not read at this point.
    process_bytes: int | None = None
    #: Bytes that the process's frameworks had allocated; `None`: not read at this point, or unknown.
    live_bytes: int | None = None
    #: Bytes that the process's frameworks held from the driver; `None`: as for `live_bytes`.
    reserved_bytes: int | None = None


def largest(first: int | None, second: int | None) -> int | None:
    """Return the larger of two readings; `None`: no reading."""
    if first is None:
        return second
    return first if second is None else max(first, second)


def merge(samples: Sequence[Sample], limit: int) -> tuple[Sample, ...]:
    """Reduce a series to at most `limit` points (2 or more), in order of time; keep all maxima and the last reading."""
    if len(samples) <= limit:
        return tuple(samples)
    *body, last = samples
    size = -(-len(body) // (limit - 1))
    return (*(_largest_of(body[i : i + size]) for i in range(0, len(body), size)), last)


def _largest_of(group: Sequence[Sample]) -> Sample:
    """Return one point with the largest value of each kind, and the time when the process was largest."""
    top = max(group, key=lambda s: (s.process_bytes or 0, s.live_bytes or 0, -s.at_s))
    process, live, reserved = top.process_bytes, top.live_bytes, top.reserved_bytes
    for sample in group:
        process = largest(process, sample.process_bytes)
        live = largest(live, sample.live_bytes)
        reserved = largest(reserved, sample.reserved_bytes)
    return Sample(top.at_s, process, live, reserved)


class SeriesBuilder:
    """Collects the readings of one process in bounded memory. For one thread.

    Peaks, count and waste stay exact when points merge. `reserved_bytes`: reservation on all devices of the process
    together, for the waste.
    """

    def __init__(self, reserved_bytes: int = 0, limit: int = SERIES_LIMIT) -> None:
        self._reserved_bytes = reserved_bytes
        self._limit = limit
        self._samples: list[Sample] = []
        self._wasted = 0.0
        self._until_s = 0.0
        self._used_bytes = 0
        #: Number of readings.
        self.count = 0
        #: Largest reading of each kind; `None`: no reading.
        self.peak_process_bytes: int | None = None
        self.peak_live_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None

    def add(self, sample: Sample) -> None:
        """Add the next reading. For the waste, a reading older than the last one has the last one's time."""
        self.count += 1
        self.peak_process_bytes = largest(self.peak_process_bytes, sample.process_bytes)
        self.peak_live_bytes = largest(self.peak_live_bytes, sample.live_bytes)
        self.peak_reserved_bytes = largest(self.peak_reserved_bytes, sample.reserved_bytes)
        if sample.process_bytes is not None:
            self._wasted = self.wasted_byte_seconds(sample.at_s)
            self._until_s = max(self._until_s, sample.at_s)
            self._used_bytes = sample.process_bytes
        self._samples.append(sample)
        if len(self._samples) > self._limit:
            # Reduced to half, so that merging takes a constant time per reading.
            self._samples = list(merge(self._samples, self._limit // 2))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Return the kept points, in order of time."""
        return tuple(self._samples)

    def wasted_byte_seconds(self, until_s: float) -> float:
        """Return reserved minus used bytes, summed over the seconds from placement to `until_s`.

        Each reading is valid until the next; before the first, nothing was used. Use above the reservation is no waste.
        """
        idle_bytes = max(0, self._reserved_bytes - self._used_bytes)
        return self._wasted + idle_bytes * max(0.0, until_s - self._until_s)


class UnitUse(NamedTuple):
    """Use of a device's units by kernels: fractions from 0 to 1, means over a time (NVML's GPM, `nvmlGpmMetricId_t`)."""

    #: Fraction of the multiprocessors that had work.
    multiprocessors: float
    #: Fraction of the time in which the multiprocessors did tensor operations.
    tensor_cores: float
    #: Fraction of the memory's highest bandwidth.
    bandwidth: float


#: Fraction of its time for which a process must have computed alone, for the units that it used to be known.
ALONE_FRACTION = 0.1


class WorkBuilder:
    """Adds up what one process computed on its devices. For one thread."""

    def __init__(self) -> None:
        #: Seconds and joules of the last reading of each device, by the device's place.
        self._last: dict[int, tuple[float, float | None]] = {}
        self._known_s = self._busy_s = 0.0
        #: Seconds in which the process alone computed and the use of units was known, and the sums of use × seconds.
        self._alone_s = 0.0
        self._used_s = [0.0] * len(UnitUse._fields)
        #: Joules that the devices took while they computed, in the process's part of the computing; `None`: not known.
        self.energy_j: float | None = None

    @property
    def busy_fraction(self) -> float | None:
        """Fraction of the time in which the process's kernels ran, the mean of its devices; `None`: not known."""
        return self._busy_s / self._known_s if self._known_s else None

    @property
    def units(self) -> UnitUse | None:
        """Use of the devices' units while no other process computed, the mean of the devices; `None`: not known."""
        if not self._alone_s or self._alone_s < ALONE_FRACTION * self._known_s:
            return None
        return UnitUse(*(used_s / self._alone_s for used_s in self._used_s))

    def add(
        self,
        at_s: float,
        device: int,
        busy: float,
        of_all: float,
        energy_j: float | None,
        units: UnitUse | None = None,
    ) -> None:
        """Add a reading of a device.

        `busy` is the process's fraction of the time since the last reading, `of_all` that of all processes together,
        `energy_j` the device's counter in joules, and `units` what all processes together used (`None`: unknown).
        """
        last = self._last.get(device)
        if last is None:
            self._last[device] = at_s, energy_j
            return
        self._last[device] = at_s, last[1] if energy_j is None else energy_j
        self._known_s += at_s - last[0]
        self._busy_s += busy * (at_s - last[0])
        # No other process computed.
        if units is not None and busy == of_all:
            self._alone_s += at_s - last[0]
            pairs = zip(self._used_s, units, strict=True)
            self._used_s = [used + part * (at_s - last[0]) for used, part in pairs]
        if energy_j is not None and last[1] is not None:
            part = busy / of_all if of_all else 0.0
            # A driver that was loaded again counts from 0.
            self.energy_j = (self.energy_j or 0.0) + part * max(0.0, energy_j - last[1])

    def pause(self) -> None:
        """Leave out the time up to the next reading."""
        self._last.clear()


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment inside the body."""

    #: Seconds since the task was placed.
    at_s: float
    name: str
    #: Seconds that a phase took; `None`: a mark, which is a moment.
    duration_s: float | None = None
    #: Bytes that the frameworks had allocated and reserved at the end of the phase, and the peaks in it; `None`: unknown.
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    #: Bytes that the driver reported for the process at the end of the phase; `None`: not reported, or not read.
    process_bytes: int | None = None
    #: Number of the mark's step, from 0.
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Memory and time of a body's steps: calls of `step()`, or repeated phases and marks."""

    #: Steps that have ended.
    count: int
    #: Peak bytes that the frameworks had allocated up to the end of the first step; `None`: unknown.
    first_live_bytes: int | None = None
    #: Peak bytes in the steps after the first and after the last release of the allocator's cache; `None`: no such step.
    steady_live_bytes: int | None = None
    #: Median seconds of the steps after the first; `None`: no such step.
    step_s: float | None = None
    #: Number of times that the allocator had to release its cache after the first step.
    alloc_retries: int = 0
    #: Growth of the bytes allocated at the end of a step, per step; `None`: too few steps.
    growth_bytes: float | None = None
    #: Whether the steps after the first took the same memory. `False`: inputs change size, or there was at most one
    #: such step. The first step of a later run may then take as much as the largest step.
    alike: bool = True


@dataclass(frozen=True, slots=True)
class Suspension:
    """One suspension of a process, with its device memory on the host meanwhile."""

    #: Monotonic seconds of the suspension's begin, and of the moment when the process ran again. In a report: seconds
    #: since the placement of the task.
    begun_s: float
    ended_s: float
    #: Seconds of the move to the host, and of the move back.
    out_s: float
    in_s: float
    #: Bytes that were moved.
    moved_bytes: int
    #: The reason as text for people, and the device on which the process was resumed.
    reason: str = ""
    device: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds from the suspension's begin until the process ran again."""
        return self.ended_s - self.begun_s


#: Number of steps, from the first, whose marks are kept.
FIRST_STEPS = 3

#: Number of newest steps whose marks are kept: the last complete step, and the marks after it, as of an evaluation.
LAST_STEPS = 2

#: Most marks of one step: a body whose names never repeat has one step only.
MARKS_PER_STEP = 32


class MarkKeeper:
    """Keeps marks in bounded memory. For one thread at a time."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[Mark]] = {}

    def add(self, *marks: Mark) -> None:
        """Add marks; drop the marks of steps between the first and the newest steps."""
        for mark in marks:
            row = self._by_step.setdefault(mark.step, [])
            if len(row) < MARKS_PER_STEP:
                row.append(mark)
        later = sorted(step for step in self._by_step if step >= FIRST_STEPS)
        for step in later[:-LAST_STEPS]:
            del self._by_step[step]

    def marks(self) -> tuple[Mark, ...]:
        """Return the kept marks, in order of time."""
        kept = (mark for row in self._by_step.values() for mark in row)
        return tuple(sorted(kept, key=lambda mark: mark.at_s))

    def take(self) -> tuple[Mark, ...]:
        """Return the kept marks, in order of time, and forget them."""
        taken = self.marks()
        self._by_step.clear()
        return taken
