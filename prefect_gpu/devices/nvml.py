"""NVIDIA GPUs and MIG instances, read through NVML, as far as `CUDA_VISIBLE_DEVICES` allows them.

Only this module imports `pynvml`. It creates no CUDA context and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import HostMemory, read_host_memory, read_machine
from prefect_gpu.devices.process_tree import ProcessTable
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.errors import DeviceError
from prefect_gpu.measurements import UnitUse
from prefect_gpu.scheduling.model import Device, DeviceKind, DeviceSnapshot, DeviceWork, ProcessUse

logger = logging.getLogger(__name__)

Handle = Any

#: From here on a figure means "not available": NVML writes the largest unsigned number, no device has half as much.
_NOT_AVAILABLE_BYTES = 2**63

#: Seconds of a process's utilisation: NVML takes a sample every 1/6 to 1 s, and none of a process that is idle.
WORK_S = 1.0

#: Metrics of NVML's GPM, each in percent, in the order of `UnitUse`.
_UNIT_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)

#: Least seconds between two readings of counters: NVML recommends 0.1 s.
UNITS_S = 0.1

#: Seconds between restarts of NVML (tens of milliseconds) while all devices fail. A lost GPU rarely comes back.
REOPEN_INTERVAL_S = 5.0

_INDEX = re.compile(r"[0-9]+")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]+)/([0-9]+)", re.IGNORECASE)

#: Errors of NVML itself, rather than of one device.
_FATAL = ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH")


class NvmlMissingError(DeviceError):
    """There is no NVIDIA driver on this machine. A driver that does not work raises another `DeviceError`."""


@dataclass(frozen=True, slots=True)
class _Memory:
    total_bytes: int
    free_bytes: int
    reserved_bytes: int = 0
    #: Whether the GPU has no memory of its own: the figures are the host's.
    unified: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that CUDA could use: a whole GPU, or a MIG instance."""

    #: Its UUID is `GPU-…` or `MIG-…`. Instances of one GPU share its `nvml_index`, the position on the PCI bus.
    device: Device
    #: UUID of the whole GPU.
    gpu_uuid: str
    #: MIG ids of an instance, the GPU instance's first; `None` for a whole GPU.
    ids: tuple[int, int] | None = None


