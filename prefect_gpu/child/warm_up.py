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
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect_gpu import in_task as inside
from prefect_gpu.child import exit as process_exit
from prefect_gpu.child.random_seeds import RandomSeeds
from prefect_gpu.devices import cuda_driver
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import look_at
from prefect_gpu.process_resources import read_own_bytes, read_status
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.messages import Late, Warmed

if TYPE_CHECKING:
    from prefect_gpu.child.forks import ThreadWatch


@dataclass(frozen=True, slots=True)
class _Origin:
    """State of the process when it imported modules before its task."""

    #: Wall-clock nanoseconds at the beginning of the imports.
    began_ns: int
    #: `sys.path` before the imports, which may add paths.
    sys_path: tuple[str, ...]
    #: Working folder; empty: it did not exist.
    cwd: str
    #: Names and files of the user's modules that were imported.
    files: frozenset[tuple[str, str]]
    #: Variables before the imports.
    environment: Mapping[str, str]
    #: Files that libraries have opened, of a process that is forked.
    opened: Sequence[weakref.ref[Any]]
    #: Generators of random numbers, of a process that is forked.
    seeds: RandomSeeds


_origin: _Origin


def origin() -> _Origin:
    """Return the state of this warm process, or of the one that it is a fork of, at its imports."""
    return _origin


def warm_up(entries: Iterable[str], forks: bool) -> Warmed:
    """Import modules (`WarmSpec.modules`), and return the report for the parent; `forks`: the process is to be forked."""
    global _origin
    # Imported late: it imports this module.
    from prefect_gpu.child.forks import ThreadWatch, find_problem

    entries, loaded = tuple(entries), frozenset(sys.modules)
    began_ns, sys_path, cwd = time.time_ns(), tuple(sys.path), working_folder()
    environment, opened = dict(os.environ), list[weakref.ref[Any]]()
    seeds = RandomSeeds()
    # A fork imports the user's modules itself: what they open, draw at random or start belongs to one task.
    libraries = entries if forks else tuple(itertools.takewhile(_is_library, entries))
    watch = ThreadWatch() if forks else None
    with inside.before_the_task() as asked:
        with seeds.watched() if forks else contextlib.nullcontext():
            failed = import_all(libraries, watch, seeds if forks else None)
        if forks:
            # Otherwise each fork would write the buffered output as well.
            opened = process_exit.write_open_files()
            process_exit.flush_streams()
        # Finalising libraries takes most of a second with PyTorch. The user's objects may hold files open.
        gc.freeze()
        failed |= import_all(entries[len(libraries) :])
    # Otherwise this collection of the objects of the user's imports would fall into the body's time.
    gc.collect()
    started = find_started()
    if watch is not None:
        started = started or find_problem(watch) or _find_users(entries, loaded)
    if asked:
        started = started or "a module asked current_allocation() as it was imported"
    # After the imports, since the file of a module shows whether the module is the user's.
    has_users = any(registry.is_users(entry.partition(":")[0]) for entry in entries)
    files = frozenset(_users_files() if has_users else ())
    _origin = _Origin(began_ns, sys_path, cwd, files, environment, opened, seeds)
    return Warmed(tuple(failed), started, read_own_bytes("RssAnon"))


def import_all(
    entries: Iterable[str], watch: ThreadWatch | None = None, seeds: RandomSeeds | None = None
) -> dict[str, str]:
    """Import modules (as in `WarmSpec.modules`), and return the reason of each failure by entry."""
    failed = {}
    for entry in entries:
        module, _, names = entry.partition(":")
        try:
            # As `import module` or `from module import names`, including submodules.
            __import__(module, fromlist=names.split(",") if names else ())
            if module == "prefect_gpu.child.prefect_context":
                sys.modules[module].rehearse()
        except BaseException as error:
            # The task's fresh process imports the module again, and the body gets the exception there.
            failed[entry] = f"{type(error).__name__}: {error}"
        if watch is not None:
            watch.look(entry)
        if seeds is not None:
            seeds.look()
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


def become_task_process(late: Late) -> None:
    """Set a task's environment, folder, arguments and paths.

    Raise `OSError` if the folder does not exist, `ImportError` if a process that starts now might find other
    modules than this process has imported.
    """
    _check_modules(late)
    follow(os.getppid())
    _set_variables(late.environment)
    if late.cwd:
        os.chdir(late.cwd)
    sys.argv[:] = late.argv
    set_paths(late.sys_path)


def set_paths(wanted: tuple[str, ...]) -> None:
    """Set `sys.path` as in a process started now with these paths, after the same imports."""
    before = _origin.sys_path
    if wanted not in (before, tuple(sys.path)):
        added = [path for path in sys.path if path not in before and path not in wanted]
        sys.path[:] = [*wanted, *added]


def _check_modules(late: Late) -> None:
    """Raise `ImportError` if a process started now might import other modules of the user's."""
    origin = _origin
    if not origin.files:
        return
    # The parent may have imported the same modules meanwhile, which add the same paths.
    if late.sys_path not in (origin.sys_path, tuple(sys.path)):
        raise ImportError("modules are found elsewhere by now")
    if late.cwd and late.cwd != origin.cwd:
        raise ImportError("modules may be found elsewhere in another folder")
    for name, path in origin.files.union(_users_files()):
        # Raises for a missing file, which a process started now would not find.
        if os.stat(path).st_mtime_ns >= origin.began_ns:
            raise ImportError(f"{name} was written to since it was imported")


def _users_files() -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each loaded module of the user's."""
    for name in tuple(sys.modules):
        path = look_at(name, "__file__")
        # Some modules name a file that never existed.
        if isinstance(path, str) and registry.is_users(name) and os.path.exists(path):
            yield name, path


def _find_users(entries: Iterable[str], loaded: Collection[str]) -> str:
    """Return, as text, that a library among `entries` has imported a module of the user's; empty: no library has.

    `loaded` are the names of the modules that this process had before.
    """
    roots = {entry.partition(":")[0].partition(".")[0] for entry in entries}
    users = (name for name, _ in _users_files() if name not in loaded)
    name = next((name for name in users if name.partition(".")[0] not in roots), "")
    return f"a library imports {name}, which is no library" if name else ""


def _is_library(entry: str) -> bool:
    """Return whether an entry of `WarmSpec.modules` is a framework or belongs to this package."""
    module = entry.partition(":")[0]
    return module.partition(".")[0] == "prefect_gpu" or module in registry.ADAPTERS


def follow(parent: int) -> None:
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
