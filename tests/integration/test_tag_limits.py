"""Concurrency limits of tags, on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prefect import flow, get_client, task

from prefect_gpu import GPUTaskRunner, gpu
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

RUNNER = GPUTaskRunner(devices=api.TWO, reports=False)


@task(tags={*gpu(memory="64MiB"), "one-at-a-time"})
def spend(_: int) -> tuple[float, float]:
    began = time.time()
    time.sleep(0.2)
    return began, time.time()


@pytest.fixture(params=["tag", "global"])
def limit_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    with get_client(sync_client=True) as client:
        if request.param == "tag":
            client.create_concurrency_limit("one-at-a-time", 1)
        else:
            client.upsert_global_concurrency_limit_by_name("tag:one-at-a-time", 1)
        yield
        client.delete_global_concurrency_limit_by_name("tag:one-at-a-time")


@flow(task_runner=RUNNER)
def spend_two() -> list[tuple[float, float]]:
    return sorted(spend.map([1, 2]).result())


def test_a_limit_is_heeded(limit_of_one: None) -> None:
    (_, first_end), (second_began, _) = spend_two()
    assert first_end <= second_began
