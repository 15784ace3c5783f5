"""The commands about past flow runs: `report`, `recommend` and `history`.

This module has the arguments and the output of the commands. `reports.advice` computes the advice, `scheduling.history`
the learned budgets. Functions import the modules that need Prefect, whose import takes a second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from prefect_gpu.errors import ReportError
from prefect_gpu.live.table import table_lines
from prefect_gpu.policy import whole
from prefect_gpu.scheduling.history import expected_s, learn
from prefect_gpu.units import counted, format_bytes, format_seconds, text_of

if TYPE_CHECKING:
    from prefect_gpu.reports.advice import TaskTags
    from prefect_gpu.reports.history import KeptHistory

#: Number of flow runs whose reports are read. Older runs may be of another program.
LAST_RUNS = 5

AsJson = Annotated[bool, Parameter("--json")]


def read_whole(_: object, tokens: Sequence[Token]) -> int:
    """Return the whole number in a token. Cyclopts itself would round 1.5 to 2."""
    return whole()(tokens[0].value)


Count = Annotated[int, Parameter(converter=read_whole, n_tokens=1, validator=Number(gte=1))]


def show_report(
    flow_run: str,
    /,
    *,
    html: Path | None = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, Parameter("--csv")] = False,
) -> str | None:
    """Print the report of a flow run, or write all reports of the run to one page.

    Args:
        flow_run: Id or name of the flow run; of several runs with one name, the last one started.
        html: Write an HTML page with all reports and charts to this file. The page needs no other file.
        as_json: Print the figures of all processes as JSON, sizes in bytes and times in seconds.
        as_csv: Print CSV, a row for each process.

    Examples:
        prefect-gpu report quiet-fox
        prefect-gpu report quiet-fox --html report.html
        prefect-gpu report quiet-fox --csv
    """
    from prefect_gpu.reports.published import report

    asked = [name for name, on in (("--html", html), ("--json", as_json), ("--csv", as_csv)) if on]
    if len(asked) > 1:
        raise ReportError(f"{' and '.join(asked)} exclude each other; accepted: one of them")
    found = report(flow_run)
    if html is not None:
        try:
            html.write_text(found.to_html(), encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{html} cannot be written: {error.strerror}") from error
        return f"{html} has the report of the flow run and of {len(found.processes)} processes"
    if as_json:
        return found.to_json()
    if as_csv:
        return found.to_csv().rstrip("\n")
    from rich.console import Console

    from prefect_gpu.cli.terminal import TerminalMarkdown

    console = Console()
    if not console.is_terminal:
        # Tables of a terminal's width would cut names for which another program searches.
        return found.to_text().rstrip("\n")
    console.print(TerminalMarkdown(found.to_text()))
    return None


def recommend(flow: str, /, *, last: Count = LAST_RUNS, as_json: AsJson = False) -> str:
    """Print the gpu:memory tag to write for each GPU task of a flow.

    The reports have the same advice. Here it is computed from all processes of the flow's last runs.

    Args:
        flow: Name of the flow; or id or name of a flow run, to read only that run.
        last: Number of the flow's last runs to read (default: 5).
        as_json: Print JSON, sizes in bytes.

    Examples:
        prefect-gpu recommend evaluate-all
        prefect-gpu recommend evaluate-all --last 20
        prefect-gpu recommend quiet-fox --json
    """
    from prefect_gpu.reports.advice import task_tags
    from prefect_gpu.reports.published import read_task_reports

    tags = task_tags(read_task_reports(flow, last))
    if as_json:
        return json.dumps([_tags_json(each) for each in tags], indent=2)
    heads = ("task", "runs", "peak", "budget now", "write", "saves", "because")
    return "\n".join(table_lines([heads, *map(_tags_row, tags)]))


def _tags_row(tags: TaskTags) -> tuple[str, ...]:
    saved = tags.saved_bytes
    keep = tags.fits or not tags.write
    return (
        _named(tags.task_name, tags.learn_by),
        str(tags.runs),
        _size(tags.peak_bytes),
        tags.budget_words,
        "nothing" if keep else _plain(tags.write_words),
        "" if keep or saved is None or saved <= 0 else format_bytes(saved),
        tags.why or "it is not known what it needs",
    )


def _size(size_bytes: int | None) -> str:
    # The report of a process that ended immediately shows no memory.
    return format_bytes(size_bytes) if size_bytes else "?"


def _tags_json(tags: TaskTags) -> dict[str, Any]:
    written = {"write": _plain(tags.write), "saved_bytes": tags.saved_bytes}
    return {**dataclasses.asdict(tags), **written}


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _named(task_name: str, learn_by: str) -> str:
    return f"{task_name} ({learn_by})" if learn_by else task_name


def list_histories(flow: str | None = None, /, *, as_json: AsJson = False) -> str:
    """List the histories of tasks: a line for each task of a flow, GPU model and set of gpu:learn_by values.

    Args:
        flow: List only tasks of this flow: name of the flow, or id or name of one of its runs.
        as_json: Print JSON, sizes in bytes and times in seconds.

    Examples:
        prefect-gpu history list
        prefect-gpu history list evaluate-all
        prefect-gpu history list --json
    """
    from prefect_gpu.reports.history import read_histories
    from prefect_gpu.reports.published import open_api, read_task_reports

    with open_api() as client:
        found = read_histories(client, lambda key: flow in (None, key.flow_name))
        if flow is not None and not found:
            # It may name a flow run.
            reports = read_task_reports(flow, LAST_RUNS)
            ran = {(r.flow_name, r.task_name, r.qualified_name) for r in reports}
            found = read_histories(
                client, lambda key: (key.flow_name, key.task_name, key.qualified_name) in ran
            )
    if as_json:
        return json.dumps([_history_json(each) for each in found], indent=2)
    if not found:
        return "no histories"
    heads = ("task", "flow", "on", "runs", "peak", "seconds", "next budget", "last run (UTC)")
    return "\n".join(table_lines([heads, *map(_history_row, found)]))


def reset_histories(
    tasks: list[str] | None = None,
    /,
    *,
    flow: str | None = None,
    every: Annotated[bool, Parameter("--all")] = False,
    yes: bool = False,
) -> str:
    """Delete the histories of tasks, so that the memory need of these tasks is learned again.

    A Python process that has run a task, such as a notebook's kernel, keeps a copy of the history until its end.

    Args:
        tasks: Names of tasks, as `prefect-gpu history list` shows them.
        flow: Delete only histories of the flow with this name (default: of all flows, and of tasks outside flows).
        every: Delete the histories of all tasks, after a confirmation.
        yes: Do not ask for confirmation.

    Examples:
        prefect-gpu history reset train evaluate
        prefect-gpu history reset train --flow nightly
        prefect-gpu history reset --all
        prefect-gpu history reset --all --yes
    """
    from prefect_gpu.reports.history import delete_history, read_histories
    from prefect_gpu.reports.published import open_api

    if bool(tasks) == every:
        raise ReportError("name the tasks whose histories are to be deleted, or give --all")
    with open_api() as client:
        found = read_histories(client, lambda key: flow in (None, key.flow_name))
        if flow is not None and not found:
            hint = "`prefect-gpu history list` shows the flows. Nothing was deleted"
            raise ReportError(f"nothing is learned in flow {flow!r}; {hint}")
        where = "" if flow is None else f" in flow {flow!r}"
        known = {each.key.task_name for each in found}
        if unknown := set(tasks or ()) - known:
            named, there = ", ".join(sorted(unknown)), ", ".join(sorted(known)) or "no task"
            problem = f"nothing is learned of {named}{where}; known: {there}"
            raise ReportError(f"{problem}. Nothing was deleted")
        chosen = [each for each in found if every or each.key.task_name in (tasks or ())]
        names = sorted({each.key.task_name for each in chosen})
        what = f"{counted(len(chosen), 'history', 'histories')} of {counted(len(names), 'task')}{where}"
        if every and chosen and not yes and not _agreed(f"Delete {what} at {client.api_url}?"):
            raise ReportError("nothing was deleted")
        runs = sum(delete_history(each.artifact_key, client) for each in chosen)
    return f"deleted {what}, with {counted(runs, 'run')}: {', '.join(names) or 'none'}"


def _agreed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, RuntimeError):
        return False  # There is no standard input.


def _history_row(history: KeptHistory) -> tuple[str, ...]:
    key, found = history.key, _history_json(history)
    ended = datetime.fromtimestamp(found["last_ended_at"], timezone.utc)
    return (
        _named(key.task_name, key.learn_by_words or key.learn_by),
        text_of(key.flow_name, absent="none"),
        key.device_name,
        str(found["runs"]),
        _size(found["peak_bytes"]),
        text_of(found["expected_s"], format_seconds, "?"),
        text_of(found["budget_bytes"], format_bytes, "not known: a first run"),
        f"{ended:%Y-%m-%d %H:%M}",
    )


def _history_json(history: KeptHistory) -> dict[str, Any]:
    lesson = learn(history.runs)
    peaks = [run.process_bytes for run in history.runs if run.process_bytes is not None]
    return {
        **dataclasses.asdict(history.key),
        "artifact_key": history.artifact_key,
        # Task runs that count for the next budget: a task run may have had several processes.
        "runs": len({run.task_run_id or at for at, run in enumerate(history.runs)}),
        "peak_bytes": max(peaks, default=None),
        "expected_s": expected_s(history.runs),
        "budget_bytes": None if lesson is None else lesson.budget_bytes,
        "last_ended_at": history.runs[0].ended_at,
    }
