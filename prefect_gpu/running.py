"""A task runner between its enter and its exit: its threads, its tasks' processes, its reports.

Prefect's contract of a task runner is in `task_runner`, one submitted task in `gpu_task`. Devices, and the
processes that wait for tasks, are those of all runners of this Python process that want the same.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from prefect import Task
from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_gpu import prefect_bridge as bridge
from prefect_gpu.attempt import CancelledByRunner
from prefect_gpu.broker import Broker, shared_broker
from prefect_gpu.budgets import BudgetBook
from prefect_gpu.contexts import context_meter
from prefect_gpu.devices.spec import DeviceSpec, open_reader
from prefect_gpu.engines import EngineThreads
from prefect_gpu.errors import PolicyError
from prefect_gpu.escalation import Escalation
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.host_memory import host_bytes_of
from prefect_gpu.frameworks.registry import detect_frameworks
from prefect_gpu.gpu_task import GPUTask
from prefect_gpu.heating import BrokerHeater
from prefect_gpu.inside import current_allocation
from prefect_gpu.ledger import PROCESS_LEDGER, ProcessLedger
from prefect_gpu.policy import GPUPolicy, parse_tags
from prefect_gpu.processes.forkserver import check_modules
from prefect_gpu.processes.interpreter import count_cores
from prefect_gpu.processes.kind import Kind, kind_of
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.standby import Announcement, standby_pool
from prefect_gpu.processes.templates import ForkLauncher, template_pool
from prefect_gpu.reports.history import MemoryHistory, PrefectHistory
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.publish import Publisher
from prefect_gpu.scheduling.board import PlacementStyle
from prefect_gpu.scheduling.model import Reservation
from prefect_gpu.scheduling.standbys import most_by_default
from prefect_gpu.start_gate import StartGate
from prefect_gpu.tag_limits import TagLimits

logger = logging.getLogger(__name__)

#: Seconds for which the end of a flow waits for children that were killed, and for the last reports.
CLOSING_S = 30.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a runner was made with; see `GPUTaskRunner`."""

    devices: DeviceSpec
    placement: PlacementStyle
    max_processes: int | None
    max_tasks_per_device: int | None
    #: `None`: by kind of device.
    headroom_bytes: int | None
    reports: bool
    standby: int | str
    start_method: str


