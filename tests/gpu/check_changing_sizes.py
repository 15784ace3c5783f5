"""Bodies whose inputs change size, several runs of each: how often is a learned budget too small, and twice in a row?

    python -m tests.gpu.check_changing_sizes [--only NAME]...

The bodies are those of `library_bodies` whose inputs change size. Each run has other sizes, in the worst order: what the
first run teaches is the least, and each of the next runs needs more. A run *pinched* if it ran out of memory at its own
cap, so that it needed another process. The run after it must not pinch again. The last run repeats the one before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu import library_bodies as bodies
from tests.gpu._checks import (
    BODY_S,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

#: By name: the modules that a body needs, and the body.
BODIES: dict[str, tuple[tuple[str, ...], Callable[..., bodies.Found]]] = {
    "torchvision": (("torch", "torchvision"), bodies.detection),
    "generate": (("torch", "transformers"), bodies.generate),
    "torch-geometric": (("torch", "torch_geometric"), bodies.graphs),
}


#: Seeds to choose from.
SEEDS = 6


def choose_seeds(count: int) -> list[int]:
    """Return seeds in the worst order: that of the smallest sizes, of middle ones, and twice that of the largest."""
    ranked = sorted(
        range(1, count + 1), key=lambda seed: max(bodies.draw_sizes(seed, bodies.STEPS, 1, 1 << 20))
    )
    return [ranked[0], ranked[count // 2], ranked[-1], ranked[-1]]


@dataclass(frozen=True, slots=True)
class Kept:
    """One task run, and what was reported of its processes."""

    ended: Ended
    reports: list[Process]

    @property
    def pinched(self) -> bool:
        return len(self.reports) > 1


def row_of(name: str, number: int, kept: Kept, observer: Observer) -> tuple[str, ...]:
    if not kept.reports:
        return (name, str(number), *["?"] * 9, kept.ended.words)
    found, last = kept.ended.value or {}, kept.reports[-1]
    return (
        name,
        str(number),
        ",".join(map(str, found.get("sizes", []))),
        size(kept.reports[0].bytes("budget_bytes")),
        size(last.bytes("budget_bytes")),
        size(last.bytes("peak_process_bytes")),
        size(observer.peak_of(last)),
        size(last.bytes("peak_live_bytes")),
        size(last.bytes("steady_live_bytes")),
        str(len(kept.reports)),
        str(found.get("retries", "?")),
        ", ".join(f"{each['outcome']} {each['run_s']} s" for each in kept.reports),
    )


def judge(name: str, runs: list[Kept]) -> list[str]:
    problems = []
    for number, kept in enumerate(runs, 1):
        if kept.ended.error is not None:
            problems.append(f"{name}, run {number}: {kept.ended.words}")
        causes = {report["cause"] for report in kept.reports} - {"none", "own_cap"}
        if causes:
            problems.append(f"{name}, run {number}: out of memory because of {', '.join(causes)}")
        if number > 1 and kept.pinched and runs[number - 2].pinched:
            problems.append(f"{name}, run {number} pinched, as the run before it")
        elif number == len(runs) and kept.pinched:
            problems.append(f"{name}, run {number} pinched with what the run before it had")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Run each body several times."""
    chosen = {}
    for name in options.only or BODIES:
        modules, body = BODIES[name]
        missing = [module for module in modules if not installed(module)]
        if missing:
            say(f"not tried: {name}, since {', '.join(missing)} is not installed")
        else:
            chosen[name] = body
    tasks: dict[str, Any] = {
        name: task(name=name, timeout_seconds=BODY_S, tags=gpu())(body)
        for name, body in chosen.items()
    }
    shrink = 1 if options.devices == "nvml" else 8
    runs: dict[str, list[Kept]] = {name: [] for name in tasks}
    with Observer() as observer:
        for seed in choose_seeds(SEEDS):
            flow = run_flow(
                "changing-sizes",
                lambda seed=seed: gather(  # type: ignore[misc]
                    {name: each.submit(shrink, seed) for name, each in tasks.items()}, BODY_S
                ),
                options.devices,
            )
            processes = read_processes(flow.id, len(tasks))
            for name, ended in flow.value.items():
                runs[name].append(Kept(ended, processes.get(ended.task_run_id, [])))
                # As soon as it is known: what follows may take too long.
                say(*row_of(name, len(runs[name]), runs[name][-1], observer), sep=" | ")
    table(
        [
            "body",
            "run",
            "sizes",
            "first-budget",
            "last-budget",
            "reported",
            "NVML-peak",
            "live",
            "steady",
            "processes",
            "retries",
            "processes' ends",
        ],
        [
            row_of(name, number, each, observer)
            for name, found in runs.items()
            for number, each in enumerate(found, 1)
        ],
    )
    say("sizes in MiB; peaks, live, steady and retries are those of the last process of each run")
    pinched = [each.pinched for found in runs.values() for each in found]
    say(f"{sum(pinched)} of {len(pinched)} runs pinched")
    return [problem for name, found in runs.items() for problem in judge(name, found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(BODIES), help="may repeat")
    return run(check, parser, limit_s=400, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
