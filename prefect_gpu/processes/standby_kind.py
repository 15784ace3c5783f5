"""Kinds and stages of warm processes, and the choice of one for a task.

A warm process imports libraries before its tasks are known. A fork source is forked for each task of its kind; a standby
becomes the process of one task. The process of a task imports the user's modules itself. `standby_pool` starts the
processes, and `standby_plan` computes their number.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from prefect_gpu.process_resources import read_status
from prefect_gpu.processes.forks import ForkSource
from prefect_gpu.processes.interpreter import environment_with, import_paths
from prefect_gpu.processes.launch_spec import WarmSpec
from prefect_gpu.processes.launcher import Handle
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.standby_plan import KindDemand

logger = logging.getLogger(__name__)

#: Frameworks whose forks, after their import alone, were shown to work on devices and without (docs/start.md).
FORKED = frozenset({"torch", "cupy", "jax"})

#: Seconds without a task of its kind after which a source ends.
IDLE_S = 300.0

#: Modules to import for a body that uses Prefect.
OWN_MODULES = ("prefect_gpu.child.prefect_context", "prefect_gpu.task_runner")

#: Failures in a row after which no more standbys of a kind are started.
MOST_FAILURES = 3

#: Seconds after the last failure until standbys of the kind are started again: causes of failures pass.
FORGET_S = 600.0

#: Variables to set in a standby when it gets a task; `None`: to remove.
Changes = dict[str, str | None]


@dataclass(frozen=True)
class Kind:
    """Kind of a warm process: its imports, and its environment during the imports."""

    #: Modules of this package, Prefect and the frameworks; none of the user's.
    always: tuple[str, ...]
    #: Libraries that the task's code imports, and those that the user's modules with that code use.
    libraries: tuple[str, ...]
    #: Variables that differ from the parent's; `None`: removed.
    environment: tuple[tuple[str, str | None], ...]
    #: A tag states the number of threads. A standby with another number is then unsuitable.
    cpus_stated: bool
    #: Number of threads, for libraries that read it at import.
    cpus: int = field(compare=False)
    #: Estimated host memory of one standby in bytes, until one is measured.
    size_bytes: int = field(compare=False)
    #: Whether processes of tasks are forks of it.
    forks: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules to import, in order."""
        return (*self.always, *self.libraries)

    @functools.cached_property
    def key(self) -> str:
        """Short name of the kind, the same in every process for equal kinds."""
        values = self.always, self.libraries, self.environment, self.cpus_stated
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def environment_of(self, parent: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of a standby, from the environment of its parent."""
        environment = dict(parent)
        for adapter in filter(None, map(registry.ADAPTERS.get, self.always)):
            ahead = {**adapter.default_environment, **adapter.standby_environment()}
            environment = {**ahead, **environment}
        cpus = dict.fromkeys(CPU_VARIABLES, str(self.cpus))
        return environment_with({**cpus, **dict(self.environment)}, environment)


def kind_of(
    fn: Any,
    policy: FrameworkPolicy,
    *,
    size_bytes: int,
    with_prefect: bool = True,
    forks: bool = False,
) -> Kind:
    """Return the kind of warm process that suits a task with the function `fn`.

    `policy` is the task's policy before placement, without devices and budget. `size_bytes` estimates the host memory
    of the process. With `with_prefect`, the task uses Prefect for certain; otherwise its modules may still import
    Prefect. `forks`: the task's process may be a fork.
    """
    names = [n for n in policy.frameworks or policy.detected if n in registry.ADAPTERS]
    if policy.device_kind == "host" and not policy.frameworks and len(names) > 1:
        # Branches of the task use one framework each, and the imports of all would count as host memory.
        names = []
    needed = registry.needed_modules(fn)
    has_prefect = with_prefect or any(map(registry.brings_prefect, needed))
    always = [*OWN_MODULES, *names] if has_prefect else names
    return Kind(
        always=tuple(name for name in always if _can_import(name)),
        libraries=_libraries(needed, names),
        environment=standby_changes(policy),
        cpus_stated=policy.cpus_stated,
        cpus=policy.cpus,
        size_bytes=size_bytes,
        forks=forks and FORKED.issuperset(names),
    )


def standby_changes(policy: FrameworkPolicy) -> tuple[tuple[str, str | None], ...]:
    """Return the variables in which a standby differs from this process, for `Kind.environment`."""
    changes = child_environment(policy, registry.adapters_for(policy), os.environ)
    if policy.device_kind == "nvml":
        # The device is not known yet, and modules that see no device would choose the CPU.
        del changes["CUDA_VISIBLE_DEVICES"]
    return tuple(sorted((n, v) for n, v in changes.items() if n not in CPU_VARIABLES))


def _libraries(needed: Iterable[str], frameworks: Sequence[str]) -> tuple[str, ...]:
    """Return the libraries among modules that a task imports, and those that the user's modules among them use."""
    found, seen, left = set(), set(), list(needed)
    while left:
        entry = left.pop()
        module = entry.partition(":")[0]
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names or root in ("prefect", "prefect_gpu", "__main__"):
            continue
        if not registry.is_users(root):
            # A branch of the task that never runs may import another framework.
            if module not in frameworks and registry.framework_of(root) in ("", *frameworks):
                found.add(entry)
        elif module not in seen and _can_import(module):
            seen.add(module)
            left += [home for home in registry.homes(module) if home in sys.modules]
    return tuple(sorted(entry for entry in found if _can_import(entry.partition(":")[0])))


def _can_import(module: str) -> bool:
    """Return whether a child could import a module. Imports nothing."""
    root = module.partition(".")[0]
    for name in (module, root):
        if name in sys.modules:
            return values.is_importable(name)
    try:
        return importlib.util.find_spec(root) is not None
    except Exception:  # raised by a third-party finder, or for a module without a spec
        return False


class HostMemory(Protocol):
    """Facts about host memory that the standby pool reads from a broker. Safe to use from several threads."""

    @property
    def host_promised_bytes(self) -> int:
        """Bytes of host memory that are reserved for tasks' processes and not yet used by them."""

    @property
    def wants_host_memory(self) -> bool:
        """Whether a task waits for host memory."""


class Stage(enum.IntEnum):
    """Stage of a warm process. If too many standbys of a kind exist, a standby in the lowest stage ends first."""

    IMPORTING = 0
    #: All modules are imported, and it waits for its task, or for requests to fork.
    WAITING = 1
    #: It was killed, or ends by itself: a source once its forks have ended.
    ENDING = 2


def read_surroundings() -> object:
    """Return the facts that a fork has from the start of its source and not from the flow, to compare two times.

    They are the user, the ignored signals, the kernel's settings for the process, and the times at which the folders of
    installed packages changed.
    """
    status = [read_status("self", name) for name in ("Uid", "Gid", "Groups", "SigIgn")]
    kernel = []
    for name in ("oom_score_adj", "coredump_filter", "cgroup"):
        with contextlib.suppress(OSError):
            kernel.append(Path("/proc/self", name).read_text())
    installed = []
    for path in import_paths():
        if path.endswith(("site-packages", "dist-packages")):
            with contextlib.suppress(OSError):
                installed.append((path, os.stat(path).st_mtime_ns))
    return status, kernel, installed


@dataclass(eq=False)
class Standby:
    """One warm process: a standby or a fork source."""

    kind: Kind
    #: May lack the libraries of the kind.
    spec: WarmSpec
    #: Monotonic seconds of the start.
    started_s: float
    #: `None`: it becomes the process of one task.
    source: ForkSource | None = None
    #: Set by the start.
    handle: Handle = field(init=False)
    #: `None`: no process has been reported yet.
    pid: int | None = None
    #: Still changes after a task was given to the standby, until the standby accepts the task.
    stage: Stage = Stage.IMPORTING
    #: Result of `read_surroundings` at the start.
    surroundings: object = None
    #: Places in the machine's limits: of importing processes first, then of standbys. Empty: not counted.
    places: list[Hold] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether all modules are imported, so that a task can begin at once."""
        return self.stage is Stage.WAITING

    def leave(self) -> None:
        """Release what it holds beside its process, once the standby has a task or a process has ended."""
        if self.source is not None:
            self.source.close()
        for place in self.places:
            place.release()

    def changes_for(self, kind: Kind, environment: Mapping[str, str]) -> Changes | None:
        """Return the variables to change for a task of a kind and environment; `None`: the standby is unsuitable."""
        return late_changes(
            self.spec.environment,
            environment,
            registry.ADAPTERS.values(),
            cpus_stated=kind.cpus_stated or self.kind.cpus_stated,
        )


def choose_standby(
    standbys: Iterable[Standby], kind: Kind, environment: Mapping[str, str]
) -> tuple[tuple[Standby, Changes] | None, list[Standby]]:
    """Return the most advanced process for a task and the variables to change in it (`None`: none suits).

    Also return the kind's processes that are unsuitable because the parent's environment has changed.
    """
    best: tuple[Standby, Changes] | None = None
    misfits = []
    # A standby that still imports suits as well: a fresh process would begin its imports only now.
    for standby in sorted(standbys, key=lambda s: (s.ready, len(s.spec.modules), -s.started_s)):
        # A standby must not have imported modules that the task would not import.
        similar = standby.kind.always == kind.always and set(standby.spec.modules) <= set(
            kind.modules
        )
        may_fork = kind.forks or not standby.kind.forks
        if standby.stage is Stage.ENDING or not similar or not may_fork:
            continue
        changes = standby.changes_for(kind, environment)
        if changes is not None:
            best = standby, changes
        elif standby.kind == kind:
            misfits.append(standby)
    return best, misfits


@dataclass(eq=False)
class KindRecord:
    """Failures, size and last use of a kind's standbys."""

    kind: Kind
    #: Host memory of one standby in bytes: the kind's estimate until one is measured.
    size_bytes: int
    #: Modules for the next standby to import: without the libraries after an import of theirs failed, or started a
    #: framework or driver.
    modules: tuple[str, ...]
    #: Number of standbys in a row that ended without a task, or were unsuitable.
    failures: int = 0
    #: Monotonic seconds of the last failure.
    failed_s: float = float("-inf")
    #: Number of the kind's last task start, counted over all kinds; 0: no task of the kind was started.
    last_used: int = 0
    #: Monotonic seconds of that start.
    used_s: float = float("-inf")

    @property
    def given_up(self) -> bool:
        """Whether no more standbys are started."""
        return self.failures >= MOST_FAILURES

    def take_imports(self, warmed: Warmed, modules: tuple[str, ...]) -> None:
        """Record a standby's report about its imports (`modules`)."""
        if not warmed.problem:
            if warmed.resident_bytes:
                self.size_bytes = warmed.resident_bytes
        elif modules != self.kind.always:
            # Compared with this standby's modules, since several standbys may start before the first report.
            self.modules = self.kind.always
            logger.debug("standbys import frameworks only from now on: %s", warmed.problem)
        elif not self.given_up:
            # Imports of frameworks will fail again.
            self.failures, self.failed_s = MOST_FAILURES, float("inf")
            logger.debug("no standbys are kept for %s: %s", self.kind.modules, warmed.problem)

    def forget(self, now_s: float) -> None:
        """Clear the failures if the last was more than `FORGET_S` seconds ago."""
        if now_s - self.failed_s > FORGET_S:
            self.failures = 0

    def take_success(self) -> None:
        """Record that a standby has accepted its task, and clear the failures."""
        self.failures, self.failed_s = 0, float("-inf")

    def take_failure(self, standby: Standby, now_s: float, why: str, stderr_tail: str = "") -> None:
        """Record that a standby ended without a task or is unsuitable, since `why`."""
        # Standbys started before the last failure fail for the same cause, which counts once.
        if standby.started_s <= self.failed_s or self.given_up:
            return
        self.failed_s = now_s
        self.failures += 1
        if self.given_up:
            logger.warning(
                "no process is started ahead of its task any more for %s: %d in a row ended without a "
                "task, the last since %s%s",
                ", ".join(standby.spec.modules),
                self.failures,
                why,
                f"; the end of its stderr:\n{stderr_tail[-1000:]}" if stderr_tail else "",
            )


def demands_of(
    records: Mapping[Kind, KindRecord],
    announced: Sequence[Kind],
    standbys: Collection[Standby],
    now_s: float,
) -> list[KindDemand]:
    """Return the demand for each kind, most urgent first; `announced`: kinds of tasks without a process, in order."""
    used = sorted((r for r in records.values() if r.last_used), key=lambda r: -r.last_used)
    latest = used[0].kind if used else None
    alive = {s.kind for s in standbys}
    kinds = dict.fromkeys(
        [*announced, *(r.kind for r in used if r.kind == latest or r.kind in alive), *alive]
    )
    demands = []
    for kind in kinds:
        record, stages = records[kind], Counter(s.stage for s in standbys if s.kind == kind)
        recent = record.last_used > 0 and (not kind.forks or now_s - record.used_s < IDLE_S)
        # One for the next task, which is likely of the kind of the last.
        wanted = max(announced.count(kind), int(recent and kind == latest))
        demands.append(
            KindDemand(
                kind,
                wanted=0 if record.given_up else min(wanted, 1) if kind.forks else wanted,
                spare=recent and not record.given_up,
                size_bytes=record.size_bytes,
                ready=stages[Stage.WAITING],
                importing=stages[Stage.IMPORTING],
                forks=kind.forks,
            )
        )
    return demands
