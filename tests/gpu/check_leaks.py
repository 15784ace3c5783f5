"""Sixty tasks of four frameworks, side by side, a third of which die or fail: what stays behind?

    python -m tests.gpu.check_leaks [--seed 7]

A third ends by an exit without a word, a segmentation fault, a kill or an out-of-memory, at places that
a seed chooses. Of each process the report must say that nothing leaked, and the device must be as it
was before.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    TOLERANCE_BYTES,
    Ended,
    Process,
    gather,
    installed,
    last_of,
    read_processes,
    run,
    run_flow,
    say,
    settle,
    table,
    used_bytes,
)

#: How bodies end, and the outcome that the report must have.
OUTCOMES = {
    "return": "completed",
    "exit": "died",
    "SIGSEGV": "died",
    "SIGKILL": "died",
    "out of memory": "oom",
}

#: Floats that a body holds while it works: 512 MiB. And those that no cap here would give.
HELD = 128 << 20
TOO_MANY = (16, 1 << 30)

#: As many as there are cores.
AT_ONCE = 16


def end(how: str) -> None:
    """End this process, or return."""
    import ctypes
    import faulthandler
    import resource
    import signal

    # The image of a process with a device is of many GiB, its stack a page.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    if how == "exit":
        os._exit(3)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)


def in_torch(how: str, held: int) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = torch.ones(held, device=device)
    a = torch.ones(1024, 1024, device=device)
    float((a @ a).sum() + block[0])
    time.sleep(0.3)
    if how == "out of memory":
        torch.ones(TOO_MANY, device=device)
    end(how)


def in_tensorflow(how: str, held: int) -> None:
    import tensorflow as tf

    block = tf.ones([held])
    a = tf.ones([1024, 1024])
    float(tf.reduce_sum(a @ a) + block[0])
    time.sleep(0.3)
    if how == "out of memory":
        tf.ones(TOO_MANY)
    end(how)


def in_jax(how: str, held: int) -> None:
    import jax.numpy as jnp

    block = jnp.ones(held)
    a = jnp.ones((1024, 1024))
    float((a @ a).sum() + block[0])
    time.sleep(0.3)
    if how == "out of memory":
        jnp.ones(TOO_MANY).block_until_ready()
    end(how)


def in_cupy(how: str, held: int) -> None:
    import cupy

    block = cupy.ones(held, dtype=cupy.float32)
    a = cupy.ones((1024, 1024), dtype=cupy.float32)
    float((a @ a).sum() + block[0])
    time.sleep(0.3)
    if how == "out of memory":
        cupy.ones(TOO_MANY, dtype=cupy.float32)
    end(how)


BODIES: dict[str, Callable[[str, int], None]] = {
    "torch": in_torch,
    "tensorflow": in_tensorflow,
    "jax": in_jax,
    "cupy": in_cupy,
}


def choose_ends(count: int, seed: int, kinds: list[str]) -> list[str]:
    """Return how each task ends: two thirds return, in an order set by the seed."""
    bad = [how for how in kinds if how != "return"]
    ends = [bad[index % len(bad)] if index < count // 3 else "return" for index in range(count)]
    random.Random(seed).shuffle(ends)
    return ends


def check(options: argparse.Namespace) -> list[str]:
    """Run them all, and look at what is left."""
    on_gpu = options.devices == "nvml"
    frameworks = [name for name in BODIES if installed(name)]
    problems = [f"{name} is not installed" for name in BODIES if name not in frameworks]
    # On the host nothing refuses 64 GiB: it would be taken.
    kinds = [how for how in OUTCOMES if on_gpu or how != "out of memory"]
    held = HELD if on_gpu else MIB
    tasks = {
        name: task(
            name=f"leak-{name}",
            timeout_seconds=BODY_S,
            tags=gpu(
                memory="4GiB" if name == "tensorflow" and on_gpu else "3GiB" if on_gpu else "1GiB",
                framework=name,
                oom="fail",
            ),
        )(BODIES[name])
        for name in frameworks
    }
    plan = {
        f"{index} {frameworks[index % len(frameworks)]} {how}": (index, how)
        for index, how in enumerate(choose_ends(options.count, options.seed, kinds))
    }

    def body() -> dict[str, Ended]:
        futures = {
            name: tasks[frameworks[index % len(frameworks)]].submit(how, held)
            for name, (index, how) in plan.items()
        }
        return gather(futures, 2 * BODY_S)

    before = used_bytes()
    flow = run_flow("check-leaks", body, options.devices, max_processes=AT_ONCE)
    ended_s = time.monotonic()
    after = settle(before)
    say(f"{len(plan)} tasks, {AT_ONCE} at once, took {flow.seconds:.0f} s")
    for first, last in zip(before, after, strict=True):
        say(
            f"as the flow ended: {(last - first) / MIB:+.1f} MiB more used than before "
            f"({time.monotonic() - ended_s:.2f} s later)"
        )
        if abs(last - first) > TOLERANCE_BYTES:
            problems.append(f"{(last - first) / MIB:+.1f} MiB are used more after the flow")
    return problems + judge(plan, flow.value, read_processes(flow.id, len(plan)))


def judge(
    plan: dict[str, tuple[int, str]],
    ended: dict[str, Ended],
    processes: dict[str, list[Process]],
) -> list[str]:
    """Print what was reported; say what is not as it should be."""
    problems = []
    groups: dict[tuple[str, str], list[Process]] = {}
    for name, (_, how) in plan.items():
        reports = processes.get(ended[name].task_run_id, [])
        report = last_of(processes, ended[name])
        if report is None or len(reports) != 1:
            problems.append(f"{name}: {len(reports)} reports ({ended[name].words})")
            continue
        groups.setdefault((name.split()[1], how), []).append(report)
        if report["outcome"] != OUTCOMES[how]:
            words = ended[name].words or "nothing raised"
            problems.append(f"{name}: {report['outcome']}, not {OUTCOMES[how]} ({words})")
        if report["leaked_bytes"] != "0":
            problems.append(f"{name}: leaked {report['leaked_bytes']} bytes")
    rows = []
    for (framework, how), reports in sorted(groups.items()):
        peaks = [report.bytes("peak_process_bytes") or 0 for report in reports]
        rows.append(
            (
                framework,
                how,
                str(len(reports)),
                " ".join(sorted({report["outcome"] for report in reports})),
                " ".join(sorted({report["leaked_bytes"] for report in reports})),
                f"{max(peaks) / MIB:.0f}",
            )
        )
    table(["framework", "ends by", "tasks", "outcome", "leaked", "peak MiB"], rows)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=60)
    return run(check, parser, limit_s=270, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