class NvmlReader(DeviceReader):
    """Reads NVIDIA devices. Used by one thread at a time. `DeviceError`: no driver, or a named device is missing.

    `visible` is the text of `CUDA_VISIBLE_DEVICES` (`None`: not set). `chosen` has indices or UUID prefixes among the
    visible devices, in the wanted order (empty: all of them).
    """

    kind: DeviceKind = "nvml"

    def __init__(
        self,
        visible: str | None = None,
        chosen: Sequence[str] = (),
        clock: Clock | None = None,
        table: ProcessTable | None = None,
        memory: Callable[[], HostMemory] = read_host_memory,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._visible = visible
        self._chosen = chosen
        self._clock: Clock = clock or RealClock()
        self._table = table or ProcessTable(clock=self._clock)
        self._memory = memory
        #: Returns seconds since the epoch, the time by which NVML dates samples of utilisation.
        self._wall_clock = wall_clock
        #: Whether the driver lists process ids of this PID namespace, as outside of containers. In a container drivers
        #: list the host's ids, or translate them for the list and then look up the memory of the host's process with
        #: the translated id (sources of the open kernel modules). Any such id may by chance be a child's.
        self._attributed = self._table.processes.in_initial_namespace()
        #: Whether this reader has started NVML, which counts starts: each reader starts and stops it once.
        self._started = False
        self._handles: dict[str, Handle] = {}
        self._units: dict[str, _UnitCounters] = {}
        self._reopen_due_s: float | None = None
        #: Indices of GPUs that are not in the default compute mode, in which any number of processes may compute.
        self._restricted: list[int] = []
        self._open()
        try:
            self._devices = self._select(tuple(self._enumerate()))
        except (pynvml.NVMLError, DeviceError) as error:
            self.close()
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"NVML could not list the devices: {_say(error)}") from error

    def read(self, roots: Collection[int]) -> tuple[DeviceSnapshot, ...]:
        """Return a snapshot of every device; see `DeviceReader.read`."""
        if self._reopen_due_s is not None and self._clock.now() >= self._reopen_due_s:
            self.close()
        self._open()
        snapshots = tuple(self._read_device(device, roots) for device in self._devices)
        if not snapshots or not all(snapshot.error for snapshot in snapshots):
            self._reopen_due_s = None
        elif self._reopen_due_s is None:
            self._reopen_due_s = self._clock.now() + REOPEN_INTERVAL_S
        return snapshots

    def close(self) -> None:
        """Shut NVML down for this reader; the next reading starts it again."""
        self._handles.clear()
        for units in self._units.values():
            units.close()
        self._units.clear()
        self._reopen_due_s = None
        if self._started:
            self._started = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def mps_refusal(self) -> str:
        """See `DeviceReader.mps_refusal`."""
        if any(device.uuid.startswith("MIG-") for device in self._devices):
            return "its devices are MIG instances"
        for device in self._devices:
            if device.nvml_index in self._restricted:
                return f"GPU {device.nvml_index} is not in the default compute mode"
        return ""

    def _open(self) -> None:
        if self._started:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            missing = error.value in _codes("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED")
            raise (NvmlMissingError if missing else DeviceError)(
                f"NVML does not start: {_say(error)}; check that `nvidia-smi` works here, "
                f"or use devices='host'"
            ) from error
        self._started = True

    def _enumerate(self) -> Iterator[Candidate]:
        driver = pynvml.nvmlSystemGetDriverVersion()
        host, machine = socket.gethostname(), read_machine()
        gpus = pynvml.nvmlDeviceGetCount()
        for gpu_index in range(gpus):
            try:
                gpu = pynvml.nvmlDeviceGetHandleByIndex(gpu_index)
                gpu_uuid = pynvml.nvmlDeviceGetUUID(gpu)
                gpu_name = pynvml.nvmlDeviceGetName(gpu)
                mode = _ask(pynvml.nvmlDeviceGetComputeMode, gpu)
                if mode not in (None, pynvml.NVML_COMPUTEMODE_DEFAULT):
                    self._restricted.append(gpu_index)
                for handle, ids in _parts(gpu):
                    uuid = gpu_uuid if ids is None else pynvml.nvmlDeviceGetUUID(handle)
                    device = Device(
                        uuid=uuid,
                        index=-1,  # Set once it is known which are visible.
                        name=gpu_name if ids is None else _name_instance(handle, gpu_name),
                        total_bytes=self._read_memory(handle).total_bytes,
                        kind=self.kind,
                        host=host,
                        nvml_index=gpu_index,
                        driver=driver,
                        machine=machine,
                        attributed=self._attributed,
                        machine_gpus=gpus,
                    )
                    yield Candidate(device, gpu_uuid, ids)
            except pynvml.NVMLError as error:
                if _is_fatal(error):
                    raise
                logger.warning("GPU %d is left out, it does not answer: %s", gpu_index, error)

    def _select(self, found: Sequence[Candidate]) -> tuple[Device, ...]:
        ours, reason = parse_visible(self._visible, found)
        if not ours:
            why = "NVML knows no device"
            if found:
                limits = f"CUDA_VISIBLE_DEVICES={self._visible!r}"
                why = f"{limits} leaves none of {len(found)} devices: {reason}"
            raise DeviceError(f"there is no NVIDIA device to use: {why}; or use devices='host'")
        there = ", ".join(f"{i}: {c.device.uuid} ({c.device.name})" for i, c in enumerate(ours))
        chosen: list[Candidate] = []
        for entry in self._chosen:
            if entry.isdigit():
                fitting = ours[int(entry) : int(entry) + 1]
            else:
                fitting = find_devices(entry, ours)
            if not fitting:
                raise DeviceError(f"devices: {entry!r} names no device here; there are {there}")
            for candidate in fitting:
                if candidate in chosen:
                    uuid = candidate.device.uuid
                    raise DeviceError(f"devices: {entry!r} names {uuid} a second time")
                chosen.append(candidate)
        return tuple(replace(c.device, index=i) for i, c in enumerate(chosen or ours))

    def _read_device(self, device: Device, roots: Collection[int]) -> DeviceSnapshot:
        at_s = self._clock.now()
        try:
            if device.uuid not in self._handles:
                self._handles[device.uuid] = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
            handle = self._handles[device.uuid]
            memory = self._read_memory(handle)
            processes = self._read_processes(handle, roots, memory.unified)
            # Only the choice between devices that fit depends on it. MIG and some drivers do not report it.
            rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
            work = self._read_work(device, handle, roots)
        except pynvml.NVMLError as error:
            self._handles.pop(device.uuid, None)
            if _is_fatal(error):
                self.close()
                raise DeviceError(f"NVML stopped answering: {_say(error)}") from error
            return DeviceSnapshot(device, at_s, free_bytes=0, error=_say(error))
        return DeviceSnapshot(
            device=device,
            at_s=at_s,
            free_bytes=memory.free_bytes,
            system_reserved_bytes=memory.reserved_bytes,
            processes=processes,
            busy_fraction=None if rates is None else min(int(rates.gpu), 100) / 100,
            work=work,
        )

    def _read_work(
        self, device: Device, handle: Handle, roots: Collection[int]
    ) -> DeviceWork | None:
        """Return what a device's processes computed; `None`: unknown (MIG, some drivers, containers).

        The newest sample of each process counts, if it is not older than `WORK_S`.
        """
        if not device.attributed:
            return None
        now_us = int(self._wall_clock() * 1e6)
        since_us = now_us - int(WORK_S * 1e6)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
        except pynvml.NVMLError as error:
            _raise_if_lost(error)
            if error.value not in _codes("NOT_FOUND"):
                return None
            samples = ()
        # Some drivers return memory that was never written.
        usable = [s for s in samples if s.smUtil <= 100 and since_us < s.timeStamp <= now_us + 1e6]
        latest = {each.pid: each for each in sorted(usable, key=lambda each: each.timeStamp)}
        busy: dict[int | None, float] = {}
        for pid, sample in latest.items():
            root = self._table.root_of(pid, roots) if roots else None
            busy[root] = busy.get(root, 0.0) + sample.smUtil / 100
        # The samples of processes that compute by turns are of different times.
        whole = max(1.0, sum(busy.values()))
        parts = {root: part / whole for root, part in busy.items()}
        units = self._units.setdefault(device.uuid, _UnitCounters()).read(handle, self._clock.now())
        # Millijoules, from Volta on.
        energy = _ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return DeviceWork(parts, None if energy is None else float(energy) / 1000, units)

    def _read_memory(self, handle: Handle) -> _Memory:
        # Version 2 reports the driver's own part separately. Older drivers have version 1.
        for version in (pynvml.nvmlMemory_v2, None):
            try:
                info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
                break
            except pynvml.NVMLError as error:
                names = ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NOT_SUPPORTED")
                if error.value not in _codes(*names):
                    raise
        else:
            # GB10, Grace: the GPU uses the host's memory.
            host = self._memory()
            return _Memory(host.total_bytes, host.available_bytes, unified=True)
        total_bytes, free_bytes = int(info.total), int(info.free)
        # Version 1 counts the driver's part as used. Documents and tools disagree on `reserved`
        # (GPU.md). `free` counts as correct, and the driver's part is at most the rest.
        reserved_bytes = int(getattr(info, "reserved", 0))
        reserved_bytes = max(0, min(reserved_bytes, total_bytes - free_bytes))
        return _Memory(total_bytes, free_bytes, reserved_bytes)

    def _read_processes(
        self, handle: Handle, roots: Collection[int], unified: bool
    ) -> tuple[ProcessUse, ...]:
        used: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics"):
            for process in _running(handle, f"nvmlDeviceGet{kind}RunningProcesses"):
                size = process.usedGpuMemory
                size = None if size is None or size >= _NOT_AVAILABLE_BYTES else int(size)
                # A process that computes and draws is in both lists, with one figure.
                known = [value for value in (used.get(process.pid), size) if value is not None]
                used[process.pid] = max(known, default=None)
        resident: tuple[ProcessUse, ...] = ()
        if unified and self._attributed:
            # Memory from the driver is pinned and in no resident set: a process has both (documented, not measured).
            resident = tuple(
                replace(use, used_bytes=(use.used_bytes or 0) + (used.pop(use.pid, None) or 0))
                for use in self._table.resident(roots)
            )
        # Without children, or in a container whose process ids are others, nobody is looked up.
        root_of = self._table.root_of if self._attributed and roots else lambda pid, roots: None
        return resident + tuple(
            ProcessUse(pid, root_of(pid, roots), used_bytes) for pid, used_bytes in used.items()
        )


