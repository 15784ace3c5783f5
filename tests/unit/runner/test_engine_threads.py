from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from prefect_gpu.runner.engine_threads import NAME, EngineThreads

PATIENCE_S = 60.0


@pytest.fixture
def engines() -> Iterator[EngineThreads]:
    made = EngineThreads()
    yield made
    made.close(wait=True)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_what_a_call_returns_or_raises_is_the_future_s(engines: EngineThreads) -> None:
    def fail() -> None:
        raise KeyboardInterrupt("inside")

    assert (
        engines.submit(lambda: threading.current_thread().name).result(PATIENCE_S).startswith(NAME)
    )
    assert isinstance(engines.submit(fail).exception(PATIENCE_S), KeyboardInterrupt)


def test_a_thread_is_gone_when_its_call_is_over(engines: EngineThreads) -> None:
    threads = []
    for _ in range(3):
        engines.submit(lambda: threads.append(threading.current_thread())).result(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(set(threads)) == 3
    assert engine_threads() == []


def test_none_waits_for_another(engines: EngineThreads) -> None:
    all_there = threading.Barrier(100)
    futures = [engines.submit(lambda: all_there.wait(PATIENCE_S)) for _ in range(100)]
    assert sorted(future.result(PATIENCE_S) for future in futures) == list(range(100))


def test_a_future_that_was_handed_out_cannot_be_cancelled(engines: EngineThreads) -> None:
    go = threading.Event()
    future = engines.submit(lambda: go.wait(PATIENCE_S))
    assert not future.cancel()
    go.set()
    assert future.result(PATIENCE_S)


def test_closed_it_takes_no_more(engines: EngineThreads) -> None:
    engines.close(wait=False)
    with pytest.raises(RuntimeError, match="takes no more tasks"):
        engines.submit(lambda: None)


def test_closing_waits_for_what_runs_if_it_is_to(engines: EngineThreads) -> None:
    go = threading.Event()
    future = engines.submit(lambda: go.wait(PATIENCE_S))
    engines.close(wait=False)
    assert not future.done()
    go.set()
    engines.close(wait=True)
    assert future.done()
    assert engine_threads() == []
