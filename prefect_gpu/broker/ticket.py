"""One request of a broker, from its submission until its memory is back.

The machine changes the ticket; other threads wait for its decision, and may withdraw it first. The request itself is a
`scheduling.model.Request`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from prefect_gpu.broker.phases import Phase, Trigger
from prefect_gpu.clock import Clock
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request

#: Cause of a suspension by a person.
BY_HAND = "prefect-gpu suspend"

#: Cause of a suspension of a first run that leaves its device to other first runs.
FOR_FIRST_RUNS = "other first runs on its device"

#: Most names of neighbour tasks in a ticket.
MOST_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of a request's process on one device, in bytes."""

    #: With its descendants.
    total_bytes: int
    #: Bytes of each of these processes, by process id; empty where the device does not attribute memory to processes.
    by_pid: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Ticket:
    """One request, from its submission until its memory is back. Made by `Broker.submit`."""

    request: Request
    #: Changed by the machine alone.
    phase: Phase = Phase.WAITING
    #: Its last triggers, for errors.
    triggers: deque[Trigger] = field(default_factory=lambda: deque(maxlen=10))
    #: Notified when the request is decided.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: The request was placed, refused or withdrawn.
    decided: bool = False
    withdrawn: bool = False
    placement: Placement | None = None
    error: PrefectGPUError | None = None
    #: Monotonic seconds when it was placed.
    placed_s: float = 0.0
    #: Process that uses the reservation; `None`: none yet, or no longer.
    pid: int | None = None
    #: Bytes by its own counters (plus context), where the device cannot tell.
    stand_in_bytes: int = 0
    #: Called at every reading while it runs, with monotonic seconds and its memory on each device, in the task's order.
    on_measured: Callable[[float, tuple[Measured, ...]], None] | None = None
    #: Called with the bytes that did not come back (`None`: not known), once.
    on_recovered: Callable[[int | None], None] | None = None
    #: Called when its process is to be suspended (`True`), or may resume.
    on_held_back: Callable[[bool], None] | None = None
    #: Argument of the last call of `on_held_back`.
    held_back: bool = False
    #: Answers to its suspension's thread: whether the process may resume.
    may_resume: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    #: Cause of that suspension, as text for people.
    held_back_for: str = ""
    #: Called with the reason if its suspended process has no device to return to.
    on_no_return: Callable[[PrefectGPUError], None] | None = None
    #: Monotonic seconds since when its suspended process has no device, in the phase `RELEASED`.
    away_s: float = 0.0
    #: Seconds of earlier suspensions without a device.
    was_away_s: float = 0.0
    #: Its priority before it was raised for long suspension; `None`: it was never suspended.
    priority: int | None = None
    #: Called once, with the device, if it is a shared probe that should end for the other probes there.
    on_short: Callable[[Device], None] | None = None
    #: It is a shared probe, and may be suspended instead.
    may_leave: bool = False
    #: Budgets learned during its suspension, by device model; see `Broker.learn_need`.
    learned: Mapping[str, int] | None = None
    #: Bytes of other people's processes on its devices when it was placed.
    foreign_before: dict[DeviceKey, int] = field(default_factory=dict)
    #: Bytes of no process on its devices when it was placed, plus later leaks of others.
    ownerless_before: dict[DeviceKey, int | None] = field(default_factory=dict)
    #: Names of the tasks that were on its devices with it, in order; at most `MOST_NEIGHBOURS`.
    neighbours: dict[str, None] = field(default_factory=dict)
    #: Monotonic seconds when its process ended; `None`: it has not.
    ended_s: float | None = None
    ended_pid: int | None = None
    #: Bytes still missing at the last reading after its end; `None`: not known.
    missing_bytes: int | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices; none before it was placed."""
        return () if self.placement is None else self.placement.devices

    def decide(
        self, placement: Placement | None = None, error: PrefectGPUError | None = None
    ) -> None:
        """Place or refuse the request, and wake the waiting thread; without effect once it was withdrawn."""
        with self.changed:
            if not self.withdrawn:
                self.placement, self.error = placement, error
                self.decided = True
                self.changed.notify_all()

    def withdraw(self) -> bool:
        """Withdraw the request and wake the waiting thread; return `False` if it was already decided."""
        with self.changed:
            if self.decided:
                return False
            self.decided = self.withdrawn = True
            self.changed.notify_all()
            return True

    def wait(self, clock: Clock, until_s: float) -> bool:
        """Wait for a decision; return whether there was one in time."""
        with self.changed:
            while not self.decided:
                left_s = until_s - clock.now()
                if left_s <= 0:
                    return False
                clock.wait(self.changed, left_s)
            return True


class Withdrawn(Exception):  # noqa: N818  # not an error: the wait was given up
    """A request was withdrawn while it waited."""
