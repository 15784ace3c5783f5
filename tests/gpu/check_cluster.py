"""A flow on two nodes of a Ray cluster, each with a GPU of its own: what runs where, what is learned, what is left.

    python -m tests.gpu.check_cluster

The nodes are two raylets of this machine. A task learns its budget on one node and gets it on the other. Evaluations
and trainings run on both. Then a node's raylet is killed with SIGKILL while both work, and the flow with SIGKILL while
both work. After each of these NVML must show as little used as before. With fewer than two devices nothing is run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    GIB,
    MIB,
    ROOT,
    TOLERANCE_BYTES,
    gather,
    last_of,
    nvml_handles,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
    used_bytes,
)

#: What an evaluation holds beside its context.
HELD_BYTES = 2 * GIB

#: Seconds for memory to come back after a kill. Ray ends the agents of a flow that is gone within seconds.
BACK_S = 5.0

#: Argument with which this module is the flow that is killed: the cluster's address.
TO_BE_KILLED = "--to-be-killed"


def evaluate(number: int) -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.full(
        [HELD_BYTES if device == "cuda" else MIB], number, dtype=torch.uint8, device=device
    )
    total = 0.0
    for _ in range(20):
        weights = torch.ones(1024, 1024, device=device)
        total = float((weights @ weights).mean())
    return total + float(held[-1])


def train(number: int) -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1)
    )
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(256, 1024, device=device)
    first = last = 0.0
    for _ in range(40):
        loss = (model(x) - number).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss)
        first = first or last
    return first - last


def hold(folder: str, seconds: float) -> str:
    """Hold memory of the device for a while, and say in a folder that it does."""
    import torch

    from prefect_gpu import current_allocation

    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.ones(1 << 28, device=device)
    allocation = current_allocation()
    assert allocation is not None
    Path(folder, f"{allocation.device_uuids[0]}-{allocation.attempt}-{os.getpid()}").touch()
    time.sleep(seconds)
    return f"{float(held[-1]):g}"


def task_of(body: Any, node: str = "", memory: str = "", retries: int = 0) -> Any:
    tags: dict[str, Any] = {"memory": memory} if memory else {}
    if node:
        tags["node"] = node
    return task(
        name=body.__name__,
        retries=retries,
        timeout_seconds=BODY_S,
        tags=gpu(framework="torch", **tags),
    )(body)


def wait_until_held(folder: str, processes: int, limit_s: float = BODY_S) -> bool:
    deadline_s = time.monotonic() + limit_s
    while len(list(Path(folder).iterdir())) < processes:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def back(before: list[int], limit_s: float = 60.0) -> float | None:
    """Return the seconds until as much is used as before; `None`: it stayed more for `limit_s`."""
    began_s = time.monotonic()
    while any(now - then > TOLERANCE_BYTES for now, then in zip(used_bytes(), before, strict=True)):
        if time.monotonic() > began_s + limit_s:
            return None
        time.sleep(0.01)
    return time.monotonic() - began_s


def look_back(what: str, before: list[int], limit_s: float | None) -> list[str]:
    seconds = back(before)
    if seconds is None:
        left = ", ".join(size(now - then) for now, then in zip(used_bytes(), before, strict=True))
        return [f"{what}: {left} MiB are left"]
    say(f"{what}: all memory is back after {seconds:.2f} s")
    return (
        [f"{what}: memory was back after {seconds:.1f} s"] if limit_s and seconds > limit_s else []
    )


def use_nodes(address: str, names: list[str], devices: str, before: list[int]) -> list[str]:
    """Run evaluations and trainings on both nodes; what one node has taught holds on the other."""
    problems: list[str] = []

    def body() -> Any:
        first = gather({"first": task_of(evaluate, names[0]).submit(1)}, BODY_S)
        learned = gather({"learned": task_of(evaluate, names[1]).submit(2)}, BODY_S)
        evaluates, trains = task_of(evaluate), task_of(train, memory="4GiB")
        futures = {f"evaluation {n}": evaluates.submit(n) for n in range(3, 15)}
        futures |= {f"training {n}": trains.submit(n) for n in range(1, 9)}
        ended = {**first, **learned, **gather(futures, 2 * BODY_S)}
        problems.extend(look_back("while the flow still runs", before, None))
        return ended

    flow = run_flow("two-nodes", body, devices, address=address)
    reports = read_processes(flow.id, len(flow.value))
    rows, nodes = [], Counter[str]()
    budgets: dict[str, int | None] = {}
    for name, ended in flow.value.items():
        report = last_of(reports, ended)
        if ended.error is not None or report is None:
            problems.append(f"{name}: {ended.words or 'no report'}")
            continue
        nodes[report["node"]] += 1
        budgets[name] = report.bytes("budget_bytes")
        if name.startswith("evaluation") and ended.value != 1024.0 + int(name.split()[1]):
            problems.append(f"{name} returned {ended.value}")
        if name.startswith("training") and not ended.value > 0:
            problems.append(f"{name} did not learn: {ended.value}")
        peak = size(report.bytes("peak_process_bytes"))
        rows.append((name, report["node"], size(budgets[name]), peak, report["queued_s"]))
    table(["task", "node", "budget", "peak", "queued-s"], rows)
    first, learned = budgets.get("first"), budgets.get("learned")
    if first is None or learned is None or learned > first / 4:
        problems.append(
            f"{names[1]} gave {size(learned)} MiB after {names[0]} had given {size(first)}"
        )
    if set(nodes) != set(names):
        problems.append(f"tasks ran on {dict(nodes)}")
    return problems


def lose_a_node(nodes: Any, folder: str, devices: str, before: list[int]) -> list[str]:
    """Kill a node's raylet while a task holds memory on each node; its task runs again on the other."""
    lost = nodes.names[1]
    killed_s: list[float] = []

    def body() -> Any:
        holds = {
            name: task_of(hold, memory="4GiB", retries=2).submit(folder, 20.0) for name in "ab"
        }
        if wait_until_held(folder, 2):
            nodes.kill(lost)
            killed_s.append(time.monotonic())
        return gather(holds, 2 * BODY_S)

    flow = run_flow("a-node-dies", body, devices, address=nodes.address)
    reports = read_processes(flow.id, 3)
    problems = [f"{name}: {ended.words}" for name, ended in flow.value.items() if ended.error]
    if not killed_s:
        return ["the tasks did not begin", *problems]
    say(f"{time.monotonic() - killed_s[0]:.0f} s after {lost} was killed all tasks had ended")
    where = {
        name: [r["node"] for r in reports.get(e.task_run_id, [])] for name, e in flow.value.items()
    }
    say(f"processes of each task, by their nodes: {where}")
    if not any(each[:1] == [lost] and each[-1:] == [nodes.names[0]] for each in where.values()):
        problems.append(f"no task went from {lost} to {nodes.names[0]}")
    return problems + look_back(f"after {lost} was killed", before, None)


