"""`GPUTaskRunner`: Prefect's contract of a task runner, and nothing else.

Tasks with a `gpu` tag run in a process of their own on a device of their own, with Prefect's engine
in a thread here; all others run in a thread, as under Prefect's default runner. What happens to one
process is in `attempt`, which device it gets in `broker`.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from typing_extensions import Self

from prefect_gpu import prefect_bridge as bridge
from prefect_gpu.attempt import Attempt, CancelledByRunner, Surroundings, host_bytes_of
from prefect_gpu.broker import Broker, next_sequence, shared_broker
from prefect_gpu.budgets import BudgetBook, Grant, TaskIdentity
from prefect_gpu.contexts import context_meter
from prefect_gpu.devices.spec import DeviceSpec, open_reader, parse_spec
from prefect_gpu.engines import EngineThreads
from prefect_gpu.errors import (
    NO_ROOM,
    ChildDiedError,
    DeviceError,
    PlacementError,
    PlacementTimeoutError,
    PolicyError,
    PrefectGPUError,
    ResultError,
)
from prefect_gpu.escalation import Escalation
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.registry import detect_frameworks
from prefect_gpu.frameworks.torch_adapter import reduce_large
from prefect_gpu.heating import BrokerHeater
from prefect_gpu.inside import current_allocation
from prefect_gpu.learn_by import digest_values
from prefect_gpu.ledger import PROCESS_LEDGER, ProcessLedger
from prefect_gpu.policy import GPUPolicy, parse_tags
from prefect_gpu.processes import values
from prefect_gpu.processes.arguments import Share, argument_files
from prefect_gpu.processes.call import Call
from prefect_gpu.processes.forkserver import check_modules
from prefect_gpu.processes.interpreter import count_cores
from prefect_gpu.processes.kind import Kind, kind_of
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.spec import Launcher
from prefect_gpu.processes.standby import Announcement, standby_pool
from prefect_gpu.processes.templates import ForkLauncher, template_pool
from prefect_gpu.processes.transport import Parcel
from prefect_gpu.record import TaskFacts
from prefect_gpu.reports.history import MemoryHistory, PrefectHistory
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.reports.publish import Publisher
from prefect_gpu.scheduling.ladder import Climb
from prefect_gpu.scheduling.model import Placement, Reservation
from prefect_gpu.scheduling.standbys import most_by_default
from prefect_gpu.settings import GPUSettings
from prefect_gpu.start_gate import Passage, StartGate
from prefect_gpu.tag_limits import TagLimits, asked_first

logger = logging.getLogger(__name__)

#: Seconds for which the end of a flow waits for children that were killed, and for the last reports.
CLOSING_S = 30.0

#: Errors after which a retry could only fail the same way: the author or the machine must change.
HOPELESS = (PolicyError, PlacementError, DeviceError, ResultError)

#: How arguments are pickled beyond what pickle does itself.
REDUCERS = (reduce_large,)


def _is_hopeless(error: object) -> bool:
    # What the body raised may pass, even if it could not be sent as it was; so may a lack of memory.
    own_error = isinstance(error, ResultError) and (
        error.what == "exception" or error.type_name == NO_ROOM
    )
    # A device that was busy for as long as `gpu:wait` allows may be free the next time.
    may_pass = own_error or isinstance(error, PlacementTimeoutError)
    return isinstance(error, HOPELESS) and not may_pass


class GPUTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs each GPU task in its own process, on devices chosen by measured free memory.

    Use it as `@flow(task_runner=GPUTaskRunner())`, and tag tasks with `prefect_gpu.gpu(...)`.

    Args:
        devices: `"auto"` (NVIDIA devices if there are any, else the machine's memory), `"nvml"`,
            `"host"`, `"simulated:2x24GiB"`, a list of indices or UUID prefixes, or a
            `prefect_gpu.testing.SimulatedDevices`. Default: the setting
            `PREFECT_INTEGRATIONS_GPU_DEVICES`, which is `"auto"`.
        placement: Among devices that fit: `"spread"` takes the emptiest, `"pack"` the fullest.
        max_processes: Most GPU tasks that run at a time; `None`: four for each core, at least
            eight.
        max_tasks_per_device: Most GPU tasks on one device at a time; `None`: as many as its memory
            holds.
        headroom: Kept free on each device, as in `"512MiB"`, or `"0"`; `None`: by kind of device.
        reports: Whether to publish memory reports as artifacts.
        standby: Processes started ahead of their tasks, with Prefect, the framework and the task's
            modules imported: `"auto"`, or at most so many; 0 starts none. `"hot"`: as `"auto"`, and
            PyTorch or CuPy runs on a device already, whose context each of them holds there.
        start_method: `"spawn"`: each process is a fresh interpreter. `"forkserver"`: it is forked from
            a process that has imported Prefect, NumPy and, for tasks that use it, PyTorch, and has
            done nothing else; for many short tasks. Other frameworks are refused under it, and no
            standbys are started.

    Raises:
        DeviceError: `devices` cannot be read, or the platform has no sessions of processes, or no
            `forkserver` (all but Linux).
        ValueError: Another argument cannot be read.
    """

    def __init__(
        self,
        devices: Any = None,
        placement: str | None = None,
        max_processes: int | None = None,
        headroom: str | None = None,
        reports: bool | None = None,
        standby: int | str | None = None,
        start_method: str | None = None,
        max_tasks_per_device: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if sys.platform == "win32":
            raise DeviceError(
                "prefect_gpu does not run on Windows: it needs process groups and Unix sockets; "
                "use Linux or WSL 2"
            )
        given: dict[str, Any] = {
            "devices": None,
            "placement": placement,
            "max_processes": max_processes,
            "max_tasks_per_device": max_tasks_per_device,
            "headroom": headroom,
            "reports": reports,
            "standby": standby,
            "start_method": start_method,
        }
        settings = GPUSettings(**{k: v for k, v in given.items() if v is not None})
        # Pickled with the flow: plain values only.
        self.devices: DeviceSpec = parse_spec(settings.devices if devices is None else devices)
        self.placement = settings.placement
        self.max_processes = settings.max_processes
        self.max_tasks_per_device = settings.max_tasks_per_device
        self.headroom = settings.headroom
        self.headroom_bytes = settings.headroom_bytes
        self.reports = settings.reports
        self.standby = settings.standby
        self.start_method = settings.start_method
        if self.start_method == "forkserver" and not sys.platform.startswith("linux"):
            raise DeviceError(
                f'start_method="forkserver" is for Linux, and this is {sys.platform}; accepted '
                'here: start_method="spawn"'
            )
        self._run: _Running | None = None

    def duplicate(self) -> Self:
        """Give a new runner of the same configuration."""
        # Not through the constructor: every child does this before its body, and reading the settings
        # again takes 3 ms. What runs is left out (`__getstate__`).
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GPUTaskRunner):
            return NotImplemented
        return self._configuration() == other._configuration()

    def __hash__(self) -> int:
        return hash(self._configuration())

    def _configuration(self) -> tuple[Any, ...]:
        return (
            type(self),
            self.devices,
            self.placement,
            self.max_processes,
            self.max_tasks_per_device,
            self.headroom_bytes,
            self.reports,
            self.standby,
            self.start_method,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_run=None, _started=False)
        return state

    def __enter__(self) -> Self:
        """Start. Opens nothing: devices, threads and processes come with the first GPU task."""
        super().__enter__()
        self._run = _Running(self)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Wait for what runs; if the flow failed or was cancelled, end it at once."""
        # Until all have ended they may still submit others.
        try:
            if self._run is not None:
                self._run.close(failed=exc_type is not None)
        finally:
            self._run = None
            super().__exit__(exc_type, exc_value, traceback)

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[Any]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Hand a task to Prefect's engine, which runs in a thread; returns at once.

        A wrong tag, or what the machine cannot satisfy, fails the task run, not this call.

        Args:
            task: The task.
            parameters: What to call it with; futures are resolved by the engine.
            wait_for: Futures that must be done first.
            dependencies: Further inputs to record.
        """
        if not self._started or self._run is None:
            raise RuntimeError("the task runner must be started before tasks are submitted")
        return self._run.submit(task, parameters, wait_for, dependencies)

    def cancel_all(self) -> None:
        """End all GPU tasks that this runner started."""
        if self._run is not None:
            self._run.cancel()


