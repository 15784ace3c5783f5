"""An API that is away, refuses, or is slow: no task is delayed or fails, and no report is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from prefect_gpu.clock import DEADLOCK_S
from tests.faults.api_proxy import Answer, Proxy, proxy
from tests.integration import engine_api
from tests.integration.programs import Workplace, wait_for

#: Tasks of the flow.
COUNT = 5

FLOW = f"""
import os
import time
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.runner import active_runner

active_runner.CLOSING_S = float(os.environ.get("CLOSING_S", "60"))


def until(name):
    while not Path(name).exists():
        time.sleep(0.02)


@task(tags=gpu(memory="64MiB", framework="none"))
def say(number):
    Path("begun").touch()
    until("go on")
    return number


@flow(task_runner=GPUTaskRunner(devices="host", start_method="auto"))
def ask():
    from prefect.runtime import flow_run

    print("FLOW RUN", flow_run.id, flush=True)
    futures = [say.submit(number) for number in range({COUNT})]
    ends = [future.result() for future in futures]
    Path("ended").touch()
    until("end")
    return ends


print("ENDS", ask())
"""


@pytest.fixture
def api(prefect_server: str) -> Iterator[Proxy]:
    with proxy(prefect_server) as made:
        yield made


class Run:
    """A flow in a process, whose API is behind a proxy."""

    def __init__(
        self, place: Workplace, api: Proxy, program: str = FLOW, **environment: str
    ) -> None:
        self.place = place
        place.write("ask.py", program)
        # A progress artifact, which a slow flow has, is created by the same request as a report.
        place.environment.update(
            PREFECT_API_URL=api.url, PREFECT_INTEGRATIONS_GPU_PROGRESS="false", **environment
        )
        self.process = place.start("ask.py")

    def wait(self, name: str) -> None:
        """Wait until the flow has come to a point."""
        path = self.place.folder / name
        wait_for(
            lambda: path.exists() or self.process.poll() is not None,
            explain=lambda: f"{name!r} was not reached",
        )
        assert path.exists(), self.process.communicate()

    def let(self, name: str) -> None:
        """Let the flow pass a point."""
        (self.place.folder / name).touch()

    def end(self) -> tuple[UUID, str]:
        """Wait for the flow's end, which must be that of a flow without faults; return its id and what it logged."""
        out, errors = self.process.communicate(timeout=DEADLOCK_S)
        assert self.process.returncode == 0, f"{out}\n{errors}"
        assert f"ENDS {list(range(COUNT))}" in out
        (line,) = (line for line in out.splitlines() if line.startswith("FLOW RUN "))
        return UUID(line.removeprefix("FLOW RUN ")), errors


def is_report(what: str) -> bool:
    """Return whether a request creates an artifact."""
    return what == "POST /api/artifacts/"


def test_reports_of_a_flow_whose_api_is_away_are_published_when_it_is_back(
    place: Workplace, api: Proxy
) -> None:
    run = Run(place, api)
    run.wait("begun")
    api.go_away()
    run.let("go on")
    # All tasks complete without the API.
    run.wait("ended")
    assert not [call for call in api.calls if is_report(call.what)]
    api.come_back()
    run.let("end")
    flow_run_id, errors = run.end()
    assert len(engine_api.artifacts(flow_run_id=flow_run_id, count=COUNT + 1)) == COUNT + 1
    assert "memory report" not in errors


def test_an_api_that_limits_the_rate_gets_reports_at_its_pace_and_delays_no_task(
    place: Workplace, api: Proxy
) -> None:
    ended = threading.Event()
    left = [Answer(429, "Retry-After: 1\r\n")] * 3

    def choose(what: str) -> Answer | None:
        if not is_report(what):
            return None
        if not ended.is_set():
            return left[0]
        return left.pop() if left else None

    api.choose_answer = choose
    run = Run(place, api)
    run.let("go on")
    run.wait("ended")
    ended.set()
    run.let("end")
    flow_run_id, errors = run.end()
    assert len(engine_api.artifacts(flow_run_id=flow_run_id, count=COUNT + 1)) == COUNT + 1
    assert "memory report" not in errors
    calls = [call for call in api.calls if is_report(call.what)]
    assert len([call for call in calls if call.answer is not None]) >= 3
    for one, next_one in itertools.pairwise(calls):
        assert one.answer is None or next_one.at_s - one.at_s >= 1.0, "sooner than was allowed"


def test_a_silent_api_delays_no_task_and_what_it_does_not_take_is_in_the_folder_that_is_named(
    place: Workplace, api: Proxy
) -> None:
    begun, ended, over = (threading.Event() for _ in range(3))
    answers = [Answer(413), Answer(503)]

    def choose(what: str) -> Answer | None:
        if begun.is_set():
            ended.wait(DEADLOCK_S)
        if not is_report(what):
            return None
        if not answers:
            over.wait(DEADLOCK_S)
        return answers.pop(0) if answers else Answer(503)

    api.choose_answer = choose
    run = Run(place, api, CLOSING_S="2")
    run.wait("begun")
    begun.set()
    run.let("go on")
    run.wait("ended")
    ended.set()
    run.let("end")
    flow_run_id, errors = run.end()
    over.set()
    (warning,) = (line for line in errors.splitlines() if "memory report" in line)
    folder = Path(place.environment["PREFECT_HOME"], "prefect-gpu", "reports", str(flow_run_id))
    assert f"{COUNT + 1} memory reports were not published but written to {folder}" in warning
    names = sorted(path.name.rpartition("-")[0] for path in folder.iterdir())
    assert names == ["gpu-flow-ask", *["gpu-memory-say"] * COUNT]
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "503 at first"])
def test_a_slow_or_overloaded_api_delays_only_what_prefect_itself_asks(
    how: str, place: Workplace, api: Proxy
) -> None:
    left = [Answer(503)] * 4

    def choose(what: str) -> Answer | None:
        if how == "slow":
            threading.Event().wait(3.0)
            return None
        return left.pop() if left and "artifacts" in what else None

    api.choose_answer = choose
    # A task without a budget asks for its history first.
    program = FLOW.replace('memory="64MiB", ', "")
    run = Run(place, api, program=program)
    for name in ("go on", "end"):
        run.let(name)
    flow_run_id, errors = run.end()
    assert len(engine_api.artifacts(flow_run_id=flow_run_id, count=COUNT + 1)) == COUNT + 1
    assert "memory report" not in errors and "Traceback" not in errors
