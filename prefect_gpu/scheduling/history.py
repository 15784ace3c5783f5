"""The next budget (device memory to reserve) of a task, learned from its past runs.

Pure. A `HistoryStore` stores the runs. `prefect_gpu.runner.budgets` decides which task runs start while no need is
known, `ladder` gives the memory after an out-of-memory. The formula:

    need(run) = max(LIVE_FACTOR × growth × live, live + margin) + context
    budget    = max(need of the completed runs, floor)

*live* is the peak of the memory that frameworks had allocated, in steady steps if the run shows steps that are alike.
*margin* is the result of `margin_bytes`. *context* is the memory outside the frameworks' allocators, *floor* the result
of `known_floor_bytes`. *growth* is 1 until a budget was too small, then `growth_factor`. Measured on an H200,
2026-11-20: a ResNet-50 in training that took 13.2 GiB because the device was empty needs 4.8 GiB to run as fast.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import NamedTuple, Protocol, TypeVar

from prefect_gpu.units import MIB

#: Runs that a history keeps.
KEPT_RUNS = 20

#: Budget as a multiple of the framework's allocated memory. 1.3 cost a ResNet-50 no speed, 1.1 a quarter of its speed.
LIVE_FACTOR = 1.3

#: Largest factor on a budget for runs whose needs differ.
MOST_GROWTH = 2.0

#: Least result of `margin_bytes`: allocators take memory in segments (PyTorch's of 20 MiB).
LIVE_MARGIN_BYTES = 64 * MIB

#: Largest result of `margin_bytes`. With 1.3 times their live memory, some 0.7 GiB, evaluations of thirty architectures
#: were short of up to 112 MiB (docs/evidence/gpu-rehearsal.txt), which makes 0.3 × 0.7 GiB + 112 MiB, rounded down.
MOST_MARGIN_BYTES = 320 * MIB

#: Budgets are multiples of this many bytes, the size to which drivers and allocators round.
ROUND_BYTES = 2 * MIB

#: Next budget as a multiple of a budget that ran out of memory, and of a budget that slowed its run down (*pinched*).
OOM_FACTOR = 1.5
PINCH_FACTOR = 1.25

#: A budget pinched its run if the allocator emptied its cache to go on, and the run was slower by this factor than a
#: run with a larger cap: in the time of a step or, if no steps are known, of the whole body, which varies more.
SLOWER_STEP = 1.05
SLOWER_RUN = 1.2


class KeptAsTexts:
    """Base of dataclasses of texts and numbers that a history stores as short texts."""

    __slots__ = ()

    def to_texts(self) -> dict[str, str]:
        """Return each field that is neither `None` nor empty, as text by name."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: str(value) for name, value in values if value not in (None, "")}

    @classmethod
    def from_texts(cls: type[_Kept], texts: Mapping[str, str]) -> _Kept:
        """Return the value from the texts of `to_texts`. Unknown fields, of later versions, are ignored.

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

_READ = {"str": str, "int": int, "float": float}


class Line(NamedTuple):
    """Histories of a task that differ in one number of their `gpu:learn_by` values only, and the number in one of them."""

    #: Parameter that has the number.
    parameter: str
    #: Digest of all other values.
    others: str
    value: float


@functools.lru_cache(4096)
def _read_lines(text: str) -> tuple[Line, ...]:
    # Other programs may write artifacts or edit them.
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return tuple(Line(str(name), str(others), float(x)) for name, others, x in json.loads(text))
    return ()


@dataclass(frozen=True, slots=True)
class HistoryKey(KeptAsTexts):
    """Key of a history: one task in one flow, on one GPU model, for one set of `gpu:learn_by` values."""

    task_name: str
    #: Qualified name of the task's function, without module or file: moving it or editing a comment keeps the history.
    qualified_name: str
    #: GPU model, as in `Device.name`; empty: any model.
    device_name: str = ""
    #: Digest of the `gpu:learn_by` values; empty: the task has no such tag.
    learn_by: str = ""
    #: The `gpu:learn_by` values as text for people; empty: the task has no such tag.
    learn_by_words: str = field(default="", compare=False)
    #: Flow that submits the task: two programs on one server may have tasks of one name. `None`: outside a flow.
    flow_name: str | None = None
    #: The property `lines` as JSON; empty: none of the `gpu:learn_by` values is a number.
    learn_by_lines: str = field(default="", compare=False)

    def on(self, device_name: str) -> HistoryKey:
        """Return this key with another GPU model."""
        return replace(self, device_name=device_name)

    @property
    def lines(self) -> tuple[Line, ...]:
        """For each number among the `gpu:learn_by` values: the histories that differ in it only."""
        return _read_lines(self.learn_by_lines) if self.learn_by_lines else ()

    @property
    def task(self) -> tuple[str, str, str | None]:
        """Names of the task, its function and its flow: equal for all histories of one task in one flow."""
        return self.task_name, self.qualified_name, self.flow_name


@dataclass(frozen=True, slots=True)
class PastRun(KeptAsTexts):
    """Measurements of one past process of a task, as its history stores them. Bytes are those of its fullest device."""

    #: Wall-clock seconds since the epoch when the process ended.
    ended_at: float
    #: As in a report: "completed", "failed", "oom", "died", "timeout", "cancelled".
    outcome: str
    #: Cause of an out-of-memory (`ladder.Cause`); empty: no out-of-memory.
    cause: str = ""
    budget_bytes: int = 0
    #: Most bytes that the framework was allowed to allocate; `None`: no cap.
    cap_bytes: int | None = None
    #: Peak of the bytes that frameworks had allocated; `None`: no framework reports it.
    live_bytes: int | None = None
    #: The same peak within steady steps; `None`: no evidence of steps, or steps differ.
    steady_live_bytes: int | None = None
    #: Peak of the whole process's bytes on the device; `None`: neither the device nor counters show them.
    process_bytes: int | None = None
    #: Bytes taken outside the frameworks' allocators.
    context_bytes: int = 0
    #: Allocations after the first step that succeeded only once the allocator had emptied its cache.
    alloc_retries: int = 0
    #: Median seconds of a steady step; `None`: no evidence of steps.
    step_s: float | None = None
    #: Seconds of the task's body.
    run_s: float = 0.0
    #: Bytes that the run would have needed in all, by its out-of-memory error; `None`: not known.
    wanted_bytes: int | None = None
    #: Seconds from the placement to the body's first line; `None`: not known.
    start_s: float | None = None
    #: Result of `known_floor_bytes` when the process ended, also from runs no longer stored; `None`: no floor.
    floor_bytes: int | None = None
    #: Most bytes that the largest device could give when the process ended; `None`: not known.
    capacity_bytes: int | None = None
    #: Id of the task run, which may have had several processes; `None`: not known.
    task_run_id: str | None = None
    #: Fraction of the body's time in which the GPU computed for the process; `None`: not known.
    busy_fraction: float | None = None


#: Least seconds of a run whose use of the GPU counts: waiting for another task of a second costs more than it gains,
#: since starts, 0.3 s each, would follow each other.
BUSY_RUN_S = 10.0


class HistoryStore(Protocol):
    """Store of the past runs of tasks. Safe to use from several threads."""

    def runs(self, key: HistoryKey) -> Sequence[PastRun]:
        """Return the last `KEPT_RUNS` runs of a key, newest first.

        Raises:
            OSError: The runs cannot be read now.
        """
        ...

    def siblings(self, key: HistoryKey) -> Collection[HistoryKey]:
        """Return the keys of all histories of the task of a key in its flow, for any GPU model and values.

        Raises:
            OSError: The histories cannot be read now.
        """
        ...

    def add(self, key: HistoryKey, run: PastRun) -> None:
        """Store one more run, without waiting for the write. A run that cannot be stored is lost with a warning."""
        ...


@dataclass(frozen=True, slots=True)
class LearnedBudget:
    """The next budget of a task, computed from its history."""

    #: Bytes to reserve on each device, context included. At most what the largest device could give at the last run.
    budget_bytes: int
    #: Part of `budget_bytes` for memory that no framework counts.
    context_bytes: int
    #: Number of completed runs from which the budget is computed.
    runs: int
    #: Smallest budget believed to be enough, from runs that ran out of memory or slowed down; 0: no such run.
    floor_bytes: int = 0
    #: Factor for a run that may need more than all past runs, from 1 to `MOST_GROWTH`.
    growth: float = 1.0
    #: Bytes to reserve if `budget_bytes` was not enough. Counts the memory of first steps, too.
    whole_bytes: int = 0
    #: Bytes by the formula: more than `budget_bytes` if no device could give so many.
    need_bytes: int = 0


def learn(runs: Iterable[PastRun]) -> LearnedBudget | None:
    """Return the next budget from all runs of one history; `None`: no completed run has measured memory."""
    past = tuple(runs)
    completed = [run for run in past if run.outcome == "completed" and _is_measured(run)]
    if not completed:
        return None
    context = max(run.context_bytes for run in completed)
    floor = known_floor_bytes(past)
    growth = _growth(completed) if floor else 1.0
    need = _largest_need_bytes(completed, growth)
    need_bytes = round_up(max(need, floor))
    return LearnedBudget(
        _bounded(need_bytes, past),
        context,
        len(completed),
        floor,
        growth,
        round_up(max(_whole_need_bytes(completed), need, floor)),
        need_bytes,
    )


def _bounded(size_bytes: int, past: Sequence[PastRun]) -> int:
    """Return a size, limited to the device capacity that the newest run has recorded."""
    known = [(run.ended_at, run.capacity_bytes) for run in past if run.capacity_bytes]
    return min(size_bytes, max(known)[1]) if known else size_bytes


def round_up(size_bytes: int) -> int:
    """Return a size rounded up to a multiple of `ROUND_BYTES`."""
    return -(-size_bytes // ROUND_BYTES) * ROUND_BYTES


def known_floor_bytes(runs: Iterable[PastRun]) -> int:
    """Return the smallest budget believed to be enough, from runs that ran out of memory or slowed down.

    0: no such run. Each later run records the number, so it outlives the run that showed it.
    """
    past = tuple(runs)
    shown = _floor_bytes(past, [run for run in past if run.outcome == "completed"])
    if shown:
        return _bounded(shown, past)
    told = [(run.ended_at, run.floor_bytes) for run in past if run.floor_bytes]
    return _bounded(max(told)[1], past) if told else 0


def learned_context_bytes(runs: Iterable[PastRun]) -> int | None:
    """Return the largest measured context of completed runs; it also corrects the caps of budgets in tags. `None`: none."""
    seen = [run.context_bytes for run in runs if run.context_bytes and run.outcome == "completed"]
    return max(seen, default=None)


def expected_s(runs: Iterable[PastRun]) -> float | None:
    """Return the median seconds for which completed runs held their devices; `None`: no completed run."""
    completed = (run for run in runs if run.outcome == "completed" and run.run_s > 0)
    held = [run.run_s + (run.start_s or 0.0) for run in completed]
    return statistics.median(held) if held else None


def busy_fraction(runs: Iterable[PastRun]) -> float | None:
    """Return the largest fraction of the time in which the GPU computed for a completed run of `BUSY_RUN_S` or more.

    The largest, as a run beside others that fill the GPU has a part of it only. `None`: no such run.
    """
    long = (run for run in runs if run.outcome == "completed" and run.run_s >= BUSY_RUN_S)
    return max((r.busy_fraction for r in long if r.busy_fraction is not None), default=None)


def _is_measured(run: PastRun) -> bool:
    return run.live_bytes is not None or run.process_bytes is not None


def growth_factor(sizes_bytes: Sequence[int]) -> float:
    """Return the factor, 1 to `MOST_GROWTH`, by which a later run may need more than the largest past run.

    Runs differ in memory where inputs change size. If the logarithms of *n* needs are spread evenly over a range, the
    upper end of the range is expected above the largest need by the average distance between two needs: a factor of
    (largest ÷ median)^(2 ÷ (*n* - 1)). The factor is 1 if all needs are equal, and approaches 1 with many runs. The
    median is used and not the smallest need: a single trial run on a few inputs says nothing about large inputs.
    """
    known = [size for size in sizes_bytes if size > 0]
    if len(known) < 2:
        return 1.0
    if len(known) == 2:
        return float(min(MOST_GROWTH, max(known) / min(known)))
    above = max(known) / statistics.median(known)
    return float(min(MOST_GROWTH, above ** (2 / (len(known) - 1))))


def _growth(completed: Sequence[PastRun]) -> float:
    """Return the largest growth factor of three groups: steady memory, whole memory of the other runs, and all runs."""
    # Whole and steady memory differ in equal runs, so they are compared in the last group only: there whole memory
    # counts for runs with a cap, and steady memory without a cap, where a first step may take much more than it needs.
    steady = [run.steady_live_bytes for run in completed if run.steady_live_bytes is not None]
    others = [run for run in completed if run.steady_live_bytes is None]
    sizes = [steady, [_basis_bytes(run) for run in others]]
    if any(run.cap_bytes is not None for run in others):
        alone = [run.steady_live_bytes or 0 for run in completed if run.cap_bytes is None]
        within = [replace(run, steady_live_bytes=None) for run in completed if run.cap_bytes]
        sizes.append([*alone, *map(_basis_bytes, within)])
    return max(map(growth_factor, sizes))


def _basis_bytes(run: PastRun) -> int:
    """Return the bytes from which a run's need is computed: steady live, else live, else those of the process."""
    live = run.live_bytes if run.steady_live_bytes is None else run.steady_live_bytes
    return (run.process_bytes or 0) if live is None else live


