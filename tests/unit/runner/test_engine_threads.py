from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from prefect.futures import as_completed, wait
from prefect.states import Completed

from prefect_gpu.runner.engine_threads import BODY_WAITS, NAME, AwaitedFuture, start_engine

PATIENCE_S = 60.0

_numbers = itertools.count()


def start(call: Callable[[], Any]) -> Future[Any]:
    return start_engine(call, next(_numbers))


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_what_a_call_returns_or_raises_is_the_future_s() -> None:
    def fail() -> None:
        raise KeyboardInterrupt("inside")

    assert start(lambda: threading.current_thread().name).result(PATIENCE_S).startswith(NAME)
    assert isinstance(start(fail).exception(PATIENCE_S), KeyboardInterrupt)


def test_a_thread_is_gone_when_its_call_is_over() -> None:
    threads = []
    for _ in range(3):
        start(lambda: threads.append(threading.current_thread())).result(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(set(threads)) == 3
    assert engine_threads() == []


def test_none_waits_for_another() -> None:
    all_there = threading.Barrier(100)
    futures = [start(lambda: all_there.wait(PATIENCE_S)) for _ in range(100)]
    assert sorted(future.result(PATIENCE_S) for future in futures) == list(range(100))


def test_a_future_that_was_handed_out_cannot_be_cancelled() -> None:
    go = threading.Event()
    future = start(lambda: go.wait(PATIENCE_S))
    assert not future.cancel()
    go.set()
    assert future.result(PATIENCE_S)


class Watched(Future[Any]):
    """The future of an engine; it notes whether its body is seen to wait each time that it is asked for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def result(self, timeout: float | None = None) -> Any:
        self.seen.append(BODY_WAITS.since() is not None)
        return super().result(timeout)


def test_a_body_waits_while_it_is_in_result_or_wait() -> None:
    inner = Watched()
    future = AwaitedFuture(uuid4(), inner)
    future.wait(timeout=0.0)
    wait([future], timeout=0.0)
    inner.set_result(Completed(data=1))
    assert future.result() == 1
    assert (inner.seen, BODY_WAITS.since()) == ([True, True], None)


def test_a_body_waits_while_it_iterates_over_what_completes() -> None:
    first, second = Future[Any](), Future[Any]()
    futures = [AwaitedFuture(uuid4(), first), AwaitedFuture(uuid4(), second)]
    first.set_result(Completed(data=1))
    completed = as_completed(futures)
    assert next(completed) is futures[0]
    assert BODY_WAITS.since() is not None
    second.set_result(Completed(data=2))
    assert [*completed] == futures[1:]
    assert BODY_WAITS.since() is None


def test_a_task_that_waits_for_another_is_no_body_that_waits() -> None:
    inner = Watched()
    future = AwaitedFuture(uuid4(), inner)
    start(lambda: future.wait(timeout=0.0)).result(PATIENCE_S)
    assert inner.seen == [False]
    with BODY_WAITS.counted(), BODY_WAITS.counted():
        since_s = BODY_WAITS.since()
    assert since_s is not None and BODY_WAITS.since() is None
