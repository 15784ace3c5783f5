"""What of a child's environment may still change once its frameworks are imported.

By rule: each variable in which a standby differs from the process that a task needs must be one that
its framework reads later (`FrameworkAdapter.applies_late`), or the task gets a fresh process. What
the rule says is proven on real devices by `tests/gpu/test_late_policy.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from prefect_gpu.frameworks.adapter import FrameworkAdapter, HeatingAdapter
from prefect_gpu.frameworks.environment import THREAD_VARIABLES

#: Variables that say how many threads to start. Most are read as a library loads.
CPU_VARIABLES = frozenset({*THREAD_VARIABLES, "NPROC"})


def late_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    adapters: Iterable[FrameworkAdapter],
    *,
    cpus_stated: bool,
) -> dict[str, str | None] | None:
    """Give what must change in a process that has imported its modules, if it still may.

    Args:
        before: The environment that it was started with.
        after: The environment that the task needs.
        adapters: All that there are: a variable belongs to one of them.
        cpus_stated: The task says how many threads it wants. A number that was only computed from
            the machine is set late, which frameworks that have a call for it follow.

    Returns:
        Variables to set, or to remove (`None`); `None`: one of them would come too late.
    """
    adapters = tuple(adapters)
    changes: dict[str, str | None] = {}
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        late = _applies_late(name, old) or any(a.applies_late(name, old, new) for a in adapters)
        if not late and (cpus_stated or name not in CPU_VARIABLES):
            return None
        changes[name] = new
    return changes


def hot_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    hot: str,
    adapters: Collection[FrameworkAdapter],
    *,
    cpus_stated: bool,
) -> dict[str, str | None] | None:
    """Give what must change in a process that has started a framework on its device, if it still may.

    Its device is settled, and so is all that its framework reads when it starts. Other frameworks have
    not started there: of theirs, what applies late does.

    Args:
        before: The environment in which it started the framework.
        after: The environment that the task needs.
        hot: The framework, as in `gpu:framework=`.
        adapters: All that there are.
        cpus_stated: As for `late_changes`, and so is what is returned.
    """
    changes = late_changes(before, after, adapters, cpus_stated=cpus_stated)
    if changes is None:
        return None
    for name in changes:
        if name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            return None
        for adapter in adapters:
            if adapter.name != hot or not isinstance(adapter, HeatingAdapter):
                continue
            old, new = before.get(name), after.get(name)
            if adapter.applies_late(name, old, new) and not adapter.applies_hot(name, old, new):
                return None
    return changes


def _applies_late(name: str, old: str | None) -> bool:
    """Tell of the variables that belong to no framework."""
    if name == "CUDA_VISIBLE_DEVICES":
        # The driver reads it when it is initialised. A module that found no device at all may have
        # decided for the CPU.
        return old is None or old.strip() not in ("", "-1", "NoDevFiles")
    # Prefect's settings travel with the run, and win over the environment.
    return name == "CUDA_DEVICE_ORDER" or name.startswith("PREFECT_")