def margin_bytes(run: PastRun) -> int:
    """Return the least bytes of a budget above the live memory of a run: those that its allocators held, within bounds.

    Blocks that differ in size do not fit each other's places, so that an allocator holds more than is allocated.
    """
    held = (run.process_bytes or 0) - run.context_bytes - _basis_bytes(run)
    return min(max(LIVE_MARGIN_BYTES, held), MOST_MARGIN_BYTES)


def _need_bytes(run: PastRun, context_bytes: int, growth: float) -> int:
    basis = _basis_bytes(run)
    need = max(int(basis * LIVE_FACTOR * growth), basis + margin_bytes(run))
    # The bytes of a whole process include its context.
    whole = run.live_bytes is None and run.steady_live_bytes is None
    return need if whole else need + context_bytes


def _largest_need_bytes(runs: Sequence[PastRun], growth: float = 1.0) -> int:
    context = max((run.context_bytes for run in runs), default=0)
    return max((_need_bytes(run, context, growth) for run in runs), default=0)


def _whole_need_bytes(completed: Sequence[PastRun]) -> int:
    """Return the largest need of runs, computed from all their allocated memory, first steps included."""
    return _largest_need_bytes(
        [r if r.live_bytes is None else replace(r, steady_live_bytes=None) for r in completed]
    )


