"""Events that a `machine` handles, and commands that its `broker` carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, Union

from prefect_gpu.broker.device_view import Note
from prefect_gpu.broker.ledger import Changes, Entry, LedgerView
from prefect_gpu.broker.planning import Plan
from prefect_gpu.broker.ticket import Measured, Ticket
from prefect_gpu.errors import PrefectGPUError
from prefect_gpu.scheduling.model import Device, Placement, Reading, Reservation

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
class MovingOut:
    """The memory of a request's process is being moved to the host."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class NotMoved:
    """A process was not suspended (`refused`), or runs again."""

    ticket: Ticket
    refused: bool


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


Event: TypeAlias = Union[  # noqa: UP007
    Submitted,
    Withdrawn,
    DevicesLost,
    Attached,
    BodyBegan,
    Ended,
    MovingOut,
    NotMoved,
    NeedLearned,
    Read,
    Rows,
    LedgerChanged,
    Waits,
    Tick,
    ScheduleDue,
    SuspensionsDue,
    Appended,
]


# Commands.


@dataclass(frozen=True, slots=True)
class Append:
    """Write a plan into the ledger, all or nothing; the event `Appended` has the result."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replace the ledger's entry of a request by the result of a pure function."""

    request_id: str
    change: Callable[[Entry], Entry]


@dataclass(frozen=True, slots=True)
class Lower:
    """Replace the reservations of a request by smaller ones."""

    request_id: str
    reservations: tuple[Reservation, ...]


@dataclass(frozen=True, slots=True)
class SetProcess:
    """Write into the ledger the process that uses a request's reservation."""

    request_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class MarkRunning:
    """Write into the ledger that the body of a request has begun."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SetHeldBytes:
    """Write into the ledger the bytes of a request's process on each device that it may use."""

    request_id: str
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Remove a request from the ledger. With a ticket: its process has ended, and `leaked_bytes` did not come back."""

    request_id: str
    ticket: Ticket | None = None
    leaked_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the other brokers of this process that the ledger has changed."""


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


Command: TypeAlias = Union[  # noqa: UP007
    Append,
    Rewrite,
    Lower,
    SetProcess,
    MarkRunning,
    SetHeldBytes,
    Release,
    Announce,
    ReadDevices,
    SampleDevices,
    Decide,
    TellMeasured,
    TellHeldBack,
    TellNoReturn,
    TellShort,
    SetAside,
    Log,
]

#: Takes an event and monotonic seconds; returns commands in order. See `Machine.handle`.
Handle: TypeAlias = Callable[[Event, float], list[Command]]
