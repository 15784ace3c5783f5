"""The events of a process: names, payloads, and the labels that an automation compares."""

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


EVENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "completed": ({}, []),
    "failed": ({"outcome": "failed"}, []),
    "out of memory": ({"outcome": "oom"}, [events.OUT_OF_MEMORY]),
    "no memory of the machine": ({"outcome": "died", "cause": "host"}, [events.OUT_OF_MEMORY]),
    "killed for an unknown cause": ({"outcome": "died", "cause": "unknown"}, []),
    "a leak": ({"leaked_bytes": GIB}, [events.LEAKED]),
    "a leak cannot be measured": ({"leaked_bytes": None}, []),
    "both": ({"outcome": "oom", "leaked_bytes": 1}, [events.OUT_OF_MEMORY, events.LEAKED]),
}


@pytest.mark.parametrize(("changes", "names"), EVENTS.values(), ids=EVENTS)
def test_a_process_leaves_events(changes: dict[str, Any], names: list[str]) -> None:
    assert [event.name for event in ended_events(task_report(**changes))] == names


NEXT: dict[str, dict[str, Any]] = {
    "the last process": {},
    "one follows": {"next_words": "more", "next_budget_bytes": 9 * GIB},
    "one with a device to itself follows": {"next_words": "all"},
}


@pytest.mark.parametrize("changes", NEXT.values(), ids=NEXT)
def test_a_shortage_says_whether_a_process_follows(changes: dict[str, Any]) -> None:
    report = task_report(outcome="oom", cause="own_cap", wanted_bytes=8 * GIB, **changes)
    (event,) = ended_events(report)
    label = "true" if changes else "false"
    assert event.labels == {"prefect-gpu.cause": "own_cap", "prefect-gpu.runs-again": label}
    assert {**event.payload, "devices": ""} == {
        "attempt": 1,
        "devices": "",
        "cause": "own_cap",
        "budget_bytes": 6 * GIB,
        "budget_source": "tag",
        "needed_bytes": 8 * GIB,
        "runs_again": bool(changes),
        "next_budget_bytes": changes.get("next_budget_bytes"),
        "error": "",
    }


def test_a_driver_that_says_too_much_is_cut() -> None:
    event = set_aside_event(device(), "no" * 10_000)
    assert len(str(event.payload["reason"])) == events.TEXT_LIMIT


def test_a_device_of_a_cluster_names_its_node() -> None:
    resource = events.device_resource(on_node("gpu-2"))
    assert resource["prefect-gpu.host"] == "gpu-2"
    assert resource["prefect.resource.id"].startswith("prefect-gpu.device.GPU-")
