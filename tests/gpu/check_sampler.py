"""What it costs a training loop to be watched, and how much of the truth the watching sees.

    python -m tests.gpu.check_sampler

A ResNet-50 step of about 27 ms, as a GPU task with `step()` and the sampler of the child, and the same
loop in a plain process that has never heard of this package, by turns. Then, with `cudnn.benchmark` on,
so that the first step takes far more than the others, a task once more, and a plain process that resets
PyTorch's peak counter after the first step: what it reads at the end is what later steps really took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    ROOT,
    Ended,
    gather,
    read_histories,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

TURNS = 3

#: Steps before those that are compared, and steps of the run whose peak is compared.
WARM_UP = 20
PEAK_STEPS = 60

#: What must hold.
SLOWEST = 1.02
LEAST_SEEN = 0.98

PLAIN = """
import json, sys
from tests.gpu._resnet import train
found = train(**json.loads(sys.argv[1]))
found["strangers"] = sorted({name.partition(".")[0] for name in sys.modules if name.startswith("prefect")})
print("FOUND" + json.dumps(found), flush=True)
"""


# A budget that never pinches: a first step with cudnn.benchmark takes 13 GiB.
@task(name="watched", tags=gpu(memory="32GiB", framework="torch"), timeout_seconds=BODY_S)
def train_watched(settings: dict[str, Any]) -> dict[str, Any]:
    """Train in a GPU task."""
    from prefect_gpu import step
    from tests.gpu import _resnet

    return _resnet.train(after_step=step, **settings)


def train_plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Train in a process without this package.

    Raises:
        RuntimeError: It failed.
    """
    ended = subprocess.run(
        [sys.executable, "-c", PLAIN, json.dumps(settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BODY_S,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND")]
    if ended.returncode or not lines:
        raise RuntimeError(f"it ended with {ended.returncode}: {ended.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND"))
    return found


def median_ms(found: dict[str, Any]) -> float:
    seconds: list[float] = found["seconds"]
    return statistics.median(seconds[min(WARM_UP, len(seconds) // 2) :]) * 1000


def check(options: argparse.Namespace) -> list[str]:
    """Run both by turns, and then the two for the peak."""
    kind = train_watched
    memory = None if options.devices == "nvml" else gpu(memory="4GiB", framework="torch")
    if memory is not None:
        kind = kind.with_options(tags=memory)
    timed = {"steps": WARM_UP + options.steps, "batch": options.batch, "benchmark": False}
    peaked = {"steps": PEAK_STEPS, "batch": options.batch, "benchmark": True}
    if options.devices != "nvml":
        timed["steps"] = peaked["steps"] = options.steps
    plain: list[dict[str, Any]] = []

    def body() -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        for turn in range(1, TURNS + 1):
            plain.append(train_plain(timed))
            say(f"turn {turn}, plain:   {median_ms(plain[-1]):.2f} ms a step")
            name = f"turn {turn}"
            found |= gather({name: kind.submit(timed)}, BODY_S)
            value = found[name].value
            what = f"{median_ms(value):.2f} ms a step" if value else found[name].words
            say(f"turn {turn}, watched: {what}")
        plain.append(train_plain({**peaked, "exact_peak": True}))
        peak = kind.with_options(name="watched-peak")
        return found | gather({"peak": peak.submit(peaked)}, BODY_S)

    flow = run_flow("check-sampler", body, options.devices)
    reports = read_processes(flow.id, TURNS + 1)
    problems = [f"{name}: {e.words}" for name, e in flow.value.items() if e.error is not None]
    if problems:
        return problems
    strangers = {name for found in plain for name in found["strangers"]}
    if strangers:
        problems.append(f"the plain process had imported {', '.join(sorted(strangers))}")
    samples = [reports[e.task_run_id][-1]["samples"] for e in flow.value.values()]
    say(f"readings in the tasks' reports: {', '.join(samples)}")
    return problems + judge_time(plain[:TURNS], flow.value) + judge_peak(plain[TURNS])


def judge_time(plain: list[dict[str, Any]], watched: dict[str, Ended]) -> list[str]:
    """Compare the medians of the steps."""
    without = [median_ms(found) for found in plain]
    with_it = [median_ms(watched[f"turn {turn}"].value) for turn in range(1, TURNS + 1)]
    rows = [
        (name, *(f"{value:.2f}" for value in values), f"{statistics.median(values):.2f}")
        for name, values in (("plain", without), ("watched", with_it))
    ]
    table(["ms a step", *(f"turn {turn}" for turn in range(1, TURNS + 1)), "median"], rows)
    ratio = statistics.median(with_it) / statistics.median(without)
    say(f"watched over plain: {ratio:.4f}")
    return [f"a step takes {ratio:.4f} of a plain one"] if ratio > SLOWEST else []


def judge_peak(control: dict[str, Any]) -> list[str]:
    """Compare what was seen of the steps after the first with what they took."""
    kept = read_histories().get("watched-peak", [{}])[-1]
    steady, live = kept.get("steady_live_bytes"), kept.get("live_bytes")
    exact = control["peak_live_bytes"]
    say(
        f"peak allocated in all: {size(int(live)) if live else '?'} MiB; after the first step: "
        f"{size(int(steady)) if steady else '?'} MiB as sampled, {size(exact)} MiB exactly"
    )
    if not steady or not exact:
        return ["the steady live peak is not known"]
    ratio = int(steady) / exact
    say(f"sampled over exact: {ratio:.4f}")
    return [f"the sampled peak is {ratio:.4f} of the real one"] if ratio < LEAST_SEEN else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps that are compared")
    parser.add_argument("--batch", type=int, default=512, help="images of a step")
    return run(check, parser, limit_s=270)


if __name__ == "__main__":
    sys.exit(main())
