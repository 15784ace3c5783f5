"""Choose the budget of a task: from its tag, from its history, from runs with other values, or as a probe.

A history holds the runs of one task on one device model, with equal `gpu:learn_by` values. While it is empty, the budget
is estimated from the histories of other values. A probe is a first run for which neither shows a need. Which probes may be
placed is decided in `broker.opening`. The formulas are in `scheduling.history` and `scheduling.estimate`, kept runs in
`reports.history`, budgets after an out-of-memory in `submission`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import BudgetSource, TaskReport, past_run
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling import history
from prefect_gpu.scheduling.estimate import estimate, nearest
from prefect_gpu.scheduling.history import HistoryKey, HistoryStore, LearnedBudget, PastRun
from prefect_gpu.scheduling.model import NEVER_BYTES, Device, Memory, ModelBudgets

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
    #: Why a probe has a device to itself, for the log; `None`: the process is no probe, or shares its device.
    alone_because: str | None = None


#: Known values from which a budget is estimated: those nearest to the task's own.
MOST_VALUES = 5

#: Shared by all flows of this Python process: the next flow learns from past runs at once, in whichever store.
PROCESS_RUNS = MemoryHistory()


class BudgetBook:
    """Chooses the budgets of one runner's tasks, and keeps their processes' needs. Safe to use from several threads.

    `store` keeps runs beyond this Python process, `recent` runs of this process.
    """

    def __init__(self, store: HistoryStore, recent: HistoryStore = PROCESS_RUNS) -> None:
        self._store = store
        self._recent = recent
        #: Runs of the store by history, as last read. Any thread may replace a value as a whole.
        self._kept: dict[HistoryKey, Sequence[PastRun]] = {}
        #: Histories without a need that were asked for, and may be estimated from other values one day.
        self._unknown: dict[HistoryKey, None] = {}
        #: By task: the keys of histories in the store, as last read. As `_kept`.
        self._listed: dict[object, Collection[HistoryKey]] = {}
        self._told = False

    def grant(self, call: TaskCall, capacities: Mapping[Device, int]) -> Grant:
        """Return the grant of a task's process. `capacities` are the most bytes on each device that the task may use."""
        identity, memory = call.identity, call.plan.policy.memory
        #: The largest capacity of each device model.
        models: dict[str, int] = {}
        for device, size in capacities.items():
            models[device.name] = max(size, models.get(device.name, 0))
        runs = {name: self._runs(identity.on(name)) for name in models}
        expected_s = _longest_s(runs)
        if memory is not None:
            return Grant(memory, "tag", _contexts(runs), expected_s=expected_s)
        known = {n: found for n, past in runs.items() if (found := _placeable(past)) is not None}
        estimated_from = {}
        for name in runs.keys() - known.keys() if identity.learn_by_lines else ():
            key = identity.on(name)
            # Before the runs are read: `take` looks here after it has added a run.
            self._unknown[key] = None
            made = self._estimate(key, self._siblings(key), self._runs)
            if made is not None:
                self._unknown.pop(key, None)
                known[name], estimated_from[name] = _above_floor(made[0], runs[name]), made[1]
        grant = _learned(call, known, runs.keys() - known.keys(), models)
        return replace(grant, expected_s=expected_s, estimated_from=estimated_from)

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
        lesson = _placeable(known)
        if lesson is None:
            return {}
        self._unknown.pop(key, None)
        listed = (*self._listed.get(key.task, ()), *self._recent.siblings(key))
        shown: dict[HistoryKey, int | None] = {key: lesson.need_bytes}
        for other in tuple(self._unknown):
            alike = other.task == key.task
            if alike and self._estimate(other, listed, self._seen) is not None:
                shown[other] = self._unknown.pop(other, None)
        return shown

    def _estimate(
        self,
        key: HistoryKey,
        siblings: Collection[HistoryKey],
        read: Callable[[HistoryKey], Sequence[PastRun]],
    ) -> tuple[LearnedBudget, str] | None:
        """Return the estimated budget of a history, and from which values, as text; `None`: they say too little.

        The values are those of the same GPU model or, if those say too little, of all models.
        """
        for line in key.lines:
            on_line = [(o, its) for o in siblings for its in o.lines if its[:2] == line[:2]]
            for alike in (True, False):
                by_value: dict[float, list[HistoryKey]] = {}
                for other, its in on_line:
                    if not alike or other.device_name == key.device_name:
                        by_value.setdefault(its.value, []).append(other)
                lessons = (
                    (value, max(found, key=lambda lesson: lesson.need_bytes))
                    for value in nearest(line.value, by_value)
                    if (found := [had for o in by_value[value] if (had := history.learn(read(o)))])
                )
                known = dict(itertools.islice(lessons, MOST_VALUES))
                made = estimate(line.value, known)
                if made is not None:
                    values = ", ".join(f"{value:g}" for value in sorted(known))
                    return made, f"{line.parameter} {values}"
        return None

    def _siblings(self, key: HistoryKey) -> Collection[HistoryKey]:
        """Return the histories of the task of a key, from the store and of this process."""
        listed = self._listed[key.task] = self._try(lambda: self._store.siblings(key)) or ()
        return {*listed, *self._recent.siblings(key)}

    def _seen(self, key: HistoryKey) -> Sequence[PastRun]:
        """Return the runs of a history that are known without a call of the API."""
        return (*self._kept.get(key, ()), *self._recent.runs(key))

    def _runs(self, key: HistoryKey) -> list[PastRun]:
        """Return the runs of a history, from the store and of this process, newest first, without duplicates."""
        kept = self._try(lambda: self._store.runs(key))
        if kept is not None:
            self._kept[key] = kept
        found = {*(kept or ()), *self._recent.runs(key)}
        return sorted(found, key=lambda run: run.ended_at, reverse=True)

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
    return replace(budget, need_bytes=need_bytes, floor_bytes=floor)


def _contexts(runs: Mapping[str, Sequence[PastRun]]) -> dict[str, int]:
    found = ((name, history.learned_context_bytes(past)) for name, past in runs.items())
    return {name: size for name, size in found if size is not None}


def _longest_s(runs: Mapping[str, Sequence[PastRun]]) -> float | None:
    """Return the expected seconds of a task on the slowest device model that it has run on."""
    known = [seconds for past in runs.values() if (seconds := history.expected_s(past)) is not None]
    return max(known, default=None)


def _placeable(runs: Sequence[PastRun]) -> LearnedBudget | None:
    """Return a history's learned budget; a need above each completed probe's budget becomes `NEVER_BYTES`."""
    lesson = history.learn(runs)
    probes = [r.budget_bytes for r in runs if r.outcome == "completed" and r.cap_bytes is None]
    if lesson is not None and probes and lesson.need_bytes > max(probes) > 0:
        # A device to itself was enough, although other programs may always use a part of it.
        return replace(lesson, need_bytes=NEVER_BYTES)
    return lesson
