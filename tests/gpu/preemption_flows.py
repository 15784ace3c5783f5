"""The flow processes of `check_preemption`, and the body of their tasks.

    python -m tests.gpu.preemption_flows OPTIONS

`OPTIONS` is `Options` as JSON. What becomes of the tasks is written into its folder, as `result.json`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import queue
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20

#: MiB of a budget beside what a body holds: CUDA's context, its model and temporary tensors.
BESIDE_MIB = 1280

#: Numbers in a row of the memory that a body holds, and rows that a step reads.
WIDE, ROWS = 256, 128


@dataclass(frozen=True)
class Kind:
    """An evaluation: two of the same kind return the same."""

    #: Names the kind.
    seed: int
    held_mib: int
    steps: int


@dataclass(frozen=True)
class Options:
    """What a flow process is to do."""

    devices: str
    headroom: str
    #: Its own.
    folder: str
    #: Run once each, at the same time where they fit, and all with this priority.
    once: list[Kind] = field(default_factory=list)
    priority: int = 0
    preemptible: bool = False
    #: Those stay at their first step until there is this file; empty: they do not.
    go: str = ""
    #: For so many seconds, so many tasks are kept in the queue or on the device, of random kinds of these.
    kinds: list[Kind] = field(default_factory=list)
    tasks: int = 0
    seconds: float = 0.0
    #: Of what is drawn.
    seed: int = 0
    #: Seconds that each step waits after it has computed.
    step_s: float = 0.02


def evaluate(
    seed: int, held_mib: int, steps: int, step_s: float, folder: str, go: str, on_gpu: bool
) -> str:
    """Compute on memory that is held all the time; return a digest of all that came of it.

    While it runs, a file `running-ID` has its task run's name, its process and when that was started.
    """
    from prefect.runtime import task_run

    here = Path(folder, f"running-{task_run.id}")
    digest = hashlib.sha256()
    for value in (_torch_values if on_gpu else _simulated_values)(seed, held_mib, steps):
        digest.update(repr(value).encode())
        if not here.exists():
            part = Path(folder, f"part-{task_run.id}")
            part.write_text(f"{task_run.name} {os.getpid()} {started_ticks(os.getpid())}")
            part.rename(here)
            while go and not Path(go).exists():
                time.sleep(step_s)
        time.sleep(step_s)
    here.rename(Path(folder, f"ended-{task_run.id}"))
    return digest.hexdigest()


def _torch_values(seed: int, held_mib: int, steps: int) -> Iterator[Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    held = torch.rand(held_mib * MIB // (4 * WIDE), WIDE, device="cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU(), torch.nn.Linear(WIDE, 1)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    apart = len(held) // ROWS
    rows = torch.arange(ROWS, device="cuda") * apart
    for step in range(steps):
        x = held[rows + step % apart]
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield held[::1001].cpu().numpy().tobytes()


def _simulated_values(seed: int, held_mib: int, steps: int) -> Iterator[Any]:
    from prefect_gpu.testing import allocate

    with allocate(f"{held_mib}MiB"):
        value = float(seed)
        for step in range(steps):
            value -= 0.01 * (value - step % 7)
            yield value


def started_ticks(pid: int) -> str:
    """Return when a process was started: with its id that names one process. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def has_preemptible() -> bool:
    """Return whether this version has the tag."""
    from prefect_gpu import gpu

    return "preemptible" in inspect.signature(gpu).parameters


class Work:
    """Submits evaluations in the flow of this process, and takes their results."""

    def __init__(self, options: Options) -> None:
        from prefect import task

        self._options = options
        self._on_gpu = options.devices == "nvml"
        self._task = task(evaluate)
        self._done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def submit(self, kind: Kind, priority: int, preemptible: bool) -> None:
        """Submit one; its result is in the queue when it has ended."""
        from prefect_gpu import gpu

        more: dict[str, Any] = {"preemptible": True} if preemptible and has_preemptible() else {}
        tags = gpu(
            memory=f"{kind.held_mib + BESIDE_MIB}MiB",
            framework="torch" if self._on_gpu else "none",
            priority=priority,
            learn_by="seed",
            **more,
        )
        options = self._options
        future = self._task.with_options(tags=tags).submit(
            kind.seed,
            kind.held_mib,
            kind.steps,
            options.step_s,
            options.folder,
            options.go,
            self._on_gpu,
        )

        def take(ended: Any) -> None:
            value = ended.result(raise_on_failure=False)
            failed = isinstance(value, BaseException)
            self._done.put(
                {
                    "kind": kind.seed,
                    "priority": priority,
                    "preemptible": preemptible,
                    "task_run_id": str(ended.task_run_id),
                    "value": "" if failed else value,
                    "error": f"{type(value).__name__}: {value}"[:300] if failed else "",
                    "state": str(ended.state.type.value),
                }
            )

        future.add_done_callback(take)

    def run_once(self) -> list[dict[str, Any]]:
        """Run each kind once."""
        for kind in self._options.once:
            self.submit(kind, self._options.priority, self._options.preemptible)
        return [self._done.get() for _ in self._options.once]

    def run_chaos(self) -> list[dict[str, Any]]:
        """Keep random evaluations in the queue for a time; most of them are preemptible."""
        options, draw = self._options, random.Random(self._options.seed)
        until_s = time.monotonic() + options.seconds
        found: list[dict[str, Any]] = []
        submitted = 0
        while True:
            while submitted - len(found) < options.tasks and time.monotonic() < until_s:
                self.submit(draw.choice(options.kinds), draw.randint(-5, 5), draw.random() < 0.8)
                submitted += 1
            if submitted == len(found):
                return found
            found.append(self._done.get())


def main(options: Options) -> None:
    from prefect import flow
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner

    runner: Any = GPUTaskRunner(devices=options.devices, headroom=options.headroom)

    @flow(name="preempted", task_runner=runner)
    def runs() -> dict[str, Any]:
        work = Work(options)
        found = work.run_once() + work.run_chaos()
        return {"flow_run_id": str(flow_run.id), "tasks": found}

    # The flow has published its reports when it returns.
    result = runs()
    part = Path(options.folder, "result.part")
    part.write_text(json.dumps(result))
    part.rename(Path(options.folder, "result.json"))


def read_options(text: str) -> Options:
    """Read what `check_preemption` wrote."""
    words = json.loads(text)
    for name in ("once", "kinds"):
        words[name] = [Kind(**kind) for kind in words[name]]
    return Options(**words)


if __name__ == "__main__":
    from tests.gpu import preemption_flows

    # Bodies are found by their module, which is not the one that was started.
    preemption_flows.main(preemption_flows.read_options(sys.argv[1]))
