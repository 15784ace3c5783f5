"""What past runs of a task say about its next budget.

Pure: runs in, a lesson out. Where runs are kept is behind `HistoryStore`; who may run while a task is
not known yet is `prefect_gpu.budgets`; what happens after an out-of-memory is in `ladder`.

The formula, with the figures it rests on (a ResNet-50 in training on an H200, 2026-11-20: a run that
took 13.2 GiB because the device was empty needs 4.8 to run as fast):

    need(run) = max(LIVE_FACTOR × live, live + LIVE_MARGIN) + context
    budget    = max(need of the completed runs, floor)

*live* is the steady live peak where the run gave evidence of steps, else the whole live peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from prefect_gpu.units import MIB

#: Runs that a history keeps.
KEPT_RUNS = 20

#: What a framework is given, of what it had allocated. 1.3 cost no speed on a ResNet-50, 1.1 a quarter.
LIVE_FACTOR = 1.3

#: Bytes that it is given more at least: allocators take memory in segments (PyTorch's of 20 MiB).
LIVE_MARGIN_BYTES = 64 * MIB

#: Budgets are multiples of this many bytes, the size to which drivers and allocators round.
ROUND_BYTES = 2 * MIB

#: How much the next budget is above one that ended in an out-of-memory, and above one that pinched.
OOM_FACTOR = 1.5
PINCH_FACTOR = 1.25

#: A run pinched if its allocator had to give up its cache and it was this much slower than a roomier
#: run, by its steps, or by the whole body, of which more is noise.
SLOWER_STEP = 1.05
SLOWER_RUN = 1.2


@dataclass(frozen=True, slots=True)
class HistoryKey:
    """What a history is about: one task, on one GPU model, for one set of `gpu:learn_by` values."""

    task_name: str
    #: Of the task's function, without its module or file: neither a moved folder nor an edited comment
    #: begins a new history.
    qualified_name: str
    #: GPU model, as `Device.name` has it.
    device_name: str
    #: Digest of the `gpu:learn_by` values; empty: none are named.
    learn_by: str = ""


@dataclass(frozen=True, slots=True)
class PastRun:
    """One process of a task, as its history keeps it. Bytes are those of one device, the fullest."""

    #: Wall-clock seconds since the epoch when it ended.
    ended_at: float
    #: As in a report: "completed", "failed", "oom", "died", "timeout", "cancelled".
    outcome: str
    #: What an out-of-memory was put down to (`ladder.Cause`); empty: there was none.
    cause: str = ""
    budget_bytes: int = 0
    #: Bytes that its framework could allocate at most; `None`: no cap.
    cap_bytes: int | None = None
    #: Most that its frameworks had allocated; `None`: no framework tells.
    live_bytes: int | None = None
    #: The same over its steady steps; `None`: no evidence of steps.
    steady_live_bytes: int | None = None
    #: Most that the device showed for the whole process.
    process_bytes: int = 0
    #: What it took outside its frameworks' allocators.
    context_bytes: int = 0
    #: Times that an allocation succeeded only after the cache was given up, past the first step.
    alloc_retries: int = 0
    #: Median seconds of a steady step; `None`: no evidence of steps.
    step_s: float | None = None
    #: Seconds of the body.
    run_s: float = 0.0
    #: Bytes on one device that it would have needed in all, as its out-of-memory says.
    wanted_bytes: int | None = None
    #: Seconds from its placement to its body's first line; `None`: not known.
    start_s: float | None = None
    #: Bytes that were known to be too few when it ended, though the run that showed it may be
    #: forgotten since; `None`: none were.
    floor_bytes: int | None = None

    def to_texts(self) -> dict[str, str]:
        """Write every known field as a short text."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: str(value) for name, value in values if value not in (None, "")}

    @classmethod
    def from_texts(cls, texts: dict[str, str]) -> PastRun:
        """Read what `to_texts` wrote; fields of later versions are passed over.

        Raises:
            ValueError: A field is missing, or is no number where one is expected.
        """
        if "ended_at" not in texts or "outcome" not in texts:
            raise ValueError(f"no run of a task: {sorted(texts)}")
        values: dict[str, object] = {}
        for f in fields(cls):
            if f.name in texts:
                values[f.name] = _READ.get(f.name, int)(texts[f.name])
        return cls(**values)  # type: ignore[arg-type]


_READ = {
    "ended_at": float,
    "outcome": str,
    "cause": str,
    "step_s": float,
    "run_s": float,
    "start_s": float,
}


