"""What does a GPU task cost on two nodes of a Ray cluster, beside one machine with the same two GPUs?

Three rows: ours on one machine (`GPUTaskRunner()`), ours on two nodes (`GPUTaskRunner(address=...)`), and
`RayTaskRunner` of prefect-ray on the same two nodes, with the fraction of a GPU's memory that a task needs.
The nodes are two raylets of this machine with a GPU each (`_ray_nodes.py`), so no network is measured.

    python benchmarks/cluster.py --out cluster.json     # two GPUs, about six minutes
    python benchmarks/cluster.py --only nodes --turns 1
    python benchmarks/cluster.py --tiny                 # that it runs, on the CPU

The rows take turns, each in a fresh process with one flow, on one Prefect server and one Ray cluster. A flow
measures, in this order:

- *ready*: four tasks at once, each of which needs more than half of a GPU, so that each GPU has two of them one
  after the other. Then tasks one by one, each when no process of the flow computes: seconds from `submit`
  until a first tensor is on the GPU. The median is of these.
- *returned*: seconds from the last line of a body to its array of 300 MB (float64) in the flow, every page of
  it read. All processes read the clock of one machine.
- *evaluations*: seconds from the first `submit` to the last result of forty model evaluations of
  `_evaluations.py`, the longest first. Each takes 0.4 to 3 s and 0.4 to 30 GiB of a GPU of 80 GiB, and in
  proportion of others. How many batches each does is fixed (`BATCH_S`), and budgets are made of its size.
  Budgets of ours and the fractions of Ray are made of the same bytes. The score of each evaluation must
  be what the first row found.
- *left*: GPU memory one second after the last result, while the flow still runs, less what was used before
  its first task; by NVML, of each GPU.

Idle raylets are there in all rows. Each run is printed as it ends, then medians and what they are held
against.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from typing import Any

import _bodies
import _bound
import _common
import _devices
import _evaluations
import _makespan_row
import _ray_nodes
import dispatch
import makespan
import psutil
import transfer

ROWS = {
    "machine": "GPUTaskRunner, one machine",
    "nodes": "GPUTaskRunner, two nodes",
    "ray": "RayTaskRunner, two nodes",
}

MIB, GIB = _devices.MIB, 2**30

#: Memory of each simulated device.
SIMULATED_BYTES = 24 * GIB

#: GPU memory for which the sizes of `_evaluations.py` hold as they are: the largest is 30 GiB of 80.
SIZES_OF_BYTES = 80 * GIB * 40 // 30

#: Seconds of one batch, by kind: about twice what its part on the CPU takes on a core that counts to ten
#: million in half a second.
BATCH_S = {"cnn": 0.4, "transformer": 0.2, "recommender": 0.06, "retrieval": 0.06, "mlp": 0.17}

#: What an evaluation takes beyond its weights: its context (0.5 to 0.7 GiB on an H200), and batches.
BEYOND_WEIGHTS_BYTES = 1536 * MIB

#: Most seconds between two tasks; they end when no process computes.
PAUSE_S = 15.0

#: Runs of the array in one flow.
ARRAYS = 3

#: Difference of a score between two runs of the same work, in half precision on two GPUs.
SCORE_TOLERANCE = 0.02

#: Targets.
MOST_LATER_S = 0.1
LEAST_SOONER = 5.0
MOST_OF_MACHINE = 1.15
MOST_OF_RAY = 0.95
MOST_OF_RAY_ARRAY = 2.0


def plan(seed: int, count: int, scale: float, device_bytes: int, tiny: bool) -> list[Any]:
    """Return the evaluations with their sizes for this device, the longest first."""
    jobs = _evaluations.plan(seed, count, ["torch"], scale, tiny)
    part = 1.0 if tiny else device_bytes / SIZES_OF_BYTES
    jobs = [dataclasses.replace(job, size_bytes=int(job.size_bytes * part)) for job in jobs]
    return sorted(jobs, key=lambda job: (-job.seconds, job.name))


def budget_bytes(job: _evaluations.Evaluation) -> int:
    """Return the bytes that an evaluation asks for."""
    return _bound.budget_bytes(job.size_bytes + BEYOND_WEIGHTS_BYTES)


def steps(job: _evaluations.Evaluation) -> int:
    """Return how many batches an evaluation does."""
    return max(2, round(job.seconds / BATCH_S[job.kind]))


class Row:
    """Measures one row in this process, and tells each part as it ends.

    Args:
        given: The arguments of the process.
        device_bytes: Memory of each device.
    """

    def __init__(self, given: argparse.Namespace, device_bytes: int) -> None:
        self._given, self._device_bytes = given, device_bytes
        self._row, self._on_gpu = given.row, given.on_gpu

    def measure(self, jobs: list[_evaluations.Evaluation]) -> None:
        """Run one flow with all parts."""
        from prefect import flow

        @flow(name=f"cluster-{self._row}", task_runner=self._make_runner())
        def measure_all() -> None:
            before = _devices.used_by_device()
            self._measure_ready()
            self._measure_returned()
            self._measure_evaluations(jobs)
            time.sleep(1.0)
            after = _devices.used_by_device()
            left = [now - then for now, then in zip(after, before, strict=True)]
            _common.tell({"kind": "left", "bytes": left})

        measure_all()

    def _make_runner(self) -> Any:
        address = self._given.address
        if self._row == "ray":
            from prefect_ray import RayTaskRunner

            return RayTaskRunner(address=address, init_kwargs={"log_to_driver": False})
        from prefect_gpu import GPUTaskRunner

        count = 1 if self._row == "nodes" else 2
        devices = "nvml" if self._on_gpu else f"simulated:{count}x{SIMULATED_BYTES // GIB}GiB"
        if self._row == "nodes":
            return GPUTaskRunner(address=address, devices=devices)
        return GPUTaskRunner(devices=devices)

    def _submit(self, body: Any, size_bytes: int, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task that may take so many bytes of a device."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        from prefect_gpu import gpu

        work = task(body, cache_policy=NO_CACHE, persist_result=False)
        if self._row == "ray":
            fraction = round(min(1.0, size_bytes / self._device_bytes) + 0.00005, 4)
            with _common.ray_options(num_gpus=fraction, num_cpus=1):
                return work.submit(*args, **kwargs)
        tags = gpu(memory=f"{-(-size_bytes // MIB)}MiB", framework="torch", cpus=1)
        return work.with_options(tags=tags).submit(*args, **kwargs)

    def _wait_until_idle(self) -> None:
        """Wait until what starts beside the tasks is ready: standbys on this machine and on the nodes."""
        if self._row == "ray":
            # Its own processes are never quite idle.
            _devices.wait_until_idle(dispatch.OTHERS_PAUSE_S)
            return
        others = self._of_nodes if self._row == "nodes" else tuple
        _devices.wait_until_idle(PAUSE_S, others=others)

    def _of_nodes(self) -> list[psutil.Process]:
        """Return the processes of this package on the nodes."""
        found = []
        for process in _ray_nodes.processes_marked(self._given.mark):
            # One may end meanwhile.
            with contextlib.suppress(psutil.Error):
                if "prefect_gpu" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _measure_ready(self) -> None:
        arguments = (
            *("torch", self._on_gpu),
            dispatch.GPU_BYTES if self._on_gpu else dispatch.HOST_BYTES,
        )

        def submit(size_bytes: int) -> Any:
            submitted = time.time()
            future = self._submit(_bodies.first_use, size_bytes, *arguments)
            return lambda: future.result()["ready"] - submitted

        # Two run and two wait. Standbys are kept on a node for tasks that wait, and for those after them.
        first = [submit(self._device_bytes * 6 // 10) for _ in range(4)]
        first_s = [result() for result in first]
        later_s = []
        for _ in range(self._given.later):
            self._wait_until_idle()
            later_s.append(submit(6 * GIB)())
        _common.tell({"kind": "ready", "seconds": later_s, "first": first_s})
        self._wait_until_idle()

    def _measure_returned(self) -> None:
        found = []
        for seed in range(1 + ARRAYS):
            # The first one is small: imports and one-time starts are not measured.
            count = self._given.size // 8 if seed else 1
            future = self._submit(transfer.give, GIB, count, seed, 0.0)
            array, returned_s = future.result()
            transfer.check(transfer.touch(array), count, seed)
            found.append(time.monotonic() - returned_s)
        _common.tell({"kind": "returned", "seconds": found[1:]})

    def _measure_evaluations(self, jobs: list[_evaluations.Evaluation]) -> None:
        began = time.time()
        futures = []
        for job in jobs:
            arguments = _makespan_row.arguments_of(job, steps(job), self._on_gpu)
            futures.append(self._submit(_evaluations.evaluate, budget_bytes(job), **arguments))
        found = [future.result(raise_on_failure=False) for future in futures]
        seconds = time.time() - began
        tasks = [
            result
            if isinstance(result, dict)
            else {"name": job.name, "error": f"{type(result).__name__}: {result}"[:500]}
            for job, result in zip(jobs, found, strict=True)
        ]
        _common.tell({"kind": "evaluations", "seconds": [seconds], "tasks": tasks})


def main() -> None:
    """Measure every row in turns; print runs, medians and checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=40, help="evaluations")
    parser.add_argument("--scale", type=float, default=0.4, help="of each evaluation's seconds")
    parser.add_argument("--later", type=int, default=3, help="tasks one by one")
    parser.add_argument("--size", type=int, default=300_000_000, help="bytes of the array")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--mark", help=argparse.SUPPRESS)
    _common.add_arguments(parser, ROWS, budget_s=540.0, seed_of="sizes, kinds and seconds")
    given = parser.parse_args()
    if given.tiny:
        given.turns, given.tasks, given.later, given.size = 1, 3, 1, 4_000_000
        given.budget = 600.0
    device_bytes = min(_devices.usable_bytes(), default=0) if given.row else 0
    device_bytes = device_bytes if given.on_gpu else SIMULATED_BYTES
    if given.row:
        jobs = plan(given.seed, given.tasks, given.scale, device_bytes, given.tiny)
        Row(given, device_bytes).measure(jobs)
        return
    for module in ("ray", "torch"):
        if not _common.installed(module):
            raise SystemExit(f"not installed: {module}")
    nvidia = _devices.nvidia()
    on_gpu = bool(nvidia) and not given.tiny
    # Two devices, for all rows alike.
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]
    if given.tiny:
        devices = ["0", "1"]
    elif min(len(devices), len(nvidia.get("devices", []))) < 2:
        raise SystemExit("fewer than two GPUs: --tiny tries it out on the CPU")
    os.environ.update(
        makespan.ENVIRONMENT,
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        CUDA_VISIBLE_DEVICES=",".join(devices),
    )
    head = {
        "versions": _common.versions("torch", "ray", "prefect-ray", "numpy"),
        **nvidia,
        "on_gpu": on_gpu,
        "seed": given.seed,
        "tasks": given.tasks,
        "scale": given.scale,
        "array_bytes": given.size,
    }
    print(json.dumps(head), flush=True)
    results = _common.Results(given.out, head)
    cores = head["versions"]["cores"]
    with (
        _common.prefect_server(given.api_url) as url,
        _ray_nodes.ray_nodes(
            devices, cpus=max(1, cores // 2), object_store_bytes=max(150 * MIB, 8 * given.size)
        ) as nodes,
    ):
        _common.say("the server and the nodes are there")
        measure(given, on_gpu, url, nodes, results)
    report(results, given.only, on_gpu)
    if given.json:
        print(json.dumps(results.found, indent=1))
    if any(run["kind"] == "problem" for run in results.found["runs"]):
        raise SystemExit("a row did not end well: see above")


def measure(
    given: argparse.Namespace,
    on_gpu: bool,
    url: str,
    nodes: _ray_nodes.Nodes,
    results: _common.Results,
) -> None:
    """Run all rows in turns."""
    absent = {}
    if "ray" in given.only and not _common.installed("prefect_ray"):
        absent["ray"] = "not installed: prefect-ray"
        _common.say(f"{ROWS['ray']}: {absent['ray']}")
    for turn in range(given.turns):
        rows = [row for row in given.only if row not in absent]
        first = turn % max(1, len(rows))
        for row in rows[first:] + rows[:first]:
            left_s = given.budget - (time.monotonic() - _common.STARTED_S)
            if left_s < 10.0:
                _common.say(f"turn {turn + 1}, {ROWS[row]}: no time within --budget")
                continue

            def take(found: dict[str, Any], turn: int = turn, row: str = row) -> None:
                results.add({"turn": turn + 1, "row": row, **found})
                _common.say(f"turn {turn + 1}, {ROWS[row]}: {describe(found, on_gpu)}")

            began = time.monotonic()
            problem = _common.stream(
                __file__,
                [
                    *("--row", row, "--address", nodes.address, "--mark", nodes.mark),
                    *("--tasks", str(given.tasks), "--seed", str(given.seed)),
                    *("--scale", str(given.scale), "--later", str(given.later)),
                    *("--size", str(given.size)),
                    *(["--on-gpu"] if on_gpu else []),
                    *(["--tiny"] if given.tiny else []),
                ],
                url,
                left_s,
                take,
            )
            took_s = time.monotonic() - began
            _common.say(f"turn {turn + 1}, {ROWS[row]}: {took_s:.0f} s {problem}".rstrip())
            if problem:
                results.add({"turn": turn + 1, "row": row, "kind": "problem", "text": problem})
    results.put("absent", absent)


def describe(found: dict[str, Any], on_gpu: bool) -> str:
    """Return one part of a run as text."""
    kind = found["kind"]
    if kind == "left":
        left = ", ".join(f"{size / MIB:.0f}" for size in found["bytes"])
        return f"left on the GPUs {left} MiB" if on_gpu else "no GPU: nothing is left"
    text = f"{kind} {', '.join(f'{value:.3f}' for value in found['seconds'])} s"
    if kind == "ready":
        text += f"; the first four {', '.join(f'{value:.2f}' for value in found['first'])} s"
    if kind == "evaluations":
        failed = [task for task in found["tasks"] if "error" in task]
        again = sum(task.get("attempt", 1) > 1 for task in found["tasks"])
        text += f"; {len(failed)} of {len(found['tasks'])} failed, {again} were run again"
        text += "".join(f"; {task['name']}: {task['error']}" for task in failed)
    return text


def select(runs: list[dict[str, Any]], row: str, kind: str) -> list[float]:
    """Return all seconds of one part of a row."""
    return [s for r in runs if (r["row"], r["kind"]) == (row, kind) for s in r["seconds"]]


def wrong_values(runs: list[dict[str, Any]], row: str) -> int:
    """Count evaluations of a row that failed, or found something else than the first row."""
    evaluations = [run for run in runs if run["kind"] == "evaluations"]
    scores: dict[str, float] = {}
    for run in evaluations:
        for task in run["tasks"]:
            if "error" not in task:
                scores.setdefault(task["name"], task["score"])
    return sum(
        "error" in task or abs(task["score"] - scores[task["name"]]) > SCORE_TOLERANCE
        for run in evaluations
        if run["row"] == row
        for task in run["tasks"]
    )


def most_left(runs: list[dict[str, Any]], row: str) -> int:
    """Return the most bytes that were left on a GPU in any turn of a row."""
    left = [size for r in runs if (r["row"], r["kind"]) == (row, "left") for size in r["bytes"]]
    return max(left, default=0)


def make_checks(runs: list[dict[str, Any]]) -> list[_bound.Check]:
    """Judge medians of all turns; what was not measured is not judged."""
    medians = {
        (row, kind): statistics.median(found)
        for row in ROWS
        for kind in ("ready", "evaluations", "returned")
        if (found := select(runs, row, kind))
    }
    checks = []

    def compare(kind: str, other: str, name: str, limit: float) -> None:
        if ("nodes", kind) in medians and (other, kind) in medians:
            ratio = medians["nodes", kind] / medians[other, kind]
            checks.append(_bound.Check(name, ratio, limit))

    ready = [medians.get((row, "ready")) for row in ROWS]
    machine_s, nodes_s, ray_s = ready
    if nodes_s and machine_s:
        checks.append(
            _bound.Check("ready later than on one machine", nodes_s - machine_s, MOST_LATER_S, "s")
        )
    if nodes_s and ray_s:
        checks.append(
            _bound.Check(
                "ready so many times sooner than RayTaskRunner",
                ray_s / nodes_s,
                LEAST_SOONER,
                at_least=True,
            )
        )
    compare("evaluations", "machine", "evaluations: of one machine's makespan", MOST_OF_MACHINE)
    compare("evaluations", "ray", "evaluations: of RayTaskRunner's makespan", MOST_OF_RAY)
    compare("returned", "ray", "array: of RayTaskRunner's time", MOST_OF_RAY_ARRAY)
    tolerance = _devices.TOLERANCE_BYTES / MIB
    for row in ("machine", "nodes"):
        if (row, "evaluations") in medians:
            left = most_left(runs, row) / MIB
            checks.append(_bound.Check(f"{row}: left on a GPU", left, tolerance, "MiB"))
    for row in ROWS:
        if (row, "evaluations") in medians:
            wrong = wrong_values(runs, row)
            checks.append(_bound.Check(f"{row}: evaluations without the right value", wrong, 0))
    return checks


def report(results: _common.Results, rows: list[str], on_gpu: bool) -> None:
    """Print a line for each row, and the checks."""
    runs, absent = results.found["runs"], results.found["absent"]
    checks = make_checks(runs)
    results.put("checks", [str(check) for check in checks] if on_gpu else [])
    table = []
    for row in rows:
        if row in absent:
            table.append([ROWS[row], absent[row], "", "", "", ""])
            continue
        table.append(
            [
                ROWS[row],
                _common.spread(select(runs, row, "ready"), 3),
                _common.spread(select(runs, row, "evaluations"), 1),
                _common.spread(select(runs, row, "returned"), 3),
                f"{most_left(runs, row) / MIB:.0f}" if on_gpu else "no GPU",
                str(wrong_values(runs, row)),
            ]
        )
    print("\nmedian (lowest–highest) of all turns; PyTorch only\n")
    _common.print_table(
        [
            "runner",
            "submit to GPU ready, s",
            "evaluations, s",
            "array returned, s",
            "most left on a GPU, MiB",
            "wrong values",
        ],
        table,
    )
    print()
    for check in checks if on_gpu else []:
        print(check)
    if not on_gpu:
        print("no GPU: nothing is judged")


if __name__ == "__main__":
    main()
