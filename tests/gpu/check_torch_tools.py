"""PyTorch's own tools in a GPU task: its memory summary, its memory snapshots, and `compute-sanitizer` on its tensors.

    python -m tests.gpu.check_torch_tools

A task runs out of memory: its report must hold PyTorch's summary, and say where a snapshot lies that names the lines
which hold the memory. Others write a snapshot themselves. The steady memory of a training, which its next budget rests on,
must be the same whether PyTorch records for snapshots or not. Last, a kernel writes past the end of a tensor under NVIDIA's
`compute-sanitizer`, which can see it with `gpu:caching=off` only.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    ROOT,
    Ended,
    Process,
    gather,
    last_of,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

#: Bytes of a tensor that is kept, and steps of a training.
KEPT_BYTES = 256 * MIB
STEPS = 60

#: Tasks that write a snapshot themselves.
CALLS = ("not-recorded", "recorded", "full-history")

#: Contexts of two processes of one program differ by this much.
NEAR_MIB = 8

#: Seconds that a program may take under the sanitizer, which patches each kernel as it is loaded.
SANITIZER_S = 70.0


def keep_all() -> None:
    """Keep tensors until there is no memory left."""
    import torch

    kept = []
    while True:
        kept.append(torch.empty(KEPT_BYTES, dtype=torch.uint8, device="cuda"))


def write_snapshots(folder: str, allocations: int) -> dict[str, float]:
    """Allocate often; write a snapshot; return its bytes, and the seconds that it took."""
    import torch

    from prefect_gpu import memory_snapshot

    kept = torch.empty(KEPT_BYTES, dtype=torch.uint8, device="cuda")
    began_s = time.perf_counter()
    for _ in range(allocations):
        torch.empty(1024, device="cuda")
    allocated_s = time.perf_counter() - began_s
    path = Path(folder, f"{os.getpid()}.pickle")
    began_s = time.perf_counter()
    assert memory_snapshot(path)
    took_s = time.perf_counter() - began_s
    del kept
    return {
        "pid": os.getpid(),
        "bytes": path.stat().st_size,
        "took_s": took_s,
        "each_us": 1e6 * allocated_s / allocations,
    }


def train(control: bool = False) -> dict[str, float]:
    """Train a little; return the median seconds of a step and, as a control, PyTorch's own peak.

    Args:
        control: Reset PyTorch's peak in each step, and return the largest after the first.
    """
    import statistics

    import torch
    from torch import nn

    from prefect_gpu import step

    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(1024, 2048, device="cuda")
    peaks, seconds = [], []
    for number in range(STEPS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        if control:
            torch.cuda.reset_peak_memory_stats()
        if number == 0:
            # As cuDNN's trials do: it takes what there is, and does without.
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        # Freed at once: no reading every few milliseconds sees it.
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        optimizer.step()
        del loss
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
        peaks.append(torch.cuda.max_memory_allocated())
        if not control:
            step()
    return {"step_s": statistics.median(seconds[3:]), "peak_bytes": max(peaks[1:])}


#: How each task ended and its report, by name.
Found: TypeAlias = dict[str, tuple[Ended, "Process | None"]]


def made(name: str, body: Callable[..., Any], **given: Any) -> Any:
    return task(name=name, timeout_seconds=BODY_S, tags=gpu(framework="torch", **given))(body)


def run_rounds(
    rounds: list[dict[str, tuple[Any, ...]]], devices: str, **configuration: Any
) -> Found:
    """Run tasks in one flow run, those of a round side by side; a task comes with its arguments.

    All flow runs are of one flow, which learns from one to the next.
    """

    def submit() -> dict[str, Ended]:
        ended: dict[str, Ended] = {}
        for tasks in rounds:
            futures = {name: body.submit(*args) for name, (body, *args) in tasks.items()}
            ended |= gather(futures, BODY_S)
        return ended

    flow = run_flow("torch-tools", submit, devices, **configuration)
    reports = read_processes(flow.id, sum(map(len, rounds)))
    return {name: (ended, last_of(reports, ended)) for name, ended in flow.value.items()}


def read_snapshot(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Unpickle a snapshot and print what it has; return it, and the functions that its blocks name."""
    snapshot = pickle.loads(path.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    held = [block for block in blocks if block["state"] == "active_allocated"]
    names = {
        frame["name"]
        for block in held
        for frame in block.get("frames", ())
        if frame["filename"].endswith("check_torch_tools.py")
    }
    events = Counter(event["action"] for trace in snapshot["device_traces"] for event in trace)
    say(
        f"{path.name}: {path.stat().st_size / MIB:.1f} MiB; {len(snapshot['segments'])} segments, "
        f"{len(held)} blocks in use with {size(sum(block['size'] for block in held))} MiB; "
        f"events {dict(events)}; functions of this file that hold blocks: {sorted(names)}"
    )
    return snapshot, sorted(names)


def out_of_memory(found: Found, folder: str) -> list[str]:
    """Judge the report and the snapshot of the task that ran out of memory."""
    ended, report = found["keep-all"]
    say(f"the task: {ended.words}")
    if report is None:
        return ["there is no report of the out-of-memory"]
    problems = [] if report["outcome"] == "oom" else [f"its outcome is {report['outcome']}"]
    page = html.unescape(report.text.partition("<pre>\n")[2].partition("\n</pre>")[0])
    say("its report holds:", *page.splitlines()[:12], "…", sep="\n  ")
    if "PyTorch CUDA memory summary, device ID 0" not in page:
        problems.append("the report does not hold PyTorch's memory summary")
    row = next((line for line in report.text.splitlines() if "Memory snapshot" in line), "")
    say(row.replace("\\", "").replace(folder, "FOLDER"))
    path = Path(folder, f"{ended.task_run_id}-1.pickle")
    if path.name not in row:
        problems.append("the report does not say where the snapshot lies")
    if not path.exists():
        return [*problems, "there is no snapshot"]
    snapshot, names = read_snapshot(path)
    if "keep_all" not in names:
        problems.append("no block of the snapshot names the function that holds it")
    actions = {event["action"] for trace in snapshot["device_traces"] for event in trace}
    if not actions >= {"alloc", "oom"}:
        problems.append(f"the snapshot's history has {sorted(actions)}")
    return problems


def by_call(found: Found, folder: str) -> list[str]:
    """Judge the snapshots that bodies wrote themselves."""
    problems, rows = [], []
    for name in ("not-recorded", "recorded", "full-history"):
        ended, _ = found[name]
        if ended.error is not None:
            problems.append(f"{name}: {ended.words}")
            continue
        value = ended.value
        say(name)
        snapshot, names = read_snapshot(Path(folder, f"{value['pid']:.0f}.pickle"))
        if bool(names) != (name != "not-recorded"):
            problems.append(f"{name}: functions that hold blocks: {names}")
        if not snapshot["segments"]:
            problems.append(f"{name}: no segment")
        rows.append(
            (
                name,
                f"{value['bytes'] / MIB:.1f}",
                f"{value['took_s']:.2f}",
                f"{value['each_us']:.1f}",
            )
        )
    table(["memory_snapshot(path)", "MiB", "seconds", "us-per-allocation"], rows)
    return problems


def steady_memory(found: Found, folder: str) -> list[str]:
    """Judge whether recording for snapshots changes what is learned."""
    problems, rows = [], []
    control = found["control"][0]
    exact = None if control.value is None else int(control.value["peak_bytes"])
    say(f"a training's steady peak by PyTorch's own counter: {exact} bytes {control.words}")
    for name in ("train-plain", "train-recorded"):
        for kind, (ended, report) in (("tag", found[name]), ("learned", found[f"{name}-learned"])):
            if report is None or ended.error is not None:
                problems.append(f"{name}, {kind}: {ended.words}")
                continue
            steady = report.bytes("steady_live_bytes")
            rows.append(
                (
                    name,
                    report["budget_source"],
                    size(report.bytes("peak_live_bytes")),
                    str(steady),
                    size(report.bytes("budget_bytes")),
                    f"{1000 * ended.value['step_s']:.2f}",
                )
            )
            if steady != exact:
                problems.append(f"{name}, {kind}: a steady peak of {steady} bytes, not {exact}")
    table(["a training", "its-budget", "peak-MiB", "steady-bytes", "budget-MiB", "step-ms"], rows)
    learned = [float(row[4]) for row in rows if row[1] == "learned"]
    if len(learned) != 2 or abs(learned[0] - learned[1]) > NEAR_MIB:
        problems.append(f"learned budgets differ, in MiB: {learned}")
    return problems


class Sanitized:
    """Two programs under `compute-sanitizer`, beside everything else: one with PyTorch's cache, one without."""

    def __init__(self, devices: str, folder: str) -> None:
        places = os.pathsep.join((os.environ["PATH"], "/usr/local/cuda/bin"))
        #: `None`: it is not installed.
        self.tool = shutil.which("compute-sanitizer", path=places)
        self._began_s = time.monotonic()
        self._runs = {}
        for caching in ("on", "off") if self.tool else ():
            log = Path(folder, f"sanitizer-{caching}.txt")
            program = [sys.executable, "tests/gpu/out_of_bounds.py", caching, devices]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(self.tool), "--target-processes", "all", *program],
                    cwd=ROOT,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._runs[caching] = process, log

    def judge(self, found: Found, folder: str) -> list[str]:
        """Wait for both and print what they say; where the tool cannot run, that is no problem."""
        if self.tool is None:
            say("compute-sanitizer is not installed here")
            return []
        version = subprocess.run([self.tool, "--version"], capture_output=True, text=True)
        say(version.stdout.strip().splitlines()[-1])
        seen = {}
        for caching, (process, log) in self._runs.items():
            try:
                process.wait(max(1.0, self._began_s + SANITIZER_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                say(f"ended after {SANITIZER_S:g} s")
            text = log.read_text(errors="replace")
            say(
                f"$ compute-sanitizer --target-processes all python tests/gpu/out_of_bounds.py {caching}"
            )
            lines = [line for line in text.splitlines() if line.startswith(("=====", "caching "))]
            say(*lines[:12], *lines[12:][-3:], f"({len(lines)} such lines)", sep="\n  ")
            if not any(line.startswith("caching ") for line in lines):
                say("the program's own last lines:", *text.splitlines()[-15:], sep="\n  ")
            seen[caching] = "Invalid __global__ write" in text
        say(f"found by gpu:caching: {seen}; after {time.monotonic() - self._began_s:.0f} s")
        if seen == {"on": False, "off": True}:
            return []
        return [f"compute-sanitizer saw the write: {seen}, not with gpu:caching=off alone"]


def check(options: argparse.Namespace) -> list[str]:
    """Run three flows, and judge each case whatever becomes of the others."""
    problems: list[str] = []
    found: Found = defaultdict(lambda: (Ended("", None, RuntimeError("its flow failed")), None))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sanitized = Sanitized(options.devices, folder)
        calls = {name: made(name, write_snapshots, memory="2GiB") for name in CALLS}
        trains = {
            name: made(name, train, memory="8GiB") for name in ("train-plain", "train-recorded")
        }
        again = {name: made(name, train) for name in trains}
        flows: list[tuple[str, list[dict[str, tuple[Any, ...]]], dict[str, Any]]] = [
            (
                "not-recorded",
                [
                    {
                        "not-recorded": (calls["not-recorded"], folder, 40_000),
                        "control": (made("control", train, memory="8GiB"), True),
                    },
                    {"train-plain": (trains["train-plain"],)},
                ],
                {},
            ),
            (
                "recorded",
                [
                    {
                        "keep-all": (made("keep-all", keep_all, memory="3GiB", oom="fail"),),
                        "recorded": (calls["recorded"], folder, 1000),
                        "full-history": (calls["full-history"], folder, 40_000),
                    },
                    {"train-recorded": (trains["train-recorded"],)},
                ],
                {"memory_snapshots": folder},
            ),
            # Without a budget, each has what its run before has shown.
            ("learned", [{f"{name}-learned": (body,) for name, body in again.items()}], {}),
        ]
        for name, rounds, configuration in flows:
            try:
                found |= run_rounds(rounds, options.devices, **configuration)
            except Exception as error:
                traceback.print_exc()
                problems.append(f"the flow {name}: {type(error).__name__}: {error}")
        cases: dict[str, Callable[[Found, str], list[str]]] = {
            "out of memory": out_of_memory,
            "memory_snapshot": by_call,
            "steady memory": steady_memory,
            "compute-sanitizer": sanitized.judge,
        }
        for name, judge in cases.items():
            say(f"-- {name}")
            try:
                problems += judge(found, folder)
            except Exception as error:
                traceback.print_exc()
                problems.append(f"{name}: {type(error).__name__}: {error}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=170, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