class _UnitCounters:
    """Counters of one device's units, which GPUs have from Hopper on."""

    def __init__(self) -> None:
        self._works = True
        self._last: Any = None
        self._read_s = float("-inf")

    def read(self, handle: Handle, now_s: float) -> UnitUse | None:
        """Return the use since the last reading; `None`: unknown (the first, other GPUs, MIG, some drivers)."""
        if not self._works or now_s < self._read_s + UNITS_S:
            return None
        last, self._last, self._read_s = self._last, None, now_s
        try:
            self._last = pynvml.nvmlGpmSampleAlloc()
            pynvml.nvmlGpmSampleGet(handle, self._last)
            return None if last is None else _read_units(last, self._last)
        except pynvml.NVMLError as error:
            self._works = False
            _raise_if_lost(error)
            return None
        finally:
            _free(last)

    def close(self) -> None:
        """Free the counters."""
        _free(self._last)


def _read_units(last: Any, now: Any) -> UnitUse | None:
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(_UNIT_METRICS)
    asked.sample1, asked.sample2 = last, now
    for place, metric in enumerate(_UNIT_METRICS):
        asked.metrics[place].metricId = metric
    pynvml.nvmlGpmMetricsGet(asked)
    metrics = asked.metrics[: len(_UNIT_METRICS)]
    # A figure that is not known is NaN, or garbage.
    known = all(each.nvmlReturn == 0 and 0 <= each.value <= 100 for each in metrics)
    return UnitUse(*(each.value / 100 for each in metrics)) if known else None


