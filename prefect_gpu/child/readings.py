"""Memory readings of a child: where they come from, and the thread that takes them.

On GPUs the frameworks and the driver are asked, on simulated devices the tally of
`prefect_gpu.testing`. Readings are collected by `recorder`, which this module feeds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prefect_gpu.child.channel import Channel
from prefect_gpu.child.recorder import Recorder
from prefect_gpu.devices.own import OwnMemory, OwnUse
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import (
    Counters,
    FrameworkAdapter,
    FrameworkPolicy,
    PeakTrace,
)
from prefect_gpu.measurements import Mark, StepFacts
from prefect_gpu.processes.messages import CountersRead

#: Seconds between two samples, on average. At 5 ms a ResNet-50 on an H200 ran as fast as without.
SAMPLE_INTERVAL_S = 0.005

#: Sampling may take one part in this many of the time, by the processor's clock: it holds the
#: interpreter's lock, and some frameworks take long to answer.
SAMPLE_SHARE = 100

#: How much of the interval is varied, so that samples do not fall in step with the body's loop.
JITTER = 0.6

#: Steps of this length fill the interval evenly and have no period.
_GOLDEN = 0.6180339887498949

#: Seconds that the thread may take to end. A call into a framework or the driver that does not return
#: holds it up, and it is left behind.
END_S = 30.0

T = TypeVar("T")


class Readings:
    """The sources of one child. They never raise: a measurement must not fail a body.

    Args:
        policy: Contains the devices and their kind.
        adapters: Frameworks to ask.
        own: Asks the driver; `None`: the machine's driver.
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
        self._own = None
        if policy.device_kind == "nvml":
            self._own = own or OwnMemory(policy.device_uuids)
        self._reported = False

    def sample(self) -> tuple[int, int] | None:
        """Read bytes allocated now and allocation retries so far, as cheaply as possible."""
        if self._simulated:
            counters = self.counters()
            return None if counters is None else (counters.live_bytes, counters.alloc_retries or 0)
        return self._ask(hooks.sample)

    def counters(self) -> Counters | None:
        """Read all counters; `None`: no framework has touched a device, or they cannot be read."""
        if self._simulated:
            tally = getattr(_testing(), "tally", None)
            found: Counters | None = None if tally is None else tally()
            return found
        return self._ask(hooks.collect_counters)

    def begin_trace(self) -> PeakTrace | None:
        """Begin to trace what is allocated; `None`: no framework can be traced now."""
        return None if self._simulated else self._ask(hooks.begin_trace)

    def own(self) -> tuple[OwnUse, ...]:
        """Read what the driver reports of this process on its devices; empty without a driver."""
        return () if self._own is None else self._own.read()

    def process_bytes(self) -> int | None:
        """Read what the driver reports of this process on all its devices; `None`: unknown."""
        known = [use.process_bytes for use in self.own() if use.process_bytes is not None]
        return sum(known) if known else None

    def refused_uuid(self) -> str:
        """Return the simulated device that refused an allocation last; empty: none did."""
        refused_uuid = getattr(_testing(), "refused_uuid", None)
        return "" if refused_uuid is None else str(refused_uuid())

    def _ask(self, question: Callable[[Sequence[FrameworkAdapter]], T | None]) -> T | None:
        try:
            return question(self._adapters)
        except Exception as error:
            # Once: it may be asked two hundred times a second.
            if not self._reported:
                self._reported = True
                sys.stderr.write(f"prefect_gpu: counters cannot be read: {error!r}\n")
            return None


def _testing() -> Any:
    # Only a body that uses it has imported it, and it may be half imported.
    return sys.modules.get("prefect_gpu.testing")


class LiveSampler:
    """Takes samples every few milliseconds, from a thread of its own, and sends counters to the parent.

    Args:
        channel: To the parent.
        recorder: Takes the samples and keeps what they show.
        interval_s: Seconds between two messages.
    """

    def __init__(self, channel: Channel, recorder: Recorder, interval_s: float) -> None:
        self._channel = channel
        self._recorder = recorder
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefect-gpu-sampler", daemon=True)
        #: The last counters that could be read.
        self._last: Counters | None = None
        #: Counters and number of steps of the last message.
        self._sent: tuple[Counters | None, int] = None, 0

    def start(self) -> None:
        """Start the thread; where the system starts none, the body runs without samples."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _report_end(error)

    def stop(self) -> None:
        """End the thread, if there is one, and whatever is traced."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        self._recorder.stop()

    def last(
        self,
    ) -> tuple[Counters | None, tuple[str, ...], StepFacts | None, tuple[Mark, ...]]:
        """Return the counters as they are, the frameworks used, and what was not sent before."""
        self._last = self._recorder.counters() or self._last
        steps, marks = self._recorder.take()
        return self._last, hooks.frameworks_in_use(), steps, marks

    def _run(self) -> None:
        try:
            self._sample()
        except OSError:
            # The parent is gone, or the body closed the channel.
            return
        except Exception as error:
            # A measurement must never cost a result.
            _report_end(error)

    def _sample(self) -> None:
        due_s = time.monotonic() + self._interval_s
        pause_s, turn = SAMPLE_INTERVAL_S, 0.0
        while not self._stopped.wait(pause_s * (1 + JITTER * (turn - 0.5))):
            turn = (turn + _GOLDEN) % 1
            began_s = time.thread_time()
            self._recorder.sample()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._interval_s
                self._send()
            pause_s = max(SAMPLE_INTERVAL_S, SAMPLE_SHARE * (time.thread_time() - began_s))

    def _send(self) -> None:
        counters = self._recorder.counters()
        if counters is None:
            # Marks are sent at the end: without counters there is no message.
            return
        self._last = counters
        steps, marks = self._recorder.take()
        news = counters, 0 if steps is None else steps.count
        if marks or news != self._sent:
            self._sent = news
            self._channel.send(CountersRead(counters, hooks.frameworks_in_use(), steps, marks))


def _report_end(error: Exception) -> None:
    sys.stderr.write(f"prefect_gpu: no longer looks at memory: {error!r}\n")
