"""However a flow is started: its tasks use the GPU, the process that started it does not, and nothing stays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.check_many_flows import check_kill
from tests.gpu.check_ways import WAYS, Seen, Way, look, measure_context, missing_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nvml", "device_is_clean")]


@pytest.fixture(autouse=True)
def server(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the programs that it starts.
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)


@pytest.fixture(scope="module")
def context_is_known(nvml: object, prefect_server: str) -> None:
    measure_context("nvml")


@pytest.mark.usefixtures("context_is_known")
@pytest.mark.parametrize("start", WAYS.values(), ids=list(WAYS))
def test_only_the_tasks_of_a_flow_use_the_gpu(start: Callable[[Way], Seen], tmp_path: Path) -> None:
    if missing := missing_for(start):
        pytest.skip(missing)
    assert look(start, tmp_path, "nvml").problems == []


def test_a_killed_flow_leaves_no_memory_of_its_eight_tasks(tmp_path: Path) -> None:
    assert check_kill(argparse.Namespace(devices="nvml"), str(tmp_path)) == []
