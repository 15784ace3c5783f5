"""A hand-written stand-in for `pynvml`: the functions that `NvmlReader` uses, over plain values.

Codes, argument order and what raises what follow nvidia-ml-py 13.615. Tests change `gpus`,
`broken` and the rest while a reader uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1024**3
MIB = 1024**2

MESSAGES = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    7: "Insufficient Size",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "Driver/library version mismatch",
    25: "Argument version mismatch",
    999: "Unknown Error",
}


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return MESSAGES[self.value]


class FakeMismatchError(Exception):
    """As pynvml's: no `NVMLError`."""


@dataclass
class FakePart:
    """A GPU or one of its MIG instances."""

    uuid: str
    name: str = "NVIDIA H200"
    total_bytes: int = 24 * GIB
    free_bytes: int = 23 * GIB
    reserved_bytes: int = 512 * MIB
    #: pid to bytes; `None`: the driver does not say.
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    #: What every question about it answers; `None`: it works.
    error: int | None = None
    memory_error: int | None = None
    #: Percent of the time in which it computed, and what the question answers; `None`: it works.
    busy_percent: int = 0
    busy_error: int | None = None
    #: Samples of utilisation: process id, time in microseconds, percent; and what the question answers (`None`: it works).
    work: list[tuple[int, int, int]] = field(default_factory=list)
    work_error: int | None = None
    #: Percent of multiprocessors, tensor cores and bandwidth in use, and what the question answers (`None`: it works).
    units: tuple[float, ...] = (0.0, 0.0, 0.0)
    units_error: int | None = 3
    #: Energy counter, and what the question answers.
    millijoules: int = 0
    energy_error: int | None = None
    #: Compute mode; 0 is the default.
    compute_mode: int = 0
    #: Errors of the next listings of processes, one each.
    process_errors: list[int] = field(default_factory=list)
    name_error: int | None = None
    gpu_instance_id: int = 0
    compute_instance_id: int = 0


@dataclass
class FakeGpu(FakePart):
    """A GPU."""

    #: `None`: not in MIG mode. A position may be empty.
    instances: list[FakePart | None] | None = None
    mig_mode_error: int | None = 3


class FakeNvml:
    """One machine's NVML."""

    NVMLError = FakeNvmlError
    NVMLLibraryMismatchError = FakeMismatchError
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_INSUFFICIENT_SIZE = 7
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
    NVML_COMPUTEMODE_DEFAULT = 0
    nvmlMemory_v2 = 0x02000028
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        #: What everything answers, `nvmlInit` too; `None`: it works.
        self.broken: int | None = None
        #: What asking for version 2 of the memory answers; `None`: it works.
        self.v2_error: int | None = None
        #: A driver without version 3 of the lists of processes.
        self.old_process_lists = False
        self.shutdown_error: int | None = None
        #: How often NVML is started, and was started in all.
        self.started = 0
        self.starts = 0
        #: Counters of units that are allocated, and the device that they were read of last.
        self.samples = 0
        self.counted = FakePart("")

    def _check(self, *codes: int | None) -> None:
        for code in (self.broken, None if self.started else 1, *codes):
            if code is not None:
                raise FakeNvmlError(code)

    def nvmlInit(self) -> None:
        if self.broken is not None:
            raise FakeNvmlError(self.broken)
        self.started += 1
        self.starts += 1

    def nvmlShutdown(self) -> None:
        self._check(self.shutdown_error)
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check()
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakePart:
        self._check(self.gpus[index].error)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakePart:
        self._check()
        parts: list[FakePart | None] = [
            part for gpu in self.gpus for part in (gpu, *(gpu.instances or ()))
        ]
        part = next((part for part in parts if part is not None and part.uuid == uuid), None)
        if part is None:
            raise FakeNvmlError(6)
        self._check(part.error)
        return part

    def nvmlDeviceGetUUID(self, handle: FakePart) -> str:
        self._check(handle.error)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakePart) -> str:
        self._check(handle.error, handle.name_error)
        return handle.name

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.instances is None:
            self._check(handle.error, handle.mig_mode_error)
            return [0, 0]
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakePart:
        instances = handle.instances or []
        part = instances[index] if index < len(instances) else None
        if part is None:
            raise FakeNvmlError(6)
        self._check(part.error)
        return part

    def nvmlDeviceGetGpuInstanceId(self, handle: FakePart) -> int:
        return handle.gpu_instance_id

    def nvmlDeviceGetComputeInstanceId(self, handle: FakePart) -> int:
        return handle.compute_instance_id

    def nvmlDeviceGetMemoryInfo(self, handle: FakePart, version: int | None = None) -> object:
        self._check(handle.error, handle.memory_error, self.v2_error if version else None)
        memory = SimpleNamespace(
            total=handle.total_bytes,
            free=handle.free_bytes,
            used=handle.total_bytes - handle.free_bytes,
        )
        if version:
            memory.reserved = handle.reserved_bytes
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: FakePart) -> SimpleNamespace:
        self._check(handle.error, handle.busy_error)
        return SimpleNamespace(gpu=handle.busy_percent, memory=0)

    def nvmlDeviceGetProcessUtilization(
        self, handle: FakePart, timeStamp: int
    ) -> list[SimpleNamespace]:
        self._check(handle.error, handle.work_error)
        newer = [each for each in handle.work if each[1] > timeStamp]
        if not newer:
            raise FakeNvmlError(6)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=part) for pid, at, part in newer]

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmSampleAlloc(self) -> Any:
        self._check()
        self.samples += 1
        return object()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, handle: FakePart, sample: Any) -> None:
        self._check(handle.error, handle.units_error)
        self.counted = handle

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == 1 and asked.numMetrics == len(self.counted.units)
        for metric, percent in zip(asked.metrics, self.counted.units, strict=False):
            assert metric.metricId in (2, 5, 10)
            metric.value = percent

    def nvmlDeviceGetComputeMode(self, handle: FakePart) -> int:
        self._check(handle.error)
        return handle.compute_mode

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakePart) -> int:
        self._check(handle.error, handle.energy_error)
        return handle.millijoules

    def _list(self, handle: FakePart, used: dict[int, int | None]) -> list[SimpleNamespace]:
        self._check(handle.error, handle.process_errors.pop(0) if handle.process_errors else None)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used.items()]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakePart) -> list[SimpleNamespace]:
        if self.old_process_lists:
            raise FakeMismatchError("Unversioned function called")
        return self._list(handle, handle.compute)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: FakePart) -> list[SimpleNamespace]:
        return self._list(handle, handle.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakePart) -> list[SimpleNamespace]:
        if self.old_process_lists:
            raise FakeMismatchError("Unversioned function called")
        return self._list(handle, handle.graphics)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, handle: FakePart) -> list[SimpleNamespace]:
        return self._list(handle, handle.graphics)
