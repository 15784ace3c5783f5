"""A driver process that has no driver: a process that is away is stopped by a signal, and resumed by one.

    python fake_driver.py [STEP=CODE|STEP=die|STEP=hang ...]

A step that is named fails with a result of the driver, ends this process before or hangs. Each has its effect once.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load() -> Any:
    """The driver process's own file, which runs without the package."""
    path = Path(__file__).parents[2] / "prefect_gpu" / "suspension" / "driver_process.py"
    spec = importlib.util.spec_from_file_location("driver_process", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeDriver:
    """Knows nothing but what the kernel shows: a process is stopped or runs; and what is locked, in a file of its own."""

    def __init__(self, faults: Sequence[str], folder: Path) -> None:
        self.faults = dict(fault.split("=") for fault in faults)
        self.folder = folder

    def start(self) -> tuple[int, int]:
        if "start" in self.faults:
            return int(self.faults["start"]), 0
        return 0, 1

    def state(self, pid: int) -> int:
        try:
            return int((self.folder / str(pid)).read_text())
        except OSError:
            return 0

    def call(self, step: str, pid: int, words: Sequence[str]) -> tuple[int, int]:
        if step == "state":
            return 0, self.state(pid)
        if (fault := self.faults.get(step)) and not (self.folder / f"{step}-failed").exists():
            (self.folder / f"{step}-failed").touch()
            if fault == "die":
                os._exit(1)
            if fault == "hang":
                threading.Event().wait()
            return int(fault), 0
        before, after = {"lock": (0, 1), "checkpoint": (1, 2), "restore": (2, 1), "unlock": (1, 0)}[
            step
        ]
        if self.state(pid) != before:
            return 401, 0
        # Other processes read it at any time.
        (self.folder / f"{pid}-new").write_text(str(after))
        (self.folder / f"{pid}-new").replace(self.folder / str(pid))
        if step == "checkpoint":
            os.kill(pid, signal.SIGSTOP)
        elif step == "restore":
            with (self.folder / f"{pid}-onto").open("a") as file:
                file.write(" ".join(words) + "\n")
            os.kill(pid, signal.SIGCONT)
        with (self.folder / "calls").open("a") as file:
            file.write(f"{step} {' '.join(words)}".strip() + "\n")
        return 0, 0


if __name__ == "__main__":
    folder, *faults = sys.argv[1:]
    load().main(FakeDriver(faults, Path(folder)))
