"""Every framework under every allocation, twice: what it was allowed, and what the driver showed.

    python -m tests.gpu.check_frameworks

Each body multiplies and convolves (CuPy: transforms), so that the libraries are loaded, then takes
memory until its cap is nearly full, then asks for more than the cap leaves. That must be refused with
the framework's own out-of-memory. A TensorFlow 1 session asks for 40 % of the device in its options and
must keep to its cap as well. A first run's cap rests on the context that was calibrated, the
second's on the context that the first was seen to have. ONNX Runtime has no `all`: its arena cannot be
taken at the start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    Ended,
    Observer,
    Process,
    gather,
    installed,
    last_of,
    own_bytes,
    percent,
    read_processes,
    run,
    run_flow,
    say,
    size,
    table,
)

ALLOCATIONS: tuple[Literal["limit", "growth", "all"], ...] = ("limit", "growth", "all")

#: Of a cap, what bodies fill: the rest is what allocators lose between blocks.
FILLED = 0.95
LEAST_FILLED = 0.85

#: NVML may show so much more than the budget, from the second run on.
MOST_OVER_BYTES = 64 * MIB

#: Seconds for which memory is held: the runner reads NVML every 0.25 s.
HOLD_S = 0.6


#: For ONNX Runtime; `onnx.save(onnx.parser.parse_model(TEXT), ...)` made it from this text:
#:
#:     <ir_version: 8, opset_import: ["": 17]>
#:     product (float[16384, 512] a, float[512, 512] b) => (float[16384, 512] product) {
#:         product = MatMul (a, b)
#:     }
PRODUCT_MODEL = Path(__file__).parent / "models" / "product.onnx"


def fill(
    framework: str,
    allocated: str,
    at_start_bytes: int,
    take: Callable[[int], Any],
    unit: int = 32 * MIB,
) -> dict[str, Any]:
    """Fill the cap nearly, ask for more than it leaves, and say what came of it.

    Args:
        framework: Which.
        allocated: As in `gpu:allocation=`.
        at_start_bytes: What NVML showed for the process before it worked.
        take: Allocates so many bytes on the device; what it returns holds them.
        unit: What it can allocate is a multiple of this.
    """
    import time

    from prefect_gpu import current_allocation, release_cached
    from prefect_gpu.frameworks.out_of_memory import looks_out_of_memory
    from prefect_gpu.frameworks.registry import ADAPTERS

    adapter = ADAPTERS[framework]
    allocation = current_allocation()
    assert allocation is not None
    if allocated != "all":
        # What the work has left in caches; with `all` the cache is what was taken at the start.
        release_cached()
    counters = adapter.counters()
    held = 0 if counters is None else counters.live_bytes
    cap = allocation.cap_bytes
    goal = allocation.budget_bytes // 3 if cap is None else int(cap * FILLED)
    piece = max(unit, goal // 40 // unit * unit)
    kept = []
    refused, is_oom = "", False
    try:
        while held + piece <= goal:
            kept.append(take(piece))
            held += piece
        time.sleep(HOLD_S)
        if cap is not None:
            kept.append(take(cap - held + piece))
    except Exception as error:
        refused, is_oom = type(error).__name__, looks_out_of_memory(error) == framework
    time.sleep(HOLD_S)
    return {
        "at_start_bytes": at_start_bytes,
        "cap_bytes": cap,
        "held_bytes": held,
        "refused": refused,
        "is_oom": is_oom,
    }


def in_torch(allocated: str) -> dict[str, Any]:
    import torch

    at_start = own_bytes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.ones(2048, 2048, device=device, requires_grad=True)
    images = torch.ones(16, 32, 64, 64, device=device, requires_grad=True)
    kernel = torch.ones(32, 32, 3, 3, device=device, requires_grad=True)
    (torch.nn.functional.conv2d(images, kernel).sum() + (a @ a).sum()).backward()
    return fill(
        "torch",
        allocated,
        at_start,
        lambda count: torch.ones(count, dtype=torch.uint8, device=device),
    )


def in_tensorflow(allocated: str) -> dict[str, Any]:
    import tensorflow as tf

    at_start = own_bytes()
    gpu_or_cpu = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"

    def take(count: int) -> Any:
        with tf.device(gpu_or_cpu):
            block = tf.zeros([count // 4], tf.float32)
            block[0].numpy()
        return block

    with tf.device(gpu_or_cpu):
        a = tf.ones([2048, 2048])
        images, kernel = (
            tf.Variable(tf.ones([16, 64, 64, 32])),
            tf.Variable(tf.ones([3, 3, 32, 32])),
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")) + tf.reduce_sum(a @ a)
        float(tf.reduce_sum(tape.gradient(loss, kernel)))
    return fill("tensorflow", allocated, at_start, take)


def in_tensorflow_session(allocated: str) -> dict[str, Any]:
    import tensorflow as tf

    at_start = own_bytes()
    v1 = tf.compat.v1
    gpu_or_cpu = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    options = v1.GPUOptions(per_process_gpu_memory_fraction=0.4)
    with v1.Graph().as_default(), tf.device(gpu_or_cpu):
        session = v1.Session(config=v1.ConfigProto(gpu_options=options))

        def take(count: int) -> Any:
            block = v1.Variable(v1.zeros([count // 4]), use_resource=True)
            session.run(block.initializer)
            return block

        a, images, kernel = (v1.ones(s) for s in ([2048, 2048], [16, 64, 64, 32], [3, 3, 32, 32]))
        session.run(v1.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")) + v1.reduce_sum(a @ a))
        return fill("tensorflow", allocated, at_start, take)


def in_jax(allocated: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    at_start = own_bytes()
    a = jnp.ones((2048, 2048))
    images, kernel = jnp.ones((16, 32, 64, 64)), jnp.ones((32, 32, 3, 3))

    def loss(kernel: Any) -> Any:
        return jax.lax.conv(images, kernel, (1, 1), "SAME").sum() + (a @ a).sum()

    jax.grad(loss)(kernel).block_until_ready()
    return fill(
        "jax", allocated, at_start, lambda count: jnp.ones(count, jnp.uint8).block_until_ready()
    )


def in_cupy(allocated: str) -> dict[str, Any]:
    import cupy

    at_start = own_bytes()
    a = cupy.ones((2048, 2048), dtype=cupy.float32)
    float((a @ a).sum())
    float(cupy.abs(cupy.fft.rfft2(a)).sum())
    del a
    return fill("cupy", allocated, at_start, lambda count: cupy.ones(count, dtype=cupy.uint8))


def in_onnxruntime(allocated: str) -> dict[str, Any]:
    import gc

    import numpy
    import onnxruntime

    from prefect_gpu import onnxruntime_provider_options
    from prefect_gpu.frameworks.onnxruntime_adapter import calibration_session

    at_start = own_bytes()
    # It loads cuBLAS, cuDNN and cuFFT. Its arena goes with it: each session's has the whole limit.
    session, given = calibration_session(onnxruntime, onnxruntime_provider_options())
    session.run(None, given)
    del session
    gc.collect()
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    cuda = ("CUDAExecutionProvider", onnxruntime_provider_options())
    # Products of 32 MiB: the driver hands out 2 MiB at a time, so that smaller ones would take more
    # of it than the arena counts.
    rows, wide = 16384, 512
    session = onnxruntime.InferenceSession(PRODUCT_MODEL.read_bytes(), settings, providers=[cuda])
    given = {name: numpy.ones((n, wide), numpy.float32) for name, n in (("a", rows), ("b", wide))}

    # A binding keeps what it was given on the device, beside what it got.
    each = (2 * rows + wide) * wide * 4

    def take(count: int) -> Any:
        held = []
        for _ in range(-(-count // each)):
            binding = session.io_binding()
            for name, array in given.items():
                binding.bind_cpu_input(name, array)
            # Left on the device, in the session's arena.
            binding.bind_output("product", "cuda")
            session.run_with_iobinding(binding)
            held.append(binding)
        return held

    return fill("onnxruntime", allocated, at_start, take, each)


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "torch": in_torch,
    "tensorflow": in_tensorflow,
    "tensorflow-session": in_tensorflow_session,
    "jax": in_jax,
    "cupy": in_cupy,
    "onnxruntime": in_onnxruntime,
}

#: TensorFlow's context is twice that of the others.
BUDGETS = {"tensorflow": "4GiB", "tensorflow-session": "4GiB"}


def package_of(body: str) -> Any:
    """Return the framework that a body uses, as in `gpu:framework=`."""
    return body.partition("-")[0]


def exists(framework: str, allocation: str) -> bool:
    return (framework, allocation) != ("onnxruntime", "all")


def make_tasks(options: argparse.Namespace, frameworks: list[str]) -> dict[str, Any]:
    """Make one task for each framework and allocation, each with a history of its own."""
    return {
        f"{framework} {allocation}": task(
            name=f"{framework}-{allocation}",
            timeout_seconds=BODY_S,
            tags=gpu(
                memory=options.budget or BUDGETS.get(framework, "3GiB"),
                framework=package_of(framework),
                allocation=allocation,
            ),
        )(BODIES[framework])
        for framework in frameworks
        for allocation in ALLOCATIONS
        if exists(framework, allocation)
    }


def check(options: argparse.Namespace) -> list[str]:
    """Run all of them side by side, then again."""
    asked = options.frameworks.split(",") if options.frameworks else list(BODIES)
    present = [framework for framework in asked if installed(package_of(framework))]
    problems = [f"{name} is not installed" for name in asked if name not in present]
    tasks = make_tasks(options, present)
    found: dict[str, list[tuple[Ended, Process | None]]] = {name: [] for name in tasks}
    with Observer() as observer:
        for number in (1, 2):
            flow = run_flow(
                "check-frameworks",
                lambda: gather(
                    {name: kind.submit(name.split()[1]) for name, kind in tasks.items()}, 2 * BODY_S
                ),
                options.devices,
            )
            say(f"run {number} of all {len(tasks)} took {flow.seconds:.0f} s")
            processes = read_processes(flow.id, len(tasks))
            for name, ended in flow.value.items():
                found[name].append((ended, last_of(processes, ended)))
    rows = []
    for framework in present:
        for allocation in ALLOCATIONS:
            name = f"{framework} {allocation}"
            if not exists(framework, allocation):
                rows.append((framework, allocation, *["-"] * 13))
                continue
            for number, (ended, report) in enumerate(found[name], 1):
                shown = observer.peak_of(report)
                rows.append((framework, allocation, str(number), *cells(ended, report, shown)))
                problems += [
                    f"{name}, run {number}: {what}"
                    for what in judge(allocation, number, ended, report, shown)
                ]
    table(
        [
            "framework",
            "allocation",
            "run",
            "budget",
            "cap",
            "at-start",
            "filled",
            "NVML-peak",
            "reported",
            "live",
            "reserved",
            "context",
            "over",
            "over-%",
            "past the cap",
        ],
        rows,
    )
    say("sizes in MiB; NVML's peak is read from outside every 10 ms, over is what it has above the")
    say("budget; at-start is before any work; live and reserved are the framework's own peaks")
    return problems


def cells(ended: Ended, report: Process | None, shown: int | None) -> tuple[str, ...]:
    """Write a run's row, after its name."""
    if ended.value is None or report is None:
        return (*["?"] * 11, ended.words or "no report")
    budget, cap = report.bytes("budget_bytes"), ended.value["cap_bytes"]
    over = None if shown is None or budget is None else shown - budget
    return (
        size(budget),
        "-" if cap is None else size(cap),
        size(ended.value["at_start_bytes"]),
        "-" if cap is None else f"{ended.value['held_bytes'] / cap * 100:.0f}%",
        size(shown),
        size(report.bytes("peak_process_bytes")),
        size(report.bytes("peak_live_bytes")),
        size(report.bytes("peak_reserved_bytes")),
        size(report.bytes("context_bytes")),
        "?" if over is None else f"{over / MIB:+.0f}",
        percent(None if over is None or not budget else over / budget),
        "-" if cap is None else ended.value["refused"] or "GIVEN",
    )


