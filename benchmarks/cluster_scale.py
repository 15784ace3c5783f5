"""How many nodes can one flow's process serve? Fake agents, real broker.

    python benchmarks/cluster_scale.py --out cluster_scale.json   # 10, 100 and 1,000 nodes of 8 GPUs
    python benchmarks/cluster_scale.py --tiny                      # that it runs, in seconds

100,000 scheduling requests of 20 GiB and 10 minutes each wait for devices of 80 GiB, in real time. They are requests
to the broker and not Prefect task runs, whose engine threads have a limit of their own. Devices are full from the
beginning, with tasks that end evenly over 10 minutes. Fake agents send what changed, and at least one message
every 2 s. Measured is the CPU time of the flow's process less that of the fake agents: the broker, its readings, the
ledger, and taking what agents say.

Prints JSON (versions, every run), then a table.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common

sys.path.insert(0, str(_common.REPOSITORY))

from prefect_gpu.broker.broker import Broker, Ticket
from prefect_gpu.broker.ledger import Ledger
from prefect_gpu.cluster.flow_side import ClusterReader, ClusterStore, Node, Nodes
from prefect_gpu.cluster.wire import News, NodeFacts
from prefect_gpu.scheduling.model import Device, DeviceSnapshot, ProcessUse, Reading, Request
from prefect_gpu.units import GIB

GPUS = 8
DEVICE_BYTES = 80 * GIB
TASK_BYTES = 20 * GIB
TASK_S = 600.0

#: Seconds between two messages of a node on which nothing changes, and between two looks of the simulation.
QUIET_S = 1.0
LOOK_S = 0.05


@dataclass(eq=False)
class FakeNode:
    """A node whose processes exist on paper."""

    name: str
    devices: list[Device]
    use: dict[str, dict[int, int]] = field(default_factory=dict)
    #: The last snapshot of each device, as it was sent.
    sent: dict[str, DeviceSnapshot] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    number: int = 0
    said_s: float = 0.0

    def tell(self, commands: Any) -> None:
        """Ignore what the flow says."""

    def news(self, now_s: float) -> News:
        """Return what an agent would send."""
        for uuid in self.changed or {d.uuid for d in self.devices if d.uuid not in self.sent}:
            device = next(d for d in self.devices if d.uuid == uuid)
            used = self.use.get(uuid, {})
            self.sent[uuid] = DeviceSnapshot(
                device,
                now_s,
                DEVICE_BYTES - sum(used.values()),
                processes=tuple(ProcessUse(pid, pid, size) for pid, size in used.items()),
            )
        self.changed = set()
        self.number += 1
        self.said_s = now_s
        snapshots = tuple(self.sent[d.uuid] for d in self.devices)
        reading = Reading(now_s, snapshots, 512 * GIB)
        return News(self.name, self.number, now_s, reading=reading)


def make_node(number: int) -> FakeNode:
    """Return a node with free devices."""
    name = f"node-{number}"
    return FakeNode(
        name,
        [
            Device(f"GPU-{number}-{i}", i, "fake", DEVICE_BYTES, "simulated", name, machine=name)
            for i in range(GPUS)
        ],
    )


def measure(nodes: int, requests: int, seconds: float) -> dict[str, Any]:
    """Run one simulation, and return what it took."""
    chance = random.Random(nodes)
    fakes = {f"node-{n}": make_node(n) for n in range(nodes)}
    cluster = Nodes(store=None)  # type: ignore[arg-type]  # no value is sent
    for fake in fakes.values():
        facts = NodeFacts(fake.name, "", "simulated", tuple(fake.devices), 0, 10**9)
        cluster.join(Node(fake.name, fake, facts))
    idle_s = [0.0]

    def say(fake: FakeNode) -> None:
        began = time.thread_time()
        news = fake.news(time.monotonic())
        idle_s[0] += time.thread_time() - began
        cluster.take(fake.name, news)

    for fake in fakes.values():
        say(fake)
    broker = Broker(
        ClusterReader(cluster, "simulated"),
        Ledger(lambda: ClusterStore(cluster)),
        max_processes=10**9,
        # With any, four tasks would not fill a device.
        headroom_bytes=0,
        read_host_available=lambda: 1 << 60,
    )
    waiting: dict[str, Ticket] = {}
    for number in range(requests):
        ticket = broker.submit(
            Request("", "task", number, 0.0, memory=TASK_BYTES, expected_s=TASK_S)
        )
        waiting[ticket.request.id] = ticket
    ends: list[tuple[float, int, Ticket]] = []
    pids, placed, full = iter(range(1, 1 << 40)), 0, False
    capacity = nodes * GPUS * (DEVICE_BYTES // TASK_BYTES)
    begun_s = time.monotonic()
    filled_s = cpu = own = until_s = 0.0
    while True:
        began = time.thread_time()
        now_s = time.monotonic()
        for request_id in [i for i in list(broker._machine.known.placed) if i in waiting]:
            ticket = waiting.pop(request_id)
            pid = next(pids)
            broker.attach(ticket, pid)
            (device,) = ticket.devices
            fake = fakes[device.host]
            fake.use.setdefault(device.uuid, {})[pid] = TASK_BYTES
            fake.changed.add(device.uuid)
            left_s = TASK_S if full else chance.uniform(0.0, TASK_S)
            heapq.heappush(ends, (now_s + left_s, pid, ticket))
            placed += 1
        while full and ends and ends[0][0] <= now_s:
            _, pid, ticket = heapq.heappop(ends)
            (device,) = ticket.devices
            fake = fakes[device.host]
            del fake.use[device.uuid][pid]
            fake.changed.add(device.uuid)
            broker.end(ticket)
        idle_s[0] += time.thread_time() - began
        for fake in fakes.values():
            if fake.changed or now_s - fake.said_s > QUIET_S:
                say(fake)
        if not full and placed >= min(capacity, requests):
            full = True
            filled_s = now_s - begun_s
            # Those that have ended while the devices were filled would end all at once.
            ends = [(now_s + chance.uniform(0.0, TASK_S), pid, t) for _, pid, t in ends]
            heapq.heapify(ends)
            time.sleep(2.0)
            cpu, own = time.process_time(), idle_s[0]
            placed, until_s = 0, time.monotonic() + seconds
        if full and now_s >= until_s:
            break
        if now_s - begun_s > 600 + seconds:
            raise RuntimeError(f"only {placed} of {capacity} were placed")
        time.sleep(LOOK_S)
    used_s = time.process_time() - cpu - (idle_s[0] - own)
    return {
        "nodes": nodes,
        "filled_s": filled_s,
        "running": min(capacity, requests),
        "placed_per_s": placed / seconds,
        "cores": used_s / seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Run all sizes, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="that are measured")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="few nodes, to see that it runs")
    options = parser.parse_args()
    if options.tiny:
        options.nodes, options.requests, options.seconds = [4], 500, 2.0
    if options.one is not None:
        print(_common.MARK + json.dumps(measure(options.one, options.requests, options.seconds)))
        sys.stdout.flush()
        # Its threads and a hundred thousand tickets need no farewell.
        import os

        os._exit(0)
    import subprocess

    rows = []
    for nodes in options.nodes:
        command = [sys.executable, __file__, "--one", str(nodes)]
        command += ["--requests", str(options.requests), "--seconds", str(options.seconds)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        line = next(each for each in output.splitlines() if each.startswith(_common.MARK))
        rows.append(json.loads(line.removeprefix(_common.MARK)))
    text = json.dumps({"release": _common.release(), "rows": rows})
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    print(f"\n{'nodes':>6}{'running':>9}{'placed/s':>10}{'cores':>7}{'filled in':>11}{'MiB':>8}")
    for row in rows:
        print(
            f"{row['nodes']:6}{row['running']:9}{row['placed_per_s']:10.1f}{row['cores']:7.2f}"
            f"{row['filled_s']:9.1f} s{row['peak_bytes'] / (1 << 20):8.0f}"
        )


if __name__ == "__main__":
    main()
