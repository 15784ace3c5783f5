"""A process on a node that is suspended there for its flow; the flow's side is `suspension.remote`.

While it is away its device is reserved for it in the node's ledger until the flow says that it makes way. Before it is
restored the node's broker has reserved a device again and the flow has agreed. A person who suspends it on the node's
machine asks by that ledger; the flow is told, and does as it does on one machine.
"""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.preempting import keep_away, lead_back, leave_device, stop_return
from prefect_gpu.broker.suspendable import SuspendableProcess
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.suspension.remote import (
    Command,
    HeldBack,
    MakeWay,
    MoveIn,
    MoveOut,
    News,
    NotReserved,
    ProcessLost,
    ReadyToReturn,
    StageReached,
)
from prefect_gpu.suspension.suspended import Stage, Suspender, Suspension

#: Seconds that the node may take to reserve the device where a process comes back. What has ended there a moment ago may
#: still hold it; after that the flow is told, which may know another device.
RESERVE_S = 2.0


class NodeSuspension(SuspendableProcess):
    """One process: a `suspension.suspended.Subject`.

    Args:
        broker: Of the node.
        ticket: Of its devices there; its callbacks are set here.
        pid: Of the process.
        send: Sends a message to the process.
        tell: Sends news to the flow.
    """

    def __init__(
        self,
        broker: Broker,
        ticket: Ticket,
        pid: int,
        send: Callable[[Any], None],
        tell: Callable[[News], None],
    ) -> None:
        super().__init__(broker, ticket, send)
        self._tell_flow = tell
        self._suspender = Suspender(pid, self)
        #: The last that came.
        self._asked = MoveOut(0, lost_before=False)
        #: Where it is to come back and monotonic seconds since when; `None`: nowhere now, or its device is reserved.
        self._returns: tuple[MoveIn, float] | None = None
        #: The flow knows the process.
        self._introduced = False
        #: Guards the next, and the order in which the flow hears of what a person asks for and of its refusal.
        self._telling = threading.Lock()
        #: What a person has last asked for, as the flow was told.
        self._told = HeldBack(away=False, shared=False)
        #: What was last said to be its stage, as text.
        self._text = ""
        #: Of the suspension that has just ended.
        self._ended: Suspension | None = None
        #: Answers of the flow to `ReadyToReturn`.
        self._answers: queues.SimpleQueue[bool] = queues.SimpleQueue()
        ticket.on_measured = self.take_measurement
        ticket.on_held_back = self._ask
        ticket.on_no_return = self._take_no_return

    def obey(self, command: Command) -> None:
        """Carry out a command of the flow."""
        rewrite = partial(self._broker.rewrite, self._ticket)
        if isinstance(command, MoveOut):
            # A refusal of what was asked before is not one of this.
            with self._suspender.lock:
                self._asked, self._returns = command, None
                rewrite(keep_away)
                self._suspender.ask(True)
        elif isinstance(command, MakeWay):
            rewrite(partial(leave_device, now_s=time.monotonic()))
        elif isinstance(command, MoveIn):
            keys = [d.key for d in self._broker.devices if d.uuid == command.device_uuid]
            rewrite(partial(lead_back, homes=keys, now_s=time.monotonic()))
            self._returns = command, time.monotonic()
            entry = self._broker.entry(self._ticket)
            if entry is not None and entry.reservations and not entry.stays_away:
                self._suspender.ask(False)
        else:
            self._answers.put(command.may)

    def introduce(self) -> None:
        """Note that the flow knows the process: it can be told of it from now on."""
        self._introduced = True

    def look(self) -> None:
        """Tell the flow what a person asks for now, and whether its device cannot be reserved. Called on the broker's thread."""
        if not self._introduced:
            return
        with self._telling:
            entry = self._broker.entry(self._ticket)
            if entry is None:
                return
            asked = HeldBack(entry.held_back, entry.held_back and entry.shared)
            if asked != self._told:
                self._told = asked
                self._tell_flow(asked)
        returns = self._returns
        if returns is None:
            return
        command, since_s = returns
        if entry.reservations:
            self._returns = None
        elif time.monotonic() - since_s > RESERVE_S and not entry.held_back:
            with self._suspender.lock:
                if self._returns is returns and self._broker.rewrite(self._ticket, stop_return):
                    self._returns = None
                    self._tell_flow(NotReserved(command.device_uuid))

    def end(self) -> None:
        """Note that the process is gone."""
        self._suspender.end()
        # It may wait for the flow's answer.
        self._answers.put(False)

    def _ask(self, away: bool) -> None:
        # A person's wish is the flow's to carry out: it knows what else is asked.
        self.look()
        if not away:
            self._suspender.ask(False)

    def _take_no_return(self, error: PrefectGPUError) -> None:
        self.lost(f"it was suspended and cannot come back: {error}")

    def take_measurement(self, at_s: float, measured: Sequence[Measured]) -> None:
        """See `SuspendableProcess.take_measurement`."""
        if not self._suspender.away:
            super().take_measurement(at_s, measured)

    def lost_before(self) -> bool:
        """See `SuspendableProcess.lost_before`."""
        return self._asked.lost_before

    # On the suspension's thread.

    def comes_back(self) -> bool:
        """See `Subject.comes_back`."""
        if not super().comes_back():
            return False
        self._tell_flow(ReadyToReturn(self._ticket.devices[0].uuid))
        may = self._answers.get()
        if not may:
            self._broker.show_suspension(self._ticket, "away", self._text)
        return may

    def tell(self, stage: Stage, text: str) -> None:
        """See `Subject.tell`."""
        self._text = text
        with self._telling:
            self._broker.show_suspension(self._ticket, stage, text)
            suspension, self._ended = self._ended, None
            self._tell_flow(StageReached(stage, text, self._asked.number, suspension))
            if stage == "refused" and self._told.away:
                # That ends a person's wish, also where the flow takes it for the refusal of something else. What is
                # asked from now on is another one.
                self._told = HeldBack(away=False, shared=False)
                self._tell_flow(self._told)

    def ended(self, suspension: Suspension | None) -> None:
        """See `Subject.ended`."""
        self._ended = suspension

    def lost(self, why: str) -> None:
        """See `Subject.lost`."""
        self._tell_flow(ProcessLost(why))
