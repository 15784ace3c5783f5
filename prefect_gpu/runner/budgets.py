"""Choose the budget of a task: from its tag, from its history, from runs with other values, or as a probe.

A history holds the runs of one task on one device model, with equal `gpu:learn_by` values. While it is empty, the budget
is estimated from the histories of other values. A probe is a first run for which neither shows a need. Which probes may be
placed is decided in `broker.opening`. The formulas are in `scheduling.history`, kept runs in
`reports.history`, budgets after an out-of-memory in `submission`.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import BudgetSource, TaskReport, past_run
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling import history
from prefect_gpu.scheduling.history import HistoryKey, HistoryStore, LearnedBudget, Line, PastRun
from prefect_gpu.scheduling.model import NEVER_BYTES, Device, Memory, ModelBudgets
from prefect_gpu.settings import read_settings

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Grant:
    """The budget of a process, and the source of the budget."""

    #: Memory to request on each device.
    memory: Memory
    source: BudgetSource
    #: Measured context of the task's own runs, in bytes by device name.
    contexts: Mapping[str, int] = field(default_factory=dict)
    #: By device model: histories that show no need, so that the process is a probe there.
    histories: Mapping[str, HistoryKey] = field(default_factory=dict)
    #: Number of kept runs by which the histories were read, as in `Broker.submit`.
    as_of: int = 0
    #: Expected seconds on its devices; `None`: no run has completed.
    expected_s: float | None = None
    #: As `Request.fills`.
    fills: bool = False
    #: Whether `memory` was decided after an out-of-memory, not by `source`.
    after_oom: bool = False
    #: Bytes that were enough for past runs, first steps included, by device name.
    whole_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Largest possible budget on each device, if the process is placed on the largest; `None`: not known.
    capacity_bytes: int | None = None
    #: Number of completed runs that the budget was learned from, by device name.
    learned_runs: Mapping[str, int] = field(default_factory=dict)
    #: Values from which the budget was estimated, by device name: `batch_size 16, 32`.
    estimated_from: Mapping[str, str] = field(default_factory=dict)
    #: As `Request.probe_fraction`.
    probe_fraction: float = 0.0
    #: Whether the process is no client of MPS, since one of the same call ended with a fault.
    outside_mps: bool = False
    #: Why a probe has a device to itself, for the log; `None`: the process is no probe, or shares its device.
    alone_because: str | None = None

    def source_on(self, device_name: str) -> BudgetSource:
        """Return the source of the budget on a device model."""
        return "estimated" if device_name in self.estimated_from else self.source


#: A task whose GPU computes for this fraction of its time keeps it busy: a second one would gain at most the rest.
FILLED_FRACTION = 0.9

#: Most histories that can be estimated after one run and are told to ask again: those with the nearest values.
MOST_TOLD = 16

#: Shared by all flows of this Python process: the next flow learns from past runs at once, in whichever store.
PROCESS_RUNS = MemoryHistory()


class _Values:
    """Values of histories, by the lines on which the histories are. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[tuple[object, str, str], dict[HistoryKey, float]] = {}

    def add(self, key: HistoryKey) -> None:
        with self._lock:
            for line in key.lines:
                there = self._lines.setdefault((key.task, line.parameter, line.others), {})
                there[key] = line.value

    def discard(self, key: HistoryKey) -> None:
        with self._lock:
            for line in key.lines:
                there = self._lines.get((key.task, line.parameter, line.others), {})
                there.pop(key, None)

    def on(self, key: HistoryKey, line: Line) -> list[tuple[HistoryKey, float]]:
        """Return the histories on a line of a history, with their values."""
        with self._lock:
            return list(self._lines.get((key.task, line.parameter, line.others), {}).items())


