"""The published reports of a flow run, read back from Prefect's API: as an object, a page, JSON or CSV.

    flow run (id or name) -> report() reads artifacts and task runs -> FlowRunReport -> HTML, JSON, CSV

The page is one file: charts are in it, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
from markdown_it import MarkdownIt
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from prefect_gpu.errors import ReportError
from prefect_gpu.reports.publish import FLOW_PREFIX, TASK_PREFIX

#: Things that one call of the API returns at most.
_PAGE = 200

#: A chart in markdown. It takes some ten thousand characters, and a terminal cannot show it.
_IMAGE = re.compile(r"!\[[^\n]*\]\(data:[^)]*\)\n*")

#: Nothing but what is in the page is loaded or run, whatever the reports contain.
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

#: Pixels of a report in a notebook.
_NOTEBOOK_HEIGHT = 640


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The report of one process of a GPU task."""

    #: Name and id of its task run; empty and `None`: it has none.
    task_run: str
    task_run_id: UUID | None
    #: As in the UI, in GitHub markdown.
    markdown: str = field(repr=False)
    #: The same figures for programs: texts by name, sizes in bytes and times in seconds. See `docs/memory.md`.
    figures: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FlowRunReport:
    """All reports of one flow run. In a notebook it shows itself."""

    flow_run: str
    flow_run_id: UUID
    #: Name of the flow run's state, such as "Completed".
    state: str
    #: The report of the whole, in GitHub markdown; empty: it is not published yet.
    markdown: str = field(repr=False)
    figures: Mapping[str, str]
    #: In the order in which they were published.
    processes: tuple[ProcessReport, ...]

    def to_html(self) -> str:
        """Return one page with all reports, which needs no other file."""
        title = html.escape(f"{self.flow_run} ({self.state})")
        parts = [f"<h1>{title}</h1>", _html(self.markdown or "The flow has not ended yet.")]
        for each in self.processes:
            name = html.escape(f"{each.task_run} · attempt {each.figures.get('attempt', '?')}")
            outcome = html.escape(each.figures.get("outcome", ""))
            parts.append(
                f"<details><summary>{name} · {outcome}</summary>"
                f"<section>{_html(each.markdown)}</section></details>"
            )
        body = "\n".join(parts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY}">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
        )

    def to_json(self) -> str:
        """Return the figures as JSON, without texts and charts."""
        found = {
            "flow_run": self.flow_run,
            "flow_run_id": str(self.flow_run_id),
            "state": self.state,
            "figures": dict(self.figures),
            "processes": [
                {
                    "task_run": each.task_run,
                    "task_run_id": str(each.task_run_id),
                    "figures": dict(each.figures),
                }
                for each in self.processes
            ],
        }
        return json.dumps(found, indent=2)

    def to_csv(self) -> str:
        """Return a row for each process and a column for each figure."""
        names = list(dict.fromkeys(name for each in self.processes for name in each.figures))
        written = io.StringIO()
        rows = csv.writer(written, lineterminator="\n")
        rows.writerow(["task_run", "task_run_id", *names])
        for each in self.processes:
            values = (each.figures.get(name, "") for name in names)
            rows.writerow([each.task_run, each.task_run_id, *values])
        return written.getvalue()

    def to_text(self) -> str:
        """Return the report of the whole in markdown without its charts, for a terminal."""
        return _IMAGE.sub("", self.markdown)

    def _repr_html_(self) -> str:
        # A frame of its own: neither its style nor whatever is in it reaches the notebook.
        page = html.escape(self.to_html(), quote=True)
        return (
            f'<iframe sandbox srcdoc="{page}" style="width:100%;height:{_NOTEBOOK_HEIGHT}px;'
            'border:0"></iframe>'
        )


def report(flow_run: UUID | str) -> FlowRunReport:
    """Read the reports of a flow run from Prefect's API.

    Args:
        flow_run: Id of the flow run, or its name; of several runs of one name the last that was started.

    Raises:
        ReportError: There is no such flow run, it has no reports, or the API does not answer.
    """
    try:
        with get_client(sync_client=True) as client:
            run = _find(client, flow_run)
            names = {UUID(each["id"]): each["name"] for each in _pages(client, "task_runs", run.id)}
            artifacts = sorted(
                _pages(client, "artifacts", run.id), key=lambda each: each["created"]
            )
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise ReportError(
            f"Prefect's API cannot be read: {type(error).__name__}: {error}"
        ) from error
    whole = [each for each in artifacts if each["key"].startswith(FLOW_PREFIX)]
    processes = [each for each in artifacts if each["key"].startswith(TASK_PREFIX)]
    if not whole and not processes:
        raise ReportError(
            f"flow run {run.name} ({run.id}) has no reports: none of its tasks had a gpu tag, or "
            "reports=False"
        )
    last = whole[-1] if whole else {}
    return FlowRunReport(
        run.name,
        run.id,
        run.state_name or "",
        last.get("data") or "",
        last.get("metadata_") or {},
        tuple(_process(each, names) for each in processes),
    )


def _process(artifact: Mapping[str, Any], names: Mapping[UUID, str]) -> ProcessReport:
    task_run_id = None if artifact["task_run_id"] is None else UUID(artifact["task_run_id"])
    name = "" if task_run_id is None else names.get(task_run_id, str(task_run_id))
    return ProcessReport(name, task_run_id, artifact["data"], artifact["metadata_"] or {})


def _find(client: SyncPrefectClient, flow_run: UUID | str) -> FlowRun:
    try:
        flow_run_id = UUID(str(flow_run))
    except ValueError:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[str(flow_run)]))
        found = client.read_flow_runs(
            flow_run_filter=named, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1
        )
        if not found:
            raise ReportError(
                f"{flow_run!r} names no flow run; accepted: the id or the name of a flow run, as "
                "`prefect flow-run ls` shows them"
            ) from None
        return found[0]
    try:
        return client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        raise ReportError(f"there is no flow run {flow_run_id} at {client.api_url}") from None


def _pages(client: SyncPrefectClient, what: str, flow_run_id: UUID) -> Iterator[dict[str, Any]]:
    """Yield everything of one kind that belongs to a flow run, with one call for each page."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])).model_dump(mode="json")
    offset = 0
    while True:
        asked = {"flow_runs": of_run, "limit": _PAGE, "offset": offset, "sort": "ID_DESC"}
        found = client.request("POST", f"/{what}/filter", json=asked).json()  # type: ignore[arg-type]
        yield from found
        if len(found) < _PAGE:
            return
        offset += len(found)


def _html(markdown: str) -> str:
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    # By itself it takes no SVG for an image.
    renderer.validateLink = _any_link  # type: ignore[method-assign]
    return str(renderer.render(markdown))


def _any_link(url: str) -> bool:
    return True