class Running:
    """A runner that was entered.

    Args:
        configuration: Of the runner.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._threads: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=sys.maxsize)
        self._threads_started = False
        self._engines = EngineThreads()
        self._client = bridge.SharedClient()
        self.limits = TagLimits(self._client.lend)
        self.gate = StartGate()
        self._lock = threading.Lock()
        #: Calls of bodies that go on, and those that are over but for their memory or their report.
        self._calls: set[Escalation] = set()
        self._ending: set[Escalation] = set()
        #: Whether there was a call at all: what its process printed may be on its way.
        self._called = False
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._closing = False
        self._publisher: Publisher | None = None
        self._reports: list[TaskReport] = []
        self._book: BudgetBook | None = None
        #: Of the flow run that tasks were submitted in.
        self.flow: FlowRunContext | None = None
        self._told: set[str] = set()
        #: By the identity of a function, which is kept so that it stays one.
        self._kinds: dict[int, tuple[Any, GPUPolicy, Kind]] = {}

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[Any]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        """See `GPUTaskRunner.submit`."""
        self.flow = self.flow or bridge.flow_run_of_thread()
        policy: GPUPolicy | None
        problem: PolicyError | None = None
        try:
            policy = parse_tags(task.tags, bridge.context_tags())
        except PolicyError as error:
            policy, problem = None, error
        if policy is not None and self._configuration.start_method == "forkserver":
            try:
                check_modules(_frameworks_of(task, policy))
            except PolicyError as error:
                policy, problem = None, error
        if policy is None and problem is None:
            return self._submit_to_thread(task, parameters, wait_for, dependencies)
        self._client.open()
        self._open_publisher()
        gpu_task = GPUTask(self, task, policy, problem)
        task_run_id = bridge.new_task_run_id()
        context = copy_context()
        future: concurrent.futures.Future[Any] = self._engines.submit(
            functools.partial(
                context.run,
                gpu_task.run,
                self._client,
                task_run_id,
                parameters,
                wait_for,
                dependencies,
            ),
        )
        self._remember(future)
        return PrefectConcurrentFuture(task_run_id=task_run_id, wrapped_future=future)

    def _remember(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._forget)

    def _unfinished(self) -> tuple[concurrent.futures.Future[Any], ...]:
        with self._lock:
            return tuple(self._futures)

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def _submit_to_thread(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[Any]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        with self._lock:
            if not self._threads_started:
                self._threads.__enter__()
                self._threads_started = True
        future = self._threads.submit(task, parameters, wait_for, dependencies)
        self._remember(future.wrapped_future)
        return future

    def new_call(self, make: Callable[[Broker, BudgetBook], Escalation]) -> Escalation:
        """Make a call of a body that ends with this runner.

        Raises:
            CancelledByRunner: The runner is ending already.
            DeviceError: The devices cannot be opened.
        """
        call = make(self._broker(), self._open_book())
        with self._lock:
            if self._closing:
                raise CancelledByRunner
            self._calls.add(call)
            self._called = True
        return call

    def call_is_over(self, call: Escalation) -> None:
        """Let go of a call once nothing of it is left: it holds all that its task run had."""
        with self._lock:
            self._calls.discard(call)
            self._ending.add(call)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            # Few: their processes are gone, or about to be.
            self._ending = {call for call in self._ending if not call.finished}

    def announce(
        self, task: Task[..., Any], policy: GPUPolicy
    ) -> Announcement | ForkLauncher | None:
        """Have a process kept ahead for a task; `None`: there will be none. It never raises."""
        standby = self._configuration.standby
        forks = self._configuration.start_method == "forkserver"
        if standby == 0 and not forks:
            return None
        try:
            broker = self._broker()
            kind = self._kind(task, policy, broker)
            if forks:
                with self._lock:
                    if self._closing:
                        return None
                    template_pool().open(self)
                return template_pool().announce(kind)
            pool = standby_pool()
            most = broker.max_processes
            heater = BrokerHeater(broker, context_meter()) if standby == "hot" else None
            with self._lock:
                if self._closing:
                    return None
                pool.open(
                    self,
                    min(standby, most)
                    if isinstance(standby, int)
                    else most_by_default(count_cores(), most),
                    lambda: broker.host_promised_bytes,
                    lambda: broker.wants_host_memory,
                    heater,
                )
            return pool.announce(kind, heater)
        except Exception:
            # What is amiss is told where the task asks for a device.
            logger.debug("no process is kept ahead for %r", task.name, exc_info=True)
            return None

    def _kind(self, task: Task[..., Any], policy: GPUPolicy, broker: Broker) -> Kind:
        threads = policy.cpus or max(1, count_cores() // max(1, broker.processes))
        known = self._kinds.get(id(task.fn))
        if known is not None and known[1] == policy:
            return replace(known[2], cpus=threads)
        named = tuple(share.name for share in policy.frameworks)
        detected = () if named else detect_frameworks(task.fn)
        kind = kind_of(
            task.fn,
            FrameworkPolicy(
                device_kind=broker.kind,
                device_uuids=(),
                total_bytes=(),
                budget_bytes=(),
                allocator_options=dict(policy.allocator_options),
                caching=policy.caching,
                cpus=threads,
                cpus_stated=policy.cpus is not None,
                frameworks=named,
                detected=detected,
            ),
            cpus_stated=policy.cpus is not None,
            size_bytes=host_bytes_of(named or detected),
            hot=self._configuration.standby == "hot" and policy.count == 1,
        )
        if self._configuration.standby == "hot" and policy.count == 1 and not kind.hot:
            what = "NVIDIA devices" if broker.kind == "host" else "PyTorch or CuPy in a task"
            self._log_once(f"standby='hot' needs {what}: without, standbys only import ahead")
        self._kinds[id(task.fn)] = task.fn, policy, kind
        return kind

    def _open_book(self) -> BudgetBook:
        """Give the runner's book of budgets; its histories are those of the flow's API."""
        with self._lock:
            if self._book is None:
                publisher = self._publisher
                self._book = BudgetBook(
                    MemoryHistory()
                    if publisher is None
                    else PrefectHistory(self._client.lend, publisher)
                )
            return self._book

    def _broker(self) -> Broker:
        given = self._configuration
        key = (
            given.devices,
            given.placement,
            given.max_processes,
            given.max_tasks_per_device,
            given.headroom_bytes,
        )
        return shared_broker(key, lambda: _make_broker(given))

    def report(self, report: TaskReport) -> None:
        """Publish the report of a process, without holding up the caller."""
        self._let_go()
        if not self._configuration.reports:
            return
        with self._lock:
            self._reports.append(report.compact())
            publisher = self._publisher
        if publisher is not None:
            publisher.publish(report)

    def _open_publisher(self) -> None:
        """Make the publisher: in the flow's own context, whose settings it keeps."""
        if self._configuration.reports and self._publisher is None:
            self._publisher = Publisher(self._client.lend)

    def _log_once(self, text: str) -> None:
        with self._lock:
            is_new = text not in self._told
            self._told.add(text)
        if is_new:
            logger.info(text)

    def cancel(self) -> None:
        """End all processes of this runner, and let no new one start."""
        with self._lock:
            self._closing = True
            calls = (*self._calls, *self._ending)
        for call in calls:
            call.cancel()

    def _end_what_waits(self) -> None:
        """End the processes that were made ahead, if no other runner of this process wants them."""
        if self._configuration.standby != 0:
            standby_pool().close(self)

    def close(self, failed: bool) -> None:
        """See `GPUTaskRunner.__exit__`."""
        try:
            self._close(failed)
        finally:
            # Last: a template tells how its forks ended.
            if self._configuration.start_method == "forkserver":
                template_pool().close(self)

    def _close(self, failed: bool) -> None:
        if failed:
            self.cancel()
            self._end_what_waits()
            if self._threads_started:
                self._threads.cancel_all()
            # All must reach their state. What does not (an engine that sleeps until its next retry)
            # is left behind: its process is gone.
            concurrent.futures.wait(self._unfinished(), CLOSING_S)
        else:
            # Tasks may submit others while these are waited for. Tasks in threads count too:
            # Prefect's thread runner cancels those that still wait for what they depend on.
            try:
                while unfinished := self._unfinished():
                    concurrent.futures.wait(unfinished)
            except BaseException:
                # Ctrl-C, or a signal that Prefect turned into an exception.
                self._close(failed=True)
                raise
        self._end_what_waits()
        if self._threads_started:
            self._threads.__exit__(None, None, None)
        self._engines.close(wait=not failed)
        with self._lock:
            calls = (*self._calls, *self._ending)
        for call in calls:
            if not call.wait_finished(CLOSING_S):
                call.reports.wait_no_longer()
        if self._called:
            process_launcher().output.flush(CLOSING_S)
        if self._publisher is not None:
            name, flow_run_id = bridge.flow_of(self.flow)
            if self._reports:
                self._publisher.publish_flow(self._reports, flow_name=name, flow_run_id=flow_run_id)
            self._publisher.close(CLOSING_S)
        self._client.close()


