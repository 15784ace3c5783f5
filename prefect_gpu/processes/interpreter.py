"""Starts a fresh interpreter for a child, and gives it the state of this interpreter.

`launcher` uses a child's process by the protocol `Process`. `forks` has processes that are forked instead.
"""

from __future__ import annotations

import contextlib
import copyreg
import logging
import multiprocessing
import operator
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, cast

from prefect_gpu.frameworks import process_settings

BOOTSTRAP = Path(__file__).parents[1] / "child" / "bootstrap.py"


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """A request to start a child process."""

    #: Shown by `ps` after the interpreter and the script; not for a fork.
    title: str
    #: Descriptor of the child's end of the channel.
    channel: int
    environment: Mapping[str, str]
    #: Folder to start in; empty: the parent's.
    cwd: str
    #: Another descriptor to inherit; not for a fork.
    control: int | None = None


class Process(Protocol):
    """A child process that leads its own session and writes its output to unbuffered pipes."""

    @property
    def pid(self) -> int:
        """Process id, also the id of the session and of the process group."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Reading end of the standard output."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Reading end of the standard error."""

    #: Exit code after `wait`; negative: signal number. A fork of the parent sets it, to wait for no process.
    returncode: int | None

    def open_pidfd(self) -> int | None:
        """Return a new pidfd, readable when the process has ended; `None`: not supported, or no descriptor is left."""

    def poll(self) -> int | None:
        """Return the exit code, without waiting; `None`: the process has not ended."""

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""


#: Function that starts a process, on the launcher's thread; raises `OSError` if that fails.
Spawner = Callable[[SpawnRequest], Process]


class Interpreter(subprocess.Popen[bytes]):
    """Process of a fresh interpreter; implements `Process`."""

    def open_pidfd(self) -> int | None:
        """See `Process.open_pidfd`."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None


def start_interpreter(request: SpawnRequest) -> Interpreter:
    """Start a fresh interpreter with the flags of this interpreter; a `Spawner`. Raise `OSError` if that fails."""
    script = str(BOOTSTRAP), str(request.channel), request.title
    return Interpreter(
        [sys.executable, *interpreter_flags(), *script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Unbuffered: data left in Python's buffer by a fork or a slow reader would be lost.
        bufsize=0,
        pass_fds=(request.channel,)
        if request.control is None
        else (request.channel, request.control),
        start_new_session=True,
        env=dict(request.environment),
        cwd=request.cwd or None,
    )


def import_paths() -> tuple[str, ...]:
    """Return `sys.path` for a child that may start in another folder: `""` becomes the current folder's path."""
    # Python ignores entries that are not text, such as a `Path`.
    return tuple(os.path.abspath(p) if p == "" else p for p in sys.path if isinstance(p, str))


def interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with (`-W`, `-X`, `-O`, …)."""
    # `multiprocessing` uses this function for spawned processes; there is no public function.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def working_folder() -> str:
    """Return the working folder of this process; empty: the folder was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def environment_with(
    changes: Mapping[str, str | None], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return `base` (`None`: this process's environment) with variables set, or removed if their change is `None`."""
    changed = {**(os.environ if base is None else base), **changes}
    return {name: value for name, value in changed.items() if value is not None}


#: Limits that a program may set: `sys.get…` and `sys.set…` with these ends. Python 3.10 may lack some.
_LIMITS = ("recursionlimit", "switchinterval", "_int_max_str_digits")

#: Warning filters of this interpreter before any library was imported.
_FIRST_FILTERS = tuple(warnings.filters)


@dataclass(frozen=True, slots=True)
class InterpreterState:
    """State of the flow's interpreter that children take over. Unpickling the state imports no user code."""

    #: Key of `multiprocessing`, which proxies of a `Manager` need to connect.
    authkey: bytes = field(repr=False)
    #: Name of the process in `multiprocessing` and log records.
    process_name: str
    start_method: str | None
    #: Values of limits, by their names in `_LIMITS`.
    limits: Mapping[str, float]
    #: Warning filters, in the order of `warnings.filters`.
    filters: tuple[WarningFilter, ...]
    #: Loggers with a level, or with `propagate` or `disabled` changed.
    loggers: tuple[LoggerState, ...]
    #: Level of `logging.disable`.
    disabled_level: int
    #: SIGINT is ignored, as after `nohup` or in the background of a script.
    ignores_interrupt: bool = False
    #: Numbers of blocked signals. Processes of a cluster block SIGINT.
    blocked_signals: frozenset[int] = frozenset()
    #: Settings of libraries.
    settings: process_settings.ProcessSettings = field(default_factory=dict)

    @classmethod
    def read(cls) -> InterpreterState:
        """Return the state of this interpreter."""
        process = multiprocessing.current_process()
        return cls(
            authkey=bytes(process.authkey),
            process_name=process.name,
            start_method=multiprocessing.get_start_method(allow_none=True),
            limits={e: getattr(sys, f"get{e}")() for e in _LIMITS if hasattr(sys, f"get{e}")},
            filters=tuple(filter(None, map(WarningFilter.of, tuple(warnings.filters)))),
            loggers=tuple(LoggerState.read_all()),
            disabled_level=logging.root.manager.disable,
            ignores_interrupt=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            blocked_signals=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            settings=process_settings.read(),
        )

    def apply(self) -> None:
        """Set the state that is needed before the call is read: proxies connect as they are unpickled."""
        process = multiprocessing.current_process()
        process.authkey = self.authkey
        process.name = self.process_name
        if self.start_method is not None:
            # Only as the default: a module may still choose a method at its import, which is allowed once.
            context = cast(Any, multiprocessing.get_context.__self__)  # type: ignore[attr-defined]
            context._default_context = multiprocessing.get_context(self.start_method)
        for end, limit in self.limits.items():
            # Python on another node may lack a limit, and the recursion limit may be below this call's depth.
            with contextlib.suppress(AttributeError, RecursionError, ValueError):
                getattr(sys, f"set{end}")(limit)

    def apply_before_body(self) -> None:
        """Set the state that imports could change, once the body's modules are imported."""
        process_settings.apply(self.settings)
        logging.disable(self.disabled_level)
        for logger in self.loggers:
            logger.apply()
        # Kept: filters of libraries that only this process has imported.
        theirs = tuple(each.item() for each in self.filters)
        added = [f for f in warnings.filters if f not in _FIRST_FILTERS and f not in theirs]
        warnings.resetwarnings()
        cast(Any, warnings.filters).extend((*added, *theirs))


@dataclass(frozen=True, slots=True)
class LoggerState:
    """Settings of a logger, without its handlers."""

    #: Name of the logger; empty: the root logger.
    name: str
    level: int
    propagate: bool
    disabled: bool
    #: The class is `logging.Logger`. Only their own library creates loggers of other classes.
    is_plain: bool

    @classmethod
    def read_all(cls) -> Iterator[LoggerState]:
        """Yield the state of each logger of this process with changed settings."""
        root = logging.root
        for name, each in (("", root), *tuple(root.manager.loggerDict.items())):
            if isinstance(each, logging.Logger) and (
                each.level or not each.propagate or each.disabled
            ):
                plain = type(each) in (logging.Logger, logging.RootLogger)
                yield cls(name, int(each.level), bool(each.propagate), bool(each.disabled), plain)

    def apply(self) -> None:
        """Apply the settings to this process's logger of that name."""
        found = logging.root.manager.loggerDict.get(self.name)
        if not self.is_plain and not isinstance(found, logging.Logger):
            return
        logger = logging.getLogger(self.name)
        if self.level:
            logger.setLevel(self.level)
        logger.propagate = logger.propagate and self.propagate
        logger.disabled = logger.disabled or self.disabled


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """An item of `warnings.filters`, with its category as a module and a name, since the class may be the user's."""

    action: str
    message: str | re.Pattern[str] | None
    category: tuple[str, str]
    module: str | re.Pattern[str] | None
    line: int

    @classmethod
    def of(cls, item: Any) -> WarningFilter | None:
        """Return an item of `warnings.filters` as a value; `None`: the item has an unknown form."""
        match item:
            case (
                str(action),
                str() | re.Pattern() | None as message,
                type() as category,
                str() | re.Pattern() | None as module,
                int(line),
            ):
                name = category.__module__, category.__qualname__
                return cls(action, message, name, module, line)
        return None

    def item(self) -> tuple[Any, ...]:
        """Return the filter as an item for `warnings.filters`, without importing the category's module."""
        module, name = self.category
        found: Any = None
        with contextlib.suppress(AttributeError):
            found = operator.attrgetter(name)(sys.modules.get(module))
        if self.action == "error" or not isinstance(found, type):
            found = _named_category(*self.category, self.action == "error")
        return self.action, self.message, found, self.module, self.line


class _NamedCategory(type):
    """Metaclass of a category that matches classes by name: a class may be imported later, or pickled by value."""

    name: tuple[str, str]
    #: Do not match warnings during imports: the flow's process had imported its modules before it set the filter.
    raises: bool

    def __subclasscheck__(cls, category: type) -> bool:
        names = ((each.__module__, each.__qualname__) for each in category.__mro__)
        return cls.name in names and not (cls.raises and _is_importing())


def _named_category(module: str, name: str, raises: bool) -> _NamedCategory:
    return _NamedCategory(name, (Warning,), {"name": (module, name), "raises": raises})


# Libraries send filters to processes of their own.
copyreg.pickle(_NamedCategory, lambda each: (_named_category, (*each.name, each.raises)))


def _is_importing() -> bool:
    frames = traceback.walk_stack(None)
    return any(f.f_globals.get("__name__") == "importlib._bootstrap" for f, _ in frames)
