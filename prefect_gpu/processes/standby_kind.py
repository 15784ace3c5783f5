"""What a standby is made for, how far it is, and which standby suits a task.

A standby is a process that imports ahead of its task. Tasks of one kind can use each other's standbys. Only what
can be imported already is imported ahead, and nothing of the user's that a process of the task would not
import anyway. This module holds the values and the decisions on them. Processes, locks and threads belong to
`standby_pool`. How many standbys there are is decided in `scheduling.standbys`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prefect_gpu import values
from prefect_gpu.devices.shared_folder import Hold
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import (
    CPU_VARIABLES,
    FrameworkPolicy,
    child_environment,
    late_changes,
)
from prefect_gpu.processes.interpreter import environment_with
from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.launcher import Handle
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.scheduling.standbys import KindDemand

logger = logging.getLogger(__name__)

#: What a task's process imports before a body that uses Prefect: Prefect, and what puts the process into its run.
OWN_MODULES = ("prefect_gpu.child.prefect_context", "prefect_gpu.task_runner")

#: Failures in a row after which something is not tried again.
MOST_FAILURES = 3

#: Seconds after the last failure after which something is tried again: what made processes fail for a while
#: must not cost a flow of days its standbys.
FORGET_S = 600.0

#: Variables to set in a process that waits, or to remove (`None`).
Changes = dict[str, str | None]


# What a standby is made for.


@dataclass(frozen=True)
class Kind:
    """What a standby imports, and the environment that it does so in."""

    #: Modules of this package, of Prefect and of the frameworks. None of them is the user's.
    always: tuple[str, ...]
    #: What the task's own code imports, its module first.
    users: tuple[str, ...]
    #: Variables in which the process differs from its parent; `None` removes one.
    environment: tuple[tuple[str, str | None], ...]
    #: A tag states the number of threads, so a standby with another number does not suit.
    cpus_stated: bool
    #: Threads that libraries may start which read the number as they load.
    cpus: int = field(compare=False)
    #: Host memory that one standby takes, before any was measured (bytes).
    size_bytes: int = field(compare=False)

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules to import, in this order: a framework before what needs it."""
        return (*self.always, *self.users)

    @functools.cached_property
    def key(self) -> str:
        """A short name of the kind, the same in every process: equal kinds have equal names."""
        values = self.always, self.users, self.environment, self.cpus_stated
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def without_users(self) -> Kind:
        """Return the kind that imports nothing of the user's."""
        return replace(self, users=())

    def environment_of(self, parent: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of a standby whose parent has `parent`."""
        environment = dict(parent)
        for name in self.always:
            adapter = registry.ADAPTERS.get(_framework_of(name))
            if adapter is not None:
                ahead = {**adapter.default_environment, **adapter.standby_environment()}
                environment = {**ahead, **environment}
        cpus = dict.fromkeys(CPU_VARIABLES, str(self.cpus))
        return environment_with({**cpus, **dict(self.environment)}, environment)


def kind_of(
    fn: Any,
    policy: FrameworkPolicy,
    *,
    size_bytes: int,
    environ: Mapping[str, str] | None = None,
    with_prefect: bool = True,
) -> Kind:
    """Return what can be done ahead for a task.

    Args:
        fn: The task's function.
        policy: What is known of the task's policy before it is placed: frameworks, allocator options,
            caching and threads, but no devices and no budget.
        size_bytes: Host memory that such a process takes, roughly.
        environ: The parent's environment; `None`: this process's.
        with_prefect: The task is known to use Prefect. Its modules may import it in any case.
    """
    environ = os.environ if environ is None else environ
    names = [n for n in policy.frameworks or policy.detected if n in registry.ADAPTERS]
    if policy.device_kind == "host" and not policy.frameworks and len(names) > 1:
        # A branch of the task uses one of them, and a process counts by its resident set.
        names = []
    always = [registry.ADAPTERS[name].module for name in names]
    users = _users_modules(fn, always, names)
    # Before them: what libraries make is frozen, and what comes with the user's modules is not.
    if with_prefect or any(map(registry.brings_prefect, users)):
        always = [*OWN_MODULES, *always]
    return Kind(
        always=tuple(name for name in always if _can_import(name)),
        users=tuple(users),
        environment=standby_changes(policy, environ),
        cpus_stated=policy.cpus_stated,
        cpus=policy.cpus,
        size_bytes=size_bytes,
    )


def standby_changes(
    policy: FrameworkPolicy, environ: Mapping[str, str]
) -> tuple[tuple[str, str | None], ...]:
    """Return the variables in which a standby differs from its parent, as `Kind.environment` has them.

    Args:
        policy: See `kind_of`.
        environ: The parent's environment.
    """
    changes = child_environment(policy, registry.adapters_for(policy), environ)
    if policy.device_kind == "nvml":
        # The device is not known yet, and with no device to see, modules would decide for the CPU.
        del changes["CUDA_VISIBLE_DEVICES"]
    return tuple(sorted((n, v) for n, v in changes.items() if n not in CPU_VARIABLES))


@functools.cache
def _framework_of(module: str) -> str:
    return next((n for n, a in registry.ADAPTERS.items() if a.module == module), "")


def _users_modules(fn: Any, always: Iterable[str], frameworks: Iterable[str]) -> list[str]:
    taken = {*always, *OWN_MODULES}
    found = []
    for entry in registry.needed_modules(fn):
        module = entry.partition(":")[0]
        root = module.partition(".")[0]
        if module in taken or root == "__main__":
            continue
        # A branch of the task may import another framework and never run.
        if registry.framework_of(root) not in ("", *frameworks):
            continue
        if root in sys.builtin_module_names:
            continue
        if _can_import(module):
            found.append(entry)
    return found


def _can_import(module: str) -> bool:
    """Return whether a child could import a module. Imports nothing."""
    if module in sys.modules:
        return values.is_importable(module)
    root = module.partition(".")[0]
    if root in sys.modules:
        return values.is_importable(root)
    try:
        return importlib.util.find_spec(root) is not None
    except Exception:  # raised by a third-party finder, or for a module without a spec
        return False


# What standbys leave to tasks.


class HostMemory(Protocol):
    """What the pool of standbys asks of a broker; see `broker.Broker`. Safe to use from several threads."""

    @property
    def host_promised_bytes(self) -> int:
        """Host memory promised to processes of tasks that they have not taken yet."""

    @property
    def wants_host_memory(self) -> bool:
        """Whether a task waits for host memory."""


# How far a standby is.


class Stage(enum.IntEnum):
    """How far a standby is. Of several of a kind, the one that is least far ends first."""

    IMPORTING = 0
    #: It has imported and waits for its task.
    WAITING = 1
    #: It was asked to end, or ends by itself.
    ENDING = 2


_serials = itertools.count()


@dataclass(eq=False)
class Standby:
    """One process that was started ahead of its task."""

    kind: Kind
    #: As it was started: users' modules may have been left out, the environment completed.
    spec: WarmSpec
    #: Monotonic seconds when it was started.
    started_s: float
    #: The order in which standbys are started.
    serial: int = field(default_factory=lambda: next(_serials))
    #: Set by the pool once it was started.
    handle: Handle | None = None
    #: `None`: the process has not been reported yet.
    pid: int | None = None
    stage: Stage = Stage.IMPORTING
    #: A task has it. Its stage goes on until it accepts the task.
    given: bool = False
    #: What it counts for among the standbys of the machine, and among those that import.
    place: Hold | None = None
    import_place: Hold | None = None

    @property
    def ready(self) -> bool:
        """Whether it has imported and can take a task at once."""
        return self.stage is Stage.WAITING

    def enter(self, stage: Stage) -> None:
        """Go on to a stage, unless it ends."""
        if self.stage is not Stage.ENDING:
            self.stage = stage
        if self.import_place is not None:
            self.import_place.release()

    def leave(self) -> None:
        """Count as a standby no longer: it has a task, or is gone."""
        for place in (self.place, self.import_place):
            if place is not None:
                place.release()

    def changes_for(self, kind: Kind, environment: Mapping[str, str]) -> Changes | None:
        """Return what must change in it for a task; `None`: it does not suit it.

        Args:
            kind: The task's.
            environment: The whole environment of the task.
        """
        return late_changes(
            self.spec.environment,
            environment,
            registry.ADAPTERS.values(),
            cpus_stated=kind.cpus_stated or self.kind.cpus_stated,
        )


# Which standby suits a task.


def choose_standby(
    standbys: Iterable[Standby], kind: Kind, environment: Mapping[str, str]
) -> tuple[tuple[Standby, Changes] | None, list[Standby]]:
    """Choose the standby that is furthest along for a task.

    Args:
        standbys: All that no task has.
        kind: The task's.
        environment: The whole environment of the task.

    Returns:
        The standby and what must change in it (`None`: none suits), and the standbys that were made for such a task
        and do not suit it: the parent's environment has changed since they were started.
    """
    best: tuple[Standby, Changes] | None = None
    best_rank: tuple[Any, ...] = ()
    misfits = []
    for standby in standbys:
        # Not one that has imported what this task would not.
        similar = standby.kind.always == kind.always and set(standby.spec.modules) <= set(
            kind.modules
        )
        if standby.stage is Stage.ENDING or not similar:
            continue
        changes = standby.changes_for(kind, environment)
        if changes is None:
            if standby.kind == kind:
                misfits.append(standby)
            continue
        # One that still imports is further along than a process that has not been started.
        rank = standby.ready, len(standby.spec.modules), -standby.serial
        if best is None or rank > best_rank:
            best, best_rank = (standby, changes), rank
    return best, misfits


# What is known of each kind.


@dataclass(eq=False)
class KindRecord:
    """What is known of a kind."""

    kind: Kind
    #: Host memory that one takes (bytes): as the kind says until one was measured.
    size_bytes: int
    #: Standbys in a row that ended without a task, or did not suit it.
    failures: int = 0
    #: Monotonic seconds of the last of them.
    failed_s: float = float("-inf")
    #: Why none is started any more; empty: they are.
    given_up: str = ""
    #: Modules of the user's do something at their import that must not be done before the task.
    without_users: bool = False
    #: The larger, the later a task of the kind was started; 0: none was.
    last_used: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        """What the next one imports."""
        made = self.kind.without_users() if self.without_users else self.kind
        return made.modules

    def take_imports(self, warmed: Warmed, modules: tuple[str, ...]) -> None:
        """Note how the imports of one went.

        Args:
            warmed: What it reports.
            modules: What it imported.
        """
        if not warmed.problem:
            if warmed.resident_bytes:
                self.size_bytes = warmed.resident_bytes
        elif modules != self.kind.without_users().modules:
            # Judged by what this one imported: several may have been started before the first reported.
            self.without_users = True
            logger.debug("standbys import nothing of the user's from now on: %s", warmed.problem)
        elif not self.given_up:
            # Its imports will not change.
            self.given_up, self.failed_s = warmed.problem, float("inf")
            logger.debug("no standbys are kept for %s: %s", self.kind.modules, warmed.problem)

    def forget(self, now_s: float) -> None:
        """Try again what has failed, if that was long ago."""
        if now_s - self.failed_s > FORGET_S:
            self.failures, self.given_up = 0, ""

    def take_success(self) -> None:
        """Note that a standby has accepted its task: failures count anew."""
        self.failures, self.failed_s, self.given_up = 0, float("-inf"), ""

    def take_failure(self, standby: Standby, now_s: float, why: str, stderr_tail: str = "") -> bool:
        """Note that one ended before it had taken a task, or does not suit it; return whether it counts.

        Several that were started before a failure fail for the same reason, so they count once.

        Args:
            standby: Which.
            now_s: Monotonic seconds.
            why: In words that follow "since".
            stderr_tail: The end of what it printed there.
        """
        if standby.started_s <= self.failed_s or self.given_up:
            return False
        self.failed_s = now_s
        self.failures += 1
        if self.failures == MOST_FAILURES:
            self.given_up = why
            logger.warning(
                "no process is started ahead of its task any more for %s: %d in a row ended without a "
                "task, the last since %s%s",
                ", ".join(standby.spec.modules),
                self.failures,
                why,
                f"; the end of its stderr:\n{stderr_tail[-1000:]}" if stderr_tail else "",
            )
        return True


def demands_of(
    records: Mapping[Kind, KindRecord], announced: Sequence[Kind], standbys: Collection[Standby]
) -> list[KindDemand]:
    """Return for every kind that is wanted or exists what wants it, the most urgent first.

    Args:
        records: Of all kinds.
        announced: The kind of each task that was submitted and has no process, in their order.
        standbys: All that no task has.
    """
    used = sorted(
        (record for record in records.values() if record.last_used), key=lambda r: -r.last_used
    )
    latest = used[0].kind if used else None
    alive = {s.kind for s in standbys}
    # First come, first served.
    kinds = dict.fromkeys(
        [*announced, *(r.kind for r in used if r.kind == latest or r.kind in alive), *alive]
    )
    demands = []
    for kind in kinds:
        stages = [s.stage for s in standbys if s.kind == kind]
        record, importing = records[kind], stages.count(Stage.IMPORTING)
        demands.append(
            KindDemand(
                kind,
                waiting=announced.count(kind),
                latest=kind == latest,
                used=record.last_used > 0,
                size_bytes=record.size_bytes,
                ready=len(stages) - importing - stages.count(Stage.ENDING),
                importing=importing,
                useful=not record.given_up,
            )
        )
    return demands
