"""How many GPUs are asked of the autoscaler for what waits."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_gpu.cluster.wanted import MOST_BUNDLES, add_up, count_bundles
from prefect_gpu.scheduling.model import Device, ModelBudgets, Request
from prefect_gpu.units import GIB

SMALL = Device("GPU-0", 0, "small", 24 * GIB, "nvml", "a")
LARGE = Device("GPU-1", 0, "large", 80 * GIB, "nvml", "b")
DEVICES = {LARGE: 79 * GIB, SMALL: 23 * GIB}


def request(**fields: Any) -> Request:
    return Request("", "task", 0, 0.0, **{"memory": 2 * GIB, **fields})


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param([], {}, id="nothing waits"),
        pytest.param([(request(), 1000)], {1: 91}, id="eleven small ones share a device"),
        pytest.param([(request(), 1), (request(memory=20 * GIB), 1)], {1: 2}, id="parts add up"),
        pytest.param([(request(), 1)] * 11, {1: 1}, id="eleven elevenths are one"),
        pytest.param([(request(memory=16 * GIB), 3)], {1: 3}, id="two do not fit one device"),
        pytest.param(
            [(request(memory=0.5), 4)], {1: 4}, id="half of the device is more than its half"
        ),
        pytest.param([(request(memory=60 * GIB), 2)], {1: 2}, id="more than the smallest has"),
        pytest.param([(request(memory=None), 3)], {1: 3}, id="an unknown need is a device"),
        pytest.param([(request(exclusive=True), 3)], {1: 3}, id="an exclusive task has a device"),
        pytest.param([(request(count=4), 2), (request(), 1)], {4: 2, 1: 1}, id="on one node"),
        pytest.param(
            [(request(memory=ModelBudgets((("large", GIB),))), 2)],
            {1: 2},
            id="a model that is not known is a device to itself",
        ),
        pytest.param([(request(nodes=("a",)), 2)], {}, id="a new node is none of the named ones"),
        pytest.param([(request(devices=("a:0",)), 2)], {}, id="nor has it a named device"),
        pytest.param([(request(devices=("0",)), 1)], {1: 1}, id="an index is of any node"),
        pytest.param([(request(memory=None), 9999)], {1: MOST_BUNDLES}, id="there is a limit"),
    ],
)
def test_bundles(waiting: list[tuple[Request, int]], expected: dict[int, int]) -> None:
    assert count_bundles(waiting, DEVICES) == expected


def test_as_many_as_may_start() -> None:
    waiting = [(request(memory=None), 3), (request(count=2), 5)]
    assert count_bundles(waiting, DEVICES, most_tasks=4) == {1: 3, 2: 1}
    assert count_bundles(waiting, DEVICES, most_tasks=0) == {}


def test_as_many_on_a_device_as_allowed() -> None:
    assert count_bundles([(request(), 6)], DEVICES, max_tasks=2) == {1: 3}


def test_without_a_device_those_that_share_share_one() -> None:
    waiting = [(request(), 1000), (request(memory=0.5), 10), (request(memory=None), 2)]
    assert count_bundles(waiting, {}) == {1: 3}
    assert count_bundles([(request(), 4)], {}, max_tasks=2) == {1: 2}


def test_flows_share_nodes_and_not_what_waits() -> None:
    reports = [({"a": 4.0, "b": 8.0}, {1: 2}), ({"b": 8.0}, {4: 1, 1: 1})]
    assert [each["GPU"] for each in add_up(reports)] == [4.0, 8.0, 4, 1, 1, 1]


def test_nodes_alone_are_not_asked_for() -> None:
    assert add_up([({"a": 4.0}, {})]) == add_up([]) == []
