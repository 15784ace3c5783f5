"""A Ray cluster with an autoscaler that starts nodes on this machine: it is asked for what waits, and for no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from prefect_gpu import GPUTaskRunner
from tests.cases import needs
from tests.fakes.ports import free_port
from tests.integration.programs import MARK, REPOSITORY, Workplace, marked, wait_for
from tests.integration.test_cluster import ONE, fails, listens, work

pytestmark = [
    needs("ray"),
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
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Start a head with an autoscaler; yield the cluster's address, and the port for clients."""
    import ray

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
        # Where the user's folder has a token, a head demands it, and a program that names an address sends none.
        "RAY_AUTH_MODE": "disabled",
    }
    command = (
        f"{sys.executable} -m ray.scripts.scripts start --head --block --num-cpus=1 --num-gpus=0 --port={port} "
        f"--ray-client-server-port={clients} --dashboard-agent-listen-port=0 --include-dashboard=false "
        f"--min-worker-port=0 --max-worker-port=0 --object-store-memory={150 << 20} "
        f"--autoscaling-config={folder / 'autoscaler.json'}"
    )
    with open(folder / "head.txt", "w") as output:
        process = subprocess.Popen(
            command.split(), env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: listens(clients), explain=lambda: (folder / "head.txt").read_text())
        yield f"{host}:{port}", clients
    finally:
        ray.shutdown()
        # The nodes that the autoscaler has started too: Ray would end them a minute later.
        for pid, _ in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def address(head: tuple[str, int]) -> str:
    return head[0]


@pytest.fixture
def seen(address: str) -> Iterator[Callable[[], list[float] | None]]:
    """Return a function that returns the GPUs that the autoscaler is asked for; `None`: it was never asked."""

    import ray

    def asked() -> list[float] | None:
        data = ray.experimental.internal_kv._internal_kv_get("autoscaler_resource_request")
        return None if data is None else sorted(each["GPU"] for each in json.loads(data))

    ray.init(address=address, logging_level="error", log_to_driver=False)
    yield asked
    ray.shutdown()


def test_without_a_gpu_node_the_flow_fails_and_asks_for_nothing(
    address: str, seen: Callable[[], list[float] | None], prefect_server: str
) -> None:
    error = fails(GPUTaskRunner(address=address))
    assert "no node of the cluster has a device" in str(error)
    assert not seen()


def test_a_task_that_waits_gets_a_node_and_the_request_is_withdrawn(
    address: str, seen: Callable[[], list[float] | None], prefect_server: str, tmp_path: Path
) -> None:
    @flow(task_runner=GPUTaskRunner(address=address, devices=ONE))
    def main() -> Any:
        futures = [work.submit(i, str(tmp_path)) for i in range(2)]
        wait_for(lambda: len(list(tmp_path.glob("*-*-*"))) == 2)
        Path(tmp_path, "go").touch()
        return [future.result()[1] for future in futures]

    import ray

    # A device holds one of them, so both ran at once on two.
    assert len(main()) == 2
    assert sum(node["Alive"] and "GPU" in node["Resources"] for node in ray.nodes()) == 1
    assert seen() == []


CLIENT = """
import sys, time
from pathlib import Path
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

@task(tags=gpu(memory="20GiB"))
def hold(i):
    while not Path("go").exists():
        time.sleep(0.05)

@flow(task_runner=GPUTaskRunner(address=sys.argv[1], devices="simulated:1x24GiB"))
def main():
    hold.map(range(4)).result()

main()
"""


def test_a_client_asks_for_the_node_that_is_used_and_for_what_waits(
    head: tuple[str, int], seen: Callable[[], list[float] | None], place: Workplace, tmp_path: Path
) -> None:
    place.write("client.py", CLIENT)
    with open(tmp_path / "stderr.txt", "w") as stderr:
        client = place.start(
            "client.py", f"ray://127.0.0.1:{head[1]}", stdout=stderr, stderr=stderr
        )
    # The head has none in Ray's count, and two tasks wait for a device.
    wait_for(lambda: seen() == [1, 1, 1], explain=lambda: f"{seen()}")
    Path(place.folder, "go").touch()
    assert client.wait() == 0, (tmp_path / "stderr.txt").read_text()
    assert seen() == []
