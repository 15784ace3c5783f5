"""In a child that was made ahead of its task: import what it will need, then become that task's.

What the imports did that a policy would come too late for is found here (`touched`): such a process
must not run a task. Which modules is `kind`'s choice; which variables may still change afterwards,
`frameworks.late`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefect_gpu import inside
from prefect_gpu.frameworks import registry
from prefect_gpu.frameworks.adapter import FrameworkPolicy, HeatingAdapter
from prefect_gpu.processes.interpreter import working_folder
from prefect_gpu.processes.messages import Heat, Heated, Late, Warmed
from prefect_gpu.processes.spec import STANDBY_TITLE

#: The driver's library, by the name under which every program loads it.
DRIVER_LIBRARY = "libcuda.so.1"

#: Fields of proc_pid_stat(5): where the arguments begin, and where the environment does. The next
#: field is where they end.
ARGUMENTS, ENVIRONMENT = 48, 50

#: What the driver answers before it was initialised (`CUDA_ERROR_NOT_INITIALIZED`).
_NOT_INITIALIZED = 3


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where modules were imported from ahead of the task."""

    #: Wall-clock nanoseconds when the imports began.
    began_ns: int
    #: Before the imports: modules add to it.
    sys_path: tuple[str, ...]
    #: Empty: the folder was gone.
    cwd: str
    #: Modules of the user's are among them.
    has_users: bool
    #: All modules that were there afterwards, and the files of those that are the user's.
    names: frozenset[str]
    files: tuple[tuple[str, str], ...]


#: `None`: this process was made for its task.
_origin: _Origin | None = None


def warm_up(entries: Iterable[str]) -> Warmed:
    """Import modules, and look at what that did.

    What libraries made is set aside from the garbage collector for good: to take it apart as the process
    ends takes most of a second with PyTorch. What came with the user's modules is not, for they may
    hold files open.

    Args:
        entries: As in `WarmSpec.modules`: libraries before what needs them.
    """
    global _origin
    entries = tuple(entries)
    began_ns, sys_path, cwd = time.time_ns(), tuple(sys.path), working_folder()
    failed = []
    libraries_end = False
    with inside.before_the_task() as asked:
        for entry in entries:
            if not libraries_end and not _is_library(entry):
                gc.freeze()
                libraries_end = True
            try:
                _import(entry)
            except BaseException:
                # Whatever it is: the body will see it, in a process that has not seen half of it.
                failed.append(entry)
    if not libraries_end:
        gc.freeze()
    # Now, or the body's first objects would have the collector look at all that the user's imports made.
    gc.collect()
    touched = find_touched()
    if asked:
        touched = touched or "a module asked current_allocation() as it was imported"
    # Not before: whose a module is, its place tells.
    has_users = any(registry.is_users(entry.partition(":")[0]) for entry in entries)
    names = frozenset(sys.modules)
    # Some modules name a file that never was.
    found = _users_files(names) if has_users else ()
    files = tuple((name, path) for name, path in found if os.path.exists(path))
    _origin = _Origin(began_ns, sys_path, cwd, has_users, names, files)
    return Warmed(tuple(failed), touched, private_bytes())


def set_aside(libraries: Iterable[str]) -> None:
    """Import modules that are none of the user's, and set what they made aside from the collector.

    Taking them apart would keep the device's memory as the process ends, as `warm_up` says.
    """
    for library in libraries:
        importlib.import_module(library)
    gc.freeze()


def _import(entry: str) -> None:
    module, _, names = entry.partition(":")
    if names:
        # What `from module import names` does, submodules included.
        __import__(module, fromlist=names.split(","))
    else:
        importlib.import_module(module)
    if module == "prefect_gpu.prefect_bridge":
        sys.modules[module].rehearse()


