"""GPU memory of running processes goes to the host and comes back, twenty times, and nothing in them notices.

    python -m tests.gpu.check_suspension [--only NAME...] [--turns 20] [--between-devices]

Each program of `suspension_bodies` runs twice: once undisturbed, once while its memory is moved out and in. Seen are
the memory that NVML shows for the process while it is away, the seconds of each move, and that both computed the same,
bit for bit. With `--between-devices` each comes back on the other of two devices. Some run side by side, so the seconds are those of a device that others use too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pynvml

from prefect_gpu.suspension.driver_calls import DriverCalls, move_in, move_out
from tests.gpu._checks import MIB, installed, say, table
from tests.gpu.suspension_bodies import BODIES, ON_TWO

#: What a body takes longer than is a hang.
BODY_S = 200.0

#: Seconds for which a process runs between two moves.
BETWEEN_S = 0.2


@dataclass
class Found:
    name: str
    turns: int = 0
    used: int = 0
    away: int = 0
    out_s: list[float] = field(default_factory=list)
    in_s: list[float] = field(default_factory=list)
    problem: str = ""


def used_bytes(pid: int) -> int:
    """What NVML shows for a process on all devices; 0: it is not there."""
    total = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
            if process.pid == pid:
                total += process.usedGpuMemory or 0
    return total


def devices_of(pid: int) -> tuple[int, ...]:
    """The indices of the devices on which NVML shows a process."""
    return tuple(
        index
        for index in range(pynvml.nvmlDeviceGetCount())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
            pynvml.nvmlDeviceGetHandleByIndex(index)
        )
        if process.pid == pid
    )


class Program:
    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.suspension_bodies", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1" if name in ON_TWO else "0"},
        )

    def ready(self) -> None:
        for line in self.process.stdout or ():
            if line.strip() == "ready":
                return
        raise RuntimeError(f"it ended: {self.process.communicate()[1][-600:]}")

    def digest(self) -> str:
        said, errors = self.process.communicate("go\n", timeout=BODY_S)
        for line in said.splitlines():
            if line.startswith("digest"):
                return line
        raise RuntimeError(f"it ended with {self.process.returncode}: {errors[-600:]}")


def try_one(
    calls: DriverCalls, name: str, turns: int, onto: Mapping[str, str] | None = None
) -> Found:
    found = Found(name)
    moved, other = Program(name), Program(name)
    try:
        moved.ready()
        other.ready()
        pid = moved.process.pid
        where = {devices_of(pid)}
        for _ in range(turns):
            time.sleep(BETWEEN_S)
            if moved.process.poll() is not None:
                raise RuntimeError("it ended before the last turn")
            used = used_bytes(pid)
            found.used = max(found.used, used)
            found.out_s.append(move_out(calls, pid, used))
            found.away = max(found.away, used_bytes(pid))
            found.in_s.append(move_in(calls, pid, used, onto))
            where.add(devices_of(pid))
            found.turns += 1
        if moved.digest() != other.digest():
            found.problem = "it computed something else"
        elif name not in ON_TWO and len(where) != (2 if onto else 1):
            found.problem = f"it was on the devices {where}"
        elif found.away:
            found.problem = "memory was left on the device"
    except Exception as error:
        found.problem = f"{type(error).__name__}: {error}"[-700:]
    finally:
        for program in (moved, other):
            program.process.kill()
    return found


def lacks(name: str) -> str:
    """Return what a program needs and this host lacks; empty if nothing."""
    framework = name.partition("-")[0]
    if not installed(framework):
        return "not installed"
    if name in ON_TWO and pynvml.nvmlDeviceGetCount() < 2:
        return "needs two devices"
    if framework == "onnxruntime":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "a build without CUDA"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*BODIES], default=[*BODIES])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--beside", type=int, default=4, help="programs that are moved at a time")
    parser.add_argument("--between-devices", action="store_true", help="needs two of one model")
    options = parser.parse_args(arguments)
    pynvml.nvmlInit()
    onto: dict[str, str] | None = None
    if options.between_devices:
        first, second = (
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in (0, 1)
        )
        onto = {first: second, second: first}
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    say(f"{pynvml.nvmlDeviceGetName(device)}, driver {pynvml.nvmlSystemGetDriverVersion()}")
    calls = DriverCalls()
    if why := calls.unsupported():
        say(why)
        return 1
    names = [name for name in options.only if not lacks(name)]
    for name in options.only:
        if why := lacks(name):
            say(f"{name}: {why}")
    with concurrent.futures.ThreadPoolExecutor(options.beside) as threads:
        rows = []
        for found in threads.map(lambda name: try_one(calls, name, options.turns, onto), names):
            say(f"{found.name}: {found.turns} turns {found.problem}")
            rows.append(found)
    table(
        (
            "program",
            "turns",
            "held, MiB",
            "while away, MiB",
            "out, s",
            "most",
            "in, s",
            "most",
            "the same",
        ),
        [
            (
                found.name,
                str(found.turns),
                f"{found.used / MIB:.0f}",
                f"{found.away / MIB:.0f}",
                *(
                    text
                    for times in (found.out_s, found.in_s)
                    for text in (
                        (f"{statistics.median(times):.2f}", f"{max(times):.2f}")
                        if times
                        else ("-", "-")
                    )
                ),
                "no" if found.problem else "yes",
            )
            for found in rows
        ],
    )
    calls.close()
    failed = [found.name for found in rows if found.problem]
    say(f"NOT: {', '.join(failed)}" if failed else "all as it should be")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
