"""What does the way of a large value through Ray's object store take, from the flow's own node and from another one?

    python benchmarks/ray_transfer.py            # 300 MB, two Ray nodes on this machine, no GPU

For each node, seconds of each part of the way that a task's value goes with `GPUTaskRunner(address=...)`: *put* by the node's agent,
*get* by the flow (from another node this is Ray's transfer between them), *copy* into memory that the flow may write to.
*Plain* is the same array as the return value of a Ray actor, which the flow may only read. Each is the median of four, the first
left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import _common
import _ray_nodes

TURNS = 5


def main() -> None:
    """Measure both nodes and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=int, default=300_000_000, help="bytes of the array")
    parser.add_argument("--tiny", action="store_true", help="an array of 4 MB: that it runs")
    given = parser.parse_args()
    size = 4_000_000 if given.tiny else given.size
    print(f"{size / 1e6:g} MB; {_common.versions('ray', 'numpy')}")
    with _ray_nodes.ray_nodes(["0", "1"], object_store_bytes=max(2**28, 8 * size)) as nodes:
        import ray

        ray.init(address=nodes.address, log_to_driver=False, logging_level="warning")
        ids = {node["NodeName"]: node["NodeID"] for node in ray.nodes()}
        own = ray.get_runtime_context().get_node_id()
        print("| node | put, s | get, s | copy, s | plain, s |\n|---|---|---|---|---|")
        for name, node_id in ids.items():
            middle = [
                f"{statistics.median(part[1:]):.3f}"
                for part in zip(*measure(node_id, size), strict=True)
            ]
            print(f"| {name}{', the flow' if node_id == own else ''} | {' | '.join(middle)} |")
        ray.shutdown()


def measure(node_id: str, size: int) -> list[tuple[float, float, float, float]]:
    """Return the seconds of put, get, copy and plain return, for each turn."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from prefect_gpu.cluster.membership import RayStore
    from prefect_gpu.cluster.wire import receive_result, send_result
    from prefect_gpu.values.transport import ReceivedValue

    @ray.remote(num_cpus=0)
    class Agent:
        def __init__(self) -> None:
            import numpy as np

            self.array = np.random.default_rng(0).random(size // 8)

        def put(self) -> tuple[Any, float]:
            value = ReceivedValue(memoryview(b""), (memoryview(self.array).cast("B"),))
            began = time.monotonic()
            return send_result(value, RayStore()), time.monotonic() - began

        def plain(self) -> tuple[float, Any]:
            return time.monotonic(), self.array

    agent = Agent.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    ).remote()
    store = RayStore()
    found = []
    for _ in range(TURNS):
        result, put_s = ray.get(agent.put.remote())
        began = time.monotonic()
        store.get(result.buffers[0])
        get_s = time.monotonic() - began
        began = time.monotonic()
        receive_result(result, store)
        copy_s = time.monotonic() - began
        del result
        returned, array = ray.get(agent.plain.remote())
        found.append((put_s, get_s, copy_s, time.monotonic() - returned))
        del array
    return found


if __name__ == "__main__":
    main()
