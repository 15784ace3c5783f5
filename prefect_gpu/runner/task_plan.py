"""One submitted task (policy, frameworks, identity) and each call of its body, as frozen values.

A `TaskPlan` is made once at submit, a `TaskCall` for each call of the body by Prefect's engine. Neither has a device or
a budget: budgets are in `budgets`, the processes of a call in `submission`.

The identity of a call is its history, with a digest of the arguments named in `gpu:learn_by`. Equal values have equal
digests on every host: a digest must not depend on the process, the host, or the module of a class (`__main__` in a
script). Reports have the values only as text, if short and not secret.

A number counts by its value (`32` as `32.0`; `True` is no number), a text or path by its text, an enum by its class and
member, a tuple or list of these by its items in order; `True`, `False` and `None` count as such. Other values are a
`PolicyError`: the part that memory depends on is not known.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import hashlib
import inspect
import json
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from prefect import Task

from prefect_gpu import values
from prefect_gpu.devices.host import count_cores
from prefect_gpu.engine.task_run import EngineRun, logs_need_prefect, prefect_log_level
from prefect_gpu.errors import NO_ROOM, PolicyError, PrefectGPUError, ResultError
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
from prefect_gpu.reports.markup import clean_name, is_secret
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import DeviceKind
from prefect_gpu.scheduling.probes import AT_ONCE_FRACTION
from prefect_gpu.values import Share
from prefect_gpu.values.transport import PackedValue

#: Frameworks that allocate their whole cap at their start: TensorFlow supports a cap or growth, not both.
TAKES_AT_ONCE = frozenset({"tensorflow"})

#: Characters of a digest: 48 bits distinguish the values of one task.
DIGEST_CHARS = 12

#: Most levels of nested tuples or lists. The limit also ends the walk through a list that contains itself.
DEPTH_LIMIT = 4

#: Most characters of the text about all values of a call.
WORDS_LIMIT = 120

#: Most characters of `HistoryKey.learn_by_lines`, those of a value in an artifact's metadata.
LINES_LIMIT = 500

#: Values accepted by `read_learn_by`, for messages.
ACCEPTED = (
    f"numbers, text, True, False, None, enums, paths, and tuples or lists of these, at most {DEPTH_LIMIT} deep; give "
    f"what memory depends on a parameter of its own, as in shape=tuple(x.shape)"
)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One submitted task, without its arguments."""

    task_name: str
    task_key: str
    function: Callable[..., Any]
    policy: GPUPolicy
    #: Frameworks named in the tags, "none" included; empty: none named.
    named: tuple[str, ...]
    #: Frameworks that the process loads: those named, or else found in the task's code and its modules.
    frameworks: tuple[str, ...]
    #: If the tags name none: frameworks in the task's own code, which share the budget.
    sharing: tuple[str, ...]
    #: Seconds that the body may run; `None`: no limit.
    timeout_s: float | None
    #: Place in the order of arrival, which a retry keeps.
    sequence: int
    #: Whether the process imports Prefect before the body, which is known to use it; otherwise on first use.
    with_prefect: bool = True
    #: Folder for PyTorch's memory snapshots; `None`: no snapshots are recorded.
    snapshots: Path | None = None
    #: As `Request.probe_fraction`, if its need is not known.
    probe_fraction: float = 0.0
    #: Why `probe_fraction` is 0, for the log; `None`: it is above 0.
    alone_because: str | None = None

    @property
    def host_bytes(self) -> int:
        """Approximate bytes of host memory that the task's process takes before the body."""
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
        """Return the history of a call, for any device. `flow_name`: the flow around it; `None`: no flow.

        Raises:
            PolicyError: `gpu:learn_by` names an unknown parameter, or one whose value is not accepted.
        """
        found = LearnBy("", "", "")
        if names := self.policy.learn_by:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
            bound.apply_defaults()
            found = read_learn_by(self.function, names, bound.arguments)
        return HistoryKey(
            self.task_name,
            _name_of(self.function),
            learn_by=found.digest,
            learn_by_words=found.words,
            learn_by_lines=found.lines,
            flow_name=flow_name,
        )


