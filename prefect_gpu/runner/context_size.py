"""The size of a framework's context, its device memory outside its allocator: known, or measured in a calibration.

A framework's cap is its budget less its context, so the context must be known before the first capped task. A
calibration is a child process on that task's device, within its reservation, run once for each framework, version, GPU
model and driver. `frameworks.context` keeps the sizes.
"""

from __future__ import annotations

import logging
import os
import queue as queues
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect_gpu import values
from prefect_gpu.broker.broker import Broker, Ticket
from prefect_gpu.frameworks import context as known_contexts
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import FrameworkPolicy, child_environment
from prefect_gpu.in_task import Allocation
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes import launch_spec
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.messages import Asked, Call, Prepare
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import format_bytes

logger = logging.getLogger(__name__)

#: Seconds for a calibration. TensorFlow's import takes up to 11 s, its first convolution some more (measured); twenty
#: times that is a hang.
CALIBRATION_S = 240.0

#: Seconds between two checks whether the task run was cancelled meanwhile.
CANCELLED_S = 0.2

#: Seconds to wait for a reading that shows the calibrated process.
READING_S = 5.0


@dataclass(frozen=True, slots=True)
class _Calibration:
    """Measures contexts within the reservation of a placed task; see `ContextMeter.contexts`."""

    policy: FrameworkPolicy
    broker: Broker
    ticket: Ticket
    cancelled: Callable[[], bool]

    def measure(self, framework: str, launcher: launch_spec.Launcher) -> int:
        """Return a framework's context: the memory of a child process on the device, less that of its allocator."""
        ticket = self.ticket
        alone = replace(
            self.policy,
            device_uuids=self.policy.device_uuids[:1],
            total_bytes=self.policy.total_bytes[:1],
            budget_bytes=self.policy.budget_bytes[:1],
            allocation="growth",
            allocator_options={},
            caching=True,
            frameworks=(framework,),
        )
        # Imported here: most processes measure no context.
        from prefect_gpu.child.main import calibrate

        allocation = Allocation(alone.budget_bytes[0], None, 1, alone.device_uuids, (framework,))
        messages: queues.SimpleQueue[Any] = queues.SimpleQueue()
        handle = launcher.start(
            launch_spec.LaunchSpec(
                task_name=f"calibrate-{framework}",
                environment=child_environment(alone, registry.adapters_for(alone), os.environ),
                prepare=Prepare(alone, allocation, 1.0),
                call=values.dumps(Call(calibrate, (framework,), {}), "call", "call"),
                argv=tuple(sys.argv),
                sys_path=import_paths(),
                placement=ticket.placement,
            ),
            messages.put,
        )
        shown: queues.SimpleQueue[tuple[float, int]] = queues.SimpleQueue()
        before = ticket.on_measured
        ticket.on_measured = lambda at_s, found: shown.put((at_s, found[0].total_bytes))
        try:
            reserved = self._hear(messages)
            return max(0, self._read(shown) - reserved)
        finally:
            handle.kill()
            try:
                ended = launch_spec.ChildExited, launch_spec.ChildRefused
                while not isinstance(messages.get(timeout=CALIBRATION_S), ended):
                    pass
            finally:
                # In this order: the task's listener must not count the calibration as the task's process.
                ticket.pid = None
                ticket.on_measured = before

    def _read(self, shown: queues.SimpleQueue[tuple[float, int]]) -> int:
        """Return the bytes in the first reading of the process; `TimeoutError` without one (WSL, containers)."""
        asked = time.monotonic()
        self.broker.refresh()
        try:
            while True:
                left_s = asked + READING_S - time.monotonic()
                at_s, process_bytes = shown.get(timeout=max(0.0, left_s))
                if at_s >= asked and process_bytes:
                    return process_bytes
        except queues.Empty:
            raise TimeoutError("the device shows no memory for the calibrated process") from None

    def _hear(self, messages: queues.SimpleQueue[Any]) -> int:
        """Return the bytes that the framework's allocator holds, as the child reports."""
        deadline = time.monotonic() + CALIBRATION_S
        while True:
            try:
                message = messages.get(timeout=CANCELLED_S)
            except queues.Empty:
                if self.cancelled() or time.monotonic() > deadline:
                    raise TimeoutError(f"it took longer than {CALIBRATION_S:g}s") from None
                continue
            match message:
                case launch_spec.ChildStarted(pid):
                    self.broker.attach(self.ticket, pid)
                case Asked(_, arguments):
                    # No answer: the child holds its device until it is killed.
                    return int(arguments["reserved_bytes"])
                case launch_spec.ValueArrived(data):
                    raise values.loads(data, "exception")
                case launch_spec.ChildRefused(error):
                    messages.put(message)
                    raise error
                case launch_spec.ChildExited(code, stderr_tail):
                    messages.put(message)
                    raise RuntimeError(f"it ended with {code}: {stderr_tail[-500:]}")


