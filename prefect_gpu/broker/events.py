"""Events that a `machine` handles, and commands that its `broker` carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prefect_gpu.broker.device_view import Note
from prefect_gpu.broker.ledger import Changes, Entry, LedgerView
from prefect_gpu.broker.phases import Trigger
from prefect_gpu.broker.planning import Plan
from prefect_gpu.broker.ticket import Measured, NeedLearned, Ticket
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.history import HistoryKey
from prefect_gpu.scheduling.model import Device, Placement, Reading

# Events.


@dataclass(frozen=True, slots=True)
class Opened:
    """The inputs of a task run (`Request.sequence`) are there, and it will make its request at any moment."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Left:
    """A task run that was opened makes no request."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was submitted.

    `histories` is for the ticket. Its budget is chosen by the runs of which the first `as_of` events `Kept` tell.
    """

    ticket: Ticket
    histories: Mapping[str, HistoryKey] = field(default_factory=dict)
    as_of: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request was withdrawn before its decision was known. The machine may have placed it meanwhile."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DevicesLost:
    """All devices are lost for good."""

    why: str


@dataclass(frozen=True, slots=True)
class Attached:
    """The process of a placed request has started."""

    ticket: Ticket
    pid: int


@dataclass(frozen=True, slots=True)
class BodyBegan:
    """A request's task body has begun: the kernel's figure of used memory now includes its host memory."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Returned:
    """The outcome of the process of a placed request is known. The process may not have ended yet."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of a placed request has ended or never started."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Moved:
    """A suspension of a request's process has made a step, or asks to make it (`MOVING_IN`); `text` is for people."""

    ticket: Ticket
    step: Trigger
    text: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The run of a task run's last process was added to its history, or there is none to add."""

    sequence: int
    #: Whether the task run is no first run any more, as its next process, if there is one, is none.
    over: bool
    #: By history: the need in bytes that its runs show now; `None`: the need can be estimated now.
    shown: Mapping[HistoryKey, int | None]
    #: Number of this event.
    number: int


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
    """Other brokers have changed the ledger, or a request was released."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The GPU task that this process runs inside has waited since `since_s` (monotonic); `None`: it does not wait."""

    since_s: float | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the wait for memory of ended processes may be over."""


@dataclass(frozen=True, slots=True)
class ScheduleDue:
    """All earlier events were handled: open requests may join the queue, and a scheduling pass is made if need be."""


@dataclass(frozen=True, slots=True)
class SuspensionsDue:
    """A scheduling pass was made: processes are told to suspend, or that they may resume."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A plan was written into the ledger; `done=False`: nothing was written, since another broker wrote first."""

    plan: Plan
    done: bool


TaskEvent = Opened | Left | Kept
TicketEvent = Submitted | Withdrawn | Attached | BodyBegan | Returned | Ended | Moved
LedgerEvent = Rows | LedgerChanged | Appended
Event = (
    TaskEvent
    | TicketEvent
    | LedgerEvent
    | Read
    | DevicesLost
    | Waits
    | Tick
    | ScheduleDue
    | SuspensionsDue
)


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
    #: Ticket whose suspended process is told whether the entry has changed, and so whether it may resume; `None`: none.
    asks: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Remove a request from the ledger. With a ticket: its process has ended and left `leaked_bytes` (`None`: unknown)."""

    request_id: str
    ticket: Ticket | None = None
    leaked_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadDevices:
    """Request a device reading now."""


@dataclass(frozen=True, slots=True)
class SampleDevices:
    """Start or stop reading the devices at intervals."""

    active: bool


@dataclass(frozen=True, slots=True)
class Decide:
    """Give a ticket its placement or its error."""

    ticket: Ticket
    placement: Placement | None = None
    error: PrefectGPUError | NeedLearned | None = None


@dataclass(frozen=True, slots=True)
class TellMeasured:
    """Tell a ticket how much memory its process holds on each of its devices."""

    ticket: Ticket
    at_s: float
    measured: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class TellHeldBack:
    """Tell a ticket that its process is to be suspended (`away`), or may resume."""

    ticket: Ticket
    away: bool


@dataclass(frozen=True, slots=True)
class TellNoReturn:
    """Tell a ticket that no device will be free for its suspended process to resume on."""

    ticket: Ticket
    error: PrefectGPUError


@dataclass(frozen=True, slots=True)
class TellShort:
    """Tell a probe's ticket to end the process, so that other probes (first runs) on the device continue."""

    ticket: Ticket
    device: Device


@dataclass(frozen=True, slots=True)
class SetAside:
    """Tell the fault watchers of the runners that a device has failed."""

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
