"""What a standby is made for: the modules it imports, and what its environment says at that time.

Tasks of one kind can use each other's standbys. Only what can be imported already is imported ahead,
and nothing of the user's that a process of the task would not import anyway. How many there are is
decided in `scheduling.standbys`; who gets one, in `standby`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import FrameworkPolicy, HeatingAdapter
from prefect_gpu.frameworks.environment import child_environment
from prefect_gpu.frameworks.late import CPU_VARIABLES
from prefect_gpu.processes import values

#: What every task's process imports before its body: Prefect, and what puts it into its run.
OWN_MODULES = ("prefect_gpu.prefect_bridge", "prefect_gpu.task_runner")


#: Stands for a framework where devices are simulated: there is a context, and nothing to start.
SIMULATED = "simulated"


@dataclass(frozen=True)
class Kind:
    """Which standbys can do a task's work."""

    #: Of ours, of Prefect's and the frameworks': nothing in them is the user's.
    always: tuple[str, ...]
    #: What the task's own code imports, its module first.
    users: tuple[str, ...]
    #: Variables in which the process differs from its parent; `None` removes one.
    environment: tuple[tuple[str, str | None], ...]
    #: The task states how many threads it wants, so one with another number will not do.
    cpus_stated: bool
    #: Threads that libraries may start which read it as they load.
    cpus: int = field(compare=False)
    #: Host memory that one takes, before any was measured (bytes).
    size_bytes: int = field(compare=False)
    #: Framework that is started ahead on a device, as in `gpu:framework=`, or `SIMULATED`; empty: none.
    hot: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """All that it imports, in this order: a framework before what needs it."""
        return (*self.always, *self.users)

    def without_users(self) -> Kind:
        """Give the kind that imports nothing of the user's."""
        return replace(self, users=())

    def environment_of(self, parent: Mapping[str, str]) -> dict[str, str]:
        """Give a standby's whole environment."""
        environment = dict(parent)
        for name in self.always:
            adapter = registry.ADAPTERS.get(_framework_of(name))
            if adapter is not None:
                environment = {**adapter.standby_environment(), **environment}
        changes = {**dict.fromkeys(CPU_VARIABLES, str(self.cpus)), **dict(self.environment)}
        for name, value in changes.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        return environment


def kind_of(
    fn: Any,
    policy: FrameworkPolicy,
    *,
    cpus_stated: bool,
    size_bytes: int,
    environ: Mapping[str, str] | None = None,
    hot: bool = False,
) -> Kind:
    """Tell what can be done ahead for a task.

    Args:
        fn: Its function.
        policy: As it will be, as far as it is known: frameworks, allocator options, caching, threads.
            Devices and budgets are not.
        cpus_stated: A tag says how many threads.
        size_bytes: Host memory that such a process takes, roughly.
        environ: The parent's environment; `None`: this process's.
        hot: Its framework is to be started ahead, where that can be done.
    """
    environ = os.environ if environ is None else environ
    names = [n for n in policy.frameworks or policy.detected if n in registry.ADAPTERS]
    always = [*OWN_MODULES, *(registry.ADAPTERS[name].module for name in names)]
    changes = child_environment(policy, registry.adapters_for(policy), environ)
    if policy.device_kind == "nvml":
        # Its device is not known yet, and with none to see, modules would decide for the CPU.
        del changes["CUDA_VISIBLE_DEVICES"]
    return Kind(
        always=tuple(name for name in always if _can_import(name)),
        users=tuple(_users_modules(fn, always, names)),
        environment=tuple(sorted((n, v) for n, v in changes.items() if n not in CPU_VARIABLES)),
        cpus_stated=cpus_stated,
        cpus=policy.cpus,
        size_bytes=size_bytes,
        hot=_find_hot(policy, names) if hot else "",
    )


def _find_hot(policy: FrameworkPolicy, names: Iterable[str]) -> str:
    """Name the framework to start ahead; the context that it makes is all the process's."""
    if policy.device_kind == "simulated":
        return SIMULATED
    if policy.device_kind != "nvml":
        return ""
    hot = (name for name in names if isinstance(registry.ADAPTERS[name], HeatingAdapter))
    return next((name for name in hot if _can_import(registry.ADAPTERS[name].module)), "")


@functools.cache
def _framework_of(module: str) -> str:
    return next((n for n, a in registry.ADAPTERS.items() if a.module == module), "")


def _users_modules(fn: Any, always: Iterable[str], frameworks: Iterable[str]) -> list[str]:
    taken = {*always, *OWN_MODULES}
    # Another framework's, which a branch imports that this task does not take.
    others = {r for r, name in registry.FRAMEWORK_BY_ROOT.items() if name not in frameworks}
    found = []
    for entry in registry.needed_modules(fn):
        module = entry.partition(":")[0]
        root = module.partition(".")[0]
        if module in taken or root in others or root == "__main__":
            continue
        if root in sys.builtin_module_names:
            continue
        if _can_import(module):
            found.append(entry)
    return found


def _can_import(module: str) -> bool:
    """Tell whether a child could import a module; imports nothing."""
    if module in sys.modules:
        return values.is_importable(module)
    root = module.partition(".")[0]
    if root in sys.modules:
        return values.is_importable(root)
    try:
        return importlib.util.find_spec(root) is not None
    except Exception:  # a finder of somebody else's, or a module without a spec
        return False
