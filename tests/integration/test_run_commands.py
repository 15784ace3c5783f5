"""`prefect-gpu recommend`, `history` and `simulate` about flow runs of a real server."""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from prefect import flow, get_client, task
from prefect.artifacts import create_markdown_artifact
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Completed

from prefect_gpu import GPUTaskRunner, gpu, report
from prefect_gpu.cli.commands import main
from prefect_gpu.reports.history import PrefectHistory
from prefect_gpu.reports.model import past_run
from prefect_gpu.reports.publish import Publisher, task_artifact
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.units import GIB, parse_bytes
from tests.fakes.reports import task_report
from tests.integration import bodies
from tests.integration.programs import workplace
from tests.ui.server import running_server

Capture = pytest.CaptureFixture[str]

#: Of one test run: histories outlive it.
MARK = uuid.uuid4().hex[:8]


train = task(bodies.train, name=f"train-{MARK}", tags=gpu(memory="10GiB", framework="none"))


@task
def plan(numbers: list[int]) -> list[int]:
    threading.Event().wait(2.5)
    return numbers


evaluate = task(
    bodies.evaluate_all,
    name=f"evaluate-{MARK}",
    tags=gpu(framework="none", learn_by="size", priority=3),
)


@flow(name=f"nightly-{MARK}", task_runner=GPUTaskRunner(devices="simulated:1x16GiB", standby=1))
def nightly() -> None:
    # An artifact without a key, as Prefect itself makes for a result that is kept.
    create_markdown_artifact("a note")
    numbers = plan.submit(train.map(range(4)))  # type: ignore[arg-type]
    evaluate.submit(numbers, size=7).result()  # type: ignore[arg-type]


#: A Python process keeps what it has learned itself, so a reset shows in another one.
EVENING = f"""
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.reports.publish import task_artifact
from prefect_gpu.testing import allocate


@task(name="evaluate-{MARK}", tags=gpu(framework="none", learn_by="size"))
def evaluate(size):
    with allocate("1GiB"):
        pass


@flow(name="evening-{MARK}", task_runner=GPUTaskRunner(devices="simulated:1x16GiB"))
def evening():
    evaluate.submit(size=8).result()


evening()
"""


class Run(NamedTuple):
    flow_run_id: str
    name: str


