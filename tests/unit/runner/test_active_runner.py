"""A runner at work: what its threads share."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import task
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Completed

from prefect_gpu import GPUTaskRunner
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.devices.spec import parse_spec
from prefect_gpu.engine import flow_run, task_engine
from prefect_gpu.engine.flow_run import SharedClient
from prefect_gpu.errors import CapacityError
from prefect_gpu.reports.model import UnstartedRun
from prefect_gpu.reports.publish import Publisher, artifact_key
from prefect_gpu.runner import active_runner, submission
from prefect_gpu.runner.active_runner import ActiveRunner
from prefect_gpu.runner.configuration import Configuration
from tests.fakes.ctrl_c import press_ctrl_c, press_ctrl_c_in
from tests.fakes.reports import FakeAPI, task_report


@task(tags=["gpu:memory=1GiB"])
def one() -> None:
    pass


def test_two_threads_that_submit_at_once_share_one_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    second = threading.Event()

    class SlowPublisher:
        flow_report_id = None

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

    with GPUTaskRunner(devices="simulated:1x8GiB", standby=0, reports=False) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            first = runner.submit(one, {})
        first.wait(DEADLOCK_S)
        second = runner.submit(one, {})
        second.wait(DEADLOCK_S)
    assert first.state.is_failed() and second.state.is_completed()
    with pytest.raises(CapacityError, match=r"can't start new thread.*ulimit -u"):
        first.result()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


KNOWN: dict[str, Any] = {
    "devices": parse_spec("simulated:1x8GiB"),
    "placement": "spread",
    "max_processes": None,
    "max_tasks_per_device": None,
    "headroom_bytes": None,
    "reports": True,
    "standby": 0,
    "start_method": "spawn",
}


def test_runners_of_the_same_devices_share_a_broker_whatever_else_they_do() -> None:
    first = ActiveRunner(Configuration(**KNOWN)).broker()
    alike = {
        "reports": False,
        "standby": 3,
        "start_method": "auto",
        "memory_snapshots": Path("snapshots"),
    }
    assert ActiveRunner(Configuration(**{**KNOWN, **alike})).broker() is first
    for other in ({"headroom_bytes": 1}, {"placement": "pack"}, {"max_processes": 3}):
        assert ActiveRunner(Configuration(**{**KNOWN, **other})).broker() is not first


def test_on_a_cluster_one_warning_a_flow_says_that_no_task_is_suspended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans: list[Any] = []

    def start(runner: ActiveRunner, task: Any, plan: Any, *_: Any) -> Any:
        plans.append(plan)
        return concurrent.futures.Future()

    monkeypatch.setattr(ActiveRunner, "_open_cluster", lambda runner: None)
    monkeypatch.setattr(ActiveRunner, "_start", start)

    @task(tags=["gpu:preemptible"])
    def one() -> None:
        pass

    for _ in range(2):
        with GPUTaskRunner(address="auto", reports=False) as runner:
            for _ in range(2):
                runner.submit(one, {})
    assert [plan.policy.preemptible for plan in plans] == [False] * 4
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 2
    assert all("gpu:preemptible has no effect on a cluster" in each for each in warnings)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeAPI:
    """The API that runners publish to."""
    api = FakeAPI()
    monkeypatch.setattr(SharedClient, "lend", lambda client: api.connect())
    return api


@pytest.fixture
def runner(api: FakeAPI) -> ActiveRunner:
    runner = ActiveRunner(Configuration(**KNOWN))
    runner._open_publisher()
    return runner


class Body:
    """A body at whose end Ctrl-C is pressed once more."""

    def __init__(self) -> None:
        self.ended = False

    def cancel(self) -> None:
        press_ctrl_c()
        # For the main thread to notice.
        time.sleep(0.01)
        self.ended = True

    def wait_finished(self, timeout_s: float) -> bool:
        return self.ended


@pytest.mark.parametrize("failed", [True, False], ids=["it failed", "it was interrupted"])
def test_ctrl_c_while_a_flow_ends_its_bodies_leaves_none_of_them(failed: bool) -> None:
    runner = ActiveRunner(Configuration(**KNOWN))
    bodies: list[Any] = [Body() for _ in range(5)]
    runner._bodies.update(bodies)
    if not failed:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        runner._futures.add(future)
        press_ctrl_c_in(runner._close)
    with pytest.raises(KeyboardInterrupt):
        runner.close(failed)
    assert [body.ended for body in bodies] == [True] * 5


def test_a_signal_while_reports_are_published_neither_loses_nor_repeats_one(
    api: FakeAPI, runner: ActiveRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.go.clear()
    runner.report(task_report())
    flow = artifact_key("gpu-flow", "no-flow")
    end_all = runner._end_all

    def end_and_answer() -> None:
        end_all()
        api.go.set()

    # What follows Ctrl-C.
    monkeypatch.setattr(runner, "_end_all", end_and_answer)
    press_ctrl_c_in(Publisher.close)
    with pytest.raises(KeyboardInterrupt):
        runner.close(failed=False)
    assert api.keys == [artifact_key("gpu-memory", task_report().task_name), flow]


@pytest.mark.parametrize("ui", ["http://ui", None], ids=["a UI", "no UI is known"])
def test_the_runners_last_line_is_the_address_of_its_report(
    ui: str | None, api: FakeAPI, runner: ActiveRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(flow_run, "log_on_flow", lambda context, text: said.append(text))
    runner._count(Completed())
    runner.report(task_report())
    # The publisher's thread has settings of its own.
    with temporary_settings({PREFECT_UI_URL: ui, PREFECT_API_URL: None}):
        runner.close(failed=False)
        runner.close(failed=False)
    line = f"Report of the GPU tasks: {ui}/artifacts/artifact/{UUID(int=len(api.keys))}"
    assert api.keys[-1].startswith("gpu-flow-")
    assert said[0].startswith("GPU task runs: 1 Completed")
    assert said[1:] == ([line] if ui else [])


@pytest.mark.parametrize(
    ("error", "count"),
    [(KeyboardInterrupt(), "1 completed, 2 crashed"), (None, "1 completed, 2 cancelled")],
    ids=["Ctrl-C", "its function failed"],
)
def test_the_report_of_a_flow_has_prefects_word_for_what_ended_with_it(
    error: BaseException | None,
    count: str,
    api: FakeAPI,
    runner: ActiveRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifacts: list[Any] = []
    create = api.create_artifact
    monkeypatch.setattr(api, "create_artifact", lambda each: artifacts.append(each) or create(each))
    ids = [UUID(int=number) for number in range(3)]
    runner.report(task_report(task_run_id=ids[0], outcome="cancelled", error="for others"))
    runner.report(task_report(task_run_id=ids[0], attempt=2))
    runner.report(task_report(task_run_id=ids[1], outcome="cancelled"))
    runner.note_unstarted(UnstartedRun(ids[2], "waits", "cancelled", "", 0.0))
    runner.close(True, error)
    assert artifacts[-1].description.startswith(f"Flow report · 3 task runs: {count}; 3 attempts")
    assert "· cancelled ·" in artifacts[2].description, "the report of the process"
    assert "for others" in artifacts[0].data
    assert artifacts[-1].data.count(f": {task_engine.ended_by(error)}\n") == 2


def test_a_signal_while_the_summary_is_written_loses_no_report(
    api: FakeAPI, runner: ActiveRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.report(task_report())
    runner._count(Completed())
    pressed: list[int] = []

    def summary(states: Any, reports: Any) -> str:
        if not pressed:
            pressed.append(1)
            raise KeyboardInterrupt
        return f"{len(reports)} of {dict(states)}"

    monkeypatch.setattr(active_runner, "flow_summary", summary)
    with pytest.raises(KeyboardInterrupt):
        runner.close(failed=False)
    assert api.keys[1:] == [artifact_key("gpu-flow", "no-flow")]


def test_processes_that_never_end_are_waited_for_once_and_not_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

    class Stuck:
        def wait_finished(self, timeout_s: float) -> bool:
            clock.now_s += max(0.0, timeout_s)
            return False

    clock = Clock()
    monkeypatch.setattr(active_runner, "time", clock)
    active_runner._wait_all([Stuck(), Stuck(), Stuck()])  # type: ignore[list-item]
    assert clock.now_s == 100.0 + active_runner.CLOSING_S
