"""Which events a process leaves, what they say, and what an automation can compare."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.reports import events
from prefect_gpu.reports.events import ended_events, placed_event, set_aside_event
from prefect_gpu.scheduling.model import Placement
from prefect_gpu.units import GIB
from tests.fakes.reports import device, on_node, task_report


def test_a_placement_names_each_device_and_the_smallest_budget() -> None:
    devices = (device(0), device(1, total_gib=80))
    event = placed_event(Placement("1", devices, (6 * GIB, 4 * GIB)), "learned", 2, 1.23456)
    described = event.payload["devices"]
    assert isinstance(described, list)
    assert [each["total_bytes"] for each in described] == [d.total_bytes for d in devices]
    assert [each["uuid"] for each in described] == [d.uuid for d in devices]
    assert {**event.payload, "devices": ""} == {
        "attempt": 2,
        "devices": "",
        "budget_bytes": 4 * GIB,
        "budget_source": "learned",
        "queued_s": 1.235,
    }


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({}, [], id="a process that completes leaves none"),
        pytest.param({"outcome": "failed"}, [], id="nor does one that fails otherwise"),
        pytest.param({"outcome": "oom"}, [events.OUT_OF_MEMORY], id="out of memory"),
        pytest.param(
            {"outcome": "died", "cause": "host"},
            [events.OUT_OF_MEMORY],
            id="killed since the machine has no memory left",
        ),
        pytest.param(
            {"outcome": "died", "cause": "unknown"}, [], id="killed, and the cause is not known"
        ),
        pytest.param({"leaked_bytes": GIB}, [events.LEAKED], id="a leak"),
        pytest.param({"leaked_bytes": None}, [], id="a leak cannot be measured"),
        pytest.param(
            {"outcome": "oom", "leaked_bytes": 1}, [events.OUT_OF_MEMORY, events.LEAKED], id="both"
        ),
    ],
)
def test_a_process_leaves_events(changes: dict[str, Any], names: list[str]) -> None:
    assert [event.name for event in ended_events(task_report(**changes))] == names


@pytest.mark.parametrize(
    ("changes", "label", "runs_again"),
    [
        pytest.param({}, "false", False, id="the last process"),
        pytest.param(
            {"next_words": "more", "next_budget_bytes": 9 * GIB}, "true", True, id="one follows"
        ),
        pytest.param({"next_words": "all"}, "true", True, id="one with a device to itself follows"),
    ],
)
def test_a_shortage_says_whether_a_process_follows(
    changes: dict[str, Any], label: str, runs_again: bool
) -> None:
    (event,) = ended_events(task_report(outcome="oom", cause="own_cap", **changes))
    assert event.labels == {"prefect-gpu.cause": "own_cap", "prefect-gpu.runs-again": label}
    assert event.payload["runs_again"] is runs_again
    assert event.payload["next_budget_bytes"] == changes.get("next_budget_bytes")


def test_a_driver_that_says_too_much_is_cut() -> None:
    event = set_aside_event(device(), "no" * 10_000)
    assert len(str(event.payload["reason"])) == events.TEXT_LIMIT


def test_a_device_of_a_cluster_names_its_node() -> None:
    resource = events.device_resource(on_node("gpu-2"))
    assert resource["prefect-gpu.host"] == "gpu-2"
    assert resource["prefect.resource.id"].startswith("prefect-gpu.device.GPU-")
