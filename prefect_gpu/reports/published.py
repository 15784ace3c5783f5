"""Published reports of flow runs, read from Prefect's API: as an object, an HTML page with charts, JSON or CSV."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from markdown_it import MarkdownIt
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings
from prefect.utilities.urls import url_for

from prefect_gpu.errors import ReportError
from prefect_gpu.reports.canvas import clean
from prefect_gpu.reports.markup import is_secret
from prefect_gpu.reports.model import TaskReport, figure_values, read_metadata
from prefect_gpu.reports.publish import FLOW_PREFIX, PAGE, TASK_PREFIX, read_pages
from prefect_gpu.units import format_seconds

#: Most characters of a flow run's parameters on a page.
_PARAMETERS_LIMIT = 500

#: Why there are no reports, for a person who expected some.
_NO_PROCESS = (
    "no process of a GPU task has ended there. A cached task, a direct call and a task without a gpu tag have none, nor "
    "has a flow without GPUTaskRunner; or reports=False"
)

#: Charts in markdown: some ten thousand characters each, which a terminal cannot show.
_IMAGE = re.compile(r"!\[[^\n]*\]\(data:[^)]*\)\n*")

#: Content security policy: a page loads and runs nothing from elsewhere, whatever the reports contain.
_SECURITY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: .3rem .6rem; }
img { max-width: 100%; }
pre { overflow-x: auto; }
section { margin: 1rem 0 1rem 1.2rem; }
summary { cursor: pointer; }
"""

#: First characters of a formula in spreadsheets. East Asian spreadsheets accept also the wide characters.
_FORMULA = tuple("=+-@＝＋－＠")
_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", re.IGNORECASE)

#: Names in the metadata of a leaderboard.
_LEADERBOARD = {"metric", "best", "values"}

#: Advice if no API answers.
_START_SERVER = (
    "check that `prefect server start` runs, and that PREFECT_API_URL is its address, as in "
    "http://127.0.0.1:4200/api"
)

