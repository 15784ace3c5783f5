"""A Ray cluster whose nodes are processes of this machine, with devices of their own.

Starts and ends it. What runs on it belongs to the benchmarks and checks that use it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import _common
import psutil

#: Seconds that a node may take to start, and to end before its processes are killed.
START_S = 120.0
END_S = 10.0

#: Variable that all processes of a cluster have in their environment; its value is the cluster's own.
MARK = "PREFECT_GPU_RAY_NODES"

#: For all nodes, and for the programs that connect to them: they must agree on the first.
ENVIRONMENT = {
    # Otherwise Ray writes a token into the home folder; this cluster listens on this machine only.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def processes_marked(mark: str) -> list[psutil.Process]:
    """Return the processes of the cluster with this mark that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            # It has ended, or it is another user's.
            continue
    return found


@dataclass
class Nodes:
    """The nodes of a running cluster."""

    #: As `ray.init` takes it.
    address: str
    #: See `processes_marked`.
    mark: str
    #: The command `ray start` of each node, by the node's name. The first is the head.
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes, in the order of their devices."""
        return list(self.commands)

    def kill(self, name: str) -> None:
        """Kill the raylet of a node with SIGKILL, as if its machine had lost power.

        The head's raylet takes the whole cluster with it.
        """
        (raylet,) = (
            child
            for child in psutil.Process(self.commands[name].pid).children()
            if child.name() == "raylet"
        )
        raylet.kill()


@contextmanager
def ray_nodes(
    devices: Sequence[str], cpus: int = 1, object_store_bytes: int = 2**28
) -> Iterator[Nodes]:
    """Start a Ray cluster on this machine, and end all of its processes on exit.

    Args:
        devices: `CUDA_VISIBLE_DEVICES` of each node. The nodes are called `node-0`, `node-1`, and so on.
        cpus: CPUs of each node, in Ray's count.
        object_store_bytes: Size of each node's object store.

    Raises:
        SystemExit: A node does not start.
    """
    os.environ.update(ENVIRONMENT)
    # Paths of sockets have at most 107 bytes, and Ray adds about 70 to the folder's.
    folder = Path(tempfile.mkdtemp(prefix="nodes", dir="/tmp"))
    nodes = Nodes(f"127.0.0.1:{free_port()}", uuid.uuid4().hex)
    try:
        for index, device in enumerate(devices):
            name = f"node-{index}"
            log = folder / f"{name}.log"
            nodes.commands[name] = _start(nodes, name, device, cpus, object_store_bytes, log)
            # The others connect to the head.
            if index == 0:
                _wait_until_started(nodes.commands[name], log)
        for name, command in nodes.commands.items():
            _wait_until_started(command, folder / f"{name}.log")
        yield nodes
    finally:
        _end(nodes)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    nodes: Nodes, name: str, device: str, cpus: int, object_store_bytes: int, log: Path
) -> subprocess.Popen[bytes]:
    if nodes.commands:
        # One log monitor reads the logs of the whole machine.
        role = [f"--address={nodes.address}", "--include-log-monitor=false"]
    else:
        role = [
            *("--head", f"--port={nodes.address.rpartition(':')[2]}", "--include-dashboard=false"),
            *(f"--ray-client-server-port={free_port()}", f"--temp-dir={log.parent}"),
        ]
    paths = [str(_common.REPOSITORY), str(_common.REPOSITORY / "benchmarks")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with log.open("wb") as file:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
                *("--node-ip-address=127.0.0.1", f"--node-name={name}", "--num-gpus=1"),
                *(f"--num-cpus={cpus}", f"--object-store-memory={object_store_bytes}"),
                # Any free ports: by default all nodes of a machine use the same ones.
                *("--min-worker-port=0", "--max-worker-port=0"),
                f"--dashboard-agent-listen-port={free_port()}",
            ],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": device,
                "PYTHONPATH": os.pathsep.join(paths),
                MARK: nodes.mark,
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends it through `ray_nodes` only.
            start_new_session=True,
        )


def _wait_until_started(command: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    # Ray prints it after the node has joined the cluster.
    while "Ray runtime started" not in (text := log.read_text(errors="replace")):
        if command.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no Ray node: {text[-2000:]}")
        time.sleep(0.05)


def _end(nodes: Nodes) -> None:
    for command in nodes.commands.values():
        command.terminate()
    began = time.monotonic()
    while (left := processes_marked(nodes.mark)) and time.monotonic() < began + 2 * END_S:
        if time.monotonic() > began + END_S:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.1)
        for command in nodes.commands.values():
            command.poll()
