"""A ResNet-50 that learns its budget: the first run takes what is there, the second what it needs.

    python -m tests.gpu.check_resnet

Training with batch 512×3×64×64, float32, SGD with momentum 0.9, `cudnn.benchmark` on. The
first run is a probe, the second has the budget that its history teaches, and the third a tag that is
too small: it runs out of memory in its own cap and recovers by itself, without a retry of Prefect's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    GIB,
    MIB,
    Ended,
    Observer,
    Process,
    gather,
    last_of,
    read_histories,
    read_processes,
    read_task_runs,
    run,
    run_flow,
    say,
    size,
    table,
)

#: The last steps of a run, of which the median is compared.
COMPARED = 20

#: What must hold.
MOST_LEARNED_BYTES = 6 * GIB
LEAST_PROBED_BYTES = 13 * GIB
SLOWEST = 1.05


@task(name="resnet50", tags=gpu(), timeout_seconds=BODY_S)
def train_resnet(steps: int, batch: int) -> dict[str, Any]:
    """Train; give the seconds of each step."""
    # Here, since a body is searched for its frameworks, and modules that it imports are not.
    import torch

    from prefect_gpu import current_allocation, step
    from tests.gpu import _resnet

    allocation = current_allocation()
    assert allocation is not None
    found = _resnet.train(steps, step, batch=batch)
    return {**found, "cap_bytes": allocation.cap_bytes, "torch": str(torch.__version__)}


def check(options: argparse.Namespace) -> list[str]:
    """Run it three times, one after another."""
    work = (options.steps, options.batch)

    def body() -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        for name, kind in (
            ("first", train_resnet),
            ("second", train_resnet),
            ("forced", train_resnet.with_options(tags=gpu(memory=options.too_small))),
        ):
            found |= gather({name: kind.submit(*work)}, 2 * BODY_S)
            value = found[name].value
            say(f"{name}: {found[name].words or 'completed, torch ' + value['torch']}")
        return found

    with Observer() as observer:
        flow = run_flow("check-resnet", body, options.devices)
    processes = read_processes(flow.id, 4)
    task_runs = read_task_runs(flow.id)
    step_s = {
        name: statistics.median(ended.value["seconds"][-COMPARED:])
        for name, ended in flow.value.items()
        if ended.value is not None
    }
    rows = []
    for name, ended in flow.value.items():
        for report in processes.get(ended.task_run_id, []):
            last = report["outcome"] == "completed" and ended.value is not None
            rows.append(
                (
                    name,
                    str(report.attempt),
                    report["outcome"],
                    report["budget_source"],
                    size(report.bytes("budget_bytes")),
                    size(ended.value["cap_bytes"]) if last and ended.value["cap_bytes"] else "-",
                    size(observer.peak_of(report)),
                    size(report.bytes("peak_live_bytes")),
                    size(report.bytes("peak_reserved_bytes")),
                    size(report.bytes("context_bytes")),
                    f"{step_s[name] * 1000:.1f}" if last else "-",
                    f"{ended.value['seconds'][0]:.1f}" if last else "-",
                )
            )
    table(
        [
            "run",
            "process",
            "outcome",
            "source",
            "budget",
            "cap",
            "NVML-peak",
            "live",
            "reserved",
            "context",
            "step-ms",
            "first-s",
        ],
        rows,
    )
    say("sizes in MiB; NVML's peak is read from outside; a step is the median of the last 20")
    for kept in read_histories().get("resnet50", []):
        steady, cause = kept.get("steady_live_bytes"), kept.get("cause") or "-"
        say(
            f"history: {kept.get('outcome')}, steady live "
            f"{size(int(steady)) if steady else 'unknown'} MiB, cause {cause}"
        )
    return judge(flow.value, processes, task_runs, observer, step_s)


def judge(
    ended: dict[str, Ended],
    processes: dict[str, list[Process]],
    task_runs: dict[str, dict[str, Any]],
    observer: Observer,
    step_s: dict[str, float],
) -> list[str]:
    """Return the faults that were found."""
    problems = [f"{name}: {e.words}" for name, e in ended.items() if e.error is not None]
    reports = {name: last_of(processes, e) for name, e in ended.items()}
    if problems or None in reports.values():
        return [*problems, *(f"{name}: no report" for name, r in reports.items() if r is None)]
    first, second, forced = (reports[name] for name in ("first", "second", "forced"))
    assert first is not None and second is not None and forced is not None
    for name, report, source in (("first", first, "probe"), ("second", second, "learned")):
        if report["budget_source"] != source:
            problems.append(f"{name}: its budget is from {report['budget_source']}, not {source}")
        if report.attempt != 1:
            problems.append(f"{name}: it took {report.attempt} processes")
    probed, learned = observer.peak_of(first) or 0, second.bytes("budget_bytes") or 0
    if probed <= LEAST_PROBED_BYTES:
        problems.append(f"first: NVML's peak is {probed / MIB:.0f} MiB, 13 GiB were expected")
    if not 0 < learned <= MOST_LEARNED_BYTES:
        problems.append(f"second: its budget is {learned / MIB:.0f} MiB, above 6 GiB")
    ratio = step_s["second"] / step_s["first"]
    say(f"step time, learned over first: {ratio:.3f}")
    if ratio > SLOWEST:
        problems.append(f"second: a step takes {ratio:.3f} of the first run's, above {SLOWEST}")
    run_count = task_runs[ended["forced"].task_run_id]["run_count"]
    say(f"forced: {forced.attempt} processes, {run_count} run of Prefect's")
    if forced.attempt < 2:
        problems.append("forced: it never ran out of memory")
    if run_count != 1:
        problems.append(f"forced: Prefect ran it {run_count} times, not once")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--too-small", default="3GiB", help="gpu:memory of the third run")
    return run(check, parser, limit_s=240)


if __name__ == "__main__":
    sys.exit(main())
