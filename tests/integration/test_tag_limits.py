"""Concurrency limits of tags, on a real server: heeded where there are any, else not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect import flow, get_client, task
from prefect.client.orchestration import PrefectClient
from prefect.concurrency import services

from prefect_gpu import GPUTaskRunner, gpu
from tests.integration import bodies
from tests.integration import engine_api as api

pytestmark = pytest.mark.usefixtures("prefect_server")

RUNNER = GPUTaskRunner(devices=api.TWO, reports=False)


spend = task(bodies.spend, tags={*gpu(memory="64MiB"), "one-at-a-time"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the server is asked slots for."""
    found: list[list[str]] = []
    real = PrefectClient.increment_concurrency_slots_with_lease

    async def note(client: Any, names: list[str], **arguments: Any) -> Any:
        found.append(names)
        return await real(client, names, **arguments)

    monkeypatch.setattr(PrefectClient, "increment_concurrency_slots_with_lease", note)
    return found


@pytest.fixture(params=["tag", "global"])
def limit_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    with get_client(sync_client=True) as client:
        if request.param == "tag":
            client.create_concurrency_limit("one-at-a-time", 1)
        else:
            client.upsert_global_concurrency_limit_by_name("tag:one-at-a-time", 1)
        # Prefect remembers for 5 s that there was none.
        services._no_limits_cache.clear()
        yield
        client.delete_global_concurrency_limit_by_name("tag:one-at-a-time")


@flow(task_runner=RUNNER)
def spend_two() -> list[tuple[float, float]]:
    return sorted(spend.map([1, 2]).result())


def test_without_a_limit_no_slot_is_asked_for(asked: list[list[str]]) -> None:
    assert len(spend_two()) == 2
    assert asked == []


def test_a_limit_is_heeded(limit_of_one: None, asked: list[list[str]]) -> None:
    (_, first_end), (second_began, _) = spend_two()
    assert first_end <= second_began
    assert asked and all("tag:one-at-a-time" in names for names in asked)