class PlanMaker:
    """Makes the plans of a runner's tasks. Safe to use from several threads.

    Each function's code is read once: a flow may map one task over thousands of inputs. A relative `snapshots` folder
    is resolved against the present working folder.
    """

    def __init__(self, snapshots: Path | None = None) -> None:
        self._snapshots = None if snapshots is None else snapshots.expanduser().absolute()
        #: Results by search and `id` of a function, which is kept alive so that the `id` stays unique.
        self._known: dict[tuple[Callable[..., Any], int], tuple[Any, Any]] = {}

    def make(self, task: Task[..., Any], policy: GPUPolicy, sequence: int) -> TaskPlan:
        """Return a submitted task's plan, with the policy of its tags and its place in the order of arrival."""
        named = tuple(share.name for share in policy.frameworks)
        found, sharing = ((), ()) if named else self._find(_detect, task.fn)
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
            with_prefect=logs_need_prefect(task) or self._find(uses_prefect, task.fn),
            snapshots=self._snapshots,
            probe_fraction=0.0 if alone_because else fraction,
            alone_because=alone_because,
        )

    def _find(self, search: Callable[[Any], Any], function: Any) -> Any:
        """Return the result of a search in a function's code, searched once."""
        key = search, id(function)
        if key not in self._known:
            self._known[key] = function, search(function)
        return self._known[key][1]


def _detect(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the frameworks in a function's code and modules, and the frameworks in its code alone."""
    found = detect_frameworks(function)
    return found, detect_frameworks(function, whole_modules=False) if found else ()


@dataclass(frozen=True, slots=True)
class TaskCall:
    """One call of a task's body by Prefect's engine."""

    plan: TaskPlan
    run: EngineRun
    identity: HistoryKey
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Keeps the memory files of the arguments.
    share: Share
    #: Kind of matching standbys on the nodes of a cluster; empty: none match.
    standby: str = ""

    def without_arguments(self) -> TaskCall:
        """Return the call without its arguments, to keep once the call has ended."""
        return replace(self, args=(), kwargs={})

    def pack(self) -> PackedValue:
        """Pickle the call, on the engine's thread; raise `ResultError` about an argument that cannot be pickled."""
        bound = inspect.signature(self.plan.function).bind(*self.args, **self.kwargs).arguments
        for name, value in bound.items():
            values.refuse_shared(value, "argument", name)
        around = self.run.context_for_child()
        call = Call(
            self.plan.function,
            self.args,
            self.kwargs,
            values.Apart.of(around.context, "call", "context"),
            around.flow_parameters,
            around.log_prints,
            prefect_log_level(),
            at_once=self.plan.with_prefect or around.log_prints,
            parameters=around.parameters,
        )
        try:
            packed = values.dumps(call, "call", "call", _reducers(), self.share.pack)
        except ResultError as error:
            if error.type_name == NO_ROOM:
                raise
            named = self._explain(error, bound)
            if named is not error:
                raise named from error
            # The flow's parameters may be meant for the flow alone, and need not be picklable.
            call = replace(call, flow_parameters={})
            packed = values.dumps(call, "call", "call", _reducers(), self.share.pack)
        self.run.advise_no_cache(packed.size_bytes)
        return packed

    def _explain(self, error: ResultError, bound: Mapping[str, Any]) -> PrefectGPUError:
        """Return an error that names the argument or the function, or else `error` itself."""
        parts = [("argument", where, value) for where, value in bound.items()]
        held = _held_by(self.plan.function, self.plan.task_name)
        parts += [("function", where, value) for where, value in held]
        for what, where, value in parts:
            try:
                values.check(value, what, where, _reducers())
            except ResultError as named:
                return named
        return error


def _reducers() -> tuple[Callable[[Any], Any], ...]:
    """Return the reducers for pickling arguments. Without an imported PyTorch no argument is a tensor."""
    return (reduce_large,) if "torch" in sys.modules else ()


def _held_by(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each object that is pickled with a function, the function last."""
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
        for variable, value in (*variables.nonlocals.items(), *variables.globals.items()):
            yield f"{variable} (used in {name})", value
    yield name, function


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


class LearnBy(NamedTuple):
    """The arguments of a call that `gpu:learn_by` names."""

    #: `DIGEST_CHARS` hexadecimal characters.
    digest: str
    #: As text, `batch_size=32, model=vit-b16`; a secret (by name or text) is `(secret)`.
    words: str
    #: `HistoryKey.learn_by_lines`: a line for each number that is no secret; empty: no such number.
    lines: str


def read_learn_by(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> LearnBy:
    """Return some arguments of a call to a task's function, for its history.

    `names` are parameters in `gpu:learn_by`, or keys of a `**kwargs`, in any order. `arguments` are bound to the
    parameters by name, with defaults.

    Raises:
        PolicyError: The function has no such parameter, or the type of an argument is not accepted.
    """
    given = _select(function, names, arguments)
    # The list of an absent key of a `**kwargs` is empty.
    plain = {
        name: [_plain(name, name, given[name])] if name in given else []
        for name in sorted(set(names))
    }
    words = ", ".join(f"{name}={_words(name, given[name])}" for name in sorted(given))
    lines = [
        [name, _digest({**plain, name: ["any number"]}), number]
        for name in sorted(given)
        if (number := _number(given[name])) is not None and not _is_secret(name, given[name])
    ]
    # What is longer is cut in the API.
    while len(text := json.dumps(lines)) > LINES_LIMIT:
        lines.pop()
    return LearnBy(_digest(plain), words[:WORDS_LIMIT], text if lines else "")


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, enum.Enum)):
        # A number of thousands of digits is none.
        with contextlib.suppress(OverflowError):
            return float(value) if math.isfinite(value) else None
    return None


def _digest(plain: Mapping[str, list[Any]]) -> str:
    text = json.dumps([[name, *value] for name, value in plain.items()])
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:DIGEST_CHARS]


def _select(
    function: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name for some parameters, without absent keys of a `**kwargs`."""
    parameters = inspect.signature(function).parameters
    variadic = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    rest = {} if variadic is None else arguments.get(variadic, {})
    for name in names:
        if name not in parameters and variadic is None:
            raise _unknown(function, name, parameters)
    known = {name: arguments[name] for name in names if name in parameters}
    return known | {name: rest[name] for name in names if name not in parameters and name in rest}


def _is_secret(name: str, value: Any) -> bool:
    # A number of tokens is a size.
    return is_secret(name if _number(value) is None else name.lower().replace("tokens", ""))


def _words(name: str, value: Any) -> str:
    if _is_secret(name, value):
        return "(secret)"
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_words(name, item) for item in value)}]"
    # Python refuses to write more than 4300 digits.
    with contextlib.suppress(ValueError):
        text = str(value)
        return "(secret)" if is_secret("", text) else text
    return type(value).__qualname__