def find_touched(open_library: Callable[..., Any] = ctypes.CDLL) -> str:
    """Say what was started that reads its configuration once; empty: nothing.

    It starts nothing itself: a driver that is not loaded is not loaded by this, and one that is not
    initialised stays so.
    """
    for name, adapter in registry.ADAPTERS.items():
        if adapter.module not in sys.modules:
            continue
        try:
            started = adapter.has_started()
        except Exception as error:
            return f"{name} could not say whether it has started: {error}"
        if started:
            return f"{name} was started by a module as it was imported"
    try:
        driver = open_library(DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        # Not loaded; or no such thing on this system (macOS).
        return ""
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED:
        return ""
    return "the CUDA driver was initialised by a module as it was imported"


def private_bytes() -> int:
    """Give the private memory of this process; 0: cannot be told."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def heat(order: Heat) -> Heated:
    """Start a framework on its device; what goes wrong is told, not raised."""
    _set_variables(order.environment)
    adapter = registry.ADAPTERS.get(order.framework)
    try:
        if isinstance(adapter, HeatingAdapter):
            adapter.heat()
    except BaseException as error:
        return Heated(f"{type(error).__name__}: {error}".partition("\n")[0])
    return Heated()


def hold_to(framework: str, policy: FrameworkPolicy) -> None:
    """Hold a framework that was started ahead to a policy, as far as that is not done at its import."""
    adapter = registry.ADAPTERS.get(framework)
    if isinstance(adapter, HeatingAdapter):
        adapter.apply_hot(policy)


def catch_up(late: Late) -> None:
    """Become the process of a task: its environment, folder, arguments and paths.

    Raises:
        OSError: The folder is gone.
        ImportError: What was imported ahead is not what the task would import now.
    """
    _check_modules(late)
    _follow_parent()
    _set_variables(late.environment)
    if late.cwd:
        os.chdir(late.cwd)
    sys.argv[:] = late.argv
    _set_path(late.sys_path)
    retitle(late.title)


def _set_path(wanted: tuple[str, ...]) -> None:
    """Look for modules where a process made now would, once it had imported the same."""
    before = wanted if _origin is None else _origin.sys_path
    if wanted in (before, tuple(sys.path)):
        return
    added = [path for path in sys.path if path not in before and path not in wanted]
    sys.path[:] = [*wanted, *added]


def _check_modules(late: Late) -> None:
    """See that the user's modules are those that a process made now would have."""
    origin = _origin
    if origin is None or not origin.has_users:
        return
    # The parent may have imported, since, what adds to its path.
    if late.sys_path not in (origin.sys_path, tuple(sys.path)):
        raise ImportError("modules are found elsewhere by now")
    if late.cwd and late.cwd != origin.cwd:
        raise ImportError("modules may be found elsewhere in another folder")
    # To look at thousands of modules takes 3 ms, for which the task would wait.
    later = sys.modules.keys() - origin.names
    for name, path in (*origin.files, *_users_files(later)):
        # A file that is gone, too: a process made now would not have it.
        if os.stat(path).st_mtime_ns >= origin.began_ns:
            raise ImportError(f"{name} was written to since it was imported")


def _users_files(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Give those modules that are the user's and came from a file, with the file."""
    for name in names:
        path = registry.look_at(name, "__file__")
        if isinstance(path, str) and registry.is_users(name):
            yield name, path


def _is_library(entry: str) -> bool:
    """Tell what is ours, and frameworks."""
    module = entry.partition(":")[0]
    frameworks = (adapter.module for adapter in registry.ADAPTERS.values())
    return module.partition(".")[0] == "prefect_gpu" or module in frameworks


def _follow_parent() -> None:
    """Take over what a process made now would inherit: its umask, and its limits of resources."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Umask:"):
                    os.umask(int(line.split()[1], 8))
                    break
    except OSError:
        # No `/proc` (macOS): as it was when this process was made.
        return
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


def retitle(title: str, before: str = STANDBY_TITLE) -> None:
    """Show another title in `ps`, in the place of one; without effect where that cannot be done."""
    size = len(before)
    rewrite(ARGUMENTS, before.encode() + b"\0", title.encode()[:size].ljust(size) + b"\0")


def rewrite(field: int, before: bytes, after: bytes) -> None:
    """Change what others see of this process; without effect where that cannot be done.

    Args:
        field: `ARGUMENTS` or `ENVIRONMENT`, as this process was started with.
        before: What to look for; its last place counts.
        after: What to put there, of the same length.
    """
    if len(before) != len(after):
        return
    # Through a file, so that a wrong address is an error and no segfault.
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # The first here is the third.
        begin, end = int(fields[field - 3]), int(fields[field - 2])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            place = memory.read(end - begin).rfind(before)
            if begin > 0 and place >= 0:
                memory.seek(begin + place)
                memory.write(after)
    except (OSError, ValueError, IndexError, OverflowError):
        return
