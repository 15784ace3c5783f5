"""Two nodes with a GPU each: tasks on both, learned budgets that travel, and nothing left after a kill."""

from __future__ import annotations

import argparse

import pytest

from tests.gpu import check_cluster
from tests.gpu._checks import nvml_handles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nvml", "prefect_server", "device_is_clean"),
]


def test_a_flow_on_two_nodes_learns_and_leaves_nothing_whatever_is_killed() -> None:
    pytest.importorskip("ray")
    if len(nvml_handles()) < 2:
        pytest.skip(f"needs two devices, found {len(nvml_handles())}")
    assert check_cluster.check(argparse.Namespace(devices="nvml")) == []
