"""Kinds and stages of standbys, and the choice of a standby for a task.

A standby is a process that imports modules ahead of its task. Tasks of one kind can use each other's standbys. Of the
user's modules, a standby imports only those that the task's process would import anyway. `standby_pool` has the
processes, and `scheduling.standbys` the number of standbys.
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

#: Modules imported before a body that uses Prefect.
OWN_MODULES = ("prefect_gpu.child.prefect_context", "prefect_gpu.task_runner")

#: Failures in a row after which standbys of a kind are given up.
MOST_FAILURES = 3

#: Seconds after the last failure after which a kind is tried again: causes of failures pass.
FORGET_S = 600.0

#: Variables to set in a waiting process, or to remove (`None`).
Changes = dict[str, str | None]


@dataclass(frozen=True)
class Kind:
    """The imports of a standby, and the environment in which it imports."""

    #: Modules of this package, of Prefect and of the frameworks; none of the user's.
    always: tuple[str, ...]
    #: Modules that the task's own code imports, the task's module first.
    users: tuple[str, ...]
    #: Variables that differ from the parent's; `None`: removed.
    environment: tuple[tuple[str, str | None], ...]
    #: A tag states the number of threads, so a standby with another number is unsuitable.
    cpus_stated: bool
    #: Number of threads for libraries that read it as they load.
    cpus: int = field(compare=False)
    #: Estimated host memory of one standby in bytes, before any was measured.
    size_bytes: int = field(compare=False)

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules to import, in this order: frameworks before modules that need them."""
        return (*self.always, *self.users)

    @functools.cached_property
    def key(self) -> str:
        """Short name of the kind, the same in every process: equal kinds have equal names."""
        values = self.always, self.users, self.environment, self.cpus_stated
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def without_users(self) -> Kind:
        """Return the kind without the user's modules."""
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
    """Return the kind of standby that suits the task of a function.

    Args:
        fn: The task's function.
        policy: The task's policy before placement, without devices and budget.
        size_bytes: Estimated host memory of such a process.
        environ: The parent's environment; `None`: this process's.
        with_prefect: The task is known to use Prefect. If `False`, its modules may still import Prefect.
    """
    environ = os.environ if environ is None else environ
    names = [n for n in policy.frameworks or policy.detected if n in registry.ADAPTERS]
    if policy.device_kind == "host" and not policy.frameworks and len(names) > 1:
        # Each branch of the task uses one of them, and a process counts by its resident set.
        names = []
    always = [registry.ADAPTERS[name].module for name in names]
    users = _users_modules(fn, always, names)
    # Ahead of the user's modules: objects of libraries are frozen, objects imported with the user's modules are not.
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
    """Return the variables in which a standby differs from its parent, as in `Kind.environment`."""
    changes = child_environment(policy, registry.adapters_for(policy), environ)
    if policy.device_kind == "nvml":
        # The device is not known yet, and modules that see no device would decide for the CPU.
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
        excluded = module in taken or root == "__main__" or root in sys.builtin_module_names
        # A branch of the task that never runs may import another framework.
        if excluded or registry.framework_of(root) not in ("", *frameworks):
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


class HostMemory(Protocol):
    """The broker's facts about host memory, for the standby pool. Safe to use from several threads."""

    @property
    def host_promised_bytes(self) -> int:
        """Host memory in bytes that is promised to tasks' processes and not yet used by them."""

    @property
    def wants_host_memory(self) -> bool:
        """Whether a task waits for host memory."""


class Stage(enum.IntEnum):
    """Stage of a standby. Of the standbys of a kind, the one with the lowest stage ends first."""

    IMPORTING = 0
    #: Its modules are imported, and it waits for its task.
    WAITING = 1
    #: It was asked to end, or ends by itself.
    ENDING = 2


_serials = itertools.count()


