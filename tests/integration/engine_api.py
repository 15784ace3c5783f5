"""Questions to the API about runs, repeated until it has the answer: states reach it seconds late."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterTaskRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, State, TaskRun

#: Seconds after which what the API was waited for will never come.
PATIENCE_S = 240.0

#: Seconds between two questions: each costs the server and this process milliseconds of CPU.
INTERVAL_S = 0.2

#: Two simulated devices.
TWO = "simulated:2x8GiB"
#: One simulated device.
ONE = "simulated:1x8GiB"


def until(ask: Callable[[], Any], what: str = "") -> Any:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never came: {what or ask}; the last answer was {answer!r}")
        time.sleep(INTERVAL_S)
    return answer


def task_run(run_id: UUID) -> TaskRun:
    """Return a task run once the API shows it as final."""
    with get_client(sync_client=True) as client:

        def ask() -> TaskRun | None:
            try:
                run = client.read_task_run(run_id)
            except Exception:
                return None
            return run if run.state is not None and run.state.is_final() else None

        found: TaskRun = until(ask, f"final state of task run {run_id}")
        return found


def history(run_id: UUID) -> list[State[Any]]:
    """Return all states of a task run in order, once it is final."""
    task_run(run_id)
    with get_client(sync_client=True) as client:
        states = client.read_task_run_states(run_id)
    return sorted(states, key=lambda state: state.timestamp)


def names(run_id: UUID) -> list[str]:
    """Return the names of all states of a task run in order, once it is final."""
    return [state.name or "" for state in history(run_id)]


def all_logs(flow_run_id: UUID, wanted: Iterable[str]) -> list[Any]:
    """Return the log of a flow run, once all wanted messages are in it."""
    wanted = set(wanted)
    with get_client(sync_client=True) as client:

        def ask() -> list[Any] | None:
            found = client.read_logs(
                LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id])), limit=200, offset=0
            )
            return found if wanted <= {log.message for log in found} else None

        answer: list[Any] = until(ask, f"log messages {wanted}")
        return answer


def logs(flow_run_id: UUID, wanted: Iterable[str]) -> dict[str, Any]:
    """Return the log of a flow run by message, once all wanted messages are in it."""
    return {log.message: log for log in all_logs(flow_run_id, wanted)}


def artifacts(
    *, task_run_id: UUID | None = None, flow_run_id: UUID | None = None, count: int
) -> list[Artifact]:
    """Return the artifacts of a run, oldest first, once there are `count`: but for its progress, which few flows last for."""
    asked = ArtifactFilter(
        task_run_id=ArtifactFilterTaskRunId(any_=[task_run_id]) if task_run_id else None,
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]) if flow_run_id else None,
    )
    with get_client(sync_client=True) as client:

        def ask() -> list[Artifact] | None:
            answer = client.request(
                "POST", "/artifacts/filter", json={"artifacts": asked.model_dump(mode="json")}
            )
            found = [Artifact.model_validate(each) for each in answer.json()]
            found = [each for each in found if each.type != "progress"]
            return found if len(found) >= count else None

        found: list[Artifact] = until(ask, f"{count} artifacts")
    return sorted(found, key=lambda artifact: artifact.created or 0)


def reports(task_run_id: UUID, count: int) -> list[dict[str, str]]:
    """Return the metadata of a task run's processes in their order."""
    found = artifacts(task_run_id=task_run_id, count=count)
    metadata = [artifact.metadata_ or {} for artifact in found]
    return sorted(metadata, key=lambda m: int(m["attempt"]))


def children() -> list[int]:
    """Return the ids of the child processes of GPU tasks, without sources that wait for the next flow."""
    import psutil

    from prefect_gpu.processes.standby_pool import standby_pool

    found, sources = [], standby_pool().pids
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if process.pid not in sources and any("bootstrap.py" in w for w in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
