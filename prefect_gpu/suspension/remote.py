"""What a flow and the agent of a node say to each other when a process on a cluster is suspended.

    flow                               node: a `Suspender`, the driver, the node's ledger
    ----                               ----
    MoveOut            ───▶            suspends the process
                       ◀───            StageReached: moving out, away, or refused
    MakeWay            ───▶            releases its device: another request of the flow gets it
    MoveIn             ───▶            reserves the device and waits for the room
                       ◀───            NotReserved, instead: another flow has the device
                       ◀───            ReadyToReturn
    Return             ───▶            restores it, if it still may
                       ◀───            StageReached: running
                       ◀───            ProcessLost, instead of a stage
                       ◀───            HeldBack: a person on the node's machine wants it suspended, or back

The flow decides, as on one machine: its ledger says whether a process is away, so no device is given away while its
process comes back. `RemoteSuspender` is what an attempt has in place of a `Suspender`. The node's side is
`cluster.node_suspension`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from prefect_gpu.suspension.suspended import Stage, Suspension

# From the flow to the node.


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Move its memory to the host."""

    #: How many there were of the process, with this one.
    number: int
    #: A process of its task was lost in a move before.
    lost_before: bool


@dataclass(frozen=True, slots=True)
class MakeWay:
    """Release its device: its memory is away, and another request gets it."""


@dataclass(frozen=True, slots=True)
class MoveIn:
    """Bring its memory back."""

    #: UUID of the device on which it comes back.
    device_uuid: str


@dataclass(frozen=True, slots=True)
class Return:
    """Answers `ReadyToReturn`."""

    #: Whether it is restored now.
    may: bool


Command: TypeAlias = MoveOut | MakeWay | MoveIn | Return

#: The classes of `Command`.
COMMANDS = (MoveOut, MakeWay, MoveIn, Return)


# From the node to the flow.


@dataclass(frozen=True, slots=True)
class StageReached:
    """How far it is."""

    stage: Stage
    #: The same for a person; empty: it runs.
    text: str
    #: Of the last `MoveOut` that had come.
    number: int
    #: With `running`: what the suspension was, by the node's clock.
    suspension: Suspension | None = None


@dataclass(frozen=True, slots=True)
class ReadyToReturn:
    """Its device is reserved on the node, and shows the room."""

    #: UUID of the device.
    device_uuid: str


@dataclass(frozen=True, slots=True)
class NotReserved:
    """The device of `MoveIn` could not be reserved on the node in time: it stays away until it is asked back again."""

    #: UUID of the device.
    device_uuid: str


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """It must be killed."""

    #: Why.
    why: str


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A person wants its memory to be on the host, or back; see `Entry.held_back` and `Entry.shared`."""

    away: bool
    shared: bool


News: TypeAlias = StageReached | ReadyToReturn | NotReserved | ProcessLost | HeldBack

#: The classes of `News`.
NEWS = (StageReached, ReadyToReturn, NotReserved, ProcessLost, HeldBack)


class RemoteSubject(Protocol):
    """A task's process on a node, as its flow knows it; see `suspended.Subject`."""

    def lost_before(self) -> bool:
        """Return whether a process of its task was lost in a move before."""
        ...

    def device_uuid(self) -> str:
        """Return the UUID of the device that is reserved for it."""
        ...

    def hold_back(self, away: bool, shared: bool) -> None:
        """Note that a person has asked for its memory; see `HeldBack`."""
        ...

    def comes_back(self) -> bool:
        """See `Subject.comes_back`."""
        ...

    def wait_again(self) -> None:
        """Note that its device is another flow's: it waits for a device again."""
        ...

    def tell(self, stage: Stage, text: str) -> None:
        """See `Subject.tell`."""
        ...

    def begun(self) -> None:
        """See `Subject.begun`."""
        ...

    def ended(self, suspension: Suspension | None) -> None:
        """See `Subject.ended`."""
        ...

    def lost(self, why: str) -> None:
        """See `Subject.lost`."""
        ...


class RemoteSuspender:
    """Has one process on a node suspended and resumed. Safe to use from several threads.

    Args:
        subject: The process.
        send: Sends a `Command` to its node.
    """

    def __init__(self, subject: RemoteSubject, send: Callable[[Any], None]) -> None:
        self._subject = subject
        self._send = send
        #: Monotonic seconds since when it is away; `None`: it is not.
        self._begun_s: float | None = None
        #: Of the last `MoveOut`.
        self._number = 0
        self._gone = False

    @property
    def away(self) -> bool:
        """See `Suspender.away`."""
        return self._begun_s is not None

    @property
    def away_s(self) -> float | None:
        """See `Suspender.away_s`."""
        begun_s = self._begun_s
        return None if begun_s is None else time.monotonic() - begun_s

    def ask(self, away: bool) -> None:
        """See `Suspender.ask`."""
        if away:
            self._number += 1
            self._send(MoveOut(self._number, self._subject.lost_before()))
        else:
            self._send(MoveIn(self._subject.device_uuid()))

    def make_way(self) -> None:
        """Have its device on the node released."""
        self._send(MakeWay())

    def end(self) -> None:
        """See `Suspender.end`."""
        self._gone = True

    def take(self, news: News) -> None:
        """Take what was heard of it, in order."""
        if self._gone:
            return
        if isinstance(news, HeldBack):
            self._subject.hold_back(news.away, news.shared)
        elif isinstance(news, ReadyToReturn):
            # It may have got another one since it was asked back.
            same = news.device_uuid == self._subject.device_uuid()
            self._send(Return(same and self._subject.comes_back()))
        elif isinstance(news, NotReserved):
            if news.device_uuid == self._subject.device_uuid():
                self._subject.wait_again()
        elif isinstance(news, ProcessLost):
            self._subject.lost(news.why)
        else:
            self._take_stage(news)

    def _take_stage(self, news: StageReached) -> None:
        begun_s = self._begun_s
        if news.stage == "moving out":
            self._subject.tell(news.stage, news.text)
            self._begun_s = time.monotonic()
            self._subject.begun()
            return
        if news.stage in ("refused", "running") and begun_s is not None:
            self._begun_s = None
            done = news.suspension
            if done is not None:
                # The node's clock is another one.
                ended_s = time.monotonic()
                done = Suspension(begun_s, ended_s, done.out_s, done.in_s, done.moved_bytes)
            self._subject.ended(done)
        if news.stage == "refused" and news.number != self._number:
            # It was asked again meanwhile, and answers that, too.
            return
        self._subject.tell(news.stage, news.text)
