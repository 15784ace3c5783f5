"""Enters Prefect's task run in a child when Prefect is first imported.

Importing Prefect takes a second of CPU, and many bodies never use Prefect. So a child imports Prefect before the body
only if the parent requires that (`Call.at_once`) or unpickling the call does so. Otherwise the body, or the first
record for Prefect's log handlers, imports Prefect. Before that `import` returns, `prefect_context` enters the task run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from prefect_gpu.frameworks.hooks import AfterImport
from prefect_gpu.process_resources import PROCESS_RESOURCES
from prefect_gpu.processes.messages import Call, ContextChanges

if TYPE_CHECKING:
    from prefect_gpu.child.prefect_context import RunContexts

#: `True` in the body's context and its copies (coroutines, `asyncio.to_thread`): Prefect's variables are the run's.
_is_body: ContextVar[bool] = ContextVar("prefect_gpu_is_body", default=False)


class LatePrefect:
    """Sets up Prefect's logging and enters the task run at the first import of Prefect, on any thread."""

    # Created before the user's modules are imported, since these may set up logging.
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_imported = False
        #: Enters the task run; `None`: outside `run`.
        self._enter: Callable[[], None] | None = None
        #: Contexts that the body may change; `None`: no task run was entered.
        self._contexts: RunContexts | None = None
        #: Levels of the root logger and of Prefect's, unless the user's code has changed them.
        self._defaults = {logging.getLogger(): logging.WARNING}
        self._stand_ins: list[_StandIn] = []
        PROCESS_RESOURCES.after_fork(self, LatePrefect._renew_lock)
        AfterImport({"prefect": self._take_import}).install()
        if not self._is_imported:
            self._stand_ins += [_StandIn(logging.getLogger(n)) for n in ("", "prefect_gpu")]

    def _renew_lock(self) -> None:
        # The thread that holds the lock may not exist in the fork.
        self._lock = threading.RLock()

    def _take_import(self) -> None:
        with self._lock:
            with _as_it_was(self._stand_ins, self._defaults):
                importlib.import_module("prefect_gpu.child.prefect_context")
            self._is_imported = True
            if self._enter is not None:
                self._enter()
            for stand_in in self._stand_ins:
                stand_in.is_relieved = True

    @contextlib.contextmanager
    def run(self, call: Call, send: Callable[[Any], None]) -> Iterator[None]:
        """Enter the parent's task run (none without `call.context`) for a `with` block, once Prefect is imported."""
        # Prefect's variables get a separate context, since the importing thread's context may not be the body's.
        context, stack = Context(), contextlib.ExitStack()

        def enter() -> None:
            from prefect_gpu.child import prefect_context

            read = call.read_context()
            self._contexts = context.run(
                stack.enter_context, prefect_context.child_context(read, call.log_prints, send)
            )
            # A copy: threads, such as Prefect's thread for events, may outlive the run.
            prefect_context.share(context.copy(), _is_body.get)

        if call.context is None:
            for stand_in in self._stand_ins:
                stand_in.logger.removeHandler(stand_in)
            yield
            return
        token = _is_body.set(True)
        try:
            self._begin(call, enter)
            yield
        finally:
            _is_body.reset(token)
            with self._lock:
                self._enter = None
                context.run(stack.close)

    def commit(self) -> ContextChanges | None:
        """Commit the body's transactions, inside `run`; return the changes to Prefect's contexts, `None`: no change."""
        return (self._contexts.commit() if self._contexts is not None else None) or None

    def roll_back(self) -> None:
        """Roll back the transactions of a failed body, inside `run`."""
        if self._contexts is not None:
            self._contexts.roll_back()

    def _begin(self, call: Call, enter: Callable[[], None]) -> None:
        with self._lock:
            prefect = logging.getLogger("prefect")
            if not self._is_imported and prefect.level == logging.NOTSET:
                prefect.setLevel(call.log_level)
                self._defaults[prefect] = prefect.level
            self._enter = enter
            if self._is_imported:
                enter()
        if call.at_once:
            importlib.import_module("prefect")


class _StandIn(logging.Handler):
    """Log handler in place of Prefect's, which imports Prefect at its first record. Makes `basicConfig` do nothing."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger = logger
        #: Handlers that existed before Prefect's.
        self.others: list[logging.Handler] = []
        self.is_relieved = False
        logger.addHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Import Prefect and pass the record to its handlers."""
        # Without the handler's lock, since a thread that imports Prefect may also log.
        with contextlib.suppress(Exception):
            importlib.import_module("prefect")
        if not self.is_relieved:
            # The import of Prefect has failed, or logs this record.
            if logging.lastResort is not None:
                logging.lastResort.handle(record)
            return True
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for handler in logger.handlers:
                if handler not in self.others and record.levelno >= handler.level:
                    handler.handle(record)
            # `logging` itself calls Prefect's handlers of the loggers above this handler's.
            logger = logger.parent if logger is not self.logger and logger.propagate else None
        return True


@contextlib.contextmanager
def _as_it_was(stand_ins: list[_StandIn], defaults: Mapping[logging.Logger, int]) -> Iterator[None]:
    """Set up Prefect's logging as if before the user's; the rest of Prefect is imported in the `with` block."""
    if not stand_ins:
        # Prefect was imported before this process was forked.
        yield
        return
    root = logging.getLogger()
    found = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = {each: (each.level, each.propagate, each.disabled) for each in (root, *found)}
    handlers = {each: [*each.handlers] for each in before}
    # `dictConfig` replaces levels and handlers and closes handlers, so all are restored below. In new lists: `logging`
    # may iterate over the old lists. Prefect would skip a root logger that has a handler with a format.
    root.handlers = [handler for handler in root.handlers if handler in stand_ins]
    for stand_in in stand_ins:
        stand_in.logger.handlers = [*stand_in.logger.handlers]
    known: Any = logging
    in_order, by_name = [*known._handlerList], dict(known._handlers)
    known._handlerList.clear()
    try:
        configuration = importlib.import_module("prefect.logging.configuration")
        if not configuration.PROCESS_LOGGING_CONFIG:
            configuration.setup_logging()
    finally:
        known._handlerList[:0] = in_order
        known._handlers.update(by_name)
        for stand_in in stand_ins:
            stand_in.others = [handler for find in in_order if (handler := find()) is not None]
        for logger, had in handlers.items():
            of_prefect = [each for each in logger.handlers if each not in had]
            # Code that has removed a stand-in would have removed Prefect's handler.
            if logger is root and not any(each in stand_ins for each in had):
                of_prefect = []
            logger.handlers = [*of_prefect, *(each for each in had if each not in stand_ins)]
    yield
    # After the block, since the rest of Prefect sets levels again.
    for logger, (level, propagate, disabled) in before.items():
        if level not in (logging.NOTSET, defaults.get(logger)):
            logger.setLevel(level)
        logger.propagate = logger.propagate and propagate
        logger.disabled = disabled
