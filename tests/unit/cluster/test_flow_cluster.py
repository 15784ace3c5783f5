"""How many GPUs are asked of Ray's autoscaler for requests that wait."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_gpu.cluster import membership
from prefect_gpu.cluster.membership import Cluster, wanted_gpus
from prefect_gpu.cluster.node_agent import NodeSettings
from prefect_gpu.devices.spec import DeviceSpec
from prefect_gpu.errors import DeviceError
from prefect_gpu.scheduling.model import Device, ModelBudgets, Request
from prefect_gpu.units import GIB

SMALL = Device("GPU-0", 0, "small", 24 * GIB, "nvml", "a")
LARGE = Device("GPU-1", 0, "large", 80 * GIB, "nvml", "b")
CAPACITIES = {LARGE: 79 * GIB, SMALL: 23 * GIB}


def requests(number: int = 1, **fields: Any) -> list[Request]:
    return [Request("", "task", 0, 0.0, **{"memory": 2 * GIB, **fields})] * number


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param(requests(1000), [1] * 91, id="eleven small ones share a GPU"),
        pytest.param(requests(11), [1], id="eleven elevenths are one"),
        pytest.param([*requests(), *requests(memory=20 * GIB)], [1, 1], id="parts add up"),
        pytest.param(requests(3, memory=16 * GIB), [1] * 3, id="two do not fit one GPU"),
        pytest.param(requests(2, memory=0.5), [1] * 2, id="two halves do not fit one GPU"),
        pytest.param(requests(2, memory=60 * GIB), [1] * 2, id="more than the smallest has"),
        pytest.param(requests(3, memory=None), [1] * 3, id="an unknown need is a GPU"),
        pytest.param(requests(3, exclusive=True), [1] * 3, id="an exclusive task has a GPU"),
        pytest.param([*requests(2, count=4), *requests()], [4, 4, 1], id="on one node"),
        pytest.param(
            requests(2, memory=ModelBudgets((("large", GIB),))),
            [1, 1],
            id="an unknown model is a GPU to itself",
        ),
        pytest.param(requests(2, nodes=("a",)), [], id="a new node is none of the named ones"),
        pytest.param(requests(2, devices=("a:0",)), [], id="a new node has no named device"),
        pytest.param(requests(devices=("0",)), [1], id="an index is of any node"),
    ],
)
def test_gpus_that_are_wanted(waiting: list[Request], expected: list[int]) -> None:
    assert wanted_gpus(waiting, CAPACITIES, sys.maxsize) == expected


def test_nodes_that_leave_while_a_flow_connects_are_an_error_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "import_ray", SimpleNamespace)
    settings = NodeSettings("n1", DeviceSpec("auto"), "pack", None, None)
    cluster, closed = Cluster("auto", settings), list[bool]()
    monkeypatch.setattr(cluster, "open", lambda: "simulated")
    monkeypatch.setattr(cluster, "close", lambda: closed.append(True))
    with pytest.raises(DeviceError, match="there is no device"):
        cluster.start(None)
    assert closed == [True]


def test_as_many_on_a_gpu_as_allowed() -> None:
    assert wanted_gpus(requests(6), CAPACITIES, 2) == [1] * 3
