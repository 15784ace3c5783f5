"""The death of a child: what is told of a process that ended without an answer, or by what it raised.

When an attempt looks at it is in `attempt`; the counters that show kills by the kernel are in
`devices.oom_kills`.
"""

from __future__ import annotations

import functools
import signal
from typing import Literal

from prefect_gpu.devices.oom_kills import OomKills
from prefect_gpu.errors import ChildDiedError
from prefect_gpu.processes.spec import ChildExited
from prefect_gpu.record import ProcessRecord
from prefect_gpu.scheduling.ladder import Cause
from prefect_gpu.units import format_bytes


class ChildTraceback(Exception):  # noqa: N818  # shown as a cause, never raised
    """The traceback that an exception had in the child, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nin the process of the GPU task:\n{self.text}"


@functools.cache
def kernel_kills() -> OomKills:
    """Give the counters of kills for want of the machine's memory, made at first use."""
    return OomKills()


def describe_exit(code: int) -> str:
    """Say how a process ended: `was killed by SIGSEGV`, `ended with exit code 3`."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code} before it returned"


def kill_cause(exited: ChildExited, kills_before: int) -> Cause | Literal[""]:
    """Tell what a SIGKILL that is not ours is put down to; empty: it was none.

    Args:
        exited: How the process ended.
        kills_before: What `kernel_kills` showed before it began.
    """
    if exited.code != -signal.SIGKILL or exited.killed_because:
        return ""
    return "host" if kernel_kills().read() > kills_before else "unknown"


def death_by_exit(task_name: str, exited: ChildExited, record: ProcessRecord) -> ChildDiedError:
    """Make the error of a process that ended without an answer.

    Args:
        task_name: Of the task.
        exited: How the process ended.
        record: What was learned of it; its cause of death is known.
    """
    detail = []
    seen = record.last_process_bytes
    if seen:
        detail.append(
            f"last seen holding {format_bytes(seen)} of its "
            f"{format_bytes(record.total_budget_bytes)} budget"
        )
    if exited.killed_because:
        detail.append(f"prefect_gpu killed it since {exited.killed_because}")
    elif record.cause == "host":
        detail.append(
            "the machine's own memory ran out: the kernel's counter of out-of-memory kills rose "
            "while it ran"
        )
    elif record.cause:
        detail.append(
            "cause unknown: possibly the kernel's out-of-memory killer, possibly a kill -9"
        )
    if exited.truncated:
        detail.append("it died while sending")
    assert record.pid is not None
    return ChildDiedError(
        task_name, record.pid, describe_exit(exited.code), "; ".join(detail), exited.stderr_tail
    )


def death_by_exception(
    task_name: str, raised: BaseException, traceback: str, record: ProcessRecord
) -> ChildDiedError:
    """Make the error of a process that raised what is meant for the process, and ends it.

    Args:
        task_name: Of the task.
        raised: `SystemExit` and its like, which would end the flow if they were raised here.
        traceback: That it had in the child, as text.
        record: What was learned of the process.
    """
    said = f": {raised}" if str(raised) else ""
    assert record.pid is not None
    death = ChildDiedError(task_name, record.pid, f"was ended by {type(raised).__name__}{said}")
    death.__cause__ = ChildTraceback(traceback)
    return death
