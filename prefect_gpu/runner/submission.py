"""One submitted GPU task: what Prefect's engine runs in place of its body, process after process.

`GPUTask` is the task, and `BodyRun` one call of its body: it starts attempts until one answers or another would
not help. What follows an out-of-memory is decided in `scheduling.ladder`, one process is `attempt`, and what a
runner keeps for all of its tasks is in `active_runner`.
"""

from __future__ import annotations

import functools
import itertools
import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from prefect import Task
from prefect.client.schemas.objects import TaskRun

from prefect_gpu.broker.broker import Broker
from prefect_gpu.cluster.expected import ClusterAnnouncement
from prefect_gpu.errors import (
    NO_ROOM,
    ChildDiedError,
    DeviceError,
    NodeRefusedError,
    PlacementError,
    PlacementTimeoutError,
    PolicyError,
    PrefectGPUError,
    ProtocolError,
    ResultError,
)
from prefect_gpu.live.progress import RunningTask, WaitingTask
from prefect_gpu.processes.launch_spec import Launcher
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.reports.model import TaskReport, UnstartedRun
from prefect_gpu.runner.attempt import (
    Attempt,
    NeedLearned,
    ProbeEnded,
    first_line,
    has_traceback,
)
from prefect_gpu.runner.budgets import BudgetBook, Grant
from prefect_gpu.runner.engine_threads import asked_first
from prefect_gpu.runner.prefect_engine import (
    LONGEST_LINE,
    CallingLine,
    CancelledByRunner,
    ChildCrash,
    EngineRun,
    SharedClient,
    add_note,
    paused_by,
    run_engine,
    with_body,
)
from prefect_gpu.runner.submit_order import Place
from prefect_gpu.runner.task_plan import TaskCall, TaskPlan
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.ladder import (
    Cause,
    Climb,
    Evidence,
    Rung,
    classify,
    last_words,
    needed_bytes,
    next_rung,
)
from prefect_gpu.scheduling.model import Device
from prefect_gpu.scheduling.reasons import Reason, WaitKind
from prefect_gpu.suspension.moves import ProcessLostError
from prefect_gpu.units import format_seconds
from prefect_gpu.values import argument_files

#: Seconds after which a task asks again for a device that its node has refused: readings come every 0.25 s.
REFUSED_S = 0.25

#: Seconds between two messages that a node refuses a task.
TELL_S = 30.0

#: Seconds that the next process of a task run waits at most for the end of the one before it and for its
#: memory: what both may take (`launcher.EXIT_GRACE_S`, `device_view.RECOVERY_S`).
ENDING_S = 10.0