def _free(counters: Any) -> None:
    if counters is not None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(counters)


def _parts(gpu: Handle) -> Iterator[tuple[Handle, tuple[int, int] | None]]:
    """Yield the handle of a GPU or, in MIG mode, of each instance with its ids (GPU instance, compute instance)."""
    try:
        mig = pynvml.nvmlDeviceGetMigMode(gpu)[0] == 1
    except pynvml.NVMLError as error:
        if error.value not in _codes("NOT_SUPPORTED", "FUNCTION_NOT_FOUND"):
            raise
        mig = False
    if not mig:
        yield gpu, None
        return
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, position)
        except pynvml.NVMLError as error:
            if error.value not in _codes("NOT_FOUND", "INVALID_ARGUMENT"):
                raise
            continue  # No instance at this position.
        gpu_instance = pynvml.nvmlDeviceGetGpuInstanceId(handle)
        yield handle, (gpu_instance, pynvml.nvmlDeviceGetComputeInstanceId(handle))


def _name_instance(handle: Handle, gpu_name: str) -> str:
    try:
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return f"{gpu_name} MIG"
    # Some drivers include the profile, "MIG 1g.10gb".
    return name if "MIG" in name else f"{name} MIG"


def _ask(function: Callable[[Handle], Any], handle: Handle) -> Any:
    """Return the answer of an NVML function about a device; `None`: the device or the driver has none."""
    try:
        return function(handle)
    except pynvml.NVMLError as error:
        _raise_if_lost(error)
        return None


