"""`GPUTaskRunner`, the part of the runner that Prefect calls. `runner.active_runner` does the work.

A task with a `gpu` tag runs in a process of its own, with Prefect's engine in a thread of the flow's process; other
tasks run in a thread, as under Prefect's default runner.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import TaskRunner
from typing_extensions import Self

from prefect_gpu.devices.spec import parse_spec
from prefect_gpu.engine.flow_run import flow_run_goes_on
from prefect_gpu.errors import DeviceError
from prefect_gpu.runner.active_runner import ActiveRunner
from prefect_gpu.runner.configuration import Configuration
from prefect_gpu.settings import read_settings


class GPUTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs each GPU task in its own process, on devices chosen by measured free memory.

    Use it as `@flow(task_runner=GPUTaskRunner())`, and tag tasks with `prefect_gpu.gpu(...)`.

    Args:
        devices: `"auto"` (NVIDIA devices if there are any, else the machine's memory), `"nvml"`, `"host"`,
            `"simulated:2x24GiB"`, a list of indices or UUID prefixes, or a `prefect_gpu.testing.SimulatedDevices`.
            Default: the setting `PREFECT_INTEGRATIONS_GPU_DEVICES`, which is `"auto"`.
        placement: Among devices that fit: `"spread"` takes the emptiest, `"pack"` the fullest.
        max_processes: Most GPU tasks that run at a time; `None`: four for each core, at least eight.
        max_tasks_per_device: Most GPU tasks on one device at a time; `None`: as many as its memory holds.
        headroom: Memory kept free on each device, as in `"512MiB"`, or `"0"`; `None`: by kind of device.
        reports: Whether to publish memory reports as artifacts.
        standby: Of processes that are not forks, most that are started ahead of their tasks, with Prefect, the framework
            and libraries imported: `"auto"` or a number; 0: none.
        start_method: `"auto"` (the default): each process is a fork of a fresh interpreter that has imported the task's
            libraries and done nothing else, on Linux, for frameworks whose forks were shown to work (docs/start.md); else
            as with `"spawn"`: each process is a fresh interpreter.
        sharing: How tasks that share a GPU compute: `"time"` (the default), by turns; or `"mps"`, at the same time, as
            clients of NVIDIA's Multi-Process Service (docs/sharing.md).
        memory_snapshots: Folder for PyTorch's memory snapshots: each PyTorch task records what it allocates, with
            stacks, and writes `<task run id>-<attempt>.pickle` there if it runs out of memory. `None`: no snapshots.
        address: Ray cluster whose devices are used in place of this machine's: `"auto"`, `"host:port"` or
            `"ray://host:port"`. `None`: this machine.
        num_gpus: On a cluster: GPUs of each node to reserve in Ray's own count, and to use. `None`: none are
            reserved, and all devices of the nodes are used.

    Raises:
        DeviceError: `devices` cannot be read, or the platform has no process groups (Windows).
        SettingError: Another argument cannot be read, or two arguments contradict each other.
    """

    def __init__(
        self,
        devices: Any = None,
        placement: Literal["spread", "pack"] | None = None,
        max_processes: int | None = None,
        headroom: str | None = None,
        reports: bool | None = None,
        standby: int | Literal["auto"] | None = None,
        start_method: Literal["auto", "spawn"] | None = None,
        max_tasks_per_device: int | None = None,
        memory_snapshots: str | Path | None = None,
        address: str | None = None,
        num_gpus: float | None = None,
        sharing: Literal["time", "mps"] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if sys.platform == "win32":
            raise DeviceError(
                "prefect_gpu does not run on Windows: it needs process groups and Unix sockets; "
                "use Linux or WSL 2"
            )
        given: dict[str, Any] = {
            "placement": placement,
            "max_processes": max_processes,
            "max_tasks_per_device": max_tasks_per_device,
            "headroom": headroom,
            "reports": reports,
            "standby": standby,
            "start_method": start_method,
            "memory_snapshots": memory_snapshots,
            "address": address,
            "num_gpus": num_gpus,
            "sharing": sharing,
        }
        given = {name: value for name, value in given.items() if value is not None}
        settings = read_settings(**given)
        # The configuration is pickled with the flow, so it has plain values only.
        self._configuration = Configuration(
            devices=parse_spec(settings.devices if devices is None else devices),
            headroom_bytes=settings.headroom,
            address=settings.address or "",
            **settings.model_dump(
                exclude={"devices", "headroom", "address", "ledger", "one_busy_task_per_device"}
            ),
        )
        shown = given if devices is None else {"devices": devices, **given}
        #: The given arguments, for `repr`.
        self._shown = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        self._run: ActiveRunner | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown})"

    def duplicate(self) -> Self:
        """Return a new runner of the same configuration."""
        # The constructor would read the settings again (3 ms in each child). `__getstate__` drops the started state.
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GPUTaskRunner):
            return NotImplemented
        return type(self) is type(other) and self._configuration == other._configuration

    def __hash__(self) -> int:
        return hash((type(self), self._configuration))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_run=None, _started=False)
        return state

    def __enter__(self) -> Self:
        """Start the runner. The first GPU task opens devices, threads and processes."""
        super().__enter__()
        self._run = ActiveRunner(self._configuration)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Wait for running tasks; if the flow failed or was cancelled, end the tasks at once."""
        # Running tasks may submit other tasks until all have ended.
        try:
            if self._run is not None:
                goes_on = flow_run_goes_on(self._run.flow, self)
                self._run.close(exc_type is not None or not goes_on, exc_value)
        finally:
            self._run = None
            super().__exit__(exc_type, exc_value, traceback)

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[Any]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Start Prefect's engine for a task in a thread; return at once.

        A wrong tag, or a request that the machine cannot satisfy, fails the task run, not this call. The engine resolves
        futures in `parameters`, waits for `wait_for`, and records `dependencies` as further inputs.
        """
        if not self._started or self._run is None:
            raise RuntimeError("the task runner must be started before tasks are submitted")
        return self._run.submit(task, parameters, wait_for, dependencies)

    def submit_background(
        self, task: Task[..., Any], arguments: Mapping[str, Any], around: set[str]
    ) -> Future[State[Any]] | None:
        """Start an existing background task run; return the future of its final state. `None`: `task` has no `gpu` tag.

        `task` has the tags of its run. `arguments` are the other arguments of Prefect's engine, with the task run.
        `around` has the tags of `prefect.tags` contexts around the call of `delay`.
        """
        if self._run is None:
            raise RuntimeError("the task runner must be started before tasks are submitted")
        return self._run.submit_background(task, arguments, around)

    def cancel_all(self) -> None:
        """End all GPU tasks that this runner started."""
        if self._run is not None:
            self._run.cancel()
