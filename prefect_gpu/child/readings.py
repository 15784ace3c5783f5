"""Reads a child's memory: from frameworks and the driver on GPUs, from `prefect_gpu.testing` on simulated devices.

`recorder` collects the readings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prefect_gpu.devices.cuda_driver import PrimaryContexts, unbound_by_captures
from prefect_gpu.devices.own import OwnMemory, OwnUse
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters, EndTrace, FrameworkAdapter, FrameworkPolicy
from prefect_gpu.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Readings:
    """Readings of one child's memory. Its methods do not raise: a measurement must not fail a body.

    Tests pass `own` and `contexts` in place of the machine's driver.
    """

    def __init__(
        self,
        policy: FrameworkPolicy,
        adapters: Sequence[FrameworkAdapter],
        own: OwnMemory | None = None,
        contexts: PrimaryContexts | None = None,
    ) -> None:
        self.device_uuids = policy.device_uuids
        self._adapters = adapters
        self._snapshot_path = policy.snapshot_path
        self._simulated = policy.device_kind == "simulated"
        #: Whether the task keeps unused memory on purpose.
        self._keeps_unused = policy.allocation == "all"
        on_gpu = policy.device_kind == "nvml"
        self._own = (own or OwnMemory(policy.device_uuids)) if on_gpu else None
        self._contexts = contexts or PrimaryContexts(len(policy.device_uuids) if on_gpu else 0)
        #: Memory of the frameworks at the last reading.
        self._held_bytes = 0
        self._reported = False

    def sample(self) -> tuple[int, int] | None:
        """Read bytes allocated now and allocation retries so far, as cheaply as possible."""
        if self._simulated:
            counters = self.counters()
            return None if counters is None else (counters.live_bytes, counters.alloc_retries or 0)
        found = self._ask(hooks.sample)
        if found is not None:
            self._held_bytes = max(self._held_bytes, found[0])
        return found

    def counters(self) -> Counters | None:
        """Read all counters; `None`: no framework has touched a device, or they cannot be read."""
        if self._simulated:
            found: Counters | None = _ask_simulated("tally")
            return found
        counters = self._ask(hooks.collect_counters)
        if counters is not None:
            self._held_bytes = counters.reserved_bytes or counters.live_bytes
        return counters

    def begin_trace(self) -> EndTrace | None:
        """Begin to trace allocations; `None`: no framework can be traced now."""
        if self._simulated:
            trace: EndTrace | None = _ask_simulated("begin_trace")
            return trace
        return self._ask(hooks.begin_trace)

    def release_unused(self) -> None:
        """Return unused device memory of the frameworks to the driver, where that is safe.

        A task with `gpu:allocation=all` keeps it: another program could take it before the task needs it.
        """
        if self._own is None or self._keeps_unused or self._contexts.lost:
            return
        with unbound_by_captures() as unbound:
            for adapter in self._adapters if unbound else ():
                # Memory that a framework refuses to release is moved.
                with contextlib.suppress(Exception):
                    adapter.release_unused()

    def memory_summary(self, framework: str) -> str:
        """Return a framework's own summary of its memory; empty: no summary."""
        named = self._named(framework)
        return self._ask(lambda _: named[0].memory_summary() if named else "") or ""

    def write_snapshot(self, framework: str) -> str:
        """Write a framework's snapshot to the policy's path; return the path; empty: no file."""
        path, named = self._snapshot_path, self._named(framework)
        if not path or not named or self._contexts.lost:
            return ""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return path if named[0].write_snapshot(path) else ""
        except Exception as error:
            logger.warning("no memory snapshot is in %s: %s", path, error)
            return ""

    def _named(self, framework: str) -> list[FrameworkAdapter]:
        return [adapter for adapter in self._adapters if adapter.name == framework]

    def own(self) -> tuple[OwnUse, ...]:
        """Read the driver's figures for this process on its devices; empty without a driver."""
        return () if self._own is None else self._own.read()

    def process_bytes(self) -> int | None:
        """Read the driver's sum for this process over all its devices; `None`: unknown."""
        known = [use.process_bytes for use in self.own() if use.process_bytes is not None]
        return sum(known) if known else None

    def _ask(self, question: Callable[[Sequence[FrameworkAdapter]], T | None]) -> T | None:
        if self._contexts.lost:
            return None
        try:
            found = question(self._adapters)
            # After the question: counters from before the destruction of a context are right, later ones are not.
            if found is None or not self._contexts.read():
                return found
            logger.warning(
                "the body destroyed its CUDA context while %s held %s in it (cudaDeviceReset, "
                "numba.cuda.close() and Device.reset() do that): this memory is lost, and the report has the "
                "framework's earlier figures; to free memory, use the framework's own calls, such as "
                "prefect_gpu.release_cached()",
                " and ".join(hooks.frameworks_in_use()),
                format_bytes(self._held_bytes),
            )
            return None
        except Exception as error:
            # Only once: readings are taken two hundred times a second.
            if not self._reported:
                self._reported = True
                sys.stderr.write(f"prefect_gpu: counters cannot be read: {error!r}\n")
            return None


def _ask_simulated(name: str) -> Any:
    """Call a function of `prefect_gpu.testing`; return `None` if the body has not imported the module completely."""
    function = getattr(sys.modules.get("prefect_gpu.testing"), name, None)
    return None if function is None else function()
