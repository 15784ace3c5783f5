"""The pool of warm processes: starts them, forks them for tasks or gives them to tasks, and ends them.

One pool serves all runners of a Python process. A runner announces each submitted task; the announcement is then the
task's `Launcher`. `standby_kind` chooses the process for a task, `standby_plan` computes their number.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect_gpu.devices.host import count_cores, read_host_available_bytes
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import PROCESS_RESOURCES, read_status, start_thread
from prefect_gpu.processes.forks import ForkSource
from prefect_gpu.processes.interpreter import (
    Process,
    SpawnRequest,
    environment_with,
    import_paths,
    working_folder,
)
from prefect_gpu.processes.launch_spec import (
    ChildExited,
    ChildHandle,
    ChildRefused,
    ChildStarted,
    LaunchSpec,
    Listener,
    ValueArrived,
    WarmSpec,
)
from prefect_gpu.processes.launcher import ProcessLauncher, process_launcher
from prefect_gpu.processes.messages import Accepted, BodyStarted, Late, Warmed
from prefect_gpu.processes.standby_kind import (
    Changes,
    HostMemory,
    Kind,
    KindRecord,
    Stage,
    Standby,
    choose_standby,
    demands_of,
    read_surroundings,
)
from prefect_gpu.processes.standby_plan import StandbyPlan, plan_standbys
from prefect_gpu.units import GIB

logger = logging.getLogger(__name__)

#: Bytes of host memory that standbys leave free.
RESERVE_BYTES = 2 * GIB

#: Seconds between two checks of host memory while there are standbys.
CHECK_S = 1.0

#: Seconds that a task waits for host memory before all standbys end: every request waits a moment.
PATIENCE_S = 0.5

#: Seconds without new standbys after a shortage of host memory or processes.
SHORTAGE_S = 10.0

#: Seconds in which a standby must import its modules: ten times the half minute that a cold disk takes.
IMPORT_S = 300.0

#: Most sources that wait for the next runner.
MOST_KEPT = 2

#: Seconds that `close` and the interpreter's end wait for the ends of processes.
_ENDING_S = 2.0


@dataclass(frozen=True, eq=False)
class Announcement:
    """`Launcher` of a submitted task, for which the pool keeps a process until the first `start`, or `retract`."""

    pool: StandbyPool
    kind: Kind
    #: The runner; once it is closed, nothing is waited for. `None`: not known.
    owner: object

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Fork a suitable process for the task, or give a standby to it, or start a process. May wait for imports."""
        return self.pool.start(self, spec, listener)

    def retract(self) -> None:
        """Keep no standby for the task any longer; no effect once the task has had a process."""
        self.pool.retract(self)


