"""Phases of a request, and the one table of their transitions. Pure.

    OPEN ──admitted──▶ WAITING ──placed──▶ PLACED ──started──▶ RUNNING ──ended──▶ ENDING ──recovered──▶ GONE
                                                                │   ▲
                                 moving out ┌───────────────────┘   └──────────────┐ moved in
                                            ▼                                      │
                                         LEAVING ──not moved──▶ RUNNING        RETURNING
                                            │                                      ▲
                                            └──moved out──▶ AWAY ──moving in───────┘
                                                             │ ▲
                                                    released ▼ │ placed
                                                           RELEASED

A request is open until no earlier task run, and no first run, holds it up (`opening`). Then it waits in the queue, is
placed on devices, and its process starts. After the end of the process, its devices stay reserved until its memory is
free. A request that is withdrawn or rejected before it has a process is gone at once.

A process is suspended in steps, which its suspension's thread reports. While its memory is on the host, its devices are
still reserved (AWAY). Either the process resumes there, or the devices are released, for one waiting request or for all;
then its own request (RELEASED) returns to the queue and is placed again.

A `Wish` says who wants a process suspended: another request, a person, or the first runs on its device. Any process of the
machine may set and remove a wish at any time. A wish does not change the phase by itself: the process is suspended while
there is a wish, and resumes while there is none. A person's wish also keeps a RELEASED request out of the queue.

`Machine.handle` changes the phase in the `Ticket` of an own request. The phase in the ledger's `Entry` follows, by
`preempting` and `planning`. Two steps go from the entry to the ticket, since the newest entry decides on them: another
broker releases the devices, and a process begins to resume. Entries have no phases ENDING and GONE: an entry stays
unchanged until its removal.

Threads and processes race, so some triggers come late, and the table keeps the phase: a second end, steps of a suspension
after the process has ended, a report that the memory is on the host after the devices were released.

Not here: phases of a process (`runner.process_run`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from prefect_gpu.errors import ProtocolError


class Phase(Enum):
    """The phases of a request."""

    #: Not in the queue yet.
    OPEN = "open"
    #: In the queue, without devices or a process.
    WAITING = "waiting"
    #: It has devices, but no process yet.
    PLACED = "placed"
    #: Its process has started, and its memory is on its devices.
    RUNNING = "running"
    #: The memory of its process is being moved to the host.
    LEAVING = "leaving"
    #: Fully suspended; its devices are reserved.
    AWAY = "away"
    #: Fully suspended, without devices.
    RELEASED = "released"
    #: The memory of its process is being moved back.
    RETURNING = "returning"
    #: Its process has ended, and the process's memory may not be free yet.
    ENDING = "ending"
    #: The last phase: nothing is reserved for the request.
    GONE = "gone"


class Trigger(Enum):
    """Events that change the phase of a request, stages of a suspension among them."""

    ADMITTED = "admitted"
    PLACED = "placed"
    #: The request can never be placed, or is to be made again with another budget.
    REJECTED = "rejected"
    #: Withdrawn before its placement was known.
    WITHDRAWN = "withdrawn"
    STARTED = "started"
    #: The process has ended, or never started.
    ENDED = "ended"
    #: The memory of the ended process is free, or is no longer waited for.
    RECOVERED = "recovered"
    #: The process could not be suspended.
    NOT_MOVED = "refused"
    MOVING_OUT = "moving out"
    MOVED_OUT = "away"
    #: The devices of a suspended process were released.
    RELEASED = "released"
    MOVING_IN = "moving in"
    MOVED_IN = "running"


#: Triggers that come from other threads and processes, also after the end of the process.
_LATE = frozenset(Trigger) - {Trigger.ADMITTED, Trigger.PLACED, Trigger.REJECTED, Trigger.RECOVERED}

#: Next phase by phase and trigger. A pair that is not here is illegal.
TRANSITIONS: Mapping[Phase, Mapping[Trigger, Phase]] = {
    Phase.OPEN: {
        Trigger.ADMITTED: Phase.WAITING,
        Trigger.REJECTED: Phase.GONE,
        Trigger.WITHDRAWN: Phase.GONE,
        # A process has ended that never started.
        Trigger.ENDED: Phase.OPEN,
    },
    Phase.WAITING: {
        Trigger.PLACED: Phase.PLACED,
        Trigger.REJECTED: Phase.GONE,
        Trigger.WITHDRAWN: Phase.GONE,
        # A process has ended that never started.
        Trigger.ENDED: Phase.WAITING,
    },
    Phase.PLACED: {
        Trigger.STARTED: Phase.RUNNING,
        Trigger.WITHDRAWN: Phase.GONE,
        Trigger.ENDED: Phase.GONE,
    },
    Phase.RUNNING: {
        # A standby has ended before the body began: a fresh process replaces it.
        Trigger.STARTED: Phase.RUNNING,
        Trigger.NOT_MOVED: Phase.RUNNING,
        Trigger.MOVING_OUT: Phase.LEAVING,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.LEAVING: {
        Trigger.NOT_MOVED: Phase.RUNNING,
        # The driver refused, and meanwhile another suspension was requested.
        Trigger.MOVING_OUT: Phase.LEAVING,
        Trigger.MOVED_OUT: Phase.AWAY,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.AWAY: {
        # The device has no room for the process yet.
        Trigger.MOVED_OUT: Phase.AWAY,
        Trigger.RELEASED: Phase.RELEASED,
        Trigger.MOVING_IN: Phase.RETURNING,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.RELEASED: {
        Trigger.PLACED: Phase.AWAY,
        Trigger.REJECTED: Phase.RELEASED,
        # The devices were released while the suspension's thread looked for room there.
        Trigger.MOVED_OUT: Phase.RELEASED,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.RETURNING: {
        # Others took the free memory before the driver was called.
        Trigger.MOVED_OUT: Phase.AWAY,
        Trigger.MOVED_IN: Phase.RUNNING,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.ENDING: {**dict.fromkeys(_LATE, Phase.ENDING), Trigger.RECOVERED: Phase.GONE},
    Phase.GONE: dict.fromkeys(_LATE, Phase.GONE),
}

#: Phases in which devices are reserved for a process that has not ended.
WITH_DEVICES = frozenset({Phase.PLACED, Phase.RUNNING, Phase.LEAVING, Phase.AWAY, Phase.RETURNING})


class IllegalTransition(ProtocolError):  # noqa: N818  # as CPython's and h11's
    """A trigger came in a phase in which it is illegal."""


def next_phase(phase: Phase, trigger: Trigger, before: Iterable[Trigger] = ()) -> Phase:
    """Return the phase after a trigger; raise `IllegalTransition`, with the earlier triggers `before`, if there is none."""
    found = TRANSITIONS[phase].get(trigger)
    if found is None:
        past = ", ".join(each.value for each in before)
        raise IllegalTransition(f"{trigger.value!r} came when {phase.value}; before: {past}")
    return found


class Wisher(Enum):
    """Who wants a process to be suspended."""

    REQUEST = "request"
    PERSON = "person"
    FIRST_RUNS = "first runs"


@dataclass(frozen=True, slots=True)
class Wish:
    """A wish that a request's process is suspended."""

    by: Wisher
    #: Id of the waiting request that is to get the devices; `None`: no request has this wish.
    request_id: str | None = None
    #: Whether the devices are released for all requests once the process is suspended.
    shared: bool = False