class HistoryStore(Protocol):
    """Keeps the runs of tasks. Safe to use from several threads."""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """Give the last `KEPT_RUNS` runs, newest first; none if nothing is known.

        Raises:
            OSError: It cannot be asked now.
        """
        ...

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """Keep one more run. Returns at once; what cannot be kept is lost with a warning."""
        ...


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a history teaches."""

    #: Bytes to reserve on each device, the context included.
    budget_bytes: int
    #: Of it, for what no framework counts.
    context_bytes: int
    #: Completed runs that it rests on.
    runs: int
    #: Bytes below which it has been seen to run out of memory or to slow down; 0: never.
    floor_bytes: int = 0


def learn(runs: Iterable[PastRun]) -> Lesson | None:
    """Work out the next budget.

    Args:
        runs: Of one key.

    Returns:
        `None`: no run has completed, so nothing is known but that.
    """
    past = tuple(runs)
    completed = [run for run in past if run.outcome == "completed"]
    if not completed:
        return None
    context = max(run.context_bytes for run in completed)
    need = max(_need_bytes(run, context) for run in completed)
    floor = known_floor_bytes(past)
    return Lesson(_round_up(max(need, floor)), context, len(completed), floor)


def known_floor_bytes(runs: Iterable[PastRun]) -> int:
    """Give the smallest budget that is known, or expected, not to be too small; 0: any.

    A run that was too small shows it; when it is forgotten, the runs that came after it still say so.
    """
    past = tuple(runs)
    shown = _floor_bytes(past, [run for run in past if run.outcome == "completed"])
    if shown:
        return shown
    told = [(run.ended_at, run.floor_bytes) for run in past if run.floor_bytes]
    return max(told)[1] if told else 0


def learned_context_bytes(runs: Iterable[PastRun]) -> int | None:
    """Give the largest context that runs were seen to have; `None`: none tells.

    A budget that a tag gives is corrected by it too.
    """
    seen = [run.context_bytes for run in runs if run.context_bytes and run.outcome == "completed"]
    return max(seen, default=None)


def expected_s(runs: Iterable[PastRun]) -> float | None:
    """Give the seconds for which a task is expected to hold its devices: the median of completed runs.

    The start of the process counts where it is known. `None`: no run has completed.
    """
    completed = (run for run in runs if run.outcome == "completed" and run.run_s > 0)
    held = [run.run_s + (run.start_s or 0.0) for run in completed]
    return statistics.median(held) if held else None


def _need_bytes(run: PastRun, context_bytes: int) -> int:
    live = run.live_bytes if run.steady_live_bytes is None else run.steady_live_bytes
    if live is None:
        # No framework tells: the process as a whole is all that is known.
        return _with_room(run.process_bytes)
    return _with_room(live) + context_bytes


def _with_room(live_bytes: int) -> int:
    return max(int(live_bytes * LIVE_FACTOR), live_bytes + LIVE_MARGIN_BYTES)


def _floor_bytes(past: Sequence[PastRun], completed: Sequence[PastRun]) -> int:
    """Give the smallest budget that is known, or expected, not to be too small; 0: any."""
    too_small = 0
    next_bytes = 0
    for run in past:
        if run.cause == "own_cap":
            factor, least = OOM_FACTOR, run.wanted_bytes or 0
        elif run.outcome == "completed" and _pinched(run, completed):
            factor, least = PINCH_FACTOR, 0
        else:
            continue
        too_small = max(too_small, run.budget_bytes)
        next_bytes = max(next_bytes, int(run.budget_bytes * factor), least)
    if not too_small:
        return 0
    enough = [
        run.budget_bytes
        for run in completed
        if run.cap_bytes is not None
        and run.budget_bytes > too_small
        and not _pinched(run, completed)
    ]
    return min(enough) if enough else next_bytes


def _pinched(run: PastRun, completed: Sequence[PastRun]) -> bool:
    """Tell whether a run's cap made it slow: retries, and slower than one that had more."""
    if run.cap_bytes is None or not run.alloc_retries:
        return False
    roomier = [r for r in completed if r.cap_bytes is None or r.cap_bytes > run.cap_bytes]
    if run.step_s is not None:
        steps = [r.step_s for r in roomier if r.step_s is not None]
        return bool(steps) and run.step_s > SLOWER_STEP * min(steps)
    return bool(roomier) and run.run_s > SLOWER_RUN * min(r.run_s for r in roomier)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ROUND_BYTES) * ROUND_BYTES
