"""What readings and the ends of steps say of a body's memory, in bounded room for millions of steps.

Pure: readings and boundaries go in, `StepFacts` come out. What begins a step is `recorder`'s to say,
who takes the readings `sampler`'s, and what follows from the facts `prefect_gpu.scheduling.history`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from prefect_gpu.reports.model import StepFacts
from prefect_gpu.reports.series import largest

#: Steps whose seconds are kept, the last ones, for the median.
KEPT_SECONDS = 512

#: Ends of steps that a slope takes: two are a difference, and three with one odd one still mislead.
LEAST_FOR_SLOPE = 4


class StepBook:
    """Collects what is known of one body's steps. For one thread at a time.

    The first step is what comes before the first boundary, and takes more than later ones:
    frameworks try out kernels in it. Steps count as *steady* after the first, and after the last one
    in which the allocator had to give up its cache. What comes after the last boundary is a step
    that is not over: its memory counts, since a budget must hold it too, and its seconds do not.
    """

    def __init__(self) -> None:
        #: Boundaries so far.
        self._count = 0
        self._first_live: int | None = None
        #: Most bytes in the step that is open, and in the steady ones that are over.
        self._open_live: int | None = None
        self._steady_live: int | None = None
        #: Steady steps that are over.
        self._steady = 0
        self._last_retries = 0
        #: Retries after the first step.
        self._retries = 0
        self._pinched = False
        self._ended_s: float | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT_SECONDS)
        self._slope = _Slope()

    @property
    def count(self) -> int:
        """Steps that are over."""
        return self._count

    @property
    def pinched(self) -> bool:
        """Whether the allocator had to give up its cache in the step that is open."""
        return self._pinched

    def reading(self, live_bytes: int, alloc_retries: int) -> None:
        """Take in what is allocated at some moment.

        Args:
            live_bytes: What the frameworks have allocated.
            alloc_retries: Times so far that an allocator had to give up its cache.
        """
        self._open_live = largest(self._open_live, live_bytes)
        # Fewer than before: the body reset its framework's statistics.
        rise = alloc_retries - self._last_retries
        more = rise if rise >= 0 else alloc_retries
        self._last_retries = alloc_retries
        if more:
            self._pinched = True
            self._retries += more if self._count else 0

    def peak(self, live_bytes: int) -> None:
        """Take in the most that was allocated in the step that is open, so far."""
        self._open_live = largest(self._open_live, live_bytes)

    def boundary(
        self, at_s: float, live_bytes: int | None = None, alloc_retries: int | None = None
    ) -> None:
        """Take in that a step is over, and with it the reading at that moment.

        Args:
            at_s: Monotonic seconds.
            live_bytes: As in `reading`; `None`: nothing was read.
            alloc_retries: As in `reading`; `None`: nothing was read.
        """
        if live_bytes is not None:
            self.reading(live_bytes, alloc_retries or 0)
        if self._count == 0:
            self._first_live = self._open_live
        elif self._pinched:
            self._steady, self._steady_live, self._slope = 0, None, _Slope()
        else:
            self._steady += 1
            self._steady_live = largest(self._steady_live, self._open_live)
            if live_bytes is not None:
                self._slope.add(self._steady, live_bytes)
        if self._ended_s is not None:
            self._seconds.append(max(0.0, at_s - self._ended_s))
        self._ended_s = at_s
        self._count += 1
        # What is allocated as a step ends is allocated as the next one begins.
        self._open_live, self._pinched = live_bytes, False

    def facts(self) -> StepFacts | None:
        """Say what the steps so far show; `None`: there was none."""
        if self._count == 0:
            return None
        steady = self._steady > 0 and not self._pinched
        return StepFacts(
            count=self._count,
            first_live_bytes=self._first_live,
            steady_live_bytes=largest(self._steady_live, self._open_live) if steady else None,
            step_s=_median(self._seconds),
            alloc_retries=self._retries,
            growth_bytes=self._slope.value() if steady else None,
        )


class _Slope:
    """A least-squares slope over points that are not kept. Sums of whole numbers: exact."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0

    def add(self, x: int, y: int) -> None:
        self._n += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def value(self) -> float | None:
        if self._n < LEAST_FOR_SLOPE:
            return None
        return (self._n * self._xy - self._x * self._y) / (self._n * self._xx - self._x**2)


def _median(values: Iterable[float]) -> float | None:
    # Not `statistics`: every child would import it, with `decimal` and `fractions`.
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2
