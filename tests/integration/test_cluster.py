"""The runner over a Ray cluster: three nodes on this machine, with simulated devices and a real Prefect server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow, task
from prefect.context import FlowRunContext
from prefect.futures import wait

import prefect_gpu
from prefect_gpu import DeviceError, GPUTaskRunner, current_allocation, gpu
from prefect_gpu.cli import main as cli
from prefect_gpu.cluster import membership
from prefect_gpu.cluster.flow_side import SILENT_S
from prefect_gpu.cluster.membership import Cluster, RayStore, import_ray
from prefect_gpu.cluster.node_agent import NodeSettings
from prefect_gpu.cluster.wire import STORED_BYTES, NodeFacts
from prefect_gpu.devices.simulated import SimulatedDevices
from prefect_gpu.devices.spec import DeviceSpec
from prefect_gpu.scheduling.model import Device
from tests.cases import needs
from tests.fakes.ports import free_port
from tests.fakes.traps import Traps
from tests.integration import bodies
from tests.integration import engine_api as api
from tests.integration.programs import (
    LIMIT_S,
    MARK,
    REPOSITORY,
    Workplace,
    lines_of,
    marked,
    wait_for,
)

numpy = pytest.importorskip("numpy")

pytestmark = [
    needs("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="starts Ray nodes on this machine"),
    # Of Ray: files and sockets of the nodes that it has started.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ONE = "simulated:1x24GiB"
NAMES = ("head", "n1", "n2")

#: Seconds for which Ray waits for a client's connection to come back.
GRACE_S = 30.0


@dataclass
class Machines:
    """A Ray cluster whose nodes are processes of this machine."""

    cluster: Any
    #: In the environment of all its processes.
    mark: str
    #: Of the head, for addresses `ray://…`.
    client_port: int
    nodes: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(node_name=name, num_cpus=1)
        # Ray takes a node that was removed for alive for about ten seconds, and its name is not free before that.
        self.cluster.wait_for_nodes(timeout=120)

    def remove(self, name: str) -> None:
        """End a node at once, as if its machine had lost power."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def kill_head(self) -> None:
        """Kill all processes of the head, as if its machine had lost power."""
        for started in self.cluster.head_node.all_processes.values():
            for each in started:
                with suppress(ProcessLookupError):
                    os.kill(each.process.pid, signal.SIGKILL)

    def runner(self, devices: Any = ONE, **options: Any) -> GPUTaskRunner:
        return GPUTaskRunner(address=self.address, devices=devices, **options)


@contextmanager
def started(*names: str) -> Iterator[Machines]:
    """Start a head and nodes of the names given."""
    import ray
    from ray.cluster_utils import Cluster as LocalCluster

    with pytest.MonkeyPatch.context() as patch:
        mark = uuid.uuid4().hex
        # Ray's processes inherit these.
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Machines(
            LocalCluster(
                initialize_head=True,
                head_node_args={
                    "node_name": "head",
                    "num_cpus": 1,
                    "object_store_memory": 150 << 20,
                    "include_dashboard": False,
                    "ray_client_server_port": (port := free_port()),
                },
            ),
            mark,
            port,
        )
        try:
            for name in names:
                made.add(name)
            # The server for clients starts beside the head.
            wait_for(lambda: listens(port))
            yield made
        finally:
            ray.shutdown()
            made.cluster.shutdown()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started(*NAMES[1:]) as made:
        yield made


def connection() -> Cluster:
    """Return the cluster of the flow around the caller, connected."""
    context = FlowRunContext.get()
    assert context is not None and isinstance(context.task_runner, GPUTaskRunner)
    assert context.task_runner._run is not None
    return context.task_runner._run._open_cluster()


def agent_pid(node: str) -> int:
    import ray

    (actor,) = (m.actor for m in connection()._members.values() if m.name == node)
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


def left(machines: Machines) -> dict[int, str]:
    """Return the agents that live, and all processes that they have started: process id to command line."""
    return {
        pid: command
        for pid, command in marked(machines.mark)
        if "prefect_gpu" in command or command.startswith("ray::Agent")
    }


