"""One request for devices and what became of it, as the broker and whoever waits share it.

Values, and the wait until one is decided: who keeps those that wait is `waiting_list`, who places it and ends
it `broker`, whether its memory is back `recovery`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from prefect_gpu.clock import Clock
from prefect_gpu.errors import PlacementTimeoutError, PrefectGPUError
from prefect_gpu.scheduling.model import Device, DeviceKey, Placement, Request
from prefect_gpu.units import format_seconds


@dataclass(eq=False)
class Loan:
    """What a hot standby has of a device, from before it is made until its memory is back."""

    #: Its place in the ledger and the memory that is waited for once it has ended.
    ticket: Ticket
    #: What suits the same tasks.
    kind: Hashable
    #: Ends its process; called without any lock.
    give_up: Callable[[], None]
    #: A task may take it.
    offered: bool = False
    #: Its process may hold memory of the device: it was offered once.
    touched: bool = False
    #: It was asked to end.
    ending: bool = False
    #: Its process is gone.
    ended: bool = False

    @property
    def id(self) -> str:
        """Its request's id."""
        return self.ticket.request.id

    @property
    def device(self) -> Device:
        """The device that it is on."""
        assert self.ticket.placement is not None
        return self.ticket.placement.devices[0]


@dataclass
class Ticket:
    """One request, from its submission until its memory is back. Made by `Broker.submit`."""

    request: Request
    #: Notified when it is decided.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: It was placed, refused or withdrawn.
    decided: bool = False
    placement: Placement | None = None
    error: PrefectGPUError | None = None
    #: Monotonic seconds when it was placed.
    placed_s: float = 0.0
    #: Process that holds what was reserved; `None`: none yet, or no longer.
    pid: int | None = None
    #: The hot standby that was kept for it, until a process has its task; `None`: none was.
    standby: Loan | None = None
    #: Whether the body has begun: what the process needs of the machine's memory is then taken.
    running: bool = False
    #: Bytes that its own counters (plus context) give, where the device cannot tell.
    stand_in_bytes: int = 0
    #: Called with monotonic seconds and the bytes on each of its devices, in the task's order, at
    #: every reading while it runs.
    on_measured: Callable[[float, tuple[int, ...]], None] | None = None
    #: Called with the bytes that did not come back (`None`: cannot be told), once.
    on_recovered: Callable[[int | None], None] | None = None
    #: What others' processes held on its devices when it was placed, in bytes.
    foreign_before: dict[DeviceKey, int] = field(default_factory=dict)
    #: Ownerless bytes of its devices when it was placed, and what others leaked there since.
    ownerless_before: dict[DeviceKey, int | None] = field(default_factory=dict)
    #: Monotonic seconds when its process ended; `None`: it has not.
    ended_s: float | None = None
    ended_pid: int | None = None
    #: Bytes that the last look since then missed; `None`: cannot be told.
    missing_bytes: int | None = None

    def decide(
        self, placement: Placement | None = None, error: PrefectGPUError | None = None
    ) -> None:
        """Place it, refuse it, or withdraw it, and wake who waits."""
        with self.changed:
            self.placement, self.error = placement, error
            self.decided = True
            self.changed.notify_all()

    def wait(self, clock: Clock, until_s: float) -> bool:
        """Wait for a decision; `False`: there was none in time."""
        with self.changed:
            while not self.decided:
                left_s = until_s - clock.now()
                if left_s <= 0:
                    return False
                clock.wait(self.changed, left_s)
            return True


class Withdrawn(Exception):  # noqa: N818  # not an error: somebody gave up waiting
    """A request was withdrawn while it waited."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long somebody waits for a request to be placed, and how often he is told why."""

    #: Seconds after which to give up, as `gpu:wait` says; `None`: never.
    limit_s: float | None
    #: Told why it waits. What it raises ends the wait.
    on_waiting: Callable[[str], None]
    #: Seconds after which `on_waiting` is told first.
    first_s: float
    #: Seconds after which it is told again, if the reason changed.
    again_s: float
    #: Seconds of `limit_s` that are gone already.
    waited_s: float

    def until_placed(
        self,
        ticket: Ticket,
        clock: Clock,
        explain: Callable[[Ticket], str],
        withdraw: Callable[[Ticket], bool],
    ) -> Placement:
        """Block until it is placed. Where it raises, it may have been placed all the same.

        Args:
            ticket: What is waited for.
            clock: Time.
            explain: Says why it waits.
            withdraw: Gives up waiting; tells whether it still waited.

        Raises:
            PlacementError: It can never be placed, or was not in time.
            Withdrawn: It was withdrawn.
        """
        began_s = clock.now() - self.waited_s
        tell_s = clock.now() + self.first_s
        told = ""
        while not ticket.wait(
            clock, tell_s if self.limit_s is None else min(tell_s, began_s + self.limit_s)
        ):
            reason = explain(ticket)
            if self.limit_s is not None and clock.now() - began_s >= self.limit_s:
                if withdraw(ticket):
                    raise PlacementTimeoutError(
                        f"gpu:wait={format_seconds(self.limit_s)} is over: "
                        f"{ticket.request.task_name!r} still waited for {reason}"
                    )
                # It was decided at the last moment.
                break
            if reason != told:
                self.on_waiting(reason)
                told = reason
            tell_s = clock.now() + self.again_s
        if ticket.error is not None:
            raise ticket.error
        if ticket.placement is None:
            raise Withdrawn(ticket.request.task_name)
        return ticket.placement
