"""Published reports read back: one object, a page, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from prefect.states import Completed, Running
from rich.console import Console

import prefect_gpu
from prefect_gpu.cli.commands import main
from prefect_gpu.cli.terminal import TerminalMarkdown
from prefect_gpu.errors import ReportError
from prefect_gpu.reports import publish
from prefect_gpu.reports.publish import flow_artifact, task_artifact
from prefect_gpu.reports.published import FlowRunReport, ProcessReport, open_api
from tests.fakes.reports import task_report

Capture = pytest.CaptureFixture[str]

#: Parameters of a flow run, and the page's text of them.
GIVEN = {"epochs": 3, "db": [{"password": "p", "host": "h"}], "url": "postgres://me:p@h/db"}
SHOWN = {"epochs": 3, "db": [{"password": "(secret)", "host": "h"}], "url": "(secret)"}

HOSTILE = '<script>alert("1")</script>'


def made(**more: str) -> FlowRunReport:
    process = ProcessReport("eval-1", uuid4(), "**Completed**", {"attempt": "2", **more})
    return FlowRunReport("red-fox", uuid4(), "Completed", "| a |\n|---|\n| b |", {}, (process,))


def test_a_page_has_everything_and_runs_nothing() -> None:
    page = replace(made(outcome=HOSTILE), flow_run=HOSTILE).to_html()
    assert "<td>b</td>" in page and "<strong>Completed</strong>" in page
    assert "eval-1 · attempt 2" in page
    assert HOSTILE not in page
    assert "default-src 'none'" in page


def test_a_page_begins_with_the_flow_and_has_its_leaderboards() -> None:
    report = replace(made(), facts=(("Flow", HOSTILE),), leaderboards=("| first |\n|---|\n| x |",))
    page = report.to_html()
    assert "<tr><th>Flow</th><td>&lt;script&gt;" in page
    assert page.index("<td>b</td>") < page.index("<td>x</td>") < page.index("eval-1")


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    shown = made()._repr_html_()
    assert shown.startswith("<iframe sandbox srcdoc=") and "<html" not in shown


def test_csv_has_a_column_for_every_figure_that_any_process_has() -> None:
    first, second = made(cap="7").processes[0], made(leak="8").processes[0]
    text = replace(made(), processes=(first, second)).to_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["cap"], row["leak"]) for row in rows] == [("7", ""), ("", "8")]


UNSEEN = "a\x1b[31mb\u202ec\x07\x00\x85d\r\ne"


def with_names(name: str) -> FlowRunReport:
    """Return a report in which every name and figure of a user is `name`."""
    process = ProcessReport(name, uuid4(), "**Completed**", {"learn_by": name, "outcome": name})
    return FlowRunReport(name, uuid4(), name, "", {}, (process,))


def test_names_have_no_control_or_direction_characters_in_a_page_and_in_csv() -> None:
    for text in (with_names(UNSEEN).to_html(), with_names(UNSEEN).to_csv()):
        assert "a�[31mb�c��" in text
        assert all(line.isprintable() for line in text.split("\n"))


FORMULAS = ("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1", "＝1", "--", "-")
FORMULAS += ("=cmd|' /C calc'!A0",)
PLAIN = ("-8", "-1.5e+3", "+7", "0", "eval-1", "a=b", "", "nan")


@pytest.mark.parametrize("name", FORMULAS + PLAIN)
def test_a_cell_of_csv_is_never_a_formula(name: str) -> None:
    ((row),) = csv.DictReader(io.StringIO(with_names(name).to_csv()))
    expected = f"'{name.strip()}" if name in FORMULAS else name
    assert row["task_run"] == row["learn_by"] == expected


@pytest.fixture(scope="module")
def api(prefect_server: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield prefect_server


@pytest.fixture(scope="module")
def run_id(api: str) -> UUID:
    """A flow run with the reports of three processes, more than one page of the API."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(
            flow(name="reported")(lambda: None), name=f"run-{uuid4()}", parameters=GIVEN
        )
        reports = [replace(task_report(), flow_run_id=run.id, attempt=at) for at in (1, 2, 3)]
        for each in reports:
            client.create_artifact(task_artifact(replace(each, task_run_id=None)))
        client.create_artifact(flow_artifact(reports, flow_name="reported", flow_run_id=run.id))
    return run.id


