"""A Ray cluster with an autoscaler that starts nodes on this machine: it is asked for what waits, and for no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from prefect_gpu import GPUTaskRunner
from prefect_gpu.cluster.autoscaler import KEEPER, has_autoscaler
from tests.fakes.ports import free_port
from tests.integration.programs import MARK, REPOSITORY, Workplace, marked, wait_for
from tests.integration.test_cluster import ONE, fails, listens, work
from tests.integration.test_cluster import place as place

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="starts Ray nodes on this machine"),
    # Of Ray: files and sockets of the nodes that it has started.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: A node with a GPU in Ray's count, where devices are simulated: one, on request.
NODES = {
    "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
    "worker": {
        "resources": {"CPU": 1, "GPU": 1, "object_store_memory": 150 << 20},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 1,
    },
}

#: Reports as a flow does until it is killed, or its input ends. Arguments: address, GPUs of a bundle that no node has.
REPORTS = """
import sys, threading, time
import ray
from prefect_gpu.cluster.autoscaler import FlowRequest
from prefect_gpu.cluster.membership import ask_autoscaler

ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
request = FlowRequest(ray, ask_autoscaler)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.5):
    request.report(ray.nodes(), {}, {int(sys.argv[2]): 1})
request.withdraw()
"""


def write_configuration(path: Path, address: str) -> None:
    """Write a configuration whose provider starts nodes as processes of this machine."""
    lists = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray"]
    configuration = {
        "cluster_name": "here",
        "max_workers": 1,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": NODES,
        "file_mounts_sync_continuously": False,
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{each}_commands": [] for each in (*lists, "worker_start_ray")},
    }
    path.write_text(json.dumps(configuration))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a head with an autoscaler; yield the cluster's address."""
    folder = tmp_path_factory.mktemp("head")
    host = ray.util.get_node_ip_address()
    port, clients = free_port(), free_port()
    write_configuration(folder / "autoscaler.json", f"{host}:{port}")
    mark = uuid.uuid4().hex
    environ = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": str(REPOSITORY),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    command = (
        f"{sys.executable} -m ray.scripts.scripts start --head --block --num-cpus=1 --num-gpus=0 --port={port} "
        f"--ray-client-server-port={clients} --dashboard-agent-listen-port=0 --include-dashboard=false "
        f"--min-worker-port=0 --max-worker-port=0 --object-store-memory={150 << 20} "
        f"--autoscaling-config={folder / 'autoscaler.json'}"
    )
    with open(folder / "head.txt", "w") as output:
        head = subprocess.Popen(
            command.split(), env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: listens(clients), explain=lambda: (folder / "head.txt").read_text())
        yield f"{host}:{port}"
    finally:
        ray.shutdown()
        # The nodes that the autoscaler has started too: Ray would end them a minute later.
        for pid, _ in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()


class Seen:
    """What the cluster knows, as one that is connected sees it."""

    def asked(self) -> list[float] | None:
        data = ray.experimental.internal_kv._internal_kv_get("autoscaler_resource_request")
        return None if data is None else sorted(each["GPU"] for each in json.loads(data))

    def keepers(self) -> int:
        named = ray.util.list_named_actors(all_namespaces=True)
        return sum(each["name"] == KEEPER for each in named)


@pytest.fixture
def seen(address: str) -> Iterator[Seen]:
    ray.init(address=address, logging_level="error", log_to_driver=False)
    yield Seen()
    ray.shutdown()


def test_requests_of_flows_add_up_and_a_flow_that_is_killed_is_dropped(
    address: str, seen: Seen, place: Workplace
) -> None:
    wait_for(lambda: has_autoscaler(ray, ray.nodes()))
    assert not seen.keepers()
    place.write("reports.py", REPORTS)
    # No node has as many GPUs, so none is started.
    killed, ends = (
        place.start("reports.py", address, gpus, stdin=subprocess.PIPE) for gpus in ("8", "16")
    )
    wait_for(lambda: seen.asked() == [8, 16], explain=lambda: f"{seen.asked()}")
    killed.kill()
    killed.wait()
    wait_for(lambda: seen.asked() == [16], explain=lambda: f"{seen.asked()}")
    ends.communicate()
    assert ends.returncode == 0
    wait_for(lambda: seen.asked() == [], explain=lambda: f"{seen.asked()}")
    wait_for(lambda: not seen.keepers())


def test_without_a_first_gpu_the_error_says_what_to_do(
    address: str, seen: Seen, prefect_server: str
) -> None:
    error = fails(GPUTaskRunner(address=address))
    assert "no node of the cluster has a device" in str(error) and "min_workers" in str(error)


def test_a_task_that_waits_gets_a_node(
    address: str, seen: Seen, prefect_server: str, tmp_path: Path
) -> None:
    @flow(task_runner=GPUTaskRunner(address=address, devices=ONE))
    def main() -> Any:
        futures = [work.submit(i, str(tmp_path)) for i in range(2)]
        wait_for(lambda: len(list(tmp_path.glob("*-*-*"))) == 2)
        Path(tmp_path, "go").touch()
        return [future.result()[1] for future in futures]

    # A device holds one of them, so both ran at once on two.
    assert len(main()) == 2
    assert sum(node["Alive"] and "GPU" in node["Resources"] for node in ray.nodes()) == 1
    assert seen.asked() == []
