"""Reads a child's device memory from frameworks and the driver, or from `prefect_gpu.testing` (simulated devices).

`recorder` calls the readings and keeps the results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prefect_gpu.devices.cuda_driver import PrimaryContexts, free_bytes, unbound_by_captures
from prefect_gpu.devices.own import OwnMemory, OwnUse
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters, EndTrace, FrameworkAdapter, FrameworkPolicy
from prefect_gpu.processes import mps
from prefect_gpu.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Readings:
    """Reads the device memory of this child. The methods do not raise, since a measurement must not fail a body."""

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
        #: The task keeps unused memory (`gpu:allocation=all`).
        self._keeps_unused = policy.allocation == "all"
        on_gpu = policy.device_kind == "nvml"
        # Tests pass `own` and `contexts` in place of the machine's driver.
        self._own = (own or OwnMemory(policy.device_uuids)) if on_gpu else None
        self._contexts = contexts or PrimaryContexts(len(policy.device_uuids) if on_gpu else 0)
        #: Bytes of the frameworks at the last reading.
        self._held_bytes = 0
        self._reported = False

    def sample(self) -> tuple[int, int] | None:
        """Return the bytes allocated now and the allocation retries so far, read as cheaply as possible."""
        if self._simulated:
            counters = self.counters()
            return None if counters is None else (counters.live_bytes, counters.alloc_retries or 0)
        found = self._ask(hooks.sample)
        if found is not None:
            self._held_bytes = max(self._held_bytes, found[0])
        return found

    def counters(self) -> Counters | None:
        """Return the frameworks' counters; `None`: no framework has used a device, or reading failed."""
        if self._simulated:
            found: Counters | None = _ask_simulated("tally")
            return found
        counters = self._ask(hooks.collect_counters)
        if counters is not None:
            self._held_bytes = counters.reserved_bytes or counters.live_bytes
        return counters

    def begin_trace(self) -> EndTrace | None:
        """Begin to trace allocations and return the function that ends the trace; `None`: not possible now."""
        if self._simulated:
            trace: EndTrace | None = _ask_simulated("begin_trace")
            return trace
        return self._ask(hooks.begin_trace)

    def release_unused(self) -> None:
        """Return the frameworks' unused device memory to the driver if that is safe, unless `gpu:allocation=all`."""
        # With that tag the task keeps its memory: another program could take it before the task needs it.
        if self._own is None or self._keeps_unused or self._contexts.lost:
            return
        with unbound_by_captures() as unbound:
            for adapter in self._adapters if unbound else ():
                # A suspension moves memory that a framework refuses to release.
                with contextlib.suppress(Exception):
                    adapter.release_unused()

    def memory_summary(self, framework: str) -> str:
        """Return a framework's text summary of its memory; empty: none."""
        named = self._named(framework)
        return self._ask(lambda _: named[0].memory_summary() if named else "") or ""

    def write_snapshot(self, framework: str) -> str:
        """Write a framework's memory snapshot to the policy's path and return the path; empty: no file was written."""
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
        """Return the driver's figures for this process on each of its devices; empty without a driver."""
        return () if self._own is None else self._own.read()

    def process_bytes(self) -> int | None:
        """Return the device memory of this process in bytes, from the driver, over all devices; `None`: unknown."""
        known = [use.process_bytes for use in self.own() if use.process_bytes is not None]
        return sum(known) if known else None

    def context_bytes(self) -> int | None:
        """Return the device memory outside the allocators; `None`: not known. Asks the driver, which hangs after some faults.

        Only the driver of a process with a limit of memory (a client of MPS) tells how much the process holds.
        """
        limit = mps.limit_bytes(os.environ)
        counters = None if limit is None else self.counters()
        if limit is None or counters is None or counters.reserved_bytes is None:
            return None
        free = free_bytes()
        return None if free is None else max(0, limit - free - counters.reserved_bytes)

    def _ask(self, question: Callable[[Sequence[FrameworkAdapter]], T | None]) -> T | None:
        if self._contexts.lost:
            return None
        try:
            found = question(self._adapters)
            # Checked afterwards: counters are wrong once a context was destroyed.
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
            # Once: readings are taken two hundred times a second.
            if not self._reported:
                self._reported = True
                sys.stderr.write(f"prefect_gpu: counters cannot be read: {error!r}\n")
            return None


def _ask_simulated(name: str) -> Any:
    """Call a function of `prefect_gpu.testing`; `None`: the body has not (completely) imported that module."""
    function = getattr(sys.modules.get("prefect_gpu.testing"), name, None)
    return None if function is None else function()