def kill_flow(address: str, folder: str, devices: str, before: list[int]) -> list[str]:
    """Kill the flow's process while it has tasks on all nodes."""
    command = [
        sys.executable,
        "-m",
        "tests.gpu.check_cluster",
        TO_BE_KILLED,
        address,
        folder,
        devices,
    ]
    flow = subprocess.Popen(command, cwd=ROOT)
    try:
        if not wait_until_held(folder, 4):
            return ["the flow that was to be killed did not begin its tasks"]
        held = [now - then for now, then in zip(used_bytes(), before, strict=True)]
        say(f"the flow has four tasks that hold {' + '.join(map(size, held))} MiB; it is killed")
    finally:
        flow.send_signal(signal.SIGKILL)
        flow.wait()
    return look_back("after kill -9 of the flow", before, BACK_S)


def be_killed(address: str, folder: str, devices: str) -> None:
    def body() -> None:
        holds = task_of(hold, memory="4GiB")
        gather({str(n): holds.submit(folder, 600.0) for n in range(4)}, 600.0)

    run_flow("to-be-killed", body, devices, address=address)


def check(options: argparse.Namespace) -> list[str]:
    handles = nvml_handles()
    if options.devices == "nvml" and len(handles) < 2:
        say(f"needs two devices; there is {len(handles)}. Nothing is run")
        return []
    sys.path.append(str(ROOT / "benchmarks"))
    ray_nodes = importlib.import_module("_ray_nodes").ray_nodes
    before = used_bytes()
    problems = []
    with ray_nodes(["0", "1"]) as nodes:
        problems += use_nodes(nodes.address, nodes.names, options.devices, before)
        with tempfile.TemporaryDirectory() as folder:
            problems += kill_flow(nodes.address, folder, options.devices, before)
        with tempfile.TemporaryDirectory() as folder:
            problems += lose_a_node(nodes, folder, options.devices, before)
    return problems


def main() -> int:
    if sys.argv[1:2] == [TO_BE_KILLED]:
        be_killed(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=330, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
