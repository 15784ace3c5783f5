"""Choose the budget of a task: from its tag, from its history, or as a probe.

A history holds the runs of one task on one device model; a probe is a first run, while the history is empty. In a
Python process at most one probe of each history waits for a device. Other task runs of that history wait until the
probe is placed, or until it has ended if it has its devices to itself. The formula is in `scheduling.history`, kept
runs are in `reports.history`, budgets after an out-of-memory in `submission`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from prefect_gpu.errors import PlacementTimeoutError
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import BudgetSource, TaskReport, past_run
from prefect_gpu.runner.task_plan import TaskCall
from prefect_gpu.scheduling import history
from prefect_gpu.scheduling.history import HistoryKey, HistoryStore, LearnedBudget, PastRun
from prefect_gpu.scheduling.model import Device, Memory, ModelBudgets
from prefect_gpu.scheduling.reasons import Reason, WaitKind, sentence
from prefect_gpu.units import format_seconds

logger = logging.getLogger(__name__)

#: Seconds of waiting after which a task run is shown as waiting for a probe.
TELL_S = 1.0

#: More bytes than any device has: a request for them is never placed.
NEVER_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Grant:
    """The budget of a process, and the source of the budget."""

    #: Memory to request on each device.
    memory: Memory
    source: BudgetSource
    #: Measured context of the task's own runs, in bytes by device name.
    contexts: Mapping[str, int] = field(default_factory=dict)
    #: Histories for which the process is the probe that other tasks wait for.
    claims: frozenset[HistoryKey] = frozenset()
    #: Seconds of waiting for other task runs' probes.
    waited_s: float = 0.0
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


class ProbeGate:
    """The histories with a probe, at most one each, for all runners of this process. Safe to use in several threads."""

    def __init__(self) -> None:
        self._reset()
        # A fork has a copy of the claims, but no threads that would end them.
        PROCESS_RESOURCES.after_fork(self, ProbeGate._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[HistoryKey] = set()
        #: By history: number of ended probes whose runs are not kept yet.
        self._ending = Counter[HistoryKey]()

    def claim(self, keys: Iterable[HistoryKey]) -> frozenset[HistoryKey]:
        """Claim the histories without a probe, and return them."""
        with self._changed:
            free = frozenset(key for key in keys if not self._hold((key,)))
            self._claimed |= free
            return free

    def release(self, keys: Iterable[HistoryKey] = ()) -> None:
        """Allow a first run for these history keys again, and wake all task runs that wait for a first run."""
        with self._changed:
            self._claimed.difference_update(keys)
            self._changed.notify_all()

    def begin_end(self, keys: Iterable[HistoryKey]) -> None:
        """Note that a probe of these histories has ended. No other probe may start before `end` is called."""
        with self._changed:
            self._ending.update(keys)

    def end(self, keys: Iterable[HistoryKey]) -> None:
        """Note that an ended probe's run was kept, or that it had none. Wake all waiting task runs."""
        with self._changed:
            self._ending.subtract(keys)
            self._changed.notify_all()

    def holds(self, keys: Iterable[HistoryKey]) -> bool:
        """Return whether all of these histories have a probe."""
        with self._changed:
            return self._hold(keys)

    def _hold(self, keys: Iterable[HistoryKey]) -> bool:
        return all(key in self._claimed or self._ending[key] for key in keys)

    def wait(
        self, keys: Iterable[HistoryKey], timeout_s: float | None, cancelled: Callable[[], bool]
    ) -> None:
        """If all these histories have a probe, wait for a change, at most `timeout_s` seconds; `None`: no limit."""
        with self._changed:
            # Checked under the lock: nobody wakes this thread for a change before the wait.
            if not cancelled() and self._hold(keys):
                self._changed.wait(timeout_s)


#: Shared by all flows of this Python process: the next flow learns from past runs at once, in whichever store.
PROCESS_GATE = ProbeGate()
PROCESS_RUNS = MemoryHistory()


