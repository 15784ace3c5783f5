"""One request of a broker, from its submission until its memory is back.

The machine changes it; other threads wait for its decision, and may withdraw it first. What is asked is a
`scheduling.model.Request`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prefect_gpu.clock import Clock
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request

#: For what a process is suspended that a person has suspended.
BY_HAND = "prefect-gpu suspend"

#: For what a first run is suspended that leaves its device to the others there.
FOR_FIRST_RUNS = "other first runs on its device"

#: Names that a ticket keeps of tasks beside its own.
MOST_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What the process of a request holds of one device, in bytes."""

    #: With all that it has started.
    total_bytes: int
    #: Of each of them, by process id; empty where the device does not attribute memory to processes.
    by_pid: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Ticket:
    """One request, from its submission until its memory is back. Made by `Broker.submit`."""

    request: Request
    #: Notified when it is decided.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: It was placed, refused or withdrawn.
    decided: bool = False
    withdrawn: bool = False
    placement: Placement | None = None
    error: PrefectGPUError | None = None
    #: Monotonic seconds when it was placed.
    placed_s: float = 0.0
    #: Process that holds what was reserved; `None`: none yet, or no longer.
    pid: int | None = None
    #: Bytes that its own counters (plus context) give, where the device cannot tell.
    stand_in_bytes: int = 0
    #: Called with monotonic seconds and what it holds of each of its devices, in the task's order, at
    #: every reading while it runs.
    on_measured: Callable[[float, tuple[Measured, ...]], None] | None = None
    #: Called with the bytes that did not come back (`None`: not known), once.
    on_recovered: Callable[[int | None], None] | None = None
    #: Called when its memory is wanted on the host (`True`), or may come back to its devices.
    on_held_back: Callable[[bool], None] | None = None
    #: What it was called with last.
    held_back: bool = False
    #: For what it was called so, as text for a person.
    held_back_for: str = ""
    #: Called if its suspended process has no device to come back to, with the reason.
    on_no_return: Callable[[PrefectGPUError], None] | None = None
    #: Monotonic seconds since when its suspended process has no device; `None`: it has one.
    away_s: float | None = None
    #: Seconds for which it had none before.
    was_away_s: float = 0.0
    #: Its priority before it was raised for the time away; `None`: it was never away.
    priority: int | None = None
    #: Called if it is a probe that shares a device and should end for the others there, with that device, once.
    on_short: Callable[[Device], None] | None = None
    #: It is such a probe, and may be suspended for them in place of its end.
    may_leave: bool = False
    #: Budgets that were learned while it was suspended, by model of the device; see `Broker.learn_need`.
    learned: Mapping[str, int] | None = None
    #: What others' processes held on its devices when it was placed, in bytes.
    foreign_before: dict[DeviceKey, int] = field(default_factory=dict)
    #: Bytes that no process held on its devices when it was placed, and what others leaked there since.
    ownerless_before: dict[DeviceKey, int | None] = field(default_factory=dict)
    #: Names of the tasks that have been on its devices with it, in order; at most `MOST_NEIGHBOURS`.
    neighbours: dict[str, None] = field(default_factory=dict)
    #: Monotonic seconds when its process ended; `None`: it has not.
    ended_s: float | None = None
    ended_pid: int | None = None
    #: Bytes that were still missing at the last reading since then; `None`: not known.
    missing_bytes: int | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices; none before it was placed."""
        return () if self.placement is None else self.placement.devices

    def add_neighbour(self, name: str) -> None:
        """Note the name of a task that is on one of its devices."""
        if len(self.neighbours) < MOST_NEIGHBOURS:
            self.neighbours[name] = None

    def decide(
        self, placement: Placement | None = None, error: PrefectGPUError | None = None
    ) -> None:
        """Place it or refuse it, and wake the thread that waits for it; without effect once it was withdrawn."""
        with self.changed:
            if not self.withdrawn:
                self.placement, self.error = placement, error
                self.decided = True
                self.changed.notify_all()

    def withdraw(self) -> bool:
        """Wake the thread that waits for it, and return `True`, if it was not decided."""
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
