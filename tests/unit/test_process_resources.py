"""What a process has one of, and what a fork of the process does with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import CapacityError
from prefect_gpu.process_resources import (
    ProcessResources,
    read_own_bytes,
    run_uninterrupted,
    start_thread,
)

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Held:
    """A shared object that says what became of it."""

    reset = False

    def begin_anew(self) -> None:
        self.reset = True


def in_fork(check: Callable[[], bool]) -> bool:
    """Return what a function returns in a fork of this process."""
    # Python 3.12 warns of forks of a process with several threads; the product must survive them.
    pid = os.fork()
    if pid == 0:
        # The fork has the test's frames: it must never return from here.
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_callers_of_one_key_share_one_object() -> None:
    resources = ProcessResources()
    first = resources.get("key", Held)
    assert resources.get("key", Held) is first
    assert resources.get("another key", Held) is not first


def test_one_that_cannot_be_made_is_tried_again() -> None:
    resources = ProcessResources()
    with pytest.raises(ZeroDivisionError):
        resources.get("key", lambda: 1 // 0)
    assert resources.get("key", lambda: 5) == 5


def test_one_is_made_from_another() -> None:
    resources = ProcessResources()
    outer, inner = resources.get("outer", lambda: (Held(), resources.get("inner", Held)))
    assert resources.get("inner", Held) is inner
    assert outer is not inner


@contextmanager
def slow(resources: ProcessResources) -> Iterator[None]:
    """Have a thread make the object of the key "slow" until the end of the block."""
    making, made = threading.Event(), threading.Event()

    def make() -> int:
        making.set()
        assert made.wait(30)
        return 1

    thread = start_thread(lambda: resources.get("slow", make), "a test's")
    assert making.wait(30)
    try:
        yield
    finally:
        made.set()
        thread.join(30)


def test_one_that_takes_long_to_make_holds_up_no_other() -> None:
    resources, got = ProcessResources(), threading.Event()
    with slow(resources):
        quick = start_thread(lambda: resources.get("quick", Held) and got.set(), "another")
        assert got.wait(30)
    quick.join(30)


def test_a_fork_shares_no_object_with_its_parent() -> None:
    resources = ProcessResources()
    ours = resources.get("key", Held)
    assert in_fork(lambda: resources.get("key", Held) is not ours)
    assert resources.get("key", Held) is ours


def test_what_is_held_in_a_fork_is_reset_there_alone() -> None:
    resources = ProcessResources()
    held = Held()
    resources.after_fork(held, Held.begin_anew)
    assert in_fork(lambda: held.reset)
    assert not held.reset


def test_a_reset_that_fails_in_a_fork_does_not_keep_others_from_theirs() -> None:
    resources = ProcessResources()
    broken, held = Held(), Held()
    resources.after_fork(broken, lambda owner: owner.no_such_name)  # type: ignore[attr-defined]
    resources.after_fork(held, Held.begin_anew)
    assert in_fork(lambda: held.reset)


def test_a_lock_that_a_thread_holds_at_the_fork_is_free_there() -> None:
    resources = ProcessResources()
    with slow(resources):
        assert in_fork(lambda: resources.get("slow", lambda: 2) == 2)


def test_a_fork_releases_no_lock_of_another_threads_fork() -> None:
    resources, held = ProcessResources(), Held()
    locks = {name: threading.Lock() for name in ("one_0", "other_0")}
    resources.quiet_at_fork(held, lambda owner: locks[threading.current_thread().name])
    with ThreadPoolExecutor(1, "one") as one, ThreadPoolExecutor(1, "other") as other:
        one.submit(resources._before_fork).result()
        other.submit(resources._before_fork).result()
        one.submit(resources._after_fork).result()
        assert [lock.locked() for lock in locks.values()] == [False, True]
        other.submit(resources._after_fork).result()
        assert not locks["other_0"].locked()


@pytest.fixture
def no_threads(monkeypatch: Patch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_an_error_of_a_thread_that_cannot_start_names_the_limit(no_threads: None) -> None:
    with pytest.raises(CapacityError, match=r"can't start new thread.*threads run.*ulimit -u"):
        start_thread(lambda: None, "a test's")


def test_without_proc_a_size_is_unknown(monkeypatch: Patch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert read_own_bytes("VmHWM") == 0


def test_a_call_goes_on_to_its_end_though_ctrl_c_is_pressed() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        begun.set()
        go_on.wait(DEADLOCK_S)
        ended.append("it")

    def press() -> None:
        main = threading.main_thread().ident
        assert main is not None
        begun.wait(DEADLOCK_S)
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            # For the main thread to notice.
            time.sleep(0.01)
        go_on.set()

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(work, "prefect-gpu-test")
    presser.join()
    assert ended == ["it"]


def test_a_call_for_which_no_thread_can_be_started_is_made_at_once(no_threads: None) -> None:
    ended: list[str] = []
    run_uninterrupted(lambda: ended.append("it"), "prefect-gpu-test")
    assert ended == ["it"]
