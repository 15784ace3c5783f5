"""The thread of a child that looks at what is allocated every few milliseconds, and tells the parent.

It keeps nothing itself (`recorder`), and stops before the value is pickled.
"""

from __future__ import annotations

import sys
import threading
import time

from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.frameworks import hooks
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes.channel import Channel
from prefect_gpu.processes.messages import CountersRead
from prefect_gpu.processes.recorder import Recorder
from prefect_gpu.reports.model import Mark, StepFacts

#: Seconds between two looks, on average. At 5 ms a ResNet-50 on an H200 ran as fast as without.
SAMPLE_INTERVAL_S = 0.005

#: The looks may take one part in this many of the time, by the processor's clock: they hold the
#: interpreter, and some frameworks take long to answer.
SAMPLE_SHARE = 100

#: How much of the interval is jitter, so that the looks do not run in step with the body's loop.
JITTER = 0.6

#: Steps of this length fill the interval evenly and meet no period.
_GOLDEN = 0.6180339887498949


class LiveSampler:
    """Feeds a recorder, and sends what it knows now and then, from a thread of its own.

    Args:
        channel: To the parent.
        recorder: Looks, and keeps.
        interval_s: Seconds between two messages.
    """

    def __init__(self, channel: Channel, recorder: Recorder, interval_s: float) -> None:
        self._channel = channel
        self._recorder = recorder
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prefect-gpu-sampler", daemon=True)
        self._last: Counters | None = None
        self._told: tuple[Counters | None, int] = None, 0

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; the thread is gone, or was never there, and nothing is traced."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(DEADLOCK_S)
        self._recorder.stop()

    def last(
        self,
    ) -> tuple[Counters | None, tuple[str, ...], StepFacts | None, tuple[Mark, ...]]:
        """Give the counters as they stand, the frameworks used, and what was not sent before."""
        self._last = self._recorder.counters() or self._last
        steps, marks = self._recorder.take()
        return self._last, hooks.frameworks_in_use(), steps, marks

    def _watch(self) -> None:
        try:
            self._look()
        except OSError:
            # The parent is gone, or the body closed the channel.
            return
        except Exception as error:
            # What is only measured must never cost a result.
            sys.stderr.write(f"prefect_gpu: no longer looks at memory: {error!r}\n")

    def _look(self) -> None:
        due_s = time.monotonic() + self._interval_s
        pause_s, turn = SAMPLE_INTERVAL_S, 0.0
        while not self._stopped.wait(pause_s * (1 + JITTER * (turn - 0.5))):
            turn = (turn + _GOLDEN) % 1
            began_s = time.thread_time()
            self._recorder.sample()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._interval_s
                self._tell()
            pause_s = max(SAMPLE_INTERVAL_S, SAMPLE_SHARE * (time.thread_time() - began_s))

    def _tell(self) -> None:
        counters = self._recorder.counters()
        if counters is None:
            # Marks wait for the end: without counters there is no message to send.
            return
        self._last = counters
        steps, marks = self._recorder.take()
        news = counters, 0 if steps is None else steps.count
        if marks or news != self._told:
            self._told = news
            self._channel.send(CountersRead(counters, hooks.frameworks_in_use(), steps, marks))
