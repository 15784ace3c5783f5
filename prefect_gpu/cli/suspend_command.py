"""`prefect-gpu suspend` and `resume`: a person moves a task's GPU memory to the host and back.

The wish is written into the ledger of the machine; the task's flow carries it out and writes its progress there. The
wish holds until `resume` or the task's end, also after the end of this command.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial

from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.errors import ReportError, SettingError
from prefect_gpu.suspension.suspended import REFUSED

#: Seconds between two readings of the ledger.
LOOK_S = 0.1

#: Seconds without progress after which a flow is reported as silent.
SILENT_S = 10.0

#: Fewest characters of an id by which a run is found.
SHORTEST_ID = 8

_pause = threading.Event()


def find(entries: Mapping[str, Entry], run: str) -> dict[str, Entry]:
    """Return the tasks that a person means, by request id.

    Args:
        entries: Entries of all tasks that have devices or are suspended.
        run: Id of a flow run or a task run, or its beginning; or the name of a task run.
    """

    def means(entry: Entry) -> bool:
        ids = entry.request.task_run_id, entry.request.flow_run_id
        known = len(run) >= SHORTEST_ID and any(each.startswith(run.lower()) for each in ids)
        return known or run == entry.request.task_run_name

    return {i: e for i, e in entries.items() if means(e)}


def suspend(run: str, *, share: bool = False) -> int:
    """Move the GPU memory of a running task to the host, so that its device is free for a while.

    It holds until `prefect-gpu resume`, or the task's end. What is freed stays reserved, so that other GPU tasks do not
    get it, but for `--share`. The exit code is 1 if a task is not suspended; it then goes on as before, and the reason is
    printed.

    Args:
        run: Id of a flow run or a task run, or its first eight characters or more; or the name of a task run.
        share: Other GPU tasks may have what is freed. The task then comes back after `resume` when there is room for it.

    Examples:
        prefect-gpu suspend train-4f1
        prefect-gpu suspend 0198f3c1 --share
    """
    return _ask(run, away=True, share=share)


def resume(run: str) -> int:
    """Move the GPU memory of a suspended task back, as soon as its device has the room.

    Args:
        run: See `prefect-gpu suspend`.

    Examples:
        prefect-gpu resume train-4f1
    """
    return _ask(run, away=False)


def _ask(run: str, away: bool, share: bool = False) -> int:
    # Imported here because other commands need neither.
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
        raise SettingError(f"no GPU task on this machine is of the run {run!r}; {running}")
    for request_id in found:
        ledger.rewrite(request_id, partial(hold_back, away=away, shared=share))
    failed = [
        request_id
        for request_id, entry in found.items()
        if not _follow(ledger, request_id, entry.request.task_run_name, away)
    ]
    return 1 if failed else 0


def _follow(ledger: Ledger, request_id: str, name: str, away: bool) -> bool:
    """Print the progress of a task's suspension or resume until it is done; return whether it succeeded."""
    told, silent_s = None, 0.0
    while True:
        entry = ledger.running().get(request_id)
        if entry is None:
            print(f"{name}: has ended")
            return not away
        state = entry.suspension
        if state != told and state:
            print(f"{name}: {state}", flush=True)
            told = state
        if away and state.startswith(REFUSED):
            return False
        if away and state.startswith("away"):
            return True
        if not away and not state:
            print(f"{name}: runs")
            return True
        if told is None and silent_s >= SILENT_S:
            print(
                f"{name}: its flow has not answered for {SILENT_S:g}s; the wish stays",
                file=sys.stderr,
            )
            return False
        silent_s += LOOK_S
        _pause.wait(LOOK_S)