@dataclass(eq=False)
class Standby:
    """One process that was started ahead of its task."""

    kind: Kind
    #: The spec of its process, which may lack the user's modules.
    spec: WarmSpec
    #: Monotonic seconds of the start.
    started_s: float
    #: Number in the order of starts.
    serial: int = field(default_factory=lambda: next(_serials))
    #: `None`: not started yet.
    handle: Handle | None = None
    #: `None`: no process has been reported yet.
    pid: int | None = None
    stage: Stage = Stage.IMPORTING
    #: A task was assigned. The stage still changes until the standby accepts the task.
    given: bool = False
    #: Its holds among the machine's standbys, and among importing standbys; `None`: not counted.
    place: Hold | None = None
    import_place: Hold | None = None

    @property
    def ready(self) -> bool:
        """Whether its modules are imported and it can take a task at once."""
        return self.stage is Stage.WAITING

    def enter(self, stage: Stage) -> None:
        """Enter a stage, unless the standby ends."""
        if self.stage is not Stage.ENDING:
            self.stage = stage
        if self.import_place is not None:
            self.import_place.release()

    def leave(self) -> None:
        """Release the standby's places in the machine's limit of standbys: it has a task, or has ended."""
        for place in (self.place, self.import_place):
            if place is not None:
                place.release()

    def changes_for(self, kind: Kind, environment: Mapping[str, str]) -> Changes | None:
        """Return the changes that this standby needs for a task with this environment; `None`: it is unsuitable."""
        return late_changes(
            self.spec.environment,
            environment,
            registry.ADAPTERS.values(),
            cpus_stated=kind.cpus_stated or self.kind.cpus_stated,
        )


def choose_standby(
    standbys: Iterable[Standby], kind: Kind, environment: Mapping[str, str]
) -> tuple[tuple[Standby, Changes] | None, list[Standby]]:
    """Choose the standby that is furthest along for a task of a kind with this whole environment.

    Returns:
        The standby and its changes (`None`: no standby suits), and the standbys of the task's kind that became
        unsuitable when the parent's environment changed.
    """
    best: tuple[Standby, Changes] | None = None
    best_rank: tuple[Any, ...] = ()
    misfits = []
    for standby in standbys:
        # A standby must not have imported modules that this task would not import.
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
        # A standby that still imports is further along than a process that has not been started.
        rank = standby.ready, len(standby.spec.modules), -standby.serial
        if best is None or rank > best_rank:
            best, best_rank = (standby, changes), rank
    return best, misfits


@dataclass(eq=False)
class KindRecord:
    """Experience with the standbys of a kind."""

    kind: Kind
    #: Host memory of one standby in bytes: the kind's estimate until one was measured.
    size_bytes: int
    #: Standbys in a row that ended without a task, or were unsuitable.
    failures: int = 0
    #: Monotonic seconds of the last failure.
    failed_s: float = float("-inf")
    #: Why no more standbys are started; empty: they are.
    given_up: str = ""
    #: An import of the user's modules failed, or started a framework or driver.
    without_users: bool = False
    #: Number of the last start of a task of this kind, among the starts of all tasks; 0: none was started.
    last_used: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that the next standby imports."""
        made = self.kind.without_users() if self.without_users else self.kind
        return made.modules

    def take_imports(self, warmed: Warmed, modules: tuple[str, ...]) -> None:
        """Record a standby's report about its imports of these modules."""
        if not warmed.problem:
            if warmed.resident_bytes:
                self.size_bytes = warmed.resident_bytes
        elif modules != self.kind.without_users().modules:
            # By the modules of this standby: several may have been started before the first report.
            self.without_users = True
            logger.debug("standbys import nothing of the user's from now on: %s", warmed.problem)
        elif not self.given_up:
            # The imports will fail again.
            self.given_up, self.failed_s = warmed.problem, float("inf")
            logger.debug("no standbys are kept for %s: %s", self.kind.modules, warmed.problem)

    def forget(self, now_s: float) -> None:
        """Clear failures that are longer ago than `FORGET_S`."""
        if now_s - self.failed_s > FORGET_S:
            self.failures, self.given_up = 0, ""

    def take_success(self) -> None:
        """Record that a standby has accepted its task: failures count anew."""
        self.failures, self.failed_s, self.given_up = 0, float("-inf"), ""

    def take_failure(self, standby: Standby, now_s: float, why: str, stderr_tail: str = "") -> bool:
        """Record that a standby ended before it accepted a task, or is unsuitable; return whether the failure counts.

        Standbys that were started before the last failure have failed for the same reason, which counts once. `why` is
        the reason in words that follow "since", `stderr_tail` the end of the standby's standard error.
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
    """Return the demand for each kind that is wanted or has standbys, the most urgent first.

    `announced` has the kinds of the submitted tasks without a process, in order of submission.
    """
    used = sorted((r for r in records.values() if r.last_used), key=lambda r: -r.last_used)
    latest = used[0].kind if used else None
    alive = {s.kind for s in standbys}
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