class StandbyPool:
    """Keeps standbys and gives them to tasks. Safe to use from several threads."""

    def __init__(
        self,
        launcher: ProcessLauncher,
        read_available: Callable[[], int] = read_host_available_bytes,
        cores: int | None = None,
    ) -> None:
        self._launcher = launcher
        #: Returns the bytes of host memory that new processes could use.
        self._read_available = read_available
        self._cores = cores or count_cores()
        self._reset()
        # The parent's standbys, announcements and thread do not exist in a fork.
        PROCESS_RESOURCES.after_fork(self, StandbyPool._forget)

    def _forget(self) -> None:
        for standby in self._standbys:
            standby.leave()
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._dirty = False
        self._shut = False
        self._thread: threading.Thread | None = None
        #: Maximum of standbys and broker of each open runner.
        self._owners: dict[object, tuple[int, HostMemory]] = {}
        self._announced: dict[Announcement, None] = {}
        self._shared: SharedFolder | None = None
        #: All standbys without a task. A standby with a task belongs to the task.
        self._standbys: list[Standby] = []
        #: Processes of tasks, each with the kind of its source if the process is a fork, else `None`.
        self._running: dict[object, Kind | None] = {}
        #: Kinds of tasks that were given to a standby and whose body has not begun, by process.
        self._starting: dict[object, Kind] = {}
        self._records: dict[Kind, KindRecord] = {}
        self._uses = itertools.count(1)
        #: Monotonic seconds since which tasks wait for host memory; infinite: no task waits.
        self._starved_since_s = math.inf
        #: Monotonic seconds until which no standby is started.
        self._hold_until_s = 0.0

    # Any thread.

    def open(
        self, owner: object, most: int, broker: HostMemory, shared: SharedFolder | None = None
    ) -> None:
        """Keep standbys for a runner (`owner`) until `close`. A second call for the same runner changes nothing.

        The largest maximum (`most`) of all runners is used. In the folder `shared`, all Python processes count their
        standbys, so that `most` limits the machine's standbys.
        """
        with self._changed:
            if not self._shut:
                if not self._owners:
                    self._begin_anew()
                self._owners.setdefault(owner, (most, broker))
                self._shared = shared or self._shared

    def close(self, owner: object) -> None:
        """Remove a runner. If no runner is left, end all processes but `MOST_KEPT` sources, and wait for the ends.

        The sources that were forked last are kept. They wait for the next runner, as long as for the next task.
        """
        with self._changed:
            self._owners.pop(owner, None)
            # Its tasks may wait for imports.
            self._wake()
            if self._owners:
                return
            self._announced.clear()
            used = [s for s in self._standbys if s.ready and self._record(s.kind).last_used]
            sources = [s for s in used if s.source is not None]
            sources.sort(key=lambda s: self._record(s.kind).last_used, reverse=True)
            kept = sources[: 0 if self._shut else MOST_KEPT]
            for standby in self._standbys:
                if standby not in kept:
                    self._end(standby)
            self._wait_for_ends()

    def shut_down(self) -> None:
        """End all processes, wait for their end and start no more, since the interpreter is about to end."""
        with self._changed:
            self._shut = True
            self._owners.clear()
            self.close(None)

    def announce(self, kind: Kind, owner: object = None) -> Announcement:
        """Note that a runner's (`owner`) task of a kind was submitted, so that a process is started; return its launcher."""
        announcement = Announcement(self, kind, owner)
        with self._changed:
            # A runner that was closed keeps nothing.
            if owner is None or owner in self._owners:
                self._announced[announcement] = None
                self._record(kind)
                self._wake()
        return announcement

    def retract(self, announcement: Announcement) -> None:
        """Keep no standby for an announced task any longer; no effect once the task has had a process."""
        with self._changed:
            if announcement in self._announced:
                del self._announced[announcement]
                self._wake()

    def start(
        self, announcement: Announcement, spec: LaunchSpec, listener: Listener
    ) -> ChildHandle:
        """See `Announcement.start`. From now on no standby is kept for the task."""
        environment = environment_with(spec.environment)
        process = object()
        listen = partial(self._pass_on, process, listener)
        with self._changed:
            self._announced.pop(announcement, None)
            self._running[process] = None
            while True:
                kind, found = self._choose(announcement, environment)
                source = None if found is None else found[0].source
                if found is None or source is None or found[0].ready:
                    break
                if announcement.owner is not None and announcement.owner not in self._owners:
                    source = found = None
                    break
                # It imports already, for all tasks of its kind.
                self._changed.wait()
            self._wake()
            if found is not None and source is None:
                standby, changes = found
                if standby.ready:
                    # Until the body begins, a new standby would take the task's cores.
                    self._starting[process] = kind
                self._drop(standby)
                late = Late(changes, spec.cwd, spec.argv, spec.sys_path)
                return standby.handle.give(spec, late, listen)
        try:
            fork = None if source is None else partial(self._fork, source, process, kind)
            return self._launcher.start(spec, listen, fork)
        except BaseException:
            with self._changed:
                del self._running[process]
            raise

    @property
    def ready_by_kind(self) -> Counter[Kind]:
        """Number of standbys that have imported their modules and wait for a task, by kind."""
        with self._changed:
            return Counter(s.kind for s in self._standbys if s.ready)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all standbys."""
        with self._changed:
            return tuple(s.pid for s in self._standbys if s.pid is not None)

    # With the lock.

    def _kind(self, kind: Kind) -> Kind:
        """Return the kind of the warm process for tasks of a kind: standbys once its sources were given up."""
        if kind.forks and self._record(kind).given_up:
            kind = replace(kind, forks=False)
        self._record(kind)
        return kind

    def _choose(
        self, announcement: Announcement, environment: Mapping[str, str]
    ) -> tuple[Kind, tuple[Standby, Changes] | None]:
        kind = self._kind(announcement.kind)
        if self._owners:
            record = self._record(kind)
            record.last_used, record.used_s = next(self._uses), time.monotonic()
        found, misfits = choose_standby(self._standbys, kind, environment)
        for standby in misfits:
            why = "the environment changes from task to task"
            self._record(standby.kind).take_failure(standby, time.monotonic(), why)
            self._end(standby)
        return kind, found

    def _wake(self) -> None:
        """Wake tasks that wait, and the pool's thread, which starts and ends standbys; start the thread if needed."""
        if self._thread is None and self._owners:
            try:
                self._thread = start_thread(self._run, "prefect-gpu-standby")
            except CapacityError as error:
                # Tasks get fresh processes; the next call tries again.
                logger.debug("no process is started ahead of its task: %s", error)
        self._dirty = True
        self._changed.notify_all()

    def _begin_anew(self) -> None:
        """Forget the failures of earlier runners' kinds, and end sources whose forks would be out of date."""
        surroundings = read_surroundings()
        for standby in self._standbys:
            environment = standby.kind.environment_of(os.environ)
            changes = standby.changes_for(standby.kind, environment)
            if changes is None or standby.surroundings != surroundings:
                self._end(standby)
        kept = {standby.kind for standby in self._standbys if standby.ready}
        self._records = {k: record for k, record in self._records.items() if k in kept}
        for standby in self._standbys:
            self._record(standby.kind).take_success()

    def _wait_for_ends(self) -> None:
        """Wait until the processes that are ending have ended; kill those that take longer than `_ENDING_S` seconds."""
        deadline = time.monotonic() + _ENDING_S
        while ending := [s for s in self._standbys if s.stage is Stage.ENDING]:
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            self._changed.wait(left_s)
        for standby in ending:
            # A fork that hangs at its end keeps its source alive.
            standby.handle.kill()

    def _end(self, standby: Standby) -> None:
        if standby.stage is not Stage.ENDING:
            ready, standby.stage = standby.ready, Stage.ENDING
            if standby.source is not None and ready:
                standby.source.retire()
            else:
                standby.handle.kill()
            # Tasks wait for sources that import.
            self._changed.notify_all()

    def _record(self, kind: Kind) -> KindRecord:
        return self._records.setdefault(kind, KindRecord(kind, kind.size_bytes, kind.modules))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._dirty:
                    # Without standbys and tasks there is nothing to check.
                    busy = self._standbys or self._announced or self._starting
                    self._changed.wait(CHECK_S if busy else None)
                self._dirty = False
                if self._shut:
                    return
                brokers = {broker for _, broker in self._owners.values()}
            try:
                self._check(brokers)
            except Exception:
                logger.exception("the pool of standby processes met an error; it goes on")

    def _check(self, brokers: set[HostMemory]) -> None:
        """Start and end standbys, as planned from demand, host memory and cores."""
        left_bytes: float = self._read_available() - RESERVE_BYTES
        left_bytes -= sum(broker.host_promised_bytes for broker in brokers)
        starved = any(broker.wants_host_memory for broker in brokers)
        now = time.monotonic()
        with self._changed:
            self._starved_since_s = min(self._starved_since_s, now) if starved else math.inf
            if now - self._starved_since_s >= PATIENCE_S:
                left_bytes = -math.inf
                self._hold_until_s = now + SHORTAGE_S
            self._end_hung(now)
            announced = [self._kind(a.kind) for a in self._announced]
            for record in self._records.values():
                record.forget(now)
            for kind in filter(None, self._running.values()):
                self._record(kind).used_s = now
            demands = demands_of(self._records, announced, self._standbys, now)
            plan = plan_standbys(demands, left_bytes, self._most(), self._imports_at_once())
            self._carry_out(plan, now)

    def _end_hung(self, now: float) -> None:
        """End processes that have imported for more than `IMPORT_S` seconds, or were stopped (SIGSTOP) meanwhile."""
        for standby in self._standbys:
            if standby.stage is not Stage.IMPORTING:
                continue
            stopped = standby.pid is not None and read_status(standby.pid, "State").startswith("T")
            if stopped or now - standby.started_s > IMPORT_S:
                why = "it was stopped" if stopped else f"it imported for more than {IMPORT_S:g} s"
                self._record(standby.kind).take_failure(standby, now, why)
                self._end(standby)

    def _carry_out(self, plan: StandbyPlan, now: float) -> None:
        for kind in plan.ends:
            own = [s for s in self._standbys if s.kind == kind and s.stage is not Stage.ENDING]
            self._end(min(own, key=lambda s: (s.stage, -s.started_s)))
        if plan.short_of_memory:
            self._hold_until_s = now + SHORTAGE_S
        for kind in plan.starts:
            if not self._owners or now < self._hold_until_s:
                return
            if kind not in self._starting.values():
                assert isinstance(kind, Kind)
                self._start(kind, now)

    def _start(self, kind: Kind, now: float) -> None:
        source = ForkSource() if kind.forks else None
        spec = WarmSpec(
            modules=self._record(kind).modules,
            environment=kind.environment_of(os.environ),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
            control=None if source is None else source.descriptor,
        )
        standby = Standby(kind, spec, now, source=source, surroundings=read_surroundings())
        try:
            if self._take_places(standby):
                standby.handle = self._launcher.start(spec, partial(self._hear, standby))
                # The standby's messages come on another thread, which waits for the lock.
                self._standbys.append(standby)
                return
        except CapacityError as error:
            self._take_refusal(error)
        standby.leave()

    def _take_places(self, standby: Standby) -> bool:
        """Take places for a new standby in the machine's limits; return whether it may be started."""
        if self._shared is None:
            return True
        limits = {"import": self._imports_at_once()}
        if standby.source is None:
            limits["standby"] = self._most()
        try:
            for name, most in limits.items():
                if (place := self._shared.hold_one(name, most)) is None:
                    return False
                standby.places.append(place)
        except OSError as error:
            logger.debug("standbys of other processes are not counted: %s", error)
        return True

    def _most(self) -> int:
        return max((most for most, _ in self._owners.values()), default=0)

    def _imports_at_once(self) -> int:
        """Return how many standbys may import at once: half the cores, or a free core for each announced task."""
        free = self._cores - len(self._running)
        return max(1, self._cores // 2, min(len(self._announced), free))

    def _take_refusal(self, error: Exception) -> None:
        """Start no standby for `SHORTAGE_S` seconds: processes that the system still allows are for tasks."""
        logger.debug("no process can be started ahead of its task: %s", error)
        self._hold_until_s = time.monotonic() + SHORTAGE_S

    # The launcher's thread.

    def _fork(
        self, source: ForkSource, process: object, kind: Kind, request: SpawnRequest
    ) -> Process:
        forked = source.fork(request)
        with self._changed:
            # After the fork: if it fails, the task gets a fresh process, whose success is not the source's.
            self._running[process] = kind
            self._record(kind).take_success()
        return forked

    def _pass_on(self, process: object, listener: Listener, message: Any) -> None:
        """Pass a message of a task's process to the task's listener; once the body begins, check for new standbys."""
        if isinstance(message, (ChildRefused, ChildExited)):
            # Before the listener, which may place other tasks: a core is free for their standbys.
            with self._changed:
                self._running.pop(process, None)
        try:
            listener(message)
        finally:
            if isinstance(message, (BodyStarted, ValueArrived, ChildRefused, ChildExited)):
                with self._changed:
                    if self._starting.pop(process, None) is not None:
                        self._wake()

    def _hear(self, standby: Standby, message: Any) -> None:
        """Handle an event or message of a standby, up to its `Accepted`."""
        with self._changed:
            record = self._record(standby.kind)
            if isinstance(message, Accepted):
                # Only now a success: a standby may also die when it gets a task.
                record.take_success()
            elif isinstance(message, ChildStarted):
                standby.pid = message.pid
                if standby.source is not None:
                    standby.source.started(message.pid)
            elif isinstance(message, Warmed):
                # With a problem the standby ends by itself, and its task gets a fresh process.
                if standby.stage is not Stage.ENDING:
                    standby.stage = Stage.ENDING if message.problem else Stage.WAITING
                for place in standby.places[:1]:
                    place.release()
                record.take_imports(message, standby.spec.modules)
            elif isinstance(message, ChildRefused) and standby.pid is None:
                # With a process, `ChildExited` will come: the launcher kills it.
                self._take_refusal(message.error)
                self._drop(standby)
            elif isinstance(message, ChildExited):
                if standby.stage is not Stage.ENDING:
                    # The pool did not kill it.
                    why = message.killed_because or f"it ended with {message.code}"
                    record.take_failure(standby, time.monotonic(), why, message.stderr_tail)
                self._drop(standby)
            self._wake()

    def _drop(self, standby: Standby) -> None:
        if standby in self._standbys:
            self._standbys.remove(standby)
            standby.leave()


def standby_pool() -> StandbyPool:
    """Return the only standby pool of this Python process; a fork has its own, empty pool."""
    return PROCESS_RESOURCES.get("standby pool", _make_pool)


def _make_pool() -> StandbyPool:
    pool = StandbyPool(process_launcher())
    # Registered after the launcher's function, so called before it: the launcher must get no new starts.
    atexit.register(pool.shut_down)
    return pool
