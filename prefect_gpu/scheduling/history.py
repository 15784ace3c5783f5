"""The next budget of a task, learned from its past runs.

Pure. `HistoryStore` keeps the runs; `prefect_gpu.runner.budgets` decides which task run may probe while nothing is
known, `ladder` what happens after an out-of-memory. The formula, with the figures that it is based on (a ResNet-50
in training on an H200, 2026-11-20: a run that took 13.2 GiB because the device was empty needs 4.8 to run as fast):

    need(run) = max(LIVE_FACTOR × growth × live, live + LIVE_MARGIN) + context
    budget    = max(need of the completed runs, floor)

*live* is the steady live peak where the run gave evidence of steps that are alike, else the whole live peak.
*growth* is 1 until a budget was too small, and `growth_factor` from then on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Protocol, TypeVar

from prefect_gpu.units import MIB

#: Runs that a history keeps.
KEPT_RUNS = 20

#: Budget of a framework as a multiple of its allocated memory. 1.3 cost a ResNet-50 no speed, 1.1 a quarter of it.
LIVE_FACTOR = 1.3

#: Largest factor on a budget for runs that differ in their needs.
MOST_GROWTH = 2.0

#: Least difference of budget and live memory: allocators take memory in segments (PyTorch's of 20 MiB).
LIVE_MARGIN_BYTES = 64 * MIB

#: Budgets are multiples of this many bytes, the size to which drivers and allocators round.
ROUND_BYTES = 2 * MIB

#: Next budget as a multiple of one that ended in an out-of-memory, and of one that pinched.
OOM_FACTOR = 1.5
PINCH_FACTOR = 1.25

#: A run pinched if its allocator gave up its cache and the run was slower than one with a larger cap by this factor:
#: in the time of its steps, or in that of the whole body, which varies more.
SLOWER_STEP = 1.05
SLOWER_RUN = 1.2


class KeptAsTexts:
    """A dataclass of texts and numbers that a history keeps as short texts."""

    __slots__ = ()

    def to_texts(self) -> dict[str, str]:
        """Return every known field as a short text."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: str(value) for name, value in values if value not in (None, "")}

    @classmethod
    def from_texts(cls: type[_Kept], texts: Mapping[str, str]) -> _Kept:
        """Return the value that `to_texts` wrote; unknown fields, of later versions, are ignored.

        Raises:
            ValueError: A field is missing, or is not a number where one is expected.
        """
        values: dict[str, object] = {}
        for f in fields(cls):  # type: ignore[arg-type]
            if f.name in texts:
                values[f.name] = _READ[f.type.removesuffix(" | None")](texts[f.name])
            elif f.default is MISSING:
                raise ValueError(f"{f.name} is missing in {sorted(texts)}")
        return cls(**values)


_Kept = TypeVar("_Kept", bound=KeptAsTexts)

#: How a field of each type is read from its text.
_READ = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class HistoryKey(KeptAsTexts):
    """Key of a history: one task in one flow, on one GPU model, for one set of `gpu:learn_by` values."""

    task_name: str
    #: Qualified name of the task's function, without module or file: moving it or editing a comment keeps the history.
    qualified_name: str
    #: GPU model, as `Device.name` has it; empty: of any.
    device_name: str = ""
    #: Digest of the `gpu:learn_by` values; empty: none are named.
    learn_by: str = ""
    #: The same values in words, for people; empty: none are named.
    learn_by_words: str = field(default="", compare=False)
    #: Flow that submits the task: two programs on one server may have tasks of one name. `None`: outside a flow.
    flow_name: str | None = None

    def on(self, device_name: str) -> HistoryKey:
        """Return the key for a GPU model."""
        return replace(self, device_name=device_name)


@dataclass(frozen=True, slots=True)
class PastRun(KeptAsTexts):
    """One process of a task, as its history keeps it. Bytes are those of one device, the fullest."""

    #: Wall-clock seconds since the epoch when it ended.
    ended_at: float
    #: As in a report: "completed", "failed", "oom", "died", "timeout", "cancelled".
    outcome: str
    #: Cause of an out-of-memory (`ladder.Cause`); empty: there was none.
    cause: str = ""
    budget_bytes: int = 0
    #: Bytes that its framework could allocate at most; `None`: no cap.
    cap_bytes: int | None = None
    #: Most bytes that its frameworks had allocated; `None`: no framework reports it.
    live_bytes: int | None = None
    #: Most bytes that its frameworks had allocated in steady steps; `None`: no evidence of steps, or they differ.
    steady_live_bytes: int | None = None
    #: Most bytes that the device showed for the whole process; `None`: neither the device nor counters show them.
    process_bytes: int | None = None
    #: Bytes that it took outside its frameworks' allocators.
    context_bytes: int = 0
    #: Allocations, past the first step, that succeeded only after the cache was given up.
    alloc_retries: int = 0
    #: Median seconds of a steady step; `None`: no evidence of steps.
    step_s: float | None = None
    #: Seconds of the body.
    run_s: float = 0.0
    #: Bytes on one device that the run would have needed in all, by its out-of-memory error.
    wanted_bytes: int | None = None
    #: Seconds from its placement to its body's first line; `None`: not known.
    start_s: float | None = None
    #: Bytes known to be too few when it ended, also from runs that are no longer kept; `None`: none are.
    floor_bytes: int | None = None
    #: Most bytes that the largest device could give when it ended; `None`: not known.
    capacity_bytes: int | None = None
    #: Id of its task run, which may have had several processes; `None`: not known.
    task_run_id: str | None = None


