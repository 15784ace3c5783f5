"""Made-up reports that look like those of real runs, for tests of charts and artifacts."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError

from prefect_gpu.measurements import Mark, Sample, SeriesBuilder
from prefect_gpu.reports.model import TaskReport
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import GIB, MIB

PLACED_AT = 1_795_000_000.0
CONTEXT = 612 * MIB


def device(index: int = 0, total_gib: float = 140.4, kind: Any = "nvml") -> Device:
    uuid = f"GPU-{0x1A2B3C4D + index * 0x1111:08x}-7f3e-4c11-9a52-0c9d1e{index:06x}"
    return Device(
        uuid, index, "NVIDIA H200", int(total_gib * GIB), kind, "node-1", index, "580.159.04"
    )


def on_node(node: str, index: int = 0) -> Device:
    """A device of a node of a cluster."""
    found = device(index)
    return replace(found, uuid=f"{found.uuid}-{node}", host=node, in_cluster=True)


def task_report(**changes: Any) -> TaskReport:
    """One process: a training with a warm-up, steps, an evaluation."""
    start_s, run_s = 3.4, 41.2
    series = SeriesBuilder(6 * GIB)
    noise = random.Random(7)
    for i in range(int((start_s + run_s) / 0.25)):
        at_s = i * 0.25
        series.add(_sample(at_s, start_s, noise))
    fields: dict[str, Any] = {
        "task_name": "evaluate",
        "task_key": "evaluate-1f0c9a7e",
        "task_run_id": UUID(int=0x5EED),
        "task_run_name": "evaluate-resnet50",
        "flow_run_id": UUID(int=0xF10),
        "pid": 4242,
        "devices": (device(),),
        "framework": "torch",
        "outcome": "completed",
        "attempt": 1,
        "budget_bytes": 6 * GIB,
        "budget_source": "tag",
        "peak_process_bytes": series.peak_process_bytes,
        "peak_live_bytes": series.peak_live_bytes,
        "peak_reserved_bytes": series.peak_reserved_bytes,
        "context_bytes": CONTEXT,
        "leaked_bytes": 0,
        "queued_s": 12.7,
        "start_s": start_s,
        "run_s": run_s,
        "placed_at": PLACED_AT,
        "samples": series.samples,
        "source": "nvml",
        "marks": (
            Mark(4.1, "load weights", 2.6, *(round(x * GIB) for x in (1.1, 1.1, 1.2, 1.2))),
            Mark(7.0, "first step", 0.9, *(round(x * GIB) for x in (2.4, 4.71, 4.9, 4.9))),
            Mark(9.2, "train", 24.0, *(round(x * GIB) for x in (2.4, 3.71, 4.9, 4.9))),
            Mark(33.6, "evaluate", 9.8, *(round(x * GIB) for x in (1.3, 1.9, 4.9, 4.9))),
            Mark(43.9, "done"),
        ),
        "wasted_byte_seconds": series.wasted_byte_seconds(start_s + run_s),
    }
    return TaskReport(**{**fields, **changes})


def _sample(at_s: float, start_s: float, noise: random.Random) -> Sample:
    if at_s < start_s - 0.6:
        return Sample(at_s, 0)
    if at_s < start_s + 0.5:
        return Sample(at_s, 420 * MIB, 0, 0)
    if at_s < 7:
        live = 1.1 * min(1.0, (at_s - 3.8) / 2.4)
    elif at_s < 8:
        live = 4.71
    elif at_s < 33.5:
        live = 3.05 + 0.55 * math.sin(at_s * 2.9) + 0.1 * noise.random()
    else:
        live = 1.5 + 0.35 * math.sin(at_s * 3.7) + 0.05 * noise.random()
    held = 1.2 if at_s < 7 else 4.9
    return Sample(at_s, int(held * GIB) + CONTEXT, int(live * GIB), int(held * GIB))


def flow_reports() -> tuple[TaskReport, ...]:
    """A flow on two devices: a probe, learned siblings, an escalation, a death and a leak."""
    noise = random.Random(11)
    models = ["resnet50", "vit-b16", "convnext-tiny", "swin-s", "efficientnet-b4", "regnet-y"]
    reports = [
        _process(1, "evaluate-resnet18", 0, 0, 28, 139.8, "probe", 13.9, noise),
    ]
    at_s = [30.0, 29.5]
    for i, model in enumerate([*models, *(f"{name}-int8" for name in models)]):
        on = i % 2
        late = at_s[on] + (i // 2 % 3) * 1.5
        took = 18 + 14 * noise.random()
        peak = 4.1 + 0.9 * noise.random()
        reports.append(
            _process(2 + i, f"evaluate-{model}", on, late, took, 5.4, "learned", peak, noise)
        )
        at_s[on] = late + (took + 1 if i // 2 % 3 == 2 else 0)
    reports += [
        _process(
            20,
            "finetune-bert",
            0,
            31,
            9,
            4,
            "tag",
            3.98,
            noise,
            outcome="oom",
            framework="tensorflow",
            error="ResourceExhaustedError: failed to allocate memory [Op:AddV2]",
        ),
        _process(
            20, "finetune-bert", 0, 42, 55, 6, "tag", 5.3, noise, attempt=2, framework="tensorflow"
        ),
        _process(
            21,
            "score-llm",
            1,
            62,
            12,
            9,
            "tag",
            6.2,
            noise,
            outcome="died",
            error="killed by SIGSEGV; last reading 6.2GiB",
        ),
        _process(21, "score-llm", 1, 77, 30, 9, "tag", 3.1, noise, attempt=2),
        _process(
            22, "all-reduce check", (0, 1), 108, 22, 20, "tag", 30.4, noise, leaked_bytes=412 * MIB
        ),
        _process(
            23,
            "slow-tokenizer",
            0,
            104,
            24,
            3,
            "tag",
            1.2,
            noise,
            outcome="timeout",
            error="ran longer than timeout_seconds=20",
        ),
    ]
    return tuple(reports)


def _process(
    run: int,
    name: str,
    on: int | tuple[int, ...],
    at_s: float,
    took_s: float,
    budget_gib: float,
    source: str,
    peak_gib: float,
    noise: random.Random,
    **changes: Any,
) -> TaskReport:
    devices = tuple(device(i) for i in ((on,) if isinstance(on, int) else on))
    start_s = 2.1 + noise.random()
    budget = int(budget_gib * GIB)
    peak = int(peak_gib * GIB)
    series = SeriesBuilder(budget * len(devices))
    steps = 40
    for i in range(steps):
        at = took_s * i / (steps - 1)
        size = 0 if at < start_s else int(peak * (0.72 + 0.25 * noise.random()))
        if i == 2 * steps // 3:
            size = peak
        live = max(0, int(0.8 * size) - CONTEXT)
        series.add(Sample(at, size, live, max(0, size - CONTEXT)))
    report = task_report(
        task_name=name.partition("-")[0],
        task_run_name=name,
        task_run_id=UUID(int=run),
        devices=devices,
        budget_bytes=budget,
        budget_source=source,
        peak_process_bytes=peak,
        peak_live_bytes=series.peak_live_bytes,
        peak_reserved_bytes=series.peak_reserved_bytes,
        queued_s=max(0.0, at_s - 2 - noise.random()),
        start_s=start_s,
        run_s=took_s - start_s,
        placed_at=PLACED_AT + at_s,
        samples=series.samples,
        marks=(),
        wasted_byte_seconds=series.wasted_byte_seconds(took_s),
    )
    return replace(report, **changes).compact()


#: Seconds after which what a test waits for will never come.
PATIENCE_S = 60.0


def answered(status: int, **headers: str) -> PrefectHTTPStatusError:
    """Return the error of an answer of Prefect's API."""
    request = httpx.Request("POST", "http://api/artifacts/")
    response = httpx.Response(status, request=request, headers=headers)
    return PrefectHTTPStatusError(f"{status}", request=request, response=response)


class FakeAPI:
    """Takes artifacts; fails with what is in `errors` first; opens only while `go` is set."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.keys: list[str] = []
        self.opened = 0
        self.go = threading.Event()
        self.go.set()

    @contextmanager
    def connect(self) -> Iterator[SyncPrefectClient]:
        self.opened += 1
        self.go.wait(PATIENCE_S)
        yield cast(SyncPrefectClient, self)

    def create_artifact(self, artifact: Any) -> Any:
        """Return an artifact whose id is its number."""
        if self.errors:
            raise self.errors.pop(0)
        self.keys.append(artifact.key)
        return SimpleNamespace(id=UUID(int=len(self.keys)))
