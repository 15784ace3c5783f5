"""What a flow's process keeps of GPU tasks that are over while the flow goes on: nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.runner import attempt
from prefect_gpu.runner import engine_threads as engines
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

PATIENCE_S = 240.0
TASKS = 12


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_attempts_and_threads_are_gone_while_the_flow_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[attempt.Attempt]] = []
    real = attempt.Attempt.__init__

    def note(self: attempt.Attempt, *args: object, **kwargs: object) -> None:
        made.append(weakref.ref(self))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(attempt.Attempt, "__init__", note)

    @task(tags=gpu(memory="64MiB", framework="none"))
    def work(index: int) -> int:
        return index

    @flow(task_runner=GPUTaskRunner(devices=api.TWO, start_method="auto"))
    def many() -> tuple[list[int], bool, bool]:
        # All at once: those that came first must not wait for one that comes later to be let go.
        futures = work.map(range(TASKS))
        results = [future.result() for future in futures]

        def few_are_left() -> bool:
            gc.collect()
            # The last to end is let go with the next, or with the flow.
            return sum(ref() is not None for ref in made) <= 2

        def no_thread_is_left() -> bool:
            return not any(t.name.startswith(engines.NAME) for t in threading.enumerate())

        return results, eventually(few_are_left), eventually(no_thread_is_left)

    assert many() == (list(range(TASKS)), True, True)
    assert len(made) == TASKS


def test_what_is_left_of_an_attempt_has_neither_arguments_nor_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Threads that wait have the last attempt in a local variable, and a report may come long after its task run.
    made: list[attempt.Attempt] = []
    real = attempt.Attempt.__init__

    def note(self: attempt.Attempt, *args: object, **kwargs: object) -> None:
        made.append(self)
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(attempt.Attempt, "__init__", note)
    large: list[weakref.ref[np.ndarray[Any, Any]]] = []

    @task(tags=gpu(memory="64MiB", framework="none"))
    def double(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return numbers * 2

    @flow(task_runner=GPUTaskRunner(devices=api.TWO))
    def doubles() -> None:
        # Prefect keeps the contexts of the task run that has started its services.
        double.submit(np.zeros(1)).result()
        given = np.ones(1 << 20)
        value = double.submit(given).result()
        assert value[0] == 2
        large.extend((weakref.ref(given), weakref.ref(value)))

    doubles()

    def are_gone() -> bool:
        gc.collect()
        return not any(ref() is not None for ref in large)

    assert len(made) == 2 and len(large) == 2
    assert eventually(are_gone)
