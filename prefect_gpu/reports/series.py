"""A process's memory over time in a bounded number of points.

It covers merging of readings, their peaks and what was reserved in vain. It does not take the
readings (the sampler in `devices` and the child do), and it does not draw them (`timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Points that a `SeriesBuilder` keeps at most. Four a second fill it in four minutes; from then on
#: neighbours merge. A chart has 860 pixels, so more would not show; a point costs about 200 bytes.
SERIES_LIMIT = 1000

#: Points of one process in a flow's report: an outline in a bar a few hundred pixels wide, 5 kB.
COMPACT_SAMPLES = 24


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of a process's memory over time."""

    #: Seconds since the task was placed.
    at_s: float
    #: Bytes of the whole process on all its devices; `None`: not read at this point.
    process_bytes: int | None = None
    #: Bytes that its frameworks had allocated; `None`: not read at this point, or unknown.
    live_bytes: int | None = None
    #: Bytes that its frameworks held from the driver; `None` as above.
    reserved_bytes: int | None = None


def largest(first: int | None, second: int | None) -> int | None:
    """Give the larger of two readings; one that was not taken does not count."""
    if first is None:
        return second
    return first if second is None else max(first, second)


def merge(samples: Sequence[Sample], limit: int) -> tuple[Sample, ...]:
    """Thin a series to at most `limit` points, keeping every maximum and the last reading.

    Args:
        samples: In order of time.
        limit: At least 2.

    Returns:
        Points in order of time. One that stands for several has the largest value of each kind
        and the time at which the process was largest.
    """
    if len(samples) <= limit:
        return tuple(samples)
    *body, last = samples
    # The last reading stays by itself: what a process holds when it ends is of interest.
    size = -(-len(body) // (limit - 1))
    return (*(_largest_of(body[i : i + size]) for i in range(0, len(body), size)), last)


def _largest_of(group: Sequence[Sample]) -> Sample:
    top = max(group, key=lambda s: (s.process_bytes or 0, s.live_bytes or 0, -s.at_s))
    process, live, reserved = top.process_bytes, top.live_bytes, top.reserved_bytes
    for sample in group:
        process = largest(process, sample.process_bytes)
        live = largest(live, sample.live_bytes)
        reserved = largest(reserved, sample.reserved_bytes)
    return Sample(top.at_s, process, live, reserved)


class SeriesBuilder:
    """Collect one process's readings for hours in bounded memory. For one thread.

    Peaks, count and waste are exact whatever is merged.

    Args:
        reserved_bytes: Reservation on all its devices together, for the waste.
        limit: Points kept at most, at least 4.
    """

    def __init__(self, reserved_bytes: int = 0, limit: int = SERIES_LIMIT) -> None:
        if limit < 4:
            raise ValueError(f"limit={limit}: a series needs at least 4 points")
        self._reserved_bytes = reserved_bytes
        self._limit = limit
        self._samples: list[Sample] = []
        self._wasted = 0.0
        self._until_s = 0.0
        self._used_bytes = 0
        #: Readings taken.
        self.count = 0
        #: Largest reading of each kind; `None`: none was taken.
        self.peak_process_bytes: int | None = None
        self.peak_live_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None

    def add(self, sample: Sample) -> None:
        """Take in the next reading; one older than the last is counted at the last's time."""
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
            # To half, so that merging costs a constant time a reading however long the task runs.
            self._samples = list(merge(self._samples, self._limit // 2))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The points kept, in order of time."""
        return tuple(self._samples)

    def wasted_byte_seconds(self, until_s: float) -> float:
        """Reserved minus used, over the time from the placement to `until_s`.

        Each reading holds until the next one; before the first, nothing was used. Using more than
        was reserved wastes nothing.
        """
        idle_bytes = max(0, self._reserved_bytes - self._used_bytes)
        return self._wasted + idle_bytes * max(0.0, until_s - self._until_s)
