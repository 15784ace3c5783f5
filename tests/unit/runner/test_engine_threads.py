from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from prefect_gpu.runner.engine_threads import NAME, start_engine

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
