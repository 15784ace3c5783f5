"""One request of a broker, from its submission until its memory is free again.

The machine changes the ticket. Other threads wait for the decision, and may withdraw the request before. The request
itself is a `scheduling.model.Request`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from prefect_gpu.broker.phases import Phase, Trigger
from prefect_gpu.clock import Clock
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Device, DeviceKey, DeviceWork, Placement, Request


class NeedLearned(Exception):  # noqa: N818  # not an error: the request is to be made again
    """Another run has shown the memory need of a first run that waits for a device."""


#: Cause of a suspension by a person.
BY_HAND = "prefect-gpu suspend"

#: Cause of the suspension of a first run so that other first runs on its device continue.
FOR_FIRST_RUNS = "other first runs on its device"

#: Most names in `Ticket.neighbours`.
MOST_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of a request's process on one device, in bytes."""

    #: Bytes of the process with its descendants.
    total_bytes: int
    #: The same by process id; empty where the device does not attribute memory to processes.
    by_pid: Mapping[int, int] = field(default_factory=dict)
    #: What all processes of the device computed; `None`: not known.
    work: DeviceWork | None = None


@dataclass
class Ticket:
    """A request with its decision, its process and callbacks, until its memory is free again. Made by `Broker.submit`."""

    request: Request
    #: Changed only by the machine.
    phase: Phase = Phase.OPEN
    #: By device model: the histories that show no need there, so that the process would be a first run.
    histories: Mapping[str, HistoryKey] = field(default_factory=dict)
    #: Of these, the histories whose other first runs wait for this one; set when it joins the queue, and by `opening.claims`.
    claims: frozenset[HistoryKey] = frozenset()
    #: In the phase `OPEN`: key in `MachineState.open_groups`.
    group: Hashable = None
    #: Last triggers of the phase, for error messages.
    triggers: deque[Trigger] = field(default_factory=lambda: deque(maxlen=10))
    #: Notified when the request is decided.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: Whether the request was placed, refused or withdrawn.
    decided: bool = False
    withdrawn: bool = False
    placement: Placement | None = None
    error: PrefectGPUError | NeedLearned | None = None
    #: Monotonic seconds when the request was placed.
    placed_s: float = 0.0
    #: Id of the process that uses the reservation; `None`: not started, or ended.
    pid: int | None = None
    #: Bytes by the process's own counters (plus context), where the device does not attribute memory to processes.
    stand_in_bytes: int = 0
    #: Called at every reading with monotonic seconds and the process's memory on each device, in the task's order.
    on_measured: Callable[[float, tuple[Measured, ...]], None] | None = None
    #: Called once, after the end, with the bytes of memory that are still missing (`None`: not known).
    on_recovered: Callable[[int | None], None] | None = None
    #: Called when the process is to be suspended (`True`), or may resume.
    on_held_back: Callable[[bool], None] | None = None
    #: Argument of the last call of `on_held_back`.
    held_back: bool = False
    #: Answers to the suspension's thread: whether the process may resume.
    may_resume: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    #: Cause of the suspension, as text for people.
    held_back_for: str = ""
    #: Called with the reason if no device will be free for the suspended process to resume on.
    on_no_return: Callable[[PrefectGPUError], None] | None = None
    #: Monotonic seconds since when the suspended process has no device, in the phase `RELEASED`.
    away_s: float = 0.0
    #: Seconds of earlier suspensions without a device.
    was_away_s: float = 0.0
    #: The request's priority before it was raised for a long suspension; `None`: never suspended.
    priority: int | None = None
    #: Called once, with the device, if this probe (a first run that shares its device) is to end for other probes there.
    on_short: Callable[[Device], None] | None = None
    #: Whether this probe may be suspended instead.
    may_leave: bool = False
    #: Budgets learned during a suspension, in bytes by device model; see `events.Kept`.
    learned: Mapping[str, int] | None = None
    #: By device: bytes held by processes of other programs when the request was placed.
    foreign_before: dict[DeviceKey, int] = field(default_factory=dict)
    #: By device: bytes held by no process when the request was placed, plus later leaks of other tasks; `None`: not known.
    ownerless_before: dict[DeviceKey, int | None] = field(default_factory=dict)
    #: Names of other tasks that were on the same devices, in order; at most `MOST_NEIGHBOURS`.
    neighbours: dict[str, None] = field(default_factory=dict)
    #: Monotonic seconds when the process ended; `None`: it has not ended.
    ended_s: float | None = None
    ended_pid: int | None = None
    #: Bytes still missing at the last reading after the end of the process; `None`: not known.
    missing_bytes: int | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices on which the request was placed; empty before."""
        return () if self.placement is None else self.placement.devices

    def decide(
        self,
        placement: Placement | None = None,
        error: PrefectGPUError | NeedLearned | None = None,
    ) -> None:
        """Set the placement or the error, and wake the waiting thread; without effect on a withdrawn request."""
        with self.changed:
            if not self.withdrawn:
                self.placement, self.error = placement, error
                self.decided = True
                self.changed.notify_all()

    def withdraw(self) -> bool:
        """Withdraw the request and wake the waiting thread; return `False` if the request was already decided."""
        with self.changed:
            if self.decided:
                return False
            self.decided = self.withdrawn = True
            self.changed.notify_all()
            return True

    def wait(self, clock: Clock, until_s: float) -> bool:
        """Wait for a decision until `until_s` (seconds of the clock), and return whether there is one."""
        with self.changed:
            while not self.decided and clock.now() < until_s:
                clock.wait(self.changed, until_s)
            return self.decided


class Withdrawn(Exception):  # noqa: N818  # not an error: the wait was given up
    """A request was withdrawn while it waited."""