class BudgetBook:
    """Chooses the budgets of one runner's tasks, and keeps their processes' needs. Safe to use from several threads.

    `store` keeps runs beyond this Python process, `recent` runs of this process.
    """

    def __init__(self, store: HistoryStore, recent: HistoryStore = PROCESS_RUNS) -> None:
        self._store = store
        self._recent = recent
        #: Runs of the store by history, as last read. Any thread may replace a value as a whole.
        self._kept: dict[HistoryKey, Sequence[PastRun]] = {}
        #: Histories with runs, and histories without a need that were asked for.
        self._known, self._unknown = _Values(), _Values()
        #: Tasks whose histories are in `_known`. The lock is held while they are listed.
        self._listed: set[object] = set()
        self._listing = threading.Lock()
        self._told = False
        self._one_fills = read_settings().one_busy_task_per_device

    def grant(self, call: TaskCall, capacities: Mapping[Device, int]) -> Grant:
        """Return the grant of a task's process. `capacities` are the most bytes on each device that the task may use."""
        identity, memory = call.identity, call.plan.policy.memory
        #: The largest capacity of each device model.
        models: dict[str, int] = {}
        for device, size in capacities.items():
            models[device.name] = max(size, models.get(device.name, 0))
        runs = {name: self._runs(identity.on(name)) for name in models}
        expected_s, fills = _longest_s(runs), self._one_fills and _fills(runs)
        if memory is not None:
            return Grant(memory, "tag", _contexts(runs), expected_s=expected_s, fills=fills)
        known = {n: found for n, past in runs.items() if (found := _placeable(past)) is not None}
        estimated_from = {}
        # A task that keeps to its budget has a first run: an estimate is not what its author or its runs have said.
        estimable = identity.learn_by_lines and call.plan.policy.oom != "fail"
        for name in runs.keys() - known.keys() if estimable else ():
            self._list(identity)
            # Before the runs are read: `take` looks here after it has added a run.
            self._unknown.add(identity.on(name))
            made = self._estimate(identity.on(name), self._runs)
            if made is not None:
                known[name], estimated_from[name] = _above_floor(made[0], runs[name]), made[1]
        grant = _learned(call, known, runs.keys() - known.keys(), models)
        return replace(grant, expected_s=expected_s, fills=fills, estimated_from=estimated_from)

    def take(self, identity: HistoryKey, report: TaskReport) -> dict[HistoryKey, int | None]:
        """Add a process's run to its history; return what is known by now, as `events.Kept.shown`.

        Does not wait for the API.
        """
        if not report.devices:
            return {}
        key, run = identity.on(report.devices[0].name), past_run(report)
        # No call of the API here, on the thread that places all tasks.
        known = (*self._seen(key), run)
        run = replace(run, floor_bytes=history.known_floor_bytes(known) or None)
        self._recent.add(key, run)
        self._store.add(key, run)
        self._known.add(key)
        lesson = _placeable(known)
        if lesson is None:
            return {}
        self._unknown.discard(key)
        return {key: lesson.need_bytes, **dict.fromkeys(self._estimable(key))}

    def _estimable(self, key: HistoryKey) -> Iterator[HistoryKey]:
        """Yield histories that can be estimated now that a history has a need, each once."""
        for line in key.lines:
            waiting = self._unknown.on(key, line)
            away = [(history.distance(value, line.value), value, other) for other, value in waiting]
            for *_, other in heapq.nsmallest(MOST_TOLD, away, lambda each: each[:2]):
                if self._estimate(other, self._seen) is not None:
                    self._unknown.discard(other)
                    yield other

    def _estimate(
        self, key: HistoryKey, read: Callable[[HistoryKey], Sequence[PastRun]]
    ) -> tuple[LearnedBudget, str] | None:
        """Return the estimated budget of a history, and from which values, as text; `None`: they say too little.

        The values are those of the same GPU model if there are two, else those of all models.
        """
        found: list[tuple[float, LearnedBudget, str]] = []
        for line in key.lines:
            there = [each for each in self._known.on(key, line) if each[0] != key]
            own = [each for each in there if each[0].device_name == key.device_name]
            by_value: dict[float, list[HistoryKey]] = {}
            for other, value in own if len(own) > 1 else there:
                by_value.setdefault(value, []).append(other)
            made = history.estimate(line.value, by_value, partial(_largest, by_value, read))
            if made is not None:
                words = ", ".join(f"{value:.12g}" for value in made.values)
                found.append((made.distance, made.budget, f"{line.parameter} {words}"))
        nearest = min(found, key=lambda each: each[0], default=None)
        return None if nearest is None else nearest[1:]

    def _list(self, key: HistoryKey) -> None:
        """Add all histories of a task, from the store and of this process, to `_known`, once."""
        with self._listing:
            if key.task in self._listed:
                return
            kept = self._try(lambda: self._store.siblings(key))
            if kept is not None:
                self._listed.add(key.task)
            for other in (*(kept or ()), *self._recent.siblings(key)):
                self._known.add(other)

    def _seen(self, key: HistoryKey) -> list[PastRun]:
        """Return the runs of a history that are known without a call of the API, as `_runs`."""
        found = {*self._kept.get(key, ()), *self._recent.runs(key)}
        return sorted(found, key=lambda run: run.ended_at, reverse=True)

    def _runs(self, key: HistoryKey) -> list[PastRun]:
        """Return the runs of a history, from the store and of this process, newest first, without duplicates."""
        kept = self._try(lambda: self._store.runs(key))
        self._kept[key] = kept or ()
        return self._seen(key)

    def _try(self, read: Callable[[], _Found]) -> _Found | None:
        """Return what the store answers; `None`: it cannot be read, which is logged once."""
        try:
            return read()
        except OSError as error:
            if not self._told:
                self._told = True
                logger.warning(
                    "histories of tasks cannot be read (%s): those without gpu:memory probe", error
                )
            return None


