"""What of a device's used memory no listed process owns, as processes come and go.

    python -m tests.gpu.check_bookkeeping

A leak is memory in use that no process is listed with. This prints how far the driver's own
bookkeeping moves that number while several processes hold contexts, start and end, so that
`prefect_gpu.broker.broker.LEAK_TOLERANCE_BYTES` and its share for each process can be chosen from it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pynvml

MIB = 1 << 20
PROGRAM = """
import sys, torch
held = torch.ones({size} << 20, device="cuda", dtype=torch.uint8)
a = torch.randn(1024, 1024, device="cuda"); (a @ a).sum().item()
torch.nn.functional.conv2d(torch.randn(8, 8, 32, 32, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
torch.cuda.synchronize()
print("up", flush=True)
sys.stdin.readline()
"""


def main() -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def ownerless() -> tuple[float, int]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        held = sum(process.usedGpuMemory or 0 for process in listed)
        return (memory.total - memory.free - memory.reserved - held) / MIB, len(listed)

    def show(what: str) -> None:
        size, count = ownerless()
        print(f"{what:<28} {count} listed, {size:7.1f} MiB not owned by a process", flush=True)

    extremes: dict[int, list[float]] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            size, count = ownerless()
            low, high = extremes.setdefault(count, [size, size])
            extremes[count] = [min(low, size), max(high, size)]

    show("idle")
    watcher = threading.Thread(target=watch)
    watcher.start()
    children = []
    for index in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(size=100 * (index + 1))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        children.append(child)
        show(f"after start {index + 1}")
    for index, child in enumerate(children):
        assert child.stdin is not None
        if index % 2:
            child.kill()
        else:
            child.stdin.close()
        child.wait()
        show(f"end {index + 1}, at once")
        time.sleep(0.3)
        show(f"end {index + 1}, 0.3 s later")
    stop.set()
    watcher.join()
    for count, (low, high) in sorted(extremes.items()):
        print(f"at any moment with {count} listed: {low:.1f} to {high:.1f} MiB")


if __name__ == "__main__":
    main()
