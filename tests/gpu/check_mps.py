"""What `sharing="mps"` gains, that its limits hold, and that a fault of one client costs no other task.

    python -m tests.gpu.check_mps [--pairs] [--seconds 15]

Two tasks that fill the chip: one after the other, by turns, with MPS, and placed by what is known of an earlier run. One, four and
eight trainings of a small ResNet at the same time, by turns and with MPS: steps a second of all together. Then a client takes
more than its budget with an allocator that nothing caps. Then three tasks compute beside one that does harm, of each kind: each
must end right, without a retry of Prefect. In the end no process and no daemon may be left.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pynvml
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, current_allocation, gpu
from prefect_gpu.devices.shared_folder import default_folder
from prefect_gpu.processes import mps
from tests.gpu._checks import GIB, MIB, nvml_handles, run, say, table

COUNTS = (1, 4, 8)

#: Least gains of MPS over turns, by the number of trainings.
LEAST = {4: 1.25, 8: 1.6}

#: Most seconds of two tasks that fill the chip, of those one after the other.
MOST_OF_SEQUENTIAL = 1.05

BUDGET_BYTES = 4 * GIB


@task(tags=gpu(memory="4GiB", framework="torch"))
def train(until_s: float) -> tuple[int, float]:
    """Train until a time; return the number of steps and the loss after twenty."""
    import torch
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.arange(32, device="cuda") % 10
    steps, loss20 = 0, 0.0
    while time.time() < until_s or steps < 20:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 20:
            loss20 = float(loss.detach())
    torch.cuda.synchronize()
    return steps, loss20


@task(tags=gpu(memory="4GiB", framework="torch"))
def fill(products: int, seconds: float) -> int:
    """Multiply large matrices so often, or for so long; return how often."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(4096, 4096, device=device)
    until_s, done = time.monotonic() + seconds, 0
    while done < products or time.monotonic() < until_s:
        x = (x @ x).clamp(max=1.0)
        done += 1
        if done % 100 == 0 and x.is_cuda:
            torch.cuda.synchronize()
    # Waits for the last.
    return done if float(x[0, 0]) else 0


@task(tags=gpu(memory="4GiB", framework="none"))
def take() -> int:
    """Take memory with `cuMemAlloc` until it is refused; return how much was given."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, given = ctypes.c_void_p(), ctypes.c_int(), 0
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
    block = ctypes.c_uint64()
    while given < 3 * BUDGET_BYTES and not cuda.cuMemAlloc_v2(
        ctypes.byref(block), ctypes.c_size_t(64 * MIB)
    ):
        given += 64 * MIB
    return given


@task(tags=gpu(framework="torch"))
def learned(size: int) -> int:
    """Compute for less time than a few readings take; return which process of the task run this is."""
    import torch

    x = torch.ones(size, size, device="cuda")
    images = torch.ones(8, 16, 64, 64, device="cuda")
    with torch.inference_mode():
        for _ in range(20):
            x = (x @ x).clamp(max=1.0)
            torch.nn.functional.conv2d(images, images[:, :, :3, :3]).sum().item()
    allocation = current_allocation()
    return allocation.attempt if allocation is not None and float(x[0, 0]) else 0


@task(tags=gpu(memory="4GiB", framework="torch"))
def work(seconds: float) -> float:
    """Compute for a while as anybody's program does; return what does not depend on the time."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(15 + seconds)
    until_s = time.monotonic() + seconds
    layer = torch.nn.Conv2d(8, 8, 3, padding=1).to(device)
    x = torch.ones(16, 8, 64, 64, device=device)
    while time.monotonic() < until_s:
        layer(x).sum().backward()
        layer.zero_grad()
    faulthandler.cancel_dump_traceback_later()
    # A task that trains on the processor without a word has no device.
    return float(x.sum()) if x.is_cuda else -1.0


@task(tags=gpu(memory="4GiB", framework="torch"))
def fault(kind: str, marker: str) -> str:
    """Do harm a second after the others have begun: the first time only, if it is of a kind that runs again."""
    import torch

    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(17)
    x = torch.ones(8, device="cuda")
    time.sleep(1)
    if kind == "kill -9 of a client":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.startswith("assertion"):
        lost = x[torch.full((8,), 100, device="cuda")].sum()
        if kind.endswith("noticed late"):
            time.sleep(3)
        lost.item()
    if kind == "illegal address" and not Path(marker).exists():
        import cupy

        Path(marker).touch()
        text = 'extern "C" __global__ void put(float* at) { *at = 1.0f; }'
        cupy.RawKernel(text, "put")((1,), (1,), (cupy.uint64(16),))
        cupy.cuda.runtime.deviceSynchronize()
    time.sleep(1)
    faulthandler.cancel_dump_traceback_later()
    return str(float(x.sum()))