def _raise_if_lost(error: Any) -> None:
    """Raise an error that concerns the whole device or NVML, not one question."""
    if _is_fatal(error) or error.value in _codes("GPU_IS_LOST"):
        raise error


def _running(handle: Handle, function: str) -> Sequence[Any]:
    """Return the processes that an NVML function lists; empty: the driver does not report them."""
    for name in (function, f"{function}_v2"):
        # A second try, if processes started after NVML had counted them.
        for _ in range(2):
            try:
                processes: Sequence[Any] = getattr(pynvml, name)(handle)
                return processes
            except pynvml.NVMLLibraryMismatchError:
                break  # A driver older than the bindings has an older structure.
            except pynvml.NVMLError as error:
                if error.value in _codes("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"):
                    return ()
                if error.value not in _codes("INSUFFICIENT_SIZE"):
                    raise
    return ()


def _is_fatal(error: Any) -> bool:
    return error.value in _codes(*_FATAL)


def _codes(*names: str) -> tuple[int, ...]:
    return tuple(getattr(pynvml, f"NVML_ERROR_{name}") for name in names)


def _say(error: Any) -> str:
    return f"{error} (NVML error {error.value})"


# `CUDA_VISIBLE_DEVICES`, by CUDA's own rules. Pure.


def parse_visible(
    value: str | None, candidates: Sequence[Candidate]
) -> tuple[tuple[Candidate, ...], str]:
    """Return the devices that a value of `CUDA_VISIBLE_DEVICES` names, and why devices are missing; empty: none is.

    `candidates` are in PCI bus order; `None` as value allows all. CUDA ends the list at the first entry that names no
    device (users write `-1`, `none` or `NoDevFiles`), and sees no device if one is named twice. The index or UUID of a
    GPU in MIG mode makes all of its instances visible: CUDA uses one per process, but each can be used.
    """
    if value is None:
        return tuple(candidates), ""
    if not value.strip():
        return (), "it is empty"
    chosen: list[Candidate] = []
    reason = ""
    for entry in (part.strip() for part in value.split(",")):
        found = find_devices(entry, candidates)
        if not found:
            reason = f"{entry!r} names no device here, and CUDA ignores all that follows it"
            break
        chosen += found
    repeated = next((found for found in chosen if chosen.count(found) > 1), None)
    if repeated is not None:
        return (), f"it names {repeated.device.uuid} twice, and CUDA then sees no device"
    return tuple(chosen), reason


def find_devices(entry: str, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the devices of an entry: index, UUID or unique UUID prefix. Several devices only for a GPU in MIG mode."""
    if _INDEX.fullmatch(entry):
        return tuple(c for c in candidates if c.device.nvml_index == int(entry))
    if legacy := _LEGACY_MIG.fullmatch(entry):
        wanted = (legacy[1].lower(), (int(legacy[2]), int(legacy[3])))
        return tuple(c for c in candidates if (c.gpu_uuid.lower(), c.ids) == wanted)
    prefix = entry.lower()
    if not prefix.startswith(("gpu-", "mig-")):
        return ()
    # Instances of one GPU share the name of the GPU.
    named = {c.gpu_uuid if prefix.startswith("gpu-") else c.device.uuid for c in candidates}
    fitting = [name for name in named if name.lower() == prefix] or [
        name for name in named if name.lower().startswith(prefix)
    ]
    if len(fitting) != 1:
        return ()
    return tuple(c for c in candidates if fitting[0] in (c.device.uuid, c.gpu_uuid))