def _floor_bytes(past: Sequence[PastRun], completed: Sequence[PastRun]) -> int:
    """Return the smallest budget believed to be enough, without the floors recorded in runs; 0: no run was short."""
    too_small = 0
    next_bytes = 0
    measured = [run for run in completed if _is_measured(run)]
    need = _largest_need_bytes(measured)
    for run in past:
        # A run that had the whole device says nothing about smaller budgets.
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
    """Return whether a cap slowed a run down: the run had allocation retries, and a run with a larger cap was faster."""
    if run.cap_bytes is None or not run.alloc_retries:
        return False
    roomier = [r for r in completed if r.cap_bytes is None or r.cap_bytes > run.cap_bytes]
    if run.step_s is not None:
        steps = [r.step_s for r in roomier if r.step_s is not None]
        return bool(steps) and run.step_s > SLOWER_STEP * min(steps)
    return bool(roomier) and run.run_s > SLOWER_RUN * min(r.run_s for r in roomier)


# The budget of a task with a new value of a `gpu:learn_by` parameter, estimated from runs with other values.
#
# The estimate is taken from two curves through two known values: a line, and a power law (a line in logarithms). Most tasks
# need *a* + *c* × value^*p* bytes, with *p* from 1 (size of a batch) to 2 (width of a layer or an image). Such a need is at
# most the smaller of the two curves between the known values, and at least the larger one beyond them. It equals that curve
# if *p* is 1 or *a* is 0.

