"""Events of task runs and devices, as a real server keeps them, and an automation that one of them triggers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow, task
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import DoNothing
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.reports import events
from prefect_gpu.scheduling.model import DeviceSnapshot
from prefect_gpu.testing import allocate
from prefect_gpu.units import GIB
from tests.integration import engine_api as api
from tests.integration.test_memory_ladder import machine

pytestmark = pytest.mark.usefixtures("prefect_server")


def read_events(resource_id: str, count: int, *names: str) -> list[dict[str, Any]]:
    """Return the events of some names that have a resource, oldest first, once there are `count`."""
    asked = {"filter": {"event": {"name": names}, "any_resource": {"id": [resource_id]}}}
    with get_client(sync_client=True) as client:

        def ask() -> list[dict[str, Any]] | None:
            found = client.request("POST", "/events/filter", json=asked).json()["events"]
            return found if len(found) >= count else None

        found: list[dict[str, Any]] = api.until(ask, f"{count} of {names} of {resource_id}")
    return sorted(found, key=lambda event: event["occurred"])


def related(event: dict[str, Any], role: str) -> list[str]:
    """Return the ids of the related resources of one role."""
    return [
        each["prefect.resource.id"]
        for each in event["related"]
        if each["prefect.resource.role"] == role
    ]


@task(tags=["a-tag", *gpu(memory="1GiB")], task_run_name="grows")
def grow() -> int:
    with allocate("3GiB"):
        allocation = current_allocation()
        assert allocation is not None
        return allocation.attempt


def test_an_automation_is_triggered_by_a_task_that_runs_out_of_memory() -> None:
    name = f"grows-{uuid4()}"
    automation = Automation(
        name=name,
        trigger=EventTrigger(
            expect={events.OUT_OF_MEMORY},
            match={"prefect-gpu.cause": "own_cap", "prefect-gpu.runs-again": "true"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": name},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[DoNothing()],
    ).create()
    ids: list[Any] = []

    @flow(name=name, task_runner=GPUTaskRunner(devices=api.ONE))
    def grows() -> int:
        future = grow.submit()
        ids.extend((future.task_run_id, flow_run.id))
        return future.result()

    assert grows() == 2
    run_id, flow_run_id = ids
    resource = f"prefect.task-run.{run_id}"
    first, shortage, second = read_events(resource, 3, events.PLACED, events.OUT_OF_MEMORY)

    device = first["payload"]["devices"][0]
    assert (device["uuid"], device["total_bytes"]) == ("SIM-0", 8 * GIB)
    assert first["payload"]["budget_bytes"] == GIB
    assert (first["payload"]["budget_source"], first["payload"]["attempt"]) == ("tag", 1)
    assert shortage["resource"]["prefect.resource.name"] == "grows"
    payload = shortage["payload"]
    assert (payload["cause"], payload["budget_bytes"], payload["attempt"]) == ("own_cap", GIB, 1)
    assert payload["next_budget_bytes"] == second["payload"]["budget_bytes"] == int(3.3 * GIB)
    for event in (first, shortage, second):
        assert event["resource"]["prefect.resource.id"] == resource
        assert related(event, "flow-run") == [f"prefect.flow-run.{flow_run_id}"]
        assert len(related(event, "flow")) == 1
        assert "prefect.tag.a-tag" in related(event, "tag")
        assert related(event, events.DEVICE_ROLE) == ["prefect-gpu.device.SIM-0"]

    read_events(f"prefect.automation.{automation.id}", 1, "prefect.automation.triggered")


def test_a_device_that_is_set_aside_is_an_event_of_the_flow_that_uses_it() -> None:
    ids: list[str] = []

    @task(tags=gpu(memory="1GiB"))
    def short() -> None:
        pass

    @flow(task_runner=GPUTaskRunner(devices=f"{api.ONE}@{uuid4().hex}"))
    def loses_its_device() -> str:
        ids.append(str(flow_run.id))
        short.submit().result()
        reader = machine()
        works = reader.read

        def read(roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
            return tuple(replace(each, error="fell off the bus") for each in works(roots))

        reader.read = read  # type: ignore[method-assign]
        waits = short.with_options(tags=gpu(memory="1GiB", wait="1s")).submit()
        waits.wait()
        (device,) = reader.devices()
        return device.uuid

    uuid = loses_its_device()
    (event,) = read_events(f"prefect.flow-run.{ids[0]}", 1, events.SET_ASIDE)
    assert event["resource"]["prefect.resource.id"] == f"prefect-gpu.device.{uuid}"
    assert event["payload"]["reason"] == "fell off the bus"
    assert len(related(event, "flow")) == 1
