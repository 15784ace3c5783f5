"""One of the flows of `check_many_flows`, which runs it in a process of its own and reads what it prints."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from prefect import flow, task
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.units import GIB

#: Bytes that a context takes beside what a body allocates, at most.
CONTEXT_GIB = 1


def hold(gib: float, seconds: float) -> list[str]:
    """Hold memory for a while; return which tasks were on the device."""
    allocation = current_allocation()
    assert allocation is not None
    if allocation.device_uuids[0].startswith("SIM-"):
        from prefect_gpu.testing import allocate

        with allocate(f"{gib}GiB"):
            time.sleep(seconds)
    else:
        import torch

        block = torch.ones(int(gib * GIB), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        time.sleep(seconds)
        assert int(block[-1]) == 1
    return list(allocation.shared_with)


def small(seconds: float) -> list[str]:
    """Need little, and say nothing of it."""
    return hold(2, seconds)


def large(seconds: float) -> list[str]:
    """Need much, and say nothing of it."""
    return hold(14, seconds)


def say(**words: Any) -> None:
    """Tell the check something."""
    print("TOLD", json.dumps({"at_s": time.monotonic(), **words}), flush=True)


def run_mixed(framework: str, count: int, seed: int) -> None:
    """Run tasks with and without budgets, all submitted at once."""
    choose = random.Random(seed)
    tagged, untagged = task(hold, retries=0), [task(small), task(large)]
    futures = []
    for at in range(count):
        seconds = choose.uniform(0.3, 1.0)
        if at % 2:
            chosen = untagged[at % 4 // 2].with_options(tags=gpu(framework=framework))
            futures.append(chosen.submit(seconds))
        else:
            gib = choose.choice([4, 8, 16, 30])
            tags = gpu(memory=f"{gib + CONTEXT_GIB}GiB", framework=framework)
            futures.append(tagged.with_options(tags=tags).submit(gib, seconds))
    results = [future.result(raise_on_failure=False) for future in futures]
    say(
        failed=[f"{type(r).__name__}: {r}"[:200] for r in results if isinstance(r, BaseException)],
        beside_others=sum(
            any(name.endswith("(another flow)") for name in result)
            for result in results
            if isinstance(result, list)
        ),
    )


def run_children(framework: str, count: int) -> None:
    """Hold memory in several processes until the flow is killed."""
    tags = gpu(memory=f"{4 + CONTEXT_GIB}GiB", framework=framework)
    held = [task(hold, tags=tags).submit(4, 600.0) for _ in range(count)]
    for future in held:
        future.wait()


def run_waiting(framework: str) -> None:
    """Ask for almost all of the device; say when that was had."""
    tags = gpu(memory="90%", framework=framework)
    say(submits=True)
    task(stamp, tags=tags).submit().result()


def stamp() -> None:
    """Say that the body runs."""
    say(runs=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("mixed", "children", "waiting"))
    parser.add_argument("--devices", required=True)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    framework = "none" if given.devices.startswith("simulated") else "torch"

    @flow(name=f"beside-{given.kind}", task_runner=GPUTaskRunner(devices=given.devices))
    def beside() -> None:
        say(ready=str(flow_run.id))
        sys.stdin.readline()
        if given.kind == "mixed":
            run_mixed(framework, given.count, given.seed)
        elif given.kind == "children":
            run_children(framework, given.count)
        else:
            run_waiting(framework)

    beside()
    say(ended=True)


if __name__ == "__main__":
    main()
