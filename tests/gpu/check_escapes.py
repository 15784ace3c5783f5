"""What takes device memory past a framework's cap: whether the cap holds, what NVML shows, and what ends it.

    python -m tests.gpu.check_escapes [--sharing mps]

Each body asks for twice its budget in a way that a cap may not cover, and then waits: once with
`gpu:enforce=warn` and once with `kill`. Every way is either refused within the budget, or measured, reported and, with
`kill`, ended; but for memory that the driver attributes to no process. As clients of MPS, one after the other, none may
have more than its budget.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect import task

from prefect_gpu import BudgetExceededError, gpu
from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory
from tests.gpu._checks import (
    BODY_S,
    GIB,
    MIB,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    last_of,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
    used_bytes,
)

BUDGET_BYTES = 2 * GIB
WANTED_BYTES = 2 * BUDGET_BYTES

#: A process may have 64 MiB more than its budget.
MOST_BYTES = BUDGET_BYTES + 64 * MIB

#: Seconds for which memory is held. The runner reads NVML every 0.25 s.
HOLD_S = 2.0

#: An allocator for PyTorch that asks the driver for each block.
ALLOCATOR = """
#include <dlfcn.h>
#include <stddef.h>
#include <new>
static void *driver(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
extern "C" void *take(ptrdiff_t size, int device, void *stream) {
    unsigned long long at = 0;
    if (((int (*)(unsigned long long *, size_t))driver("cuMemAlloc_v2"))(&at, size)) throw std::bad_alloc();
    return (void *)at;
}
extern "C" void give(void *at, ptrdiff_t size, int device, void *stream) {
    ((int (*)(unsigned long long))driver("cuMemFree_v2"))((unsigned long long)at);
}
"""


def torch_fraction() -> Any:
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0)
    return torch.ones(WANTED_BYTES, dtype=torch.uint8, device="cuda")


def torch_allocator() -> Any:
    import torch

    folder = Path(tempfile.mkdtemp())
    (folder / "allocator.cpp").write_text(ALLOCATOR, encoding="ascii")
    library = folder / "allocator.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", library, folder / "allocator.cpp", "-ldl"], check=True
    )
    shared = torch.cuda.memory.CUDAPluggableAllocator(str(library), "take", "give")
    torch.cuda.memory.change_current_allocator(shared)
    return torch.ones(WANTED_BYTES, dtype=torch.uint8, device="cuda")


def cupy_allocator() -> Any:
    import cupy

    cupy.cuda.set_allocator(None)
    return cupy.ones(WANTED_BYTES, dtype=cupy.uint8)


def cupy_managed() -> Any:
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    return cupy.ones(WANTED_BYTES, dtype=cupy.uint8)


def cupy_managed_without_pool() -> Any:
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.malloc_managed)
    held = cupy.ones(WANTED_BYTES, dtype=cupy.uint8)
    cupy.cuda.Device().synchronize()
    return held


def cupy_async() -> Any:
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.malloc_async)
    return cupy.ones(WANTED_BYTES, dtype=cupy.uint8)


def tensorflow_logical_device() -> Any:
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=WANTED_BYTES // MIB)
    tf.config.set_logical_device_configuration(gpu, [limit])
    return tf.ones([WANTED_BYTES // 2], tf.uint8)


def jax_environment() -> Any:
    import os

    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.9"
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    import jax.numpy as jnp

    return jnp.ones(WANTED_BYTES, jnp.uint8).block_until_ready()


def numba() -> Any:
    from numba import cuda

    return cuda.device_array(WANTED_BYTES, dtype="u1")


def driver() -> Any:
    import ctypes

    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, at = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for failed in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(WANTED_BYTES)),
    ):
        if failed:
            raise RuntimeError(f"the driver refused with {failed}")
    return at.value


def program() -> Any:
    take = "from tests.gpu import check_escapes; check_escapes.driver(); print('had', flush=True); input()"
    started = subprocess.Popen(
        [sys.executable, "-c", take],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stderr is not None
    if started.stdout.readline() != "had\n":
        raise MemoryError(started.stderr.read().splitlines()[-1])
    return started


def onnxruntime_without_options() -> Any:
    import numpy
    import onnxruntime

    model = Path(__file__).parent / "models" / "product.onnx"
    session = onnxruntime.InferenceSession(
        model.read_bytes(), providers=[("CUDAExecutionProvider", {})]
    )
    rows, wide = 16384, 512
    given = {name: numpy.ones((n, wide), numpy.float32) for name, n in (("a", rows), ("b", wide))}
    held = []
    for _ in range(WANTED_BYTES // ((2 * rows + wide) * wide * 4) + 1):
        binding = session.io_binding()
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("product", "cuda")
        session.run_with_iobinding(binding)
        held.append(binding)
    return held


#: By what is written in the body: the module it needs, `gpu:framework`, the body.
WAYS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "torch.cuda.set_per_process_memory_fraction(1.0)": ("torch", "torch", torch_fraction),
    "torch.cuda.memory.CUDAPluggableAllocator": ("torch", "torch", torch_allocator),
    "cupy.cuda.set_allocator(None)": ("cupy", "cupy", cupy_allocator),
    "cupy.cuda.malloc_async": ("cupy", "cupy", cupy_async),
    "cupy.cuda.malloc_managed in a MemoryPool": ("cupy", "cupy", cupy_managed),
    "cupy.cuda.malloc_managed without a pool": ("cupy", "cupy", cupy_managed_without_pool),
    "tf.config.set_logical_device_configuration": (
        "tensorflow",
        "tensorflow",
        tensorflow_logical_device,
    ),
    "os.environ['XLA_PYTHON_CLIENT_…'] before import jax": ("jax", "jax", jax_environment),
    "numba.cuda.device_array": ("numba", "none", numba),
    "cuMemAlloc": ("ctypes", "none", driver),
    "onnxruntime.InferenceSession without options": (
        "onnxruntime",
        "onnxruntime",
        onnxruntime_without_options,
    ),
}


#: What is tried as clients of MPS only: an `Observer` sees processes of a body's own.
CLIENTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    **WAYS,
    "cuMemAlloc in a program that the body starts": ("ctypes", "none", program),
}


#: Parts of the texts of errors that say that memory was refused.
REFUSALS = ("out of memory", "memoryallocation", "bad_alloc", "the driver refused with 2")


#: Where the cap holds.
HELD = (
    "tf.config.set_logical_device_configuration",
    "os.environ['XLA_PYTHON_CLIENT_…'] before import jax",
    "cupy.cuda.malloc_managed in a MemoryPool",
)

#: Where the driver counts the memory as used of the device and of no process.
UNSEEN = ("cupy.cuda.malloc_managed without a pool",)


@dataclass
class Tried:
    """What became of one way."""

    #: What refused it; empty: nothing did.
    refused: str = ""
    #: By how much the memory in use of the whole device rose, in bytes.
    rose_bytes: int = 0


def make_task(way: str, enforce: Literal["warn", "kill"], is_client: bool = False) -> Any:
    """Make the task of one way; it returns a `Tried`."""
    _, framework, take = CLIENTS[way]

    @task(
        name=f"{take.__name__}-{enforce}",
        timeout_seconds=BODY_S,
        tags=gpu(
            memory="2GiB",
            framework=framework,  # type: ignore[arg-type]
            enforce=enforce,
            oom="fail",
            # For what rises on the device.
            exclusive=way in UNSEEN and not is_client,
        ),
    )
    def escape() -> Tried:
        before = sum(used_bytes())
        try:
            held = take()
        except Exception as error:
            if not looks_out_of_memory(error):
                # Something else is wrong with the way: no cap has held.
                raise
            return Tried(f"{type(error).__name__}: {error}"[:160])
        time.sleep(HOLD_S)
        rose = sum(used_bytes()) - before
        del held
        return Tried(rose_bytes=rose)

    return escape


def missing_for(way: str, module: str) -> str:
    """Return why a way cannot be tried here; empty: it can."""
    if not installed(module):
        return f"{module} is not installed"
    if module == "onnxruntime":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "onnxruntime has no CUDAExecutionProvider"
    if CLIENTS[way][2] is torch_allocator and shutil.which("g++") is None:
        return "g++ is not installed"
    return ""


class Overruns(Observer):
    """Also notes when each process was first seen above its budget, and when it was last seen."""

    def __init__(self) -> None:
        super().__init__()
        self.over_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}

    def note(self, pid: int, held: int) -> None:
        """See `Observer.note`."""
        super().note(pid, held)
        now_s = time.monotonic()
        if held > MOST_BYTES:
            self.over_s.setdefault(pid, now_s)
        self.last_s[pid] = now_s

    def lasted_s(self, pid: int) -> float | None:
        """Return how long a process was above its budget; `None`: it never was."""
        return None if pid not in self.over_s else self.last_s[pid] - self.over_s[pid]


def check_clients(ways: list[str], devices: str) -> list[str]:
    """Try each way as a client of MPS, one after the other."""

    def one_by_one() -> dict[str, Ended]:
        each = {way: make_task(way, "warn", is_client=True) for way in ways}
        return {way: gather({way: each[way].submit()}, BODY_S)[way] for way in ways}

    with Observer() as observer:
        flow = run_flow("clients", one_by_one, devices, sharing="mps")
        processes = read_processes(flow.id, len(ways))
    problems, rows = [], []
    for way, ended in flow.value.items():
        report = last_of(processes, ended)
        shown, tried = observer.peak_of(report), ended.value or Tried()
        reported = None if report is None else report.bytes("peak_process_bytes")
        rose = tried.rose_bytes if way in UNSEEN else 0
        words = (tried.refused or ended.words)[:80]
        rows.append((way, size(shown), size(reported), size(rose) if rose else "", words))
        if not any(word in words.lower() for word in REFUSALS):
            problems.append(f"{way}: nothing refused it: {words or 'it ended'}")
        if max(shown or 0, reported or 0, rose) > MOST_BYTES:
            problems.append(f"{way}: it took more than its budget")
        if report is None or report.fields.get("sharing") != "mps":
            problems.append(f"{way}: it was no client of MPS: {ended.words}")
    table(["in the body of a client", "NVML-peak", "reported", "device-rose", "refused with"], rows)
    say(f"sizes in MiB; budget {size(BUDGET_BYTES)}, asked for {size(WANTED_BYTES)}")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    """Try each way, first with a warning, then with an end."""
    problems: list[str] = []
    ways = []
    for way, (module, _, _) in (CLIENTS if options.sharing == "mps" else WAYS).items():
        missing = missing_for(way, module)
        if missing:
            say(f"not tried: {way}, since {missing}")
        else:
            ways.append(way)
    if options.sharing == "mps":
        return check_clients(ways, options.devices)
    rows = []
    found: dict[tuple[str, str], tuple[Ended, Process | None, int | None, float | None]] = {}
    names = {f"{way} {enforce}": (way, enforce) for way in ways for enforce in ("warn", "kill")}
    with Overruns() as observer:
        flow = run_flow(
            "escapes",
            lambda: gather(
                {name: make_task(*names[name]).submit() for name in names},  # type: ignore[arg-type]
                2 * BODY_S,
            ),
            options.devices,
        )
        processes = read_processes(flow.id, len(names))
    for name, ended in flow.value.items():
        report = last_of(processes, ended)
        pid = 0 if report is None else report.pid
        found[names[name]] = ended, report, observer.peaks.get(pid), observer.lasted_s(pid)
    for way in ways:
        warned, report, shown, lasted_s = found[way, "warn"]
        killed, killed_report, _, killed_s = found[way, "kill"]
        tried: Tried = warned.value or Tried()
        held = lasted_s is None and way not in UNSEEN
        reported = None if report is None else report.bytes("peak_process_bytes")
        rows.append(
            (
                way,
                "holds" if held else "not seen" if lasted_s is None else "passed",
                size(shown),
                size(reported),
                tried.refused or warned.words,
                type(killed.error).__name__ if killed.error else "-",
                "-" if killed_s is None else f"{killed_s:.2f}",
            )
        )
        if held != (way in HELD):
            problems.append(f"{way}: the cap {'holds' if held else 'was passed'}")
        if held and not tried.refused:
            problems.append(f"{way}: it took less than it asked for, and nothing refused it")
        if way in UNSEEN:
            say(f"{way}: the memory in use of the device rose by {size(tried.rose_bytes)} MiB")
            if lasted_s is not None or tried.rose_bytes < WANTED_BYTES:
                problems.append(f"{way}: the driver counts it otherwise")
            continue
        if not held and (reported or 0) < WANTED_BYTES:
            problems.append(f"{way}: its report says {size(reported)} MiB")
        if not held and not isinstance(killed.error, BudgetExceededError):
            problems.append(f"{way}: gpu:enforce=kill did not end it: {killed.words or 'it ended'}")
        if not held and (killed_report is None or killed_report["outcome"] != "oom"):
            problems.append(f"{way}: its report is not of an out-of-memory")
    table(
        ["in the body", "cap", "NVML-peak", "reported", "refused with", "enforce=kill", "over-s"],
        rows,
    )
    say(
        f"sizes in MiB; budget {size(BUDGET_BYTES)}, asked for {size(WANTED_BYTES)}. over-s: seconds from the"
    )
    say("first reading above the budget to the last reading of the process, with gpu:enforce=kill")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharing", choices=("time", "mps"), default="time")
    return run(check, parser, limit_s=270, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
