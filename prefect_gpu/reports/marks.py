"""Which marks and phases of a body are kept: those of its first steps and of its last.

Pure. Who makes them is `prefect_gpu.processes.recorder`; how they are drawn is `timeline`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from prefect_gpu.reports.model import Mark

#: Steps from the first on whose marks are kept.
FIRST_STEPS = 3

#: Newest steps whose marks are kept: the last that is over, and what came after it, which may be an
#: evaluation.
LAST_STEPS = 2

#: Marks of one step that are kept: a body whose names never come again has one step only.
MARKS_PER_STEP = 32


class MarkKeeper:
    """Keeps marks in bounded room. For one thread at a time."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[Mark]] = {}

    def add(self, mark: Mark) -> None:
        """Take in one more mark."""
        row = self._by_step.setdefault(mark.step, [])
        if len(row) < MARKS_PER_STEP:
            row.append(mark)
        later = sorted(step for step in self._by_step if step >= FIRST_STEPS)
        for step in later[:-LAST_STEPS]:
            del self._by_step[step]

    def extend(self, marks: Iterable[Mark]) -> None:
        """Take in several."""
        for mark in marks:
            self.add(mark)

    def marks(self) -> tuple[Mark, ...]:
        """Give those that are kept, in order of time."""
        kept = (mark for row in self._by_step.values() for mark in row)
        return tuple(sorted(kept, key=lambda mark: mark.at_s))

    def take(self) -> tuple[Mark, ...]:
        """Give those that are kept and forget them."""
        taken = self.marks()
        self._by_step.clear()
        return taken
