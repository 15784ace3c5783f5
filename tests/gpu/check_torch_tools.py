"""PyTorch's own tools in a GPU task: its memory summary, its memory snapshots, and `compute-sanitizer` on its tensors.

    python -m tests.gpu.check_torch_tools

A task runs out of memory: its report must hold PyTorch's summary, and say where a snapshot lies that names the lines
which hold the memory. Others write a snapshot themselves. The steady memory of a training, which its next budget rests on,
must be the same whether PyTorch records for snapshots or not. Last, a kernel writes past the end of a tensor under NVIDIA's
`compute-sanitizer`, which can see it with `gpu:caching=off` only.
"""

from __future__ import annotations

import argparse
import html
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    ROOT,
    FlowRun,
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

#: Two processes of one program differ by this much in what the driver takes for them.
NEAR_BYTES = 8 * MIB

#: Seconds that a program may take under the sanitizer, which patches each kernel as it is loaded.
SANITIZER_S = 75.0


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


def submit_one(
    name: str, body: Callable[..., Any], arguments: tuple[Any, ...], devices: str, **given: Any
) -> tuple[Any, Process | None]:
    """Run one task in a flow of its own; return how it ended, and its report."""
    snapshots = given.pop("memory_snapshots", None)
    tags = gpu(framework="torch", **given)
    made = task(name=name, timeout_seconds=BODY_S, tags=tags)(body)
    ran: FlowRun[Any] = run_flow(
        name,
        lambda: gather({name: made.submit(*arguments)}, BODY_S),
        devices,
        memory_snapshots=snapshots,
    )
    ended = ran.value[name]
    return ended, last_of(read_processes(ran.id, 1), ended)


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


def out_of_memory(devices: str, folder: str) -> list[str]:
    """Check the report and the snapshot of a task that runs out of memory."""
    ended, report = submit_one(
        "keep-all", keep_all, (), devices, memory="3GiB", oom="fail", memory_snapshots=folder
    )
    say(f"the task: {ended.words}")
    if report is None:
        return ["there is no report of the out-of-memory"]
    problems = [] if report["outcome"] == "oom" else [f"its outcome is {report['outcome']}"]
    page = html.unescape(report.text.partition("<pre>\n")[2].partition("\n</pre>")[0])
    say("its report holds:", *page.splitlines()[:12], "…", sep="\n  ")
    if "PyTorch CUDA memory summary, device ID 0" not in page:
        problems.append("the report does not hold PyTorch's memory summary")
    row = next((line for line in report.text.splitlines() if "Memory snapshot" in line), "")
    say(row)
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


def by_call(devices: str, folder: str) -> list[str]:
    """Check snapshots that a body writes itself."""
    problems, rows = [], []
    for what, allocations, snapshots in (
        ("not recorded", 40_000, None),
        ("recorded", 1000, folder),
        ("recorded, a full history", 40_000, folder),
    ):
        ended, _ = submit_one(
            f"by-call-{len(rows)}",
            write_snapshots,
            (folder, allocations),
            devices,
            memory="2GiB",
            memory_snapshots=snapshots,
        )
        if ended.error is not None:
            problems.append(f"{what}: {ended.words}")
            continue
        value = ended.value
        say(what)
        snapshot, names = read_snapshot(Path(folder, f"{value['pid']:.0f}.pickle"))
        if bool(names) != bool(snapshots):
            problems.append(f"{what}: functions that hold blocks: {names}")
        if not snapshot["segments"]:
            problems.append(f"{what}: no segment")
        rows.append(
            (
                what,
                f"{value['bytes'] / MIB:.1f}",
                f"{value['took_s']:.2f}",
                f"{value['each_us']:.1f}",
            )
        )
    table(["memory_snapshot(path)", "MiB", "seconds", "us-per-allocation"], rows)
    return problems


def steady_memory(devices: str, folder: str) -> list[str]:
    """Check that recording for snapshots does not change what is learned."""
    control, _ = submit_one("control", train, (True,), devices, memory="8GiB")
    exact = None if control.value is None else int(control.value["peak_bytes"])
    rows = [("control, by PyTorch's own counter", "", size(exact), "", "")]
    learned: dict[str, int | None] = {}
    problems = [] if control.error is None else [f"control: {control.words}"]
    for name, snapshots in (("plain", None), ("recorded", folder)):
        # Twice, without a budget: the first is a probe, the second has what that has shown.
        for number in (1, 2):
            ended, report = submit_one(name, train, (), devices, memory_snapshots=snapshots)
            if report is None or ended.error is not None:
                problems.append(f"{name}: {ended.words}")
                continue
            steady, learned[name] = report.bytes("steady_live_bytes"), report.bytes("budget_bytes")
            rows.append(
                (
                    f"{name}, run {number}",
                    size(report.bytes("peak_live_bytes")),
                    size(steady),
                    size(learned[name]),
                    f"{1000 * ended.value['step_s']:.2f}",
                )
            )
            if steady != exact:
                problems.append(f"{name}: a steady peak of {steady} bytes, not {exact}")
    table(["a training", "peak", "steady", "budget", "step-ms"], rows)
    say("sizes in MiB")
    budgets = [value or 0 for value in learned.values()]
    if len(budgets) < 2 or abs(budgets[0] - budgets[1]) > NEAR_BYTES:
        problems.append(f"learned budgets differ: {learned}")
    return problems


def sanitizer(devices: str, folder: str) -> list[str]:
    """Run a task under `compute-sanitizer`; where that cannot be, say so, which is no problem."""
    places = ("/usr/local/cuda/bin", "/opt/nvidia", "/usr/local/cuda/compute-sanitizer")
    tool = shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=place))),
        None,
    )
    if tool is None:
        say("compute-sanitizer is not installed here")
        return []
    say(subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.strip())
    found = {}
    for caching in ("on", "off"):
        program = ["tests/gpu/out_of_bounds.py", caching, devices]
        command = [tool, "--target-processes", "all", sys.executable, *program]
        say(f"$ compute-sanitizer --target-processes all python {' '.join(program[:2])}")
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=SANITIZER_S
            )
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            text = b"".join(part or b"" for part in (late.stdout, late.stderr)).decode(
                errors="replace"
            )
            say(f"ended after {SANITIZER_S:g} s")
        lines = [line for line in text.splitlines() if line.startswith(("=====", "caching "))]
        say(
            *lines[:20],
            f"({len(lines)} such lines, {time.monotonic() - began_s:.0f} s)",
            sep="\n  ",
        )
        if not any(line.startswith("caching ") for line in lines):
            say("the program's own last lines:", *text.splitlines()[-15:], sep="\n  ")
        found[caching] = "Invalid __global__ write" in text
    say(f"the write past the end was found: {found}")
    if found == {"on": False, "off": True}:
        return []
    return [f"compute-sanitizer found the write: {found}, not with gpu:caching=off alone"]


def check(options: argparse.Namespace) -> list[str]:
    """Run each case, whatever becomes of the others."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (out_of_memory, by_call, steady_memory, sanitizer):
            say(f"\n-- {case.__name__.replace('_', ' ')}")
            try:
                problems += case(options.devices, folder)
            except Exception as error:
                traceback.print_exc()
                problems.append(f"{case.__name__}: {type(error).__name__}: {error}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=400, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
