"""Processes that wait ahead of their tasks: who gets one, how many there are, when they go.

One pool serves all runners of a Python process. A runner announces each task as it is submitted; the
announcement is the task's `Launcher` from then on. A standby is used once. It does not decide how
many there should be (`scheduling.standbys`), nor what one imports (`kind`), nor whether a kind is worth another
one or a device (`kinds`), nor which of them suits a task (`suiting`), nor which device one starts its framework
on and who takes it there (`heater`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.processes.heater import Heater, Lent
from prefect_gpu.processes.interpreter import (
    count_cores,
    environment_with,
    import_paths,
    interpreter_flags,
    working_folder,
)
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.kinds import Kinds, KindState
from prefect_gpu.processes.launcher import ProcessLauncher, process_launcher
from prefect_gpu.processes.messages import (
    Accepted,
    BodyStarted,
    Heat,
    Heated,
    Late,
    Warmed,
)
from prefect_gpu.processes.spec import (
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
from prefect_gpu.processes.suiting import Changes, choose_standby, fit_hot
from prefect_gpu.processes.waiting import Owner, Standby, serials
from prefect_gpu.scheduling.standbys import Machine, StandbyPlan, plan_standbys
from prefect_gpu.units import GIB

logger = logging.getLogger(__name__)

#: Bytes of the machine's memory that standbys leave free.
RESERVE_BYTES = 2 * GIB

#: Seconds between two looks at the machine's memory while there are standbys.
LOOK_S = 1.0

#: Seconds that imports may take. TensorFlow takes 11 s from a cold disk (measured); thirty times
#: that is a hang. A task that was given such a process hangs as it would in a fresh one.
WARMING_S = 300.0

#: Seconds that a task must have waited for the machine's memory before standbys make room: every
#: request waits for a moment.
PATIENCE_S = 0.5

#: Seconds without new standbys after they had to make room for a task.
MAKING_ROOM_S = 10.0

#: Seconds that a framework may take to start on a device: 0.2 to 0.4 measured on an H200, seconds on
#: a machine with many devices and no persistence daemon.
HEATING_S = 60.0

#: Seconds until a device is asked for again where there was none for a hot standby, or one had to go.
COOL_S = 5.0

#: Seconds that `close` waits for processes that were killed.
_ENDING_S = 5.0


class Announcement:
    """A task that was submitted: the `Launcher` of all its processes.

    From then on, until its first process starts or it is retracted, a standby is kept for it.
    """

    def __init__(self, pool: StandbyPool, kind: Kind) -> None:
        self._pool = pool
        self.kind = kind
        #: In the order of arrival.
        self.serial = next(serials)

    def start(self, spec: LaunchSpec, listener: Listener) -> ChildHandle:
        """Give the task to a standby that suits it, or start a process for it."""
        return self._pool.start(self.kind, spec, listener, self)

    def retract(self) -> None:
        """Say that it needs no process any more; without effect once it had one."""
        self._pool.retract(self)


class StandbyPool:
    """Keeps standbys and hands them out. Safe to use from several threads.

    Args:
        launcher: Starts them.
        read_available: Gives the bytes of the machine's memory that new processes could use.
        reserve_bytes: Of those, to leave free.
        cores: Of this process.
    """

    def __init__(
        self,
        launcher: ProcessLauncher,
        read_available: Callable[[], int] = read_host_available_bytes,
        reserve_bytes: int = RESERVE_BYTES,
        cores: int | None = None,
    ) -> None:
        self._launcher = launcher
        self._read_available = read_available
        self._reserve_bytes = reserve_bytes
        self._cores = cores or count_cores()
        self._reset()
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(itself))

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._dirty = False
        self._shut = False
        self._thread: threading.Thread | None = None
        self._owners: dict[object, Owner] = {}
        self._announced: dict[Announcement, None] = {}
        self._standbys: list[Standby] = []
        #: Those that were given a task whose body has not begun.
        self._given: set[Standby] = set()
        self._kinds = Kinds()
        #: Monotonic seconds since when a task has waited for the machine's memory; `None`: none does.
        self._starved_since_s: float | None = None
        #: Monotonic seconds until which none is started.
        self._hold_until_s = 0.0

    # Any thread.

    def open(
        self,
        owner: object,
        most: int,
        promised_bytes: Callable[[], int] = lambda: 0,
        wants_room: Callable[[], bool] = lambda: False,
        heater: Heater | None = None,
    ) -> None:
        """Say that a runner may have standbys; again: without effect.

        Args:
            owner: The runner, until `close`.
            most: Standbys at most. With several runners the largest number counts.
            promised_bytes: Gives the host memory that was promised to processes of its tasks and that
                they have not taken yet.
            wants_room: Tells whether a task of its waits for the machine's own memory.
            heater: Lends its devices to hot standbys; `None`: it wants none.
        """
        with self._changed:
            if not self._shut:
                self._owners.setdefault(owner, Owner(most, promised_bytes, wants_room, heater))

    def close(self, owner: object) -> None:
        """Say that a runner has ended. With the last one all standbys end."""
        with self._changed:
            self._owners.pop(owner, None)
            if self._owners:
                self._end_unheated()
                return
            self._announced.clear()
            self._end_all()
            # A kind that was given up may have a better time with the next runner.
            self._kinds.forget()
            deadline = time.monotonic() + _ENDING_S
            while self._standbys and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def shut_down(self) -> None:
        """End all, for good: the interpreter is about to end."""
        with self._changed:
            self._shut = True
            self._owners.clear()
            self._announced.clear()
            self._end_all()
            self._wake()

    def announce(self, kind: Kind, heater: Heater | None = None) -> Announcement:
        """Say that a task of a kind will come.

        Args:
            kind: What can be done ahead for it.
            heater: Lends the devices that the task may have; `None`: nothing is started there.
        """
        announcement = Announcement(self, kind)
        with self._changed:
            self._announced[announcement] = None
            if heater is not None and kind.hot:
                self._kinds.of(kind).heater = heater
            self._look_soon()
        return announcement

    def retract(self, announcement: Announcement) -> None:
        """See `Announcement.retract`."""
        with self._changed:
            if announcement in self._announced:
                del self._announced[announcement]
                self._wake()

    def start(
        self,
        kind: Kind,
        spec: LaunchSpec,
        listener: Listener,
        announcement: Announcement | None = None,
    ) -> ChildHandle:
        """Start a task's process: a standby that suits it, or a fresh one.

        Args:
            kind: What could be done ahead for it.
            spec: Of its process.
            listener: Hears it.
            announcement: Of the task, which is kept no standby for from now on.
        """
        environment = environment_with(spec.environment)
        with self._changed:
            if announcement is not None:
                self._announced.pop(announcement, None)
            if self._owners:
                self._kinds.use(kind)
            found = self._take_kept(spec.standby, kind, environment) if spec.standby else None
            found = found or self._choose(kind, environment)
            if found is not None:
                standby, changes = found
                self._standbys.remove(standby)
                assert standby.handle is not None
                hot = ""
                if standby.lent is not None:
                    hot = standby.kind.hot
                    # Another may have its place.
                    self._state_of(standby).cool_until_s = 0.0
                late = Late(changes, spec.cwd, spec.argv, spec.sys_path, spec.task_name, hot)
                if standby.ready:
                    # The next one is made once this one's body has begun: it would be in its way.
                    self._given.add(standby)
                else:
                    self._look_soon()
                return standby.handle.give(
                    spec, late, lambda message: self._pass_on(standby, listener, message)
                )
            self._look_soon()
        return self._launcher.start(spec, listener)

    @property
    def ready(self) -> int:
        """Standbys that wait for a task now."""
        with self._changed:
            return sum(s.ready for s in self._standbys)

    @property
    def hot(self) -> int:
        """Standbys whose framework has started, and that wait for a task."""
        with self._changed:
            return sum(s.hot and not s.ended for s in self._standbys)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all standbys."""
        with self._changed:
            return tuple(s.pid for s in self._standbys if s.pid is not None)

    # With the lock.

    def _take_kept(
        self, standby_id: str, kind: Kind, environment: dict[str, str]
    ) -> tuple[Standby, Changes] | None:
        """Find the hot standby that is kept for a task; one that does not suit it ends."""
        standby = next((s for s in self._standbys if s.id == standby_id), None)
        if standby is None or standby.ended:
            return None
        changes = fit_hot(standby, kind, environment, tuple(interpreter_flags()))
        if changes is None:
            self._end(standby)
            self._state_of(standby).take_hot_misfit()
            return None
        return standby, changes

    def _choose(self, kind: Kind, environment: dict[str, str]) -> tuple[Standby, Changes] | None:
        best, misfits = choose_standby(
            self._standbys, kind, environment, tuple(interpreter_flags())
        )
        for standby in misfits:
            self._end(standby)
            self._state_of(standby).take_misfit()
        return best

    def _look_soon(self) -> None:
        if self._shut or not self._owners:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="prefect-gpu-standby", daemon=True
            )
            self._thread.start()
        self._wake()

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _end_all(self) -> None:
        for standby in self._standbys:
            self._end(standby)

    def _end_unheated(self) -> None:
        """End what holds devices that no runner has any more."""
        self._kinds.keep_heaters([owner.heater for owner in self._owners.values()])
        for standby in self._standbys:
            if standby.heating and self._state_of(standby).heater is None:
                self._end(standby)
        self._wake()

    def _end(self, standby: Standby) -> None:
        if not standby.ended and standby.handle is not None:
            standby.ended = True
            standby.handle.kill()

    def _state_of(self, standby: Standby) -> KindState:
        return self._kinds.of(standby.kind)

    # The pool's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._dirty:
                    # While nothing is wanted there is nothing to look at.
                    busy = bool(self._standbys or self._announced or self._given)
                    self._changed.wait(LOOK_S if busy else None)
                self._dirty = False
                if self._shut:
                    return
                owners = tuple(self._owners.values())
            try:
                self._step(owners)
            except Exception:
                logger.exception("the keeper of standby processes met an error; it goes on")

    def _step(self, owners: tuple[Owner, ...]) -> None:
        available_bytes = self._read_available()
        promised_bytes = sum(owner.promised_bytes() for owner in owners)
        wants_room = any(owner.wants_room() for owner in owners)
        now = time.monotonic()
        with self._changed:
            if self._shut or not self._owners:
                return
            for standby in self._standbys:
                if not standby.ready and now - standby.started_s > WARMING_S:
                    self._state_of(standby).take_death(
                        standby.spec.modules, f"it imported for more than {WARMING_S:g} s"
                    )
                    self._end(standby)
                since_s = standby.heating_since_s
                if since_s is not None and now - since_s > HEATING_S and not standby.ended:
                    self._end(standby)
                    self._take_cold(standby, f"it had not started after {HEATING_S:g} s")
            self._starved_since_s = (self._starved_since_s or now) if wants_room else None
            if self._starved_since_s is not None and now - self._starved_since_s >= PATIENCE_S:
                self._hold_until_s = now + MAKING_ROOM_S
                self._end_all()
            if now < self._hold_until_s:
                return
            machine = Machine(
                available_bytes,
                promised_bytes,
                self._reserve_bytes,
                self._cores,
                max(owner.most for owner in self._owners.values()),
            )
            demands = self._kinds.demands([a.kind for a in self._announced], self._standbys)
            self._carry_out(plan_standbys(demands, machine))
            heated = self._kinds.choose_to_heat(self._standbys, now)
            for standby, _, _ in heated:
                standby.heating = True
        for standby, heater, avoid in heated:
            self._heat(standby, heater, avoid)

    def _heat(self, standby: Standby, heater: Heater, avoid: frozenset[str]) -> None:
        """Have a standby start its framework, without the lock: a device is asked for."""
        assert standby.pid is not None and standby.handle is not None
        lent: Lent | None = None
        try:
            lent = heater.lend(
                standby.id, standby.kind, standby.pid, lambda: self._give_up(standby), avoid
            )
        except Exception:
            logger.debug("no device for a hot standby", exc_info=True)
        with self._changed:
            if lent is None:
                standby.heating = False
                self._state_of(standby).cool_until_s = time.monotonic() + COOL_S
                return
            standby.lent = lent
            if standby not in self._standbys:
                # It has a task meanwhile, or died: it has not touched the device.
                lent.end()
                return
            if standby.ended:
                return
            standby.heating_since_s = time.monotonic()
            standby.handle.answer(Heat(standby.kind.hot, lent.environment))
            # What is given to it now it takes once its framework has started.
            lent.offer()

    def _give_up(self, standby: Standby) -> None:
        """A device's memory is needed: from the thread that hands out devices, which holds no lock."""
        with self._changed:
            self._state_of(standby).cool_until_s = time.monotonic() + COOL_S
            self._end(standby)

    def _take_cold(self, standby: Standby, problem: str) -> None:
        """Its framework does not start on its device."""
        standby.ended = True
        uuid = standby.lent.device_uuid if standby.lent is not None else ""
        self._state_of(standby).take_cold(uuid, problem)

    def _carry_out(self, plan: StandbyPlan) -> None:
        for kind in plan.ends:
            own = [s for s in self._standbys if s.kind == kind and not s.ended]
            if own:
                self._end(min(own, key=lambda s: (s.heating, s.ready, -s.serial)))
        for kind in plan.starts:
            assert isinstance(kind, Kind)
            self._warm(kind)

    def _warm(self, kind: Kind) -> None:
        spec = WarmSpec(
            modules=self._kinds.of(kind).modules,
            environment=kind.environment_of(os.environ),
            cwd=working_folder(),
            argv=tuple(sys.argv),
            sys_path=import_paths(),
        )
        standby = Standby(kind, spec, tuple(interpreter_flags()), time.monotonic())
        self._standbys.append(standby)
        standby.handle = self._launcher.start(spec, lambda message: self._hear(standby, message))

    # The launcher's thread.

    def _pass_on(self, standby: Standby, listener: Listener, message: Any) -> None:
        try:
            listener(message)
        finally:
            if isinstance(message, (BodyStarted, ValueArrived, ChildRefused, ChildExited)):
                with self._changed:
                    if standby in self._given:
                        self._given.remove(standby)
                        self._look_soon()

    def _hear(self, standby: Standby, message: Any) -> None:
        with self._changed:
            if isinstance(message, Accepted):
                # Not that it has imported, nor that it was given a task: some die of that. How many
                # there are it does not change.
                self._state_of(standby).deaths = 0
                return
            if isinstance(message, ChildStarted):
                standby.pid = message.pid
            elif isinstance(message, Warmed):
                self._take_warmed(standby, message)
            elif isinstance(message, Heated):
                standby.heating_since_s = None
                standby.hot = not message.problem
                if message.problem:
                    self._take_cold(standby, message.problem)
            elif isinstance(message, ChildRefused):
                self._state_of(standby).take_death(standby.spec.modules, str(message.error))
                self._end(standby)
                if standby.pid is None:
                    # No process came of it, so none will be heard to end.
                    self._drop(standby)
            elif isinstance(message, ChildExited):
                if not standby.ended and standby.heating_since_s is not None:
                    self._take_cold(standby, f"it ended with {message.code} as it started")
                elif not standby.ended:
                    self._take_end(standby, message)
                self._drop(standby)
                if standby.lent is not None:
                    standby.lent.end()
            self._wake()

    def _drop(self, standby: Standby) -> None:
        # One that was given a task is in the list no more.
        if standby in self._standbys:
            self._standbys.remove(standby)

    def _take_warmed(self, standby: Standby, warmed: Warmed) -> None:
        if warmed.problem:
            # It ends by itself; a task that was given to it goes to a process of its own.
            standby.ended = True
        else:
            standby.ready = True
        self._state_of(standby).take_warmed(warmed, standby.spec.modules)

    def _take_end(self, standby: Standby, message: ChildExited) -> None:
        """One ended that was not asked to."""
        how = f"it ended with {message.code}"
        if message.code == UNSUITED_CODE:
            state = self._state_of(standby)
            if standby.started_s <= state.unsuited_s:
                # By the same change as the one before it.
                return
            state.unsuited_s = time.monotonic()
            for other in self._standbys:
                if other.kind == standby.kind:
                    self._end(other)
            how = (
                "what it had imported was not what its task would import: files of modules, sys.path or "
                "the working folder had changed"
            )
        self._state_of(standby).take_death(standby.spec.modules, how, message.stderr_tail)


def _forget(pool: weakref.ref[StandbyPool]) -> None:
    forked = pool()
    if forked is not None:
        # Its processes, announcements and thread are the parent's.
        forked._reset()


_lock = threading.Lock()
_pool: StandbyPool | None = None


def standby_pool() -> StandbyPool:
    """Give the one pool of this Python process; in a fork of it, an empty one."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = StandbyPool(process_launcher())
            # Before the launcher's, which was registered first: it must not be asked for new ones.
            atexit.register(_pool.shut_down)
        return _pool


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)
