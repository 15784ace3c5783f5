"""Bodies of tasks of several test files. A child imports this module, so it imports neither Prefect nor pytest."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

from prefect_gpu import current_allocation, step
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.testing import allocate
from prefect_gpu.units import GIB


def wait_for_file(path: Path) -> None:
    """Wait until a file exists, or so long that its test has failed."""
    until_s = time.monotonic() + DEADLOCK_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.02)


def meet(folder: Path, name: str, count: int) -> bool:
    """Wait until so many tasks hold memory at the same time; return whether they did."""
    (folder / name).touch()
    until_s = time.monotonic() + DEADLOCK_S
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def evaluate(name: str, folder: str, size: str, count: int) -> tuple[bool, int | None]:
    """Take memory, and wait for the others."""
    allocation = current_allocation()
    assert allocation is not None
    with allocate(size):
        return meet(Path(folder), name, count), allocation.cap_bytes


def hold_batch(batch: int) -> None:
    """Hold half a gibibyte for each element of a batch."""
    with allocate(batch * GIB // 2):
        time.sleep(0.4)


def count_turns(folder: str) -> tuple[int, int]:
    """Count until a file comes, and tell which process it is and how far it is."""
    allocation = current_allocation()
    assert allocation is not None
    # Replaced: a reader, or a stop, must not find a file while it is written.
    new = Path(folder, "new")
    with allocate("3GiB"):
        turns = 0
        new.write_text(str(os.getpid()))
        new.replace(Path(folder, "run"))
        while not Path(folder, "go").exists():
            turns += 1
            new.write_text(str(turns))
            new.replace(Path(folder, "turns"))
            time.sleep(0.02)
        return turns, allocation.attempt


def grow(name: str, folder: str, sizes: list[str]) -> int:
    """Take memory piece by piece, once another task holds its own; tell which process this is."""
    allocation = current_allocation()
    assert allocation is not None
    held = [allocate("256MiB")]
    if allocation.exclusive:
        held += [allocate(size) for size in sizes]
        return allocation.attempt
    meet(Path(folder), name, 2)
    for size in sizes:
        held.append(allocate(size))
        time.sleep(0.1)
    # As long as it takes to be seen: it is ended, or the other one has ended.
    wait_for_file(Path(folder, "over"))
    assert held
    return allocation.attempt


def steps(name: str) -> None:
    """Take the same in each step."""
    size = 256 * (1 + int(name.rpartition("-")[2]))
    for _ in range(4):
        with allocate(f"{size}MiB"):
            # Long enough to be read on a busy machine.
            time.sleep(0.2)
        step()


def fill(sizes: list[str], hold_s: float = 0.0) -> tuple[int, int]:
    """Take memory piece by piece; tell the budget and which process it is."""
    held = [allocate(size) for size in sizes]
    time.sleep(hold_s)
    allocation = current_allocation()
    assert held is not None and allocation is not None
    return allocation.budget_bytes, allocation.attempt


def fill_when_told(folder: str) -> int:
    """Take 1GiB, wait for a sign, take 2GiB more."""
    allocation = current_allocation()
    assert allocation is not None
    with allocate("1GiB"):
        Path(folder, f"holds-{allocation.attempt}").touch()
        if allocation.attempt == 1:
            wait_for_file(Path(folder, "go"))
        with allocate("2GiB"):
            return allocation.attempt


def hog(folder: str) -> None:
    """Take far more than was reserved."""
    with allocate("13GiB"):
        Path(folder, "go").touch()
        wait_for_file(Path(folder, "enough"))


def kill_itself() -> None:
    """Die without a cause that anyone knows."""
    os.kill(os.getpid(), signal.SIGKILL)


def ids() -> tuple[int, int]:
    """Return the ids of this process and of its parent."""
    return os.getpid(), os.getppid()


def endless(folder: str) -> None:
    """Run until killed."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


def scaled(factor: int, x: int) -> tuple[int, int]:
    """Used through `functools.partial`."""
    return factor * x, os.getpid()


class ShopError(Exception):
    """An error with an attribute."""

    def __init__(self, item: str, price: int) -> None:
        super().__init__(item, price)
        self.item = item


class ColdError(Exception):
    """An error whose constructor pickles."""


class AwkwardError(Exception):
    """An error whose constructor takes other arguments than it passes on."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}: {hint}")
        self.code = code


class HeldError(Exception):
    """An error that holds an object that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.connection = sqlite3.connect(":memory:")


def spend(_: int) -> tuple[float, float]:
    """Return when the body began, and when it ended."""
    began = time.time()
    time.sleep(0.2)
    return began, time.time()


def hold(size: str, seconds: float) -> None:
    """Hold memory for a while."""
    with allocate(size):
        time.sleep(seconds)


def train(number: int) -> int:
    """Hold 2 GiB."""
    hold("2GiB", 0.6)
    return number


def evaluate_all(numbers: list[int], size: int) -> None:
    """Hold 1 GiB."""
    hold("1GiB", 0.4)


def change(array: Any, by: float) -> tuple[float, list[str], int]:
    """Change an array; return its sum before, inodes of mapped memory files, and the process id."""
    was = float(array.sum())
    array += by
    return was, mapped(), os.getpid()


def mapped() -> list[str]:
    """Return inodes of memory files that this process has mapped."""
    with open("/proc/self/maps", encoding="ascii") as file:
        return [line.split()[4] for line in file if "memfd:prefect-gpu" in line]


def full(count: int, number: float) -> Any:
    """Return an array of one number."""
    import numpy as np

    return np.full(count, number)


def run_out_in_torch(page: str = "page of device {}") -> None:
    """Fail as PyTorch does, with a CUDA that says what it is told."""
    import torch

    def summary(index: int) -> str:
        if not page:
            raise RuntimeError("the context is lost")
        return page.format(index)

    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 2
    cuda.memory_stats = lambda index: {}
    cuda.get_allocator_backend = lambda: "native"
    cuda.memory_summary = summary
    cuda.memory._dump_snapshot = lambda path: Path(path).write_bytes(b"a snapshot")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def node_of(allocated: Any) -> str:
    """Return the name of the node that an allocation is on."""
    assert allocated is not None
    return str(allocated.device_uuids[0]).split("-")[1]


def work(index: int, folder: str = "", big: Any = None) -> tuple[int, str, float]:
    """Return the index, the name of the node, and the sum of an argument; wait for a sign if there is a folder."""
    node = node_of(current_allocation())
    print(f"task {index} runs")
    if folder:
        # An attempt each.
        Path(folder, f"{index}-{node}-{os.getpid()}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    return index, node, 0.0 if big is None else float(big.sum())


def square(index: int) -> tuple[int, str]:
    """Return the square of a number, and the name of the node."""
    with allocate("3GiB"):
        time.sleep(0.05)
    return index * index, node_of(current_allocation())


class HostError(Exception):
    """An error of a body."""
