"""One submitted GPU task: the processes that Prefect's engine runs in place of its body.

`GPUTask` is the task, `BodyRun` one call of its body: it starts attempts until one returns a value or another attempt
would not help. `scheduling.ladder` decides retries after an out-of-memory, `attempt` is one process, and
`active_runner` has the shared parts of all tasks of a runner.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefect import Task
from typing_extensions import assert_never

from prefect_gpu.broker.broker import NeedLearned
from prefect_gpu.cluster.flow_side import ClusterAnnouncement
from prefect_gpu.engine.flow_run import SharedClient
from prefect_gpu.engine.task_engine import (
    NOTE,
    CallingLine,
    CancelledByRunner,
    in_place_of,
    run_engine,
)
from prefect_gpu.engine.task_run import EngineRun
from prefect_gpu.errors import PlacementError, add_note
from prefect_gpu.live.progress import RunningTask, WaitingTask
from prefect_gpu.processes.launch_spec import ChildRefused, Launcher
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import TaskReport, UnstartedRun
from prefect_gpu.runner import process_run as steps
from prefect_gpu.runner.attempt import Attempt
from prefect_gpu.runner.budgets import Grant
from prefect_gpu.runner.process_run import Done
from prefect_gpu.runner.run_log import first_line, in_one_line
from prefect_gpu.runner.task_plan import TaskCall, TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.ladder import OomHistory
from prefect_gpu.scheduling.model import Device
from prefect_gpu.values import argument_files

if TYPE_CHECKING:
    from prefect_gpu.runner.active_runner import ActiveRunner

#: Seconds between two log lines about a node that refuses a task.
TELL_S = 30.0

#: Longest wait in seconds of a task run's next process for the end of the previous one and for its memory
#: (`launcher.EXIT_GRACE_S`, `device_view.RECOVERY_S`).
ENDING_S = 10.0


@dataclass(eq=False, repr=False)
class BodyRun:
    """One call of the body by Prefect's engine, in one or more processes."""

    _runner: ActiveRunner
    _call: TaskCall
    #: Budget increases so far, also in earlier calls for the same task run.
    climb: OomHistory
    _numbers: Iterator[int]
    _launcher: Launcher
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _cancelled: bool = field(default=False, init=False)
    #: In order; at most `ladder.MOST_PROCESSES`.
    _attempts: list[Attempt] = field(default_factory=list, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._policy = self._call.plan.policy
        self._broker, self._book = self._runner.broker(), self._runner.book()

    def cancel(self) -> None:
        """End the call in any state, from any thread; `run` then raises `CancelledByRunner`."""
        with self._lock:
            self._cancelled = True
            attempts = tuple(self._attempts)
        for attempt in attempts:
            # Attempts before the last may hang at their exit.
            attempt.cancel()

    @property
    def finished(self) -> bool:
        """Whether all processes of the call have ended and their reports were passed on."""
        return self._over.is_set() and all(a.finished.is_set() for a in self._attempts)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until `finished`, at most `timeout_s` seconds; return `finished`."""
        deadline = time.monotonic() + timeout_s
        events = (self._over, *(attempt.finished for attempt in self._attempts))
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    @property
    def _last_attempt(self) -> Attempt | None:
        # The engine's thread may remove an attempt at any time.
        with self._lock:
            return self._attempts[-1] if self._attempts else None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the call in the queue, lowest first."""
        return -self._policy.priority, self._call.plan.sequence

    @property
    def has_devices(self) -> bool:
        """Whether a process of the call has devices now. From any thread."""
        last = self._last_attempt
        return last is not None and last.has_devices

    def running(self) -> RunningTask | None:
        """Return the call's row in the live view; `None`: it has no devices now. From any thread."""
        last = self._last_attempt
        return None if last is None else last.running()

    def waiting(self) -> WaitingTask:
        """Return the call's row in the live view while it has no devices. From any thread."""
        run = self._call.run
        # Without a process its budget is being chosen.
        seconds, reason = None, run.awaits
        if (last := self._last_attempt) is not None:
            seconds, reason = last.why_it_waits()
        return WaitingTask(self.order, clean_name(run.task_run.name), seconds, reason)

    def run(self) -> object:
        """Run the body until a process returns a value; return that value.

        Raises:
            PlacementError: No device is large enough, or none was free in time.
            CancelledByRunner: `cancel` was called.
            BaseException: The error of `Attempt.run` for the last process.
        """
        try:
            return self._run_processes()
        finally:
            self._over.set()
            # A Prefect context may keep this object, so the arguments are released.
            self._call = self._call.without_arguments()

    def _run_processes(self) -> object:
        asked_s = time.monotonic()
        grant = self._first_grant()
        whole_bytes = 0
        out_of_memory: BaseException | None = None
        number, told_s = next(self._numbers), -math.inf
        while True:
            pipes = self._runner.mps_pipes
            attempt = Attempt(
                self._call, grant, asked_s, number, self._broker, self._launcher, pipes
            )
            step: steps.Step | None = None
            short: steps.Shortage | None = None
            goes_on = False
            try:
                self._add(attempt)
                try:
                    placement = attempt.place()
                    whole_bytes = grant.whole_bytes.get(placement.devices[0].name, 0)
                    ended = attempt.run()
                except PlacementError as error:
                    ended = steps.Ended(ChildRefused(error), error, in_one_line(error))
                if isinstance(ended, Done):
                    return ended.value
                history = steps.History(
                    self._policy,
                    replace(self.climb, whole_device=attempt.whole_device),
                    self._memory(attempt, whole_bytes),
                    time.monotonic() - asked_s,
                    out_of_memory,
                    attempt.neighbours_at_fault(ended),
                )
                step = steps.next_step(ended, grant, history)
                match step:
                    case steps.Raise(final, note, short):
                        if note is not None:
                            add_note(final, NOTE + note)
                        raise final
                    case steps.Retry(_, warning, short):
                        self._call.run.warn(warning)
                        out_of_memory = out_of_memory if short is None else ended.error
                    case steps.AskAgain(reason):
                        if time.monotonic() - told_s >= TELL_S:
                            told_s = time.monotonic()
                            self._call.run.show_awaiting(reason)
                    case _:
                        assert_never(step)
                goes_on = True
            except NeedLearned:
                pass
            finally:
                # After a first run that shared its device, the next process is no first run.
                take = functools.partial(self._take_report, attempt.shares or not goes_on)
                attempt.close(take, short)
            if isinstance(step, steps.Retry):
                # Reports must come in the order of the processes: Prefect shows the newest.
                attempt.finished.wait(ENDING_S)
                grant, number, asked_s = step.grant, next(self._numbers), time.monotonic()
                if short is not None and short.rung is not None:
                    self.climb = short.rung.climb
                continue
            # There was no process.
            if isinstance(step, steps.AskAgain):
                self._over.wait(steps.REFUSED_S)
            with self._lock:
                self._attempts.remove(attempt)
            if step is None:
                grant = self._first_grant()

    def _add(self, attempt: Attempt) -> None:
        with self._lock:
            cancelled = self._cancelled
            self._attempts.append(attempt)
        if cancelled:
            attempt.cancel()

    def _first_grant(self) -> Grant:
        policy, as_of = self._policy, self._broker.runs_kept
        capacities = self._broker.capacities(policy.devices, policy.nodes)
        most = _most_of_each(capacities, policy.count)
        grant = replace(self._book.grant(self._call, capacities), capacity_bytes=most, as_of=as_of)
        if self.climb.whole_device:
            return replace(grant, memory=None, after_oom=True, probe_fraction=0.0)
        if isinstance(grant.memory, int) and grant.memory < self.climb.reached_bytes:
            # An earlier call has shown that the task needs more.
            return replace(grant, memory=self.climb.reached_bytes, after_oom=True)
        return grant

    def _memory(self, attempt: Attempt, whole_bytes: int) -> steps.Memory | None:
        """Return the facts about a process's out-of-memory; `None`: nothing is known, or no out-of-memory."""
        evidence, policy = attempt.evidence(), self._policy
        if evidence is None:
            return None
        capacities = self._broker.capacities(policy.devices, policy.nodes)
        capacity = _most_of_each(capacities, policy.count)
        alike = len({device.name for device in capacities}) == 1
        return steps.Memory(evidence, capacity, whole_bytes, alike, self._broker.kind)

    def _take_report(self, over: bool, report: TaskReport | None) -> None:
        """Keep a process's report (`None`: there was no process), and pass it on. `over` is as in `Broker.kept`."""
        shown: Mapping[HistoryKey, int | None] = {}
        try:
            if report is not None:
                shown = self._book.take(self._call.identity, report)
        finally:
            self._broker.kept(self._call.plan.sequence, over, shown)
            if report is not None:
                self._runner.report(report)


def _most_of_each(capacities: Mapping[Device, int], count: int) -> int:
    """Return the largest possible budget in bytes on each of `count` devices of one node."""
    by_node: dict[str, list[int]] = {}
    for device, size in sorted(capacities.items(), key=lambda each: -each[1]):
        by_node.setdefault(device.host, []).append(size)
    sizes = [found[count - 1] for found in by_node.values() if len(found) >= count]
    return max(sizes, default=min(capacities.values()))


@dataclass(eq=False, repr=False)
class GPUTask:
    """One submitted GPU task; `_plan` may be an error in its tags or function, which fails the task run."""

    _runner: ActiveRunner
    _task: Task[..., Any]
    _plan: TaskPlan | Exception
    #: The user's line that submitted the task; `None`: not known.
    _submitted_at: CallingLine | None
    #: One count for all calls of the body: Prefect's retries are further calls.
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _climb: OomHistory = field(default=OomHistory(), init=False)
    _last: BodyRun | None = field(default=None, init=False)
    #: Launcher of the processes; for an announced task, one that uses warm processes.
    _launcher: Launcher = field(default_factory=process_launcher, init=False)
    #: Kind of matching standbys on the nodes of a cluster; empty: none match.
    _standby: str = field(default="", init=False)

    def run(self, client: SharedClient, arguments: Mapping[str, Any]) -> Any:
        """Run Prefect's engine to the task's final state, in this thread, and return the state. See `run_engine`."""
        announced = None
        if isinstance(self._plan, TaskPlan):
            announced = self._runner.announce(self._plan)
            self._launcher = announced or self._runner.cluster_launcher() or self._launcher
        if isinstance(announced, ClusterAnnouncement):
            self._standby = announced.standby
        try:
            body = in_place_of(self._task.fn, self._body, self._submitted_at)
            limits, pause = self._runner.limits, self._runner.pause
            return run_engine(client, limits, self._task, body, arguments, pause)
        finally:
            self._runner.leave(self._plan)
            if announced is not None:
                announced.retract()

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the body: the first, or one of Prefect's retries."""
        run = EngineRun(self._task)
        try:
            return self._run_body(run, args, kwargs)
        except BaseException as error:
            found, name = run.task_run, clean_name(run.task_run.name)
            self._runner.note_unstarted(
                UnstartedRun(
                    found.id,
                    name,
                    "failed" if isinstance(error, Exception) else "cancelled",
                    first_line(error),
                    time.time(),
                )
            )
            raise
        finally:
            # Prefect may try again much later.
            self._runner.leave(self._plan)
            run.end()

    def _run_body(self, run: EngineRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self._plan, Exception):
            raise self._plan
        if self._last is not None:
            # As between the processes of one call.
            self._last.wait_finished(ENDING_S)
        try:
            with argument_files().share() as share:
                plan, runner = self._plan, self._runner
                identity = plan.identity(args, kwargs, run.flow_name)
                call = TaskCall(plan, run, identity, args, kwargs, share, self._standby)
                self._last = body = BodyRun(
                    runner, call, self._climb, self._numbers, self._launcher
                )
                runner.begin(body)
                try:
                    return body.run()
                finally:
                    # Prefect's retry starts with this state.
                    self._climb = body.climb
                    runner.end(body)
        except CancelledByRunner:
            raise self._runner.ending from None