class BodyRun:
    """Runs the body for one call by Prefect's engine.

    Args:
        call: The call.
        climb: How far earlier calls for the same task run have climbed.
        numbers: Numbers the processes of the task run.
        broker: Of the runner's devices.
        launcher: Starts the processes.
        book: Says what they get.
        report: Takes the report of each process, from any thread.
        new_attempt: Makes an attempt; tests have others.
    """

    def __init__(
        self,
        call: TaskCall,
        climb: Climb,
        numbers: Iterator[int],
        broker: Broker,
        launcher: Launcher,
        book: BudgetBook,
        report: Callable[[TaskReport], None],
        new_attempt: Callable[[TaskCall, Grant, int, Broker, Launcher], Attempt] = Attempt,
    ) -> None:
        self._call = call
        self._policy = call.plan.policy
        #: How far it has climbed.
        self.climb = climb
        self._numbers = numbers
        self._broker = broker
        self._launcher = launcher
        self._book = book
        self._report = report
        self._new_attempt = new_attempt
        self._lock = threading.Lock()
        self._cancelled = False
        #: In order; at most `ladder.MOST_PROCESSES`.
        self._attempts: list[Attempt] = []
        self._over = threading.Event()
        #: Histories for which its process probes beside other tasks.
        self._probed: frozenset[HistoryKey] = frozenset()

    def cancel(self) -> None:
        """End it, wherever it is. From any thread; `run` then raises `CancelledByRunner`."""
        with self._lock:
            self._cancelled = True
            attempts = tuple(self._attempts)
        self._book.wake()
        for attempt in attempts:
            # Those before the last may linger at their exit.
            attempt.cancel()

    @property
    def finished(self) -> bool:
        """Whether nothing of its processes is left and their reports were handed on."""
        return self._over.is_set() and all(a.finished.is_set() for a in self._attempts)

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until `finished`; `False`: it was not in time."""
        deadline = time.monotonic() + timeout_s
        events = (self._over, *(attempt.finished for attempt in self._attempts))
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    @property
    def broker(self) -> Broker:
        """Hands out its devices."""
        return self._broker

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the queue: the lower is first."""
        return -self._policy.priority, self._call.plan.sequence

    @property
    def has_devices(self) -> bool:
        """Whether a process of it has devices now. From any thread."""
        return bool(self._attempts) and self._attempts[-1].has_devices

    def running(self) -> RunningTask | None:
        """Return what is shown of it while it has devices; `None`: it has none. From any thread."""
        return self._attempts[-1].running() if self._attempts else None

    def waiting(self) -> WaitingTask:
        """Return what is shown of it while it has no devices. From any thread."""
        run = self._call.run
        # Without a process it waits for what the first run of its like shows.
        seconds, reason = None, run.awaits
        if self._attempts:
            seconds, reason = self._attempts[-1].why_it_waits()
        return WaitingTask(self.order, clean_name(run.task_run.name), seconds, reason)

    def run(self) -> object:
        """Run the body until a process answers.

        Returns:
            What the body returned.

        Raises:
            PlacementError: No device can hold it, or none was free in time.
            CancelledByRunner: `cancel` was called.
            BaseException: What `Attempt.run` raises for the last process.
        """
        try:
            return self._run_processes()
        finally:
            # It may end before it has asked for a device, and Prefect retry it later.
            self._call.place.leave()
            self._over.set()
            # What else keeps this object, such as a context of Prefect, keeps no arguments with it.
            self._call = self._call.without_arguments()

    def _run_processes(self) -> object:
        grant = self._first_grant()
        whole_bytes = 0
        shortage: Exception | None = None
        refused, number, told_s = False, 0, -math.inf
        while True:
            if not refused:
                number = next(self._numbers)
            attempt: Attempt | None = None
            rung: Rung | None = None
            go_on = refused = lost = again = learned = False
            began_s = time.monotonic()
            cause: Cause | Literal[""] = ""
            wanted_bytes: int | None = None
            try:
                attempt = self._new_attempt(self._call, grant, number, self._broker, self._launcher)
                self._add(attempt)
                self._book.begin_probe(self._probed, attempt.learn_need)
                placement = attempt.place()
                # A probe on one model says nothing of others.
                grant = self._book.keep(grant, placement.devices[0].name)
                if attempt.shares:
                    # The next of its kind may ask now.
                    self._book.release(grant)
                    grant = replace(grant, claims=frozenset())
                whole_bytes = grant.whole_bytes.get(placement.devices[0].name, 0)
                return attempt.run()
            except PlacementTimeoutError:
                raise
            except NeedLearned:
                learned = True
            except ProbeEnded:
                go_on = again = True
                self._call.run.warn(
                    "Ended, since first runs beside it grow and its device runs short of memory; it runs again with "
                    "a device to itself"
                )
            except NodeRefusedError as error:
                # It goes back to its place in the queue, and what the node says is known by the next reading.
                waited_s = grant.waited_s + time.monotonic() - began_s
                limit_s = self._policy.wait_s
                if limit_s is not None and waited_s >= limit_s:
                    raise PlacementTimeoutError(
                        f"gpu:wait={format_seconds(limit_s)} is over: {error}"
                    ) from None
                refused = True
                if time.monotonic() - told_s >= TELL_S:
                    told_s = time.monotonic()
                    reason = Reason(WaitKind.OTHER_NODE, at=error.node, detail=error.problem)
                    self._call.run.show_awaiting(reason)
            except PlacementError as error:
                if shortage is None:
                    raise
                # What ran out is what went wrong; that there is no more is why it ends.
                add_note(shortage, str(error))
                raise shortage from None
            except ProcessLostError as error:
                # None of this task is moved again, so it comes at most once for each that is moved now.
                self._call.run.warn(f"The process was lost in a move: {error}; the body runs again")
                lost = go_on = True
            except Exception as error:
                evidence = None if attempt is None else attempt.evidence()
                if attempt is None or evidence is None:
                    raise
                cause, wanted_bytes = classify(evidence), needed_bytes(evidence)
                rung = self._next_rung(attempt, cause, evidence, whole_bytes, error)
                if rung is None:
                    raise
                # The first of PyTorch's six sentences says it.
                said = textwrap.shorten(first_line(error), LONGEST_LINE, placeholder=" …")
                self._call.run.warn(f"Out of memory: {rung.reason} ({said})")
                shortage, go_on = error, True
            finally:
                if attempt is not None:
                    self._book.end_probe(self._probed, attempt.learn_need)
                # The grant goes on to the next process, if there is one.
                ended = self._probed if attempt is not None and attempt.shares else frozenset()
                # Those like it wait for its run, which is kept once its memory is back.
                self._book.begin_end(ended)
                take = functools.partial(self._take_report, grant, not (go_on or refused), ended)
                if attempt is None:
                    take(None)
                else:
                    attempt.close(take, cause, wanted_bytes, rung)
            assert attempt is not None
            if lost:
                attempt.finished.wait(ENDING_S)
                grant = replace(grant, waited_s=0.0)
                continue
            if learned:
                with self._lock:
                    self._attempts.remove(attempt)
                waited_s = grant.waited_s + time.monotonic() - began_s
                grant = replace(self._first_grant(), waited_s=waited_s)
                # It has had no process.
                refused = True
                continue
            if again:
                attempt.finished.wait(ENDING_S)
                grant = replace(
                    grant, waited_s=0.0, probe_fraction=0.0, alone_because="it was ended once"
                )
                continue
            if rung is None:
                # A node has refused it: it waits on.
                self._over.wait(REFUSED_S)
                with self._lock:
                    self._attempts.remove(attempt)
                grant = replace(grant, waited_s=grant.waited_s + time.monotonic() - began_s)
                continue
            self._probed = frozenset()
            # Reports come in the order of the processes, of which Prefect shows the newest.
            attempt.finished.wait(ENDING_S)
            grant = replace(
                grant,
                memory=rung.budget_bytes,
                waited_s=0.0,
                after_oom=True,
                probe_fraction=0.0,
            )
            self.climb = rung.climb

    def _add(self, attempt: Attempt) -> None:
        with self._lock:
            cancelled = self._cancelled
            self._attempts.append(attempt)
        if cancelled:
            attempt.cancel()

    def _first_grant(self) -> Grant:
        policy, broker = self._policy, self._broker
        capacities = broker.capacities(policy.devices, policy.nodes)
        by_size = sorted((size, device.name) for device, size in capacities.items())
        grant = self._book.grant(
            self._call.identity,
            policy.memory,
            [device.name for device in capacities],
            self._call.place,
            count=policy.count,
            capacity_bytes={name: size for size, name in by_size},
            limit_s=policy.wait_s,
            on_waiting=self._call.run.show_awaiting,
            cancelled=lambda: self._cancelled,
            probe_fraction=self._call.plan.probe_fraction,
        )
        if grant is None:
            raise CancelledByRunner
        grant = replace(grant, capacity_bytes=_most_of_each(capacities, policy.count))
        self._probed = grant.claims if grant.probe_fraction else frozenset()
        if grant.source == "probe":
            grant = replace(grant, alone_because=self._call.plan.alone_because)
        if self.climb.whole_device:
            return replace(grant, memory=None, after_oom=True, probe_fraction=0.0)
        if isinstance(grant.memory, int) and grant.memory < self.climb.reached_bytes:
            # An earlier call has found that it needs more.
            return replace(grant, memory=self.climb.reached_bytes, after_oom=True)
        return grant

    def _next_rung(
        self,
        attempt: Attempt,
        cause: Cause,
        evidence: Evidence,
        whole_bytes: int,
        error: Exception,
    ) -> Rung | None:
        """Return what the next process gets; `None`: there is none, and the error stands."""
        climb = replace(self.climb, whole_device=attempt.whole_device)
        policy = self._policy
        capacities = self._broker.capacities(policy.devices, policy.nodes)
        capacity = _most_of_each(capacities, policy.count)
        alike = len({device.name for device in capacities}) == 1
        rung = next_rung(climb, cause, evidence, capacity, whole_bytes, alike)
        # A probe beside others was not given what its tag lets it fail with.
        probed = evidence.shared_probe or climb.from_error
        if isinstance(rung, Rung) and (policy.oom != "fail" or probed):
            return rung
        add_note(error, last_words(cause, evidence, rung, capacity, self._broker.kind))
        return None

    def _take_report(
        self,
        grant: Grant,
        release: bool,
        ended: frozenset[HistoryKey],
        report: TaskReport | None,
    ) -> None:
        """Take the report of a process, `None` if there was none, and hand it on.

        Args:
            grant: What the process got.
            release: Whether no other process of the task run has that.
            ended: Histories that it was a probe for beside other tasks.
            report: Of the process.
        """
        try:
            if report is not None:
                self._book.take(self._call.identity, report)
        finally:
            if release:
                self._book.release(grant)
            self._book.end(ended)
            if report is not None:
                self._report(report)


