"""Shared objects of a process, its one fork hook, and the start of its threads.

The broker, the launcher and the pools exist once in a process. A fork of the process begins without them.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar, cast

from prefect_gpu.errors import CapacityError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Lock(Protocol):
    """A lock or a reentrant lock."""

    def acquire(self) -> bool:
        """Wait for the lock."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...


class ProcessResources:
    """The shared objects of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Locks by key, held while the key's object is made: a broker may wait for its driver, other keys must not.
        self._making: dict[Hashable, threading.RLock] = {}
        self._shared: dict[Hashable, Any] = {}
        #: Resets in a fork of the process, by object. Objects are not kept alive.
        self._in_fork: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = (
            weakref.WeakKeyDictionary()
        )
        #: Functions that return the lock to hold during a fork, by object.
        self._quiet: weakref.WeakKeyDictionary[Any, Callable[[Any], Lock]] = (
            weakref.WeakKeyDictionary()
        )
        #: Locks that the current fork holds.
        self._held: list[Lock] = []
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._begin_anew,
        )

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of a key; make it if needed, under a lock of the key.

        `make` may ask for the object of another key. After its exception the next caller tries again.
        """
        with self._lock:
            making = self._making.setdefault(key, threading.RLock())
        with making:
            found = self._shared.get(key)
            if found is None:
                found = self._shared[key] = make()
            return cast("T", found)

    def quiet_at_fork(self, owner: T, lock: Callable[[T], Lock]) -> None:
        """Hold a lock of an object during each fork of this process.

        Args:
            owner: The object, which is not kept alive. Its reset, see `after_fork`, makes a new lock.
            lock: Returns the lock. It must not refer to `owner`. Code under the lock ends soon and takes no other of
                these locks.
        """
        self._quiet[owner] = lock

    def _before_fork(self) -> None:
        for owner, lock in list(self._quiet.items()):
            taken = lock(owner)
            taken.acquire()
            self._held.append(taken)

    def _after_fork(self) -> None:
        while self._held:
            self._held.pop().release()

    def after_fork(self, owner: T, reset: Callable[[T], object]) -> None:
        """Call `reset(owner)` in every fork of this process, for as long as `owner` lives.

        Args:
            owner: An object with threads, locks, descriptors or processes of the parent. It is not kept alive.
            reset: A function of the owner's class, not a bound method: it must not refer to `owner`. Locks of
                `owner` may be held by threads that do not exist in the fork.
        """
        self._in_fork[owner] = reset

    def _begin_anew(self) -> None:
        self._held.clear()
        self._lock = threading.Lock()
        self._making.clear()
        for owner, reset in list(self._in_fork.items()):
            try:
                reset(owner)
            except Exception:
                # The edge of a process: the other objects must be reset too.
                logger.exception("%r cannot begin anew in a fork", type(owner).__name__)
        self._shared.clear()


#: The resources of this process.
PROCESS_RESOURCES = ProcessResources()


def read_status(pid: int | str, name: str) -> str:
    """Return a field of `/proc/PID/status`, as in "12 kB"; empty: the system does not show it (macOS)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            return next((value.strip() for key, _, value in lines if key == name), "")
    except OSError:
        return ""


def read_own_bytes(name: str) -> int:
    """Return a size of this process from `/proc/self/status`, in bytes; 0: unknown."""
    return int(read_status("self", name).removesuffix(" kB") or 0) * 1024


def start_thread(target: Callable[[], object], name: str, daemon: bool = True) -> threading.Thread:
    """Start a thread and return it. The interpreter does not wait for a `daemon` at its exit.

    Raises:
        CapacityError: The system starts no more threads. The text names the limit; a later call may succeed.
    """
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise CapacityError(
            f"the thread {name!r} could not be started ({error}); {threading.active_count()} threads run in "
            f"this process, and {describe_process_limit()}; raise the limit or run fewer tasks at a time"
        ) from error
    return thread


def run_uninterrupted(call: Callable[[], object], name: str) -> None:
    """Run a call that ends soon to its end, on a thread of its own, also if Ctrl-C is pressed meanwhile.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. The call has ended.
    """
    claim, done = threading.Lock(), threading.Event()

    def run() -> None:
        # An interrupted start is repeated: it may have started a thread or not.
        if claim.acquire(blocking=False):
            try:
                call()
            finally:
                done.set()

    started = False
    interrupt: KeyboardInterrupt | None = None
    while not done.is_set():
        try:
            if not started:
                start_thread(run, name)
                started = True
            # Before Python 3.13 an interrupted `Thread.join` considers the thread ended.
            done.wait()
        except CapacityError:
            started = True
            run()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def describe_process_limit() -> str:
    """Return a clause that names the user's limit of processes and threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return "the user's limit of processes and threads (ulimit -u) is not set: a container may have one"
    return f"the user's limit of processes and threads (ulimit -u) is {soft}"
