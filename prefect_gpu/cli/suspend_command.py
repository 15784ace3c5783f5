"""`prefect-gpu suspend` and `resume`: move a task's GPU memory to the host and back.

The commands write the wanted state into the ledger of the machine, where a suspension lasts until `resume` or the task's
end. The task's flow moves the memory, and writes its progress into the ledger.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial

from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.errors import ReportError, SettingError
from prefect_gpu.suspension.eligibility import REFUSED

#: Seconds between two readings of the ledger.
LOOK_S = 0.1

#: Seconds without progress after which a command reports that the flow does not answer.
SILENT_S = 10.0

#: Fewest characters of an id that identify a run.
SHORTEST_ID = 8

_pause = threading.Event()


def find(entries: Mapping[str, Entry], run: str) -> dict[str, Entry]:
    """Return the ledger entries of a flow run or task run, by request id. `run`: see `suspend`."""

    def means(entry: Entry) -> bool:
        ids = entry.request.task_run_id, entry.request.flow_run_id
        known = len(run) >= SHORTEST_ID and any(each.startswith(run.lower()) for each in ids)
        return known or run == entry.request.task_run_name

    return {request_id: entry for request_id, entry in entries.items() if means(entry)}


def suspend(run: str, *, share: bool = False) -> int:
    """Move the GPU memory of a running task to the host, so that another program can use the device.

    The suspension lasts until `prefect-gpu resume`, or the task's end. Without `--share` the freed memory stays reserved.
    The exit code is 1 if a task is not suspended: the task continues, and the reason is printed.

    Args:
        run: Id of a flow run or task run, or at least the first eight characters of the id; or name of a task run.
        share: Let other GPU tasks use the freed memory. After `resume` the task continues when there is room for it.

    Examples:
        prefect-gpu suspend train-4f1
        prefect-gpu suspend 0198f3c1 --share
    """
    return _ask(run, away=True, share=share)


def resume(run: str) -> int:
    """Move the GPU memory of a suspended task back to its device, as soon as there is room.

    Args:
        run: Flow run or task run; see `prefect-gpu suspend`.

    Examples:
        prefect-gpu resume train-4f1
    """
    return _ask(run, away=False)


def _ask(run: str, away: bool, share: bool = False) -> int:
    from prefect_gpu.broker.host_ledger import HostStore
    from prefect_gpu.broker.preempting import hold_back
    from prefect_gpu.settings import read_settings

    ledger = Ledger(partial(HostStore, read_settings().ledger))
    found = find(ledger.running(), run)
    if ledger.problem:
        raise ReportError(f"the ledger of this machine cannot be read: {ledger.problem}")
    if not found:
        names = sorted({e.request.task_run_name for e in ledger.running().values()})
        running = f"these have devices: {', '.join(names)}" if names else "no GPU task has a device"
        accepted = "accepted: the name of a task run, the id of a task run or of a flow run"
        raise SettingError(f"{run!r} names no GPU task of this machine; {running}; {accepted}")
    for request_id in found:
        ledger.rewrite(request_id, partial(hold_back, away=away, shared=share))
    done = [_follow(ledger, i, e.request.task_run_name, away) for i, e in found.items()]
    return 0 if all(done) else 1


def _follow(ledger: Ledger, request_id: str, name: str, away: bool) -> bool:
    """Print the progress of a task's suspension or resume until its end; return whether the move succeeded."""
    told, silent_s = None, 0.0
    while (entry := ledger.running().get(request_id)) is not None:
        state = entry.suspension
        if state and state != told:
            print(f"{name}: {state}", flush=True)
            told = state
        if away and state.startswith((REFUSED, "away")):
            return state.startswith("away")
        if not away and not state:
            print(f"{name}: runs")
            return True
        if told is None and silent_s >= SILENT_S:
            text = f"{name}: its flow has not answered for {SILENT_S:g}s; the wish stays"
            print(text, file=sys.stderr)
            return False
        silent_s += LOOK_S
        _pause.wait(LOOK_S)
    print(f"{name}: has ended")
    return not away