#: Height of a report in a notebook, in pixels.
_NOTEBOOK_HEIGHT = 640


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The report of one process of a GPU task."""

    #: Name and id of the process's task run; empty and `None`: there is no task run.
    task_run: str
    task_run_id: UUID | None
    #: The report as in the UI, in GitHub markdown.
    markdown: str = field(repr=False)
    #: The report's figures for programs: texts by name, sizes in bytes, times in seconds. See `docs/memory.md`.
    figures: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Submission:
    """The time of a task run's submission, and its inputs."""

    #: Seconds since the epoch.
    submitted_at: float
    #: Ids of the task runs in its arguments and in its `wait_for`.
    inputs: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class FlowRunReport:
    """All reports of one flow run. A notebook shows the object as a page."""

    flow_run: str
    flow_run_id: UUID
    #: Name of the flow run's state, such as "Completed".
    state: str
    #: The flow run's report in GitHub markdown, and its figures for programs; empty: not published yet.
    markdown: str = field(repr=False)
    figures: Mapping[str, str]
    #: In the order of publication.
    processes: tuple[ProcessReport, ...]
    #: Submissions by task run id, including task runs without a gpu tag.
    submissions: Mapping[UUID, Submission] = field(default_factory=dict, repr=False)
    #: Rows at the top of the page: names and values, as in "Started" and "2026-11-27 14:54:00 UTC, ran 6s".
    facts: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: Leaderboards that `publish_leaderboard` has published, in GitHub markdown.
    leaderboards: tuple[str, ...] = field(default=(), repr=False)

    @property
    def task_reports(self) -> tuple[TaskReport, ...]:
        """The reports in `processes` as values, in the same order.

        Raises:
            ReportError: Another version of prefect_gpu published a report.
        """
        return tuple(
            _task_report(each.figures, each.task_run_id, self.flow_run_id, each.task_run)
            for each in self.processes
        )

    def to_html(self) -> str:
        """Return one HTML page with all reports. The page needs no other file."""
        title = html.escape(clean(f"{self.flow_run} ({self.state})"))
        parts = [f"<h1>{title}</h1>"]
        if self.facts:
            facts = ((html.escape(clean(name)), html.escape(clean(v))) for name, v in self.facts)
            rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts)
            parts.append(f"<table>{rows}</table>")
        parts += map(_html, (self.markdown or "The flow has not ended yet.", *self.leaderboards))
        for each in self.processes:
            attempt, outcome = each.figures.get("attempt", "?"), each.figures.get("outcome", "")
            summary = html.escape(clean(f"{each.task_run} · attempt {attempt} · {outcome}"))
            content = f"<summary>{summary}</summary><section>{_html(each.markdown)}</section>"
            parts.append(f"<details>{content}</details>")
        body = "\n".join(parts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY}">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
        )

    def to_json(self) -> str:
        """Return the figures as JSON, without texts and charts: sizes in bytes, times in seconds, `null`: not known."""
        found = {
            "flow_run": self.flow_run,
            "flow_run_id": str(self.flow_run_id),
            "state": self.state,
            "figures": figure_values(self.figures),
            "processes": [
                {
                    "task_run": each.task_run,
                    "task_run_id": str(each.task_run_id),
                    "figures": figure_values(each.figures),
                }
                for each in self.processes
            ],
        }
        return json.dumps(found, indent=2)

    def to_csv(self) -> str:
        """Return CSV: a row for each process, a column for each figure. Text like a formula gets a leading `'`."""
        names = list(dict.fromkeys(name for each in self.processes for name in each.figures))
        rows = [("task_run", "task_run_id", *names)]
        for each in self.processes:
            values = (each.figures.get(name, "") for name in names)
            rows.append((each.task_run, str(each.task_run_id or ""), *values))
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(map(_cell, row) for row in rows)
        return written.getvalue()

    def to_text(self) -> str:
        """Return the flow run's report in markdown without charts, for a terminal."""
        return _IMAGE.sub("", self.markdown)

    def _repr_html_(self) -> str:
        # A frame isolates the notebook from the report's style and content.
        page = html.escape(self.to_html(), quote=True)
        style = f"width:100%;height:{_NOTEBOOK_HEIGHT}px;border:0"
        return f'<iframe sandbox srcdoc="{page}" style="{style}"></iframe>'


def report(flow_run: UUID | str) -> FlowRunReport:
    """Read the reports of a flow run from Prefect's API.

    Args:
        flow_run: Id or name of the flow run; of several runs with one name, the last one started.

    Raises:
        ReportError: There is no such flow run, it has no reports, or the API does not answer.
    """
    with open_api() as client:
        run = _find(client, flow_run)
        flow_name = client.read_flow(run.flow_id).name
        task_runs = {UUID(each["id"]): each for each in _all_of(client, "task_runs", [run.id])}
        artifacts = sorted(_all_of(client, "artifacts", [run.id]), key=lambda a: a["created"])
    names = {id_: each["name"] for id_, each in task_runs.items()}
    whole = [each for each in artifacts if (each["key"] or "").startswith(FLOW_PREFIX)]
    processes = [each for each in artifacts if (each["key"] or "").startswith(TASK_PREFIX)]
    if not whole and not processes:
        state = f", and it is {run.state_name}" if run.state and not run.state.is_final() else ""
        raise ReportError(f"flow run {run.name} ({run.id}) has no reports: {_NO_PROCESS}{state}")
    last = whole[-1] if whole else {}
    return FlowRunReport(
        run.name,
        run.id,
        run.state_name or "",
        last.get("data") or "",
        last.get("metadata_") or {},
        tuple(_process(each, names) for each in processes),
        {id_: _submission(each) for id_, each in task_runs.items()},
        _facts(flow_name, run),
        tuple(a["data"] for a in artifacts if (a["metadata_"] or {}).keys() >= _LEADERBOARD),
    )