def test_the_reports_of_a_flow_run_are_read_page_by_page(
    run_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PAGE", 2)
    found = prefect_gpu.report(run_id)
    assert found.flow_run_id == run_id
    assert [each.figures["attempt"] for each in found.processes] == ["1", "2", "3"]
    assert found.figures["processes"] == "3"
    assert "data:image/svg+xml" in found.markdown and "data:image" not in found.to_text()
    assert prefect_gpu.report(found.flow_run) == found, "by its name"
    assert found.to_html().count("<img src=") == 4
    facts = dict(found.facts)
    assert facts["Flow"] == "reported"
    assert json.loads(facts["Parameters"]) == SHOWN
    assert facts["Page"].endswith(f"/runs/flow-run/{run_id}")


def test_the_command_writes_what_was_asked(run_id: UUID, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(run_id), "--html", str(page)]) == 0
    assert "3 processes" in capsys.readouterr().out and "</html>" in page.read_text()
    assert main(["report", str(run_id), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [each["figures"]["attempt"] for each in written["processes"]] == [1, 2, 3]
    assert written["figures"]["processes"] == 3
    assert main(["report", str(run_id), "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["report", str(run_id)]) == 0
    assert "3 attempts" in capsys.readouterr().out
    assert main(["report", str(run_id), "--html", str(tmp_path / "no" / "page")]) == 2
    assert "cannot be written: No such file or directory\n" in capsys.readouterr().err
    assert main(["report", str(run_id), "--json", "--csv"]) == 2
    assert "--json and --csv exclude each other" in capsys.readouterr().err


def test_a_flow_run_that_is_not_there_or_has_no_report_is_one_clear_error(api: str) -> None:
    with pytest.raises(ReportError, match=r"'nobody' names no flow run; accepted: the id or"):
        prefect_gpu.report("nobody")
    with pytest.raises(ReportError, match=rf"there is no flow run {UUID(int=7)} at {api}"):
        prefect_gpu.report(UUID(int=7))
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(flow(name="silent")(lambda: None), state=Completed())
    with pytest.raises(
        ReportError, match=r"has no reports: no process of a GPU task .* or reports=False$"
    ):
        prefect_gpu.report(run.id)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Running())
    with pytest.raises(ReportError, match=r"or reports=False, and it is Running$"):
        prefect_gpu.report(run.id)


def test_an_api_that_does_not_answer_is_one_clear_error() -> None:
    away = "http://127.0.0.1:9/api"
    with (
        temporary_settings({PREFECT_API_URL: away}),
        pytest.raises(ReportError, match=f"API at {away} cannot be read: Connect") as told,
    ):
        prefect_gpu.report("anything")
    assert "`prefect server start`" in str(told.value)
    no_server = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
    with (
        temporary_settings(no_server, restore_defaults={PREFECT_API_URL}),
        pytest.raises(ReportError, match="there is no Prefect API"),
    ):
        prefect_gpu.report("anything")


def test_a_name_that_is_too_long_for_its_column_is_wrapped_and_not_cut() -> None:
    written = io.StringIO()
    console = Console(width=30, file=written)
    name = "evaluate-with-a-long-name-4c5"
    console.print(TerminalMarkdown(f"| task run | outcome |\n|---|---|\n| {name} | completed |"))
    assert "…" not in written.getvalue()


def refused(url: str, error: Exception) -> str:
    """Return the message after an error of the API at an address."""
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(ReportError) as caught,
        open_api(),
    ):
        raise error
    return str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:4200", "https://host/prefect/"])
def test_an_address_without_api_is_named(url: str) -> None:
    # Prefect's server answers with the page of its UI.
    text = refused(url, json.JSONDecodeError("Expecting value", "<!DOCTYPE html>", 0))
    assert f"API at {url} cannot be read: JSONDecodeError" in text
    assert text.endswith(f"PREFECT_API_URL has no /api; did you mean {url.rstrip('/')}/api?")


def test_an_address_with_api_is_not_corrected() -> None:
    cloud = "https://api.prefect.cloud/api/accounts/a/workspaces/w"
    text = refused(cloud, httpx.ReadTimeout("nothing came"))
    assert "ReadTimeout: nothing came" in text and "did you mean" not in text
