"""Ray nodes of the benchmarks: they end with the context, and one can be killed before."""

from __future__ import annotations

import sys

import pytest

from tests.cases import needs
from tests.process.rig import eventually

ray_nodes = pytest.importorskip("_ray_nodes")


@needs("ray")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts Ray nodes on this machine")
def test_nodes_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ray_nodes.ENVIRONMENT:
        # Restored afterwards.
        monkeypatch.setenv(name, "")
    with ray_nodes.ray_nodes(["0", "1"], object_store_bytes=150 << 20) as nodes:
        assert nodes.names == ["node-0", "node-1"]

        def raylets() -> list[str]:
            return [
                process.environ()["CUDA_VISIBLE_DEVICES"]
                for process in ray_nodes.processes_marked(nodes.mark)
                if process.name() == "raylet"
            ]

        assert sorted(raylets()) == ["0", "1"]
        nodes.kill("node-1")
        assert eventually(lambda: raylets() == ["0"])
    assert ray_nodes.processes_marked(nodes.mark) == []