def _facts(flow_name: str, run: FlowRun) -> tuple[tuple[str, str], ...]:
    began, took = run.start_time, format_seconds(run.total_run_time.total_seconds())
    parameters = json.dumps(_without_secrets("", run.parameters), default=str)
    if len(parameters) > _PARAMETERS_LIMIT:
        parameters = f"{parameters[:_PARAMETERS_LIMIT]}…"
    url = url_for("flow-run", run.id)
    return (
        ("Flow", flow_name),
        *([("Started", f"{began:%Y-%m-%d %H:%M:%S %Z}, ran {took}")] if began else []),
        *([("Parameters", parameters)] if run.parameters else []),
        *([("Page", url)] if url else []),
    )


def _without_secrets(name: str, value: Any) -> Any:
    """Return a parameter's value without secrets, because other people may read the report."""
    if is_secret(name):
        return "(secret)"
    if isinstance(value, Mapping):
        return {key: _without_secrets(str(key), each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, each) for each in value]
    return "(secret)" if is_secret(name, str(value)) else value


def read_task_reports(flow: UUID | str, last: int) -> tuple[TaskReport, ...]:
    """Return the task reports of a flow run (id or name), or of the `last` runs of a flow (name), from Prefect's API.

    Raises:
        ReportError: There is no such flow, its runs have no reports, or the API does not answer.
    """
    accepted = "the name of a flow that has run, the id or the name of a flow run"
    with open_api() as client:
        runs = _last_runs(client, str(flow), last) or [_find(client, flow, accepted)]
        of_tasks = {"artifacts": {"key": {"like_": f"{TASK_PREFIX}-"}}}
        artifacts = list(_all_of(client, "artifacts", [run.id for run in runs], of_tasks))
    reports: list[TaskReport] = []
    unreadable: ReportError | None = None
    for each in artifacts:
        # The filter finds the text anywhere in a key.
        if each["task_run_id"] is None or not each["key"].startswith(TASK_PREFIX):
            continue
        ids = UUID(each["task_run_id"]), UUID(each["flow_run_id"])
        try:
            reports.append(_task_report(each["metadata_"] or {}, *ids))
        except ReportError as error:
            # The flow ran under an older version.
            unreadable = error
    if not reports:
        names = ", ".join(f"{run.name} ({str(run.id)[:8]})" for run in runs)
        which = f"its last {len(runs)} runs: {names}" if len(runs) > 1 else names
        problem = f"no reports of {str(flow)!r}: {_NO_PROCESS} (looked at {which})"
        raise unreadable or ReportError(problem)
    return tuple(sorted(reports, key=lambda each: each.placed_at))


@contextlib.contextmanager
def open_api() -> Iterator[SyncPrefectClient]:
    """Yield a client of Prefect's API.

    Raises:
        ReportError: The API does not answer, or refuses a call in the `with` block.
    """
    try:
        with contextlib.ExitStack() as stack:
            try:
                client = stack.enter_context(get_client(sync_client=True))
            except (RuntimeError, ValueError) as error:
                # Without PREFECT_API_URL: the temporary server did not start in time, or is not allowed.
                reason = str(error).rstrip(".")
                raise ReportError(f"there is no Prefect API: {reason}; {_START_SERVER}") from error
            yield client
    except (httpx.HTTPError, PrefectHTTPStatusError, json.JSONDecodeError) as error:
        url = get_current_settings().api.url
        # httpx appends a link that explains the status.
        reason = " ".join(str(error).split()).partition(" - For more information")[0]
        raise ReportError(
            f"Prefect's API at {url or 'a temporary server'} cannot be read: {type(error).__name__}: {reason}; "
            f"{correct_address(url) or _START_SERVER}"
        ) from error