#: Kinds of faults, and whether the task that does the harm must end right.
KINDS = {
    "illegal address": True,
    "assertion": False,
    "assertion, noticed late": False,
    "kill -9 of a client": False,
    "kill -9 of the server": True,
    "kill -9 of the daemon": True,
}


def kill(name: str) -> None:
    """Kill the processes whose names begin so; the kernel keeps 15 characters of a name."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            words = (comm.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if name.encode() in words.split(b"\0")[0]:
            os.kill(int(comm.parent.name), signal.SIGKILL)


def one_round(kind: str) -> list[str]:
    """Let three tasks compute beside one that does harm; return what is not as it should be."""
    marker = f"/tmp/prefect-gpu-fault-{time.monotonic_ns()}"
    others = [work.submit(2.5) for _ in range(3)]
    harmful = fault.submit(kind, marker)
    if kind.endswith(("server", "daemon")):
        time.sleep(1.5)
        kill("nvidia-cuda-mps-server" if kind.endswith("server") else mps.CONTROL)
    found = [each.result(raise_on_failure=False) for each in others]
    problems = [f"{kind}: a neighbour ended with {each!r}" for each in found if each != 524288.0]
    ended = harmful.result(raise_on_failure=False)
    if KINDS[kind] and ended != "8.0":
        problems.append(f"{kind}: the task itself ended with {ended!r}")
    if not KINDS[kind] and not isinstance(ended, Exception):
        problems.append(f"{kind}: the task itself ended with {ended!r}, but did harm")
    return problems


#: Started as a flow that is killed.
KILLED = """
import time
from tests.gpu.check_mps import in_flow, work
in_flow("mps", "nvml", lambda: [each.result() for each in [work.submit(60) for _ in range(4)]])
"""


def kill_flow() -> list[str]:
    """Kill a flow in whose midst four clients compute; return what is left of it after five seconds."""
    flow = subprocess.Popen([sys.executable, "-c", KILLED], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    handles = nvml_handles()
    while len(compute_processes(handles)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = len(compute_processes(handles))
    flow.kill()
    flow.wait()
    time.sleep(5)
    left = compute_processes(handles)
    problems = [f"kill -9 of the flow: {seen} clients were seen"] if seen < 4 else []
    return problems + [f"kill -9 of the flow: left after 5 s: {left}"] * bool(left) + daemon_left()


def compute_processes(handles: list[Any]) -> list[int]:
    return [p.pid for h in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(h)]


def daemon_left() -> list[str]:
    """Return a problem if the daemon still answers after ten seconds."""
    deadline = time.monotonic() + 10
    pipes = str(default_folder() / "mps" / "pipe")
    while (left := mps.ask("get_server_list", pipes)) is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    return [] if left is None else ["the daemon is left"]


def in_flow(sharing: Any, devices: str, make: Any, reports: bool = False) -> Any:
    """Run `make` in a flow with a way of sharing."""

    @flow(task_runner=GPUTaskRunner(devices=devices, sharing=sharing, reports=reports))
    def shared() -> Any:
        return make()

    return shared()


def trainings(sharing: str, count: int, seconds: float, devices: str) -> list[tuple[int, float]]:
    def make() -> list[tuple[int, float]]:
        # A first one, so that the process that is forked has imported everything.
        train.submit(0.0).result()
        until_s = time.time() + seconds
        return [each.result() for each in [train.submit(until_s) for _ in range(count)]]

    found: list[tuple[int, float]] = in_flow(sharing, devices, make)
    return found


def pairs(options: argparse.Namespace) -> list[str]:
    """Run two tasks that fill the chip in each way; return what is not as it should be."""
    problems, rows = [], []
    # The first completed run of more than ten seconds teaches that it fills the chip.
    products = in_flow("time", options.devices, lambda: fill.submit(0, 12.0).result(), True)
    for way, sharing, one_busy, at_once in (
        ("one after the other", "time", "0", 1),
        ("by turns", "time", "0", 2),
        ("MPS", "mps", "0", 2),
        ("placed", "time", "1", 2),
    ):
        os.environ["PREFECT_INTEGRATIONS_GPU_ONE_BUSY_TASK_PER_DEVICE"] = one_busy

        def two(at_once: int = at_once) -> float:
            # A first one, so that the process that is forked has imported everything.
            fill.submit(1, 0.0).result()
            began_s = time.monotonic()
            for _ in range(0, 2, at_once):
                for each in [fill.submit(products, 0.0) for _ in range(at_once)]:
                    each.result()
            return time.monotonic() - began_s

        took_s: float = in_flow(sharing, options.devices, two, True)
        rows.append((way, f"{took_s:.1f}"))
    table(["two that fill the chip", "seconds"], rows)
    if float(rows[-1][1]) > MOST_OF_SEQUENTIAL * float(rows[0][1]):
        problems.append(f"placed, two that fill the chip took {rows[-1][1]} s")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Measure, then take too much, then fail."""
    rows, losses = [], set()
    problems = pairs(options) if options.pairs else []
    for count in [count for _ in range(options.turns) for count in COUNTS]:
        rates = {}
        for sharing in ("time", "mps"):
            found = trainings(sharing, count, options.seconds, options.devices)
            rates[sharing] = sum(steps for steps, _ in found) / options.seconds
            losses |= {round(loss, 2) for _, loss in found}
        gain = rates["mps"] / rates["time"]
        rows.append((str(count), f"{rates['time']:.0f}", f"{rates['mps']:.0f}", f"{gain:.2f}"))
        if gain < LEAST.get(count, 0.0):
            problems.append(f"{count} trainings: {gain:.2f} times as much, below {LEAST[count]}")
    table(["trainings", "turns, steps/s", "MPS, steps/s", "gain"], rows)
    if len(losses) > 1:
        problems.append(f"the losses after 20 steps differ: {sorted(losses)}")
    given = in_flow("mps", options.devices, lambda: take.submit().result())
    say(f"cuMemAlloc gave {given / MIB:.0f} MiB of a budget of {BUDGET_BYTES / MIB:.0f} MiB")
    if given > BUDGET_BYTES + 64 * MIB:
        problems.append(f"a client took {given / MIB:.0f} MiB")
    attempts = in_flow(
        "mps",
        options.devices,
        lambda: [learned.submit(2048).result(), *learned.map([2048] * 8).result()],
    )
    say(f"processes of nine runs without a budget: {attempts}")
    if attempts != [1] * 9:
        problems.append("a learned budget was not enough for a client")
    problems += daemon_left()
    table(["fault", "rounds", "wrong", "seconds"], list(faults(options, problems)))
    return problems


