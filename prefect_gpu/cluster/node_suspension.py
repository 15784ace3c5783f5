"""A process on a node that is suspended there for its flow; the flow's side is `suspension.remote`.

While it is away its device is reserved for it in the node's ledger until the flow says that it makes way. Before it is
restored the node's broker has reserved a device again and the flow has agreed. A person who suspends it on the node's
machine asks by that ledger; the flow is told, and does as it does on one machine.
"""

from __future__ import annotations

import queue as queues
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.preempting import keep_away, lead_back, leave_device
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
    ProcessLost,
    ReadyToReturn,
    StageReached,
)
from prefect_gpu.suspension.suspended import Stage, Suspender, Suspension


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
            self._asked = command
            rewrite(keep_away)
            self._suspender.ask(True)
        elif isinstance(command, MakeWay):
            rewrite(partial(leave_device, now_s=time.monotonic()))
        elif isinstance(command, MoveIn):
            keys = [d.key for d in self._broker.devices if d.uuid == command.device_uuid]
            rewrite(partial(lead_back, homes=keys, now_s=time.monotonic()))
            entry = self._broker.entry(self._ticket)
            if entry is not None and entry.reservations and not entry.stays_away:
                self._suspender.ask(False)
        else:
            self._answers.put(command.may)

    def look(self) -> None:
        """Tell the flow what a person asks for, if that has changed. On the broker's thread."""
        entry = self._broker.entry(self._ticket)
        if entry is None:
            return
        asked = HeldBack(entry.held_back, entry.held_back and entry.shared)
        if asked != self._told:
            self._told = asked
            self._tell_flow(asked)

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
        self._tell_flow(ReadyToReturn())
        may = self._answers.get()
        if not may:
            self._broker.show_suspension(self._ticket, "away", self._text)
        return may

    def tell(self, stage: Stage, text: str) -> None:
        """See `Subject.tell`."""
        self._text = text
        self._broker.show_suspension(self._ticket, stage, text)
        suspension, self._ended = self._ended, None
        self._tell_flow(StageReached(stage, text, self._asked.number, suspension))
        if stage == "refused":
            # That ends a person's wish in both ledgers. What is asked from now on is another one.
            self._told = HeldBack(away=False, shared=False)

    def ended(self, suspension: Suspension | None) -> None:
        """See `Subject.ended`."""
        self._ended = suspension

    def lost(self, why: str) -> None:
        """See `Subject.lost`."""
        self._tell_flow(ProcessLost(why))