class _Running:
    """A runner between its enter and its exit: threads, attempts, reports."""

    def __init__(self, runner: GPUTaskRunner) -> None:
        self._runner = runner
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
        self._flow: FlowRunContext | None = None
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
        self._flow = self._flow or bridge.flow_run_of_thread()
        policy: GPUPolicy | None
        problem: PolicyError | None = None
        try:
            policy = parse_tags(task.tags, bridge.context_tags())
        except PolicyError as error:
            policy, problem = None, error
        if policy is not None and self._runner.start_method == "forkserver":
            try:
                check_modules(_frameworks_of(task, policy))
            except PolicyError as error:
                policy, problem = None, error
        if policy is None and problem is None:
            return self._submit_to_thread(task, parameters, wait_for, dependencies)
        self._client.open()
        self._open_publisher()
        gpu_task = _GPUTask(self, task, policy, problem)
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
        standby = self._runner.standby
        forks = self._runner.start_method == "forkserver"
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
            hot=self._runner.standby == "hot" and policy.count == 1,
        )
        if self._runner.standby == "hot" and policy.count == 1 and not kind.hot:
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
        runner = self._runner
        key = (
            runner.devices,
            runner.placement,
            runner.max_processes,
            runner.max_tasks_per_device,
            runner.headroom_bytes,
        )
        return shared_broker(key, lambda: _make_broker(runner))

    def report(self, report: TaskReport) -> None:
        """Publish the report of a process, without holding up the caller."""
        self._let_go()
        if not self._runner.reports:
            return
        with self._lock:
            self._reports.append(report.compact())
            publisher = self._publisher
        if publisher is not None:
            publisher.publish(report)

    def _open_publisher(self) -> None:
        """Make the publisher: in the flow's own context, whose settings it keeps."""
        if self._runner.reports and self._publisher is None:
            self._publisher = Publisher(self._client.lend)

    def tell_once(self, logger: logging.Logger | Any, text: str) -> None:
        """Log a warning, the first time for this flow run."""
        if self._is_new(text):
            logger.warning(text)

    def _log_once(self, text: str) -> None:
        if self._is_new(text):
            logger.info(text)

    def _is_new(self, text: str) -> bool:
        with self._lock:
            new = text not in self._told
            self._told.add(text)
        return new

    def cancel(self) -> None:
        """End all processes of this runner, and let no new one start."""
        with self._lock:
            self._closing = True
            calls = (*self._calls, *self._ending)
        for call in calls:
            call.cancel()

    def _end_what_waits(self) -> None:
        """End the processes that were made ahead, if no other runner of this process wants them."""
        if self._runner.standby != 0:
            standby_pool().close(self)

    def close(self, failed: bool) -> None:
        """See `GPUTaskRunner.__exit__`."""
        try:
            self._close(failed)
        finally:
            # Last: a template tells how its forks ended.
            if self._runner.start_method == "forkserver":
                template_pool().close(self)

    def _close(self, failed: bool) -> None:
        failed = failed or not bridge.flow_run_goes_on(self._flow, self._runner)
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
            call.wait_finished(CLOSING_S)
        if self._called:
            process_launcher().output.flush(CLOSING_S)
        if self._publisher is not None:
            name, flow_run_id = bridge.flow_of(self._flow)
            if self._reports:
                self._publisher.publish_flow(self._reports, flow_name=name, flow_run_id=flow_run_id)
            self._publisher.close(CLOSING_S)
        self._client.close()


