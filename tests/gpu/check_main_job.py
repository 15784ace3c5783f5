"""Run the main job on real GPUs, watched from outside, and print what the driver showed.

    python -m tests.gpu.check_main_job [--epochs 20]

An observer that knows nothing of this package reads NVML every 10 ms from a process of its own. It
prints one line for each process of a task (its budget, the most that NVML showed for it), the
device's memory before and after, and whether the flow's own process was ever in NVML's lists. The
exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pynvml

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

#: Device memory after the flow may differ from before by this much.
TOLERANCE_BYTES = 2 * MIB


class Observer(threading.Thread):
    """Reads every device's processes until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self.peaks: dict[int, int] = {}
        self.stopped = threading.Event()
        self.readings = 0

    def used(self) -> list[int]:
        infos = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in self.handles]
        return [info.total - info.free for info in infos]

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            self.readings += 1
            now: dict[int, int] = {}
            for handle in self.handles:
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    now[process.pid] = now.get(process.pid, 0) + (process.usedGpuMemory or 0)
            for pid, size in now.items():
                self.peaks[pid] = max(self.peaks.get(pid, 0), size)


@contextlib.contextmanager
def prefect_server(home: str) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": home,
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield environment
    finally:
        server.terminate()
        server.wait(30)


def reports(environment: dict[str, str]) -> list[dict[str, str]]:
    """Read the memory artifacts back, as any client of the API would."""
    os.environ.update({k: v for k, v in environment.items() if k.startswith("PREFECT_")})
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_="gpu-memory-"))
        )
    rows = []
    for artifact in found:
        pid = re.search(r"\bpid\D{0,12}(\d+)", str(artifact.data))
        rows.append({**(artifact.metadata_ or {}), "pid": pid[1] if pid else "0"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", default="20")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, prefect_server(home) as environment:
        observer = Observer()
        name = pynvml.nvmlDeviceGetName(observer.handles[0])
        print(f"{len(observer.handles)} x {name}, driver {pynvml.nvmlSystemGetDriverVersion()}")
        before = observer.used()
        observer.start()
        flow = subprocess.Popen(
            [
                sys.executable,
                "flows/evaluate_models.py",
                "--devices",
                "nvml",
                "--epochs",
                arguments.epochs,
            ],
            env=environment,
            cwd=ROOT,
        )
        code = flow.wait()
        ended = time.monotonic()
        while observer.used() != before and time.monotonic() - ended < 5:
            time.sleep(0.01)
        back_s = time.monotonic() - ended
        after = observer.used()
        observer.stopped.set()
        observer.join()
        rows = reports(environment)
    bad = code != 0
    print(f"\nflow process {flow.pid} ended with {code}; {observer.readings} readings of NVML")
    print("pid      framework   outcome    budget MiB  NVML peak MiB  reported MiB  leaked  under")
    for row in sorted(rows, key=lambda row: int(row["pid"])):
        pid, budget = int(row["pid"]), int(row["budget_bytes"])
        peak = observer.peaks.pop(pid, 0)
        under = 0 < peak <= budget
        bad |= not under or row["leaked_bytes"] != "0"
        print(
            f"{pid:<8} {row['framework']:<11} {row['outcome']:<10} {budget / MIB:>10.0f} "
            f"{peak / MIB:>14.0f} {int(row['peak_process_bytes']) / MIB:>13.0f} "
            f"{row['leaked_bytes']:>7}  {'yes' if under else 'NO'}"
        )
    others = {pid: size // MIB for pid, size in observer.peaks.items()}
    print(f"other processes that NVML showed (calibrations among them): {others or 'none'}")
    parent_seen = flow.pid in observer.peaks
    print(f"flow process in NVML's lists: {'YES' if parent_seen else 'never'}")
    for index, (first, last) in enumerate(zip(before, after, strict=True)):
        print(
            f"device {index}: used before {first / MIB:.1f} MiB, after {last / MIB:.1f} MiB, "
            f"difference {(last - first) / MIB:+.1f} MiB ({back_s:.2f} s after the flow)"
        )
        bad |= abs(last - first) > TOLERANCE_BYTES
    bad |= parent_seen or len(rows) < 6
    print("all as it should be" if not bad else "NOT AS IT SHOULD BE")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