def _most_of_each(capacities: Mapping[Device, int], count: int) -> int:
    """Return the most bytes that each of so many devices of one node could give."""
    by_node: dict[str, list[int]] = {}
    for device, size in sorted(capacities.items(), key=lambda each: -each[1]):
        by_node.setdefault(device.host, []).append(size)
    sizes = [found[count - 1] for found in by_node.values() if len(found) >= count]
    return max(sizes, default=min(capacities.values()))


if TYPE_CHECKING:
    from prefect_gpu.runner.active_runner import ActiveRunner

#: Errors after which a retry could only fail the same way: the author or the machine must change.
HOPELESS = (PolicyError, PlacementError, DeviceError, ResultError)


def is_hopeless(error: object) -> bool:
    """Return whether a retry could only fail the same way."""
    # An exception of the body may not come again, even if it could not be pickled; so may a lack of memory.
    own_error = isinstance(error, ResultError) and (
        error.what == "exception" or error.type_name == NO_ROOM
    )
    # A device that was busy for as long as `gpu:wait` allows may be free the next time.
    may_pass = own_error or isinstance(error, PlacementTimeoutError)
    return isinstance(error, HOPELESS) and not may_pass


def speaks_for_itself(error: Exception) -> bool:
    """Return whether an error is not explained by where in this package it was raised."""
    if isinstance(error, ProtocolError):
        # A fault of this package.
        return False
    return isinstance(error, PrefectGPUError) or has_traceback(error)


