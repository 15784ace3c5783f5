"""The pool of standbys: starts them, assigns them to tasks, and ends them.

One pool serves all runners of a Python process. A runner announces each submitted task; the announcement is then the
task's `Launcher`. `standby_kind` has the kinds and the choice for a task, `scheduling.standbys` the number of standbys.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from prefect_gpu.devices.host import count_cores, read_host_available_bytes
from prefect_gpu.devices.shared_folder import SharedFolder
from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import PROCESS_RESOURCES, start_thread
from prefect_gpu.processes.interpreter import environment_with, import_paths, working_folder
from prefect_gpu.processes.launch_spec import (
    UNSUITED_CODE,
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
)
from prefect_gpu.scheduling.standbys import Machine, StandbyPlan, most_imports, plan_standbys
from prefect_gpu.units import GIB

logger = logging.getLogger(__name__)

#: Bytes of the machine's memory that standbys leave free.
RESERVE_BYTES = 2 * GIB

#: Seconds between two checks of the machine's memory while there are standbys.
CHECK_S = 1.0

#: Seconds that a task waits for host memory before standbys end for it: every request waits a moment.
PATIENCE_S = 0.5

#: Seconds without new standbys after the machine was short of memory or processes.
SHORTAGE_S = 10.0

#: Seconds that a standby may import: half a minute is a cold disk, ten times that a hang.
IMPORT_S = 300.0

#: Seconds that `close` waits for processes that were killed.
_ENDING_S = 5.0


class Announcement:
    """A submitted task: the `Launcher` of all its processes.

    A standby is kept for the task until its first process starts or the announcement is retracted.
    """

    def __init__(self, pool: StandbyPool, kind: Kind) -> None:
        self._pool = pool
        self.kind = kind

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Assign a suitable standby to the task, or start a process for it."""
        return self._pool.start(self, spec, listener)

    def retract(self) -> None:
        """Keep no standby for the task any longer; without effect once it had a process."""
        self._pool.retract(self)


