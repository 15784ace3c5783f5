"""The code of a warm process: imports modules before the task is known, then becomes the task's process, or is forked.

An import may start a framework or driver, which a policy can then no longer configure (`find_started`): no task may run
in such a process. `processes.standby_kind` chooses the modules.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from prefect_gpu import in_task as inside
from prefect_gpu.devices import cuda_driver
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.process_resources import read_own_bytes, read_status
from prefect_gpu.processes.messages import Late, Warmed

if TYPE_CHECKING:
    from prefect_gpu.child.forks import Source


#: `sys.path` before the imports, which may add paths.
_sys_path: tuple[str, ...]


def warm_up(entries: Iterable[str], source: Source | None = None) -> Warmed:
    """Import modules (`WarmSpec.modules`), and return the report for the parent; `source`: the process is to be forked."""
    global _sys_path
    entries, before = tuple(entries), frozenset(sys.modules)
    _sys_path = tuple(sys.path)
    watched = contextlib.nullcontext() if source is None else source.watched()
    with inside.before_the_task() as asked, watched:
        failed = import_all(entries, source)
    # Finalising libraries takes most of a second with PyTorch.
    gc.freeze()
    touched = find_started() or _find_users_module(entries, before)
    if source is not None:
        touched = touched or source.find_problem()
    if asked:
        touched = touched or "a module asked current_allocation() as it was imported"
    return Warmed(tuple(failed), touched, read_own_bytes("RssAnon"))


def import_all(entries: Iterable[str], source: Source | None = None) -> list[str]:
    """Import modules (as in `WarmSpec.modules`), and return the entries that failed."""
    failed = []
    for entry in entries:
        module, _, names = entry.partition(":")
        try:
            # As `import module` or `from module import names`, including submodules.
            __import__(module, fromlist=names.split(",") if names else ())
            if module == "prefect_gpu.child.prefect_context":
                sys.modules[module].rehearse()
        except BaseException:
            # The task's fresh process imports the module again, and the body gets the exception there.
            failed.append(entry)
        if source is not None:
            source.look(entry)
    return failed


def find_started() -> str:
    """Return which framework or driver an import has started, as text; empty: none. Does not load a driver."""
    for name, adapter in registry.ADAPTERS.items():
        if name not in sys.modules:
            continue
        try:
            started = adapter.has_started()
        except Exception as error:
            return f"{name} could not say whether it has started: {error}"
        if started:
            return f"{name} was started by a module as it was imported"
    if cuda_driver.is_initialized():
        return "the CUDA driver was initialised by a module as it was imported"
    return ""


def _find_users_module(entries: Iterable[str], before: Collection[str]) -> str:
    """Return which module of the user's a library has imported before the task, as text; empty: none."""
    asked = {entry.partition(":")[0].partition(".")[0] for entry in entries}
    for name in sys.modules.keys() - before:
        path = look_at(name, "__file__")
        # Some modules name a file that never existed.
        if isinstance(path, str) and registry.is_users(name) and os.path.exists(path):
            if name.partition(".")[0] not in asked:
                return f"a library imports {name}, which is no library"
    return ""


def become_task_process(late: Late, parent: int) -> None:
    """Set a task's environment, folder, arguments and paths, and the limits that the process `parent` has by now.

    Raise `OSError` if the folder does not exist.
    """
    _follow(parent)
    for name, value in late.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if late.cwd:
        os.chdir(late.cwd)
    sys.argv[:] = late.argv
    if late.sys_path not in (_sys_path, tuple(sys.path)):
        # As in a process started now with these paths, after the same imports.
        added = [path for path in sys.path if path not in (*_sys_path, *late.sys_path)]
        sys.path[:] = [*late.sys_path, *added]


def _follow(parent: int) -> None:
    """Set the current umask, CPU affinity and limits of the process `parent`; do nothing without `/proc` (macOS)."""
    umask = read_status(parent, "Umask")
    if not umask:
        return
    os.umask(int(umask, 8))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(parent))
    import resource

    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limit = getattr(resource, name)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(limit, resource.prlimit(parent, limit))