def _make_broker(given: Configuration) -> Broker:
    simulated = given.devices.kind == "simulated"
    return Broker(
        open_reader(given.devices, os.environ),
        # Simulated devices of two specifications may have the same names.
        ledger=ProcessLedger() if simulated else PROCESS_LEDGER,
        style=given.placement,
        max_processes=given.max_processes,
        max_tasks_per_device=given.max_tasks_per_device,
        headroom_bytes=given.headroom_bytes,
        held_by_parent=() if simulated else _held_by_parent(),
    )


def _held_by_parent() -> tuple[Reservation, ...]:
    """Give what the GPU task around this process holds, if there is one."""
    allocation = current_allocation()
    if allocation is None:
        return ()
    import socket

    return tuple(
        Reservation(
            request_id="the task around it",
            host=socket.gethostname(),
            device_uuid=uuid,
            reserved_bytes=allocation.budget_bytes,
            exclusive=allocation.exclusive,
            task_name="the task around it",
        )
        for uuid in allocation.device_uuids
    )


def _frameworks_of(task: Task[..., Any], policy: GPUPolicy) -> tuple[str, ...]:
    """Name the frameworks that a task says or was found to use."""
    named = tuple(share.name for share in policy.frameworks)
    return tuple(n for n in named or detect_frameworks(task.fn, whole_modules=False) if n != "none")
