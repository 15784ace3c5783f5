"""Reasons why a task waits, as values, and their English sentences, which no code reads back.

Pure. A task that can never start gets a `PlacementError` instead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect_gpu.units import MIB, format_bytes, format_seconds

#: Most names in a list and most characters of a sentence. Prefect (3.8.8) cuts the message of a state at 100,000
#: characters, and a log line at 1,000,000.
MOST_NAMES = 3
MOST_CHARACTERS = 2000


class WaitKind(enum.Enum):
    """Kind of a wait. The value is the template of the text after "waiting for"; `r` is the `Reason`."""

    FIRST_READING = "the first reading of the devices"
    DEVICES_SILENT = "the devices to answer ({r.detail})"
    REFUSAL = "its refusal: {r.detail}"
    PROCESSES = "another process to end{on_node} (max_processes is {r.limit})"
    HOST_MEMORY = "{need} of host memory for its process{on_node}; {free} available{at}"
    DEVICE_ERROR = "{asked}; {r.at}: {r.detail}"
    DEVICE_TASKS = "{asked}; max_tasks_per_device is {r.limit}, and as many tasks run on each"
    EMPTY_DEVICE = "{asked}; running there: {tasks}"
    EXCLUSIVE_TASK = "{asked}; in exclusive use by: {tasks}"
    BUSY_DEVICE = "{asked} where it computes alone; kept busy by: {tasks}"
    DEVICE_MEMORY = "{asked}; most free {free}{at}"
    FIRST_RUN_MEMORY = "{asked} (first run, memory need unknown); most free {free}{at}"
    RESERVED_MEMORY = "{asked}; most free {free}{at}, the rest reserved for first runs: {tasks}"
    EARLIER = "earlier task runs to ask for their devices"
    FIRST_RUN = "the first run of {tasks} to show how much memory it needs"
    RESUME = "prefect-gpu resume: its memory is {r.detail}"
    ROOM = "room, suspended for {r.suspended_for}: its memory is {r.detail}"
    OTHER_NODE = "other devices: node {r.at} of the cluster refused the task: {r.detail}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a task waits. Each kind uses the fields that its template needs."""

    kind: WaitKind
    #: Bytes asked of each device, or of host memory. Several values: the need differs by model. Empty: a whole device.
    need_bytes: tuple[int, ...] = ()
    #: Free bytes of the emptiest device or node, from `shown_bytes`, and the name of that device or node.
    free_bytes: int = 0
    at: str | None = None
    #: Number of devices asked for, of devices that the request may use, and of their cluster nodes (0: no cluster).
    count: int = 1
    devices: int = 1
    nodes: int = 0
    #: Label of the only device, or name of the only node.
    where: str | None = None
    #: Names of the tasks that occupy the devices, from `shown_names`.
    tasks: tuple[str, ...] = ()
    #: `max_processes` or `max_tasks_per_device`.
    limit: int = 0
    #: Cause of the task's suspension, as in reports ("task 'evaluate'").
    suspended_for: str | None = None
    #: Place of the suspended task's memory, or an error's text.
    detail: str | None = None
    #: Number of requests ahead in the queue; their task names, each with whether its flow is another one.
    ahead: int = 0
    ahead_tasks: tuple[tuple[str, bool], ...] = ()
    #: Number of later requests that started first.
    passed: int = 0
    #: Whether no later request may start on the devices any more; see `backfill`.
    drains: bool = False
    #: Labels of the devices kept for the request, and seconds until they are expected to be free; `None`: not known.
    kept: tuple[str, ...] = ()
    free_in_s: float | None = None
    #: Why the reservations are not shared with other flows; `None`: they are shared.
    ledger_problem: str | None = None

    @property
    def topic(self) -> tuple[object, ...]:
        """Identity of the reason without sizes and counts. The log has one line for each topic."""
        return self.kind, self.ahead > 0, self.suspended_for


def shown_bytes(size_bytes: int) -> int:
    """Return free bytes rounded down to 64 MiB, so that small allocations do not change a reason."""
    return max(0, size_bytes) // (64 * MIB) * (64 * MIB)


def shown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return distinct names, at most `MOST_NAMES` + 1: one more than a sentence shows, so that it can add "and others"."""
    return tuple(dict.fromkeys(names))[: MOST_NAMES + 1]


#: Templates of the ends of sentences, by the field of `Reason` that must be set.
_ENDS = {
    "ahead": "; {r.ahead} ahead in the queue: {ahead}",
    "passed": "; later tasks that started before it: {r.passed}",
    "drains": "; no later task may start on the devices that it can use",
    "kept": "; {kept} kept for it",
    "free_in_s": ", free in about {free_in}",
    "ledger_problem": "; {r.ledger_problem}",
}


def sentence(reason: Reason) -> str:
    """Return a reason as the text after "waiting for": `6.6GiB on any of 2 devices; most free 3.1GiB`."""
    ends = (words for field, words in _ENDS.items() if getattr(reason, field))
    ahead = [f"{name} (another flow)" if other else name for name, other in reason.ahead_tasks]
    need = " or ".join(map(format_bytes, reason.need_bytes))
    text = "".join((reason.kind.value, *ends)).format(
        r=reason,
        need=need,
        asked=_asked(reason, need),
        free=format_bytes(reason.free_bytes),
        tasks=_join(reason.tasks),
        on_node=f" on {'any of ' * (reason.nodes > 1)}{_nodes(reason)}" if reason.nodes else "",
        at=f" ({reason.at})" if reason.at else "",
        ahead=_join(ahead),
        kept=_join(reason.kept),
        free_in=format_seconds(reason.free_in_s),
    )
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 2]} …"


def _asked(reason: Reason, need: str) -> str:
    alone = " and no other task" if reason.kind is WaitKind.EMPTY_DEVICE else ""
    amount = f"{need}{alone}" if need else "a device to itself"
    where, several = reason.where, reason.count > 1
    if reason.devices > 1:
        where = f"{reason.count if several else 'any'} of {reason.devices} devices"
        if reason.nodes:
            where += f" on {'one of ' * (several and reason.nodes > 1)}{_nodes(reason)}"
    return f"{amount} on {where}"


def _nodes(reason: Reason) -> str:
    return f"{reason.nodes} nodes" if reason.nodes > 1 else f"node {reason.where}"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (" and others" if len(names) > MOST_NAMES else "")
