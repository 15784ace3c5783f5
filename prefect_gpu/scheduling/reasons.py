"""Why a task waits, as a value, and the sentence that says so.

Pure. Every cause of a wait makes a `Reason`. Only this module has the English of waits, and no code reads its sentences.
A task that can never start has a `PlacementError` instead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect_gpu.units import MIB, format_bytes, format_seconds

#: Most names and most characters of a sentence: names and errors have any length. Prefect cuts the message of a state
#: at 100,000 characters, and a log line at 1,000,000 (3.8.8).
MOST_NAMES = 3
MOST_CHARACTERS = 2000


class WaitKind(enum.Enum):
    """What a task lacks to start or resume; each value begins a sentence that follows "waiting for"."""

    FIRST_READING = "the first reading of the devices"
    DEVICES_SILENT = "the devices to answer ({r.detail})"
    REFUSAL = "its refusal: {r.detail}"
    PROCESSES = "another process to end{on_node} (max_processes is {r.limit})"
    HOST_MEMORY = "{need} of host memory for its process{on_node}; {free} available{at}"
    DEVICE_ERROR = "{asked}; {r.at}: {r.detail}"
    DEVICE_TASKS = "{asked}; max_tasks_per_device is {r.limit}, and as many tasks run on each"
    #: The task must be alone on its devices, and others run there.
    EMPTY_DEVICE = "{asked}; running there: {tasks}"
    EXCLUSIVE_TASK = "{asked}; in exclusive use by: {tasks}"
    DEVICE_MEMORY = "{asked}; most free {free}{at}"
    FIRST_RUN_MEMORY = "{asked} (first run, memory need unknown); most free {free}{at}"
    RESERVED_MEMORY = "{asked}; most free {free}{at}, the rest reserved for first runs: {tasks}"
    FIRST_RUN = "the first run of {tasks} to show how much memory it needs"
    RESUME = "prefect-gpu resume: its memory is {r.detail}"
    ROOM = "room, suspended for {r.suspended_for}: its memory is {r.detail}"
    OTHER_NODE = "other devices: node {r.at} of the cluster refused the task: {r.detail}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a task waits. Each kind uses the fields that its sentence needs."""

    kind: WaitKind
    #: Bytes asked of each device, or of host memory; several: they differ by model. Empty: a whole device.
    need_bytes: tuple[int, ...] = ()
    #: Most bytes free on a device or node, from `shown_bytes`; `at` is its name.
    free_bytes: int = 0
    at: str | None = None
    #: Devices asked for, devices that the request may use, and their cluster nodes (0: no cluster). `where` is the label
    #: of the only device, or the name of the only node.
    count: int = 1
    devices: int = 1
    nodes: int = 0
    where: str | None = None
    #: Names of the tasks waited for, from `shown_names`; `limit` is `max_processes` or `max_tasks_per_device`.
    tasks: tuple[str, ...] = ()
    limit: int = 0
    #: Cause of its suspension, as in reports ("task 'evaluate'"); place of its memory, or an error's text.
    suspended_for: str | None = None
    detail: str | None = None
    #: Number of requests ahead in the queue; their task names, each with whether it is of another flow.
    ahead: int = 0
    ahead_tasks: tuple[tuple[str, bool], ...] = ()
    #: Number of later requests that started first; no later request may start any more.
    passed: int = 0
    drains: bool = False
    #: Labels of its kept devices, and seconds until they are expected to be free; `None`: not known.
    kept: tuple[str, ...] = ()
    free_in_s: float | None = None
    #: Why the ledger is not shared with other flows; `None`: it is shared.
    ledger_problem: str | None = None

    @property
    def topic(self) -> tuple[object, ...]:
        """The kind of lack without its size: one log line for each topic."""
        return self.kind, self.ahead > 0, self.suspended_for


def shown_bytes(size_bytes: int) -> int:
    """Return free bytes rounded down to 64 MiB, so that small allocations do not change a reason and log it again."""
    return max(0, size_bytes) // (64 * MIB) * (64 * MIB)


def shown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return distinct names, at most one more than a sentence shows."""
    return tuple(dict.fromkeys(names))[: MOST_NAMES + 1]


#: Ends of sentences, each used if its field is set.
_ENDS = {
    "ahead": "; {r.ahead} ahead in the queue: {ahead}",
    "passed": "; later tasks that started before it: {r.passed}",
    "drains": "; no later task may start on the devices that it can use",
    "kept": "; {kept} kept for it",
    "free_in_s": ", free in about {free_in}",
    "ledger_problem": "; {r.ledger_problem}",
}


def sentence(reason: Reason) -> str:
    """Return a reason as text to follow "waiting for": `6.6GiB on any of 2 devices; most free 3.1GiB`."""
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
