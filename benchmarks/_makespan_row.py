"""One row of `makespan.py`, measured in the process that this is run in.

Which rows there are, in which order and for how long is `makespan`'s, and so is what the figures are
held against. The bodies are in `_evaluations`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from typing import Any

import _bound
import _common
import _devices
import _evaluations

MIB = _devices.MIB

#: Processes that fill caches at a time: together they need at most 80 GiB.
CACHES_AT_A_TIME = 4


def is_compiled(job: _evaluations.Evaluation) -> bool:
    """Return whether a framework compiles its models and can cache the result on disk."""
    return job.framework == "jax"


def spawned(queue: Any, arguments: dict[str, Any]) -> None:
    """Run an evaluation in a process of `multiprocessing`."""
    try:
        queue.put(_evaluations.evaluate(**arguments))
    except Exception as error:
        queue.put({"error": f"{type(error).__name__}: {error}"[:500]})


def fill_caches(jobs: list[_evaluations.Evaluation], on_gpu: bool) -> None:
    """Compile each model once into the caches on disk, some at a time; return their number."""
    context = multiprocessing.get_context("spawn")
    waiting = [dataclasses.replace(job, seconds=0.0) for job in jobs if is_compiled(job)]
    running: list[Any] = []
    filled, count = 0, len(waiting)
    while waiting or running:
        filled += sum(process.exitcode == 0 for process in running)
        running = [process for process in running if process.exitcode is None]
        while waiting and len(running) < CACHES_AT_A_TIME:
            arguments = arguments_of(waiting.pop(), 1, on_gpu)
            process = context.Process(target=_evaluations.evaluate, kwargs=arguments, daemon=True)
            process.start()
            running.append(process)
        time.sleep(0.05)
    _common.tell({"filled": filled, "of": count})


def arguments_of(job: _evaluations.Evaluation, steps: int, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of the body."""
    return {**dataclasses.asdict(job), "steps": steps, "on_gpu": on_gpu}


def tell_task(
    job: _evaluations.Evaluation, found: Any, sampler: _devices.Sampler, error: str = ""
) -> None:
    """Return the result of one task."""
    record = {"kind": "task", "name": job.name, "error": error}
    if not error:
        record |= found
        record["peak_bytes"] = sampler.peak_bytes(found["pid"])
        record["gone"] = sampler.last_seen.get(found["pid"], found["ended"])
        record["busy_fraction"] = sampler.busy_fraction(found["ready"], found["ended"])
    _common.tell(record)


def measure_sequential(jobs: list[_evaluations.Evaluation], on_gpu: bool) -> None:
    """Run one process after another; tell each, and the whole."""
    context = multiprocessing.get_context("spawn")
    used_before, failed = _devices.used_bytes(), 0
    with _devices.Sampler(on_gpu) as sampler:
        began = time.time()
        for number, job in enumerate(jobs, 1):
            queue = context.SimpleQueue()
            process = context.Process(
                target=spawned, args=(queue, arguments_of(job, 0, on_gpu)), daemon=True
            )
            process.start()
            # One that dies says nothing.
            while queue.empty() and process.is_alive():
                process.join(0.01)
            died = {"error": f"exit code {process.exitcode}"}
            found = died if queue.empty() else queue.get()
            process.join()
            error = found.get("error", "")
            failed += bool(error)
            tell_task(job, found, sampler, error)
            if number % 5 == 0 or error:
                _common.say(f"{number} of {len(jobs)} alone {error}".rstrip())
        wall_s = time.time() - began
    _common.tell(
        {
            "kind": "row",
            "makespan_s": wall_s,
            "failed": failed,
            "leaked_bytes": _devices.settled_difference_bytes(used_before),
        }
    )


def measure_flow(
    row: str,
    jobs: list[_evaluations.Evaluation],
    costs: dict[str, dict[str, Any]],
    device_bytes: int,
    on_gpu: bool,
    settings: dict[str, Any],
    learns: bool,
) -> None:
    """Run all tasks in one flow; tell each, and the whole.

    Args:
        device_bytes: Memory of the device that the row may use; 0: no GPU.
        learns: Whether this row shares what it learns, and knows what the others learned that do so.
    """
    from prefect import flow, task
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner, gpu

    total = min(device_bytes, *_devices.usable_bytes()) if on_gpu else 0
    if row == "ray":
        runner: Any = _common.ray_runner(1)
    else:
        runner = GPUTaskRunner(devices="nvml" if on_gpu else "host", **settings)
    # Histories are of a flow's and a task's name: one name for the rows that share them.
    work = task(_evaluations.evaluate, name="evaluate" if learns else f"evaluate-{row}")
    seen: dict[str, Any] = {}

    def submit(job: _evaluations.Evaluation) -> Any:
        arguments = arguments_of(job, costs[job.name]["steps"], on_gpu)
        peak = costs[job.name]["peak_bytes"]
        if row == "ray":
            fraction = round(min(1.0, peak / total) + 0.00005, 4) if on_gpu else 0
            with _common.ray_options(num_gpus=fraction, num_cpus=1):
                return work.submit(**arguments)
        more: dict[str, Any] = {"framework": job.framework, "cpus": 1}
        if row == "ours":
            more["memory"] = f"{-(-_bound.budget_bytes(peak) // MIB)}MiB"
        else:
            more["learn_by"] = "name"
            more["exclusive"] = row == "exclusive"
        return work.with_options(tags=gpu(**more)).submit(**arguments)

    @flow(name="makespan" if learns else f"makespan-{row}", task_runner=runner)
    def evaluate_all() -> None:
        seen["flow_run_id"] = str(flow_run.id)
        began = time.time()
        futures = [(job, submit(job)) for job in jobs]
        seen["results"] = results = []
        seen["task_runs"] = {str(future.task_run_id): job.name for job, future in futures}
        for job, future in futures:
            results.append((job, future.result(raise_on_failure=False)))
            if len(results) % 10 == 0:
                _common.say(f"{row}: {len(results)} of {len(jobs)} have ended")
        seen["makespan_s"] = time.time() - began

    used_before = _devices.used_bytes()
    if row != "ray" and on_gpu:
        _common.warm_up(runner, sorted({job.framework for job in jobs}), on_gpu)
    with _devices.Sampler(on_gpu) as sampler:
        evaluate_all()
    failed, out_of_memory = 0, 0
    for job, found in seen["results"]:
        error = ""
        if not isinstance(found, dict):
            error = f"{type(found).__name__}: {found}"[:500]
            failed += 1
            out_of_memory += _common.says_out_of_memory(error)
        tell_task(job, found, sampler, error)
    record = {
        "kind": "row",
        "makespan_s": seen["makespan_s"],
        "failed": failed,
        "out_of_memory": out_of_memory,
        # Standing processes end with the flow, or hold what they hold for a moment.
        "leaked_bytes": _devices.settled_difference_bytes(used_before),
        "used_peak_bytes": max(sampler.used_peaks),
    }
    if row != "ray":
        reports = _common.read_reports(seen["flow_run_id"], len(jobs))
        summary = _common.summarise_reports(reports)
        record["reports"] = summary
        #: By task: bytes set aside, and seconds from its placement to its first line.
        record["placed"] = {
            seen["task_runs"][report["task_run_id"]]: [
                int(report["budget_bytes"]),
                float(report["start_s"]),
            ]
            for report in reports
            if report["task_run_id"] in seen["task_runs"]
        }
        # A task that ran out of memory and then ended well is in the reports alone.
        record["out_of_memory"] = max(out_of_memory, summary["out_of_memory"])
    _common.tell(record)
