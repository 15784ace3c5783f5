"""The code of a warm process: imports modules before the task is known, then becomes the task's process, or is forked.

An import may start a framework or driver, which a policy can then no longer configure (`find_started`): no task may run
in such a process. `processes.standby_kind` chooses the modules.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect_gpu import in_task as inside
from prefect_gpu.devices import cuda_driver
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.process_resources import read_own_bytes, read_status
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.messages import Late, Warmed

if TYPE_CHECKING:
    from prefect_gpu.child.forks import Source


@dataclass(frozen=True, slots=True)
class _Origin:
    """State of the process when it imported modules before its task."""

    #: Wall-clock nanoseconds at the beginning of the imports.
    began_ns: int
    #: `sys.path` before the imports, which may add paths.
    sys_path: tuple[str, ...]
    #: Working folder; empty: it did not exist.
    cwd: str
    #: Names and files of the user's modules that were imported; a source imports none.
    files: frozenset[tuple[str, str]]


_origin: _Origin


def warm_up(entries: Iterable[str], source: Source | None = None) -> Warmed:
    """Import modules (`WarmSpec.modules`), and return the report for the parent; `source`: the process is to be forked."""
    global _origin
    entries = tuple(entries)
    began_ns, sys_path, cwd = time.time_ns(), tuple(sys.path), working_folder()
    # A fork imports the user's modules itself: what they open, draw at random or start belongs to one task.
    libraries = entries if source is not None else tuple(itertools.takewhile(_is_library, entries))
    with inside.before_the_task() as asked:
        with contextlib.nullcontext() if source is None else source.watched():
            failed = import_all(libraries, source)
        # Finalising libraries takes most of a second with PyTorch. The user's objects may hold files open.
        gc.freeze()
        failed += import_all(entries[len(libraries) :])
    # Otherwise this collection of the objects of the user's imports would fall into the body's time.
    gc.collect()
    touched = find_started() or ("" if source is None else source.find_problem(entries))
    if asked:
        touched = touched or "a module asked current_allocation() as it was imported"
    # After the imports, since the file of a module shows whether the module is the user's.
    has_users = any(registry.is_users(entry.partition(":")[0]) for entry in entries)
    files = frozenset(users_files() if has_users and source is None else ())
    _origin = _Origin(began_ns, sys_path, cwd, files)
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


def become_task_process(late: Late, parent: int) -> None:
    """Set a task's environment, folder, arguments and paths, and the limits that the process `parent` has by now.

    Raise `OSError` if the folder does not exist, `ImportError` if a process that starts now might find other
    modules than this process has imported.
    """
    _check_modules(late)
    _follow(parent)
    _set_variables(late.environment)
    if late.cwd:
        os.chdir(late.cwd)
    sys.argv[:] = late.argv
    before, wanted = _origin.sys_path, late.sys_path
    if wanted not in (before, tuple(sys.path)):
        # As in a process started now with these paths, after the same imports.
        added = [path for path in sys.path if path not in before and path not in wanted]
        sys.path[:] = [*wanted, *added]


def _check_modules(late: Late) -> None:
    """Raise `ImportError` if a process started now might import other modules of the user's."""
    if not _origin.files:
        return
    # The parent may have imported the same modules meanwhile, which add the same paths.
    if late.sys_path not in (_origin.sys_path, tuple(sys.path)):
        raise ImportError("modules are found elsewhere by now")
    if late.cwd and late.cwd != _origin.cwd:
        raise ImportError("modules may be found elsewhere in another folder")
    for name, path in _origin.files.union(users_files()):
        # Raises for a missing file, which a process started now would not find.
        if os.stat(path).st_mtime_ns >= _origin.began_ns:
            raise ImportError(f"{name} was written to since it was imported")


def users_files() -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each loaded module of the user's."""
    for name in tuple(sys.modules):
        path = look_at(name, "__file__")
        # Some modules name a file that never existed.
        if isinstance(path, str) and registry.is_users(name) and os.path.exists(path):
            yield name, path


def _is_library(entry: str) -> bool:
    """Return whether an entry of `WarmSpec.modules` is a framework or belongs to this package."""
    module = entry.partition(":")[0]
    return module.partition(".")[0] == "prefect_gpu" or module in registry.ADAPTERS


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


def _set_variables(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
