"""What a person reads of a task's history: its last runs, and what they teach.

Text only: the lesson itself is `scheduling.history.learn`, and where the page goes is `history`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from prefect_gpu.reports.markup import escape, table
from prefect_gpu.reports.model import CAUSE_WORDS
from prefect_gpu.reports.timeline import OUTCOME_WORDS
from prefect_gpu.scheduling.history import HistoryKey, PastRun, learn
from prefect_gpu.units import format_bytes, format_seconds

_OUTCOMES: Mapping[str, str] = {str(word): text for word, text in OUTCOME_WORDS.items()}

_HEADS = (
    "ended (UTC)",
    "outcome",
    "budget",
    "live peak",
    "steady live",
    "process peak",
    "context",
    "retries",
    "step",
    "cause",
)

_LEGEND = (
    "Sizes are those of one device. *Live* is what the frameworks had allocated, *steady* the same "
    "without the first step, *process peak* what the device showed for the whole process, *context* "
    "the part of it that no framework counts. *Retries* are allocations that succeeded only after "
    "the framework's cache was given up."
)


def history_markdown(key: HistoryKey, runs: Sequence[PastRun]) -> str:
    """Write the page of one history.

    Args:
        key: What it is about.
        runs: Newest first.
    """
    about = f"Task {escape(key.task_name)} on {escape(key.device_name)}"
    if key.learn_by:
        about += f", for one set of its `gpu:learn_by` values ({escape(key.learn_by)})"
    rows = [
        (
            _time(run.ended_at),
            _OUTCOMES.get(run.outcome, escape(run.outcome)),
            format_bytes(run.budget_bytes) + ("" if run.cap_bytes is not None else ", no cap"),
            _size(run.live_bytes),
            _size(run.steady_live_bytes),
            format_bytes(run.process_bytes),
            format_bytes(run.context_bytes),
            str(run.alloc_retries),
            "–" if run.step_s is None else format_seconds(run.step_s),
            CAUSE_WORDS.get(run.cause, escape(run.cause)) or "–",
        )
        for run in runs
    ]
    parts = (
        f"**{_lesson(runs)}**",
        f"{about}. A `gpu:memory` tag takes precedence over what is learned.",
        table(_HEADS, rows, right=range(2, 9)),
        _LEGEND,
    )
    return "\n\n".join(parts) + "\n"


def _lesson(runs: Sequence[PastRun]) -> str:
    lesson = learn(runs)
    if lesson is None:
        return "No run has completed: the next one has a device to itself, to find out."
    count = "1 completed run" if lesson.runs == 1 else f"{lesson.runs} completed runs"
    text = (
        f"Next budget: {format_bytes(lesson.budget_bytes)} of each device, "
        f"{format_bytes(lesson.context_bytes)} of it for the context, learned from {count}."
    )
    if lesson.floor_bytes:
        text += (
            f" Not less than {format_bytes(lesson.floor_bytes)}: with a smaller one it ran out of "
            "memory or slowed down."
        )
    return text


def _size(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else format_bytes(size_bytes)


def _time(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        # Anybody may write artifacts; a page is not lost for one.
        return "–"