class BudgetBook:
    """Chooses the budgets of one runner's tasks, and keeps their processes' needs. Safe to use from several threads.

    `store` keeps runs beyond this Python process, `recent` runs of this process. `gate` has the histories with a probe.
    """

    def __init__(
        self,
        store: HistoryStore,
        gate: ProbeGate = PROCESS_GATE,
        recent: HistoryStore = PROCESS_RUNS,
    ) -> None:
        self._store = store
        self.gate = gate
        self._recent = recent
        #: Runs of the store by history, as last read. Any thread may replace a value as a whole.
        self._kept: dict[HistoryKey, Sequence[PastRun]] = {}
        #: By history: callbacks of its probes that share a device.
        self._probes: dict[HistoryKey, list[Callable[[str, int], None]]] = {}
        self._lock = threading.Lock()
        self._told = False

    def grant(
        self, call: TaskCall, capacities: Mapping[Device, int], cancelled: Callable[[], bool]
    ) -> Grant | None:
        """Return the grant of a task's process; wait for a probe if the need is not known. `None`: it was cancelled.

        `capacities` are the largest possible reservations, in bytes, on the devices that the task may use. `cancelled`
        is called after every change; see `ProbeGate.release`.

        Raises:
            PlacementTimeoutError: The awaited probe took longer than `gpu:wait`.
        """
        identity, policy, gate = call.identity, call.plan.policy, self.gate
        #: The largest capacity of each device model.
        models: dict[str, int] = {}
        for device, size in capacities.items():
            models[device.name] = max(size, models.get(device.name, 0))
        call.place.take_turn()
        if policy.memory is not None:
            runs = {name: self._runs(identity.on(name)) for name in models}
            return Grant(policy.memory, "tag", _contexts(runs), expected_s=_longest_s(runs))
        began_s, told = time.monotonic(), False
        reason = Reason(WaitKind.FIRST_RUN, tasks=(identity.task_name,))
        while not cancelled():
            runs = {name: self._runs(identity.on(name)) for name in models}
            lessons = {name: _placeable(past) for name, past in runs.items()}
            unknown = [identity.on(name) for name, lesson in lessons.items() if lesson is None]
            claims = gate.claim(unknown)
            if claims or len(unknown) < len(models):
                # Another probe may have ended between lookup and claim.
                if any(history.learn(self._runs(key)) is not None for key in claims):
                    gate.release(claims)
                    continue
                usable = [n for n in models if lessons[n] is not None or identity.on(n) in claims]
                roomy = sum(device.name in usable for device in capacities)
                grant = _from_lessons(call, lessons, claims, models, roomy >= policy.count)
                waited_s = time.monotonic() - began_s if told else 0.0
                return replace(grant, waited_s=waited_s, expected_s=_longest_s(runs))
            waited_s = time.monotonic() - began_s
            limit_s = math.inf if policy.wait_s is None else policy.wait_s
            if waited_s >= limit_s:
                raise PlacementTimeoutError(
                    f"gpu:wait={format_seconds(limit_s)} is over: {identity.task_name!r} still "
                    f"waited for {sentence(reason)}"
                )
            if waited_s >= TELL_S and not told:
                told = True
                call.run.show_awaiting(reason)
            left_s = min(limit_s - waited_s, math.inf if told else TELL_S)
            call.place.yield_while(partial(gate.holds, unknown))
            gate.wait(unknown, None if left_s == math.inf else left_s, cancelled)
            call.place.take_turn()
        return None

    def take(self, identity: HistoryKey, report: TaskReport) -> None:
        """Add a process's run to its history, and report a learned need to probes of it. Does not wait for the API."""
        if not report.devices:
            return
        key, run = identity.on(report.devices[0].name), past_run(report)
        # No call of the API here, on the thread that places all tasks.
        known = (*self._kept.get(key, ()), *self._recent.runs(key), run)
        run = replace(run, floor_bytes=history.known_floor_bytes(known) or None)
        self._recent.add(key, run)
        self._store.add(key, run)
        if (lesson := _placeable(known)) is None:
            return
        with self._lock:
            probes = tuple(self._probes.get(key, ()))
        for learns in probes:
            learns(key.device_name, lesson.need_bytes)

    def begin_probe(self, keys: Iterable[HistoryKey], learns: Callable[[str, int], None]) -> None:
        """Call `learns`, which must not raise, on any thread with each budget learned later (device model, bytes)."""
        with self._lock:
            for key in keys:
                self._probes.setdefault(key, []).append(learns)

    def end_probe(self, keys: Iterable[HistoryKey], learns: Callable[[str, int], None]) -> None:
        """Undo `begin_probe`."""
        with self._lock:
            for key in keys:
                left = [each for each in self._probes.pop(key, ()) if each != learns]
                if left:
                    self._probes[key] = left

    def keep(self, grant: Grant, device_name: str) -> Grant:
        """Release a placed process's claims for other device models; return its grant without them."""
        others = frozenset(key for key in grant.claims if key.device_name != device_name)
        if not others:
            return grant
        self.gate.release(others)
        return replace(grant, claims=grant.claims - others)

    def _runs(self, key: HistoryKey) -> list[PastRun]:
        """Return the runs of a history, from the store and of this process, newest first, without duplicates."""
        try:
            kept = self._kept[key] = self._store.runs(key)
        except OSError as error:
            kept = ()
            with self._lock:
                told, self._told = self._told, True
            if not told:
                logger.warning(
                    "histories of tasks cannot be read (%s): those without gpu:memory probe", error
                )
        return sorted({*kept, *self._recent.runs(key)}, key=lambda run: run.ended_at, reverse=True)


def _from_lessons(
    call: TaskCall,
    lessons: Mapping[str, LearnedBudget | None],
    claims: frozenset[HistoryKey],
    capacity_bytes: Mapping[str, int],
    avoid: bool,
) -> Grant:
    """Return a grant with budgets by device model; `avoid`: not on a model where another task run probes."""
    known = {name: lesson for name, lesson in lessons.items() if lesson is not None}
    # A budget above the capacity means a device to itself.
    budgets = {n: k.need_bytes for n, k in known.items() if k.need_bytes < capacity_bytes[n]}
    # A process with a learned budget of a whole device is no probe.
    probes = claims and len(budgets) == len(known)
    if avoid:
        unclaimed = [n for n in lessons if n not in known and call.identity.on(n) not in claims]
        budgets |= dict.fromkeys(unclaimed, NEVER_BYTES)
    memory: Memory = ModelBudgets(tuple(sorted(budgets.items()))) if budgets else None
    if len(lessons) == 1 and budgets:
        (memory,) = budgets.values()
    return Grant(
        memory,
        "learned" if known else "probe",
        {name: lesson.context_bytes for name, lesson in known.items()},
        claims,
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
