"""How large a framework's context is on a device: known, or measured in a calibration child.

A framework's cap is its budget less its context, so the context must be known before the first
capped task. It is measured on the very device, and within the very reservation, of the task that
needs it, once for each framework, version, GPU model and driver; `frameworks.context` keeps it.
"""

from __future__ import annotations

import logging
import os
import queue as queues
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from prefect_gpu.broker import Broker, Ticket
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import FrameworkPolicy
from prefect_gpu.frameworks.context import ContextKey, ContextStore, fallback_context_bytes
from prefect_gpu.frameworks.environment import child_environment
from prefect_gpu.inside import Allocation
from prefect_gpu.processes import values
from prefect_gpu.processes.interpreter import import_paths
from prefect_gpu.processes.launcher import process_launcher
from prefect_gpu.processes.messages import BodyEnded, Prepare
from prefect_gpu.processes.spec import (
    ChildExited,
    ChildRefused,
    ChildStarted,
    Launcher,
    LaunchSpec,
    ValueArrived,
)
from prefect_gpu.scheduling.model import Device
from prefect_gpu.units import format_bytes

logger = logging.getLogger(__name__)

#: Seconds that a calibration may take. Importing TensorFlow takes up to 11 s, its first
#: convolution some more (measured); twenty times that is a hang.
CALIBRATION_S = 240.0

#: Seconds to wait for a reading that shows the calibrated process.
READING_S = 5.0