class ContextMeter:
    """Looks up context sizes, or measures them in child processes of a launcher. Safe to use from several threads."""

    def __init__(self, store: known_contexts.ContextStore, launcher: launch_spec.Launcher) -> None:
        self._store = store
        self._launcher = launcher
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        #: Assumed sizes by key, where a calibration took too long: each further one would take as long.
        self._assumed: dict[str, int] = {}

    def contexts(
        self,
        frameworks: Sequence[str],
        learned_bytes: int | None,
        policy: FrameworkPolicy,
        broker: Broker,
        ticket: Ticket,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, int]:
        """Return each framework's context in bytes on the first device of a ticket, for a task's caps to leave free.

        Only the task's own `frameworks` are measured (empty: not known); others have the known or a documented size.
        `learned_bytes` is the context in earlier processes of the task; `None`: not measured. `policy` is the task's,
        without contexts. Once `cancelled` returns true, no more is measured, and the documented sizes are returned.
        """
        assert ticket.placement is not None
        device = ticket.placement.devices[0]
        known = self.known(device)
        if policy.allocation == "growth":
            # No cap depends on the context: no calibration.
            return known
        if learned_bytes:
            # More accurate than a calibration.
            names = frameworks or tuple(known)
            return {**known, **{n: int(learned_bytes * policy.share(n)) for n in names}}
        missing = [
            name
            for name in frameworks
            if self._store.get(known_contexts.context_key(name, device)) is None
        ]
        calibration = _Calibration(policy, broker, ticket, cancelled)
        contexts = {
            **known,
            **{name: self._measure(name, device, calibration) for name in missing},
        }
        if len(ticket.placement.devices) > 1:
            # Only the first run shows whether the task uses NCCL.
            least = min(policy.budget_bytes)
            return {
                name: known_contexts.with_collectives(size, least)
                for name, size in contexts.items()
            }
        return contexts

    def known(self, device: Device) -> dict[str, int]:
        """Return each framework's context in bytes on a device: the known size, or else a documented one."""
        found = {
            n: self._store.get(known_contexts.context_key(n, device)) for n in registry.ADAPTERS
        }
        documented = known_contexts.FALLBACK_CONTEXT_BYTES
        return {n: documented[n] if size is None else size for n, size in found.items()}

    def _measure(self, framework: str, device: Device, calibration: _Calibration) -> int:
        """Return a framework's context in bytes from a calibration, or else a documented size."""
        key = known_contexts.context_key(framework, device)
        documented = known_contexts.FALLBACK_CONTEXT_BYTES[framework]
        cancelled = calibration.cancelled
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        while not lock.acquire(timeout=CANCELLED_S):
            if cancelled():
                return documented
        try:
            # Another task may have measured it meanwhile.
            size = self._store.get(key)
            if size is None:
                size = self._assumed.get(key)
            if size is not None:
                return size
            if cancelled():
                return documented
            try:
                size = calibration.measure(framework, self._launcher)
            except Exception as error:  # noqa: BLE001 - a figure is assumed instead
                if not cancelled():
                    if isinstance(error, TimeoutError):
                        self._assumed[key] = documented
                    where, assumed = f"{framework} on {device.name}", format_bytes(documented)
                    text = "the context of %s could not be measured (%s); %s is assumed"
                    logger.warning(text, where, error, assumed)
                return documented
            self._store.put(key, size)
            logger.info("context of %s on %s: %s", framework, device.name, format_bytes(size))
            return size
        finally:
            lock.release()


def context_meter(launcher: launch_spec.Launcher | None = None) -> ContextMeter:
    """Return the meter of this process, or a new one for a cluster's launcher; `None`: this machine."""
    if launcher is None:
        return PROCESS_RESOURCES.get(
            ContextMeter, lambda: ContextMeter(known_contexts.ContextStore(), process_launcher())
        )
    return ContextMeter(known_contexts.ContextStore(), launcher)
