"""A child's memory, made up: what a `Recorder` asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prefect_gpu.frameworks.adapter import Counters


class FakeTrace:
    """A trace of a `FakeSource`: the most that it was set to since."""

    def __init__(self, source: FakeSource) -> None:
        self._source = source
        self.peak: int | None = source.live

    def __call__(self) -> int | None:
        self._source.on_trace()
        self._source.traces.remove(self)
        return self.peak


class FakeSource:
    """An allocator of which a test sets the numbers. Peaks follow what it was set to."""

    def __init__(self) -> None:
        #: `False`: no framework has touched a device.
        self.touched = True
        self.live = 0
        self.reserved: int | None = 0
        self.peak_live = 0
        self.peak_reserved: int | None = 0
        self.retries = 0
        self.process: int | None = None
        #: Whether it can be traced, the traces that run, and how many were begun.
        self.traceable = False
        self.traces: list[FakeTrace] = []
        self.traced = 0
        #: How often each was asked.
        self.samples = self.readings = self.questions = self.releases = 0
        #: Called at each reading: it may take time.
        self.on_counters: Callable[[], None] = lambda: None
        self.on_sample: Callable[[], None] = lambda: None
        self.on_trace: Callable[[], None] = lambda: None
        #: A thread that reads sees all of a change or nothing.
        self._lock = threading.Lock()

    def hold(self, live: int, reserved: int | None = None) -> None:
        """Allocate or free until so much is allocated, and held."""
        with self._lock:
            self.live = live
            self.peak_live = max(self.peak_live, live)
            for trace in self.traces:
                trace.peak = None if trace.peak is None else max(trace.peak, live)
            held = max(self.reserved or 0, live) if reserved is None else reserved
            self.reserved = held
            self.peak_reserved = max(self.peak_reserved or 0, held)

    def spike(self, live: int) -> None:
        """Allocate so much and free it at once, so that only the peak shows it."""
        before = self.live
        self.hold(live)
        self.hold(before)

    def sample(self) -> tuple[int, int] | None:
        self.samples += 1
        self.on_sample()
        return (self.live, self.retries) if self.touched else None

    def counters(self) -> Counters | None:
        self.readings += 1
        self.on_counters()
        if not self.touched:
            return None
        with self._lock:
            return Counters(
                self.live, self.reserved, self.peak_live, self.peak_reserved, self.retries
            )

    def release_unused(self) -> None:
        self.releases += 1

    def begin_trace(self) -> FakeTrace | None:
        self.on_trace()
        if not self.traceable:
            return None
        self.traced += 1
        self.traces.append(FakeTrace(self))
        return self.traces[-1]

    def process_bytes(self) -> int | None:
        self.questions += 1
        return self.process
