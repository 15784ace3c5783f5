"""What a child can be asked about its memory, whatever its devices are.

On GPUs the frameworks and the driver answer, on simulated devices `prefect_gpu.testing`'s tally. It
keeps nothing: that is `recorder`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from prefect_gpu.devices.own import OwnMemory, OwnUse
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import (
    Counters,
    FrameworkAdapter,
    FrameworkPolicy,
    PeakTrace,
)


class Readings:
    """The sources of one child. They never raise: a body must not fail for what is only measured.

    Args:
        policy: Says which devices.
        adapters: Frameworks to ask.
        own: Asks the driver; `None`: the machine's.
    """

    def __init__(
        self,
        policy: FrameworkPolicy,
        adapters: Sequence[FrameworkAdapter],
        own: OwnMemory | None = None,
    ) -> None:
        #: In the task's order.
        self.device_uuids = policy.device_uuids
        self._adapters = adapters
        self._simulated = policy.device_kind == "simulated"
        self._own = (
            (own or OwnMemory(policy.device_uuids)) if policy.device_kind == "nvml" else None
        )
        self._said = False

    def sample(self) -> tuple[int, int] | None:
        """Read bytes allocated now and allocation retries so far, as cheaply as it goes."""
        if self._simulated:
            counters = self.counters()
            return None if counters is None else (counters.live_bytes, counters.alloc_retries or 0)
        try:
            return hooks.sample(self._adapters)
        except Exception as error:
            self._say(error)
            return None

    def counters(self) -> Counters | None:
        """Read all counters; `None`: no framework has touched a device, or it cannot be read."""
        if self._simulated:
            tally = getattr(_testing(), "tally", None)
            found: Counters | None = None if tally is None else tally()
            return found
        try:
            return hooks.collect_counters(self._adapters)
        except Exception as error:
            self._say(error)
            return None

    def begin_trace(self) -> PeakTrace | None:
        """Begin to trace what is allocated; `None`: no framework can be traced now."""
        if self._simulated:
            return None
        try:
            return hooks.begin_trace(self._adapters)
        except Exception as error:
            self._say(error)
            return None

    def own(self) -> tuple[OwnUse, ...]:
        """Ask the driver about this process on its devices; none where there is no driver."""
        return () if self._own is None else self._own.read()

    def process_bytes(self) -> int | None:
        """Read what the driver shows for this process on all its devices; `None`: unknown."""
        known = [use.process_bytes for use in self.own() if use.process_bytes is not None]
        return sum(known) if known else None

    def refused_uuid(self) -> str:
        """Name the simulated device that refused last; empty: none did."""
        refused_uuid = getattr(_testing(), "refused_uuid", None)
        return "" if refused_uuid is None else str(refused_uuid())

    def _say(self, error: Exception) -> None:
        # Once: it may be asked two hundred times a second.
        if not self._said:
            self._said = True
            sys.stderr.write(f"prefect_gpu: counters cannot be read: {error!r}\n")


def _testing() -> Any:
    # Only a body that uses it has imported it; a child need not. It may be half imported.
    return sys.modules.get("prefect_gpu.testing")