def stored_bytes(machines: Machines) -> int:
    """Return what the object stores of all nodes hold."""
    import ray
    from ray._private.internal_api import node_stats

    ray.init(address=machines.address, logging_level="warning", log_to_driver=False)
    try:
        return sum(
            node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"], False
            ).store_stats.object_store_bytes_used
            for node in ray.nodes()
            if node["Alive"]
        )
    finally:
        ray.shutdown()


work = task(bodies.work, tags=gpu(memory="16GiB"), log_prints=True)


def meet(folder: Path, count: int) -> dict[int, str]:
    """Wait until as many tasks run; return their nodes by index."""
    wait_for(lambda: len(list(folder.glob("*-*-*"))) >= count)
    found = [path.name.split("-") for path in folder.glob("*-*-*")]
    return {int(index): node for index, node, _ in found}


@pytest.fixture
def pair() -> Iterator[Machines]:
    """Two nodes, which are enough for the one test of every day."""
    with started("n1") as made:
        yield made


def test_tasks_run_on_all_nodes(
    pair: Machines, prefect_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    names = set(NAMES[:2])
    puts: list[int] = []
    put = RayStore.put

    def counted(store: RayStore, data: memoryview) -> Any:
        puts.append(data.nbytes)
        return put(store, data)

    monkeypatch.setattr(RayStore, "put", counted)
    big = numpy.ones(500_000)
    flow_runs: list[Any] = []

    @task(tags=gpu(memory="1GiB"))
    def make() -> Any:
        return numpy.ones(1_000_000)

    @task(tags=gpu(memory="1GiB"))
    def fail() -> None:
        raise bodies.HostError("of the body")

    @task(tags=gpu(memory="1GiB"))
    def grow() -> int:
        from prefect_gpu.testing import allocate

        with allocate("3GiB"):
            allocated = current_allocation()
            assert allocated is not None
            return allocated.attempt

    @flow(task_runner=pair.runner())
    def main() -> Any:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        flow_runs.append(context.flow_run.id)
        together = [work.submit(i, str(tmp_path), big) for i in range(2)]
        meet(tmp_path, 2)
        Path(tmp_path, "go").touch()
        others = make.submit(), fail.submit(), grow.submit()
        wait([*together, *others])
        return [f.result() for f in together], [f.result(raise_on_failure=False) for f in others]

    worked, (made, failed, attempt) = main()
    assert [(index, total) for index, _, total in worked] == [(i, 500_000.0) for i in range(2)]
    assert {node for _, node, _ in worked} == names
    made += 1
    assert made.shape == (1_000_000,) and float(made.sum()) == 2_000_000.0
    assert isinstance(failed, bodies.HostError) and failed.args == ("of the body",)
    assert attempt == 2
    assert [size for size in puts if size >= STORED_BYTES] == [big.nbytes]
    found = api.logs(flow_runs[0], [f"task {i} runs" for i in range(2)])
    assert all(found[f"task {i} runs"].task_run_id for i in range(2))
    # Six processes, and the flow.
    *reports, of_flow = api.artifacts(flow_run_id=flow_runs[0], count=7)
    assert {report.metadata_["node"] for report in reports} == names
    assert all(f"| Device | {r.metadata_['node']}:0, " in str(r.data) for r in reports)
    assert of_flow.metadata_["nodes"] == "2"
    assert all(f"| {name}:0 |" in str(of_flow.data) for name in names)

    # Nothing is left.
    assert not ray.is_initialized()
    wait_for(lambda: not left(pair), explain=lambda: f"{left(pair)}")
    wait_for(lambda: stored_bytes(pair) == 0, interval_s=0.2)


@pytest.mark.slow
def test_first_runs_share_the_devices_of_nodes_and_all_are_learned_from(
    machines: Machines, prefect_server: str, tmp_path: Path
) -> None:
    @task(tags=gpu(learn_by="name"))
    def unknown(name: str, folder: str) -> str:
        from prefect_gpu.testing import allocate

        with allocate("2GiB"):
            Path(folder, name).touch()
            wait_for(lambda: len(list(Path(folder).iterdir())) == len(NAMES) + 2)
            return bodies.node_of(current_allocation())

    names = [f"unknown-{n}" for n in range(len(NAMES) + 2)]
    first, second = tmp_path / "first", tmp_path / "second"

    @flow(task_runner=machines.runner())
    def main() -> Any:
        rounds = []
        for folder in (first, second):
            folder.mkdir()
            futures = [unknown.submit(name, str(folder)) for name in names]
            rounds.append([(future.task_run_id, future.result()) for future in futures])
        return rounds

    probes, learned = main()
    # Two more than there are devices have met.
    assert {node for _, node in probes} == set(NAMES)
    for runs, source in ((probes, "probe"), (learned, "learned")):
        for run_id, node in runs:
            (report,) = api.artifacts(task_run_id=run_id, count=1)
            said = {key: report.metadata_[key] for key in ("budget_source", "outcome", "node")}
            assert said == {"budget_source": source, "outcome": "completed", "node": node}


@pytest.mark.slow
def test_a_node_dies_and_its_task_is_run_again_elsewhere(
    machines: Machines, prefect_server: str, tmp_path: Path
) -> None:
    @flow(task_runner=machines.runner())
    def main() -> Any:
        again = work.with_options(retries=1)
        futures = [again.submit(i, str(tmp_path)) for i in range(3)]
        nodes = meet(tmp_path, 3)
        machines.remove("n2")
        # The processes of this node outlive it for a moment.
        wait_for(lambda: "n2" not in {node.name for node in connection().nodes.all()})
        Path(tmp_path, "go").touch()
        wait(futures)
        return nodes, [f.state for f in futures]

    try:
        nodes, states = main()
    finally:
        machines.add("n2")
    assert sorted(nodes.values()) == sorted(NAMES)
    assert [state.name for state in states] == ["Completed"] * 3
    values = [state.result() for state in states]
    assert [index for index, _, _ in values] == [0, 1, 2]
    for index, node, _ in values:
        assert node != "n2" if nodes[index] == "n2" else node == nodes[index]


@pytest.mark.slow
def test_a_flow_outside_of_the_cluster_is_its_client(
    machines: Machines, prefect_server: str
) -> None:
    import ray

    @task(tags=gpu(memory="1GiB"))
    def double(given: Any) -> Any:
        return 2 * given

    runner = GPUTaskRunner(address=f"ray://127.0.0.1:{machines.client_port}", devices=ONE)

    @flow(task_runner=runner)
    def main() -> Any:
        large = numpy.ones(1_000_000)
        return [f.result() for f in [double.submit(large), double.submit(large), double.submit(3)]]

    first, second, third = main()
    first += 1
    assert (float(first.sum()), float(second.sum()), third) == (3e6, 2e6, 6)
    assert not ray.is_initialized()
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}", limit_s=120.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_tasks_outlive_a_node(machines: Machines, prefect_server: str) -> None:
    count = 200

    @flow(task_runner=machines.runner())
    def main() -> Any:
        square = task(bodies.square, tags=gpu(memory="4GiB"), retries=2)
        futures = square.map(range(count))
        wait_for(lambda: sum(f.state.is_final() for f in futures) > count // 4, limit_s=600.0)
        machines.remove("n2")
        wait(futures)
        return [f.state for f in futures]

    try:
        states = main()
    finally:
        machines.add("n2")
    assert [state.name for state in states] == ["Completed"] * count
    values = [state.result() for state in states]
    assert [value for value, _ in values] == [index * index for index in range(count)]
    assert {node for _, node in values} == set(NAMES)
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["node", "agent"])
def test_without_retries_a_task_crashes_with_its_node(
    how: str, machines: Machines, prefect_server: str, tmp_path: Path
) -> None:
    """And an agent that died is started again."""

    @flow(task_runner=machines.runner())
    def main() -> Any:
        first = [work.submit(i, str(tmp_path)) for i in range(3)]
        nodes = meet(tmp_path, 3)
        (index,) = (i for i, node in nodes.items() if node == "n2")
        if how == "node":
            machines.remove("n2")
        else:
            os.kill(agent_pid("n2"), signal.SIGKILL)
        first[index].wait()
        states = [first[index].state]
        Path(tmp_path, "go").touch()
        wait(first)
        states += [f.state for i, f in enumerate(first) if i != index]
        if how == "agent":
            Path(tmp_path, "go").unlink()
            for path in tmp_path.glob("*-*-*"):
                path.unlink()
            later = [work.submit(i, str(tmp_path)) for i in range(3)]
            meet(tmp_path, 3)
            Path(tmp_path, "go").touch()
            states.append(sorted(f.result()[1] for f in later))
        return states

    try:
        lost, *rest = main()
    finally:
        if how == "node":
            machines.add("n2")
    assert lost.name == "Crashed" and "node n2" in (lost.message or ""), lost.message
    assert [state.name for state in rest[:2]] == ["Completed", "Completed"]
    if how == "agent":
        assert rest[2] == sorted(NAMES)


