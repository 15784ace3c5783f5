"""Events that a `machine` handles, and commands that its `broker` carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefect_gpu.broker.device_view import Note
from prefect_gpu.broker.ledger import Changes, Entry, LedgerView
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.planning import Plan
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.model import Device, Placement, Reading

# Events.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was made."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request was withdrawn before it was decided. It may have been placed meanwhile."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DevicesLost:
    """No device will ever answer again."""

    why: str


@dataclass(frozen=True, slots=True)
class Attached:
    """The process of a placed request has started."""

    ticket: Ticket
    pid: int


@dataclass(frozen=True, slots=True)
class BodyBegan:
    """The body of a request has begun: the kernel's figures include its host memory from now on."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of a placed request has ended, or never started."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Moved:
    """The suspension of a request's process has made a step, or is about to (`MOVING_IN`); `text` is for people."""

    ticket: Ticket
    step: Trigger
    text: str


@dataclass(frozen=True, slots=True)
class NeedLearned:
    """The need of a probe's task is known: bytes on a device, by its model."""

    ticket: Ticket
    budgets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Read:
    """The devices were read."""

    reading: Reading


@dataclass(frozen=True, slots=True)
class Rows:
    """The ledger was read: its reservations, and the entries that have changed."""

    ledger: LedgerView
    changes: Changes


@dataclass(frozen=True, slots=True)
class LedgerChanged:
    """Other brokers have changed the ledger, or memory was released."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Monotonic seconds since when the GPU task around this process waits; `None`: it does not."""

    since_s: float | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: memory of ended processes may be given up."""


@dataclass(frozen=True, slots=True)
class ScheduleDue:
    """All events before it were handled: a pass is made, if something has changed."""


@dataclass(frozen=True, slots=True)
class SuspensionsDue:
    """A pass was made: tasks are asked to suspend, or may resume."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A plan was written into the ledger (`done=False`: other brokers were faster, and nothing was written)."""

    plan: Plan
    done: bool


TicketEvent = Submitted | Withdrawn | Attached | BodyBegan | Ended | Moved | NeedLearned
LedgerEvent = Rows | LedgerChanged | Appended
Event = TicketEvent | LedgerEvent | Read | DevicesLost | Waits | Tick | ScheduleDue | SuspensionsDue


# Commands.


@dataclass(frozen=True, slots=True)
class Append:
    """Write a plan into the ledger, all or nothing; the event `Appended` has the result."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replace the ledger's entry of a request by the result of a pure function; see `Ledger.rewrite`."""

    request_id: str
    change: Callable[[Entry], Entry]
    announces: bool = True
    #: Request whose suspended process is told whether the entry has changed: it may resume.
    asks: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Remove a request from the ledger. With a ticket: its process has ended, and `leaked_bytes` did not come back."""

    request_id: str
    ticket: Ticket | None = None
    leaked_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadDevices:
    """Ask for a device reading now."""


@dataclass(frozen=True, slots=True)
class SampleDevices:
    """Start or stop reading the devices at intervals."""

    active: bool


@dataclass(frozen=True, slots=True)
class Decide:
    """Tell a request that it was placed or refused."""

    ticket: Ticket
    placement: Placement | None = None
    error: PrefectGPUError | None = None


@dataclass(frozen=True, slots=True)
class TellMeasured:
    """Tell a request the memory of its process on each of its devices."""

    ticket: Ticket
    at_s: float
    measured: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class TellHeldBack:
    """Tell a request that its process is to be suspended, or may resume."""

    ticket: Ticket
    away: bool


@dataclass(frozen=True, slots=True)
class TellNoReturn:
    """Tell a request that its suspended process has no device to return to."""

    ticket: Ticket
    error: PrefectGPUError


@dataclass(frozen=True, slots=True)
class TellShort:
    """Tell a probe to end its process, so that the other probes on its device continue."""

    ticket: Ticket
    device: Device


@dataclass(frozen=True, slots=True)
class SetAside:
    """Tell the fault watchers that a device does not work."""

    device: Device
    why: str


@dataclass(frozen=True, slots=True)
class Log:
    """Log a line."""

    note: Note


LedgerCommand = Append | Rewrite | Release
Tell = Decide | TellMeasured | TellHeldBack | TellNoReturn | TellShort
Command = LedgerCommand | Tell | ReadDevices | SampleDevices | SetAside | Log

#: Takes an event and monotonic seconds; returns commands in order. See `Machine.handle`.
Handle = Callable[[Event, float], list[Command]]
