"""Objects that exist once in a process, its one fork hook, and the start of its threads.

The broker, the launcher and the pools are such objects. A fork of the process begins without them.
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
    """A `threading.Lock` or `RLock`."""

    def acquire(self) -> bool:
        """Wait for the lock."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...


class ProcessResources:
    """The objects that exist once in a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Locks by key, held while the key's object is made: a new broker may wait for its driver, other keys must not.
        self._making: dict[Hashable, threading.RLock] = {}
        self._shared: dict[Hashable, Any] = {}
        #: Functions that reset an object in a fork, by object. Objects are not kept alive.
        self._in_fork: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = (
            weakref.WeakKeyDictionary()
        )
        #: Functions that return the lock to hold during a fork, by object.
        self._quiet: weakref.WeakKeyDictionary[Any, Callable[[Any], Lock]] = (
            weakref.WeakKeyDictionary()
        )
        #: `locks`: the locks that the thread's current fork holds. Two threads may fork at once.
        self._held = threading.local()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._begin_anew,
        )

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a key's object; the first caller makes the object. If `make` raises, the next caller tries again."""
        # Each key has a lock of its own: `make` may ask for the object of another key.
        with self._lock:
            making = self._making.setdefault(key, threading.RLock())
        with making:
            found = self._shared.get(key)
            if found is None:
                found = self._shared[key] = make()
            return cast("T", found)

    def quiet_at_fork(self, owner: T, lock: Callable[[T], Lock]) -> None:
        """Hold a lock of `owner`, which `lock(owner)` returns, during each fork of this process.

        `owner` is not kept alive, so `lock` must not refer to `owner`. The reset in the fork (`after_fork`) makes a new
        lock. Code under the lock must end soon, and take no other lock that is held during forks.
        """
        self._quiet[owner] = lock

    def _before_fork(self) -> None:
        held = self._held.locks = list[Lock]()
        for owner, lock in list(self._quiet.items()):
            taken = lock(owner)
            taken.acquire()
            held.append(taken)

    def _after_fork(self) -> None:
        while self._held.locks:
            self._held.locks.pop().release()

    def after_fork(self, owner: T, reset: Callable[[T], object]) -> None:
        """Call `reset(owner)` in each fork of this process: for objects with threads, locks, descriptors or processes.

        `owner` is not kept alive, so `reset` must not refer to `owner`: it is a function of the class, not a bound
        method. Locks of `owner` may be held by threads that do not exist in the fork.
        """
        self._in_fork[owner] = reset

    def _begin_anew(self) -> None:
        self._held = threading.local()
        self._lock = threading.Lock()
        self._making.clear()
        for owner, reset in list(self._in_fork.items()):
            try:
                reset(owner)
            except Exception:
                # The other objects must be reset all the same.
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

    Raises `CapacityError` if the system starts no more threads. The text names the limit; a later call may succeed.
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
    """Run a short call to its end on another thread; if Ctrl-C is pressed meanwhile, raise `KeyboardInterrupt` then."""
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
    """Return a clause for error messages with the user's limit of processes and threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return "the user's limit of processes and threads (ulimit -u) is not set: a container may have one"
    return f"the user's limit of processes and threads (ulimit -u) is {soft}"