def _unknown(
    function: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter]
) -> PolicyError:
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    known = [p.name for p in parameters.values() if p.kind not in variadic]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean gpu:learn_by={close[0]}?" if close else ""
    return PolicyError(
        f"gpu:learn_by={name}",
        f"{_name_of(function)}() has no parameter {name!r}{hint}",
        ", ".join(known) or "none, since it has no parameters",
    )


def _plain(name: str, where: str, value: Any, depth: int = 0) -> Any:
    """Return a value as JSON data, most as `[kind, value]`. `where` is the value's path in errors: `sizes[0]`."""
    cls = type(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        # Python 3.10 has no name for combined flags.
        flags = isinstance(value, enum.Flag)
        said = _plain(name, where, value.value, depth) if flags else value.name
        return ["enum", cls.__qualname__, said]
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        if not (number := float(value)).is_integer():
            return ["number", repr(number)]
        value = int(number)
    if isinstance(value, numbers.Integral):
        # Not decimal: Python refuses to write more than 4300 digits.
        return ["number", f"{int(value):x}"]
    text = value.__fspath__() if hasattr(cls, "__fspath__") else value
    if isinstance(text, str):
        return ["text", str(text)]
    if isinstance(value, (list, tuple)) and depth < DEPTH_LIMIT:
        items = enumerate(value)
        return ["list", [_plain(name, f"{where}[{at}]", item, depth + 1) for at, item in items]]
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    problem = f"{where} is of type {module}{cls.__qualname__}"
    raise PolicyError(f"gpu:learn_by={name}", problem, ACCEPTED)