class StandbyPool:
    """Keeps standbys and assigns them to tasks. Safe to use from several threads.

    `read_available` returns the bytes of the machine's memory that new processes could use.
    """

    def __init__(
        self,
        launcher: ProcessLauncher,
        read_available: Callable[[], int] = read_host_available_bytes,
        cores: int | None = None,
    ) -> None:
        self._launcher = launcher
        self._read_available = read_available
        self._cores = cores or count_cores()
        self._reset()
        # A fork does not have its parent's processes, announcements and thread.
        PROCESS_RESOURCES.after_fork(self, StandbyPool._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._dirty = False
        self._shut = False
        self._thread: threading.Thread | None = None
        #: Open runners, each with its maximum of standbys and its tasks' broker.
        self._owners: dict[object, tuple[int, HostMemory]] = {}
        self._announced: dict[Announcement, None] = {}
        self._shared: SharedFolder | None = None
        #: All standbys without a task.
        self._standbys: list[Standby] = []
        #: Processes of tasks; a standby that was given its task has the task's kind until the body begins.
        self._running: dict[object, Kind | None] = {}
        self._records: dict[Kind, KindRecord] = {}
        self._uses = itertools.count(1)
        #: Monotonic seconds since when a task has waited for host memory; `None`: no task waits.
        self._starved_since_s: float | None = None
        #: Monotonic seconds until which no standby is started.
        self._hold_until_s = 0.0

    # Any thread.

    def open(
        self, owner: object, most: int, broker: HostMemory, shared: SharedFolder | None = None
    ) -> None:
        """Keep standbys for a runner until `close`; without effect the second time.

        Args:
            owner: The runner.
            most: Maximum of standbys. The largest of all runners is used.
            broker: Broker of the runner's tasks.
            shared: Folder in which all processes of the machine count their standbys, for which `most` is then a limit.
        """
        with self._changed:
            if not self._shut:
                self._owners.setdefault(owner, (most, broker))
                self._shared = shared or self._shared

    def close(self, owner: object) -> None:
        """Remove a runner. With the last runner all standbys end."""
        with self._changed:
            self._owners.pop(owner, None)
            if self._owners:
                self._wake()
                return
            self._announced.clear()
            self._end_all()
            # A kind that was given up may work for the next runner.
            self._records.clear()
            for standby in self._standbys:
                self._record(standby.kind)
            deadline = time.monotonic() + _ENDING_S
            while self._standbys and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def shut_down(self) -> None:
        """End all standbys for good, since the interpreter is about to end."""
        with self._changed:
            self._shut = True
            self._owners.clear()
            self._announced.clear()
            self._end_all()
            self._wake()

    def announce(self, kind: Kind) -> Announcement:
        """Keep a standby of a kind for a submitted task."""
        announcement = Announcement(self, kind)
        with self._changed:
            self._announced[announcement] = None
            self._record(kind)
            self._check_soon()
        return announcement

    def retract(self, announcement: Announcement) -> None:
        """See `Announcement.retract`."""
        with self._changed:
            if announcement in self._announced:
                del self._announced[announcement]
                self._wake()

    def start(
        self, announcement: Announcement, spec: LaunchSpec, listener: Listener
    ) -> ChildHandle:
        """See `Announcement.start`. No standby is kept for the task from now on."""
        kind, environment = announcement.kind, environment_with(spec.environment)
        process = object()

        def listen(message: Any) -> None:
            self._pass_on(process, listener, message)

        with self._changed:
            self._announced.pop(announcement, None)
            self._running[process] = None
            if self._owners:
                self._record(kind).last_used = next(self._uses)
            found, misfits = choose_standby(self._standbys, kind, environment)
            for standby in misfits:
                why = "the environment changes from task to task"
                self._record(standby.kind).take_failure(standby, time.monotonic(), why)
                self._end(standby)
            if found is not None:
                standby, changes = found
                if standby.ready:
                    # Another standby would take the cores on which this task begins.
                    self._running[process] = kind
                else:
                    self._check_soon()
                return self._give(standby, changes, spec, listen)
            self._check_soon()
        try:
            return self._launcher.start(spec, listen)
        except BaseException:
            with self._changed:
                del self._running[process]
            raise

    @property
    def ready(self) -> int:
        """Number of standbys that wait for a task now."""
        with self._changed:
            return sum(s.ready for s in self._standbys)

    @property
    def ready_by_kind(self) -> Counter[Kind]:
        """Number of standbys that wait for a task now, by kind."""
        with self._changed:
            return Counter(s.kind for s in self._standbys if s.ready)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all standbys."""
        with self._changed:
            return tuple(s.pid for s in self._standbys if s.pid is not None)

    # With the lock.

    def _give(
        self, standby: Standby, changes: Changes, spec: LaunchSpec, listener: Listener
    ) -> ChildHandle:
        assert standby.handle is not None
        self._standbys.remove(standby)
        standby.given = True
        standby.leave()
        late = Late(changes, spec.cwd, spec.argv, spec.sys_path)
        return standby.handle.give(spec, late, listener)

    def _check_soon(self) -> None:
        """Wake the pool's thread to start and end standbys; start the thread if there is none."""
        if self._shut or not self._owners:
            return
        if self._thread is None:
            try:
                self._thread = start_thread(self._run, "prefect-gpu-standby")
            except CapacityError as error:
                # Tasks get fresh processes; the next call tries again.
                logger.debug("no process is started ahead of its task: %s", error)
                return
        self._wake()

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _end_all(self) -> None:
        for standby in self._standbys:
            self._end(standby)

    def _end(self, standby: Standby) -> None:
        # A standby that was given to a task belongs to the task.
        if standby.stage is not Stage.ENDING and not standby.given and standby.handle is not None:
            standby.stage = Stage.ENDING
            standby.handle.kill()

    def _record(self, kind: Kind) -> KindRecord:
        return self._records.setdefault(kind, KindRecord(kind, kind.size_bytes))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._dirty:
                    # Without standbys and tasks there is nothing to check.
                    busy = self._standbys or self._announced or any(self._running.values())
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
        """Start and end standbys as the plan says."""
        available_bytes = self._read_available()
        promised_bytes = sum(broker.host_promised_bytes for broker in brokers)
        starved = any(broker.wants_host_memory for broker in brokers)
        now = time.monotonic()
        with self._changed:
            if self._shut or not self._owners:
                return
            self._starved_since_s = (self._starved_since_s or now) if starved else None
            if self._starved_since_s is not None and now - self._starved_since_s >= PATIENCE_S:
                self._hold_until_s = now + SHORTAGE_S
                self._end_all()
            # A plan lets half of these cores import.
            cores, most = 2 * self._imports_at_once(), self._most()
            machine = Machine(available_bytes, promised_bytes, RESERVE_BYTES, cores, most)
            self._end_hung(now)
            announced = [a.kind for a in self._announced]
            for record in self._records.values():
                record.forget(now)
            demands = demands_of(self._records, announced, self._standbys)
            self._carry_out(plan_standbys(demands, machine), now)

    def _end_hung(self, now: float) -> None:
        """End standbys that import for too long."""
        for standby in self._standbys:
            if standby.stage is Stage.IMPORTING and now - standby.started_s > IMPORT_S:
                why = f"it imported for more than {IMPORT_S:g} s"
                self._record(standby.kind).take_failure(standby, now, why)
                self._end(standby)

    def _carry_out(self, plan: StandbyPlan, now: float) -> None:
        for kind in plan.ends:
            own = [s for s in self._standbys if s.kind == kind and s.stage is not Stage.ENDING]
            if own:
                self._end(min(own, key=lambda s: (s.stage, -s.serial)))
        if plan.short_of_memory:
            self._hold_until_s = now + SHORTAGE_S
        for kind in plan.starts:
            if now >= self._hold_until_s and kind not in self._running.values():
                assert isinstance(kind, Kind)
                self._start(kind, now)

    def _start(self, kind: Kind, now: float) -> None:
        spec = WarmSpec(
            modules=self._record(kind).modules,
            environment=kind.environment_of(os.environ),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
        )
        standby = Standby(kind, spec, now)
        if not self._take_places(standby):
            return
        try:
            standby.handle = self._launcher.start(
                spec, lambda message: self._hear(standby, message)
            )
        except CapacityError as error:
            standby.leave()
            self._take_refusal(error)
            return
        # Messages of the standby come on another thread, which waits for the lock.
        self._standbys.append(standby)

    def _take_places(self, standby: Standby) -> bool:
        """Count a new standby on the machine; return whether it may be started."""
        if self._shared is None:
            return True
        try:
            standby.import_place = self._shared.hold_one("import", self._imports_at_once())
            if standby.import_place is not None:
                standby.place = self._shared.hold_one("standby", self._most())
        except OSError as error:
            logger.debug("standbys of other processes are not counted: %s", error)
            return True
        if standby.place is None:
            standby.leave()
        return standby.place is not None

    def _most(self) -> int:
        return max(most for most, _ in self._owners.values())

    def _imports_at_once(self) -> int:
        """Return how many standbys may import at a time: half the cores, for many tasks all cores without a task."""
        half = most_imports(self._cores)
        return max(half, min(len(self._announced), self._cores - len(self._running)))

    def _take_refusal(self, error: Exception) -> None:
        """Start no standby for a while: the processes that the system still allows are for tasks."""
        logger.debug("no process can be started ahead of its task: %s", error)
        self._hold_until_s = time.monotonic() + SHORTAGE_S

    # The launcher's thread.

    def _pass_on(self, process: object, listener: Listener, message: Any) -> None:
        """Pass on a message of a task's process; the next standby is started once the body has begun."""
        try:
            listener(message)
        finally:
            if isinstance(message, (BodyStarted, ValueArrived, ChildRefused, ChildExited)):
                with self._changed:
                    if self._running.pop(process, None) is not None:
                        self._check_soon()
                    if isinstance(message, (BodyStarted, ValueArrived)):
                        self._running[process] = None

    def _hear(self, standby: Standby, message: Any) -> None:
        """Handle a message of a standby, up to its `Accepted`."""
        with self._changed:
            record, now = self._record(standby.kind), time.monotonic()
            if isinstance(message, Accepted):
                # Not before: a standby may die of its imports, or when it is given a task.
                record.take_success()
                return
            if isinstance(message, ChildStarted):
                standby.pid = message.pid
            elif isinstance(message, Warmed):
                # With a problem the standby ends by itself; a task that was given to it gets a fresh process.
                standby.enter(Stage.ENDING if message.problem else Stage.WAITING)
                record.take_imports(message, standby.spec.modules)
            elif isinstance(message, ChildRefused):
                if standby.pid is None:
                    # Without a process, no end will be reported.
                    self._take_refusal(message.error)
                    self._drop(standby)
                else:
                    record.take_failure(standby, now, str(message.error))
                    self._end(standby)
            elif isinstance(message, ChildExited):
                if standby.stage is not Stage.ENDING:
                    self._take_end(standby, message, now)
                self._drop(standby)
            self._wake()

    def _drop(self, standby: Standby) -> None:
        # A standby that was given a task is not in the list.
        if standby in self._standbys:
            self._standbys.remove(standby)
            standby.leave()

    def _take_end(self, standby: Standby, message: ChildExited, now: float) -> None:
        """Record the end of a standby that was not asked to end."""
        unsuited, why = message.code == UNSUITED_CODE, f"it ended with {message.code}"
        if unsuited:
            why = "files of modules, sys.path or the working folder had changed after its imports"
        counts = self._record(standby.kind).take_failure(standby, now, why, message.stderr_tail)
        if unsuited and counts:
            # Other standbys of the kind have imported the same modules.
            for other in self._standbys:
                if other.kind == standby.kind:
                    self._end(other)


def standby_pool() -> StandbyPool:
    """Return the only pool of this Python process; a fork has an empty pool of its own."""
    return PROCESS_RESOURCES.get("standby pool", _make_pool)


def _make_pool() -> StandbyPool:
    pool = StandbyPool(process_launcher())
    # Called before the launcher's function, which was registered first: the launcher must get no new starts.
    atexit.register(pool.shut_down)
    return pool
