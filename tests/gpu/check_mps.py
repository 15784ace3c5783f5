"""What `sharing="mps"` gains, that its limits hold, and that a fault of one client costs no other task.

    python -m tests.gpu.check_mps [--seconds 15]

One, four and eight trainings of a small ResNet at the same time, by turns and with MPS: steps a second of all together. Then a
client takes more than its budget with an allocator that nothing caps. Then four tasks run, one of which reads an illegal
address: the others must end right. In the end no daemon may be left.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.devices.shared_folder import default_folder
from prefect_gpu.processes import mps
from tests.gpu._checks import GIB, MIB, run, say, table

COUNTS = (1, 4, 8)

#: Least gains of MPS over turns, by the number of trainings.
LEAST = {4: 1.25, 8: 1.6}

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
            loss20 = float(loss)
    torch.cuda.synchronize()
    return steps, loss20


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


@task(tags=gpu(memory="4GiB", framework="cupy"))
def fault(marker: str) -> str:
    """Write to an illegal address the first time."""
    import cupy

    if not Path(marker).exists():
        Path(marker).touch()
        time.sleep(3)
        text = 'extern "C" __global__ void put(float* at) { *at = 1.0f; }'
        cupy.RawKernel(text, "put")((1,), (1,), (cupy.uint64(16),))
    cupy.cuda.runtime.deviceSynchronize()
    return "ended"


def in_flow(sharing: Any, devices: str, make: Any) -> Any:
    """Run `make` in a flow with a way of sharing."""

    @flow(task_runner=GPUTaskRunner(devices=devices, sharing=sharing, reports=False))
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


def check(options: argparse.Namespace) -> list[str]:
    """Measure, then take too much, then fail."""
    problems, rows, losses = [], [], set()
    for count in COUNTS:
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
    marker = f"/tmp/prefect-gpu-fault-{os.getpid()}"

    def faulty() -> list[Any]:
        others = [train.submit(time.time() + 10) for _ in range(3)]
        return [fault.submit(marker).result(), *(each.result()[1] for each in others)]

    try:
        say(f"beside a fault: {in_flow('mps', options.devices, faulty)}")
    except Exception as error:
        problems.append(f"beside a fault: {type(error).__name__}: {error}")
    deadline = time.monotonic() + 10
    pipes = str(default_folder() / "mps" / "pipe")
    while (left := mps.ask("get_server_list", pipes)) is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    if left is not None:
        problems.append("the daemon is left")
    say(subprocess.run(["pgrep", "-af", "mps"], capture_output=True, text=True).stdout.strip())
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each set of trainings")
    return run(check, parser, limit_s=300)


if __name__ == "__main__":
    sys.exit(main())
