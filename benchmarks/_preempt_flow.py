"""The flow processes of `preempt.py`, and the bodies of their tasks.

`preempt.py` starts this file once for each flow, writes a line of JSON for each task to its standard input, and reads what
becomes of the tasks from its standard output. What the tasks compute is the same in each run, bit for bit.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common

#: Prefix of the lines that a flow process prints for `preempt.py`.
TOLD = "TOLD "

#: Bytes of a budget that a body leaves to CUDA's context, its model and temporary tensors.
LEFT_BYTES = 2 * 2**30

#: Seconds that a step waits after it has computed, so that the number of steps fixes the duration.
STEP_S = 0.05

#: Numbers in a row of the memory that a training holds, and rows that a step reads.
WIDE, ROWS = 1024, 512

#: Seconds that anything which is waited for may take.
LIMIT_S = 200.0


class StoppedEarly(Exception):  # noqa: N818
    """The benchmark has seen enough of a training."""


# In the process of a task.


def train(path: str, budget_bytes: int, steps: int, seed: int, on_gpu: bool) -> int:
    """Train a small network on rows of a large tensor; note each step in a file.

    Args:
        path: Of the file. Each step adds a line with its number, its loss and the time. A file of the same name with `.live`
            gets the bytes that are allocated, the process id and the device; with one named `.stop` the training ends.
        budget_bytes: Of the task.
        steps: How many.
        seed: Of the weights and of the large tensor.
        on_gpu: Whether to use PyTorch on a GPU, or a simulated device.

    Raises:
        StoppedEarly: There is a file with `.stop`. A run that completes too soon would teach wrong durations.
    """
    one_step, live_bytes, _kept = (_torch_training if on_gpu else _simulated_training)(
        budget_bytes, seed
    )
    Path(f"{path}.live").write_text(f"{live_bytes} {os.getpid()} {_device()}")
    stop = Path(f"{path}.stop")
    with Path(path).open("a") as file:
        for step in range(steps):
            loss = one_step(step)
            file.write(f"{step} {loss!r} {time.time()}\n")
            file.flush()
            if stop.exists():
                raise StoppedEarly(path)
            time.sleep(STEP_S)
    return live_bytes


Training = tuple[Callable[[int], float], int, Any]


def _torch_training(budget_bytes: int, seed: int) -> Training:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    held = torch.rand((budget_bytes - LEFT_BYTES) // (4 * WIDE), WIDE, device="cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU(), torch.nn.Linear(WIDE, 1)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    # Rows from everywhere: what is moved wrongly shows in the losses.
    rows = torch.arange(ROWS, device="cuda") * (len(held) // ROWS)

    def one_step(step: int) -> float:
        x = held[rows + step]
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    one_step(0)
    return one_step, torch.cuda.memory_allocated(), held


def _simulated_training(budget_bytes: int, seed: int) -> Training:
    from prefect_gpu.testing import allocate

    live_bytes = budget_bytes - LEFT_BYTES
    kept = allocate(f"{live_bytes // 2**20}MiB")
    weight = [1.0 + seed]

    def one_step(step: int) -> float:
        weight[0] -= 0.01 * (weight[0] - step % 7)
        return weight[0]

    return one_step, live_bytes, kept


def _device() -> str:
    from prefect_gpu import current_allocation

    allocation = current_allocation()
    return "" if allocation is None else ",".join(allocation.device_uuids)


def evaluate(budget_bytes: int, seconds: float, on_gpu: bool) -> dict[str, float]:
    """Evaluate for some seconds; return when the first line ran and when the first kernel had ended."""
    line = time.time()
    if not on_gpu:
        from prefect_gpu.testing import allocate

        with allocate(f"{max(1, (budget_bytes - LEFT_BYTES) // 2**20)}MiB"):
            time.sleep(seconds)
        return {"line": line, "ready": line}
    import torch

    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    ready = time.time()
    held = torch.ones((budget_bytes - LEFT_BYTES) // 4, device="cuda")
    while time.time() < ready + seconds:
        held.sum().item()
    return {"line": line, "ready": ready}


# In a flow's process.


def _tell(**words: Any) -> None:
    # In one piece: several threads tell.
    sys.stdout.write(f"{TOLD}{json.dumps(words)}\n")
    sys.stdout.flush()


def main(devices: str, headroom: str, on_gpu: bool) -> None:
    """Run a flow that submits a task for each line of standard input, until that is closed."""
    from prefect import flow, task
    from prefect.runtime import flow_run

    from prefect_gpu import GPUTaskRunner, gpu

    tasks: dict[str, Any] = {"train": task(train), "evaluate": task(evaluate)}
    runner: Any = GPUTaskRunner(devices=devices, headroom=headroom, reports=True)

    def tell_end(number: int, future: Any) -> None:
        value = future.result(raise_on_failure=False)
        failed = isinstance(value, BaseException)
        words = {"error": f"{type(value).__name__}: {value}"[:500]} if failed else {"value": value}
        _tell(number=number, ended=time.time(), **words)

    @flow(name="preempt", task_runner=runner)
    def submits() -> None:
        _tell(ready=str(flow_run.id))
        for line in sys.stdin:
            asked = json.loads(line)
            tagged = tasks[asked["task"]].with_options(tags=gpu(**asked["tags"]))
            # It may be taken at once.
            submitted = time.time()
            future = tagged.submit(**asked["arguments"])
            _tell(number=asked["number"], submitted=submitted)
            threading.Thread(target=tell_end, args=(asked["number"], future), daemon=True).start()

    submits()


# In the process of `preempt.py`.


@dataclass
class Task:
    """A task that a flow process was asked to run."""

    flow: FlowProcess
    number: int

    def submitted(self) -> float:
        """Return when it was submitted, in seconds since the epoch."""
        return float(self.flow.told(self.number, "submitted")["submitted"])

    def ended(self) -> dict[str, Any]:
        """Wait for its end; return `ended`, in seconds since the epoch, and `value` or `error`."""
        return self.flow.told(self.number, "ended")

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self.flow.knows(self.number, "ended")


class FlowProcess:
    """A flow in a process of its own.

    Args:
        devices: As in `GPUTaskRunner`.
        headroom: Likewise.
        on_gpu: Whether tasks use PyTorch on a GPU.
        log: File for what it logs: a training that is stopped is a failed task run, which is meant.
    """

    def __init__(self, devices: str, headroom: str, on_gpu: bool, log: Path) -> None:
        self._log = log
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", __file__, devices, headroom),
                    *(["--on-gpu"] if on_gpu else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PREFECT_LOGGING_LEVEL": "INFO"},
            )
        self._on_gpu = on_gpu
        self._asked = 0
        self._found: dict[tuple[int, str], dict[str, Any]] = {}
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def submit(self, name: str, tags: Mapping[str, Any], **arguments: Any) -> Task:
        """Let it submit a task; returns at once.

        Args:
            name: `train` or `evaluate`.
            tags: Arguments of `gpu`, but for the framework.
            **arguments: Of the body, but for `on_gpu`.
        """
        self._asked += 1
        asked = {
            "number": self._asked,
            "task": name,
            "tags": {"framework": "torch" if self._on_gpu else "none", **tags},
            "arguments": {**arguments, "on_gpu": self._on_gpu},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Task(self, self._asked)

    def told(self, number: int, word: str) -> dict[str, Any]:
        """Wait until it tells something of a task.

        Raises:
            RuntimeError: It ended, or told nothing within `LIMIT_S`.
        """
        deadline = time.monotonic() + LIMIT_S
        while (number, word) not in self._found:
            self._take(deadline - time.monotonic())
        return self._found[number, word]

    def knows(self, number: int, word: str) -> bool:
        """Return whether it has told something of a task."""
        while not self._lines.empty():
            self._take(1.0)
        return (number, word) in self._found

    def _take(self, patience_s: float) -> None:
        try:
            line = self._lines.get(timeout=max(0.0, patience_s))
        except queue.Empty:
            raise RuntimeError(f"a flow told nothing for {LIMIT_S:g} s") from None
        if line is None:
            raise RuntimeError(f"a flow process ended with {self._process.wait()}")
        # What a child prints comes with a prefix.
        before, found, text = line.partition(TOLD)
        if not found or before.strip():
            print(line, end="", flush=True)
            return
        words = json.loads(text)
        for word in {"ended", "submitted"} & {*words}:
            self._found[words["number"], word] = words

    def log(self) -> str:
        """Return the end of what it has logged."""
        return self._log.read_text()[-3000:]

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let the flow end, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()


if __name__ == "__main__":
    # Prefect pickles bodies by their module, which children import.
    sys.path[:0] = [str(_common.REPOSITORY), str(_common.REPOSITORY / "benchmarks")]
    import _preempt_flow

    _preempt_flow.main(sys.argv[1], sys.argv[2], "--on-gpu" in sys.argv)
