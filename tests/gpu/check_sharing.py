"""Three TensorFlow programs of 40 % of a device, each of which takes 38 % of it: two run, the third waits.

    python -m tests.gpu.check_sharing

Each fills its device to 38 % with one tensor after the other, works on them, and holds them for a while. On several
devices there are three programs for each of them, and all devices are shared in this way.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    Observer,
    gather,
    last_of,
    nvml_handles,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

BUDGET_PERCENT = 40
TAKEN_FRACTION = 0.38

#: Programs on each device, of which two fit.
PROGRAMS = 3

#: Seconds for which memory is held.
HOLD_S = 6.0

#: Bytes of one tensor.
BLOCK_BYTES = 512 * MIB


@dataclass
class Span:
    """When a program held its memory, in seconds since the epoch, and how much."""

    began_s: float
    ended_s: float
    taken_bytes: int


@task(
    name="shares",
    timeout_seconds=BODY_S,
    tags=gpu(memory=f"{BUDGET_PERCENT}%", framework="tensorflow", oom="fail"),
)
def take_share() -> Span:
    import tensorflow as tf

    from prefect_gpu import current_allocation

    began_s = time.time()
    allocation = current_allocation()
    assert allocation is not None and allocation.budget_bytes is not None
    wanted = int(allocation.budget_bytes * TAKEN_FRACTION / (BUDGET_PERCENT / 100))
    context = allocation.budget_bytes - (allocation.cap_bytes or 0)
    blocks = [
        tf.ones([BLOCK_BYTES // 4], tf.float32) for _ in range((wanted - context) // BLOCK_BYTES)
    ]
    assert all(float(block[-1]) == 1.0 for block in blocks)
    time.sleep(HOLD_S)
    return Span(began_s, time.time(), len(blocks) * BLOCK_BYTES + context)


def most_at_once(spans: list[Span]) -> int:
    """Return how many of the spans overlap at most."""
    return max((sum(s.began_s <= at.began_s < s.ended_s for s in spans) for at in spans), default=0)


def check(options: argparse.Namespace) -> list[str]:
    """Run three programs for each device."""
    devices = max(1, len(nvml_handles()))
    names = [f"program {number}" for number in range(1, PROGRAMS * devices + 1)]
    with Observer() as observer:
        flow = run_flow(
            "sharing",
            lambda: gather({name: take_share.submit() for name in names}, 2 * BODY_S),
            options.devices,
        )
    processes = read_processes(flow.id, len(names))
    problems, rows = [], []
    spans: dict[str, list[Span]] = {}
    first_s = min((e.value.began_s for e in flow.value.values() if e.value), default=0.0)
    for name, ended in flow.value.items():
        report = last_of(processes, ended)
        if ended.value is None or report is None:
            problems.append(f"{name}: {ended.words or 'no report'}")
            continue
        span: Span = ended.value
        budget, shown = report.bytes("budget_bytes"), observer.peak_of(report)
        spans.setdefault(report["device_uuid"], []).append(span)
        rows.append(
            (
                name,
                report["device_uuid"][:12],
                f"{span.began_s - first_s:.1f}",
                f"{span.ended_s - first_s:.1f}",
                report["queued_s"],
                size(budget),
                size(span.taken_bytes),
                size(shown),
            )
        )
        if shown is not None and budget is not None and shown > budget + 64 * MIB:
            problems.append(f"{name}: NVML showed {size(shown)} MiB of a budget of {size(budget)}")
    table(
        ["program", "device", "began-s", "ended-s", "queued-s", "budget", "taken", "NVML-peak"],
        rows,
    )
    say("began and ended: seconds since the first line of the first; sizes in MiB")
    for device, held in spans.items():
        together = most_at_once(held)
        say(f"{device[:12]}: at most {together} at once")
        if together != PROGRAMS - 1:
            problems.append(f"{device}: {together} at once, and two fit")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=240)


if __name__ == "__main__":
    sys.exit(main())