@pytest.mark.slow
def test_a_node_that_does_not_answer_gets_no_task(
    machines: Machines, prefect_server: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    @flow(task_runner=machines.runner())
    def main() -> Any:
        before = [work.submit(i, str(first)) for i in range(3)]
        nodes = meet(first, 3)
        pid = agent_pid("n2")
        os.kill(pid, signal.SIGSTOP)
        try:
            # A reading later, it is left out.
            (silent,) = (node for node in connection().nodes.all() if node.name == "n2")
            wait_for(lambda: time.monotonic() - silent.heard_s > SILENT_S + 1)
            small = work.with_options(tags=gpu(memory="3GiB"))
            after = [small.submit(i, str(second)) for i in range(4)]
            placed = meet(second, 4)
        finally:
            os.kill(pid, signal.SIGCONT)
        Path(first, "go").touch()
        Path(second, "go").touch()
        return nodes, placed, [f.result()[0] for f in (*before, *after)]

    nodes, placed, values = main()
    assert sorted(nodes.values()) == sorted(NAMES)
    assert set(placed.values()) == {"head", "n1"}
    assert values == [0, 1, 2, 0, 1, 2, 3]


KILLED = """
import os, sys, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

@task(tags=gpu(memory="20GiB"))
def sleep(i):
    with open("pids.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

@flow(task_runner=GPUTaskRunner(address=sys.argv[1], devices="simulated:1x24GiB", standby=1))
def main():
    return sleep.map([0, 1, 2]).result()

main()
"""


@pytest.mark.slow
def test_a_flow_that_is_killed_leaves_nothing(
    machines: Machines, place: Workplace, tmp_path: Path
) -> None:
    place.write("killed.py", KILLED)
    with open(tmp_path / "stderr.txt", "w") as stderr:
        process = place.start("killed.py", machines.address, stdout=stderr, stderr=stderr)
    pids = place.folder / "pids.txt"
    wait_for(
        lambda: len(lines_of(pids)) == 3 or process.poll() is not None,
        explain=lambda: (tmp_path / "stderr.txt").read_text(),
    )
    assert process.poll() is None, (tmp_path / "stderr.txt").read_text()
    assert {int(pid) for pid in lines_of(pids)} <= left(machines).keys()
    process.kill()
    process.wait()
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")

    @flow(task_runner=machines.runner())
    def main() -> Any:
        whole = work.with_options(tags=gpu(memory="20GiB"))
        return [f.result()[1] for f in [whole.submit(i, str(tmp_path)) for i in range(3)]]

    Path(tmp_path, "go").touch()
    assert len(main()) == 3


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_after_rays_grace(
    machines: Machines, place: Workplace, tmp_path: Path
) -> None:
    place.write("killed.py", KILLED)
    with open(tmp_path / "stderr.txt", "w") as stderr:
        address = f"ray://127.0.0.1:{machines.client_port}"
        process = place.start("killed.py", address, stdout=stderr, stderr=stderr)
    pids = place.folder / "pids.txt"
    wait_for(
        lambda: len(lines_of(pids)) == 3 or process.poll() is not None,
        explain=lambda: (tmp_path / "stderr.txt").read_text(),
    )
    bodies = {int(pid) for pid in lines_of(pids)}
    process.kill()
    process.wait()
    killed_s = time.monotonic()
    # Ray cannot tell a client that was killed from one whose connection comes back.
    time.sleep(GRACE_S / 3)
    assert bodies <= left(machines).keys()
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")
    print(f"nothing was left {time.monotonic() - killed_s:.1f} s after the kill")


HEADLESS = """
import os, sys, time
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

@task(tags=[*gpu(memory="20GiB"), "gpu:node=n1"], retries=1)
def sleep(i):
    with open("pids.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

@flow(task_runner=GPUTaskRunner(address=sys.argv[1], devices="simulated:1x24GiB"))
def main():
    futures = sleep.map([0, 1])
    for future in futures:
        future.wait()
        print("STATE", future.state.name, future.state.message, flush=True)
    return "over"

print(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_the_head_is_gone(scheme: str, place: Workplace) -> None:
    """What runs and what waits fails with the reason, before Ray ends the flow's process."""
    place.write("headless.py", HEADLESS)
    with started("n1") as machines:
        address = f"ray://127.0.0.1:{machines.client_port}" if scheme else machines.address
        said, pids = place.folder / "said.txt", place.folder / "pids.txt"
        with open(said, "w") as stdout:
            process = place.start("headless.py", address, stdout=stdout, stderr=stdout)
        wait_for(
            lambda: bool(lines_of(pids)) or process.poll() is not None,
            explain=said.read_text,
        )
        machines.kill_head()
        killed_s = time.monotonic()
        code = process.wait(LIMIT_S)
        print(f"the flow ended {time.monotonic() - killed_s:.1f} s after the head was killed")
        wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")
        print(f"nothing was left {time.monotonic() - killed_s:.1f} s after the head was killed")
    states = [line for line in lines_of(said) if line.startswith("STATE")]
    assert code == 0 and lines_of(said)[-1] == "over", said.read_text()
    assert len(states) == 2
    assert all("DeviceError" in line and f"address='{address}'" in line for line in states), (
        said.read_text()
    )
    assert all("the Ray cluster" in line for line in states), said.read_text()


@pytest.mark.slow
def test_a_node_joins_while_a_flow_runs(prefect_server: str, tmp_path: Path) -> None:
    with started() as machines:

        @flow(task_runner=machines.runner())
        def main() -> Any:
            futures = [work.submit(i, str(tmp_path)) for i in range(2)]
            meet(tmp_path, 1)
            machines.add("n1")
            nodes = meet(tmp_path, 2)
            Path(tmp_path, "go").touch()
            return nodes, [f.result()[1] for f in futures]

        nodes, ran = main()
    assert sorted(nodes.values()) == sorted(ran) == ["head", "n1"]


class Proxy:
    """Passes TCP connections on to a port of this machine, until they are dropped."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.passes = True
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self, seconds: float) -> None:
        """Close all connections, and refuse new ones for a while."""
        self.passes = False
        with self._lock:
            dropped, self._open = self._open, set()
        for each in dropped:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        time.sleep(seconds)
        self.passes = True

    def close(self) -> None:
        self._listener.close()
        self.drop(0.0)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.passes:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to))
            with self._lock:
                self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
# Of a thread of Ray's client, whose channel is closed under it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_clients_connection_comes_back(
    machines: Machines, prefect_server: str, tmp_path: Path
) -> None:
    proxy = Proxy(machines.client_port)

    @flow(task_runner=GPUTaskRunner(address=f"ray://127.0.0.1:{proxy.port}", devices=ONE))
    def main() -> Any:
        # Three run, and two wait.
        futures = [work.submit(i, str(tmp_path)) for i in range(5)]
        meet(tmp_path, 3)
        proxy.drop(2.5)
        Path(tmp_path, "go").touch()
        wait(futures)
        return [f.state for f in futures]

    try:
        states = main()
    finally:
        proxy.close()
    assert [state.name for state in states] == ["Completed"] * 5, [s.message for s in states]
    assert sorted(int(path.name.split("-")[0]) for path in tmp_path.glob("*-*-*")) == list(range(5))
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")


CLEAN = """
import sys
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

@task(tags=gpu(memory="2GiB"))
def double(i):
    return 2 * i

@flow(task_runner=GPUTaskRunner(address=sys.argv[1], devices="simulated:1x24GiB"))
def main():
    return double.map([1, 2, 3]).result()

print(main())
"""


@pytest.mark.slow
def test_a_flow_that_succeeds_says_nothing_else(machines: Machines, place: Workplace) -> None:
    place.write("clean.py", CLEAN)
    done = place.run("clean.py", machines.address)
    assert done.stdout.strip() == "[2, 4, 6]"
    # The summary of a flow has further lines, which begin with blanks.
    said = [line for line in done.stderr.splitlines() if "| INFO " not in line]
    assert [line for line in said if not line.startswith("  ")] == []


def fails(runner: GPUTaskRunner) -> BaseException:
    """Return what a task of a flow fails with."""

    @flow(task_runner=runner)
    def main() -> Any:
        return work.submit(0).result(raise_on_failure=False)

    error = main()
    assert isinstance(error, BaseException), error
    return error


@pytest.mark.slow
def test_the_devices_of_all_nodes_are_listed(
    machines: Machines,
    prefect_server: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traps = Traps(tmp_path / "current")
    monkeypatch.chdir(traps.folder)
    there = ["--address", machines.address]
    assert cli(["devices", "--devices", ONE, *there, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["host"] for each in found["devices"]) == sorted(NAMES)
    assert all(each["free_bytes"] == 24 << 30 for each in found["devices"])
    assert found["set_aside"] == {}
    assert cli(["devices", "--devices", ONE, *there]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(["node", *NAMES])
    with monkeypatch.context() as patch:
        patch.setenv("PREFECT_INTEGRATIONS_GPU_ADDRESS", machines.address)
        assert cli(["devices", "--devices", ONE]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert cli(["devices", *there]) == 2
    assert "it has no NVIDIA driver" in capsys.readouterr().err
    assert traps.imported == [] and Path.cwd() == traps.folder
    wait_for(lambda: not left(machines), explain=lambda: f"{left(machines)}")


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_at_the_address(address: str, prefect_server: str) -> None:
    error = fails(GPUTaskRunner(address=address, devices=ONE))
    assert isinstance(error, DeviceError) and address in str(error)


@pytest.mark.slow
def test_no_node_has_a_gpu(
    machines: Machines, prefect_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = fails(machines.runner("auto"))
    assert not [r for r in caplog.records if r.name == membership.__name__]
    assert isinstance(error, DeviceError) and "no node of the cluster has a device" in str(error)
    assert all(f"{name}: it has no NVIDIA driver" in str(error) for name in NAMES)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DeviceError, match=r"prefect-gpu\[ray\]"):
        import_ray()


def facts(**changes: Any) -> NodeFacts:
    device = Device("SIM-n1-0", 0, "Simulated", 24 << 30, "simulated", "n1")
    given = {
        "agent": "a",
        "version": prefect_gpu.__version__,
        "kind": "simulated",
        "devices": (device,),
        "context_bytes": 0,
        "max_processes": 4,
        **changes,
    }
    return NodeFacts(**given)


def connected(monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, Any]:
    """Return a cluster that needs no Ray, and a member of it."""
    handle = SimpleNamespace(
        listen=SimpleNamespace(remote=lambda seen: f"news after {seen}"),
        tell=SimpleNamespace(remote=lambda commands: None),
    )
    fake = SimpleNamespace(get=lambda reference, timeout: reference)
    monkeypatch.setattr(membership, "import_ray", lambda: fake)
    spec = DeviceSpec("simulated", SimulatedDevices("1x24GiB"))
    cluster = Cluster("auto", NodeSettings("", spec, "spread", None, None))
    return cluster, membership._Member("n1", handle, "facts")


@pytest.mark.parametrize(
    ("failures", "tries", "says"),
    [
        pytest.param([ConnectionAbortedError("it died")] * 2, 3, "", id="its process dies twice"),
        pytest.param([ConnectionAbortedError("it died")] * 3, 3, "(it died)", id="each time"),
        pytest.param([RuntimeError("version\nmismatch")], 1, "(mismatch)", id="it is refused"),
        pytest.param([AssertionError()], 1, "(AssertionError)", id="without a word"),
    ],
)
def test_a_client_whose_process_dies_at_its_start_connects_again(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], tries: int, says: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done: list[str] = []
    left = [*failures]

    def init(**given: Any) -> None:
        done.append("init")
        if left:
            raise left.pop(0)

    fake = SimpleNamespace(init=init, shutdown=lambda: done.append("shutdown"))
    raised = ""
    try:
        membership._connect(fake, "auto")
    except Exception as error:
        raised = f"({membership._last_line(error)})"
    assert raised == says
    assert done.count("init") == tries
    # Each failure is cleared away: Ray's client mode would make the next connection fail.
    assert done.count("shutdown") == len(failures)


def test_a_node_joins_with_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, member = connected(monkeypatch)
    cluster._take_facts(member, facts())
    assert [node.name for node in cluster.nodes.all()] == ["n1"]
    assert member.waits_for == "news after 0"


def test_a_connection_that_is_lost_is_not_taken_for_the_end_of_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, member = connected(monkeypatch)
    cluster._take_facts(member, facts())
    cluster._members["1"] = member

    def get(reference: Any) -> Any:
        raise ConnectionError("Client is shutting down.")

    cluster._ray.wait = lambda references, num_returns, timeout: (references, [])
    cluster._ray.get, cluster._ray.is_initialized = get, lambda: False
    with pytest.raises(ConnectionError):
        cluster._listen(0.0)
    assert [node.name for node in cluster.nodes.all()] == ["n1"]


def test_the_autoscaler_is_asked_while_tasks_wait_for_nodes_beside_those_that_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, member = connected(monkeypatch)
    cluster._members["1"] = member
    asked: list[list[float]] = []
    member.actor.ask_autoscaler = SimpleNamespace(remote=asked.append)
    told = [
        {"NodeID": "1", "Alive": True, "Resources": {"GPU": 4.0, "CPU": 8.0}},
        {"NodeID": "2", "Alive": True, "Resources": {"GPU": 4.0}},
    ]
    cluster._ask_autoscaler(told, [])
    assert asked == [], "another program's request stays"
    cluster._take_facts(member, facts())
    cluster._ask_autoscaler(told, [2, 1])
    # What waits may start there.
    assert asked == [[2, 1]]
    member.joined_s -= membership.WAITED_S
    cluster._ask_autoscaler(told, [2, 1])
    cluster._ask_autoscaler(told, [])
    cluster._ask_autoscaler(told, [])
    assert asked[1:] == [[4.0, 2, 1], []]


def test_a_request_that_could_not_be_withdrawn_is_withdrawn_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, member = connected(monkeypatch)
    cluster._members["1"] = member
    asked: list[list[float]] = []
    member.actor.ask_autoscaler = SimpleNamespace(remote=asked.append)
    cluster._ask_autoscaler([], [1])
    with monkeypatch.context() as patch:
        patch.setattr(cluster._ray, "get", lambda reference, timeout: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cluster._ask_autoscaler([], [])
    cluster._ask_autoscaler([], [])
    assert asked == [[1], [], []]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": "0.0.1"}, "it has prefect-gpu 0.0.1, and the flow has"),
        ({"devices": ()}, "it has no devices"),
        ({"problem": "no driver answers"}, "no driver answers"),
    ],
    ids=["another version", "no devices", "a problem"],
)
def test_a_node_is_set_aside(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, member = connected(monkeypatch)
    cluster._take_facts(member, facts(**changes))
    assert cluster.nodes.all() == ()
    assert why in cluster.aside["n1"]
    assert member.waits_for is None
