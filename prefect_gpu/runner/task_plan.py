"""One submitted task (policy, frameworks, identity) and each call of its body, as frozen values.

A `TaskPlan` is made once at submit, a `TaskCall` for each call of the body by Prefect's engine. Neither has a device
or a budget: budgets are in `budgets`, the processes of a call in `submission`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import Task

from prefect_gpu import values
from prefect_gpu.devices.host import count_cores
from prefect_gpu.engine.child_context import (
    logs_need_prefect,
    prefect_log_level,
    without_parameters,
)
from prefect_gpu.engine.task_run import EngineRun
from prefect_gpu.errors import NO_ROOM, PrefectGPUError, ResultError
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.registry import (
    NO_FRAMEWORK,
    detect_frameworks,
    host_bytes_of,
    uses_prefect,
)
from prefect_gpu.frameworks.torch_adapter import reduce_large
from prefect_gpu.policy import GPUPolicy, why_alone
from prefect_gpu.processes.messages import Call
from prefect_gpu.reports.markup import clean_name
from prefect_gpu.runner.learn_by import describe_values, digest_values
from prefect_gpu.runner.submit_order import Place
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.scheduling.probes import AT_ONCE_FRACTION
from prefect_gpu.values import Share
from prefect_gpu.values.transport import PackedValue

#: Frameworks that allocate their whole cap at their start: TensorFlow supports a cap or growth, not both.
TAKES_AT_ONCE = frozenset({"tensorflow"})


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One submitted task, without its arguments."""

    task_name: str
    task_key: str
    #: The task's own function.
    function: Callable[..., Any]
    #: The policy from the tags.
    policy: GPUPolicy
    #: Frameworks named in the tags, "none" included; empty: none named.
    named: tuple[str, ...]
    #: Frameworks that its process loads: those of the tags, or else those found in its code and the modules of that
    #: code.
    frameworks: tuple[str, ...]
    #: If the tags name none: frameworks in the task's own code, which share the budget.
    sharing: tuple[str, ...]
    #: Seconds that the body may run; `None`: no limit.
    timeout_s: float | None
    #: Place in the order of arrival, which a retry keeps.
    sequence: int
    #: Whether its process imports Prefect before the body, which is known to use it; otherwise on first use.
    with_prefect: bool = True
    #: Folder for PyTorch's memory snapshots; `None`: no snapshots are recorded.
    snapshots: Path | None = None
    #: As `Request.probe_fraction`, if its need is not known.
    probe_fraction: float = 0.0
    #: Why `probe_fraction` is 0, for the log; `None`: it is above 0.
    alone_because: str | None = None

    @property
    def host_bytes(self) -> int:
        """Approximate bytes of the machine's memory that its process takes before the body."""
        return host_bytes_of(self.frameworks)

    def framework_policy(self, kind: DeviceKind, processes: int) -> FrameworkPolicy:
        """Return the frameworks' policy without facts of a placement; `processes` share the machine's cores now."""
        policy = self.policy
        return FrameworkPolicy(
            device_kind=kind,
            device_uuids=(),
            total_bytes=(),
            budget_bytes=(),
            allocator_options=dict(policy.allocator_options),
            caching=policy.caching,
            cpus=policy.cpus or max(1, count_cores() // max(1, processes)),
            cpus_stated=policy.cpus is not None,
            frameworks=self.named,
            detected=self.sharing,
            shares={s.name: s.fraction for s in policy.frameworks if s.fraction is not None},
        )

    def identity(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flow_name: str | None
    ) -> HistoryKey:
        """Return the history that a call uses, for any device.

        Args:
            args: Of the call.
            kwargs: Of the call.
            flow_name: Flow in which the task was submitted; `None`: no flow.

        Raises:
            PolicyError: `gpu:learn_by` names an unknown parameter.
        """
        digest = words = ""
        if self.policy.learn_by:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
            bound.apply_defaults()
            digest = digest_values(self.function, self.policy.learn_by, bound.arguments)
            words = describe_values(self.function, self.policy.learn_by, bound.arguments)
        qualified_name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return HistoryKey(
            self.task_name,
            qualified_name,
            learn_by=digest,
            learn_by_words=words,
            flow_name=flow_name,
        )


class PlanMaker:
    """Makes the plans of a runner's tasks. Safe to use from several threads.

    Each function's code is read once: a flow may map one task over thousands of inputs. A relative `snapshots` folder
    is resolved against the present working folder.
    """

    def __init__(self, snapshots: Path | None = None) -> None:
        self._snapshots = None if snapshots is None else snapshots.expanduser().absolute()
        #: By the `id` of a function, which is kept alive so that the `id` stays unique.
        self._found: dict[int, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {}
        #: Whether functions use Prefect, by `id` as above.
        self._use_prefect: dict[int, tuple[Any, bool]] = {}

    def make(self, task: Task[..., Any], policy: GPUPolicy, sequence: int) -> TaskPlan:
        """Return the plan of a task as submitted, with the policy of its tags and its place in the order of arrival."""
        named = tuple(share.name for share in policy.frameworks)
        found, sharing = ((), ()) if named else self._detect(task.fn)
        frameworks = tuple(name for name in named or found if name != NO_FRAMEWORK)
        alone_because = why_alone(policy)
        fraction = AT_ONCE_FRACTION if TAKES_AT_ONCE.intersection(frameworks) else 1.0
        return TaskPlan(
            task_name=clean_name(task.name),
            task_key=task.task_key,
            function=task.fn,
            policy=policy,
            named=named,
            frameworks=frameworks,
            sharing=sharing,
            timeout_s=task.timeout_seconds,
            sequence=sequence,
            with_prefect=logs_need_prefect(task) or self._uses_prefect(task.fn),
            snapshots=self._snapshots,
            probe_fraction=0.0 if alone_because else fraction,
            alone_because=alone_because,
        )

    def _uses_prefect(self, function: Any) -> bool:
        known = self._use_prefect.get(id(function))
        if known is None:
            known = self._use_prefect[id(function)] = function, uses_prefect(function)
        return known[1]

    def _detect(self, function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        known = self._found.get(id(function))
        if known is None:
            found = detect_frameworks(function)
            sharing = detect_frameworks(function, whole_modules=False) if found else ()
            known = self._found[id(function)] = function, found, sharing
        return known[1], known[2]


@dataclass(frozen=True, slots=True)
class TaskCall:
    """One call of a task's body by Prefect's engine."""

    plan: TaskPlan
    #: The task run of the call.
    run: EngineRun
    #: The history that the call uses.
    identity: HistoryKey
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Keeps the memory files of the arguments.
    share: Share
    #: Its place among task runs that have not requested a device yet.
    place: Place
    #: Kind of matching standbys on the nodes of a cluster; empty: none match.
    standby: str = ""

    def without_arguments(self) -> TaskCall:
        """Return the call without its arguments, to keep once the call has ended."""
        return replace(self, args=(), kwargs={})

    def pack(self) -> PackedValue:
        """Pickle the call for a child process. On the engine's thread.

        Raises:
            ResultError: A part of the call cannot be pickled; the error names the argument.
        """
        bound = inspect.signature(self.plan.function).bind(*self.args, **self.kwargs).arguments
        for name, value in bound.items():
            values.refuse_shared(value, "argument", name)
        context, log_prints = self.run.context_for_child()
        context, parameters, flow_parameters = without_parameters(context)
        call = Call(
            self.plan.function,
            self.args,
            self.kwargs,
            values.Apart.of(context, "call", "context"),
            flow_parameters,
            log_prints,
            prefect_log_level(),
            at_once=self.plan.with_prefect or log_prints,
            parameters=parameters,
        )
        try:
            packed = values.dumps(call, "call", "call", _reducers(), self.share.pack)
        except ResultError as error:
            if error.type_name == NO_ROOM:
                raise
            named = self._explain(error)
            if named is not error:
                raise named from error
            # The flow's parameters may be meant for the flow alone.
            call = replace(call, flow_parameters={})
            packed = values.dumps(call, "call", "call", _reducers(), self.share.pack)
        self.run.advise_no_cache(packed.size_bytes)
        return packed

    def _explain(self, error: ResultError) -> PrefectGPUError:
        """Return an error that names the argument or the function, or else `error` itself."""
        function, name = self.plan.function, self.plan.task_name
        bound = inspect.signature(function).bind(*self.args, **self.kwargs).arguments
        parts = [("argument", where, value) for where, value in bound.items()]
        parts += [("function", where, value) for where, value in _held_by(function, name)]
        for what, where, value in parts:
            try:
                values.check(value, what, where, _reducers())
            except ResultError as named:
                return named
        return error


def _reducers() -> tuple[Callable[[Any], Any], ...]:
    """Return how arguments are pickled beyond what pickle does itself."""
    # Nothing is a tensor where PyTorch was not imported.
    return (reduce_large,) if "torch" in sys.modules else ()


def _held_by(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that are pickled with a function, each with its name, and the function last."""
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
