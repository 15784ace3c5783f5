"""Four flow processes on one GPU, and a flow that is killed with eight children: what do the others see, what stays?

    python -m tests.gpu.check_many_flows [--count 24] [--flows 4]

First the flows submit tasks with and without budgets at the same moment: none may run out of memory, and no more
than the device has may ever be promised. Then a flow is killed with -9 while eight of its tasks hold 4 GiB each and
another flow waits for nine tenths of the device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.test_many_flows import check_capacity, owner_of, read_log
from tests.gpu._checks import (
    MIB,
    ROOT,
    TOLERANCE_BYTES,
    nvml_handles,
    read_processes,
    run,
    say,
    settle,
    table,
    used_bytes,
)

GIB = 1 << 30

#: Children of the flow that is killed.
CHILDREN = 8

#: Seconds that anything may take here.
LIMIT_S = 400.0


class Flow:
    """One flow process."""

    def __init__(self, kind: str, devices: str, ledger: str, **arguments: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.flow_beside", kind, "--devices", devices]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PREFECT_INTEGRATIONS_GPU_LEDGER": ledger},
            start_new_session=True,
        )
        self.run_id = str(self.told("ready")["ready"])

    def go(self) -> None:
        """Let it submit its tasks."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def told(self, word: str) -> dict[str, Any]:
        """Wait until it tells something; return that, empty if it never does."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Output of children comes with a prefix.
            _, found, text = line.partition("TOLD ")
            if found and word in (words := json.loads(text)):
                return dict(words)
        return {}

    def close(self) -> None:
        """Wait for its end, and close what it was told through."""
        with self.process:
            self.process.wait(60)


def check(options: argparse.Namespace) -> list[str]:
    """Run both parts."""
    problems = []
    for part in (_check_mixed, check_kill):
        with tempfile.TemporaryDirectory() as ledger:
            problems += part(options, ledger)
    return problems


def _check_mixed(options: argparse.Namespace, ledger: str) -> list[str]:
    problems: list[str] = []
    before, began_s = used_bytes(), time.monotonic()
    flows = [
        Flow("mixed", options.devices, ledger, count=options.count, seed=seed)
        for seed in range(options.flows)
    ]
    for each in flows:
        each.go()
    rows = []
    for number, each in enumerate(flows):
        told = each.told("failed")
        if not told or not each.told("ended"):
            problems.append(f"flow {number} ended without its results")
            continue
        each.close()
        problems += [f"flow {number}: {failure}" for failure in told["failed"]]
        reports = [r for rs in read_processes(each.run_id, options.count).values() for r in rs]
        outcomes = Counter(report["outcome"] for report in reports)
        if set(outcomes) != {"completed"} or len(reports) != options.count:
            problems.append(f"flow {number}: {dict(outcomes)} of {options.count} tasks")
        if leaked := {report["leaked_bytes"] for report in reports} - {"0"}:
            problems.append(f"flow {number}: leaked {leaked}")
        sources = Counter(report["budget_source"] for report in reports)
        rows.append(
            (
                str(number),
                " ".join(f"{n} {how}" for how, n in sorted(outcomes.items())),
                *(str(sources[name]) for name in ("tag", "learned", "probe")),
                str(told["beside_others"]),
            )
        )
    say(f"{options.flows} flows of {options.count} tasks took {time.monotonic() - began_s:.0f} s")
    heads = ("flow", "outcomes", "tagged", "learned", "probes", "beside tasks of other flows")
    table(heads, rows)
    log = read_log(Path(ledger))
    # All of a device; what is kept free of it is not promised either.
    handles = nvml_handles()
    import pynvml

    capacity = max((pynvml.nvmlDeviceGetMemoryInfo(h).total for h in handles), default=1 << 62)
    most = check_capacity(log, capacity)
    say(f"most promised at a time: {most / GIB:.1f} GiB, in {len(log)} changes of the ledger")
    return problems + _left("the flows", before)


def check_kill(options: argparse.Namespace, ledger: str) -> list[str]:
    """Kill a flow while eight of its tasks hold memory that another flow waits for."""
    problems: list[str] = []
    before = used_bytes()
    waiting = Flow("waiting", options.devices, ledger)
    children = Flow("children", options.devices, ledger, count=CHILDREN)
    children.go()
    deadline_s = time.monotonic() + LIMIT_S
    while _running(Path(ledger)) < CHILDREN and time.monotonic() < deadline_s:
        time.sleep(0.05)
    # They have allocated what they hold.
    time.sleep(3.0)
    held = [now - then for now, then in zip(used_bytes(), before, strict=True)]
    say(f"{_running(Path(ledger))} children hold {', '.join(f'{h / GIB:.1f} GiB' for h in held)}")
    waiting.go()
    waiting.told("submits")
    time.sleep(1.0)
    killed = owner_of(Path(ledger), children.process.pid)
    os.kill(children.process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    problems += _left("the killed flow", before)
    began_s = waiting.told("runs").get("at_s")
    if began_s is None:
        problems.append("the flow that waited never had the device")
    else:
        log = read_log(Path(ledger))
        freed_s = max(row.at_s for row in log if row.owner == killed) - killed_s
        placed_s = min(row.at_s for row in log if row.owner != killed and row.held) - killed_s
        say(
            f"after the kill: its reservations were free after {freed_s:.2f} s, the other flow had the device after "
            f"{placed_s:.2f} s, its body ran after {began_s - killed_s:.2f} s"
        )
    waiting.told("ended")
    waiting.close()
    children.close()
    return problems + _left("both", before)


def _running(ledger: Path) -> int:
    last = {row.request: row.entry for row in read_log(ledger)}
    return sum(entry is not None and entry["running"] for entry in last.values())


def _left(what: str, before: list[int]) -> list[str]:
    ended_s = time.monotonic()
    left = [now - then for now, then in zip(settle(before), before, strict=True)]
    for size in left:
        say(f"after {what}: {size / MIB:+.1f} MiB ({time.monotonic() - ended_s:.2f} s later)")
    return [f"after {what}: {size / MIB:+.1f} MiB" for size in left if abs(size) > TOLERANCE_BYTES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=24, help="tasks of each flow")
    parser.add_argument("--flows", type=int, default=4)
    return run(check, parser, limit_s=LIMIT_S + 100, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