def correct_address(url: str | None) -> str | None:
    """Return a hint that an address of Prefect's API lacks `/api`; `None`: the address may be right."""
    if url is None or "api" in urlsplit(url).path.split("/"):
        return None
    return f"PREFECT_API_URL has no /api; did you mean {url.rstrip('/')}/api?"


def _last_runs(client: SyncPrefectClient, flow: str, last: int) -> list[FlowRun]:
    """Return the newest `last` runs of a flow that have begun; empty: no flow has that name."""
    begun = FlowRunFilterStateType(not_any_=[StateType.SCHEDULED, StateType.PENDING])
    found: list[FlowRun] = []
    for offset in range(0, last, PAGE):
        found += client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=begun)),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=min(PAGE, last - offset),
            offset=offset,
        )
        if len(found) < offset + PAGE:
            break
    return found


def _task_report(
    figures: Mapping[str, str],
    task_run_id: UUID | None,
    flow_run_id: UUID,
    task_run_name: str = "",
) -> TaskReport:
    try:
        return read_metadata(figures, task_run_id or UUID(int=0), flow_run_id, task_run_name)
    except ValueError as error:
        raise ReportError(
            f"a report of flow run {flow_run_id} was published by another version of prefect_gpu: "
            f"{error}; run the flow once with this one"
        ) from error


def _submission(task_run: Mapping[str, Any]) -> Submission:
    # `__parents__` names the task whose body submitted this task, which does not wait for the end of that body.
    given = (inputs for name, inputs in task_run["task_inputs"].items() if name != "__parents__")
    runs = (each for inputs in given for each in inputs if each["input_type"] == "task_run")
    at = task_run["expected_start_time"] or task_run["created"]
    submitted = datetime.fromisoformat(at.replace("Z", "+00:00"))
    return Submission(submitted.timestamp(), tuple(dict.fromkeys(UUID(run["id"]) for run in runs)))


def _process(artifact: Mapping[str, Any], names: Mapping[UUID, str]) -> ProcessReport:
    task_run_id = None if artifact["task_run_id"] is None else UUID(artifact["task_run_id"])
    name = "" if task_run_id is None else names.get(task_run_id, str(task_run_id))
    return ProcessReport(name, task_run_id, artifact["data"], artifact["metadata_"] or {})


def _find(
    client: SyncPrefectClient,
    flow_run: UUID | str,
    accepted: str = "the id or the name of a flow run",
) -> FlowRun:
    try:
        flow_run_id = UUID(str(flow_run))
    except ValueError:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[str(flow_run)]))
        newest = FlowRunSort.EXPECTED_START_TIME_DESC
        for run in client.read_flow_runs(flow_run_filter=named, sort=newest, limit=1):
            return run
        raise ReportError(
            f"{flow_run!r} names no flow run; accepted: {accepted}, as `prefect flow-run ls` shows them"
        ) from None
    try:
        return client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        raise ReportError(f"there is no flow run {flow_run_id} at {client.api_url}") from None


def _all_of(
    client: SyncPrefectClient, what: str, flow_run_ids: Sequence[UUID], more: Mapping[str, Any] = {}
) -> Iterator[dict[str, Any]]:
    """Yield all `artifacts` or `task_runs` of flow runs; `more` are further filters."""
    of_runs = FlowRunFilter(id=FlowRunFilterId(any_=[*flow_run_ids])).model_dump(mode="json")
    return read_pages(client, what, {"flow_runs": of_runs, "sort": "ID_DESC", **more})


def _cell(text: str) -> str:
    """Return a CSV cell: one line, and no formula that a spreadsheet would run."""
    line = clean(text)
    return f"'{line}" if line.startswith(_FORMULA) and not _NUMBER.fullmatch(line) else line


def _html(markdown: str) -> str:
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    # By default markdown-it accepts no SVG as an image.
    renderer.validateLink = lambda url: True  # type: ignore[method-assign]
    return str(renderer.render(markdown))
