"""How much a task is given: what its tag says, what its history teaches, or a probe that finds out.

A task that nobody knows runs once with a device to itself, and those of the same history wait for
what that shows. The formula is `scheduling.history`; where runs are kept is `reports.history`; what a
process gets after an out-of-memory is `escalation`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefect_gpu.errors import PlacementTimeoutError
from prefect_gpu.reports.history import MemoryHistory
from prefect_gpu.reports.model import BudgetSource, TaskReport
from prefect_gpu.reports.past_run import past_run
from prefect_gpu.scheduling.history import (
    HistoryKey,
    HistoryStore,
    Lesson,
    PastRun,
    expected_s,
    known_floor_bytes,
    learn,
    learned_context_bytes,
)
from prefect_gpu.scheduling.model import Memory, ModelBudgets
from prefect_gpu.units import format_seconds

logger = logging.getLogger(__name__)

#: Seconds after which a task that waits for a probe says so.
TELL_S = 1.0

#: More bytes than any device has: what asks for them is never placed there.
NEVER_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """What tells a task's histories from those of others; the GPU model comes to it."""

    task_name: str
    qualified_name: str
    #: Digest of the `gpu:learn_by` values; empty: none are named.
    learn_by: str = ""

    def on(self, device_name: str) -> HistoryKey:
        """Give the key for a GPU model."""
        return HistoryKey(self.task_name, self.qualified_name, device_name, self.learn_by)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a process of a task is given."""

    #: To ask of each device.
    memory: Memory
    #: Where that comes from.
    source: BudgetSource
    #: Context that the task's own runs were seen to have, in bytes by device name.
    contexts: Mapping[str, int] = field(default_factory=dict)
    #: Histories that this process begins: others of them wait for it.
    claims: frozenset[HistoryKey] = frozenset()
    #: Seconds that it waited for others' probes.
    waited_s: float = 0.0
    #: Seconds for which it is expected to hold its devices; `None`: no run of it has completed.
    expected_s: float | None = None


class ProbeGate:
    """Who probes for which history: one at a time, for all runners of this process."""

    def __init__(self) -> None:
        self._reset()
        # A forked copy of this process has the claims but not the threads that would end them.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[HistoryKey] = set()

    @property
    def changed(self) -> threading.Condition:
        """Notified when a claim ends; to be held while waiting."""
        return self._changed

    def is_claimed(self, key: HistoryKey) -> bool:
        """Tell whether somebody probes for a history."""
        return key in self._claimed

    def claim(self, keys: Iterable[HistoryKey]) -> frozenset[HistoryKey]:
        """Claim those that nobody probes for; give them."""
        with self._changed:
            free = frozenset(key for key in keys if key not in self._claimed)
            self._claimed |= free
            return free

    def release(self, keys: Iterable[HistoryKey]) -> None:
        """End claims; whoever waits looks again."""
        with self._changed:
            self._claimed.difference_update(keys)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._changed:
            self._changed.notify_all()


#: Of this Python process: runs of one flow teach the next at once, whatever keeps histories.
PROCESS_GATE = ProbeGate()
PROCESS_RUNS = MemoryHistory()


class BudgetBook:
    """Gives budgets, and takes in what became of them. For one runner; any thread may use it.

    Args:
        store: Keeps runs beyond this process.
        gate: Who probes.
        recent: Runs of this process.
    """

    def __init__(
        self,
        store: HistoryStore,
        gate: ProbeGate = PROCESS_GATE,
        recent: HistoryStore = PROCESS_RUNS,
    ) -> None:
        self._store = store
        self._gate = gate
        self._recent = recent
        self._lock = threading.Lock()
        self._told = False

    def grant(
        self,
        identity: TaskIdentity,
        memory: int | float | None,
        device_names: Sequence[str],
        *,
        count: int,
        capacity_bytes: Mapping[str, int],
        limit_s: float | None,
        on_waiting: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> Grant | None:
        """Say what a process of a task gets, once that is known.

        Args:
            identity: Which task.
            memory: What its tag asks for; `None`: no tag.
            device_names: Model of each device that it may use.
            count: Devices that it asks for.
            capacity_bytes: What the largest of each model could ever promise.
            limit_s: Seconds after which to give up, as `gpu:wait` says; `None`: never.
            on_waiting: Told why it waits; what it raises ends the wait.
            cancelled: Asked after every change; see `wake`.

        Returns:
            `None`: it was cancelled.

        Raises:
            PlacementTimeoutError: The probe that it waits for took too long.
        """
        names = list(dict.fromkeys(device_names))
        if memory is not None:
            runs = {name: self._runs(identity.on(name)) for name in names}
            return Grant(memory, "tag", _contexts(runs), expected_s=_longest_s(runs))
        began_s = time.monotonic()
        told = False
        while not cancelled():
            runs = {name: self._runs(identity.on(name)) for name in names}
            lessons = {name: _placeable(past) for name, past in runs.items()}
            unknown = [identity.on(name) for name, lesson in lessons.items() if lesson is None]
            claims = self._gate.claim(unknown)
            if claims or len(unknown) < len(names):
                # It may have become known between the look and the claim.
                fresh = {k for k in claims if learn(self._runs(k)) is not None}
                if fresh:
                    self._gate.release(claims)
                    continue
                waited_s = time.monotonic() - began_s if told else 0.0
                roomy = sum(
                    lessons[name] is not None or identity.on(name) in claims
                    for name in device_names
                )
                grant = self._from_lessons(
                    identity, lessons, claims, capacity_bytes, waited_s, roomy >= count
                )
                return replace(grant, expected_s=_longest_s(runs))
            waited_s = time.monotonic() - began_s
            if limit_s is not None and waited_s >= limit_s:
                raise PlacementTimeoutError(
                    f"gpu:wait={format_seconds(limit_s)} is over: {identity.task_name!r} still "
                    f"waited for the first run of that task to show what it needs"
                )
            if waited_s >= TELL_S and not told:
                told = True
                on_waiting(f"the first run of {identity.task_name!r} to show what it needs")
            left_s = None if limit_s is None else limit_s - waited_s
            self._wait(unknown, left_s, told, cancelled)
        return None

    def take(self, identity: TaskIdentity, report: TaskReport) -> None:
        """Keep what became of a process. Returns at once."""
        if not report.devices:
            return
        key, run = identity.on(report.devices[0].name), past_run(report)
        run = replace(run, floor_bytes=known_floor_bytes((*self._runs(key), run)) or None)
        self._recent.add(key, run)
        self._store.add(key, run)

    def release(self, grant: Grant) -> None:
        """Say that a process is over and its run taken in: others may probe, or have learned."""
        if grant.claims:
            self._gate.release(grant.claims)

    def keep(self, grant: Grant, device_name: str) -> Grant:
        """Say where a process was placed: it probes for that model only."""
        others = frozenset(key for key in grant.claims if key.device_name != device_name)
        if not others:
            return grant
        self._gate.release(others)
        return replace(grant, claims=grant.claims - others)

    def wake(self) -> None:
        """Have all who wait for probes look whether they were cancelled."""
        self._gate.wake()

    def _wait(
        self,
        keys: Sequence[HistoryKey],
        left_s: float | None,
        told: bool,
        cancelled: Callable[[], bool],
    ) -> None:
        patience = [s for s in (left_s, None if told else TELL_S) if s is not None]
        with self._gate.changed:
            # A claim that ended, or a cancellation, since the look has notified nobody.
            if not cancelled() and all(self._gate.is_claimed(key) for key in keys):
                self._gate.changed.wait(min(patience) if patience else None)

    @staticmethod
    def _from_lessons(
        identity: TaskIdentity,
        lessons: Mapping[str, Lesson | None],
        claims: frozenset[HistoryKey],
        capacity_bytes: Mapping[str, int],
        waited_s: float,
        avoid: bool,
    ) -> Grant:
        known = {name: lesson for name, lesson in lessons.items() if lesson is not None}
        contexts = {name: lesson.context_bytes for name, lesson in known.items()}
        # More than there is: a device to itself is all that can be done.
        budgets = {
            name: lesson.budget_bytes
            for name, lesson in known.items()
            if lesson.budget_bytes < capacity_bytes.get(name, 0)
        }
        unclaimed = [n for n in lessons if n not in known and identity.on(n) not in claims]
        if avoid:
            # Somebody else finds out about those.
            budgets |= dict.fromkeys(unclaimed, NEVER_BYTES)
        memory: Memory = ModelBudgets(tuple(sorted(budgets.items()))) if budgets else None
        if len(lessons) == 1 and budgets:
            (memory,) = budgets.values()
        return Grant(memory, "learned" if known else "probe", contexts, claims, waited_s)

    def _runs(self, key: HistoryKey) -> list[PastRun]:
        """Give the runs of a key: kept ones and those of this process, each once, newest first."""
        try:
            kept = self._store.runs(key)
        except OSError as error:
            kept = ()
            with self._lock:
                told, self._told = self._told, True
            if not told:
                logger.warning(
                    "histories of tasks cannot be read (%s): those without gpu:memory probe", error
                )
        return sorted({*kept, *self._recent.runs(key)}, key=lambda run: run.ended_at, reverse=True)


def _contexts(runs: Mapping[str, Sequence[PastRun]]) -> dict[str, int]:
    found = ((name, learned_context_bytes(past)) for name, past in runs.items())
    return {name: size for name, size in found if size is not None}


def _longest_s(runs: Mapping[str, Sequence[PastRun]]) -> float | None:
    """Give the seconds that a task is expected to take on the slowest model that it is known on."""
    known = [seconds for past in runs.values() if (seconds := expected_s(past)) is not None]
    return max(known, default=None)


def _placeable(runs: Sequence[PastRun]) -> Lesson | None:
    """Learn, but never to wait for more than a device had left for a probe that completed."""
    lesson = learn(runs)
    probes = [r.budget_bytes for r in runs if r.outcome == "completed" and r.cap_bytes is None]
    if lesson is not None and probes and lesson.budget_bytes > max(probes) > 0:
        # Others may use the device for good: a device to itself is what was enough.
        return replace(lesson, budget_bytes=NEVER_BYTES)
    return lesson
