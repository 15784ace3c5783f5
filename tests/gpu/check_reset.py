"""What `numba.cuda` resets in a body: what PyTorch beside it can still do, and what the report says.

python -m tests.gpu.check_reset
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from prefect import task

from prefect_gpu import gpu
from tests.gpu._checks import (
    BODY_S,
    MIB,
    gather,
    last_of,
    logs_of,
    own_bytes,
    read_processes,
    run,
    run_flow,
    size,
    table,
)

#: Seconds for which memory is held. The runner reads NVML every 0.25 s.
HOLD_S = 1.0


def reset() -> None:
    from numba import cuda

    cuda.get_current_device().reset()


def close() -> None:
    from numba import cuda

    cuda.close()


def use_torch() -> str:
    import torch

    try:
        block = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
        total = int(block[:1024].sum())
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:90]
    return "works" if total == 1024 else f"wrong: {total}"


def beside_torch(end: Callable[[], None]) -> dict[str, Any]:
    import torch
    from numba import cuda

    kept = torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda")
    array = cuda.device_array(512 * MIB, dtype="u1")
    time.sleep(HOLD_S)
    before = own_bytes()
    del array
    end()
    time.sleep(HOLD_S)
    after = own_bytes()
    again = use_torch()
    time.sleep(HOLD_S)
    counted = torch.cuda.memory_allocated()
    del kept
    return {"before": before, "after": after, "again": again, "counted": counted}


def alone(end: Callable[[], None]) -> dict[str, Any]:
    from numba import cuda

    array = cuda.device_array(512 * MIB, dtype="u1")
    time.sleep(HOLD_S)
    before = own_bytes()
    del array
    end()
    time.sleep(HOLD_S)
    after = own_bytes()
    try:
        cuda.device_array(512 * MIB, dtype="u1")
        again = "works"
    except Exception as error:
        again = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:90]
    return {"before": before, "after": after, "again": again, "counted": None}


CASES: dict[str, tuple[Any, Any, Any]] = {
    "PyTorch and get_current_device().reset()": (beside_torch, reset, "torch"),
    "PyTorch and cuda.close()": (beside_torch, close, "torch"),
    "Numba alone and get_current_device().reset()": (alone, reset, "none"),
    "Numba alone and cuda.close()": (alone, close, "none"),
}


#: A part of what the task run's log then says.
WARNING = "destroyed its CUDA context"


def make_task(name: str) -> Any:
    """Make the task of one case; its argument is what ends the context."""
    body, end, framework = CASES[name]
    return task(
        name=f"{body.__name__}-{end.__name__}",
        timeout_seconds=BODY_S,
        tags=gpu(memory="4GiB", framework=framework),
    )(body)


def check(options: argparse.Namespace) -> list[str]:
    """Try each, and print what came of it."""
    tasks = {name: make_task(name) for name in CASES}
    flow = run_flow(
        "reset",
        lambda: gather({name: tasks[name].submit(CASES[name][1]) for name in CASES}, BODY_S),
        options.devices,
    )
    processes = read_processes(flow.id, len(tasks))
    problems, rows = [], []
    for name, ended in flow.value.items():
        report = last_of(processes, ended)
        value = ended.value or {}
        rows.append(
            (
                name,
                size(value.get("before")),
                size(value.get("after")),
                value.get("again") or ended.words,
                size(value.get("counted")),
                "?" if report is None else report["outcome"],
                size(None if report is None else report.bytes("peak_process_bytes")),
                size(None if report is None else report.bytes("peak_live_bytes")),
                size(None if report is None else report.bytes("leaked_bytes")),
            )
        )
        if report is None:
            problems.append(f"{name}: no report")
        elif name.startswith("PyTorch"):
            # What is counted after the reset does not count.
            if (report.bytes("peak_live_bytes") or 0) != 1024 * MIB:
                problems.append(
                    f"{name}: its report says that {report['peak_live_bytes']} were live"
                )
            if not logs_of(ended.task_run_id, WARNING):
                problems.append(f"{name}: no warning in its log")
    table(
        [
            "in the body",
            "before",
            "after",
            "the next use",
            "counted",
            "outcome",
            "peak",
            "live",
            "leaked",
        ],
        rows,
    )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    return run(check, parser, limit_s=180)


if __name__ == "__main__":
    sys.exit(main())
