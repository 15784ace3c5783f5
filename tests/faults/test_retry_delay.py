"""The end of a flow while a task of it waits for its next retry."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prefect import flow, get_client, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.runner.engine_threads import NAME
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

#: Longer than the end of a flow waits for anything.
DELAY_S = 600


@task(tags=gpu(memory="64MiB"), retries=1, retry_delay_seconds=DELAY_S)
def fails() -> None:
    raise ValueError("of the body")


@task(retries=1, retry_delay_seconds=DELAY_S)
def fails_in_a_thread() -> None:
    raise ValueError("of the body")


def test_a_task_that_waits_for_its_retry_is_cancelled_when_its_flow_raises() -> None:
    kept: list[Any] = []

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False))
    def raises() -> None:
        kept.extend((fails.submit(), fails_in_a_thread.submit()))
        with get_client(sync_client=True) as client:
            api.until(lambda: {shown(client, future) for future in kept} == {"AwaitingRetry"})
        raise ValueError("of the flow")

    with pytest.raises(ValueError, match="of the flow"):
        raises()
    assert all(future.wrapped_future.done() for future in kept)
    api.until(lambda: not [t for t in threading.enumerate() if t.name.startswith(NAME)])
    for future in kept:
        # As a task that waits for a device.
        assert api.names(future.task_run_id)[-2:] == ["AwaitingRetry", "Cancelled"]
    assert isinstance(kept[0].result(raise_on_failure=False), Exception)


def shown(client: Any, future: Any) -> str | None:
    """Return the name of a task run's state in the API; `None`: it is not there yet."""
    try:
        name: str | None = client.read_task_run(future.task_run_id).state_name
    except Exception:
        return None
    return name
