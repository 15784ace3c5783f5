"""The start of a fresh interpreter like this one, and the state that it gets from this one.

`launcher` knows a child's process only by the protocol `Process`. `fork_server` forks a process instead.
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

from prefect_gpu.frameworks.hooks import AfterImport

BOOTSTRAP = Path(__file__).parents[1] / "child" / "bootstrap.py"


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """A request to start a process."""

    #: Shown by `ps` after the interpreter and the script; not for a fork.
    title: str
    channel: int
    environment: Mapping[str, str]
    #: Folder to start in; empty: the parent's.
    cwd: str


class Process(Protocol):
    """A child process: leader of a session of its own, with unbuffered pipes for its output."""

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the session and of the process group."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Reading end of the standard output."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Reading end of the standard error."""

    #: Exit code after `wait`; negative: number of the signal that ended the process. Set in a fork of the parent, which
    #: must not wait for a process that is not its child.
    returncode: int | None

    def open_pidfd(self) -> int | None:
        """Open a descriptor that becomes readable when the process ends; `None`: the system has none (left)."""

    def poll(self) -> int | None:
        """Return the exit code; `None`: the process has not ended."""

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""


#: Starts a process. Runs on the launcher's thread; raises if the process cannot be started.
Spawner = Callable[[SpawnRequest], Process]


class Interpreter(subprocess.Popen[bytes]):
    """A fresh interpreter: a `Process`."""

    def open_pidfd(self) -> int | None:
        """See `Process.open_pidfd`."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None


def start_interpreter(request: SpawnRequest) -> Interpreter:
    """Start a fresh interpreter by exec, with the flags of this one: a `Spawner`. May raise `OSError`."""
    script = str(BOOTSTRAP), str(request.channel), request.title
    return Interpreter(
        [sys.executable, *interpreter_flags(), *script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Unbuffered: data that a fork or a slow reader leaves in Python's buffer would be lost.
        bufsize=0,
        pass_fds=(request.channel,),
        start_new_session=True,
        env=dict(request.environment),
        cwd=request.cwd or None,
    )


def import_paths() -> tuple[str, ...]:
    """Return `sys.path` for a child, which may start in another folder: `""` becomes this folder."""
    # Python ignores entries that are not text, such as a `Path`.
    return tuple(os.path.abspath(p) if p == "" else p for p in sys.path if isinstance(p, str))


def interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with (`-W`, `-X`, `-O`, …)."""
    # The function that multiprocessing uses for its own spawned children; there is no public one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def working_folder() -> str:
    """Return the working folder of this process; empty if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def environment_with(
    changes: Mapping[str, str | None], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return `base` (`None`: the environment of this process) with some variables set, or removed (`None`)."""
    changed = {**(os.environ if base is None else base), **changes}
    return {name: value for name, value in changed.items() if value is not None}


#: Ends of names of functions of `sys` (`get…`, `set…`) for limits that a program may set. Python 3.10 may lack some.
_LIMITS = ("recursionlimit", "switchinterval", "_int_max_str_digits")

#: Warning filters of this interpreter before any library was imported.
_FIRST_FILTERS = tuple(warnings.filters)


@dataclass(frozen=True, slots=True)
class InterpreterState:
    """State that a program sets in its interpreter, for its tasks. Unpickling it imports no user code."""

    #: Key of `multiprocessing`: proxies of a `Manager` need it to open their connections.
    authkey: bytes = field(repr=False)
    #: Name of the process in `multiprocessing` and log records.
    process_name: str
    start_method: str | None
    #: Values of limits, by the ends of names in `_LIMITS`.
    limits: Mapping[str, float]
    #: Warning filters in the order in which they are tried.
    filters: tuple[WarningFilter, ...]
    #: Loggers with a level, or with `propagate` or `disabled` changed.
    loggers: tuple[LoggerState, ...]
    disabled_level: int
    #: The process and its children ignore SIGINT, as after `nohup` or in the background of a script.
    ignores_interrupt: bool = False
    #: Numbers of the signals that the threads block; processes of a cluster block SIGINT.
    blocked_signals: frozenset[int] = frozenset()
    #: PyTorch's strategy to share tensors between processes (workers of a `DataLoader`); `None`: not imported.
    tensor_sharing: str | None = None

    @classmethod
    def read(cls) -> InterpreterState:
        """Return the state of this interpreter."""
        process = multiprocessing.current_process()
        # Another thread may be importing it now.
        torch: Any = sys.modules.get("torch.multiprocessing")
        torch = torch if hasattr(torch, "get_sharing_strategy") else None
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
            tensor_sharing=None if torch is None else torch.get_sharing_strategy(),
        )

    def apply(self) -> None:
        """Apply the state needed before the call is read: proxies connect as they are unpickled."""
        process = multiprocessing.current_process()
        process.authkey = self.authkey
        process.name = self.process_name
        if self.start_method is not None:
            # As the default: a module may still choose a method at its import, which is allowed once in a process.
            context = cast(Any, multiprocessing.get_context.__self__)  # type: ignore[attr-defined]
            context._default_context = multiprocessing.get_context(self.start_method)
        for end, limit in self.limits.items():
            # Python on another node may lack a limit, and a limit may be below the depth of this call.
            with contextlib.suppress(AttributeError, RecursionError, ValueError):
                getattr(sys, f"set{end}")(limit)
        if self.tensor_sharing is not None:
            AfterImport({"torch.multiprocessing": self._share_tensors}).install()

    def _share_tensors(self) -> None:
        # PyTorch on another node may not have this strategy.
        with contextlib.suppress(AssertionError):
            sys.modules["torch.multiprocessing"].set_sharing_strategy(self.tensor_sharing)

    def apply_before_body(self) -> None:
        """Apply the state that imports could change: in the flow's process, it was set after the imports."""
        logging.disable(self.disabled_level)
        for logger in self.loggers:
            logger.apply()
        # Libraries that only this process has imported have filters of their own.
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
    #: The class is `logging.Logger`. Loggers of other classes are left to the library that makes them.
    is_plain: bool

    @classmethod
    def read_all(cls) -> Iterator[LoggerState]:
        """Yield the settings of each logger of this process that has any."""
        root = logging.root
        for name, each in (("", root), *tuple(root.manager.loggerDict.items())):
            if isinstance(each, logging.Logger) and (
                each.level or not each.propagate or each.disabled
            ):
                plain = type(each) in (logging.Logger, logging.RootLogger)
                yield cls(name, int(each.level), bool(each.propagate), bool(each.disabled), plain)

    def apply(self) -> None:
        """Apply the settings in this process."""
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
    """An item of `warnings.filters`. The category is stored by name, since its class may be the user's."""

    action: str
    message: str | re.Pattern[str] | None
    category: tuple[str, str]
    module: str | re.Pattern[str] | None
    line: int

    @classmethod
    def of(cls, item: Any) -> WarningFilter | None:
        """Return a filter as a value; `None`: `warnings` makes no such filter."""
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
        """Return the filter as an item of `warnings.filters`, without importing the category's module."""
        module, name = self.category
        found: Any = None
        with contextlib.suppress(AttributeError):
            found = operator.attrgetter(name)(sys.modules.get(module))
        if self.action == "error" or not isinstance(found, type):
            found = _named_category(*self.category, self.action == "error")
        return self.action, self.message, found, self.module, self.line


class _NamedCategory(type):
    """Class of a category that is known by name, since its class may be imported later or travel by value.

    If `raises`, warnings during imports do not match: in the flow's process, imports came before the filter.
    """

    name: tuple[str, str]
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
