"""The thread that reads the devices, for all runners that share them.

This module decides when to read, handles readings that fail or hang, and averages the utilisation of devices.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from prefect_gpu.clock import Clock, RealClock
from prefect_gpu.devices.host import read_host_available_bytes
from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.errors import DeviceError
from prefect_gpu.process_resources import start_thread
from prefect_gpu.scheduling.model import DeviceKey, DeviceSnapshot, Reading

#: Seconds of the mean utilisation. NVML's figure covers 1/6 to 1 s; a training is idle as long to load or save data.
WINDOW_S = 3.0


class Utilisation:
    """The utilisation of each device in the last `WINDOW_S` seconds. For one thread."""

    def __init__(self) -> None:
        #: Time and busy fraction of each reading, oldest first.
        self._seen: dict[DeviceKey, deque[tuple[float, float]]] = {}

    def smooth(self, snapshot: DeviceSnapshot) -> DeviceSnapshot:
        """Return a snapshot with the mean as its `busy_fraction`; a missing fraction restarts the mean."""
        now = snapshot.busy_fraction
        if now is None or snapshot.error:
            self._seen.pop(snapshot.device.key, None)
            return snapshot
        seen = self._seen.setdefault(snapshot.device.key, deque())
        seen.append((snapshot.at_s, now))
        while seen[0][0] < snapshot.at_s - WINDOW_S:
            seen.popleft()
        return replace(snapshot, busy_fraction=sum(part for _, part in seen) / len(seen))


logger = logging.getLogger(__name__)

#: Longest pause in seconds between two readings. Each failed reading doubles the pause.
MAX_BACK_OFF_S = 5.0


@dataclass(eq=False, repr=False)
class Sampler:
    """Reads devices in a thread of its own, at an interval while it is active.

    Any thread may call any method. Only `stop` waits for the reader. While a driver hangs, `publish` is not called.
    """

    #: Used by the sampler's thread alone.
    reader: DeviceReader
    #: Returns the process ids of the living children.
    roots: Callable[[], Collection[int]]
    #: Called with every reading, on the sampler's thread; must not block for long.
    publish: Callable[[Reading], None]
    #: Seconds from the start of a reading to the start of the next.
    interval_s: float = 0.25
    clock: Clock = field(default_factory=RealClock)
    #: Returns `Reading.host_available_bytes`.
    read_host_available: Callable[[], int] = read_host_available_bytes
    #: Used by the sampler's thread alone.
    _utilisation: Utilisation = field(default_factory=Utilisation, init=False)
    #: Guards all below; never held while reading or publishing.
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _active: bool = field(default=False, init=False)
    _asked: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)
    _due_s: float = field(default=float("-inf"), init=False)

    def set_active(self, active: bool) -> None:
        """Start or stop reading at the interval; the first reading, if due, is made at once. Raises as `refresh`."""
        with self._changed:
            if active != self._active:
                self._wake()
                self._active = active

    def refresh(self) -> None:
        """Request a reading now, active or not; `CapacityError`: the thread could not be started.

        A caller recognises the reading by its `at_s`, which is not before this call. Several calls before a reading
        lead to one reading; a call during a reading leads to another.
        """
        with self._changed:
            self._wake()
            self._asked = True

    def stop(self) -> None:
        """Stop the thread and wait for its end, after the reading in progress."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, "prefect-gpu-sampler")
        self._changed.notify_all()

    def _run(self) -> None:
        while self._wait_until_due():
            reading = self.read()
            with self._changed:
                # Before `publish`: a test that moves the clock after a reading moves it past `_due_s`.
                self._failures = self._failures + 1 if reading.error else 0
                self._due_s = reading.at_s + self._pause_s()
            try:
                self.publish(reading)
            except Exception:
                # The edge of a thread: after an error readings would stop for ever without a message.
                logger.exception("a reading of the devices could not be passed on")

    def _wait_until_due(self) -> bool:
        """Wait until a reading is due; return `False` once the sampler is stopped."""
        with self._changed:
            while not self._stopping:
                if self._asked or (self._active and self._due_s <= self.clock.now()):
                    self._asked = False
                    return True
                self.clock.wait(self._changed, self._due_s if self._active else None)
            return False

    def _pause_s(self) -> float:
        # The exponent is bounded: 2.0 ** 1024 overflows after hours without a driver.
        doubled_s = self.interval_s * 2.0 ** min(max(self._failures - 1, 0), 16)
        return max(self.interval_s, min(doubled_s, MAX_BACK_OFF_S))

    def read(self) -> Reading:
        """Return a reading of the devices, made on the caller's thread; a failure is in its `error`."""
        at_s = self.clock.now()
        host_available_bytes = 0
        try:
            if self.reader.kind != "host":
                host_available_bytes = self.read_host_available()
            snapshots = self.reader.read(self.roots())
            # Readings of other machines have means already.
            if not self.reader.remote:
                snapshots = tuple(map(self._utilisation.smooth, snapshots))
            # The host's available memory is this device's free memory.
            if self.reader.kind == "host":
                host_available_bytes = sum(snapshot.free_bytes for snapshot in snapshots)
            return Reading(at_s, snapshots, host_available_bytes, nodes=self.reader.nodes())
        except DeviceError as error:
            problem = str(error)
        except Exception as error:
            # The edge of a thread: the error becomes the reason why tasks wait.
            logger.exception("the devices could not be read")
            problem = f"{type(error).__name__}: {error}"
        return Reading(at_s, (), host_available_bytes, error=problem or "no reason given")
