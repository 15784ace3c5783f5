"""How much of its time does a task compute, and with how much energy: reports beside `nvidia-smi` and the power's readings.

    python -m tests.gpu.check_work [--seconds 20] [--only half]

Tasks compute without a pause, for half of their time, and not at all, each alone; then two compute beside each other.
`nvidia-smi pmon` shows each process's part meanwhile, `dmon` the device's, and NVML its power. How long the two questions take
that a reading has more for it is printed, too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import pynvml
from prefect import task

from prefect_gpu import gpu
from prefect_gpu.measurements import UnitUse
from tests.gpu._checks import (
    gather,
    last_of,
    nvml_handles,
    read_processes,
    run,
    run_flow,
    say,
    table,
)

#: What a report may differ by: percent of the time, and part of the energy.
MOST_APART_PERCENT = 12.0
MOST_ENERGY_APART = 0.15

#: Tasks at a time, and for how much of its time each computes.
ROWS = {"all": (1, 1.0), "half": (1, 0.5), "nothing": (1, 0.0), "two": (2, 1.0)}


@task(tags=gpu(memory="4GiB", framework="torch"))
def compute(part: float, seconds: float) -> None:
    """Multiply matrices for a part of each tenth of a second."""
    import torch

    x = torch.ones(4096, 4096, device="cuda")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pause_s = time.monotonic() + 0.1
        while time.monotonic() < pause_s - 0.1 * (1 - part):
            x = (x @ x).clamp(max=1.0)
            torch.cuda.synchronize()
        time.sleep(max(0.0, pause_s - time.monotonic()))


class Smi(threading.Thread):
    """Reads what `nvidia-smi pmon` prints each second, and the power ten times a second, until it is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        #: Percent of the time by process id.
        self.percents: dict[int, list[int]] = defaultdict(list)
        #: Percent of the time of the device.
        self.device: list[int] = []
        self.watts: list[float] = []
        self._left = threading.Event()

    def __enter__(self) -> Smi:
        self._pmon, self._dmon = (
            subprocess.Popen(
                ["nvidia-smi", way, "-s", "u", "-d", "1"], stdout=subprocess.PIPE, text=True
            )
            for way in ("pmon", "dmon")
        )
        self.start()
        self._power = threading.Thread(target=self._read_power, daemon=True)
        self._power.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._left.set()
        self._power.join()
        self._pmon.terminate()
        self._dmon.terminate()
        self.join()
        # The first device, multiprocessors, …
        lines = [line.split() for line in self._dmon.communicate()[0].splitlines()]
        self.device = [int(parts[1]) for parts in lines if parts[0] == "0" and parts[1].isdigit()]

    def run(self) -> None:
        assert self._pmon.stdout is not None
        for line in self._pmon.stdout:
            # GPU, process id, type, multiprocessors, …
            parts = line.split()
            if len(parts) > 3 and parts[1].isdigit():
                self.percents[int(parts[1])].append(int(parts[3]) if parts[3].isdigit() else 0)

    def _read_power(self) -> None:
        (handle, *_) = nvml_handles()
        while not self._left.wait(0.1):
            self.watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)

    def percent(self, pid: int) -> float:
        """Return the mean of a process, without the first and last second."""
        return statistics.fmean(self.percents[pid][1:-1] or [0])

    def device_percent(self) -> float:
        """Return the mean of the device from the first to the last second in which it computed."""
        busy = [at for at, part in enumerate(self.device) if part]
        return statistics.fmean(self.device[busy[0] + 1 : busy[-1]] or [0]) if busy else 0.0


def check(options: argparse.Namespace) -> list[str]:
    """Run each row, and compare."""
    if options.devices != "nvml":
        return ["nothing to compare"]
    (handle, *_) = nvml_handles()
    problems, lines = [], []
    for name in options.only or ROWS:
        count, part = ROWS[name]
        with Smi() as smi:
            began_s = time.monotonic()
            flow: Any = run_flow(
                name,
                lambda count=count, part=part: gather(
                    {str(i): compute.submit(part, options.seconds) for i in range(count)},
                    3 * options.seconds,
                ),
                options.devices,
            )
            took_s = time.monotonic() - began_s
        processes = read_processes(flow.id, count)
        joules = statistics.fmean(smi.watts) * took_s
        energies = []
        for each in flow.value.values():
            report = last_of(processes, each)
            if report is None or each.error:
                problems.append(f"{name}: {each.words or 'no report'}")
                continue
            ours = (
                100 * float(report["busy_fraction"]) if "busy_fraction" in report.fields else None
            )
            energy = float(report["energy_j"]) if "energy_j" in report.fields else 0.0
            energies.append(energy)
            theirs = smi.percent(report.pid)
            seen = "?" if ours is None else f"{ours:.1f}"
            units = [
                f"{100 * float(report[each]):.1f}" if each in report.fields else "?"
                for each in UnitUse._fields
            ]
            dmon = f"{smi.device_percent():.1f}"
            lines.append(
                (name, seen, f"{theirs:.1f}", dmon, f"{energy:.0f}", f"{joules:.0f}", *units)
            )
            if ours is None or abs(ours - theirs) > MOST_APART_PERCENT:
                problems.append(f"{name}: {seen} % of the time, by nvidia-smi {theirs:.1f} %")
        # The device takes energy before and after the bodies, too.
        if part == 1.0 and not 0 < sum(energies) < (1 + MOST_ENERGY_APART) * joules:
            problems.append(f"{name}: {sum(energies):.0f} J of {joules:.0f} J")
    heads = ["computes", "ours-%", "pmon-%", "dmon-%", "joules", "of-the-device"]
    table([*heads, *(f"{each}-%" for each in UnitUse._fields)], lines)
    for question, ask in {
        "utilisation of processes": lambda: pynvml.nvmlDeviceGetProcessUtilization(handle, 0),
        "energy": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "units": lambda: pynvml.nvmlGpmSampleFree(
            pynvml.nvmlGpmSampleGet(handle, pynvml.nvmlGpmSampleAlloc())
        ),
    }.items():
        times_s = []
        for _ in range(50):
            asked_s = time.perf_counter()
            try:
                ask()
            except pynvml.NVMLError as error:
                say(f"{question}: {error}")
                break
            times_s.append(time.perf_counter() - asked_s)
        if times_s:
            say(
                f"{question}: {1000 * statistics.median(times_s):.2f} ms, at most {1000 * max(times_s):.2f}"
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each task")
    parser.add_argument("--only", action="append", choices=ROWS, help="default: all rows")
    return run(check, parser, limit_s=240)


if __name__ == "__main__":
    sys.exit(main())