class GPUTask:
    """One submitted GPU task.

    Args:
        runner: The runner that it was submitted to.
        task: As it was submitted.
        plan: What it is; or else what is wrong with it, which fails the task run.
        place: In the order of `submit`.
        submitted_at: The line of the user's that submitted it.
    """

    def __init__(
        self,
        runner: ActiveRunner,
        task: Task[..., Any],
        plan: TaskPlan | Exception,
        place: Place,
        submitted_at: CallingLine | None,
    ) -> None:
        self._runner = runner
        self._task = task
        self._plan = plan
        self._place = place
        self._submitted_at = submitted_at
        # Of all calls of the body, which are Prefect's retries.
        self._numbers = itertools.count(1)
        self._climb = Climb()
        #: The last call of the body.
        self._last: BodyRun | None = None
        #: Starts its processes; once it was announced, from among those that wait.
        self._launcher: Launcher = process_launcher()
        #: Kind of the standbys on the nodes of a cluster that suit it; empty: none does.
        self._standby = ""
        #: The engine's task run, once the body was called.
        self._task_run: TaskRun | None = None

    def run(self, client: SharedClient, arguments: Mapping[str, Any]) -> Any:
        """Run Prefect's engine to the task's final state, on a thread of its own. See `run_engine`."""
        announced = None
        if isinstance(self._plan, TaskPlan):
            announced = self._runner.announce(self._plan)
            self._launcher = announced or self._runner.cluster_launcher() or self._launcher
        if isinstance(announced, ClusterAnnouncement):
            self._standby = announced.standby
        try:
            task = with_body(
                self._task, self._body, is_hopeless, speaks_for_itself, self._submitted_at
            )
            with asked_first(self._runner.limits), paused_by(self._runner.pause):
                return run_engine(client, task, arguments, lambda: self._task_run)
        finally:
            self._place.leave()
            if announced is not None:
                announced.retract()

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the body: the first, or one of Prefect's retries."""
        run = EngineRun(self._task)
        self._task_run = run.task_run
        try:
            return self._run_body(run, args, kwargs)
        except BaseException as error:
            task_run = run.task_run
            outcome: Literal["failed", "cancelled"] = (
                "failed" if isinstance(error, Exception) else "cancelled"
            )
            self._runner.note_unstarted(
                UnstartedRun(
                    task_run.id, clean_name(task_run.name), outcome, first_line(error), time.time()
                )
            )
            raise
        finally:
            run.end()

    def _run_body(self, run: EngineRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self._plan, Exception):
            raise self._plan
        if self._last is not None:
            # As between the processes of one call.
            self._last.wait_finished(ENDING_S)
        try:
            with argument_files().share() as share:
                identity = self._plan.identity(args, kwargs, run.flow_name)
                call = TaskCall(
                    self._plan,
                    run,
                    identity,
                    args,
                    kwargs,
                    share,
                    self._place,
                    self._standby,
                )
                broker, book = self._runner.broker(), self._runner.book()
                self._last = body = BodyRun(
                    call,
                    self._climb,
                    self._numbers,
                    broker,
                    self._launcher,
                    book,
                    self._runner.report,
                )
                self._runner.begin(body)
                try:
                    return body.run()
                finally:
                    # A retry of Prefect's goes on from here.
                    self._climb = body.climb
                    self._runner.end(body)
        except CancelledByRunner:
            raise self._runner.ending from None
        except ChildDiedError as death:
            # The engine retries an exception if retries are left; a `BaseException` ends the run as
            # crashed.
            if run.may_still_retry(death):
                raise
            raise ChildCrash(death) from None