#: Largest ratio of a value to the nearest known value, if all known values are smaller, or all are larger.
REACH = 8.0

#: Largest distance to such a value, as a multiple of the distance between the two known values of the curve. Distances are
#: logarithms of ratios: from 16 and 32, values up to 256 are estimated.
STRETCH = 3.0

#: Exponents of a power law beyond the known values. Outside these bounds, memory does not follow the value.
LEAST_POWER, MOST_POWER = -1.0, 3.0

#: Known values on each side of the new one that are used, and how many are looked at to find them.
MOST_VALUES = 3
MOST_LOOKS = 6

#: Smallest ratio of two known values that are used. Closer ones would show noise.
SPREAD = 1.2

#: Largest factor by which a known value may need more than its own estimate, and largest by which it may need less. If it
#: misses by more, memory does not follow the value.
MOST_ABOVE = 1.5
MOST_BELOW = 2.0

#: Smallest and largest value that is used, apart from 0 and of either sign.
SMALLEST, LARGEST = 1e-12, 1e12


class Estimate(NamedTuple):
    """An estimated budget."""

    #: Learned from 0 runs. Its `growth` is the margin: the largest factor by which a known value needs more than its own
    #: estimate from the others.
    budget: LearnedBudget
    #: Known values from which it was estimated, in order.
    values: tuple[float, ...]
    #: Logarithm of the ratio to the nearest known value; 0 between known values.
    distance: float