def _learned(
    call: TaskCall,
    known: Mapping[str, LearnedBudget],
    unknown: Collection[str],
    capacity_bytes: Mapping[str, int],
) -> Grant:
    """Return a grant with budgets by device model, from those that are known."""
    # A budget above the capacity means a device to itself.
    budgets = {n: k.need_bytes for n, k in known.items() if k.need_bytes < capacity_bytes[n]}
    # A process with a learned budget of a whole device is no probe.
    probes = bool(unknown) and len(budgets) == len(known)
    memory: Memory = ModelBudgets(tuple(sorted(budgets.items()))) if budgets else None
    if len(capacity_bytes) == 1 and budgets:
        (memory,) = budgets.values()
    return Grant(
        memory,
        "learned" if known else "probe",
        {name: lesson.context_bytes for name, lesson in known.items()},
        {name: call.identity.on(name) for name in unknown},
        whole_bytes={name: lesson.whole_bytes for name, lesson in known.items()},
        learned_runs={name: lesson.runs for name, lesson in known.items()},
        probe_fraction=call.plan.probe_fraction if probes else 0.0,
        alone_because=None if known else call.plan.alone_because,
    )


def _above_floor(budget: LearnedBudget, runs: Sequence[PastRun]) -> LearnedBudget:
    """Return an estimated budget, at least the floor that runs with the same values have shown."""
    floor = history.known_floor_bytes(runs)
    need_bytes = max(budget.need_bytes, floor)
    whole_bytes = max(budget.whole_bytes, floor)
    return replace(
        budget,
        budget_bytes=need_bytes,
        need_bytes=need_bytes,
        whole_bytes=whole_bytes,
        floor_bytes=floor,
    )


def _largest(
    by_value: Mapping[float, Sequence[HistoryKey]],
    read: Callable[[HistoryKey], Sequence[PastRun]],
    value: float,
) -> LearnedBudget | None:
    """Return the largest budget that was learned for a value; `None`: none was."""
    lessons = [found for key in by_value[value] if (found := history.learn(read(key)))]
    return max(lessons, key=lambda lesson: lesson.need_bytes, default=None)


def _contexts(runs: Mapping[str, Sequence[PastRun]]) -> dict[str, int]:
    found = ((name, history.learned_context_bytes(past)) for name, past in runs.items())
    return {name: size for name, size in found if size is not None}


def _longest_s(runs: Mapping[str, Sequence[PastRun]]) -> float | None:
    """Return the expected seconds of a task on the slowest device model that it has run on."""
    known = [seconds for past in runs.values() if (seconds := history.expected_s(past)) is not None]
    return max(known, default=None)


def _fills(runs: Mapping[str, Sequence[PastRun]]) -> bool:
    """Return whether a task keeps a GPU busy by itself, on any device model."""
    busy = (history.busy_fraction(past) for past in runs.values())
    return any(each is not None and each >= FILLED_FRACTION for each in busy)


def _placeable(runs: Sequence[PastRun]) -> LearnedBudget | None:
    """Return a history's learned budget; a need above each completed probe's budget becomes `NEVER_BYTES`."""
    lesson = history.learn(runs)
    probes = [r.budget_bytes for r in runs if r.outcome == "completed" and r.cap_bytes is None]
    if lesson is not None and probes and lesson.need_bytes > max(probes) > 0:
        # A device to itself was enough, although other programs may always use a part of it.
        return replace(lesson, need_bytes=NEVER_BYTES)
    return lesson
