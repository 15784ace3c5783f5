"""What the benchmarks read of devices and processes, by NVML and psutil and without the package.

Where no NVIDIA device answers, the machine's memory stands in: resident sets of this process's
descendants, so that every benchmark can be tried out anywhere.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MIB = 2**20

#: Bytes by which an idle device may differ from before without anything having stayed.
TOLERANCE_BYTES = 2 * MIB

#: Seconds of CPU time that idle processes may use in `QUIET_S`, and that time.
IDLE_CPU_S = 0.05
QUIET_S = 0.6


def handles() -> list[Any]:
    """Return the NVML handle of every device; empty if no driver answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no package, no library, no driver
        return []


def nvidia() -> dict[str, Any]:
    """Name the driver and its devices; empty where there is none."""
    found = handles()
    if not found:
        return {}
    import pynvml

    return {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "devices": [pynvml.nvmlDeviceGetName(handle) for handle in found],
    }


def torch_sees_gpu() -> bool:
    """Return whether the installed PyTorch was built for CUDA, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    return "cuda: Optional[str] = None" not in version and "cuda = None" not in version


def usable_bytes() -> list[int]:
    """Read what each device has for processes: its total less what the driver keeps."""
    found = []
    for handle in handles():
        import pynvml

        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            found.append(int(memory.total - memory.reserved))
        except (pynvml.NVMLError, AttributeError):
            found.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
    return found


def headroom(usable: list[int], cap_bytes: int) -> str:
    """Return the runner's `headroom` with which no device offers more than the cap.

    Args:
        usable: Result of `usable_bytes`.

    Raises:
        SystemExit: A device is smaller than the cap.
    """
    if min(usable) < cap_bytes:
        raise SystemExit(
            f"--cap {cap_bytes / 1e9:g}: in GB; a device here has {min(usable) / 1e9:.1f} GB only"
        )
    return f"{-(-(max(usable) - cap_bytes) // MIB)}MiB" if max(usable) > cap_bytes else "0"


def used_by_device() -> list[int]:
    """Return the memory in use on each GPU, by all processes."""
    found = []
    for handle in handles():
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        # Trust what is free: `used` counts the driver's own differently in its versions.
        found.append(int(memory.total - memory.free))
    return found


def used_bytes() -> int:
    """Return the memory in use on all GPUs, for machines where NVML lists no processes."""
    return sum(used_by_device())


def energy_j(devices: int) -> float | None:
    """Return the energy of the first `devices` GPUs since their driver was loaded, in joules; `None`: not told."""
    import pynvml

    try:
        # NVML counts millijoules.
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles()[:devices])) / 1000
    except pynvml.NVMLError:
        return None


def settled_difference_bytes(before: int, patience_s: float = 5.0) -> int:
    """Wait until as much is used on all GPUs as before; give what differs then, 0 within tolerance."""
    deadline = time.monotonic() + patience_s
    while True:
        difference = used_bytes() - before
        if abs(difference) <= TOLERANCE_BYTES:
            return 0
        if time.monotonic() > deadline:
            return difference
        time.sleep(0.05)


def descendants() -> list[int]:
    """Return the process ids of this process and its descendants."""
    import psutil

    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def held_bytes(on_gpu: bool) -> int:
    """Read what this process and its descendants hold: of all GPUs by NVML, or resident."""
    return sum(read_processes(on_gpu, set(descendants())).values())


def read_processes(on_gpu: bool, pids: set[int] | None = None) -> dict[tuple[int, int], int]:
    """Read bytes by process and device.

    Args:
        on_gpu: By NVML; otherwise the resident sets of descendants, on a device 0.
        pids: Only of these; `None`: all that there are.
    """
    found: dict[tuple[int, int], int] = {}
    if on_gpu:
        import pynvml

        for index, handle in enumerate(handles()):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if pids is None or process.pid in pids:
                    found[process.pid, index] = process.usedGpuMemory or 0
        return found
    import psutil

    for pid in descendants() if pids is None else pids:
        try:
            found[pid, 0] = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return found


def wait_until_idle(
    limit_s: float,
    but_for: int | None = None,
    others: Callable[[], Iterable[Any]] = tuple,
) -> float | None:
    """Wait until all descendants are idle; standbys and pool workers are ready then.

    Args:
        limit_s: Time limit in seconds.
        but_for: Id of a process that may be busy.
        others: Returns further processes that must be idle, as psutil's objects.

    Returns:
        Seconds until the last of them used CPU time; `None` if some were busy at the time limit.
    """
    import psutil

    began = time.monotonic()
    busy_s, total = 0.0, -1.0
    while True:
        now = 0.0
        for child in (*psutil.Process().children(recursive=True), *others()):
            if child.pid == but_for:
                continue
            try:
                times = child.cpu_times()
            except psutil.Error:
                continue
            now += times.user + times.system
        passed = time.monotonic() - began
        # One that ended takes its seconds with it: a sum that falls says that something changed.
        if total < 0 or abs(now - total) > IDLE_CPU_S:
            busy_s, total = (0.0 if total < 0 else passed), now
        if passed - busy_s >= QUIET_S:
            return busy_s
        if passed > limit_s:
            return None
        time.sleep(0.05)


class Sampler(threading.Thread):
    """Reads devices all the time that it is entered.

    Args:
        on_gpu: By NVML, or the resident sets of this process's descendants.
    """

    def __init__(self, on_gpu: bool) -> None:
        super().__init__(daemon=True)
        self._on_gpu = on_gpu
        self._handles = handles() if on_gpu else []
        self._interval_s = 0.02 if on_gpu else 0.1
        self._stopped = threading.Event()
        #: Most bytes of a process on a device.
        self.peaks: dict[tuple[int, int], int] = {}
        #: `time.time()` at which a process was seen last.
        self.last_seen: dict[int, float] = {}
        #: Most bytes in use on each device.
        self.used_peaks: list[int] = [0] * max(1, len(self._handles))
        #: `time.time()` and utilisation of each device, 0 to 1.
        self.busy: list[tuple[float, list[float]]] = []

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Read until it is left."""
        while not self._stopped.wait(self._interval_s):
            try:
                self.read()
            except Exception:  # a driver that does not answer once
                continue

    def read(self) -> None:
        """Read once."""
        if not self._on_gpu:
            for key, held in read_processes(False).items():
                self.peaks[key] = max(self.peaks.get(key, 0), held)
            return
        import pynvml

        now = time.time()
        for index, handle in enumerate(self._handles):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            used = int(memory.total - memory.free)
            self.used_peaks[index] = max(self.used_peaks[index], used)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                key = (process.pid, index)
                self.peaks[key] = max(self.peaks.get(key, 0), process.usedGpuMemory or 0)
                self.last_seen[process.pid] = now
        # Last: a driver that does not tell this one tells the rest.
        load = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
        self.busy.append((now, load))

    def peak_bytes(self, pid: int) -> int:
        """Return the peak memory of a process on any one device; 0 if it was never seen."""
        return max((held for (owner, _), held in self.peaks.items() if owner == pid), default=0)

    def busy_fraction(self, began: float, ended: float) -> float:
        """Return the mean utilisation of all devices in a period, 0 to 1; 0 without readings.

        NVML says in which part of its last sixth of a second to second any kernel ran: over a task of a
        second it is rough, over a row it is not.
        """
        read = [statistics.fmean(load) for at, load in self.busy if began <= at <= ended and load]
        return statistics.fmean(read) if read else 0.0
