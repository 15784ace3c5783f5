"""Convert the outcome of a child process to the verdict of its report and the error of its task run, as text.

The outcome is decided in `process_run`, the next step in `next_step`.
"""

from __future__ import annotations

import signal
import textwrap

from typing_extensions import assert_never

from prefect_gpu.broker.suspendable import Lost
from prefect_gpu.engine.task_engine import LONGEST_LINE, CancelledByRunner
from prefect_gpu.engine.tracebacks import ChildTraceback, attach_traceback
from prefect_gpu.errors import ChildDiedError, ChildTimeoutError, PrefectGPUError
from prefect_gpu.processes.crash_site import crashed_at
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused
from prefect_gpu.reports.model import Verdict
from prefect_gpu.runner import process_run
from prefect_gpu.runner.process_record import ProcessRecord
from prefect_gpu.runner.task_plan import TaskPlan
from prefect_gpu.suspension.moves import ProcessLostError
from prefect_gpu.units import format_bytes


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the class name unless the class is of this package."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - a user's class may have no text
        text = ""
    if isinstance(error, (PrefectGPUError, CancelledByRunner)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return an error in one line for the log: PyTorch's text has six sentences, of which the first is enough."""
    return textwrap.shorten(first_line(error), LONGEST_LINE, placeholder=" …")


def conclude(
    outcome: process_run.Failure, plan: TaskPlan, record: ProcessRecord
) -> tuple[BaseException, Verdict]:
    """Return the error and the verdict of a process without a value."""
    match outcome:
        case process_run.Failed(error, traceback):
            verdict = Verdict("failed", _last_line(traceback))
        case process_run.OutOfMemory(error, traceback):
            verdict = Verdict("oom", _last_line(traceback))
        case ChildRefused(error):
            return error, Verdict("failed", first_line(error))
        case process_run.Quit(raised, traceback):
            assert record.pid is not None
            said = f": {raised}" if str(raised) else ""
            how = f"was ended by {type(raised).__name__}{said}"
            death = ChildDiedError(plan.task_name, record.pid, how)
            death.__cause__ = ChildTraceback(traceback)
            return death, Verdict("died", _last_line(traceback) or first_line(death))
        case process_run.Died(exited, cause):
            said = f"the process {_describe_exit(exited.code)}"
            if line := crashed_at(exited.stderr_tail):
                said += f"; it crashed in native code that {line} called"
            verdict = Verdict("died", said, cause or "", stderr_tail=exited.stderr_tail)
            return _death(plan.task_name, outcome, record), verdict
        case process_run.TimedOut():
            assert plan.timeout_s is not None
            late = ChildTimeoutError(plan.task_name, plan.timeout_s)
            return late, Verdict("timeout", first_line(late))
        case process_run.Cancelled():
            ended = CancelledByRunner()
            return ended, Verdict("cancelled", first_line(ended))
        case Lost(why):
            return ProcessLostError(why), Verdict("died", why)
        case process_run.EndedForOthers(where):
            why = f"ended for other first runs on {where}, which ran short of memory"
            alone = "it gets a device to itself"
            return PrefectGPUError(why), Verdict("cancelled", why, next_words=alone)
        case _:
            assert_never(outcome)
    if traceback:
        attach_traceback(error, traceback)
    return error, verdict if verdict.error else Verdict(verdict.outcome, first_line(error))


def _last_line(traceback: str | None) -> str:
    return (traceback or "").strip().rpartition("\n")[2]


def _describe_exit(code: int) -> str:
    """Return the end of a process as text: `was killed by SIGSEGV`, `ended with exit code 3`."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code} before it returned"


def _death(task_name: str, died: process_run.Died, record: ProcessRecord) -> ChildDiedError:
    exited: ChildExited = died.exited
    detail = []
    seen = record.last_process_bytes
    if seen:
        detail.append(
            f"last seen holding {format_bytes(seen)} of its "
            f"{format_bytes(record.total_budget_bytes)} budget"
        )
    if exited.killed_because:
        detail.append(f"prefect_gpu killed it since {exited.killed_because}")
    elif died.cause == "host":
        detail.append(
            "the machine's own memory, or that of its container or job (control group), ran out: "
            "the kernel's counter of out-of-memory kills rose "
            "while it ran: load less data at a time, start fewer data loader workers, or let fewer "
            "tasks run at once (max_processes=)"
        )
    elif died.cause:
        detail.append(
            "cause unknown: possibly the kernel's out-of-memory killer, possibly a kill -9; "
            "journalctl -k shows which"
        )
    if exited.truncated:
        detail.append("it died while sending")
    if line := crashed_at(exited.stderr_tail):
        detail.append(f"it crashed in native code that {line} called")
    assert record.pid is not None
    return ChildDiedError(
        task_name, record.pid, _describe_exit(exited.code), "; ".join(detail), exited.stderr_tail
    )