def judge(
    allocation: str, number: int, ended: Ended, report: Process | None, shown: int | None
) -> list[str]:
    """Return the faults of one run."""
    if ended.value is None or report is None:
        return [ended.words or "no report"]
    problems = []
    budget, cap = report.bytes("budget_bytes") or 0, ended.value["cap_bytes"]
    if report.attempt != 1:
        problems.append(f"it took {report.attempt} processes")
    if not shown:
        problems.append("NVML never showed its process")
    if allocation == "growth":
        return problems if cap is None else [*problems, "it has a cap"]
    if cap is None:
        return [*problems, "it has no cap"]
    if allocation == "all" and ended.value["at_start_bytes"] < LEAST_FILLED * cap:
        problems.append("it did not take its cap at the start")
    if ended.value["held_bytes"] < LEAST_FILLED * cap:
        problems.append(f"it filled less than {LEAST_FILLED:.0%} of its cap")
    if not ended.value["is_oom"]:
        said = ended.value["refused"] or "nothing, and it was given"
        problems.append(f"past its cap it met {said}")
    if allocation == "limit" and number > 1 and shown and shown - budget > MOST_OVER_BYTES:
        problems.append(f"{(shown - budget) / MIB:.0f} MiB above its budget")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", default="", help=f"some of {','.join(BODIES)}; all")
    parser.add_argument("--budget", default="", help="of each task; 3GiB, TensorFlow's 4GiB")
    return run(check, parser, limit_s=270)


if __name__ == "__main__":
    sys.exit(main())
