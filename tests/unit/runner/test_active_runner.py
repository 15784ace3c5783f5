"""A runner at work: what its threads share."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prefect import task
from prefect.states import Completed

from prefect_gpu import GPUTaskRunner
from prefect_gpu.devices.spec import parse_spec
from prefect_gpu.errors import CapacityError
from prefect_gpu.runner import active_runner, submission
from prefect_gpu.runner.active_runner import ActiveRunner, Configuration
from prefect_gpu.runner.prefect_engine import SharedClient


def test_two_threads_that_submit_at_once_share_one_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    second = threading.Event()

    class SlowPublisher:
        def __init__(self, lend: Any) -> None:
            made.append(self)
            if len(made) > 1:
                second.set()
            # Time for the other thread to make one too, if it can.
            second.wait(0.2)

        def close(self, timeout_s: float) -> None:
            pass

    monkeypatch.setattr(active_runner, "Publisher", SlowPublisher)
    monkeypatch.setattr(SharedClient, "open", lambda client: None)
    monkeypatch.setattr(submission, "run_engine", lambda *args: None)

    @task(tags=["gpu:memory=1GiB"])
    def one() -> None:
        pass

    with GPUTaskRunner(devices="simulated:1x8GiB", standby=0) as runner:
        threads = [threading.Thread(target=runner.submit, args=(one, {})) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1


def test_a_task_without_a_thread_fails_alone_and_the_next_one_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedClient, "open", lambda client: None)
    monkeypatch.setattr(submission, "run_engine", lambda *args: Completed(data=7))

    @task(tags=["gpu:memory=1GiB"])
    def one() -> None:
        pass

    with GPUTaskRunner(devices="simulated:1x8GiB", standby=0, reports=False) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            first = runner.submit(one, {})
        first.wait(1)
        second = runner.submit(one, {})
        second.wait(60)
    assert first.state.is_failed() and second.state.is_completed()
    with pytest.raises(CapacityError, match=r"can't start new thread.*ulimit -u"):
        first.result()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_runners_of_the_same_devices_share_a_broker_whatever_else_they_do() -> None:
    known: dict[str, Any] = {
        "devices": parse_spec("simulated:1x8GiB"),
        "placement": "spread",
        "max_processes": None,
        "max_tasks_per_device": None,
        "headroom_bytes": None,
        "reports": True,
        "standby": 0,
        "start_method": "spawn",
    }
    first = ActiveRunner(Configuration(**known)).broker()
    alike = {"reports": False, "standby": "hot", "start_method": "forkserver"}
    assert ActiveRunner(Configuration(**{**known, **alike})).broker() is first
    for other in ({"headroom_bytes": 1}, {"placement": "pack"}, {"max_processes": 3}):
        assert ActiveRunner(Configuration(**{**known, **other})).broker() is not first
