"""Which standby suits a task: what of its environment may still change, and who is furthest along.

Decided from what is handed in. What becomes of one that does not suit is `standby`'s to say; the rule for a
variable is `frameworks.late`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.late import hot_changes, late_changes
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.waiting import Standby

#: Variables to set in a process that waits, or to remove (`None`).
Changes = dict[str, str | None]


def fit_hot(
    standby: Standby, kind: Kind, environment: Mapping[str, str], flags: tuple[str, ...]
) -> Changes | None:
    """Say what must change in the hot standby that is kept for a task; `None`: it does not suit it.

    Args:
        standby: It has a device, and has started its framework there or is about to.
        kind: The task's.
        environment: All that the task needs.
        flags: Of the interpreter.
    """
    changes = hot_changes(
        standby.environment,
        environment,
        standby.kind.hot,
        tuple(registry.ADAPTERS.values()),
        cpus_stated=kind.cpus_stated or standby.kind.cpus_stated,
    )
    return changes if standby.flags == flags else None


def choose_standby(
    standbys: Iterable[Standby],
    kind: Kind,
    environment: Mapping[str, str],
    flags: tuple[str, ...],
) -> tuple[tuple[Standby, Changes] | None, list[Standby]]:
    """Choose the standby that is furthest along among those without a device that suit a task.

    Args:
        standbys: All that there are.
        kind: The task's.
        environment: All that the task needs.
        flags: Of the interpreter.

    Returns:
        It and what must change in it (`None`: none suits), and those that were made for the task's own kind
        and suit no more: the parent's environment has changed since.
    """
    best: tuple[Standby, Changes] | None = None
    best_rank: tuple[Any, ...] = ()
    misfits = []
    for standby in standbys:
        # Not one that has imported what this task would not.
        same = standby.kind.always == kind.always and standby.lent is None
        if standby.ended or not same or not set(standby.spec.modules) <= set(kind.modules):
            continue
        changes = late_changes(
            standby.spec.environment,
            environment,
            registry.ADAPTERS.values(),
            cpus_stated=kind.cpus_stated or standby.kind.cpus_stated,
        )
        if changes is None or standby.flags != flags:
            if standby.kind == kind:
                misfits.append(standby)
            continue
        # One that imports still is further along than one that has not begun.
        rank = (standby.ready, not standby.heating, len(standby.spec.modules), -standby.serial)
        if best is None or rank > best_rank:
            best, best_rank = (standby, changes), rank
    return best, misfits
