"""The progress of a running flow: values, the text of its progress artifact, and the lines of its live view. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_gpu.live.table import (
    DEVICE_HEADS,
    Row,
    device_label,
    device_row,
    device_status,
    table_lines,
)
from prefect_gpu.scheduling.memory import DeviceState
from prefect_gpu.scheduling.reasons import Reason, sentence
from prefect_gpu.units import format_bytes, format_seconds, text_of

#: Most devices, waiting task runs and running task runs in a view, and running task runs in the smallest terminal.
MOST_DEVICES, MOST_WAITING, MOST_RUNNING, LEAST_RUNNING = 8, 3, 10, 2


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Numbers of a flow's GPU task runs: submitted in all, with devices (`running`), waiting for devices, and ended."""

    submitted: int = 0
    running: int = 0
    waiting: int = 0
    #: Ended task runs by name of their state.
    ended: Mapping[str, int] = field(default_factory=dict)
    #: Whether the flow has ended.
    over: bool = False

    @property
    def ended_count(self) -> int:
        """Number of ended task runs."""
        return sum(self.ended.values())

    @property
    def percent(self) -> float:
        """Percentage of submitted task runs that have ended, rounded down: 100 means all."""
        return float(100 * self.ended_count // self.submitted) if self.submitted else 0.0


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task run that has devices. Bytes are totals over all its devices."""

    name: str
    #: Labels of the devices.
    devices: tuple[str, ...]
    budget_bytes: int
    #: Bytes in the last reading; `None`: no reading yet.
    used_bytes: int | None
    #: Seconds since the placement.
    seconds: float
    #: Whether the body has begun.
    started: bool
    #: Ended steps (`prefect_gpu.step`).
    steps: int = 0
    #: Median seconds of a step; `None`: not known.
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task run that waits for a device."""

    #: Sort key of the queue, lowest first.
    order: tuple[int, int]
    name: str
    #: Seconds since the request; `None`: no request yet, the task run waits for a probe (first run) of another task run.
    seconds: float | None
    #: `None`: not known yet.
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class FlowProgress:
    """The content of a live view: task runs and devices of one flow, or of several flows (`combine`)."""

    counts: RunCounts
    devices: Sequence[DeviceState] = ()
    #: In the order of placement.
    running: Sequence[RunningTask] = ()
    #: The first waiting task runs, in the order of the queue.
    waiting: Sequence[WaitingTask] = ()


def combine(parts: Sequence[FlowProgress]) -> FlowProgress:
    """Return the progress of several flows as one."""
    if len(parts) == 1:
        return parts[0]
    ended: Counter[str] = Counter()
    for part in parts:
        ended.update(part.counts.ended)
    counts = [part.counts for part in parts]
    return FlowProgress(
        RunCounts(
            sum(each.submitted for each in counts),
            sum(each.running for each in counts),
            sum(each.waiting for each in counts),
            ended,
            all(each.over for each in counts),
        ),
        # Flows may share devices.
        tuple({each.device.key: each for part in parts for each in part.devices}.values()),
        sorted((r for part in parts for r in part.running), key=lambda r: -r.seconds),
        sorted((w for part in parts for w in part.waiting), key=lambda w: w.order),
    )


def progress_words(counts: RunCounts) -> str:
    """Return the counts as text: "12 of 40 ended, 4 running, 24 waiting for a device"."""
    done, total = counts.ended_count, counts.submitted
    words = f"{done:,} of {total:,} ended"
    states = sorted(counts.ended.items(), key=lambda each: -each[1])
    left = total - done
    if counts.over:
        if states:
            words += f": {', '.join(f'{count:,} {name}' for name, count in states)}"
        return words if left <= 0 else f"{words}; the flow ended before the other {left:,}"
    words += f", {counts.running:,} running, {counts.waiting:,} waiting for a device"
    other = left - counts.running - counts.waiting
    if other > 0:
        words += f", {other:,} waiting for their inputs or a retry"
    bad = [f"{count:,} {name}" for name, count in states if name not in ("Completed", "Cached")]
    return f"{words} ({', '.join(bad)})" if bad else words


def view_lines(progress: FlowProgress, height: int) -> list[str]:
    """Return the lines of a live view for a terminal of `height` lines. In less than 12 lines the end is cut."""
    lines = [f"GPU task runs: {progress_words(progress.counts)}"]
    if progress.devices:
        shown = progress.devices[:MOST_DEVICES]
        rows = [device_row(device_status(d), device_label(d.device)) for d in shown]
        lines += table_lines([DEVICE_HEADS, *rows])
        lines += _others(len(progress.devices) - len(shown), "device")
    after: list[str] = []
    if progress.waiting:
        waiting = progress.waiting[:MOST_WAITING]
        heads: Row = ("waiting", "for", "what it waits for")
        rows = [(w.name, _since(w.seconds), text_of(w.reason, sentence)) for w in waiting]
        after = table_lines([heads, *rows])
        after += _others(progress.counts.waiting - len(waiting), "waiting task run")
    if progress.running:
        # Two lines are for the heads and the count of other task runs.
        room = height - 1 - len(lines) - len(after) - 2
        running = progress.running[: max(LEAST_RUNNING, min(room, MOST_RUNNING))]
        heads = ("running", "device", "used", "budget", "for", "step")
        lines += table_lines([heads, *map(_running_row, running)])
        lines += _others(progress.counts.running - len(running), "running task run")
    return (lines + after)[: max(1, height - 1)]


def _others(count: int, what: str) -> list[str]:
    return [] if count <= 0 else [f"and {count:,} other {what}{'' if count == 1 else 's'}"]


def _running_row(task: RunningTask) -> tuple[str, ...]:
    step = "" if task.started else "its process starts"
    if task.steps:
        step = f"{task.steps:,}"
        if task.step_s is not None:
            step += f" ({format_seconds(task.step_s)} each)"
    sizes = (text_of(task.used_bytes, format_bytes), format_bytes(task.budget_bytes))
    return (task.name, ",".join(task.devices), *sizes, _since(task.seconds), step)


def _since(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f}s" if seconds < 59 else format_seconds(seconds)
