"""A task runner between enter and exit: its threads, the processes of its tasks, its reports.

`task_runner` has Prefect's interface of a task runner, `submission` one submitted task. All runners of this Python
process with the same configuration share devices and standbys.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import Context, copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture

from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.devices.host import count_cores
from prefect_gpu.devices.shared_folder import SharedFolder, shared_folder
from prefect_gpu.engine import flow_run, task_engine
from prefect_gpu.engine.task_engine import CallingLine, CancelledByRunner, TagLimits, calling_line
from prefect_gpu.errors import CapacityError, DeviceError
from prefect_gpu.live.progress import MOST_RUNNING, MOST_WAITING, FlowProgress, RunCounts
from prefect_gpu.live.view import live_view
from prefect_gpu.policy import is_split_text, near_miss, parse_tags
from prefect_gpu.process_resources import PROCESS_RESOURCES, run_uninterrupted
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.standby_kind import Kind, kind_of
from prefect_gpu.processes.standby_plan import most_by_default
from prefect_gpu.processes.standby_pool import standby_pool
from prefect_gpu.reports.events import set_aside_event
from prefect_gpu.reports.history import MemoryHistory, PrefectHistory
from prefect_gpu.reports.model import TaskReport, UnstartedRun
from prefect_gpu.reports.publish import ProgressArtifact, Publisher
from prefect_gpu.runner.budgets import BudgetBook
from prefect_gpu.runner.configuration import Configuration, MpsUse
from prefect_gpu.runner.engine_threads import (
    BODY_WAITS,
    AwaitedFuture,
    RunnerThreads,
    start_engine,
    when_there,
)
from prefect_gpu.runner.run_log import flow_summary
from prefect_gpu.runner.submission import BodyRun, GPUTask
from prefect_gpu.runner.task_plan import PlanMaker, TaskPlan
from prefect_gpu.scheduling.model import Device, Request
from prefect_gpu.settings import read_settings

if TYPE_CHECKING:
    from prefect_gpu.cluster.membership import Cluster
    from prefect_gpu.processes.launch_spec import AnnouncedTask, Launcher

logger = logging.getLogger(__name__)

NOT_PREEMPTIBLE = (
    "gpu:preemptible has no effect on a cluster (address={address!r}): its tasks are neither suspended nor moved for "
    "others. A task of higher priority waits until memory is free, and is placed first."
)
SPLIT_TEXT = (
    "Task {name!r} has the tags {tags}: Python splits a text into its characters where a list is expected. Write "
    'tags=["gpu:memory=6GiB"] or tags=gpu(memory="6GiB"), not tags="gpu:memory=6GiB".'
)

#: Longest wait in seconds at a flow's end, for killed processes and for the last reports.
CLOSING_S = 30.0

#: Latest processes, and latest task runs without a process, that a runner outside a flow run keeps for its report. Such
#: a runner may serve background tasks for weeks, at about 1 kB a process.
KEPT_OUTSIDE_FLOWS = 1000

_Ended = TypeVar("_Ended", TaskReport, UnstartedRun)


class ActiveRunner:
    """A task runner that was entered and has not exited, with its configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._threads = RunnerThreads(self.pause)
        self._threads.__enter__()
        self._numbers = itertools.count()
        self._client = flow_run.SharedClient()
        self.limits = TagLimits(self._client.lend)
        self._lock = threading.Lock()
        #: Running bodies, and ended bodies whose memory or report is still awaited.
        self._bodies: set[BodyRun] = set()
        self._ending: set[BodyRun] = set()
        #: Whether any body began: output of its process may still arrive.
        self._called = False
        #: Futures of task runs that have not ended. Without the lock: each change is one operation of the set.
        self._futures: set[concurrent.futures.Future[Any]] = set()
        #: Set once the runner ends its tasks instead of waiting for them.
        self._closing = threading.Event()
        #: Exception that ends task runs once `_closing` is set.
        self._ended_by = CancelledByRunner()
        self._publisher: Publisher | None = None
        #: Tags and texts that `_warn_once` has handled; a set: the characters of a text that was given as tags.
        self._warned_of: set[str | frozenset[str]] = set()
        self._reports: list[TaskReport] = []
        #: Number of submitted GPU task runs, and of ended ones by the name of their state.
        self._submitted = 0
        self._states: Counter[str] = Counter()
        #: Whether the flow's summary was logged: all task runs have ended.
        self._summarised = False
        #: Task runs whose call of the body failed, with or without a process.
        self._unstarted: dict[UUID, UnstartedRun] = {}
        self._book: BudgetBook | None = None
        self._plans = PlanMaker(configuration.memory_snapshots)
        #: Context of the flow run in which tasks were submitted; `None`: no task, or no flow.
        self.flow: FlowRunContext | None = None
        #: Context of the first submit, in which events about devices are emitted.
        self._around: Context | None = None
        #: Broker whose device faults are watched; `None`: no broker was needed yet.
        self._watched: Broker | None = None
        self._cluster_lock = threading.Lock()
        self._cluster: Cluster | None = None
        #: Why the connection to the cluster failed; `None`: not tried, or connected.
        self._no_cluster: DeviceError | None = None
        self._mps = MpsUse(lambda text: self._warn_once(text, text))
        #: Plan and standby kind by the `id` of a function, which the plan keeps alive.
        self._kinds: dict[int, tuple[TaskPlan, Kind]] = {}

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[Any]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        """Start a task run and return its future. See `GPUTaskRunner.submit`."""
        self.flow = self.flow or FlowRunContext.get()
        plan = self._plan(task, flow_run.context_tags())
        if plan is None:
            thread = self._threads.submit(task, parameters, wait_for, dependencies)
            self._remember(thread.wrapped_future)
            return thread
        task_run_id = task_engine.new_task_run_id()
        arguments = {
            "task_run_id": task_run_id,
            "parameters": parameters,
            "wait_for": wait_for,
            "dependencies": dependencies,
        }
        future = self._start(task, plan, arguments, calling_line())
        return AwaitedFuture(task_run_id, future)

    def submit_background(
        self, task: Task[..., Any], arguments: Mapping[str, Any], around: set[str]
    ) -> concurrent.futures.Future[State[Any]] | None:
        """Start an existing task run; return the future of its final state. See `GPUTaskRunner.submit_background`."""
        plan = self._plan(task, around)
        return None if plan is None else self._start(task, plan, arguments, None)

    def _start(
        self,
        task: Task[..., Any],
        plan: TaskPlan | Exception,
        arguments: Mapping[str, Any],
        submitted_at: CallingLine | None,
    ) -> concurrent.futures.Future[State[Any]]:
        """Start the engine of a GPU task in a thread; return the future of the task run's final state."""
        self._around = self._around or copy_context()
        self._client.open()
        self._open_publisher()
        if self._configuration.live_view and not self._submitted:
            live_view().join(self, self.progress)
        with self._lock:
            self._submitted += 1
        self._expect(plan, (arguments["wait_for"], arguments["parameters"]))
        gpu_task = GPUTask(self, task, plan, submitted_at)
        run = copy_context().run
        engine = functools.partial(run, self._run_engine, gpu_task, self._client, arguments)
        try:
            future = start_engine(engine, next(self._numbers))
        except CapacityError as error:
            # Without a thread there is no engine. The next task may get one.
            self.leave(plan)
            future = concurrent.futures.Future()
            future.set_result(self._count(task_engine.failed_state(task.name, error)))
        self._remember(future)
        return future

    def _expect(self, plan: TaskPlan | Exception, inputs: Any) -> None:
        """Give a task run its place in the order of `submit`, once its inputs are there."""
        if isinstance(plan, TaskPlan):
            # The task's own request raises the same error.
            with contextlib.suppress(Exception):
                places = self.broker().places
                places.expect(plan.sequence)
                when_there(inputs, functools.partial(places.open, plan.sequence))

    def leave(self, plan: TaskPlan | Exception) -> None:
        """Give up the place of a task run in the order of `submit`, if it has not made its request."""
        if isinstance(plan, TaskPlan) and self._watched is not None:
            self._watched.places.leave(plan.sequence)

    def _plan(self, task: Task[..., Any], around: set[str]) -> TaskPlan | Exception | None:
        """Return the plan of a task, or the error in its tags; `None`: no GPU task. `around`: tags of the call."""
        self._warn_of_near_misses(task, around)
        try:
            policy = parse_tags(task.tags, around)
            if policy is None:
                return None
            self._configuration.check(policy)
            if self._configuration.address:
                # On the flow's thread, which is the main one: Ray sets signal handlers.
                self._open_cluster()
                if policy.preemptible:
                    policy = replace(policy, preemptible=False)
                    text = NOT_PREEMPTIBLE.format(address=self._configuration.address)
                    self._warn_once(text, text)
            # The sequence number is taken here, on the flow's thread: engine threads run in any order.
            plan = self._plans.make(task, policy, next_sequence())
        except Exception as error:  # noqa: BLE001 - it fails the task run, not the submit
            return error
        return plan

    def _warn_once(self, of: str | frozenset[str], text: str | None) -> None:
        """Log a warning (`None`: nothing is wrong) once for `of`: a tag, several tags, or the warning itself."""
        if of not in self._warned_of and text is not None:
            flow_run.log_on_flow(self.flow, text, logging.WARNING)
        self._warned_of.add(of)

    def _warn_of_near_misses(self, task: Task[..., Any], around: set[str]) -> None:
        """Warn once of each tag that looks like a GPU tag but is none."""
        own = frozenset(task.tags)
        if is_split_text(own):
            tags = ", ".join(sorted(own))
            self._warn_once(own, SPLIT_TEXT.format(name=task.name, tags=tags))
        for tag in sorted({*own, *around} - self._warned_of):
            meant = near_miss(tag)
            text = f"Task {task.name!r} has the tag {tag!r}, which has no meaning here; did you mean {meant!r}?"
            self._warn_once(tag, text if meant else None)

    def _remember(self, future: concurrent.futures.Future[Any]) -> None:
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    def _run_engine(self, task: GPUTask, *args: Any) -> State[Any]:
        return self._count(task.run(*args))

    def _count(self, state: State[Any]) -> State[Any]:
        with self._lock:
            self._states[state.name or state.type.value] += 1
        return state

    def counts(self) -> RunCounts:
        """Return the numbers of GPU task runs by state."""
        with self._lock:
            submitted, ended, bodies = self._submitted, dict(self._states), tuple(self._bodies)
        running = sum(body.has_devices for body in bodies)
        return RunCounts(submitted, running, len(bodies) - running, ended, self._summarised)

    def progress(self) -> FlowProgress:
        """Return the content of a live view, without reading any device."""
        with self._lock:
            bodies = tuple(self._bodies)
        running = [task for body in bodies if (task := body.running()) is not None]
        waiting = [body for body in bodies if not body.has_devices]
        first = heapq.nsmallest(MOST_WAITING, waiting, key=lambda body: body.order)
        return FlowProgress(
            self.counts(),
            self._watched.device_states() if bodies and self._watched is not None else (),
            heapq.nlargest(MOST_RUNNING, running, key=lambda task: task.seconds),
            [body.waiting() for body in first],
        )

    def _leave_view(self) -> None:
        # Not in a child, which enters and exits a copy of the runner.
        if self._submitted:
            live_view().leave(self)

    @property
    def ending(self) -> CancelledByRunner:
        """A new exception for one task run that the ending runner ends without waiting."""
        return CancelledByRunner(str(self._ended_by), self._ended_by.crashed)

    def begin(self, body: BodyRun) -> None:
        """Register a call of a body, to end it with this runner; raise `CancelledByRunner` if the runner is ending."""
        with self._lock:
            if self._closing.is_set():
                raise CancelledByRunner
            self._bodies.add(body)
            self._called = True

    def pause(self, seconds: float) -> None:
        """Wait between two tries of a task run; raise `CancelledByRunner` as soon as the runner is ending."""
        if self._closing.wait(max(0.0, seconds)):
            raise self.ending

    def end(self, body: BodyRun) -> None:
        """Note that a call of a body has ended; release its data once its processes have ended and are reported."""
        with self._lock:
            self._bodies.discard(body)
            self._ending.add(body)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            # Cheap: a body stays in the set only until its processes have ended.
            self._ending = {body for body in self._ending if not body.finished}

    def announce(self, plan: TaskPlan) -> AnnouncedTask | None:
        """Request that a warm process is prepared for a task; `None`: none will be. Never raises."""
        standby = self._configuration.standby
        if standby == 0 and not self._forks:
            return None
        try:
            broker, policy = self.broker(), plan.policy
            request = Request(
                "", plan.task_name, plan.sequence, 0.0, policy.memory, policy.count, policy.devices
            )
            # Raises for a task that can never be placed.
            broker.check(replace(request, exclusive=policy.exclusive, nodes=policy.nodes))
            kind = self._kind(plan, broker)
            if broker.reader.remote:
                return self._open_cluster().announce(kind, plan.framework_policy(broker.kind, 1))
            with self._lock:
                if self._closing.is_set():
                    return None
                most = broker.max_processes
                if isinstance(standby, int):
                    number = min(standby, most)
                else:
                    number = most_by_default(count_cores(), most)
                standby_pool().open(self, number, broker, _shared_folder())
            return standby_pool().announce(kind, self)
        except Exception:
            # The task's own request raises the same error.
            logger.debug("no process is kept ahead for %r", plan.task_name, exc_info=True)
            return None

    @property
    def _forks(self) -> bool:
        """Whether processes may be forks of a warm process, on a system that has what they need."""
        # Some builds of Python lack the functions. Under `-X dev` all of a process is finalised, which a fork is not.
        able = all(hasattr(os, name) for name in ("fork", "pidfd_open"))
        on = self._configuration.start_method != "spawn" and not sys.flags.dev_mode
        return on and able and sys.platform.startswith("linux")

    def _kind(self, plan: TaskPlan, broker: Broker) -> Kind:
        policy = plan.framework_policy(broker.kind, broker.processes)
        before, kind = self._kinds.get(id(plan.function), (None, None))
        if before is not None and kind is not None:
            if (before.policy, before.with_prefect) == (plan.policy, plan.with_prefect):
                return replace(kind, cpus=policy.cpus)
        kind = kind_of(
            plan.function,
            # A standby imports the modules of the function's code whole: all their frameworks count.
            replace(policy, detected=plan.frameworks),
            size_bytes=plan.host_bytes,
            with_prefect=plan.with_prefect,
            forks=self._forks and not broker.reader.remote,
        )
        self._kinds[id(plan.function)] = plan, kind
        return kind

    def book(self) -> BudgetBook:
        """Return the runner's budget book, with histories in Prefect's API if the runner publishes reports."""
        with self._lock:
            if self._book is None:
                publisher = self._publisher
                self._book = BudgetBook(
                    PrefectHistory(self._client.lend, publisher) if publisher else MemoryHistory()
                )
            return self._book

    def broker(self) -> Broker:
        """Return the broker of the runner's devices; raise `DeviceError` if the devices cannot be opened."""
        given = self._configuration
        if given.address:
            found = self._open_cluster().broker
            assert found is not None, "it was started"
            broker = found
        else:
            folder = read_settings().ledger
            key = "broker", given.of_broker, folder
            broker = PROCESS_RESOURCES.get(key, lambda: given.make_broker(folder))
        with self._lock:
            watched, self._watched = self._watched, broker
        if watched is not broker:
            broker.fault_watchers.add(self._emit_set_aside)
        return broker

    def _emit_set_aside(self, device: Device, why: str) -> None:
        if self._around is not None:
            flow_run.emit_device_event(set_aside_event(device, why), self._around)

    def mps_pipes(self) -> str | None:
        """Return the folder of the MPS daemon whose clients tasks are to be; `None`: they share a GPU by time."""
        is_used = self._configuration.sharing == "mps"
        return self._mps.pipes(self.broker().reader) if is_used else None

    def cluster_launcher(self) -> Launcher | None:
        """Return the launcher for the nodes of the runner's cluster; `None`: processes run on this machine."""
        return self._open_cluster().launcher if self._configuration.address else None

    def _open_cluster(self) -> Cluster:
        """Return the cluster, connected once; raise `DeviceError` if the address has no cluster with devices."""
        with self._cluster_lock:
            if self._no_cluster is not None:
                # Behind a firewall each try takes ten seconds.
                raise DeviceError(str(self._no_cluster))
            if self._cluster is None:
                try:
                    self._cluster = self._configuration.connect()
                except DeviceError as error:
                    self._no_cluster = error
                    raise
            return self._cluster

    def report(self, report: TaskReport) -> None:
        """Keep and publish the report of a process, without delaying the caller."""
        self._let_go()
        if _ended_with_flow(report, self._ended_by):
            report = replace(report, error=str(self._ended_by))
        with self._lock:
            same = [r for r in self._reports if r.task_run_id == report.task_run_id]
            self._reports.append(report.compact())
            if self.flow is None:
                del self._reports[:-KEPT_OUTSIDE_FLOWS]
            publisher = self._publisher
        if publisher is not None:
            publisher.publish(report, same)

    def last_report(self, task_run_id: UUID) -> TaskReport | None:
        """Return the report of the last process of an ended task run; `None`: it had no process."""
        with self._lock:
            ending = tuple(self._ending)
        _wait_all(ending)
        with self._lock:
            found = [each for each in self._reports if each.task_run_id == task_run_id]
        return max(found, key=lambda report: report.attempt, default=None)

    def note_unstarted(self, run: UnstartedRun) -> None:
        """Keep a task run whose call of the body failed: the flow's report lists the task run if no process ran."""
        if self._configuration.reports:
            with self._lock:
                self._unstarted[run.task_run_id] = run
                if self.flow is None and len(self._unstarted) > KEPT_OUTSIDE_FLOWS:
                    del self._unstarted[next(iter(self._unstarted))]

    def _open_publisher(self) -> None:
        """Create the publisher, which keeps the settings of the calling context, the flow's."""
        with self._lock:
            if self._configuration.reports and self._publisher is None:
                self._publisher = Publisher(self._client.lend)
                name, flow_run_id = flow_run.flow_of(self.flow)
                if self._configuration.progress and flow_run_id is not None:
                    self._publisher.show_progress(
                        ProgressArtifact(self.counts, flow_name=name, flow_run_id=flow_run_id)
                    )

    def cancel(self) -> None:
        """End all processes of this runner, and start no new ones."""
        with self._lock:
            self._closing.set()
            bodies = (*self._bodies, *self._ending)
        for body in bodies:
            body.cancel()

    def _end_what_waits(self) -> None:
        """End the warm processes, unless another runner of this process uses them."""
        if self._configuration.standby != 0 or self._forks:
            standby_pool().close(self)

    def close(self, failed: bool, error: BaseException | None = None) -> None:
        """End the runner: wait for its tasks, or end them if `failed`, then publish the flow's report.

        `error` is the exception that ended the flow's engine; `None`: none.
        """
        self._ended_by = task_engine.ended_by(error)
        try:
            self._close(failed)
        except BaseException as signal:
            # Ctrl-C, or a signal that Prefect turned into an exception. Either may come again at any line.
            try:
                if not failed:
                    self._ended_by = task_engine.ended_by(signal)
                    self._close(failed=True)
            finally:
                run_uninterrupted(self._end_all, "prefect-gpu-close")
                if self._publisher is not None:
                    self._publisher.end("the flow's process was told to end")
            raise
        finally:
            self._leave_view()
            if self._watched is not None:
                self._watched.fault_watchers.discard(self._emit_set_aside)
            self._mps.leave()
            with self._cluster_lock:
                opened, self._cluster = self._cluster, None
            if opened is not None:
                opened.close()

    def _end_all(self) -> None:
        """End all processes. Idempotent."""
        self.cancel()
        # Engines may wait for a warm process that imports.
        self._end_what_waits()
        self._threads.cancel_all()

    def _close(self, failed: bool) -> None:
        if failed:
            # Running bodies would keep the interpreter from exiting.
            run_uninterrupted(self._end_all, "prefect-gpu-close")
            # All task runs must reach their final state.
            concurrent.futures.wait(self._futures.copy(), CLOSING_S)
        else:
            # Awaited tasks may submit others. Tasks in threads are awaited, too: Prefect's thread runner cancels tasks
            # that still wait for their inputs.
            with BODY_WAITS.counted():
                while unfinished := self._futures.copy():
                    concurrent.futures.wait(unfinished)
        self._end_what_waits()
        self._threads.__exit__(None, None, None)
        with self._lock:
            bodies = (*self._bodies, *self._ending)
        _wait_all(bodies)
        if self._called:
            process_launcher().output.flush(CLOSING_S)
        # After a signal at any line this method runs again: each step is marked as done only afterwards.
        self._leave_view()
        if self._states and not self._summarised:
            flow_run.log_on_flow(self.flow, flow_summary(self._states, self._reports))
            self._summarised = True
        if self._publisher is not None:
            name, flow_run_id = flow_run.flow_of(self.flow)
            if self._reports or self._unstarted:
                reports = [_as_ended(each, self._ended_by) for each in self._reports]
                unstarted = [_as_ended(each, self._ended_by) for each in self._unstarted.values()]
                self._publisher.publish_flow(
                    reports, unstarted, flow_name=name, flow_run_id=flow_run_id
                )
                self._reports, self._unstarted = [], {}
            self._publisher.close(CLOSING_S)
            report_id, self._publisher.flow_report_id = self._publisher.flow_report_id, None
            if report_id is not None and (url := flow_run.artifact_url(report_id)):
                flow_run.log_on_flow(self.flow, f"Report of the GPU tasks: {url}")
        self._client.close()


def _wait_all(bodies: Iterable[BodyRun]) -> None:
    """Wait until bodies have ended and their reports were passed on, for `CLOSING_S` seconds in all."""
    until_s = time.monotonic() + CLOSING_S
    for body in bodies:
        body.wait_finished(until_s - time.monotonic())


def _as_ended(found: _Ended, by: CancelledByRunner) -> _Ended:
    """Return a task run's report; if its flow ended the task run, with the outcome and reason of the final state."""
    if not _ended_with_flow(found, by):
        return found
    return replace(found, outcome="died" if by.crashed else "cancelled", error=str(by))


def _ended_with_flow(found: TaskReport | UnstartedRun, by: CancelledByRunner) -> bool:
    # A first run that was ended for others has its own reason.
    return found.outcome == "cancelled" and found.error in ("", str(CancelledByRunner()), str(by))


def _shared_folder() -> SharedFolder | None:
    try:
        return shared_folder(read_settings().ledger)
    except OSError as error:
        # The ledger logs the warning.
        logger.debug("standbys of other processes are not counted: %s", error)
        return None