def estimate(
    value: float, others: Iterable[float], read: Callable[[float], LearnedBudget | None]
) -> Estimate | None:
    """Return the estimated budget for a value; `None`: other values say too little.

    `read` returns the budget that was learned for one of the `others`; `None`: none was.
    """
    if not _is_usable(value):
        return None
    known = _choose(value, filter(_is_usable, others), read)
    context = max((budget.context_bytes for budget in known.values()), default=0)
    needs = {
        x: float(max(budget.need_bytes - budget.context_bytes, LIVE_MARGIN_BYTES))
        for x, budget in known.items()
    }
    need = _curve(value, needs)
    whole = _curve(value, {x: max(needs[x], known[x].whole_bytes) for x in known})
    misses = [_miss(x, needs) for x in needs]
    margin = max([1.0, *misses])
    if need is None or whole is None or margin > MOST_ABOVE or min(misses) < 1 / MOST_BELOW:
        return None
    need_bytes = round_up(int(need * margin)) + context
    whole_bytes = max(round_up(int(whole)), need_bytes)
    budget = LearnedBudget(
        need_bytes, context, 0, growth=margin, whole_bytes=whole_bytes, need_bytes=need_bytes
    )
    values = sorted(known)
    inside = values[0] <= value <= values[-1]
    return Estimate(
        budget, tuple(values), 0.0 if inside else min(distance(value, x) for x in values)
    )


def _choose(
    value: float, others: Iterable[float], read: Callable[[float], LearnedBudget | None]
) -> dict[float, LearnedBudget]:
    """Return the budgets of the nearest known values on both sides of a value."""
    every = sorted(set(others))
    found: dict[float, LearnedBudget] = {}
    for side in ([x for x in every if x > value], [x for x in every[::-1] if x <= value]):
        last, looks, kept = None, 0, 0
        for x in side:
            if last is not None and distance(x, last) < math.log(SPREAD):
                continue
            if kept == MOST_VALUES or looks == MOST_LOOKS:
                break
            looks += 1
            budget = read(x)
            if budget is not None:
                found[x], last, kept = budget, x, kept + 1
    return found


def _is_usable(value: float) -> bool:
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def distance(value: float, other: float) -> float:
    """Return the logarithm of the ratio of two values; infinity unless both are positive."""
    return abs(math.log(value) - math.log(other)) if value > 0 and other > 0 else math.inf


def _miss(value: float, sizes: Mapping[float, float]) -> float:
    """Return by which factor a known value's size is above its estimate from the others; 1: there is no estimate."""
    again = _curve(value, {x: size for x, size in sizes.items() if x != value})
    return 1.0 if again is None else sizes[value] / again


def _curve(value: float, sizes: Mapping[float, float]) -> float | None:
    """Return the size for a value, from the sizes of at least two others; `None`: they say too little."""
    xs = sorted(sizes)
    if len(xs) < 2:
        return None
    if xs[0] <= value <= xs[-1]:
        at = max(1, next(i for i, x in enumerate(xs) if x >= value))
        return min(_curves(value, (xs[at - 1], xs[at]), sizes))
    near, *far = sorted(xs, reverse=value > xs[0])
    away = distance(value, near)
    # A support that is as far from the nearest value as the new value is, or the farthest one.
    finite = [x for x in far if math.isfinite(distance(x, near))] or [near]
    support = next((x for x in finite if distance(x, near) >= away - 1e-9), finite[-1])
    apart = distance(near, support)
    if apart < math.log(SPREAD) - 1e-9:
        return None
    if away > min(math.log(REACH), STRETCH * apart) + 1e-9:
        return None
    slope = math.log(sizes[near] / sizes[support]) / math.log(near / support)
    if not LEAST_POWER <= slope <= MOST_POWER:
        return None
    return max(_curves(value, (support, near), sizes))


def _curves(
    value: float, supports: tuple[float, float], sizes: Mapping[float, float]
) -> list[float]:
    """Return the size by the line through two values, and by the power law if all values are positive."""
    x0, x1 = supports
    y0, y1 = sizes[x0], sizes[x1]
    line = y0 + (y1 - y0) * ((value - x0) / (x1 - x0))
    if min(value, x0, x1) <= 0 or distance(x0, x1) < 1e-9:
        return [line]
    share = (math.log(value) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return [line, math.exp(math.log(y0) + share * math.log(y1 / y0))]
