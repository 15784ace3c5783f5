"""A person suspends a training on a GPU, uses the device, and resumes it, with `prefect-gpu suspend` and `resume`.

    python -m tests.gpu.check_suspend_by_hand [--held 16]

Two trainings of the same seed run, each in a flow of its own; one is suspended twice. While it is away the device is used by
another program, at the second time also when it is to come back: then it waits and says so. A third task has most of its
memory in PyTorch's cache, which is not moved. Last, a flow is killed with -9 while its task is away. Seen are the memory that NVML shows, the losses, which must be equal bit for bit, and what the
commands print.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.runtime import task_run

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.units import parse_bytes
from tests.gpu._checks import MIB, ROOT, nvml_handles, run, say, settle, used_bytes

GIB = 1 << 30

#: Seconds that anything may take here.
LIMIT_S = 280.0


@task
def train(folder: str, held_gib: int, steps: int) -> str:
    """Train a small network beside a large tensor; return a digest of the losses and of the tensor."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    held = torch.rand(held_gib * GIB // 4, device="cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(512, 256, device="cuda")
    digest = hashlib.sha256()
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        digest.update(repr(float(loss)).encode())
        if step == 0:
            Path(folder, "run").write_text(f"{task_run.name} {os.getpid()}")
        time.sleep(0.02)
    digest.update(held[::1001].cpu().numpy().tobytes())
    return digest.hexdigest()


@task
def caches(folder: str, held_gib: int, steps: int) -> str:
    """Hold 1 GiB and cache the rest, replay a graph, and at the end take the rest again."""
    import torch

    live = torch.full((GIB // 4,), 1.5, device="cuda")
    # Freed at once: it stays in the cache.
    torch.empty((held_gib - 1) * GIB, dtype=torch.uint8, device="cuda")
    x = torch.ones(256, device="cuda")
    # Its kernels are loaded before the capture.
    y = x * 2 + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    # The context manager empties the cache first.
    torch.empty((held_gib - 1) * GIB, dtype=torch.uint8, device="cuda")
    seen = set()
    for step in range(steps):
        x.fill_(step)
        graph.replay()
        seen.add(float((y - 2 * step).mean()))
        if step == 0:
            Path(folder, "run").write_text(f"{task_run.name} {os.getpid()}")
        time.sleep(0.02)
    torch.empty((held_gib - 1) * GIB, dtype=torch.uint8, device="cuda")
    return f"{seen} {float(live.mean())}"


def trains(devices: str, folder: str, held_gib: int, steps: int, body: str) -> str:
    @flow(task_runner=GPUTaskRunner(devices=devices))
    def trains_once() -> str:
        chosen = {"train": train, "caches": caches}[body]
        tagged = chosen.with_options(tags=gpu(memory=f"{held_gib + 2}GiB"))
        return str(tagged.submit(folder, held_gib, steps).result())

    return trains_once()


class Flow:
    """A flow in a process of its own."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        steps: int,
        body: str = "train",
        held_gib: int | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        held_gib = held_gib or options.held
        words = [options.devices, str(folder), str(held_gib), str(steps), body]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.check_suspend_by_hand", "--flow", *words],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def begun(self) -> tuple[str, int]:
        """Wait for the first step; return the task run's name and its process."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            words = (
                (self.folder / "run").read_text().split() if (self.folder / "run").exists() else ()
            )
            if len(words) == 2:
                return words[0], int(words[1])
            time.sleep(0.05)
        raise RuntimeError((self.folder / "log").read_text()[-2000:])

    def digest(self) -> str:
        self.process.wait(LIMIT_S)
        path = self.folder / "digest"
        return path.read_text() if path.exists() else (self.folder / "log").read_text()[-2000:]


def command(*words: str) -> tuple[int, str]:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "prefect_gpu", *words], capture_output=True, text=True, cwd=ROOT
    )
    said = done.stdout + done.stderr
    for line in said.splitlines():
        say(f"  $ prefect-gpu {' '.join(words)}: {line}")
    say(f"  {time.monotonic() - began_s:.2f} s, exit code {done.returncode}")
    return done.returncode, said


def held_by(pid: int) -> int:
    import pynvml

    return sum(
        process.usedGpuMemory or 0
        for handle in nvml_handles()
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid == pid
    )