class HistoryStore(Protocol):
    """Keeps the runs of tasks. Safe to use from several threads."""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """Return the last `KEPT_RUNS` runs, newest first; none if nothing is known.

        Raises:
            OSError: The runs cannot be read now.
        """
        ...

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """Keep one more run, without waiting. A run that cannot be kept is lost with a warning."""
        ...


@dataclass(frozen=True, slots=True)
class LearnedBudget:
    """The next budget of a task, as its history suggests."""

    #: Bytes to reserve on each device, the context included. Never more than a device could give at the last run.
    budget_bytes: int
    #: Part of `budget_bytes` for memory that no framework counts.
    context_bytes: int
    #: Number of completed runs that the budget is learned from.
    runs: int
    #: Bytes below which runs ran out of memory or slowed down; 0: none did.
    floor_bytes: int = 0
    #: Factor for runs that may need more than all before, from 1 to `MOST_GROWTH`.
    growth: float = 1.0
    #: Bytes to reserve if `budget_bytes` was not enough: the memory of first steps counts too.
    whole_bytes: int = 0
    #: Bytes by the formula, more than `budget_bytes` if no device could give them.
    need_bytes: int = 0


def learn(runs: Iterable[PastRun]) -> LearnedBudget | None:
    """Return the next budget from all runs of one key; `None`: no completed run has its memory measured."""
    past = tuple(runs)
    completed = [run for run in past if run.outcome == "completed" and _is_measured(run)]
    if not completed:
        return None
    context = max(run.context_bytes for run in completed)
    floor = known_floor_bytes(past)
    growth = _growth(completed) if floor else 1.0
    need = max(_need_bytes(run, context, growth) for run in completed)
    need_bytes = _round(max(need, floor))
    return LearnedBudget(
        _bounded(need_bytes, past),
        context,
        len(completed),
        floor,
        growth,
        _round(max(_whole_need_bytes(completed), need, floor)),
        need_bytes,
    )


def _bounded(size_bytes: int, past: Sequence[PastRun]) -> int:
    """Return a size, at most the capacity of the largest device at the newest run that recorded it."""
    known = [(run.ended_at, run.capacity_bytes) for run in past if run.capacity_bytes]
    return min(size_bytes, max(known)[1]) if known else size_bytes