@pytest.fixture(scope="module")
def api(prefect_server: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield prefect_server


@pytest.fixture(scope="module")
def run(api: str) -> Run:
    """A flow run: four processes after each other on one device, then one that needs their results."""
    state = nightly(return_state=True)
    flow_run_id = state.state_details.flow_run_id
    assert state.is_completed() and flow_run_id is not None
    with get_client(sync_client=True) as client:
        return Run(str(flow_run_id), client.read_flow_run(flow_run_id).name)


def printed(capsys: Capture, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def found(capsys: Capture, *words: str) -> Any:
    return json.loads(printed(capsys, *words, "--json"))


def refused(capsys: Capture, *words: str) -> str:
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


# -- simulate ------------------------------------------------------------------------------------


def test_a_flow_run_is_simulated_on_more_devices(run: Run, capsys: Capture) -> None:
    by_count = {
        count: found(capsys, "simulate", run.name, "--devices", f"{count}x16GiB")
        for count in (1, 2, 4)
    }
    spans = {count: each["makespan_s"] for count, each in by_count.items()}
    measured_s = by_count[1]["measured_makespan_s"]
    # What is not in it is the time between the end of a process and the next placement.
    assert 0.7 * measured_s <= spans[1] <= 1.05 * measured_s
    # One task that takes as long as the other three ends as late on four devices as on two. But less is waited.
    assert spans[4] <= spans[2] < spans[1]
    waits = {n: sum(task["waited_s"] for task in each["tasks"]) for n, each in by_count.items()}
    assert waits[4] < waits[2] < waits[1]
    for each in by_count.values():
        *trains, last = each["tasks"]
        assert last["name"].startswith("evaluate")
        ended_s = max(task["ended_s"] for task in trains)
        assert last["submitted_s"] > ended_s + 0.5, "the task between them has no process"
    assert [len(task["devices"]) for task in by_count[4]["tasks"]] == [1] * 5
    assert (by_count[1]["flow_run"], by_count[1]["flow_run_id"]) == (run.name, run.flow_run_id)


def test_the_verdict_is_one_line(run: Run, capsys: Capture) -> None:
    first, empty, *rest = printed(
        capsys, "simulate", run.flow_run_id, "--devices", "4x16GiB"
    ).splitlines()
    time = r"(?:\d+m )?[\d.]+m?s"
    assert re.fullmatch(
        rf"{run.name}: {time} on 4x16GiB instead of {time} on 1 × simulated 16GiB", first
    )
    assert not empty and rest[0] == "tasks        5, of which 5 ran"


def test_processes_that_do_not_fit_are_named(run: Run, capsys: Capture) -> None:
    text = printed(capsys, "simulate", run.name, "--devices", "1x8GiB")
    assert "without 5 of 5 processes" in text.splitlines()[0]
    assert (
        len(re.findall(rf"(?m)^train-{MARK}.* and 1 more can never run: gpu:memory=10GiB", text))
        == 1
    )
    assert "can never run: comes after" in text.splitlines()[-1]


def test_what_is_neither_a_file_nor_a_flow_run_is_one_error(api: str, capsys: Capture) -> None:
    said = refused(capsys, "simulate", "no-such-run", "--devices", "1x8GiB")
    assert "there is no file no-such-run; 'no-such-run' names no flow run" in said


# -- recommend -----------------------------------------------------------------------------------


def test_the_tags_to_write_are_those_of_the_report(run: Run, capsys: Capture) -> None:
    evaluated, trained = found(capsys, "recommend", f"nightly-{MARK}")
    assert (trained["task_name"], trained["runs"]) == (f"train-{MARK}", 4)
    assert (trained["write"], trained["device_kind"]) == ("gpu:memory=2.6GiB", "simulated")
    assert trained["peak_bytes"] == 2 * GIB
    assert trained["saved_bytes"] == 10 * GIB - parse_bytes("2.6GiB")
    assert (evaluated["learn_by"], evaluated["budget_sources"]) == ("size=7", ["probe"])
    shown = report(run.flow_run_id).markdown
    assert all(f"`{each['write']}`" in shown for each in (evaluated, trained))
    for other in run:
        assert found(capsys, "recommend", other) == [evaluated, trained]
    # Prefect's API gives 200 runs at most in one answer.
    many = found(capsys, "recommend", f"nightly-{MARK}", "--last", "401")
    assert many == [evaluated, trained]


def test_recommendations_are_a_table(run: Run, capsys: Capture) -> None:
    heads, _, trained = printed(capsys, "recommend", run.name, "--last", "1").splitlines()
    assert heads.split() == ["task", "runs", "peak", "budget", "now", "write", "saves", "because"]
    assert re.sub(" +", " ", trained) == (
        f"train-{MARK} 4 2GiB 10GiB, tag gpu:memory=2.6GiB (simulated devices only) 7.4GiB live peak 2GiB × 1.3; the most of 4 "
        "task runs"
    )


def test_a_flow_that_is_not_there_or_has_no_gpu_task_is_one_error(
    api: str, capsys: Capture
) -> None:
    said = refused(capsys, "recommend", "no-such-flow")
    assert "'no-such-flow' names no flow run; accepted: the name of a flow that has run" in said
    flow(name=f"silent-{MARK}")(lambda: None)()
    assert f"no reports of 'silent-{MARK}'" in refused(capsys, "recommend", f"silent-{MARK}")


def test_reports_of_another_version_are_left_out(run: Run, capsys: Capture) -> None:
    name = f"renewed-{MARK}"
    with get_client(sync_client=True) as client:
        begun = Completed()
        old = client.create_flow_run(flow(name=name)(lambda: None), state=begun)
        artifact = task_artifact(task_report(flow_run_id=UUID(str(old.id))))
        artifact.metadata_ = {"schema": "0"}
        client.create_artifact(artifact)
        said = refused(capsys, "recommend", name)
        assert "was published by another version of prefect_gpu" in said
        new = client.create_flow_run(flow(name=name)(lambda: None), state=begun)
        client.create_artifact(task_artifact(task_report(flow_run_id=new.id)))
    (tags,) = found(capsys, "recommend", name)
    assert (tags["task_name"], tags["runs"]) == ("evaluate", 1)


# -- history -------------------------------------------------------------------------------------


def tasks_of(histories: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["task_name"], each["learn_by_words"]) for each in histories]


def test_histories_are_listed_and_those_of_one_flow(run: Run, capsys: Capture) -> None:
    ours = found(capsys, "history", "list", f"nightly-{MARK}")
    assert (f"evaluate-{MARK}", "size=7") in tasks_of(ours)
    assert {name for name, _ in tasks_of(ours)} == {f"evaluate-{MARK}", f"train-{MARK}"}
    everything = found(capsys, "history", "list")
    assert all(each in everything for each in ours)
    trained = ours[-1]
    assert (trained["runs"], trained["peak_bytes"]) == (4, 2 * GIB)
    assert trained["device_name"] == "simulated 16GiB" and trained["expected_s"] > 0.6
    row = printed(capsys, "history", "list", run.name).splitlines()[-1]
    assert re.fullmatch(
        rf"train-{MARK} +nightly-{MARK} +simulated 16GiB +4 +2GiB +[\d.]+m?s +2\.6GiB +\d{{4}}-.*",
        row,
    )


def test_histories_of_a_flow_are_listed_by_its_own_name(api: str, capsys: Capture) -> None:
    # None of its last runs has started a process: all was cached.
    cached = flow(name=f"cached-{MARK}")(lambda: None)
    cached()
    key = HistoryKey("evaluate", "evaluate", "NVIDIA H200", flow_name=cached.name)
    publisher = Publisher(
        partial(get_client, sync_client=True), logger=logging.getLogger("reports")
    )
    PrefectHistory(partial(get_client, sync_client=True), publisher).add(
        key, past_run(task_report())
    )
    publisher.close(timeout_s=60)
    assert tasks_of(found(capsys, "history", "list", cached.name)) == [("evaluate", "")]
    silent = flow(name=f"unlearned-{MARK}")(lambda: None)
    for _ in range(2):
        silent()
    said = refused(capsys, "history", "list", silent.name)
    assert "(looked at its last 2 runs: " in said and "--last" not in said


@pytest.fixture
def evening(tmp_path: Path, api: str, capsys: Capture) -> Iterator[Callable[[], list[str]]]:
    """A function that runs the flow of `EVENING`, and returns where its budget came from."""
    with workplace(tmp_path, api) as place:
        program = place.write("evening.py", EVENING)

        def run_it() -> list[str]:
            place.run(str(program))
            (tags,) = found(capsys, "recommend", f"evening-{MARK}", "--last", "1")
            sources: list[str] = tags["budget_sources"]
            return sources

        yield run_it


def test_a_reset_makes_the_next_run_learn_anew(
    run: Run, evening: Callable[[], list[str]], capsys: Capture
) -> None:
    assert evening() == ["probe"]
    assert evening() == ["learned"]
    said = refused(capsys, "history", "reset", f"evaluate-{MARK}", "no-such-task")
    assert "nothing is learned of no-such-task; known: " in said and "Nothing was deleted" in said
    said = refused(capsys, "history", "reset", f"evaluate-{MARK}", "--flow", "no-such-flow")
    assert "nothing is learned in flow 'no-such-flow'" in said and "Nothing was deleted" in said
    evenings = "history", "reset", f"evaluate-{MARK}", "--flow", f"evening-{MARK}"
    assert printed(capsys, *evenings) == (
        f"deleted 1 history of 1 task in flow 'evening-{MARK}', with 2 runs: evaluate-{MARK}\n"
    )
    assert (f"evaluate-{MARK}", "size=7") in tasks_of(found(capsys, "history", "list", run.name))
    said = printed(capsys, "history", "reset", f"evaluate-{MARK}")
    assert said == f"deleted 1 history of 1 task, with 1 run: evaluate-{MARK}\n"
    assert {name for name, _ in tasks_of(found(capsys, "history", "list", run.name))} == {
        f"train-{MARK}"
    }
    assert evening() == ["probe"]


def test_all_histories_are_deleted_only_if_a_person_agrees(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @flow(task_runner=GPUTaskRunner(devices="simulated:1x16GiB"))
    def one() -> None:
        train.submit(0).result()

    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    # Tests beside this one learn from the histories of the server that they share. Prefect sends logs later, when this
    # server is gone, and then tries for minutes.
    others = {PREFECT_LOGGING_TO_API_ENABLED: False}
    with running_server(tmp_path) as url, temporary_settings({PREFECT_API_URL: url, **others}):
        one()
        capsys.readouterr()
        assert "name the tasks" in refused(capsys, "history", "reset")
        assert "name the tasks" in refused(capsys, "history", "reset", f"train-{MARK}", "--all")
        assert "nothing was deleted" in refused(capsys, "history", "reset", "--all")
        assert re.match(r"Delete \d+ histor.* of \d+ task.* at http", asked[0])
        assert f"train-{MARK}" in printed(capsys, "history", "list")
        assert "deleted" in printed(capsys, "history", "reset", "--all", "--yes")
        assert len(asked) == 1
        assert printed(capsys, "history", "list") == "no histories\n"