def faults(options: argparse.Namespace, problems: list[str]) -> Iterator[tuple[str, ...]]:
    """Do harm of each kind; add what is wrong to `problems`."""
    for kind in options.kinds or KINDS:
        began_s = time.monotonic()

        def rounds(kind: str = kind) -> list[list[str]]:
            # A first one, so that the process that is forked has imported everything.
            work.submit(0.0).result()
            return [one_round(kind) for _ in range(options.rounds)]

        found = in_flow("mps", options.devices, rounds) if options.rounds else []
        found.append(daemon_left())
        problems += chain.from_iterable(found)
        wrong = sum(map(bool, found))
        # Now, since a later kind may hang.
        say(f"{kind}: {wrong} of {options.rounds} rounds wrong")
        yield kind, str(options.rounds), str(wrong), f"{time.monotonic() - began_s:.0f}"
    began_s = time.monotonic()
    found = [kill_flow() for _ in range(options.kills)]
    problems += chain.from_iterable(found)
    wrong = sum(map(bool, found))
    yield "kill -9 of the flow", str(options.kills), str(wrong), f"{time.monotonic() - began_s:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each set of trainings")
    parser.add_argument("--turns", type=int, default=1, help="of each set of trainings")
    parser.add_argument(
        "--pairs", action="store_true", help="begin with two tasks that fill the chip"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each kind of fault")
    parser.add_argument("--kinds", action="append", choices=KINDS, help="of faults; default: all")
    parser.add_argument("--kills", type=int, default=20, help="of flows")
    return run(check, parser, limit_s=580, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
