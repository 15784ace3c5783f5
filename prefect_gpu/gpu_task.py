"""One submitted GPU task: what Prefect's engine runs in place of its body.

Which processes follow one another in a call of the body is in `escalation`; what a runner keeps for all of its
tasks, in `running`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol
from uuid import UUID

from prefect import Task
from prefect.futures import PrefectFuture

from prefect_gpu import prefect_bridge as bridge
from prefect_gpu.attempt import Attempt, Surroundings
from prefect_gpu.broker import Broker, next_sequence
from prefect_gpu.budgets import BudgetBook, Grant, TaskIdentity
from prefect_gpu.contexts import context_meter
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
from prefect_gpu.frameworks.registry import detect_frameworks
from prefect_gpu.frameworks.torch_adapter import reduce_large
from prefect_gpu.learn_by import digest_values
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes import values
from prefect_gpu.processes.arguments import Share, argument_files
from prefect_gpu.processes.call import Call
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.spec import Launcher
from prefect_gpu.processes.standby import Announcement
from prefect_gpu.processes.templates import ForkLauncher
from prefect_gpu.processes.transport import Parcel
from prefect_gpu.record import TaskFacts
from prefect_gpu.reports.in_order import ReportsInOrder
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.scheduling.ladder import Climb
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.start_gate import Passage, StartGate
from prefect_gpu.tag_limits import TagLimits, asked_first

#: Errors after which a retry could only fail the same way: the author or the machine must change.
HOPELESS = (PolicyError, PlacementError, DeviceError, ResultError)

#: How arguments are pickled beyond what pickle does itself.
REDUCERS = (reduce_large,)


def is_hopeless(error: object) -> bool:
    """Tell whether a retry could only fail the same way."""
    # What the body raised may pass, even if it could not be sent as it was; so may a lack of memory.
    own_error = isinstance(error, ResultError) and (
        error.what == "exception" or error.type_name == NO_ROOM
    )
    # A device that was busy for as long as `gpu:wait` allows may be free the next time.
    may_pass = own_error or isinstance(error, PlacementTimeoutError)
    return isinstance(error, HOPELESS) and not may_pass


class Around(Protocol):
    """What a GPU task needs of the runner that it was submitted to."""

    #: Which tags have a concurrency limit.
    limits: TagLimits
    #: How many tasks may be between their start and their body at a time.
    gate: StartGate

    def announce(
        self, task: Task[..., Any], policy: GPUPolicy
    ) -> Announcement | ForkLauncher | None:
        """Have a process kept ahead for a task; `None`: there will be none."""

    def new_call(self, make: Callable[[Broker, BudgetBook], Escalation]) -> Escalation:
        """Make a call of a body that ends with the runner."""

    def call_is_over(self, call: Escalation) -> None:
        """Let go of a call."""

    def report(self, report: TaskReport) -> None:
        """Publish the report of a process."""


class GPUTask:
    """One submitted GPU task.

    Args:
        run: The runner that it was submitted to.
        task: As it was submitted.
        policy: What its tags ask for; `None`: they cannot be read.
        problem: What is wrong with it; `None`: nothing. It fails the task run.
    """

    def __init__(
        self,
        run: Around,
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
        self._reports = ReportsInOrder(run.report)
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
        return bridge.with_body(self._task, self._body, is_hopeless)

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
            reports=self._reports,
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