class ContextMeter:
    """Knows contexts, or has them measured. Safe to use from several threads.

    Args:
        store: Keeps what was measured.
        launcher: Starts calibration children.
    """

    def __init__(self, store: ContextStore, launcher: Launcher) -> None:
        self._store = store
        self._launcher = launcher
        self._lock = threading.Lock()
        self._locks: dict[ContextKey, threading.Lock] = {}

    def contexts_of_task(
        self,
        frameworks: Sequence[str],
        learned_bytes: int | None,
        device: Device,
        policy: FrameworkPolicy,
        broker: Broker,
        ticket: Ticket,
    ) -> dict[str, int]:
        """Give the contexts that a task's caps leave room for, from the best source there is.

        Args:
            frameworks: That the task uses; empty: nobody knows.
            learned_bytes: What its own processes were seen to have on such a device; `None`: none were.
            device: Where; the first of the task's devices.
            policy: Of the task, but for its contexts.
            broker: Reads the device.
            ticket: Of the task, placed.

        Returns:
            Bytes by framework; none where there are no contexts.
        """
        if broker.kind != "nvml":
            return {}
        if policy.allocation == "growth":
            # No cap depends on it, so it is not worth a calibration.
            return self.known(device)
        if learned_bytes:
            # Closer than any calibration.
            known = self.known(device)
            names = frameworks or tuple(known)
            return {**known, **{n: int(learned_bytes * policy.share(n)) for n in names}}
        if not self.is_measured(frameworks, device):
            # What is measured runs within this reservation, where one context has room.
            broker.lending.leave(ticket)
        return self.contexts(frameworks, device, policy, broker, ticket)

    def contexts(
        self,
        frameworks: Iterable[str],
        device: Device,
        policy: FrameworkPolicy,
        broker: Broker,
        ticket: Ticket,
    ) -> dict[str, int]:
        """Give the context of each framework on a device, in bytes.

        Args:
            frameworks: Names as in `gpu:framework=`. Others that the task turns out to import are
                given the figure that is known for them, or else a documented one.
            device: Where; the first of the task's devices.
            policy: Of the task that needs it.
            broker: Reads the device.
            ticket: Of the same task: a calibration runs within its reservation.
        """
        found: dict[str, int] = {}
        for name in frameworks:
            found[name] = self._context(name, device, policy, broker, ticket)
        return {**self.known(device), **found}

    def is_measured(self, frameworks: Iterable[str], device: Device) -> bool:
        """Tell whether `contexts` would measure nothing."""
        return all(self._store.get(_key(name, device)) is not None for name in frameworks)

    def known(self, device: Device) -> dict[str, int]:
        """Give the context of every framework as it is known, or else a documented figure."""
        contexts: dict[str, int] = {}
        for name in registry.ADAPTERS:
            measured = self._store.get(_key(name, device))
            contexts[name] = fallback_context_bytes(name) if measured is None else measured
        return contexts

    def _context(
        self,
        framework: str,
        device: Device,
        policy: FrameworkPolicy,
        broker: Broker,
        ticket: Ticket,
    ) -> int:
        key = _key(framework, device)
        known = self._store.get(key)
        if known is not None:
            return known
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            known = self._store.get(key)
            if known is not None:
                return known
            try:
                size = self._calibrate(framework, policy, broker, ticket)
            except Exception as error:  # noqa: BLE001 - whatever it was, a figure is assumed
                size = fallback_context_bytes(framework)
                logger.warning(
                    "the context of %s on %s could not be measured (%s); %s is assumed",
                    framework,
                    device.name,
                    error,
                    format_bytes(size),
                )
                return size
            self._store.put(key, size)
            logger.info("context of %s on %s: %s", framework, device.name, format_bytes(size))
            return size

    def _calibrate(
        self, framework: str, policy: FrameworkPolicy, broker: Broker, ticket: Ticket
    ) -> int:
        """Run a calibration child and read the device while it lives."""
        alone = replace(
            policy,
            device_uuids=policy.device_uuids[:1],
            total_bytes=policy.total_bytes[:1],
            budget_bytes=policy.budget_bytes[:1],
            allocation="growth",
            allocator_options={},
            caching=True,
            frameworks=(framework,),
        )
        allocation = Allocation(alone.budget_bytes[0], None, 1, alone.device_uuids, (framework,))
        messages: queues.SimpleQueue[Any] = queues.SimpleQueue()
        handle = self._launcher.start(
            LaunchSpec(
                task_name=f"calibrate-{framework}",
                environment=child_environment(alone, registry.adapters_for(alone), os.environ),
                prepare=Prepare(alone, allocation, 1.0, work="calibrate", framework=framework),
                argv=tuple(sys.argv),
                sys_path=import_paths(),
            ),
            messages.put,
        )
        shown: queues.SimpleQueue[tuple[float, int]] = queues.SimpleQueue()
        before, ticket.on_measured = ticket.on_measured, lambda at, sizes: shown.put((at, sizes[0]))
        try:
            reserved = self._hear(messages, broker, ticket)
            return max(0, self._read(shown, broker) - reserved)
        finally:
            ticket.on_measured = before
            handle.kill()
            try:
                self._wait_for_exit(messages)
            finally:
                ticket.pid = None

    @staticmethod
    def _read(shown: queues.SimpleQueue[tuple[float, int]], broker: Broker) -> int:
        """Wait for a reading that shows the process.

        Readings come all the time; where the device tells nothing of processes (WSL, containers),
        none of them ever does.
        """
        asked = time.monotonic()
        broker.refresh()
        try:
            while True:
                left_s = asked + READING_S - time.monotonic()
                at_s, process_bytes = shown.get(timeout=max(0.0, left_s))
                if at_s >= asked and process_bytes:
                    return process_bytes
        except queues.Empty:
            raise TimeoutError("the device shows no memory for the calibrated process") from None

    def _hear(self, messages: queues.SimpleQueue[Any], broker: Broker, ticket: Ticket) -> int:
        deadline = time.monotonic() + CALIBRATION_S
        ended: BodyEnded | None = None
        while True:
            try:
                message = messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queues.Empty:
                raise TimeoutError(f"it took longer than {CALIBRATION_S:g}s") from None
            if isinstance(message, ChildStarted):
                broker.attach(ticket, message.pid)
            elif isinstance(message, BodyEnded):
                ended = message
            elif isinstance(message, ValueArrived):
                value = values.loads(message.data, "return value")
                if ended is None or ended.raised:
                    raise value
                return int(value)
            elif isinstance(message, ChildRefused):
                messages.put(message)
                raise message.error
            elif isinstance(message, ChildExited):
                messages.put(message)
                raise RuntimeError(f"it ended with {message.code}: {message.stderr_tail[-500:]}")

    @staticmethod
    def _wait_for_exit(messages: queues.SimpleQueue[Any]) -> None:
        while not isinstance(messages.get(timeout=CALIBRATION_S), (ChildExited, ChildRefused)):
            pass


def _key(framework: str, device: Device) -> ContextKey:
    return ContextKey(framework, registry.framework_version(framework), device.name, device.driver)


_meter_lock = threading.Lock()
_meter: ContextMeter | None = None


def context_meter() -> ContextMeter:
    """Give the one meter of this process."""
    global _meter
    with _meter_lock:
        if _meter is None:
            _meter = ContextMeter(ContextStore(), process_launcher())
        return _meter
