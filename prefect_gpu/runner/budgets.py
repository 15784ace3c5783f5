"""Choose the budget of a task: from its tag, from its history, or as a probe.

A history holds the runs of one task on one device model; a probe is a first run, while the history is empty. Which
probes may be placed is decided in `broker.opening`. The formula is in `scheduling.history`, kept runs are in
`reports.history`, budgets after an out-of-memory in `submission`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import BudgetSource, TaskReport, past_run
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling import history
from prefect_gpu.scheduling.history import HistoryKey, HistoryStore, LearnedBudget, PastRun
from prefect_gpu.scheduling.model import NEVER_BYTES, Device, Memory, ModelBudgets

logger = logging.getLogger(__name__)


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
    #: As `Request.probe_fraction`.
    probe_fraction: float = 0.0
    #: Why a probe has a device to itself, for the log; `None`: the process is no probe, or shares its device.
    alone_because: str | None = None


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
        return replace(_learned(call, runs, models), expected_s=expected_s)

    def take(self, identity: HistoryKey, report: TaskReport) -> tuple[HistoryKey, int] | None:
        """Add a process's run to its history; return the history with the need that it shows, if it shows one.

        Does not wait for the API.
        """
        if not report.devices:
            return None
        key, run = identity.on(report.devices[0].name), past_run(report)
        # No call of the API here, on the thread that places all tasks.
        known = (*self._kept.get(key, ()), *self._recent.runs(key), run)
        run = replace(run, floor_bytes=history.known_floor_bytes(known) or None)
        self._recent.add(key, run)
        self._store.add(key, run)
        lesson = _placeable(known)
        return None if lesson is None else (key, lesson.need_bytes)

    def _runs(self, key: HistoryKey) -> list[PastRun]:
        """Return the runs of a history, from the store and of this process, newest first, without duplicates."""
        try:
            kept = self._kept[key] = self._store.runs(key)
        except OSError as error:
            kept = ()
            if not self._told:
                self._told = True
                logger.warning(
                    "histories of tasks cannot be read (%s): those without gpu:memory probe", error
                )
        return sorted({*kept, *self._recent.runs(key)}, key=lambda run: run.ended_at, reverse=True)


def _learned(
    call: TaskCall, runs: Mapping[str, Sequence[PastRun]], capacity_bytes: Mapping[str, int]
) -> Grant:
    """Return a grant with budgets by device model, from the runs on each."""
    known = {name: found for name, past in runs.items() if (found := _placeable(past)) is not None}
    # A budget above the capacity means a device to itself.
    budgets = {n: k.need_bytes for n, k in known.items() if k.need_bytes < capacity_bytes[n]}
    # A process with a learned budget of a whole device is no probe.
    probes = len(known) < len(runs) and len(budgets) == len(known)
    memory: Memory = ModelBudgets(tuple(sorted(budgets.items()))) if budgets else None
    if len(runs) == 1 and budgets:
        (memory,) = budgets.values()
    return Grant(
        memory,
        "learned" if known else "probe",
        {name: lesson.context_bytes for name, lesson in known.items()},
        {name: call.identity.on(name) for name in runs if name not in known},
        whole_bytes={name: lesson.whole_bytes for name, lesson in known.items()},
        learned_runs={name: lesson.runs for name, lesson in known.items()},
        probe_fraction=call.plan.probe_fraction if probes else 0.0,
        alone_because=None if known else call.plan.alone_because,
    )


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
