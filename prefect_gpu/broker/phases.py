"""Phases of a request, and the one table of their transitions. Pure.

    WAITING ──placed──▶ PLACED ──started──▶ RUNNING ──ended──▶ ENDING ──recovered──▶ GONE
                                             │   ▲
              moving out ┌───────────────────┘   └──────────────┐ moved in
                         ▼                                      │
                      LEAVING ──not moved──▶ RUNNING        RETURNING
                         │                                      ▲
                         └──moved out──▶ AWAY ──moving in───────┘
                                          │ ▲
                                 released ▼ │ placed
                                        RELEASED

A request waits in the queue, is placed on devices, and its process starts. When the process has ended, the devices stay
reserved until they show its memory back. A request that is withdrawn or rejected before it has a process is gone at once.

A process is suspended in steps, which its suspension's thread reports. While its memory is on the host, its devices are
still reserved (AWAY): it may resume there, or they are released, for one waiting request or for all. Then its request
(RELEASED) returns to the queue, and is placed again.

Who wants a process suspended is its `Wish`, data beside the phase: another request, a person, or the first runs on its
device. A wish is set and removed at any time, by every process of the machine, and alone changes no phase: the process
leaves while there is a wish, and resumes while there is none. A person's wish also keeps a released request out of the
queue.

An own request has its phase in its `Ticket`, which `Machine.handle` changes. The phase in the ledger's `Entry` follows:
`preempting` and `planning` make it for the machine. Two steps go from the ledger to the ticket, since the newest entry
decides on them: another request's broker releases devices, and a process begins to resume. ENDING and GONE are phases of
a ticket alone: the entry stays as it is until it is removed.

Threads and processes race, so some triggers come late. They have rows that keep the phase: a second end, steps of a
suspension whose process has ended, a report that the memory is on the host after the devices were released.

Not here: the order of tasks whose inputs are computed (`runner.engine_threads`), and phases of a process
(`runner.process_run`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from prefect_gpu.errors import ProtocolError


class Phase(Enum):
    """The phases of a request."""

    #: In the queue, without devices and without a process.
    WAITING = "waiting"
    #: It has devices, and no process yet.
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
    #: Its process has ended, and the memory may not be back.
    ENDING = "ending"
    #: Nothing is reserved for it any more, or ever was.
    GONE = "gone"


class Trigger(Enum):
    """Events that change the phase of a request. Steps of a suspension have the values of `suspension.suspended.Stage`."""

    PLACED = "placed"
    #: It can never be placed.
    REJECTED = "rejected"
    #: Withdrawn before its placement was known.
    WITHDRAWN = "withdrawn"
    STARTED = "started"
    #: Its process has ended, or never started.
    ENDED = "ended"
    #: The memory is back on its devices, or was given up.
    RECOVERED = "recovered"
    #: The process could not be suspended.
    NOT_MOVED = "refused"
    MOVING_OUT = "moving out"
    MOVED_OUT = "away"
    #: Its devices were released while it was suspended.
    RELEASED = "released"
    MOVING_IN = "moving in"
    MOVED_IN = "running"


#: Triggers that come from other threads and processes, also after the end of the process.
_LATE = frozenset(Trigger) - {Trigger.PLACED, Trigger.REJECTED, Trigger.RECOVERED}

#: Next phase by phase and trigger. A pair that is not here is illegal.
TRANSITIONS: Mapping[Phase, Mapping[Trigger, Phase]] = {
    Phase.WAITING: {
        Trigger.PLACED: Phase.PLACED,
        Trigger.REJECTED: Phase.GONE,
        Trigger.WITHDRAWN: Phase.GONE,
        # The end of a process that never was.
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
        # The driver refused, and the process was asked again meanwhile.
        Trigger.MOVING_OUT: Phase.LEAVING,
        Trigger.MOVED_OUT: Phase.AWAY,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.AWAY: {
        # Its device has no room for it yet.
        Trigger.MOVED_OUT: Phase.AWAY,
        Trigger.RELEASED: Phase.RELEASED,
        Trigger.MOVING_IN: Phase.RETURNING,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.RELEASED: {
        Trigger.PLACED: Phase.AWAY,
        Trigger.REJECTED: Phase.RELEASED,
        # Its devices were released while its thread looked for room there.
        Trigger.MOVED_OUT: Phase.RELEASED,
        Trigger.ENDED: Phase.ENDING,
    },
    Phase.RETURNING: {
        # The room was taken before the driver was called.
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
    """An event came in a phase in which it cannot come."""


def next_phase(phase: Phase, trigger: Trigger, before: Iterable[Trigger] = ()) -> Phase:
    """Return the phase after a trigger; `before` are the last ones of the request, for the error."""
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
    """That a request's process is suspended."""

    by: Wisher
    #: Id of the waiting request that is to get the devices; `None`: it is not the wish of a request.
    request_id: str | None = None
    #: Once the process is suspended, its devices are released for all requests.
    shared: bool = False