def _round(size_bytes: int) -> int:
    return -(-size_bytes // ROUND_BYTES) * ROUND_BYTES


def known_floor_bytes(runs: Iterable[PastRun]) -> int:
    """Return the smallest budget believed to be enough, from runs that ran out of memory or slowed down.

    0: there was no such run. Later runs repeat the number, so it stays known when that run is no longer kept.
    """
    past = tuple(runs)
    shown = _floor_bytes(past, [run for run in past if run.outcome == "completed"])
    if shown:
        return _bounded(shown, past)
    told = [(run.ended_at, run.floor_bytes) for run in past if run.floor_bytes]
    return _bounded(max(told)[1], past) if told else 0


def learned_context_bytes(runs: Iterable[PastRun]) -> int | None:
    """Return the largest measured context of completed runs; `None`: none was measured.

    It also corrects the cap of a budget that a tag states.
    """
    seen = [run.context_bytes for run in runs if run.context_bytes and run.outcome == "completed"]
    return max(seen, default=None)


def expected_s(runs: Iterable[PastRun]) -> float | None:
    """Return the median seconds for which completed runs held their devices, known starts included; `None`: no run."""
    completed = (run for run in runs if run.outcome == "completed" and run.run_s > 0)
    held = [run.run_s + (run.start_s or 0.0) for run in completed]
    return statistics.median(held) if held else None


def _is_measured(run: PastRun) -> bool:
    return run.live_bytes is not None or run.process_bytes is not None


def growth_factor(sizes_bytes: Sequence[int]) -> float:
    """Return the factor, 1 to `MOST_GROWTH`, by which a later run may need more than the largest run.

    Runs differ in memory where inputs change size. If the logarithms of their needs are spread evenly, the end of that
    range is expected above the largest of *n* by the average distance between two of them: a factor of
    (largest ÷ median)^(2 ÷ (*n* - 1)). It is 1 where all are equal, and approaches 1 with many runs. The median and not
    the smallest, because a single run on a few inputs, to try the task out, says nothing of large ones.
    """
    known = [size for size in sizes_bytes if size > 0]
    if len(known) < 2:
        return 1.0
    if len(known) == 2:
        return float(min(MOST_GROWTH, max(known) / min(known)))
    above = max(known) / statistics.median(known)
    return float(min(MOST_GROWTH, above ** (2 / (len(known) - 1))))


def _growth(completed: Sequence[PastRun]) -> float:
    """Return the largest growth factor: of steady memory, of the other runs, and of both within a cap."""
    # The whole memory of a run is not compared with another's steady memory: they differ in equal runs. Nor is memory
    # on a device to itself, where a first step may have taken much more than it needs.
    steady = [run.steady_live_bytes for run in completed if run.steady_live_bytes is not None]
    others = [run for run in completed if run.steady_live_bytes is None]
    sizes = [steady, [_basis_bytes(run) for run in others]]
    if any(run.cap_bytes is not None for run in others):
        alone = [run.steady_live_bytes or 0 for run in completed if run.cap_bytes is None]
        within = [replace(run, steady_live_bytes=None) for run in completed if run.cap_bytes]
        sizes.append([*alone, *map(_basis_bytes, within)])
    return max(map(growth_factor, sizes))


def _basis_bytes(run: PastRun) -> int:
    """Return the live bytes that a run's need is computed from; the process's bytes if no framework reports any."""
    live = run.live_bytes if run.steady_live_bytes is None else run.steady_live_bytes
    return (run.process_bytes or 0) if live is None else live


def _need_bytes(run: PastRun, context_bytes: int, growth: float) -> int:
    basis = _basis_bytes(run)
    need = max(int(basis * LIVE_FACTOR * growth), basis + LIVE_MARGIN_BYTES)
    # The process as a whole includes its context.
    whole = run.live_bytes is None and run.steady_live_bytes is None
    return need if whole else need + context_bytes


def _whole_need_bytes(completed: Sequence[PastRun]) -> int:
    """Return the largest need of runs by all their allocated memory, first steps included."""
    context = max((run.context_bytes for run in completed), default=0)
    whole = (
        run if run.live_bytes is None else replace(run, steady_live_bytes=None) for run in completed
    )
    return max((_need_bytes(run, context, 1.0) for run in whole), default=0)


def _floor_bytes(past: Sequence[PastRun], completed: Sequence[PastRun]) -> int:
    """Return the smallest budget believed to be enough, by the runs themselves; 0: none ran short."""
    too_small = 0
    next_bytes = 0
    measured = [run for run in completed if _is_measured(run)]
    context = max((run.context_bytes for run in measured), default=0)
    need = max((_need_bytes(run, context, 1.0) for run in measured), default=0)
    for run in past:
        # A run with a whole device says nothing of smaller budgets.
        limited = run.cap_bytes is not None or (run.process_bytes or 0) > run.budget_bytes
        if run.cause == "own_cap" and limited:
            factor, least = OOM_FACTOR, run.wanted_bytes or 0
            if run.budget_bytes >= need:
                # Steady memory was too little; the whole memory of a completed run was enough for that run.
                least = max(least, _whole_need_bytes(measured))
        elif run.outcome == "completed" and _pinched(run, completed):
            factor, least = PINCH_FACTOR, 0
        else:
            continue
        too_small = max(too_small, run.budget_bytes)
        next_bytes = max(next_bytes, int(run.budget_bytes * factor), least)
    if not too_small:
        return 0
    capped = [r for r in completed if r.cap_bytes is not None and r.budget_bytes > too_small]
    enough = [run.budget_bytes for run in capped if not _pinched(run, completed)]
    return min([*enough, next_bytes])


def _pinched(run: PastRun, completed: Sequence[PastRun]) -> bool:
    """Return whether a run's cap made it slow: it had retries, and a run with a larger cap was faster."""
    if run.cap_bytes is None or not run.alloc_retries:
        return False
    roomier = [r for r in completed if r.cap_bytes is None or r.cap_bytes > run.cap_bytes]
    if run.step_s is not None:
        steps = [r.step_s for r in roomier if r.step_s is not None]
        return bool(steps) and run.step_s > SLOWER_STEP * min(steps)
    return bool(roomier) and run.run_s > SLOWER_RUN * min(r.run_s for r in roomier)