def other_program() -> subprocess.Popen[str]:
    """Another program that takes nearly all that the device has free."""
    source = (
        "import sys, torch\n"
        "free = torch.cuda.mem_get_info()[0]\n"
        "held = torch.empty(free - (1 << 30), dtype=torch.uint8, device='cuda')\n"
        "print('there', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def check_cache(options: argparse.Namespace, folder: Path) -> list[str]:
    """Suspend a task that holds 1 GiB and caches 4."""
    problems = []
    cached = Flow(options, folder, 300, "caches", held_gib=5)
    name, pid = cached.begun()
    before = held_by(pid)
    code, said = command("suspend", name)
    match = re.search(r"away: (\S+) in host memory", said)
    moved = parse_bytes(match[1]) if match else None
    say(f"held before: {before / GIB:.1f} GiB, 4 of them cached; moved: {match and match[1]}")
    if code or held_by(pid) or before < 5 * GIB or moved is None or moved >= 2 * GIB:
        problems.append("what was cached was moved, or the task was not suspended")
    if command("resume", name)[0]:
        problems.append("it was not resumed")
    if (digest := cached.digest()) != "{1.0} 1.5":
        problems.append(f"it computed {digest}")
    return problems


def check(options: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PREFECT_INTEGRATIONS_GPU_LEDGER"] = str(Path(folder, "ledger"))
        Path(folder, "ledger").mkdir()
        before = used_bytes()
        moved = Flow(options, Path(folder, "moved"), options.steps)
        name, pid = moved.begun()
        for again in (False, True):
            say(f"held before: {held_by(pid) / MIB:.0f} MiB")
            code, _ = command("suspend", name)
            away = held_by(pid)
            say(f"held while away: {away / MIB:.0f} MiB")
            if code or away:
                problems.append(f"suspend ended with {code}, and {away} bytes were left")
            command("status")
            other = other_program()
            say(f"another program has {held_by(other.pid) / GIB:.1f} GiB of the device")
            if again:
                resume: subprocess.Popen[Any] = subprocess.Popen(
                    [sys.executable, "-m", "prefect_gpu", "resume", name], cwd=ROOT,
                    stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                assert resume.stdout is not None
                said = resume.stdout.readline()
                say(f"  $ prefect-gpu resume {name}: {said.strip()}")
                if "waits for" not in said:
                    said = resume.stdout.readline()
                    say(f"  $ prefect-gpu resume {name}: {said.strip()}")
                if "waits for" not in said:
                    problems.append(f"resume did not wait: {said}")
            other.communicate("go\n")
            if again:
                rest = resume.communicate()[0]
                say(f"  $ prefect-gpu resume {name}: {rest.strip()}; exit code {resume.returncode}")
                if resume.returncode:
                    problems.append("it was not resumed")
            elif command("resume", name)[0]:
                problems.append("it was not resumed")
            time.sleep(0.5)
        quiet = Flow(options, Path(folder, "quiet"), options.steps)
        digests = moved.digest(), quiet.digest()
        say(
            f"digest of the losses: {digests[0][:16]} suspended twice, {digests[1][:16]} undisturbed"
        )
        if len({*digests}) != 1 or len(digests[0]) != 64:
            problems.append(f"the trainings differ: {digests}")
        for line in (moved.folder / "log").read_text().splitlines():
            if "Goes on" in line or "Waiting for" in line:
                say(f"  log: {line}")
        problems += check_cache(options, Path(folder, "cached"))
        killed = Flow(options, Path(folder, "killed"), 10_000)
        name, pid = killed.begun()
        command("suspend", name)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed_s = time.monotonic()
        while Path(f"/proc/{pid}").exists() and time.monotonic() < killed_s + 10:
            time.sleep(0.02)
        say(
            f"kill -9 of the flow: its suspended child had ended after {time.monotonic() - killed_s:.2f} s"
        )
        if Path(f"/proc/{pid}").exists():
            problems.append("a suspended child outlived its flow")
        left = [now - then for now, then in zip(settle(before), before, strict=True)]
        say(f"left on the devices: {', '.join(f'{size / MIB:+.1f} MiB' for size in left)}")
    return problems


def main() -> int:
    if sys.argv[1:2] == ["--flow"]:
        devices, folder, held, steps, body = sys.argv[2:]
        digest = trains(devices, folder, int(held), int(steps), body)
        Path(folder, "digest").write_text(digest)
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", type=int, default=16, help="GiB of a training")
    parser.add_argument("--steps", type=int, default=1500)
    return run(check, parser, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