def _make_broker(runner: GPUTaskRunner) -> Broker:
    simulated = runner.devices.kind == "simulated"
    return Broker(
        open_reader(runner.devices, os.environ),
        # Simulated devices of two specifications may have the same names.
        ledger=ProcessLedger() if simulated else PROCESS_LEDGER,
        style=runner.placement,
        max_processes=runner.max_processes,
        max_tasks_per_device=runner.max_tasks_per_device,
        headroom_bytes=runner.headroom_bytes,
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


class _GPUTask:
    """One submitted GPU task: what the engine runs in place of its body."""

    def __init__(
        self,
        run: _Running,
        task: Task[..., Any],
        policy: GPUPolicy | None,
        problem: PolicyError | None,
    ) -> None:
        self._run = run
        self._task = task
        self._policy = policy
        self._problem = problem
        # Taken here, on the flow's thread: engine threads run in any order.
        self._sequence = next_sequence()
        self._passage = Passage(None)
        self._processes = 0
        self._climb = Climb()
        #: Starts its processes; once it was announced, from among those that wait.
        self._launcher: Launcher = process_launcher()
        #: Kind of the hot standbys that suit it; `None`: none does.
        self._hot: Kind | None = None
        #: The engine's own object, once the body was called.
        self.task_run: Any = None

    def run(
        self,
        client: bridge.SharedClient,
        task_run_id: UUID,
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[Any]] | None,
    ) -> Any:
        """Run Prefect's engine to the task's final state, on a thread of its own."""
        announced = None
        if self._policy is not None:
            announced = self._run.announce(self._task, self._policy)
        if announced is not None:
            self._launcher = announced
            if isinstance(announced, Announcement) and announced.kind.hot:
                self._hot = announced.kind
        waits = wait_for or any(isinstance(value, PrefectFuture) for value in parameters.values())
        # One that waits for others must not hold a place that they need.
        self._passage = Passage(None) if waits else self._run.gate.enter()
        try:
            with asked_first(self._run.limits):
                return bridge.run_engine(
                    client,
                    self._shadow(),
                    task_run_id,
                    parameters,
                    wait_for,
                    dependencies,
                    lambda: self.task_run,
                )
        finally:
            self._passage.leave()
            if announced is not None:
                announced.retract()

    def _shadow(self) -> Task[..., Any]:
        """Give the task as the engine runs it."""
        return bridge.with_body(self._task, self._body, _is_hopeless)

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        self._passage.leave()
        if self._problem is not None:
            raise self._problem
        self.task_run = task_run = bridge.current_task_run()
        try:
            with argument_files().share((args, kwargs)) as share:
                call = self._run.new_call(
                    lambda broker, book: self._call(broker, book, task_run, args, kwargs, share)
                )
                try:
                    return call.run()
                finally:
                    # A retry of Prefect's goes on from here.
                    self._climb = call.climb
                    self._run.call_is_over(call)
        except ChildDiedError as death:
            # An exception is retried by the engine if retries are left; what is not an `Exception`
            # ends the run as crashed.
            if bridge.may_still_retry(task_run, death):
                raise
            raise bridge.ChildCrash(death) from None

    def _call(
        self,
        broker: Broker,
        book: BudgetBook,
        task_run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        share: Share,
    ) -> Escalation:
        task, policy = self._task, self._policy
        assert policy is not None
        logger = bridge.run_logger()
        facts = TaskFacts(
            task_name=task.name,
            task_key=task.task_key,
            task_run_id=task_run.id,
            task_run_name=task_run.name,
            flow_run_id=task_run.flow_run_id,
        )
        detected = () if policy.frameworks else detect_frameworks(task.fn)
        sharing = detect_frameworks(task.fn, whole_modules=False) if detected else ()

        def make(
            grant: Grant,
            on_placed: Callable[[Placement], None],
            on_report: Callable[[TaskReport | None], None],
        ) -> Attempt:
            self._processes += 1
            return Attempt(
                facts=facts,
                policy=policy,
                grant=grant,
                number=self._processes,
                sequence=self._sequence,
                timeout_s=task.timeout_seconds,
                detected=detected,
                sharing=sharing,
                broker=broker,
                launcher=self._launcher,
                meter=context_meter(),
                surroundings=Surroundings(
                    dump_call=lambda: self._dump_call(args, kwargs, share),
                    environment=bridge.environment_for_child,
                    on_waiting=bridge.show_awaiting,
                    on_running=bridge.show_running,
                    on_log=bridge.forward_log,
                    on_event=bridge.forward_event,
                    on_placed=on_placed,
                    tell=logger.warning,
                    on_report=on_report,
                ),
                hot=self._hot,
            )

        return Escalation(
            identity=TaskIdentity(
                task.name,
                getattr(task.fn, "__qualname__", type(task.fn).__qualname__),
                digest_values(task.fn, policy.learn_by, self._arguments(args, kwargs))
                if policy.learn_by
                else "",
            ),
            policy=policy,
            climb=self._climb,
            broker=broker,
            book=book,
            make=make,
            on_waiting=bridge.show_awaiting,
            tell=logger.warning,
            on_report=self._run.report,
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(self._task.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _dump_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share) -> Parcel:
        context, log_prints = bridge.context_for_child(self._task)
        call = Call(self._task.fn, args, kwargs, context, log_prints)
        transport = share.transport()
        try:
            return values.dumps(call, "call", "call", REDUCERS, transport)
        except ResultError as error:
            if error.type_name == NO_ROOM:
                raise
            named = self._explain(args, kwargs, error)
            if named is not error:
                raise named from error
        # It is in what surrounds the call. A flow may have been given what only it can use.
        context = bridge.without_flow_parameters(context)
        return values.dumps(replace(call, context=context), "call", "call", REDUCERS, transport)

    def _explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: ResultError
    ) -> PrefectGPUError:
        """Name the argument, or say that it is the function, rather than our own wrapping."""
        bound = inspect.signature(self._task.fn).bind(*args, **kwargs).arguments
        for name, value in bound.items():
            try:
                values.check(value, "argument", name, REDUCERS)
            except ResultError as named:
                return named
        for where, value in _held_by(self._task.fn, self._task.name):
            try:
                values.check(value, "function", where, REDUCERS)
            except ResultError as named:
                return named
        return error


def _frameworks_of(task: Task[..., Any], policy: GPUPolicy) -> tuple[str, ...]:
    """Name the frameworks that a task says or was found to use."""
    named = tuple(share.name for share in policy.frameworks)
    return tuple(n for n in named or detect_frameworks(task.fn, whole_modules=False) if n != "none")


def _held_by(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Give what travels with a function by value, each under its name, and itself last."""
    inner = function
    while isinstance(inner, functools.partial):
        yield f"{name}.args", inner.args
        yield f"{name}.keywords", inner.keywords
        inner = inner.func
    if inspect.ismethod(inner):
        yield f"{name}.__self__", inner.__self__
        inner = inner.__func__
    if inspect.isfunction(inner):
        variables = inspect.getclosurevars(inner)
        for held in (variables.nonlocals, variables.globals):
            for variable, value in held.items():
                yield f"{variable} (used in {name})", value
    yield name, function
