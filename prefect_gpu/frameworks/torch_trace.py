"""PyTorch: the peak of a stretch of time, from what its allocator records of itself.

Looks miss what is freed within a few milliseconds, and the allocator's own peak covers the whole
life of the process unless it is reset, which is the body's to do. The allocator's trace has every
event and resets nothing. It is the body's as well: while the body records, this keeps away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Events of each device that are kept; a block has three in its life. Reading 150 takes 0.5 ms, 20,000
#: take 8 (H200, PyTorch 2.11, 2026-11-21). A step with more has no peak from here.
MAX_EVENTS = 50_000

#: Bytes to which the allocator rounds a block (`kMinBlockSize`); a trace has what was asked for.
BLOCK_BYTES = 512

#: What in `torch._C` switches recording on and off; every public way goes through one of them.
_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


def peak_bytes(live_bytes: int, events: Iterable[Mapping[str, Any]]) -> int:
    """Give the most that was allocated on one device at a time.

    Counters fall when a block is given up, not when the device has finished with it, so
    "free_requested" counts. A block from the cache may be larger than what was asked for, by less
    than 1 MiB, which no event tells.

    Args:
        live_bytes: Allocated when the trace began.
        events: Of its trace, oldest first, with "action" and "size".
    """
    peak = now = live_bytes
    for event in events:
        action = event["action"]
        if action == "alloc":
            now += _block_bytes(event["size"])
            peak = max(peak, now)
        elif action == "free_requested":
            now -= _block_bytes(event["size"])
    return peak


def begin_trace(torch: Any) -> TorchTrace | None:
    """Have the allocator record from now on; CUDA must have started.

    Returns:
        `None`: somebody records already, or this allocator cannot.
    """
    trace = None
    try:
        if torch._C._cuda_isHistoryEnabled():
            return None
        trace = TorchTrace(torch)
        trace.begin()
    except Exception:  # noqa: BLE001 - an allocator that cannot be traced costs no body
        if trace is not None:
            trace.stop()
        return None
    return trace


class TorchTrace:
    """A trace that runs. The body's own recording, begun meanwhile, is never switched off.

    Args:
        torch: The module.
    """

    def __init__(self, torch: Any) -> None:
        self._core = torch._C
        self._cuda = torch.cuda
        #: By device.
        self._live_bytes = [
            int(self._cuda.memory_stats_as_nested_dict(i)["allocated_bytes"]["all"]["current"])
            for i in range(self._cuda.device_count())
        ]
        #: The body switched recording on or off itself.
        self._taken_over = False
        #: By name, what stands in `torch._C` for a switch, and the switch.
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Begin to record, without stacks, and to notice whether the body does so too."""
        # Takes 20 µs. Nothing is left of an older recording: the end of one empties it.
        self._cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS
        )
        for name in _SWITCHES:
            switch = getattr(self._core, name, None)
            if switch is not None:
                stand_in = self._stand_in(switch)
                self._replaced[name] = stand_in, switch
                setattr(self._core, name, stand_in)

    def end(self) -> int | None:
        """Stop, and give the most that was allocated meanwhile. Never raises.

        Returns:
            Summed over the devices: their peaks need not fall together, so it may be too large, not
            too small. `None`: there were too many events, the body recorded, or blocks are rounded
            otherwise (`roundup_power2_divisions`).
        """
        try:
            return self._peak_bytes() if self._is_ours() else None
        except Exception:  # noqa: BLE001 - as above
            return None
        finally:
            # After the reading: to stop empties the trace.
            self.stop()

    def stop(self) -> None:
        """Stop, and leave PyTorch as it was. Never raises."""
        with contextlib.suppress(Exception):
            for name, (stand_in, switch) in self._replaced.items():
                # Somebody else's may stand over it.
                if getattr(self._core, name) is stand_in:
                    setattr(self._core, name, switch)
            self._replaced.clear()
            if self._is_ours():
                self._cuda.memory._record_memory_history(enabled=None)

    def _is_ours(self) -> bool:
        return not self._taken_over and bool(self._core._cuda_isHistoryEnabled())

    def _stand_in(self, switch: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._taken_over = True
            return switch(*args, **kwargs)

        return noticed

    def _peak_bytes(self) -> int | None:
        snapshot = self._cuda.memory._snapshot()
        rounding = snapshot.get("allocator_settings", {}).get("roundup_power2_divisions", {})
        if any(int(divisions) > 1 for divisions in rounding.values()):
            return None
        traces = snapshot["device_traces"]
        if any(len(events) >= MAX_EVENTS for events in traces):
            return None
        # A device that was never used may have no trace.
        unused = len(self._live_bytes) - len(traces)
        return sum(map(peak_bytes, self._live_bytes, [*traces, *([()] * unused)]))


def _block_bytes(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
